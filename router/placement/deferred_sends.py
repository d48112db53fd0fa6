"""Sends that must not wait, to destinations whose store is not open: a background thread opens it and sends them.

While some are deferred for a destination, nobody finds its store by that destination without coming here first: later
sends of the same thread, waiting or not, come behind them. Only background threads send deferred messages, so that
Ctrl-C strikes between no two steps of it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Final

from ...adapters.core import Store
from ...adapters.core.messages import Receipt
from ...adapters.system.background import shared
from ...adapters.system.conditions import Event, Promise, unless_busy
from ...policies.errors import AnabranchError, ClosedError
from ...policies.names.destination import Destination

KNOWN_SECONDS: Final = 1.0

Send = Callable[[Store], "Future[Receipt]"]


class _Line:
    """The sends that are deferred for one destination, in order."""

    def __init__(self) -> None:
        self.waiting: deque[tuple[Send, Future[Receipt]]] = deque()
        self.work = threading.Lock()
        """Held by the background thread that sends it."""
        self.thread = 0
        """The id of that thread."""
        self.ended = Event()
        """Set once all of it was handed to the store, and nothing comes after."""


class DeferredSends:
    """The deferred sends of one router. Threads: all. `lock` guards the lines: under it a store begins or ceases to be
    found by its destination."""

    def __init__(self, send: Callable[[Destination, Send], Future[Receipt]]) -> None:
        """Begin without lines. `send` opens the store of a destination and calls with it."""
        self._send = send
        self.lock = threading.RLock()  # re-entrant, for signal handlers
        self._lines: dict[Destination, _Line] = {}

    def holds(self, destination: Destination) -> bool:
        """Return whether something is deferred for a destination. With the lock held."""
        return destination in self._lines

    def defer(self, destination: Destination, send: Send) -> Future[Receipt]:
        """Defer a send, behind all that is deferred for its destination. With the lock held."""
        future: Future[Receipt] = Promise()
        future.set_running_or_notify_cancel()
        line = self._lines.setdefault(destination, _Line())
        try:
            line.waiting.append((send, future))
        finally:
            self._begin(destination, line)
        return future

    def wait(self, destination: Destination) -> None:
        """Wait until nothing is deferred for a destination. The thread that sends it does not wait."""
        line = self._lines.get(destination)
        if line is not None and line.thread != threading.get_ident():
            self._begin(destination, line)
            line.ended.wait()

    def _begin(self, destination: Destination, line: _Line) -> None:
        shared().lead(partial(self._run, destination, line))

    def _run(self, destination: Destination, line: _Line) -> None:
        unless_busy(line.work, lambda: self._send_all(destination, line))  # who is at work sends all

    def _send_all(self, destination: Destination, line: _Line) -> None:
        try:
            line.thread = threading.get_ident()
            while self._has_more(destination, line):
                self._send_one(destination, *line.waiting.popleft())
        finally:
            line.thread = 0

    def _has_more(self, destination: Destination, line: _Line) -> bool:
        with self.lock:
            if line.waiting:
                return True
            if self._lines.get(destination) is line:
                del self._lines[destination]
            line.ended.set()
            return False

    def _send_one(self, destination: Destination, send: Send, future: Future[Receipt]) -> None:
        try:
            sent = self._send(destination, send)
        except BaseException as error:
            shared().resolve([(future, None, error)])
        else:
            sent.add_done_callback(partial(_copy, future))


def once_more(
    sent: Future[Receipt], again: Callable[[], Future[Receipt]], seconds: float = KNOWN_SECONDS
) -> Future[Receipt]:
    """Return `sent`; or the result of `again`, if it was not sent: its destination was about to move to another store,
    or its store was closed. Waits until that is known, so that later sends of the same thread come behind it. The wait
    is at most a second, for it may be the thread that would tell, or the disk hang. There is none (`seconds`) for a
    send that may have to wait for room."""
    try:
        return again() if isinstance(sent.exception(seconds), ClosedError) else sent
    except TimeoutError:
        pass
    future: Future[Receipt] = Promise()
    future.set_running_or_notify_cancel()

    def known(done: Future[Receipt]) -> None:
        if not isinstance(done.exception(), ClosedError):
            _copy(future, done)
            return
        try:
            again().add_done_callback(partial(_copy, future))
        except AnabranchError as error:
            shared().resolve([(future, None, error)])

    sent.add_done_callback(known)
    return future


def _copy(future: Future[Receipt], done: Future[Receipt]) -> None:
    """Copy the result, on the thread that resolves futures."""
    error = done.exception()
    shared().resolve([(future, done.result() if error is None else None, error)])
