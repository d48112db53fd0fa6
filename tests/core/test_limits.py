"""Room is reserved before anything is queued, and given back when nobody needs it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import pytest

from anabranch.adapters.core.limits import Room
from anabranch.adapters.core.plan import Plan
from anabranch.adapters.messages import Outgoing
from anabranch.policies.errors import StoreFullError

from ..contract.disk import A, Disk, Parallel
from ..crash.test_interrupts import everywhere
from .made import journal, onefile


def test_what_is_held_and_reserved_counts() -> None:
    held = [(2, 20)]
    room = Room("s", 4, 100, lambda: held[0])
    first = room.reserve((1, 10))
    with pytest.raises(StoreFullError, match=r"holds 3 messages, 2 more would come; max_messages is 4"):
        room.reserve((2, 10))
    with pytest.raises(StoreFullError, match=r"holds 30 bytes of messages, 71 more would come; max_bytes is 100"):
        room.reserve((1, 71))
    second = room.reserve((1, 70))
    del first, second
    held[0] = (4, 100)  # they have become messages
    room.require((0, 0))
    with pytest.raises(StoreFullError):
        room.require((1, 0))


def test_what_is_given_back_is_there_again() -> None:
    room = Room("s", 1, None, lambda: (0, 0))
    for _ in range(100):
        reservation = room.reserve((1, 1))
        with pytest.raises(StoreFullError):
            room.reserve((1, 1))
        del reservation


def test_interrupted_anywhere_nothing_is_reserved_for_good_or_given_back_twice() -> None:
    room = Room("s", 10, None, lambda: (0, 0))

    def use() -> None:
        first = room.reserve((3, 0))
        room.reserve((2, 0)).release()
        first.release()

    def check(_at: int, where: str) -> None:
        with pytest.raises(StoreFullError):
            room.require((11, 0))
        try:
            room.require((10, 0))
        except StoreFullError as error:
            raise AssertionError(where) from error

    assert everywhere(lambda _: use, check) > 20


def test_a_prepared_branch_has_its_room_whether_or_not_there_is_any() -> None:
    room = Room("s", None, 10, lambda: (0, 0), "max_stored_bytes")
    held = room.hold((5, 50))
    with pytest.raises(StoreFullError, match="max_stored_bytes is 10"):
        room.reserve((1, 1))
    del held
    room.require((1, 10))


def test_no_two_get_the_same() -> None:
    room = Room("s", 50, None, lambda: (0, 0))

    def reserve(_: int) -> object:
        try:
            return room.reserve((1, 1))
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


def test_without_limits_there_is_nothing_to_ask() -> None:
    assert not Room("s", None, None, lambda: (0, 0)).limited
