"""The appender in Python: its tests' oracle, and what serves where there is no compiled one. It keeps every promise,
only slower.

Whoever writes takes all that is linked; whoever syncs does so for all who wait for the lock meanwhile. Each step may be
done again after an interruption: the same bytes, at the same place.
"""

from __future__ import annotations

import errno
import os
import threading
from time import monotonic
from typing import Final

from ...system.durations import DurationCounter, Durations
from ...system.files import sync_data, write_all
from ..ticket import WriteBatch

REENTRY: Final = "a log was called from a signal handler that interrupted its own write"


class PythonAppender:
    """Writes batches to a file, in order, and syncs it. Threads: all; one at a time puts."""

    def __init__(self) -> None:
        self.attempted: int = 0
        """The number of the last batch that may be in the file by now, of the files since `restart`."""
        self.written: int = 0
        """The number of the last batch that is there."""
        self.durable: int = 0
        """The number of the last batch that is on disk."""
        self.durable_lsn: int = 0
        """The last LSN of that one."""
        self.syncs: int = 0
        """How often it has waited for the disk."""
        self._took = DurationCounter()
        """How long that takes."""
        self._fd = -1  # first: an object that is made by halves is let go of too
        self._failed: OSError | None = None
        """Why it has failed, if it has."""
        self._last: WriteBatch
        """The last that was written."""
        self._writing, self._syncing = threading.RLock(), threading.RLock()

    @property
    def sync_seconds(self) -> float:
        """Return how long a wait for the disk takes, lately."""
        return self._took.mean

    @property
    def sync_durations(self) -> Durations:
        """Return how long each has taken."""
        return self._took.durations

    def restart(self, first: WriteBatch) -> None:
        """Begin with the batch behind this one, which has number 0, and is on disk with all before it."""
        self._last, self.durable_lsn = first, first.tail.lsn
        self.attempted = self.written = self.durable = 0

    def segment(self, fd: int, offset: int) -> None:
        """Go on in this file, from this offset on, by a descriptor of its own; -1: in none. Nothing is queued; nobody
        uses the one before by then. Raises OSError."""
        own = os.dup(fd) if fd >= 0 else -1
        with self._syncing, self._writing:
            self._fd, before = own, self._fd
        if before >= 0:
            os.close(before)

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)

    def put(self, data: bytes, lsn: int, sync: bool, last: WriteBatch, batch: WriteBatch) -> None:
        """Queue a batch whose bytes are `data` and whose last LSN is `lsn`, and link it to the `last` one, in one step.
        `sync`: somebody will wait for the disk. Raises OSError once it has failed; RuntimeError in a signal handler
        that interrupted its own thread's write, and would wait for itself (rule G3)."""
        self._require_no_reentry()
        self._require_not_failed()
        last.next = batch

    def settle(self, number: int, sync_number: int) -> None:
        """Wait until all up to a batch is written, and all up to another one is on disk. Raises OSError; then it has
        failed for good (invariant 7); RuntimeError as `put`."""
        self._require_no_reentry()
        if self.written < max(number, sync_number):
            with self._writing:
                self._write()
        if self.durable < sync_number:
            with self._syncing:
                self._sync(sync_number)

    def _write(self) -> None:
        self._require_not_failed()
        batches, last = [], self._last
        while (batch := last.next) is not None:
            batches.append(batch)
            last = batch
        if batches:
            self.attempted = last.number
            self._require_not_failed()  # only now: see `stop`
            try:
                write_all(self._fd, b"".join([batch.data for batch in batches]), batches[0].offset)
            except OSError as error:
                self._failed = error
                raise
            self._last = last
        self.written = self._last.number

    def _sync(self, number: int) -> None:
        self._require_not_failed()
        if self.durable < number:
            target = self._last
            try:
                self.syncs += 1
                began = monotonic()
                sync_data(self._fd)
                self._took.count(monotonic() - began)
            except OSError as error:
                self._failed = error
                raise
            self.durable_lsn, self.durable = target.tail.lsn, target.number

    def _require_not_failed(self) -> None:
        if self._failed is not None:
            raise self._failed

    def stop(self) -> None:
        """Write nothing more, for good: as after an error. `attempted` stays as it is, or what it becomes is not
        written."""
        self._failed = self._failed or OSError(errno.ECANCELED, os.strerror(errno.ECANCELED))

    def _require_no_reentry(self) -> None:
        if self._writing._is_owned() or self._syncing._is_owned():  # type: ignore[attr-defined]
            raise RuntimeError(REENTRY)

    def kick(self) -> None:
        """See that what is queued is synced though nobody waits: here it is done by who waits."""
