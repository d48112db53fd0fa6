"""The contract of a commit under a caller's name, which is known afterwards, and of nothing else that it changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from anabranch.adapters.core import Store
from anabranch.adapters.core.messages import DROPPED, Message, Outgoing, Receipt
from anabranch.adapters.core.record.keys import put_of
from anabranch.adapters.core.store_types import Change, Subscription
from anabranch.policies.names.destination import Destination

from .disk import A, B, C, Disk, T, assert_whole, bodies, drain, take
from .preparing import Sends, claim, to, transaction

M = Destination.map("m")
U = Destination.parse("topic://u")
S = Subscription(T, "s")

Commit = Callable[[Store, Sends, Sequence[Message], Sequence[Change]], list[Receipt]]


def alone(store: Store, sends: Sends, acks: Sequence[Message], changes: Sequence[Change]) -> list[Receipt]:
    """Commit in this store alone."""
    return store.commit(sends, acks, None, changes, "mark")


def prepared(store: Store, sends: Sends, acks: Sequence[Message], changes: Sequence[Change]) -> list[Receipt]:
    """Commit what was prepared, as one of several stores."""
    room = store.reserve(sends, acks)
    store.prepare(transaction(1), [store.store_id], sends, acks, True, room, changes, "mark").wait()
    assert store.marked("mark", sends, [A, B, C, M, T]) is None
    return store.commit_prepared(transaction(1)).wait()


def keyed(key: str, value: bytes = b"v") -> tuple[Destination, Outgoing]:
    return M, put_of(key, value)


ways = pytest.mark.parametrize("commit", [alone, prepared])


class MarkingContract:
    @ways
    def test_it_is_known_with_its_receipts(self, disk: Disk, store: Store, place: str, commit: Commit) -> None:
        store.send_many(A, [b"1", b"2"])
        sends = [*to(B, b"b"), *to(A, b"3"), keyed("k"), *to(B, b"c"), *to(T, b"t"), *to(U, b"u")]
        receipts = commit(store, sends, [claim(store)], [Change(S, True, False)])
        assert len({receipt.seq for receipt in receipts}) == len(sends)
        store = disk.later(store, place)
        assert store.marked("mark", sends) == receipts
        assert store.marked("another", sends, [A]) is None
        assert (drain(store), drain(store, B), drain(store, T, S.key)) == ([b"2", b"3"], [b"b", b"c"], [b"t"])
        assert list(store.maps.items(M)) == [("k", b"v")]
        assert store.stats().messages == 1
        assert_whole(store)
        assert disk.later(store, place).marked("mark", sends) == receipts

    @ways
    @pytest.mark.parametrize("what", ["acks", "subscribe", "unsubscribe", "puts"])
    def test_whatever_it_does(self, disk: Disk, store: Store, place: str, commit: Commit, what: str) -> None:
        store.send_many(A, [b"1", b"2"])
        store.subscribe(Subscription(U, "u"))
        sends: Sends = [keyed("k"), keyed("k", b"w")] if what == "puts" else []
        acks = [claim(store)] if what == "acks" else []
        changes = {"subscribe": [Change(S, True)], "unsubscribe": [Change(Subscription(U, "u"), False)]}.get(what, [])
        receipts = commit(store, sends, acks, changes)
        others = {"acks": [A], "subscribe": [T], "unsubscribe": [U]}.get(what, [])
        for view in disk.views(store):
            assert view.marked("mark", sends, others) == receipts
            assert view.marked("mark", [], [B]) is None
        store = disk.later(store, place)
        assert store.marked("mark", sends, others) == receipts
        assert dict(store.maps.items(M)) == ({"k": b"w"} if what == "puts" else {})
        assert_whole(store)

    @ways
    def test_nobody_receives_it(self, store: Store, commit: Commit) -> None:
        """Neither those who have had all there was, nor subscribers."""
        store.subscribe(S)
        store.send_many(A, [b"1"])
        held = take(store, T, subscription=S.key) if store.send(T, b"t") else None
        assert held is not None and store.receive(T, 0, S.key) is None
        store.claim(held)
        message = claim(store)
        assert store.receive(A) is None
        commit(store, [], [message, held], [])
        assert (store.receive(A), store.receive(T, 0, S.key)) == (None, None)
        assert (store.depth(A), store.depth(T, S.key), store.counts(A).ready) == (0, 0, 0)
        store.send(A, b"2")
        assert (take(store).body, store.receive(A)) == (b"2", None)

    def test_another_destination_tells_of_it_once_one_is_removed(self, disk: Disk, store: Store, place: str) -> None:
        store.send(A, b"1")
        sends = [*to(B, b"b"), *to(C, b"c")]
        receipts = alone(store, sends, [claim(store)], [])
        store.delete(B)
        store = disk.later(store, place)
        assert receipts[1].seq and store.marked("mark", sends[1:], [A]) is not None
        store.delete(C)
        assert store.marked("mark", sends, [A]) == [Receipt(B, 0), Receipt(C, 0)]
        store.delete(A)
        assert store.marked("mark", sends, [A]) is None
        assert disk.later(store, place).marked("mark", sends, [A]) is None

    def test_what_is_gone_when_it_is_written_is_not_there_anew(self, store: Store) -> None:
        store.send_many(A, [b"1"])
        message = claim(store)
        name = transaction(1)
        store.prepare(name, [store.store_id], to(B, b"b"), [message], True, None, (), "mark").wait()
        store.commit_prepared(name).wait()
        assert store.marked("mark", [], [A]) == [] and store.delete(A) == 0
        assert store.marked("mark", to(B, b"b"), [A]) is not None
        assert store.destinations() == [B]

    @ways
    def test_duplicates_are_told_from_its_own(self, disk: Disk, store: Store, place: str, commit: Commit) -> None:
        store.send(A, b"0", message_id="old")
        sends = [
            (A, Outgoing(b"1", None, "new")), (A, Outgoing(b"2", None, "old")), (A, Outgoing(b"3")),
            (A, Outgoing(b"4", None, "new")), (B, Outgoing(b"5", None, "old")), (B, Outgoing(b"6")),
        ]  # fmt: skip
        receipts = commit(store, sends, [], [])
        assert [receipt.duplicate for receipt in receipts] == [False, True, False, True, False, False]
        assert disk.later(store, place).marked("mark", sends) == receipts

    def test_behind_an_id_that_tells_nothing_seqs_are_not_guessed(self, store: Store) -> None:
        sends = [(A, Outgoing(b"1")), (A, Outgoing(b"2", None, "id")), (A, Outgoing(b"3"))]
        receipts = alone(store, sends, [], [])
        assert store.marked("mark", sends) == receipts
        store.send_many(A, [Outgoing(b"2", None, "id", requeued=True)])
        assert store.marked("mark", sends) == [Receipt(A, 0)] * 3

    def test_a_rollback_is_not_known(self, disk: Disk, store: Store, place: str) -> None:
        store.send(A, b"1")
        name, sends = transaction(1), to(B, b"b")
        store.prepare(name, [store.store_id], sends, [claim(store)], True, None, (), "mark").wait()
        store = disk.later(store, place)
        assert store.rollback_prepared(name).wait()
        assert store.marked("mark", sends, [A]) is None
        assert drain(store) == [b"1"]

    def test_a_branch_keeps_it_over_a_restart(self, disk: Disk, store: Store, place: str) -> None:
        store.send(A, b"1")
        name, sends = transaction(1), [*to(B, b"b"), keyed("k")]
        store.prepare(name, [store.store_id], sends, [claim(store)], True, None, (), "mark").wait()
        store = disk.later(store, place)
        receipts = store.commit_prepared(name).wait()
        for view in disk.views(store):
            assert view.marked("mark", sends, [A]) == receipts
        assert bodies(store) == []

    def test_it_is_forgotten_as_ids_are(self, disk: Disk) -> None:
        store = disk.create(duplicate_window=3)
        receipts = alone(store, to(A, b"1"), [], [])
        store.send(B, b"2", message_id="2")
        store.send(B, b"3", message_id="3")
        for view in disk.views(store):
            assert view.marked("mark", to(A, b"1")) == receipts
        store.send(B, b"4", message_id="4")
        for view in disk.views(store):
            assert view.marked("mark", to(A, b"1")) is None

    def test_without_a_window_it_is_not_known(self, disk: Disk) -> None:
        store = disk.create(duplicate_window=0)
        before = store.last_seq
        alone(store, to(A, b"1"), [], [])
        assert store.marked("mark", to(A, b"1")) is None
        assert store.last_seq == before + 1

    def test_it_takes_no_room(self, disk: Disk) -> None:
        store = disk.create(max_messages=2)
        store.send_many(A, [b"1", b"2"])
        alone(store, [], [claim(store)], [])
        alone(store, to(B, b"b"), [], [])
        assert store.stats().messages == 2

    def test_of_what_was_dropped_no_seq_is_told(self, disk: Disk) -> None:
        store = disk.create(max_messages=1, when_full="drop_new")
        sends = to(A, b"1", b"2")
        receipts = alone(store, sends, [], [])
        assert DROPPED in [receipt.seq for receipt in receipts]
        assert store.marked("mark", sends) == [Receipt(A, 0)] * 2
