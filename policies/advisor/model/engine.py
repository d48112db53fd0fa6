"""Engines know a trace, by arrays in this process or through Spark. Either gives the same figures to the last digit.

    engine.summary(segment_bytes)               what the search runs on
    engine.courses(partitions, costs)           what each store has on disk over time
    engine.simulate(partitions, segment_bytes)  every segment of each partitioning, where nothing is compacted
    engine.measure(partitions, costs)           the exact figures of each

`LocalEngine` holds the whole trace, some 400 bytes an operation while it is read. `spark.engine.SparkEngine` keeps it
with Spark's workers: here come the summary and the segments, whose number depends on bytes and not on operations.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from ..statistics.operations import DestinationTotals, Operations, TransactionSet
from ..statistics.sizes import OperationSizes
from ..statistics.summary import Summary, summarise
from ..trace.arrays import Ints
from ..trace.nodes import NodeUse
from ..trace.table import Finding
from .cost_model import (
    PEAK_SPAN_SEGMENTS,
    CostModel,
    Partition,
    Retention,
    Segments,
    TimedCourse,
    courses,
    figures,
    lasting_peak,
    segments,
)
from .kernel import JournalRules

EXACT_OPERATIONS_MAX = 1_000_000
"""Operations of the largest trace that is held in this process for a last local search by the exact model."""


class Engine(ABC):
    """A trace that has been checked. `measure` and `simulate` take seconds to minutes through Spark: ask for many."""

    destinations: tuple[str, ...]
    totals: tuple[DestinationTotals, ...]
    transactions: tuple[TransactionSet, ...]
    findings: tuple[Finding, ...]
    use: NodeUse | None
    """Of a trace of several nodes: where its destinations were used."""
    sizes: OperationSizes
    count: int
    """Operations in the trace."""
    begin: float
    """The time of the first operation, in seconds of the trace's clock; `finish`: of the last."""
    finish: float
    largest: tuple[int, int]
    """Bytes and seq of the largest operation."""
    _left_out: frozenset[int] = frozenset()

    @property
    def crossed(self) -> frozenset[int]:
        """Return the numbers of the destinations of which messages were sent on one node and acked on another."""
        return frozenset(self.use.crossed if self.use else ())

    @property
    def elsewhere(self) -> frozenset[int]:
        """Return the numbers of the destinations that are in no journal: the crossed ones, and those left out."""
        return self.crossed | self._left_out

    def leave_out(self, destinations: Iterable[int]) -> None:
        """Leave these destinations out of all journals, before anything is asked of them: their store is none."""
        self._left_out = frozenset(destinations)

    def summary(self, segment_bytes: int) -> Summary:
        """Add up bytes and lives by bucket."""
        return replace(self._summary(segment_bytes), elsewhere=self.elsewhere)

    def courses(self, partitions: Sequence[Partition], costs: CostModel) -> list[list[TimedCourse]]:
        """Find the course of each store of each partitioning."""
        return self._found(partitions, costs.rules(self.sizes))

    def simulate(self, partitions: Sequence[Partition], segment_bytes: int) -> list[Segments]:
        """Find the segments of each partitioning, in order of birth, as they are without compaction."""
        return self._simulate(partitions, JournalRules.of(self.sizes, segment_bytes, 0, 1))

    def compacted_peaks(self, partitions: Sequence[Partition], segment_bytes: int) -> list[int]:
        """Count the files at each peak without the ack rule: a broker's ack compaction can get that far."""
        rules = JournalRules.of(self.sizes, segment_bytes, 0, 1, ack_rule=False)
        return self._lasting_peaks(self._simulate(partitions, rules))

    def measure(self, partitions: Sequence[Partition], costs: CostModel) -> list[Retention]:
        """Work out the exact figures of each partitioning."""
        found = self.courses(partitions, costs)
        peaks: list[int | None] = [None] * len(found)
        if self.sizes.model == "kahadb":
            peaks = [*self._lasting_peaks([segments(stores, costs.segment_bytes) for stores in found])]
        return [
            figures(
                stores, partition, costs, self.sizes, self.transactions, self.begin, self.finish, peak_files=peak_files
            )
            for stores, partition, peak_files in zip(found, partitions, peaks, strict=True)
        ]

    @property
    def bytes(self) -> int:
        """Add up what all operations write."""
        return sum(total.bytes for total in self.totals)

    @property
    def has_operations(self) -> bool:
        """Tell whether `operations` may be asked for."""
        return self.count <= EXACT_OPERATIONS_MAX

    @abstractmethod
    def operations(self) -> Operations:
        """Give the trace as arrays in this process; through Spark of `EXACT_OPERATIONS_MAX` operations at most."""

    @abstractmethod
    def _summary(self, segment_bytes: int) -> Summary: ...

    def _simulate(self, partitions: Sequence[Partition], rules: JournalRules) -> list[Segments]:
        return [segments(found, rules.segment_bytes) for found in self._found(partitions, rules)]

    def _lasting_peaks(self, simulated: Sequence[Segments]) -> list[int]:
        """Count KahaDB's files at the peak of each partitioning: a number of them must last to count."""
        if not simulated:
            return []
        # A trace that writes less than the span still has its files on disk.
        span = min(PEAK_SPAN_SEGMENTS * simulated[0].segment_bytes, 0.5 * self.bytes)
        return [lasting_peak(begin, finish, span) for begin, finish in self._written_during(simulated)]

    @abstractmethod
    def _found(self, partitions: Sequence[Partition], rules: JournalRules) -> list[list[TimedCourse]]:
        """Find the course of each store of each partitioning."""

    @abstractmethod
    def _written_during(self, simulated: Sequence[Segments]) -> list[tuple[Ints, Ints]]:
        """Give the bytes written to all stores when each segment begins and ends, of each partitioning.

        Operations of the same time happen at one moment: it begins with the first of them and ends with the last.
        """


class LocalEngine(Engine):
    """A trace in this process's memory."""

    def __init__(self, operations: Operations) -> None:
        self._operations = operations
        self.destinations: tuple[str, ...] = operations.destinations
        self.totals: tuple[DestinationTotals, ...] = operations.totals
        self.transactions: tuple[TransactionSet, ...] = operations.transactions
        self.findings: tuple[Finding, ...] = operations.findings
        self.use: NodeUse | None = operations.use
        self.sizes: OperationSizes = operations.sizes
        self.count: int = len(operations)
        self.begin: float = float(operations.time[0])
        self.finish: float = float(operations.time[-1])
        at = int(operations.size.argmax())
        self.largest: tuple[int, int] = int(operations.size[at]), int(operations.seq[at])

    def _summary(self, segment_bytes: int) -> Summary:
        return summarise(self._operations, segment_bytes)

    has_operations = True

    def operations(self) -> Operations:
        return replace(self._operations, elsewhere=self.elsewhere)

    def _found(self, partitions: Sequence[Partition], rules: JournalRules) -> list[list[TimedCourse]]:
        operations = self.operations()
        return [courses(operations, partition, rules) for partition in partitions]

    def _written_during(self, simulated: Sequence[Segments]) -> list[tuple[Ints, Ints]]:
        time, written = self._operations.time, np.cumsum(self._operations.size)
        return [
            (
                written[np.searchsorted(time, one.start, side="left")],
                written[np.searchsorted(time, one.end, side="right") - 1],
            )
            for one in simulated
        ]
