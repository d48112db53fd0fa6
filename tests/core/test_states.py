"""What a store knows of its destinations."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from anabranch.adapters.base import Subscription
from anabranch.adapters.core.states import Catalog
from anabranch.policies.destination import Destination

from ..contract.disk import A, T
from .made import onefile


def test_a_number_is_given_once() -> None:
    catalog = Catalog()
    start = threading.Barrier(8)

    def make(seed: int) -> list[int]:
        start.wait()
        return [catalog.state(Destination.parse(f"q{n}")).number for n in range(200)]

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(make, range(8)))
    assert all(numbers == found[0] for numbers in found)
    assert len(set(found[0])) == 200


def test_what_is_loaded_keeps_its_number() -> None:
    catalog = Catalog()
    topic = catalog.load(5, T)
    known = catalog.load_subscription(9, topic, Subscription(T, "desk"), 3)
    assert (topic.declared, topic.feeds(9), topic.entitled(4), topic.entitled(3)) == (True, (known.feed,), [known], [])
    assert catalog.state(A).number == 10


def test_removed_destinations_leave_nothing_behind() -> None:
    """Nor do those that somebody asked for in vain."""
    with onefile() as disk:
        store = disk.create()
        catalog = store._engine.catalog
        for n in range(50):
            destination = Destination.parse(f"reply.{n}")
            store.send(destination, b"x")
            message = store.receive(destination)
            assert message is not None
            message.ack()
            store.delete(destination)
            assert store.receive(Destination.parse(f"nothing.{n}"), timeout=0.0001) is None
        assert (len(catalog.destinations), len(catalog.by_number)) == (0, 0)
        assert list(store.destinations()) == []
