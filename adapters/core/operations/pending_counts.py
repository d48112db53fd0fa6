"""The numbers of messages that there will be more once what is pending is applied."""

from __future__ import annotations

from collections.abc import Sequence

from ..state.leases import DestinationState, SubscriptionState
from ..state.states import Catalog

Counted = DestinationState | SubscriptionState
"""The things that messages are counted for."""


class PendingCounts:
    """The counts that one look at a store finds pending. Changes count themselves (Change.add_to)."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self.more: dict[Counted, int] = {}
        """By how much each count changes, as far as that can be told; fewer if negative."""
        self.unknown: set[Counted] = set()
        """Counts of which that cannot be told. These are what many acks at once concern, and a topic if others may have
        yet to ack what one subscription has acked."""
        self.is_guess: bool = False
        """A count was asked for of which that cannot be told."""

    def of(self, counted: Counted) -> int:
        """Return the count that a destination or subscription will have."""
        self.is_guess |= counted in self.unknown
        return counted.total + self.more.get(counted, 0)

    def add(self, counted: Counted, messages: int) -> None:
        """Count so many messages more."""
        self.more[counted] = self.more.get(counted, 0) + messages

    def add_send(self, state: DestinationState, recipients: Sequence[SubscriptionState]) -> None:
        """Count a message, which is for these subscriptions of a topic; for none it is not kept."""
        if state.is_map:
            self.unknown.add(state)  # it may take the place of another
        if recipients or not state.is_topic:
            self.add(state, 1)
            for subscriber in recipients:
                self.add(subscriber, 1)

    def add_ack(self, state: DestinationState, number: int) -> None:
        """Count the ack of a message, of a topic's for the subscription with this number."""
        acked: Counted | None = state
        if state.is_topic:
            self.unknown.add(state)
            acked = self._catalog.subscriptions.get(number)
        if acked is not None:
            self.add(acked, -1)
