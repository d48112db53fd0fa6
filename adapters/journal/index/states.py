"""The index's knowledge of a destination and of a subscription, beside the core's: their `own`. All belongs to the
store's lock, and is as of what is applied."""

from __future__ import annotations

from typing import Final

from ...core.state.leases import DestinationState, SubscriptionState


class IndexedDestination:
    """The index's knowledge of a destination that it has met."""

    __slots__ = ("leaving", "mask", "named", "newest", "subscriptions", "taken")

    def __init__(self) -> None:
        self.named: bool = True
        """True if the destination is there: the index has a row for it, or is to write one."""
        self.leaving: bool = False
        """True if the destination was removed, and messages of it are still to go; the index has a row for it."""
        self.subscriptions: dict[int, SubscriptionState] = {}
        """Subscriptions of a topic, by number; also those that have ended and for which messages are still to go."""
        self.mask: int = 0
        """The bits of those that have not ended."""
        self.taken: int = 0
        """The bits of all of them."""
        self.newest: int = 0
        """The latest start of any of them."""

    def reset(self) -> None:
        """Forget all subscriptions."""
        self.subscriptions, self.mask, self.taken, self.newest = {}, 0, 0, 0

    def recipients(self, seq: int) -> int:
        """Return the bits of those whom a message of that seq is for. For one that takes effect now: all."""
        if seq > self.newest:
            return self.mask
        bits: int = sum(subscriber.own.bit for subscriber in self.subscriptions.values() if subscriber.start < seq)
        return bits & self.mask

    def join(self, subscriber: SubscriptionState) -> None:
        """Add a subscription; its bit is set."""
        self.subscriptions[subscriber.number] = subscriber
        self.taken |= subscriber.own.bit
        if not subscriber.own.ended:
            self.mask |= subscriber.own.bit
        self.newest = max(self.newest, subscriber.start)

    def end(self, subscriber: SubscriptionState) -> None:
        """End a subscription: no new message is for it. Its bit is in messages still."""
        subscriber.own.ended = True
        self.mask &= ~subscriber.own.bit

    def leave(self, subscriber: SubscriptionState) -> None:
        """Remove a subscription. Its bit is in no message any more, and may be another's."""
        self.subscriptions.pop(subscriber.number, None)
        self.mask &= ~subscriber.own.bit
        self.taken &= ~subscriber.own.bit

    def free_slot(self) -> int:
        """Return the number of a bit that is no subscription's."""
        return (~self.taken & (self.taken + 1)).bit_length() - 1


class IndexedSubscription:
    """The index's knowledge of a subscription."""

    __slots__ = ("bit", "ended")

    def __init__(self, bit: int, ended: bool = False) -> None:
        self.bit: Final = bit
        """Set in the row of a message that it has yet to ack."""
        self.ended: bool = ended
        """Messages are still to go that are for it alone."""


def indexed(state: DestinationState) -> IndexedDestination:
    """Return what the index keeps of a destination, made if the index has not met it."""
    own: IndexedDestination | None = state.own
    if own is None:
        own = state.own = IndexedDestination()
    return own
