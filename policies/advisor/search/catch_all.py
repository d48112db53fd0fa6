"""The store that takes what the trace did not show.

By itself a store `rest` does, beside those that are recommended: what nobody has seen yet may stay long, and shall keep
no other destination's files. Our own stores cost nothing before their first message. One of those recommended does
instead, the one that most is written to, where another store would be in the way:

- one store is recommended: who is told to keep all together makes one
- `kahadb`: each adapter of an mKahaDB has a journal file from the start, the one that takes what no other does too
- as many stores are recommended as there may be

It must sync as what is unseen would.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...config.durability import Sync
from ...names.pattern import Pattern
from ..statistics.sizes import Model

CATCH_ALL = ">"
REST = "rest"
"""The store of its own."""


def unseen_sync(durability: Mapping[str, Sync]) -> Sync:
    """Tell how what the trace did not show is to sync, queues and topics, by the policies of patterns."""
    everything = Pattern.parse(CATCH_ALL)
    return next((sync for text, sync in durability.items() if Pattern.parse(text) == everything), Sync.ALWAYS)


def catch_all_store(
    stores: Sequence[Sequence[str]],
    syncs: Sequence[Sync | None],
    weights: Mapping[str, int],
    *,
    model: Model,
    stores_max: int | None,
    durability: Mapping[str, Sync],
) -> int | None:
    """Choose the store that takes all that is unseen, by number; None where `rest` does.

    `syncs`: None for a store that nodes share. `weights`: bytes written by destination.
    """
    if len(stores) > 1 and model != "kahadb" and (stores_max is None or len(stores) < stores_max):
        return None
    fit = [number for number, sync in enumerate(syncs) if sync is unseen_sync(durability)]
    return min(fit, key=lambda number: (-sum(weights[name] for name in stores[number]), number), default=None)
