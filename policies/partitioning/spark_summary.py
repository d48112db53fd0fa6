"""The summary of a trace, made by Spark: three passes over the data, whose results are small whatever its size.

1. totals by destination, which also give the length of a bucket
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
    rows = _conform(trace, clock, operations_per_second)
    rows.createOrReplaceTempView("anabranch_rows")
    names, number_of = _destinations(rows)
    spark.createDataFrame(list(number_of.items()), "name string, d int").createOrReplaceTempView("anabranch_names")
    report("summarise", 0.15)
    transactions, rule = _transactions(spark, model, sizes)
    report("summarise", 0.3)
    # The numbered view is recomputed by each pass: reading the columns again is cheaper than keeping them.
    spark.sql(
        f"""SELECT /*+ BROADCAST(n) */ n.d, r.seq, r.time, r.op, r.message_id, r.acks_needed,
                   CAST({rule.sql()} AS double) AS size
            FROM anabranch_rows r JOIN anabranch_names n ON r.destination = n.name"""
    ).createOrReplaceTempView("anabranch_operations")
    spans = (
        spark.sql(
            """SELECT d, count_if(op = 'send') AS sends, count_if(op = 'ack') AS acks, sum(size) AS bytes,
                  min(seq) AS first, max(seq) AS last, max(time) AS finish
           FROM anabranch_operations GROUP BY d"""
        )
        .toArrow()
        .to_pandas()
    )
    first = int(spans["first"].min())
    length = bucket_length(int(spans["last"].max()) - first + 1, float(spans["bytes"].sum()), segment_bytes)
    report("summarise", 0.45)
    written = (
        spark.sql(
            f"""SELECT d AS destination, (seq - {first}) DIV {length} AS bucket, sum(size) AS size,
                   sum(size * size) AS squares, min_by(time, seq) AS time, min(seq) AS seq
            FROM anabranch_operations GROUP BY d, (seq - {first}) DIV {length}"""
        )
        .toArrow()
        .to_pandas()
    )
    report("summarise", 0.6)
    lives = _lives(spark, first, length)
    report("summarise", 1.0)
    finish = float(spans["finish"].max())
    firsts = written.sort_values("seq").groupby("bucket")["time"].first()
    pending = lives[lives["ack"] == NO_ACK].groupby("destination")["count"].sum()
    if not finish > float(firsts.min()):
        raise TraceError(
            "the trace begins and ends at the same time; give clock='seq', or a trace that spans some time"
        )
    totals = {int(row.d): row for row in spans.itertuples()}
    starts = firsts.index.to_numpy(np.int64), firsts.to_numpy(np.float64)
    return assemble(
        destinations=names,
        sizes=rule,
        finish=finish,
        starts=starts,
        written=written[["destination", "bucket", "size", "squares"]],
        lives=lives,
        transactions=transactions,
        totals=tuple(
            DestinationTotals(
                name, int(totals[d].sends), int(totals[d].acks), int(totals[d].bytes), int(pending.get(d, 0))
            )
            for d, name in enumerate(names)
        ),
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


def _destinations(rows: DataFrame) -> tuple[tuple[str, ...], dict[str, int]]:
    """Names in order, and the number of each text that the trace uses for one."""
    texts = sorted(row[0] for row in rows.select("destination").distinct().collect())
    if not texts:
        raise TraceError("the trace holds no operation; record one that covers some days of ordinary use")
    canonical = {text: canonical_destination(text) for text in texts}
    names = tuple(sorted(set(canonical.values())))
    number = {name: i for i, name in enumerate(names)}
    return names, {text: number[name] for text, name in canonical.items()}


def _transactions(
    spark: SparkSession, model: Model, sizes: JournalSizes | None
) -> tuple[tuple[TransactionSet, ...], OperationSizes]:
    found = spark.sql(
        """SELECT members, count(*) AS count, sum(operations) AS operations FROM (
               SELECT r.tx, sort_array(collect_set(n.d)) AS members, count(*) AS operations
               FROM (SELECT tx, destination FROM anabranch_rows WHERE tx IS NOT NULL) r
               JOIN anabranch_names n ON r.destination = n.name GROUP BY r.tx)
           GROUP BY members"""
    ).collect()
    sets = tuple(sorted((TransactionSet(tuple(row[0]), int(row[1])) for row in found), key=lambda t: t.members))
    rule = OperationSizes.of(model, sizes, sum(t.count for t in sets), sum(int(row[2]) for row in found))
    return sets, rule


def _lives(spark: SparkSession, first: int, length: int) -> pd.DataFrame:
    """Columns destination, send, ack, time, count, as `summary.assemble` takes them."""
    keys = "d, xxhash64(message_id) AS hash, message_id, time, seq"
    spark.sql(
        f"""SELECT /*+ SHUFFLE_HASH(a) */ s.d, s.seq, s.acks_needed, greatest(a.time, s.time) AS time,
                   (s.seq - {first}) DIV {length} AS send, (a.seq - {first}) DIV {length} AS ack
            FROM (SELECT {keys}, acks_needed FROM anabranch_operations WHERE op = 'send') s
            LEFT JOIN (SELECT {keys} FROM anabranch_operations WHERE op = 'ack') a
            ON s.d = a.d AND s.hash = a.hash AND s.message_id = a.message_id"""
    ).createOrReplaceTempView("anabranch_pairs")
    lives = (
        spark.sql(
            """SELECT d AS destination, send, ack, max(time) AS time, count(*) AS count
           FROM anabranch_pairs WHERE ack IS NOT NULL OR acks_needed > 0 GROUP BY d, send, ack"""
        )
        .toArrow()
        .to_pandas()
    )
    # A topic message with some of its acks is as pending as one with none.
    several = spark.sql("SELECT max(acks_needed) FROM anabranch_operations WHERE op = 'send'").collect()[0][0]
    if several is not None and several > 1:
        partly = (
            spark.sql(
                """SELECT d AS destination, send, count(*) AS count FROM (
                   SELECT d, send, seq FROM anabranch_pairs WHERE acks_needed > 1 AND ack IS NOT NULL
                   GROUP BY d, send, seq HAVING count(*) < max(acks_needed))
               GROUP BY d, send"""
            )
            .toArrow()
            .to_pandas()
        )
        lives = pd.concat([lives, partly], ignore_index=True)
    lives["ack"] = lives["ack"].fillna(NO_ACK).astype(np.int64)
    lives["time"] = lives["time"].where(lives["ack"] != NO_ACK, NEVER).astype(float)
    # With both kinds of pending in one bucket there are two rows of one key: they are one.
    keys_of_life = ["destination", "send", "ack"]
    merged: pd.DataFrame = lives.groupby(keys_of_life, as_index=False).agg(time=("time", "max"), count=("count", "sum"))
    return merged
