"""The retention model, exact: which journal segments a partitioning keeps on disk, and when.

A store's journal is the subsequence of operations of its destinations, cut into segments that an operation never
straddles. A segment is on disk from its first operation to

    L[s] = max( the last time a message in s is finally acked (the trace's end, if one is not),
                the start of s + 1,
                L[t] for every earlier segment t with a message that an ack in s ends )    under `kahadb` only

The third line is ActiveMQ's ack rule: an ack must outlive the message it ends, or a recovery would bring that message
back, and so on down a chain. It is a fixed point that one ascending sweep reaches, because every ack in t stands before
every operation of s. Our own journal has snapshots in its place. Replaying the broker's own trace under this rule gives
exactly the 44 files that ActiveMQ 5.17 kept of 51, each by number.

The peak counts files on disk at one moment. For KahaDB it counts the files that are there throughout the writing of
half a segment: the broker cleans up from time to time and can only be looked at in between, so what overlaps for a
moment is not seen. (On the toy maker's broker: 6 files split, as listed there; 7 for 341 and 278 operations of 46,771.)

Everything is simulated in one pass over the trace for all stores of a partitioning at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .jit import njit
from .operations import Floats, Ints, Operations, TransactionSet
from .sizes import Model, OperationSizes

GIB = float(1 << 30)
HOUR = 3600.0

PEAK_SPAN_SEGMENTS: dict[Model, float] = {"kahadb": 0.5, "anabranch": 0.0}
"""How long a number of files must last to count as a peak, in segments written meanwhile."""

Partition = tuple[tuple[int, ...], ...]
"""Destination numbers, grouped into stores. Canonical: each store sorted, stores ordered by their first member."""


@dataclass(frozen=True, slots=True)
class CostModel:
    """What makes a partitioning better than another: disk held over time, and syncs that spanning transactions add."""

    segment_bytes: int = 32 << 20
    overhead_segments: float = 0.5
    """Disk that a store costs by being there, in segments."""
    disk_gib: float = 100.0
    sync_rate: float = 5000.0
    """Syncs a second that the disk can do. An hour of nothing but syncs costs as much as the whole disk for an hour."""

    @property
    def sync_price(self) -> float:
        """GiB-hours that one sync is worth."""
        return self.disk_gib / (self.sync_rate * HOUR)


@dataclass(frozen=True, slots=True)
class Segments:
    """Every segment that a partitioning ever has, in order of birth. On disk in [start, end]."""

    store: npt.NDArray[np.int32]
    start: Floats
    end: Floats
    segment_bytes: int


@dataclass(frozen=True, slots=True)
class Retention:
    """What a partitioning costs, over the whole trace."""

    mean_bytes: float
    """Journal bytes on disk, averaged over the trace's time."""
    peak_bytes: int
    """The most that all stores together hold at one time."""
    peak_files: int
    gib_hours: float
    """Journal bytes times time."""
    spanning_transactions: int
    cost: float
    """J, in GiB-hours: retention, overhead of stores, price of the syncs that spanning transactions add."""
    store_gib_hours: tuple[float, ...]
    store_peak_bytes: tuple[int, ...]
    """Of each store by itself, at one moment."""


def canonical(stores: Sequence[Sequence[int]]) -> Partition:
    return tuple(sorted(tuple(sorted(store)) for store in stores if store))


def simulate(operations: Operations, partition: Partition, segment_bytes: int, compacted: bool = False) -> Segments:
    """The segments of each store. Destinations in no store are left out. `compacted`: no ack keeps a file."""
    return simulate_rows(operations, partition, segment_bytes, compacted)[0]


def simulate_rows(
    operations: Operations, partition: Partition, segment_bytes: int, compacted: bool = False
) -> tuple[Segments, npt.NDArray[np.int32]]:
    """The same, and the segment of each operation, -1 for one that is in no store."""
    store_of = np.full(len(operations.destinations), -1, np.int32)
    for number, members in enumerate(partition):
        store_of[list(members)] = number
    capacity = operations.sizes.capacity(segment_bytes)
    segment, store, start, end = _assign(
        operations.destination, operations.size, operations.time, store_of, len(partition), capacity
    )
    _extend(segment, operations.end, end, float(operations.time[-1]))
    if operations.sizes.model == "kahadb" and not compacted:
        _chain(segment, operations.send, end)
    return Segments(store, start, end, segment_bytes), segment


@njit
def _assign(
    destination: npt.NDArray[np.int32],
    size: Ints,
    time: Floats,
    store_of: npt.NDArray[np.int32],
    stores: int,
    capacity: int,
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], Floats, Floats]:
    """Segment of each operation (-1: in no store), and each segment's store, start and the start of its successor."""
    count = len(time)
    used = np.zeros(stores, np.int64)
    current = np.full(stores, -1, np.int32)
    segment = np.full(count, -1, np.int32)
    store = np.empty(count, np.int32)
    start = np.empty(count, np.float64)
    end = np.empty(count, np.float64)
    born = 0
    for i in range(count):
        b = store_of[destination[i]]
        if b < 0:
            continue
        need = min(size[i], capacity)
        if current[b] < 0 or used[b] + need > capacity:
            if current[b] >= 0:
                end[current[b]] = time[i]
            store[born], start[born], end[born] = b, time[i], time[count - 1]
            current[b] = born
            used[b] = 0
            born += 1
        used[b] += need
        segment[i] = current[b]
    return segment, store[:born].copy(), start[:born].copy(), end[:born].copy()


@njit
def _extend(segment: npt.NDArray[np.int32], op_end: Floats, end: Floats, finish: float) -> None:
    """A segment lives as long as its last message."""
    for i in range(len(segment)):
        s = segment[i]
        if s >= 0:
            end[s] = max(end[s], min(op_end[i], finish))


@njit
def _chain(segment: npt.NDArray[np.int32], send: Ints, end: Floats) -> None:
    """The ack rule. In the trace's order, end[t] is final when the first ack from a later segment is reached."""
    for i in range(len(segment)):
        s = segment[i]
        if s >= 0 and send[i] >= 0:
            t = segment[send[i]]
            if 0 <= t < s:
                end[s] = max(end[s], end[t])


def measure(operations: Operations, partition: Partition, costs: CostModel) -> Retention:
    """The exact figures of a partitioning."""
    segments = simulate(operations, partition, costs.segment_bytes)
    span = peak_span(operations.sizes.model, costs.segment_bytes)
    peak_files = _peak(operations, segments, span) if span else None
    begin, finish = float(operations.time[0]), float(operations.time[-1])
    return figures(
        segments, partition, costs, operations.sizes, operations.transactions, begin, finish, peak_files=peak_files
    )


def compacted_peak(operations: Operations, partition: Partition, segment_bytes: int) -> int:
    """The files at the peak without the ack rule: what a broker's ack compaction can bring it down to."""
    segments = simulate(operations, partition, segment_bytes, compacted=True)
    return _peak(operations, segments, peak_span(operations.sizes.model, segment_bytes))


def figures(
    segments: Segments,
    partition: Partition,
    costs: CostModel,
    sizes: OperationSizes,
    transactions: Sequence[TransactionSet],
    begin: float,
    finish: float,
    *,
    peak_files: int | None,
) -> Retention:
    """What a partitioning of these segments costs, in a trace from `begin` to `finish`.

    `peak_files`: the files at the peak where one must last to count; None: the most at any moment.
    """
    ahead = sizes.sizes.segments_ahead
    held = (segments.end - segments.start) * costs.segment_bytes
    kept_ahead = ahead * costs.segment_bytes * (finish - begin)
    seconds = np.bincount(segments.store, weights=held, minlength=len(partition)) + kept_ahead
    peaks = _peaks_by_store(segments, len(partition))
    if peak_files is None:
        peak_files = lasting_peak(segments.start, segments.end, 0.0)
    peak_files += ahead * len(partition)
    gib_hours = float(seconds.sum()) / GIB / HOUR
    spanning, touches = spanning_transactions(transactions, partition)
    overhead = costs.overhead_segments * costs.segment_bytes * len(partition) * (finish - begin) / GIB / HOUR
    return Retention(
        mean_bytes=float(seconds.sum()) / (finish - begin),
        peak_bytes=peak_files * costs.segment_bytes,
        peak_files=peak_files,
        gib_hours=gib_hours,
        spanning_transactions=spanning,
        cost=gib_hours + overhead + 2 * costs.sync_price * touches,
        store_gib_hours=tuple(float(x) / GIB / HOUR for x in seconds),
        store_peak_bytes=tuple((peak + ahead) * costs.segment_bytes for peak in peaks),
    )


def _peaks_by_store(segments: Segments, stores: int) -> list[int]:
    """The most files of each store by itself, at one moment."""
    order = np.argsort(segments.store, kind="stable")
    start, end = segments.start[order], segments.end[order]
    edges = np.searchsorted(segments.store[order], np.arange(stores + 1))
    cuts = [slice(first, last) for first, last in itertools.pairwise(edges.tolist())]
    return [lasting_peak(start[cut], end[cut], 0.0) for cut in cuts]


def peak_span(model: Model, segment_bytes: int) -> float:
    """How many bytes are written while a number of files that counts as a peak lasts; 0: every moment counts."""
    return PEAK_SPAN_SEGMENTS[model] * segment_bytes


def _peak(operations: Operations, segments: Segments, span: float) -> int:
    written = np.cumsum(operations.size)
    begin = written[np.searchsorted(operations.time, segments.start, side="left")]
    finish = written[np.searchsorted(operations.time, segments.end, side="right") - 1]
    return written_peak(begin, finish, span, int(written[-1]))


def written_peak(begin: Ints, finish: Ints, span: float, total: int) -> int:
    """The most segments that stay while `span` bytes are written, of `total`.

    A segment stays from when `begin` bytes have been written to all stores, to when `finish` have been.
    """
    # A trace that writes less than the span still has its files on disk.
    return lasting_peak(begin.astype(np.float64), finish.astype(np.float64), min(span, 0.5 * float(total)))


def lasting_peak(start: Floats, end: Floats, span: float) -> int:
    """The largest n such that n intervals or more are open throughout some stretch of at least this length.

    One that ends where another begins is still open at that point.
    """
    if not len(start):
        return 0
    at = np.concatenate([start, end])
    change = np.concatenate([np.ones(len(start), np.int64), -np.ones(len(end), np.int64)])
    order = np.lexsort((-change, at))
    at, level = at[order], np.cumsum(change[order])
    low, high = 0, int(level.max())
    while low < high:
        middle = (low + high + 1) // 2
        if _longest_run(at, level >= middle) >= span:
            low = middle
        else:
            high = middle - 1
    return low


def _longest_run(at: Floats, open_enough: npt.NDArray[np.bool_]) -> float:
    """The longest stretch over which the flag holds. It changes at each `at` and holds until the next."""
    edges = np.diff(np.concatenate([[False], open_enough, [False]]).astype(np.int8))
    begins, ends = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
    if not len(begins):
        return -1.0
    return float((at[np.minimum(ends, len(at) - 1)] - at[begins]).max())


def spanning_transactions(transactions: Sequence[TransactionSet], partition: Partition) -> tuple[int, int]:
    """Transactions that touch several stores, and the stores that these touch in all."""
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
