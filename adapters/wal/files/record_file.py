"""A file of records, all of which are read when it is opened: for what is small, changes seldom and must survive.

    0         512       1024            start         end
    +---------+---------+------ - - ----+-------------+------ - - ----+
    | slot 0  | slot 1  |               | records     |               |
    +---------+---------+------ - - ----+-------------+------ - - ----+

F3  A commit writes its records where nothing lies that counts, syncs, writes the slot that its number's last bit says,
    and syncs. So at any moment one slot speaks of records that are all there. A slot that is read, at open and after an
    error, is written again and synced before anybody sees what it says: after a kill, or an error of its sync, it may
    be in the page cache alone, and its records, which were synced before it, are not.
F4  A slot holds the same twice, so that a write that is cut short leaves either the new or the old in it. The newest
    that is right counts. The other slot is of the commit before, and the records are those that the newest has the
    checksum of; else the file is damaged. Bytes elsewhere may be anything.
F5  Beside the records there is always room to write all of them anew (`is_crowded`): a file that holds less and less
    never needs more of the disk.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from google_crc32c import extend as crc32c

from ...system.files import FILE_MODE, extend, sync_data, sync_directory, sync_file, write_all
from .file import File

SLOT = struct.Struct("<8sIQQQI")
"""Magic, version of the records, number of the commit, start and end of the records in the file, their CRC-32C. Then
the CRC-32C of these."""
assert SLOT.size == 40
NUMBER = struct.Struct("<I")
"""A CRC-32C; bytes of a record, which come before it."""
MAGIC: Final = b"ABrecs\x00\x01"
SLOT_BYTES: Final = 512
"""A slot has a sector of its own."""
COPY_BYTES: Final = 64
"""The offset in a slot where the second copy begins."""
FIRST: Final = 2 * SLOT_BYTES
"""The first offset where records may begin."""
SPARE: Final = 64 * 1024
"""Bytes that are free besides, and the least that is written anew."""
AHEAD: Final = 128 * 1024
"""By so much more than it needs the file grows, so that few commits have it grow."""


class DamagedError(Exception):
    """The file is not what was written; `offset` in bytes is about where."""

    def __init__(self, offset: int, reason: str) -> None:
        super().__init__(reason)
        self.offset = offset


class Slot(NamedTuple):
    """The page of one commit."""

    version: int
    number: int
    """The number of the commit."""
    start: int
    end: int
    crc: int

    def encode(self) -> bytes:
        fields = SLOT.pack(MAGIC, *self)
        return (fields + NUMBER.pack(crc32c(0, fields))).ljust(COPY_BYTES, b"\0") * 2


class RecordFile:
    """One file, open from `open` to `close`. Not safe for threads. After an error, or Ctrl-C, a commit has happened or
    not; the next one finds out."""

    def __init__(self, path: Path, version: int, file_mode: int = FILE_MODE) -> None:
        """`version` is that of the records."""
        self._path, self._file_mode, self._version = path, file_mode, version
        self._file: File | None = None
        self._slot: Slot | None = None
        """The last commit; None where it has to be read."""
        self._allocated = 0
        """Bytes of the file."""
        self._whole = 0
        """Bytes that the records took when they were written anew last."""

    def create(self) -> None:
        """Make it, empty and durable, unless it is there. Raises OSError."""
        if self._path.exists():
            sync_directory(self._path.parent)  # a kill may have come between the rename and its sync
            return
        made = self._path.with_name(self._path.name + ".tmp")
        made.unlink(missing_ok=True)
        file = File(made, os.O_RDWR | os.O_CREAT, self._file_mode)
        for number in range(2):
            write_all(file.fd, Slot(self._version, number, FIRST, FIRST, 0).encode(), number * SLOT_BYTES)
        with suppress(OSError):  # a full disk: it is made longer when something is written
            extend(file.fd, FIRST + SPARE + AHEAD)
        sync_file(file.fd)
        made.rename(self._path)
        sync_directory(self._path.parent)

    def open(self) -> tuple[int, list[bytes]]:
        """Open the file; return the records' version, and all of them in the order in which they came. Raises
        DamagedError, OSError."""
        self._file, self._slot = File(self._path, os.O_RDWR), None
        slot, data = self._read()
        records = list(_split(data, slot.start))
        # The first record is what was written anew last. All of them would be too many: over many short processes the
        # file would never be written anew.
        self._whole = NUMBER.size + len(records[0]) if records else 0
        return slot.version, records

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._file = self._slot = None

    @property
    def _fd(self) -> int:
        if self._file is None:
            raise AssertionError(f"{self._path} is not open")
        return self._file.fd

    def _read(self) -> tuple[Slot, bytes]:
        """Return the last commit, durable now, and its records' bytes."""
        self._allocated = os.fstat(self._fd).st_size
        slots = [self._read_slot(number) for number in range(2)]
        slot = max((*slots[0], *slots[1]), key=lambda slot: slot.number)
        if slot.number - 1 not in [older.number for older in slots[1 - slot.number % 2]]:
            raise DamagedError(0, f"its slots are of the commits {slots[0][0].number} and {slots[1][0].number}")
        data = os.pread(self._fd, slot.end - slot.start, slot.start) if slot.end > slot.start else b""
        if slot.start < FIRST or len(data) != slot.end - slot.start or crc32c(0, data) != slot.crc:
            raise DamagedError(slot.start, "its records are not those that were written")
        # Written again, not synced alone: after an error of a sync the kernel may take the page for clean.
        write_all(self._fd, slot.encode(), slot.number % 2 * SLOT_BYTES)
        sync_data(self._fd)
        self._slot = slot
        return slot, data

    def _read_slot(self, number: int) -> list[Slot]:
        """Return the copies of a slot that are right, at least one."""
        at = number * SLOT_BYTES
        data = os.pread(self._fd, 2 * COPY_BYTES, at)
        if len(data) != 2 * COPY_BYTES:
            raise DamagedError(at + len(data), "it is cut short")
        copies = [copy for start in (0, COPY_BYTES) if (copy := _decode_slot(data, start)) is not None]
        if not copies or any(copy.number % 2 != number for copy in copies):
            raise DamagedError(at, f"slot {number} is damaged")
        return copies

    # Writing

    def _last(self) -> Slot:
        return self._slot or self._read()[0]

    def reserve(self, size: int) -> None:
        """See that there is room for a record of so many bytes, and to write all anew after it (F5). Raises OSError."""
        slot = self._last()
        length = slot.end - slot.start + NUMBER.size + size
        # Behind what is there: all of it written anew, and once more behind that.
        needed = slot.end + 2 * length + SPARE
        if self._allocated < needed:
            extend(self._fd, needed + AHEAD)
            self._allocated = os.fstat(self._fd).st_size

    def is_crowded(self, size: int) -> bool:
        """Return whether all that counts should be written anew, instead of adding a record of so many bytes. Then most
        of what is there counts no more, or else there would be no room to do so later."""
        slot = self._last()
        end = slot.end + NUMBER.size + size
        length = end - slot.start
        has_room = end <= self._allocated and (slot.start - FIRST >= length or self._allocated - end >= length)
        return length > 2 * self._whole + SPARE or not has_room

    def append(self, record: bytes) -> None:
        """Append a record. Durable on return. Raises OSError."""
        slot = self._last()
        data = NUMBER.pack(len(record)) + record
        self._commit(slot, slot.start, slot.end, data, crc32c(slot.crc, data))

    def replace(self, record: bytes) -> None:
        """Replace all records that are there by one. Durable on return. Raises OSError."""
        slot = self._last()
        data = NUMBER.pack(len(record)) + record
        start = FIRST if slot.start - FIRST >= len(data) else slot.end
        self._commit(slot, start, start, data, crc32c(0, data))
        self._whole = len(data)

    def _commit(self, last: Slot, start: int, at: int, data: bytes, crc: int) -> None:
        """Commit as F3 says, with `data` written at an offset."""
        self._slot = None  # until it is done: interrupted, the file tells
        write_all(self._fd, data, at)
        sync_data(self._fd)
        slot = Slot(self._version, last.number + 1, start, at + len(data), crc)
        write_all(self._fd, slot.encode(), slot.number % 2 * SLOT_BYTES)
        sync_data(self._fd)
        self._allocated = max(self._allocated, slot.end)
        self._slot = slot


def damages(path: Path) -> Iterator[DamagedError]:
    """Yield what in a file is not as it was written: each copy of a slot, and the records. Writes nothing. Raises
    OSError."""
    with path.open("rb") as file:
        head = file.read(FIRST)
        slots = []
        for at in (number * SLOT_BYTES + copy for number in range(2) for copy in (0, COPY_BYTES)):
            slot = _decode_slot(head, at) if at + COPY_BYTES <= len(head) else None
            if slot is None:
                yield DamagedError(at, f"a copy of slot {at // SLOT_BYTES} is damaged")
            else:
                slots.append(slot)
        if slots:
            last = max(slots, key=lambda slot: slot.number)
            file.seek(last.start)
            data = file.read(max(0, last.end - last.start))
            if len(data) != last.end - last.start or crc32c(0, data) != last.crc:
                yield DamagedError(last.start, "its records are not those that were written")


def _decode_slot(data: bytes, start: int) -> Slot | None:
    """Return the copy of a slot that begins there; None for one that is damaged."""
    magic, *fields = SLOT.unpack_from(data, start)
    crc = crc32c(0, data[start : start + SLOT.size])
    return Slot(*fields) if magic == MAGIC and NUMBER.unpack_from(data, start + SLOT.size)[0] == crc else None


def _split(data: bytes, start: int) -> Iterable[bytes]:
    at = 0
    while at < len(data):
        end = at + NUMBER.size + NUMBER.unpack_from(data, at)[0] if at + NUMBER.size <= len(data) else len(data) + 1
        if end > len(data):
            raise DamagedError(start + at, "a record is cut short")
        yield data[at + NUMBER.size : end]
        at = end
