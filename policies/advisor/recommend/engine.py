"""Who knows a trace: the arrays in this process, or Spark. Either gives the same figures to the last digit.

    engine.summary(segment_bytes)             what the search runs on
    engine.courses(partitions, costs)           what each store has on disk over time
    engine.simulate(partitions, segment_bytes)  every segment of each partitioning, where nothing is compacted
    engine.measure(partitions, costs)           the exact figures of each

`LocalEngine` holds the whole trace, some 400 bytes an operation while it is read. `spark_engine.SparkEngine` keeps it
with Spark's workers: here come the summary and the segments, whose number depends on bytes and not on operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ..model.exact import (
    CostModel,
    Partition,
    Retention,
    Segments,
    TimedCourse,
    compacted_peak,
    courses,
    measure,
    simulate,
    timed,
)
from ..model.kernel import JournalRules
from ..statistics.operations import DestinationTotals, Operations, TransactionSet
from ..statistics.sizes import OperationSizes
from ..statistics.summary import Summary, summarise
from ..trace.table import Finding

EXACT_OPERATIONS_MAX = 1_000_000
"""Operations of the largest trace that is held in this process for a last local search by the exact model."""


class Engine(Protocol):
    """A trace that has been checked. `measure` and `simulate` take seconds to minutes through Spark: ask for many."""

    @property
    def destinations(self) -> tuple[str, ...]: ...

    @property
    def totals(self) -> tuple[DestinationTotals, ...]: ...

    @property
    def transactions(self) -> tuple[TransactionSet, ...]: ...

    @property
    def findings(self) -> tuple[Finding, ...]: ...

    @property
    def sizes(self) -> OperationSizes: ...

    @property
    def count(self) -> int:
        """Operations in the trace."""

    @property
    def begin(self) -> float:
        """When the first operation was, in seconds of the trace's clock; `finish`: the last."""

    @property
    def finish(self) -> float: ...

    @property
    def largest(self) -> tuple[int, int]:
        """Bytes and seq of the largest operation."""

    def summary(self, segment_bytes: int) -> Summary:
        """Bytes and lives by bucket."""

    def courses(self, partitions: Sequence[Partition], costs: CostModel) -> list[list[TimedCourse]]:
        """The course of each store of each partitioning."""

    def simulate(self, partitions: Sequence[Partition], segment_bytes: int) -> list[Segments]:
        """The segments of each partitioning, in order of birth, as they are without compaction."""

    def measure(self, partitions: Sequence[Partition], costs: CostModel) -> list[Retention]:
        """The exact figures of each partitioning."""

    def compacted_peaks(self, partitions: Sequence[Partition], segment_bytes: int) -> list[int]:
        """`model.compacted_peak` of each partitioning."""

    @property
    def has_operations(self) -> bool:
        """Whether `operations` may be asked for."""

    def operations(self) -> Operations:
        """The trace as arrays in this process; through Spark of `EXACT_OPERATIONS_MAX` operations at most."""


class LocalEngine:
    """A trace in this process's memory."""

    def __init__(self, operations: Operations) -> None:
        self._operations = operations
        self.destinations = operations.destinations
        self.totals = operations.totals
        self.transactions = operations.transactions
        self.findings = operations.findings
        self.sizes = operations.sizes
        self.count = len(operations)
        self.begin, self.finish = float(operations.time[0]), float(operations.time[-1])

    @property
    def largest(self) -> tuple[int, int]:
        at = int(self._operations.size.argmax())
        return int(self._operations.size[at]), int(self._operations.seq[at])

    def summary(self, segment_bytes: int) -> Summary:
        return summarise(self._operations, segment_bytes)

    def courses(self, partitions: Sequence[Partition], costs: CostModel) -> list[list[TimedCourse]]:
        rules = costs.rules(self.sizes)
        return [timed(self._operations, courses(self._operations, partition, rules)) for partition in partitions]

    def simulate(self, partitions: Sequence[Partition], segment_bytes: int) -> list[Segments]:
        rules = JournalRules.of(self.sizes, segment_bytes, 0, 1)
        return [simulate(self._operations, partition, rules) for partition in partitions]

    def measure(self, partitions: Sequence[Partition], costs: CostModel) -> list[Retention]:
        return [measure(self._operations, partition, costs) for partition in partitions]

    def compacted_peaks(self, partitions: Sequence[Partition], segment_bytes: int) -> list[int]:
        return [compacted_peak(self._operations, partition, segment_bytes) for partition in partitions]

    has_operations = True

    def operations(self) -> Operations:
        return self._operations
