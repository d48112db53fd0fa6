"""The contract of watch, for who receives without a thread, and of last_seq."""

from __future__ import annotations

import threading

import pytest

from anabranch.adapters.base import Outgoing, Store, Subscription
from anabranch.policies.errors import ClosedError

from .disk import PATIENCE, A, B, Disk, Parallel, T, eventually, take
from .preparing import claim, prepare, to

DESK = Subscription(T, "desk")


class Bell:
    """What is called when a message may have become free."""

    def __init__(self) -> None:
        self.rung = 0
        self._event = threading.Event()

    def __call__(self) -> None:
        self.rung += 1
        self._event.set()

    def wait(self) -> bool:
        return self._event.wait(PATIENCE)


class WatchingContract:
    @pytest.mark.parametrize("how", ["send", "many", "nowait", "release", "unclaim", "commit", "prepared", "rollback"])
    def test_a_watch_rings_once(self, store: Store, how: str) -> None:
        """By then the message is there to be received."""
        store.send_many(A, [b"x"] * 2)
        message, claimed = take(store), claim(store)
        name = prepare(store, 1, to(A, b"x"))
        back = prepare(store, 2, (), [claimed])
        bell = Bell()
        store.watch(A, None, bell)
        if how == "send":
            store.send(A, b"x")
        elif how == "many":
            store.send_many(A, [b"x"] * 5)
        elif how == "nowait":
            store.send_nowait(A, b"x")
        elif how == "release":
            message.release()
        elif how == "unclaim":
            store.claim(message)
            store.unclaim([message])
        elif how == "commit":
            store.commit([(A, Outgoing(b"x"))], [])
        elif how == "prepared":
            store.commit_prepared(name).wait()
        else:
            store.rollback_prepared(back).wait()
        assert bell.wait()
        eventually(lambda: store.receive(A) is not None)
        store.send(A, b"y")
        assert bell.rung == 1

    def test_a_watch_is_a_destinations(self, store: Store) -> None:
        bell, other = Bell(), Bell()
        store.watch(A, None, bell)
        store.watch(B, None, other)
        store.send(B, b"x")
        assert other.wait()
        store.send(A, b"x")
        assert bell.wait()

    def test_a_watch_of_a_subscription(self, store: Store) -> None:
        store.subscribe(DESK)
        bell = Bell()
        store.watch(T, DESK.key, bell)
        store.send(T, b"x")
        assert bell.wait()
        message = take(store, T, 0, DESK.key)
        again = Bell()
        store.watch(T, DESK.key, again)
        message.release()
        assert again.wait()

    def test_a_watch_that_has_ended_does_not_ring(self, store: Store) -> None:
        bell = Bell()
        end = store.watch(A, None, bell)
        other = Bell()
        end_other = store.watch(A, None, other)
        end()
        end()
        store.send(A, b"x")
        assert other.wait()
        end_other()
        assert (bell.rung, other.rung) == (0, 1)

    def test_a_watch_that_raises_harms_nobody(self, store: Store) -> None:
        def wrong() -> None:
            raise RuntimeError("a watcher's own affair")

        bell = Bell()
        store.watch(A, None, wrong)
        store.watch(A, None, bell)
        store.send(A, b"x")
        assert bell.wait()
        assert take(store).body == b"x"

    def test_a_watch_beside_a_receiver(self, store: Store) -> None:
        """Both are told; one of them is first."""
        bell = Bell()
        store.watch(A, None, bell)
        with Parallel(lambda: store.receive(A, None)) as receiver:
            assert receiver.outlives(0.05)
            store.send(A, b"x")
            assert receiver.result().body == b"x"
        assert bell.wait()

    def test_close_rings(self, store: Store) -> None:
        bell = Bell()
        store.watch(A, None, bell)
        store.close()
        assert bell.wait()
        with pytest.raises(ClosedError):
            store.receive(A)

    def test_unsubscribing_rings(self, store: Store) -> None:
        store.subscribe(DESK)
        bell = Bell()
        store.watch(T, DESK.key, bell)
        store.unsubscribe(T, DESK.key)
        assert bell.wait()

    def test_a_watched_store_does_not_retire(self, store: Store) -> None:
        bell = Bell()
        end = store.watch(A, None, bell)
        assert not store.retire()
        end()
        assert store.retire()

    def test_a_watch_that_has_rung_does_not_keep_it(self, store: Store) -> None:
        bell = Bell()
        store.watch(A, None, bell)
        store.send(A, b"x")
        assert bell.wait()
        take(store).ack()
        eventually(store.retire)

    # last_seq

    def test_last_seq(self, disk: Disk, store: Store) -> None:
        """What is sent comes behind it, whatever has become of what was sent before."""
        for place in ("here", "closed", "here", "crashed", "here"):
            before = store.last_seq
            sent = [r.seq for r in store.send_many(A, [b"x"] * 3)] + [store.send(T, b"to nobody").seq]
            assert min(sent) > before
            assert store.last_seq >= max(sent)
            take(store).ack()
            store.purge(A)
            store = disk.later(store, place)
            assert store.last_seq >= max(sent)

    def test_last_seq_after_a_branch(self, store: Store) -> None:
        name = prepare(store, 1, to(A, b"x", b"y"))
        before = store.last_seq
        seqs = [receipt.seq for receipt in store.commit_prepared(name).wait()]
        assert before < min(seqs) <= max(seqs) <= store.last_seq
