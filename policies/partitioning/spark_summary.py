"""The summary of a trace, made by Spark: three passes over the data, whose results are small whatever its size.

1. totals by destination, which give the numbers of destinations and the length of a bucket
2. bytes by (destination, bucket) and the first time of each bucket
3. sends joined to their acks, to lives by (destination, bucket of the send, bucket of the ack)

and, where there are transactions, the sets of destinations that they touch. The join dominates. It is plain SQL on
narrow columns: destinations as numbers, message ids by their hash, then checked by the id itself. The `shuffle_hash`
hint spares the sort of both sides. There is no window without partitions anywhere: that would run on one task.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from ..errors import TraceError
from .operations import NEVER, Clock, DestinationTotals, TransactionSet
from .sizes import JournalSizes, Model, OperationSizes
from .summary import NO_ACK, Summary, assemble, bucket_length
from .trace import REQUIRED, SCHEMA, canonical_destination

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Progress = Callable[[str, float], None]
_SQL_TYPES = {"int64": "bigint", "int32": "int", "double": "double", "string": "string"}


def summarise_with_spark(
    spark: SparkSession,
    trace: DataFrame,
    segment_bytes: int,
    *,
    model: Model = "anabranch",
    clock: Clock = "ts",
    operations_per_second: float = 1000.0,
    sizes: JournalSizes | None = None,
    progress: Progress | None = None,
) -> Summary:
    """The same summary as `summary.summarise` makes of the same trace in memory. Raises TraceError."""
    report = progress or (lambda stage, share: None)
    report("summarise", 0.0)
    _conform(trace, clock, operations_per_second).createOrReplaceTempView("anabranch_rows")
    spans = _spans(spark, OperationSizes.of(model, sizes, 0, 0))
    names = tuple(sorted(set(spans["name"])))
    number = {name: i for i, name in enumerate(names)}
    spans["d"] = spans["name"].map(number)
    numbered = list(zip(spans["destination"].tolist(), spans["d"].tolist(), strict=True))
    spark.createDataFrame(numbered, "name string, d int").createOrReplaceTempView("anabranch_names")
    report("summarise", 0.15)
    in_transactions = int(spans["in_transactions"].sum())
    transactions = _transactions(spark) if in_transactions else ()
    rule = OperationSizes.of(model, sizes, sum(t.count for t in transactions), in_transactions)
    # What the first pass could not know: the share of a transaction's own records.
    spans["bytes"] += spans["in_transactions"] * round(rule.transaction_share)
    report("summarise", 0.3)
    first, last = int(spans["first"].min()), int(spans["last"].max())
    length = bucket_length(last - first + 1, float(spans["bytes"].sum()), segment_bytes)
    # A view is computed anew by each pass: reading the columns again is cheaper than keeping them.
    spark.sql(
        f"""SELECT /*+ BROADCAST(n) */ n.d, r.seq, r.time, r.op, r.message_id, r.acks_needed,
                   (r.seq - {first}) DIV {length} AS bucket, CAST({rule.sql()} AS double) AS size
            FROM anabranch_rows r JOIN anabranch_names n ON r.destination = n.name"""
    ).createOrReplaceTempView("anabranch_operations")
    written = _frame(
        spark,
        """SELECT d AS destination, bucket, sum(size) AS size, sum(size * size) AS squares,
                  min_by(time, seq) AS time, min(seq) AS seq
           FROM anabranch_operations GROUP BY d, bucket""",
    )
    report("summarise", 0.5)
    lives = _lives(spark, several=int(spans["needed"].max()) > 1)
    report("summarise", 1.0)
    firsts = written.sort_values("seq").groupby("bucket")["time"].first()
    finish = float(spans["finish"].max())
    if not finish > float(firsts.min()):
        raise TraceError("the trace begins and ends at the same time; choose the clock seq (--clock seq)")
    return assemble(
        destinations=names,
        sizes=rule,
        finish=finish,
        starts=(firsts.index.to_numpy(np.int64), firsts.to_numpy(np.float64)),
        written=written[["destination", "bucket", "size", "squares"]],
        lives=lives,
        transactions=transactions,
        totals=_totals(names, spans, lives),
    )


def _frame(spark: SparkSession, query: str) -> pd.DataFrame:
    frame: pd.DataFrame = spark.sql(query).toArrow().to_pandas()
    return frame


def _spans(spark: SparkSession, rule: OperationSizes) -> pd.DataFrame:
    """The totals by the destinations' texts, with the canonical name of each."""
    spans = _frame(
        spark,
        f"""SELECT destination, count_if(op = 'send') AS sends, count_if(op = 'ack') AS acks,
                   CAST(sum(CAST({rule.sql()} AS bigint)) AS bigint) AS bytes, count(tx) AS in_transactions,
                   min(seq) AS first, max(seq) AS last, max(time) AS finish,
                   coalesce(max(if(op = 'send', acks_needed, NULL)), 0) AS needed
            FROM anabranch_rows GROUP BY destination""",
    )
    if spans.empty:
        raise TraceError("the trace holds no operation; record one that covers some days of ordinary use")
    spans["name"] = [canonical_destination(text) for text in spans["destination"]]
    return spans


def _totals(names: tuple[str, ...], spans: pd.DataFrame, lives: pd.DataFrame) -> tuple[DestinationTotals, ...]:
    sums = spans.groupby("name")[["sends", "acks", "bytes"]].sum().sort_index()
    pending = lives[lives["ack"] == NO_ACK].groupby("destination")["count"].sum()
    return tuple(
        DestinationTotals(name, sends, acks, size, int(pending.get(d, 0)))
        for d, (name, (sends, acks, size)) in enumerate(zip(names, sums.to_numpy(np.int64).tolist(), strict=True))
    )


def _conform(trace: DataFrame, clock: Clock, operations_per_second: float) -> DataFrame:
    """The trace's columns in their types, the missing ones as nulls, and `time` on the chosen clock."""
    missing = [name for name in REQUIRED if name not in trace.columns]
    if missing:
        raise TraceError(f"the trace lacks the columns {', '.join(missing)}; it has {', '.join(trace.columns)}")
    columns = []
    for name in SCHEMA.names:
        kind = _SQL_TYPES[str(SCHEMA.field(name).type)]
        columns.append(f"CAST({name if name in trace.columns else 'NULL'} AS {kind}) AS {name}")
    rows = trace.selectExpr(*columns)
    time = "ts" if clock == "ts" else f"CAST(seq AS double) / {operations_per_second!r}"
    return rows.selectExpr(
        *("seq", "op", "destination", "message_id", "size", "tx", "body_size"),
        f"{time} AS time",
        "coalesce(acks_needed, 1) AS acks_needed",
    )


def _transactions(spark: SparkSession) -> tuple[TransactionSet, ...]:
    found = spark.sql(
        """SELECT members, count(*) FROM (
               SELECT /*+ BROADCAST(n) */ sort_array(collect_set(n.d)) AS members
               FROM anabranch_rows r JOIN anabranch_names n ON r.destination = n.name
               WHERE r.tx IS NOT NULL GROUP BY r.tx)
           GROUP BY members"""
    ).collect()
    return tuple(sorted((TransactionSet(tuple(row[0]), int(row[1])) for row in found), key=lambda t: t.members))


def _lives(spark: SparkSession, *, several: bool) -> pd.DataFrame:
    """Columns destination, send, ack, time, count, as `summary.assemble` takes them. `several`: some need many acks."""
    columns = "d, xxhash64(message_id) AS hash, message_id, time, bucket"
    spark.sql(
        f"""SELECT /*+ SHUFFLE_HASH(a) */ s.d, s.seq, s.acks_needed, greatest(a.time, s.time) AS time,
                   s.bucket AS send, a.bucket AS ack
            FROM (SELECT {columns}, seq, acks_needed FROM anabranch_operations WHERE op = 'send') s
            LEFT JOIN (SELECT {columns} FROM anabranch_operations WHERE op = 'ack') a
            ON s.d = a.d AND s.hash = a.hash AND s.message_id = a.message_id"""
    ).createOrReplaceTempView("anabranch_pairs")
    lives = _frame(
        spark,
        """SELECT d AS destination, send, ack, max(time) AS time, count(*) AS count
           FROM anabranch_pairs WHERE ack IS NOT NULL OR acks_needed > 0 GROUP BY d, send, ack""",
    )
    if several:
        # A topic message with some of its acks is as pending as one with none.
        partly = _frame(
            spark,
            """SELECT d AS destination, send, count(*) AS count FROM (
                   SELECT d, send, seq FROM anabranch_pairs WHERE acks_needed > 1 AND ack IS NOT NULL
                   GROUP BY d, send, seq HAVING count(*) < max(acks_needed))
               GROUP BY d, send""",
        )
        lives = pd.concat([lives, partly], ignore_index=True)
    lives["ack"] = lives["ack"].fillna(NO_ACK).astype(np.int64)
    lives["time"] = lives["time"].where(lives["ack"] != NO_ACK, NEVER).astype(float)
    # With both kinds of pending in one bucket there are two rows of one key: they are one.
    keys = ["destination", "send", "ack"]
    merged: pd.DataFrame = lives.groupby(keys, as_index=False).agg(time=("time", "max"), count=("count", "sum"))
    return merged
