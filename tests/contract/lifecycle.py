"""The contract of opening, closing, crashing, forking, and of what a store says of itself."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from anabranch.adapters.core import Store
from anabranch.adapters.core.messages import Message, Outgoing
from anabranch.adapters.core.store_types import Subscription
from anabranch.policies.errors import AnabranchError, ClosedError, StoreLockedError
from anabranch.policies.names.destination import Destination

from .children import reaped
from .disk import PATIENCE, A, B, C, Disk, Parallel, T, assert_whole, bodies, drain, eventually, survives, take

DESK = Subscription(T, "desk", "c1")
M = Destination.map("m")


def every_call(store: Store, message: Message, claimed: Message) -> dict[str, Callable[[], object]]:
    """One call of each method that a closed store refuses."""
    return {
        "declare": lambda: store.declare(C),
        "send": lambda: store.send(A, b"x"),
        "send to a new one": lambda: store.send(C, b"x"),
        "send_nowait": lambda: store.send_nowait(A, b"x"),
        "send_many": lambda: store.send_many(A, [b"x"]),
        "receive": lambda: store.receive(A),
        "receive waiting": lambda: store.receive(A, None),
        "receive of a new one": lambda: store.receive(C, None),
        "receive of a subscription": lambda: store.receive(T, None, DESK.key),
        "listen": lambda: store.listen(A, print),
        "browse": lambda: list(store.browse(A)),
        "browse of a new one": lambda: list(store.browse(C)),
        "ack": lambda: store.ack([message]),
        "release": lambda: store.release([message]),
        "release undelivered": lambda: store.release([message], delivered=False),
        "claim": lambda: store.claim(message),
        "unclaim": lambda: store.unclaim([claimed]),
        "take_undelivered": store.take_undelivered,
        "subscribe": lambda: store.subscribe(DESK),
        "unsubscribe": lambda: store.unsubscribe(T, DESK.key),
        "subscriptions": store.subscriptions,
        "commit": lambda: store.commit([(A, Outgoing(b"x"))], [claimed]),
        "reserve": lambda: store.reserve([(A, Outgoing(b"x"))]),
        "prepare": lambda: store.prepare(bytes(32), [bytes(16)], [(A, Outgoing(b"x"))], [claimed], True),
        "commit_prepared": lambda: store.commit_prepared(bytes(32)),
        "rollback_prepared": lambda: store.rollback_prepared(bytes(32)),
        "recover_prepared": store.recover_prepared,
        "committed": store.committed,
        "forget": lambda: store.forget([bytes(32)]),
        "sync": store.sync,
        "purge": lambda: store.purge(A),
        "purge of a subscription": lambda: store.purge(T, DESK.key),
        "delete": lambda: store.delete(A),
        "delete of a new one": lambda: store.delete(C),
        "destinations": store.destinations,
        "depth": lambda: store.depth(A),
        "depth of a subscription": lambda: store.depth(T, DESK.key),
        "depth of a new one": lambda: store.depth(C),
        "reclaim": store.reclaim,
        "compact": store.compact,
        "stats": store.stats,
        "check": lambda: list(store.check()),
    }


def outcomes(calls: dict[str, Callable[[], object]]) -> dict[str, str]:
    """What each raised."""
    found = {}
    for name, call in calls.items():
        try:
            found[name] = f"returned {call()!r}"
        except AnabranchError as error:
            found[name] = type(error).__name__
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


class LifecycleContract:
    @survives
    def test_reopened_it_holds_the_same(self, disk: Disk, store: Store) -> None:
        store.send_many(A, [str(n).encode() for n in range(100)])
        store.send(B, b"b")
        for _ in range(30):
            take(store).ack()
        seqs = [m.seq for m in store.browse(A)]
        for _ in range(3):
            store = disk.later(store, "closed")
            assert [m.seq for m in store.browse(A)] == seqs
            assert bodies(store) == [str(n).encode() for n in range(30, 100)]
            assert bodies(store, B) == [b"b"]
            assert_whole(store)
        assert store.send(A, b"new").seq > max(seqs)

    @survives
    def test_crashed_it_holds_the_same(self, disk: Disk, store: Store) -> None:
        for generation in range(4):
            for n in range(20):
                store.send(A, f"{generation}.{n}".encode())
            for _ in range(10):
                take(store).ack()
            expected = bodies(store)
            store = disk.crash(store)
            assert bodies(store) == expected
            assert_whole(store)
        assert len(drain(store)) == 40

    @survives
    def test_seqs_are_never_used_twice(self, disk: Disk, store: Store) -> None:
        last = 0
        for generation in range(6):
            seq = store.send(A, b"x").seq
            assert seq > last
            last = seq
            take(store).ack()
            store = disk.later(store, "crashed" if generation % 2 else "closed")

    def test_close_is_idempotent(self, disk: Disk, store: Store) -> None:
        store.close()
        store.close()

    def test_the_same_object_opens_again(self, disk: Disk, store: Store) -> None:
        store.send(A, b"x")
        store.close()
        store.open()
        assert drain(store) == ([] if disk.volatile else [b"x"])
        store.send(A, b"y")
        assert drain(store) == [b"y"]
        store.close()

    def test_each_has_an_id(self, disk: Disk, store: Store) -> None:
        assert len(store.store_id) == 16
        assert disk.create().store_id != store.store_id

    @survives
    def test_the_id_is_for_life(self, disk: Disk, store: Store) -> None:
        before = store.store_id
        store.close()
        assert disk.reopen(store).store_id == before

    def test_a_closed_store_refuses_everything(self, store: Store) -> None:
        store.send_many(A, [b"x"] * 3)
        message, claimed = take(store), take(store)
        store.claim(claimed)
        calls = every_call(store, message, claimed)
        store.close()
        assert outcomes(calls) == dict.fromkeys(calls, "ClosedError")

    def test_a_store_that_was_never_opened_refuses_everything(self, disk: Disk, store: Store) -> None:
        store.send_many(A, [b"x"] * 3)
        message, claimed = take(store), take(store)
        fresh = disk.unopened(store)
        calls = every_call(fresh, message, claimed)
        assert outcomes(calls) == dict.fromkeys(calls, "ClosedError")
        fresh.close()

    def test_one_owner(self, disk: Disk, store: Store) -> None:
        store.send(A, b"x")
        with pytest.raises(StoreLockedError, match=disk.owner):
            disk.unopened(store).open()
        with pytest.raises(StoreLockedError):
            store.open()
        assert drain(store) == [b"x"]

    def test_a_forked_child_is_refused(self, store: Store) -> None:
        """It can neither use nor harm the store; the parent goes on (invariant 8)."""
        store.send_many(A, [b"1", b"2", b"3"])
        message, claimed = take(store), take(store)
        store.claim(claimed)
        calls = every_call(store, message, claimed)
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:  # pragma: no cover
            found = repr(outcomes(calls))
            store.close()
            os.write(writer, found.encode())
            os._exit(0)
        os.close(writer)
        status = reaped(pid)
        with os.fdopen(reader) as pipe:
            assert pipe.read() == repr(dict.fromkeys(calls, "ClosedError"))
        assert status == 0
        store.send(A, b"4")
        message.ack()
        store.unclaim([claimed])
        assert drain(store) == [b"2", b"3", b"4"]
        assert_whole(store)

    def test_a_forked_child_does_not_unlock(self, disk: Disk, store: Store) -> None:
        store.send(A, b"x")
        pid = os.fork()
        if pid == 0:  # pragma: no cover
            store.close()
            del store
            os._exit(0)
        assert reaped(pid) == 0
        with pytest.raises(StoreLockedError):
            disk.unopened(store).open()

    def test_retire(self, disk: Disk, store: Store) -> None:
        store.send(A, b"x")
        message = take(store)
        assert not store.retire()
        store.send(A, b"y")
        message.release()
        with Parallel(lambda: store.receive(B, None)) as receiver:
            eventually(lambda: store.stats().waiting == 1)
            assert not store.retire()
            store.send(B, b"z")
            receiver.result().release()
        if disk.volatile:  # what it holds would be lost, and noticed
            assert not store.retire()
            store.purge(A)
            store.purge(B)
        assert store.retire()
        for call in (lambda: store.send(A, b"x"), lambda: store.receive(A)):
            with pytest.raises(ClosedError):
                call()
        store.close()
        store.open()
        assert drain(store) == ([] if disk.volatile else [b"x", b"y"])

    def test_one_that_is_to_be_removed_retires_empty(self, store: Store) -> None:
        store.send(A, b"x")
        take(store).ack()
        assert not store.retire(to_remove=True)  # its destination is there still
        store.delete(A)
        assert store.retire(to_remove=True)

    @survives
    def test_retire_loses_nothing_that_is_under_way(self, disk: Disk, store: Store) -> None:
        futures = [store.send_nowait(A, str(n).encode()) for n in range(100)]
        assert store.retire()
        store.close()
        assert [future.result(PATIENCE).duplicate for future in futures] == [False] * 100
        assert disk.reopen(store).depth(A) == 100

    # What it says of itself

    def test_stats(self, disk: Disk, store: Store) -> None:
        assert (store.stats().messages, store.stats().destinations) == (0, {})
        store.send_many(A, [b"x"] * 5)
        store.send(B, b"y")
        store.send(C, b"z")
        message = take(store)
        take(store)
        take(store, B).ack()
        message.ack()
        stats = store.stats()
        assert stats.name == store.name
        assert (stats.messages, stats.leased, stats.sends, stats.acks) == (5, 1, 7, 2)
        assert stats.destinations == {A: 4, B: 0, C: 1}
        assert stats.batches > 0
        assert stats.failed is None

    @survives
    def test_stats_begin_again(self, disk: Disk, store: Store) -> None:
        """What is held is told at once, what was done is counted since open."""
        store.send_many(A, [b"x"] * 5)
        store.send(B, b"y")
        store.send(C, b"z")
        take(store)
        take(store, B).ack()
        take(store).ack()
        store.close()
        stats = disk.reopen(store).stats()
        assert (stats.messages, stats.leased, stats.sends, stats.acks) == (5, 0, 0, 0)
        assert stats.destinations == {A: 4, B: 0, C: 1}

    def test_destinations_stay_when_empty(self, disk: Disk, store: Store) -> None:
        store.send(A, b"x")
        store.send(C, b"x")
        drain(store)
        assert set(store.destinations()) == {A, C}
        assert set(disk.later(store, "closed").destinations()) == {A, C}

    def test_what_is_declared_is_there(self, disk: Disk, store: Store, place: str) -> None:
        """Empty, and durable whatever the policy; said again it changes nothing, and `delete` undoes it."""
        declared = {A, T, M}
        for _ in range(2):
            for destination in declared:
                store.declare(destination)
        store.send(B, b"x")
        store.declare(B)
        store = disk.later(store, place)
        assert set(store.destinations()) == {*declared, B}
        assert (store.depth(A), store.depth(B), store.stats().messages) == (0, 1, 1)
        store.send(A, b"1")
        store.declare(A)
        assert (drain(store), store.delete(A), store.delete(M), store.delete(T)) == ([b"1"], 0, 0, 0)
        store.declare(C)
        store = disk.later(store, place)
        assert set(store.destinations()) == {B, C}
        assert_whole(store)

    def test_asking_creates_nothing(self, store: Store) -> None:
        store.receive(A)
        store.depth(A)
        store.purge(A)
        list(store.browse(A))
        assert list(store.destinations()) == []
        assert store.stats().destinations == {}

    def test_check_of_a_whole_store(self, store: Store) -> None:
        assert_whole(store)
        store.send_many(A, [b"x" * 100] * 100)
        store.send(B, b"y")
        for _ in range(50):
            take(store).ack()
        take(store)
        store.purge(B)
        assert_whole(store)

    def test_compact_changes_nothing_to_see(self, disk: Disk, store: Store) -> None:
        store.subscribe(DESK)
        kept = []
        for n in range(6):
            store.send(B, b"keep %d" % n, {"n": n}, f"id-{n}")
            store.send(T, b"told %d" % n)
            store.send_many(A, [b"x" * 1000] * 60)
            kept.append(b"keep %d" % n)
            drain(store)
        held = take(store, B)
        take(store, B).release()
        assert store.compact() >= 0
        assert_whole(store)
        held.release()
        assert (bodies(store, A), bodies(store, B), store.depth(T, DESK.key)) == ([], kept, 6)
        again = disk.later(store)
        if not store.volatile:
            assert bodies(again, B) == kept
            assert again.send(B, b"x", None, "id-3").duplicate
            assert take(again, B).deliveries == 2
        again.compact()
        assert drain(again, T, DESK.key) == [b"told %d" % n for n in range(6)]
        assert_whole(again)

    def test_reclaim_changes_nothing_to_see(self, disk: Disk, store: Store) -> None:
        store.send_many(A, [b"x" * 1000] * 300)
        store.send(B, b"keep", None, "id")
        drain(store)
        store.reclaim()
        assert (bodies(store, A), bodies(store, B)) == ([], [b"keep"])
        assert_whole(store)
        again = disk.later(store)
        assert (bodies(again, A), bodies(again, B)) == ([], [b"keep"])
        assert again.send(B, b"x", None, "id").duplicate
        assert_whole(again)
