"""The contract of how old the message is that is received next (Counts.oldest_ready_seconds)."""

from __future__ import annotations

import pytest

from anabranch.adapters.core import Store
from anabranch.adapters.core.messages import Outgoing
from anabranch.adapters.core.store_types import Counts, Subscription

from .disk import A, B, Disk, T, assert_whole, drain, survives, take
from .expiring import HOUR, Clock
from .preparing import claim, prepare

DESK, BOOK = Subscription(T, "desk"), Subscription(T, "book")
HOURS = HOUR / 1000


def age(store: Store, subscription: Subscription | None = None) -> float | None:
    """In hours, of what is next."""
    destination = A if subscription is None else subscription.topic
    counts = store.counts(destination, None if subscription is None else subscription.key)
    assert (counts.oldest_ready_seconds is None) == (counts.ready == 0)
    return None if counts.oldest_ready_seconds is None else counts.oldest_ready_seconds / HOURS


class AgesContract:
    """Beside ExpiringContract, which has the clock."""

    def hourly(self, store: Store, clock: Clock, bodies: bytes = b"123") -> None:
        """A message an hour; the last was just sent."""
        for number in range(len(bodies)):
            store.send(A, bodies[number : number + 1])
            clock.offset_ms += HOUR
        clock.offset_ms -= HOUR

    def test_the_age_of_the_first_one_that_is_ready(self, disk: Disk, clock: Clock, store: Store, place: str) -> None:
        assert age(store) is None
        self.hourly(store, clock)
        store.sync()
        store = disk.later(store, place)
        assert age(store) == 2
        first, second = take(store), take(store)
        assert (first.body, second.body, age(store)) == (b"1", b"2", 0)
        clock.offset_ms += HOUR
        second.release()
        assert age(store) == 2  # as old as it is since it was sent
        take(store).ack()
        assert age(store) == 1
        take(store).ack()
        assert (age(store), store.counts(A)) == (None, Counts(0, 1))
        first.release()
        assert (age(store), drain(store), age(store)) == (3, [b"1"], None)
        assert_whole(store)

    def test_asking_for_the_age_takes_nothing_from_who_receives(self, store: Store, clock: Clock) -> None:
        self.hourly(store, clock)
        back = take(store)
        back.release()
        for expected in (b"1", b"2", b"3"):
            for _ in range(3):
                assert age(store) == 3 - int(expected)
            message = take(store)
            assert message.body == expected and message.deliveries == (2 if expected == b"1" else 1)
            message.ack()
        assert age(store) is None
        assert_whole(store)

    def test_the_age_of_what_waited_for_its_time_counts_from_when_it_was_sent(self, store: Store, clock: Clock) -> None:
        store.send(A, b"1", deliver_at_ms=clock.now + 2 * HOUR)
        assert age(store) is None
        clock.offset_ms = HOUR
        store.send(A, b"2")
        assert age(store) == 0
        clock.offset_ms = 3 * HOUR
        message = take(store)  # which brings what is due
        assert message.body == b"1"
        message.release()
        assert age(store) == 3

    def test_the_age_passes_what_has_expired_or_is_claimed(self, store: Store, clock: Clock) -> None:
        store.send(A, b"1", expires_at_ms=clock.now + HOUR)
        store.send(A, b"2")
        clock.offset_ms = HOUR
        store.send(A, b"3")
        clock.offset_ms = 2 * HOUR
        message = claim(store)
        assert message.body == b"2"
        branch = prepare(store, 1, [], [message])
        assert age(store) == 1
        store.rollback_prepared(branch).wait()
        assert age(store) == 2

    def test_the_age_of_messages_that_are_not_persistent(self, store: Store, clock: Clock) -> None:
        store.send_many(A, [Outgoing(b"1", persistent=False)])
        clock.offset_ms = HOUR
        store.send(A, b"2")
        assert age(store) == 1
        take(store).ack()
        assert age(store) == 0

    def test_with_priorities_the_age_is_the_most_urgent_one_s(self, disk: Disk, clock: Clock) -> None:
        store = disk.create(priorities=True)
        for number, priority in enumerate((4, 9, 9, 1)):
            store.send_many(A, [Outgoing(b"%d" % number, priority=priority)])
            clock.offset_ms += HOUR
        assert age(store) == 3
        taken = [take(store), take(store)]
        assert ([message.body for message in taken], age(store)) == ([b"1", b"2"], 4)
        taken[0].release()
        assert age(store) == 3

    def test_each_subscription_has_its_own_age(self, store: Store, clock: Clock) -> None:
        for subscription in (DESK, BOOK):
            store.subscribe(subscription)
        for body in (b"1", b"2"):
            store.send(T, body)
            clock.offset_ms += HOUR
        take(store, T, 0, DESK.key).ack()
        assert (age(store, DESK), age(store, BOOK)) == (1, 2)
        assert store.counts(T).oldest_ready_seconds == 2 * HOURS

    def test_an_age_where_the_clock_was_put_back(self, store: Store, clock: Clock) -> None:
        clock.offset_ms = HOUR
        store.send(A, b"1")
        clock.offset_ms = 0
        assert store.counts(A).oldest_ready_seconds == 0

    def test_two_counts_that_say_the_same_numbers_are_equal(self, store: Store, clock: Clock) -> None:
        """The age is said beside them, since it changes all the time."""
        self.hourly(store, clock)
        counts = store.counts(A)
        assert counts == Counts(3, 0) == (3, 0, 0, 0) and "oldest_ready_seconds=7200.0)" in repr(counts)
        assert store.counts(B) == Counts(0, 0)

    @survives
    @pytest.mark.parametrize("ended", ["closed", "crashed"])
    def test_the_age_after_a_restart(self, disk: Disk, clock: Clock, store: Store, ended: str) -> None:
        self.hourly(store, clock)
        store.sync()
        assert age(disk.later(store, ended)) == 2
