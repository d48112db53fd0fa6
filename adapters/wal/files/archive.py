"""The archive: released segments that somebody wants to keep, up to so many bytes, so old. Nothing in it is needed."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from ...system.files import FILE_MODE, make_directory, open_file, open_to_read, sync_directory, sync_file

log: logging.Logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Archive:
    """The archive directory of one log. One thread at a time."""

    directory: Path
    max_bytes: int | None = None
    """The oldest go that are too much. None: no limit."""
    max_age: float | None = None
    """Seconds since a segment was written to last, by the wall clock. None: no limit."""
    file_mode: int = FILE_MODE

    def take(self, path: Path) -> None:
        """Move a segment there. Where that is another disk, it is there, durably, before it is here no more. Raises
        OSError."""
        make_directory(self.directory, self.file_mode, is_ours=True)
        target = self.directory / path.name
        try:
            path.rename(target)
            return
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
        making = target.with_name(f"{target.name}.tmp")
        fd = open_file(making, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, self.file_mode)
        with os.fdopen(fd, "wb") as copy, open_to_read(path) as segment:
            shutil.copyfileobj(segment, copy, 1 << 20)
            copy.flush()
            shutil.copystat(path, making)  # how old it is decides how long it is kept
            sync_file(fd)
        making.rename(target)
        sync_directory(self.directory)
        path.unlink()

    def trim(self) -> None:
        """Remove what is beyond the limits. A segment that cannot be removed is logged, and tried again next time."""
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
