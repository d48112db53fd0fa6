"""The contract of a store's branches: prepared, then committed or rolled back, whatever happens (invariant 4)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from anabranch.adapters.core import Store
from anabranch.adapters.core.messages import Headers, Message, Outgoing, Receipt
from anabranch.adapters.core.store_types import Prepared, Settlement, Subscription
from anabranch.policies.errors import (
    ClosedError,
    MessageTooLargeError,
    StoreFullError,
    TransactionError,
    UnknownMessageError,
)
from anabranch.policies.names.destination import Destination

from .disk import PATIENCE, A, B, C, Disk, Parallel, assert_whole, bodies, drain, drain_at_once, eventually, take

OTHER = b"id of some other"
"""Another store that takes part."""
NOBODY = b"a store that is not there"[:16]

Sends = Sequence[tuple[Destination, Outgoing]]


def transaction(number: int) -> bytes:
    """An id as a coordinator makes them: its own id, its epoch, a number."""
    return b"the coordinator." + (1).to_bytes(8, "big") + number.to_bytes(8, "big")


def prepare(store: Store, number: int, sends: Sends = (), acks: Sequence[Message] = ()) -> bytes:
    """A branch that is prepared on return."""
    name = transaction(number)
    store.prepare(name, [store.store_id, OTHER], sends, acks, True, store.reserve(sends, acks)).wait()
    return name


def claim(store: Store, destination: Destination = A) -> Message:
    """The first message, for a transaction."""
    message = take(store, destination)
    store.claim(message)
    return message


def to(destination: Destination, *sent: bytes) -> list[tuple[Destination, Outgoing]]:
    return [(destination, Outgoing(body)) for body in sent]


class PreparingContract:
    # Prepared

    def test_nothing_of_it_is_seen(self, disk: Disk, store: Store, place: str) -> None:
        store.send_many(A, [b"1", b"2"])
        prepare(store, 1, [*to(A, b"3"), *to(B, b"b")], [claim(store)])
        store = disk.later(store, place)
        assert (bodies(store), store.depth(A), store.depth(B)) == ([b"1", b"2"], 2, 0)
        assert (take(store).body, store.receive(A), store.receive(B)) == (b"2", None, None)
        assert B not in store.destinations()
        assert store.stats().messages == 2
        assert_whole(store)

    def test_its_acks_are_nobody_elses(self, disk: Disk, store: Store, place: str) -> None:
        """Rules X6 and T10: neither received, settled, purged nor deleted by anybody."""
        store.send_many(A, [b"1", b"2", b"3"])
        message = take(store)
        token = store.token(message)
        store.claim(message)
        prepare(store, 1, (), [message])
        store = disk.later(store, place)
        for how in (Settlement.ACK, Settlement.RELEASE):
            (wrong,) = store.settle([token], how)
            assert isinstance(wrong, UnknownMessageError)
        for settle in (store.ack, store.release, lambda some: store.claim(some[0])):
            with pytest.raises(UnknownMessageError):
                settle([message])
        with pytest.raises(TransactionError, match="claimed"):
            store.delete(A)
        assert store.purge(A) == 2
        assert (bodies(store), store.receive(A)) == ([b"1"], None)
        assert not store.retire()
        again = disk.later(store)
        assert again.receive(A) is None
        assert again.rollback_prepared(transaction(1)).wait()
        assert drain(again) == [b"1"]

    def test_what_is_prepared_comes_back(self, disk: Disk, store: Store, place: str) -> None:
        """Oldest first, with the ids of all that take part."""
        store.send_many(A, [b"1", b"2", b"3"])
        ids = [store.store_id, OTHER, NOBODY]
        for number, sends, acks in ((3, to(A, b"x"), 0), (1, to(B, b"x", b"y"), 2), (2, [], 1)):
            messages = [claim(store) for _ in range(acks)]
            store.prepare(transaction(number), ids[:number], sends, messages, True, store.reserve(sends)).wait()
        store = disk.later(store, place)
        assert list(store.recover_prepared()) == [
            Prepared(transaction(1), tuple(ids[:1]), 2, 2),
            Prepared(transaction(2), tuple(ids[:2]), 0, 1),
            Prepared(transaction(3), tuple(ids), 1, 0),
        ]
        for number in (1, 2, 3):
            store.rollback_prepared(transaction(number)).wait()
        assert list(store.recover_prepared()) == []
        assert drain(store) == [b"1", b"2", b"3"]

    def test_a_prepare_goes_on_by_itself(self, store: Store) -> None:
        step = store.prepare(transaction(1), [store.store_id], to(A, b"x"), [], True, None)
        step.proceed()
        eventually(lambda: len(store.recover_prepared()) == 1)
        step.wait()
        outcome = store.commit_prepared(transaction(1))
        outcome.proceed()
        eventually(lambda: store.depth(A) == 1)
        assert [receipt.destination for receipt in outcome.wait()] == [A]

    def test_an_outcome_finds_what_is_still_under_way(self, store: Store) -> None:
        """The thread that prepared was interrupted before it could wait; another one ends the transaction."""
        store.send(A, b"1")
        store.prepare(transaction(1), [store.store_id], to(B, b"b"), [claim(store)], True, None)
        assert store.rollback_prepared(transaction(1)).wait()
        store.prepare(transaction(2), [store.store_id], to(B, b"c"), [], True, None)
        assert [receipt.destination for receipt in store.commit_prepared(transaction(2)).wait()] == [B]
        assert (bodies(store), bodies(store, B)) == ([b"1"], [b"c"])

    def test_what_cannot_be_prepared_changes_nothing(self, disk: Disk) -> None:
        store = disk.create(message_bytes_max=1000)
        store.send_many(A, [b"1", b"2"])
        message, leased = claim(store), take(store)
        wrong: list[tuple[Sends, list[Message], type[Exception]]] = [
            (to(B, b"x" * 2000), [message], MessageTooLargeError),
            ([(B, Outgoing("text"))], [message], TypeError),  # type: ignore[arg-type]
            ([(B, Outgoing(b"x", {"n": [1j]}))], [message], TypeError),  # type: ignore[list-item]
            ([(B, Outgoing(b"x", None, ""))], [message], ValueError),
            (to(B, b"x"), [message, leased], UnknownMessageError),
            (to(B, b"x"), [message, message, leased], UnknownMessageError),
        ]
        for sends, acks, error in wrong:
            with pytest.raises(error):
                store.prepare(transaction(1), [store.store_id], sends, acks, True, None).wait()
            assert list(store.recover_prepared()) == []
        store.commit(to(B, b"b"), [message])  # still claimed
        leased.ack()
        assert (bodies(store), bodies(store, B)) == ([], [b"b"])

    # Committed

    def test_commit(self, disk: Disk, store: Store, place: str) -> None:
        """At the ends of the destinations as they are by then, in the order of the sends (invariant 2)."""
        store.send_many(A, [b"1", b"2", b"3"])
        sends = [*to(B, b"b1"), *to(A, b"4"), *to(C, b"c"), *to(B, b"b2"), *to(A, b"5")]
        name = prepare(store, 1, sends, [claim(store), claim(store)])
        store.send(A, b"between")
        store.send(B, b"between")
        store = disk.later(store, place)
        receipts = store.commit_prepared(name).wait()
        assert [receipt.destination for receipt in receipts] == [B, A, C, B, A]
        seqs = [receipt.seq for receipt in receipts]
        assert seqs == sorted(set(seqs))
        assert [m.seq for m in store.browse(B)][1:] == [seqs[0], seqs[3]]
        assert not any(receipt.duplicate for receipt in receipts)
        for view in ("here", "crashed", "closed"):
            store = disk.later(store, view)
            if store.recover_prepared():
                store.commit_prepared(name).wait()  # allowed: it was not told to sync
            assert bodies(store) == [b"3", b"between", b"4", b"5"]
            assert bodies(store, B) == [b"between", b"b1", b"b2"]
            assert bodies(store, C) == [b"c"]
            assert_whole(store)
        assert drain(store) == [b"3", b"between", b"4", b"5"]

    def test_what_it_sends_is_as_it_was_given(self, disk: Disk, store: Store, place: str) -> None:
        odd = Destination.parse("topic://ü/..%2f")
        store.subscribe(Subscription(odd, "desk"))
        headers: Headers = {"text": "ü", "int": -1, "float": 0.5, "bytes": b"\0", "none": None, "true": True}
        sent = [
            (A, Outgoing(b"", headers, "an id")),
            (A, Outgoing(b"x" * 200_000, None, "ü")),
            (odd, Outgoing(b"\0\n" * 10)),
            (A, Outgoing(b"last")),
        ]
        name = prepare(store, 1, sent)
        store = disk.later(store, place)
        store.commit_prepared(name).wait()
        store.sync()
        for view in disk.views(store):
            found = [(m.destination, Outgoing(m.body, m.headers or None, m.message_id)) for m in view.browse(A)]
            found[2:2] = [(m.destination, Outgoing(m.body, m.headers or None, m.message_id)) for m in view.browse(odd)]
            assert found == sent
            assert_whole(view)

    def test_a_big_branch(self, disk: Disk, store: Store, place: str) -> None:
        store.send_many(A, [str(n).encode() for n in range(200)])
        sent = [str(n).encode() * 300 for n in range(500)]
        name = prepare(store, 1, to(B, *sent), [claim(store) for _ in range(150)])
        store = disk.later(store, place)
        assert len(store.commit_prepared(name).wait()) == 500
        store.sync()
        again = disk.later(store)
        assert drain(again) == [str(n).encode() for n in range(150, 200)]
        assert drain(again, B) == sent
        assert_whole(again)

    def test_the_order_is_that_of_the_commits(self, disk: Disk, store: Store) -> None:
        names = [prepare(store, n, to(A, str(n).encode())) for n in range(5)]
        for n in (3, 0, 4, 1, 2):
            store.commit_prepared(names[n]).wait()
        store.sync()
        for view in disk.views(store):
            assert bodies(view) == [b"3", b"0", b"4", b"1", b"2"]

    def test_a_commit_wakes_who_waits(self, store: Store) -> None:
        name = prepare(store, 1, to(A, b"x"))
        with Parallel(lambda: store.receive(A, None)) as receiver:
            assert receiver.outlives(0.05)
            store.commit_prepared(name).wait()
            assert receiver.result().body == b"x"

    def test_a_destination_that_was_deleted_meanwhile(self, disk: Disk, store: Store, place: str) -> None:
        """It comes back with what the branch sends, and nothing else."""
        store.send(A, b"old", None, "id")
        store.send(B, b"b")
        name = prepare(store, 1, [(A, Outgoing(b"new", None, "id")), *to(C, b"c")])
        assert store.delete(A) == 1
        store = disk.later(store, place)
        assert not any(receipt.duplicate for receipt in store.commit_prepared(name).wait())
        store.sync()
        for view in disk.views(store):
            assert (bodies(view), bodies(view, B), bodies(view, C)) == ([b"new"], [b"b"], [b"c"])
            assert set(view.destinations()) == {A, B, C}
            assert_whole(view)

    def test_synced_it_is_committed_for_good(self, disk: Disk, store: Store) -> None:
        store.send(A, b"1")
        name = prepare(store, 1, to(A, b"2"), [claim(store)])
        store.commit_prepared(name).wait()
        store.sync()
        again = disk.later(store)
        assert list(again.recover_prepared()) == []
        assert bodies(again) == [b"2"]

    # Rolled back

    def test_rollback(self, disk: Disk, store: Store, place: str) -> None:
        """What it had claimed is free again, each message at its old place; what it sent was never there."""
        store.send_many(A, [str(n).encode() for n in range(200)])
        messages = [claim(store) for _ in range(100)]
        store.unclaim([messages[n] for n in (5, 50)])
        name = prepare(store, 1, to(B, b"b"), [messages[n] for n in (70, 3, 99, 0)])
        gone = prepare(store, 2, (), [message for n, message in enumerate(messages) if n not in (0, 3, 5, 50, 70, 99)])
        store = disk.later(store, place)
        store.commit_prepared(gone).wait()
        assert [take(store).body for _ in range(3)] == [b"5", b"50", b"100"]
        assert store.rollback_prepared(name).wait() is True
        assert [take(store).body for _ in range(4)] == [b"0", b"3", b"70", b"99"]
        assert drain(store) == [str(n).encode() for n in range(101, 200)]
        assert bodies(store, B) == []
        store.sync()
        for view in disk.views(store):
            assert list(view.recover_prepared()) == []
            assert bodies(view) == [b"0", b"3", b"5", b"50", b"70", b"99", b"100"]
            assert_whole(view)
            if view is not store:
                assert len(drain(view)) == 7  # the leases have ended

    def test_what_a_rollback_has_freed_is_freed_once(self, store: Store) -> None:
        """Whoever claims it next keeps it, though an interrupted rollback is done again from the start."""
        store.send(A, b"1")
        before = claim(store)
        assert store.rollback_prepared(prepare(store, 1, (), [before])).wait()
        claim(store)
        with pytest.raises(UnknownMessageError):
            store.unclaim([before])
        assert store.receive(A) is None

    def test_a_rollback_wakes_who_waits(self, store: Store) -> None:
        store.send(A, b"x")
        name = prepare(store, 1, (), [claim(store)])
        with Parallel(lambda: store.receive(A, None)) as receiver:
            assert receiver.outlives(0.05)
            store.rollback_prepared(name).wait()
            assert receiver.result().body == b"x"

    @pytest.mark.parametrize("commit", [True, False])
    def test_an_outcome_that_nobody_waits_for_wakes_who_waits(self, disk: Disk, commit: bool) -> None:
        store = disk.create(**disk.idle)  # what runs in the background would look, too
        store.send(A, b"x")
        name = prepare(store, 1, to(B, b"x"), [claim(store)])
        with Parallel(lambda: store.receive(B if commit else A, PATIENCE / 2)) as receiver:
            assert receiver.outlives(0.05)
            (store.commit_prepared if commit else store.rollback_prepared)(name).proceed()
            assert not receiver.outlives(PATIENCE / 4)
            assert receiver.result().body == b"x"

    def test_what_came_back_can_be_prepared_again(self, disk: Disk, store: Store) -> None:
        store.send_many(A, [b"1", b"2"])
        for number in range(4):
            name = prepare(store, number, to(B, b"b"), [claim(store), claim(store)])
            if number == 1:
                store = disk.later(store)
            assert store.rollback_prepared(name).wait() is True
        store.commit_prepared(prepare(store, 4, to(B, b"b"), [claim(store)])).wait()
        assert (drain(store), drain(store, B)) == ([b"2"], [b"b"])
        assert_whole(store)

    @pytest.mark.parametrize("commit", [True, False])
    def test_who_receives_while_it_is_prepared(self, disk: Disk, store: Store, place: str, commit: bool) -> None:
        """What is fetched ahead for others is never what a branch has claimed, neither before nor after its end."""
        store.send_many(A, [str(n).encode() for n in range(8)])
        messages = [claim(store) for _ in range(6)]
        store.unclaim([messages[n] for n in (0, 2, 5)])
        name = prepare(store, 1, (), [messages[n] for n in (1, 3, 4)])
        store = disk.later(store, place)
        first = take(store)
        assert first.body == b"0"
        if commit:
            store.commit_prepared(name).wait()
            left = [b"2", b"5", b"6", b"7"]
        else:
            store.rollback_prepared(name).wait()
            left = [b"1", b"2", b"3", b"4", b"5", b"6", b"7"]
        assert store.depth(A) == len(left) + 1
        again = [take(store) for _ in left]
        assert [message.body for message in again] == left
        assert store.receive(A) is None
        store.release([*again[::2], first])
        assert drain(store) == [b"0", *left[::2]]
        store.ack(again[1::2])
        assert_whole(store)

    # Told twice, or to nobody

    def test_an_outcome_is_told_twice(self, disk: Disk, store: Store, place: str) -> None:
        store.send_many(A, [b"1", b"2", b"3"])
        done = prepare(store, 1, to(B, b"b"), [claim(store)])
        undone = prepare(store, 2, to(B, b"never"), [claim(store)])
        store.commit_prepared(done).wait()
        store.rollback_prepared(undone).wait()
        mine = claim(store)
        store.sync()
        if place != "here":
            store = disk.later(store, place)
            mine = claim(store)
        assert mine.body == b"2"
        for _ in range(2):
            assert store.commit_prepared(done).wait() == []
            assert store.rollback_prepared(done).wait() is False
            assert store.rollback_prepared(undone).wait() is False
            assert store.commit_prepared(undone).wait() == []
        assert bodies(store, B) == [b"b"]
        store.commit([], [mine])  # another transaction's claim is as it was
        assert drain(store) == [b"3"]
        assert_whole(store)

    def test_two_steps_of_one_outcome(self, store: Store) -> None:
        """Two threads tell the same: it is done once."""
        store.send(A, b"1")
        name = prepare(store, 1, to(B, b"x", b"y"), [claim(store)])
        steps = [store.commit_prepared(name) for _ in range(3)]
        told = sorted((len(step.wait()) for step in steps), reverse=True)
        assert told == [2, 0, 0]
        assert (bodies(store), bodies(store, B)) == ([], [b"x", b"y"])

    def test_unknown_transactions_are_passed_over(self, store: Store) -> None:
        store.send(A, b"1")
        assert store.commit_prepared(transaction(7)).wait() == []
        assert store.rollback_prepared(transaction(7)).wait() is False
        store.forget([transaction(7)])
        assert (list(store.recover_prepared()), list(store.committed())) == ([], [])
        assert drain(store) == [b"1"]

    # What was committed

    def test_committed_until_forgotten(self, disk: Disk, store: Store) -> None:
        """The last word where a coordinator has lost its own (rule T3)."""
        names = [prepare(store, n, to(A, b"x")) for n in range(5)]
        assert list(store.committed()) == []
        for n in (2, 0, 4):
            store.commit_prepared(names[n]).wait()
        store.rollback_prepared(names[1]).wait()
        store.sync()
        for place in ("here", "crashed", "closed"):
            store = disk.later(store, place)
            assert list(store.committed()) == [names[0], names[2], names[4]]
        store.forget([names[0], names[3], names[4]])
        for place in ("here", "closed"):
            store = disk.later(store, place)
            assert list(store.committed()) == [names[2]]
            assert [prepared.transaction for prepared in store.recover_prepared()] == [names[3]]
        store.forget(names)
        assert list(store.committed()) == []
        assert store.depth(A) == 3
        assert_whole(store)

    # Duplicates

    def test_a_message_id_that_was_sent_meanwhile(self, disk: Disk, store: Store, place: str) -> None:
        """Invariant 3, rule X7: stored once, whoever comes first."""
        name = prepare(store, 1, [(A, Outgoing(b"prepared", None, "id")), *to(A, b"other")])
        plain = store.send(A, b"plain", None, "id")
        assert not plain.duplicate
        store = disk.later(store, place)
        receipts = store.commit_prepared(name).wait()
        assert receipts[0] == Receipt(A, plain.seq, True)
        assert not receipts[1].duplicate
        store.sync()
        for view in disk.views(store):
            assert bodies(view) == [b"plain", b"other"]

    def test_a_message_id_that_a_branch_has_sent(self, disk: Disk, store: Store, place: str) -> None:
        first = prepare(store, 1, [(A, Outgoing(b"1", None, "id")), (B, Outgoing(b"b", None, "id"))])
        second = prepare(store, 2, [(A, Outgoing(b"2", None, "id"))])
        never = prepare(store, 3, [(A, Outgoing(b"3", None, "another"))])
        store = disk.later(store, place)
        store.rollback_prepared(never).wait()
        seq = store.commit_prepared(first).wait()[0].seq
        assert store.commit_prepared(second).wait() == [Receipt(A, seq, True)]
        store.sync()
        for view in disk.views(store):
            assert view.send(A, b"4", None, "id") == Receipt(A, seq, True)
            assert not view.send(A, b"5", None, "another").duplicate
            assert (bodies(view), bodies(view, B)) == ([b"1", b"5"], [b"b"])

    def test_a_requeued_message_of_a_branch_is_no_duplicate(self, disk: Disk, store: Store, place: str) -> None:
        """Nor in whatever process its outcome is told; the ack of the dead letter is in the same branch."""
        store.send(A, b"1", None, "id")
        take(store).ack()
        store.send(B, b"letter")
        sends = [(A, Outgoing(b"plain", None, "id")), (A, Outgoing(b"2", None, "id", requeued=True))]
        name = prepare(store, 1, sends, [claim(store, B)])
        store = disk.later(store, place)
        assert [receipt.duplicate for receipt in store.commit_prepared(name).wait()] == [True, False]
        store.sync()
        for view in disk.views(store):
            assert view.send(A, b"3", None, "id").duplicate
            assert ([(m.body, m.message_id) for m in view.browse(A)], bodies(view, B)) == ([(b"2", "id")], [])
            assert_whole(view)

    def test_a_message_id_twice_in_one_branch(self, disk: Disk, store: Store, place: str) -> None:
        name = prepare(store, 1, [(A, Outgoing(b"1", None, "id")), *to(A, b"2"), (A, Outgoing(b"3", None, "id"))])
        store = disk.later(store, place)
        receipts = store.commit_prepared(name).wait()
        assert [receipt.duplicate for receipt in receipts] == [False, False, True]
        assert receipts[0].seq == receipts[2].seq
        assert bodies(store) == [b"1", b"2"]
        assert_whole(store)

    # Limits

    def test_a_prepared_branch_keeps_its_room(self, disk: Disk, place: str) -> None:
        """Rule T1: taken before the prepare, so that no commit finds the store full; and counted once."""
        store = disk.create(max_messages=5)
        store.send(A, b"1")
        kept = prepare(store, 1, to(A, b"2", b"3"))
        given_back = prepare(store, 2, to(B, b"x", b"y"))
        store = disk.later(store, place)
        with pytest.raises(StoreFullError, match="max_messages is 5"):
            store.send(A, b"x")
        with pytest.raises(StoreFullError, match="max_messages is 5"):
            store.reserve(to(A, b"x"))
        store.rollback_prepared(given_back).wait()
        store.send(B, b"4")
        store.commit_prepared(kept).wait()
        store.send(B, b"5")
        with pytest.raises(StoreFullError):
            store.send(B, b"6")
        assert (bodies(store), bodies(store, B)) == ([b"1", b"2", b"3"], [b"4", b"5"])
        for _ in range(3):
            take(store).ack()
        store.commit_prepared(prepare(store, 3, to(A, b"7", b"8", b"9"))).wait()
        assert store.depth(A) == 3

    @pytest.mark.parametrize("commit", [True, False])
    def test_a_branch_needs_room_for_what_it_sends_beyond_what_it_acks(
        self, disk: Disk, place: str, commit: bool
    ) -> None:
        store = disk.create(max_messages=3)
        store.send_many(A, [b"1", b"2"])
        acks = [claim(store), claim(store)]
        with pytest.raises(StoreFullError):
            store.reserve(to(B, b"x") * 4, acks)
        name = prepare(store, 1, to(B, b"3", b"4", b"5"), acks)
        store = disk.later(store, place)
        with pytest.raises(StoreFullError):
            store.send(A, b"x")
        (store.commit_prepared if commit else store.rollback_prepared)(name).wait()
        if not commit:
            store.send(B, b"x")
        with pytest.raises(StoreFullError):
            store.send(A, b"x")
        assert store.depth(A) + store.depth(B) == 3
        acks = [claim(store, B if commit else A)]
        store.commit_prepared(prepare(store, 2, to(A, b"6"), acks)).wait()  # of a full store
        assert store.depth(A) + store.depth(B) == 3

    def test_room_that_is_reserved_and_let_go(self, disk: Disk) -> None:
        store = disk.create(max_messages=2)
        room = store.reserve(to(A, b"1", b"2"))
        with pytest.raises(StoreFullError):
            store.send(A, b"x")
        with pytest.raises(StoreFullError):
            store.reserve(to(A, b"x"))
        del room
        room = store.reserve(to(A, b"1", b"2"))
        store.prepare(transaction(1), [store.store_id], to(A, b"1", b"2"), [], True, room).wait()
        del room  # the branch has it now
        with pytest.raises(StoreFullError):
            store.send(A, b"x")
        store.commit_prepared(transaction(1)).wait()
        assert bodies(store) == [b"1", b"2"]

    def test_reserve_is_all_or_nothing(self, disk: Disk) -> None:
        store = disk.create(max_messages=3, message_bytes_max=1000)
        for _ in range(5):
            with pytest.raises(StoreFullError):
                store.reserve(to(A, b"1", b"2", b"3", b"4"))
            with pytest.raises(MessageTooLargeError):
                store.reserve(to(A, b"1", b"x" * 2000))
        store.commit_prepared(prepare(store, 1, to(A, b"1", b"2", b"3"))).wait()
        assert store.depth(A) == 3

    def test_a_prepared_branch_keeps_its_bytes(self, disk: Disk, place: str) -> None:
        store = disk.create(max_bytes=3000)
        name = prepare(store, 1, to(A, b"x" * 1000, b"x" * 1000))
        store = disk.later(store, place)
        with pytest.raises(StoreFullError, match=r"max_\w*bytes is 3000"):
            store.reserve(to(A, b"x" * 1000))
        store.commit_prepared(name).wait()
        store.send(A, b"x" * 500)
        with pytest.raises(StoreFullError):
            store.send(A, b"x" * 500)
        assert store.depth(A) == 3

    # A store's life

    def test_a_store_with_a_branch_does_not_retire(self, store: Store) -> None:
        name = prepare(store, 1, to(A, b"x"))
        assert not store.retire()
        store.commit_prepared(name).wait()
        take(store).ack()
        store.forget([name])
        assert store.retire()
        with pytest.raises(ClosedError):
            store.recover_prepared()

    def test_stats_of_a_branch(self, store: Store) -> None:
        store.send_many(A, [b"1", b"2"])
        name = prepare(store, 1, to(B, b"x", b"y", b"z"), [claim(store)])
        stats = store.stats()
        assert (stats.messages, stats.leased, stats.sends, stats.acks) == (2, 1, 2, 0)
        store.commit_prepared(name).wait()
        stats = store.stats()
        assert (stats.messages, stats.leased, stats.sends, stats.acks) == (4, 0, 5, 1)

    def test_branches_survive_many_restarts_and_reclaiming(self, disk: Disk, store: Store) -> None:
        """However often, and whatever else comes and goes (rule J6)."""
        store.send_many(A, [b"1", b"2", b"3"])
        names = [prepare(store, n, to(A, f"sent {n}".encode() * 100), [claim(store)]) for n in range(3)]
        for place in ("crashed", "closed", "crashed", "closed"):
            store.send_many(B, [b"x" * 1000] * 150)
            assert len(drain_at_once(store, B)) == 150
            store.reclaim()
            store = disk.later(store, place)
            assert [prepared.transaction for prepared in store.recover_prepared()] == names
            assert store.receive(A) is None
            assert_whole(store)
        store.commit_prepared(names[2]).wait()
        store.rollback_prepared(names[0]).wait()
        store.commit_prepared(names[1]).wait()
        store.send_many(B, [b"x" * 1000] * 150)
        drain_at_once(store, B)
        store.reclaim()
        store = disk.later(store, "crashed")
        assert drain(store) == [b"1", b"sent 2" * 100, b"sent 1" * 100]
        assert_whole(store)

    def test_branches_of_many_threads(self, disk: Disk, store: Store) -> None:
        """Beside plain sends, in every order: each message once, each thread's in order, a third rolled back."""
        threads, each = 8, 24
        store.send_many(A, [str(n).encode() for n in range(threads * each)])

        def work(thread: int) -> tuple[set[bytes], list[int]]:
            chance = random.Random(thread)
            taken: set[bytes] = set()
            kept: list[int] = []
            waiting: list[tuple[bytes, int, Message]] = []
            for n in range(each):
                message = claim(store)
                sends = to(B, f"{thread}:{n}:{message.body.decode()}".encode()) + to(C, b"c")
                waiting.append((prepare(store, thread * 1000 + n, sends, [message]), n, message))
                store.send(B, b"plain")
                while waiting and (n == each - 1 or chance.random() < 0.5):
                    name, number, message = waiting.pop(0)
                    if number % 3 == 0:
                        assert store.rollback_prepared(name).wait()
                        continue
                    assert len(store.commit_prepared(name).wait()) == 2
                    kept.append(number)
                    taken.add(message.body)
            return taken, kept

        with ThreadPoolExecutor(threads) as pool:
            done = [future.result(3 * PATIENCE) for future in [pool.submit(work, n) for n in range(threads)]]
        store.sync()
        for view in disk.views(store):
            assert list(view.recover_prepared()) == []
            sent = [body.split(b":") for body in bodies(view, B) if body != b"plain"]
            assert view.depth(B) - len(sent) == threads * each
            assert view.depth(C) == len(sent)
            for thread, (taken, kept) in enumerate(done):
                mine = [parts for parts in sent if int(parts[0]) == thread]
                assert [int(parts[1]) for parts in mine] == kept
                assert {parts[2] for parts in mine} == taken
            gone = {parts[2] for parts in sent}
            assert len(gone) == len(sent)
            assert bodies(view) == [
                body for body in (str(n).encode() for n in range(threads * each)) if body not in gone
            ]
            assert_whole(view)
        assert len(drain(store)) == threads * each - len(sent)
