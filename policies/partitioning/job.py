"""The advisor from end to end: trace in, recommendation out.

    1 summarise   Spark reduces the trace to a summary               spark_summary
    2 search      partitionings of least cost, by the summary        evaluate, search
    3 confirm     the finalists, exactly, on the driver              model, confirm
    4 name        stores, and the fewest filters that make them      patterns

Every figure in a recommendation comes from the exact model.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from math import inf
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa

from ..destination import Destination
from ..durability import Sync
from ..errors import ConfigError, TraceError
from ..outputs import scratch_directory
from ..wildcard import Pattern, RouteTable
from .confirm import ExactCosts, improve_exactly
from .evaluate import SetCosts
from .jvm import quiet_py4j
from .model import CostModel, Partition, Retention, canonical, measure
from .operations import CLOCKS, Clock, Operations, build
from .patterns import filters
from .recommendation import Candidate, Recommendation, StorePlan, store_names
from .render import human_bytes
from .search import Constraints, search
from .session import spark_errors, spark_session, told_of_no_workers
from .sizes import MODELS, JournalSizes, Model
from .spark_summary import summarise_with_spark
from .summary import Summary, summarise
from .trace import Finding, conform, read_trace, trace_path, write_trace

logger = logging.getLogger(__name__)

Progress = Callable[[str, float], None]
"""Called with a stage (summarise, search, confirm, ...) and the share of it that is done, 0 to 1."""

_WEIGHTS = tuple(4.0**power for power in range(7))
"""How dear disk is made, step by step, while the peak is above its cap."""

SEGMENTS_MAX = 10_000_000
"""Journal files that a trace may fill: each takes some dozens of bytes in every partitioning that is tried."""

_OPTIONS = {"segment_bytes": "segment-size", "peak_bytes_max": "peak-max"}
"""Options of the command line whose names are not those of the fields; so that an error names both."""
_NOT_OPTIONS = ("operations_per_second", "overhead_segments")


def _named(field_name: str) -> str:
    if field_name in _NOT_OPTIONS:
        return field_name
    return f"{field_name} (--{_OPTIONS.get(field_name, field_name.replace('_', '-'))})"


@dataclass(frozen=True, slots=True)
class RecommendOptions:
    """What to optimise, under which rules."""

    model: Model = "anabranch"
    """Whose journal: our own, or ActiveMQ's with its ack rule."""
    segment_bytes: int = 32 << 20
    clock: Clock = "ts"
    """`seq` goes by order alone, for traces whose clock says little."""
    operations_per_second: float = 1000.0
    """What a position is worth in time, under clock `seq`."""
    disk_gib: float = 100.0
    sync_rate: float = 5000.0
    """Syncs a second that the disk can do. With `disk_gib` it prices the syncs that spanning transactions add."""
    overhead_segments: float = 0.5
    """Disk that a store costs by being there, in segments."""
    stores_max: int | None = None
    peak_bytes_max: int | None = None
    """A cap on all journals together; the cheapest partitioning found under it is recommended."""
    durability: Mapping[str, Sync] = field(default_factory=dict)
    """Pattern to sync policy; what matches none is `always`. Different policies never share a store."""
    pinned: tuple[tuple[str, ...], ...] = ()
    """Groups of patterns: what one group matches stays together."""
    current: Mapping[str, tuple[str, ...]] | None = None
    """The configuration to compare with: store name to patterns."""
    sizes: JournalSizes | None = None
    """Our own journal's record overheads, where the defaults do not fit."""
    engine: Literal["spark", "local"] = "spark"
    """Who summarises. `local` does it in this process, without Java: for traces that fit in memory."""
    master: str | None = None
    """Spark's master, where no session is active; None: this machine."""

    def check(self) -> None:
        """Raises ConfigError with everything that is wrong."""
        above_0 = ("segment_bytes", "operations_per_second", "disk_gib", "sync_rate")
        problems = [
            f"{_named(n)} is {getattr(self, n)!r}; it must be above 0, and finite"
            for n in above_0
            if not 0 < getattr(self, n) < inf
        ]
        if self.overhead_segments < 0:
            problems.append(f"overhead_segments is {self.overhead_segments!r}; it must be 0 or more")
        for name, allowed in (("model", MODELS), ("clock", CLOCKS), ("engine", ("spark", "local"))):
            if getattr(self, name) not in allowed:
                problems.append(f"{_named(name)} is {getattr(self, name)!r}; it must be one of {', '.join(allowed)}")
        for name in ("stores_max", "peak_bytes_max"):
            value = getattr(self, name)
            if value is not None and value < 1:
                problems.append(f"{_named(name)} is {value!r}; it must be 1 or more, or left out")
        if self.model == "anabranch" and 0 < self.segment_bytes <= (self.sizes or JournalSizes()).segment_header:
            problems.append(f"{_named('segment_bytes')} is {self.segment_bytes}; a segment's header alone takes more")
        if problems:
            raise ConfigError(problems)

    @property
    def costs(self) -> CostModel:
        return CostModel(self.segment_bytes, self.overhead_segments, self.disk_gib, self.sync_rate)


def recommend(
    trace: str | Path | pa.Table, options: RecommendOptions | None = None, progress: Progress | None = None
) -> Recommendation:
    """Which destinations should share a store.

    `trace`: an Arrow table as `trace.SCHEMA` says, or the path of one (.parquet, .arrow, .csv, a directory of
    Parquet). Raises TraceError where it cannot be used, ConfigError where the options contradict each other.
    """
    options = options or RecommendOptions()
    options.check()
    report = progress or (lambda stage, share: None)
    source = trace if isinstance(trace, pa.Table) else trace_path(trace)
    name = "the trace" if isinstance(source, pa.Table) else str(source)
    table = conform(source) if isinstance(source, pa.Table) else read_trace(source)
    report("read", 1.0)
    # The exact arrays come first: building them finds what is wrong with a trace before Spark spends time on it.
    operations = build(
        table,
        model=options.model,
        clock=options.clock,
        operations_per_second=options.operations_per_second,
        sizes=options.sizes,
        source=name,
    )
    _check_segments(operations, options, name)
    summary = _summary(table, source, operations, options, report)
    constraints = _constraints(operations, options)
    partitions, findings = _choose(summary, operations, constraints, options, report)
    candidates = _candidates(operations, partitions, options, report)
    return Recommendation(
        recommended=candidates[0],
        candidates=tuple(candidates),
        findings=(*operations.findings, *findings),
        parameters=_parameters(options, operations),
    )


def _check_segments(operations: Operations, options: RecommendOptions, source: str) -> None:
    """Raises TraceError where there would be more journal files than can be simulated."""
    total = float(operations.size.sum(dtype=float))
    segments = total / operations.sizes.capacity(options.segment_bytes)
    if segments > SEGMENTS_MAX:
        largest = int(operations.size.argmax())
        raise TraceError(
            f"{source}: {human_bytes(total)} in all fill {segments:,.0f} journal files of {options.segment_bytes} "
            f"bytes, and at most {SEGMENTS_MAX:,} can be simulated; the largest operation is that of seq "
            f"{operations.seq[largest]}, of {operations.size[largest]} bytes; if the sizes are right, choose a larger "
            "--segment-size"
        )


def _summary(
    table: pa.Table, source: Path | pa.Table, operations: Operations, options: RecommendOptions, report: Progress
) -> Summary:
    if options.engine == "local":
        summary = summarise(operations, options.segment_bytes)
        report("summarise", 1.0)
        return summary
    report("start Spark", 0.0)
    with quiet_py4j(), spark_errors(), scratch_directory(Path(tempfile.gettempdir()), "anabranch") as scratch:
        spark = spark_session(options.master)
        report("start Spark", 1.0)
        path = source
        if isinstance(path, pa.Table) or path.suffix != ".parquet":
            path = scratch / "trace.parquet"
            write_trace(table, path)
        with told_of_no_workers(spark):
            return summarise_with_spark(
                spark,
                spark.read.parquet(str(path)),
                options.segment_bytes,
                model=options.model,
                clock=options.clock,
                operations_per_second=options.operations_per_second,
                sizes=options.sizes,
                progress=report,
            )


def _constraints(operations: Operations, options: RecommendOptions) -> Constraints:
    destinations = [Destination.parse(name) for name in operations.destinations]
    pinned = []
    for group in options.pinned:
        patterns = [Pattern.parse(text) for text in group]
        members = tuple(i for i, d in enumerate(destinations) if any(p.matches(d) for p in patterns))
        if members:
            pinned.append(members)
    policies = _policies(operations, options)
    order = list(Sync)
    return Constraints(tuple(order.index(policy) for policy in policies), tuple(pinned), options.stores_max)


def _policies(operations: Operations, options: RecommendOptions) -> list[Sync]:
    table = RouteTable(list(options.durability.items()))
    matches = [table.route(Destination.parse(name)) for name in operations.destinations]
    return [match.target if match else Sync.ALWAYS for match in matches]


def _choose(
    summary: Summary, operations: Operations, constraints: Constraints, options: RecommendOptions, report: Progress
) -> tuple[dict[str, Partition], list[Finding]]:
    """The partitionings to show, by name, the recommended one first."""
    costs = options.costs
    set_costs = SetCosts(summary, costs)
    finalists: list[tuple[float, Partition, Retention]] = []
    for weight in _WEIGHTS:
        weighted = set_costs.reweighted(weight)
        found = search(weighted, constraints, progress=report)
        best = improve_exactly(ExactCosts(summary, operations, costs, weight), constraints, found)
        for partition in dict.fromkeys([best, *found]):
            if all(partition != known for _, known, _ in finalists):
                figures = measure(operations, partition, costs)
                finalists.append((figures.cost, partition, figures))
        if options.peak_bytes_max is None or _under(finalists, options.peak_bytes_max):
            break
    logger.debug("evaluated %d sets", set_costs.evaluated)
    finalists.sort(key=lambda entry: (entry[0], entry[1]))
    findings = []
    if options.peak_bytes_max is not None:
        allowed = _under(finalists, options.peak_bytes_max)
        if not allowed:
            lowest = min(finalists, key=lambda entry: (entry[2].peak_bytes, entry[0], entry[1]))
            cap = human_bytes(options.peak_bytes_max)
            message = (
                f"cap on the peak, {cap}, that no partitioning found keeps; the one with the lowest is recommended"
            )
            findings.append(Finding("peak-cap", 1, message))
            allowed = [lowest]
        finalists = allowed + [entry for entry in finalists if entry not in allowed]
    everything = range(len(operations.destinations))
    named = {
        "recommended": finalists[0][1],
        "all-together": canonical([everything]),
        "all-separate": canonical([[d] for d in everything]),
    }
    if options.current is not None:
        named["current"] = _current(operations, options.current)
    others = [partition for _, partition, _ in finalists[1:] if partition not in named.values()]
    named.update(zip(("second", "third"), others, strict=False))
    return named, findings


def _under(
    finalists: list[tuple[float, Partition, Retention]], peak_bytes_max: int
) -> list[tuple[float, Partition, Retention]]:
    return [entry for entry in finalists if entry[2].peak_bytes <= peak_bytes_max]


def _current(operations: Operations, current: Mapping[str, tuple[str, ...]]) -> Partition:
    routes = RouteTable([(pattern, store) for store, patterns in current.items() for pattern in patterns])
    stores: dict[str, list[int]] = {}
    unrouted = []
    for number, name in enumerate(operations.destinations):
        match = routes.route(Destination.parse(name))
        if match is None:
            unrouted.append(name)
        else:
            stores.setdefault(match.target, []).append(number)
    if unrouted:
        raise ConfigError([f"the current configuration routes {n} nowhere; add a pattern for it" for n in unrouted])
    return canonical(list(stores.values()))


def _candidates(
    operations: Operations, partitions: Mapping[str, Partition], options: RecommendOptions, report: Progress
) -> list[Candidate]:
    weights = {total.name: total.bytes for total in operations.totals}
    policies = _policies(operations, options)
    candidates = []
    for done, (name, partition) in enumerate(partitions.items(), start=1):
        figures = measure(operations, partition, options.costs)
        destinations = [tuple(operations.destinations[d] for d in members) for members in partition]
        names = store_names(destinations, weights)
        stores = tuple(
            StorePlan(
                name=names[i],
                destinations=destinations[i],
                filters=tuple(found),
                sync=policies[partition[i][0]].value,
                gib_hours=figures.store_gib_hours[i],
                peak_bytes=figures.store_peak_bytes[i],
            )
            for i, found in enumerate(filters(destinations))
        )
        candidates.append(
            Candidate(
                name=name,
                stores=stores,
                mean_bytes=figures.mean_bytes,
                peak_bytes=figures.peak_bytes,
                gib_hours=figures.gib_hours,
                spanning_transactions=figures.spanning_transactions,
                cost=figures.cost,
            )
        )
        report("confirm", done / len(partitions))
    return candidates


def _parameters(options: RecommendOptions, operations: Operations) -> dict[str, Any]:
    values = {name: getattr(options, name) for name in options.__dataclass_fields__}
    values["durability"] = {pattern: sync.value for pattern, sync in options.durability.items()}
    values["pinned"] = [list(group) for group in options.pinned]
    values["current"] = {k: list(v) for k, v in options.current.items()} if options.current is not None else None
    values["sizes"] = asdict(operations.sizes.sizes)
    values["operations"] = len(operations)
    values["duration_seconds"] = operations.duration
    return values
