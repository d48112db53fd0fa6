"""The contract of receiving the newest message first."""

from __future__ import annotations

import random

import pytest

from anabranch.adapters.core import Store
from anabranch.adapters.core.messages import Message, Outgoing
from anabranch.adapters.core.store_types import Subscription
from anabranch.policies.names.destination import Destination

from .disk import PATIENCE, A, B, C, Disk, Parallel, T, assert_whole, bodies, drain, eventually, take
from .expiring import HOUR, Clock


def newest(store: Store, destination: Destination = A, timeout: float = 0, **others: object) -> Message:
    message = store.receive(destination, timeout, newest=True, **others)  # type: ignore[arg-type]
    assert message is not None
    message._note.kept = True
    return message


class NewestContract:
    """Beside ExpiringContract, which has the clock."""

    def test_the_newest_comes_first(self, disk: Disk, store: Store, place: str) -> None:
        """Beside others, who get the oldest; what is given back is the newest again."""
        assert store.receive(A, 0, newest=True) is None
        store.send_many(A, [b"%d" % n for n in range(9)])
        store.sync()
        store = disk.later(store, place)
        first, last = take(store), newest(store)
        assert (first.body, last.body) == (b"0", b"8")
        held = newest(store)
        assert (held.body, newest(store).body) == (b"7", b"6")
        last.ack()
        store.send(A, b"9")
        newest(store).ack()
        held.release()
        again = newest(store)
        assert (again.body, again.deliveries, again.token == held._note) == (b"7", 2, False)
        first.release()
        again.release(delivered=False)
        store.release([newest(store)])
        assert drain(store) == [b"0", b"1", b"2", b"3", b"4", b"5", b"7"]
        assert store.receive(A, 0, newest=True) is None
        assert bodies(store) == [b"6"]

    @pytest.mark.parametrize("acked", [True, False])
    def test_the_newest_of_a_group_leaves_the_others_once_each(self, store: Store, acked: bool) -> None:
        """Who receives the newest meets the second of a group ahead of its turn, while it is fetched already."""
        store.send_many(A, [Outgoing(b"x1"), Outgoing(b"x2"), Outgoing(b"b", group="g"), Outgoing(b"c", group="g")])
        first = [newest(store), newest(store), take(store)]
        assert [one.body for one in first] == [b"c", b"x2", b"x1"]
        store.ack(first)
        if acked:
            assert drain(store) == [b"b"]
        else:
            for deliveries in (1, 2, 3):
                one = take(store)
                assert (one.body, one.deliveries) == (b"b", deliveries)
                one.release()
        assert_whole(store)

    def test_the_newest_of_each_of_many_queues(self, disk: Disk, store: Store, place: str) -> None:
        """Wherever the last messages of a queue are among those of others, and whoever holds some."""
        random.seed(7)
        queues: dict[Destination, list[bytes]] = {A: [], B: [], C: []}
        number = 0
        for run in (1, 20, 2, 90, 5, 1, 30, 1):
            queue = random.choice(list(queues))
            some = [b"%d" % (number + n) for n in range(run)]
            store.send_many(queue, [Outgoing(body, persistent=store.volatile or number % 3 > 0) for body in some[:5]])
            store.send_many(queue, some[5:])
            queues[queue] += some
            number += run
        if place != "here":
            for kept in queues.values():  # what is transient is gone then
                kept.clear()
            for queue in queues:
                store.purge(queue)
                queues[queue] += [b"%d" % n for n in range(9)]
                store.send_many(queue, queues[queue])
        store.sync()
        store = disk.later(store, place)
        held: list[tuple[Destination, Message]] = []
        while any(queues.values()):
            queue = random.choice([one for one, left in queues.items() if left])
            if random.random() < 0.2:
                message, body = take(store, queue), queues[queue].pop(0)
            else:
                message, body = newest(store, queue), queues[queue].pop()
            assert message.body == body
            if random.random() < 0.3:
                held.append((queue, message))
            else:
                message.ack()
        for queue in queues:
            assert store.receive(queue, 0, newest=True) is None
        for _, message in held:
            message.release()
        assert {queue: len(bodies(store, queue)) for queue in queues} == {
            queue: sum(one is queue for one, _ in held) for queue in queues
        }
        queue, message = max(held, key=lambda one: (one[0] is A, one[1].seq))
        assert newest(store, queue).seq == message.seq

    def test_the_newest_of_a_subscription(self, store: Store) -> None:
        desk, book = Subscription(T, "desk"), Subscription(T, "book")
        store.subscribe(desk)
        store.send(T, b"0")
        store.subscribe(book)
        store.send_many(T, [b"%d" % n for n in range(1, 9)])
        for n in (8, 7, 6):
            message = newest(store, T, subscription=desk.key)
            assert message.body == b"%d" % n
            message.ack()
        assert newest(store, T, subscription=book.key).body == b"8"
        assert drain(store, T, desk.key) == [b"%d" % n for n in range(6)]
        assert drain(store, T, book.key) == [b"%d" % n for n in range(1, 8)]

    def test_the_newest_of_the_most_urgent(self, disk: Disk) -> None:
        store = disk.create(priorities=True)
        given = [(b"1", 4), (b"2", 65_535), (b"3", 0), (b"4", 65_535), (b"5", 4), (b"6", 0)]
        store.send_many(A, [Outgoing(body, priority=priority) for body, priority in given])
        assert take(store).body == b"2"
        assert [newest(store).body for _ in range(3)] == [b"4", b"5", b"1"]
        assert drain(store) == [b"3", b"6"]

    def test_the_newest_that_may_be_delivered(self, disk: Disk, clock: Clock) -> None:
        """Neither what has expired, nor what waits, nor what has reached the delivery limit."""
        store = disk.create(max_deliveries=2, dead_letter="dead")
        store.send_many(A, [b"1", b"2", b"3"])
        store.send(A, b"late", deliver_at_ms=clock.now + HOUR)
        store.send(A, b"short", expires_at_ms=clock.now + HOUR // 2)
        short = newest(store)
        assert short.body == b"short"
        short.release()
        clock.offset_ms += HOUR // 2
        for _ in range(2):
            message = newest(store)
            assert message.body == b"3"
            message.release()
        assert newest(store).body == b"2"
        clock.offset_ms += HOUR
        assert newest(store).body == b"late"
        assert newest(store).body == b"1"

    def test_the_newest_of_a_group_one_at_a_time(self, disk: Disk, store: Store, place: str) -> None:
        store.send_many(A, [Outgoing(b"a1", group="a"), b"x", Outgoing(b"a2", group="a"), Outgoing(b"b1", group="b")])
        store.sync()
        store = disk.later(store, place)
        assert newest(store).body == b"b1"
        held = newest(store)
        assert (held.body, newest(store).body) == (b"a2", b"x")
        assert store.receive(A, 0, newest=True) is None and store.receive(A) is None
        held.ack()
        assert newest(store).body == b"a1"

    def test_who_waits_for_the_newest_stands_in_line(self, store: Store) -> None:
        with Parallel(lambda: take(store, A, PATIENCE)) as first:
            eventually(lambda: store.stats().waiting == 1)
            with Parallel(lambda: newest(store, A, PATIENCE)) as second:
                eventually(lambda: store.stats().waiting == 2)
                store.send(A, b"1")
                assert first.result().body == b"1"
                store.send(A, b"2")
                assert second.result().body == b"2"
        assert store.receive(A, 0.01, newest=True) is None
