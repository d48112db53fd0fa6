"""Metrics of a router for Prometheus.

    from prometheus_client import start_http_server
    from anabranch.hosts.prometheus import register

    register(router)
    start_http_server(9100, "127.0.0.1")

Nothing is counted for it: each scrape asks `router.stats()` and `router.health()`, which costs each store a sync. A
store whose disk hangs holds up one scrape by some seconds; then it is told as one that is not up, with its latest
figures. So is one that has failed. Of one that could never be asked there are no figures. Labels are the names of
stores in the configuration: those of one that is made per destination are one.

Counts begin anew with each collector. They go on where a store is closed, opened anew or deleted: what it had counted
at the last scrape is kept. Needs the extra `prometheus`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate
from threading import Lock
from typing import Final

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

import anabranch
from anabranch import Durations, RouterStats

__all__ = ["RouterCollector", "register"]

_BOUNDS: Final = (*map(str, Durations.BOUNDS), "+Inf")
_GAUGES: Final = {
    "store_up": "1: the store can be used, as router.health() says. 0: it has failed, does not open, or hangs.",
    "oldest_message_age_seconds": "Age of the oldest message that comes next, dead letters aside; absent if none does.",
    "free_bytes": "Free on the disk of the store's directory.",
    "waiting_receivers": "Receivers and listeners that wait for a message.",
}
_COUNTERS: Final = {
    "sent": "Messages that were stored.",
    "acked": "Messages that were acked, of a topic by each subscription.",
    "redelivered": "Messages that were handed out, and had been before.",
    "syncs": "Times that the store waited for the disk.",
    "dropped": "Messages that were sent to a topic without subscriptions, or dropped since the store was full.",
}
_WORST: Final = {"store_up": min, "free_bytes": min, "oldest_message_age_seconds": max}
"""How the figures of stores with one label become one. All others are summed up."""


@dataclass(frozen=True, slots=True)
class _Counts:
    """What a store has counted, or all of one label."""

    values: tuple[int, ...] = (0,) * len(_COUNTERS)
    """In the order of `_COUNTERS`."""
    syncs: Durations = field(default_factory=Durations)

    def __add__(self, other: _Counts) -> _Counts:
        return _Counts(tuple(map(sum, zip(self.values, other.values, strict=True))), self.syncs + other.syncs)

    def is_before(self, other: _Counts) -> bool:
        """Tell whether counting on can lead from these to the others."""
        mine, others = (*self.values, *self.syncs.counts), (*other.values, *other.syncs.counts)
        return all(one <= two for one, two in zip(mine, others, strict=True))


def _label(store: str) -> str:
    return store.partition(":")[0]


class RouterCollector(Collector):
    """The metrics of one router, which may be a client's of another process. Threads: all."""

    def __init__(self, router: anabranch.Router) -> None:
        self._router = router
        self._lock = Lock()
        self._last: dict[str, _Counts] = {}
        """By store, at the last scrape."""
        self._ended: dict[str, _Counts] = {}
        """By label: of stores that are gone, or have begun anew."""

    def describe(self) -> Iterable[Metric]:
        """Return nothing: the names are those below `anabranch_`, and no store is asked for them."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Yield all metrics. Raises ClosedError once the router is closed."""
        with self._lock:  # else an older answer could look like a store that began anew
            stats = self._router.stats()
            counted = self._counted(stats)
        health = self._router.health()
        figures: dict[tuple[str, str, str], float] = {}

        def note(metric: str, store: str, value: float, state: str = "") -> None:
            key = metric, _label(store), state
            before = figures.get(key)
            if before is None:
                figures[key] = value
            else:
                worst = _WORST.get(metric)
                figures[key] = worst(before, value) if worst is not None else before + value

        dead = {store.name: store.dead for store in health.stores}
        for name, one in stats.stores.items():
            if one.failed is not None and not one.messages:
                continue  # it has told nothing yet, it may be
            note("messages", name, max(0, one.messages - one.leased - one.delayed - dead.get(name, 0)), "ready")
            note("messages", name, one.leased, "leased")
            note("messages", name, one.delayed, "delayed")
            note("messages", name, dead.get(name, 0), "dead")
            note("disk_bytes", name, one.live_bytes, "live")
            note("disk_bytes", name, one.held_bytes, "held")
            note("disk_bytes", name, one.pool_bytes, "pooled")
            note("disk_bytes", name, one.index_bytes, "index")
            note("waiting_receivers", name, one.waiting)
        for label, counts in counted.items():
            for metric, value in zip(_COUNTERS, counts.values, strict=True):
                note(metric, label, value)
        for store in health.stores:
            note("store_up", store.name, store.state == "ok")
            if store.oldest_ready_seconds is not None:
                note("oldest_message_age_seconds", store.name, store.oldest_ready_seconds)
            if store.free_bytes is not None:
                note("free_bytes", store.name, store.free_bytes)

        by_state = {
            "messages": "Messages held now; dead: dead letters. Of a topic, leased ones count for each subscription.",
            "disk_bytes": "Bytes of a journal on disk: live messages, the rest of their files, the pool, the index.",
        }
        families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {
            name: GaugeMetricFamily(f"anabranch_{name}", text, labels=["store", "state"])
            for name, text in by_state.items()
        }
        for name, text in _GAUGES.items():
            families[name] = GaugeMetricFamily(f"anabranch_{name}", text, labels=["store"])
        for name, text in _COUNTERS.items():
            families[name] = CounterMetricFamily(f"anabranch_{name}", text, labels=["store"])
        for (name, label, state), figure in figures.items():
            families[name].add_metric([label, state] if name in by_state else [label], figure)
        yield from families.values()
        durations = HistogramMetricFamily(
            "anabranch_sync_duration_seconds", "How long the store waited for the disk each time.", labels=["store"]
        )
        for label, counts in counted.items():
            took = counts.syncs
            durations.add_metric([label], list(zip(_BOUNDS, accumulate(took.counts), strict=True)), took.seconds)
        yield durations
        yield CounterMetricFamily(
            "anabranch_dead_lettered", "Messages that were put into dead-letter queues.", stats.dead_lettered
        )
        yield GaugeMetricFamily(
            "anabranch_transactions_in_doubt", "Prepared transactions that wait for an outcome.", health.in_doubt
        )
        yield GaugeMetricFamily(
            "anabranch_transactions_for_operator",
            "Those of them that wait for no manager and no store: somebody has to decide.",
            health.for_operator,
        )

    def _counted(self, stats: RouterStats) -> dict[str, _Counts]:
        """Return what the stores of each label have counted. A sum that fell would look like a counter that began
        anew."""
        now = {name: last for name, last in self._last.items() if name in stats.unresponsive}
        now |= {
            name: _Counts((one.sends, one.acks, one.redelivered, one.syncs, one.dropped), one.sync_durations)
            for name, one in stats.stores.items()
        }
        for name, last in self._last.items():
            if name not in now or not last.is_before(now[name]):
                self._ended[_label(name)] = self._ended.get(_label(name), _Counts()) + last
        self._last = now
        sums = dict(self._ended)
        for name, counts in now.items():
            sums[_label(name)] = sums.get(_label(name), _Counts()) + counts
        return sums


def register(router: anabranch.Router, registry: CollectorRegistry = REGISTRY) -> RouterCollector:
    """Let a registry collect the metrics of a router until `registry.unregister` is called with what this returns."""
    collector = RouterCollector(router)
    registry.register(collector)
    return collector
