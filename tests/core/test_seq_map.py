"""From the seqs of messages to those of their copies (adapters/core/migration/seq_map.py)."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from anabranch.adapters.core.migration import seq_map
from anabranch.adapters.core.migration.seq_map import SeqMap


@pytest.fixture
def seqs() -> Iterator[SeqMap]:
    made = SeqMap()
    yield made
    made.close()


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 16, 100])
def test_as_a_dict(seqs: SeqMap, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seq_map, "BLOCK", 8)
    chance = random.Random(count)
    pairs: dict[int, int] = {}
    source = target = 0
    for _ in range(count):
        source, target = source + chance.randint(1, 4), target + chance.randint(1, 3)
        seqs.add(source, target)
        pairs[source] = target
    for first in range(source + 6):
        assert seqs.get(first) == pairs.get(first)
        for last in range(first, source + 6):
            found = [pairs[one] for one in range(first, last + 1) if one in pairs]
            assert seqs.between(first, last) == ((found[0], found[-1]) if found else None)
