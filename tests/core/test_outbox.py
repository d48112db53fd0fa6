"""What callers' transactions ask for is done once, in order, whatever fails in between (rules Q4 to Q7)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from anabranch.adapters.core import Store
from anabranch.adapters.core.backend.outbox_rows import EndListener, Entry, Written
from anabranch.adapters.core.features import outbox
from anabranch.adapters.core.features.outbox import EntriesDone, Outbox
from anabranch.adapters.core.operations.table import Table
from anabranch.adapters.core.state.gates import Gate
from anabranch.adapters.core.state.leases import Lease
from anabranch.policies.errors import StoreFailedError, StoreFullError, TransactionError, UnknownMessageError
from anabranch.policies.names.destination import Destination

from ..contract.disk import A, B, bodies, eventually, take
from ..contract.leasing import LONG, Lasting, timed
from .made import memory


class Caller:
    def __init__(self, key: str) -> None:
        self.key = key
        self.rows: list[Entry] = []
        self.over = False

    def is_open(self) -> bool:
        return not self.over


class Rows:
    """A database with a table OUTBOX; its connections are Callers."""

    def __init__(self) -> None:
        self.committed: list[tuple[str, Entry]] = []
        self.fails: Exception | None = None
        self.listener: EndListener

    def enlist(self, connection: Any, listener: EndListener) -> Caller:
        self.listener = listener
        assert isinstance(connection, Caller)
        return connection

    def put(self, connection: Any, caller: Any, entries: Sequence[Entry]) -> None:
        if self.fails is not None:
            raise self.fails
        caller.rows += entries

    def written(self, after: int, most: int, caller: str | None = None) -> Sequence[Written]:
        if self.fails is not None:
            raise self.fails
        rows = sorted((entry, key) for key, entry in self.committed if entry.number > after and caller in (None, key))
        return [Written(entry.number, key, len(entry.record)) for entry, key in rows[:most]]

    def entries(self, caller: str, first: int, last: int) -> Sequence[Entry]:
        return sorted(entry for key, entry in self.committed if key == caller and first <= entry.number <= last)

    def is_over(self, caller: Any) -> bool:
        return bool(caller.over)

    def entries_done(self, numbers: Sequence[int]) -> None:
        assert {entry.number for _, entry in self.committed} >= set(numbers)
        self.committed = [row for row in self.committed if row[1].number not in numbers]

    def end(self, caller: Caller, commits: bool = True) -> None:
        self.listener.ending(caller)
        if commits:
            self.committed += [(caller.key, entry) for entry in caller.rows]
        caller.over = True


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> Rows:
    rows = Rows()

    def apply(self: EntriesDone, table: Table) -> None:
        rows.entries_done(self.numbers)

    monkeypatch.setattr(EntriesDone, "apply", apply)
    return rows


def give_outbox(store: Store, rows: Rows) -> None:
    """Let callers of a store in memory write into such a database."""
    made = Outbox(store, store._engine, store._sending, store._settling, store._lease_times, rows)
    store._engine.outbox = made
    store._engine.hooks.settling = (made.settle,)


def outbox_of(store: Store) -> Outbox:
    assert isinstance(store._engine.outbox, Outbox)
    return store._engine.outbox


@pytest.fixture
def store(rows: Rows) -> Iterator[Store]:
    with memory() as disk:
        store = disk.create()
        give_outbox(store, rows)
        yield store


def drain(store: Store) -> bool:
    """As in the background."""
    return outbox_of(store)._drain_now(everything=True)


def test_in_the_order_of_each(rows: Rows, store: Store) -> None:
    one, two = Caller("one"), Caller("two")
    store.send_within(one, A, [b"1"])
    store.send_within(two, A, [b"2"])
    store.send_within(one, A, [b"3"])
    rows.end(two)
    drain(store)
    assert bodies(store) == [b"2"]
    rows.end(one)
    assert bodies(store) == [b"2", b"1", b"3"] and rows.committed == []
    assert not outbox_of(store).is_used


def test_one_larger_than_a_write_lies_between_others(rows: Rows, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "GROUP_MAX", 4)
    callers = [Caller(name) for name in "abc"]
    for number in range(9):
        for caller in callers:
            store.send_within(caller, Destination.parse(caller.key), [b"%d" % number])
    for caller in callers:
        rows.end(caller)
    drain(store)
    for caller in callers:
        assert bodies(store, Destination.parse(caller.key)) == [b"%d" % number for number in range(9)]
    assert rows.committed == []


def test_what_cannot_be_done_holds_up_no_other(
    rows: Rows, store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A destination that is in another store by now: what was sent there stays, and is told."""
    monkeypatch.setattr(outbox, "GROUP_MAX", 2)

    class Router:
        moved = True

        def _is_elsewhere(self, destination: Destination, store_id: bytes) -> bool:
            return self.moved and destination == A

    store.owner = router = Router()
    one, two = Caller("one"), Caller("two")
    store.send_within(one, B, [b"b"])
    store.send_within(one, A, [b"1", b"2", b"3"])
    store.send_within(two, B, [b"4", b"5", b"6"])
    rows.end(one)
    rows.end(two)
    drain(store)
    assert bodies(store, B) == [b"4", b"5", b"6"]
    assert store.depth(A) == 0 and len(rows.committed) == 4  # not by halves
    assert "waits in OUTBOX" in caplog.text and "queue://a has moved to another store" in caplog.text
    router.moved = False
    drain(store)
    assert bodies(store) == [b"1", b"2", b"3"] and bodies(store, B)[-1] == b"b" and rows.committed == []


def test_a_database_that_is_away_is_asked_again(rows: Rows, store: Store) -> None:
    store.send(A, b"1")
    message, caller = take(store), Caller("one")
    store.ack_within(caller, [message])
    store.send_within(caller, B, [b"2"])
    rows.fails = StoreFailedError("it is away")
    rows.end(caller)
    assert drain(store)
    assert store.stats().leased == 1
    rows.fails = None
    eventually(lambda: store.depth(B) == 1)
    assert bodies(store) == []


def test_a_connection_that_refuses(rows: Rows, store: Store) -> None:
    """Nothing is claimed, nothing reserved."""
    store.send(A, b"1")
    message, caller = take(store), Caller("one")
    rows.fails = ValueError("no")
    for call in (lambda: store.ack_within(caller, [message]), lambda: store.send_within(caller, B, [b"2"])):
        with pytest.raises(ValueError, match="no"):
            call()
    rows.fails = None
    assert not store.is_enlisted(B)
    message.release()
    assert take(store).body == b"1"


def test_an_ack_that_is_refused_after_the_leases_time_frees_the_message(
    rows: Rows, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller's database has had it wait, and its lease was over meanwhile, or was extended before."""
    lasting = Lasting(monkeypatch)

    def refused(*_: object) -> None:
        lasting.go_on(store)
        raise ValueError("no")

    monkeypatch.setattr(rows, "put", refused)
    store.send_many(A, [b"1", b"2"])
    messages = [timed(store, LONG) for _ in range(2)]
    messages[1].extend(3 * LONG)
    with pytest.raises(ValueError, match="no"):
        store.ack_within(Caller("one"), messages)
    with pytest.raises(UnknownMessageError, match="ran out"):
        messages[0].ack()
    lasting.go_on(store, 0)
    assert (take(store).body, store.receive(A, 0)) == (b"1", None)
    lasting.go_on(store)
    assert (take(store).body, store.receive(A, 0)) == (b"2", None)


@pytest.mark.parametrize("how", ["refused", "rolled back"])
def test_what_is_claimed_while_its_queue_is_about_to_move_is_free_once_that_is_given_up(
    rows: Rows, store: Store, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """The move sees that the transaction has claimed it, and gives way."""
    store.send(A, b"1")
    message, caller, frozen = take(store), Caller("one"), dict[Lease, int]()
    delivery, channel = store._engine.delivery, store._engine.catalog.state(A).channel

    def moves(*_: object) -> None:
        assert delivery.freeze([channel], Gate(A), frozen)
        raise ValueError("no")

    with monkeypatch.context() as patches:
        if how == "refused":
            patches.setattr(rows, "put", moves)
            with pytest.raises(ValueError, match="no"):
                store.ack_within(caller, [message])
        else:
            store.ack_within(caller, [message])
            with pytest.raises(ValueError, match="no"):
                moves()
    rows.end(caller, commits=False)
    drain(store)
    assert store.is_enlisted(A)
    for lease, hold in frozen.items():  # LiveCopy.abandon
        lease.hold = hold
    drain(store)
    assert take(store).deliveries == 2
    assert not store.is_enlisted(A)


def test_what_is_claimed_is_nobody_elses(rows: Rows, store: Store) -> None:
    store.send(A, b"1")
    message, one, two = take(store), Caller("one"), Caller("two")
    store.ack_within(one, [message])
    store.ack_within(one, [message])
    with pytest.raises(UnknownMessageError):
        store.ack_within(two, [message])
    assert store.is_enlisted(A) and not store.is_enlisted(B)
    rows.end(one, commits=False)
    rows.end(two, commits=False)
    assert take(store).deliveries == 2
    assert not store.is_enlisted(A)


def test_room_is_kept_until_the_end(rows: Rows) -> None:
    with memory() as disk:
        store = disk.create(max_messages=2)
        give_outbox(store, rows)
        one, two = Caller("one"), Caller("two")
        store.send_within(one, A, [b"1", b"2"])
        with pytest.raises(StoreFullError):
            store.send_within(two, A, [b"3"])
        rows.end(one, commits=False)
        assert bodies(store) == []
        store.send_within(two, A, [b"3", b"4"])
        rows.end(two)
        assert bodies(store) == [b"3", b"4"]
        with pytest.raises(StoreFullError):
            store.send(A, b"5")


def test_a_store_without_one(store: Store) -> None:
    store._engine.outbox = None
    with pytest.raises(TransactionError, match="of kind memory"):
        store.send_within(Caller("one"), A, [b"1"])
    assert not store.is_enlisted(A)
