"""Sequences of numbers in little memory: what a chunk keeps of each of its messages."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from typing import Protocol


class Numbers(Protocol):
    """One for each message of a chunk."""

    def __getitem__(self, index: int, /) -> int: ...


class Near:
    """Numbers that are close together, or 0."""

    __slots__ = ("_base", "offsets")

    def __init__(self, numbers: Sequence[int], base: int, code: str) -> None:
        self._base = base - 1
        self.offsets = array(code, [number - self._base if number else 0 for number in numbers])

    def __getitem__(self, index: int) -> int:
        offset = self.offsets[index]
        return offset + self._base if offset else 0


class Few:
    """Numbers most of which are 0."""

    __slots__ = ("numbers", "which")

    def __init__(self, numbers: Sequence[int]) -> None:
        self.which = array("H", [index for index, number in enumerate(numbers) if number])
        self.numbers = array("Q", [number for number in numbers if number])

    def __getitem__(self, index: int) -> int:
        at = bisect_left(self.which, index)
        return self.numbers[at] if at < len(self.which) and self.which[at] == index else 0


class Sizes:
    """Numbers below 1 << 32, by what each is more than the smallest: nothing, if they are all the same."""

    __slots__ = ("_least", "_length", "offsets")

    def __init__(self, numbers: Sequence[int]) -> None:
        self._length = len(numbers)
        self._least = least = min(numbers)
        spread = max(numbers) - least
        self.offsets: array[int] | None = None
        if spread:
            code = "B" if spread < 1 << 8 else "H" if spread < 1 << 16 else "I"
            self.offsets = array(code, [number - least for number in numbers])

    def __getitem__(self, index: int) -> int:
        return self._least + self.offsets[index] if self.offsets is not None else self._least

    def __len__(self) -> int:
        return self._length


def packed(numbers: Sequence[int]) -> Numbers:
    """The same numbers, 0 among them standing for none."""
    some = [number for number in numbers if number]
    spread = max(some, default=0) - min(some, default=0)
    if 5 * len(some) < len(numbers):
        return Few(numbers)
    if spread + 1 < 1 << 32:
        return Near(numbers, min(some), "H" if spread + 1 < 1 << 16 else "I")
    return array("Q", numbers)


def packed_ascending(offsets: Sequence[int]) -> Sequence[int]:
    """The same numbers, which begin with 0 and grow."""
    last = offsets[-1]
    if last == len(offsets) - 1:
        return range(len(offsets))
    return array("H" if last < 1 << 16 else "I" if last < 1 << 32 else "Q", offsets)


def bytes_of(numbers: object) -> int:
    """Bytes of memory, beside what an empty one takes."""
    if isinstance(numbers, array):
        return len(numbers) * numbers.itemsize
    if isinstance(numbers, Near):
        return 160 + bytes_of(numbers.offsets)
    if isinstance(numbers, Sizes):
        return bytes_of(numbers.offsets)
    if isinstance(numbers, Few):
        return 240 + bytes_of(numbers.which) + bytes_of(numbers.numbers)
    return 0
