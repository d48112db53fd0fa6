"""The archive: released segments that somebody wants to keep, up to so many bytes, so old. Nothing in it is needed."""

from __future__ import annotations

import logging
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from ..files import FILE_MODE, make_directory

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Archive:
    """A directory of one log's. One thread at a time."""

    directory: Path
    max_bytes: int | None = None
    """The oldest go that are too much. None: no limit."""
    max_age: float | None = None
    """Seconds since a segment was written to last, by the wall clock. None: no limit."""
    file_mode: int = FILE_MODE

    def take(self, path: Path) -> None:
        """Move a segment there. Raises OSError."""
        make_directory(self.directory, self.file_mode)
        shutil.move(path, self.directory / path.name)

    def trim(self) -> None:
        """Remove what is beyond the limits. What cannot be removed is logged, and tried again next time."""
        if self.max_bytes is None and self.max_age is None:
            return
        try:
            found = [(path, path.stat()) for path in self.directory.glob("*.seg")]
        except OSError as error:
            log.warning("the archive %s cannot be read: %s", self.directory, error)
            return
        found.sort(key=lambda one: one[0].name)  # by number: the oldest first
        size, now = sum(stat.st_size for _, stat in found), time.time()
        for path, stat in found:
            too_large = self.max_bytes is not None and size > self.max_bytes
            if not too_large and (self.max_age is None or now - stat.st_mtime <= self.max_age):
                continue
            try:
                path.unlink(missing_ok=True)
                size -= stat.st_size
            except OSError as error:
                log.warning("%s stays in the archive beyond its limits: %s", path, error)
