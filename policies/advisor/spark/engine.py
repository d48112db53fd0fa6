"""The exact model through Spark: every figure of `model`, of any trace, and the driver never holds it.

    courses   what each store has on disk, when: a `kernel.StoreJournal`, fed with the operations in their order
    times     the clock at the positions that matter, and, for KahaDB's peak, the bytes written until then

A store is a set of destinations, whatever partitioning it is in: each distinct one is worked out once. A task goes
through the whole order for many stores, since reading it costs more than they do. Everything stays in positions of the
global order until the end, since time never falls along it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

from ..model.cost_model import Partition, Segments, TimedCourse, joined
from ..model.engine import Engine
from ..model.kernel import JournalRules, StoreCourse, store_journal
from ..statistics.lives import NONE
from ..statistics.operations import DestinationTotals, Operations, TransactionSet
from ..statistics.sizes import OperationSizes
from ..statistics.summary import NO_ACK, Summary, assemble, bucket_length
from ..trace.arrays import NEVER_POSITION, Floats, Ints
from ..trace.nodes import NodeUse, count_nodes
from ..trace.table import Finding
from . import workers
from .trace import SparkTrace, aggregated

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


class _Store(NamedTuple):
    """The key of a course: the same destinations keep other files by other rules. It is one journal's."""

    rules: JournalRules
    members: tuple[int, ...]
    """Sites."""


class SparkEngine(Engine):
    """A trace that Spark's workers hold. Not for several threads."""

    def __init__(self, trace: SparkTrace) -> None:
        self._trace = trace
        self.destinations: tuple[str, ...] = trace.destinations
        self.totals: tuple[DestinationTotals, ...] = trace.totals
        self.transactions: tuple[TransactionSet, ...] = trace.transactions
        self.findings: tuple[Finding, ...] = trace.findings
        self.use: NodeUse | None = trace.use
        self.sizes: OperationSizes = trace.sizes
        self.count: int = trace.count
        facts = trace.facts
        at = int(facts["largest"].to_numpy().argmax())
        self.largest: tuple[int, int] = int(facts["largest"].iloc[at]), int(facts["largest_at"].iloc[at]) + trace.first
        self._last = int(facts["last"].max())
        self._courses: dict[_Store, TimedCourse] = {}
        self._operations: Operations | None = None
        if trace.operations_per_second > 0:
            begin, finish = self._times(np.array([0, self._last]))
        else:
            begin, finish = facts["first_stamp"].iloc[0], facts["highest_stamp"].max()
        self.begin: float = float(begin)
        self.finish: float = float(finish)

    # The summary ----------------------------------------------------------------------------------------------------

    def _summary(self, segment_bytes: int) -> Summary:
        length = bucket_length(self._last + 1, float(self.bytes), segment_bytes, self._trace.lags)
        timed = self._trace.timed()
        written = _columns(
            aggregated(
                timed.selectExpr("d", f"seq DIV {length} AS bucket", "CAST(size AS double) AS size", "time"),
                ["d", "bucket"],
                {"size": "sum(size)", "squares": "sum(size * size)", "time": "min(time)"},
            )
        )
        never = f"ends = {NEVER_POSITION}"
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
                {"time": "max(time)", "early": f"coalesce(max(early), {NONE})", "count": "count(*)"},
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
            use=self.use,
        )

    # Stores ---------------------------------------------------------------------------------------------------------

    def _found(self, partitions: Sequence[Partition], rules: JournalRules) -> list[list[TimedCourse]]:
        # Those that are not known yet are worked out in one pass.
        if not rules.live_percent:
            rules = replace(rules, min_segments=1)  # says nothing then, and is not asked for twice
        # With the ack rule in force both are asked for in the end, and going through the order is most of it.
        both = [rules, replace(rules, ack_rule=False)] if rules.ack_rule else [rules]
        stores = dict.fromkeys(members for partition in partitions for members in partition)
        asked = [_Store(rule, sites) for rule in both for members in stores for sites in self._journals(members)]
        self._work_out([store for store in asked if store not in self._courses])
        found = {m: joined([self._courses[_Store(rules, sites)] for sites in self._journals(m)]) for m in stores}
        return [[found[members] for members in partition] for partition in partitions]

    def _journals(self, members: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Return the sites in each journal of a store, as `journals_of`."""
        nodes, elsewhere = count_nodes(self.use), self.elsewhere
        own = [d for d in members if d not in elsewhere]
        each = [tuple(d * nodes + node for d in own) for node in range(nodes)]
        return [sites for sites in each if self._trace.sites[list(sites)].any()]

    def _work_out(self, stores: Sequence[_Store]) -> None:
        if not stores:
            return
        flows = [self._flow(stores, group) for group in self._groups(stores)]
        table = functools.reduce(lambda one, other: one.unionAll(other), flows).toArrow()
        numbers = table.column("store").to_pylist()
        found = []
        for row in range(len(numbers)):
            arrays = {name: table.column(name)[row].values.to_numpy() for name in workers.COURSE_ARRAYS}
            counts = {name: table.column(name)[row].as_py() for name in workers.COURSE_COUNTS}
            found.append(StoreCourse(**arrays, **counts))
        times = self._times(np.concatenate([course.changes for course in found]))
        cuts = np.cumsum([len(course.changes) for course in found])[:-1]
        for number, course, time in zip(numbers, found, np.split(times, cuts), strict=True):
            self._courses[stores[number]] = TimedCourse(course, time)

    def _groups(self, stores: Sequence[_Store]) -> list[list[int]]:
        """Share the stores, by number, among tasks that all have about as many operations to go through."""
        counts = [int(self._trace.sites[list(store.members)].sum()) for store in stores]
        tasks = min(_parallelism(self._trace.rows), -(-sum(counts) // self.count))
        groups: list[list[int]] = [[] for _ in range(tasks)]
        load = [0] * tasks
        for number in sorted(range(len(stores)), key=lambda n: -counts[n]):
            least = load.index(min(load))
            groups[least].append(number)
            load[least] += counts[number]
        return [group for group in groups if group]

    def _flow(self, stores: Sequence[_Store], group: list[int]) -> DataFrame:
        """Work out the courses of these stores, by one task."""
        rows = self._trace.rows.select("seq", "d", "size", "partner", "ends")
        needed = sorted({d for number in group for d in stores[number].members})
        if len(needed) < np.count_nonzero(self._trace.sites):
            rows = rows.where(f"d IN ({', '.join(map(str, needed))})")
        journals = {(number, stores[number].members): store_journal(stores[number].rules) for number in group}
        task = functools.partial(workers.flow_task, journals, self._last)
        # The ranges may come in any order; each is sorted already, and sorting what is sorted is quick.
        return rows.coalesce(1).sortWithinPartitions("seq").mapInArrow(task, workers.COURSES)

    # Times ----------------------------------------------------------------------------------------------------------

    def _times(self, positions: Ints) -> Floats:
        """Find the time at each position of an operation."""
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
        """Find the operations with one of these values, which are few."""
        from pyspark.sql.functions import broadcast

        timed = self._trace.timed()
        asked = timed.sparkSession.createDataFrame(pa.table({column: values}))
        return timed.join(broadcast(asked), column)

    def _written_during(self, simulated: Sequence[Segments]) -> list[tuple[Ints, Ints]]:
        times = np.unique(np.concatenate([array for s in simulated for array in (s.start, s.end)]))
        found = _columns(
            aggregated(self._beside("time", times), ["time"], {"begin": "min(written)", "finish": "max(written)"})
        )
        order = np.argsort(found["time"])
        begin, finish = found["begin"][order], found["finish"][order]
        return [(begin[np.searchsorted(times, s.start)], finish[np.searchsorted(times, s.end)]) for s in simulated]

    # A small trace --------------------------------------------------------------------------------------------------

    def operations(self) -> Operations:
        if self._operations is None:
            self._operations = self._collected()
        return replace(self._operations, elsewhere=self.elsewhere)

    def _collected(self) -> Operations:
        found = _columns(self._trace.timed().select("seq", "d", "size", "partner", "ends", "time"))
        order = np.argsort(found["seq"])
        seq, site, size, partner, ends, time = (column[order] for column in found.values())
        destination, node = np.divmod(site, count_nodes(self.use))
        last = np.minimum(np.searchsorted(seq, ends), len(seq) - 1)
        return Operations(
            destinations=self.destinations,
            destination=destination,
            size=size,
            time=time,
            send=np.where(partner < 0, -1, np.searchsorted(seq, partner)),
            ends=np.where(ends == NEVER_POSITION, NEVER_POSITION, last),
            seq=seq + self._trace.first,
            transactions=self.transactions,
            totals=self.totals,
            sizes=self.sizes,
            findings=self.findings,
            use=self.use,
            node=None if self.use is None else node,
        )


def _columns(rows: DataFrame) -> dict[str, Any]:
    """Bring a small result to the driver."""
    table = rows.toArrow()
    return {name: np.array(table.column(name)) for name in table.column_names}


def _parallelism(rows: DataFrame) -> int:
    """Tell how many tasks run at a time."""
    context = getattr(rows.sparkSession, "_sc", None)  # a session of Spark Connect has none
    return 2 if context is None else int(context.defaultParallelism)
