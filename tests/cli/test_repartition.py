"""`anabranch repartition`: what a data directory holds moves to where a new configuration routes it."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest
from click.testing import CliRunner

import anabranch
from anabranch.adapters.core.migration import copying
from anabranch.policies.errors import StoreFullError
from anabranch.router.cli.app import app

from . import commands

OLD = """
directory: data
stores:
- {name: all, match: [">"], journal: {segment_size: 64KiB}}
"""
NEW = """
directory: data
stores:
- {name: orders, match: ["queue://orders.>"], journal: {segment_size: 64KiB}}
- {name: rest, match: [">"], sql: {}}
"""
NEXT = """
directory: data
stores:
- {name: orders, match: ["queue://orders.>"], journal: {segment_size: 64KiB}}
- {name: all, match: [">"], journal: {segment_size: 64KiB}}
"""

run = partial(commands.run, "repartition")


@pytest.fixture(autouse=True)
def _in_a_directory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("old.yaml").write_text(OLD)
    Path("new.yaml").write_text(NEW)
    Path("next.yaml").write_text(NEXT)


def fill() -> None:
    with anabranch.open("old.yaml") as router:
        router.queue("orders.eu").send_many([b"an order"] * 1000)
        router.queue("audit").send(b"a line")
        router.topic("prices").subscribe("desk")


def full(_: object) -> NoReturn:
    raise StoreFullError("the disk is full; free some space and try again")


def test_moves() -> None:
    fill()
    planned = run("--config", "new.yaml", "data", "--dry-run")
    assert (planned.exit_code, planned.stderr) == (0, "")
    assert planned.stdout.splitlines()[:2] == [
        "destination        from  to      messages     bytes  subscriptions",
        "queue://audit      all   rest           1  32 bytes              0",
    ]
    assert planned.stdout.splitlines()[-1] == "3 destinations, 1,001 messages, 34.0 KB would move."
    result = run("--config", "new.yaml", "data")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.splitlines()[:4] == planned.stdout.splitlines()[:4]
    assert result.stdout.splitlines()[4:] == [
        "3 destinations, 1,001 messages, 34.0 KB moved.",
        "Store all is empty and not in new.yaml: removed with its directory.",
        f"From now on open {Path('data').absolute()} with new.yaml.",
    ]
    result = run("--config", "new.yaml", "data")
    assert result.stdout == f"Nothing to move: everything in {Path('data').absolute()} lies where new.yaml routes it.\n"
    with anabranch.open("new.yaml") as router:
        assert router.queue("orders.eu").depth() == 1000
        assert len(router.subscriptions()) == 1


def test_json() -> None:
    fill()
    found = json.loads(run("--config", "new.yaml", "data", "--dry-run", "--json").stdout)
    done = json.loads(run("--config", "new.yaml", "data", "--json").stdout)
    assert (found["dry_run"], done["dry_run"], found["moves"]) == (True, False, done["moves"])
    assert done["moves"][0] == {
        "destination": "queue://audit", "source": "all", "target": "rest", "messages": 1, "bytes": 32,
        "subscriptions": 0,
    }  # fmt: skip
    assert (found["removed"], done["removed"]) == ([], ["all"])


def test_the_refusal_names_a_command_that_works() -> None:
    """Of a configuration that would hide messages."""
    fill()
    with pytest.raises(anabranch.PlacementError) as caught:
        anabranch.open("new.yaml")
    command = str(caught.value).partition("`")[2].partition("`")[0]
    assert command.startswith("anabranch repartition --config new.yaml ")
    assert run(*command.split()[2:]).exit_code == 0
    anabranch.open("new.yaml").close()


def test_a_server_s_database_that_the_new_configuration_does_not_have(tmp_path: Path) -> None:
    """--old says where it is."""
    url = f"sqlite:///{tmp_path}/elsewhere.db"
    Path("old.yaml").write_text(f"directory: data\nstores:\n- {{name: db, match: ['>'], sql: {{url: '{url}'}}}}\n")
    fill()
    result = run("--config", "new.yaml", "--old", "old.yaml", "data", code=0)
    assert result.stderr == (
        "Warning: store db is removed; its data outside of its directory, an empty database or an index, stays\n"
    )
    with anabranch.open("new.yaml") as router:
        assert router.queue("orders.eu").depth() == 1000


def test_another_data_directory() -> None:
    fill()
    result = run("--config", "new.yaml", "elsewhere", code=2)
    assert result.stderr == (
        f"Error: new.yaml has the data directory {Path('data').absolute()}, and DIR is {Path('elsewhere').absolute()}; "
        f"write `directory: {Path('elsewhere').absolute()}` into the file, or give the other DIR\n"
    )
    assert not Path("elsewhere").exists()


@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
def test_bad_input(dry: list[str]) -> None:
    assert "no placement.records" in run("--config", "new.yaml", "data", *dry).stderr
    assert not Path("data").exists()
    fill()
    for arguments, said in (
        (["data"], "Missing option '--config'"),
        (["--config", "new.yaml"], "Missing argument 'DIR'"),
        (["--config", "none.yaml", "data"], "none.yaml"),
        (["--config", "new.yaml", "s3://bucket/data"], "s3://bucket/data"),
        (["--config", "new.yaml", "--old", "none.yaml", "data"], "none.yaml"),
    ):
        result = run(*arguments, *dry, code=2)
        assert said in result.stderr
    Path("new.yaml").write_text(NEW.replace('match: [">"]', 'match: ["topic://>"]'))
    result = run("--config", "new.yaml", "data", *dry, code=2)
    assert result.stderr.splitlines() == [
        "Error: nothing was changed. These cannot be moved:",
        "  queue://audit: 1 message in store 'all', routed to no store; add a pattern for it",
    ]


@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
def test_while_another_process_has_it_open(dry: list[str]) -> None:
    fill()
    script = "import anabranch; r = anabranch.open('old.yaml'); print('open', flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdin is not None
        assert other.stdout.readline() == b"open\n"
        result = run("--config", "new.yaml", "data", *dry)
        other.stdin.close()
    assert (result.exit_code, len(result.stderr.splitlines())) == (1, 1)
    assert f"process {other.pid}" in result.stderr


def test_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    fill()
    real = copying.Bringing.end
    monkeypatch.setattr(copying.Bringing, "end", full)
    result = run("--config", "new.yaml", "data", code=1)
    assert result.stderr == (
        "Error: the disk is full; free some space and try again. All that has moved stays moved. Run the same "
        "again: it goes on from there. Or undo it with --restart and the configuration that was used until now\n"
    )
    monkeypatch.setattr(copying.Bringing, "end", real)
    result = run("--config", "old.yaml", "data", code=2)
    assert "is being repartitioned to another configuration (new.yaml), and that was interrupted" in result.stderr
    assert run("--config", "new.yaml", "data").exit_code == 0
    with anabranch.open("new.yaml") as router:
        assert router.queue("orders.eu").depth() == 1000


def explained(*arguments: str) -> tuple[str, Any]:
    """As text, on one line, and as data."""
    text, found = (CliRunner().invoke(app, ["explain", *arguments, *more]) for more in ([], ["--json"]))
    assert (text.exit_code, found.exit_code) == (0, 0)
    return " ".join(text.stdout.split()), json.loads(found.stdout)


def test_while_it_is_interrupted_nobody_takes_its_copy_for_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    fill()
    with monkeypatch.context() as patched:
        patched.setattr(copying.Bringing, "end", full)
        assert run("--config", "next.yaml", "data").exit_code == 1
    here = Path.cwd()
    for config in ("old.yaml", "next.yaml"):
        with pytest.raises(anabranch.PlacementError) as raised:
            anabranch.open(config)
        assert str(raised.value) == (
            f"{here}/data is being repartitioned to the configuration next.yaml, and that was interrupted; run "
            f"`anabranch repartition --config next.yaml {here}/data` again: it goes on where it was. To move to "
            "another configuration, or back to the one before, run it with that one and --restart"
        )
    before = {path: path.read_bytes() for path in Path("data").rglob("*") if path.is_file()}
    text, found = explained("data")
    assert "data is being repartitioned to the configuration next.yaml, and that was interrupted" in text
    assert "The messages of queue://orders.eu in store orders are an unfinished copy" in text
    assert "store all holds its messages" in text
    assert found["copy"] == {"destination": "queue://orders.eu", "store": "orders", "original": "all"}
    of_all, of_orders = text.split("== ")[1:3]
    assert ("queue://orders.eu (unfinished copy)" in of_all, "(unfinished copy)" in of_orders) == (False, True)
    text, _ = explained("data/stores/orders")
    assert f"`anabranch explain {here}/data` says of what" in text
    assert {path: path.read_bytes() for path in Path("data").rglob("*") if path.is_file()} == before
    assert run("--config", "next.yaml", "data").exit_code == 0
    text, found = explained("data")
    assert (found["copy"], found["notes"], "copy" in text) == (None, [], False)


def test_what_is_left_once_it_has_moved_does_not_count_either(monkeypatch: pytest.MonkeyPatch) -> None:
    fill()
    with monkeypatch.context() as patched:
        patched.setattr(copying, "remove", lambda store, destination: full(None) if store.name == "all" else None)
        assert run("--config", "next.yaml", "data").exit_code == 1
    text, found = explained("data")
    assert found["copy"] == {"destination": "queue://orders.eu", "store": "all", "original": "orders"}
    assert "(unfinished copy)" in text.split("== ")[1]


def test_damaged_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    fill()
    with monkeypatch.context() as patched:
        patched.setattr(copying.Bringing, "end", full)
        assert run("--config", "next.yaml", "data").exit_code == 1
    Path("data/repartition.records").write_bytes(b"x" * 2000)
    with pytest.raises(anabranch.CorruptionError, match="the progress of a repartition is damaged"):
        anabranch.open("old.yaml")
    text, found = explained("data")
    assert "data/repartition.records" in text
    assert "the progress of a repartition is damaged" in found["notes"][0]


def test_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that stays full."""
    fill()
    with monkeypatch.context() as patched:
        patched.setattr(copying.Bringing, "end", full)
        assert run("--config", "new.yaml", "data").exit_code == 1
    result = run("--config", "old.yaml", "data", "--restart")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith("Nothing to move")
    with anabranch.open("old.yaml") as router:
        assert router.queue("orders.eu").depth() == 1000


def test_prepared_transactions() -> None:
    """A dry run, which settles nothing, tells of them; a run takes them along."""
    fill()
    with anabranch.open("old.yaml") as router:
        transaction = router.transaction(anabranch.Xid(1, "g", "b"))
        transaction.send("queue://audit", b"prepared")
        transaction.prepare()
    planned = run("--config", "new.yaml", "data", "--dry-run", code=0)
    assert planned.stderr.startswith("Warning: queue://audit: 1 transaction prepared in store all would change it; th")
    assert run("--config", "new.yaml", "data").exit_code == 0
    assert CliRunner().invoke(app, ["transactions", "-c", "new.yaml", "--commit", "1:g:b"]).exit_code == 0
    with anabranch.open("new.yaml") as router:
        assert router.queue("audit").depth() == 2
