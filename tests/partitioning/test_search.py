"""The search against the exhaustive optimum, and the summary against the exact model."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from anabranch.policies.advisor import RecommendOptions, Workload, generate, recommend
from anabranch.policies.advisor.job import WORTH
from anabranch.policies.advisor.model.cost_model import CostModel, Partition
from anabranch.policies.advisor.model.evaluate import SetCosts, mask_members
from anabranch.policies.advisor.search.alike import cells
from anabranch.policies.advisor.search.confirm import ExactCosts
from anabranch.policies.advisor.search.search import Constraints, keeps, ladder, search
from anabranch.policies.advisor.statistics.operations import build
from anabranch.policies.advisor.statistics.sizes import MODELS, Model
from anabranch.policies.advisor.statistics.summary import Summary, retention_quantile, summarise
from anabranch.policies.errors import ConfigError

from .conftest import SEGMENT_BYTES, measure, shape

COSTS = CostModel(segment_bytes=SEGMENT_BYTES, sync_rate=50_000.0)


def partitions(width: int) -> Iterator[list[int]]:
    """Every way to group `width` destinations, as masks."""

    def extend(stores: list[int], at: int) -> Iterator[list[int]]:
        if at == width:
            yield stores
            return
        for i in range(len(stores)):
            yield from extend([*stores[:i], stores[i] | 1 << at, *stores[i + 1 :]], at + 1)
        yield from extend([*stores, 1 << at], at + 1)

    return extend([], 0)


def assert_good(table: pa.Table, model: Model) -> None:
    """What costs least was found, and is recommended, unless it saves too little for that."""
    operations = build(table, model=model)
    exact = ExactCosts(summarise(operations, SEGMENT_BYTES), operations, COSTS)
    optimum = min(sum(exact.cost(store) for store in stores) for stores in partitions(len(operations.destinations)))
    options = RecommendOptions(model=model, segment_bytes=SEGMENT_BYTES, sync_rate=50_000.0, engine="local")
    answer = recommend(table, options)
    assert min(candidate.cost for candidate in answer.candidates) <= optimum * 1.005
    together, apart = answer.candidate("all-together"), answer.candidate("all-separate")
    if answer.recommended.stores == together.stores:
        assert together.cost * (1 - WORTH) <= min(optimum, apart.cost)
    else:
        assert answer.recommended.cost <= min(optimum * 1.005, together.cost, apart.cost)


@pytest.mark.parametrize("model", ["anabranch", "kahadb"])
def test_within_half_a_percent_of_the_optimum(shaped: tuple[str, pa.Table], model: Model) -> None:
    """On the six shapes."""
    assert_good(shaped[1], model)


def random_workload(seed: int) -> Workload:
    """Up to 8 destinations of any habits."""
    random = np.random.default_rng(seed)
    lines = [f"name: random\nseed: {seed}\nduration: 30m\ndestinations:"]
    count = int(random.integers(2, 9))
    for i in range(count):
        lag = float(np.exp(random.uniform(0, 7)))
        never = random.choice([0, 0, 0.01, 1])
        size = int(np.exp(random.uniform(4, 8)))
        rate = float(random.uniform(0.05, 1.0))
        lines.append(
            f"  - {{name: queue://q{i}, arrival: {{poisson: {rate}}}, size: {{mean: {size}}}, "
            f"consumer: {{lag: {{mean: {lag}}}, never: {never}}}}}"
        )
    if count > 2:
        lines.append("transactions:\n  - {name: t, sends: [queue://q0, queue://q1], arrival: {poisson: 0.2}}")
    return Workload.parse("\n".join(lines))


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[pytest.mark.campaign] if seed >= 6 else []) for seed in range(12)]
)
def test_within_half_a_percent_on_random_workloads(seed: int) -> None:
    """On random ones."""
    assert_good(generate(random_workload(seed)), MODELS[seed % 2])


@pytest.mark.parametrize("model", ["anabranch", "kahadb"])
def test_the_summary_agrees_with_the_exact_model(shaped: tuple[str, pa.Table], model: str) -> None:
    _, table = shaped
    operations = build(table, model=model)  # type: ignore[arg-type]
    sets = SetCosts(summarise(operations, SEGMENT_BYTES), COSTS)
    errors, copied = [], []
    for mask in range(1, 1 << len(operations.destinations)):
        found = measure(operations, (tuple(mask_members(mask)),), COSTS)
        errors.append(abs(sets.retained(mask) / found.gib_hours - 1))
        copied.append(abs(sets.copied(mask) - found.copied_bytes) / found.written_bytes)
    # An hour is some hundred segments at most, and one message may keep one of them: coarser than a real trace.
    assert np.mean(errors) < 0.04
    assert max(errors) < 0.16
    assert np.mean(copied) < 0.03
    assert max(copied) < 0.12


@pytest.mark.parametrize(("model", "mean", "most"), [("kahadb", 0.0024, 0.025), ("anabranch", 0.03, 0.12)])
def test_the_summary_is_close_where_segments_are_many(model: Model, mean: float, most: float) -> None:
    operations = build(generate(shape("slow-among-fast", "10h")), model=model)
    sets = SetCosts(summarise(operations, SEGMENT_BYTES), COSTS)
    errors = []
    for mask in range(1, 1 << len(operations.destinations)):
        exact = measure(operations, (tuple(mask_members(mask)),), COSTS).gib_hours
        errors.append(abs(sets.retained(mask) / exact - 1))
    assert np.mean(errors) < mean
    assert max(errors) < most


class TableCosts:
    """Costs that are looked up, not modelled."""

    def __init__(self, summary: Summary, seed: int) -> None:
        self.summary = summary
        self._seed = seed

    def cost(self, mask: int, /) -> float:
        members = mask_members(mask)
        at = np.random.default_rng(self._seed).uniform(0, 10, 64)[members]
        jitter = np.random.default_rng([self._seed, mask]).uniform(0, 0.3)
        return float(1.0 + (at.max() - at.min()) * len(members) + jitter)


def summary_of(destinations: int, rate: float) -> Summary:
    """Of so many destinations, of thirty speeds."""
    loads = "\n".join(
        f"  - {{name: queue://q{i:02}, arrival: {{poisson: {rate}}}, size: 500, "
        f"consumer: {{lag: {{mean: {1.35 ** (i * 7 % 30)}}}}}}}"
        for i in range(destinations)
    )
    return summarise(build(generate(Workload.parse(f"duration: 30m\ndestinations:\n{loads}"))), SEGMENT_BYTES)


@pytest.fixture(scope="module")
def summary() -> Summary:
    """Of 30 destinations of all speeds."""
    return summary_of(30, 0.2)


def total(costs: SetCosts | TableCosts, partition: Partition) -> float:
    return sum(costs.cost(sum(1 << d for d in store)) for store in partition)


def part(summary: Summary, count: int) -> Summary:
    """The summary cut down to its first destinations."""
    return replace(summary, destinations=summary.destinations[:count])


@pytest.mark.parametrize("seed", range(5))
def test_subset_programming_finds_the_optimum_of_any_costs(summary: Summary, seed: int) -> None:
    costs = TableCosts(part(summary, 7), seed)
    best = min(sum(costs.cost(store) for store in stores) for stores in partitions(7))
    found = search(costs)
    assert total(costs, found[0]) == pytest.approx(best)
    totals = [total(costs, partition) for partition in found]
    assert totals == sorted(totals)
    assert len(set(found)) == 3


def test_many_destinations(summary: Summary) -> None:
    """Every destination is in one store; nothing that a single step could improve is left."""
    costs = SetCosts(summary, COSTS)
    best = search(costs)[0]
    assert sorted(itertools.chain(*best)) == list(range(30))
    assert total(costs, best) < total(costs, (tuple(range(30)),))
    assert total(costs, best) < total(costs, tuple((d,) for d in range(30)))
    for destination in range(30):
        home = next(store for store in best if destination in store)
        rest = tuple(d for d in home if d != destination)
        for target in [store for store in best if store != home]:
            moved = [store for store in best if store not in (home, target)]
            moved += [tuple(sorted((*target, destination)))] + ([rest] if rest else [])
            assert total(costs, tuple(moved)) >= total(costs, best) * (1 - 1e-8)


def test_heuristics_come_close_to_the_optimum(summary: Summary, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compaction makes many divisions nearly alike, so that a search step by step may end earlier."""
    for percent, most in ((0, 1.005), (50, 1.02)):
        costs = SetCosts(part(summary, 10), replace(COSTS, live_percent=percent))
        monkeypatch.setattr("anabranch.policies.advisor.search.search.EXACT_ATOMS_MAX", 12)
        exact = total(costs, search(costs)[0])
        monkeypatch.setattr("anabranch.policies.advisor.search.search.EXACT_ATOMS_MAX", 0)
        assert total(costs, search(costs)[0]) <= exact * most


@pytest.mark.parametrize("count", [8, 30])
def test_constraints_are_kept(summary: Summary, count: int) -> None:
    costs = SetCosts(part(summary, count), COSTS)
    durability = tuple(d % 2 for d in range(count))
    for partition in search(costs, Constraints(durability, ((0, 4), (4, 6)), stores_max=3)):
        assert len(partition) <= 3
        assert all(len({durability[d] for d in store}) == 1 for store in partition)
        assert any({0, 4, 6} <= set(store) for store in partition)


def test_constraints_that_contradict_each_other(summary: Summary) -> None:
    costs = SetCosts(part(summary, 4), COSTS)
    with pytest.raises(ConfigError, match="pinned together but differ"):
        search(costs, Constraints((0, 1, 0, 1), ((0, 1),)))
    with pytest.raises(ConfigError, match="2 durabilities need a store each"):
        search(costs, Constraints((0, 1, 0, 1), stores_max=1))


@pytest.fixture(scope="module")
def crowd() -> Summary:
    """Of 60 destinations: thirty habits, each of two destinations."""
    return summary_of(60, 0.1)


def test_more_destinations_than_are_searched_one_by_one(crowd: Summary, monkeypatch: pytest.MonkeyPatch) -> None:
    """What behaves alike is grouped first: as good within two percent, and the same each time."""
    whole = search(SetCosts(crowd, COSTS))[0]
    monkeypatch.setattr("anabranch.policies.advisor.search.search.CELLS_MAX", 30)
    costs = SetCosts(crowd, COSTS)
    grouped = search(costs)
    assert all(sorted(itertools.chain(*partition)) == list(range(60)) for partition in grouped)
    assert total(costs, grouped[0]) <= total(costs, whole) * 1.02
    assert len(set(grouped)) == 3
    assert search(SetCosts(crowd, COSTS)) == grouped


def test_a_large_summary_bounds_how_many_are_moved_one_by_one(crowd: Summary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anabranch.policies.advisor.search.search.CELLS_MAX", 30)
    costs = SetCosts(crowd, COSTS)
    search(costs)
    monkeypatch.setattr("anabranch.policies.advisor.search.search.FINE_WORK", 0)
    bounded = SetCosts(crowd, COSTS)
    found = search(bounded)
    assert sorted(itertools.chain(*found[0])) == list(range(60))
    assert bounded.evaluated < costs.evaluated


def test_constraints_are_kept_where_what_behaves_alike_is_grouped(
    crowd: Summary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anabranch.policies.advisor.search.search.CELLS_MAX", 20)
    constraints = Constraints(tuple(d % 2 for d in range(60)), ((0, 4), (4, 6)), stores_max=3)
    for partition in search(SetCosts(crowd, COSTS), constraints):
        assert keeps(partition, constraints)


def test_each_durability_has_a_cell_however_many_there_are(crowd: Summary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anabranch.policies.advisor.search.search.CELLS_MAX", 20)
    constraints = Constraints(tuple(d // 2 for d in range(60)))
    assert all(keeps(partition, constraints) for partition in search(SetCosts(crowd, COSTS), constraints))


def test_a_ladder_of_many_puts_apart_what_writes_most(crowd: Summary, monkeypatch: pytest.MonkeyPatch) -> None:
    constraints = Constraints(pinned=((0, 4), (4, 6)))
    costs, few = SetCosts(crowd, COSTS), SetCosts(crowd, COSTS)
    start = search(SetCosts(crowd, COSTS), constraints)[0]
    most = len(start) + 4
    whole = ladder(costs, constraints, start, most)
    monkeypatch.setattr("anabranch.policies.advisor.search.search.CELLS_MAX", 20)
    monkeypatch.setattr("anabranch.policies.advisor.search.search.LADDER_ATOMS", 6)
    steps = ladder(few, constraints, start, most)
    assert max(steps) == max(whole) == most
    assert steps[len(start)] == start
    assert few.evaluated < costs.evaluated
    heaviest = sorted(range(60), key=lambda d: -crowd.totals[d].bytes)[:8]
    for count in range(len(start) + 1, most + 1):
        assert keeps(steps[count], constraints)
        alone = min(set(steps[count]) - set(steps[count - 1]), key=len)
        assert alone == (0, 4, 6) or set(alone) <= set(heaviest)


def test_cells_hold_what_behaves_alike(crowd: Summary) -> None:
    """Of two lags that are far apart no cell holds both; groups are apart; no cell is empty."""
    atoms, group = [[d] for d in range(60)], [d % 2 for d in range(60)]
    found = cells(crowd, atoms, group, 12)
    assert len(found) == 12
    assert sorted(itertools.chain(*found)) == list(range(60))
    assert all(len({group[d] for d in cell}) == 1 for cell in found)
    stays = [[retention_quantile(crowd, d) for d in cell] for cell in found]
    assert not any(min(cell) < 20 and max(cell) > 600 for cell in stays)
    alike = replace(crowd, byte_rows=crowd.byte_rows * 0, life_rows=crowd.life_rows * 0, totals=crowd.totals[:1] * 60)
    assert cells(alike, atoms, [0] * 60, 12) == [list(range(60))]


def test_one_destination(summary: Summary) -> None:
    assert search(SetCosts(part(summary, 1), COSTS)) == (((0,),),)


def test_the_same_answer_each_time(summary: Summary) -> None:
    assert search(SetCosts(summary, COSTS)) == search(SetCosts(summary, COSTS))


def test_retention_quantiles_rise_with_the_lag() -> None:
    loads = "\n".join(
        f"  - {{name: queue://q{i}, arrival: {{rate: 1}}, size: 500, consumer: {{lag: {lag}}}}}"
        for i, lag in enumerate((1, 30, 300))
    )
    table = generate(Workload.parse(f"duration: 2h\ndestinations:\n{loads}"))
    found = summarise(build(table), SEGMENT_BYTES)
    assert [retention_quantile(found, d) for d in range(3)] == pytest.approx([1, 30, 300], abs=12)
