"""Which key of a map leads to which message, in memory."""

from __future__ import annotations

import random

import pytest

from anabranch.adapters.core.in_memory import key_index
from anabranch.adapters.core.in_memory.key_index import KeyIndex


@pytest.mark.parametrize("asked", [True, False])
def test_it_is_a_dict_in_order(monkeypatch: pytest.MonkeyPatch, asked: bool) -> None:
    """Blocks of keys are split and go; whether somebody has asked for the order before, or not."""
    monkeypatch.setattr(key_index, "BLOCK_MAX", 8)
    keys, model, rng = KeyIndex(), dict[bytes, int](), random.Random(7)
    if asked:
        keys.page(b"", 1)
    for seq in range(1, 2000):
        name = b"%03d" % rng.randrange(150)
        if name in model and rng.randrange(2):
            keys.forget(model.pop(name))
        elif name not in model:
            keys.put(name, seq)
            model[name] = seq
        assert (keys.get(name), len(keys)) == (model.get(name), len(model))
    assert keys.page(b"", 1000) == sorted(model.items()) == sorted(keys.items())
    assert keys.page(b"05", 7) == [item for item in sorted(model.items()) if item[0] >= b"05"][:7]
    for seq in list(model.values()):
        keys.forget(seq)
    assert (len(keys), keys.cost, keys.page(b"", 10)) == (0, 0, [])


def test_what_is_done_again_changes_nothing() -> None:
    keys = KeyIndex()
    keys.page(b"", 1)
    for _ in range(2):
        keys.put(b"a", 1)
        keys.put(b"b", 2)
    cost = keys.cost
    keys.put(b"a", 3)
    assert (keys.page(b"", 10), keys.cost) == ([(b"a", 1), (b"b", 2)], cost)
    for _ in range(2):
        keys.forget(1)
        keys.forget(7)
    assert keys.page(b"", 10) == [(b"b", 2)]
    keys.put(b"a", 3)
    assert (keys.get(b"a"), keys.cost) == (3, cost)
