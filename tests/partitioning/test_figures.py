"""What the report's figures say, against the same written plainly, and against the model itself."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from anabranch.policies.advisor import RecommendOptions, generate, recommend
from anabranch.policies.advisor.advice import figures as figures_module
from anabranch.policies.advisor.advice.figures import ALONE, Figures, build_figures
from anabranch.policies.advisor.model.cost_model import CostModel, Partition, Segments, canonical, courses, together
from anabranch.policies.advisor.model.evaluate import SetCosts
from anabranch.policies.advisor.model.history import bars, history
from anabranch.policies.advisor.model.kernel import JournalRules
from anabranch.policies.advisor.model.pins import NOBODY, find_pins, full_times
from anabranch.policies.advisor.search.search import Constraints
from anabranch.policies.advisor.statistics.operations import Operations, build
from anabranch.policies.advisor.statistics.sizes import Model
from anabranch.policies.advisor.statistics.summary import summarise

from .conftest import SEGMENT_BYTES, in_force, measure, shape, simulate

COSTS = CostModel(SEGMENT_BYTES)


def figures_of(
    operations: Operations, partition: Partition, constraints: Constraints | None = None
) -> tuple[Figures, list[str]]:
    names = [f"store{number}" for number in range(len(partition))]
    summary = summarise(operations, SEGMENT_BYTES)
    together = canonical([range(len(operations.destinations))])
    figures = build_figures(
        operations,
        SetCosts(summary, COSTS),
        constraints or Constraints(),
        COSTS,
        {"all-together": (together, ["all"]), "recommended": (partition, names)},
    )
    return figures, names


def plain_pins(
    operations: Operations, partition: Partition, chains: bool
) -> tuple[list[int], dict[tuple[int, int], float]]:
    """Holder of each segment, and byte-seconds by (whose, by whom), one segment and one operation after another."""
    rules = JournalRules.of(operations.sizes, SEGMENT_BYTES, 0, 1)
    segments = simulate(operations, partition, rules)
    finish = float(operations.time[-1])
    full = full_times(segments, finish)
    capacity = operations.sizes.capacity(SEGMENT_BYTES)
    store_of = {d: number for number, members in enumerate(partition) for d in members}
    current: dict[int, int] = {}
    used: dict[int, int] = {}
    where: list[int] = []
    born = 0
    for d, size in zip(operations.destination.tolist(), operations.size.tolist(), strict=True):
        store = store_of[d]
        if store not in current or used[store] + size + rules.room > capacity:
            current[store], used[store], born = born, 0, born + 1
        used[store] += size
        where.append(current[store])
    ends = [min(end, finish) for end in operations.end.tolist()]
    reasons: list[list[tuple[float, int]]] = [[] for _ in range(born)]
    for i, s in enumerate(where):
        reasons[s].append((ends[i], int(operations.destination[i])))
    holders: list[int] = []
    until: list[float] = []
    for s in range(born):
        last = max(max(end for end, _ in reasons[s]), full[s])
        holder = next((d for end, d in reasons[s] if end == last), NOBODY) if last > full[s] else NOBODY
        if chains:
            for i in (i for i, at in enumerate(where) if at == s and operations.send[i] >= 0):
                earlier = where[operations.send[i]]
                if earlier < s and until[earlier] > last:
                    last, holder = until[earlier], holders[earlier]
        holders.append(holder)
        until.append(last)
    assert until == segments.end.tolist()
    kept: dict[tuple[int, int], float] = {}
    for s in range(born):
        for d in {d for _, d in reasons[s]}:
            own = max(end for end, whose in reasons[s] if whose == d)
            size = sum(
                int(operations.size[i]) for i, at in enumerate(where) if at == s and operations.destination[i] == d
            )
            wait = until[s] - max(own, full[s])
            if wait > 0 and holders[s] not in (d, NOBODY):
                kept[d, holders[s]] = kept.get((d, holders[s]), 0.0) + wait * size
    return holders, kept


@pytest.mark.parametrize("model", ["anabranch", "kahadb"])
@pytest.mark.parametrize("name", ["slow-among-fast", "never-acked", "batches"])
def test_who_keeps_a_segment(name: str, model: Model) -> None:
    operations = build(generate(shape(name, "10m")), model=model)
    width = len(operations.destinations)
    for partition in (canonical([range(width)]), canonical([range(0, width, 2), range(1, width, 2)])):
        rules = JournalRules.of(operations.sizes, SEGMENT_BYTES, 0, 1)
        segments, pins = find_pins(operations, partition, rules)
        assert segments.end.tolist() == simulate(operations, partition, rules).end.tolist()
        holders, kept = plain_pins(operations, partition, model == "kahadb")
        assert pins.holder.tolist() == holders
        assert pins.kept.keys() == kept.keys()
        for key, value in kept.items():
            assert pins.kept[key] == pytest.approx(value)
        held = pins.held(segments, float(operations.time[-1]))
        assert sum(files for files, _ in held.values()) == sum(holder != NOBODY for holder in holders)


@pytest.mark.parametrize("percent", [50, 0])
def test_what_is_on_disk_over_time(percent: int) -> None:
    """By column the fullest moment of all stores together, and what each of them holds then."""
    operations = build(generate(shape("batches")))
    rules = CostModel(SEGMENT_BYTES, live_percent=percent).rules(operations.sizes)
    found = courses(operations, ((0, 3), (1, 2), (4,)), rules)
    begin, finish = float(operations.time[0]), float(operations.time[-1])
    drawn = history(found, begin, finish, ahead_bytes=10, columns=17)
    changes = sorted(
        (at, time, number, level)
        for number, one in enumerate(found)
        for at, time, level in zip(
            one.course.changes.tolist(), one.time.tolist(), one.course.level.tolist(), strict=True
        )
    )
    levels: list[tuple[float, tuple[int, ...]]] = [(begin, (0, 0, 0))]
    for _, time, number, level in changes:
        levels.append((time, tuple(level if b == number else old for b, old in enumerate(levels[-1][1]))))
    for column in range(17):
        low, high = drawn.edges[column], drawn.edges[column + 1]
        before = [now for time, now in levels if time < low][-1:]
        inside = before + [now for time, now in levels if low <= time < high or (column == 16 and time == high)]
        assert drawn.total[column] == 3 * 10 + max(map(sum, inside))
        assert tuple((drawn.held[:, column] - 10).tolist()) in inside
    assert drawn.total.max() == 3 * 10 + together(found)[0]


def test_bars_are_all_or_an_even_sample() -> None:
    start = np.arange(1000.0)
    segments = Segments((np.arange(1000) % 3).astype(np.int32), start, start + 5, 10)
    holder = np.full(1000, NOBODY, np.int32)
    drawn = bars(segments, holder, 1004.0, most=100)
    assert len(drawn.start) == 100
    assert drawn.of == 1000
    assert [(drawn.store == number).sum() for number in range(3)] == pytest.approx([33, 33, 33], abs=1)
    assert (drawn.full - drawn.start == 3.0).sum() >= 97, "but for the last of each store"
    assert len(bars(segments, holder, 1004.0, most=1000).start) == 1000


@pytest.mark.parametrize("clock", ["ts", "seq"])
def test_what_else_could_be_is_what_the_model_says(clock: str) -> None:
    operations = build(generate(shape("transactions")), clock=clock)  # type: ignore[arg-type]
    partition = canonical([[0, 1], [2, 3], [4]])
    figures, names = figures_of(operations, partition)
    now = measure(operations, partition, COSTS).cost
    assert dict(figures.by_stores)[3] == pytest.approx(now)
    together = canonical([range(5)])
    assert dict(figures.by_stores)[1] == pytest.approx(measure(operations, together, COSTS).cost)
    assert dict(figures.by_stores)[5] == pytest.approx(
        measure(operations, canonical([[d] for d in range(5)]), COSTS).cost
    )
    for number, store in enumerate(figures.stores):
        assert store.nearest is not None
        other = names.index(store.nearest)
        joined = [members for b, members in enumerate(partition) if b not in (number, other)]
        joined.append(partition[number] + partition[other])
        assert store.merged_cost == pytest.approx(measure(operations, canonical(joined), COSTS).cost)
        members = np.isin(operations.destination, partition[number]) & (operations.send < 0)
        stays = np.sort((operations.end - operations.time)[members])
        assert store.sends == len(stays)
        assert store.retention_p50 == stays[math.ceil(0.5 * len(stays)) - 1]
        assert store.retention_p95 == stays[math.ceil(0.95 * len(stays)) - 1]
    for one in figures.listed:
        d = operations.destinations.index(one.name)
        stores = [[m for m in members if m != d] for members in partition]
        if one.target == ALONE:
            stores.append([d])
        else:
            assert one.target is not None
            stores[names.index(one.target)].append(d)
        after = measure(operations, canonical(stores), COSTS).cost
        assert one.move_cost == pytest.approx(after - now)


def test_rules_are_kept_by_what_else_could_be() -> None:
    operations = build(generate(shape("transactions")))
    partition = canonical([[0, 1], [2, 3], [4]])
    figures, _ = figures_of(operations, partition, Constraints((0, 0, 1, 1, 1), ((0, 1),), 3))
    told = {one.name: one for one in figures.listed}
    assert [told[operations.destinations[d]].target for d in (0, 1)] == [None, None]
    assert [told[operations.destinations[d]].target for d in (2, 3, 4)] == ["store2", "store2", "store1"]
    assert figures.stores[0].nearest is None
    assert [figures.stores[b].nearest for b in (1, 2)] == ["store2", "store1"]
    assert min(count for count, _ in figures.by_stores) == 2


def test_a_large_trace_is_not_simulated_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    operations = build(generate(shape("transactions")))
    monkeypatch.setattr(figures_module, "SIMULATED_OPERATIONS_MAX", 0)
    figures, _ = figures_of(operations, canonical([[0, 1], [2, 3], [4]]))
    assert [store.merged_cost for store in figures.stores] == [None] * 3
    assert {one.move_cost for one in figures.listed} == {None}
    assert figures.by_stores == ()


def test_the_toy_maker(toymaker: pa.Table) -> None:
    options = RecommendOptions(model="kahadb", segment_bytes=512 << 10, clock="seq", engine="local")
    answer = recommend(toymaker, options)
    figures = answer.figures
    assert figures is not None
    before, after = figures.pictures
    assert (before.candidate, after.candidate) == ("all-together", "recommended")
    # The peak of KahaDB counts only what lasts; a picture shows every moment.
    assert before.history.total.max() >= answer.candidate("all-together").peak_bytes
    assert before.bars is not None
    assert before.bars.of == 51
    worst = figures.listed[0]
    assert worst.name in ("queue://dlq", "queue://orders.custom")
    assert worst.kept[0].file_bytes > 10 * max(worst.kept[0].by_others, 1)
    assert min(figures.by_stores, key=lambda entry: entry[1])[0] == len(answer.recommended.stores)
    assert dict(figures.by_stores)[len(answer.recommended.stores)] == pytest.approx(answer.recommended.cost)
    current = recommend(toymaker, replace(options, current=in_force({"a": ["orders.custom"], "b": [">"]})))
    assert current.figures is not None
    assert [picture.candidate for picture in current.figures.pictures] in (["current", "recommended"], ["recommended"])
