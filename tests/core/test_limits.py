"""Room is reserved before anything is queued, and given back when nobody needs it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from anabranch.adapters.core.limits import Room
from anabranch.policies.errors import StoreFullError


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


def test_without_limits_there_is_nothing_to_ask() -> None:
    assert not Room("s", None, None, lambda: (0, 0)).limited
