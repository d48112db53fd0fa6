"""An overview of a router: what each of its stores holds and has done, and how many dead letters come from where."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from ...adapters.core.store_types import Counts, StoreStats, SubscriptionKey
from ...policies.errors import AnabranchError
from ...policies.names.destination import Destination, Kind, dead_letter_name
from ..api.dead_letter import dead_letter_of
from ..api.queue import Queue

if TYPE_CHECKING:
    from ..placement.registry import StoreRegistry

AGED_MAX: Final = 200
"""Queues and subscriptions of a store that are asked how old their first message is: those with most messages."""
LONGEST_MAX: Final = 50
"""Those of a store that are named: whose first message has waited longest."""
LETTERS_MAX: Final = 50
"""Dead-letter queues of a store that are named: those with most letters."""


def dead_letters(
    registry: StoreRegistry, failed: Collection[str]
) -> Counter[tuple[Destination, SubscriptionKey | None]]:
    """Return the dead letters by where they come from: each dead-letter queue is walked once, but in stores that have
    `failed`, by their names."""
    found: Counter[tuple[Destination, Any]] = Counter()
    left_out = {row.store_id for name, row in registry.rows_by_name().items() if name in failed}
    for queue in dead_letter_queues(registry):
        row = registry.table.destinations.get(queue)
        if row is None or row.store_id in left_out:
            continue
        for message in Queue[Any](registry, queue).browse():
            letter = dead_letter_of(message)
            if letter is not None and letter.source != queue:
                found[letter.source, letter.subscription] += 1
    return found


def dead_letter_queues(registry: StoreRegistry) -> dict[Destination, None]:
    """Return the dead-letter queues that there are."""
    there = list(registry.table.destinations.items())
    queues = {one.name: one for one, _ in there if one.kind is Kind.QUEUE}
    patterns: dict[bytes, str | None] = {}
    found: dict[Destination, None] = {}
    for destination, row in there:
        if row.store_id not in patterns:
            pattern = registry.option_for(destination, "dead_letter")
            patterns[row.store_id] = None if pattern is None else Destination.restored(pattern).name
        name = patterns[row.store_id]
        if name is not None and (queue := queues.get(dead_letter_name(name, destination.name))) is not None:
            found[queue] = None
    return found


def overview(registry: StoreRegistry, stores: Mapping[str, StoreStats]) -> Iterator[dict[str, Any]]:
    """Yield what is to be shown of each store, from its statistics: plain values."""
    dead = dead_letter_queues(registry)
    for name, stats in stores.items():
        there = {d: n for d, n in stats.destinations.items() if d.kind is not Kind.MAP}
        waiting = longest_waiting(registry, stats, dead) if stats.failed is None else ()
        of_dead = Counter({destination: n for destination in dead if (n := there.get(destination))})
        holding = sum(n > 0 and one.kind is Kind.QUEUE and one not in dead for one, n in there.items())
        held, leased, delayed = sum(there.values()), stats.leased, stats.delayed
        yield {
            "store": name, "kind": stats.kind, "sends": stats.sends, "acks": stats.acks, "syncs": stats.syncs,
            "sync_seconds": stats.sync_seconds, "sync_counts": list(stats.sync_durations.counts),
            "sync_total_seconds": stats.sync_durations.seconds,
            "ready": max(held - leased - delayed, 0), "leased": leased, "delayed": delayed,
            "dead": sum(of_dead.values()),
            "oldest_ready_seconds": oldest_ready(waiting), "waiting": stats.waiting, "failed": stats.failed,
            "waiting_longest": [(str(one[0]), *one[1:]) for one in waiting[:LONGEST_MAX]],
            "holding": holding + sum(n > 0 for n in stats.subscriptions.values()),
            "dead_letter_queues": {str(one): n for one, n in of_dead.most_common(LETTERS_MAX)},
        }  # fmt: skip


Waiting = tuple[Destination, SubscriptionKey | None, float | None, int]
"""A queue, or a topic with one of its subscriptions; since when (monotonic) the message has waited that is received
there next, if there is one; and how many messages it holds."""


def longest_waiting(registry: StoreRegistry, stats: StoreStats, dead: Mapping[Destination, None]) -> Sequence[Waiting]:
    """Return the queues and subscriptions of a store that hold messages, of many the fullest, in the order of
    `by_waiting`. Dead-letter queues are left out: letters wait for nobody."""
    held: Counter[tuple[Destination, SubscriptionKey | None]] = Counter()
    queues = {(one, None): n for one, n in stats.destinations.items() if one.kind is Kind.QUEUE and one not in dead}
    held.update({queue: n for queue, n in queues.items() if n})
    held.update({(one.topic, one.key): n for one, n in stats.subscriptions.items() if n})
    return sorted(((*one, _since(registry, *one), n) for one, n in held.most_common(AGED_MAX)), key=by_waiting)


def by_waiting(one: Sequence[Any]) -> tuple[float, int]:
    """Return the key that sorts Waiting: those that have waited longest first, and behind them those that have nothing
    ready, the fullest first."""
    return (math.inf if one[2] is None else one[2]), -one[3]


def _since(registry: StoreRegistry, destination: Destination, key: SubscriptionKey | None) -> float | None:
    with suppress(AnabranchError):  # it has ended meanwhile, or its store has failed
        counts: Counts = registry.for_held(destination, lambda store: store.counts(destination, key), Counts(0, 0))
        if counts.oldest_ready_seconds is not None:
            return time.monotonic() - counts.oldest_ready_seconds
    return None


def oldest_ready(waiting: Sequence[Waiting]) -> float | None:
    """Return the age of the oldest message that is received next; None if none is."""
    return None if not waiting or waiting[0][2] is None else max(0.0, time.monotonic() - waiting[0][2])
