"""The contract of receive and browse."""

from __future__ import annotations

import time
from typing import Any

import pytest

from anabranch.adapters.core import Store
from anabranch.adapters.core.store_types import Counts, Subscription
from anabranch.policies.errors import ClosedError, StoreFullError
from anabranch.policies.names.destination import Destination

from .disk import PATIENCE, A, B, Disk, Parallel, T, bodies, drain, survives, take


class ReceivingContract:
    def test_receive_in_order(self, store: Store) -> None:
        sent = [str(n).encode() for n in range(200)]
        store.send_many(A, sent)
        received = [take(store).body for _ in sent]
        assert received == sent
        assert store.receive(A) is None

    def test_order_of_sends_and_receives_mixed(self, store: Store) -> None:
        got = []
        for n in range(100):
            store.send(A, str(2 * n).encode())
            store.send(A, str(2 * n + 1).encode())
            message = take(store)
            got.append(message.body)
            message.ack()
        assert got + drain(store) == [str(n).encode() for n in range(200)]

    def test_nothing_there(self, store: Store) -> None:
        assert store.receive(A) is None
        assert store.depth(A) == 0
        assert bodies(store) == []
        assert list(store.destinations()) == []

    def test_a_lease_is_for_one(self, store: Store) -> None:
        store.send(A, b"x")
        assert take(store).leased
        assert store.receive(A) is None
        assert store.depth(A) == 1
        assert store.stats().leased == 1

    @survives
    def test_a_lease_ends_with_the_process(self, disk: Disk, store: Store) -> None:
        store.send_many(A, [b"1", b"2"])
        take(store)
        again = disk.crash(store)
        assert drain(again) == [b"1", b"2"]

    @survives
    def test_a_lease_ends_with_close(self, disk: Disk, store: Store) -> None:
        store.send_many(A, [b"1", b"2"])
        take(store)
        store.close()
        assert drain(disk.reopen(store)) == [b"1", b"2"]

    @pytest.mark.parametrize("timeout", [0.05, 0, -1])
    def test_receive_times_out(self, store: Store, timeout: float) -> None:
        started = time.monotonic()
        assert store.receive(A, timeout) is None
        assert max(timeout, 0) * 0.9 <= time.monotonic() - started < PATIENCE

    def test_the_timeout_does_not_matter_when_there_is_one(self, store: Store) -> None:
        store.send(A, b"x")
        started = time.monotonic()
        assert take(store, timeout=PATIENCE).body == b"x"
        assert time.monotonic() - started < PATIENCE / 2

    @pytest.mark.parametrize("timeout", [None, PATIENCE])
    def test_a_send_wakes_a_receiver(self, store: Store, timeout: float | None) -> None:
        with Parallel(lambda: store.receive(A, timeout)) as receiver:
            assert receiver.outlives(0.05)
            store.send(B, b"another's")
            assert receiver.outlives(0.05)
            store.send(A, b"x")
            assert receiver.result().body == b"x"

    def test_a_send_without_waiting_wakes_a_receiver(self, store: Store) -> None:
        with Parallel(lambda: store.receive(A, None)) as receiver:
            assert receiver.outlives(0.05)
            store.send_nowait(A, b"x")
            assert receiver.result().body == b"x"

    def test_a_release_wakes_a_receiver(self, store: Store) -> None:
        store.send(A, b"x")
        message = take(store)
        with Parallel(lambda: store.receive(A, None)) as receiver:
            assert receiver.outlives(0.05)
            message.release()
            assert receiver.result().body == b"x"

    def test_a_rollback_wakes_a_receiver(self, store: Store) -> None:
        store.send(A, b"x")
        message = take(store)
        store.claim(message)
        with Parallel(lambda: store.receive(A, None)) as receiver:
            assert receiver.outlives(0.05)
            store.unclaim([message])
            assert receiver.result().body == b"x"

    @pytest.mark.parametrize("timeout", [None, PATIENCE])
    def test_close_wakes_a_receiver(self, store: Store, timeout: float | None) -> None:
        with Parallel(lambda: store.receive(A, timeout)) as receiver:
            assert receiver.outlives(0.05)
            store.close()
            with pytest.raises(ClosedError):
                receiver.result()

    def test_each_waiting_receiver_gets_its_own(self, store: Store) -> None:
        with Parallel(lambda: store.receive(A, None)) as one, Parallel(lambda: store.receive(A, None)) as two:
            store.send(A, b"1")
            store.send(A, b"2")
            assert {one.result().body, two.result().body} == {b"1", b"2"}

    # receive many

    def test_receive_many_in_order(self, store: Store) -> None:
        """More than a page of them; each is settled on its own."""
        sent = [str(n).encode() for n in range(700)]
        store.send_many(A, sent)
        first = store.receive_many(A, 650)
        assert [message.body for message in first] == sent[:650]
        first[0].ack()
        first[1].release()
        assert [message.body for message in store.receive_many(A, 1000)] == [sent[1], *sent[650:]]
        assert store.receive_many(A, 10) == []
        assert store.counts(A) == Counts(0, 699)

    def test_receive_many_takes_what_is_there(self, store: Store) -> None:
        """It waits for the first one alone."""
        with Parallel(lambda: store.receive_many(A, 10, None)) as receiver:
            assert receiver.outlives(0.05)
            store.send(A, b"1")
            assert [message.body for message in receiver.result()] == [b"1"]
        store.send_many(A, [b"2", b"3"])
        assert [message.body for message in store.receive_many(A, 10, PATIENCE)] == [b"2", b"3"]

    def test_receive_many_of_a_subscription(self, store: Store) -> None:
        desk = Subscription(T, "desk")
        store.subscribe(desk)
        store.send_many(T, [b"1", b"2", b"3"])
        messages = store.receive_many(T, 2, 0, desk.key)
        assert [(message.body, message.subscription) for message in messages] == [(b"1", desk.key), (b"2", desk.key)]

    def test_receive_many_of_both_sorts(self, store: Store) -> None:
        """What is not persistent comes in its place."""
        for n in range(6):
            store.send(A, b"%d" % n, persistent=bool(n % 2))
        assert [message.body for message in store.receive_many(A, 5)] == [b"0", b"1", b"2", b"3", b"4"]

    def test_receive_many_up_to_the_leases_that_there_may_be(self, disk: Disk) -> None:
        store = disk.create(max_leases=3)
        store.send_many(A, [b"1", b"2", b"3", b"4"])
        assert [message.body for message in store.receive_many(A, 10)] == [b"1", b"2", b"3"]
        with pytest.raises(StoreFullError, match="max_leases"):
            store.receive_many(A, 10)

    # browse

    def test_browse_sees_all_in_order(self, store: Store) -> None:
        sent = [str(n).encode() for n in range(1500)]
        receipts = store.send_many(A, sent)
        leased = take(store)
        messages = list(store.browse(A))
        assert [m.body for m in messages] == sent
        assert [m.seq for m in messages] == [r.seq for r in receipts]
        assert not any(m.leased for m in messages)
        assert leased.leased

    def test_browse_a_part(self, store: Store) -> None:
        receipts = store.send_many(A, [str(n).encode() for n in range(10)])
        assert [m.body for m in store.browse(A, limit=3)] == [b"0", b"1", b"2"]
        assert [m.body for m in store.browse(A, after=receipts[6].seq)] == [b"7", b"8", b"9"]
        assert [m.body for m in store.browse(A, limit=1, after=receipts[6].seq)] == [b"7"]
        assert list(store.browse(A, limit=0)) == []
        assert list(store.browse(A, after=receipts[9].seq)) == []

    def test_browse_without_what_is_leased(self, store: Store) -> None:
        """Or claimed, by whoever; also if it was leased since it was looked up, and again once it is free."""
        desk = Subscription(T, "desk")
        store.subscribe(desk)
        store.subscribe(Subscription(T, "book"))
        store.send_many(A, [b"%d" % n for n in range(8)])
        store.send_many(T, [b"1", b"2"])
        held = store.receive_many(A, 3)
        store.claim(held[2])
        store.release([held[0]])

        def free(destination: Destination = A, **how: Any) -> list[bytes]:
            return [message.body for message in store.browse(destination, leased=False, **how)]

        assert free() == [b"0", *(b"%d" % n for n in range(3, 8))]
        assert free(limit=2) == [b"0", b"3"]
        assert free(after=held[1]) == [b"%d" % n for n in range(3, 8)]
        assert len(bodies(store)) == 8
        take(store, T, subscription=desk.key)
        assert free(T, subscription=desk.key) == [b"2"]
        assert free(T, subscription=("", "book")) == [b"1", b"2"] == free(T)

    def test_browse_counts_what_it_gives(self, store: Store) -> None:
        """A message acked meanwhile does not count against the limit."""
        store.send_many(A, [str(n).encode() for n in range(10)])
        look = store.browse(A, limit=4)
        assert next(look).body == b"0"
        for _ in range(3):
            take(store).ack()
        assert [m.body for m in look] == [b"3", b"4", b"5"]

    def test_browse_leaves_out_what_is_acked_meanwhile(self, store: Store) -> None:
        """Rule X1: it holds on to nothing between two messages."""
        store.send_many(A, [str(n).encode() for n in range(1200)])
        look = store.browse(A)
        assert next(look).body == b"0"
        messages = [take(store) for _ in range(1100)]
        store.ack(messages[1:600])
        assert next(look).body == b"600"
        store.ack(messages[601:])
        assert [m.body for m in look] == [str(n).encode() for n in range(1100, 1200)]

    def test_browse_holds_no_lock_between_two(self, store: Store) -> None:
        store.send_many(A, [b"0", b"1"])
        look = store.browse(A)
        assert next(look).body == b"0"
        with Parallel(lambda: (store.send(A, b"2"), take(store), store.purge(A), store.delete(A))) as other:
            other.result()
        assert list(look) == []

    def test_browse_of_a_closed_store(self, store: Store) -> None:
        store.send(A, b"x")
        look = store.browse(A)
        store.close()
        with pytest.raises(ClosedError):
            next(look)
