"""The exact model through Spark: every figure of `model`, of any trace, and the driver never holds it.

    courses   what each store has on disk, when: `kernel.StoreJournal`, fed with the operations in their order
    times     the clock at the positions that matter, and, for KahaDB's peak, the bytes written until then

A store is a set of destinations, whatever partitioning it is in: each distinct one is worked out once. A task goes
through the whole order for many stores, since reading it costs more than they do. Everything stays in positions of the
global order until the end, since time never falls along it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from . import workers
from .engine import EXACT_OPERATIONS_MAX
from .kernel import JournalRules, StoreCourse, StoreJournal
from .model import CostModel, Partition, Retention, Segments, figures, peak_span, written_peak
from .operations import NEVER, DestinationTotals, Floats, Ints, Operations, TransactionSet
from .sizes import OperationSizes
from .spark_trace import SparkTrace, aggregated
from .summary import NO_ACK, Summary, assemble, bucket_length
from .trace import Finding

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


class SparkEngine:
    """A trace that Spark's workers hold. Not for several threads."""

    def __init__(self, trace: SparkTrace) -> None:
        self._trace = trace
        self.destinations: tuple[str, ...] = trace.destinations
        self.totals: tuple[DestinationTotals, ...] = trace.totals
        self.transactions: tuple[TransactionSet, ...] = trace.transactions
        self.findings: tuple[Finding, ...] = trace.findings
        self.sizes: OperationSizes = trace.sizes
        self.count = trace.count
        facts = trace.facts
        self._last = int(facts["last"].max())
        self._courses: dict[tuple[JournalRules, tuple[int, ...]], StoreCourse] = {}
        self._operations: Operations | None = None
        if trace.operations_per_second > 0:
            self.begin, self.finish = (float(t) for t in self._times(np.array([0, self._last])))
        else:
            self.begin, self.finish = float(facts["first_stamp"].iloc[0]), float(facts["highest_stamp"].max())

    @property
    def largest(self) -> tuple[int, int]:
        facts = self._trace.facts
        at = int(facts["largest"].to_numpy().argmax())
        return int(facts["largest"].iloc[at]), int(facts["largest_at"].iloc[at]) + self._trace.first

    @property
    def _bytes(self) -> int:
        return int(self._trace.facts["bytes"].sum())

    # The summary ----------------------------------------------------------------------------------------------------

    def summary(self, segment_bytes: int) -> Summary:
        length = bucket_length(self._last + 1, float(self._bytes), segment_bytes, self._trace.lags)
        timed = self._trace.timed()
        written = _columns(
            aggregated(
                timed.selectExpr("d", f"seq DIV {length} AS bucket", "CAST(size AS double) AS size", "time"),
                ["d", "bucket"],
                {"size": "sum(size)", "squares": "sum(size * size)", "time": "min(time)"},
            )
        )
        never = f"ends = {workers.NEVER_POSITION}"
        lives = _columns(
            aggregated(
                timed.where(f"partner >= 0 OR {never}").selectExpr(
                    "d",
                    f"if({never}, seq, partner) DIV {length} AS send",
                    f"if({never}, {NO_ACK}, seq DIV {length}) AS ack",
                    f"if({never}, double('infinity'), time) AS time",
                    "if(partner > seq, partner, NULL) AS early",
                ),
                ["d", "send", "ack"],
                {"time": "max(time)", "early": f"coalesce(max(early), {workers.NONE})", "count": "count(*)"},
            )
        )
        # What is acked before it is sent, in the order, lives until it is sent.
        early = np.flatnonzero(lives["early"] >= 0)
        if len(early):
            lives["time"] = lives["time"].copy()
            lives["time"][early] = np.maximum(lives["time"][early], self._times(lives["early"][early]))
        return assemble(
            destinations=self.destinations,
            sizes=self.sizes,
            finish=self.finish,
            written=written,
            lives=lives,
            transactions=self.transactions,
            totals=self.totals,
        )

    # Stores ---------------------------------------------------------------------------------------------------------

    def simulate(self, partitions: Sequence[Partition], segment_bytes: int) -> list[Segments]:
        return self._simulate(partitions, self._rules(segment_bytes))

    def compacted_peaks(self, partitions: Sequence[Partition], segment_bytes: int) -> list[int]:
        simulated = self._simulate(partitions, self._rules(segment_bytes, chained=False))
        span = peak_span(self.sizes.model, segment_bytes)
        return [written_peak(begin, finish, span, self._bytes) for begin, finish in self._written_during(simulated)]

    def measure(self, partitions: Sequence[Partition], costs: CostModel) -> list[Retention]:
        simulated = self.simulate(partitions, costs.segment_bytes)
        span = peak_span(self.sizes.model, costs.segment_bytes)
        peaks: list[int | None] = [None] * len(simulated)
        if span:
            peaks = [
                written_peak(begin, finish, span, self._bytes) for begin, finish in self._written_during(simulated)
            ]
        return [
            figures(
                segments,
                partition,
                costs,
                self.sizes,
                self.transactions,
                self.begin,
                self.finish,
                peak_files=peak,
            )
            for segments, partition, peak in zip(simulated, partitions, peaks, strict=True)
        ]

    def _rules(self, segment_bytes: int, *, chained: bool = True) -> JournalRules:
        capacity = self.sizes.capacity(segment_bytes)
        model = self.sizes.model if chained else "anabranch"
        return JournalRules(model, segment_bytes, capacity, self.sizes.sizes.batch_overhead)

    def _simulate(self, partitions: Sequence[Partition], rules: JournalRules) -> list[Segments]:
        courses = self.courses(partitions, rules)
        asked = [array for found in courses for course in found for array in (course.starts, course.ends)]
        times = iter(np.split(self._times(np.concatenate(asked)), np.cumsum([len(array) for array in asked])[:-1]))
        simulated = []
        for found in courses:
            store = np.repeat(np.arange(len(found), dtype=np.int32), [len(course.starts) for course in found])
            both = [(next(times), next(times)) for _ in found]
            order = np.argsort(np.concatenate([course.starts for course in found]), kind="stable")
            start, end = (np.concatenate(arrays)[order] for arrays in zip(*both, strict=True))
            simulated.append(Segments(store[order], start, end, rules.segment_bytes))
        return simulated

    def courses(self, partitions: Sequence[Partition], rules: JournalRules) -> list[list[StoreCourse]]:
        """What each store of each partitioning has on disk; those that are not known yet in one pass."""
        known = self._courses
        asked = dict.fromkeys(members for partition in partitions for members in partition)
        sets = [members for members in asked if (rules, members) not in known]
        if sets:
            flows = [self._flow(sets, group, rules) for group in self._groups(sets)]
            found = functools.reduce(lambda one, other: one.unionAll(other), flows).toArrow()
            for row in range(found.num_rows):
                arrays = {name: found.column(name)[row].values.to_numpy() for name in workers.COURSE_ARRAYS}
                counts = {name: found.column(name)[row].as_py() for name in workers.COURSE_COUNTS}
                known[rules, sets[found.column("store")[row].as_py()]] = StoreCourse(**arrays, **counts)
        return [[known[rules, members] for members in partition] for partition in partitions]

    def _groups(self, sets: Sequence[tuple[int, ...]]) -> list[list[int]]:
        """The numbers of the stores that each task takes, so that all have about as many operations to go through."""
        counts = [self._operations_of(members) for members in sets]
        whole = sum(counts)
        tasks = max(min(_parallelism(self._trace.rows), -(-whole // self.count)), 1)
        groups: list[list[int]] = [[] for _ in range(tasks)]
        load = [0] * tasks
        for number in sorted(range(len(sets)), key=lambda n: -counts[n]):
            least = load.index(min(load))
            groups[least].append(number)
            load[least] += counts[number]
        return [group for group in groups if group]

    def _operations_of(self, members: Sequence[int]) -> int:
        return sum(self.totals[d].sends + self.totals[d].acks for d in members)

    def _flow(self, sets: Sequence[tuple[int, ...]], group: list[int], rules: JournalRules) -> DataFrame:
        """The courses of these stores, by one task."""
        rows = self._trace.rows.select("seq", "d", "size", "partner", "ends")
        needed = sorted({d for number in group for d in sets[number]})
        if len(needed) < len(self.destinations):
            rows = rows.where(f"d IN ({', '.join(map(str, needed))})")
        journals = {(number, sets[number]): StoreJournal(rules) for number in group}
        task = functools.partial(workers.flow_task, journals, self._last)
        # The ranges come in any order, and one after another; what is sorted already is sorted quickly.
        return rows.coalesce(1).sortWithinPartitions("seq").mapInArrow(task, workers.COURSES)

    # Times ----------------------------------------------------------------------------------------------------------

    def _times(self, positions: Ints) -> Floats:
        """The time at each position of an operation."""
        if self._trace.operations_per_second > 0:
            by_order: Floats = (positions + self._trace.first) / self._trace.operations_per_second
            return by_order
        distinct, which = np.unique(positions, return_inverse=True)
        found = _columns(self._beside("seq", distinct).select("seq", "time"))
        times = np.empty(len(distinct))
        times[np.searchsorted(distinct, found["seq"])] = found["time"]
        result: Floats = times[which]
        return result

    def _beside(self, column: str, values: Ints | Floats) -> DataFrame:
        """The operations with one of these values, which are few."""
        from pyspark.sql.functions import broadcast

        timed = self._trace.timed()
        asked = timed.sparkSession.createDataFrame(pa.table({column: values}))
        return timed.join(broadcast(asked), column)

    def _written_during(self, simulated: Sequence[Segments]) -> list[tuple[Ints, Ints]]:
        """The bytes written to all stores when each segment begins and ends, of each partitioning.

        Operations of the same time happen at one moment: it begins with the first of them and ends with the last.
        """
        times = np.unique(np.concatenate([array for s in simulated for array in (s.start, s.end)]))
        found = _columns(
            aggregated(self._beside("time", times), ["time"], {"begin": "min(written)", "finish": "max(written)"})
        )
        order = np.argsort(found["time"])
        begin, finish = found["begin"][order], found["finish"][order]
        return [(begin[np.searchsorted(times, s.start)], finish[np.searchsorted(times, s.end)]) for s in simulated]

    # A small trace --------------------------------------------------------------------------------------------------

    @property
    def has_operations(self) -> bool:
        return self.count <= EXACT_OPERATIONS_MAX

    def operations(self) -> Operations:
        if self._operations is None:
            self._operations = self._collected()
        return self._operations

    def _collected(self) -> Operations:
        found = _columns(self._trace.timed().select("seq", "d", "size", "partner", "ends", "time"))
        order = np.argsort(found["seq"])
        seq, destination, size, partner, ends, time = (column[order] for column in found.values())
        last = np.minimum(np.searchsorted(seq, ends), len(seq) - 1)
        return Operations(
            destinations=self.destinations,
            destination=destination,
            size=size,
            time=time,
            send=np.where(partner < 0, -1, np.searchsorted(seq, partner)),
            end=np.where(ends == workers.NEVER_POSITION, NEVER, time[last]),
            seq=seq + self._trace.first,
            transactions=self.transactions,
            totals=self.totals,
            sizes=self.sizes,
            findings=self.findings,
        )


def _columns(rows: DataFrame) -> dict[str, Any]:
    """A small result, on the driver."""
    table = rows.toArrow()
    return {name: np.array(table.column(name)) for name in table.column_names}


def _parallelism(rows: DataFrame) -> int:
    """How many tasks run at a time."""
    context = getattr(rows.sparkSession, "_sc", None)  # a session of Spark Connect has none
    return 2 if context is None else int(context.defaultParallelism)
