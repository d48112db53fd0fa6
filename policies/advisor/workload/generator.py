"""The generator of a workload's trace, in this process or by Spark, with the same rows in order.

Time is cut into chunks, and every stream (a destination's arrivals, or a transaction's) draws its randomness for a
chunk from a generator keyed by (seed, stream, chunk). So chunks are independent of each other and of who makes them. A
chunk holds the sends of its time and all their acks, also those that fall later; acks past the end are left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ...errors import ConfigError
from ..trace.arrays import Floats, Ints
from ..trace.events import ACK_BYTES_DEFAULT, SEND_HEADER_BYTES_DEFAULT
from ..trace.table import SCHEMA, SQL_TYPES
from .workload import Arrival, Burst, Consumer, DestinationLoad, Diurnal, Spread, Workload

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

CHUNK_SENDS = 100_000
"""Sends in a chunk, about."""
CHUNK_TASKS_MAX = 10_000
"""Tasks that make chunks, of a trace of a billion operations and above."""
PARTITION_OPERATIONS = 2_000_000
"""Operations that are sorted by one task of Spark, which does so on disk where memory is short."""
SPANS_A_PARTITION = 64
"""Into so many spans time is cut to find where a partition ends."""
OPERATIONS_MAX = 1_000_000_000
"""Operations of a trace in memory, where each takes some hundred bytes."""
_DAY = 86400.0
_ORDER = ("ts", "stream", "chunk", "number", "part")
"""The global order is sorted by this. `part` puts a transaction's sends side by side and acks behind sends."""
_CHUNK_SCHEMA = pa.schema(
    [
        *(field for field in SCHEMA if field.name != "seq"),
        pa.field("stream", pa.int32()),
        pa.field("chunk", pa.int32()),
        pa.field("number", pa.int64()),
        pa.field("part", pa.int32()),
    ]
)


def generate(workload: Workload) -> pa.Table:
    """Make the whole trace, in order, in memory. Raises ConfigError where it would be larger than any memory."""
    if workload.operations > OPERATIONS_MAX:
        raise ConfigError(
            [
                f"it describes some {workload.operations:,.0f} operations, and {OPERATIONS_MAX:,} can be generated; "
                "give it a shorter duration, lower rates or fewer subscriptions, or --engine spark"
            ]
        )
    tables = [_chunk(workload, chunk) for chunk in range(chunk_count(workload))]
    table = pa.concat_tables(tables).sort_by([(name, "ascending") for name in _ORDER])
    seq = pa.array(np.arange(table.num_rows, dtype=np.int64))
    return pa.table([seq, *(table.column(name) for name in SCHEMA.names[1:])], schema=SCHEMA)


def generate_with_spark(spark: SparkSession, workload: Workload, partitions: int | None = None) -> DataFrame:
    """Make the whole trace as a data frame, where it is needed: write it with `.write.parquet(path)`.

    It is range-partitioned by time, in order inside each partition; `seq` numbers it through. Each time that it is read
    it is made anew, and is the same: what fell to a worker that is lost, another makes. Made once already here, to be
    counted. Memory holds a chunk a task.
    """
    chunks = chunk_count(workload)
    parts = partitions or max(
        min(chunks, 4 * spark.sparkContext.defaultParallelism), math.ceil(workload.operations / PARTITION_OPERATIONS)
    )
    begins, before = _cuts(spark, workload, parts)

    def make(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for chunk in batch.column(0).to_pylist():
                rows = _chunk(workload, chunk)
                place = np.searchsorted(begins, rows.column("ts").to_numpy(), "right").astype(np.int32)
                yield from rows.append_column("place", pa.array(place)).to_batches(max_chunksize=65536)

    def number(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        at = None
        for batch in batches:
            if batch.num_rows:
                at = int(before[batch.column("place")[0].as_py()]) if at is None else at
                seq = pa.array(np.arange(at, at + batch.num_rows, dtype=np.int64))
                at += batch.num_rows
                columns = [seq, *(batch.column(batch.schema.get_field_index(name)) for name in SCHEMA.names[1:])]
                yield pa.RecordBatch.from_arrays(columns, names=SCHEMA.names)

    made = _chunks(spark, workload).mapInArrow(make, f"{_sql_schema(_CHUNK_SCHEMA)}, place int")
    ordered = made.repartitionById(parts, "place").sortWithinPartitions(*_ORDER)
    return ordered.mapInArrow(number, _sql_schema(SCHEMA))


def _chunks(spark: SparkSession, workload: Workload) -> DataFrame:
    """Return the numbers of the chunks, for tasks to make them."""
    chunks = chunk_count(workload)
    return spark.range(0, chunks, 1, min(chunks, CHUNK_TASKS_MAX))


def _cuts(spark: SparkSession, workload: Workload, parts: int) -> tuple[Floats, Ints]:
    """Cut the time so that parts are about as large: the times at which all but the first begin, and the operations
    before each. The trace is made for it, and counted."""
    span = workload.duration / (parts * SPANS_A_PARTITION)
    starts = workload.start_seconds + span * np.arange(1, parts * SPANS_A_PARTITION)

    def count(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for chunk in batch.column(0).to_pylist():
                spans = np.searchsorted(starts, _chunk(workload, chunk).column("ts").to_numpy(), "right")
                found, counts = np.unique(spans, return_counts=True)
                yield pa.RecordBatch.from_pydict({"span": found, "count": counts})

    counted = _chunks(spark, workload).mapInArrow(count, "span long, count long")
    written = counted.groupBy("span").sum("count").toArrow()
    counts = np.zeros(parts * SPANS_A_PARTITION, np.int64)
    counts[written.column(0).to_numpy()] = written.column(1).to_numpy()
    # Bounds between spans, so that partitions are about alike although it may be busier at one time than at another.
    reached = np.cumsum(counts)
    bounds = np.unique(np.searchsorted(reached, reached[-1] * np.arange(1, parts) / parts))
    return starts[bounds[bounds < len(starts)]], np.append(0, reached[bounds])


def _sql_schema(schema: pa.Schema) -> str:
    return ", ".join(f"`{field.name}` {SQL_TYPES[str(field.type)]}" for field in schema)


def chunk_count(workload: Workload) -> int:
    """Count the chunks that the time is cut into."""
    rate = sum(d.arrival.per_second for d in workload.destinations if d.arrival is not None)
    rate += sum(t.arrival.per_second * len(t.sends) for t in workload.transactions)
    return max(1, math.ceil(rate * workload.duration / CHUNK_SENDS))


def _chunk(workload: Workload, chunk: int) -> pa.Table:
    length = workload.duration / chunk_count(workload)
    begin, end = chunk * length, (chunk + 1) * length
    loads = {load.name: load for load in workload.destinations}
    tables = []
    streams: list[tuple[Arrival, tuple[str, ...], str | None]] = [
        (load.arrival, (load.name,), None) for load in workload.destinations if load.arrival is not None
    ]
    streams += [(t.arrival, t.sends, t.name) for t in workload.transactions]
    for stream, (arrival, sends, tx_name) in enumerate(streams):
        random = np.random.Generator(np.random.Philox(np.random.SeedSequence([workload.seed, stream, chunk])))
        times = _arrivals(arrival, begin, end, workload.start_seconds % _DAY, random)
        tx = None if tx_name is None else _labels(f"{tx_name}-{chunk}-", len(times))
        for part, name in enumerate(sends):
            ids = _labels(f"{stream}-{part}-{chunk}-", len(times))
            place = _Place(stream, chunk, part)
            tables += _messages(workload, loads[name], times, ids, tx, place, random)
    return pa.concat_tables(tables) if tables else _CHUNK_SCHEMA.empty_table()


class _Place(NamedTuple):
    """The place of rows in the order among rows of the same time."""

    stream: int
    chunk: int
    part: int


def _labels(prefix: str, count: int) -> pa.Array:
    return pc.binary_join_element_wise(pa.scalar(prefix), pa.array(np.arange(count)).cast(pa.string()), "")


def _messages(
    workload: Workload,
    load: DestinationLoad,
    times: Floats,
    ids: pa.Array,
    tx: pa.Array | None,
    place: _Place,
    random: np.random.Generator,
) -> list[pa.Table]:
    """Make the sends to one destination at these times, and their acks."""
    count = len(times)
    body = _draw(load.size, count, random).astype(np.int64)
    number = np.arange(count, dtype=np.int64)
    topic = load.name.startswith("topic://")
    start = workload.start_seconds
    sent = times + start
    size = body + SEND_HEADER_BYTES_DEFAULT
    columns = {"destination": load.name, "tx": tx, "acks_needed": load.subscriptions, "body_size": body}
    tables = [_table(place, number, op="send", ts=sent, message_id=ids, size=size, **columns)]
    for subscription in range(load.subscriptions):
        acked = _acks(load.consumer, times, random)
        kept = np.flatnonzero(acked < workload.duration)
        behind = _Place(place.stream, place.chunk, 1_000_000 + place.part * 1000 + subscription)
        tables.append(
            _table(
                behind,
                number[kept],
                op="ack",
                destination=load.name,
                ts=acked[kept] + start,
                message_id=ids.take(pa.array(kept)),
                size=ACK_BYTES_DEFAULT,
                acks_needed=1,
                subscription=f"subscription-{subscription + 1}" if topic else None,
            )
        )
    return tables


def _table(place: _Place, number: Ints, **columns: Any) -> pa.Table:
    """Make a chunk's rows. A column is an array, or a value for all rows; one that is left out is empty."""
    columns |= {**place._asdict(), "number": number}
    fields = [pa.field(field.name, field.type) for field in _CHUNK_SCHEMA]
    arrays = []
    for field in fields:
        column = columns.get(field.name)
        if isinstance(column, np.ndarray):
            column = pa.array(column)
        elif not isinstance(column, pa.Array):
            column = pa.repeat(pa.scalar(column, field.type), len(number))
        arrays.append(column)
    return pa.table(arrays, schema=pa.schema(fields))


def _draw(spread: Spread, count: int, random: np.random.Generator) -> Floats:
    if spread.mean is not None:
        return random.exponential(spread.mean, count)
    low, high = spread.min or 0.0, spread.max or 0.0
    return np.full(count, low) if low == high else random.uniform(low, high, count)


def _arrivals(arrival: Arrival, begin: float, end: float, time_of_day: float, random: np.random.Generator) -> Floats:
    """Draw the times since the start, ascending, in [begin, end)."""
    if arrival.rate is not None:
        first, last = math.ceil(begin * arrival.rate), math.ceil(end * arrival.rate)
        return np.arange(first, last) / arrival.rate
    if arrival.burst is not None:
        return _bursts(arrival.burst, begin, end)
    if arrival.poisson is not None:
        return np.sort(random.uniform(begin, end, random.poisson(arrival.poisson * (end - begin))))
    assert arrival.diurnal is not None
    return _diurnal(arrival.diurnal, begin, end, time_of_day, random)


def _bursts(burst: Burst, begin: float, end: float) -> Floats:
    first = max(math.floor((begin - burst.offset) / burst.every), 0)
    last = max(math.ceil((end - burst.offset) / burst.every), 0)
    heads = burst.offset + burst.every * np.arange(first, last)
    times = (heads[:, None] + burst.spacing * np.arange(burst.count)[None, :]).ravel()
    inside: Floats = times[(times >= begin) & (times < end)]
    return inside


def _diurnal(diurnal: Diurnal, begin: float, end: float, time_of_day: float, random: np.random.Generator) -> Floats:
    """Draw times by Poisson at the highest rate, thinned."""
    highest = diurnal.mean * (1 + diurnal.amplitude)
    times = np.sort(random.uniform(begin, end, random.poisson(highest * (end - begin))))
    phase = 2 * math.pi * (times + time_of_day - diurnal.peak) / _DAY
    rate = diurnal.mean * (1 + diurnal.amplitude * np.cos(phase))
    kept: Floats = times[random.uniform(0, highest, len(times)) < rate]
    return kept


def _acks(consumer: Consumer, times: Floats, random: np.random.Generator) -> Floats:
    """Draw when each send is acked, infinite for never. An ack is later than its send, and stands behind it."""
    acked = times + np.maximum(_draw(consumer.lag, len(times), random), 1e-6)
    if consumer.batch is not None:
        acked = np.ceil(acked / consumer.batch) * consumer.batch
    for window in consumer.offline:
        acked = _after(acked, window.from_, window.to, window.every)
    lost: npt.NDArray[np.bool_] = random.uniform(0, 1, len(times)) < consumer.never
    acked[lost] = np.inf
    return acked


def _after(acked: Floats, begin: float, end: float, every: float | None) -> Floats:
    shift = np.zeros(len(acked)) if every is None else np.floor((acked - begin) / every) * every
    # Before the first of them there is none.
    shift = np.maximum(shift, 0.0)
    inside = (acked >= begin + shift) & (acked < end + shift)
    return np.where(inside, end + shift, acked)
