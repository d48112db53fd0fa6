"""What a store knows of its destinations, and of the ids that it has seen."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from anabranch.adapters.core import Store
from anabranch.adapters.core.state.duplicates import DuplicateWindow
from anabranch.adapters.core.state.states import Catalog
from anabranch.adapters.core.store_types import Subscription
from anabranch.policies.names.destination import Destination

from ..contract.disk import A, T, assert_whole, bodies, take
from .made import send_to, ticket_of

# What a store knows of its destinations


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


def test_removed_destinations_leave_nothing_behind(store: Store) -> None:
    """Nor do those that somebody asked for in vain."""
    catalog = store._engine.catalog
    for n in range(50):
        destination = Destination.parse(f"reply.{n}")
        store.send(destination, b"x")
        message = take(store, destination)
        message.ack()
        store.delete(destination)
        assert store.receive(Destination.parse(f"nothing.{n}"), timeout=0.0001) is None
    assert (len(catalog.destinations), len(catalog.by_number)) == (0, 0)
    assert list(store.destinations()) == []


def test_a_send_to_what_was_dropped_meanwhile_goes_where_others_look(memory_store: Store) -> None:
    """Its sender has looked its queue up; then it is dropped, since it is empty, and another sender makes it anew."""
    catalog, writer = memory_store._engine.catalog, memory_store._writer
    dropped = catalog.state(A)
    ticket = ticket_of(send_to(dropped, b"1"))
    catalog.drop(dropped)
    memory_store.send(A, b"2")
    assert catalog.destinations[A] is not dropped
    writer.submit(ticket)
    writer.wait(ticket)
    assert (bodies(memory_store), memory_store.depth(A)) == ([b"2", b"1"], 2)
    assert_whole(memory_store)


# The duplicate window


class TestDuplicateWindow:
    def test_the_oldest_goes_first(self) -> None:
        window = DuplicateWindow(3)
        for seq, name in enumerate((b"a", b"b", b"c", b"d"), 1):
            window.add({(1, name): seq})
        assert window.get((1, b"a")) is None
        assert window.items() == [((1, b"b"), 2), ((1, b"c"), 3), ((1, b"d"), 4)]

    def test_adding_again_changes_nothing(self) -> None:
        window = DuplicateWindow(2)
        for _ in range(3):
            window.add({(1, b"a"): 1, (1, b"b"): 2})
        assert window.items() == [((1, b"a"), 1), ((1, b"b"), 2)]

    def test_forgetting_a_destination(self) -> None:
        window = DuplicateWindow(5)
        window.add({(1, b"a"): 1, (2, b"a"): 2})
        window.forget(1)
        assert window.items() == [((2, b"a"), 2)]

    def test_what_is_forgotten_is_found_from_the_latest_back(self) -> None:
        """Interrupted or not, once and again, whatever came or went before."""
        window = DuplicateWindow(4)
        for _ in range(2):
            window.add({(1, b"a"): 1, (2, b"a"): 2, (1, b"b"): 3})
        window.add({(1, b"a"): 4})  # requeued
        window.add({(3, b"a"): 5, (1, b"c"): 6})  # (2, a) falls out
        window.forget(2)
        assert window.items() == [((1, b"b"), 3), ((1, b"a"), 4), ((3, b"a"), 5), ((1, b"c"), 6)]
        window.forget(1)
        window.forget(1)
        assert window.items() == [((3, b"a"), 5)]
        window.add({(1, b"d"): 7})
        window.forget(1)
        assert window.items() == [((3, b"a"), 5)]

    def test_no_window(self) -> None:
        window = DuplicateWindow(0)
        window.add({(1, b"a"): 1})
        assert window.items() == []
