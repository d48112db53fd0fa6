"""How long something took each time, as counts in a few buckets: constant memory, whatever the number of times."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import ClassVar, Final

BOUNDS: Final = (*(float(f"{digit}e{power}") for power in range(-5, 1) for digit in (1, 2, 5)), 10.0)
"""The upper bounds of the buckets, in seconds. The last bucket, behind them, has none."""


@dataclass(frozen=True, slots=True)
class Durations:
    """How long something took each time."""

    BOUNDS: ClassVar[tuple[float, ...]] = BOUNDS
    """The upper bounds of the buckets, in seconds: 10, 20 and 50 microseconds, and so on up to 10 seconds."""
    counts: tuple[int, ...] = (0,) * (len(BOUNDS) + 1)
    """How many times it took at most each bound, and longer than the one before. The last: longer than all."""
    seconds: float = 0.0
    """The sum of all times."""

    def __add__(self, other: Durations) -> Durations:
        counts = tuple(one + two for one, two in zip(self.counts, other.counts, strict=True))
        return Durations(counts, self.seconds + other.seconds)

    def quantile(self, share: float) -> float | None:
        """Return the seconds that this share of the times (0 to 1) stayed within, as far as the buckets tell; None if
        there were none. What took longer than 10 seconds counts as 10."""
        rank, below, least = share * sum(self.counts), 0, 0.0
        for most, count in zip((*BOUNDS, BOUNDS[-1]), self.counts, strict=True):
            if count and below + count >= rank:
                return least + (most - least) * (rank - below) / count
            below, least = below + count, most
        return None


class DurationCounter:
    """Counts durations. Threads: all; of two at once one may be missed. The compiled appender does the same."""

    __slots__ = ("_counts", "_seconds", "mean")

    def __init__(self) -> None:
        self._counts, self._seconds = [0] * (len(BOUNDS) + 1), 0.0
        self.mean: float = 0.0
        """How long it takes, lately. A stall is no measure: it counts as twice as long."""

    def count(self, seconds: float) -> None:
        """Count that it took so long."""
        self._counts[bisect_left(BOUNDS, seconds)] += 1
        self._seconds += seconds
        self.mean = 0.7 * self.mean + 0.3 * min(seconds, 2 * self.mean + 0.001)

    @property
    def durations(self) -> Durations:
        """Return all that was counted."""
        return Durations(tuple(self._counts), self._seconds)
