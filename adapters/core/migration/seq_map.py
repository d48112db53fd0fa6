"""A map from the seqs of messages in one store to the seqs of their copies in another, both rising. The pairs are in a
file of the system's directory for temporary files, which goes when it is closed; in memory is one seq of each block."""

from __future__ import annotations

import os
import struct
import tempfile
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Final, NamedTuple

PAIR: Final = struct.Struct("<QQ")
BLOCK: Final = 512
"""Pairs."""


class Pair(NamedTuple):
    """A message's seq, and that of its copy."""

    source: int
    target: int


class SeqMap:
    """The map from seqs to their copies' seqs. Used by one thread."""

    def __init__(self) -> None:
        """Make an empty map. Raises OSError."""
        self._file = tempfile.TemporaryFile(prefix="anabranch-")  # noqa: SIM115  closed by `close`
        self._firsts = array("Q")
        """The first source of each block."""
        self._last: list[Pair] = []
        """The last block."""
        self._read: tuple[int, list[Pair]] = (-1, [])
        """The block that was read last, and which it is."""

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._file.close()

    def add(self, source: int, target: int) -> None:
        """Add one more pair, behind the others. Raises OSError."""
        if len(self._last) == BLOCK:
            data = b"".join(PAIR.pack(*pair) for pair in self._last)
            at = (len(self._firsts) - 1) * BLOCK * PAIR.size
            while data:
                written = os.pwrite(self._file.fileno(), data, at)
                data, at = data[written:], at + written
            self._last = []
        if not self._last:
            self._firsts.append(source)
        self._last.append(Pair(source, target))

    def get(self, source: int) -> int | None:
        """Return the seq of this message's copy; None if it has none. Raises OSError."""
        number = bisect_right(self._firsts, source) - 1
        if number < 0:
            return None
        block = self._block(number)
        at = bisect_left(block, (source, 0))
        return block[at].target if at < len(block) and block[at].source == source else None

    def between(self, first: int, last: int) -> tuple[int, int] | None:
        """Return the seqs of the first and of the last copy of the messages between these two; None if there are
        none."""
        ahead, behind = self._at_or_behind(first), self._at_or_ahead(last)
        if ahead is None or behind is None or ahead.source > behind.source:
            return None
        return ahead.target, behind.target

    def _at_or_behind(self, source: int) -> Pair | None:
        number = max(bisect_right(self._firsts, source) - 1, 0)
        for one in range(number, min(number + 2, len(self._firsts))):
            block = self._block(one)
            at = bisect_left(block, (source, 0))
            if at < len(block):
                return block[at]
        return None

    def _at_or_ahead(self, source: int) -> Pair | None:
        number = bisect_right(self._firsts, source) - 1
        if number < 0:
            return None
        block = self._block(number)
        return block[bisect_left(block, (source + 1, 0)) - 1]

    def _block(self, number: int) -> Sequence[Pair]:
        if number == len(self._firsts) - 1:
            return self._last
        if self._read[0] != number:
            data = os.pread(self._file.fileno(), BLOCK * PAIR.size, number * BLOCK * PAIR.size)
            self._read = number, [Pair(*pair) for pair in PAIR.iter_unpack(data)]
        return self._read[1]
