"""`anabranch recommend`: its options about durability, groups, sizes and the configuration now."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ..kernels import compiled  # noqa: F401  a fixture
from .commands import run

pytestmark = pytest.mark.usefixtures("compiled")

WORKLOAD = """
name: shop
seed: 3
duration: 20m
destinations:
  - {name: queue://ticks.eu, arrival: {rate: 4/s}, size: 200, consumer: {lag: 1s}}
  - {name: queue://ticks.us, arrival: {rate: 4/s}, size: 200, consumer: {lag: 1s}}
  - {name: queue://orders.new, arrival: {rate: 1/s}, size: 400, consumer: {lag: {min: 2m, max: 9m}}}
  - {name: queue://orders.old, arrival: {rate: 1/s}, size: 400, consumer: {lag: {min: 2m, max: 9m}}}
"""


@pytest.fixture(autouse=True)
def _in_a_directory_with_a_workload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("shop.yaml").write_text(WORKLOAD)


recommend = partial(run, "recommend", "--workload", "shop.yaml", "--out", "advice", "--engine", "local")


def answer() -> dict[str, object]:
    return json.loads(Path("advice/recommendation.json").read_text())  # type: ignore[no-any-return]


def stores() -> list[dict[str, Any]]:
    return json.loads(Path("advice/recommendation.json").read_text())["recommended"]["stores"]  # type: ignore[no-any-return]


def test_durability_and_pins() -> None:
    result = recommend(
        "--segment-size", "64KiB", "--durability", "ticks.>=never", "--durability", "queue://orders.new = periodic",
        "--pin", "ticks.us, ticks.eu",
    )  # fmt: skip
    assert result.exit_code == 2  # the blank before the equals sign belongs to the pattern
    assert "'queue://orders.new ' begins or ends with a blank" in result.stderr
    result = recommend(
        "--segment-size", "64KiB", "--durability", "ticks.>=never", "--durability", "queue://orders.new=periodic",
        "--pin", "ticks.us, ticks.eu",
    )  # fmt: skip
    assert (result.exit_code, result.stderr) == (0, "")
    found = {tuple(store["destinations"]): store["sync"] for store in stores()}
    assert found == {
        ("queue://orders.new",): "periodic",
        ("queue://orders.old",): "always",
        ("queue://ticks.eu", "queue://ticks.us"): "never",
    }


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--durability", "orders.>"), "--durability 'orders.>' has no =; write PATTERN=POLICY"),
        (("--durability", "orders.>=sometimes"), "'sometimes' is no policy; it must be one of always, periodic, never"),
        (("--durability", "a.>.b=never"), "only its last segment"),
        (("--durability", "a=never", "--durability", "a=always"), "gives pattern 'a' twice"),
        (("--durability", "[ab]=never", "--durability", "[ba]=always"), "is the same as '[ab]'"),
        (("--pin", "orders.>,"), "pattern '' is empty"),
        (("--pin", "queu://a,b"), "unknown scheme 'queu'"),
        (("--current", "none.yaml"), "none.yaml: no such file"),
    ],
)
def test_mistyped_patterns_and_policies(arguments: tuple[str, ...], says: str) -> None:
    result = recommend(*arguments, code=2)
    assert says in result.stderr
    assert result.stderr.count("\n") == 1
    assert not Path("advice").exists()


def test_pins_that_contradict_durability() -> None:
    result = recommend("--durability", "ticks.>=never", "--pin", "ticks.eu,orders.new", code=2)
    assert "are pinned together but differ in durability" in result.stderr
    assert not Path("advice").exists()


def test_a_pattern_that_matches_nothing_is_told() -> None:
    result = recommend("--segment-size", "64KiB", "--durability", "tick.>=never", "--pin", "order.>,ticks.>")
    assert (result.exit_code, result.stderr) == (0, "")
    assert "2 patterns that match no destination in the trace: tick.>, order.>" in result.stdout


def test_an_mkahadb_is_written_right_away() -> None:
    given = ("--model", "kahadb", "--segment-size", "64KiB", "--mkahadb-xml", "xml/mkahadb.xml")
    result = recommend(*given)
    assert (result.exit_code, result.stderr) == (0, "")
    assert "xml/mkahadb.xml" in result.stdout
    written = Path("xml/mkahadb.xml").read_text()
    assert written == run("mkahadb", "--from-config", "advice/stores.yaml").stdout
    assert written.count("<filteredKahaDB") == len(stores()) > 1
    recommend(*given, "--force", code=0)
    for path in Path("advice").iterdir():
        path.unlink()
    refused = recommend(*given, code=2)
    assert "mkahadb.xml exists already and was left as it is" in refused.stderr
    assert not list(Path("advice").iterdir())


def test_an_mkahadb_needs_no_variable_that_a_store_names() -> None:
    Path("now.yaml").write_text(
        "directory: data\nstores:\n- {name: there, match: [elsewhere], sql: {url_env: NOT_SET_URL}}\n"
        "- {name: all, match: ['>']}\n"
    )
    given = ("--model", "kahadb", "--segment-size", "64KiB", "--mkahadb-xml", "mkahadb.xml", "--current", "now.yaml")
    recommend(*given, code=0)
    again = run("mkahadb", "--from-config", "advice/stores.yaml")
    assert (again.exit_code, again.stdout) == (0, Path("mkahadb.xml").read_text())


def test_an_mkahadb_goes_with_the_model_of_activemq() -> None:
    result = recommend("--mkahadb-xml", "mkahadb.xml", code=2)
    assert "--mkahadb-xml mkahadb.xml is for ActiveMQ, and the model is anabranch's; add --model kahadb" in (
        " ".join(result.stderr.split())
    )
    assert not Path("mkahadb.xml").exists()


def test_what_activemq_has_not_is_told() -> None:
    Path("now.yaml").write_text("directory: data\nfile_mode: '0640'\nstores: [{name: all, match: ['>']}]\n")
    given = ("--model", "kahadb", "--segment-size", "64KiB", "--mkahadb-xml", "mkahadb.xml", "--current", "now.yaml")
    result = recommend(*given, "--json", code=0)
    assert "stores.yaml: note: file_mode: ActiveMQ makes files as the broker's umask has them" in result.stderr
    assert json.loads(result.stdout) == answer()


def test_names_are_no_commands_to_a_terminal() -> None:
    """A broker's clients choose them."""
    names = ["queue://a\x1b[2J" if n % 9 == 0 else "queue://quick" for n in range(600)]
    rows = [f"{2 * n},{1767571200 + 9 * n},send,{name},{n},900" for n, name in enumerate(names)]
    rows += [f"{2 * n + 1},{1767571200 + 9 * n},ack,{name},{n}," for n, name in enumerate(names) if n % 9]
    Path("usage.csv").write_text("\n".join(["seq,ts,op,destination,message_id,body_size", *rows]))
    result = run("recommend", "--trace", "usage.csv", "--out", "advice", "--engine", "local", "--segment-size", "64KiB",
                 "--model", "kahadb")  # fmt: skip
    assert result.exit_code == 0, result.output
    for text in (result.stdout, Path("advice/summary.txt").read_text()):
        assert r"queue://a\x1b[2J" in text
        assert "\x1b" not in text
    Path("usage.csv").write_text("a,b\n\x1b[2J\n")
    result = run("recommend", "--trace", "usage.csv", "--out", "other", "--engine", "local", code=2)
    assert r"\x1b[2J" in result.stderr and "\x1b" not in result.stderr
