"""The kernel: as the slow models say, whichever way it is fed."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from anabranch.policies.advisor.model.kernel import JournalRules, StoreCourse, store_journal
from anabranch.policies.advisor.trace.arrays import NEVER_POSITION

from . import reference

Arrays = tuple[npt.NDArray[np.int64], ...]
RULES = JournalRules(8192, 7680, live_percent=50, min_segments=2, messages_max=12)


def operations(seed: int, count: int) -> Arrays:
    """Positions, sizes, partners and ends: messages that go soon, late and never, those that several acks end, sends of
    one id, acks of nothing and acks that stand before their send."""
    chance = random.Random(seed)
    places = sorted(chance.sample(range(3 * count), count))
    size, partner, ends = ([0] * count for _ in range(3))
    free = list(range(count))
    slow = chance.choice([0.02, 0.2, 0.6])
    for row in range(count):
        partner[row] = -1
    taken: set[int] = set()
    for row in free:
        if row in taken:
            size[row] = chance.choice([68, 68, 75])
            continue
        size[row] = 88 + chance.choice([0, 10, 300, 900, 5000 if chance.random() < 0.05 else 40])
        kind = chance.random()
        if kind < 0.03:
            ends[row] = NEVER_POSITION
            continue
        if kind < 0.06:  # acked before, or needs no ack
            ends[row] = places[row]
            continue
        reach = count // 2 if chance.random() < slow else 12
        behind = [at for at in range(row + 1, min(row + reach, count)) if at not in taken]
        if not behind:
            ends[row] = NEVER_POSITION
            continue
        acks = sorted(chance.sample(behind, min(len(behind), chance.choice([1, 1, 1, 2]))))
        taken.update(acks)
        ends[row] = places[acks[-1]]
        for ack in acks:
            partner[ack] = places[row]
        if chance.random() < 0.05 and row + 1 not in taken and row + 1 < acks[0]:  # the same id once more
            taken.add(row + 1)
            size[row + 1], ends[row + 1] = 120, places[acks[-1]]
    return tuple(np.array(column, np.int64) for column in (places, size, partner, ends))


def fed(rules: JournalRules, rows: Arrays, pieces: int = 1) -> StoreCourse:
    journal = store_journal(rules)
    for piece in np.array_split(np.arange(len(rows[0])), pieces):
        journal.feed(*(column[piece] for column in rows))
    return journal.finish(int(rows[0][-1]))


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[pytest.mark.campaign] if seed % 3 else []) for seed in range(60)]
)
def test_compacts_as_the_slow_model(seed: int) -> None:
    chance = random.Random(seed)
    rules = replace(
        RULES,
        live_percent=chance.choice([20, 50, 50, 70, 80]),
        min_segments=chance.choice([1, 2, 4]),
        messages_max=chance.choice([5, 12, 8192]),
    )
    rows = operations(seed, 2500)
    course = fed(rules, rows)
    expected = reference.compacted(rules, *(column.tolist() for column in rows))
    last = np.append(np.diff(course.changes) > 0, True)
    got = list(
        zip(course.changes[last].tolist(), course.level[last].tolist(), course.files[last].tolist(), strict=True)
    )
    assert [
        entry for before, entry in zip([(0, 0, 0), *got], got, strict=False) if entry[1:] != before[1:]
    ] == expected.levels
    assert (course.written, course.copied, course.most_copied) == expected.sums
    assert course.most_copied > 0
    assert (np.diff(course.changes) >= 0).all()


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(
    "rules", [RULES, replace(RULES, live_percent=0), replace(RULES, ack_rule=True, live_percent=0)]
)
def test_pieces_make_no_difference(seed: int, rules: JournalRules) -> None:
    rows = operations(seed, 700)
    whole, cut = fed(rules, rows), fed(rules, rows, pieces=37)
    for name in ("changes", "level", "files", "starts", "ends"):
        assert (getattr(whole, name) == getattr(cut, name)).all()
    assert (whole.written, whole.copied, whole.most_copied) == (cut.written, cut.copied, cut.most_copied)


def test_nothing_is_copied_where_nothing_may_be() -> None:
    course = fed(replace(RULES, live_percent=0), operations(1, 1000))
    assert course.copied == course.most_copied == 0
    assert len(course.starts) > 10
    assert course.level.max() == course.files.max() * RULES.segment_bytes
