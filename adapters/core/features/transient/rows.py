"""The rows of a store that holds transient messages: those of the backend and those in memory (transient/messages.py),
in one order."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Final

from ...record.place import ALSO_WAITING, SEQ, Place, TransientSlot, is_volatile
from ...state.leases import Channel, DestinationState, SubscriptionState
from ...state.rows import Rows, ScheduledRows
from ...state.states import Catalog

if TYPE_CHECKING:
    from ...backend import Backend
    from ...in_memory.rows import MemoryRows

AT_ONCE: Final = 0
PLANNED: Final = 1
"""The two levels of each order in memory (rule A3): order 4 has 8 and 9 there."""


class MixedRows(Rows):
    """The rows of one open store, transient ones among them. Under its lock, but for `bodies`."""

    def __init__(self, catalog: Catalog, backend: Backend, kept: MemoryRows) -> None:
        """`kept`: those that are not persistent, of destinations that mirror those of the catalog."""
        self._catalog, self._backend, self._kept = catalog, backend, kept
        self._scheduled = backend if isinstance(backend, ScheduledRows) else None

    def next_order(self, state: DestinationState, subscription: SubscriptionState | None, order: int) -> int | None:
        least = self._backend.next_order(state, subscription, order)
        mirror, also = state.volatile, order & ALSO_WAITING
        if mirror is None or not mirror.count:
            return least
        same = mirror_of(mirror, subscription)
        first = None
        if subscription is None or same is not None:
            first = self._kept.next_order(mirror, same, 2 * (order - also) + also)
        if first is None:
            return least
        first = (first - also >> 1) + also
        return first if least is None else min(least, first)

    def rows(
        self, state: DestinationState, subscription: SubscriptionState | None, order: int | None, after: int, limit: int
    ) -> Sequence[Place]:
        mirror = state.volatile
        if mirror is None or not mirror.count:
            return self._backend.rows(state, subscription, order, after, limit)
        places = self.volatile_rows(state, subscription, order, after, limit)
        if state.count:
            places += self._backend.rows(state, subscription, order, after, limit)
        places.sort(key=itemgetter(SEQ))
        del places[limit:]
        return places

    def volatile_rows(
        self, state: DestinationState, subscription: SubscriptionState | None, order: int | None, after: int, limit: int
    ) -> list[Place]:
        """Return rows of the transient messages alone, as `rows`."""
        mirror = state.volatile
        if mirror is None:
            return []
        same = mirror_of(mirror, subscription)
        if subscription is not None and same is None:
            return []
        if order is None:
            return [_place(place) for place in self._kept.rows(mirror, same, None, after, limit)]
        levels = mirror.own.levels
        also = order & ALSO_WAITING
        order -= also
        orders = [one for one in (2 * order + AT_ONCE, 2 * order + PLANNED) if one in levels]
        places = [_place(place) for one in orders for place in self._kept.rows(mirror, same, one + also, after, limit)]
        if len(orders) > 1:
            places.sort(key=itemgetter(SEQ))
        return places[:limit]

    def row(
        self, state: DestinationState, subscription: SubscriptionState | None, seq: int, order: int | None = None
    ) -> Place | None:
        mirror = state.volatile
        if mirror is not None:
            same = mirror_of(mirror, subscription)
            if subscription is None or same is not None:
                place = self._kept.row(mirror, same, seq)
                if place is not None:
                    return _place(place)
        return self._backend.row(state, subscription, seq, order)

    def unacked(self, state: DestinationState, seq: int) -> Sequence[Channel]:
        mirror = state.volatile
        channels = self._kept.unacked(mirror, seq) if mirror is not None else ()
        return channels or self._backend.unacked(state, seq)

    def expired(self, since: int, now: int) -> Iterator[tuple[DestinationState, Place]]:
        yield from self._backend.expired(since, now)
        for mirror, place in self._kept.expired(since, now):
            state = self._catalog.by_number.get(mirror.number)
            if state is not None:
                yield state, _place(place)

    def limited(self, least: int) -> Iterator[tuple[Channel, Place]]:
        yield from self._backend.limited(least)
        for channel, place in self._kept.limited(least):
            yield channel, _place(place)

    def next_due(self) -> int:
        both = (self._scheduled.next_due() if self._scheduled is not None else 0, self._kept.next_due())
        return min(filter(None, both), default=0)

    def due(self, now: int, limit: int) -> Sequence[tuple[DestinationState, int, Place]]:
        found = list(self._scheduled.due(now, limit)) if self._scheduled is not None else []
        for mirror, number, place in self._kept.due(now, limit - len(found)):
            state = self._catalog.by_number.get(mirror.number)
            if state is not None:
                found.append((state, number, _place(place)))
        return found

    def until(self, state: DestinationState, subscription: SubscriptionState | None, seq: int) -> int:
        mirror = state.volatile
        if mirror is not None:
            until = self._kept.until(mirror, mirror_of(mirror, subscription), seq)
            if until:
                return until
        return self._scheduled.until(state, subscription, seq) if self._scheduled is not None else 0

    def bodies(self, state: DestinationState, places: Sequence[Place]) -> Iterator[bytes | None]:
        """Return the records of messages, as Backend.bodies. Any thread."""
        if len(places) == 1:
            return (self._kept if is_volatile(places[0]) else self._backend).bodies(state, places)
        return self._bodies(state, places)

    def _bodies(self, state: DestinationState, places: Sequence[Place]) -> Iterator[bytes | None]:
        for volatile, run in itertools.groupby(places, is_volatile):
            yield from (self._kept if volatile else self._backend).bodies(state, list(run))


def mirror_of(mirror: DestinationState, subscription: SubscriptionState | None) -> SubscriptionState | None:
    """Return a subscription's mirror."""
    if subscription is None:
        return None
    same = mirror.subscriptions.get(subscription.subscription.key)
    return same if same is not None and same.number == subscription.number else None


def _place(place: Place) -> Place:
    """Return a place in memory, as the core knows it."""
    order, seq, expires, deliveries, slot = place
    return order >> 1, seq, expires, deliveries, TransientSlot(slot)
