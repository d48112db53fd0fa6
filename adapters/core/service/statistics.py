"""Statistics of a store: how many messages are where, and what the store has done."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from contextlib import suppress

from ....policies.errors import CorruptionError, StoreFailedError
from ....policies.names.destination import Destination
from ..engine.engine import Engine
from ..operations.pending_counts import Counted, PendingCounts
from ..record.encoding import sent_at_ms
from ..state.leases import Channel, Lease, SubscriptionState
from ..state.sweep import wall_ms
from ..store_types import Counts, StoreStats, SubscriptionKey
from .receiving import Receiving


class Statistics:
    """The statistics of one open store. Threads: all."""

    def __init__(self, engine: Engine, receiving: Receiving) -> None:
        self._engine, self._receiving = engine, receiving

    def depth(self, destination: Destination, key: SubscriptionKey | None) -> int:
        """Return the depth of a destination, as Store.depth."""
        state = self._state(destination, key)
        return self._engine.counted(lambda pending: pending.of(state) if state is not None else 0)

    def counts(self, destination: Destination, key: SubscriptionKey | None) -> Counts:
        """Return the counts of a queue or a subscription, as Store.counts."""
        state = self._state(destination, key)
        counts = self._engine.counted(
            lambda pending: self._counts(state, pending) if state is not None else Counts(0, 0)
        )
        if state is None or not counts.ready or self._engine.counts_stand:
            return counts  # where they stand, whoever wants more would wait for a disk
        counts.oldest_ready_seconds = self._oldest_ready(state)
        return counts

    def _oldest_ready(self, state: Counted) -> float | None:
        """Return the age of what is received next; None if nothing is, or it cannot be read."""
        channels = (state.channel,) if isinstance(state, SubscriptionState) else tuple(state.channels())
        sent = [found for channel in channels if (found := self._first_sent_at(channel)) is not None]
        return max(wall_ms() - min(sent), 0) / 1000 if sent else None

    def _first_sent_at(self, channel: Channel) -> int | None:
        """Return when the first message was sent that nobody holds (ms)."""
        engine = self._engine
        while (place := engine.asked(lambda: engine.delivery.first(channel, engine.rows))) is not None:
            with suppress(CorruptionError):  # told by who receives it
                for record in engine.rows.bodies(channel.state, [place]):
                    if record is not None:
                        return sent_at_ms(record)
                continue  # it has died meanwhile
            return None
        return None

    def _state(self, destination: Destination, key: SubscriptionKey | None) -> Counted | None:
        if key is not None:
            return self._receiving.subscription(destination, key)
        state = self._engine.catalog.destinations.get(destination)
        if state is None:
            self._engine.require_here(destination)
        return state

    def _counts(self, state: Counted, pending: PendingCounts) -> Counts:
        channels = (state.channel,) if isinstance(state, SubscriptionState) else state.channels()
        held, leased = pending.of(state), sum(len(channel.held) for channel in channels)
        delayed = state.total_delayed
        return Counts(max(held - leased - delayed, 0), leased, delayed, state.expired)

    def count_expired(self, leases: Iterable[Lease]) -> None:
        """Count messages that are gone, for their time was over."""
        with self._engine.lock:
            for lease in leases:
                lease.channels[0].state.expired += 1
                for channel in lease.channels:
                    if channel.subscription is not None:
                        channel.subscription.expired += 1

    def of_store(self) -> StoreStats:
        """Return the statistics of the store, as Store.stats."""
        engine = self._engine
        if engine.failed is None:
            try:
                return engine.counted(self._of_store)
            except StoreFailedError:
                pass  # it has just failed
        with engine.lock:
            return self._of_store(engine.pending_counts())

    def _of_store(self, pending: PendingCounts) -> StoreStats:
        engine = self._engine
        counts = {state: pending.of(state) for state in engine.catalog.declared()}
        backend = engine.backend.stats()
        more: Counter[str] = Counter(memory_bytes=backend.memory_bytes, swap_bytes=backend.swap_bytes)
        more["dropped"] = engine.sequencer.dropped
        for feature in engine.features:
            more.update(feature.statistics())
        return StoreStats(
            name=engine.name,
            kind=engine.backend.kind,
            messages=sum(counts.values()),
            destinations={state.destination: count for state, count in counts.items()},
            leased=sum(len(channel.held) for channel in engine.catalog.channels()),
            sends=engine.sends,
            acks=engine.acks,
            redelivered=engine.redelivered,
            syncs=backend.syncs,
            batches=engine.batches,
            journal_bytes=backend.journal_bytes,
            index_bytes=backend.index_bytes,
            capacity_bytes=backend.capacity_bytes,
            pool_bytes=backend.pool_bytes,
            segments=backend.segments,
            live_percent=backend.live_percent,
            live_bytes=backend.live_bytes + more["large_bytes"],
            compactions=backend.compactions,
            failed=str(engine.failed) if engine.failed is not None else None,
            subscriptions={
                subscriber.subscription: pending.of(subscriber)
                for state in counts
                for subscriber in state.subscriptions.values()
            },
            waiting=sum(channel.waiting for channel in engine.catalog.channels()),
            delayed=sum(state.total_delayed for state in counts),
            sync_seconds=backend.sync_seconds,
            sync_durations=backend.sync_durations,
            **more,
        )
