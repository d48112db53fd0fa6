"""The exact model: what a partitioning has on disk over the trace, what compaction copies, and what that costs.

A store's journal is the subsequence of operations of its destinations; `kernel` says what is on disk after each of
them. A store compacts by its own writing alone, so its course is the same in any partitioning, and costs add up over
stores. Only the peak does not: the stores' courses are laid over each other, position by position.

Where nothing is copied (`kahadb`, and our own journal with `compact_live_percent: 0`) a segment goes whole, and is on
disk from its first operation to

    L[s] = max( the last time a message in s is finally acked (the trace's end, if one is not),
                the start of s + 1,
                L[t] for every earlier segment t with a message that an ack in s ends )    under `kahadb` only

The third line is ActiveMQ's ack rule: an ack must outlive the message it ends, or a recovery would bring that message
back, and so on down a chain. Our own journal has snapshots in its place. Replaying the broker's own trace under this
rule gives exactly the 44 files that ActiveMQ 5.17 kept of 51, each by number.

The peak is the most bytes on disk at one moment. For KahaDB it counts the files that are there throughout the writing
of half a segment: the broker cleans up from time to time and can only be looked at in between, so what overlaps for a
moment is not seen. (On the toy maker's broker: 6 files split, as listed there; 7 for 341 and 278 operations of 46,771.)
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..statistics.operations import Operations, TransactionSet
from ..statistics.sizes import Model, OperationSizes
from ..trace.arrays import Floats, Ints
from .kernel import JournalRules, StoreCourse, store_journal

MIB = float(1 << 20)
GIB = float(1 << 30)
HOUR = 3600.0
COPY_RATE = 100.0

PEAK_SPAN_SEGMENTS = 0.5
"""How long a number of KahaDB's files must last to count as a peak, in segments written meanwhile."""

Partition = tuple[tuple[int, ...], ...]
"""Destination numbers, grouped into stores. Canonical: each store sorted, stores ordered by their first member."""


@dataclass(frozen=True, slots=True)
class CostModel:
    """The prices that make a partitioning better than another.

    They are those of disk held over time, of syncs that spanning transactions add, and of what compaction copies.
    """

    segment_bytes: int = 32 << 20
    overhead_segments: float = 0.5
    """Disk that a store costs by being there, in segments."""
    disk_gib: float = 100.0
    sync_rate: float = 5000.0
    """Syncs a second that the disk can do. An hour of nothing but syncs costs as much as the whole disk for an hour."""
    copy_rate: float = COPY_RATE
    """MiB a second that the disk can copy: each byte is read once and written once. An hour of nothing but copying
    costs as much as the whole disk for an hour."""
    live_percent: int = 50
    """A journal's `compact_live_percent`; 0: nothing is compacted."""
    min_segments: int = 4
    """A journal's `compact_min_segments`."""

    @property
    def sync_price(self) -> float:
        """Return the GiB-hours that one sync is worth."""
        return self.disk_gib / (self.sync_rate * HOUR)

    @property
    def copy_price(self) -> float:
        """Return the GiB-hours that copying one byte is worth."""
        return self.disk_gib / (self.copy_rate * MIB * HOUR)

    def rules(self, sizes: OperationSizes) -> JournalRules:
        """Return the rules by which each store's journal keeps its files."""
        return JournalRules.of(sizes, self.segment_bytes, self.live_percent, self.min_segments)

    def compacts(self, model: Model) -> bool:
        """Tell whether messages are copied at all."""
        return model == "anabranch" and self.live_percent > 0


@dataclass(frozen=True, slots=True)
class Segments:
    """Every segment that a partitioning ever has, in order of birth. On disk in [start, end]."""

    store: npt.NDArray[np.int32]
    start: Floats
    end: Floats
    segment_bytes: int


@dataclass(frozen=True, slots=True)
class TimedCourse:
    """One store's course, with the time of each of its changes."""

    course: StoreCourse
    time: Floats
    journals: int = 1
    """The nodes on which it has a journal."""

    def time_of(self, positions: Ints) -> Floats:
        """Give the times of these positions, at each of which something changed."""
        times: Floats = self.time[np.searchsorted(self.course.changes, positions)]
        return times

    def byte_seconds(self, finish: float) -> float:
        """Return the bytes on disk times time, to the trace's end."""
        return float((self.course.level * np.diff(self.time, append=finish)).sum())


@dataclass(frozen=True, slots=True)
class Retention:
    """The costs of a partitioning, over the whole trace."""

    mean_bytes: float
    """Journal bytes on disk, averaged over the trace's time."""
    peak_bytes: int
    """The most that all stores together hold at one time."""
    peak_files: int
    gib_hours: float
    """Journal bytes times time."""
    spanning_transactions: int
    cost: float
    """J, in GiB-hours: retention, overhead of stores, prices of the syncs that spanning transactions add and of what
    compaction copies."""
    written_bytes: int
    """The bytes that operations, and compaction's own records, put into the journals."""
    copied_bytes: int
    """The bytes that compaction copies: each byte is read once and written once."""
    most_copied: int
    """The copies of the message that was copied most often."""
    store_gib_hours: tuple[float, ...]
    store_peak_bytes: tuple[int, ...]
    """The peak of each store by itself, at one moment."""
    store_written_bytes: tuple[int, ...]
    store_copied_bytes: tuple[int, ...]


def canonical(stores: Sequence[Sequence[int]]) -> Partition:
    return tuple(sorted(tuple(sorted(store)) for store in stores if store))


# Courses ------------------------------------------------------------------------------------------------------------


def courses(operations: Operations, partition: Partition, rules: JournalRules) -> list[TimedCourse]:
    """Find the course of each store, in rows. Destinations in no store are left out."""
    found = []
    for members in partition:
        each = []
        for rows in journals_of(operations, members):
            journal = store_journal(rules)
            journal.feed(rows, operations.size[rows], operations.send[rows], operations.ends[rows])
            course = journal.finish(len(operations) - 1)
            each.append(TimedCourse(course, operations.time[course.changes]))
        found.append(joined(each))
    return found


def joined(found: Sequence[TimedCourse]) -> TimedCourse:
    """Make one course of those of a store's journals, one on each of several nodes."""
    if len(found) == 1:
        return found[0]
    each = [one.course for one in found]

    def all_of(arrays: Iterable[Ints]) -> Ints:
        return np.concatenate([np.empty(0, np.int64), *arrays])

    changes = all_of(one.changes for one in each)
    order = np.argsort(changes, kind="stable")
    course = StoreCourse(
        changes[order],
        np.cumsum(all_of(np.diff(one.level, prepend=0) for one in each)[order]),
        np.cumsum(all_of(np.diff(one.files, prepend=0) for one in each)[order]),
        sum(one.written for one in each),
        sum(one.copied for one in each),
        max((one.most_copied for one in each), default=0),
        all_of(one.starts for one in each),
        all_of(one.ends for one in each),
    )
    time = np.concatenate([np.empty(0), *(one.time for one in found)])
    return TimedCourse(course, time[order], len(found))


def journals_of(operations: Operations, members: Sequence[int]) -> list[Ints]:
    """Return the rows of these destinations' operations in each journal of a store. Of several nodes each that has such
    operations has one; what is elsewhere is in none."""
    own = [d for d in members if d not in operations.elsewhere]
    if not own:
        return []
    rows = rows_of(operations, own)
    if operations.node is None:
        return [rows]
    node = operations.node[rows]
    return [rows[node == number] for number in np.unique(node)]


def rows_of(operations: Operations, members: Sequence[int]) -> Ints:
    """Return the rows of these destinations' operations."""
    if len(members) == len(operations.destinations):
        return np.arange(len(operations))
    chosen = np.zeros(len(operations.destinations), np.bool_)
    chosen[list(members)] = True
    return np.flatnonzero(chosen[operations.destination])


def segments(found: Sequence[TimedCourse], segment_bytes: int) -> Segments:
    """Put the segments of several stores that do not compact in order of birth."""
    births = [one.course.starts for one in found]
    store = np.repeat(np.arange(len(found), dtype=np.int32), [len(one) for one in births])
    order = np.argsort(np.concatenate(births), kind="stable")
    starts = np.concatenate([one.time_of(one.course.starts) for one in found])
    ends = np.concatenate([one.time_of(one.course.ends) for one in found])
    return Segments(store[order], starts[order], ends[order], segment_bytes)


# Figures ------------------------------------------------------------------------------------------------------------


def figures(
    found: Sequence[TimedCourse],
    partition: Partition,
    costs: CostModel,
    sizes: OperationSizes,
    transactions: Sequence[TransactionSet],
    begin: float,
    finish: float,
    *,
    peak_files: int | None,
) -> Retention:
    """Work out what a partitioning whose stores take these courses costs, in a trace from `begin` to `finish`.

    `peak_files`: the files at the peak where one must last to count; None: every moment counts.
    """
    ahead = sizes.sizes.segments_ahead
    ahead_bytes = ahead * costs.segment_bytes
    journals = sum(one.journals for one in found)
    seconds = [one.byte_seconds(finish) + one.journals * ahead_bytes * (finish - begin) for one in found]
    if peak_files is None:
        peak_bytes, peak_files = together(found)
    else:
        peak_bytes = peak_files * costs.segment_bytes
    held = sum(seconds)
    gib_hours = held / GIB / HOUR
    copied = [one.course.copied for one in found]
    spanning, touches = spanning_transactions(transactions, partition)
    overhead = costs.overhead_segments * costs.segment_bytes * journals * (finish - begin) / GIB / HOUR
    return Retention(
        mean_bytes=held / (finish - begin),
        peak_bytes=peak_bytes + ahead_bytes * journals,
        peak_files=peak_files + ahead * journals,
        gib_hours=gib_hours,
        spanning_transactions=spanning,
        cost=gib_hours + overhead + 2 * costs.sync_price * touches + costs.copy_price * sum(copied),
        written_bytes=sum(one.course.written for one in found),
        copied_bytes=sum(copied),
        most_copied=max((one.course.most_copied for one in found), default=0),
        store_gib_hours=tuple(x / GIB / HOUR for x in seconds),
        store_peak_bytes=tuple(int(one.course.level.max(initial=0)) + one.journals * ahead_bytes for one in found),
        store_written_bytes=tuple(one.course.written for one in found),
        store_copied_bytes=tuple(copied),
    )


def together(found: Sequence[TimedCourse]) -> tuple[int, int]:
    """Find the most bytes, and the most files, that these stores hold at one position of the global order."""
    at = np.concatenate([one.course.changes for one in found])
    order = np.argsort(at, kind="stable")
    most = []
    for values in ([one.course.level for one in found], [one.course.files for one in found]):
        change = np.concatenate([np.diff(value, prepend=0) for value in values])
        most.append(int(np.cumsum(change[order]).max(initial=0)))
    return most[0], most[1]


def lasting_peak(start: Floats | Ints, end: Floats | Ints, span: float) -> int:
    """Find the largest n such that n intervals or more are open throughout a stretch of at least this length.

    One that ends where another begins is still open at that point.
    """
    if not len(start):
        return 0
    at, level = open_at(start, end)

    def is_short(files: int) -> bool:
        """Tell whether so many are never open for long enough."""
        return bool(stretches(at, level >= files).max(initial=-1.0) < span)

    return bisect_left(range(1, int(level.max()) + 1), True, key=is_short)


def open_at(start: Floats | Ints, end: Floats | Ints) -> tuple[Floats, Ints]:
    """Return the times at which these intervals begin and end, in order, and how many are open from each on."""
    at = np.concatenate([start, end]).astype(np.float64)
    change = np.concatenate([np.ones(len(start), np.int64), -np.ones(len(end), np.int64)])
    order = np.lexsort((-change, at))
    return at[order], np.cumsum(change[order])


def stretches(at: Floats, holds: npt.NDArray[np.bool_]) -> Floats:
    """Return the length of each stretch over which a flag holds, which changes at each `at` and holds until the
    next."""
    edges = np.diff(np.concatenate([[False], holds, [False]]).astype(np.int8))
    lengths: Floats = at[np.minimum(np.flatnonzero(edges == -1), len(at) - 1)] - at[np.flatnonzero(edges == 1)]
    return lengths


def spanning_transactions(transactions: Sequence[TransactionSet], partition: Partition) -> tuple[int, int]:
    """Count the transactions that touch several stores, and the stores that these touch in all."""
    if len(partition) == 1:
        return 0, 0
    store_of = {member: number for number, members in enumerate(partition) for member in members}
    spanning = touches = 0
    for group in transactions:
        touched = len({store_of[member] for member in group.members if member in store_of})
        if touched > 1:
            spanning += group.count
            touches += touched * group.count
    return spanning, touches
