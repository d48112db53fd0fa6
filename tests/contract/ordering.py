"""The contract of priorities: kept and handed back always, the order of delivery where the store's option says so."""

from __future__ import annotations

from typing import Any

import pytest

from anabranch.adapters.core import Store
from anabranch.adapters.core.messages import DEFAULT_PRIORITY, Outgoing
from anabranch.adapters.core.store_types import Subscription

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
    in_one_store,
    survives,
    take,
)
from .preparing import claim, prepare, to

MIXED = (4, 0, 65_535, 9, 4, 256, 9, 5, 0, 255, 65_535, 10, 256, 1)


def sent_by_priority(store: Store, priorities: tuple[int, ...] = MIXED) -> list[bytes]:
    """Sends one message of each, and says in which order they should come."""
    store.send_many(A, [Outgoing(f"{n}p{p}".encode(), priority=p) for n, p in enumerate(priorities)])
    return [f"{n}p{p}".encode() for n, p in sorted(enumerate(priorities), key=lambda pair: -pair[1])]


class OrderingContract:
    @pytest.fixture
    def ordered(self, disk: Disk) -> Store:
        """A store that delivers by priority."""
        return disk.create(priorities=True)

    def test_priorities_come_back(self, disk: Disk, store: Store, place: str) -> None:
        """And change nothing where the store does not order by them (invariant 2)."""
        store.send(A, b"0", priority=0)
        store.send_nowait(A, b"1", priority=256).result(PATIENCE)
        store.send_many(A, [Outgoing(b"2", priority=7), b"3"])
        store.commit([(A, Outgoing(b"4", priority=1))], [])
        store.commit_prepared(prepare(store, 1, [(A, Outgoing(b"5", priority=65_535))])).wait()
        store.sync()
        store = disk.later(store, place)
        expected = [0, 256, 7, DEFAULT_PRIORITY, 1, 65_535]
        assert [message.priority for message in store.browse(A)] == expected
        received = [take(store) for _ in expected]
        assert [message.body for message in received] == [str(n).encode() for n in range(6)]
        assert [message.priority for message in received] == expected

    def test_a_header_of_activemq_is_one_as_others(self, ordered: Store) -> None:
        """JMSXGroupID is no message group of ours: several receivers have messages of one at a time, by priority."""
        group = {"JMSXGroupID": "g"}
        ordered.send_many(A, [Outgoing(b"1", group), Outgoing(b"2", group, priority=9), Outgoing(b"3", priority=7)])
        received = [take(ordered) for _ in range(3)]
        assert [message.body for message in received] == [b"2", b"3", b"1"]
        assert [message.headers for message in received] == [group, {}, group]

    @in_one_store("priority", [-1, 65_536, 2**31, 2**64])
    def test_what_is_no_priority_is_refused(self, store: Store, priority: int) -> None:
        self.refused(store, priority, ValueError)

    @in_one_store("priority", ["4", None, 4.0, True])
    def test_what_is_no_number_is_refused(self, store: Store, priority: Any) -> None:
        self.refused(store, priority, TypeError)

    def refused(self, store: Store, priority: Any, error: type[Exception]) -> None:
        message = Outgoing(b"x", priority=priority)
        said = f"priority {priority} is not between 0 and 65535" if error is ValueError else "priority"
        for send in (
            lambda: store.send(A, b"x", priority=priority),
            lambda: store.send_nowait(A, b"x", priority=priority),
            lambda: store.send_many(A, [message]),
            lambda: store.commit([(A, message)], []),
            lambda: prepare(store, 1, [(A, message)]),
        ):
            with pytest.raises(error, match=said):
                send()
        assert bodies(store) == []
        assert list(store.recover_prepared()) == []

    def test_the_highest_first(self, disk: Disk, ordered: Store, place: str) -> None:
        expected = sent_by_priority(ordered)
        store = disk.later(ordered, place)
        assert bodies(store) == expected
        assert drain(store) == expected
        assert_whole(store)

    def test_of_one_priority_the_oldest_first(self, ordered: Store) -> None:
        sent = [str(n).encode() for n in range(300)]
        ordered.send_many(A, [Outgoing(body, priority=n % 2) for n, body in enumerate(sent)])
        assert drain(ordered) == sent[1::2] + sent[::2]

    def test_a_higher_one_overtakes_what_was_there_before(self, ordered: Store) -> None:
        """Also what a receive had looked up ahead."""
        ordered.send_many(A, [Outgoing(f"low {n}".encode(), priority=2) for n in range(200)])
        assert take(ordered).body == b"low 0"
        ordered.send(A, b"high", priority=256)
        ordered.send(A, b"middle", priority=255)
        ordered.send(A, b"higher", priority=65_535)
        assert [take(ordered).body for _ in range(4)] == [b"higher", b"high", b"middle", b"low 1"]
        ordered.send(A, b"lower", priority=1)
        assert drain(ordered) == [*(f"low {n}".encode() for n in range(2, 200)), b"lower"]

    def test_each_destination_has_its_own_order(self, ordered: Store) -> None:
        ordered.send(A, b"a1", priority=1)
        ordered.send(B, b"b9", priority=9)
        ordered.send(A, b"a2", priority=2)
        assert (drain(ordered), drain(ordered, B)) == ([b"a2", b"a1"], [b"b9"])

    def test_released_ones_go_back_by_priority(self, ordered: Store) -> None:
        expected = sent_by_priority(ordered)
        messages = [take(ordered) for _ in expected]
        ordered.send(A, b"between", priority=100)
        ordered.release([messages[n] for n in (7, 1, 4)])
        messages[0].release()
        assert [take(ordered).body for _ in range(5)] == [
            expected[0], expected[1], expected[4], b"between", expected[7],
        ]  # fmt: skip
        assert ordered.receive(A) is None

    def test_a_high_one_wakes_a_receiver(self, ordered: Store) -> None:
        with Parallel(lambda: ordered.receive(A, None)) as receiver:
            assert receiver.outlives(0.05)
            ordered.send(A, b"x", priority=9)
            assert receiver.result().body == b"x"

    def test_transactions_keep_the_order(self, disk: Disk, ordered: Store, place: str) -> None:
        """What they send comes in by priority, what they give back goes to its old place."""
        ordered.send(A, b"first 5", priority=5)
        ordered.send(A, b"first 7", priority=7)
        name = prepare(ordered, 1, [(A, Outgoing(b"branch 7", priority=7)), *to(A, b"branch 4")], [claim(ordered)])
        back = prepare(ordered, 2, (), [claim(ordered)])
        ordered.commit([(A, Outgoing(b"plain 9", priority=9)), (A, Outgoing(b"plain 5", priority=5))], [])
        store = disk.later(ordered, place)
        assert [take(store).body for _ in range(2)] == [b"plain 9", b"plain 5"]
        store.rollback_prepared(back).wait()
        store.commit_prepared(name).wait()
        store.send(A, b"last 7", priority=7)
        assert drain(store) == [b"branch 7", b"last 7", b"first 5", b"branch 4"]
        assert_whole(store)

    def test_a_rollback_gives_the_old_places_back(self, ordered: Store) -> None:
        expected = sent_by_priority(ordered)
        messages = [claim(ordered) for _ in range(4)]
        ordered.unclaim(messages[::-1])
        assert drain(ordered) == expected

    def test_browse_goes_by_priority(self, disk: Disk, ordered: Store, place: str) -> None:
        count = 1200
        ordered.send_many(A, [Outgoing(str(n).encode(), priority=6553 * (n % 10)) for n in range(count)])
        expected = [str(n).encode() for n in sorted(range(count), key=lambda n: -(n % 10))]
        store = disk.later(ordered, place)
        messages = list(store.browse(A))
        assert [message.body for message in messages] == expected
        for index in (0, 119, 120, 700, count - 2):
            page = [message.body for message in store.browse(A, 3, messages[index])]
            assert page == expected[index + 1 : index + 4]
        assert list(store.browse(A, after=messages[-1])) == []

    def test_each_of_many_has_a_priority_of_its_own(self, disk: Disk, ordered: Store, place: str) -> None:
        """More than a receive, or a page of browse, looks up at once; what is sent meanwhile comes in between."""
        count = disk.many_priorities
        priorities = [n * 6113 % 65_536 for n in range(count)]
        ordered.send_many(A, [Outgoing(str(p).encode(), priority=p) for p in priorities])
        expected = [str(p).encode() for p in sorted(priorities, reverse=True)]
        store = disk.later(ordered, place)
        assert bodies(store) == expected
        messages = list(store.browse(A))
        for index in {0, min(511, count // 2), min(512, count - 3), count - 2}:
            assert [m.body for m in store.browse(A, 2, messages[index])] == expected[index + 1 : index + 3]
        taken = [take(store) for _ in range(count // 2)]
        assert [message.body for message in taken] == expected[: count // 2]
        store.send_many(A, [Outgoing(b"later %d" % p, priority=p) for p in (0, taken[-1].priority, 65_535, 7)])
        first = take(store)
        assert first.body == b"later 65535"
        store.release([taken[15], taken[10]])
        left = [(int(body), body) for n, body in enumerate(expected) if n >= count // 2 or n in (10, 15)]
        left += [(p, b"later %d" % p) for p in (0, taken[-1].priority, 7)]
        assert drain_at_once(store) == [body for _, body in sorted(left, key=lambda one: -one[0])]
        store.ack([first, *(message for n, message in enumerate(taken) if n not in (10, 15))])
        assert bodies(store) == []
        assert_whole(store)

    def test_many_priorities_of_a_topic(self, disk: Disk, ordered: Store, place: str) -> None:
        """Each subscription goes through those that it has yet to ack."""
        for name in ("one", "two"):
            ordered.subscribe(Subscription(T, name))
        acked = disk.many_priorities - 5
        priorities = [n * 6113 % 65_536 for n in range(disk.many_priorities)]
        ordered.send_many(T, [Outgoing(str(p).encode(), priority=p) for p in priorities])
        expected = [str(p).encode() for p in sorted(priorities, reverse=True)]
        taken = [take(ordered, T, subscription=("", "one")) for _ in range(acked)]
        assert [message.body for message in taken] == expected[:acked]
        ordered.ack(taken)
        store = disk.later(ordered, place)
        for name, count in (("one", acked), ("two", 0)):
            assert [message.body for message in store.browse(T, subscription=("", name))] == expected[count:]
            message = store.receive(T, subscription=("", name))
            assert message is not None
            assert message.body == expected[count]
        assert_whole(store)

    def test_browse_after_one_that_is_gone(self, ordered: Store) -> None:
        expected = sent_by_priority(ordered)
        message = take(ordered)
        message.ack()
        assert [found.body for found in ordered.browse(A, after=message)] == expected[1:]

    def test_browse_after_a_message_without_priorities(self, store: Store) -> None:
        store.send_many(A, [str(n).encode() for n in range(5)])
        messages = list(store.browse(A))
        assert [found.body for found in store.browse(A, after=messages[2])] == [b"3", b"4"]

    def test_browse_after_a_seq_says_nothing_here(self, ordered: Store) -> None:
        sent_by_priority(ordered)
        seq = next(ordered.browse(A)).seq
        with pytest.raises(ValueError, match="priorit"):
            list(ordered.browse(A, after=seq))
        assert len(list(ordered.browse(A, after=0))) == len(MIXED)

    def test_browse_of_what_lies_far_apart(self, disk: Disk, ordered: Store, place: str) -> None:
        """The first and the last in order were sent together, what comes between them long before."""
        ordered.send(A, b"old", priority=4)
        ordered.send_many(B, [b"x" * 1000] * 150)
        ordered.send_many(A, [Outgoing(b"new, first", priority=9), Outgoing(b"new, last", priority=0)])
        drain(ordered, B)
        ordered.reclaim()
        store = disk.later(ordered, place)
        assert bodies(store) == drain(store) == [b"new, first", b"old", b"new, last"]

    def test_purge_and_acks_of_all_priorities(self, ordered: Store) -> None:
        expected = sent_by_priority(ordered)
        messages = [take(ordered) for _ in range(5)]  # of three priorities
        messages[1].release()
        messages[3].ack()
        assert ordered.purge(A) == len(expected) - 4
        assert bodies(ordered) == [expected[n] for n in (0, 2, 4)]
        ordered.release([messages[4], messages[0]])
        assert drain(ordered) == [expected[n] for n in (0, 4)]
        assert_whole(ordered)

    @survives
    def test_the_order_can_be_changed(self, disk: Disk, store: Store) -> None:
        """A store that is opened with the option orders by it also what it held before; and without it no more."""
        by_priority = sent_by_priority(store)
        by_seq = bodies(store)
        assert by_seq != by_priority
        for priorities, expected in ((True, by_priority), (False, by_seq), (True, by_priority)):
            store = disk.reopen(store, priorities=priorities)
            assert bodies(store) == expected
            message = take(store)
            assert message.body == expected[0]
            message.release()
            assert_whole(store)
        assert drain(disk.crash(store, priorities=False)) == by_seq
        assert drain(store) == by_priority
