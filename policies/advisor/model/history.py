"""The disk that a partitioning takes over time, as few enough points to draw.

It follows from the courses of its stores, and from the lives of their segments where nothing is compacted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..trace.arrays import Floats, Ints
from .cost_model import Segments, TimedCourse
from .pins import full_times

COLUMNS = 240
BARS_MAX = 150


@dataclass(frozen=True, slots=True)
class History:
    """Bytes on disk in equal stretches of time, each at the moment when all stores together held most."""

    edges: Floats
    """Seconds: one more than there are columns."""
    held: Ints
    """Bytes, by store (rows) and column."""

    @property
    def total(self) -> Ints:
        """Add up the bytes of all stores, by column."""
        summed: Ints = self.held.sum(axis=0)
        return summed


@dataclass(frozen=True, slots=True)
class Bars:
    """Segments from their start to when they go, by store and start. All, or an even sample of them."""

    store: npt.NDArray[np.int32]
    start: Floats
    full: Floats
    end: Floats
    holder: npt.NDArray[np.int32]
    of: int
    """The number of segments in all."""


def history(
    courses: Sequence[TimedCourse], begin: float, finish: float, *, ahead_bytes: int = 0, columns: int = COLUMNS
) -> History:
    """Find what is on disk from begin to finish. `ahead_bytes`: what each journal always has beside its course."""
    position = np.concatenate([one.course.changes for one in courses])
    order = np.argsort(position, kind="stable")
    store = np.repeat(np.arange(len(courses)), [len(one.time) for one in courses])[order]
    at = np.concatenate([one.time for one in courses])[order]
    change = np.concatenate([np.diff(one.course.level, prepend=0) for one in courses])[order]
    level = np.concatenate([[0], np.cumsum(change)])
    edges = np.linspace(begin, finish, columns + 1)
    first = np.searchsorted(at, edges[:-1], side="left")
    last = np.searchsorted(at, edges[1:], side="left")
    last[-1] = len(at)
    # The level after `n` changes is level[n]; a column begins with what the one before left.
    fullest = np.array([a + int(np.argmax(level[a : b + 1])) for a, b in zip(first, last, strict=True)], np.int64)
    held = np.zeros((len(courses), columns), np.int64)
    for number in range(len(courses)):
        own = np.flatnonzero(store == number)
        running = np.concatenate([[0], np.cumsum(change[own])])
        held[number] = running[np.searchsorted(own, fullest, side="left")] + courses[number].journals * ahead_bytes
    return History(edges, held)


def bars(segments: Segments, holder: npt.NDArray[np.int32], finish: float, most: int = BARS_MAX) -> Bars:
    """Choose the segments to draw, with who keeps each (`pins.Pins.holder`, or numbers like those)."""
    order = np.lexsort((segments.start, segments.store))
    if len(order) > most:
        order = order[np.linspace(0, len(order) - 1, most).round().astype(np.int64)]
    full = full_times(segments, finish)
    return Bars(
        segments.store[order],
        segments.start[order],
        full[order],
        segments.end[order],
        holder[order],
        len(segments.start),
    )
