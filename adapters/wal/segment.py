"""A segment as it is seen in memory, and the table of all of them."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from ..system.descriptors import read_files
from ..system.files import is_out_of_files
from .files.file import File
from .format import COPIES, HEADER_BYTES, SegmentHeader

DEAD_BYTES_MORE: Final = 63
"""Bytes by which the bits of dead records grow beyond what they have to."""


class Segment:
    """One file of the log and what is known of its content.

    Who submits to the log alone changes `allocated`, `end` and `last_lsn`; `live`, `live_bytes`, `dead` and `changed`
    are its owner's, who knows which records are still needed.
    """

    __slots__ = (
        "__weakref__", "allocated", "base_lsn", "capacity", "changed", "counts", "dead", "end", "file", "generation",
        "last_lsn", "live", "live_bytes", "nonce", "number", "path", "seed",
    )  # fmt: skip

    def __init__(self, header: SegmentHeader, path: Path, file: File | None = None) -> None:
        self.number: Final = header.number
        self.nonce: Final = header.nonce
        self.seed: Final = header.seed
        self.base_lsn: Final = header.base_lsn
        self.capacity: Final = header.capacity
        self.path: Path = path
        self.file: File | None = file
        self.generation: Final = header.counter if header.number >= COPIES else 0
        """How often what is in it was copied."""
        self.counts: bool = header.number < COPIES
        """Its records count. For copies a record of the log says that, and so once that is applied."""
        self.allocated: int = HEADER_BYTES
        self.end: int | None = None
        """The offset where the segment's records end; None while it is the one being written."""
        self.last_lsn: int = header.base_lsn - 1
        self.live: int = 0
        """Records in it that its owner needs."""
        self.live_bytes: int = 0
        self.dead: bytearray | None = None
        """A bit for each record, by LSN - base_lsn: set once it is needed no more. None: that is so of none of them."""
        self.changed: bool = True
        """Its owner has not yet kept the last change of live or dead."""

    @property
    def taken(self) -> int:
        """Return how many bytes of the disk the segment takes beside its header."""
        return max(self.end or 0, self.allocated) - HEADER_BYTES

    def open(self) -> File:
        """Return the file, for reading; kept open for a while. Hold what it returns while you use its fd. Raises
        OSError."""
        file = self.file
        if file is None:
            try:
                file = File(self.path, os.O_RDONLY)
            except OSError as error:
                if not is_out_of_files(error) or not read_files.let_go():
                    raise
                file = File(self.path, os.O_RDONLY)
            self.file = file
        if self.end is not None:  # else the log writes to it, and has it open anyway
            read_files.used(self)
        return file

    def close(self) -> None:
        """Keep the file open no more; whoever reads it goes on. Idempotent."""
        read_files.forget(self)

    def reading(self) -> File:
        """Return the file, for one pass over all of it: not kept open for that."""
        return self.file or File(self.path, os.O_RDONLY)

    def add_live(self, length: int) -> None:
        """Count a record of so many bytes that is needed."""
        self.live += 1
        self.live_bytes += length
        self.changed = True

    def remove_live(self, lsn: int, length: int) -> None:
        """Note that the record with this LSN is needed no more. Only once for each that was added."""
        self.mark_dead(lsn)
        self.live -= 1
        self.live_bytes -= length

    def mark_dead(self, *lsns: int) -> None:
        """Mark them dead, at least one, in ascending order: such as were so before they were added."""
        base, dead = self.base_lsn, self.dead
        if dead is None:
            dead = self.dead = bytearray()
        missing = (lsns[-1] - base >> 3) + 1 - len(dead)
        if missing > 0:
            dead.extend(bytes(missing + DEAD_BYTES_MORE))
        for lsn in lsns:
            ordinal = lsn - base
            dead[ordinal >> 3] |= 1 << (ordinal & 7)
        self.changed = True

    def is_dead(self, lsn: int) -> bool:
        """Return whether the record with this LSN is marked dead. Any thread may ask."""
        ordinal, dead = lsn - self.base_lsn, self.dead
        return dead is not None and ordinal >> 3 < len(dead) and bool(dead[ordinal >> 3] & 1 << (ordinal & 7))


class SegmentTable:
    """The segments in order, and the files of copies (copies.py). Immutable: a change makes a new table, so readers
    need no lock."""

    __slots__ = ("_bases", "_found", "all", "copies", "segments")

    def __init__(self, segments: Iterable[Segment], copies: Iterable[Segment] = ()) -> None:
        self.segments: Final = tuple(segments)
        self.copies: Final = tuple(copies)
        """In order of their LSNs, too."""
        self.all: Final = (*self.segments, *self.copies)
        """In order of their LSNs: those of copies lie behind all others."""
        self._found = (None, *self.segments, None, *self.copies)
        """Segments found from each of `_bases` on: between the log and the first copies nothing."""
        self._bases = [
            0, *[segment.base_lsn for segment in self.segments],
            COPIES, *[segment.base_lsn for segment in self.copies],
        ]  # fmt: skip

    def find(self, lsn: int) -> Segment | None:
        """Return the segment whose records include this LSN, if it is still there."""
        segment = self._found[bisect_right(self._bases, lsn) - 1]
        if segment is None or (segment.end is not None and lsn > segment.last_lsn):
            return None
        return segment

    def sealed(self, before: int) -> list[Segment]:
        """Return the segments before this one, by number, and the files of copies that count."""
        return [s for s in self.segments if s.number < before] + [s for s in self.copies if s.counts]

    def without(self, gone: set[int]) -> SegmentTable:
        return SegmentTable(
            (s for s in self.segments if s.number not in gone), (s for s in self.copies if s.number not in gone)
        )

    def with_copies(self, copies: Segment) -> SegmentTable:
        """Return the table with one more file of copies: the latest."""
        return SegmentTable(self.segments, (*self.copies, copies))
