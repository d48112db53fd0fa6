"""What the search needs of a trace, whatever the trace's size: bytes and lives by bucket of the global order.

A bucket is a run of operations about as long as a quarter of a segment of the whole journal. The summary says how many
bytes each destination wrote in each bucket, and how its messages lead from the bucket of their send to the bucket of
an ack. It is built here from arrays, or by Spark in `spark_engine`, to the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from .operations import NEVER, DestinationTotals, Floats, Ints, Operations, TransactionSet
from .sizes import OperationSizes

BUCKETS_A_SEGMENT = 4
BUCKETS_MIN = 1024
"""Buckets of a short trace, whose segments are too few to give it a resolution in time."""
NO_ACK = -1


@dataclass(frozen=True, slots=True)
class Summary:
    """The tables below are sorted, and cut by destination: row numbers `byte_rows[d]` to `byte_rows[d + 1]` are d's."""

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

    @property
    def duration(self) -> float:
        return self.finish - self.begin


def bucket_length(operations: int, total_bytes: float, segment_bytes: int) -> int:
    """How many positions of the global order make a bucket."""
    buckets = max(BUCKETS_A_SEGMENT * total_bytes / segment_bytes, BUCKETS_MIN)
    return max(int(operations / buckets), 1)


def summarise(operations: Operations, segment_bytes: int) -> Summary:
    """The summary of a trace that is in memory."""
    positions = operations.seq - operations.seq[0]
    length = bucket_length(int(positions[-1]) + 1, float(operations.size.sum()), segment_bytes)
    bucket = positions // length
    rows = pd.DataFrame({"destination": operations.destination, "bucket": bucket})
    rows["size"] = operations.size.astype(float)
    rows["squares"] = rows["size"] ** 2
    written = rows.groupby(["destination", "bucket"], as_index=False).sum()
    firsts = pd.Series(operations.time).groupby(bucket).first()
    return assemble(
        destinations=operations.destinations,
        sizes=operations.sizes,
        finish=float(operations.time[-1]),
        starts=(firsts.index.to_numpy(np.int64), firsts.to_numpy(np.float64)),
        written=written,
        lives=_lives(operations, bucket),
        transactions=operations.transactions,
        totals=operations.totals,
    )


def _lives(operations: Operations, bucket: Ints) -> pd.DataFrame:
    """Columns destination, send, ack, time, count."""
    acks = np.flatnonzero(operations.send >= 0)
    sends = operations.send[acks]
    ended = pd.DataFrame(
        {
            "destination": operations.destination[acks],
            "send": bucket[sends],
            "ack": bucket[acks],
            "time": np.maximum(operations.time[acks], operations.time[sends]),
        }
    )
    keys = ["destination", "send", "ack"]
    ended = ended.groupby(keys, as_index=False).agg(time=("time", "max"), count=("time", "size"))
    open_ = np.flatnonzero(operations.end == NEVER)
    pending = pd.DataFrame({"destination": operations.destination[open_], "send": bucket[open_]})
    pending = pending.groupby(["destination", "send"], as_index=False).size().rename(columns={"size": "count"})
    pending["ack"], pending["time"] = NO_ACK, NEVER
    return pd.concat([ended, pending[[*keys, "time", "count"]]])


def assemble(
    *,
    destinations: tuple[str, ...],
    sizes: OperationSizes,
    finish: float,
    starts: tuple[Ints, Floats],
    written: pd.DataFrame,
    lives: pd.DataFrame,
    transactions: tuple[TransactionSet, ...],
    totals: tuple[DestinationTotals, ...],
) -> Summary:
    """Sort and cut the tables. Columns of `written`: destination, bucket, size, squares; of `lives`: as above.

    `starts` gives the time of the first operation of each bucket that has one.
    """
    buckets, times = starts
    # A bucket without operations (the order may have gaps) starts where the next one does.
    following = np.searchsorted(buckets, np.arange(int(buckets[-1]) + 1), side="left")
    bucket_start = np.append(np.maximum.accumulate(times)[following], finish)
    written = written.sort_values(["destination", "bucket"])
    lives = lives.sort_values(["destination", "ack", "send"])
    edges = np.arange(len(destinations) + 1)
    return Summary(
        destinations=destinations,
        sizes=sizes,
        begin=float(times[0]),
        finish=finish,
        bucket_start=bucket_start,
        byte_rows=np.searchsorted(written["destination"].to_numpy(), edges).astype(np.int64),
        byte_bucket=written["bucket"].to_numpy(np.int64),
        byte_sum=written["size"].to_numpy(np.float64),
        byte_squares=written["squares"].to_numpy(np.float64),
        life_rows=np.searchsorted(lives["destination"].to_numpy(), edges).astype(np.int64),
        life_send=lives["send"].to_numpy(np.int64),
        life_ack=lives["ack"].to_numpy(np.int64),
        life_time=lives["time"].to_numpy(np.float64),
        life_count=lives["count"].to_numpy(np.int64),
        transactions=transactions,
        totals=totals,
    )


def retention_quantile(summary: Summary, destination: int, quantile: float = 0.95) -> float:
    """Seconds within which this share of a destination's messages is acked; NEVER if it is not."""
    rows = slice(summary.life_rows[destination], summary.life_rows[destination + 1])
    stay = summary.life_time[rows] - summary.bucket_start[summary.life_send[rows]]
    if not len(stay):
        return 0.0
    order = np.argsort(stay, kind="stable")
    reached = np.cumsum(summary.life_count[rows][order])
    return float(stay[order][np.searchsorted(reached, quantile * reached[-1])])
