"""The numbers of messages that there will be more once what is pending is applied."""

from __future__ import annotations

from collections.abc import Iterable

from ..operations.changes import Ack, AckRange, Change, Send, SendMany
from ..state.states import Catalog, DestinationState, SubscriptionState

Counted = DestinationState | SubscriptionState
"""The things that messages are counted for."""


class PendingCounts:
    """The counts that one look at a store finds pending."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self.more: dict[Counted, int] = {}
        """By how much each count changes, as far as that can be told; fewer if negative."""
        self.unknown: set[Counted] = set()
        """Counts of which that cannot be told. These are what many acks at once concern, and a topic if others may have
        yet to ack what one subscription has acked."""

    def of(self, counted: Counted) -> int:
        """Return the count that a destination or subscription will have."""
        return counted.total + self.more.get(counted, 0)

    def add(self, change: Change, subscribed: Iterable[SubscriptionState] = ()) -> None:
        """Count a pending change. `subscribed`: the subscriptions that a message is for, if the message does not say
        so."""
        more = self.more
        if type(change) is Send:
            if change.state.is_map:
                self.unknown.add(change.state)  # it may take the place of another
            entitled = list(change.entitled or subscribed)
            if entitled or not change.state.is_topic:
                more[change.state] = more.get(change.state, 0) + 1
                for subscriber in entitled:
                    more[subscriber] = more.get(subscriber, 0) + 1
        elif type(change) is SendMany:
            more[change.state] = more.get(change.state, 0) + len(change)
        elif type(change) is Ack:
            acked: Counted | None = change.state
            if change.state.is_topic:
                self.unknown.add(change.state)
                acked = self._catalog.subscriptions.get(change.number)
            if acked is not None:
                more[acked] = more.get(acked, 0) - 1
        elif type(change) is AckRange:
            self.unknown |= {change.state, *change.state.subscriptions.values()}
