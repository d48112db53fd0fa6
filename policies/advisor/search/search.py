"""The search: the partitioning of least cost, given the cost of every set of destinations as one store.

Up to 12 atoms (a destination, or several that are pinned together) dynamic programming over subsets finds the optimum.
Above, two heuristics start from opposite ends, each is improved by local search, and the better one is kept:

- agglomeration: from all-separate, join the pair of stores that gains most, until none gains;
- intervals: atoms in order of how long their messages stay, cut into runs by dynamic programming. Retention is what
  binds destinations together, so a good partitioning is nearly one of runs.

Above 400 atoms both work on at most as many cells of atoms that behave alike (`alike`); the local search then moves the
atoms one by one, within a bound of work that goes by the summary's size and not by any clock.

Nothing is random and ties go to what comes first, so the same costs give the same answer.
"""

from __future__ import annotations

import functools
import heapq
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ...errors import ConfigError
from ..model.cost_model import Partition, canonical
from ..model.evaluate import mask_members
from ..model.jit import njit
from ..statistics.summary import Summary, retention_quantile
from ..trace.arrays import Ints
from .alike import cells

EXACT_ATOMS_MAX = 12
INTERVAL_ATOMS_MAX = 60
NEIGHBOURS = 40
"""In agglomeration and local search above this many atoms, only stores near in retention are candidates for joining."""
ROUNDS_MAX = 12
CELLS_MAX = 400
"""Above so many atoms those that behave alike are searched for as one, unless there are more durabilities."""
FINE_ROUNDS_MAX = 2
"""Rounds of local search over the atoms of cells, one by one."""
FINE_TARGETS = 8
"""Stores, those near in retention, that an atom of a cell is tried in."""
LADDER_ATOMS = 100
"""Atoms that are tried alone, of many, for each number of stores."""
FINE_WORK = 10_000_000_000
"""Rows and buckets of the summary that one such round may go through: on the order of a minute."""
_ALIKE_STEPS = 8
_GAIN_MIN = 1e-9
"""A relative gain below this is rounding, not a gain."""

Progress = Callable[[str, float], None]
"""Called with a stage (summarise, search, confirm, ...) and the share of it that is done, 0 to 1."""


@dataclass(frozen=True, slots=True)
class Constraints:
    """Rules that the costs do not say. Destinations are given by number."""

    durability: tuple[int, ...] = ()
    """A group for each destination; different groups never share a store. Empty: all alike."""
    pinned: tuple[tuple[int, ...], ...] = ()
    """Sets that must share a store."""
    stores_max: int | None = None


def keeps(partition: Partition, constraints: Constraints) -> bool:
    """Tell whether a partitioning keeps to the constraints."""
    if constraints.stores_max is not None and len(partition) > constraints.stores_max:
        return False
    store_of = {member: number for number, members in enumerate(partition) for member in members}
    groups = constraints.durability
    return all(len({store_of[member] for member in pinned}) == 1 for pinned in constraints.pinned) and all(
        len({groups[member] for member in members}) == 1 for members in partition if groups
    )


class Costs(Protocol):
    """A judge that the search asks for the cost of a set of destinations (a bit mask) as one store."""

    @property
    def summary(self) -> Summary: ...

    def cost(self, mask: int, /) -> float: ...


@dataclass(slots=True)
class _Problem:
    """The atoms, in the order of their first destination, and what may be joined."""

    costs: Costs
    atoms: list[int]
    group: list[int]
    stores_max: int
    rank: list[int]
    """Place of each atom in the order of (durability, retention)."""
    _group_masks: dict[int, int] = field(default_factory=dict)
    """The atoms of each durability."""
    _positions: dict[int, float] = field(default_factory=dict)
    _is_plain: bool = False
    """Whether each destination is an atom: a mask over atoms is one over destinations."""

    def __post_init__(self) -> None:
        self._is_plain = all(atom == 1 << number for number, atom in enumerate(self.atoms))
        for atom, group in enumerate(self.group):
            self._group_masks[group] = self._group_masks.get(group, 0) | 1 << atom

    @property
    def many(self) -> bool:
        """Tell whether there are so many atoms that not everything is tried."""
        return len(self.atoms) > CELLS_MAX

    def cost(self, store: int) -> float:
        """Return the cost of a store given as a mask over atoms; infinite where durabilities mix."""
        first = (store & -store).bit_length() - 1
        if store & ~self._group_masks[self.group[first]]:
            return math.inf
        return self.costs.cost(self.destinations(store))

    def destinations(self, store: int) -> int:
        if self._is_plain:
            return store
        return _union(self.atoms[atom] for atom in mask_members(store))

    def partition(self, stores: Sequence[int]) -> Partition:
        return canonical([mask_members(self.destinations(store)) for store in stores])

    def stores(self, partition: Partition) -> list[int]:
        """Return a partitioning as masks over atoms."""
        atom_of = {d: a for a, atom in enumerate(self.atoms) for d in mask_members(atom)}
        return [_union(1 << atom_of[d] for d in members) for members in partition]

    def total(self, stores: Sequence[int]) -> float:
        return math.fsum(self.cost(store) for store in stores)

    def position(self, store: int) -> float:
        """Return where a store stands in the order of retention."""
        found = self._positions.get(store)
        if found is None:
            members = mask_members(store)
            found = self._positions[store] = sum(self.rank[a] for a in members) / len(members)
        return found

    def nearest(self, stores: Sequence[int], at: float, most: int) -> list[int]:
        """Find the stores that stand nearest to a place in the order of retention."""
        return sorted(stores, key=lambda store: (abs(self.position(store) - at), store))[:most]


def search(
    costs: Costs, constraints: Constraints | None = None, *, keep: int = 3, progress: Progress | None = None
) -> tuple[Partition, ...]:
    """Find the best partitionings, best first, at most `keep`. Raises ConfigError where constraints contradict."""
    problem = _problem(costs, constraints or Constraints())
    report = progress or (lambda stage, share: None)
    if len(problem.atoms) <= EXACT_ATOMS_MAX:
        best = _exact(problem, report)
    elif not problem.many:
        best = _heuristic(problem, report)
    else:
        coarse, members = _coarse(problem)
        best = [_union(members[cell] for cell in mask_members(store)) for store in _heuristic(coarse, report)]
        best = _improve(problem, best, report)
    ranked = _with_neighbours(problem, best, keep)
    report("search", 1.0)
    return tuple(ranked)


def refine(costs: Costs, constraints: Constraints, start: Partition) -> Partition:
    """Improve a partitioning that keeps the constraints by local search."""
    problem = _problem(costs, constraints)
    return problem.partition(_improve(problem, problem.stores(start), lambda stage, share: None))


def _problem(costs: Costs, constraints: Constraints) -> _Problem:
    width = len(costs.summary.destinations)
    durability = constraints.durability or (0,) * width
    atom_of = list(range(width))
    for pin in constraints.pinned:
        first = min(atom_of[d] for d in pin)
        joined = {atom_of[d] for d in pin}
        atom_of = [first if a in joined else a for a in atom_of]
    atoms = [sum(1 << d for d in range(width) if atom_of[d] == a) for a in sorted(set(atom_of))]
    group = []
    for atom in atoms:
        kinds = {durability[d] for d in mask_members(atom)}
        if len(kinds) > 1:
            names = ", ".join(costs.summary.destinations[d] for d in mask_members(atom))
            raise ConfigError([f"{names} are pinned together but differ in durability; pin or classify them otherwise"])
        group.append(kinds.pop())
    stores_max = len(atoms) if constraints.stores_max is None else constraints.stores_max
    if stores_max < len(set(group)):
        raise ConfigError(
            [f"stores_max is {stores_max}, but {len(set(group))} durabilities need a store each; allow more"]
        )
    return _Problem(costs, atoms, group, stores_max, _ranks(group, [_stay(costs, atom) for atom in atoms]))


def _coarse(problem: _Problem) -> tuple[_Problem, list[int]]:
    """Return the problem with cells for atoms, and the atoms of each cell as a mask."""
    members = cells(problem.costs.summary, [mask_members(atom) for atom in problem.atoms], problem.group, CELLS_MAX)
    masks = [sum(1 << a for a in cell) for cell in members]
    group = [problem.group[cell[0]] for cell in members]
    atoms = [problem.destinations(mask) for mask in masks]
    ranks = _ranks(group, [problem.position(mask) for mask in masks])
    return _Problem(problem.costs, atoms, group, problem.stores_max, ranks), masks


def _ranks(group: Sequence[int], stay: Sequence[float]) -> list[int]:
    """Place each atom in the order of (durability, retention)."""
    ranks = [0] * len(group)
    for place, atom in enumerate(sorted(range(len(group)), key=lambda a: (group[a], stay[a], a))):
        ranks[atom] = place
    return ranks


def _union(masks: Iterable[int]) -> int:
    return functools.reduce(operator.or_, masks, 0)


def _heuristic(problem: _Problem, report: Progress) -> list[int]:
    """Improve what both heuristics find, and return the better."""
    starts = [_agglomerate(problem, report), _intervals(problem, report)]
    improved = [_improve(problem, stores, report) for stores in starts if stores]
    return min(improved, key=lambda stores: (problem.total(stores), problem.partition(stores)))


def _stay(costs: Costs, atom: int) -> float:
    return max(retention_quantile(costs.summary, d) for d in mask_members(atom))


# Subsets: the optimum -----------------------------------------------------------------------------------------------


def _exact(problem: _Problem, report: Progress) -> list[int]:
    size = 1 << len(problem.atoms)
    values = np.full(size, np.inf)
    for store in range(1, size):
        values[store] = problem.cost(store)
        if store % 256 == 0:
            report("search", store / size)
    choice, stores = _subset_program(values, len(problem.atoms), min(problem.stores_max, len(problem.atoms)))
    result, rest = [], size - 1
    for count in range(stores, 0, -1):
        store = int(choice[count, rest])
        result.append(store)
        rest ^= store
    return result


@njit
def _subset_program(values: npt.NDArray[np.float64], atoms: int, stores_max: int) -> tuple[Ints, int]:
    """Cut every set best. `choice[k, set]` is the store with its lowest atom when it is cut into k stores."""
    size = 1 << atoms
    best = np.full((stores_max + 1, size), np.inf)
    choice = np.zeros((stores_max + 1, size), np.int64)
    best[0, 0] = 0.0
    for count in range(1, stores_max + 1):
        for whole in range(1, size):
            low = whole & -whole
            part = whole
            while part:
                # A store without the lowest atom will hold some other set's lowest: each partition is seen once.
                if part & low:
                    value = values[part] + best[count - 1, whole ^ part]
                    if value < best[count, whole]:
                        best[count, whole] = value
                        choice[count, whole] = part
                part = (part - 1) & whole
    stores = 1
    for count in range(1, stores_max + 1):
        if best[count, size - 1] < best[stores, size - 1]:
            stores = count
    return choice, stores


# Agglomeration ------------------------------------------------------------------------------------------------------


def _agglomerate(problem: _Problem, report: Progress) -> list[int]:
    """Join the pair that gains most until none gains; while there are too many stores, the one that costs least."""
    order = sorted(range(len(problem.atoms)), key=lambda a: problem.rank[a])
    stores = {number: 1 << atom for number, atom in enumerate(order)}
    near = NEIGHBOURS if len(order) > NEIGHBOURS else len(order)
    heap: list[tuple[float, int, int]] = []

    def offer(a: int, b: int) -> None:
        joined = problem.cost(stores[a] | stores[b])
        if joined < math.inf:
            change = joined - problem.cost(stores[a]) - problem.cost(stores[b])
            heapq.heappush(heap, (change, min(a, b), max(a, b)))

    for a in range(len(order)):
        for b in range(a + 1, min(a + 1 + near, len(order))):
            offer(a, b)
        report("agglomerate", a / len(order))
    born = len(order)
    while heap:
        change, a, b = heapq.heappop(heap)
        if a not in stores or b not in stores:
            continue
        if change >= -_GAIN_MIN * problem.cost(stores[a]) and len(stores) <= problem.stores_max:
            break
        stores[born] = stores.pop(a) | stores.pop(b)
        at = problem.position(stores[born])
        others = sorted((n for n in stores if n != born), key=lambda n: (abs(problem.position(stores[n]) - at), n))
        for other in others[:near]:
            offer(other, born)
        born += 1
    return list(stores.values()) if len(stores) <= problem.stores_max else []


# Intervals ----------------------------------------------------------------------------------------------------------


def _intervals(problem: _Problem, report: Progress) -> list[int]:
    """Find the best cut of the atoms, in order of retention, into runs."""
    runs = _runs(problem)
    count = len(runs)
    stores_max = min(problem.stores_max, count)
    values = np.full((count, count + 1), math.inf)
    for i in range(count):
        store = 0
        for j in range(i + 1, count + 1):
            store |= runs[j - 1]
            values[i, j] = problem.cost(store)
            if values[i, j] == math.inf:
                break
        report("intervals", (i + 1) / count)
    best = np.full((stores_max + 1, count + 1), math.inf)
    cut = np.zeros((stores_max + 1, count + 1), np.int64)
    best[0, 0] = 0.0
    for k in range(1, stores_max + 1):
        for j in range(1, count + 1):
            candidates = best[k - 1, :j] + values[:j, j]
            cut[k, j] = int(np.argmin(candidates))
            best[k, j] = candidates[cut[k, j]]
    k, j = int(np.argmin(best[:, count])), count
    if not math.isfinite(best[k, count]):
        return []
    stores = []
    while j:
        i = int(cut[k, j])
        stores.append(_union(runs[i:j]))
        k, j = k - 1, i
    return stores


def _runs(problem: _Problem) -> list[int]:
    """Make at most INTERVAL_ATOMS_MAX runs of neighbours in the order of retention, none of mixed durability."""
    order = sorted(range(len(problem.atoms)), key=lambda a: problem.rank[a])
    length = math.ceil(len(order) / INTERVAL_ATOMS_MAX)
    runs: list[int] = []
    members = 0
    for place, atom in enumerate(order):
        fresh = place == 0 or members == length or problem.group[atom] != problem.group[order[place - 1]]
        if fresh:
            runs.append(0)
            members = 0
        runs[-1] |= 1 << atom
        members += 1
    return runs


# Local search -------------------------------------------------------------------------------------------------------


def _improve(problem: _Problem, stores: list[int], report: Progress) -> list[int]:
    """Move one atom to another or a new store, or join two stores, until nothing gains."""
    stores = sorted(stores)
    rounds = FINE_ROUNDS_MAX if problem.many else ROUNDS_MAX
    for round_ in range(rounds):
        before = problem.total(stores)
        for atom in _movable(problem, len(stores)):
            stores = _move(problem, stores, 1 << atom)
        stores = _joined(problem, stores)
        report("improve", (round_ + 1) / rounds)
        if problem.total(stores) >= before * (1 - _GAIN_MIN):
            break
    report("improve", 1.0)
    return stores


def _movable(problem: _Problem, stores: int) -> list[int]:
    """Choose the atoms to move: all. If they are many it is those that write most, as far as the bound of work goes."""
    if not problem.many:
        return list(range(len(problem.atoms)))
    summary = problem.costs.summary
    rows = len(summary.byte_sum) + len(summary.life_time)
    atom_work = (FINE_TARGETS + 2) * (rows // stores + len(summary.bucket_start))
    return sorted(_heaviest(problem)[: FINE_WORK // atom_work])


def _heaviest(problem: _Problem) -> list[int]:
    """Sort the atoms, those first that write most."""
    totals = problem.costs.summary.totals
    written = [sum(totals[d].bytes for d in mask_members(atom)) for atom in problem.atoms]
    return sorted(range(len(problem.atoms)), key=lambda a: (-written[a], a))


@dataclass(frozen=True, slots=True)
class _Step:
    """One move of an atom, or one join of two stores."""

    arriving: float
    """The cost of the stores that come, beyond those that stay."""
    leaving: float
    """The cost that is saved where something leaves."""
    gone: tuple[int, ...]
    come: tuple[int, ...]

    @property
    def change(self) -> float:
        """Tell what the whole cost changes by."""
        return self.arriving - self.leaving

    def taken(self, stores: Iterable[int]) -> list[int]:
        """Give the stores after this step."""
        return sorted([*(store for store in stores if store not in self.gone), *self.come])


def _move(problem: _Problem, stores: list[int], atom: int) -> list[int]:
    """Take the best move of this atom, if one gains."""
    best = min(_moves(problem, stores, atom, NEIGHBOURS), key=lambda step: step.arriving, default=None)
    return stores if best is None or best.arriving >= best.leaving * (1 - _GAIN_MIN) else best.taken(stores)


def _joined(problem: _Problem, stores: list[int]) -> list[int]:
    """Join pairs while one gains."""
    while step := min(_joins(problem, stores, NEIGHBOURS), key=lambda step: step.change, default=None):
        if step.change >= -_GAIN_MIN * problem.total(stores):
            break
        stores = step.taken(stores)
    return stores


def _moves(problem: _Problem, stores: Sequence[int], atom: int, most: int) -> Iterator[_Step]:
    """Yield the moves of an atom to other stores, the nearest so many, and to one of its own."""
    cost = problem.cost
    home = next(store for store in stores if store & atom)
    rest = home & ~atom
    leaving = cost(home) - (cost(rest) if rest else 0.0)
    others = [store for store in stores if store != home]
    most = FINE_TARGETS if problem.many else most
    for target in problem.nearest(others, problem.position(atom), most) if len(others) > most else others:
        arriving = cost(target | atom) - cost(target)
        if arriving < math.inf:
            yield _Step(arriving, leaving, (home, target), (target | atom, rest) if rest else (target | atom,))
    if rest and len(stores) < problem.stores_max:
        yield _Step(cost(atom), leaving, (home,), (rest, atom))


def _joins(problem: _Problem, stores: Sequence[int], most: int) -> Iterator[_Step]:
    """Yield the joins of two stores that durability allows, of each with at most so many that follow in retention."""
    ordered = sorted(stores, key=lambda store: (problem.position(store), store))
    for i, a in enumerate(ordered):
        for b in ordered[i + 1 : i + 1 + most]:
            arriving = problem.cost(a | b) - problem.cost(a)
            if arriving < math.inf:
                yield _Step(arriving, problem.cost(b), (a, b), (a | b,))


def _with_neighbours(problem: _Problem, best: list[int], keep: int) -> list[Partition]:
    """Give the best and the next best that are one step from it. If atoms and stores are many, some are tried."""
    most = NEIGHBOURS if problem.many else len(best)
    more = [step for atom in _movable(problem, len(best)) for step in _moves(problem, best, 1 << atom, most)]
    more += _joins(problem, best, most)
    # A partitioning may be several steps' (of two atoms together either can leave), and equal ones differ by rounding.
    least = heapq.nsmallest(_ALIKE_STEPS * keep, (step.change for step in more))
    slack = _GAIN_MIN * problem.total(best)
    found: dict[Partition, float] = {}
    for step in more:
        if step.change <= least[-1] + slack:
            stores = step.taken(best)
            found[problem.partition(stores)] = problem.total(stores)
    first = problem.partition(best)
    found.pop(first, None)
    return [first, *heapq.nsmallest(keep - 1, found, key=lambda partition: (found[partition], partition))]


# For each number of stores ------------------------------------------------------------------------------------------


def ladder(costs: Costs, constraints: Constraints, start: Partition, most: int) -> dict[int, Partition]:
    """Find a good partitioning for each number of stores, step by step from `start`.

    Downwards the pair is joined that costs least, upwards, to at most `most` stores, the atom gets a store of its own
    that costs least so; of many the LADDER_ATOMS that write most. Above NEIGHBOURS stores there are no steps downwards.
    """
    problem = _problem(costs, constraints)
    stores = problem.stores(start)
    found = {len(stores): problem.partition(stores)}
    fewer = list(stores)
    while 1 < len(fewer) <= NEIGHBOURS:
        pairs = [(a, b) for i, a in enumerate(fewer) for b in fewer[i + 1 :]]
        change, a, b = min((problem.cost(a | b) - problem.cost(a) - problem.cost(b), a, b) for a, b in pairs)
        if change == math.inf:
            break
        fewer = [store for store in fewer if store not in (a, b)] + [a | b]
        found[len(fewer)] = problem.partition(fewer)
    more = list(stores)
    offered = _union(1 << atom for atom in _heaviest(problem)[:LADDER_ATOMS])
    offered = offered if problem.many else _union(stores)
    while len(more) < most:
        leaving = [
            (problem.cost(store & ~atom) + problem.cost(atom) - problem.cost(store), atom, store)
            for store in more
            for atom in (1 << a for a in mask_members(store & offered))
            if store != atom
        ]
        if not leaving:
            break
        _, atom, store = min(leaving)
        more = [other for other in more if other != store] + [store & ~atom, atom]
        found[len(more)] = problem.partition(more)
    return dict(sorted(found.items()))
