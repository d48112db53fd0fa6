"""What goes by the thousand: a large queue or topic is deleted, a subscription of a large topic ends."""

from __future__ import annotations

from queue import SimpleQueue

import pytest

from anabranch.adapters.core import Store
from anabranch.adapters.core.messages import Message, Outgoing
from anabranch.adapters.core.operations.table import AT_ONCE
from anabranch.adapters.core.service import purging
from anabranch.adapters.core.store_types import Change, Subscription
from anabranch.policies.errors import UnknownMessageError

from .disk import PATIENCE, A, B, Disk, Parallel, T, assert_whole, bodies, drain, take

MANY = AT_ONCE + 104
"""More than any store removes in one go, and than two goes of pages."""
DESK, BOOK = Subscription(T, "desk"), Subscription(T, "book")


class RemovingContract:
    def test_delete_of_many(self, disk: Disk, store: Store, place: str) -> None:
        store.send_many(A, [b"x"] * MANY)
        store.send(B, b"b")
        take(store)
        assert store.delete(A) == MANY
        assert (store.depth(A), store.stats().messages, list(store.destinations())) == (0, 1, [B])
        store = disk.later(store, place)
        store.send(A, b"new")
        for view in disk.views(store):
            assert (bodies(view), bodies(view, B), view.depth(A)) == ([b"new"], [b"b"], 1)
            assert_whole(view)
        assert store.delete(A) == 1

    def test_delete_of_a_topic_with_many(self, disk: Disk, store: Store, place: str) -> None:
        for subscription in (DESK, BOOK):
            store.subscribe(subscription)
        store.send_many(T, [b"x"] * MANY)
        for _ in range(3):
            take(store, T, 0, DESK.key).ack()
            take(store, T, 0, BOOK.key).release()
        assert store.delete(T) == MANY
        store = disk.later(store, place)
        store.subscribe(DESK)
        store.send(T, b"new")
        for view in disk.views(store):
            assert (bodies(view, T), list(view.subscriptions()), view.depth(T, DESK.key)) == ([b"new"], [DESK], 1)
            assert_whole(view)

    def test_unsubscribe_from_many(self, disk: Disk, store: Store, place: str) -> None:
        """What others have yet to ack stays; what only the one was to have goes."""
        for subscription in (DESK, BOOK):
            store.subscribe(subscription)
        store.send_many(T, [str(n).encode() for n in range(MANY)])
        held = [take(store, T, 0, BOOK.key) for _ in range(100)]
        store.ack(held[::2])
        for _ in range(3):
            take(store, T, 0, DESK.key).ack()
        left = [str(n).encode() for n in range(MANY) if n % 2 or n >= 100]
        assert store.unsubscribe(T, DESK.key) == MANY - 3
        assert (store.depth(T), store.depth(T, BOOK.key)) == (len(left), len(left))
        assert store.subscribe(DESK)
        store = disk.later(store, place)
        store.send(T, b"new")
        for view in disk.views(store):
            assert (bodies(view, T, BOOK.key), bodies(view, T, DESK.key)) == ([*left, b"new"], [b"new"])
            assert view.depth(T) == len(left) + 1
            assert_whole(view)
        assert store.unsubscribe(T, BOOK.key) == len(left) + 1
        assert (store.depth(T), drain(store, T, DESK.key), store.depth(T)) == (1, [b"new"], 0)
        assert_whole(store)

    def test_what_was_acked_stays_so_while_what_one_that_ended_left_goes(
        self, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It may wait for the ended one alone: it neither expires for others nor comes back to them."""
        monkeypatch.setattr(purging, "DROP_SECONDS", 3600.0)
        for subscription in (DESK, BOOK):
            store.subscribe(subscription)
        store.send_many(T, [Outgoing(b"x", expires_at_ms=1)] * MANY)
        assert store.purge(T, BOOK.key) == MANY
        store.commit([], [], None, [Change(DESK, False)])
        assert store.take_undelivered() == []
        assert (store.depth(T, BOOK.key), store.counts(T, BOOK.key)) == (0, (0, 0, 0, 0))
        assert_whole(store)
        assert store.depth(T) == 0

    def test_what_one_that_ended_left_is_for_nobody_who_begins(
        self, disk: Disk, store: Store, place: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Not even for a retroactive one, to which what others have yet to ack comes; persistent or not."""
        monkeypatch.setattr(purging, "DROP_SECONDS", 3600.0)
        for subscription in (DESK, BOOK):
            store.subscribe(subscription)
        store.send_many(T, [b"x"] * MANY)
        store.send_many(T, [Outgoing(b"x", persistent=False)] * MANY)
        store.purge(T, BOOK.key)
        store.send(T, b"new")
        store.commit([], [], None, [Change(DESK, False)])
        for name in ("late", "later"):
            late = Subscription(T, name)
            store.subscribe(late, retroactive=True)
            assert (store.depth(T, late.key), bodies(store, T, late.key)) == (1, [b"new"])
        assert [message.body for message in iter(lambda: store.receive(T, 0, late.key), None)] == [b"new"]
        assert_whole(store)
        assert store.depth(T) == 1
        store = disk.later(store, place)
        for key in (BOOK.key, ("", "late"), ("", "later")):
            assert bodies(store, T, key) == [b"new"]
        assert_whole(store)

    def test_who_waits_at_a_deleted_queue_gets_what_comes_to_the_new_one(self, store: Store) -> None:
        store.send(A, b"old")
        take(store)
        with Parallel(lambda: store.receive(A, None)) as receiver:
            assert receiver.outlives(0.05)
            assert store.delete(A) == 1
            assert not store.receive(A)
            store.send(A, b"new")
            message = receiver.result()
        assert message.body == b"new"
        message.ack()
        assert store.depth(A) == 0
        assert_whole(store)

    def test_a_listener_at_a_deleted_queue_hears_what_comes_to_the_new_one(self, store: Store) -> None:
        heard: SimpleQueue[Message] = SimpleQueue()
        listener = store.listen(A, heard.put, credit=10)
        for persistent in (True, False, True):
            store.send(A, b"old", persistent=persistent)
            old = heard.get(timeout=PATIENCE)
            assert store.delete(A) == 1
            with pytest.raises(UnknownMessageError):
                old.ack()
            store.send(A, b"new", persistent=persistent)
            message = heard.get(timeout=PATIENCE)
            assert message.body == b"new"
            message.ack()
        listener.close()
        store.send(A, b"later")
        assert (drain(store), heard.empty()) == ([b"later"], True)

    def test_delete_of_many_that_are_persistent_or_not(self, disk: Disk, store: Store, place: str) -> None:
        """Leased ones too. The name is in use again at once, and its ids are new there."""
        store.send_many(A, [Outgoing(b"x", message_id=str(n), persistent=bool(n % 2)) for n in range(2 * MANY)])
        store.send(B, b"b", persistent=False)
        leased = [take(store) for _ in range(4)]
        leased.pop().release()
        assert store.delete(A) == 2 * MANY
        assert (store.receive(A), store.depth(A), list(store.destinations())) == (None, 0, [B])
        for message in leased:
            with pytest.raises(UnknownMessageError):
                message.ack()
        receipts = store.send_many(A, [Outgoing(b"%d" % n, message_id=str(n), persistent=n < 2) for n in range(4)])
        assert not any(receipt.duplicate for receipt in receipts)
        assert (bodies(store), store.depth(A), store.stats().messages) == ([b"0", b"1", b"2", b"3"], 4, 5)
        assert_whole(store)
        kept = [b"0", b"1", b"2", b"3"] if store.volatile or place == "here" else [b"0", b"1"]
        store = disk.later(store, place)
        assert (bodies(store), store.depth(A)) == (kept, len(kept))
        assert store.delete(A) == len(kept)
        assert store.receive(A) is None
        assert_whole(store)

    def test_delete_of_a_topic_with_many_that_are_persistent_or_not(self, store: Store) -> None:
        for subscription in (DESK, BOOK):
            store.subscribe(subscription)
        store.send_many(T, [Outgoing(b"x", persistent=bool(n % 2)) for n in range(2 * MANY)])
        for _ in range(2):
            take(store, T, 0, DESK.key).ack()
            take(store, T, 0, BOOK.key)
        assert store.unsubscribe(T, DESK.key) == 2 * MANY - 2
        assert (store.subscribe(DESK), store.depth(T), store.depth(T, BOOK.key)) == (True, 2 * MANY, 2 * MANY)
        assert store.delete(T) == 2 * MANY
        assert (list(store.destinations()), list(store.subscriptions())) == ([], [])
        store.subscribe(DESK)
        store.send(T, b"new", persistent=False)
        store.send(T, b"newer")
        assert drain(store, T, DESK.key) == [b"new", b"newer"]
        assert (store.depth(T), store.stats().messages) == (0, 0)
        assert_whole(store)
