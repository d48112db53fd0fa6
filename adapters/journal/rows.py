"""The index's rows of messages: where each is, in which order they come, when they expire, who has yet to ack them.

    messages       destination id, seq          ->  LSN, offset in the segment, length of the record; some: when it
                                                    expires, its order, who has yet to ack it
    lanes          destination id, order, seq   ->  nothing; only in a store with priorities
    expiries       expires at, seq              ->  destination id; only of messages that expire
    deliveries     seq, subscription            ->  how often it has come back, destination id; where it has

A queue's message without expiry in a store without priorities, the commonest, takes one row of 28 bytes. A topic's has
a bit for each subscription that has yet to ack it, and is dead when none is left; whoever begins later has none in it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, Final

import lmdb

from ..delivery import PLAIN_ORDERS, PRIORITY_ORDERS, Feed
from ..wal.segment import Segment, SegmentTable
from .destinations import SEQ, DestinationState, Place, SubscriptionState

KEY = struct.Struct(">IQ")
KEY_SEQ = struct.Struct(">4xQ")
PREFIX_BYTES: Final = 4
"""What the keys of one destination's messages share."""
PLACE = struct.Struct("<QII")
MORE = struct.Struct("<QB")
"""Expires at (ms, 0: never) and order. Then, of a topic's message, the bits of those that have yet to ack it, in as
many bytes as that takes."""
MORE_AT: Final = PLACE.size + MORE.size
LANE_KEY = struct.Struct(">IBQ")
EXPIRY_KEY = struct.Struct(">QQ")
DELIVERIES_KEY = struct.Struct(">QI")
DELIVERIES = struct.Struct("<II")
ID = struct.Struct(">I")
SEQ_END: Final = (1 << 64) - 1
PAGE: Final = 512
"""Rows that are looked at in one go where only some of them are wanted."""

TABLES: Final = 4

Row = tuple[Place, int]
"""A message's place, and the bits of those that have yet to ack it."""


def read_row(seq: int, value: bytes) -> Row:
    lsn, offset, length = PLACE.unpack_from(value)
    if len(value) == PLACE.size:
        return (0, seq, 0, lsn, offset, length), 0
    expires, order = MORE.unpack_from(value, PLACE.size)
    return (order, seq, expires, lsn, offset, length), int.from_bytes(value[MORE_AT:], "little")


def write_row(place: Place, pending: int) -> bytes:
    order, _, expires, lsn, offset, length = place
    value = PLACE.pack(lsn, offset, length)
    if order or expires or pending:
        value += MORE.pack(expires, order) + pending.to_bytes((pending.bit_length() + 7) // 8, "little")
    return value


class Rows:
    """Of one index, which lends its transaction. Every method is called under the store's index lock. Delivery's Source
    (adapters/delivery.py)."""

    def __init__(
        self,
        priorities: bool,
        states: dict[int, DestinationState],
        bury: Callable[[int, int, object, SegmentTable], None],
    ) -> None:
        """`bury` takes note that a record (LSN, length, of what) is needed no more."""
        self._priorities, self._states, self._bury = priorities, states, bury
        self._txn: Any = None
        self.messages = self.bytes = 0
        """Of all destinations."""
        self.counted = 0
        """Rows in `deliveries`: nothing is looked up there while there are none."""
        self.on_damage: Callable[[lmdb.Error], None] = lambda error: None
        """Called when what is read cannot be right, before the error is raised: the file was damaged after it had been
        verified."""

    def open(self, env: Any) -> None:
        self._messages_db = env.open_db(b"messages")
        self._lanes_db = env.open_db(b"lanes")
        self._expiries_db = env.open_db(b"expiries")
        self._deliveries_db = env.open_db(b"deliveries")

    def lend(self, txn: Any) -> None:
        """The transaction from now on."""
        self._txn = txn

    def load(self) -> None:
        """Set the counts to what the destinations' say."""
        self.messages = sum(state.count for state in self._states.values())
        self.bytes = sum(state.bytes for state in self._states.values())
        self.counted = self._txn.stat(self._deliveries_db)["entries"]

    # Changing

    def put(self, puts: list[tuple[bytes, bytes]], segment: Segment, live_bytes: int) -> None:
        """New messages, written to `segment`; their destinations have counted them."""
        if len(puts) == 1:
            self._txn.put(*puts[0], db=self._messages_db)
        else:
            with self._txn.cursor(db=self._messages_db) as cursor:
                cursor.putmulti(puts)
        self.messages += len(puts)
        self.bytes += live_bytes
        segment.live += len(puts)
        segment.live_bytes += live_bytes
        segment.changed = True

    def more(self, state: DestinationState, seq: int, extra: tuple[int, int] | None) -> bytes | None:
        """What a new message's row has behind its place, and its rows elsewhere; `extra`: order and expiry. None for a
        topic's that nobody is to have: it is born dead."""
        order, expires = extra or (0, 0)
        pending = 0
        if state.is_topic:
            pending = state.entitled(seq)
            if not pending:
                return None
            for known in state.subscribers.values():
                if known.bit & pending:
                    known.count += 1
                    known.changed = True
        if self._priorities:
            self._txn.put(LANE_KEY.pack(state.id, order, seq), b"", db=self._lanes_db)
        if expires:
            self._txn.put(EXPIRY_KEY.pack(expires, seq), ID.pack(state.id), db=self._expiries_db)
        return MORE.pack(expires, order) + pending.to_bytes((pending.bit_length() + 7) // 8, "little")

    def kill(self, state: DestinationState, seq: int, table: SegmentTable) -> None:
        """It is dead, for all."""
        value = self._txn.pop(KEY.pack(state.id, seq), db=self._messages_db)
        if value is not None:
            self._dead(state, seq, value, table)

    def _dead(self, state: DestinationState, seq: int, value: bytes, table: SegmentTable) -> None:
        lsn, _, length = PLACE.unpack_from(value)
        if len(value) > PLACE.size:
            (order, _, expires, *_), pending = read_row(seq, value)
            if self._priorities:
                self._txn.delete(LANE_KEY.pack(state.id, order, seq), db=self._lanes_db)
            if expires:
                self._txn.delete(EXPIRY_KEY.pack(expires, seq), db=self._expiries_db)
            if pending:
                for known in state.subscribers.values():
                    if known.bit & pending:
                        known.count -= 1
                        known.changed = True
        if self.counted:
            self._forget_deliveries(seq)
        self._bury(lsn, length, state.destination, table)
        self.messages -= 1
        self.bytes -= length
        state.count -= 1
        state.bytes -= length
        state.changed = True

    def ack_for(self, state: DestinationState, seq: int, number: int, table: SegmentTable) -> None:
        """It is dead for one subscription."""
        known = state.subscribers.get(number)
        key = KEY.pack(state.id, seq)
        value = self._txn.get(key, db=self._messages_db)
        if known is None or value is None:
            return
        place, pending = read_row(seq, value)
        if not pending & known.bit:
            return
        if pending == known.bit:
            self.kill(state, seq, table)
            return
        self._txn.put(key, write_row(place, pending & ~known.bit), db=self._messages_db)
        known.count -= 1
        known.changed = True
        if self.counted and self._txn.delete(DELIVERIES_KEY.pack(seq, number), db=self._deliveries_db):
            self.counted -= 1

    def ack_range(self, state: DestinationState, first: int, last: int, number: int, table: SegmentTable) -> None:
        """All between two seqs are dead, for one subscription or (number 0) for all."""
        if not number:
            self._kill_range(state, first, last, table)
            return
        while rows := self._by_seq(state, first, PAGE):
            for place, _ in rows:
                if place[SEQ] > last:
                    return
                self.ack_for(state, place[SEQ], number, table)
            first = rows[-1][0][SEQ] + 1

    def _kill_range(self, state: DestinationState, first: int, last: int, table: SegmentTable) -> None:
        with self._txn.cursor(db=self._messages_db) as cursor:
            found = cursor.set_range(KEY.pack(state.id, first))
            while found:
                number, seq = KEY.unpack(cursor.key())
                if number != state.id or seq > last:
                    break
                self._dead(state, seq, cursor.value(), table)
                found = cursor.delete() and bool(cursor.key())

    def delivered(self, state: DestinationState, number: int, seq: int, count: int) -> None:
        """It has come back so often by now, if it is still there."""
        row = self._row(state, seq)
        if row is None or (state.is_topic and not self._is_pending(state, number, row[1])):
            return
        key, value = DELIVERIES_KEY.pack(seq, number), DELIVERIES.pack(count, state.id)
        self.counted += self._txn.replace(key, value, db=self._deliveries_db) is None

    def _is_pending(self, state: DestinationState, number: int, pending: int) -> bool:
        known = state.subscribers.get(number)
        return known is not None and bool(known.bit & pending)

    def _forget_deliveries(self, seq: int) -> None:
        with self._txn.cursor(db=self._deliveries_db) as cursor:
            found = cursor.set_range(DELIVERIES_KEY.pack(seq, 0))
            while found and DELIVERIES_KEY.unpack(cursor.key())[0] == seq:
                self.counted -= 1
                found = cursor.delete() and bool(cursor.key())

    def begin(self, known: SubscriptionState) -> None:
        """All that the topic holds from its start on is for it: of a retroactive one everything."""
        after, state = known.start, known.state
        while rows := self._by_seq(state, after + 1, PAGE):
            for place, pending in rows:
                key = KEY.pack(state.id, place[SEQ])
                self._txn.put(key, write_row(place, pending | known.bit), db=self._messages_db)
                known.count += not pending & known.bit
            after = rows[-1][0][SEQ]

    # Asking

    def _by_seq(self, state: DestinationState, first: int, count: int) -> list[Row]:
        start = KEY.pack(state.id, first)
        rows = self._raw(self._messages_db, start, PREFIX_BYTES, count)
        return [read_row(KEY_SEQ.unpack(key)[0], value) for key, value in rows]

    def _raw(self, db: Any, start: bytes, prefix_bytes: int, count: int) -> list[tuple[bytes, bytes]]:
        """Up to `count` rows from `start` on that share its prefix. Callers go on behind the last, so with one
        that lies before `start` they would never come to an end."""
        try:
            with self._txn.cursor(db=db) as cursor:
                if not cursor.set_range(start):
                    return []
                rows = list(islice(cursor.iternext(), count))
            if rows and not start <= rows[0][0] <= rows[-1][0]:
                raise lmdb.CorruptedError(f"the index's rows are out of order at key {rows[-1][0].hex()}")
        except lmdb.Error as error:
            self.on_damage(error)
            raise
        prefix = start[:prefix_bytes]
        while rows and not rows[-1][0].startswith(prefix):
            rows.pop()  # of the next one
        return rows

    def _by_order(self, state: DestinationState, order: int, first: int, count: int, across: bool) -> list[Row]:
        """In a store with priorities; `across`: on into the orders that follow."""
        prefix_bytes = PREFIX_BYTES if across else PREFIX_BYTES + 1
        lane = self._raw(self._lanes_db, LANE_KEY.pack(state.id, order, first), prefix_bytes, count)
        rows = []
        for key, _ in lane:
            _, its_order, seq = LANE_KEY.unpack(key)
            row = self._row(state, seq)
            if row is None or row[0][0] != its_order:  # callers go on behind the row's own order
                error = lmdb.CorruptedError(f"the index's row of message {seq} is missing or of another order")
                self.on_damage(error)
                raise error
            rows.append(row)
        return rows

    def look(self, state: DestinationState, bit: int, after: tuple[int, int], count: int, across: bool) -> list[Place]:
        """Up to `count` messages in order, from the one after `after` (order, seq); with `bit` those that have it."""
        order, seq = after
        found: list[Place] = []
        size = max(count, PAGE) if bit else count
        while True:
            if self._priorities:
                rows = self._by_order(state, order, seq + 1, size, across)
            else:
                rows = self._by_seq(state, seq + 1, size)
            found += [place for place, pending in rows if not bit or pending & bit]
            if len(rows) < size or len(found) >= count:
                return found[:count]
            order, seq = rows[-1][0][:2]

    def orders(self, feed: Feed) -> tuple[int, ...]:
        return PRIORITY_ORDERS if self._priorities else PLAIN_ORDERS

    def fetch(self, feed: Feed, order: int, after: int, limit: int) -> list[Place]:
        state: DestinationState = feed.owner
        if state.is_topic:
            known = state.subscribers.get(feed.number)
            if known is None or not known.count:
                return []
            return self.look(state, known.bit, (order, after), limit, across=False)
        if self._priorities:
            return self.look(state, 0, (order, after), limit, across=False)
        return self.scan(state, after, limit)

    def scan(self, state: DestinationState, after: int, count: int) -> list[Place]:
        """Up to `count` messages of a destination by seq, from the one after seq `after`."""
        rows = self._raw(self._messages_db, KEY.pack(state.id, after + 1), PREFIX_BYTES, count)
        unpack_seq, unpack_place = KEY_SEQ.unpack, PLACE.unpack
        return [
            (0, *unpack_seq(key), 0, *unpack_place(value))
            if len(value) == PLACE.size
            else read_row(KEY_SEQ.unpack(key)[0], value)[0]
            for key, value in rows
        ]

    def pending(self, state: DestinationState) -> Iterator[tuple[int, int]]:
        """Seq, and the bits of those that have yet to ack it, of all a topic's messages."""
        first = 0
        while rows := self._by_seq(state, first, PAGE):
            yield from ((place[SEQ], pending) for place, pending in rows)
            first = rows[-1][0][SEQ] + 1

    def _row(self, state: DestinationState, seq: int) -> Row | None:
        try:
            value = self._txn.get(KEY.pack(state.id, seq), db=self._messages_db)
        except lmdb.Error as error:
            self.on_damage(error)
            raise
        return None if value is None else read_row(seq, value)

    def find(self, state: DestinationState, seq: int) -> Place | None:
        """Where one message is; None if it is dead."""
        row = self._row(state, seq)
        return None if row is None else row[0]

    def place(self, feed: Feed, seq: int) -> Place | None:
        row = self._row(feed.owner, seq)
        if row is None or (feed.number and not self._is_pending(feed.owner, feed.number, row[1])):
            return None
        return row[0]

    def waiting_for(self, state: DestinationState, seq: int) -> tuple[Feed, ...]:
        """The feeds that have yet to ack it."""
        if not state.is_topic:
            return (state.feed,)
        row = self._row(state, seq)
        return tuple(s.feed for s in state.subscribers.values() if row is not None and s.bit & row[1])

    def deliveries(self, feed: Feed, seq: int) -> int:
        if not self.counted:
            return 0
        value = self._txn.get(DELIVERIES_KEY.pack(seq, feed.number), db=self._deliveries_db)
        return 0 if value is None else int(DELIVERIES.unpack(value)[0])

    def deliveries_of(self, places: Iterable[Place], number: int | None) -> dict[int, int]:
        """By seq, of those that have come back; without a subscription's number the most of any."""
        counts: dict[int, int] = {}
        if not self.counted:
            return counts
        for place in places:
            start = DELIVERIES_KEY.pack(place[SEQ], number or 0)
            prefix_bytes = 8 if number is None else DELIVERIES_KEY.size
            for _, value in self._raw(self._deliveries_db, start, prefix_bytes, PAGE):
                counts[place[SEQ]] = max(counts.get(place[SEQ], 0), DELIVERIES.unpack(value)[0])
        return counts

    def expired(self, now: int) -> Iterator[tuple[tuple[Feed, ...], Place]]:
        for key, value in self._pages(self._expiries_db):
            expires, seq = EXPIRY_KEY.unpack(key)
            if expires > now:
                return
            state = self._states[ID.unpack(value)[0]]
            row = self._row(state, seq)
            if row is not None:
                yield self.waiting_for(state, seq), row[0]

    def spent(self, least: int) -> Iterator[tuple[Feed, int]]:
        for seq, number, count, destination in self.all_deliveries():
            if count >= least:
                for feed in self._states[destination].feeds(number):
                    yield feed, seq

    def all_deliveries(self) -> Iterator[tuple[int, int, int, int]]:
        """Seq, subscription, count and destination id of all that have come back."""
        if self.counted:
            for key, value in self._pages(self._deliveries_db):
                yield (*DELIVERIES_KEY.unpack(key), *DELIVERIES.unpack(value))

    def _pages(self, db: Any) -> Iterator[tuple[bytes, bytes]]:
        """All rows. No cursor is open while the caller looks at one (rule X1)."""
        start = b"\0"
        while rows := self._raw(db, start, 0, PAGE):
            yield from rows
            start = rows[-1][0] + b"\0"

    def all(self) -> Iterator[tuple[int, Place, int]]:
        """Destination id, place and pending bits of every message, for checking."""
        for key, value in self._pages(self._messages_db):
            number, seq = KEY.unpack(key)
            place, pending = read_row(seq, value)
            yield number, place, pending

    def all_lanes(self) -> Iterator[tuple[int, int, int]]:
        """Destination id, order and seq, for checking."""
        for key, _ in self._pages(self._lanes_db):
            yield LANE_KEY.unpack(key)

    def all_expiries(self) -> Iterator[tuple[int, int, int]]:
        """Expiry (ms), seq and destination id, for checking."""
        for key, value in self._pages(self._expiries_db):
            yield (*EXPIRY_KEY.unpack(key), ID.unpack(value)[0])
