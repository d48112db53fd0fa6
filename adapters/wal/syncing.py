"""Making written bytes durable: which files wait for a sync, and up to where all is on disk (invariant 7, rule J2)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from time import monotonic

from ..system.descriptors import shares, unsynced_files
from ..system.files import sync_data, write_synced
from .files.file import File
from .ticket import Tail

UNSYNCED_FILES_MAX = 32
"""Sealed segments that are not synced yet, under `periodic` and `never`; beyond it the next one waits for the disk."""


class Syncer:
    """The syncs of one log. Threads: all; of two at once none misses the other's error.

    `_lock` guards fdatasync and `durable_lsn`.
    """

    def __init__(
        self,
        written: Callable[[], Tail],
        fail: Callable[[BaseException], None],
        require_not_failed: Callable[[], None],
    ) -> None:
        """`written` says up to where the log is written now; `fail` stops it after an error, and `require_not_failed`
        raises StoreFailedError once it has stopped."""
        self.durable_lsn = 0
        """All up to it is on disk."""
        self.dirty_since: float | None = None
        """When (monotonic) the first byte was written that is not on disk; None if all is."""
        self.count = 0
        """How often the log has waited for the disk."""
        self._written, self._fail, self._require_not_failed = written, fail, require_not_failed
        self._lock = threading.Lock()
        self._sealed: list[File] = []
        """Files of earlier segments that wait for their sync."""

    @property
    def is_full(self) -> bool:
        """Return whether as many sealed files wait as may, of this log or of the process."""
        return len(self._sealed) >= UNSYNCED_FILES_MAX or len(unsynced_files) >= shares().unsynced

    def sealed(self, file: File) -> None:
        """Note a file that is written no more, and not synced. Called by the leader, while the file is still its
        segment's."""
        self._sealed.append(file)
        unsynced_files.add(file)

    def through(self, tail: Tail) -> None:
        """Make all that was written up to `tail` durable. Never tried again after an error (invariant 7). Raises
        OSError, StoreFailedError."""
        with self._lock:
            self._require_not_failed()
            if self.durable_lsn >= tail.lsn and self.dirty_since is None:
                return
            current = tail.segment.file  # first: a segment being sealed is the one or among the others, never neither
            earlier = list(self._sealed)
            try:
                self._sync(earlier if current is None or current in earlier else [*earlier, current])
            except OSError as error:
                self._fail(error)
                raise
            self._done(earlier, tail)

    def write_through(self, data: bytes, offset: int, tail: Tail) -> None:
        """Write what the log holds up to `tail` last, and make it durable with all before it: as `through`. Called by
        the leader."""
        with self._lock:
            self._require_not_failed()
            file = tail.segment.file or tail.segment.open()
            earlier = list(self._sealed)
            try:
                if earlier:
                    self._sync(earlier)
                self.count += 1
                write_synced(file.fd, data, offset)
            except OSError as error:
                self._fail(error)
                raise
            self._done(earlier, tail)

    def _sync(self, files: Sequence[File]) -> None:
        for file in files:
            self.count += 1
            sync_data(file.fd)

    def _done(self, earlier: Sequence[File], tail: Tail) -> None:
        for file in earlier:
            self._sealed.remove(file)  # in place: the leader may be adding one
            unsynced_files.discard(file)
        self.durable_lsn = max(self.durable_lsn, tail.lsn)
        self.dirty_since = None if self._written().lsn <= tail.lsn else monotonic()

    def let_go(self) -> None:
        """Let go of the files once the log is closed: whatever is not synced stays so."""
        unsynced_files.difference_update(self._sealed)
        self._sealed.clear()
