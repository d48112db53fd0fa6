"""The exact model as a judge: the cost of sets for a last local search.

A trace of a few segments is coarser than the summary's interpolation. Where the trace is small enough to be simulated
many times over, the search's answer is therefore improved once more on exact costs. For a large trace the summary is
within a fraction of a percent, and only the finalists are simulated.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..model.cost_model import CostModel, Partition
from ..model.engine import EXACT_OPERATIONS_MAX, Engine, LocalEngine
from ..model.evaluate import SpanningCounts, mask_members
from ..statistics.operations import Operations
from ..statistics.summary import Summary
from .search import Constraints, refine

REFINE_OPERATIONS_MAX = 200_000_000
"""Operations that the last local search may simulate in all: some seconds."""


class ExactCosts:
    """The cost of a set as one store, by the exact model; the same face as `evaluate.SetCosts`."""

    def __init__(
        self, summary: Summary, operations: Operations, costs: CostModel, retention_weight: float = 1.0
    ) -> None:
        self.summary = summary
        self.operations = operations
        self._engine = LocalEngine(operations)
        self.costs = costs
        self.retention_weight = retention_weight
        self._known: dict[int, float] = {}
        self._spanning = SpanningCounts(operations.transactions, len(operations.destinations))

    def cost(self, mask: int) -> float:
        """Return J of this store, in GiB-hours."""
        found = self._known.get(mask)
        if found is None:
            members = mask_members(mask)
            figures = self._engine.measure([(tuple(members),)], self.costs)[0]
            # The measured cost of one store alone holds its retention and overhead: it sees no spanning transaction.
            weighted = figures.cost + (self.retention_weight - 1.0) * figures.gib_hours
            found = self._known[mask] = weighted + 2 * self.costs.sync_price * self._spanning.of(members)
        return found


def improve_exactly(
    engine: Engine,
    summary: Summary,
    costs: CostModel,
    constraints: Constraints,
    starts: Sequence[Partition],
    retention_weight: float = 1.0,
) -> list[Partition]:
    """Improve these and give the best by exact cost; none where the trace is too large for that."""
    # Two rounds each, in which every destination is tried in every store and alone.
    steps = 2 * len(summary.destinations) * sum(len(start) + 2 for start in starts)
    if engine.count > EXACT_OPERATIONS_MAX or steps * engine.count > REFINE_OPERATIONS_MAX:
        return []
    exact = ExactCosts(summary, engine.operations(), costs, retention_weight)

    def total(partition: Partition) -> tuple[float, Partition]:
        return sum(exact.cost(sum(1 << d for d in store)) for store in partition), partition

    improved = [refine(exact, constraints, start) for start in starts]
    return [min([*improved, *starts], key=total)]
