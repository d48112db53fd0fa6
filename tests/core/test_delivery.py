"""Who holds what and who is next (H1 to H4)."""

from __future__ import annotations

import heapq

import pytest

from anabranch.adapters.core.operations.changes import Ack
from anabranch.adapters.core.record.place import SEQ
from anabranch.adapters.core.state.delivery import Delivery
from anabranch.adapters.core.state.leases import LEASED, LEAVING, Receiver
from anabranch.policies.errors import StoreFullError, UnknownMessageError

from ..contract.disk import A
from .made import onefile


def test_who_came_first_is_served_first() -> None:
    with onefile() as disk:
        store = disk.create()
        store.send_many(A, [b"1", b"2"])
        engine = store._engine
        channel = engine.catalog.state(A).channel
        receivers = [Receiver() for _ in range(3)]
        for receiver in receivers:
            receiver.prepare()
            channel.receivers[receiver] = None
        with engine.lock:
            engine.delivery.hand_over(channel, store.backend)
        seqs = [receiver.lease.seq if receiver.lease is not None else None for receiver in receivers]
        assert (seqs, list(channel.receivers)) == ([1, 2, None], receivers[2:])


def test_moves_are_all_or_none() -> None:
    with onefile() as disk:
        store = disk.create()
        store.send_many(A, [b"1", b"2"])
        one, two = store.receive(A), store.receive(A)
        assert one is not None and two is not None
        delivery = store._engine.delivery
        delivery.take(store, [two], LEASED, LEAVING)
        with pytest.raises(UnknownMessageError):
            delivery.take(store, [one, two], LEASED, LEAVING)
        assert one._note.hold == LEASED
        delivery.put_back([two._note], LEASED)
        store.ack([one, two])


def test_who_waits_at_the_limit_of_leases_is_served_later() -> None:
    with onefile() as disk:
        store = disk.create(max_leases=1)
        store.send_many(A, [b"1", b"2"])
        message = store.receive(A)
        assert message is not None
        with pytest.raises(StoreFullError):
            store.receive(A, timeout=0)
        heard: list[bytes] = []
        store.listen(A, lambda m: heard.append(m.body))
        with store._engine.lock:
            store._engine.delivery.hand_over(store._engine.catalog.state(A).channel, store.backend)
        assert heard == []
        message.ack()


def test_an_empty_one_has_nothing() -> None:
    delivery = Delivery("s", 10)
    with onefile() as disk:
        store = disk.create()
        channel = store._engine.catalog.state(A).channel
        assert not delivery.lease(channel, store.backend, Receiver())


def test_one_that_is_fetched_and_has_returned_is_given_once() -> None:
    """Its place may be one object in both: a backend may keep it."""
    with onefile() as disk:
        store = disk.create()
        store.send_many(A, [b"1", b"2", b"3"])
        channel, delivery = store._engine.catalog.state(A).channel, store._engine.delivery
        with store._engine.lock:
            delivery.first(channel, store.backend)
            assert channel.first.ready is not None
            place = channel.first.ready[1]
            channel.returned_places[place[SEQ]] = place
            heapq.heappush(channel.returned, place[:2])
        given = []
        while delivery.lease(channel, store.backend, receiver := Receiver()):
            assert receiver.lease is not None
            given.append(receiver.lease.seq)
            store._sending.write([Ack(channel.state, receiver.lease.seq, 0)])
        assert given == [1, 2, 3]
