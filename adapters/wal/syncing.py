"""Making written bytes durable: which files wait for a sync, and up to where all is on disk (invariant 7, rule J2)."""

from __future__ import annotations

import errno
import os
import threading
from contextlib import suppress
from time import monotonic

from ..system.descriptors import shares, unsynced_files
from ..system.durations import DurationCounter, Durations
from ..system.files import sync_data
from .appending import Appender
from .files.file import File

UNSYNCED_FILES_MAX = 32
"""Sealed segments that are not synced yet, under `periodic` and `never`; beyond it the next one waits for the disk."""


class Syncer:
    """The files of one log that wait for the disk beside the one being written. Threads: all; of two at once none
    misses the other's error.

    `_lock` guards the syncs.
    """

    __slots__ = ("__dict__", "dirty_since", "sealed")  # the rest is found by name

    def __init__(self, appender: Appender) -> None:
        self.dirty_since: float | None = None
        """When (monotonic) the first byte was queued since the last sync was begun; None if none was."""
        self.count: int = 0
        """How often the log has waited for the disk, beside the appender."""
        self.sealed: list[File | None] = []
        """Files of earlier segments that wait for their sync. None: they were let go of, and are never synced."""
        self._appender = appender
        self._durable = self._durable_lsn = 0
        """While any wait: all up to this batch, and its LSN, is on disk."""
        self._took = DurationCounter()
        self._lock = threading.RLock()
        self._failed: OSError | None = None

    @property
    def durable(self) -> int:
        """Return the number of a batch: all up to it is on disk."""
        return self._durable if self.sealed else self._appender.durable

    @property
    def durable_lsn(self) -> int:
        """Return an LSN: all up to it is on disk."""
        return self._durable_lsn if self.sealed else self._appender.durable_lsn

    @property
    def durations(self) -> Durations:
        """Return how long each sync of an earlier segment took."""
        return self._took.durations

    @property
    def is_full(self) -> bool:
        """Return whether as many sealed files wait as may, of this log or of the process."""
        return len(self.sealed) >= UNSYNCED_FILES_MAX or len(unsynced_files) >= shares().unsynced

    def seal(self, file: File) -> None:
        """Note a file that is written no more, and not synced, before anything is written to the next one."""
        self._durable, self._durable_lsn = self.durable, self.durable_lsn
        self.sealed.append(file)
        unsynced_files.add(file)

    def sync_sealed(self, number: int) -> None:
        """Make all in earlier segments durable, if that is not so up to this batch. Never tried again after an error
        (invariant 7). Raises OSError."""
        if number <= self.durable:
            return
        with self._lock:
            for file in list(self.sealed):
                if self._failed is not None:
                    raise self._failed
                assert file is not None
                try:
                    self.count += 1
                    began = monotonic()
                    sync_data(file.fd)
                    self._took.count(monotonic() - began)
                except OSError as error:
                    self._failed = error
                    raise
                with suppress(ValueError):  # it was let go of meanwhile
                    self.sealed.remove(file)  # in place: who seals may be adding one
                unsynced_files.discard(file)

    @property
    def is_syncing(self) -> bool:
        """Return whether this thread is in `sync_sealed`: it is asked by a signal handler then."""
        return self._lock._is_owned()  # type: ignore[attr-defined, no-any-return]

    def let_go(self) -> None:
        """Let go of the files once the log is closed: whatever is not synced stays so, also for who waits for it still,
        in a log that has failed."""
        if self.sealed:
            self._failed = self._failed or OSError(errno.ECANCELED, os.strerror(errno.ECANCELED))  # first
            files, self.sealed[:] = list(self.sealed), [None]
            unsynced_files.difference_update(filter(None, files))
