"""The summary that the search needs of a trace of any size: bytes and lives by bucket of the order.

A bucket is a run of operations about as long as a quarter of a segment of the whole journal, or longer where there
would be too many rows. The summary says how many bytes each destination wrote in each bucket, and how its messages lead
from the bucket of their send to the bucket of an ack. It is built here from arrays, or by Spark in `spark_engine`, to
the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from ..trace.arrays import NEVER, Floats, Ints
from ..trace.nodes import NodeUse, count_nodes
from .operations import DestinationTotals, Operations, TransactionSet
from .sizes import OperationSizes

BUCKETS_A_SEGMENT = 4
BUCKETS_LEAST = 256
BUCKETS_MIN = 1024
"""Buckets of a short trace, whose segments are too few to give it a resolution in time; `BUCKETS_LEAST`: of one whose
messages stay so long that there would be too many rows."""
LAG_BITS = 64
ROWS_MAX = 600_000
"""Rows of bytes and lives together, about, of a few destinations: buckets are longer where there would be more."""
ROWS_A_DESTINATION = 300
"""And as many more for each of them."""
NO_ACK = -1


@dataclass(frozen=True, slots=True)
class Summary:
    """The tables below are sorted, and cut by site, that is by destination and node, as `Operations.site` has them: row
    numbers `byte_rows[s]` to `byte_rows[s + 1]` are those of site s."""

    destinations: tuple[str, ...]
    sizes: OperationSizes
    begin: float
    finish: float
    bucket_start: Floats
    """Time of each bucket's first operation, then `finish`: one more than there are buckets."""
    byte_rows: Ints
    byte_bucket: Ints
    byte_sum: Floats
    byte_squares: Floats
    """Sum of the squares of the operations' sizes: with the sum it gives the room lost at segments' ends."""
    life_rows: Ints
    life_send: Ints
    """Bucket of the sends."""
    life_ack: Ints
    """Bucket of acks of these sends, or NO_ACK where the last one did not come."""
    life_time: Floats
    """Time of the last of these acks, NEVER where it did not come."""
    life_count: Ints
    transactions: tuple[TransactionSet, ...]
    totals: tuple[DestinationTotals, ...]
    use: NodeUse | None = None
    elsewhere: frozenset[int] = frozenset()
    """Destinations that are in no journal, since their store is none, or is shared by nodes."""

    def lives_of(self, destination: int) -> slice:
        """Return the rows of lives of a destination, on all nodes."""
        nodes = count_nodes(self.use)
        return slice(self.life_rows[destination * nodes], self.life_rows[(destination + 1) * nodes])

    @property
    def duration(self) -> float:
        return self.finish - self.begin


def lags_of(acked: npt.NDArray[np.int32], lag: Ints, pending: npt.NDArray[np.int32], width: int) -> Ints:
    """Count the acks of each site that come so many positions after their send: in column k, of k bits.

    In column 0 those that never come. `acked` and `pending` are sites, of each ack and of each of these sends.
    """
    bits = np.searchsorted(1 << np.arange(LAG_BITS - 1), np.abs(lag), side="right")
    counts = np.bincount(acked.astype(np.int64) * LAG_BITS + bits, minlength=width * LAG_BITS)
    counts = counts.reshape(width, LAG_BITS).astype(np.int64)
    counts[:, 0] = np.bincount(pending, minlength=width)
    return counts


def bucket_length(operations: int, total_bytes: float, segment_bytes: int, lags: Ints) -> int:
    """Choose how many of the global order's positions, `operations` in all, make a bucket. `lags`: as `lags_of`."""
    buckets = max(BUCKETS_A_SEGMENT * total_bytes / segment_bytes, BUCKETS_MIN)
    length = max(int(operations / buckets), 1)
    longest = max(operations // BUCKETS_LEAST, length)
    rows_max = ROWS_MAX + ROWS_A_DESTINATION * len(lags)
    while length < longest and _rows(operations // length + 1, length, lags) > rows_max:
        length = min(length * 5 // 4 + 1, longest)
    return length


def _rows(buckets: int, length: int, lags: Ints) -> int:
    """Bound the rows of a summary with so many buckets.

    Where an ack comes less than n buckets after its send, those of one bucket's sends lie in n buckets and one more.
    """
    apart = (1 << np.arange(LAG_BITS, dtype=object)) // length + 2
    apart[0] = 1
    lives = np.minimum(lags, np.minimum(buckets * apart, 1 << 62).astype(np.int64)).sum()
    return int(lives) + int(np.minimum(2 * lags.sum(axis=1), buckets).sum())


def summarise(operations: Operations, segment_bytes: int) -> Summary:
    """Summarise a trace that is in memory."""
    positions = operations.seq - operations.seq[0]
    acks = np.flatnonzero(operations.send >= 0)
    sends = operations.send[acks]
    open_ = np.flatnonzero(operations.end == NEVER)
    site = operations.site
    sites = len(operations.destinations) * count_nodes(operations.use)
    lags = lags_of(site[acks], positions[acks] - positions[sends], site[open_], sites)
    length = bucket_length(int(positions[-1]) + 1, float(operations.size.sum()), segment_bytes, lags)
    bucket = positions // length
    size = operations.size.astype(float)
    rows = pd.DataFrame({"d": site, "bucket": bucket, "size": size, "squares": size**2})
    rows["time"] = operations.time
    sums = {"size": "sum", "squares": "sum", "time": "min"}
    whole = np.concatenate
    lives = pd.DataFrame(
        {
            "d": site[whole([acks, open_])],
            "send": bucket[whole([sends, open_])],
            "ack": whole([bucket[acks], np.full(len(open_), NO_ACK)]),
            "time": whole([np.maximum(operations.time[acks], operations.time[sends]), operations.end[open_]]),
        }
    )
    ended = lives.groupby(["d", "send", "ack"], as_index=False).agg(time=("time", "max"), count=("time", "size"))
    return assemble(
        destinations=operations.destinations,
        sizes=operations.sizes,
        finish=float(operations.time[-1]),
        written=_arrays(rows.groupby(["d", "bucket"], as_index=False).agg(sums)),
        lives=_arrays(ended),
        transactions=operations.transactions,
        totals=operations.totals,
        use=operations.use,
    )


def _arrays(rows: pd.DataFrame) -> dict[str, Any]:
    return {name: rows[name].to_numpy() for name in rows.columns}


def assemble(
    *,
    destinations: tuple[str, ...],
    sizes: OperationSizes,
    finish: float,
    written: dict[str, Any],
    lives: dict[str, Any],
    transactions: tuple[TransactionSet, ...],
    totals: tuple[DestinationTotals, ...],
    use: NodeUse | None,
) -> Summary:
    """Sort and cut the tables, which are used up. Columns of `written`: d (a site), bucket, size, squares, and time, of
    the first operation; of `lives`: d, send, ack, time, count."""
    _sort(written, ("d", "bucket"))
    _sort(lives, ("d", "ack", "send"))
    # A bucket without operations (the order may have gaps) starts where the next one does.
    start = np.full(int(written["bucket"].max()) + 2, finish)
    np.minimum.at(start, written["bucket"], written["time"])
    bucket_start = np.minimum.accumulate(start[::-1])[::-1]
    edges = np.arange(len(destinations) * count_nodes(use) + 1)
    return Summary(
        destinations=destinations,
        sizes=sizes,
        begin=float(bucket_start[0]),
        finish=finish,
        bucket_start=bucket_start,
        byte_rows=np.searchsorted(written["d"], edges).astype(np.int64),
        byte_bucket=written["bucket"].astype(np.int64, copy=False),
        byte_sum=written["size"].astype(np.float64, copy=False),
        byte_squares=written["squares"].astype(np.float64, copy=False),
        life_rows=np.searchsorted(lives["d"], edges).astype(np.int64),
        life_send=lives["send"].astype(np.int64, copy=False),
        life_ack=lives["ack"].astype(np.int64, copy=False),
        life_time=lives["time"].astype(np.float64, copy=False),
        life_count=lives["count"].astype(np.int64, copy=False),
        transactions=transactions,
        totals=totals,
        use=use,
    )


def _sort(table: dict[str, Any], keys: tuple[str, ...]) -> None:
    order = np.lexsort([table[key] for key in reversed(keys)])
    for name in table:  # one column at a time: they are most of what the driver has
        table[name] = table[name][order]


def retention_quantile(summary: Summary, destination: int, quantile: float = 0.95) -> float:
    """Return the seconds within which this share of a destination's messages is acked; NEVER if it is not."""
    rows = summary.lives_of(destination)
    stay = summary.life_time[rows] - summary.bucket_start[summary.life_send[rows]]
    if not len(stay):
        return 0.0
    order = np.argsort(stay, kind="stable")
    reached = np.cumsum(summary.life_count[rows][order])
    return float(stay[order][np.searchsorted(reached, quantile * reached[-1])])
