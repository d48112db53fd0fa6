"""The reserve of a log: allocated files that only what makes room may take (rule J10).

    <n>.spare      allocated from its first byte to its last, waiting to become a segment when the disk has no other

A log that takes something in keeps FILES of them, or refuses it. Work that makes room, such as a message store's acks,
may begin the next segment in one of them; then earlier segments are released, and the first of these is a spare file
again. A third one stands by where room is promised for what must follow.

A file taken from here keeps its place on the disk all the time: nobody else can get between. None of them is synced:
where a power failure takes one away, its space is free as well.
"""

from __future__ import annotations

import itertools
import os
import threading
from pathlib import Path
from typing import Final

from ...system.files import FILE_MODE, allocate
from ..format import HEADER_BYTES
from .file import File

SPARE_SUFFIX: Final = ".spare"
FILES: Final = 2
"""One that is being filled while the other one is released."""
BYTES_MIN: Final = 32 * 1024
BYTES_MAX: Final = 1024 * 1024
SHARE: Final = 16
"""The part of what the log holds that a file has for tickets that make room, within the two."""
PAGE_BYTES: Final = 4096


class Reserve:
    """The reserve of one log's directory. Who submits keeps and takes files; releasing segments puts some in.

    `_lock` guards making files and putting them in; `files` is replaced, never changed.
    """

    def __init__(self, directory: Path, file_mode: int = FILE_MODE) -> None:
        self._directory, self._file_mode = directory, file_mode
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._size = BYTES_MIN
        self.files: tuple[tuple[Path, int], ...] = ()
        """Each with its size, the largest last."""

    def load(self, paths: list[Path]) -> None:
        """Take stock at open of the files that are there."""
        self._set([(path, path.stat().st_size) for path in paths])
        self._numbers = itertools.count(1 + max((int(path.stem) for path in paths), default=0))

    def keep(self, held: int, snapshot: int, promised: int) -> None:
        """See that there are as many as a log needs that holds so many bytes, each large enough for a snapshot and what
        was promised. Raises OSError if the disk has no room for them."""
        size = snapshot + promised + min(held // SHARE, BYTES_MAX)
        step = BYTES_MIN << max(0, size // BYTES_MIN).bit_length() >> 2  # it grows now and then, not each time
        size = HEADER_BYTES + BYTES_MIN + size + -size % max(step, PAGE_BYTES)
        with self._lock:
            self._size = size
            for path, known in self.files:
                if known < size:
                    file = File(path, os.O_RDWR)
                    allocate(file.fd, known, size)
                elif known > 2 * size:
                    _cut(path, size)
                else:
                    continue
                self._set([*(file for file in self.files if file[0] is not path), (path, size)])
            while len(self.files) < FILES + (promised > 0):
                self._make(size)

    @property
    def is_short(self) -> bool:
        """Return whether a file was taken, and none has come back."""
        return len(self.files) < FILES

    def find(self, size: int) -> tuple[Path, int] | None:
        """Return the smallest file that has so many bytes."""
        return next((file for file in self.files if file[1] >= size), None)

    def _make(self, size: int) -> None:
        path = self._next_path()
        try:
            file = File(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, self._file_mode)
            allocate(file.fd, 0, size)
        except OSError:
            path.unlink(missing_ok=True)
            raise
        self._set([*self.files, (path, size)])

    def taken(self, path: Path) -> None:
        """Note that a file is about to become a segment."""
        with self._lock:
            self._set([file for file in self.files if file[0] != path])

    def make_of(self, path: Path, others: int) -> tuple[Path, int] | None:
        """Give a released segment the name of a spare file, if one is lacking beside `others` that were made so, and
        cut it down to what is needed; for `put_in`. Raises OSError."""
        with self._lock:
            if len(self.files) + others >= FILES:
                return None
            size = min(self._size, path.stat().st_size)
            if size < BYTES_MIN:
                return None
            _cut(path, size)
            spare = self._next_path()
        path.rename(spare)
        return spare, size

    def put_in(self, files: list[tuple[Path, int]]) -> None:
        """Put in the files that `make_of` returned, once the new names are durable."""
        with self._lock:
            self._set([*self.files, *files])

    def _next_path(self) -> Path:
        return self._directory / f"{next(self._numbers)}{SPARE_SUFFIX}"

    def _set(self, files: list[tuple[Path, int]]) -> None:
        self.files = tuple(sorted(files, key=lambda file: file[1]))


def _cut(path: Path, size: int) -> None:
    file = File(path, os.O_RDWR)
    os.truncate(file.fd, size)
