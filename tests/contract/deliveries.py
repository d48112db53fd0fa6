"""The contract of counted deliveries: how often a message was given back, and that it stops at the limit."""

from __future__ import annotations

import pytest

from anabranch.adapters.core import Store
from anabranch.adapters.core.messages import DELIVERY_LIMIT, Message, Outgoing
from anabranch.adapters.core.store_types import Subscription

from .disk import A, B, Disk, T, assert_whole, bodies, drain, drain_at_once, eventually, survives, take
from .expiring import messages_of, undelivered
from .preparing import claim, prepare

LIMITED = {"max_deliveries": 3, "dead_letter": "dlq"}
DESK, BOOK = Subscription(T, "desk"), Subscription(T, "book")


def counts(store: Store) -> list[int]:
    """How often each of A has come back."""
    return [message.deliveries for message in store.browse(A)]


def spend(store: Store, times: int = 3) -> None:
    """The first of A comes back so often."""
    for _ in range(times):
        take(store).release()


class DeliveriesContract:
    def test_they_are_counted_from_one(self, store: Store) -> None:
        store.send_many(A, [b"1", b"2"])
        for expected in range(1, 6):
            message = take(store)
            assert (message.body, message.deliveries, message.redelivered) == (b"1", expected, expected > 1)
            assert counts(store) == [expected - 1, 0]
            message.release()
        assert counts(store) == [5, 0]
        assert [take(store).deliveries for _ in range(2)] == [6, 1]

    def test_one_that_was_not_delivered_is_not_counted(self, store: Store) -> None:
        """Such as one that an interface looked up ahead and nobody saw."""
        store.send_many(A, [b"1", b"2"])
        for _ in range(3):
            message = take(store)
            assert message.deliveries == 1
            store.release([message], delivered=False)
        take(store).release()
        message = take(store)
        assert message.deliveries == 2
        store.release([message], delivered=False)
        assert counts(store) == [1, 0]

    def test_many_at_once(self, store: Store) -> None:
        store.send_many(A, [str(n).encode() for n in range(100)])
        store.release([take(store) for _ in range(60)])
        store.release([take(store) for _ in range(30)])
        assert counts(store) == [2] * 30 + [1] * 30 + [0] * 40

    def test_a_rollback_counts(self, disk: Disk, store: Store, place: str) -> None:
        """That of a transaction in one store, and that of a branch, wherever it is told."""
        store.send_many(A, [b"1", b"2", b"3"])
        messages = [claim(store) for _ in range(2)]
        store.unclaim(messages)
        assert counts(store) == [1, 1, 0]
        name = prepare(store, 1, (), [claim(store), claim(store)])
        assert counts(store) == [1, 1, 0]
        store = disk.later(store, place)
        store.rollback_prepared(name).wait()
        assert counts(store) == [2, 2, 0]
        assert [take(store).deliveries for _ in range(3)] == [3, 3, 1]

    def test_they_are_kept(self, disk: Disk, store: Store, place: str) -> None:
        store.send_many(A, [str(n).encode() for n in range(5)])
        store.release([take(store) for _ in range(3)])
        first = take(store)
        first.release()
        store = disk.later(store, place)
        assert counts(store) == [2, 1, 1, 0, 0]
        store.release([take(store) for _ in range(2)])
        take(store).ack()
        store = disk.later(store, place)
        assert counts(store) == [2, 1, 0, 0]
        assert [take(store).deliveries for _ in range(4)] == [3, 2, 1, 1]
        assert_whole(store)

    @survives
    @pytest.mark.parametrize("closed", [False, True])
    def test_a_process_that_ends_counts_nothing(self, disk: Disk, store: Store, closed: bool) -> None:
        """It is not known what it did with what it held: neither was it given back."""
        store.send_many(A, [b"1", b"2"])
        take(store).release()
        take(store)
        store.claim(take(store))
        store = disk.later(store, "closed" if closed else "crashed")
        assert [take(store).deliveries for _ in range(2)] == [2, 1]

    @survives
    def test_they_outlive_many_restarts_and_reclaiming(self, disk: Disk, store: Store) -> None:
        store.send_many(A, [b"1", b"2", b"3"])
        for generation in range(1, 6):
            store.release([take(store) for _ in range(2)])
            store.send_many(B, [b"x" * 1000] * 150)
            drain_at_once(store, B)
            store.reclaim()
            store = disk.later(store, "closed" if generation % 2 else "crashed")
            assert counts(store) == [generation, generation, 0]
        assert_whole(store)

    def test_a_count_costs_no_message_its_place(self, disk: Disk, store: Store, place: str) -> None:
        store.send_many(A, [str(n).encode() for n in range(100)])
        for _ in range(3):
            messages = [take(store) for _ in range(10)]
            store.release(messages[::2])
            store.release(messages[1::2])
        store = disk.later(store, place)
        assert drain(store) == [str(n).encode() for n in range(100)]

    def test_how_often_messages_come_again_is_counted(self, disk: Disk, place: str) -> None:
        """However they are received. One that nobody had seen does not come again, nor does one that goes to the dead
        letters."""
        store = disk.create(**LIMITED)
        store.send_many(A, [b"1", b"2", b"3"])
        unseen, *others = store.receive_many(A, 3)
        store.release([unseen], delivered=False)
        store.release(others)
        assert store.stats().redelivered == 0
        store.release(store.receive_many(A, 3))
        assert store.stats().redelivered == 2
        heard: list[Message] = []
        listener = store.listen(A, heard.append, credit=3)
        eventually(lambda: len(heard) == 3)
        listener.close()
        assert store.stats().redelivered == 5
        store.release(heard)
        store = disk.later(store, place)
        before = store.stats().redelivered
        assert (take(store).body, len(undelivered(store))) == (b"1", 2)
        assert store.stats().redelivered == before + 1

    def test_what_a_watch_finds_again_is_counted(self, store: Store) -> None:
        store.send(A, b"1")
        for times in range(3):
            message = store.receive_or_watch(A, lambda closing: None)
            assert isinstance(message, Message) and store.stats().redelivered == times
            message.release()

    # Too often

    def test_one_that_comes_back_too_often_stops(self, disk: Disk, place: str) -> None:
        store = disk.create(**LIMITED)
        store.send_many(A, [b"1", b"2"])
        spend(store, 2)
        store = disk.later(store, place)
        assert undelivered(store) == []
        message = take(store)
        assert (message.body, message.deliveries) == (b"1", 3)
        message.release()
        assert take(store).body == b"2"
        assert store.receive(A) is None

    def test_a_spent_one_is_handed_out(self, disk: Disk, place: str) -> None:
        store = disk.create(**LIMITED)
        store.send_many(A, [Outgoing(b"1", {"h": 1}, "id"), b"2"])
        spend(store)
        store = disk.later(store, place)
        assert take(store).body == b"2"
        assert store.receive(A) is None
        assert (bodies(store), counts(store), store.depth(A)) == ([b"1", b"2"], [3, 0], 2)
        ((message, reason),) = undelivered(store)
        assert (message.body, message.headers, message.message_id, reason) == (b"1", {"h": 1}, "id", DELIVERY_LIMIT)
        assert (message.leased, message.deliveries, message.subscription) == (True, 4, None)
        assert undelivered(store) == []
        message.ack()
        assert (bodies(store), undelivered(store)) == ([b"2"], [])
        assert_whole(store)

    def test_a_spent_one_that_is_given_back(self, disk: Disk) -> None:
        store = disk.create(**LIMITED)
        store.send(A, b"1")
        spend(store)
        for delivered in (False, True, False):
            ((message, reason),) = undelivered(store)
            assert reason == DELIVERY_LIMIT
            store.release([message], delivered)
            assert store.receive(A) is None

    def test_rollbacks_spend_it_too(self, disk: Disk, place: str) -> None:
        store = disk.create(**LIMITED)
        store.send_many(A, [b"1", b"2"])
        store.unclaim([claim(store)])
        take(store).release()
        name = prepare(store, 1, (), [claim(store)])
        store = disk.later(store, place)
        assert undelivered(store) == []
        store.rollback_prepared(name).wait()
        assert take(store).body == b"2"
        assert [message.body for message in messages_of(undelivered(store))] == [b"1"]

    @pytest.mark.parametrize("priorities", [False, True])
    def test_one_that_came_back_before_it_was_looked_up_stops_too(
        self, disk: Disk, place: str, priorities: bool
    ) -> None:
        store = disk.create(max_deliveries=2, dead_letter="dlq", priorities=priorities)
        store.send(A, b"1")
        name = prepare(store, 1, (), [claim(store)])
        store = disk.later(store, place)
        store.rollback_prepared(name).wait()
        message = take(store)
        assert message.deliveries == 2
        message.release()
        assert store.receive(A) is None
        assert [message.body for message in messages_of(undelivered(store))] == [b"1"]

    def test_more_than_are_asked_for_at_once(self, disk: Disk, place: str) -> None:
        store = disk.create(max_deliveries=1, dead_letter="dlq")
        store.send_many(A, [str(n).encode() for n in range(250)])
        store.release([take(store) for _ in range(230)])
        store = disk.later(store, place)
        assert take(store).body == b"230"
        seen = []
        for expected in (100, 100, 30, 0):
            found = undelivered(store)
            assert len(found) == expected
            seen += [message.body for message in messages_of(found)]
            store.ack(messages_of(found))
        assert sorted(seen, key=int) == [str(n).encode() for n in range(230)]

    def test_expired_and_spent_it_is_handed_out_once(self, disk: Disk) -> None:
        store = disk.create(**LIMITED)
        store.send(A, b"1", expires_at_ms=1)
        ((message, _),) = undelivered(store)
        for _ in range(3):
            message.release()
            ((message, _),) = undelivered(store)
        message.ack()
        assert (undelivered(store), store.depth(A)) == ([], 0)

    def test_purge_removes_spent_ones(self, disk: Disk) -> None:
        store = disk.create(**LIMITED)
        store.send_many(A, [b"1", b"2"])
        spend(store)
        assert store.purge(A) == 2
        assert (undelivered(store), store.depth(A)) == ([], 0)

    @survives
    def test_the_limit_can_be_changed(self, disk: Disk) -> None:
        """It is told by the counts whatever limit they came about under."""
        store = disk.create()
        store.send_many(A, [b"1", b"2", b"3"])
        spend(store, 5)
        store = disk.reopen(store, **LIMITED)
        assert take(store).body == b"2"
        assert [message.body for message in messages_of(undelivered(store))] == [b"1"]
        store = disk.reopen(store, max_deliveries=6)
        assert undelivered(store) == []
        assert (take(store).body, take(store).body) == (b"1", b"2")

    # Of topics

    def test_each_subscription_counts_for_itself(self, disk: Disk, place: str) -> None:
        store = disk.create(**LIMITED)
        store.subscribe(DESK)
        store.subscribe(BOOK)
        store.send_many(T, [b"1", b"2"])
        for _ in range(2):
            take(store, T, 0, DESK.key).release()
        take(store, T, 0, BOOK.key).release()
        store = disk.later(store, place)
        message = take(store, T, 0, DESK.key)
        assert (message.body, message.deliveries) == (b"1", 3)
        assert take(store, T, 0, BOOK.key).deliveries == 2
        message.release()
        ((lost, reason),) = undelivered(store)
        assert (lost.body, lost.subscription, reason) == (b"1", DESK.key, DELIVERY_LIMIT)
        lost.ack()
        assert (bodies(store, T, DESK.key), bodies(store, T, BOOK.key)) == ([b"2"], [b"1", b"2"])
        assert_whole(store)
