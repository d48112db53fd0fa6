"""The figures that the report shows beside the candidates: stores, destinations, holders of files, pictures.

Every figure comes from the exact model. The summary only chooses what is worth working out: with which store another
would be joined, where a destination would move, which partitioning to show for each number of stores. A figure that
would take too long on a large trace is None, and the report says so. If there are many destinations, those are shown
that matter most.

`build_figures` makes them of operations in memory. A caller that has the stores' courses alone (`model.TimedCourse`)
gives what follows from them, a `Picture` without bars, and leaves `stores`, `listed` and `by_stores` empty: the report
then shows what there is, and says what there is not. A store that compacts keeps no file for one message: nothing is
said of who keeps whose files then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

import numpy as np

from ..model.cost_model import CostModel, Partition, TimedCourse, courses
from ..model.engine import Engine
from ..model.evaluate import SetCosts, mask_members
from ..model.history import Bars, History, bars, history
from ..model.pins import find_pins
from ..search.confirm import ExactCosts
from ..search.search import Constraints, ladder
from ..statistics.operations import Operations
from ..trace.arrays import Floats

SIMULATED_OPERATIONS_MAX = 200_000_000
"""Operations that may be simulated for figures of what else could be: some seconds."""
DESTINATIONS_MAX = 200
"""Destinations that are told of one by one."""
STEPS_MAX = 24
"""Numbers of stores above the recommended one that are tried."""
NEAR = 24
"""Above so many stores only these, near in retention, are candidates to be joined with or moved to."""
HOLDERS_SHOWN = 3
ALONE = ""
"""Where a destination would move to: a store of its own."""


@dataclass(frozen=True, slots=True)
class StoreFigures:
    """One recommended store. J is the whole partitioning's, in GiB-hours."""

    name: str
    sends: int
    bytes: int
    """The bytes of messages and acks written."""
    pending: int
    retention_p50: float
    """Seconds from a send to its last ack that half of the messages stay within; infinite where they are pending."""
    retention_p95: float
    nearest: str | None
    """The store with which it would be joined at least cost; None where there is none that it may be joined with."""
    merged_cost: float | None
    """J if it were; None also where the trace is too large to try."""


@dataclass(frozen=True, slots=True)
class Kept:
    """One destination under one partitioning. Bytes are means over the trace's time."""

    by_others: float
    """The bytes of its own in full files that it needs no more."""
    others: tuple[tuple[str, float], ...]
    """The destinations that keep most of them, and how much each keeps."""
    files: int
    """The files that it keeps: it is the last to let them go."""
    file_bytes: float
    """The disk that those files take after they were full."""


@dataclass(frozen=True, slots=True)
class DestinationFigures:
    """One destination."""

    name: str
    store: str
    sends: int
    bytes: int
    pending: int
    kept: tuple[Kept, ...]
    """Under each partitioning of `Figures.pictures`; empty where stores compact."""
    target: str | None
    """The store where moving it would cost least; ALONE for one of its own; None where it may not move."""
    move_cost: float | None
    """The cost that J grows by if it moves there, in GiB-hours; None also where the trace is too large to try."""


@dataclass(frozen=True, slots=True)
class Picture:
    """One candidate over time."""

    candidate: str
    stores: tuple[str, ...]
    history: History
    bars: Bars | None
    """None where stores compact, and where it is not known who keeps a segment."""


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures that the report shows. Times are seconds on the trace's clock."""

    begin: float
    finish: float
    destinations: tuple[str, ...]
    """All names, which `Bars.holder` is a number into."""
    pictures: tuple[Picture, ...]
    """The candidate that it is compared with, and the recommended one; that alone where they are the same."""
    stores: tuple[StoreFigures, ...] = ()
    listed: tuple[DestinationFigures, ...] = ()
    """At most DESTINATIONS_MAX of the destinations, those first that keep most of what is compared with it, or that
    write most, where stores compact."""
    by_stores: tuple[tuple[int, float], ...] = ()
    """J by number of stores, as far as it was tried."""


class _Limited:
    """Exact costs of as many sets as may be simulated, then none."""

    def __init__(self, exact: ExactCosts) -> None:
        self._exact = exact
        self._known: dict[int, float] = {}
        self._left = SIMULATED_OPERATIONS_MAX

    def cost(self, mask: int) -> float | None:
        if mask not in self._known:
            if self._left <= 0:
                return None
            self._left -= sum(self._exact.operations.totals[d].operations for d in mask_members(mask))
            self._known[mask] = self._exact.cost(mask)
        return self._known[mask]

    def total(self, masks: Sequence[int]) -> float | None:
        """Add up the costs of all; None where one of them is."""
        costs = [self.cost(mask) for mask in masks]
        return None if None in costs else float(sum(cost for cost in costs if cost is not None))


def build_figures(
    operations: Operations,
    set_costs: SetCosts,
    constraints: Constraints,
    costs: CostModel,
    partitions: Mapping[str, tuple[Partition, Sequence[str]]],
) -> Figures:
    """Work out the figures of the recommended partitioning and of what it is compared with. `partitions`: stores and
    their names, by name, the recommended one last."""
    partition, names = list(partitions.values())[-1]
    limited = _Limited(ExactCosts(set_costs.summary, operations, costs))
    masks = [_mask(members) for members in partition]
    pictures, kept = _pictures(operations, costs, partitions)
    stays = _stays(operations, partition)
    near = _by_retention(stays)
    stores = _stores(operations, set_costs, constraints, limited, partition, names, stays)
    weights = [_weight(kept, d) if kept else operations.totals[d].bytes for d in range(len(operations.destinations))]
    listed = sorted(range(len(weights)), key=lambda d: (-weights[d], operations.destinations[d]))[:DESTINATIONS_MAX]
    home = {d: number for number, members in enumerate(partition) for d in members}
    moves = {d: _move(set_costs, constraints, limited, masks, near, home[d], d) for d in listed}
    return Figures(
        begin=float(operations.time[0]),
        finish=float(operations.time[-1]),
        destinations=operations.destinations,
        stores=stores,
        listed=tuple(
            DestinationFigures(
                name=operations.destinations[d],
                store=names[home[d]],
                sends=operations.totals[d].sends,
                bytes=operations.totals[d].bytes,
                pending=operations.totals[d].pending,
                kept=tuple(one[d] for one in kept),
                target=None if (target := moves[d].store) is None else ALONE if target < 0 else names[target],
                move_cost=moves[d].cost,
            )
            for d in listed
        ),
        pictures=pictures,
        by_stores=_by_stores(set_costs, constraints, limited, partition),
    )


def figures_of_courses(
    engine: Engine, found: Sequence[Sequence[TimedCourse]], costs: CostModel, names: Mapping[str, Sequence[str]]
) -> Figures:
    """Work out what can be told where the trace is not in this process: the pictures over time. `names`: of the stores
    of each partitioning whose courses these are."""
    ahead = engine.sizes.sizes.segments_ahead * costs.segment_bytes
    pictures = [
        Picture(name, tuple(stores), history(one, engine.begin, engine.finish, ahead_bytes=ahead), None)
        for (name, stores), one in zip(names.items(), found, strict=True)
    ]
    return Figures(begin=engine.begin, finish=engine.finish, destinations=engine.destinations, pictures=tuple(pictures))


def _mask(members: Sequence[int]) -> int:
    return sum(1 << d for d in members)


def _weight(kept: Sequence[Mapping[int, Kept]], destination: int) -> float:
    return sum(one[destination].file_bytes + one[destination].by_others for one in kept)


# Over time ----------------------------------------------------------------------------------------------------------


def _pictures(
    operations: Operations, costs: CostModel, partitions: Mapping[str, tuple[Partition, Sequence[str]]]
) -> tuple[tuple[Picture, ...], list[dict[int, Kept]]]:
    begin, finish = float(operations.time[0]), float(operations.time[-1])
    ahead = operations.sizes.sizes.segments_ahead * costs.segment_bytes
    rules = costs.rules(operations.sizes)
    pictures, kept = [], []
    for name, (partition, stores) in partitions.items():
        found = courses(operations, partition, rules)
        over_time, drawn = history(found, begin, finish, ahead_bytes=ahead), None
        if not costs.compacts(operations.sizes.model) and operations.use is None:  # else a store has several journals
            segments, pins = find_pins(operations, partition, rules)
            drawn = bars(segments, pins.holder, finish)
            kept.append(_kept(operations, pins.kept, pins.held(segments, finish), finish - begin))
        pictures.append(Picture(name, tuple(stores), over_time, drawn))
    return tuple(pictures), kept


def _kept(
    operations: Operations,
    shares: Mapping[tuple[int, int], float],
    held: Mapping[int, tuple[int, float]],
    seconds: float,
) -> dict[int, Kept]:
    by: dict[int, list[tuple[float, int]]] = {}
    for (whose, holder), byte_seconds in shares.items():
        by.setdefault(whose, []).append((byte_seconds / seconds, holder))
    result = {}
    for d in range(len(operations.destinations)):
        holders = sorted(by.get(d, ()), key=lambda entry: (-entry[0], entry[1]))
        files, file_seconds = held.get(d, (0, 0.0))
        result[d] = Kept(
            by_others=sum(amount for amount, _ in holders),
            others=tuple((operations.destinations[k], amount) for amount, k in holders[:HOLDERS_SHOWN]),
            files=files,
            file_bytes=file_seconds / seconds,
        )
    return result


# Stores -------------------------------------------------------------------------------------------------------------


def _stores(
    operations: Operations,
    set_costs: SetCosts,
    constraints: Constraints,
    limited: _Limited,
    partition: Partition,
    names: Sequence[str],
    stays: Sequence[tuple[Floats, int]],
) -> tuple[StoreFigures, ...]:
    totals = operations.totals
    masks = [_mask(members) for members in partition]
    order = _by_retention(stays)
    whole = limited.total(masks)
    result = []
    for b, members in enumerate(partition):
        near = [c for c in _near(order, b) if c != b and _may_join(constraints, partition[c][0], members[0])]
        nearest, merged = None, None
        if near:
            nearest = min(near, key=lambda c: (set_costs.cost(masks[b] | masks[c]) - set_costs.cost(masks[c]), c))
            joined = limited.total([masks[b] | masks[nearest]])
            apart = limited.total([masks[b], masks[nearest]])
            if whole is not None and joined is not None and apart is not None:
                merged = whole - apart + joined
        result.append(
            StoreFigures(
                name=names[b],
                sends=sum(totals[d].sends for d in members),
                bytes=sum(totals[d].bytes for d in members),
                pending=sum(totals[d].pending for d in members),
                retention_p50=_quantile(*stays[b], 0.5),
                retention_p95=_quantile(*stays[b], 0.95),
                nearest=None if nearest is None else names[nearest],
                merged_cost=merged,
            )
        )
    return tuple(result)


def _stays(operations: Operations, partition: Partition) -> list[tuple[Floats, int]]:
    """Find how long each store's messages stayed that stayed at all, ascending, and count all of them."""
    stayed = np.flatnonzero((operations.send < 0) & (operations.end > operations.time))
    length = operations.end[stayed] - operations.time[stayed]
    whose = operations.destination[stayed]
    store_of = np.full(len(operations.destinations), -1, np.int32)
    for number, members in enumerate(partition):
        store_of[list(members)] = number
    store = store_of[whose]
    order = np.lexsort((length, store))
    bounds = np.searchsorted(store[order], np.arange(len(partition) + 1))
    return [
        (length[order[bounds[b] : bounds[b + 1]]], sum(operations.totals[d].sends for d in members))
        for b, members in enumerate(partition)
    ]


def _quantile(stayed: Floats, messages: int, share: float) -> float:
    """Return the time that this share of the messages stays within; those not among `stayed` stay no time."""
    if not messages:
        return 0.0
    at = ceil(share * messages) - 1 - (messages - len(stayed))
    return float(stayed[at]) if at >= 0 else 0.0


def _by_retention(stays: Sequence[tuple[Floats, int]]) -> list[int]:
    """Sort the stores by their 95 % quantile."""
    return sorted(range(len(stays)), key=lambda b: (_quantile(*stays[b], 0.95), b))


def _near(order: Sequence[int], store: int) -> Sequence[int]:
    """Return the stores that are near in retention, itself among them: all, where there are few."""
    if len(order) <= NEAR:
        return order
    first = min(max(order.index(store) - NEAR // 2, 0), len(order) - NEAR)
    return order[first : first + NEAR]


def _may_join(constraints: Constraints, a: int, b: int) -> bool:
    return not constraints.durability or constraints.durability[a] == constraints.durability[b]


# What else could be -------------------------------------------------------------------------------------------------


class _Move(NamedTuple):
    store: int | None = None
    """The store where it would go, -1 for a store of its own; None: nowhere."""
    cost: float | None = None


def _move(
    set_costs: SetCosts,
    constraints: Constraints,
    limited: _Limited,
    masks: Sequence[int],
    order: Sequence[int],
    home: int,
    destination: int,
) -> _Move:
    """Find where moving this destination costs least. `order`: the stores by retention."""
    if any(destination in group and len(group) > 1 for group in constraints.pinned):
        return _Move()
    own = 1 << destination
    rest = masks[home] & ~own
    others = [b for b in _near(order, home) if b != home and _may_join(constraints, _first(masks[b]), destination)]
    offers = [(set_costs.cost(masks[b] | own) - set_costs.cost(masks[b]), b) for b in others]
    if rest and (constraints.stores_max is None or len(masks) < constraints.stores_max):
        offers.append((set_costs.cost(own), -1))
    if not offers:
        return _Move()
    _, target = min(offers)
    joined = own if target < 0 else masks[target] | own
    after = limited.total([joined, *([rest] if rest else [])])
    before = limited.total([masks[home], *([] if target < 0 else [masks[target]])])
    return _Move(target, None if after is None or before is None else after - before)


def _first(mask: int) -> int:
    return (mask & -mask).bit_length() - 1


def _by_stores(
    set_costs: SetCosts, constraints: Constraints, limited: _Limited, partition: Partition
) -> tuple[tuple[int, float], ...]:
    steps = ladder(set_costs, constraints, partition, len(partition) + STEPS_MAX)
    # From the recommended number outwards, so that a large trace shows at least what lies next to it.
    found = []
    for count in sorted(steps, key=lambda count: (abs(count - len(partition)), count)):
        total = limited.total([_mask(members) for members in steps[count]])
        if total is None:
            break
        found.append((count, total))
    return tuple(sorted(found))
