"""The contract of what happens at a limit: waiting for room, and what is dropped."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from anabranch.adapters.core import Store
from anabranch.adapters.core.messages import Outgoing
from anabranch.adapters.core.state.limits import without_waiting
from anabranch.adapters.core.store_types import Counts, Subscription
from anabranch.policies.config.limits import LimitOptions
from anabranch.policies.errors import ClosedError, StoreFullError

from .disk import PATIENCE, A, B, Disk, Parallel, T, assert_whole, bodies, drain, eventually, survives, take
from .features import limits_of

LONG = 1000.0
"""Seconds that a test does not wait for."""


def limit(pattern: str, messages: int, **options: Any) -> LimitOptions:
    return LimitOptions(match=(pattern,), max_messages=messages, **options)


@functools.singledispatch
def waiting(store: Store) -> int:
    """How many wait for room."""
    return len(limits_of(store)._line)


class WhenFullContract:
    # Limits of destinations

    def test_each_destination_has_its_own_limit(self, disk: Disk) -> None:
        store = disk.create(limits=[limit("a", 2), limit("topic://>", 1)])
        store.subscribe(Subscription(T, "s"))
        store.send_many(A, [b"1", b"2"])
        store.send_many(B, [b"x"] * 20)
        store.send(T, b"t")
        for destination in (A, T):
            for call in (
                lambda to=destination: store.send(to, b"3"),
                lambda to=destination: store.send(to, b"3", persistent=False),
                lambda to=destination: store.send_nowait(to, b"3").result(PATIENCE),
                lambda to=destination: store.send_many(to, [b"3"]),
                lambda to=destination: store.commit([(B, Outgoing(b"x")), (to, Outgoing(b"3"))], []),
                lambda to=destination: store.reserve([(to, Outgoing(b"3"))]),
            ):
                with pytest.raises(StoreFullError, match=f"{destination} in store .*max_messages is"):
                    call()
        assert store.depth(B) == 20
        take(store).ack()
        store.send(A, b"3")
        assert bodies(store) == [b"2", b"3"]

    def test_a_destinations_bytes(self, disk: Disk) -> None:
        store = disk.create(limits=[LimitOptions(match=("a",), max_bytes=3000)])
        store.send_many(A, [b"x" * 1000] * 2)
        with pytest.raises(StoreFullError, match="max_bytes is 3000"):
            store.send(A, b"x" * 1000)
        store.send(B, b"x" * 5000)
        take(store).ack()
        store.send(A, b"x" * 1000)

    @survives
    def test_a_limit_below_what_is_there(self, disk: Disk) -> None:
        store = disk.create()
        store.send_many(A, [b"1", b"2", b"3"])
        store = disk.reopen(store, limits=[limit("a", 2)])
        with pytest.raises(StoreFullError):
            store.send(A, b"4")
        take(store).ack()
        with pytest.raises(StoreFullError):
            store.send(A, b"4")
        take(store).ack()
        store.send(A, b"4")
        assert bodies(store) == [b"3", b"4"]

    def test_what_is_not_persistent_has_limits_of_its_own(self, disk: Disk) -> None:
        if disk.volatile:
            return  # there all messages are alike
        store = disk.create(nonpersistent_max_messages=2, max_messages=4)
        store.send(A, b"1", persistent=False)
        store.send(A, b"2", persistent=False)
        with pytest.raises(StoreFullError, match="nonpersistent_max_messages is 2"):
            store.send(A, b"3", persistent=False)
        with pytest.raises(StoreFullError, match="nonpersistent_max_messages is 2"):
            store.commit([(A, Outgoing(b"3", persistent=False)), (A, Outgoing(b"4"))], [])
        store.send_many(A, [b"3", b"4"])
        with pytest.raises(StoreFullError, match=r"max_messages is 4"):
            store.send(A, b"5")
        drain(store)
        store.send(A, b"6", persistent=False)
        assert_whole(store)

    def test_bytes_of_what_is_not_persistent(self, disk: Disk) -> None:
        if disk.volatile:
            return
        store = disk.create(nonpersistent_max_bytes=3000, when_full="drop_old")
        for number in range(5):
            store.send(A, b"%d" % number * 1000, persistent=False)
            store.send(A, b"kept")
        found = bodies(store)
        assert found.count(b"kept") == 5
        assert [body for body in found if body != b"kept"] == [b"3" * 1000, b"4" * 1000]
        assert_whole(store)

    # Waiting

    def test_a_send_waits_for_room(self, disk: Disk) -> None:
        store = disk.create(max_messages=1, when_full="block", block_timeout=LONG)
        calls: list[Callable[[], object]] = [
            lambda: store.send(A, b"x"),
            lambda: store.send_many(A, [b"x"]),
            lambda: store.send(A, b"x", persistent=False),
            lambda: store.send_nowait(A, b"x").result(PATIENCE),
            lambda: store.commit([(A, Outgoing(b"x"))], []),
            lambda: store.commit_nowait([(A, Outgoing(b"x"))], []).result(PATIENCE),
            lambda: store.reserve([(A, Outgoing(b"x"))]) and store.send_nowait(A, b"x"),
        ]
        store.send(A, b"x")
        for call in calls[:-1]:
            with Parallel(call) as sender:
                eventually(lambda: waiting(store))
                take(store).ack()
                sender.result()
            assert store.depth(A) == 1
        assert_whole(store)

    def test_who_waits_gives_up_in_time(self, disk: Disk) -> None:
        store = disk.create(max_messages=1, when_full="block", block_timeout=0.05)
        store.send(A, b"1")
        message = take(store)
        store.claim(message)
        for call in (
            lambda: store.send(A, b"2"),  # though the one that could ack is this thread
            lambda: store.send_nowait(A, b"2").result(PATIENCE),
            lambda: store.send_many(A, [b"2"]),
            lambda: store.commit([(A, Outgoing(b"2"))] * 2, [message]),
            lambda: store.reserve([(A, Outgoing(b"2"))]),
        ):
            with pytest.raises(StoreFullError):
                call()
        assert not waiting(store)
        store.commit([(A, Outgoing(b"2"))], [message])  # what acks as many as it sends needs no room
        assert bodies(store) == [b"2"]

    def test_what_can_never_fit_is_refused_at_once(self, disk: Disk) -> None:
        store = disk.create(max_messages=2, max_bytes=2000, when_full="block", block_timeout=LONG)
        for call in (
            lambda: store.send(A, b"x" * 3000),
            lambda: store.commit([(A, Outgoing(b"x"))] * 3, []),
        ):
            with pytest.raises(StoreFullError):
                call()
        without_waiting(lambda: store.send_many(A, [b"x"] * 2))
        with pytest.raises(StoreFullError):
            without_waiting(lambda: store.send(A, b"x"))

    def test_many_that_are_more_than_fit_go_one_after_the_other(self, disk: Disk) -> None:
        store = disk.create(max_messages=3, when_full="block", block_timeout=LONG)
        sent = [b"%d" % number for number in range(20)]
        with Parallel(lambda: store.send_many(A, sent)) as sender:
            found = []
            for _ in sent:
                message = take(store, A, PATIENCE)
                found.append(message.body)
                assert store.depth(A) <= 3
                message.ack()
            assert len(sender.result()) == 20
        assert found == sent

    def test_who_came_first_gets_room_first(self, disk: Disk) -> None:
        store = disk.create(max_messages=1, when_full="block", block_timeout=LONG)
        store.send(A, b"full")
        threads = []
        for number in range(8):
            threads.append(threading.Thread(target=lambda body=b"%d" % number: store.send(A, body)))
            threads[-1].start()
            eventually(lambda: waiting(store) == len(threads))
        found = []
        for _ in range(9):
            message = take(store, A, PATIENCE)
            found.append(message.body)
            message.ack()
        for thread in threads:
            thread.join()
        assert found == [b"full", *(b"%d" % number for number in range(8))]

    def test_sends_that_do_not_wait_keep_their_order(self, disk: Disk) -> None:
        store = disk.create(max_messages=2, when_full="block", block_timeout=LONG)
        futures = [store.send_nowait(A, b"%d" % number) for number in range(6)]
        with Parallel(lambda: store.send(A, b"6")) as sender:
            eventually(lambda: waiting(store) == 5)
            found = []
            for _ in range(7):
                message = take(store, A, PATIENCE)
                found.append(message.body)
                message.ack()
            sender.result()
        assert found == [b"%d" % number for number in range(7)]
        assert [future.result(PATIENCE).seq for future in futures] == sorted(future.result().seq for future in futures)

    def test_a_full_destination_holds_up_its_own_senders_alone(self, disk: Disk) -> None:
        store = disk.create(limits=[limit("a", 1)], max_messages=100, when_full="block", block_timeout=LONG)
        store.send(A, b"1")
        future = store.send_nowait(A, b"2")
        with Parallel(lambda: store.send(A, b"3")) as sender:
            eventually(lambda: waiting(store) == 2)
            store.send(B, b"x")
            store.send_nowait(B, b"x").result(PATIENCE)
            store.commit([(B, Outgoing(b"x"))], [])
            store.purge(A)
            assert future.result(PATIENCE).seq
            store.purge(A)
            sender.result()
        assert bodies(store) == [b"3"]

    @pytest.mark.parametrize("how", ["purge", "delete", "release_branch", "commit_other", "nonpersistent"])
    def test_room_comes_of_whatever_frees_it(self, disk: Disk, how: str) -> None:
        store = disk.create(max_messages=2, when_full="block", block_timeout=LONG)
        name = b"t" * 32
        held = None
        if how == "release_branch":
            sends = [(B, Outgoing(b"x"))] * 2
            store.prepare(name, [store.store_id], sends, [], True, store.reserve(sends)).wait()
        elif how == "nonpersistent":
            store.send(B, b"1", persistent=False)
            store.send(B, b"2", persistent=False)
        elif how == "commit_other":
            held = store.reserve([(B, Outgoing(b"x"))] * 2)
        else:
            store.send_many(B, [b"1", b"2"])
        with Parallel(lambda: store.send(A, b"here")) as sender:
            eventually(lambda: waiting(store))
            if how == "purge":
                store.purge(B)
            elif how == "delete":
                store.delete(B)
            elif how == "release_branch":
                store.rollback_prepared(name).wait()
            elif how == "nonpersistent":
                take(store, B).ack()
            else:
                assert held is not None
                del held
            sender.result()
        assert bodies(store) == [b"here"]

    def test_who_waits_hears_that_the_store_is_closed(self, disk: Disk) -> None:
        store = disk.create(max_messages=1, when_full="block", block_timeout=LONG)
        store.send(A, b"1")
        future = store.send_nowait(A, b"2")
        with Parallel(lambda: store.send(A, b"3")) as sender, Parallel(lambda: store.send(A, b"4")) as other:
            eventually(lambda: waiting(store) == 3)
            store.close()
            for one in (sender, other):
                with pytest.raises(ClosedError):
                    one.result()
        with pytest.raises(ClosedError):
            future.result(PATIENCE)

    def test_a_duplicate_does_not_wait(self, disk: Disk) -> None:
        store = disk.create(max_messages=1, when_full="block", block_timeout=LONG)
        first = store.send(A, b"1", message_id="id")
        assert store.send(A, b"1", message_id="id") == (A, first.seq, True)

    # What is new is dropped

    def test_what_finds_no_room_is_dropped_and_its_receipt_says_so(self, disk: Disk) -> None:
        store = disk.create(max_messages=2, when_full="drop_new")
        receipts = store.send_many(A, [b"1", b"2", b"3"])
        assert [receipt.dropped for receipt in receipts] == [False, False, True]
        assert ["dropped=True" in repr(receipt) for receipt in receipts] == [False, False, True]
        assert store.send(A, b"4").dropped
        assert store.send(A, b"5", persistent=False).dropped
        assert store.send_nowait(A, b"6").result(PATIENCE).dropped
        message = take(store)
        store.claim(message)
        receipts = store.commit([(B, Outgoing(b"7")), (A, Outgoing(b"8"))], [message])
        assert [(receipt.destination, receipt.dropped) for receipt in receipts] == [(B, False), (A, True)]
        receipts = store.commit_nowait([(A, Outgoing(b"9"))] * 2, []).result(PATIENCE)
        assert [receipt.dropped for receipt in receipts] == [True, True]
        assert (bodies(store), bodies(store, B)) == ([b"2"], [b"7"])
        assert store.stats().dropped == 7
        assert store.stats().sends == 3
        assert_whole(store)

    def test_of_a_prepared_branch_what_finds_no_room_is_dropped(self, disk: Disk) -> None:
        store = disk.create(limits=[limit("a", 1)], when_full="drop_new")
        name = b"t" * 32
        sends = [(A, Outgoing(b"1")), (A, Outgoing(b"2")), (B, Outgoing(b"3"))]
        store.prepare(name, [store.store_id], sends, [], True, store.reserve(sends)).wait()
        assert store.send(A, b"x").dropped  # the room is the branch's
        receipts = store.commit_prepared(name).wait()
        assert [(receipt.destination, receipt.dropped) for receipt in receipts] == [(A, False), (A, True), (B, False)]
        assert (bodies(store), bodies(store, B)) == ([b"1"], [b"3"])
        assert store.stats().dropped == 2

    # What is old is dropped

    def test_a_ring_keeps_the_latest(self, disk: Disk) -> None:
        store = disk.create(max_messages=3, when_full="drop_old")
        for number in range(4):
            store.send(A if number % 2 else B, b"%d" % number)
        assert (bodies(store), bodies(store, B)) == ([b"1", b"3"], [b"2"])
        store.send_many(A, [b"%d" % number for number in range(10, 20)])
        assert (bodies(store), bodies(store, B)) == ([b"17", b"18", b"19"], [])
        store.commit([(B, Outgoing(b"20")), (A, Outgoing(b"21"))], [])
        store.send_nowait(A, b"22").result(PATIENCE)
        assert (bodies(store), bodies(store, B)) == ([b"21", b"22"], [b"20"])
        assert store.stats().dropped == 14
        for again in disk.views(store):
            assert (bodies(again), bodies(again, B)) == ([b"21", b"22"], [b"20"])
            assert_whole(again)
        assert drain(store) == [b"21", b"22"]

    def test_a_destinations_ring(self, disk: Disk) -> None:
        store = disk.create(limits=[limit("a", 2, when_full="drop_old")])
        store.send(B, b"x")
        for number in range(5):
            store.send(A, b"%d" % number)
        assert (bodies(store), bodies(store, B)) == ([b"3", b"4"], [b"x"])

    def test_a_ring_of_bytes(self, disk: Disk) -> None:
        store = disk.create(max_bytes=4000, when_full="drop_old")
        for number in range(6):
            store.send(A, b"%d" % number * 1000)
        assert [body[:1] for body in bodies(store)] == [b"3", b"4", b"5"]
        store.send(A, b"6" * 2500)
        assert [body[:1] for body in bodies(store)] == [b"5", b"6"]
        with pytest.raises(StoreFullError):
            store.send(A, b"7" * 5000)
        assert len(bodies(store)) == 2

    def test_what_somebody_holds_is_never_dropped(self, disk: Disk) -> None:
        store = disk.create(max_messages=3, when_full="drop_old")
        store.send_many(A, [b"1", b"2", b"3"])
        first = take(store)
        store.send(A, b"4")
        assert bodies(store) == [b"1", b"3", b"4"]
        second, third = take(store), take(store)
        store.claim(third)
        with pytest.raises(StoreFullError, match="nothing that could go: it is held"):
            store.send(A, b"5")
        first.release()
        store.send(A, b"5")
        assert bodies(store) == [b"3", b"4", b"5"]
        second.ack()
        store.commit([(A, Outgoing(b"6"))], [third])
        assert bodies(store) == [b"5", b"6"]
        assert_whole(store)

    @survives
    def test_what_a_prepared_branch_acks_is_never_dropped(self, disk: Disk, place: str) -> None:
        store = disk.create(max_messages=2, when_full="drop_old")
        store.send_many(A, [b"1", b"2"])
        message = take(store)
        store.claim(message)
        store.prepare(b"t" * 32, [store.store_id], [], [message], True).wait()
        store = disk.later(store, place)
        for number in range(3, 6):
            store.send(A, b"%d" % number)
        assert bodies(store) == [b"1", b"5"]
        store.rollback_prepared(b"t" * 32).wait()
        assert drain(store) == [b"1", b"5"]

    def test_a_branch_that_drops_does_so_when_it_is_committed(self, disk: Disk, place: str) -> None:
        store = disk.create(max_messages=2, when_full="drop_old")
        for number, outcome in enumerate((False, True)):
            store.send_many(A, [b"1", b"2"])
            name = bytes([number]) * 32
            sends = [(B, Outgoing(b"3"))]
            store.prepare(name, [store.store_id], sends, [], True, store.reserve(sends)).wait()
            store = disk.later(store, place)
            assert (bodies(store), bodies(store, B)) == ([b"1", b"2"], [])
            if outcome:
                store.commit_prepared(name).wait()
                assert (drain(store), drain(store, B)) == ([b"2"], [b"3"])
            else:
                store.rollback_prepared(name).wait()
                assert (drain(store), drain(store, B)) == ([b"1", b"2"], [])
        assert_whole(store)

    @pytest.mark.parametrize("commit", [True, False], ids=["commit", "rollback"])
    @pytest.mark.parametrize("count_deliveries", ["on_return", "on_receive"])
    def test_what_a_branch_drops_was_not_delivered(
        self, disk: Disk, count_deliveries: str, commit: bool, place: str
    ) -> None:
        """Committed it counts as dropped, not as acked; rolled back it neither waits nor counts as a delivery."""
        store = disk.create(
            max_messages=3, when_full="drop_old", redelivery={"delay": LONG}, count_deliveries=count_deliveries
        )  # fmt: skip
        store.send_many(A, [b"1", b"2", b"3"])
        acked = take(store)
        take(store).release(delay=0)
        store.claim(acked)
        name, sends = b"t" * 32, [(B, Outgoing(b"x"))] * 3
        store.prepare(name, [store.store_id], sends, [acked], True, store.reserve(sends, [acked])).wait()
        before = store.stats()
        store = disk.later(store, place)
        before = before if place == "here" or disk.volatile else store.stats()
        if commit:
            store.commit_prepared(name).wait()
            after = store.stats()
            assert bodies(store) == []
            assert (after.sends - before.sends, after.acks - before.acks, after.dropped - before.dropped) == (3, 1, 2)
        else:
            store.rollback_prepared(name).wait()
            assert store.counts(A) == Counts(2, 0, 1)
            assert [(one.body, one.deliveries) for one in (take(store), take(store))] == [(b"2", 2), (b"3", 1)]
        assert_whole(store)

    def test_a_topics_message_is_dropped_for_all(self, disk: Disk) -> None:
        store = disk.create(max_messages=2, when_full="drop_old")
        one, two = Subscription(T, "one"), Subscription(T, "two")
        store.subscribe(one)
        store.subscribe(two)
        store.send_many(T, [b"1", b"2"])
        take(store, T, 0, one.key).ack()
        store.send(T, b"3")  # the first goes, for `two` too
        assert drain(store, T, two.key) == [b"2", b"3"]
        held = take(store, T, 0, one.key)
        assert held.body == b"2"
        store.send(T, b"4")  # not the one that is held
        held.release()
        assert drain(store, T, one.key) == [b"2", b"4"]
        assert drain(store, T, two.key) == [b"4"]
        assert store.depth(T) == 0
        assert_whole(store)

    def test_a_refused_send_drops_nothing(self, disk: Disk) -> None:
        store = disk.create(max_messages=2, when_full="drop_old", message_bytes_max=1000)
        store.send_many(A, [b"1", b"2"])
        with pytest.raises(ValueError, match="message_bytes_max"):
            store.send(A, b"x" * 2000)
        room = store.reserve([(A, Outgoing(b"x"))])
        assert [take(store).body] == [b"2"]  # the first is about to go
        assert room is not None
        room.cancel()
        assert [take(store).body] == [b"1"]
        assert store.stats().dropped == 0

    @survives
    def test_a_ring_that_was_made_smaller_shrinks(self, disk: Disk) -> None:
        store = disk.create()
        store.send_many(A, [b"%d" % number for number in range(500)])
        store = disk.reopen(store, max_messages=10, when_full="drop_old")
        for _ in range(10):
            store.send(A, b"x")
        assert store.depth(A) == 10
        assert bodies(store) == [b"x"] * 10

    def test_senders_and_receivers_of_a_ring_at_once(self, disk: Disk) -> None:
        """Each message is received or dropped, once."""
        store = disk.create(max_messages=20, when_full="drop_old")
        end = threading.Event()
        count = 100

        def send(name: int) -> None:
            for number in range(count):
                store.send(A, b"%d %d" % (name, number))

        def receive() -> list[bytes]:
            found = []
            while True:
                message = store.receive(A, 0)
                if message is not None:
                    found.append(message.body)
                    message.ack()
                elif end.is_set():
                    return found
                else:
                    time.sleep(0.001)

        with Parallel(receive) as first, Parallel(receive) as second:
            with Parallel(lambda: send(1)) as one, Parallel(lambda: send(2)) as two, Parallel(lambda: send(3)) as three:
                for sender in (one, two, three):
                    sender.result()
            end.set()
            found = first.result() + second.result()
        assert len(found) == len(set(found))
        assert len(found) + store.stats().dropped == 3 * count
        assert_whole(store)
