"""One limit: what is held and reserved counts, and what is reserved is given back when nobody needs it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from anabranch.adapters.core.state.limits import DiskRoom, Grant, NoRoomYetError, Room, may_wait, without_waiting
from anabranch.adapters.system.volumes import Volume
from anabranch.policies.config.when_full import WhenFull
from anabranch.policies.errors import StoreFullError

from ..crash.interrupts import everywhere


def test_what_is_held_and_reserved_counts() -> None:
    held = [(2, 20)]
    room = Room("store 's'", 4, 100, lambda: held[0])
    first = room.hold((1, 10))
    assert room.lacking((2, 10)) == (1, 0)
    with pytest.raises(StoreFullError, match=r"holds 3 messages, 2 more would come; max_messages is 4"):
        raise room.error((2, 10))
    assert room.lacking((1, 71)) == (0, 1)
    with pytest.raises(StoreFullError, match=r"holds 30 bytes of messages, 71 more would come; max_bytes is 100"):
        raise room.error((1, 71))
    second = room.hold((1, 70))
    del first, second
    held[0] = (4, 100)  # they have become messages
    assert room.lacking((0, 0)) == (0, 0)
    assert room.lacking((1, 0)) == (1, 0)


def test_what_would_never_fit_is_known() -> None:
    room = Room("s", 4, 100, lambda: (0, 0))
    assert not room.is_too_small((4, 100))
    assert room.is_too_small((5, 0))
    assert room.is_too_small((1, 101))
    assert "that is more than it ever holds; send less at once, or raise the limit" in str(room.error((1, 101)))
    assert "receive and ack some, remove some if they are values of a map" in str(room.error((4, 100)))


def test_one_that_holds_more_than_it_may_shrinks_a_little_with_each() -> None:
    room = Room("s", 10, None, lambda: (5000, 0))
    assert room.to_go((1, 0), room.lacking((1, 0))) == (101, 0)
    assert Room("s", 10, None, lambda: (10, 0)).to_go((3, 0), (3, 0)) == (3, 0)
    assert Room("s", 10, None, lambda: (15, 0)).to_go((1, 0), (6, 0)) == (6, 0)


def test_what_is_given_back_is_there_again() -> None:
    room = Room("s", 1, None, lambda: (0, 0))
    for _ in range(100):
        reservation = room.hold((1, 1))
        assert room.lacking((1, 1)) == (1, 0)
        del reservation
        assert room.lacking((1, 1)) == (0, 0)


def test_interrupted_anywhere_nothing_is_reserved_for_good_or_given_back_twice() -> None:
    room = Room("s", 10, None, lambda: (0, 0))

    def use() -> None:
        first = room.hold((3, 0))
        room.hold((2, 0)).release()
        room.taken()
        first.release()

    def check(_at: int, where: str) -> None:
        assert room.taken() == (0, 0), where

    assert everywhere(lambda _: use, check) > 10


def test_a_grant_gives_back_all_of_it_once() -> None:
    freed: list[Any] = []
    rooms = [Room("s", 10, None, lambda: (0, 0)) for _ in range(2)]
    grant = Grant(freed.append)
    grant.parts += [room.hold((3, 0)) for room in rooms]
    grant.evicted = ["message"]  # type: ignore[list-item]
    assert [room.taken()[0] for room in rooms] == [3, 3]
    grant.cancel()
    grant.cancel()
    assert [room.taken()[0] for room in rooms] == [0, 0]
    assert freed == [["message"]]


def test_who_works_for_many_does_not_wait() -> None:
    assert may_wait()
    assert without_waiting(lambda: (may_wait(), without_waiting(may_wait), may_wait())) == (False, False, False)
    assert may_wait()
    with pytest.raises(ZeroDivisionError):
        without_waiting(lambda: 1 // 0)
    assert may_wait()
    assert issubclass(NoRoomYetError, StoreFullError)


def test_a_disk_has_room_above_what_is_to_stay_free(tmp_path: Path) -> None:
    volume = Volume(tmp_path)
    free = volume.free(0)
    least = free // 2
    room = DiskRoom("store 's'", tmp_path, volume, least, WhenFull.FAIL, 0.0)
    assert room.lacking((1, 1000)) == (0, 0)
    assert room.lacking((1, 0)) == (0, 0)
    assert room.lacking((1, free)) != (0, 0)
    held = room.hold((1, free))
    assert room.lacking((1, 1000)) != (0, 0)
    with pytest.raises(StoreFullError, match=f"are free on the disk of {tmp_path}.*min_free_disk is {least}"):
        raise room.error((1, 1000))
    held.release()
    volume._asked_at = -1e9
    assert room.lacking((1, 1000)) == (0, 0)
