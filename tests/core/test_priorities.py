"""What is fetched of many orders (O1 to O3), and what it costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from anabranch.adapters.core.messages import Message, Outgoing
from anabranch.adapters.core.state.priorities import FETCHED_MAX, Orders
from anabranch.adapters.core.store import Store

from ..contract.disk import A, assert_whole, bodies, drain, take
from ..crash.interrupts import everywhere
from .made import memory

COUNT = 10_000


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 20)), max_size=60))
def test_orders_are_a_sorted_set(steps: list[tuple[bool, int]]) -> None:
    orders, expected = Orders(), set[int]()
    for add, order in steps:
        (orders.add if add else orders.discard)(order)
        (expected.add if add else expected.discard)(order)
        assert len(orders) == len(expected)
        for least in range(22):
            assert orders.first(least) == min((one for one in expected if one >= least), default=None)


def received(store: Store) -> Message:
    return take(store)


@contextmanager
def questions(store: Store) -> Iterator[list[str]]:
    """What its backend is asked about orders and rows."""
    asked: list[str] = []
    backend: Any = store.backend

    def ask(name: str, question: Any, *arguments: Any) -> Any:
        asked.append(name)
        return question(*arguments)

    for name in ("next_order", "rows"):
        setattr(backend, name, partial(ask, name, getattr(backend, name)))
    yield asked
    for name in ("next_order", "rows"):
        delattr(backend, name)


def ordered_store(disk: Any, priorities: list[int]) -> Store:
    store: Store = disk.create(priorities=True)
    store.send_many(A, [Outgoing(b"%d" % priority, priority=priority) for priority in priorities])
    return store


def test_a_receive_costs_the_same_however_many_priorities_there_are() -> None:
    """Also where those before are leased still, and something urgent comes each time."""
    with memory() as disk:
        store = ordered_store(disk, [6 * n for n in range(COUNT)])
        with questions(store) as asked:
            for n in range(COUNT - 1, 0, -1):
                message = received(store)
                assert message.priority == 6 * n
                if n % 2:
                    message.ack()
                if n % 100 == 0:
                    store.send(A, b"urgent", priority=6 * n + 1)
                    assert received(store).body == b"urgent"
        assert len(asked) < 4 * COUNT
        with questions(store) as asked:
            assert received(store).priority == 0
            assert [store.receive(A) for _ in range(100)] == [None] * 100
        assert len(asked) < 10


def test_orders_that_are_used_no_more_leave_nothing() -> None:
    with memory() as disk:
        store = ordered_store(disk, [6 * n for n in range(1000)])
        assert len(drain(store)) == 1000
        store.send_many(A, [Outgoing(b"x", priority=6 * n + 1) for n in range(1000)])  # behind what was looked at
        channel = store._engine.catalog.state(A).channel
        with store._engine.lock:
            store._engine.current()
        assert channel.levels is not None
        assert len(channel.levels) == 1000
        assert len(drain(store)) == 1000
        assert len(channel.levels) == 0
        assert len(channel.state.own.levels) == len(channel.state.own.orders) <= 16
        store.send(A, b"y", priority=3)
        assert drain(store) == [b"y"]
        assert_whole(store)


def test_what_is_overtaken_again_and_again_is_not_all_kept() -> None:
    """Each time something more urgent comes, many of its kind behind it."""
    with memory() as disk:
        store: Store = disk.create(priorities=True)
        taken = []
        for priority in range(3 * FETCHED_MAX):
            store.send_many(A, [Outgoing(b"%d.%d" % (priority, n), priority=priority) for n in range(10)])
            taken.append(received(store))
        assert [message.body for message in taken] == [b"%d.0" % priority for priority in range(3 * FETCHED_MAX)]
        channel = store._engine.catalog.state(A).channel
        assert channel.levels is not None
        assert sum(bool(level.ready) for level in channel.levels._levels.values()) <= FETCHED_MAX
        expected = [b"%d.%d" % (p, n) for p in range(3 * FETCHED_MAX - 1, -1, -1) for n in range(1, 10)]
        assert drain(store) == expected
        store.release(taken)
        assert bodies(store) == drain(store) == [message.body for message in reversed(taken)]


def test_a_purge_takes_what_was_fetched_ahead() -> None:
    with memory() as disk:
        store = ordered_store(disk, [1, 2, 2, 2, 3])
        first = received(store)
        store.send(A, b"9", priority=9)
        assert received(store).body == b"9"
        assert store.purge(A) == 4
        assert store.receive(A) is None
        first.release()
        assert drain(store) == [b"3"]


def test_a_receive_interrupted_anywhere_hides_nothing() -> None:
    """Also not what came while others were fetched, more urgent or less."""
    with memory() as disk:
        store: Store = disk.create(priorities=True)
        sent: list[tuple[int, bytes]] = []

        def prepare(at: int) -> Callable[[], object]:
            for priority in (at % 3, 5, 400 + at % 50, 70 - at % 7):
                sent.append((-priority, b"%d.%d" % (at, priority)))
                store.send(A, sent[-1][1], priority=priority)
            return lambda: store.receive(A)

        def check(at: int, where: str) -> None:
            if not where:
                return
            for lease in list(store._engine.catalog.state(A).channel.held.values()):
                store._receiving.give_back(lease)  # it was on its way to who called
            sent.sort(key=lambda one: one[0])
            if at % 4 == 0:
                assert drain(store) == [body for _, body in sent], where
                sent.clear()
            else:
                message = received(store)
                assert message.body == sent.pop(0)[1], where
                message.ack()

        assert everywhere(prepare, check) > 50
        assert_whole(store)
