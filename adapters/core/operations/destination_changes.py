"""Changes of destinations and of subscriptions (changes.py)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final, Protocol

from ...wal.ticket import SHRINKS
from ..state.leases import DestinationState, SubscriptionState
from ..store_types import Subscription, SubscriptionKey
from .changes import SMALL_BYTES, Change, MessagePlan, declaration_bytes

if TYPE_CHECKING:
    from ..state.delivery import Delivery
    from ..state.gates import Gate


class DestinationPlan(MessagePlan, Protocol):
    """A plan (plan.py), as changes of destinations and subscriptions look at it and add to it."""

    def find(self, state: DestinationState) -> DestinationState: ...

    def remove(self, state: DestinationState) -> None: ...

    def subscribe(self, subscriber: SubscriptionState) -> None: ...

    def unsubscribe(self, subscriber: SubscriptionState) -> None: ...

    def close(self, gate: Gate) -> None: ...


class DestinationTable(Protocol):
    """The steps of a backend for changes of destinations and subscriptions (table.py)."""

    def declare(self, state: DestinationState) -> None:
        """Declare a destination that is there from now on."""

    def remove(self, state: DestinationState) -> None:
        """Remove a destination with all that belongs to it: nothing of it is seen any more, and its number is never
        used again. Its messages, if there are more than AT_ONCE, may stay: then it is put into `Catalog.leaving`, and
        is told by `ack_range` which of them go, until one reaches to SEQ_MAX; or the next opening removes them."""

    def subscribe(self, subscriber: SubscriptionState) -> None:
        """Begin a subscription: all that its topic holds behind `subscriber.start` is for it as well."""

    def unsubscribe(self, subscriber: SubscriptionState) -> None:
        """End a subscription: it has acked all, so to speak. If its topic holds more than AT_ONCE messages, it may do
        so by pages, likewise."""


class Declare(Change):
    """The change by which a destination gets its number, unless it has one. Made by the plan, too."""

    __slots__ = ("size", "state")

    brings = True

    def __init__(self, state: DestinationState) -> None:
        self.state: DestinationState = state
        self.size: int = SMALL_BYTES + declaration_bytes(state)

    def plan(self, plan: DestinationPlan) -> None:
        self.state = plan.current(self.state)
        plan.declare(self.state)

    def apply(self, table: DestinationTable) -> None:
        table.declare(self.state)


class Remove(Change):
    """The change by which a destination goes, with its messages, leased ones too, and its subscriptions."""

    __slots__ = ("state",)

    leaves = SHRINKS

    def __init__(self, state: DestinationState) -> None:
        self.state: DestinationState = state

    def plan(self, plan: DestinationPlan) -> None:
        self.state = plan.find(self.state)
        if plan.is_declared(self.state):
            plan.remove(self.state)
            plan.changes.append(self)

    def apply(self, table: DestinationTable) -> None:
        table.remove(self.state)

    def settle(self, delivery: Delivery) -> None:
        for channel in (*self.state.channels(), self.state.channel):
            delivery.gone(channel)
        self.state.subscriptions = {}

    def states(self) -> Iterable[DestinationState]:
        return (self.state,)


class CloseGate(Change):
    """The change behind which, in the order of what is written, nothing is sent to a destination (rule K11)."""

    __slots__ = ("gate",)

    def __init__(self, gate: Gate) -> None:
        self.gate: Gate = gate

    def plan(self, plan: DestinationPlan) -> None:
        """Close the gate. No backend is told of it."""
        plan.close(self.gate)


class Subscribe(Change):
    """The change by which a durable subscription begins, unless it is there."""

    __slots__ = ("number", "retroactive", "size", "state", "subscriber", "subscription")

    brings = True
    subscriber: SubscriptionState
    """Set by the plan: that which begins."""

    def __init__(self, state: DestinationState, number: int, subscription: Subscription, retroactive: bool) -> None:
        self.state: DestinationState = state
        self.number: int = number
        self.subscription: Subscription = subscription
        self.retroactive: Final = retroactive
        self.size: int = SMALL_BYTES + subscription_bytes(subscription) + declaration_bytes(state)

    def plan(self, plan: DestinationPlan) -> tuple[SubscriptionState, bool]:
        """Begin the subscription; return it, and whether it was there already."""
        if plan.removed or not self.state.declared:
            self.state = plan.current(self.state)
        subscriber = plan.subscriptions(self.state).get(self.subscription.key)
        if subscriber is not None:
            return subscriber, True
        plan.declare(self.state)
        start = 0 if self.retroactive else plan.last_seq
        self.subscriber = subscriber = SubscriptionState(self.number, self.state, self.subscription, start)
        plan.subscribe(subscriber)
        plan.changes.append(self)
        return subscriber, False

    def apply(self, table: DestinationTable) -> None:
        table.subscribe(self.subscriber)

    def settle(self, delivery: Delivery) -> None:
        self.state.join(self.subscriber)

    def states(self) -> Iterable[DestinationState]:
        return (self.state,)


class Unsubscribe(Change):
    """The change by which a durable subscription ends, if it is there."""

    __slots__ = ("key", "state", "subscriber")

    leaves = SHRINKS
    subscriber: SubscriptionState
    """Set by the plan: that which ends."""

    def __init__(self, state: DestinationState, key: SubscriptionKey) -> None:
        self.state: DestinationState = state
        self.key: Final = key

    def plan(self, plan: DestinationPlan) -> tuple[SubscriptionState | None, bool]:
        """End the subscription; return it, if it was there."""
        self.state = plan.find(self.state)
        subscriber = plan.subscriptions(self.state).get(self.key)
        if subscriber is None:
            return None, False
        self.subscriber = subscriber
        plan.unsubscribe(subscriber)
        plan.changes.append(self)
        return subscriber, True

    def apply(self, table: DestinationTable) -> None:
        table.unsubscribe(self.subscriber)

    def settle(self, delivery: Delivery) -> None:
        self.state.leave(self.subscriber)
        delivery.gone(self.subscriber.channel)

    def states(self) -> Iterable[DestinationState]:
        return (self.state,)


def subscription_bytes(subscription: Subscription) -> int:
    """Return how many bytes a subscription's texts take."""
    texts = (subscription.client_id, subscription.name, subscription.selector or "")
    return sum(len(text.encode()) for text in texts)
