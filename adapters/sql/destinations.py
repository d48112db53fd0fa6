"""What is kept in memory of each destination and each subscription: how much there is, not which messages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ...policies.destination import Destination, Kind
from ..base import Subscription, SubscriptionKey
from ..delivery import Feed


@dataclass(slots=True, eq=False)
class Durable:
    """A durable subscription."""

    subscription: Subscription
    number: int
    start: int
    """The first seq that it is entitled to."""
    feed: Feed
    count: int = 0
    """Messages that it has yet to ack."""
    redelivered: bool = False
    """Whether REDELIVERIES may have rows of it."""


@dataclass(slots=True)
class Lane:
    """The messages of one order."""

    count: int = 0
    last: int = 0
    """No message has a higher seq."""


@dataclass(slots=True, eq=False)
class DestinationState:
    """Under the state's lock. Outlives the destination, since somebody may wait here for its first message."""

    destination: Destination
    number: int = 0
    """In DESTINATIONS; 0: it is not there."""
    count: int = 0
    size: int = 0
    expiring: int = 0
    """Messages that expire."""
    lanes: dict[int, Lane] = field(default_factory=dict)
    """By order."""
    durables: dict[SubscriptionKey, Durable] = field(default_factory=dict)
    """Replaced as a whole, never changed: who goes through it holds no lock."""
    feed: Feed = field(init=False)
    """Of a queue; a topic's subscriptions have their own."""
    purging: int = 0

    def __post_init__(self) -> None:
        self.feed = Feed(self)

    @property
    def is_topic(self) -> bool:
        return self.destination.kind is Kind.TOPIC

    def feeds(self) -> Iterator[Feed]:
        """All that deliver its messages."""
        if self.is_topic:
            for durable in self.durables.values():
                yield durable.feed
        else:
            yield self.feed

    def entitled(self, seq: int) -> list[Durable]:
        """The subscriptions that a message is for."""
        return [durable for durable in self.durables.values() if durable.start <= seq]

    def lane(self, order: int) -> Lane:
        lane = self.lanes.get(order)
        if lane is None:
            lane = self.lanes[order] = Lane()
        return lane

    def wake(self) -> None:
        for feed in self.feeds():
            feed.wake()
