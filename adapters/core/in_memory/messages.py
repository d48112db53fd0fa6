"""The messages of one destination, in the order in which they are delivered, and who has yet to ack them."""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from operator import itemgetter
from typing import Final

from ..record.place import ALSO_WAITING, SEQ, Place
from ..state.leases import Channel, DestinationState, SubscriptionState
from ..state.priorities import Orders
from .key_index import KeyIndex
from .message_chunks import MASKS, Chunk, Level, indexes

DESTINATION_COST: Final = 2500
SUBSCRIPTION_COST: Final = 2000
"""Bytes of memory that a destination takes, empty, and a subscription."""

STEP: Final = 64
"""Messages of a level that are looked up at once where those of several are brought into one order."""

Slot = tuple[Chunk, int]
"""The place of a message: its chunk, and its index in it."""


class DestinationMessages:
    """The messages of one queue, topic or map. Under the store's lock."""

    __slots__ = ("keys", "levels", "orders", "state", "subscriptions")

    def __init__(self, state: DestinationState) -> None:
        self.state: DestinationState = state
        self.levels: dict[int, Level] = {}
        """By order."""
        self.orders: Final = Orders()
        """Theirs."""
        self.keys: Final = KeyIndex() if state.is_map else None
        """Keys of a map, and the seqs of its values."""
        self.subscriptions: dict[int, SubscriptionState] = {}
        """By number: those that have begun and not ended. (The core's own list is ahead of what is applied.)"""

    @property
    def cost(self) -> int:
        """Return how many bytes of memory the destination takes, beside its chunks."""
        keys = self.keys.cost if self.keys is not None else 0
        return DESTINATION_COST + SUBSCRIPTION_COST * len(self.subscriptions) + keys

    def level(self, order: int) -> Level:
        """Return the level of an order, made if it is not there."""
        level = self.levels.get(order)
        if level is None:
            self.orders.add(order)  # first: an order that has no level does no harm
            level = self.levels[order] = Level(self.state, order)
        return level

    def keep(self, level: Level) -> None:
        """Keep a level that has a message: it may have been dropped when its last chunk was. Idempotent."""
        if self.levels.get(level.order) is not level:
            self.orders.add(level.order)
            self.levels[level.order] = level

    def drop(self, chunk: Chunk) -> None:
        """Drop a chunk in which nothing lives. In a store with priorities its level goes with its last chunk.
        Idempotent."""
        level = chunk.level
        level.drop(chunk)
        if level.order and not level.chunks and self.levels.get(level.order) is level:
            del self.levels[level.order]
            self.orders.discard(level.order)

    def chunks(self) -> Iterator[Chunk]:
        """Yield all chunks. They may be dropped meanwhile."""
        for level in list(self.levels.values()):
            yield from list(level.chunks)

    def find(self, seq: int, order: int | None = None) -> Slot | None:
        """Return a message, dead or not. `order`: its order, if that is known."""
        if order is not None:
            level = self.levels.get(order)
            return level.find(seq) if level is not None else None
        for level in self.levels.values():
            found = level.find(seq)
            if found is not None:
                return found
        return None

    def pending(self, subscriber: SubscriptionState | None, chunk: Chunk) -> int:
        """Return a bit for each message of a chunk that lives and that the subscription, if it is about one, has yet to
        ack."""
        if subscriber is None:
            return chunk.live
        mask = chunk.live & ~chunk.acked.get(subscriber.number, 0)
        if subscriber.start >= chunk.first:
            mask &= -1 << bisect_right(chunk.offsets, subscriber.start - chunk.first)
        return mask

    def wanted(self, chunk: Chunk, but: SubscriptionState | None = None) -> int:
        """Return a bit for each message of a topic's chunk that any subscription, `but` one, has yet to ack."""
        mask = 0
        for subscriber in self.subscriptions.values():
            if subscriber is not but:
                mask |= self.pending(subscriber, chunk)
        return mask

    def channels(self, slot: Slot) -> list[Channel]:
        """Return the channels that have yet to ack a message."""
        if not self.state.is_topic:
            return [self.state.channel]
        chunk, index = slot
        return [
            subscriber.channel
            for subscriber in self.subscriptions.values()
            if self.pending(subscriber, chunk) >> index & 1
        ]

    # Places, as the core knows them

    def keyed(self, names: Sequence[bytes]) -> dict[bytes, Place]:
        """Return where the values of keys are, as KeyedRows has it."""
        assert self.keys is not None
        found = {}
        for name in names:
            seq = self.keys.get(name)
            place = self.row(None, seq, None) if seq is not None else None
            if place is not None:
                found[name] = place
        return found

    def keyed_from(self, start: bytes, limit: int) -> list[tuple[bytes, Place]]:
        """Return keys and their values' places, as Backend.keys."""
        assert self.keys is not None
        found = [(name, self.row(None, seq, None)) for name, seq in self.keys.page(start, limit)]
        return [(name, place) for name, place in found if place is not None]

    def rows(self, subscriber: SubscriptionState | None, order: int | None, after: int, limit: int) -> list[Place]:
        """Return messages, as of Rows (adapters/core/state/rows.py)."""
        if order is not None:
            also = bool(order & ALSO_WAITING)
            level = self.levels.get(order & ~ALSO_WAITING)
            return self._rows(subscriber, level, after, limit, also) if level is not None else []
        if len(self.levels) == 1:
            (level,) = self.levels.values()
            return self._rows(subscriber, level, after, limit, True)
        by_seq = heapq.merge(
            *(self._all(subscriber, level, after) for level in self.levels.values()), key=itemgetter(SEQ)
        )
        return list(islice(by_seq, limit))

    def _all(self, subscriber: SubscriptionState | None, level: Level, after: int) -> Iterator[Place]:
        while found := self._rows(subscriber, level, after, STEP, True):
            yield from found
            after = found[-1][SEQ]

    def _rows(
        self, subscriber: SubscriptionState | None, level: Level, after: int, limit: int, also: bool
    ) -> list[Place]:
        """Return rows of a level. `also`: those too that wait."""
        found: list[Place] = []
        number = subscriber.number if subscriber is not None else 0
        order = level.order
        for chunk, index in level.after(after):
            length = len(chunk.offsets)
            mask = self.pending(subscriber, chunk) >> index << index
            if chunk.waiting and not also:
                mask &= ~chunk.waits_for(number)
                if not mask:
                    continue
            which: Iterable[int] = range(index, length) if mask == MASKS[length] >> index << index else indexes(mask)
            first, offsets, expiries, counts = chunk.first, chunk.offsets, chunk.expiries, chunk.counts
            some = islice(which, limit - len(found))
            if expiries is None and not counts:
                found += [(order, first + offsets[i], 0, 0, (chunk, i)) for i in some]
            else:
                found += [
                    (order, first + offsets[i], chunk.expires_at(i), counts.get((number, i), 0), (chunk, i))
                    for i in some
                ]
            if len(found) == limit:
                break
        return found

    def row(self, subscriber: SubscriptionState | None, seq: int, order: int | None) -> Place | None:
        """Return where one message is, as of Rows."""
        slot = self.find(seq, order)
        if slot is None or not self.pending(subscriber, slot[0]) >> slot[1] & 1:
            return None
        return place_of(slot, subscriber.number if subscriber is not None else 0)


def place_of(slot: Slot, number: int) -> Place:
    """Return the place for the channel of this number."""
    chunk, index = slot
    count = chunk.counts.get((number, index), 0)
    return chunk.level.order, chunk.seq(index), chunk.expires_at(index), count, slot
