"""What a memory store holds: its destinations, their subscriptions, and the totals."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from ...policies.destination import Destination, Kind
from ..base import Subscription, SubscriptionKey
from ..delivery import PLAIN_ORDERS, PRIORITY_ORDERS, Feed, Place
from ..duplicates import DuplicateWindow
from .chunks import Chunk, Lane, indexes

CHUNK: Final = 3
INDEX: Final = 4
"""In a place: (order, seq, expires at, chunk, index)."""

DESTINATION_COST: Final = 2000
"""Bytes of memory that a destination or a subscription takes, empty."""


class SubscriptionState:
    """One durable subscription. It has yet to ack `topic.total - joined - done` messages."""

    __slots__ = ("done", "feed", "joined", "start", "subscription", "topic")

    def __init__(self, subscription: Subscription, topic: DestinationState, number: int, start: int) -> None:
        self.subscription = subscription
        self.topic = topic
        self.feed = Feed(self, number, subscription.key)
        self.start = start
        """It is entitled to the messages with a higher seq."""
        self.joined = 0
        """What its topic's `total` was, less what it found there."""
        self.done = 0
        """Messages that are done with: acked by it, or dead for all."""

    @property
    def number(self) -> int:
        return self.feed.number

    @property
    def count(self) -> int:
        """Messages that it has yet to ack."""
        return self.topic.total - self.joined - self.done

    def pending(self, chunk: Chunk) -> int:
        """A bit for each message of a chunk that it has yet to ack."""
        mask = chunk.live & ~chunk.acked.get(self.number, 0)
        if self.start >= chunk.first:
            mask &= -1 << bisect_right(chunk.offsets, self.start - chunk.first)
        return mask


class DestinationState:
    """One queue or topic. Under the store's lock."""

    __slots__ = (
        "count", "declared", "destination", "feed", "is_topic", "lanes", "live_bytes", "number", "subscriptions",
        "total",
    )  # fmt: skip

    def __init__(self, number: int, destination: Destination) -> None:
        self.number = number
        self.destination = destination
        self.is_topic = destination.kind is Kind.TOPIC
        self.feed = Feed(self)
        """What a queue's receivers draw from."""
        self.lanes: dict[int, Lane] = {}
        """By order."""
        self.subscriptions: dict[SubscriptionKey, SubscriptionState] = {}
        self.declared = False
        """Something was sent here, or a subscription made: it is one of the store's destinations."""
        self.count = 0
        self.live_bytes = 0
        self.total = 0
        """Messages ever stored here."""

    def lane(self, order: int) -> Lane:
        lane = self.lanes.get(order)
        if lane is None:
            lane = self.lanes[order] = Lane(self, order)
        return lane

    @property
    def feeds(self) -> list[Feed]:
        """All that receivers may draw from."""
        return [some.feed for some in self.subscriptions.values()] if self.is_topic else [self.feed]

    def chunks(self) -> Iterator[Chunk]:
        for lane in list(self.lanes.values()):
            yield from list(lane.chunks)

    def find(self, seq: int) -> tuple[Chunk, int] | None:
        for lane in self.lanes.values():
            found = lane.find(seq)
            if found is not None:
                return found
        return None

    def pending(self, subscription: SubscriptionState | None, chunk: Chunk) -> int:
        """A bit for each message of a chunk that the subscription has yet to ack, or that lives."""
        return chunk.live if subscription is None else subscription.pending(chunk)

    def pages(
        self, subscription: SubscriptionState | None, order: int, after: int
    ) -> Iterator[tuple[Chunk, Iterator[int]]]:
        """Chunk by chunk, those messages of an order that come behind `after`."""
        lane = self.lanes.get(order)
        if lane is not None:
            for chunk, index in lane.after(after):
                mask = self.pending(subscription, chunk) & (-1 << index)
                if mask:
                    yield chunk, indexes(mask)


def place_of(chunk: Chunk, index: int) -> Place:
    return chunk.lane.order, chunk.seq(index), chunk.expires_at(index), chunk, index


class Contents:
    """All of it. Under the store's lock. It is a Source of adapters/delivery.py."""

    def __init__(self, priorities: bool, duplicate_window: int) -> None:
        self.states: dict[Destination, DestinationState] = {}
        self.seq = 0
        """The highest given out."""
        self.numbers = 0
        """Likewise, of destinations and subscriptions."""
        self.messages = 0
        self.live_bytes = 0
        """Bytes of messages, as they count for the store's limits."""
        self.memory = 0
        """Bytes of memory that all of it takes."""
        self.window = DuplicateWindow(duplicate_window)
        self.expiring: dict[Chunk, None] = {}
        """Those in which messages expire."""
        self.soonest = 0
        """No message expires before; 0: none does."""
        self.priorities = priorities
        self._orders = PRIORITY_ORDERS if priorities else PLAIN_ORDERS

    def next_number(self) -> int:
        self.numbers += 1
        return self.numbers

    def subscriptions(self) -> Iterator[SubscriptionState]:
        for state in list(self.states.values()):
            yield from state.subscriptions.values()

    # Source

    def orders(self, feed: Feed) -> Sequence[int]:
        return self._orders

    def fetch(self, feed: Feed, order: int, after: int, limit: int) -> list[Place]:
        state, subscription = owners(feed)
        places: list[Place] = []
        for chunk, which in state.pages(subscription, order, after):
            for index in which:
                places.append(place_of(chunk, index))
                if len(places) == limit:
                    return places
        return places

    def place(self, feed: Feed, seq: int) -> Place | None:
        state, subscription = owners(feed)
        found = state.find(seq)
        if found is None or not state.pending(subscription, found[0]) >> found[1] & 1:
            return None
        return place_of(*found)

    def deliveries(self, feed: Feed, seq: int) -> int:
        found = owners(feed)[0].find(seq)
        return found[0].counts.get((feed.number, found[1]), 0) if found is not None else 0

    def expired(self, now: int) -> Iterable[tuple[Sequence[Feed], Place]]:
        """By the times themselves, whenever it is asked: a clock that went forward and back again hides nothing."""
        if not self.soonest or now < self.soonest:
            return
        for chunk in list(self.expiring):
            if not chunk.soonest or now < chunk.soonest:
                continue
            soonest = 0
            for index in indexes(chunk.live):
                at = chunk.expires_at(index)
                soonest = min(soonest or at, at) if at else soonest
                if at and at <= now:
                    yield who_waits(chunk, index), place_of(chunk, index)
            chunk.soonest = soonest  # of those that were given as well: whoever takes them may give them back
            if not soonest:
                self.expiring.pop(chunk, None)
        self.soonest = min((chunk.soonest for chunk in self.expiring), default=0)

    def spent(self, least: int) -> Iterable[tuple[Feed, int]]:
        for state in list(self.states.values()):
            feeds = {feed.number: feed for feed in state.feeds}
            for chunk in state.chunks():
                for (number, index), count in list(chunk.counts.items()):
                    if count >= least and number in feeds:
                        yield feeds[number], chunk.seq(index)


def owners(feed: Feed) -> tuple[DestinationState, SubscriptionState | None]:
    """The destination, and the subscription if it is one's."""
    owner = feed.owner
    return (owner.topic, owner) if isinstance(owner, SubscriptionState) else (owner, None)


def who_waits(chunk: Chunk, index: int) -> list[Feed]:
    """The feeds that have yet to ack a message."""
    state = chunk.lane.state
    if not state.is_topic:
        return [state.feed]
    return [some.feed for some in state.subscriptions.values() if some.pending(chunk) >> index & 1]
