"""Events, Futures and locks that may be taken, under Ctrl-C (rule G6): nobody hangs afterwards."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

import pytest

from anabranch.adapters.system.background import shared
from anabranch.adapters.system.conditions import Event, Promise, unless_busy

from ..contract.disk import Parallel
from ..crash.interrupts import LIBRARY, OURS, everywhere

PATIENCE = 60.0


def test_a_lock_that_may_be_taken() -> None:
    lock = threading.Lock()
    assert unless_busy(lock, lambda: lock.locked()) is True
    with lock:
        assert unless_busy(lock, lambda: True) is None
        assert unless_busy(lock, lambda: True, 0.01) is None
    with pytest.raises(ZeroDivisionError):
        unless_busy(lock, lambda: 1 // 0)
    assert not lock.locked()
    again = threading.RLock()
    with again:
        assert unless_busy(again, lambda: 1) == 1


@pytest.mark.parametrize("seconds", [0.0, 1.0])
def test_it_is_free_after_an_interruption_anywhere(seconds: float) -> None:
    lock = threading.Lock()

    def check(at: int, where: str) -> None:
        assert not lock.locked(), where

    def works() -> None:
        len("")

    assert everywhere(lambda at: lambda: unless_busy(lock, works, seconds), check, folders=(*OURS, __file__)) > 3


def test_who_sets_an_event_does_not_hang_after_an_interruption_anywhere() -> None:
    state: list[Event] = []

    def prepare(at: int) -> Callable[[], object]:
        state[:] = [Event()]
        return lambda: state[0].wait(0.001)

    def check(at: int, where: str) -> None:
        with Parallel(state[0].set) as setting:
            setting.result()
        assert state[0].wait(PATIENCE), where

    assert everywhere(prepare, check, folders=(*OURS, *LIBRARY)) > 5


def test_futures_resolve_after_an_interruption_anywhere() -> None:
    """One thread resolves all of the process."""
    waited_for: list[Promise[int]] = []

    def prepare(at: int) -> Callable[[], object]:
        future: Promise[int] = Promise()
        waited_for[:] = [future]

        def wait() -> None:
            with suppress(TimeoutError):
                future.result(0.001)

        return wait

    def check(at: int, where: str) -> None:
        other: Promise[int] = Promise()
        shared().resolve([(waited_for[0], 1, None), (other, 2, None)])
        assert other.result(PATIENCE) == 2, where
        assert waited_for[0].result(PATIENCE) == 1, where

    assert everywhere(prepare, check, folders=(*OURS, *LIBRARY)) > 10
