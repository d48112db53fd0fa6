"""Who holds what and who is next (H1 to H4)."""

from __future__ import annotations

import pytest

from anabranch.adapters.core.state.delivery import Delivery
from anabranch.adapters.core.state.leases import LEASED, LEAVING, Taker
from anabranch.policies.errors import StoreFullError, UnknownMessageError

from ..contract.disk import A
from .made import onefile


def test_who_came_first_is_served_first() -> None:
    with onefile() as disk:
        store = disk.create()
        store.send_many(A, [b"1", b"2"])
        engine = store._engine
        feed = engine.catalog.state(A).feed
        takers = [Taker() for _ in range(3)]
        for taker in takers:
            taker.prepare()
            feed.takers[taker] = None
        with engine.lock:
            engine.delivery.hand_over(feed, store.backend)
        seqs = [taker.lease.seq if taker.lease is not None else None for taker in takers]
        assert (seqs, list(feed.takers)) == ([1, 2, None], takers[2:])


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
            store._engine.delivery.hand_over(store._engine.catalog.state(A).feed, store.backend)
        assert heard == []
        message.ack()


def test_an_empty_one_has_nothing() -> None:
    delivery = Delivery("s", 10)
    with onefile() as disk:
        store = disk.create()
        feed = store._engine.catalog.state(A).feed
        assert not delivery.lease(feed, store.backend, Taker())
