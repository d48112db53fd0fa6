"""Reads from a store's tables: where messages are, and their records. Recently read messages are kept.

V1  What is not applied yet is not seen: rows behind `last_seq` are left out, though the database has them already. Not
    so of maps: the value before is gone by then, and a key is never to be without one in between. Nor of messages that
    begin to wait or come free, which the database may have elsewhere by then: who asks for both asks once, for both.
V2  `places` and `records` hold what the tables would say, since each write drops from them what it changes. Beyond
    their limits they forget; nothing depends on what they hold but how often the database is asked.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, Final

from sqlalchemy.engine import Connection

from ..core.record.place import ALSO_WAITING, SEQ, Place, priority_of
from ..core.state.leases import Channel, DestinationState, SubscriptionState
from ..core.state.states import Catalog
from .database.columns import CONTENT, ID, PARTS, place_of, record_of
from .database.columns import EXPIRES as EXPIRES_COLUMN
from .database.errors import Database
from .database.statements import Statements
from .effects import Effects, Levels

ID_MAX: Final = (1 << 63) - 1
INLINE: Final = 4096
"""Messages up to this size (bytes) are read ahead with their bodies."""
RECORDS_MAX: Final = 2048
RECORDS_BYTES_MAX: Final = 4 << 20
PLACES_MAX: Final = 20_000
PAGE: Final = 256


class Records:
    """Messages that were read ahead: the latest, as many as fit. Changed under the store's lock; any thread may get."""

    def __init__(self) -> None:
        self._records: OrderedDict[int, bytes] = OrderedDict()
        self._bytes = 0

    def get(self, seq: int) -> bytes | None:
        return self._records.get(seq)

    def put(self, seq: int, record: bytes) -> None:
        self.drop(seq)
        self._records[seq] = record
        self._bytes += len(record)
        while len(self._records) > RECORDS_MAX or self._bytes > RECORDS_BYTES_MAX:
            self._bytes -= len(self._records.popitem(last=False)[1])

    def drop(self, seq: int) -> None:
        record = self._records.pop(seq, None)
        if record is not None:
            self._bytes -= len(record)

    def clear(self) -> None:
        self._records.clear()
        self._bytes = 0


class Reading:
    """Rows (core/delivery.py) over the tables of one store that is open. Called under the store's lock, but
    `bodies`."""

    def __init__(self, database: Database, statements: Statements, catalog: Catalog, priorities: bool) -> None:
        self._database, self._statements, self._catalog = database, statements, catalog
        self._priorities = priorities
        self._records = Records()
        self._places: OrderedDict[tuple[int, int], Place] = OrderedDict()
        """Places by subscription's number (0: a queue) and seq."""
        self.last_seq: int = 0
        """The seq up to which all is applied."""
        self.next_expiry: int = 0
        """The time (ms) before which no message expires; 0: none does."""

    def _all(self, statement: str, **parameters: Any) -> Sequence[Any]:
        rows: Sequence[Any] = self._database.read(lambda c: c.execute(self._statements[statement], parameters).all())
        return rows

    def apply(self, effects: Effects) -> None:
        """Apply what a write has done, so that it is seen from now on."""
        effects.apply_counts(self._catalog, self._priorities)
        self.last_seq = effects.last_seq
        if effects.expiry and not 0 < self.next_expiry <= effects.expiry:
            self.next_expiry = effects.expiry
        for subscriber in effects.redelivered:
            subscriber.own = True
        for key, count in effects.returned.items():
            place = self._places.get(key)
            if place is not None:
                order, seq, expires, _, own = place
                self._places[key] = (order, seq, expires, count, own)
        if effects.many:
            self._places.clear()
            self._records.clear()
        for key in effects.acked:
            self._places.pop(key, None)
        for seq in effects.dead:
            self._records.drop(seq)
            self._places.pop((0, seq), None)

    # Where messages are

    def next_order(self, state: DestinationState, subscription: SubscriptionState | None, order: int) -> int | None:
        levels: Levels | None = state.own
        if levels is None or (subscription is not None and not subscription.count):
            return None
        also = order & ALSO_WAITING
        first = levels.orders.first(order - also)
        return first + also if first is not None else None

    def rows(
        self, state: DestinationState, subscription: SubscriptionState | None, order: int | None, after: int, limit: int
    ) -> Sequence[Place]:
        levels: Levels | None = state.own
        also = order is None or bool(order & ALSO_WAITING)
        if order is not None:
            order &= ~ALSO_WAITING
        level = levels.get(order) if levels is not None and order is not None else None
        if order is not None and (level is None or not level.count or (after >= level.last and not also)):
            return ()
        if subscription is not None and not subscription.count:
            return ()
        while True:
            rows = self._page(state, subscription, order, after, limit, also)
            if subscription is None and level is not None and len(rows) < limit and not also:
                level.last = min(level.last, rows[-1][ID] if rows else after)
            places = [place_of(row, self._priorities) for row in rows]
            if subscription is not None and subscription.own and places:
                places = self._with_deliveries(subscription, places, also)
            if places or len(rows) < limit:
                break
            after = rows[-1][ID]  # all of these wait for this subscription
        if len(places) < len(rows):
            there = {place[SEQ] for place in places}
            rows = [row for row in rows if row[ID] in there]
        if order is not None:
            number = subscription.number if subscription is not None else 0
            for row, place in zip(rows, places, strict=True):
                self._keep(number, place)
                if row[CONTENT] is not None and self._records.get(row[ID]) is None:
                    self._records.put(row[ID], record_of(row))
        return places

    def _page(
        self, state: DestinationState, subscription: SubscriptionState | None, order: int | None, after: int,
        limit: int, also: bool,
    ) -> list[Any]:  # fmt: skip
        """Return rows of MESSAGES; without an order, bodies are left out. `also` adds those that wait for all."""
        name, inline = "select.messages", INLINE if order is not None else -1
        parameters = {"destination": state.number, "most": limit, "inline": inline}
        if subscription is not None:
            name += ".durable"
            parameters["durable"] = subscription.number
            after = max(after, subscription.start)
        if order is not None and self._priorities:
            name += ".priority"
            parameters["priority"] = priority_of(order)
        if also:
            name += ".waiting"
            parameters["apart"] = -state.number
        return [row for row in self._all(name, after=after, **parameters) if row[ID] <= self.last_seq]

    def _with_deliveries(self, subscription: SubscriptionState, places: list[Place], also: bool) -> list[Place]:
        """Return the places with a subscription's delivery counts. `also` keeps those that wait for this
        subscription."""
        first, last = places[0][SEQ], places[-1][SEQ]
        counts, waits = {}, set()
        for seq, count, due in self._all("select.redelivered", durable=subscription.number, first=first, last=last):
            counts[seq] = count
            if due and not also:
                waits.add(seq)
        return [
            (order, seq, expires, counts.get(seq, 0), own) for order, seq, expires, _, own in places if seq not in waits
        ]

    def _keep(self, number: int, place: Place) -> None:
        self._places[number, place[SEQ]] = place
        if len(self._places) > PLACES_MAX:
            self._places.popitem(last=False)

    def row(
        self, state: DestinationState, subscription: SubscriptionState | None, seq: int, order: int | None = None
    ) -> Place | None:
        number = subscription.number if subscription is not None else 0
        place = self._places.get((number, seq))
        if place is not None:
            return place
        if seq > self.last_seq or (subscription is not None and seq <= subscription.start):
            return None
        if subscription is None:
            rows = self._all("select.place", message=seq)
        else:  # at once whether it is acked: the last ack takes the message and its rows of ACKS
            rows = self._all("select.place.durable", message=seq, durable=number)
        if not rows or rows[0][-1] != state.number:
            return None
        place = place_of(rows[0], self._priorities)
        if subscription is not None and subscription.own:
            place = self._with_deliveries(subscription, [place], True)[0]
        self._keep(number, place)
        return place

    def keyed(self, state: DestinationState, names: Sequence[bytes]) -> dict[bytes, Place]:
        """Return where the values of a map's keys are, as Backend."""
        rows = self._all("select.keyed", destination=state.number, keys=list(names))
        return {bytes(row[-1]): place_of(row, self._priorities) for row in rows}

    def keys(self, state: DestinationState, start: bytes, limit: int) -> list[tuple[bytes, Place]]:
        """Return the first keys of a map with their values' places, as Backend."""
        rows = self._all("select.keys", destination=state.number, start=start, most=limit)
        return [(bytes(row[-1]), place_of(row, self._priorities)) for row in rows]

    def expired(self, since: int, now: int) -> Iterator[tuple[DestinationState, Place]]:
        if not self.next_expiry or now < self.next_expiry:
            return
        after, seq = since, ID_MAX
        while rows := self._all("select.expired", now=now, after=after, after_id=seq, most=PAGE):
            removed = {
                channel.state.number: channel.state for channel in self._catalog.leaving if channel.state.removed
            }
            for row in rows:
                seq, after = row[ID], row[EXPIRES_COLUMN]
                state = self._catalog.by_number.get(row[-1]) or removed.get(row[-1])
                if state is not None and seq <= self.last_seq:
                    place = place_of(row, self._priorities)
                    self._keep(0, place)
                    yield state, place
        if after == since:
            self.next_expiry = self._all("select.expiry")[0][0] or 0

    def next_due(self) -> int:
        found = (self._all(name)[0][0] for name in ("select.next", "select.next.durable"))
        return min(filter(None, found), default=0)

    def due(self, now: int, limit: int) -> list[tuple[DestinationState, int, Place]]:
        removed = {channel.state.number: channel.state for channel in self._catalog.leaving if channel.state.removed}
        found: list[tuple[int, int, DestinationState, int, Place]] = []
        for row in self._all("select.due", now=now, most=limit):
            state = self._catalog.by_number.get(row[-2]) or removed.get(row[-2])
            if state is not None and row[ID] <= self.last_seq:
                found.append((row[-1], row[ID], state, 0, place_of(row, self._priorities)))
        for number, seq, due in self._all("select.due.durable", now=now, most=limit):
            subscriber = self._catalog.subscriptions.get(number)
            if subscriber is not None:
                place = self.row(subscriber.topic, subscriber, seq) or (0, seq, 0, 0, (0, 0))
                found.append((due, seq, subscriber.topic, number, place))
        found.sort(key=itemgetter(0, 1, 3))
        return [one[2:] for one in found[:limit]]

    def until(self, state: DestinationState, subscription: SubscriptionState | None, seq: int) -> int:
        until = self._all("select.until", message=seq) if state.delayed else ()
        if not until and subscription is not None and subscription.delayed:
            until = self._all("select.until.durable", durable=subscription.number, message=seq)
        return until[0][0] if until else 0

    def unacked(self, state: DestinationState, seq: int) -> Sequence[Channel]:
        recipients = state.recipients(seq)
        # While one that has ended still goes page by page, what is there may wait for it alone.
        if len(recipients) == 1 and not any(channel.state is state for channel in self._catalog.leaving):
            return [recipients[0].channel]
        acked = {row[0] for row in self._all("select.acked", message=seq)}
        return [subscriber.channel for subscriber in recipients if subscriber.number not in acked]

    def limited(self, least: int) -> Iterator[tuple[Channel, Place]]:
        after = 0
        while rows := self._all("select.limited", least=least, after=after, most=PAGE):
            for number, after in rows:
                state = self._catalog.by_number.get(number)
                place = self.row(state, None, after) if state is not None else None
                if state is not None and place is not None:
                    yield state.channel, place
        for subscriber in list(self._catalog.subscriptions.values()):
            after = 0
            while subscriber.own and (
                rows := self._all(
                    "select.limited.durable", durable=subscriber.number, least=least, after=after, most=PAGE
                )
            ):
                for _, after in rows:
                    place = self.row(subscriber.topic, subscriber, after)
                    if place is not None:
                        yield subscriber.channel, place

    # Their records

    def bodies(self, places: Sequence[Place]) -> Iterator[bytes | None]:
        """Yield the records of messages, None for one that is dead. Raises StoreFailedError."""
        for place in places:
            seq = place[SEQ]
            record = self._records.get(seq)
            yield record if record is not None else self._database.read(partial(self._record, seq=seq))

    def _record(self, connection: Connection, seq: int) -> bytes | None:
        row = connection.execute(self._statements["select.message"], {"message": seq}).one_or_none()
        if row is None or row[PARTS] <= 0:
            return None if row is None else record_of(row)
        parts = connection.execute(self._statements["select.chunks"], {"message": seq}).all()
        if len(parts) != row[PARTS]:
            return None  # its ack came between
        return record_of(row, b"".join(bytes(part) for (part,) in parts))
