"""The work of Spark's workers on a part of a trace, over Arrow: match, order, go through a journal.

Positions count from the trace's first seq. The functions are sent to the workers by value (see `spark_trace`), and so
need nothing of this package there beside what they are given.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ..model.kernel import StoreJournal
from ..statistics.lives import NONE, match
from ..trace.arrays import Ints

TWICE = 8
"""A flag beside those of `lives`: the operation's position is that of another."""


def gather(batches: Iterable[pa.RecordBatch]) -> dict[str, npt.NDArray[Any]]:
    """Return all rows of a task by column; none where there is no batch."""
    held = [batch for batch in batches if batch.num_rows]
    if not held:
        return {}
    table = pa.Table.from_batches(held)
    return {name: table.column(name).to_numpy() for name in table.column_names}


# Messages -----------------------------------------------------------------------------------------------------------

MATCHED = "part int, seq long, d int, stamp double, size long, partner long, ends long, flags int"


def match_task(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Match the messages that this task holds. `needed` is -1 for an ack, else the acks that end it."""
    rows = gather(batches)
    if not rows:
        return
    order = np.lexsort((rows["seq"], rows["h2"], rows["h1"]))
    h1, h2 = rows["h1"][order], rows["h2"][order]
    fresh = np.ones(len(order), bool)
    fresh[1:] = (h1[1:] != h1[:-1]) | (h2[1:] != h2[:-1])
    found = {name: rows[name][order] for name in ("part", "seq", "d", "stamp", "size")}
    lives = match(np.cumsum(fresh) - 1, found["seq"], rows["needed"][order])
    yield pa.RecordBatch.from_pydict(found | dict(zip(("partner", "ends", "flags"), lives, strict=True)))


# The order ----------------------------------------------------------------------------------------------------------

ORDERED = f"{MATCHED}, reached double, written long"


def order_task(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield a range's operations, in order, with the range's latest clock and bytes up to each of them."""
    reached, written, at = -np.inf, 0, NONE
    for batch in batches:
        if not batch.num_rows:
            continue
        seq, stamp, size, flags = (batch.column(name).to_numpy() for name in ("seq", "stamp", "size", "flags"))
        reaches = np.maximum(np.maximum.accumulate(stamp), reached)
        writes = np.cumsum(size) + written
        twice = np.diff(seq, prepend=at) == 0
        columns = {name: batch.column(name) for name in batch.schema.names}
        columns |= {"flags": flags + np.where(twice, TWICE, 0).astype(np.int32), "reached": reaches, "written": writes}
        yield pa.RecordBatch.from_pydict(columns)
        reached, written, at = reaches[-1], int(writes[-1]), int(seq[-1])


# Stores -------------------------------------------------------------------------------------------------------------

COURSE_ARRAYS, COURSE_COUNTS = ("changes", "level", "files", "starts", "ends"), ("written", "copied", "most_copied")
COURSES = ", ".join(
    ["store int", *(f"{name} array<long>" for name in COURSE_ARRAYS), *(f"{name} long" for name in COURSE_COUNTS)]
)
FLOW_ROWS = 1 << 18
"""Operations that go through all journals of a task at a time."""


def flow_task(
    journals: dict[tuple[int, tuple[int, ...]], StoreJournal], last: int, batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Feed each journal with the operations of its destinations; a row for each, as `COURSES`.

    The keys are a store's number and its destinations. The operations come in the global order.
    """
    at = NONE
    for rows in chunks(batches, FLOW_ROWS):
        seq = rows["seq"]
        assert seq[0] > at and (np.diff(seq) > 0).all(), "operations out of order"
        at = seq[-1]
        of_destination = rows_by_destination(rows["d"])
        for (_, members), journal in journals.items():
            chosen = rows_of(members, of_destination, len(seq))
            if len(chosen):
                journal.feed(*(rows[name][chosen] for name in ("seq", "size", "partner", "ends")))
    for (number, _), journal in journals.items():
        course = journal.finish(last)
        found = {name: [getattr(course, name)] for name in (*COURSE_ARRAYS, *COURSE_COUNTS)}
        yield pa.RecordBatch.from_pydict({"store": pa.array([number], pa.int32()), **found})


def chunks(batches: Iterable[pa.RecordBatch], rows: int) -> Iterator[dict[str, npt.NDArray[Any]]]:
    """Yield all rows by column, about so many at a time."""
    held: list[pa.RecordBatch] = []
    count = 0
    for batch in batches:
        held.append(batch)
        count += batch.num_rows
        if count >= rows:
            yield gather(held)
            held, count = [], 0
    if count:
        yield gather(held)


def rows_by_destination(destination: npt.NDArray[Any]) -> dict[int, Ints]:
    """Find the rows of each destination, ascending."""
    order = np.argsort(destination, kind="stable")
    numbers, begins = np.unique(destination[order], return_index=True)
    ends = np.append(begins[1:], len(order))
    return {int(d): order[begin:end] for d, begin, end in zip(numbers, begins, ends, strict=True)}


def rows_of(members: tuple[int, ...], of_destination: dict[int, Ints], count: int) -> Ints:
    """Find the rows of all these destinations, ascending, out of so many."""
    held = [of_destination[d] for d in members if d in of_destination]
    if len(held) < 2:
        return held[0] if held else np.empty(0, np.int64)
    # Marked and collected in order: several times as quick as sorting them, unless they are few.
    marked = np.zeros(count, bool)
    for rows in held:
        marked[rows] = True
    return np.flatnonzero(marked)
