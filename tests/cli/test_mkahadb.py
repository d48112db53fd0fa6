"""`anabranch mkahadb`, both ways."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

import anabranch

from . import commands

XML = """<broker><persistenceAdapter>
<kahaDB directory="${activemq.data}/kahadb" journalMaxFileLength="${length}" cleanupInterval="5000"/>
</persistenceAdapter></broker>
"""

run = partial(commands.run, "mkahadb")


@pytest.fixture(autouse=True)
def _in_a_directory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("activemq.xml").write_text(XML)


def test_what_is_written_opens_and_goes_back() -> None:
    Path("env").write_text("length=1mb\n")
    result = run("activemq.xml", "--properties", "env", "-D", "length=2mb", "--directory", "d", "--out", "stores.yaml")
    assert (result.exit_code, result.stdout) == (0, "Written: stores.yaml\n")
    assert "activemq.xml:2: note: cleanupInterval has no counterpart" in result.stderr
    with anabranch.open("stores.yaml") as router:
        router.queue("q").send(b"1")
        assert router.config.stores[0].options.model_dump()["segment_size"] == 2 << 20
    assert Path("d/stores/all").is_dir()
    back = run("--from-config", "stores.yaml", "--directory", "/new")
    assert (back.exit_code, back.stderr) == (0, "")
    assert '<mKahaDB directory="/new">' in back.stdout and 'journalMaxFileLength="2mb"' in back.stdout


def test_as_json_and_on_stdout() -> None:
    shown = run("activemq.xml", "-D", "length=1mb")
    told = json.loads(run("activemq.xml", "-D", "length=1mb", "--json").stdout)
    assert told["text"] == shown.stdout
    assert told["written"] is None
    assert [note["line"] for note in told["notes"]] == [2, 2, 0]


def test_nothing_is_overwritten_unless_asked() -> None:
    Path("stores.yaml").write_text("mine")
    arguments = ("activemq.xml", "-D", "length=1mb", "--out", "stores.yaml")
    refused = run(*arguments, code=2)
    assert "stores.yaml exists already and was left as it is" in refused.stderr
    assert Path("stores.yaml").read_text() == "mine"
    assert run(*arguments, "--force").exit_code == 0
    assert Path("stores.yaml").read_text().startswith("# Made by")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "Error: give an activemq.xml, or a stores.yaml by --from-config: one of them\n"),
        (("activemq.xml", "--from-config", "s.yaml"), "Error: give an activemq.xml, or a stores.yaml"),
        (("--from-config", "s.yaml", "-D", "a=b"), "Error: --property and --properties are for an activemq.xml"),
        (("--from-config", "s.yaml"), "s.yaml: no such file"),
        (("none.xml",), "none.xml: no such file\n"),
        (("activemq.xml",), "activemq.xml:2: journalMaxFileLength: ${length} has no value; give it by --property"),
        (("activemq.xml", "-D", "length"), "Error: --property 'length': expected NAME=VALUE\n"),
        (("activemq.xml", "--properties", "none"), "none: no such file\n"),
        ((".",), ".: the file cannot be read"),
    ],
)
def test_bad_input(arguments: tuple[str, ...], says: str) -> None:
    result = run(*arguments, code=2)
    assert result.stderr.startswith(says)
    assert [path.name for path in Path().iterdir()] == ["activemq.xml"]
