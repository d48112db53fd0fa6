"""What Spark's workers do with a part of a trace: numpy over Arrow, and nothing of this package beside it.

A trace is cut into ranges of the global order, each held by one task. Positions count from the trace's first seq, and
the time at a position is the latest clock up to it: it never falls, so the latest time of some operations is the time
at the last position of them.

Where a store's segments begin depends on what came before, in one number: how full the segment is that is open where a
range begins (its carry). Each range says what would come out for every carry (`outcomes`); laid end to end they give
every range its own (`compose`), and a second look at the ranges gives the segments (`segment_starts`).

The functions are sent to the workers by value (see `spark_engine`), which therefore need numpy and pyarrow alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

NEVER_POSITION = 1 << 62
"""Behind every operation: where a message ends that is never acked."""
NONE = -1
SEND, REPEATED, SURPLUS = 1, 2, 4
"""Flags of an operation: it is a send, of an id sent again later, of a message acked more often than it needs."""


def gather(batches: Iterable[pa.RecordBatch]) -> dict[str, npt.NDArray[Any]]:
    """All rows of a task by column; none where there is no batch."""
    held = [batch for batch in batches if batch.num_rows]
    if not held:
        return {}
    table = pa.Table.from_batches(held)
    return {name: table.column(name).to_numpy() for name in table.column_names}


def emit(columns: dict[str, Any]) -> Iterator[pa.RecordBatch]:
    """One batch of these columns, unless they are empty."""
    batch = pa.RecordBatch.from_pydict(columns)
    if batch.num_rows:
        yield batch


@dataclass(frozen=True)
class RangeClock:
    """The time in every range of a trace."""

    before: dict[int, float]
    """By range, the latest stamp of the ranges before it."""
    first: int
    """The seq that positions count from."""
    operations_per_second: float
    """Above 0: the clock goes by seq alone."""

    def times(self, part: int, position: Ints, stamps: Floats) -> Floats:
        """Seconds of each operation of a range."""
        if self.operations_per_second > 0:
            by_order: Floats = (position + self.first) / self.operations_per_second
            return by_order
        times: Floats = np.maximum(np.maximum.accumulate(stamps), self.before[part])
        return times


def range_facts(part: int, position: Ints, stamps: Floats, size: Ints) -> dict[str, list[Any]]:
    """One row about a range."""
    steps = np.diff(position)
    twice = np.flatnonzero(steps == 0)
    earlier = np.maximum.accumulate(stamps) - stamps
    return {
        "part": [part],
        "count": [len(position)],
        "first": [int(position[0])],
        "last": [int(position[-1])],
        "bytes": [int(size.sum())],
        "largest": [int(size.max())],
        "largest_at": [int(position[int(size.argmax())])],
        "first_stamp": [float(stamps[0])],
        "lowest_stamp": [float(stamps.min())],
        "highest_stamp": [float(stamps.max())],
        "twice": [len(twice)],
        "first_twice": [int(position[twice[0]]) if len(twice) else NONE],
        "backwards": [int((earlier > 0).sum())],
        "backwards_most": [float(earlier.max())],
    }


def part_of_task() -> int:
    """The number of the range that this task holds."""
    from pyspark import TaskContext

    context = TaskContext.get()
    assert context is not None
    return int(context.partitionId())


def facts_task(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """One row about the range that this task holds."""
    held = gather(batches)
    if held:
        yield from emit(range_facts(part_of_task(), held["seq"], held["stamp"], held["size"]))


def backwards_task(before: dict[int, float], batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """How many clocks of this range lie before an earlier one's, and by how much at most."""
    held = gather(batches)
    if held:
        earlier = np.maximum(np.maximum.accumulate(held["stamp"]), before[part_of_task()]) - held["stamp"]
        yield from emit({"backwards": [int((earlier > 0).sum())], "backwards_most": [float(earlier.max())]})


RANGE_FACTS = (
    "part long, count long, first long, last long, bytes long, largest long, largest_at long, first_stamp double, "
    "lowest_stamp double, highest_stamp double, twice long, first_twice long, backwards long, backwards_most double"
)


# Messages -----------------------------------------------------------------------------------------------------------

MATCHED = "seq long, d int, partner long, ends long, flags int"


def match(rows: dict[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
    """Sends and acks of the same messages, told of each other. `needed` is -1 for an ack, else the acks that end it.

    `partner`: for an ack, the position of the last send of its message, or NONE. `ends`: where a send's life ends.
    """
    order = np.lexsort((rows["seq"], rows["h2"], rows["h1"]))
    h1, h2, seq, needed = (rows[name][order] for name in ("h1", "h2", "seq", "needed"))
    fresh = np.ones(len(seq), bool)
    fresh[1:] = (h1[1:] != h1[:-1]) | (h2[1:] != h2[:-1])
    message = np.cumsum(fresh) - 1
    is_send = needed >= 0
    last_send = np.full(message[-1] + 1, NONE, np.int64)
    last_ack = np.full(message[-1] + 1, NONE, np.int64)
    # In order of position within a message: the last one stays.
    last_send[message[is_send]] = seq[is_send]
    last_ack[message[~is_send]] = seq[~is_send]
    acks = np.bincount(message[~is_send], minlength=len(last_ack))[message]
    ends = np.where(is_send & (acks < needed), NEVER_POSITION, np.maximum(seq, last_ack[message]))
    flags = np.where(is_send, SEND, 0)
    flags += np.where(is_send & (last_send[message] != seq), REPEATED, 0)
    flags += np.where(is_send & (acks > np.maximum(needed, 1)), SURPLUS, 0)
    return {
        "seq": seq,
        "d": rows["d"][order],
        "partner": np.where(is_send, NONE, last_send[message]),
        "ends": np.where(is_send, ends, seq),
        "flags": flags.astype(np.int32),
    }


def match_task(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """`match`, of the messages that this task holds."""
    held = gather(batches)
    if held:
        yield from emit(match(held))


# Segments -----------------------------------------------------------------------------------------------------------


def rows_of_sets(destination: npt.NDArray[Any], sets: list[tuple[int, ...]]) -> Iterator[tuple[int, Ints]]:
    """The number of each set that has rows here, and its rows, ascending."""
    order = np.argsort(destination, kind="stable")
    numbers, begins = np.unique(destination[order], return_index=True)
    ends = np.append(begins[1:], len(order))
    rows = {int(d): order[begin:end] for d, begin, end in zip(numbers, begins, ends, strict=True)}
    for number, members in enumerate(sets):
        held = [rows[d] for d in members if d in rows]
        if len(held) == 1:
            yield number, held[0]
        elif held:
            # Marked and collected in order: several times as quick as sorting them, unless they are few.
            marked = np.zeros(len(destination), bool)
            for found in held:
                marked[found] = True
            yield number, np.flatnonzero(marked)


OUTCOMES = "store long, part long, total long, limits array<long>, outs array<long>"


def outcomes(size: Ints, capacity: int) -> tuple[int, Ints, Ints]:
    """What a range makes of any carry, of operations of these sizes (none above the capacity).

    In all so many bytes; and where a new segment begins: the room left in the open one is below `limits[i]`, and not
    below an earlier limit, then the last segment is filled with `outs[i]`.
    """
    written = np.cumsum(size)
    before = written - size
    count = len(size)
    # The operations that can be the first of a new segment: all that an open one might end at.
    entries = np.arange(min(int(np.searchsorted(written, capacity, "right")), count - 1) + 1)
    at, which = entries, entries
    while True:
        following = np.searchsorted(written, before[at] + capacity, "right")
        going = following < count
        if not going.any():
            break
        at = np.where(going, following, at)
        kept = np.append(True, at[1:] != at[:-1])
        which = (np.cumsum(kept) - 1)[which]
        at = at[kept]
    outs = (written[-1] - before[at])[which]
    last = np.append(outs[1:] != outs[:-1], True)
    return int(written[-1]), written[entries][last], outs[last]


def outcomes_task(
    sets: list[tuple[int, ...]], capacity: int, batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """A row for each store that has operations in this range, as `OUTCOMES`."""
    held = gather(batches)
    if held:
        sizes = np.minimum(held["size"], capacity)
        part = part_of_task()
        for number, rows in rows_of_sets(held["d"], sets):
            total, limits, outs = outcomes(sizes[rows], capacity)
            yield from emit({"store": [number], "part": [part], "total": [total], "limits": [limits], "outs": [outs]})


def compose(table: pa.Table, capacity: int) -> pa.Table:
    """The carry that each range of one store begins with, of what its ranges make of any carry."""
    table = table.sort_by("part")
    carry = capacity + 1  # nothing is open: every operation begins a segment
    carries = []
    for total, limits, outs in zip(
        table.column("total").to_pylist(), table.column("limits"), table.column("outs"), strict=True
    ):
        carries.append(carry)
        room = capacity - carry
        if room >= total:
            carry += total
        else:
            chosen = int(np.searchsorted(limits.values.to_numpy(), room, "right"))
            carry = outs.values[chosen].as_py()
    return pa.table(
        {
            "store": table.column("store"),
            "part": table.column("part"),
            "carry": pa.array(carries, pa.int64()),
        }
    )


CARRIES = "store long, part long, carry long"
STARTS = "store long, seq long, time double"


def segment_starts(size: Ints, capacity: int, carry: int) -> list[int]:
    """The rows that begin a segment."""
    written = np.cumsum(size)
    before = written - size
    rows = []
    row = int(np.searchsorted(written, capacity - carry, "right"))
    while row < len(size):
        rows.append(row)
        row = int(np.searchsorted(written, before[row] + capacity, "right"))
    return rows


def starts_task(
    sets: list[tuple[int, ...]],
    capacity: int,
    carries: dict[tuple[int, int], int],
    clock: RangeClock,
    batches: Iterable[pa.RecordBatch],
) -> Iterator[pa.RecordBatch]:
    """A row for each segment that begins in this range, as `STARTS`. `carries` by store and range."""
    held = gather(batches)
    if held:
        sizes = np.minimum(held["size"], capacity)
        part = part_of_task()
        times = clock.times(part, held["seq"], held["stamp"])
        for number, rows in rows_of_sets(held["d"], sets):
            begins = rows[segment_starts(sizes[rows], capacity, carries[number, part])]
            yield from emit({"store": np.full(len(begins), number), "seq": held["seq"][begins], "time": times[begins]})


# Lives --------------------------------------------------------------------------------------------------------------

LIVES = "store long, segment long, origin long, ends long"


def lives(
    rows: dict[str, npt.NDArray[Any]], sets: list[tuple[int, ...]], starts: list[Ints], *, chains: bool
) -> Iterator[pa.RecordBatch]:
    """Of matched operations: where the last message of each segment ends (origin NONE).

    With `chains`, also the earlier segments (origins) whose messages an ack in a segment ends.
    """
    for number, chosen in rows_of_sets(rows["d"], sets):
        seq, partner = rows["seq"][chosen], rows["partner"][chosen]
        segment = np.searchsorted(starts[number], seq, "right") - 1
        ends = np.full(len(starts[number]), NONE, np.int64)
        np.maximum.at(ends, segment, rows["ends"][chosen])
        known = np.flatnonzero(ends >= 0)
        yield from _lives(number, known, np.full(len(known), NONE), ends[known])
        if chains:
            acks = partner >= 0
            origin = np.searchsorted(starts[number], partner[acks], "right") - 1
            later = origin < segment[acks]
            edges = np.unique(segment[acks][later] * len(ends) + origin[later])
            yield from _lives(number, edges // len(ends), edges % len(ends), np.zeros(len(edges), np.int64))


def _lives(number: int, segment: Ints, origin: Ints, ends: Ints) -> Iterator[pa.RecordBatch]:
    return emit(
        {
            "store": np.full(len(segment), number),
            "segment": segment,
            "origin": origin,
            "ends": ends,
        }
    )


ENDS = "store long, segment long, own long, ends long"


def sweep(table: pa.Table, starts: list[Ints]) -> pa.Table:
    """Where each segment of one store ends: NEVER_POSITION, or the position that it is last needed at.

    `own`: for its own messages alone; `ends`: with the ack rule, of what acks of earlier segments' messages there are.
    """
    number = table.column("store")[0].as_py()
    segment, origin, ends = (table.column(name).to_numpy() for name in ("segment", "origin", "ends"))
    result = np.append(starts[number][1:], NEVER_POSITION)
    messages = origin == NONE
    result[segment[messages]] = np.maximum(result[segment[messages]], ends[messages])
    own = result.copy()
    # An ack outlives its message: in ascending order what an earlier segment's end is, is settled.
    segment, origin = segment[~messages], origin[~messages]
    order = np.argsort(segment, kind="stable")
    segment, origin = segment[order], origin[order]
    heads, begins = np.unique(segment, return_index=True)
    for head, begin, end in zip(heads, begins, np.searchsorted(segment, heads, "right"), strict=True):
        result[head] = max(result[head], result[origin[begin:end]].max())
    return pa.table(
        {
            "store": pa.array(np.full(len(result), number)),
            "segment": pa.array(np.arange(len(result))),
            "own": pa.array(own),
            "ends": pa.array(result),
        }
    )


def lives_task(
    sets: list[tuple[int, ...]], starts: list[Ints], chains: bool, batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """`lives`, of the messages that this task holds."""
    held = gather(batches)
    if held:
        yield from lives(held, sets, starts, chains=chains)


# Times --------------------------------------------------------------------------------------------------------------

VALUES = "number long, value double"
COUNTS = "number long, value long"


def written_at(time: Floats, size: Ints, before: int, queries: Floats, side: str) -> Ints:
    """Bytes written with the first row that is not before each time (`left`), or the last not after it (`right`)."""
    at = np.searchsorted(time, queries, "left") if side == "left" else np.searchsorted(time, queries, "right") - 1
    written: Ints = (np.cumsum(size) + before)[at]
    return written


def times_task(clock: RangeClock, positions: Ints, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The times at those of these positions (ascending) that lie in this range, as `VALUES`, by their numbers."""
    held = gather(batches)
    if held:
        seq = held["seq"]
        begin, end = np.searchsorted(positions, [seq[0], seq[-1] + 1])
        times = clock.times(part_of_task(), seq, held["stamp"])
        at = np.searchsorted(seq, positions[begin:end])
        yield from emit({"number": np.arange(begin, end), "value": times[at]})


def written_task(
    clock: RangeClock,
    before: dict[int, int],
    queries: dict[int, tuple[tuple[Ints, Floats], tuple[Ints, Floats]]],
    batches: Iterable[pa.RecordBatch],
) -> Iterator[pa.RecordBatch]:
    """`written_at` for the times of either side that are asked of this range, as `COUNTS`. `before`: bytes by range."""
    held = gather(batches)
    if held:
        part = part_of_task()
        times = clock.times(part, held["seq"], held["stamp"])
        for side, (numbers, asked) in zip(("left", "right"), queries[part], strict=True):
            yield from emit({"number": numbers, "value": written_at(times, held["size"], before[part], asked, side)})
