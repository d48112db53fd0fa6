"""Reclaiming: segments in which nothing is needed any more go, once a snapshot says what else was in them (J6, J7)."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import TypeVar

from ...policies.errors import AnabranchError
from ..system.background import CoalescedJob
from ..system.files import disk_errors
from . import format as f
from .files.archive import Archive
from .log import Log
from .segment import Segment
from .ticket import Ticket

log: logging.Logger = logging.getLogger(__name__)

T = TypeVar("T")


class Reclaimer:
    """Frees segments in the background, or when asked. One at a time."""

    def __init__(
        self,
        wal: Log,
        snapshot: Callable[[], tuple[list[Segment], bytes]],
        content: Callable[[bytes], object],
        forget: Callable[[set[int]], None],
        archive: Archive | None = None,
    ) -> None:
        """`snapshot` returns the segments that may go, and the payload of the snapshot that stands in for them, empty
        if it is not worth it; `content` makes of it what a ticket holds, a record of kind SNAPSHOT. `forget` is called
        once that is durable: it takes segments, by number, out of whatever else says that they exist, durably, and out
        of the log. `archive`: where they are moved to instead of being used again or deleted."""
        self._log, self._snapshot, self._content, self._forget, self._archive = wal, snapshot, content, forget, archive
        self._lock = threading.RLock()  # one reclaiming at a time
        self._holds = 0
        """How many want nothing to be released. Under the lock."""
        self._job = CoalescedJob(self._run_in_background)
        wal.relief = self.run

    def notice(self) -> None:
        """Note that a segment may have become free."""
        self._job.schedule(0)

    def _run_in_background(self) -> None:
        try:
            if not self._log.forked:
                self.run()
        except AnabranchError as error:
            log.debug("%s: nothing reclaimed: %s", self._log.name, error)

    def meanwhile(self, work: Callable[[], T]) -> T:
        """Do it while nothing is reclaimed: no snapshot is under way."""
        with self._lock:
            return work()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Release nothing while the block runs. Whoever wants room meanwhile hears that nothing can go."""
        with self._lock:
            self._holds += 1
        try:
            yield
        finally:
            with self._lock:
                self._holds -= 1
            self.notice()

    def finish(self) -> None:
        """Wait for the one under way, if one is; the log is closed, so that no other begins."""
        with self._lock:
            pass

    def run(self) -> int:
        """Free what can be freed; returns bytes. Raises AnabranchError, and then nothing is freed.

        The snapshot is durable before `forget` is called, and that has returned before any file goes: a crash between
        finds either everything, or files that nothing accounts for any more, which the next recovery removes.
        """
        with self._lock:
            if self._log.releasing == get_ident():  # rule G3
                raise RuntimeError(
                    f"{self._log.name} was called from a signal handler that interrupted its own reclaiming; "
                    "do it after the handler, or in another thread"
                )
            try:
                self._log.releasing = get_ident()
                return self._run()
            finally:
                self._log.releasing = 0

    def _run(self) -> int:
        self._log.ensure_usable()
        if self._holds:
            return 0
        free, payload = self._snapshot()
        if not payload:
            return 0
        with disk_errors(f"{self._log.name}: no segment can be released"):
            names = self._log.files.names()
        self._log.sync()  # first: who writes next waits for the sync of the snapshot, not of all before it
        ticket = Ticket(self._content(payload), f.RECORD_HEADER.size + len(payload), sync=True)
        ticket.unsynced = True  # with `sync` it is synced
        self._log.submit(ticket)
        self._log.wait(ticket)
        self._forget({segment.number for segment in free})
        segments = [(segment.number, segment.capacity) for segment in free]
        try:
            self._log.files.release(segments, self._pool_files(), self._archive, names)
        except OSError as error:
            # The log is right without them; the next recovery removes what is left.
            log.warning("%s: released segments could not be removed: %s", self._log.name, error)
        if self._archive is not None:
            self._archive.trim()
        self._log.releases += 1
        log.debug("%s: %d segments released", self._log.name, len(free))
        return sum(segment.capacity for segment in free)

    def _pool_files(self) -> int:
        """Return how many files the pool may hold."""
        options = self._log.options
        if options.pool_files < 0:
            return sys.maxsize
        return max(options.pool_files, options.min_files - len(self._log.table.segments))
