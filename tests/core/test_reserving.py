"""Room in all limits at once, and the line of those who wait for some."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import pytest

from anabranch.adapters.core import Store
from anabranch.adapters.core.messages import Outgoing
from anabranch.adapters.core.operations.destination_changes import CloseGate
from anabranch.adapters.core.operations.plan import Plan
from anabranch.adapters.core.state.gates import Gate, MovedError
from anabranch.adapters.core.state.limits import NoRoomYetError
from anabranch.policies.config.limits import LimitOptions
from anabranch.policies.errors import StoreFailedError, StoreFullError

from ..contract.disk import PATIENCE, A, B, Disk, Parallel, bodies, drain, eventually, take
from ..contract.features import limits_of
from ..contract.when_full import LONG, limit, waiting
from ..crash.interrupts import everywhere
from ..shares import Share
from .made import journal, memory, onefile


def test_no_two_get_the_same() -> None:
    with journal() as disk:
        store = disk.create(max_messages=50)

        def reserve(_: int) -> object:
            try:
                return store.reserve([(A, Outgoing(b"x"))])
            except StoreFullError:
                return None

        with ThreadPoolExecutor(8) as pool:
            got = [one for one in pool.map(reserve, range(200)) if one is not None]
        assert len(got) == 50


@pytest.mark.parametrize("kind", [journal, onefile])
def test_what_is_written_counts_once(kind: Callable[[], AbstractContextManager[Disk]]) -> None:
    """As held or as reserved, also before its sender has been told."""
    with kind() as disk:
        store = disk.create(max_messages=2)
        of: Any = store._engine if kind is journal else store._writer
        name = "take" if kind is journal else "_done"
        written = getattr(of, name)
        seen = []

        def look(plan: Plan) -> None:
            written(plan)
            with Parallel(lambda: store.reserve([(A, Outgoing(b"x"))])) as another:
                seen.append(another.result())
            with Parallel(lambda: store.reserve([(A, Outgoing(b"x"))] * 2)) as another, pytest.raises(StoreFullError):
                another.result()

        setattr(of, name, look)
        store.send(A, b"1")
        assert len(seen) == 1


def test_each_part_of_a_large_send_counts_once() -> None:
    with journal() as disk:
        store = disk.create(max_messages=10, batch_bytes_max=1 << 16)
        take = store._engine.take

        def look(plan: Plan) -> None:
            take(plan)
            with Parallel(lambda: store.reserve([(A, Outgoing(b"x"))] * 2)) as another:
                assert another.result() is not None
            with Parallel(lambda: store.reserve([(A, Outgoing(b"x"))] * 3)) as another, pytest.raises(StoreFullError):
                another.result()
            plans.append(plan)

        plans: list[Plan] = []
        store._engine.take = look  # type: ignore[method-assign]
        store.send_many(A, [b"x" * 50_000] * 8)
        assert len(plans) > 1


def test_who_does_not_want_to_wait_is_told_at_once_and_holds_nothing() -> None:
    with journal() as disk:
        store = disk.create(max_messages=1, when_full="block", block_timeout=LONG)
        room = store.reserve([(A, Outgoing(b"x"))], wait=False)
        with pytest.raises(NoRoomYetError, match="max_messages is 1"):
            store.reserve([(A, Outgoing(b"x"))], wait=False)
        assert not waiting(store)
        assert room is not None
        room.cancel()
        store.send(A, b"1")


def test_whose_time_began_before_waits_for_the_rest_of_it() -> None:
    with journal() as disk:
        store = disk.create(max_messages=1, when_full="block", block_timeout=LONG)
        store.send(A, b"1")
        with pytest.raises(StoreFullError, match="no room came in time"):
            store.reserve([(A, Outgoing(b"x"))], since=-10 * LONG)


def test_who_came_before_is_not_passed_by_who_needs_less() -> None:
    with journal() as disk:
        store = disk.create(max_messages=3, when_full="block", block_timeout=LONG)
        store.send_many(A, [b"1", b"2"])
        with Parallel(lambda: store.commit([(B, Outgoing(b"two"))] * 2, [])) as large:
            eventually(lambda: waiting(store) == 1)
            with Parallel(lambda: store.send(B, b"one")) as small:
                eventually(lambda: waiting(store) == 2)
                take(store).ack()
                large.result()
                assert waiting(store) == 1
                take(store).ack()
                small.result()
        assert bodies(store, B) == [b"two", b"two", b"one"]


def test_many_threads_wait_in_turn(share: Share) -> None:
    """All are served, and by the order in which they came."""
    count = share.count(100, 1000)
    with memory() as disk:
        store = disk.create(max_messages=1, when_full="block", block_timeout=LONG)
        store.send(A, b"full")
        granted: list[int] = []
        limits = limits_of(store)

        def wait(number: int) -> None:
            grant = limits.reserve(store._sending.sends([(A, Outgoing(b"x"))]))
            granted.append(number)
            grant.cancel()
            limits.wake()

        threads = []
        for number in range(count):
            threads.append(threading.Thread(target=wait, args=(number,)))
            threads[-1].start()
            eventually(lambda: waiting(store) == len(threads))
        take(store).ack()
        for thread in threads:
            thread.join(PATIENCE)
        assert granted == list(range(count))


def test_who_waits_follows_a_destination_that_moves() -> None:
    with journal() as disk:
        store = disk.create(max_messages=1, when_full="block", block_timeout=LONG)
        store.send(B, b"1")
        future = store.send_nowait(A, b"2")
        with Parallel(lambda: store.send(A, b"3")) as sender:
            eventually(lambda: waiting(store) == 2)
            store._sending.write([CloseGate(Gate.passed(A))])
            with pytest.raises(MovedError):
                sender.result()
        with pytest.raises(MovedError):
            future.result(PATIENCE)
        assert not waiting(store)


def test_who_waits_hears_that_the_store_has_failed() -> None:
    with journal() as disk:
        store = disk.create(max_messages=1, when_full="block", block_timeout=LONG)
        store.send(A, b"1")
        future = store.send_nowait(A, b"2")
        with Parallel(lambda: store.send(A, b"3")) as sender:
            eventually(lambda: waiting(store) == 2)
            store._engine.fail(OSError("the disk is gone"))
            with pytest.raises(StoreFailedError):
                sender.result()
        with pytest.raises(StoreFailedError):
            future.result(PATIENCE)


@pytest.mark.parametrize("when_full", ["block", "drop_old", "drop_new"])
@pytest.mark.parametrize("kind", [journal, memory])
def test_interrupted_anywhere_nothing_is_held_for_good(
    kind: Callable[[], AbstractContextManager[Disk]], when_full: str, share: Share
) -> None:
    """A send to a store that is full, in which it waits, drops, or is dropped."""
    with kind() as disk:
        store: list[Store] = []

        def prepare(_: int) -> Callable[[], None]:
            store[:] = [disk.create(max_messages=2, when_full=when_full, block_timeout=0.002)]
            store[0].send_many(A, [b"1", b"2"])

            def send() -> None:
                try:
                    store[0].send(A, b"3")
                except StoreFullError:
                    assert when_full == "block"

            return send

        def check(_: int, where: str) -> None:
            assert not waiting(store[0]), where
            eventually(lambda: not store[0].stats().leased, lambda: where)
            left = drain(store[0])
            possible = [[b"1", b"2"]] + [[b"2", b"3"]] * (when_full == "drop_old")
            assert left in possible, where
            limits_of(store[0]).reserve(store[0]._sending.sends([(A, Outgoing(b"x"))] * 2)).cancel()
            store[0].close()

        assert everywhere(prepare, check, 40, share) > 20


def test_a_limit_of_a_destination_is_that_of_the_destination_that_is_there() -> None:
    with journal() as disk:
        store = disk.create(limits=[LimitOptions(match=("a",), max_messages=1)])
        store.send(A, b"1")
        store.delete(A)
        store.send(A, b"2")
        with pytest.raises(StoreFullError):
            store.send(A, b"3")


def test_messages_that_come_from_another_store_neither_wait_nor_make_others_go() -> None:
    with journal() as disk:
        for when_full in ("block", "drop_old", "drop_new"):
            store = disk.create(limits=[limit("a", 1)], max_messages=5, when_full=when_full)
            store.send(A, b"1")
            state = store._engine.catalog.state(A)
            with pytest.raises(StoreFullError):
                limits_of(store).reserve_moved(state, (1, 10))
            take(store).ack()
            limits_of(store).reserve_moved(state, (1, 10)).cancel()
