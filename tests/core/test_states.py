"""What a store knows of its destinations."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from anabranch.adapters.core.state.states import Catalog
from anabranch.adapters.core.store_types import Subscription
from anabranch.policies.names.destination import Destination

from ..contract.disk import A, T, assert_whole, bodies
from .made import memory, onefile, send_to, ticket_of


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
    assert (topic.declared, topic.channels(9), topic.recipients(4), topic.recipients(3)) == (
        True,
        (known.channel,),
        [known],
        [],
    )
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


def test_a_send_to_what_was_dropped_meanwhile_goes_where_others_look() -> None:
    """Its sender has looked its queue up; then it is dropped, since it is empty, and another sender makes it anew."""
    with memory() as disk:
        store = disk.create()
        catalog, writer = store._engine.catalog, store._writer
        dropped = catalog.state(A)
        ticket = ticket_of(send_to(dropped, b"1"))
        catalog.drop(dropped)
        store.send(A, b"2")
        assert catalog.destinations[A] is not dropped
        writer.submit(ticket)
        writer.wait(ticket)
        assert (bodies(store), store.depth(A)) == ([b"2", b"1"], 2)
        assert_whole(store)
