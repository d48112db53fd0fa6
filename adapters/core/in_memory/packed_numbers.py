"""Sequences of numbers in little memory: what a chunk keeps of each of its messages."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final

_CODES: Final = (("B", 1 << 8), ("H", 1 << 16), ("I", 1 << 32), ("Q", 1 << 64))


class Packed:
    """Numbers by what each is more than the smallest, in as few bytes as that takes, but for 0, which stays 0. Nothing,
    if they are all the same."""

    __slots__ = ("_base", "_length", "offsets")

    def __init__(self, numbers: Sequence[int]) -> None:
        self._length = len(numbers)
        least, most = min(filter(None, numbers), default=0), max(numbers)
        self.offsets: array[int] | None = None
        if min(numbers) == most:
            self._base = most
        else:
            self._base = least - 1
            code = _code(most - self._base)
            self.offsets = array(code, [number - self._base if number else 0 for number in numbers])

    def __getitem__(self, index: int) -> int:
        if self.offsets is None:
            return self._base
        offset = self.offsets[index]
        return offset + self._base if offset else 0

    def __len__(self) -> int:
        return self._length


def packed_ascending(offsets: Sequence[int]) -> Sequence[int]:
    """Return the same numbers, which begin with 0 and grow."""
    last = offsets[-1]
    return range(len(offsets)) if last == len(offsets) - 1 else array(_code(last), offsets)


def _code(most: int) -> str:
    """Return the type code of the array that holds numbers up to this one."""
    return next(code for code, end in _CODES if most < end)


def bytes_of(numbers: object) -> int:
    """Return how many bytes of memory numbers take, beside what an empty one takes."""
    if isinstance(numbers, Packed):
        return 160 + bytes_of(numbers.offsets) if numbers.offsets is not None else 0
    return len(numbers) * numbers.itemsize if isinstance(numbers, array) else 0
