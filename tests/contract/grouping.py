"""The contract of message groups: one message of a group at a time, in order, whoever receives."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from anabranch.adapters.core import Store
from anabranch.adapters.core.messages import DELIVERY_LIMIT, EXPIRED, GROUP, GROUP_BYTES_MAX, Message, Outgoing
from anabranch.adapters.core.store_types import Counts, Settlement, Subscription
from anabranch.policies.names.destination import Destination

from .disk import PATIENCE, A, B, Disk, Parallel, T, assert_whole, bodies, drain, in_one_store, survives, take
from .expiring import HOUR, Clock, messages_of, undelivered
from .leasing import LONG, Lasting
from .preparing import claim, prepare

DESK, BOOK = Subscription(T, "desk"), Subscription(T, "book")


def of(group: str, *sent: bytes, **others: Any) -> list[Outgoing]:
    return [Outgoing(body, group=group, **others) for body in sent]


def all_there(store: Store, destination: Destination = A, **others: Any) -> list[Message]:
    """Receive until there is nothing that may be received."""
    found = []
    while (message := store.receive(destination, 0, **others)) is not None:
        message._note.kept = True
        found.append(message)
    return found


def all_bodies(store: Store, destination: Destination = A, **others: Any) -> list[bytes]:
    return [message.body for message in all_there(store, destination, **others)]


class GroupingContract:
    """Beside ExpiringContract and LeasingContract, which have the clocks."""

    def test_groups_one_message_at_a_time(self, disk: Disk, store: Store, place: str) -> None:
        """However it was sent; what has no group goes by."""
        store.send(A, b"a1", {GROUP: "a"})
        store.send_many(A, [*of("a", b"a2"), b"x", *of("b", b"b1")])
        store.send_nowait(A, b"b2", {GROUP: "b"}).result(PATIENCE)
        store.commit([(A, Outgoing(b"a3", group="a")), (A, Outgoing(b"y"))], [])
        store.commit_prepared(
            prepare(store, 1, [(A, Outgoing(b"b3", group="b")), (A, Outgoing(b"c1", group="c"))])
        ).wait()
        store.sync()
        store = disk.later(store, place)
        sent = [b"a1", b"a2", b"x", b"b1", b"b2", b"a3", b"y", b"b3", b"c1"]
        assert bodies(store) == sent
        first = all_there(store)
        assert [(one.body, one.group) for one in first] == [
            (b"a1", "a"), (b"x", None), (b"b1", "b"), (b"y", None), (b"c1", "c")
        ]  # fmt: skip
        assert store.counts(A)[:3] == (4, 5, 0)
        assert [one.group for one in store.browse(A)] == ["a", "a", None, "b", "b", "a", None, "b", "c"]
        first[2].ack()
        assert all_bodies(store) == [b"b2"]
        store.ack(first[:2])
        assert all_bodies(store) == [b"a2"]
        assert_whole(store)
        store = disk.later(store, place)
        if place != "here":
            assert drain(store) == [b"a2", b"b2", b"a3", b"y", b"b3", b"c1"]
            assert_whole(store)

    def test_groups_receive_many_gives_one_of_each(self, store: Store) -> None:
        store.send_many(A, [Outgoing(b"%d" % n, group=f"g{n % 3}") for n in range(9)])
        first = store.receive_many(A, 10)
        assert [message.body for message in first] == [b"0", b"1", b"2"]
        assert store.receive_many(A, 10) == []
        store.ack(first)
        assert [message.body for message in store.receive_many(A, 2)] == [b"3", b"4"]
        assert [message.body for message in store.receive_many(A, 2)] == [b"5"]

    def test_groups_are_those_of_their_queue(self, store: Store) -> None:
        for destination in (A, B):
            store.send_many(destination, of("g", b"1", b"2"))
        assert all_bodies(store, A) == all_bodies(store, B) == [b"1"]

    def test_groups_what_is_given_back_comes_before_what_is_behind_it(
        self, disk: Disk, store: Store, place: str
    ) -> None:
        store.send_many(A, [*of("g", b"1", b"2", b"3"), b"x"])
        for _ in range(3):
            (first, *_others) = all_there(store)
            first.release()
            store.release(_others)
        assert [(one.body, one.deliveries) for one in all_there(store)] == [(b"1", 4), (b"x", 4)]
        store = disk.later(store, place)
        if place != "here":
            assert all_bodies(store) == [b"1", b"x"]
        assert_whole(store)

    @pytest.mark.parametrize(
        "end", ["ack", "nowait", "release", "token", "commit", "unclaim", "rollback", "branch", "time"]
    )
    def test_groups_who_waits_has_the_next_one(self, store: Store, lasting: Lasting, end: str) -> None:
        store.send_many(A, of("g", b"1", b"2", b"3"))
        first = store.receive(A, 0, lease=LONG)
        assert first is not None
        first._note.kept = True
        if end in ("commit", "unclaim", "rollback", "branch"):
            store.claim(first)
        branch = prepare(store, 1, (), [first]) if end in ("rollback", "branch") else b""
        ends: dict[str, Callable[[], object]] = {
            "ack": first.ack,
            "nowait": lambda: first.ack_nowait().result(PATIENCE),
            "release": first.release,
            "token": lambda: store.settle([first.token], Settlement.ACK),
            "commit": lambda: store.commit([(B, Outgoing(b"b"))], [first]),
            "unclaim": lambda: store.unclaim([first]),
            "rollback": lambda: store.rollback_prepared(branch).wait(),
            "branch": lambda: store.commit_prepared(branch).wait(),
            "time": lambda: lasting.go_on(store),
        }
        acked = end in ("ack", "nowait", "token", "commit", "branch")
        with Parallel(lambda: take(store, A, PATIENCE)) as waiting:
            assert waiting.outlives(0.05)
            ends[end]()
            second = waiting.result()
            assert second.body == (b"2" if acked else b"1")
        with Parallel(lambda: take(store, A, PATIENCE)) as waiting:
            second.ack()
            assert waiting.result().body == (b"3" if acked else b"2")

    def test_groups_all_who_wait_have_theirs(self, store: Store) -> None:
        """With one ack of several groups."""
        names = [f"g{n}" for n in range(5)]
        store.send_many(A, [Outgoing(name.encode(), group=name) for _ in range(2) for name in names])
        first = all_there(store)
        parallels = [Parallel(lambda: take(store, A, PATIENCE)) for _ in names]
        for parallel in parallels:
            parallel.__enter__()
        store.ack(first)
        assert sorted(parallel.result().body for parallel in parallels) == [name.encode() for name in names]

    def test_groups_a_listener_has_one_at_a_time(self, store: Store) -> None:
        """Whatever its credit; two of them share the groups."""
        order: dict[str, list[int]] = {}
        out: set[str] = set()
        lock, done = threading.Lock(), threading.Event()
        count = 60

        def seen(message: Message) -> None:
            group = message.group
            assert group is not None
            with lock:
                assert group not in out, "two of a group at once"
                out.add(group)
                order.setdefault(group, []).append(int(message.body))
                out.discard(group)
                if sum(map(len, order.values())) == count:
                    done.set()
            message.ack()

        store.send_many(A, [Outgoing(b"%d" % n, group=f"g{n % 3}") for n in range(count)])
        listeners = [store.listen(A, seen, credit=100) for _ in range(2)]
        assert done.wait(PATIENCE)
        for listener in listeners:
            listener.close()
        assert all(numbers == sorted(numbers) for numbers in order.values())

    def test_groups_a_watch_hears_of_the_next_one(self, store: Store) -> None:
        store.send_many(A, of("g", b"1", b"2"))
        first, woken = take(store), threading.Event()
        watch = store.receive_or_watch(A, lambda closing: woken.set())
        assert not isinstance(watch, Message)
        first.ack()
        assert woken.wait(PATIENCE)
        found = store.receive_or_watch(A, lambda closing: None)
        assert isinstance(found, Message) and found.body == b"2"

    # What holds a group

    def test_groups_a_claim_holds_it(self, disk: Disk, store: Store, place: str) -> None:
        """That of a transaction, and of a branch over restarts."""
        store.send_many(A, of("g", b"1", b"2"))
        first = claim(store)
        assert store.receive(A) is None
        name = prepare(store, 1, (), [first])
        store = disk.later(store, place)
        assert store.receive(A) is None
        store.commit_prepared(name).wait()
        assert drain(store) == [b"2"]
        assert_whole(store)

    @survives
    def test_groups_a_lease_taken_up_again_holds_it(self, disk: Disk, store: Store) -> None:
        store.send_many(A, of("g", b"1", b"2"))
        first = take(store)
        store = disk.crash(store)
        token = store.lease_again(A, first.seq)
        assert token is not None
        assert store.receive(A) is None
        assert store.settle([token], Settlement.ACK) == [None]
        assert drain(store) == [b"2"]

    def test_groups_what_waits_for_another_try_holds_it(
        self, disk: Disk, clock: Clock, store: Store, place: str
    ) -> None:
        """Over restarts, too; who waits has it once it is due."""
        store.send_many(A, [*of("g", b"1", b"2"), b"x"])
        take(store).release(delay=HOUR / 1000)
        store = disk.later(store, place)
        assert all_bodies(store) == [b"x"]
        assert store.counts(A)[:3] == (1, 1, 1)
        with Parallel(lambda: take(store, A, PATIENCE)) as waiting:
            assert waiting.outlives(0.05)
            clock.offset_ms = HOUR
            back = waiting.result()
        assert (back.body, back.deliveries) == (b"1", 2)
        assert store.receive(A) is None
        back.ack()
        assert drain(store) == [b"2"]
        assert_whole(store)

    def test_groups_what_was_not_delivered_holds_it_too(self, clock: Clock, store: Store) -> None:
        store.send_many(A, of("g", b"1", b"2"))
        take(store).release(delivered=False, delay=HOUR / 1000)
        assert store.receive(A) is None
        clock.offset_ms = HOUR
        assert drain(store) == [b"1", b"2"]

    def test_groups_a_rollback_with_a_wait_holds_it(self, disk: Disk, clock: Clock) -> None:
        store = disk.create(redelivery={"delay": 60})
        store.send_many(A, of("g", b"1", b"2"))
        store.rollback_prepared(prepare(store, 1, (), [claim(store)])).wait()
        assert store.receive(A) is None
        clock.offset_ms = HOUR
        assert drain(store) == [b"1", b"2"]

    def test_groups_what_is_sent_to_come_later_is_passed(
        self, disk: Disk, clock: Clock, store: Store, place: str
    ) -> None:
        """It holds nothing. Once its time has come it is at its place, and waits for its group as others do."""
        due = clock.now + HOUR
        store.send_many(A, [*of("g", b"1", deliver_at_ms=due), *of("g", b"2", b"3")])
        store = disk.later(store, place)
        second = take(store)
        assert second.body == b"2"
        clock.offset_ms = HOUR
        assert store.receive(A) is None
        second.ack()
        assert drain(store) == [b"1", b"3"]

    # What frees a group

    def test_groups_go_on_at_the_delivery_limit(self, disk: Disk, place: str) -> None:
        store = disk.create(max_deliveries=2, dead_letter="dlq")
        store.send_many(A, of("g", b"1", b"2"))
        take(store).release()
        take(store).release()
        store = disk.later(store, place)
        second = take(store)
        assert second.body == b"2"
        ((spent, reason),) = undelivered(store)
        assert (spent.body, spent.group, reason) == (b"1", "g", DELIVERY_LIMIT)
        spent.ack()
        second.release()
        assert drain(store) == [b"2"]

    @pytest.mark.parametrize("swept", [True, False], ids=["swept", "there"])
    def test_groups_expired_messages_are_passed(
        self, disk: Disk, clock: Clock, store: Store, place: str, swept: bool
    ) -> None:
        """Those that are held back, too, whether they are gone by then or not."""
        store.send_many(A, [*of("g", b"1"), *of("g", b"2", b"3", expires_at_ms=clock.now + HOUR // 2), *of("g", b"4")])
        first = take(store)
        assert store.receive(A) is None
        clock.offset_ms = HOUR // 2
        store = disk.later(store, place)
        if place != "here":
            first = take(store)
        if swept:
            for lost in messages_of(undelivered(store)):
                lost.ack()
        first.ack()
        assert drain(store) == [b"4"]
        assert {lost.body for lost in messages_of(undelivered(store))} == (set() if swept else {b"2", b"3"})

    def test_groups_one_that_expires_while_it_waits_frees_it(self, clock: Clock, store: Store) -> None:
        store.send_many(A, [*of("g", b"1", expires_at_ms=clock.now + HOUR // 2), *of("g", b"2")])
        take(store).release(delay=HOUR / 1000)
        with Parallel(lambda: take(store, A, PATIENCE)) as waiting:
            assert waiting.outlives(0.05)
            clock.offset_ms = HOUR // 2
            ((lost, reason),) = undelivered(store)
            assert (lost.body, reason) == (b"1", EXPIRED)
            lost.ack()
            assert waiting.result().body == b"2"

    def test_groups_a_purge_frees_them(self, clock: Clock, store: Store) -> None:
        """What is leased stays, and what waited is gone."""
        store.send_many(A, [*of("g", b"1", b"2"), *of("h", b"3", b"4", b"5")])
        take(store).release(delay=HOUR / 1000)
        third = take(store)
        assert store.purge(A) == 4
        store.send_many(A, [*of("g", b"6", b"7"), *of("h", b"8")])
        assert drain(store) == [b"6", b"7"]
        third.ack()
        assert drain(store) == [b"8"]
        assert_whole(store)

    def test_groups_a_delete_frees_them(self, store: Store) -> None:
        store.send_many(A, of("g", b"1", b"2", b"3"))
        take(store)
        assert store.delete(A) == 3
        store.send_many(A, of("g", b"4", b"5"))
        assert all_bodies(store) == [b"4"]

    # Beside other things

    def test_groups_have_the_order_of_their_queue(self, disk: Disk, place: str) -> None:
        """By priority, where the store has that."""
        store = disk.create(priorities=True)
        store.send_many(A, [*of("g", b"1", b"2"), *of("g", b"9", priority=9), Outgoing(b"x", priority=1)])
        store = disk.later(store, place)
        first = take(store)
        assert first.body == b"9"
        store.send_many(A, of("g", b"7", priority=7))
        assert take(store).body == b"x"
        store.send_many(A, of("g", b"0", priority=0))
        assert store.receive(A) is None
        first.ack()
        assert drain(store) == [b"7", b"1", b"2", b"0"]

    def test_groups_of_a_topic_are_each_subscriptions_own(self, disk: Disk, store: Store, place: str) -> None:
        for subscription in (DESK, BOOK):
            store.subscribe(subscription)
        store.send_many(T, [*of("g", b"1", b"2"), b"x", *of("h", b"3", b"4")])
        store = disk.later(store, place)
        desk = all_there(store, T, subscription=DESK.key)
        assert [message.body for message in desk] == [b"1", b"x", b"3"]
        desk[0].ack()
        assert all_bodies(store, T, subscription=DESK.key) == [b"2"]
        assert drain(store, T, BOOK.key) == [b"1", b"2", b"x", b"3", b"4"]
        late = Subscription(T, "late")
        store.subscribe(late, retroactive=True)
        assert all_bodies(store, T, subscription=late.key) == [b"2", b"x", b"3"]
        assert_whole(store)

    def test_groups_of_a_subscription_wait_for_another_try(
        self, disk: Disk, clock: Clock, store: Store, place: str
    ) -> None:
        """Nobody else waits with it."""
        for subscription in (DESK, BOOK):
            store.subscribe(subscription)
        store.send_many(T, of("g", b"1", b"2"))
        take(store, T, subscription=DESK.key).release(delay=HOUR / 1000)
        store = disk.later(store, place)
        assert all_bodies(store, T, subscription=DESK.key) == []
        assert drain(store, T, BOOK.key) == [b"1", b"2"]
        clock.offset_ms = HOUR
        assert drain(store, T, DESK.key) == [b"1", b"2"]

    def test_groups_of_all_subscriptions_wait_for_another_try(
        self, disk: Disk, clock: Clock, store: Store, place: str
    ) -> None:
        """More wait than there are messages."""
        subscriptions = [Subscription(T, f"desk{n}") for n in range(3)]
        for subscription in subscriptions:
            store.subscribe(subscription)
        store.send_many(T, of("g", b"1", b"2"))
        for subscription in subscriptions:
            take(store, T, subscription=subscription.key).release(delay=HOUR / 1000)
        store = disk.later(store, place)
        assert [all_bodies(store, T, subscription=one.key) for one in subscriptions] == [[], [], []]
        clock.offset_ms = HOUR
        for subscription in subscriptions:
            assert drain(store, T, subscription.key) == [b"1", b"2"]

    def test_groups_of_transient_messages(self, clock: Clock, store: Store) -> None:
        """Of one group they are in one order with the others."""
        store.send_many(A, of("g", b"1"))
        store.send(A, b"2", {GROUP: "g"}, persistent=False)
        store.send_many(A, [*of("g", b"3"), *of("g", b"4", persistent=False), Outgoing(b"x", persistent=False)])
        first = all_there(store)
        assert [message.body for message in first] == [b"1", b"x"]
        first[0].ack()
        (second,) = all_there(store)
        assert second.body == b"2"
        second.release(delay=HOUR / 1000)
        assert store.receive(A) is None
        clock.offset_ms = HOUR
        assert drain(store) == [b"2", b"3", b"4"]

    def test_groups_of_transient_messages_alone(self, store: Store) -> None:
        store.send_many(A, of("g", b"1", b"2", persistent=False))
        with Parallel(lambda: take(store, A, PATIENCE)) as first:
            one = first.result()
        with Parallel(lambda: take(store, A, PATIENCE)) as waiting:
            assert waiting.outlives(0.05)
            one.ack()
            assert waiting.result().body == b"2"

    def test_groups_of_many_messages(self, disk: Disk, store: Store, place: str) -> None:
        """All that is behind a busy group is received, and then the group in order."""
        count = disk.many_priorities
        store.send_many(A, [*of("g", *(b"%d" % n for n in range(count))), *of("h", b"h1", b"h2"), b"x"])
        store = disk.later(store, place)
        first = all_there(store)
        assert [message.body for message in first] == [b"0", b"h1", b"x"]
        store.ack(first)
        assert [body for body in drain(store) if body != b"h2"] == [b"%d" % n for n in range(1, count)]
        assert store.depth(A) == 0
        assert_whole(store)

    def test_groups_in_one_queue_are_many(self, disk: Disk, store: Store, place: str) -> None:
        count = disk.many_priorities // 3
        store.send_many(A, [Outgoing(b"%d" % n, group=f"g{n % count}") for n in range(3 * count)])
        store = disk.later(store, place)
        for part in range(3):
            found = all_there(store)
            assert [int(message.body) for message in found] == list(range(part * count, part * count + count))
            store.ack(found[::-1])
        assert store.counts(A)[:3] == Counts(0, 0, 0)[:3]

    @in_one_store("group, error", [
        (3, TypeError), (b"g", TypeError), (True, TypeError), ("", ValueError), ("\ud800", ValueError),
        ("g" * (GROUP_BYTES_MAX + 1), ValueError),
    ])  # fmt: skip
    def test_groups_what_is_none_is_refused(self, store: Store, group: Any, error: type[Exception]) -> None:
        """Also where it is given as the header that it is."""
        for send in (
            lambda: store.send_many(A, [Outgoing(b"x", group=group)]),
            lambda: store.send_many(A, [Outgoing(b"x", {GROUP: group})]),
            lambda: store.send(A, b"x", {GROUP: group}),
            lambda: store.commit([(A, Outgoing(b"x", group=group))], []),
        ):
            with pytest.raises(error, match="group"):
                send()
        assert store.depth(A) == 0

    def test_groups_a_header_that_says_another_is_refused(self, store: Store) -> None:
        with pytest.raises(ValueError, match=r"'a'.*'b'"):
            store.send_many(A, [Outgoing(b"x", {GROUP: "a"}, group="b")])
        store.send_many(A, [Outgoing(b"x", {GROUP: "g" * GROUP_BYTES_MAX}, group="g" * GROUP_BYTES_MAX)])
        assert take(store).group == "g" * GROUP_BYTES_MAX

    def test_groups_the_name_of_the_header_is_a_value_as_others(self, store: Store) -> None:
        store.send_many(
            A, [Outgoing(b"1", {"kind": GROUP}), Outgoing(b"2", {"of": {GROUP: "g"}}), *of("g", b"3", b"4")]
        )
        assert all_bodies(store) == [b"1", b"2", b"3"]
