"""What Anabranch's delivery asks of a store, and who draws from which feed. All of it under the store's lock."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from anabranch.adapters.base import SubscriptionKey
from anabranch.adapters.delivery import PLAIN_ORDERS, PRIORITY_ORDERS, Feed, Note, Place, order_of
from anabranch.policies.destination import Destination, Kind
from anabranch.policies.errors import DestinationError, UnknownSubscriptionError

from .contents import QUEUE, Acked, Contents, Stored


class Source:
    """anabranch.adapters.delivery.Source, over the contents of the day."""

    def __init__(self, contents: Contents, priorities: bool) -> None:
        self.contents = contents
        self.feeds: dict[tuple[Destination, int], Feed] = {}
        """By destination and number: QUEUE, or that of a subscription."""
        self._priorities = priorities

    def orders(self, feed: Feed) -> Sequence[int]:
        return PRIORITY_ORDERS if self._priorities else PLAIN_ORDERS

    def fetch(self, feed: Feed, order: int, after: int, limit: int) -> Sequence[Place]:
        found = (s for s in self.contents.of(str(feed.owner)).values() if s.seq > after and feed.number in s.pending)
        return [place for stored in found if (place := self.key_of(stored))[0] == order][:limit]

    def place(self, feed: Feed, seq: int) -> Place | None:
        stored = self.contents.of(str(feed.owner)).get(seq)
        return self.key_of(stored) if stored is not None and feed.number in stored.pending else None

    def deliveries(self, feed: Feed, seq: int) -> int:
        return self.contents.of(str(feed.owner))[seq].pending[feed.number]

    def expired(self, now: int) -> Iterable[tuple[Sequence[Feed], Place]]:
        for name, messages in self.contents.destinations.items():
            for stored in messages.values():
                if 0 < stored.sent.expires_at_ms <= now:
                    yield [self.feed(Destination.restored(name), n) for n in stored.pending], self.key_of(stored)

    def spent(self, least: int) -> Iterable[tuple[Feed, int]]:
        for name, messages in self.contents.destinations.items():
            for stored in messages.values():
                for number, count in stored.pending.items():
                    if count >= least:
                        yield self.feed(Destination.restored(name), number), stored.seq

    def key_of(self, stored: Stored) -> Place:
        return order_of(stored.sent.priority, self._priorities), stored.seq, stored.sent.expires_at_ms

    def feed_of(self, destination: Destination, subscription: SubscriptionKey | None) -> Feed:
        """What a receiver draws from. Raises DestinationError, UnknownSubscriptionError."""
        if (destination.kind is Kind.TOPIC) != (subscription is not None):
            raise DestinationError(f"{destination}: a topic is received from for a subscription, a queue without one")
        return self.feed(destination, QUEUE if subscription is None else self.number(destination, subscription))

    def feed(self, destination: Destination, number: int) -> Feed:
        known = self.contents.subscriptions.get(number)
        key = (known.client_id, known.name) if known is not None else None
        return self.feeds.setdefault((destination, number), Feed(destination, number, key))

    def number(self, topic: Destination, subscription: SubscriptionKey) -> int:
        number = self.contents.number_of(str(topic), *subscription)
        if number is None:
            raise UnknownSubscriptionError(f"{topic} has no durable subscription {subscription!r}")
        return number

    def note_of(self, acked: Acked) -> Note:
        """Of a branch's ack: whom it is claimed for."""
        destination = Destination.restored(acked.destination)
        if acked.number is not None:
            return self.feed(destination, acked.number)
        stored = self.contents.of(acked.destination).get(acked.seq)
        return tuple(self.feed(destination, number) for number in (stored.pending if stored else ()))

    def numbers(self, destination: Destination) -> list[int]:
        """Of all that may draw from it."""
        found = [n for n, known in self.contents.subscriptions.items() if known.topic == str(destination)]
        return found if destination.kind is Kind.TOPIC else [QUEUE]
