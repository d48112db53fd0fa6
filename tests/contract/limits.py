"""The contract of a store's limits: what goes beyond one is refused, takes no effect, and fits once there is room."""

from __future__ import annotations

import pytest

from anabranch.adapters.core import Store
from anabranch.adapters.core.messages import Outgoing, Receipt
from anabranch.adapters.core.store_types import Subscription
from anabranch.policies.errors import StoreFullError, UnknownMessageError

from .disk import PATIENCE, A, B, Disk, Parallel, T, assert_whole, bodies, drain, survives, take


class LimitsContract:
    def test_max_messages(self, disk: Disk) -> None:
        store = disk.create(max_messages=3)
        store.send(A, b"1")
        store.send(B, b"2")
        store.send(A, b"3")
        for call in (
            lambda: store.send(A, b"4"),
            lambda: store.send_many(A, [b"4"]),
            lambda: store.send_nowait(A, b"4").result(PATIENCE),
            lambda: store.commit([(A, Outgoing(b"4"))], []),
        ):
            with pytest.raises(StoreFullError, match="max_messages is 3"):
                call()
        assert (bodies(store, A), bodies(store, B)) == ([b"1", b"3"], [b"2"])
        take(store).ack()
        store.send(A, b"4")
        with pytest.raises(StoreFullError):
            store.send(A, b"5")
        assert drain(store) == [b"3", b"4"]

    def test_max_bytes(self, disk: Disk) -> None:
        store = disk.create(max_bytes=3000)
        store.send_many(A, [b"x" * 1000] * 2)
        with pytest.raises(StoreFullError, match=r"max_\w*bytes is 3000"):
            store.send(A, b"x" * 1000)
        assert store.depth(A) == 2
        take(store).ack()
        store.send(A, b"x" * 1000)

    def test_a_commit_that_goes_beyond_is_refused_whole(self, disk: Disk) -> None:
        store = disk.create(max_messages=3)
        store.send_many(A, [b"1", b"2"])
        message = take(store)
        store.claim(message)
        with pytest.raises(StoreFullError):
            store.commit([(A, Outgoing(b"x"))] * 3, [message])
        assert bodies(store) == [b"1", b"2"]
        store.commit([(A, Outgoing(b"3"))], [message])  # still claimed
        assert bodies(store) == [b"2", b"3"]

    def test_a_commit_after_which_the_store_holds_no_more_is_not_refused(self, disk: Disk) -> None:
        store = disk.create(max_messages=2)
        store.send_many(A, [b"1", b"2"])
        message = take(store)
        store.claim(message)
        with pytest.raises(StoreFullError):
            store.commit([(B, Outgoing(b"x"))] * 2, [message])
        store.commit([(B, Outgoing(b"3"))], [message])
        message = take(store, B)
        store.claim(message)
        store.commit_nowait([(B, Outgoing(b"4", persistent=False))], [message]).result(PATIENCE)
        with pytest.raises(StoreFullError):
            store.send(A, b"x")
        assert (bodies(store), bodies(store, B)) == ([b"2"], [b"4"])
        message = take(store)
        store.claim(message)
        store.commit([(B, Outgoing(b"5"))], [message])
        with pytest.raises(StoreFullError):
            store.send(A, b"x")
        assert drain(store, B) == [b"4", b"5"]
        assert_whole(store)

    def test_the_ack_of_one_subscription_of_several_makes_no_room(self, disk: Disk) -> None:
        store = disk.create(max_messages=1)
        keys = []
        for name in ("desk", "book"):
            subscription = Subscription(T, name)
            store.subscribe(subscription)
            keys.append(subscription.key)
        store.send(T, b"1")
        first, last = (take(store, T, 0, key) for key in keys)
        store.claim(first)
        store.claim(last)
        with pytest.raises(StoreFullError):
            store.commit([(A, Outgoing(b"x"))], [first])
        store.commit([], [first])
        store.commit([(A, Outgoing(b"2"))], [last])
        with pytest.raises(StoreFullError):
            store.send(A, b"x")
        assert drain(store) == [b"2"]
        assert_whole(store)

    def test_in_place_of_as_many_messages_bodies_alone_count(self, disk: Disk) -> None:
        """So that dead letters, whose headers say more than those of the messages, leave a full store."""
        store = disk.create(max_bytes=3000)
        store.send(A, b"x" * 2900)
        message = take(store)
        store.claim(message)
        for sends in ([Outgoing(b"x" * 3000, {"k": "v" * 200})], [Outgoing(b"x" * 1450, {"k": "v" * 200})] * 2):
            with pytest.raises(StoreFullError, match=r"max_\w*bytes is 3000"):
                store.commit([(B, outgoing) for outgoing in sends], [message])
        store.commit([(B, Outgoing(b"x" * 2900, {"k": "v" * 200}))], [message])
        with pytest.raises(StoreFullError):
            store.send(A, b"")
        assert drain(store, B) == [b"x" * 2900]

    def test_send_many_stops_at_the_limit(self, disk: Disk) -> None:
        store = disk.create(max_messages=5)
        with pytest.raises(StoreFullError):
            store.send_many(A, [b"x"] * 8)
        assert store.depth(A) <= 5
        assert store.stats().messages <= 5
        assert_whole(store)

    def test_sends_without_waiting_stop_at_the_limit(self, disk: Disk) -> None:
        store = disk.create(max_messages=5)
        done, full = 0, 0
        for _ in range(20):
            try:
                store.send_nowait(A, b"x").result(PATIENCE)
                done += 1
            except StoreFullError:
                full += 1
        assert (done, full, store.depth(A)) == (5, 15, 5)

    def test_sends_of_many_threads_stop_at_the_limit(self, disk: Disk) -> None:
        store = disk.create(max_messages=20)

        def fill() -> int:
            sent = 0
            try:
                while sent < 50:
                    store.send(A, b"x")
                    sent += 1
            except StoreFullError:
                pass
            return sent

        with Parallel(fill) as one, Parallel(fill) as two, Parallel(fill) as three, Parallel(fill) as four:
            assert sum(some.result() for some in (one, two, three, four)) == 20
        assert store.depth(A) == 20

    def test_refused_sends_leave_the_room_to_others(self, disk: Disk) -> None:
        """What was too large, failed or a duplicate takes no room for good."""
        store = disk.create(max_messages=3, message_bytes_max=1000)
        for _ in range(10):
            with pytest.raises(ValueError, match="message_bytes_max"):
                store.send(A, b"x" * 2000)
            with pytest.raises(StoreFullError):
                store.send_many(A, [b"x"] * 4)
            store.purge(A)
            with pytest.raises(StoreFullError):
                store.commit([(A, Outgoing(b"x"))] * 4, [])
        store.send(A, b"1", None, "id")
        for _ in range(10):
            assert store.send(A, b"1", None, "id").duplicate
        store.send_many(A, [b"2", b"3"])
        assert bodies(store) == [b"1", b"2", b"3"]

    def test_what_failed_leaves_its_room_though_its_error_is_kept(self, disk: Disk) -> None:
        store = disk.create(max_messages=3)
        store.send(A, b"1")
        message = take(store)
        message.ack()
        sends = [(A, Outgoing(b"x"))] * 3
        kept = []
        for call in (
            lambda: store.commit(sends, [message]),
            lambda: store.commit_nowait(sends, [message]),
            lambda: store.prepare(b"t" * 32, [store.store_id], sends, [message], True, store.reserve(sends)),
        ):
            with pytest.raises(UnknownMessageError) as raised:
                call()
            kept.append(raised.value)
            assert len(store.send_many(B, [b"x"] * 3)) == 3
            assert len(drain(store, B)) == 3
        assert len(kept) == 3

    @survives
    def test_limits_count_what_an_earlier_process_left(self, disk: Disk) -> None:
        store = disk.create(max_messages=2)
        store.send_many(A, [b"1", b"2"])
        again = disk.crash(store)
        with pytest.raises(StoreFullError):
            again.send(A, b"3")

    def test_a_message_id_in_the_window_needs_no_room(self, disk: Disk) -> None:
        """An unsure sender that sends again must hear `duplicate`, not `full`."""
        store = disk.create(max_messages=1)
        first = store.send(A, b"1", None, "id")
        assert store.send(A, b"1", None, "id") == Receipt(A, first.seq, True)

    def test_a_new_message_id_twice_in_one_call_needs_room_once(self, disk: Disk) -> None:
        store = disk.create(max_messages=2)
        store.send(A, b"1")
        first, second = store.send_many(A, [Outgoing(b"2", None, "id"), Outgoing(b"2", None, "id")])
        assert (first.duplicate, second) == (False, Receipt(A, first.seq, True))
        assert bodies(store) == [b"1", b"2"]
        take(store).ack()
        store.commit([(A, Outgoing(b"3", None, "other"))] * 2, [])
        assert bodies(store) == [b"2", b"3"]

    def test_a_requeued_message_needs_room(self, disk: Disk) -> None:
        """It is stored, be its id in the window or not."""
        store = disk.create(max_messages=1)
        store.send(A, b"1", None, "id")
        back = [(A, Outgoing(b"2", None, "id", requeued=True))]
        with pytest.raises(StoreFullError):
            store.commit(back, [])
        with pytest.raises(StoreFullError):
            store.reserve(back)
        assert bodies(store) == [b"1"]

    def test_max_leases(self, disk: Disk) -> None:
        store = disk.create(max_leases=3)
        store.send_many(A, [b"x"] * 5)
        messages = [take(store) for _ in range(3)]
        with pytest.raises(StoreFullError, match="max_leases is 3"):
            store.receive(A)
        store.claim(messages[2])  # a claim is a lease still
        with pytest.raises(StoreFullError):
            store.receive(A, timeout=0.01)
        messages[0].ack()
        take(store)
        messages[1].release()
        take(store)
        with pytest.raises(StoreFullError):
            store.receive(A)

    def test_max_leases_is_a_queues_own(self, disk: Disk) -> None:
        """Who does not ack holds up nobody but those who receive from the same queue."""
        store = disk.create(max_leases=2)
        store.send_many(A, [b"a"] * 3)
        store.send_many(B, [b"b"] * 2)
        take(store, A)
        take(store, A)
        with pytest.raises(StoreFullError):
            store.receive(A)
        assert [take(store, B).body for _ in range(2)] == [b"b"] * 2

    def test_full_is_not_failed(self, disk: Disk) -> None:
        store = disk.create(max_messages=1)
        store.send(A, b"x")
        with pytest.raises(StoreFullError):
            store.send(A, b"y")
        assert store.stats().failed is None
        assert drain(store) == [b"x"]
        assert_whole(store)

    def test_a_batch_beside_a_limit(self, disk: Disk, store: Store) -> None:
        """No limits, no refusals: 20,000 leases and as many acks in one call."""
        store.send_many(A, [b"x"] * 2000)
        messages = [take(store) for _ in range(2000)]
        store.ack(messages)
        assert store.depth(A) == 0
        assert_whole(store)
