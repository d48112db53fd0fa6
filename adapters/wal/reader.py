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
        self.offset: int = offset
        self.lsn: int = lsn
        """The last LSN before `offset`."""
        self._segment, self._seed = segment, segment.seed
        self._file = segment.reading()
        self._limit = os.fstat(self._file.fd).st_size if limit is None else limit

    def __iter__(self) -> Iterator[Batch]:
        while True:
            window, headers = self._read()
            if not headers:
                return
            at = 0
            for header in headers:
                at += f.BATCH_HEADER.size
                batch = Batch(self._segment, self.offset, header, window[at : at + header.length])
                at += header.length
                self.offset, self.lsn = batch.end, batch.last_lsn
                yield batch

    def _read(self) -> tuple[bytes, list[f.BatchHeader]]:
        """Return what is next, and the headers of the batches at its head."""
        size = WINDOW
        while True:
            window = read_at(self._file, self.offset, max(min(size, self._limit - self.offset), 0))
            headers = batches_in(window, self._seed, self.offset, self.lsn)
            first = None if headers else f.decode_batch_header(window, self._seed, self.offset)
            if first is None or f.BATCH_HEADER.size + first.length <= size:
                return window, headers
            size = f.BATCH_HEADER.size + first.length  # it is larger

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
def batches_in(window: bytes, seed: int, offset: int, lsn: int) -> list[f.BatchHeader]:
    """Return the headers of the batches at the head of these bytes, as far as they are whole and in sequence. The bytes
    begin at `offset` of a segment with this `seed`, behind the record `lsn`."""
    headers, at = [], 0
    while (header := f.decode_batch_header(window[at : at + f.BATCH_HEADER.size], seed, offset + at)) is not None:
        start = at + f.BATCH_HEADER.size
        end = start + header.length
        if (
            header.base_lsn != lsn + 1
            or end > len(window)
            or not _are_whole(window[start:end], seed, offset + start, header)
        ):
            break
        headers.append(header)
        at, lsn = end, lsn + header.count
    return headers


def _are_whole(records: bytes, seed: int, start: int, header: f.BatchHeader) -> bool:
    """Return whether these bytes are the records of a batch, as many and with those LSNs. They begin at offset `start`;
    `seed` is their segment's."""
    position, unpack = 0, f.RECORD_HEADER.unpack_from
    for lsn in range(header.base_lsn, header.base_lsn + header.count):
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
