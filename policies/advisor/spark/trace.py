"""A trace as Spark holds it: checked, its destinations numbered, cut into ranges of the global order.

    1 check     one aggregate by destination: what is missing, misspelt or out of bounds, counts and bytes
    2 match     sends and acks told of each other: one shuffle of narrow rows by the hash of the message
    3 order     a second shuffle, into ranges of the global order, sorted; what each has reached is added up

The result is kept on the disks of the workers that made it, and made again where it is lost. So nothing in it may
depend on who makes it, or when: the ranges have bounds that the driver knows, and are not Spark's own
(`repartitionByRange`), which come from a sample and may be others the next time, while clocks are told by the range's
number.

The driver gets a row a destination and a row a range. Where the trace cannot be used the errors are those of `trace`
and `operations`, but rows are named by file and seq.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from ...errors import TraceError
from ...text import count_of
from ..model import kernel
from ..statistics import lives
from ..statistics.lives import life_findings
from ..statistics.operations import (
    ALONE,
    Clock,
    DestinationTotals,
    TransactionSet,
    check_span,
    repeated_seq,
    size_findings,
)
from ..statistics.sizes import JournalSizes, Model, OperationSizes
from ..statistics.summary import LAG_BITS
from ..trace.arrays import NEVER_POSITION, Ints
from ..trace.nodes import NodeUse
from ..trace.table import (
    AMOUNTS,
    BY_ORDER,
    LEAST_AMOUNT,
    MOST_AMOUNT,
    MUST_BE_GIVEN,
    NO_TIME,
    NODE_OF_ALL,
    NODE_SCHEMA,
    OPS,
    REQUIRED,
    SCHEMA,
    SECONDS_MAX,
    SQL_TYPES,
    Finding,
    backwards_finding,
    canonical_destination,
    check_columns,
    expected,
    no_operation,
)
from . import workers
from .cluster import is_local

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ROWS_A_TASK = 1_500_000
"""Operations that one task holds in memory at a time: some 350 MB."""


@dataclass(frozen=True, slots=True)
class SparkTrace:
    """The facts of a trace before it is cut into stores, and the place of its rows."""

    source: str
    destinations: tuple[str, ...]
    first: int
    """The seq that positions count from."""
    facts: pd.DataFrame
    """A row a range, in order, as `_facts` says."""
    operations_per_second: float
    """Above 0 under clock `seq`."""
    transactions: tuple[TransactionSet, ...]
    totals: tuple[DestinationTotals, ...]
    lags: Ints
    """As `summary.lags_of`."""
    sizes: OperationSizes
    findings: tuple[Finding, ...]
    rows: DataFrame
    """Each operation, as `workers.ORDERED` says; kept on the workers' disks."""
    sites: Ints
    """The operations at each site. `d` in `rows` is one, as `Operations.site`."""
    use: NodeUse | None

    @property
    def count(self) -> int:
        return int(self.facts["count"].sum())

    def timed(self) -> DataFrame:
        """Return the operations with `time`, by the chosen clock, and `written`, the bytes of all up to each."""
        time = f"CAST(seq + ({self.first}) AS double) / {self.operations_per_second!r}D"
        if not self.operations_per_second > 0:
            time = "greatest(reached, before)"
        from pyspark.sql.functions import expr

        found = _beside_ranges(self.rows, self.facts)
        return found.withColumns({"time": expr(time), "written": expr("written + bytes_before")})

    def close(self) -> None:
        """Give back the disk that the rows take."""
        self.rows.unpersist()


def prepare(
    spark: SparkSession,
    trace: DataFrame,
    *,
    model: Model = "anabranch",
    clock: Clock = "ts",
    operations_per_second: float = 1000.0,
    sizes: JournalSizes | None = None,
    source: str = "the trace",
    rows_a_task: int = ROWS_A_TASK,
) -> SparkTrace:
    """Check a trace and put it in order. Raises TraceError where it cannot be used."""
    ship(spark)
    check_columns(trace.columns, source)
    spans = _check(trace, clock, source, OperationSizes.of(model, sizes, 0, 0))
    names = tuple(sorted(set(spans["name"])))
    given = _numbered(spark, _conform(trace), spans, names)
    in_transactions = int(spans["in_transactions"].sum())
    transactions = _transactions(given) if in_transactions else ()
    use = _use(given, spans)
    given, sites = _by_site(given, spans, use)
    rule = OperationSizes.of(model, sizes, sum(t.count for t in transactions), in_transactions)
    findings: list[Finding] = []
    sums = spans[["sends", "unsized", "unsized_rows", "bodiless"]].sum()
    first, last = int(spans["first"].min()), int(spans["last"].max())
    check_span(first, last, source)
    per_second = operations_per_second if clock == "seq" else 0.0
    count = int(spans["count"].sum())
    tasks = -(-count // rows_a_task)
    rows = _ordered(given, rule, first, _bounds(given, first, last, count, tasks), tasks)
    try:
        facts = _facts(rows)
        _check_order(facts, first, source)
        if per_second == 0:
            findings += _clock_findings(rows, facts, source)
        elif not last > first:
            raise TraceError(f"{source}: {ALONE}")
        findings += size_findings(model, *(int(count) for count in sums), source=source)
        totals, lags = _messages(names, spans, rule, rows, findings, len(sites))
        return SparkTrace(
            source, names, first, facts, per_second, transactions, totals, lags, rule, tuple(findings), rows, sites, use
        )
    except BaseException:
        rows.unpersist()
        raise


def _numbered(spark: SparkSession, rows: DataFrame, spans: pd.DataFrame, names: Sequence[str]) -> DataFrame:
    """Put the number of its destination beside each operation, by the text that stands for it there."""
    from pyspark.sql.functions import broadcast

    numbers = {name: number for number, name in enumerate(names)}
    spans["d"] = [numbers[name] for name in spans["name"]]
    numbered = list(dict.fromkeys(zip(spans["destination"], spans["d"], strict=True)))
    return rows.join(broadcast(spark.createDataFrame(numbered, "destination string, d int")), "destination")


def _use(given: DataFrame, spans: pd.DataFrame) -> NodeUse | None:
    """Tell where destinations were used, and what crossed: `node_use`, by one more shuffle where there are nodes."""
    from pyspark.sql.functions import expr

    nodes = tuple(sorted(set(spans["node"]))) if "node" in spans else ()
    if len(nodes) < 2:
        return None
    sent, acked = (expr(f"collect_set(if(op = '{op}', node, NULL))").alias(op) for op in ("send", "ack"))
    messages = given.groupBy("d", "message_id").agg(sent, acked).where("size(send) = 1")
    away = messages.selectExpr("d", "send[0] AS source", "array_sort(array_except(ack, send)) AS targets")
    flows: Counter[tuple[int, int, int]] = Counter()
    crossed: Counter[int] = Counter()
    for d, source, targets, count in (
        away.where("size(targets) > 0").groupBy("d", "source", "targets").count().collect()
    ):
        crossed[d] += count
        for target in targets:
            flows[d, nodes.index(source), nodes.index(target)] += count
    used = [tuple(sorted(map(nodes.index, each))) for _, each in spans.groupby("d")["node"].unique().items()]
    return NodeUse(nodes, tuple(used), dict(sorted(flows.items())), dict(sorted(crossed.items())))


def _by_site(given: DataFrame, spans: pd.DataFrame, use: NodeUse | None) -> tuple[DataFrame, Ints]:
    """Put sites in place of destinations, and count the operations of each."""
    if use is None:
        return given, np.bincount(spans["d"], weights=spans["count"]).astype(np.int64)
    from pyspark.sql.functions import broadcast

    nodes = len(use.nodes)
    on = [0 if d in use.crossed else use.nodes.index(node) for d, node in zip(spans["d"], spans["node"], strict=True)]
    numbers = spans[["destination", "node"]].assign(d=(spans["d"] * nodes + on).astype(np.int32))
    placed = given.drop("d").join(broadcast(given.sparkSession.createDataFrame(numbers)), ["destination", "node"])
    counts = np.bincount(numbers["d"], weights=spans["count"], minlength=(int(spans["d"].max()) + 1) * nodes)
    return placed, counts.astype(np.int64)


def _ordered(given: DataFrame, rule: OperationSizes, first: int, bounds: list[int], tasks: int) -> DataFrame:
    """Match the messages and put all operations in order. `given` has numbers of destinations."""
    from pyspark import StorageLevel

    return (
        given.selectExpr(
            f"{_range_of('seq', bounds)} AS part",
            f"seq - ({first}) AS seq",
            "d",
            "coalesce(ts, 0) AS stamp",
            f"CAST({rule.sql()} AS bigint) AS size",
            "if(op = 'send', coalesce(acks_needed, 1), -1) AS needed",
            "xxhash64(1, d, message_id) AS h1",
            "xxhash64(2, d, message_id) AS h2",
        )
        .repartition(tasks, "h1", "h2")
        .mapInArrow(workers.match_task, workers.MATCHED)
        .repartitionById(tasks, "part")
        .sortWithinPartitions("seq")
        .mapInArrow(workers.order_task, workers.ORDERED)
        .persist(StorageLevel.DISK_ONLY)
    )


def ship(spark: SparkSession) -> None:
    """Have the functions that workers need sent to them themselves, not their names: they may not have this package.

    Where they are on this machine they have it, and the kernel as it was compiled before, which takes half a minute.
    """
    by_value(workers)
    by_value(lives)
    context = getattr(spark, "_sc", None)  # a session of Spark Connect has none
    if context is None or not is_local(context.master):
        by_value(kernel)


def by_value(module: ModuleType) -> None:
    """Have a module's functions and classes pickled with their code."""
    from pyspark import cloudpickle

    untyped: Any = cloudpickle
    if module.__name__ not in untyped.list_registry_pickle_by_value():
        untyped.register_pickle_by_value(module)


def grouped(rows: DataFrame, keys: list[str], values: dict[str, str]) -> pd.DataFrame:
    """Bring to the driver what these expressions come to for each of the keys, by name: a small result."""
    result: pd.DataFrame = aggregated(rows, keys, values).toArrow().to_pandas()
    return result


def aggregated(rows: DataFrame, keys: list[str], values: dict[str, str]) -> DataFrame:
    """Work out what these expressions come to for each of the keys, by name."""
    from pyspark.sql.functions import expr

    # Not by SQL over these rows: the view that it needs collides with others in the caller's session, and when it is
    # dropped, what is kept of the rows goes with it.
    return rows.groupBy(*keys).agg(*(expr(value).alias(name) for name, value in values.items()))


# Checks -------------------------------------------------------------------------------------------------------------


def _conform(trace: DataFrame, *more: str) -> DataFrame:
    """Select the trace's columns in their types, null for what is missing or cannot be cast; and `more` of it."""
    columns = [*more]
    for name in NODE_SCHEMA.names if "node" in trace.columns else SCHEMA.names:
        kind = SQL_TYPES[str(NODE_SCHEMA.field(name).type)]
        columns.append(f"{_cast(name, kind)} AS {name}" if name in trace.columns else f"CAST(NULL AS {kind}) AS {name}")
    return trace.selectExpr(*columns)


def _cast(name: str, kind: str) -> str:
    return f"try_cast(`{name}` AS {kind})"


def _violations(trace: DataFrame, clock: Clock) -> list[tuple[str, str, str]]:
    """Return, for each rule, the column, the condition that a row breaks it, and what is told of that."""
    found = []
    sources = dict(trace.dtypes)
    for field in SCHEMA:
        name = field.name
        if name not in trace.columns:
            continue
        kind = SQL_TYPES[str(field.type)]
        misfit = f"(`{name}` IS NOT NULL AND {_cast(name, kind)} IS NULL)"
        if kind.endswith("int") and sources[name].startswith(("float", "double", "decimal")):
            misfit = f"({misfit} OR `{name}` <> floor(`{name}`))"
        if sources[name] != kind:
            found.append((name, misfit, f"expected {expected(field.type)}"))
        if name in REQUIRED:
            found.append((name, f"`{name}` IS NULL", MUST_BE_GIVEN))
    found.append(("op", "op NOT IN ('send', 'ack')", OPS))
    for name, largest in AMOUNTS:
        if name in trace.columns:
            value = _cast(name, "bigint")
            found.append((name, f"{value} < 0", LEAST_AMOUNT))
            if largest is not None:
                found.append((name, f"{value} > {largest}", MOST_AMOUNT))
    if clock == "ts":
        value = _cast("ts", "double") if "ts" in trace.columns else "CAST(NULL AS double)"
        found.append(("ts", f"{value} IS NULL", BY_ORDER))
        found.append(("ts", f"NOT (abs({value}) <= {SECONDS_MAX!r})", NO_TIME))
    return found


def _check(trace: DataFrame, clock: Clock, source: str, rule: OperationSizes) -> pd.DataFrame:
    """Return a row for each text of a destination, and node, with its name. Transactions' own records are not in its
    bytes yet.

    Raises TraceError for the first rule that rows break, with one of them.
    """
    rules = _violations(trace, clock)
    broken = " OR ".join(f"({condition})" for _, condition, _ in rules)
    # Told of after one pass, which bears rows that break them: their numbers may be too large to be added up.
    found = trace.selectExpr("*", f"coalesce({broken}, false) AS anabranch_broken")
    spans = grouped(
        _conform(found, "anabranch_broken"),
        ["destination", "node"] if "node" in trace.columns else ["destination"],
        {
            "count": "count(*)",
            "sends": "count_if(op = 'send')",
            "acks": "count_if(op = 'ack')",
            "bytes": f"CAST(sum(if(anabranch_broken, 0, CAST({rule.sql()} AS bigint))) AS bigint)",
            "in_transactions": "count(tx)",
            "first": "min(seq)",
            "last": "max(seq)",
            "unsized": "count_if(op = 'send' AND body_size IS NULL AND coalesce(size, -1) <= 0)",
            "unsized_rows": "count_if(coalesce(size, -1) <= 0)",
            "bodiless": "count_if(op = 'send' AND body_size IS NULL AND size > 0)",
            "broken": "count_if(anabranch_broken)",
        },
    )
    if not len(spans):
        raise no_operation(source)
    if spans["broken"].any():
        _tell(trace, rules, source)
    if "node" in spans and (nowhere := spans["node"].isna()).any():
        if not nowhere.all():
            empty = count_of(int(spans["count"][nowhere].sum()), "row")
            raise TraceError(f"{source}: column node is empty in {empty}; {NODE_OF_ALL}")
        del spans["node"]
    spans["name"] = [canonical_destination(text, source) for text in spans["destination"]]
    return spans


def _tell(trace: DataFrame, rules: list[tuple[str, str, str]], source: str) -> None:
    for column, condition, told in rules:
        broken = trace.where(condition)
        count = broken.count()
        if count:
            files = bool(trace.inputFiles())
            value = f"`{column}`" if column in trace.columns else "NULL"
            where = "_metadata.file_name" if files else "NULL"
            row = broken.selectExpr("seq", f"{value} AS value", f"{where} AS file").orderBy("seq").first()
            assert row is not None
            place = f"seq {row['seq']}" + (f" of {row['file']}" if files else "")
            if row["value"] is None:
                raise TraceError(
                    f"{source}: column {column} is empty in {count_of(count, 'row')}, first in {place}; {told}"
                )
            raise TraceError(f"{source}: {place}: column {column} is {row['value']!r}; {told}")


def _transactions(given: DataFrame) -> tuple[TransactionSet, ...]:
    from pyspark.sql.functions import expr

    sets = given.where("tx IS NOT NULL").groupBy("tx").agg(expr("sort_array(collect_set(d))").alias("members"))
    found = sets.groupBy("members").count().collect()
    return tuple(sorted((TransactionSet(tuple(row[0]), int(row[1])) for row in found), key=lambda t: t.members))


# Ranges -------------------------------------------------------------------------------------------------------------

_BOUNDS_ACCURACY = 100
"""A range is larger than it should be by one part in so many at most, where seq has gaps."""


def _bounds(given: DataFrame, first: int, last: int, count: int, tasks: int) -> list[int]:
    """Choose the seq that each range but the first begins with, ascending. All hold about as many operations."""
    if last - first + 1 == count:
        return [first + number * count // tasks for number in range(1, tasks)]
    shares = ", ".join(f"{number / tasks!r}D" for number in range(1, tasks))
    if not shares:
        return []
    accuracy = max(10_000, _BOUNDS_ACCURACY * tasks)
    row = given.selectExpr(f"percentile_approx(seq, array({shares}), {accuracy})").collect()[0]
    return sorted(set(row[0]))


def _range_of(column: str, bounds: list[int]) -> str:
    """Write SQL for the number of the range that a seq lies in: a search by halves."""

    def search(low: int, high: int) -> str:
        """Search between the ranges `low` and `high`."""
        if low == high:
            return str(low)
        middle = (low + high) // 2
        return f"if({column} < {bounds[middle]}, {search(low, middle)}, {search(middle + 1, high)})"

    return search(0, len(bounds))


def _facts(rows: DataFrame) -> pd.DataFrame:
    """Tell what is in each range; the latest clock (`before`) and the bytes (`bytes_before`) of those before it."""
    twice = f"flags & {workers.TWICE} > 0"
    facts = grouped(
        rows,
        ["part"],
        {
            "count": "count(*)",
            "last": "max(seq)",
            "bytes": "max(written)",
            "largest": "max(size)",
            "largest_at": "max_by(seq, size)",
            "first_stamp": "min_by(stamp, seq)",
            "lowest_stamp": "min(stamp)",
            "highest_stamp": "max(stamp)",
            "twice": f"count_if({twice})",
            "first_twice": f"min(if({twice}, seq, NULL))",
            "backwards": "count_if(reached > stamp)",
            "backwards_most": "max(reached - stamp)",
        },
    )
    facts = facts.sort_values("part", ignore_index=True)
    reached = np.maximum.accumulate(facts["highest_stamp"].to_numpy(np.float64))
    facts["before"] = np.append(-np.inf, reached[:-1])
    facts["bytes_before"] = np.append(0, np.cumsum(facts["bytes"].to_numpy(np.int64))[:-1])
    return facts


def _check_order(facts: pd.DataFrame, first: int, source: str) -> None:
    twice = facts[facts["twice"] > 0]
    if len(twice):
        at = first + int(twice["first_twice"].iloc[0])
        raise repeated_seq(int(twice["twice"].sum()), at, source)


def _clock_findings(rows: DataFrame, facts: pd.DataFrame, source: str) -> list[Finding]:
    begin, finish = float(facts["first_stamp"].iloc[0]), float(facts["highest_stamp"].max())
    if not finish > begin:
        raise TraceError(
            f"{source}: column ts never comes after its first time, {begin}; choose the clock seq (--clock seq) to go "
            "by order alone, or give a trace that spans some time"
        )
    counted = facts[["backwards", "backwards_most"]]
    if (facts["before"] > facts["lowest_stamp"]).any():
        time = "greatest(reached, before)"
        counted = grouped(
            _beside_ranges(rows, facts),
            [],
            {"backwards": f"count_if({time} > stamp)", "backwards_most": f"max({time} - stamp)"},
        )
    return backwards_finding(int(counted["backwards"].sum()), float(counted["backwards_most"].max()))


def _beside_ranges(rows: DataFrame, facts: pd.DataFrame) -> DataFrame:
    """Put the latest clock and the bytes of the ranges before its own beside each operation."""
    from pyspark.sql.functions import broadcast

    before = rows.sparkSession.createDataFrame(facts[["part", "before", "bytes_before"]])
    return rows.join(broadcast(before), "part")


# Messages -----------------------------------------------------------------------------------------------------------


def _messages(
    names: tuple[str, ...],
    spans: pd.DataFrame,
    rule: OperationSizes,
    rows: DataFrame,
    findings: list[Finding],
    sites: int,
) -> tuple[tuple[DestinationTotals, ...], Ints]:
    """Tell what each destination did, and how long after the sends its acks come, as `summary.lags_of`."""
    send, pending = f"flags & {lives.SEND} > 0", f"ends = {NEVER_POSITION}"
    bits = f"CASE WHEN partner >= 0 THEN length(bin(abs(seq - partner))) WHEN {pending} THEN 0 ELSE -1 END"
    counts = grouped(
        rows.selectExpr("*", f"{bits} AS bits"),
        ["d", "bits"],
        {
            "count": "count(*)",
            "pending-sends": f"count_if({pending})",
            "unknown-acks": f"count_if(NOT {send} AND partner < 0)",
            "early-acks": f"count_if(NOT {send} AND partner > seq)",
            "repeated-sends": f"count_if(flags & {lives.REPEATED} > 0)",
            "surplus-acks": f"count_if(flags & {lives.SURPLUS} > 0)",
        },
    )
    lags = np.zeros((sites, LAG_BITS), np.int64)
    acked = counts[counts["bits"] >= 0]
    lags[acked["d"], acked["bits"]] = acked["count"]
    counts = counts.drop(columns=["bits", "count"]).groupby("d").sum()
    sends, acks = int(spans["sends"].sum()), int(spans["acks"].sum())
    findings += life_findings(sends, acks, {str(code): int(count) for code, count in counts.sum().items()})
    # What the first look could not know: the share of a transaction's own records.
    spans["bytes"] += spans["in_transactions"] * round(rule.transaction_share)
    sums = spans.groupby("name")[["sends", "acks", "bytes"]].sum().sort_index()
    open_ = counts["pending-sends"].groupby(counts.index // (sites // len(names))).sum()
    totals = tuple(
        DestinationTotals(name, numbers[0], numbers[1], numbers[2], int(open_.get(d, 0)))
        for d, (name, numbers) in enumerate(zip(names, sums.to_numpy(np.int64).tolist(), strict=True))
    )
    return totals, lags
