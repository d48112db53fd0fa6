"""Messages fetched ahead of a channel by order, and the orders in which more is there to be fetched.

O1  An order below `walked` of which the rows hold a message that was not fetched has a level whose cursor lies before
    that message. Of the orders from `walked` on nothing is known: the rows are asked for the next one.
O2  An order that has a level is in the heap; what is in the heap twice, or without a level, is skipped.
O3  A level that has run out goes, so that there are never more levels than orders with messages. At most FETCHED_MAX of
    them hold messages that were fetched.

Each order is asked for once, however many there are, and again only once something has come: a receive costs the same
with 10,000 priorities as with two. Ctrl-C may strike anywhere and makes a message seen twice, never out of sight.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from typing import Any, Final, Protocol

from ..record.place import ORDER_MAX, SEQ, Place

FETCH: Final = 64
"""How many messages a receive looks up ahead."""
FETCHED_MAX: Final = 32
"""Levels of a channel that keep what was fetched once something more urgent has come."""


class Orders:
    """Orders that are in use, for a backend to keep: `first` costs the same however many there are. Whoever is
    interrupted has one too many, which is harmless."""

    __slots__ = ("_sorted",)

    def __init__(self) -> None:
        self._sorted: list[int] = []

    def __len__(self) -> int:
        return len(self._sorted)

    def add(self, order: int) -> None:
        """Add an order. Idempotent."""
        at = bisect_left(self._sorted, order)
        if at == len(self._sorted) or self._sorted[at] != order:
            self._sorted.insert(at, order)

    def discard(self, order: int) -> None:
        """Discard an order. Idempotent."""
        at = bisect_left(self._sorted, order)
        if at < len(self._sorted) and self._sorted[at] == order:
            del self._sorted[at]

    def first(self, order: int) -> int | None:
        """Return the least order from `order` on; None if there is none."""
        at = bisect_left(self._sorted, order)
        return self._sorted[at] if at < len(self._sorted) else None


class Source(Protocol):
    """The channel that levels belong to (leases.py)."""

    state: Any
    subscription: Any
    held: dict[int, Any]


class OrderedRows(Protocol):
    """The rows (rows.py), as levels ask them for messages."""

    def next_order(self, state: Any, subscription: Any, order: int) -> int | None:
        """Return what Rows.next_order does."""

    def rows(self, state: Any, subscription: Any, order: int, after: int, limit: int) -> Sequence[Place]:
        """Return what Rows.rows does."""


class Level:
    """The messages that have been fetched of one order of a channel."""

    __slots__ = ("cursor", "end", "ready")

    def __init__(self, cursor: int = 0) -> None:
        self.cursor: int = cursor
        """All up to this seq has been fetched."""
        self.end: int = 0
        """The delivery's `epoch` in which there is nothing in the rows beyond the cursor: see arrivals.py."""
        self.ready: deque[Place] | None = None
        """None before the first fetch: a level may wait long for its turn, and there may be 65,536."""

    def fetch(self, channel: Source, rows: OrderedRows, order: int, epoch: int = 0) -> deque[Place] | None:
        """Look some ahead; None if nobody holds none. `epoch`: what `end` is if there is no more. A message claimed by
        a transaction that was prepared before this open is skipped: a rollback brings it back, after a commit nothing
        would tell that it is dead."""
        held, ready, self.end = channel.held, self.ready, 0
        if ready is None:
            ready = self.ready = deque()
        while places := rows.rows(channel.state, channel.subscription, order, self.cursor, FETCH):
            ready.extend(place for place in places if place[SEQ] not in held)
            self.cursor = places[-1][SEQ]
            if ready:
                self.end = epoch if len(places) < FETCH else 0
                return ready
        self.end = epoch
        return None

    def forget(self) -> None:
        """Forget what was fetched; what is still there is fetched anew."""
        self.end = self.cursor = 0
        self.ready = None

    def unfetch(self) -> None:
        """Forget what was fetched; it is fetched again."""
        if self.ready:
            self.cursor = self.ready[0][SEQ] - 1
        self.ready = None

    def set_back(self, seq: int) -> None:
        """Set the level back: a message has come that may lie before what was fetched, and is fetched next.
        Idempotent."""
        if self.cursor >= seq:
            self.end = 0
            self.cursor = min(seq, self.ready[0][SEQ] if self.ready else seq) - 1
            self.ready = None

    def remove(self, first: int, last: int) -> None:
        """Remove the messages between these seqs, which are dead. Idempotent."""
        if self.ready and self.ready[0][SEQ] <= last:
            self.ready = deque(place for place in self.ready if not first <= place[SEQ] <= last)


class Levels:
    """The levels of one channel of a store with priorities. All fields belong to the store's lock."""

    __slots__ = ("_fetched", "_heap", "_levels", "_walked")

    def __init__(self) -> None:
        self._levels: dict[int, Level] = {}
        self._heap: list[int] = []
        """Their orders."""
        self._fetched: dict[int, Level] = {}
        """Levels that may hold something."""
        self._walked = 0

    def __len__(self) -> int:
        return len(self._levels)

    @property
    def position(self) -> int:
        """Return a number that changes when messages pass, and may when none does."""
        return sum(level.cursor for level in self._levels.values())

    def add(self, order: int, seq: int) -> None:
        """Note a new message in the rows. May be said again."""
        if order < self._walked and order not in self._levels:
            heapq.heappush(self._heap, order)
            self._levels[order] = Level(seq - 1)

    def set_back(self, order: int, seq: int) -> None:
        """Set back the level of this order, as Level.set_back."""
        level = self._levels.get(order)
        if level is None:
            self.add(order, seq)
        else:
            level.set_back(seq)

    def first(self, channel: Source, rows: OrderedRows) -> deque[Place] | None:
        """Return what was fetched of the first order that has something; None if none has."""
        heap, levels = self._heap, self._levels
        while True:
            while heap and heap[0] < self._walked:
                order = heap[0]
                level = levels.get(order)
                if level is not None:
                    ready = level.ready
                    if not ready:
                        self._keep(order, level)  # first: what is fetched may have to be found again
                        ready = level.fetch(channel, rows, order)
                    if ready:
                        return ready
                    levels.pop(order, None)
                heapq.heappop(heap)
            next_order = None
            if self._walked <= ORDER_MAX:
                next_order = rows.next_order(channel.state, channel.subscription, self._walked)
            if next_order is None:
                self._walked = ORDER_MAX + 1
                if not heap:
                    return None
                continue
            heapq.heappush(heap, next_order)
            levels.setdefault(next_order, Level())
            self._walked = next_order + 1

    def _keep(self, order: int, level: Level) -> None:
        """Note a level that is about to be fetched from. The most urgent ones of the others keep what they hold."""
        fetched = self._fetched
        if len(fetched) >= FETCHED_MAX and order not in fetched:
            for used_up in [used_up for used_up, other in fetched.items() if not other.ready]:
                fetched.pop(used_up, None)
            if len(fetched) >= FETCHED_MAX:
                least = max(fetched)
                fetched[least].unfetch()
                fetched.pop(least, None)
        fetched[order] = level

    def remove(self, first: int, last: int) -> None:
        """Remove the messages between these seqs, which are dead. Idempotent."""
        for level in self._fetched.values():
            level.remove(first, last)
