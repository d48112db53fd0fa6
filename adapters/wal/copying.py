"""A copy of a log that is in use, as it is at one moment.

    copier = LogCopier(log, reclaimer)
    with copier.kept():                    nothing is released meanwhile
        with copier.still():               nothing is queued: several logs may be held so at once
            ...
        size = copier.copy(directory)      all that was queued by then, in directory/journal

A log only grows at its end: its files up to that moment's end are all that it said then. What was queued and not yet
written is written first. The watermark is left out: it would speak of later segments perhaps, and is made anew.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from ..system.files import FILE_MODE, new_directory, open_file, sync_directory, sync_file, write_all
from .log import Log
from .reclaim import Reclaimer
from .segment import Segment

CHUNK_BYTES = 1 << 20


class LogCopier:
    """Copies one log, once."""

    def __init__(self, log: Log, reclaimer: Reclaimer, file_mode: int = FILE_MODE) -> None:
        self._log, self._reclaimer, self._file_mode = log, reclaimer, file_mode
        self._files: list[tuple[Segment, int]] = []
        """The segments at that moment, and where the records of each end."""

    def kept(self) -> AbstractContextManager[None]:
        """Return a context in which no segment is released, and none that is there goes."""
        return self._reclaimer.held()

    @contextmanager
    def still(self) -> Iterator[None]:
        """Hold the log still: whoever writes to it waits. Its end is the moment that is copied."""
        with self._log.still() as (table, tail):
            self._files = [
                (segment, tail.offset if segment is tail.segment else segment.end or segment.allocated)
                for segment in table.all
            ]
            yield

    def copy(self, directory: Path) -> int:
        """Put the log as it was into a directory that is there. Returns bytes. Raises AnabranchError, OSError."""
        self._log.flush()
        directory = directory / "journal"
        new_directory(directory, self._file_mode)
        size = sum(self._copy_file(segment.path, directory, end) for segment, end in self._files)
        sync_directory(directory)
        return size

    def _copy_file(self, path: Path, directory: Path, end: int) -> int:
        made = open_file(directory / path.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, self._file_mode)
        try:
            with path.open("rb", buffering=0) as file:
                for offset in range(0, end, CHUNK_BYTES):
                    write_all(made, os.pread(file.fileno(), min(CHUNK_BYTES, end - offset), offset), offset)
                os.ftruncate(made, max(end, os.fstat(file.fileno()).st_size))  # as long, and with a hole at its end
            sync_file(made)
        finally:
            os.close(made)
        return end
