"""`anabranch transactions`: what an operator sees of transactions that wait, and does about them."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path

import pytest

import anabranch
from anabranch import Xid

from . import commands

CONFIG = """
directory: data
stores:
- {name: orders, match: [orders], journal: {segment_size: 64KiB}}
- {name: rest, match: [">"], journal: {segment_size: 64KiB, sync: never}}
"""
XID = Xid(1, "order-17", "messages")

run = partial(commands.run, "transactions")


@pytest.fixture(autouse=True)
def _in_a_directory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("stores.yaml").write_text(CONFIG)


def prepare(xid: Xid = XID, body: bytes = b"a train") -> None:
    """An external transaction whose manager is gone."""
    with anabranch.open("stores.yaml") as router:
        transaction = router.transaction(xid)
        transaction.send("queue://orders,queue://audit", body)
        transaction.prepare()


def orders() -> list[bytes]:
    with anabranch.open("stores.yaml") as router:
        return [message.body for message in router.queue("orders").browse()]


def the_id() -> str:
    found = json.loads(run("--json").stdout)
    (one,) = found["in_doubt"]
    assert isinstance(one["transaction"], str)
    return one["transaction"]


def test_nothing_waits() -> None:
    with anabranch.open("stores.yaml") as router:
        router.send("queue://orders,queue://audit", b"committed")
    result = run()
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == f"No transaction of {Path('data').absolute()} waits for an outcome.\n"
    assert json.loads(run("--json").stdout) == {
        "directory": str(Path("data").absolute()), "decision_log": "ok", "in_doubt": [], "by_hand": [],
    }  # fmt: skip


def test_what_waits_is_listed() -> None:
    prepare()
    (one,) = json.loads(run("--json").stdout)["in_doubt"]
    assert one["xid"] == {"format_id": 1, "global_id": "order-17", "branch": "messages"}
    assert (one["outcome"], sorted(one["stores"]), len(one["transaction"])) == (None, ["orders", "rest"], 64)
    lines = run().stdout.splitlines()
    assert lines[:2] == [one["transaction"], "  xid      1:order-17:messages"]
    assert lines[3:5] == ["  holds    sends: 2, acks: 0", "  outcome  none yet"]
    assert "its transaction manager has not said the outcome" in lines[5]


@pytest.mark.parametrize("by_xid", [False, True])
@pytest.mark.parametrize(("option", "finds"), [("--commit", [b"a train"]), ("--rollback", [])])
def test_an_outcome_by_hand(option: str, finds: list[bytes], by_xid: bool) -> None:
    prepare()
    transaction = the_id()
    result = run(option, str(XID) if by_xid else transaction)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == f"{transaction}: {option.removeprefix('--')}, by hand\n"
    assert orders() == finds
    listed = run().stdout
    assert "No transaction" in listed
    assert listed.endswith(f"  {transaction}  {option.removeprefix('--')}  (1:order-17:messages)\n")
    assert json.loads(run("--json").stdout)["by_hand"][0]["outcome"] == option.removeprefix("--")
    forgotten = run("--forget", str(XID) if by_xid else transaction, "--json")
    assert json.loads(forgotten.stdout) == {"transaction": transaction, "forgotten": True}
    assert "by hand" not in run().stdout
    assert orders() == finds


@pytest.mark.parametrize("option", ["--commit", "--rollback"])
def test_an_outcome_by_hand_is_given_once(option: str) -> None:
    prepare()
    assert run("--commit", str(XID)).exit_code == 0
    result = run(option, str(XID))
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == f"Error: the outcome of '{XID}' was given by hand already: commit\n"
    assert orders() == [b"a train"]


def test_an_xid_that_two_are_called_by_decides_neither() -> None:
    prepare(Xid(1, "a:b", "c"), b"one")
    prepare(Xid(1, "a", "b:c"), b"other")
    first, second = (one["transaction"] for one in json.loads(run("--json").stdout)["in_doubt"])
    result = run("--commit", "1:a:b:c")
    assert (result.exit_code, result.stdout) == (1, "")
    assert f"give the id: {first}, {second}" in result.stderr
    assert run("--commit", second).exit_code == 0
    assert orders() == [b"other"]


def test_its_manager_is_told_of_an_outcome_by_hand() -> None:
    prepare()
    assert run("--rollback", str(XID)).exit_code == 0
    with anabranch.open("stores.yaml") as router, pytest.raises(anabranch.TransactionError, match="by hand"):
        router.commit(XID)


@pytest.mark.parametrize("option", ["--commit", "--rollback", "--forget"])
@pytest.mark.parametrize("name", ["1:other:", "0" * 64, "nonsense", ""])
def test_a_name_that_is_none(option: str, name: str) -> None:
    prepare()
    result = run(option, name)
    assert (result.exit_code, result.stdout) == (1, "")
    there = "none" if option == "--forget" else "1:order-17:messages"
    assert result.stderr == f"Error: {name!r} names none of these transactions; there are: {there}\n"


def test_one_thing_at_a_time() -> None:
    result = run("--commit", "a", "--forget", "a", code=2)
    assert "exclude each other" in result.stderr


def test_a_locked_directory_says_who_has_it() -> None:
    with Path("stores.yaml").open("a") as file:
        file.write("control: false\n")
    with anabranch.open("stores.yaml"):
        result = run()
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("Error: ") and "is open already, by this process" in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_directory_that_is_not_there() -> None:
    result = run(code=2)
    assert "does not exist yet" in result.stderr
    assert not Path("data").exists()


def test_a_damaged_decision_log_decides_nothing() -> None:
    prepare()
    (segment,) = Path("data/decisions").rglob("*.seg")
    content = bytearray(segment.read_bytes())
    content[16] ^= 0xFF
    segment.write_bytes(content)
    result = run(code=1)
    assert "the decision log cannot be read" in result.stdout
    assert result.stderr.startswith("Error: the decision log cannot be used: ") and str(segment) in result.stderr
    assert "never an older copy, or move it away" in result.stderr and "backup" not in result.stderr
    found = json.loads(run("--json").stdout)
    assert str(segment) in found["decision_log"]
    (waiting,) = found["in_doubt"]
    assert (waiting["outcome"], waiting["xid"]) == (None, None)
    refused = run("--commit", waiting["transaction"])
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert "move it away" in refused.stderr

    # What docs/transactions.md advises: aside with it, and an outcome by hand.
    shutil.move("data/decisions", "extras")
    assert the_id() == waiting["transaction"]
    assert run("--commit", waiting["transaction"]).exit_code == 0
    assert orders() == [b"a train"]
