"""The loop of an owner's serving thread: what waits at sockets, what other threads leave to it, and what is due."""

from __future__ import annotations

import heapq
import itertools
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

WAIT_MAX: Final = 3600.0
"""A selector waits for no more than some weeks; who waits for longer is looked after now and then."""
SWEPT_AT: Final = 256
"""So many timers may be there before those that were called off are looked for."""


class Timer:
    """What is to be done at a time."""

    __slots__ = ("call",)

    def __init__(self, call: Callable[[], object]) -> None:
        self.call: Callable[[], object] | None = call

    def call_off(self) -> None:
        """Let it not be done. Any thread. Idempotent."""
        self.call = None


class Loop:
    """All is done on the serving thread, if not said otherwise."""

    def __init__(self) -> None:
        self._selector: selectors.BaseSelector
        self._woken: deque[Callable[[], object]] = deque()
        """What other threads have left to be done here."""
        self._wake_in: socket.socket
        self._wake_out: socket.socket | None = None
        self._timers: list[tuple[float, int, Timer]] = []
        """A heap of what is to be done at a time (monotonic)."""
        self._swept_at = SWEPT_AT
        self._adding = threading.Lock()
        """Guards what is added against a sweep: a thread whose turn is over may still add."""
        self._numbers = itertools.count()
        self.closing = False
        """It is to end."""
        self.thread = 0
        """The id of the serving thread, which does not wait while something is left to it."""

    def open(self) -> None:
        """Begin."""
        self._selector = selectors.DefaultSelector()
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_out.setblocking(False)
        self._wake_in.setblocking(False)
        self._selector.register(self._wake_in, selectors.EVENT_READ, self._drain)

    def close(self) -> None:
        """Let go of all descriptors: also in a forked child, whose parent keeps them."""
        self._selector.close()
        self._wake_in.close()
        wake, self._wake_out = self._wake_out, None
        if wake is not None:
            wake.close()

    def watch(self, sock: socket.socket, events: int, before: int, handle: Any) -> None:
        """Wait for these events at a socket, instead of those before; 0: for none."""
        if not events:
            with suppress(KeyError, ValueError):
                self._selector.unregister(sock)
        elif not before:
            self._selector.register(sock, events, handle)
        else:
            self._selector.modify(sock, events, handle)

    def wait(self, seconds: float | None) -> list[tuple[Any, int]]:
        """Return what has come at sockets, with the events; wait for so long at most. Not where something is left to be
        done."""
        if self._woken:
            return []
        due = self._timers[0][0] - time.monotonic() if self._timers else WAIT_MAX
        least = min(due, WAIT_MAX if seconds is None else seconds)
        return [(key.data, events) for key, events in self._selector.select(max(least, 0))]

    def run_due(self, goes_on: Callable[[], bool]) -> bool:
        """Do what other threads have left to be done, and what is due, while this thread is to go on; return whether it
        is still."""
        while self._woken:
            self._woken.popleft()()
            if not goes_on():
                return False
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            call = heapq.heappop(self._timers)[2].call
            if call is not None:
                call()
                if not goes_on():
                    return False
        if len(self._timers) > self._swept_at:
            self._sweep()
        return True

    def _sweep(self) -> None:
        """Let go of the timers that were called off. A look costs little, for there are twice as many by the next."""
        with self._adding:
            self._timers = [one for one in self._timers if one[2].call is not None]
            heapq.heapify(self._timers)
        self._swept_at = max(SWEPT_AT, 2 * len(self._timers))

    def at(self, seconds: float, call: Callable[[], object]) -> Timer:
        """Let something be done in so many seconds, unless it is called off."""
        timer = Timer(call)
        with self._adding:
            heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._numbers), timer))
        return timer

    def later(self, call: Callable[[], object]) -> None:
        """Leave something to be done by the serving thread. Any thread."""
        self._woken.append(call)
        if threading.get_ident() != self.thread:
            self.wake()

    def wake(self) -> None:
        """Let the serving thread look. Any thread."""
        wake = self._wake_out
        if wake is not None:  # else it looks before it begins to wait
            with suppress(OSError):  # a full buffer wakes it as well
                wake.send(b"\0")

    def _drain(self) -> None:
        with suppress(BlockingIOError):
            self._wake_in.recv(4096)
