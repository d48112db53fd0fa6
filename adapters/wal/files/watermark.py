"""A second place that knows of the newest segment (rules J4, J7).

Each segment's header vouches for the one before it, and batches vouch for those before them; nothing in a segment can
vouch for the segment itself, nor for its last batches. So a small file beside the segments says which is the newest and
up to where all was on disk: it is written when a segment is begun, when nobody writes for a while, and at close, always
after what it says is durable. It holds two pages that are written in turn, so that one of them is whole whenever power
fails; what neither says is simply not known from here.
"""

from __future__ import annotations

import logging
import os
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from google_crc32c import extend as crc32c

from ...system.files import FILE_MODE, sync_data, sync_directory, write_all
from ..format import VERSION
from .file import File

log: logging.Logger = logging.getLogger(__name__)

NAME: Final = "watermark"
MAGIC: Final = b"ANBRMARK"
PAGE_BYTES: Final = 4096
PAGES: Final = 2
WATERMARK = struct.Struct("<8sHHI16sQQQ")
assert WATERMARK.size == 56


class Watermark(NamedTuple):
    """The content of the file. Neither number ever falls."""

    segment: int
    """The number of a segment that was there, or a later one is."""
    lsn: int
    """All up to it was on disk."""
    nonce: int
    """The segment's."""


def encode(log_id: bytes, mark: Watermark) -> bytes:
    """Return the beginning of a page."""
    fields = (mark.segment, mark.nonce, mark.lsn)
    blank = WATERMARK.pack(MAGIC, VERSION, 0, 0, log_id, *fields)
    return WATERMARK.pack(MAGIC, VERSION, 0, crc32c(0, blank), log_id, *fields)


def decode(page: bytes, log_id: bytes) -> Watermark | None:
    """Return the watermark in a page; None where the page does not say anything about this log."""
    if len(page) < WATERMARK.size:
        return None
    magic, version, _, _, whose, segment, nonce, lsn = WATERMARK.unpack_from(page)
    mark = Watermark(segment, lsn, nonce)
    if (magic, version, whose) != (MAGIC, VERSION, log_id) or encode(log_id, mark) != page[: WATERMARK.size]:
        return None
    return mark


def damaged_pages(directory: Path, log_id: bytes) -> list[int]:
    """Return the offsets of the pages in the file of a log's directory that were written, and do not read. Nothing is
    written. Raises OSError."""
    try:
        data = (directory / NAME).read_bytes()
    except FileNotFoundError:
        return []
    starts = range(0, PAGES * PAGE_BYTES, PAGE_BYTES)
    pages = [(at, data[at : at + WATERMARK.size]) for at in starts]
    return [at for at, page in pages if any(page) and decode(page, log_id) is None]


class WatermarkFile:
    """The file in a log's directory. It stands in for nothing: where it cannot be read or written, that is logged, and
    the log goes on without it. Threads: any."""

    def __init__(
        self, directory: Path, log_id: bytes, count_sync: Callable[[], None] = lambda: None, file_mode: int = FILE_MODE
    ) -> None:
        self._path, self._log_id = directory / NAME, log_id
        self._count_sync, self._file_mode = count_sync, file_mode
        self._lock = threading.RLock()
        """Held while it is written. Nobody who has it waits for another lock."""
        self._latest: Watermark | None = None
        self._page = 0
        """The page that is written next: the other one says what was written last."""

    def read(self) -> Watermark | None:
        """Return the latest watermark that the file says; None if it says nothing."""
        try:
            file = File(self._path, os.O_RDONLY)
            pages = [os.pread(file.fd, WATERMARK.size, page * PAGE_BYTES) for page in range(PAGES)]
        except FileNotFoundError:
            return None
        except OSError as error:
            log.warning("%s cannot be read; the log's headers say all but its end: %s", self._path, error)
            return None
        marks = [(mark, page) for page, data in enumerate(pages) if (mark := decode(data, self._log_id)) is not None]
        if marks:
            self._latest, page = max(marks)
            self._page = (page + 1) % PAGES
        return self._latest

    def write(self, mark: Watermark) -> None:
        """Say it, durably. All of it is durable already."""
        with self._lock:
            self._write(mark)

    def _write(self, mark: Watermark) -> None:
        if self._latest is not None and mark <= self._latest:
            return
        try:
            file = self._open()
            write_all(file.fd, encode(self._log_id, mark).ljust(PAGE_BYTES, b"\0"), self._page * PAGE_BYTES)
            self._count_sync()
            sync_data(file.fd)
        except OSError as error:
            log.warning("%s cannot be written; damage of the newest segment may not be noticed: %s", self._path, error)
            return
        self._latest, self._page = mark, (self._page + 1) % PAGES

    def _open(self) -> File:
        try:
            return File(self._path, os.O_RDWR)
        except FileNotFoundError:
            file = File(self._path, os.O_RDWR | os.O_CREAT, self._file_mode)
            write_all(file.fd, bytes(PAGES * PAGE_BYTES), 0)  # all that it needs, while there is room
            sync_directory(self._path.parent)
            return file
