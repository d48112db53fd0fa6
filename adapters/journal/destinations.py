"""What a store knows of one destination: its id and counts, who receives from it, its durable subscriptions."""

from __future__ import annotations

from typing import Final

from ...policies.destination import Destination, Kind
from ..base import Subscription, SubscriptionKey
from ..delivery import Feed
from ..wal import format as w
from . import format as f

Place = tuple[int, int, int, int, int, int]
"""Where a message is: order, seq, when it expires (ms, 0: never); LSN, offset in the segment, length of its record."""
SEQ: Final = 1
LSN: Final = 3
OFFSET: Final = 4
LENGTH: Final = 5


class SubscriptionState:
    """One durable subscription of a topic. All fields belong to the store's index lock."""

    __slots__ = ("bit", "changed", "count", "feed", "number", "start", "state", "subscription")

    def __init__(self, number: int, state: DestinationState, subscription: Subscription, start: int) -> None:
        self.number = number
        """In this store, for life: the journal knows it by that."""
        self.state = state
        self.subscription = subscription
        self.start = start
        """Messages from the one after this seq are for it; of those before, none."""
        self.bit = 0
        """The index's own: set in the row of a message that it has yet to ack. 0: the index does not know it."""
        self.count = 0
        """Messages that it has yet to ack."""
        self.changed = True
        self.feed = Feed(state, number, subscription.key)

    def record(self) -> bytes:
        """The payload of its SUBSCRIBE record."""
        _, name, client, selector, no_local = self.subscription
        flags = (f.NO_LOCAL if no_local else 0) | (f.HAS_SELECTOR if selector is not None else 0)
        texts = [text.encode() for text in (client, name, selector or "")]
        start = f.SUBSCRIBE_PAYLOAD.pack(self.state.id, self.number, self.start, flags, *map(len, texts))
        return start + b"".join(texts)


class DestinationState:
    """All fields belong to the store's index lock, but `declared`, which is the leader's."""

    __slots__ = (
        "bytes", "changed", "count", "declared", "destination", "feed", "id", "is_topic", "mask", "named", "newest",
        "subscribers",
    )  # fmt: skip

    def __init__(self, number: int, destination: Destination, declared: bool) -> None:
        self.id = number
        self.destination = destination
        self.is_topic = destination.kind is Kind.TOPIC
        self.declared = declared
        """The journal holds the record that gives the id its name."""
        self.named = declared
        """The index has applied that record: what `declared` says, as of what the index reflects."""
        self.count = 0
        self.bytes = 0
        self.changed = True
        self.feed = Feed(self)
        """Of a queue."""
        self.subscribers: dict[int, SubscriptionState] = {}
        """By number. Replaced, not changed, so that other threads may walk it."""
        self.mask = 0
        """The bits of all of them."""
        self.newest = 0
        """The latest start of any of them."""

    @property
    def send_overhead(self) -> int:
        """At most so many bytes a send takes in the journal beside what its sender encoded."""
        return f.SEND_START.size + w.CRC.size + (0 if self.declared else f.DECLARATION_BYTES_MAX)

    def declaration(self) -> bytes:
        """The payload of its DESTINATION record."""
        destination = self.destination
        return f.DESTINATION_PAYLOAD.pack(self.id, destination.kind.value) + destination.name.encode()

    def entitled(self, seq: int) -> int:
        """The bits of those whom a message of that seq is for. Of one that takes effect now: all."""
        if seq > self.newest:
            return self.mask
        return sum(known.bit for known in self.subscribers.values() if known.start < seq)

    def join(self, known: SubscriptionState) -> None:
        """One more subscription; its bit is set."""
        self.subscribers = {**self.subscribers, known.number: known}
        self.mask |= known.bit
        self.newest = max(self.newest, known.start)

    def leave(self, known: SubscriptionState) -> None:
        """One less. Its bit is in no message any more, and may be another's."""
        self.subscribers = {number: other for number, other in self.subscribers.items() if other is not known}
        self.mask &= ~known.bit

    def free_slot(self) -> int:
        """The number of a bit that is no subscription's."""
        return (~self.mask & (self.mask + 1)).bit_length() - 1

    def subscriber(self, key: SubscriptionKey) -> SubscriptionState | None:
        """The subscription of that key."""
        return next((known for known in self.subscribers.values() if known.subscription.key == key), None)

    def feeds(self, number: int = 0) -> tuple[Feed, ...]:
        """A queue's; of a topic those of all its subscriptions, or of the one with this number."""
        if not self.is_topic:
            return (self.feed,)
        return tuple(s.feed for s in self.subscribers.values() if number in (0, s.number))

    def wake(self) -> None:
        """Tell all that wait for a message here."""
        if self.feed.waiters:
            self.feed.wake()
        for known in self.subscribers.values():
            known.feed.wake()
