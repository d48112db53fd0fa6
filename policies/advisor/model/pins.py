"""The holder of a journal file: the destination that lets a segment go last, and whose bytes lie there.

A segment is *full* when its store begins the next one, or at the trace's end. From then on it is kept for messages
alone; its *holder* is the destination of the one that goes last, under `kahadb` also of one in an earlier segment whose
ack stands here, however long that chain. If several go at one moment it is the one first met in the trace, as where
messages are pending at the trace's end. A segment that goes as soon as it is full has no holder.

Bytes of a destination in a segment are *kept by another* from when the segment is full and its own messages there have
gone until the segment goes, and that other is the holder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from ..statistics.operations import Operations
from ..trace.arrays import Floats, Ints
from .cost_model import Partition, Segments, courses, journals_of, segments
from .jit import njit
from .kernel import JournalRules

NOBODY = -1

_Numbers = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Pins:
    """The holders of one partitioning's files. Destinations are numbers into `Operations.destinations`."""

    holder: _Numbers
    """The holder of each segment, in the order of `Segments`; NOBODY for one that went as soon as it was full."""
    kept: Mapping[tuple[int, int], float]
    """(whose, by whom), never the same: byte-seconds of the messages and acks that a destination has in files which it
    needs no more."""

    def held(self, segments: Segments, finish: float) -> Mapping[int, tuple[int, float]]:
        """Find the files that each holder keeps, and their byte-seconds on disk after they were full."""
        extra = (segments.end - full_times(segments, finish)) * segments.segment_bytes
        return {
            int(number): (int((self.holder == number).sum()), float(extra[self.holder == number].sum()))
            for number in np.unique(self.holder)
            if number != NOBODY
        }


def full_times(segments: Segments, finish: float) -> Floats:
    """Tell when each segment was full: its store began the next one, or the trace ended."""
    full = np.full(len(segments.start), finish)
    order = np.argsort(segments.store, kind="stable")
    followed = segments.store[order[:-1]] == segments.store[order[1:]]
    full[order[:-1][followed]] = segments.start[order[1:][followed]]
    return full


def find_pins(operations: Operations, partition: Partition, rules: JournalRules) -> tuple[Segments, Pins]:
    """Find the segments of a partitioning that does not compact, as `exact.segments` has them, and who keeps them."""
    found = courses(operations, partition, rules)
    simulated = segments(found, rules.segment_bytes)
    segment = _segment_of(operations, partition, [one.course.starts for one in found])
    finish = float(operations.time[-1])
    full = full_times(simulated, finish)
    end = operations.end
    holder = _holders(segment, operations.destination, operations.send, end, full, finish, rules.ack_rule)
    where, whose, size, own = _shares(segment, operations.destination, operations.size, end, finish)
    waits = simulated.end[where] - np.maximum(full[where], own)
    by = holder[where]
    chosen = (waits > 0) & (by != whose) & (by != NOBODY)
    width = len(operations.destinations)
    keys, place = np.unique(whose[chosen] * width + by[chosen], return_inverse=True)
    totals = np.bincount(place, weights=size[chosen] * waits[chosen], minlength=len(keys))
    kept = {divmod(int(key), width): float(total) for key, total in zip(keys, totals, strict=True)}
    return simulated, Pins(holder, kept)


def _segment_of(operations: Operations, partition: Partition, starts: Sequence[Ints]) -> _Numbers:
    """Find the segment of each operation, -1 for one that is in no store. `starts`: of each store's segments."""
    number = np.argsort(np.argsort(np.concatenate(starts), kind="stable"), kind="stable").astype(np.int32)
    segment = np.full(len(operations), -1, np.int32)
    first = 0
    for members, start in zip(partition, starts, strict=True):
        for rows in journals_of(operations, members):
            segment[rows] = number[first + np.searchsorted(start, rows, side="right") - 1]
        first += len(start)
    return segment


@njit
def _holders(
    segment: _Numbers, destination: _Numbers, send: Ints, op_end: Floats, full: Floats, finish: float, chains: bool
) -> _Numbers:
    until = full.copy()
    holder = np.full(len(full), -1, np.int32)
    for i in range(len(segment)):
        s = segment[i]
        if s >= 0 and min(op_end[i], finish) > until[s]:
            until[s] = min(op_end[i], finish)
            holder[s] = destination[i]
    if chains:
        # In the trace's order `until` is final where it is read: by the first ack from a later segment.
        for i in range(len(segment)):
            s = segment[i]
            if s >= 0 and send[i] >= 0:
                t = segment[send[i]]
                if 0 <= t < s and until[t] > until[s]:
                    until[s] = until[t]
                    holder[s] = holder[t]
    return holder


def _shares(
    segment: _Numbers, destination: _Numbers, size: Ints, op_end: Floats, finish: float
) -> tuple[Ints, Ints, Ints, Floats]:
    """Find, for each segment and destination in it, its bytes there, and when its last message there goes."""
    inside = np.flatnonzero(segment >= 0)
    width = int(destination.max()) + 1
    place, keys = pd.factorize(segment[inside].astype(np.int64) * width + destination[inside])
    held = np.bincount(place, weights=size[inside], minlength=len(keys)).astype(np.int64)
    own = np.full(len(keys), -np.inf)
    np.maximum.at(own, place, np.minimum(op_end[inside], finish))
    return keys // width, keys % width, held, own
