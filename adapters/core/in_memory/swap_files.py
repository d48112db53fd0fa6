"""Swap files: what does not fit into memory, by address.

    <directory>/swap/<n>.swap     entries, one after the other; docs/format.md draws one

Nothing here is meant to outlive the store: what an earlier process left is removed at open, all of it at close, and a
file as soon as nothing in it is needed. No file is open between two calls.

F1  An entry is given out by `write` once it is written whole; the next one begins behind it, never over it.
F2  A file is there as long as it has entries that were not released.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from google_crc32c import extend as crc32c

from ...system.files import FILE_MODE, make_directory, open_file, open_to_read
from ..backend import ReadError

log: logging.Logger = logging.getLogger(__name__)

ENTRY: Final = struct.Struct("<4sII")
"""Magic, CRC-32C of what follows it in the entry and of the offset, number of records."""
assert ENTRY.size == 12
MAGIC: Final = b"ABsw"
LENGTH: Final = struct.Struct("<I")
"""The length of a record."""
assert LENGTH.size == 4
_CRC_FROM: Final = 8

AT_ONCE: Final = 4 << 20
"""Bytes; an entry of at most so many is read with one call, a larger one record by record."""


class SwapFile:
    """One file, and the entries in it that are needed."""

    __slots__ = ("end", "entries", "number", "path")

    def __init__(self, number: int, path: Path) -> None:
        self.number: int = number
        self.path: Path = path
        self.end: int = 0
        self.entries: set[int] = set()
        """Their offsets."""


class Address(NamedTuple):
    """The place of an entry."""

    file: SwapFile
    offset: int
    length: int


class SwapFiles:
    """The swap files of one store. Under the store's lock. The constructor touches nothing."""

    def __init__(self, directory: Path, roll_over_bytes: int, file_mode: int | None = None) -> None:
        self.directory: Final = directory / "swap"
        self._roll_over_bytes = roll_over_bytes
        self._file_mode = file_mode or FILE_MODE
        self._files: dict[int, SwapFile] = {}
        self._last = 0
        self._current: SwapFile | None = None

    @property
    def total_bytes(self) -> int:
        """Return how many bytes all files have."""
        return sum(file.end for file in list(self._files.values()))

    @property
    def entries(self) -> set[Address]:
        """Return all entries that are kept; their lengths are 0."""
        return {Address(file, offset, 0) for file in list(self._files.values()) for offset in file.entries}

    def wipe(self) -> None:
        """Remove all, of an earlier process too. Idempotent. Raises OSError."""
        self._current = None
        self._files = {}
        try:
            shutil.rmtree(self.directory)
        except FileNotFoundError:
            pass

    def write(self, records: Sequence[bytes]) -> Address:
        """Write a new entry. Raises OSError, and then none is there."""
        file = self._file()
        offset = file.end
        tail = ENTRY.pack(MAGIC, 0, len(records))[_CRC_FROM:] + struct.pack(f"<{len(records)}I", *map(len, records))
        crc = crc32c(_seed(offset), tail)
        for record in records:
            crc = crc32c(crc, record)
        start = MAGIC + LENGTH.pack(crc) + tail
        length = len(start) + sum(map(len, records))
        _write_all(file.path, offset, [start, *records], self._file_mode)
        address = Address(file, offset, length)
        file.entries.add(offset)
        file.end = offset + length
        return address

    def _file(self) -> SwapFile:
        """Return the file that is written to."""
        file = self._current
        if file is None or file.end >= self._roll_over_bytes or file.number not in self._files:
            make_directory(self.directory, self._file_mode, is_ours=True)
            self._last += 1
            file = SwapFile(self._last, self.directory / f"{self._last}.swap")
            self._files[file.number] = file
            self._current = file
        return file

    def read(self, address: Address) -> list[bytes]:
        """Return the records of an entry. Raises ReadError, which names file and offset (invariant 9), and OSError."""
        file, offset, length = address
        with open_to_read(file.path) as opened:
            fd = opened.fileno()
            start = os.pread(fd, min(length, AT_ONCE), offset)
            if len(start) != min(length, AT_ONCE) or start[:4] != MAGIC:
                raise _damaged(address, "it is cut short" if start[:4] == MAGIC or not start else "no entry is there")
            _, crc, count = ENTRY.unpack_from(start)
            at = ENTRY.size + LENGTH.size * count
            if at > len(start):
                raise _damaged(address, "its table does not fit into it")
            records = []
            found = crc32c(_seed(offset), start[_CRC_FROM:at])
            for size in struct.unpack_from(f"<{count}I", start, ENTRY.size):
                end = at + size
                record = start[at:end] if end <= len(start) else os.pread(fd, size, offset + at)
                found = crc32c(found, record)
                records.append(record)
                at = end
        if found != crc or at != length:
            raise _damaged(address, "its checksum does not fit")
        return records

    def release(self, address: Address) -> None:
        """Release an entry that is not needed any more. Idempotent: an interrupted one is done again."""
        file = address.file
        file.entries.discard(address.offset)
        if not file.entries:
            try:
                file.path.unlink(missing_ok=True)
            except OSError as error:
                log.warning("the swap file %s cannot be removed now, and will be at close: %s", file.path, error)
            self._files.pop(file.number, None)


def _seed(offset: int) -> int:
    return int(crc32c(0, offset.to_bytes(8, "little")))


def _damaged(address: Address, reason: str) -> ReadError:
    return ReadError(
        str(address.file.path), address.offset, f"a swapped entry of {address.length} bytes is damaged: {reason}",
        "its messages are lost: purge or delete their destination; and see to the disk or the memory",
    )  # fmt: skip


def _write_all(path: Path, offset: int, pieces: list[bytes], file_mode: int) -> None:
    """Write all of the data. Raises OSError; what was written until then lies beyond the file's end (F1)."""
    left = sum(map(len, pieces))
    with os.fdopen(open_file(path, os.O_WRONLY | os.O_CREAT, file_mode), "wb", buffering=0) as file:
        views = [memoryview(piece) for piece in pieces if piece]
        while left:
            written = os.pwritev(file.fileno(), views[:512], offset)
            if written == 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            offset += written
            left -= written
            while written and written >= len(views[0]):
                written -= len(views.pop(0))
            if written:
                views[0] = views[0][written:]
