"""What a store knows of its tables without asking them: how much there is of what, who receives from where, which
messages are held, what is prepared. It is as large as that, not as the backlog (invariant 10).

St1  Changed by the thread that writes, once a transaction of its own is committed (applying.py), and at open.
St2  `places` holds every message that is leased, claimed or has come back, for as long as it is not dead: what is not
     there any more was acked already. It may know more than `Delivery.held`, never less but for an interruption.
St3  `counts` holds what has come back oftener than the tables say, until they say it too.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, TypeVar

from sqlalchemy.engine import Connection

from ...policies.destination import Destination
from ...policies.options import SqlOptions
from ..delivery import PLAIN_ORDERS, PRIORITY_ORDERS, Delivery, Feed, Note, Place, order_of
from .branches import Branch
from .destinations import DestinationState, Durable
from .messages import Row, row_of
from .statements import Statements
from .window import DuplicateWindow

T = TypeVar("T")
Read = Callable[[Callable[[Connection], T]], T]

INLINE: Final = 4096
"""Messages up to this size (bytes) are read ahead with their bodies."""
ROWS_MAX: Final = 2048
ROWS_BYTES_MAX: Final = 4 << 20
PAGE: Final = 256
LAST: Final = (1 << 63) - 1
"""The highest seq there is."""

# Where a place has what it holds behind order, seq and expiry: size, parts, priority, destination number.
SIZE, PARTS, NUMBER = 3, 4, 6


class Rows:
    """What was read ahead: the latest, as many as fit. Under the state's lock."""

    def __init__(self) -> None:
        self._rows: OrderedDict[int, Row] = OrderedDict()
        self._bytes = 0

    def get(self, seq: int) -> Row | None:
        return self._rows.get(seq)

    def put(self, row: Row) -> None:
        if row.size > INLINE:
            return
        self.drop(row.seq)
        self._rows[row.seq] = row
        self._bytes += row.size
        while len(self._rows) > ROWS_MAX or self._bytes > ROWS_BYTES_MAX:
            self._bytes -= self._rows.popitem(last=False)[1].size

    def drop(self, seq: int) -> None:
        row = self._rows.pop(seq, None)
        if row is not None:
            self._bytes -= row.size

    def clear(self) -> None:
        self._rows.clear()
        self._bytes = 0


class Look:
    """A browse under way: which of those that it has looked up are still there."""

    __slots__ = ("__weakref__", "feed", "left", "stale", "state")

    def __init__(self, state: DestinationState, feed: Feed | None) -> None:
        self.state, self.feed = state, feed
        self.left: set[int] = set()
        self.stale = False
        """Much has changed: look up the rest anew."""


class State:
    """Of one store that is open. It is the Source of its Delivery. `lock` guards all fields; those who hold it may read
    from the database."""

    def __init__(self, options: SqlOptions, statements: Statements, delivery: Delivery, read: Read[Any]) -> None:
        self.lock = threading.RLock()
        """Taken by `with` itself, never inside a function that returns with it: only so can Ctrl-C not leak it."""
        self.options, self.statements, self.delivery, self._read = options, statements, delivery, read
        self.window = DuplicateWindow(options.duplicate_window)
        self.destinations: dict[Destination, DestinationState] = {}
        self.by_number: dict[int, DestinationState] = {}
        self.durables: dict[int, Durable] = {}
        self.places: dict[int, Place] = {}
        """Held key -> place."""
        self.counts: dict[int, int] = {}
        """Held key -> how often it has come back."""
        self.rows = Rows()
        self.looks: weakref.WeakSet[Look] = weakref.WeakSet()
        """They go with who looks, wherever he is interrupted."""
        self.prepared: dict[bytes, Branch] = {}
        self.committed: dict[bytes, None] = {}
        self.batch = 0
        self.last_seq = 0
        self.last_number = 0
        """Of destinations and subscriptions."""
        self.free_until = LAST
        """No seq from the next to here is taken."""
        self.wrapped = False
        self.messages = self.size = 0
        self.next_expiry = 0
        """No message expires before (ms); 0: none does."""

    def destination(self, destination: Destination) -> DestinationState:
        """Made if it is new here."""
        state = self.destinations.get(destination)
        if state is None:
            with self.lock:
                state = self.destinations.setdefault(destination, DestinationState(destination))
        return state

    def place_of(self, state: DestinationState, row: Sequence[Any]) -> Place:
        """`row` begins with seq, priority, expiration, size, parts."""
        return (order_of(row[1], self.options.priorities), row[0], row[2], row[3], row[4], row[1], state.number)

    def row(self, seq: int) -> Row | None:
        """A message's row with its content, unless that is in chunks; None if it is dead."""
        row = self.rows.get(seq)
        if row is None:
            found = self._all("select.message", message=seq)
            row = row_of(found[0]) if found else None
            if row is not None:
                self.rows.put(row)
        return row

    def whole_row(self, connection: Connection, seq: int) -> Row | None:
        """A message's row with all of its body; None if it is dead."""
        found = connection.execute(self.statements["select.message"], {"message": seq}).one_or_none()
        if found is None:
            return None
        row = row_of(found)
        if not row.parts:
            return row
        parts = connection.execute(self.statements["select.chunks"], {"message": seq}).all()
        if len(parts) != row.parts:
            return None  # its ack came between
        return row._replace(content=b"".join(bytes(part) for (part,) in parts))

    def _all(self, statement: str, **parameters: Any) -> Sequence[Any]:
        found: Sequence[Any] = self._read(lambda c: c.execute(self.statements[statement], parameters).all())
        return found

    # The Source

    def orders(self, feed: Feed) -> Sequence[int]:
        if not self.options.priorities:
            return PLAIN_ORDERS
        lanes = feed.owner.lanes
        return [order for order in PRIORITY_ORDERS if order in lanes and lanes[order].count]

    def fetch(self, feed: Feed, order: int, after: int, limit: int) -> Sequence[Place]:
        state: DestinationState = feed.owner
        lane = state.lanes.get(order)
        if lane is None or after >= lane.last:
            return ()
        if feed.key is None:
            rows = self.page(state, None, order, after, limit)
            if len(rows) < limit:
                lane.last = min(lane.last, rows[-1].seq if rows else after)
        else:
            durable = self.durables.get(feed.number)
            if durable is None or not durable.count:
                return ()
            rows = self.page(state, durable, order, after, limit)
        for row in rows:
            self.rows.put(row)
        return [self.place_of(state, row) for row in rows]

    def page(
        self, state: DestinationState, durable: Durable | None, order: int, after: int, limit: int
    ) -> Sequence[Row]:
        """The next messages of one order, in memory those only that are not too long."""
        name, parameters = "select.messages", {"destination": state.number, "most": limit, "inline": INLINE}
        if durable is not None:
            name += ".durable"
            parameters["durable"] = durable.number
            after = max(after, durable.start - 1)
        if self.options.priorities:
            name += ".priority"
            parameters["priority"] = PRIORITY_ORDERS[-1] - order
        return [row_of(found) for found in self._all(name, after=after, **parameters)]

    def place(self, feed: Feed, seq: int) -> Place | None:
        found = self.places.get(feed.base + seq)
        if found is not None:
            return found
        row = self.row(seq)
        if row is None or (feed.key is not None and self._acked(feed, seq)):
            return None
        return self.place_of(feed.owner, row)

    def _acked(self, feed: Feed, seq: int) -> bool:
        return feed.number in {row[0] for row in self._all("select.acked", message=seq)}

    def deliveries(self, feed: Feed, seq: int) -> int:
        count = self.counts.get(feed.base + seq)
        if count is not None:
            return count
        if feed.key is None:
            row = self.row(seq)
            return 0 if row is None else row.deliveries
        durable = self.durables.get(feed.number)
        if durable is None or not durable.redelivered:
            return 0
        found = self._all("select.redelivered", durable=durable.number, message=seq)
        return found[0][0] if found else 0

    def expired(self, now: int) -> Iterator[tuple[Sequence[Feed], Place]]:
        if not self.next_expiry or now < self.next_expiry:
            return
        after, seq = 0, 0
        while rows := self._all("select.expired", now=now, after=after, after_id=seq, most=PAGE):
            for number, *row in rows:
                seq, after = row[0], row[2]
                state = self.by_number.get(number)
                if state is not None:
                    yield self._waiting(state, seq), self.place_of(state, row)
        if not after:
            self.next_expiry = self._all("select.expiry")[0][0] or 0

    def _waiting(self, state: DestinationState, seq: int) -> list[Feed]:
        """The feeds that have yet to ack a message."""
        if not state.is_topic:
            return [state.feed]
        durables = state.entitled(seq)
        acked = {row[0] for row in self._all("select.acked", message=seq)} if len(durables) > 1 else set()
        return [durable.feed for durable in durables if durable.number not in acked]

    def spent(self, least: int) -> Iterator[tuple[Feed, int]]:
        after = 0
        while rows := self._all("select.spent", least=least, after=after, most=PAGE):
            for number, after in rows:
                state = self.by_number.get(number)
                if state is not None:
                    yield state.feed, after
        for durable in list(self.durables.values()):
            after = 0
            while durable.redelivered and (
                rows := self._all("select.spent.durable", durable=durable.number, least=least, after=after, most=PAGE)
            ):
                for _, after in rows:
                    yield durable.feed, after

    # Holding

    def lease(self, feed: Feed) -> Place | None:
        """Under the lock: the next message, for its receiver."""
        self.delivery.require_room()
        place = self.delivery.lease(feed, self)
        if place is not None:
            self.places[feed.base + place[1]] = place
        return place

    def let_go(self, feed: Feed, seq: int) -> None:
        """Under the lock: whoever leased it has found it dead."""
        self.places.pop(feed.base + seq, None)
        self.delivery.acked(feed, seq)

    def note_of(self, destination: Destination, numbers: Iterable[int], whole: bool) -> Note | None:
        """What receives from a queue, or for these subscriptions of a topic, as far as they are still there; `whole`:
        its ack is for all that have yet to ack."""
        state = self.destinations.get(destination)
        if state is None:
            return None
        if not state.is_topic:
            return (state.feed,) if whole else state.feed
        feeds = tuple(self.durables[number].feed for number in numbers if number in self.durables)
        if not feeds:
            return None
        return feeds if whole else feeds[0]

    def held_of(self, feeds: Iterable[Feed]) -> set[int]:
        """The seqs of all that is held of these."""
        wanted = set(feeds)
        return {key - feed.base for key, (feed, _) in list(self.delivery.held.items()) if feed in wanted}

    def held(self) -> tuple[int, int]:
        """Messages, and their bytes."""
        return self.messages, self.size
