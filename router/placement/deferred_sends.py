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
from contextlib import suppress
from functools import partial
from typing import Final

from ...adapters.core import Store
from ...adapters.core.messages import Receipt
from ...adapters.core.service.sending import WaitingFuture
from ...adapters.system.background import shared
from ...adapters.system.conditions import Event, Promise, unless_busy
from ...policies.errors import AnabranchError, ClosedError
from ...policies.names.destination import Destination
from .gates import Gates

KNOWN_SECONDS: Final = 1.0
"""Seconds to wait for the outcome of a send to a destination that may have moved."""

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

    def __init__(
        self,
        found: dict[Destination, Store],
        lock: threading.RLock,
        require_open: Callable[[], None],
        gates: Gates,
        for_store: Callable[[Destination, Send], Future[Receipt]],
        record_again: Callable[[Destination], None],
        store_of: Callable[[Destination], object],
    ) -> None:
        """Begin without lines. `found` has the stores that were found before; the functions are the registry's."""
        self._store_of = store_of
        self._found, self._gates, self._require_open = found, gates, require_open
        self.lock = lock
        self._for_store, self._record_again = for_store, record_again
        self._lines: dict[Destination, _Line] = {}

    def send(self, destination: Destination, send: Send, closed: Store | None = None) -> Future[Receipt]:
        """Call with the store of a destination, as soon as a background thread has opened it. The store was not found
        before, or only a `closed` one. Never waits."""
        self._require_open()
        with self.lock:
            store = self._found.get(destination)
            if store is None or store is closed:
                self._found.pop(destination, None)
                return self._defer(destination, send)
        removals = self._gates.removals
        again = partial(self.send, destination, send, store)
        try:  # another thread has just found it
            sent = send(store)
        except ClosedError:
            return again()
        return self.known(destination, sent, removals, again)

    def known(
        self, destination: Destination, sent: Future[Receipt], removals: int, again: Callable[[], Future[Receipt]]
    ) -> Future[Receipt]:
        """Return the result of a send to a store that was found when `removals` was so. If it turns out that it was not
        sent it is done `again`."""
        moved = self._gates.removals != removals
        if moved:
            self._record_again(destination)
        elif type(sent) is not WaitingFuture:
            return sent
        return _once_more(sent, again, KNOWN_SECONDS if moved else 0)

    def _send_now(self, destination: Destination, send: Send) -> Future[Receipt]:
        """Send on a background thread; once more if the destination was about to move."""
        removals = self._gates.removals
        sent = self._for_store(destination, send)
        return self.known(destination, sent, removals, partial(self._send_now, destination, send))

    def holds(self, destination: Destination) -> bool:
        """Return whether something is deferred for a destination. With the lock held."""
        return destination in self._lines

    def _defer(self, destination: Destination, send: Send) -> Future[Receipt]:
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
        sent = unless_busy(line.work, lambda: self._send_all(destination, line))  # who is at work sends all
        if sent and destination not in self._found and destination not in self._lines:
            with suppress(AnabranchError):
                self._store_of(destination)  # so that the next ones need not be deferred

    def _send_all(self, destination: Destination, line: _Line) -> bool:
        try:
            line.thread = threading.get_ident()
            while self._has_more(destination, line):
                self._send_one(destination, *line.waiting.popleft())
            return True
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
            sent = self._send_now(destination, send)
        except BaseException as error:
            shared().resolve([(future, None, error)])
        else:
            sent.add_done_callback(partial(_copy, future))


def _once_more(sent: Future[Receipt], again: Callable[[], Future[Receipt]], seconds: float) -> Future[Receipt]:
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
