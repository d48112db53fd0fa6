"""The contract of messages whose time is over: never received, never lost sight of, handed out to be dead-lettered."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from anabranch.adapters.core import Store
from anabranch.adapters.core.messages import EXPIRED, EXPIRES_MAX_MS, Message, Outgoing, Undelivered
from anabranch.adapters.core.store_types import Subscription
from anabranch.policies.errors import ClockError, StoreFullError, UnknownMessageError

from .disk import A, B, Disk, Parallel, T, assert_whole, bodies, drain, in_one_store, take
from .preparing import claim, prepare, to

HOUR = 3_600_000
DESK, BOOK = Subscription(T, "desk"), Subscription(T, "book")


class Clock:
    """The wall clock, which a test sets: by itself it stands still. Waiting is not by it."""

    def __init__(self) -> None:
        self.offset_ms = 0
        self._began_ns = time.time_ns()

    def time(self) -> float:
        return self.time_ns() / 1e9

    def time_ns(self) -> int:
        return self._began_ns + self.offset_ms * 1_000_000

    @property
    def now(self) -> int:
        return self.time_ns() // 1_000_000


class GoingClock(Clock):
    """One that goes on by itself."""

    def __init__(self) -> None:
        super().__init__()
        self._right_ns = time.time_ns

    def time_ns(self) -> int:
        return self._right_ns() + self.offset_ms * 1_000_000


def stopped_clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    """Yield a clock that is this process's wall clock meanwhile: for a fixture."""
    yield from going_by(Clock(), monkeypatch)


def going_by(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    """Yield the clock, which is this process's wall clock meanwhile."""
    with monkeypatch.context() as patches:
        patches.setattr(time, "time", clock.time)
        patches.setattr(time, "time_ns", clock.time_ns)
        yield clock


def undelivered(store: Store, limit: int = 100) -> list[Undelivered]:
    return list(store.take_undelivered(limit))


def messages_of(found: Sequence[Undelivered]) -> list[Message]:
    return [message for message, _ in found]


def sent(found: Sequence[Undelivered]) -> list[bytes]:
    """In the order of their seqs; take_undelivered promises none."""
    return [message.body for message, _ in sorted(found, key=lambda lost: lost.message.seq)]


class ExpiringContract:
    @pytest.fixture
    def clock(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
        """Before the stores of the test are opened."""
        yield from stopped_clock(monkeypatch)

    def test_the_time_comes_back(self, clock: Clock, disk: Disk, store: Store, place: str) -> None:
        soon = clock.now + HOUR
        store.send(A, b"1", expires_at_ms=soon)
        store.send_many(A, [Outgoing(b"2", expires_at_ms=EXPIRES_MAX_MS), b"3"])
        store.commit([(A, Outgoing(b"4", expires_at_ms=soon + 1))], [])
        store.commit_prepared(prepare(store, 1, [(A, Outgoing(b"5", expires_at_ms=soon + 2))])).wait()
        store.sync()
        store = disk.later(store, place)
        expected = [soon, EXPIRES_MAX_MS, 0, soon + 1, soon + 2]
        assert [message.expires_at_ms for message in store.browse(A)] == expected
        assert [take(store).expires_at_ms for _ in expected] == expected
        assert undelivered(store) == []

    @pytest.mark.parametrize("now", [-HOUR, -(10**13)])
    def test_a_clock_before_1970(self, clock: Clock, store: Store, now: int) -> None:
        """Nothing is sent at no time; what is there is received and acked."""
        store.send(A, b"before", expires_at_ms=clock.now + HOUR)
        store.send(A, b"letter")
        clock.offset_ms = now - clock.now
        letter = claim(store)
        for send in (
            lambda: store.send(A, b"x"),
            lambda: store.send_many(A, [b"x", Outgoing(b"y", None, "id")]),
            lambda: store.send_nowait(A, b"x", None, "id").result(),
            lambda: store.commit([(A, Outgoing(b"x"))], [letter]),
            lambda: prepare(store, 1, to(A, b"x"), [letter]),
        ):
            with pytest.raises(ClockError, match="before 1970"):
                send()
        store.unclaim([letter])
        assert undelivered(store) == []
        assert drain(store) == [b"before", b"letter"]
        clock.offset_ms = 0
        assert not store.send(A, b"after", None, "id").duplicate
        assert bodies(store) == [b"after"]
        assert_whole(store)

    @in_one_store("at", [-1, EXPIRES_MAX_MS + 1, 2**64])
    def test_what_is_no_time_is_refused(self, store: Store, at: int) -> None:
        with pytest.raises(ValueError, match="expires_at_ms"):
            store.send(A, b"x", expires_at_ms=at)
        with pytest.raises(ValueError, match="expires_at_ms"):
            store.commit([(A, Outgoing(b"x", expires_at_ms=at))], [])
        assert bodies(store) == []

    @in_one_store("at", ["5", None, 5.0, True])
    def test_what_is_no_number_of_ms_is_refused(self, store: Store, at: Any) -> None:
        for send in (
            lambda: store.send(A, b"x", expires_at_ms=at),
            lambda: store.send_nowait(A, b"x", expires_at_ms=at),
        ):
            with pytest.raises(TypeError, match="expires_at_ms"):
                send()
        assert bodies(store) == []

    def test_it_is_passed_over(self, clock: Clock, disk: Disk, store: Store, place: str) -> None:
        store.send(A, b"1", expires_at_ms=clock.now + 1000)
        store.send(A, b"2")
        store.send(A, b"3", expires_at_ms=clock.now + 1000)
        store.send(A, b"4", expires_at_ms=clock.now + HOUR)
        clock.offset_ms += 2000
        store = disk.later(store, place)
        assert [take(store).body for _ in range(2)] == [b"2", b"4"]
        assert store.receive(A) is None
        assert store.receive(A, 0.05) is None
        assert (bodies(store), store.depth(A), store.stats().messages) == ([b"1", b"2", b"3", b"4"], 4, 4)
        assert_whole(store)

    def test_an_expired_one_is_handed_out(self, clock: Clock, disk: Disk, store: Store, place: str) -> None:
        store.send(A, b"1", {"h": 1}, "id", priority=7, expires_at_ms=clock.now + 1000)
        store.send(A, b"2")
        store.send(B, b"3", expires_at_ms=clock.now + 1000)
        assert undelivered(store) == []
        clock.offset_ms += 2000
        store = disk.later(store, place)
        found = sorted(undelivered(store), key=lambda lost: lost.message.seq)
        assert [(m.destination, m.body, reason) for m, reason in found] == [(A, b"1", EXPIRED), (B, b"3", EXPIRED)]
        message = found[0].message
        assert (message.headers, message.message_id, message.priority) == ({"h": 1}, "id", 7)
        assert (message.leased, message._store.store_id, message.subscription) == (True, store.store_id, None)
        assert (undelivered(store), store.stats().leased) == ([], 2)
        store.ack(messages_of(found))
        assert (bodies(store), bodies(store, B), store.stats().leased) == ([b"2"], [], 0)
        assert undelivered(store) == []
        again = disk.later(store)
        assert (undelivered(again), drain(again)) == ([], [b"2"])
        assert_whole(again)

    def test_as_many_as_are_asked_for(self, clock: Clock, store: Store) -> None:
        store.send_many(A, [Outgoing(str(n).encode(), expires_at_ms=clock.now + 1000 + n % 7) for n in range(250)])
        clock.offset_ms += 2000
        seen: list[bytes] = []
        for expected in (100, 100, 50, 0):
            found = undelivered(store)
            assert len(found) == expected
            seen += sent(found)
            store.ack(messages_of(found))
        assert sorted(seen, key=int) == [str(n).encode() for n in range(250)]
        assert store.depth(A) == 0
        store.send_many(A, [Outgoing(b"x", expires_at_ms=clock.now - 1)] * 3)
        assert len(undelivered(store, 2)) == 2
        assert len(undelivered(store, 2)) == 1

    def test_one_whose_time_was_over_when_it_was_sent(self, clock: Clock, store: Store) -> None:
        assert not store.send(A, b"x", expires_at_ms=1).duplicate
        assert (store.receive(A), bodies(store)) == (None, [b"x"])
        assert sent(undelivered(store)) == [b"x"]

    def test_an_expired_one_that_is_given_back(self, clock: Clock, store: Store) -> None:
        store.send(A, b"x", expires_at_ms=clock.now - 1)
        for delivered in (False, True, False):
            ((message, reason),) = undelivered(store)
            assert reason == EXPIRED
            store.release([message], delivered)
            with pytest.raises(UnknownMessageError):
                message.ack()
            assert store.receive(A) is None

    def test_who_leased_it_before_has_it(self, clock: Clock, store: Store) -> None:
        store.send_many(A, [Outgoing(b"1", expires_at_ms=clock.now + 1000), b"2"])
        message = take(store)
        clock.offset_ms += 2000
        assert undelivered(store) == []
        message.ack()
        assert (undelivered(store), bodies(store)) == ([], [b"2"])

    def test_released_after_its_time(self, clock: Clock, store: Store) -> None:
        store.send_many(A, [Outgoing(b"1", expires_at_ms=clock.now + 1000), b"2"])
        message = take(store)
        clock.offset_ms += 2000
        message.release()
        assert take(store).body == b"2"
        assert store.receive(A) is None
        assert sent(undelivered(store)) == [b"1"]

    def test_what_was_leased_when_it_expired_is_found_once_it_is_given_back(self, clock: Clock, store: Store) -> None:
        """And what comes late: all of it after others were looked at."""
        store.send_many(A, [Outgoing(str(n).encode(), expires_at_ms=clock.now + 1000) for n in range(4)])
        store.send(A, b"4", expires_at_ms=clock.now + HOUR)
        first, second, third, _ = (take(store) for _ in range(4))
        for seconds in (2, 3):
            clock.offset_ms = seconds * 1000
            assert undelivered(store) == []
        first.release()
        store.send(A, b"late", expires_at_ms=clock.now - 1500)
        third.ack()
        found = undelivered(store)
        assert sent(found) == [b"0", b"late"]
        assert undelivered(store) == []
        store.release(messages_of(found))
        second.release()
        clock.offset_ms += 1
        assert sent(undelivered(store)) == [b"0", b"1", b"late"]
        assert drain(store) == [b"4"]

    def test_its_time_ends_when_it_was_looked_up_ahead(self, clock: Clock, store: Store) -> None:
        store.send_many(A, [b"0", *(Outgoing(str(n).encode(), expires_at_ms=clock.now + 1000) for n in (1, 2)), b"3"])
        assert take(store).body == b"0"
        clock.offset_ms += 2000
        assert take(store).body == b"3"
        assert sent(undelivered(store)) == [b"1", b"2"]

    def test_what_a_transaction_has_claimed_is_its_own(
        self, clock: Clock, disk: Disk, store: Store, place: str
    ) -> None:
        """Rule X6; given back, its time is over."""
        store.send_many(A, [Outgoing(str(n).encode(), expires_at_ms=clock.now + 1000) for n in range(3)])
        names = [prepare(store, n, (), [claim(store)]) for n in range(2)]
        clock.offset_ms += 2000
        store = disk.later(store, place)
        assert sent(undelivered(store)) == [b"2"]
        store.commit_prepared(names[0]).wait()
        assert undelivered(store) == []
        store.rollback_prepared(names[1]).wait()
        assert store.receive(A) is None
        assert sent(undelivered(store)) == [b"1"]
        assert_whole(store)

    def test_it_is_moved_in_one_transaction(self, clock: Clock, disk: Disk, store: Store, place: str) -> None:
        """As the router does it: from its destination to the queue for such messages."""
        store.send_many(A, [Outgoing(b"1", expires_at_ms=clock.now - 1), Outgoing(b"2", expires_at_ms=clock.now - 1)])
        first, second = messages_of(undelivered(store))
        store.claim(first)
        store.claim(second)
        store.commit(to(B, first.body), [first])
        name = prepare(store, 1, to(B, second.body), [second])
        store = disk.later(store, place)
        assert (undelivered(store), bodies(store, B)) == ([], [first.body])
        store.commit_prepared(name).wait()
        assert (bodies(store), drain(store, B)) == ([], [first.body, second.body])

    def test_purge_removes_expired_ones(self, clock: Clock, store: Store) -> None:
        store.send_many(A, [Outgoing(b"1", expires_at_ms=clock.now - 1), b"2"])
        assert store.receive(A) is not None
        assert store.purge(A) == 1
        assert (bodies(store), undelivered(store)) == ([b"2"], [])

    def test_delete_removes_expired_ones(self, clock: Clock, store: Store) -> None:
        store.send_many(A, [Outgoing(b"1", expires_at_ms=clock.now - 1)] * 2)
        (message,) = messages_of(undelivered(store, 1))
        assert store.delete(A) == 2
        assert undelivered(store) == []
        with pytest.raises(UnknownMessageError):
            message.ack()

    def test_it_counts_among_the_leases(self, clock: Clock, disk: Disk) -> None:
        store = disk.create(max_leases=2)
        store.send_many(A, [b"1", *[Outgoing(b"x", expires_at_ms=clock.now - 1)] * 3])
        take(store)
        found = undelivered(store)
        assert len(found) == 1
        store.send(A, b"2")
        with pytest.raises(StoreFullError):
            store.receive(A)
        store.ack(messages_of(found))
        assert take(store).body == b"2"

    def test_expired_ones_by_priority(self, clock: Clock, disk: Disk) -> None:
        store = disk.create(priorities=True)
        store.send(A, b"low", priority=1)
        store.send(A, b"high", priority=9, expires_at_ms=clock.now + 1000)
        store.send(A, b"middle", priority=5, expires_at_ms=clock.now + HOUR)
        clock.offset_ms += 2000
        assert [take(store).body for _ in range(2)] == [b"middle", b"low"]
        assert store.receive(A) is None
        assert sent(undelivered(store)) == [b"high"]

    # A clock that jumps

    def test_a_clock_that_goes_back(self, clock: Clock, disk: Disk, store: Store, place: str) -> None:
        """What was passed over is to be received again, at its old place."""
        store.send_many(A, [Outgoing(str(n).encode(), expires_at_ms=clock.now + HOUR) for n in range(3)])
        store.send(A, b"3")
        clock.offset_ms += 2 * HOUR
        assert take(store).body == b"3"
        assert store.receive(A) is None
        clock.offset_ms -= 2 * HOUR
        store = disk.later(store, place)
        assert undelivered(store) == []
        assert [take(store).body for _ in range(3)] == [b"0", b"1", b"2"]

    def test_a_clock_that_goes_back_while_it_is_dead_letter(self, clock: Clock, store: Store) -> None:
        store.send_many(A, [Outgoing(b"1", expires_at_ms=clock.now + HOUR), b"2"])
        clock.offset_ms += 2 * HOUR
        ((message, _),) = undelivered(store)
        clock.offset_ms -= 2 * HOUR
        store.release([message], delivered=False)
        assert drain(store) == [b"1", b"2"]

    def test_a_clock_that_goes_back_while_somebody_waits(self, clock: Clock, store: Store) -> None:
        store.send(A, b"x", expires_at_ms=clock.now + HOUR)
        clock.offset_ms += 2 * HOUR
        with Parallel(lambda: store.receive(A, None)) as receiver:
            assert receiver.outlives(0.05)
            clock.offset_ms -= 2 * HOUR
            assert receiver.result().body == b"x"

    def test_a_clock_that_jumps_to_and_fro(self, clock: Clock, store: Store) -> None:
        store.send_many(A, [Outgoing(str(n).encode(), expires_at_ms=clock.now + n * HOUR) for n in range(1, 8)])
        held: list[Message] = []
        for hours in (3, 0, 5, 1, 9, 2):
            clock.offset_ms = hours * HOUR + 1000
            found = messages_of(undelivered(store))
            assert {m.body for m in found} == {str(n).encode() for n in range(1, min(hours, 7) + 1)} - {
                m.body for m in held
            }
            store.release(found, delivered=False)
            message = store.receive(A)
            if hours < 7:
                assert message is not None
                held.append(message)
        clock.offset_ms = 0
        store.release(held)
        assert drain(store) == [str(n).encode() for n in range(1, 8)]
        assert_whole(store)

    @pytest.mark.parametrize("priorities", [False, True])
    @pytest.mark.parametrize("persistent", [False, True])
    def test_once_acked_it_is_received_by_nobody_though_the_clock_goes_back(
        self, clock: Clock, disk: Disk, priorities: bool, persistent: bool
    ) -> None:
        store = disk.create(priorities=priorities)
        store.subscribe(DESK)
        expiring = Outgoing(b"2", expires_at_ms=clock.now + HOUR, persistent=persistent)
        for destination, key in ((A, None), (T, DESK.key)):
            store.send_many(destination, [b"1", expiring, b"3"])
            take(store, destination, 0, key)  # the others have been looked up ahead
        clock.offset_ms += 2 * HOUR
        found = undelivered(store)
        assert sent(found) == [b"2", b"2"]
        store.subscribe(BOOK, retroactive=True)
        assert take(store, T, 0, BOOK.key).body == b"1"
        store.ack(messages_of(found))
        clock.offset_ms -= 2 * HOUR
        assert drain(store) == [b"3"]
        for subscription in (DESK, BOOK):
            assert drain(store, T, subscription.key) == [b"3"]
        assert_whole(store)

    # Of topics

    @pytest.mark.parametrize("how", ["acked", "released", "unsubscribed"])
    def test_of_a_topic_it_is_found_once_nobody_holds_it(self, clock: Clock, store: Store, how: str) -> None:
        store.subscribe(DESK)
        store.subscribe(BOOK)
        store.send_many(T, [Outgoing(str(n).encode(), expires_at_ms=clock.now + 1000) for n in range(3)])
        held = [take(store, T, 0, DESK.key) for _ in range(2)]
        clock.offset_ms += 2000
        assert sent(undelivered(store)) == [b"2"]
        clock.offset_ms += 1000
        assert undelivered(store) == []
        if how == "acked":
            store.ack(held)
        elif how == "released":
            store.release(held)
        else:
            store.unsubscribe(DESK.topic, DESK.key)
        found = undelivered(store)
        assert sent(found) == [b"0", b"1"]
        store.ack(messages_of(found))
        assert (undelivered(store), bodies(store, T, BOOK.key)) == ([], [b"2"])

    def test_of_a_topic_it_is_gone_for_all(self, clock: Clock, disk: Disk, store: Store, place: str) -> None:
        store.subscribe(DESK)
        store.subscribe(BOOK)
        store.send(T, b"1", expires_at_ms=clock.now + 1000)
        store.send(T, b"2")
        clock.offset_ms += 2000
        store = disk.later(store, place)
        for subscription in (DESK, BOOK):
            assert bodies(store, T, subscription.key) == [b"1", b"2"]
            assert take(store, T, 0, subscription.key).body == b"2"
            assert store.receive(T, 0, subscription.key) is None
        ((message, reason),) = undelivered(store)
        assert (message.body, message.destination, message.subscription, reason) == (b"1", T, None, EXPIRED)
        assert undelivered(store) == []
        message.ack()
        for subscription in (DESK, BOOK):
            assert bodies(store, T, subscription.key) == [b"2"]
        assert (bodies(store, T), store.stats().messages) == ([b"2"], 1)
        again = disk.later(store)
        assert (bodies(again, T), undelivered(again)) == ([b"2"], [])
        assert_whole(again)

    def test_of_a_topic_given_back_for_all(self, clock: Clock, store: Store) -> None:
        store.subscribe(DESK)
        store.subscribe(BOOK)
        store.send(T, b"1", expires_at_ms=clock.now + HOUR)
        clock.offset_ms += 2 * HOUR
        ((message, _),) = undelivered(store)
        store.release([message], delivered=False)
        clock.offset_ms -= 2 * HOUR
        for subscription in (DESK, BOOK):
            assert drain(store, T, subscription.key) == [b"1"]
        assert store.stats().messages == 0

    def test_of_a_topic_it_waits_for_who_leased_it(self, clock: Clock, store: Store) -> None:
        store.subscribe(DESK)
        store.subscribe(BOOK)
        store.send(T, b"1", expires_at_ms=clock.now + 1000)
        message = take(store, T, 0, DESK.key)
        clock.offset_ms += 2000
        assert (undelivered(store), store.receive(T, 0, BOOK.key)) == ([], None)
        message.ack()
        ((left, _),) = undelivered(store)
        left.ack()
        assert (bodies(store, T), store.stats().messages) == ([], 0)

    def test_of_a_topic_it_is_moved_in_one_transaction(
        self, clock: Clock, disk: Disk, store: Store, place: str
    ) -> None:
        store.subscribe(DESK)
        store.subscribe(BOOK)
        store.send(T, b"1", expires_at_ms=clock.now - 1)
        ((message, _),) = undelivered(store)
        store.claim(message)
        name = prepare(store, 1, to(B, b"1"), [message])
        store = disk.later(store, place)
        assert undelivered(store) == []
        store.commit_prepared(name).wait()
        assert (bodies(store, T), bodies(store, B), store.stats().messages) == ([], [b"1"], 1)
        for subscription in (DESK, BOOK):
            assert store.depth(T, subscription.key) == 0
        assert_whole(store)

    def test_of_a_topic_a_rollback_frees_it_for_all(self, clock: Clock, disk: Disk, store: Store, place: str) -> None:
        store.subscribe(DESK)
        store.subscribe(BOOK)
        store.send(T, b"1", expires_at_ms=clock.now + HOUR)
        clock.offset_ms += 2 * HOUR
        ((message, _),) = undelivered(store)
        store.claim(message)
        name = prepare(store, 1, (), [message])
        store = disk.later(store, place)
        assert store.rollback_prepared(name).wait()
        assert len(undelivered(store)) == 1
        store.send(T, b"2")
        clock.offset_ms -= 2 * HOUR
        for subscription in (DESK, BOOK):
            assert take(store, T, 0, subscription.key).body == b"2"
