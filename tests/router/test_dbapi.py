"""Transactions under the DB-API's names, and its rules (PEP 249, "Optional Two-Phase Commit Extensions")."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import anabranch
from anabranch import Connection, ProgrammingError, TransactionError, TransactionInDoubt, Xid

from .disk import Faults, contents, take

NEVER = anabranch.JournalOptions(segment_size=64 * 1024, sync=anabranch.Sync.NEVER)


def config(directory: Path) -> anabranch.Config:
    stores = [
        anabranch.StoreConfig("one", ["queue://one"], journal=NEVER),
        anabranch.StoreConfig("few", ["queue://few"], journal=NEVER.model_copy(update={"max_messages": 1})),
    ]
    return anabranch.Config(directory, stores)


@pytest.fixture
def router(tmp_path: Path) -> Iterator[anabranch.Router]:
    with anabranch.open(config(tmp_path / "data")) as router:
        yield router


@pytest.fixture
def connection(router: anabranch.Router) -> Iterator[Connection]:
    with router.connection() as connection:
        yield connection


class TestOnePhase:
    def test_a_transaction_begins_by_itself(self, router: anabranch.Router, connection: Connection) -> None:
        connection.commit()
        connection.rollback()
        connection.send("one", b"1")
        connection.send("few", b"2")
        assert contents(router, "one") == []
        assert [receipt.destination.name for receipt in connection.commit()] == ["one", "few"]
        connection.send("one", b"never")
        connection.ack(take(router, "few"))
        connection.rollback()
        assert (contents(router, "one"), take(router, "few").body) == ([b"1"], b"2")

    def test_after_a_failed_commit_another_begins(self, router: anabranch.Router, connection: Connection) -> None:
        connection.send("few", b"1")
        connection.send("few", b"2")
        with pytest.raises(anabranch.StoreFullError):
            connection.commit()
        connection.rollback()
        connection.send("few", b"3")
        connection.commit()
        assert contents(router, "few") == [b"3"]

    def test_closing_rolls_back(self, router: anabranch.Router) -> None:
        router.queue("one").send(b"1")
        with router.connection() as connection:
            connection.ack(take(router, "one"))
        connection.close()
        assert take(router, "one").body == b"1"
        with pytest.raises(ProgrammingError, match="closed"):
            connection.send("one", b"2")


class TestTwoPhases:
    def test_prepare_and_commit(self, router: anabranch.Router, connection: Connection) -> None:
        xid = connection.xid(1, "order-17", "messages")
        assert (xid[0], xid[1], xid[2]) == (1, "order-17", "messages")
        connection.tpc_begin(xid)
        connection.send("queue://one,queue://few", b"1")
        connection.tpc_prepare()
        assert (connection.tpc_recover(), contents(router, "one")) == ([xid], [])
        connection.tpc_commit()
        assert (connection.tpc_recover(), contents(router, "one"), contents(router, "few")) == ([], [b"1"], [b"1"])
        connection.tpc_begin(connection.xid(1, "order-18"))  # the connection is free again
        connection.tpc_rollback()

    def test_commit_in_one_phase(self, router: anabranch.Router, connection: Connection) -> None:
        connection.tpc_begin(connection.xid(1, "a"))
        connection.send("one", b"1")
        connection.tpc_commit()
        assert contents(router, "one") == [b"1"]

    @pytest.mark.parametrize("prepared", [False, True])
    def test_rollback(self, router: anabranch.Router, connection: Connection, prepared: bool) -> None:
        router.queue("one").send(b"old")
        connection.tpc_begin(connection.xid(1, "a"))
        connection.ack(take(router, "one"))
        if prepared:
            connection.tpc_prepare()
        connection.tpc_rollback()
        assert (take(router, "one").body, connection.tpc_recover()) == (b"old", [])

    def test_another_process_says_the_outcome(self, tmp_path: Path) -> None:
        names = [Xid(1, "commit"), Xid(1, "roll back")]
        with anabranch.open(config(tmp_path / "data")) as router:
            for xid in names:
                with router.connection() as connection:  # closing one that is prepared rolls nothing back
                    connection.tpc_begin(xid)
                    connection.send("one", xid.global_id.encode())
                    connection.tpc_prepare()
        with anabranch.open(config(tmp_path / "data")) as router, router.connection() as connection:
            assert connection.tpc_recover() == names
            connection.tpc_commit(names[0])
            connection.tpc_rollback(names[1])
            assert (connection.tpc_recover(), contents(router, "one")) == ([], [b"commit"])

    def test_what_did_nothing(self, connection: Connection) -> None:
        for end in (connection.tpc_commit, connection.tpc_rollback):
            xid = connection.xid(1, end.__name__)
            connection.tpc_begin(xid)
            connection.tpc_prepare()
            assert connection.tpc_recover() == [xid]
            end()
            assert connection.tpc_recover() == []

    def test_a_prepare_that_fails_is_ended_by_rollback(self, router: anabranch.Router, connection: Connection) -> None:
        router.queue("few").send(b"full")
        connection.tpc_begin(connection.xid(1, "a"))
        connection.send("queue://one,queue://few", b"never")
        with pytest.raises(anabranch.StoreFullError):
            connection.tpc_prepare()
        connection.tpc_rollback()
        connection.send("one", b"1")
        connection.commit()
        assert contents(router, "one") == [b"1"]


@pytest.mark.parametrize("call", ["pwrite", "fdatasync"])
def test_a_prepare_in_doubt(
    router: anabranch.Router, connection: Connection, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decision log's disk fails: until it is read again nothing is said about what is prepared, then it ends."""
    router.queue("few").send(b"old")
    connection.tpc_begin(connection.xid(1, "before"))  # the decision log is there and in use
    connection.send("one", b"1")
    connection.tpc_prepare()
    connection.tpc_commit()
    faults = Faults(monkeypatch)
    begun(connection)
    connection.ack(take(router, "few"))
    connection.send("one", b"never")
    faults.fail(call, "/decisions/")
    with pytest.raises(TransactionInDoubt):
        connection.tpc_prepare()
    for step in (connection.tpc_rollback, connection.tpc_recover, lambda: router.commit(Xid(1, "a"))):
        with pytest.raises(connection.OperationalError, match="decision log"):
            step()
    faults.mend()
    router.reopen_decisions()
    connection.tpc_rollback()
    assert (connection.tpc_recover(), router.in_doubt(), contents(router, "one")) == ([], [], [b"1"])
    assert take(router, "few").body == b"old"


def begun(connection: Connection) -> None:
    connection.tpc_begin(connection.xid(1, "a"))


def prepared(connection: Connection) -> None:
    begun(connection)
    connection.send("one", b"1")
    connection.tpc_prepare()


def sent(connection: Connection) -> None:
    connection.send("one", b"1")


def nothing(connection: Connection) -> None:
    pass


Step = Callable[[Connection], object]
UNKNOWN = Xid(1, "unknown")
RULES: list[tuple[Step, Step, str]] = [
    (sent, begun, "inside a transaction"),
    (begun, begun, "inside a transaction"),
    (begun, lambda c: c.commit(), "tpc_commit"),
    (begun, lambda c: c.rollback(), "tpc_rollback"),
    (nothing, lambda c: c.tpc_prepare(), "begun with tpc_begin"),
    (sent, lambda c: c.tpc_prepare(), "begun with tpc_begin"),
    (nothing, lambda c: c.tpc_commit(), "begun with tpc_begin"),
    (nothing, lambda c: c.tpc_rollback(), "begun with tpc_begin"),
    (prepared, lambda c: c.send("one", b"2"), "is prepared"),
    (prepared, lambda c: c.tpc_prepare(), "prepared already"),
    (sent, lambda c: c.tpc_commit(UNKNOWN), "inside a transaction"),
    (begun, lambda c: c.tpc_rollback(UNKNOWN), "inside a transaction"),
    (nothing, lambda c: c.tpc_commit(UNKNOWN), "no transaction 1:unknown: is prepared"),
    (nothing, lambda c: c.tpc_rollback(UNKNOWN), "no transaction 1:unknown: is prepared"),
]


@pytest.mark.parametrize(("before", "step", "says"), RULES)
def test_what_is_not_allowed_at_that_point(
    router: anabranch.Router, connection: Connection, before: Step, step: Step, says: str
) -> None:
    before(connection)
    with pytest.raises(connection.ProgrammingError, match=says):
        step(connection)
    if before in (begun, prepared):  # and nothing has happened: it goes on
        connection.tpc_commit()
    elif before is sent:
        connection.commit()
    assert contents(router, "one") == ([b"1"] if before in (sent, prepared) else [])


def test_a_name_in_use(router: anabranch.Router, connection: Connection) -> None:
    with router.connection() as other:
        begun(other)
        with pytest.raises(ProgrammingError, match="in use"):
            begun(connection)
        with pytest.raises(ProgrammingError, match="not prepared"):
            connection.tpc_commit(Xid(1, "a"))


def test_names_that_are_none(connection: Connection) -> None:
    with pytest.raises(TransactionError, match="65 bytes"):
        connection.xid(1, "x" * 65)
    with pytest.raises(TypeError):
        connection.tpc_begin("a")  # type: ignore[arg-type]
    begun(connection)  # it was not begun before


def test_its_errors_are_ours(connection: Connection) -> None:
    assert connection.Error is anabranch.AnabranchError
    assert issubclass(connection.ProgrammingError, connection.Error)
