"""Reading a log in order: whole batches, and the records in them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Final, NamedTuple

from google_crc32c import extend as crc32c

from ..system.acceleration import inner_loop
from . import format as f
from .files.file import File
from .segment import Segment

WINDOW: Final = 1 << 20


class Record(NamedTuple):
    """One record: what it holds and where it is."""

    lsn: int
    kind: int
    payload: bytes
    segment: Segment
    offset: int
    """In the segment's file."""
    length: int
    """The length of the whole record."""


class Batch(NamedTuple):
    """One whole and valid batch."""

    segment: Segment
    offset: int
    header: f.BatchHeader
    records: bytes

    @property
    def end(self) -> int:
        return self.offset + f.BATCH_HEADER.size + self.header.length

    @property
    def last_lsn(self) -> int:
        return self.header.base_lsn + self.header.count - 1


class BatchReader:
    """Walks the batches of one segment. `offset` and `lsn` say how far all was whole and in sequence."""

    def __init__(self, segment: Segment, offset: int, lsn: int, limit: int | None = None) -> None:
        """Begin at `offset`, where a batch begins; it is read up to `limit`, or to the end of the file. Raises
        OSError."""
        self.offset = offset
        self.lsn = lsn
        """The last LSN before `offset`."""
        self._segment, self._seed = segment, segment.seed
        self._file = segment.reading()
        self._limit = os.fstat(self._file.fd).st_size if limit is None else limit
        self._window, self._window_at = b"", 0

    def _read(self, offset: int, size: int) -> bytes:
        """Return `size` bytes, fewer at the limit."""
        size = min(size, self._limit - offset)
        if size <= 0:
            return b""
        at = offset - self._window_at
        if at < 0 or at + size > len(self._window):
            self._window = read_at(self._file, offset, min(max(size, WINDOW), self._limit - offset))
            self._window_at, at = offset, 0
        return self._window[at : at + size]

    def __iter__(self) -> Iterator[Batch]:
        while (batch := self._next()) is not None:
            self.offset, self.lsn = batch.end, batch.last_lsn
            yield batch

    def _next(self) -> Batch | None:
        header = f.decode_batch_header(self._read(self.offset, f.BATCH_HEADER.size), self._seed, self.offset)
        if header is None or header.base_lsn != self.lsn + 1:
            return None
        start = self.offset + f.BATCH_HEADER.size
        records = self._read(start, header.length)
        if len(records) < header.length or not is_whole(records, self._seed, start, header.base_lsn, header.count):
            return None
        return Batch(self._segment, self.offset, header, records)

    def headers_beyond(self) -> Iterator[f.BatchHeader]:
        """Yield valid batch headers from `offset` on: that of the batch which is not whole, and what the hole hides."""
        position = self.offset
        while position < self._limit:
            data = read_at(self._file, position, min(WINDOW, self._limit - position))
            index = data.find(f.BATCH_MAGIC)
            while index >= 0:
                at = position + index
                header = f.decode_batch_header(read_at(self._file, at, f.BATCH_HEADER.size), self._seed, at)
                if header is not None:
                    yield header
                index = data.find(f.BATCH_MAGIC, index + 1)
            position += max(1, len(data) - len(f.BATCH_MAGIC) + 1)


def read_at(file: File, offset: int, size: int) -> bytes:
    """Return all bytes that were asked for, or those up to the end of the file. Raises OSError."""
    fd = file.fd
    data = os.pread(fd, size, offset)
    while 0 < len(data) < size:
        more = os.pread(fd, size - len(data), offset + len(data))
        if not more:
            break
        data += more
    return data


@inner_loop
def is_whole(records: bytes, seed: int, start: int, base_lsn: int, count: int) -> bool:
    """Return whether these bytes are the records of a batch, as many and with those LSNs. They begin at offset `start`;
    `seed` is their segment's."""
    position, unpack = 0, f.RECORD_HEADER.unpack_from
    for lsn in range(base_lsn, base_lsn + count):
        if position + f.RECORD_HEADER.size > len(records):
            return False
        crc, length, found, _, _, _ = unpack(records, position)
        end = position + f.RECORD_HEADER.size + length
        if found != lsn or end > len(records):
            return False
        if crc32c(seed ^ (start + position), records[position + 4 : end]) != crc:
            return False
        position = end
    return position == len(records)


@inner_loop
def records_of(batch: Batch) -> list[Record]:
    """Return the records of a batch that was read whole."""
    records = []
    position, start = 0, batch.offset + f.BATCH_HEADER.size
    while position < len(batch.records):
        _, length, lsn, kind, _, _ = f.RECORD_HEADER.unpack_from(batch.records, position)
        end = position + f.RECORD_HEADER.size + length
        payload = batch.records[position + f.RECORD_HEADER.size : end]
        records.append(Record(lsn, kind, payload, batch.segment, start + position, end - position))
        position = end
    return records


def read_record(segment: Segment, kind: int, lsn: int, offset: int, length: int) -> bytes | None:
    """Return the payload of the record at a place; None if it is not there whole. Raises OSError."""
    record = read_at(segment.reading(), offset, length)
    if len(record) != length or length < f.RECORD_HEADER.size:
        return None
    crc, _, found_lsn, found_kind, _, _ = f.RECORD_HEADER.unpack_from(record)
    if crc != crc32c(segment.seed ^ offset, record[f.CRC.size :]) or (found_lsn, found_kind) != (lsn, kind):
        return None
    return record[f.RECORD_HEADER.size :]
