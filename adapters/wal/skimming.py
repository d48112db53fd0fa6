"""The few records of a sealed segment that are wanted: the others are skipped by their lengths, their checksums are not
computed. Records that are wanted are verified."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

from google_crc32c import extend as crc32c

from . import format as f
from .reader import WINDOW, Record, read_at
from .segment import Segment

_unpack_batch = f.BATCH_HEADER.unpack_from
_unpack_record = f.RECORD_HEADER.unpack_from
_HEADER = f.RECORD_HEADER.size


class Skimmer:
    """One pass over a segment. `offset` says how far it read as a segment does."""

    def __init__(self, segment: Segment, kind: int, is_dead: Callable[[int], bool]) -> None:
        """Skim the records of this kind whose LSN is not dead. Raises OSError."""
        self.offset: int = f.HEADER_BYTES
        self._segment, self._kind, self._is_dead = segment, kind, is_dead
        self._file = segment.reading()
        self._end = segment.end if segment.end is not None else os.fstat(self._file.fd).st_size

    def __iter__(self) -> Iterator[Record | None]:
        """Yield the wanted records, in order, and None behind each batch. Ends early where the segment does not read
        back."""
        lsn, window, window_at = self._segment.base_lsn, b"", 0
        while self.offset < self._end:
            at, size = self.offset - window_at, f.BATCH_HEADER.size
            if at + size <= len(window):
                size += _unpack_batch(window, at)[2]
            if at + size > len(window):
                window = read_at(self._file, self.offset, min(max(size, WINDOW), self._end - self.offset))
                window_at, at = self.offset, 0
                if len(window) < f.BATCH_HEADER.size:
                    return
                size = f.BATCH_HEADER.size + _unpack_batch(window, 0)[2]
                if size > len(window):  # what a damaged header says may be any number
                    window = read_at(self._file, self.offset, min(size, self._end - self.offset))
            magic, _, length, count, base_lsn, _ = _unpack_batch(window, at)
            end = at + f.BATCH_HEADER.size + length
            if magic != f.BATCH_MAGIC or base_lsn != lsn or end > len(window):
                return
            at += f.BATCH_HEADER.size
            for lsn in range(base_lsn, base_lsn + count):
                if at + _HEADER > end:
                    return
                crc, size, found, kind, _, _ = _unpack_record(window, at)
                behind = at + _HEADER + size
                if found != lsn or behind > end:
                    return
                if kind == self._kind and not self._is_dead(lsn):
                    offset = window_at + at
                    if crc32c(self._segment.seed ^ offset, window[at + f.CRC.size : behind]) != crc:
                        return
                    yield Record(lsn, kind, window[at + _HEADER : behind], self._segment, offset, behind - at)
                at = behind
            if at != end:
                return
            lsn, self.offset = base_lsn + count, window_at + end
            yield None
