"""The exact model through Spark: every figure of `model`, of any trace, and the driver never holds it.

    boundaries   where each store's segments begin: what each range makes of any carry, composed, walked again
    lives        where each segment is last needed, by the matched sends and acks; the ack rule swept store by store
    times        the clock at the positions that matter, and, for KahaDB's peak, the bytes written until then

A store is a set of destinations, whatever partitioning it is in: each distinct one is worked out once, all of them in
the same passes. Everything stays in positions of the global order until the end, since time never falls along it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from . import ranges
from .engine import EXACT_OPERATIONS_MAX
from .model import CostModel, Partition, Retention, Segments, figures, peak_span, written_peak
from .operations import NEVER, DestinationTotals, Floats, Ints, Operations, TransactionSet
from .sizes import OperationSizes
from .spark_trace import SparkTrace, frame
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
        part = facts["part"].tolist()
        self._clock = ranges.RangeClock(
            dict(zip(part, facts["before"].tolist(), strict=True)), trace.first, trace.operations_per_second
        )
        self._last = int(facts["last"].max())
        self._segments: dict[tuple[int, bool, tuple[int, ...]], tuple[Ints, Floats, Floats]] = {}
        """By size of a segment, whether the ack rule holds, and store: positions and times of the starts, times of
        the ends."""
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
        length = bucket_length(self._last + 1, float(self._bytes), segment_bytes)
        rows, matched = self._trace.rows, self._trace.matched
        written = _grouped(
            rows.selectExpr("d AS destination", f"seq DIV {length} AS bucket", "CAST(size AS double) AS size", "seq"),
            ["destination", "bucket"],
            {"size": "sum(size)", "squares": "sum(size * size)", "first": "min(seq)"},
        )
        firsts = written.groupby("bucket")["first"].min()
        keys = ["destination", "send", "ack"]
        ended = _grouped(
            matched.where("partner >= 0").selectExpr(
                "d AS destination", f"partner DIV {length} AS send", f"seq DIV {length} AS ack", "seq", "partner"
            ),
            keys,
            {"last": "max(greatest(seq, partner))", "count": "count(*)"},
        )
        pending = _grouped(
            matched.where(f"ends = {ranges.NEVER_POSITION}").selectExpr(
                "d AS destination", f"seq DIV {length} AS send"
            ),
            ["destination", "send"],
            {"count": "count(*)"},
        )
        asked = [ended["last"].to_numpy(np.int64), firsts.to_numpy(np.int64)]
        ended["time"], starts = np.split(self._times(np.concatenate(asked)), [len(asked[0])])
        pending["ack"], pending["time"] = NO_ACK, NEVER
        columns = [*keys, "time", "count"]
        return assemble(
            destinations=self.destinations,
            sizes=self.sizes,
            finish=self.finish,
            starts=(firsts.index.to_numpy(np.int64), starts),
            written=written[["destination", "bucket", "size", "squares"]],
            lives=pd.concat([ended[columns], pending[columns]], ignore_index=True),
            transactions=self.transactions,
            totals=self.totals,
        )

    # Segments -------------------------------------------------------------------------------------------------------

    def simulate(self, partitions: Sequence[Partition], segment_bytes: int) -> list[Segments]:
        return self._simulate(partitions, segment_bytes, self.sizes.model == "kahadb")

    def compacted_peaks(self, partitions: Sequence[Partition], segment_bytes: int) -> list[int]:
        simulated = self._simulate(partitions, segment_bytes, False)
        span = peak_span(self.sizes.model, segment_bytes)
        return [written_peak(begin, finish, span, self._bytes) for begin, finish in self._written_during(simulated)]

    def _simulate(self, partitions: Sequence[Partition], segment_bytes: int, chained: bool) -> list[Segments]:
        """`chained`: the ack rule holds."""
        self._work_out([store for partition in partitions for store in partition], segment_bytes, chained)
        return [self._assembled(partition, segment_bytes, chained) for partition in partitions]

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

    def _assembled(self, partition: Partition, segment_bytes: int, chained: bool) -> Segments:
        known = [self._segments[segment_bytes, chained, members] for members in partition]
        store = np.repeat(np.arange(len(known), dtype=np.int32), [len(starts) for starts, _, _ in known])
        position = np.concatenate([found[0] for found in known])
        start, end = (np.concatenate([found[i] for found in known]) for i in (1, 2))
        order = np.argsort(position, kind="stable")
        return Segments(store[order], start[order], end[order], segment_bytes)

    def _work_out(self, stores: Sequence[tuple[int, ...]], segment_bytes: int, chained: bool) -> None:
        """Every segment of the stores that are not known yet."""
        known = self._segments
        sets = [members for members in dict.fromkeys(stores) if (segment_bytes, chained, members) not in known]
        if not sets:
            return
        starts, times = self._starts(sets, self.sizes.capacity(segment_bytes))
        # With the ack rule in force both are asked for in the end, and the passes are the same.
        rules = (False, True) if chained else (False,)
        ends = [found for rule in self._ends(sets, starts, rules) for found in rule]
        lengths = np.cumsum([len(found) for found in ends])[:-1]
        end_times = iter(np.split(self._times(np.concatenate(ends)), lengths))
        for rule in rules:
            for members, at, start in zip(sets, starts, times, strict=True):
                known[segment_bytes, rule, members] = (at, start, next(end_times))

    def _starts(self, sets: list[tuple[int, ...]], capacity: int) -> tuple[list[Ints], list[Floats]]:
        """Positions and times at which each store's segments begin."""
        rows = self._trace.rows
        found = rows.select("d", "size").mapInArrow(
            functools.partial(ranges.outcomes_task, sets, capacity), ranges.OUTCOMES
        )
        composed = frame(found.groupBy("store").applyInArrow(with_argument(ranges.compose, capacity), ranges.CARRIES))
        carries = {
            (store, part): carry
            for store, part, carry in zip(
                composed["store"].tolist(), composed["part"].tolist(), composed["carry"].tolist(), strict=True
            )
        }
        task = functools.partial(ranges.starts_task, sets, capacity, carries, self._clock)
        begun = frame(rows.select("seq", "d", "size", "stamp").mapInArrow(task, ranges.STARTS))
        begun = begun.sort_values(["store", "seq"])
        cuts = np.searchsorted(begun["store"].to_numpy(), np.arange(1, len(sets)))
        return np.split(begun["seq"].to_numpy(np.int64), cuts), np.split(begun["time"].to_numpy(np.float64), cuts)

    def _ends(self, sets: list[tuple[int, ...]], starts: list[Ints], rules: tuple[bool, ...]) -> list[list[Ints]]:
        """Positions at which each store's segments are last needed, without the ack rule and with it."""
        from pyspark.sql.functions import max as largest

        task = functools.partial(ranges.lives_task, sets, starts, True in rules)
        lives = self._trace.matched.select("seq", "d", "partner", "ends").mapInArrow(task, ranges.LIVES)
        merged = lives.groupBy("store", "segment", "origin").agg(largest("ends").alias("ends"))
        swept = merged.groupBy("store").applyInArrow(with_argument(ranges.sweep, starts), ranges.ENDS)
        ends = frame(swept).sort_values(["store", "segment"])
        cuts = np.searchsorted(ends["store"].to_numpy(), np.arange(1, len(sets)))
        columns = ["ends" if rule else "own" for rule in rules]
        return [np.split(np.minimum(ends[column].to_numpy(np.int64), self._last), cuts) for column in columns]

    # Times ----------------------------------------------------------------------------------------------------------

    def _times(self, positions: Ints) -> Floats:
        """The time at each position of an operation."""
        if self._trace.operations_per_second > 0:
            by_order: Floats = (positions + self._trace.first) / self._trace.operations_per_second
            return by_order
        distinct, which = np.unique(positions, return_inverse=True)
        task = functools.partial(ranges.times_task, self._clock, distinct)
        found = frame(self._trace.rows.select("seq", "stamp").mapInArrow(task, ranges.VALUES))
        times = np.empty(len(distinct))
        times[found["number"].to_numpy()] = found["value"].to_numpy()
        result: Floats = times[which]
        return result

    def _written_during(self, simulated: Sequence[Segments]) -> list[tuple[Ints, Ints]]:
        """The bytes written to all stores when each segment begins and ends, of each partitioning."""
        begins, which_begin = np.unique(np.concatenate([s.start for s in simulated]), return_inverse=True)
        ends, which_end = np.unique(np.concatenate([s.end for s in simulated]), return_inverse=True)
        facts = self._trace.facts
        positions = facts[["first", "last"]].to_numpy(np.int64)
        if self._trace.operations_per_second > 0:
            first, last = (self._times(positions[:, i]) for i in range(2))
        else:
            stamps = facts[["before", "first_stamp", "highest_stamp"]].to_numpy(np.float64)
            first, last = (np.maximum(stamps[:, 0], stamps[:, i]) for i in (1, 2))
        # A beginning is asked of the first range that gets there, an end of the last that has not gone beyond.
        of_begin = np.searchsorted(last, begins, "left")
        of_end = np.searchsorted(first, ends, "right") - 1
        queries = {}
        for place, part in enumerate(facts["part"].tolist()):
            asked = np.flatnonzero(of_begin == place), np.flatnonzero(of_end == place)
            queries[part] = (asked[0], begins[asked[0]]), (asked[1] + len(begins), ends[asked[1]])
        before = dict(zip(facts["part"].tolist(), facts["bytes_before"].tolist(), strict=True))
        task = functools.partial(ranges.written_task, self._clock, before, queries)
        found = frame(self._trace.rows.select("seq", "stamp", "size").mapInArrow(task, ranges.COUNTS))
        written = np.empty(len(begins) + len(ends), np.int64)
        written[found["number"].to_numpy()] = found["value"].to_numpy()
        cuts = np.cumsum([len(s.start) for s in simulated])[:-1]
        begin_bytes = np.split(written[: len(begins)][which_begin], cuts)
        end_bytes = np.split(written[len(begins) :][which_end], cuts)
        return list(zip(begin_bytes, end_bytes, strict=True))

    # A small trace --------------------------------------------------------------------------------------------------

    @property
    def has_operations(self) -> bool:
        return self.count <= EXACT_OPERATIONS_MAX

    def operations(self) -> Operations:
        if self._operations is None:
            self._operations = self._collected()
        return self._operations

    def _collected(self) -> Operations:
        rows = frame(self._trace.rows.select("seq", "d", "size", "stamp")).sort_values("seq")
        matched = frame(self._trace.matched.select("seq", "partner", "ends")).sort_values("seq")
        seq = rows["seq"].to_numpy(np.int64)
        stamps = rows["stamp"].to_numpy(np.float64)
        partner, ends = matched["partner"].to_numpy(np.int64), matched["ends"].to_numpy(np.int64)
        by_order = self._trace.operations_per_second > 0
        time = self._times(seq) if by_order else np.maximum.accumulate(stamps)
        last = np.minimum(np.searchsorted(seq, ends), len(seq) - 1)
        return Operations(
            destinations=self.destinations,
            destination=rows["d"].to_numpy(np.int32),
            size=rows["size"].to_numpy(np.int64),
            time=time,
            send=np.where(partner < 0, -1, np.searchsorted(seq, partner)),
            ends=np.where(ends == ranges.NEVER_POSITION, ranges.NEVER_POSITION, last),
            seq=seq + self._trace.first,
            transactions=self.transactions,
            totals=self.totals,
            sizes=self.sizes,
            findings=self.findings,
        )


def _grouped(rows: DataFrame, keys: list[str], values: dict[str, str]) -> pd.DataFrame:
    # Not by SQL over these rows: the view of them that it needs for a moment, going, takes what is kept of them along.
    from pyspark.sql.functions import expr

    return frame(rows.groupBy(*keys).agg(*(expr(value).alias(name) for name, value in values.items())))


def with_argument(function: Any, argument: object) -> Any:
    """A function of one table, as Spark wants it: of a `partial` it does not see how many arguments it takes."""

    def apply(table: Any) -> Any:
        return function(table, argument)

    return apply
