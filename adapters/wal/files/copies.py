"""Files of copies: what still counts of earlier segments, together in a file as large as that takes (rule J8).

Such a file is written beside the log, by a thread that holds none of the log's locks, and is whole and durable before a
record of the log says that its records count; until then, and if that is never written, it is a leftover. It is read
as a segment is: a header, then batches. Its number and its LSNs are its own, from format.COPIES on: it takes its place
in the order of the log by the record that speaks of it.

    number    COPIES + the log's last LSN when it was begun, or one more than the number before: never used twice
    LSNs      COPIES + (number - COPIES) * RECORDS_MAX and those that follow
    counter   in its header: how often its records were copied, this time too (`Segment.generation`)
"""

from __future__ import annotations

import os
from typing import Final

from google_crc32c import extend as crc32c

from ....policies.compaction import BATCH_BYTES
from ...system.files import sync_file, write_all
from .. import format as f
from ..segment import Segment
from .file import File
from .segment_files import UNFINISHED_SUFFIX, SegmentFiles

RECORDS_MAX: Final = 1 << 16
"""No file has so many."""

END_MAX: Final = (1 << 32) - 1
"""An offset has 32 bits."""


def base_of(number: int) -> int:
    """Return the first LSN of a file of copies, by its number."""
    return f.COPIES + (number - f.COPIES) * RECORDS_MAX


class CopiesWriter:
    """One file while it is being written. One thread."""

    def __init__(self, files: SegmentFiles, log_id: bytes, number: int, generation: int) -> None:
        """Make the file, under an unfinished name. `number`: behind COPIES. Raises OSError."""
        self._files, self._log_id, self._number, self._generation = files, log_id, f.COPIES + number, generation
        self._nonce = int.from_bytes(os.urandom(8), "little")
        self._seed = f.segment_seed(log_id, self._nonce)
        self._base_lsn = base_of(self._number)
        self._path = files.path(self._number)
        self._unfinished = self._path.with_name(self._path.name + UNFINISHED_SUFFIX)
        self._file = File(self._unfinished, os.O_RDWR | os.O_CREAT | os.O_TRUNC, files.file_mode)
        self._batch: list[bytes] = []
        self._batch_at, self._batch_lsn = f.HEADER_BYTES, self._base_lsn
        self.end: int = f.HEADER_BYTES + f.BATCH_HEADER.size
        """The offset where the next record goes."""
        self.count: int = 0
        """Records in it."""

    def takes(self, size: int) -> bool:
        """Return whether there is room for a payload of so many bytes. Every file takes one that a segment has
        taken."""
        end = self.end + f.RECORD_HEADER.size + size
        return self.count < RECORDS_MAX - 1 and (end <= END_MAX or not self.count)

    def add(self, kind: int, payload: bytes) -> tuple[int, int, int]:
        """Add a record. Returns its LSN, its offset and its length. Raises OSError."""
        if self.end - self._batch_at >= BATCH_BYTES:
            self._write_batch()
        lsn, offset = self._base_lsn + self.count, self.end
        record = f.RECORD_REST.pack(len(payload), lsn, kind, 0, 0) + payload
        self._batch.append(f.CRC.pack(crc32c(self._seed ^ offset, record)))
        self._batch.append(record)
        length = f.CRC.size + len(record)
        self.end += length
        self.count += 1
        return lsn, offset, length

    def _write_batch(self) -> None:
        count = len(self._batch) // 2
        start = self._batch_at + f.BATCH_HEADER.size
        header = f.encode_batch_header(
            self._seed, self._batch_at, self.end - start, count, self._batch_lsn, watermark=0
        )
        write_all(self._file.fd, header + b"".join(self._batch), self._batch_at)
        self._batch_at, self._batch_lsn, self._batch = self.end, self._batch_lsn + count, []
        self.end += f.BATCH_HEADER.size

    def finish(self) -> Segment:
        """Make it durable, under its name; it has one record at least. Raises OSError."""
        if self._batch:
            self._write_batch()
        end = self._batch_at
        header = f.SegmentHeader(
            log_id=self._log_id, number=self._number, nonce=self._nonce, base_lsn=self._base_lsn, durable_lsn=0,
            prev_number=0, prev_end=0, prev_lsn=0, counter=self._generation, snapshot_number=0, snapshot_offset=0,
            capacity=end,
        )  # fmt: skip
        write_all(self._file.fd, header.encode(), 0)
        self._files.count_sync()
        sync_file(self._file.fd)
        names = self._files.names()
        self._unfinished.rename(self._path)
        self._files.sync_names(names)
        segment = Segment(header, self._path)
        segment.allocated = segment.end = end
        segment.last_lsn = self._base_lsn + self.count - 1
        return segment

    def give_up(self) -> None:
        """Remove what was written. Raises OSError."""
        self._unfinished.unlink(missing_ok=True)
        self._path.unlink(missing_ok=True)
