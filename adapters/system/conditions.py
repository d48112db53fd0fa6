"""Waiting, and taking a lock that may be taken, where Ctrl-C leaves nothing locked (rule G6).

`with lock` is safe: no signal comes between taking it and the block. Python's Event and Future are not, at one step:

    with condition:              Condition.__enter__ is Python code, which takes the lock. Struck just after that, it
                                 raises, the block is not entered, and nobody lets go of the lock.

Whoever sets the event then, or resolves the future, hangs: of futures the one thread that resolves all of them. Here
`with` finds the methods of the lock itself, in C.
"""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable, Iterable
from concurrent.futures._base import FINISHED
from functools import partial
from operator import attrgetter
from typing import Any, Final, TypeVar

from .acceleration import inner_loop

T = TypeVar("T")

RLock: Final = inner_loop(threading.RLock)
"""A lock as that of `threading`. A thread that waits for the compiled one takes it only once it can run: else it would
hold the lock while others run, each of which would soon wait for it in turn. One that finds it taken again twice is
handed it."""


def unless_busy(
    lock: threading.Lock | threading.RLock | threading.Condition, work: Callable[[], T], seconds: float = 0.0
) -> T | None:
    """Return the result of `work`, done with the lock held; None if another thread holds it, for so long at least."""
    taken: list[bool] = []
    try:
        # Taken and noted in one step, and let go of with no call before it.
        taken += map(lock.acquire, (seconds > 0,), (seconds or -1,))
        return work() if taken[0] else None
    finally:
        if taken and taken[0]:
            lock.release()


class _Condition(threading.Condition):
    __enter__ = property(attrgetter("_lock.__enter__"))
    __exit__ = property(attrgetter("_lock.__exit__"))

    def wait(self, timeout: float | None = None) -> bool:
        try:
            return super().wait(timeout)
        except BaseException:
            if not self._is_owned():  # type: ignore[attr-defined]  # struck just after it had given up the lock
                self._lock.acquire()  # type: ignore[attr-defined]  # which the end of the block lets go of
            raise


class Event(threading.Event):
    """An event as that of `threading`."""

    def __init__(self) -> None:
        super().__init__()
        self._cond = _Condition()


class Thread(threading.Thread):
    """A daemon, as that of `threading`, whose start can be interrupted: it waits for an Event."""

    def __init__(self, target: Callable[..., object], name: str, args: Iterable[Any] = ()) -> None:
        super().__init__(target=target, name=f"anabranch-{name}", args=args, daemon=True)
        self._started = Event()


class Promise(concurrent.futures.Future[T]):
    """A Future that is ours to resolve."""

    def __init__(self) -> None:
        concurrent.futures.Future.__init__(self)  # quicker than super(): one is made for each send that does not wait
        self._condition.__class__ = _Condition

    def settle(self, value: T, error: BaseException | None) -> bool:
        """Resolve it here, unless somebody is to be called, or another thread is at it; returns whether it is resolved.
        Once more does no harm."""
        return bool(unless_busy(self._condition, partial(self._settle, value, error)))

    def _settle(self, value: T, error: BaseException | None) -> bool:
        if self._waiters or self._done_callbacks:  # type: ignore[attr-defined]
            return self._state == FINISHED
        self._result, self._exception, self._state = value, error, FINISHED
        self._condition.notify_all()
        return True
