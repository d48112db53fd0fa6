"""The counts that a store knows without asking its tables, and what a write changes of them.

They are counted at open, and from then on by what each write has done. So nothing here costs more where the backlog
is longer (invariant 10).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from ..core.operations.changes import Send
from ..core.operations.pending_counts import Counted
from ..core.record.place import order_of
from ..core.state.duplicates import Key
from ..core.state.leases import Channel, DestinationState, SubscriptionState
from ..core.state.priorities import Orders
from ..core.state.states import Catalog


@dataclass(slots=True)
class Level:
    """The messages of one order of a destination."""

    count: int = 0
    last: int = 0
    """A seq that no message exceeds."""


class Levels:
    """The messages of a destination by order, of those orders that have some; DestinationState.own."""

    __slots__ = ("_levels", "orders")

    def __init__(self) -> None:
        self._levels: dict[int, Level] = {}
        self.orders: Final = Orders()

    def get(self, order: int) -> Level | None:
        return self._levels.get(order)

    def count(self, order: int, more: int, last: int) -> None:
        """Add so many messages to an order, or take them off. `last` is the highest new seq, 0: there is none."""
        level = self._levels.get(order)
        if level is None:
            self.orders.add(order)
            level = self._levels[order] = Level()
        level.count += more
        level.last = max(level.last, last)
        if not level.count:
            del self._levels[order]
            self.orders.discard(order)


@dataclass(slots=True)
class Amount:
    """The growth of a level."""

    messages: int = 0
    bytes: int = 0
    last: int = 0
    """The highest seq that is new; 0: none."""


@dataclass(slots=True)
class Effects:
    """The effects of one write on the counts."""

    amounts: dict[tuple[DestinationState, int], Amount] = field(default_factory=dict)
    """The growth of levels, by destination and order."""
    to_ack: dict[SubscriptionState, int] = field(default_factory=dict)
    """The number of further messages that each subscription has to ack."""
    counted: dict[DestinationState, tuple[Sequence[Any], dict[SubscriptionState, int]]] = field(default_factory=dict)
    """Counts made anew, instead of all of `amounts` and `to_ack` before. A destination has rows as of `select.counts`
    behind the destination, and what its subscriptions have to ack."""
    acked: list[tuple[int, int]] = field(default_factory=list)
    """The number of the subscription (0: a queue) and the seq of each message acked."""
    dead: list[int] = field(default_factory=list)
    """The seqs of messages that are gone."""
    returned: dict[tuple[int, int], int] = field(default_factory=dict)
    """The times that a message has been given back, by the subscription's number and seq."""
    redelivered: set[SubscriptionState] = field(default_factory=set)
    """Subscriptions that have rows in REDELIVERIES now."""
    many: bool = False
    """True if more messages are gone than those that are listed."""
    expiry: int = 0
    """The earliest time (ms) at which something new expires; 0: nothing does."""
    prepared: dict[bytes, int] = field(default_factory=dict)
    """The row in XALOG of each prepared transaction."""
    settled: list[bytes] = field(default_factory=list)
    removed: list[DestinationState] = field(default_factory=list)
    leaving: list[Channel] = field(default_factory=list)
    """Channels of removed destinations and of ended subscriptions, whose messages are still to go."""
    left: list[tuple[DestinationState, int]] = field(default_factory=list)
    """The destination and the number of the subscription (0: the destination itself) of those which are gone for
    good."""
    waits: dict[Counted, int] = field(default_factory=dict)
    """The number of further messages that wait for their time, of a destination and for a subscription."""
    waiting: dict[Counted, int] = field(default_factory=dict)
    """The number of messages that wait, counted anew."""
    due: int = 0
    """The earliest time (ms) until which something waits by now; 0: nothing new."""
    ids: list[Key] = field(default_factory=list)
    """Ids that are new in the duplicate window."""
    last_seq: int = 0

    def sent(self, send: Send) -> None:
        """Count a message that is kept."""
        amount = self._amount(send.state, send.order)
        amount.messages += 1
        amount.bytes += len(send.record)
        amount.last = max(amount.last, send.seq)
        for subscriber in send.recipients:
            self.to_ack[subscriber] = self.to_ack.get(subscriber, 0) + 1
        if send.expires_at_ms and not 0 < self.expiry <= send.expires_at_ms:
            self.expiry = send.expires_at_ms

    def more_waits(self, counted: Counted, more: int) -> None:
        """Count so many more messages that wait, or fewer."""
        self.waits[counted] = self.waits.get(counted, 0) + more

    def free(self, state: DestinationState, order: int, seq: int) -> None:
        """Note that a message waits no longer."""
        amount = self._amount(state, order)
        amount.last = max(amount.last, seq)

    def gone(self, state: DestinationState, order: int, messages: int, size: int) -> None:
        """Count so many messages of one order as dead."""
        amount = self._amount(state, order)
        amount.messages -= messages
        amount.bytes -= size

    def _amount(self, state: DestinationState, order: int) -> Amount:
        amount = self.amounts.get((state, order))
        if amount is None:
            amount = self.amounts[state, order] = Amount()
        return amount

    def acks(self, subscriber: SubscriptionState, count: int) -> None:
        """Count so many fewer messages that a subscription has to ack."""
        self.to_ack[subscriber] = self.to_ack.get(subscriber, 0) - count

    def count_anew(self, state: DestinationState, rows: Sequence[Any], to_ack: dict[SubscriptionState, int]) -> None:
        """Take what was counted anew of a destination. Its earlier count is void."""
        self.amounts = {key: amount for key, amount in self.amounts.items() if key[0] is not state}
        self.to_ack = {subscriber: count for subscriber, count in self.to_ack.items() if subscriber.topic is not state}
        self.counted[state] = (rows, to_ack)

    def apply_counts(self, catalog: Catalog, priorities: bool) -> None:
        """Apply the counts to the destinations and subscriptions. Called under the store's lock."""
        for state, (rows, to_ack) in self.counted.items():
            load_counts(catalog, state, rows, priorities)
            for subscriber, count in to_ack.items():
                subscriber.count = count
        for (state, order), amount in self.amounts.items():
            if state.own is None:
                state.own = Levels()
            levels: Levels = state.own
            levels.count(order, amount.messages, amount.last)
            catalog.count(state, amount.messages, amount.bytes)
        for subscriber, more in self.to_ack.items():
            subscriber.count += more
        for counted, more in self.waits.items():
            counted.delayed += more
        for counted, count in self.waiting.items():
            counted.delayed = count
        for channel in self.leaving:
            catalog.leaving[channel] = None
        for state, number in self.left:
            catalog.left(state, number)


def load_counts(catalog: Catalog, state: DestinationState, rows: Iterable[Sequence[Any]], priorities: bool) -> None:
    """Set what there is of a destination: priority, messages, bytes, the highest seq of each row."""
    catalog.count(state, -state.count, -state.bytes)
    levels = Levels()
    for priority, count, size, last in rows:
        levels.count(order_of(priority, priorities), count, last)
        catalog.count(state, count, int(size))
    state.own = levels
