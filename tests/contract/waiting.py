"""The contract of messages that wait for their time: sent to be delivered later, or given back with a delay."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest

from anabranch.adapters.core import Store
from anabranch.adapters.core.messages import DELIVERY_LIMIT, EXPIRED, Message, Outgoing
from anabranch.adapters.core.store_types import Counts, Settlement, Subscription
from anabranch.policies.names.destination import Destination

from .disk import (
    PATIENCE,
    A,
    B,
    Disk,
    Parallel,
    T,
    assert_whole,
    bodies,
    drain,
    drain_at_once,
    eventually,
    in_one_store,
    survives,
    take,
)
from .expiring import HOUR, Clock, messages_of, undelivered
from .preparing import claim, prepare

YEAR = 366 * 24 * HOUR
DESK, BOOK = Subscription(T, "desk"), Subscription(T, "book")
BACKOFF = {"delay": 60, "multiplier": 2, "max_delay": 150}


def later(clock: Clock, body: bytes, ms: int = HOUR, **others: Any) -> Outgoing:
    """A message that waits for so long."""
    return Outgoing(body, deliver_at_ms=clock.now + ms, **others)


def waiting(store: Store, destination: Destination = A, subscription: Any = None) -> int:
    return store.counts(destination, subscription).delayed


class WaitingContract:
    """Beside ExpiringContract, which has the clock."""

    # Sent to be delivered later

    def test_waiting_others_pass_it(self, disk: Disk, clock: Clock, store: Store, place: str) -> None:
        """However it was sent; then it is at its place."""
        due = clock.now + HOUR
        store.send(A, b"1", deliver_at_ms=due)
        store.send(A, b"2")
        store.send_many(A, [later(clock, b"3"), b"4", later(clock, b"5", 2 * HOUR)])
        store.send_nowait(A, b"6", deliver_at_ms=due).result(PATIENCE)
        store.commit([(A, later(clock, b"7")), (A, Outgoing(b"8"))], [])
        store.commit_prepared(prepare(store, 1, [(A, later(clock, b"9")), (A, Outgoing(b"0"))])).wait()
        store.sync()
        store = disk.later(store, place)
        everything = [b"1", b"2", b"3", b"4", b"5", b"6", b"7", b"8", b"9", b"0"]
        assert (bodies(store), store.depth(A), store.counts(A)) == (everything, 10, Counts(4, 0, 6))
        assert drain(store) == [b"2", b"4", b"8", b"0"]
        assert_whole(store)
        store = disk.later(store, place)
        store.send(A, b"x")
        clock.offset_ms = HOUR - 1
        assert drain(store) == [b"x"]
        clock.offset_ms = HOUR
        store = disk.later(store, place)
        store.send(A, b"y")
        assert drain(store) == [b"1", b"3", b"6", b"7", b"9", b"y"]
        assert (bodies(store), store.counts(A)) == ([b"5"], Counts(0, 0, 1))
        clock.offset_ms = 2 * HOUR
        assert (drain(store), store.counts(A), store.depth(A)) == ([b"5"], Counts(0, 0, 0), 0)
        assert_whole(store)

    def test_waiting_a_prepared_branch_waits_from_when_it_was_sent(
        self, disk: Disk, clock: Clock, store: Store, place: str
    ) -> None:
        name = prepare(store, 1, [(A, later(clock, b"1")), (A, Outgoing(b"2"))])
        store = disk.later(store, place)
        clock.offset_ms = HOUR // 2
        store.commit_prepared(name).wait()
        assert (drain(store), waiting(store)) == ([b"2"], 1)
        clock.offset_ms = HOUR
        assert drain(store) == [b"1"]
        assert_whole(store)

    def test_waiting_what_is_sent_twice_is_there_once(self, clock: Clock, store: Store) -> None:
        assert not store.send(A, b"1", message_id="x", deliver_at_ms=clock.now + HOUR).duplicate
        assert store.send(A, b"2", message_id="x", deliver_at_ms=clock.now + 1).duplicate
        assert store.send(A, b"3", message_id="x").duplicate
        found = store.find(A, "x")
        assert found is not None and found.body == b"1"
        clock.offset_ms = 1
        assert (drain(store), waiting(store)) == ([], 1)

    @pytest.mark.parametrize("order", ["forward", "backward", "random"])
    def test_waiting_many(self, disk: Disk, clock: Clock, store: Store, order: str, place: str) -> None:
        """They come back in the order in which they were sent, whatever that of their times."""
        count = disk.many_priorities
        numbers = list(range(count))
        if order != "forward":
            numbers.reverse()
        if order == "random":
            random.Random(1).shuffle(numbers)
        sent = [b"%d" % number for number in numbers]
        store.send_many(A, [later(clock, body, 1 + number) for body, number in zip(sent, numbers, strict=True)])
        store.send(A, b"free")
        store = disk.later(store, place)
        assert (drain(store), waiting(store)) == ([b"free"], count)
        clock.offset_ms = count // 2
        due = [body for body in sent if int(body) < count // 2]
        assert (drain_at_once(store), waiting(store)) == (due, count // 2)
        clock.offset_ms = count
        assert drain_at_once(store) == [body for body in sent if int(body) >= count // 2]
        assert_whole(store)

    def test_waiting_by_priority(self, disk: Disk, clock: Clock, place: str) -> None:
        store = disk.create(priorities=True)
        store.send_many(A, [later(clock, b"1", priority=9), Outgoing(b"2", priority=5), later(clock, b"3", priority=5)])
        store.send_many(A, [later(clock, b"4", 2 * HOUR, priority=5), Outgoing(b"5", priority=1), b"6"])
        store = disk.later(store, place)
        assert bodies(store) == [b"1", b"2", b"3", b"4", b"6", b"5"]
        assert take(store).body == b"2"
        clock.offset_ms = HOUR
        assert [take(store).body for _ in range(3)] == [b"1", b"3", b"6"]
        clock.offset_ms = 2 * HOUR
        assert [take(store).body for _ in range(2)] == [b"4", b"5"]
        assert_whole(store)

    def test_waiting_who_waits_gets_it(self, clock: Clock, store: Store) -> None:
        store.send(A, b"1", deliver_at_ms=clock.now + HOUR)
        with Parallel(lambda: take(store, timeout=PATIENCE)) as parallel:
            assert parallel.outlives(0.05)
            clock.offset_ms = HOUR
            assert parallel.result().body == b"1"

    def test_waiting_who_listens_gets_it(self, clock: Clock, store: Store) -> None:
        got: list[Message] = []
        listener = store.listen(A, got.append, credit=10)
        store.send(A, b"1", deliver_at_ms=clock.now + HOUR)
        store.send(A, b"2")
        eventually(lambda: len(got) == 1)
        clock.offset_ms = HOUR
        eventually(lambda: len(got) == 2)
        assert [message.body for message in got] == [b"2", b"1"]
        listener.close()

    def test_waiting_a_receiver_that_keeps_up_does_not_get_it(self, clock: Clock, store: Store) -> None:
        for number in range(10):
            store.send(A, b"%d" % number)
            assert drain(store) == [b"%d" % number]
            store.send(A, b"later", deliver_at_ms=clock.now + HOUR)
            assert (drain(store), waiting(store)) == ([], number + 1)
        clock.offset_ms = HOUR
        assert drain(store) == [b"later"] * 10

    # Given back

    def test_waiting_a_delay(self, disk: Disk, clock: Clock, store: Store, place: str) -> None:
        store.send_many(A, [b"1", b"2", b"3"])
        first, second = take(store), take(store)
        first.release(delay=3600)
        store.release([second], delivered=False, delay=7200.0)
        assert (store.counts(A), store.depth(A)) == (Counts(1, 0, 2), 3)
        store = disk.later(store, place)
        assert (drain(store), bodies(store), waiting(store)) == ([b"3"], [b"1", b"2"], 2)
        clock.offset_ms = HOUR
        message = take(store)
        assert (message.body, message.deliveries, store.receive(A, 0)) == (b"1", 2, None)
        store.release_nowait([message], delay=3600).result(PATIENCE)
        store = disk.later(store, place)
        assert store.receive(A, 0) is None
        clock.offset_ms = 2 * HOUR
        found = [take(store), take(store)]
        assert [(one.body, one.deliveries) for one in found] == [(b"1", 3), (b"2", 1)]
        store.release(found, delay=0)
        assert drain(store) == [b"1", b"2"]
        assert_whole(store)

    def test_waiting_the_policy_of_the_store(self, disk: Disk, clock: Clock, place: str) -> None:
        store = disk.create(redelivery=BACKOFF)
        store.send(A, b"1")
        for seconds in (60, 120, 150, 150):
            take(store).release()
            store = disk.later(store, place)
            clock.offset_ms += 1000 * seconds - 1
            assert store.receive(A, 0) is None
            clock.offset_ms += 1
        message = take(store)
        store.release([message], delivered=False)  # nobody has seen it
        take(store).release(delay=0)
        assert (take(store).deliveries, waiting(store)) == (6, 0)
        assert_whole(store)

    def test_waiting_a_rollback_is_a_return(self, disk: Disk, clock: Clock, place: str) -> None:
        """Of a transaction in one store, and of a branch, wherever it is told."""
        store = disk.create(redelivery=BACKOFF)
        store.send_many(A, [b"1", b"2", b"3"])
        store.unclaim([claim(store)])
        name = prepare(store, 1, (), [claim(store)])
        store = disk.later(store, place)
        store.rollback_prepared(name).wait()
        assert (drain(store), waiting(store)) == ([b"3"], 2)
        store = disk.later(store, place)
        clock.offset_ms = 60_000
        assert [take(store).deliveries for _ in range(2)] == [2, 2]
        assert_whole(store)

    def test_waiting_as_a_transaction_or_a_host_says(self, disk: Disk, clock: Clock, place: str) -> None:
        """What was claimed, and what is settled by token, is given back as by release."""
        store = disk.create(redelivery=BACKOFF)
        store.send_many(A, [b"1", b"2", b"3", b"4", b"5"])
        first, second = claim(store), claim(store)
        store.unclaim([first], delay=3600)
        store.unclaim([second], delivered=False)
        taken = [take(store) for _ in range(4)]
        assert [(one.body, one.deliveries) for one in taken] == [(b"2", 1), (b"3", 1), (b"4", 1), (b"5", 1)]
        two, three, four, five = (store.token(one) for one in taken)
        assert store.settle([two, "x"], Settlement.RELEASE, delay=3600)[0] is None
        assert store.settle_nowait([three], Settlement.RELEASE, delay=0).result(PATIENCE) == [None]
        assert store.settle([four], Settlement.RELEASE, delivered=False) == [None]
        assert store.settle_nowait([five], Settlement.RELEASE).result(PATIENCE) == [None]
        for wrong in (-1, float("nan"), "1"):
            with pytest.raises(TypeError if wrong == "1" else ValueError, match="delay"):
                store.settle([five], Settlement.RELEASE, delay=wrong)  # type: ignore[arg-type]
        store = disk.later(store, place)
        assert [(one.body, one.deliveries) for one in (take(store), take(store))] == [(b"3", 2), (b"4", 1)]
        assert waiting(store) == 3
        clock.offset_ms = 60_000
        assert [(one.body, one.deliveries) for one in (take(store),)] == [(b"5", 2)]
        clock.offset_ms = HOUR
        assert [(one.body, one.deliveries) for one in (take(store), take(store))] == [(b"1", 2), (b"2", 2)]
        assert_whole(store)

    def test_waiting_what_has_reached_the_limit_does_not_wait(self, disk: Disk, clock: Clock) -> None:
        store = disk.create(redelivery=BACKOFF, max_deliveries=2, dead_letter="dlq")
        store.send(A, b"1")
        take(store).release()
        assert undelivered(store) == []
        clock.offset_ms = 60_000
        take(store).release()
        ((message, reason),) = undelivered(store)
        assert (message.body, reason) == (b"1", DELIVERY_LIMIT)
        message.ack()
        assert_whole(store)

    def test_waiting_by_token_and_by_listeners(self, disk: Disk, clock: Clock) -> None:
        store = disk.create(redelivery=BACKOFF)
        store.send_many(A, [b"1", b"2"])

        def fail(message: Message) -> None:
            raise ValueError(message)

        listener = store.listen(A, fail, credit=2)
        eventually(lambda: store.counts(A) == Counts(0, 0, 2))
        listener.close()
        clock.offset_ms = 60_000
        assert drain(store) == [b"1", b"2"]

    @survives
    def test_waiting_it_outlives_many_restarts_and_reclaiming(self, disk: Disk, clock: Clock, store: Store) -> None:
        store.send_many(A, [b"1", later(clock, b"2", 10 * HOUR), b"3", later(clock, b"4", HOUR)])
        take(store).release(delay=5 * 3600)
        for generation in range(1, 6):
            store.send_many(B, [b"x" * 1000] * 150)
            drain_at_once(store, B)
            store.reclaim()
            store = disk.later(store, "closed" if generation % 2 else "crashed")
            assert (waiting(store), bodies(store)) == (3, [b"1", b"2", b"3", b"4"])
        assert_whole(store)
        for hours, expected in ((0, [b"3"]), (1, [b"4"]), (5, [b"1"]), (10, [b"2"])):
            clock.offset_ms = hours * HOUR
            assert drain(store) == expected

    # The clock

    @pytest.mark.parametrize("jump", [YEAR, -YEAR])
    def test_waiting_a_clock_that_jumps(self, disk: Disk, clock: Clock, store: Store, jump: int, place: str) -> None:
        """What has become due stays so."""
        store.send_many(A, [later(clock, b"1"), later(clock, b"2", 2 * HOUR), b"3"])
        clock.offset_ms = HOUR
        assert take(store).body == b"1"
        clock.offset_ms = jump
        store = disk.later(store, place)
        there = [b"2", b"3"] if jump > 0 else [b"3"]
        if place != "here" and not store.volatile:
            there = [b"1", *there]  # nobody holds it any more
        assert drain(store) == there
        store.send(A, b"4", deliver_at_ms=clock.now + 1)
        clock.offset_ms += 1
        assert drain(store) == [b"4"]
        clock.offset_ms = 2 * HOUR
        assert drain(store) == ([] if jump > 0 else [b"2"])
        assert_whole(store)

    # Beside what else becomes of messages

    def test_waiting_it_expires_while_it_waits(self, disk: Disk, clock: Clock, store: Store, place: str) -> None:
        store.send(A, b"1", expires_at_ms=clock.now + HOUR, deliver_at_ms=clock.now + 2 * HOUR)
        store.send(A, b"2", expires_at_ms=clock.now + 3 * HOUR, deliver_at_ms=clock.now + 2 * HOUR)
        store = disk.later(store, place)
        clock.offset_ms = HOUR
        ((message, reason),) = undelivered(store)
        assert (message.body, reason, waiting(store)) == (b"1", EXPIRED, 2)
        store.release([message], delivered=False)
        assert messages_of(undelivered(store))[0].body == b"1"
        clock.offset_ms = 2 * HOUR
        assert drain(store) == [b"2"]
        store = disk.later(store, place)
        for message in messages_of(undelivered(store)):
            message.ack()
        assert store.depth(A) == (1 if place == "here" or store.volatile else 0)
        assert_whole(store)

    def test_waiting_purge(self, disk: Disk, clock: Clock, store: Store, place: str) -> None:
        store.send_many(A, [later(clock, b"1"), b"2", later(clock, b"3"), b"4"])
        held = take(store)
        assert (store.purge(A), bodies(store), store.counts(A)) == (3, [b"2"], Counts(0, 1, 0))
        held.release(delay=1)
        store = disk.later(store, place)
        assert (store.purge(A), store.depth(A), waiting(store)) == (1, 0, 0)
        clock.offset_ms = HOUR
        assert store.receive(A, 0) is None
        assert_whole(store)

    def test_waiting_delete(self, disk: Disk, clock: Clock, store: Store, place: str) -> None:
        store.send_many(A, [later(clock, b"%d" % number) for number in range(20)])
        assert store.delete(A) == 20
        store.send(A, b"new", deliver_at_ms=clock.now + 2 * HOUR)
        store = disk.later(store, place)
        clock.offset_ms = HOUR
        assert (drain(store), store.depth(A), waiting(store)) == ([], 1, 1)
        clock.offset_ms = 2 * HOUR
        assert drain(store) == [b"new"]
        assert_whole(store)

    def test_waiting_what_is_not_persistent(self, disk: Disk, clock: Clock, store: Store) -> None:
        store.send(A, b"1", deliver_at_ms=clock.now + HOUR, persistent=False)
        store.send(A, b"2", deliver_at_ms=clock.now + HOUR)
        store.send_many(A, [later(clock, b"3", persistent=False), Outgoing(b"4", persistent=False), b"5"])
        store.commit([(A, later(clock, b"6", persistent=False)), (A, Outgoing(b"7"))], [])
        assert bodies(store) == [b"1", b"2", b"3", b"4", b"5", b"6", b"7"]
        assert store.counts(A) == Counts(3, 0, 4)
        first, *others = [take(store) for _ in range(3)]
        assert [first.body, *(message.body for message in others)] == [b"4", b"5", b"7"]
        store.release([first, others[0]], delay=7200)
        store.ack(others[1:])
        clock.offset_ms = HOUR
        assert drain(store) == [b"1", b"2", b"3", b"6"]
        assert store.counts(A) == Counts(0, 0, 2)
        clock.offset_ms = 2 * HOUR
        assert (drain(store), waiting(store)) == ([b"4", b"5"], 0)
        assert_whole(store)

    def test_waiting_a_branch_that_is_not_persistent(self, disk: Disk, clock: Clock) -> None:
        store = disk.create(redelivery=BACKOFF)
        store.commit_prepared(prepare(store, 1, [(A, later(clock, b"1", persistent=False))])).wait()
        assert drain(store) == []
        clock.offset_ms = HOUR
        store.rollback_prepared(prepare(store, 2, (), [claim(store)])).wait()
        assert (store.receive(A, 0), waiting(store)) == (None, 1)
        clock.offset_ms += 60_000
        assert take(store).deliveries == 2

    # Topics

    def test_waiting_each_subscription_waits_by_itself(
        self, disk: Disk, clock: Clock, store: Store, place: str
    ) -> None:
        for subscription in (DESK, BOOK):
            store.subscribe(subscription)
        store.send(T, b"1")
        store.send(T, b"2", deliver_at_ms=clock.now + HOUR)
        store.send(T, b"3")
        store.send(A, b"4", deliver_at_ms=clock.now + HOUR, persistent=False)
        assert store.stats().delayed == 2
        store.delete(A)
        take(store, T, subscription=DESK.key).release(delay=7200)
        assert store.counts(T, DESK.key) == Counts(1, 0, 2)
        assert store.counts(T, BOOK.key) == Counts(2, 0, 1)
        assert bodies(store, T, DESK.key) == [b"1", b"2", b"3"]
        store = disk.later(store, place)
        assert drain(store, T, DESK.key) == [b"3"]
        assert drain(store, T, BOOK.key) == [b"1", b"3"]
        assert [waiting(store, T, one.key) for one in (DESK, BOOK)] == [2, 1]
        assert_whole(store)
        clock.offset_ms = HOUR
        store = disk.later(store, place)
        assert drain(store, T, DESK.key) == [b"2"]
        clock.offset_ms = 2 * HOUR
        assert drain(store, T, DESK.key) == [b"1"]
        assert drain(store, T, BOOK.key) == [b"2"]
        assert store.depth(T) == 0
        assert_whole(store)

    def test_waiting_a_retroactive_subscription_waits_too(
        self, disk: Disk, clock: Clock, store: Store, place: str
    ) -> None:
        store.subscribe(DESK)
        store.send_many(T, [later(clock, b"1"), b"2"])
        take(store, T, subscription=DESK.key).release(delay=60)
        store.subscribe(BOOK, retroactive=True)
        store.subscribe(Subscription(T, "late"))
        store = disk.later(store, place)
        assert drain(store, T, BOOK.key) == [b"2"]
        assert [waiting(store, T, one.key) for one in (DESK, BOOK)] == [2, 1]
        clock.offset_ms = HOUR
        assert drain(store, T, DESK.key) == [b"1", b"2"]
        assert drain(store, T, BOOK.key) == [b"1"]
        assert (drain(store, T, ("", "late")), store.depth(T)) == ([], 0)
        assert_whole(store)

    @pytest.mark.parametrize("end", ["purge", "unsubscribe", "delete"])
    def test_waiting_what_a_subscription_had_ends_with_it(
        self, disk: Disk, clock: Clock, store: Store, end: str, place: str
    ) -> None:
        for subscription in (DESK, BOOK):
            store.subscribe(subscription)
        store.send_many(T, [later(clock, b"1"), b"2", b"3"])
        store.release([take(store, T, subscription=DESK.key) for _ in range(2)], delay=1800)
        {
            "purge": lambda: store.purge(T, DESK.key),
            "unsubscribe": lambda: store.unsubscribe(T, DESK.key),
            "delete": lambda: store.delete(T),
        }[end]()
        store = disk.later(store, place)
        assert_whole(store)
        clock.offset_ms = HOUR
        if end == "purge":
            assert (drain(store, T, DESK.key), waiting(store, T, DESK.key)) == ([], 0)
        if end != "delete":
            assert drain(store, T, BOOK.key) == [b"1", b"2", b"3"]
        assert (store.depth(T), waiting(store, T)) == (0, 0)
        assert_whole(store)

    def test_waiting_an_expired_one_is_taken_from_all_at_once(self, clock: Clock, store: Store) -> None:
        for subscription in (DESK, BOOK):
            store.subscribe(subscription)
        store.send(T, b"1", expires_at_ms=clock.now + HOUR)
        take(store, T, subscription=DESK.key).release(delay=7200)
        clock.offset_ms = HOUR
        (message,) = messages_of(undelivered(store))
        message.ack()
        clock.offset_ms = 2 * HOUR
        assert [store.receive(T, 0, one.key) for one in (DESK, BOOK)] == [None, None]
        assert_whole(store)

    # What is no time

    @in_one_store("due", [-1, 2**63, 2**70])
    def test_waiting_a_time_out_of_range(self, store: Store, due: int) -> None:
        self.refused_due(store, due, ValueError)

    @in_one_store("due", ["1", 1.5, True])
    def test_waiting_what_is_no_time(self, store: Store, due: Any) -> None:
        self.refused_due(store, due, TypeError)

    def refused_due(self, store: Store, due: Any, error: type[Exception]) -> None:
        sends: Sequence[Any] = (
            lambda: store.send(A, b"x", deliver_at_ms=due),
            lambda: store.send(A, b"x", deliver_at_ms=due, persistent=False),
            lambda: store.send_nowait(A, b"x", deliver_at_ms=due),
            lambda: store.send_many(A, [b"1", Outgoing(b"x", deliver_at_ms=due)]),
            lambda: store.commit([(A, Outgoing(b"x", deliver_at_ms=due))], []),
        )
        for send in sends:
            with pytest.raises(error, match="deliver_at_ms"):
                send()
        assert store.depth(A) == 0

    @in_one_store(
        "delay, error",
        [(-1, ValueError), (math.nan, ValueError), (math.inf, ValueError), (2.0**63, ValueError), ("1", TypeError)],
    )
    def test_waiting_a_delay_that_is_none(self, store: Store, delay: Any, error: type[Exception]) -> None:
        store.send(A, b"1")
        message = take(store)
        for release in (store.release, store.release_nowait):
            with pytest.raises(error, match="delay"):
                release([message], delay=delay)
        message.ack()
        assert store.depth(A) == 0

    def test_waiting_the_longest_delay(self, disk: Disk, clock: Clock, store: Store, place: str) -> None:
        store.send(A, b"1", deliver_at_ms=2**63 - 1)
        store.send(A, b"2")
        take(store).release(delay=9e15)
        store = disk.later(store, place)
        assert (store.receive(A, 0), waiting(store)) == (None, 2)
        assert_whole(store)
