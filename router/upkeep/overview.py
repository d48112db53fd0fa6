"""An overview of a router: what each of its stores holds and has done, and how many dead letters come from where."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from ...adapters.core.store_types import Counts, StoreStats, SubscriptionKey
from ...policies.names.destination import Destination, Kind
from ..api.dead_letter import dead_letter_of, dead_letter_queue
from ..api.queue import Queue

if TYPE_CHECKING:
    from ..placement.registry import StoreRegistry

AGED_MAX: Final = 200
"""Queues of a store that are asked how old their first message is: those with most messages."""
LETTERS_MAX: Final = 50
"""Dead-letter queues of a store that are named: those with most letters."""


def dead_letters(registry: StoreRegistry) -> Counter[tuple[Destination, SubscriptionKey | None]]:
    """Return the dead letters by where they come from: each dead-letter queue is walked once."""
    found: Counter[tuple[Destination, Any]] = Counter()
    for queue in _dead_letter_queues(registry):
        for message in Queue[Any](registry, queue).browse():
            letter = dead_letter_of(message)
            if letter is not None and letter.source != queue:
                found[letter.source, letter.subscription] += 1
    return found


def _dead_letter_queues(registry: StoreRegistry) -> dict[Destination, None]:
    """Return the dead-letter queues that there are."""
    there = registry.table.destinations
    patterns: dict[bytes, str | None] = {}
    found: dict[Destination, None] = {}
    for destination, row in list(there.items()):
        if row.store_id not in patterns:
            patterns[row.store_id] = registry.option_for(destination, "dead_letter")
        pattern = patterns[row.store_id]
        if pattern is not None and (queue := dead_letter_queue(pattern, destination)) in there:
            found[queue] = None
    return found


def overview(registry: StoreRegistry, stores: Mapping[str, StoreStats]) -> Iterator[dict[str, Any]]:
    """Yield what is to be shown of each store, from its statistics: plain values."""
    dead = _dead_letter_queues(registry)
    for name, stats in stores.items():
        there = {d: n for d, n in stats.destinations.items() if d.kind is not Kind.MAP}
        of_dead = Counter({destination: n for destination, n in there.items() if n and destination in dead})
        held, leased, delayed = sum(there.values()), stats.leased, stats.delayed
        yield {
            "store": name, "kind": stats.kind, "sends": stats.sends, "acks": stats.acks, "syncs": stats.syncs,
            "sync_seconds": stats.sync_seconds, "sync_counts": list(stats.sync_durations.counts),
            "ready": max(held - leased - delayed, 0), "leased": leased, "delayed": delayed,
            "dead": sum(of_dead.values()),
            "oldest_ready_seconds": oldest_ready(registry, there), "waiting": stats.waiting, "failed": stats.failed,
            "dead_letter_queues": {str(one): n for one, n in of_dead.most_common(LETTERS_MAX)},
        }  # fmt: skip


def oldest_ready(registry: StoreRegistry, destinations: Mapping[Destination, int]) -> float | None:
    """Return the age of the oldest message that is received next; None if none is."""
    busiest = sorted((d for d, n in destinations.items() if n), key=destinations.__getitem__, reverse=True)[:AGED_MAX]
    ages = [
        registry.for_held(one, lambda store, of=one: store.counts(of), Counts(0, 0)).oldest_ready_seconds  # type: ignore[misc]
        for one in busiest
    ]
    return max((age for age in ages if age is not None), default=None)
