"""The index's rows of messages: where each is, in which order they come, when they expire, who has yet to ack them.

    messages       destination, seq             ->  LSN, offset in the segment, length of the record; some: when it
                                                    expires, its order, who has yet to ack it
    lanes          destination, order, seq      ->  nothing; only in a store with priorities
    expiries       expires at, seq              ->  destination; only of messages that expire
    deliveries     seq, subscription            ->  how often it has been given back, destination; where it has
    keys           destination, key             ->  seq; of maps
    waits          seq, subscription            ->  until when it waits (ms), destination; where it does
    dues           until when, seq, subscription   ->  destination; the same by time

A queue's message without expiry in a store without priorities, the commonest, takes one row of 28 bytes. A topic's has
a bit for each subscription that has yet to ack it, and is dead when none is left; whoever begins later has none in it.
A map's has its key there.

A message that waits for its time, as a whole, has its rows in `messages` and `lanes` under another number than its
destination's, `WAITING` above it: so it is in nobody's way who looks for messages that are free. A message that waits
for one subscription has a row in `waits` that says so, and else its rows where they were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby, islice
from operator import attrgetter
from typing import Any, Final

import lmdb

from ...core.messages import MADE
from ...core.operations.changes import Ack, Change, Mark, Send, SendMany
from ...core.operations.table import SEQ_MAX
from ...core.record.encoding import REMOVAL
from ...core.record.place import ALSO_WAITING, ORDER, OWN, SEQ, Place
from ...core.state.leases import Channel, DestinationState, SubscriptionState
from ...core.state.states import Catalog
from ...wal.segment import Segment, SegmentTable
from ..encoding import SEND_OVERHEAD
from ..pending_before import PendingBefore
from .row_format import (
    DELIVERIES,
    DELIVERIES_KEY,
    DUE_KEY,
    EXPIRY_KEY,
    ID,
    KEY,
    KEY_SEQ,
    KEYED_SEQ,
    LANE_KEY,
    LANE_PREFIX_BYTES,
    MORE_AT,
    PREFIX_BYTES,
    WAIT,
    WAITING,
    WHERE,
    Packed,
    Row,
    is_waiting,
    more_of,
    pack_rows,
    places_of,
    read_row,
    rows_of_many,
    with_pending,
)
from .states import IndexedDestination

_pack_key = KEY.pack
_unpack_where = WHERE.unpack_from

PAGE: Final = 512
"""Rows that are looked at in one go where only some of them are wanted."""

_MADE: Final = MADE.encode()

FIRST_KEY: Final = b"\0"
"""No key comes before."""

TABLES: Final = 7

Ask = Callable[[Callable[[], Any]], Any]
"""A function that calls a question under the store's lock, if who asks has not got it."""


def at_once(question: Callable[[], Any]) -> Any:
    """Answer a question at once, as the Ask of who has the lock."""
    return question()


def short_lived(changes: Sequence[Change]) -> tuple[Sequence[Change], Sequence[Send], Sequence[Mark]]:
    """Split off the messages of queues that a later one of the changes acks, and marks. Returns the changes without
    these and their acks, the messages, and the marks."""
    sends: dict[int, Send] = {}
    dead: list[Send] = []
    marks: list[Mark] = []
    if Ack not in set(map(type, changes)):
        return changes, dead, marks
    for change in changes:
        if type(change) is Send:
            if not change.state.is_topic:
                sends[change.seq] = change
        elif type(change) is Ack and change.seq in sends:
            dead.append(sends.pop(change.seq))
        elif type(change) is Mark:
            marks.append(change)
    if not dead and not marks:
        return changes, dead, marks
    gone = {send.seq for send in dead} | {mark.seq for mark in marks}
    left = [
        c for c in changes if (type(c) is not Send and type(c) is not Ack and type(c) is not Mark) or c.seq not in gone
    ]
    return left, dead, marks


def _seq_of(row: Row) -> int:
    return row[0][SEQ]


class MessageRows:
    """The rows of one index, which lends its transaction. Every method is called under the store's lock."""

    def __init__(
        self,
        priorities: bool,
        states: dict[int, DestinationState],
        catalog: Catalog,
        remember: Callable[[Sequence[Send]], None],
        remember_id: Callable[[tuple[int, bytes], int], None],
        remove_live: Callable[[int, int, object], None],
    ) -> None:
        """Take a catalog, which counts what there is. `remember` keeps the ids of new messages, `remember_id`
        that of a mark; `remove_live` takes note that a record (LSN, length, of what) is needed no more."""
        self._states, self._catalog = states, catalog
        self.priorities = priorities
        self._remember, self._remember_id, self._remove_live = remember, remember_id, remove_live
        self._txn: Any = None
        self.changed: dict[DestinationState, None] = {}
        """Destinations whose rows in the index say something else by now."""
        self.changed_subscriptions: dict[SubscriptionState, None] = {}
        """Subscriptions whose rows in the index say something else by now."""
        self.counted: int = 0
        """Rows in `deliveries`: nothing is looked up there while there are none."""
        self.waits: int = 0
        """Rows in `waits`: nothing is looked up there while there are none."""
        self.before: PendingBefore | None = None
        """While a snapshot is being taken."""
        self.on_damage: Callable[[lmdb.Error], None] = lambda error: None
        """Called when what is read cannot be right, before the error is raised: the file was damaged after it had been
        verified."""

    def open(self, env: Any) -> None:
        self._messages_db = env.open_db(b"messages")
        self._lanes_db = env.open_db(b"lanes")
        self._expiries_db = env.open_db(b"expiries")
        self._deliveries_db = env.open_db(b"deliveries")
        self._keys_db = env.open_db(b"keys")
        self._waits_db = env.open_db(b"waits")
        self._dues_db = env.open_db(b"dues")

    def lend(self, txn: Any) -> None:
        """Use this transaction from now on."""
        self._txn = txn

    def load(self) -> None:
        """Set the counts to what the tables say."""
        self.counted = self._txn.stat(self._deliveries_db)["entries"]
        self.waits = self._txn.stat(self._waits_db)["entries"]

    # Changing

    def put(self, sends: Sequence[Send], table: SegmentTable) -> None:
        """Put new messages of one destination, each of which has in `own` where its record is; or many, which say that
        of the first."""
        if type(sends) is SendMany:
            segment = table.find(sends.own[0])
            if segment is None:
                raise AssertionError(f"index: message {sends.seq} of {sends.state.destination} has no segment")
            with self._txn.cursor(db=self._messages_db) as cursor:
                cursor.putmulti(rows_of_many(sends.state.number, sends))
            self._count(sends.state, segment, len(sends), sends.record_bytes + SEND_OVERHEAD * len(sends))
            return
        segment = table.find(sends[0].own[0])
        if segment is not None and (segment.end is None or sends[-1].own[0] <= segment.last_lsn):
            self._put(sends, segment)
            return
        for segment, part in groupby(sends, lambda send: table.find(send.own[0])):
            if segment is None:
                raise AssertionError(f"index: message {sends[0].seq} of {sends[0].state.destination} has no segment")
            self._put(list(part), segment)

    def _put(self, sends: Sequence[Send], segment: Segment) -> None:
        state = sends[0].state
        number = state.number
        if state.is_map:
            self._put_values(state, sends, segment)
            return
        packed = None if self.priorities or state.is_topic else pack_rows(number, sends)
        puts, size = packed if packed is not None else self._pack_with_more(sends, segment)
        self._remember(sends)
        if len(puts) == 1:
            self._txn.put(*puts[0], db=self._messages_db)
        else:
            with self._txn.cursor(db=self._messages_db) as cursor:
                cursor.putmulti(puts)
        self._count(state, segment, len(puts), size)

    def _count(self, state: DestinationState, segment: Segment, count: int, size: int) -> None:
        """Count so many messages that have come, whose records take so many bytes together."""
        segment.live += count
        segment.live_bytes += size
        segment.changed = True
        self._catalog.count(state, count, size - SEND_OVERHEAD * count)
        self.changed[state] = None

    def _put_values(self, state: DestinationState, sends: Sequence[Send], segment: Segment) -> None:
        """Put the values of a map: each takes the place of what its key had before."""
        txn, number, own = self._txn, state.number, ID.pack(state.number)
        for send in sends:
            seq, name = send.seq, send.name
            assert name is not None
            if not self._remove_before(state, name, seq) or send.expires_at_ms == REMOVAL:
                segment.mark_dead(send.own[0])
                if name.startswith(_MADE):  # a Mark, read back
                    self._remember_id((number, name), seq)
                continue
            more = self._put_more(state, send)
            assert more is not None
            txn.put(_pack_key(number, seq), WHERE.pack(*send.own) + more + name, db=self._messages_db)
            txn.put(own + name, KEYED_SEQ.pack(seq), db=self._keys_db)
            self._count(state, segment, 1, send.own[2])

    def _pack_with_more(self, sends: Sequence[Send], segment: Segment) -> Packed:
        """Return what pack_rows returns, of messages whose rows say more than where they are."""
        puts, size = [], 0
        for send in sends:
            own = send.own
            row = WHERE.pack(*own)
            if self.priorities or send.state.is_topic or send.expires_at_ms:
                more = self._put_more(send.state, send)
                if more is None:
                    segment.mark_dead(own[0])
                    continue
                row += more
            puts.append((KEY.pack(send.state.number, send.seq), row))
            size += own[2]
        return puts, size

    def _put_more(self, state: DestinationState, send: Send) -> bytes | None:
        """Return what a new message's row has behind its place, and put its rows elsewhere. None for a topic's that
        nobody is to have: it is dead at once."""
        pending = 0
        if state.is_topic:
            own: IndexedDestination = state.own
            pending = own.recipients(send.seq)
            if not pending:
                return None
            for subscriber in own.subscriptions.values():
                if subscriber.own.bit & pending:
                    subscriber.count += 1
                    self.changed_subscriptions[subscriber] = None
        if self.priorities:
            self._txn.put(LANE_KEY.pack(state.number, send.order, send.seq), b"", db=self._lanes_db)
        if send.expires_at_ms:
            self._txn.put(EXPIRY_KEY.pack(send.expires_at_ms, send.seq), ID.pack(state.number), db=self._expiries_db)
        return more_of(send.order, send.expires_at_ms, pending)

    def put_marks(self, marks: Sequence[Mark], table: SegmentTable) -> bool:
        """Take in marks, as `put_dead`."""
        for mark in marks:
            self._remember_id((mark.state.number, mark.name), mark.seq)
        return self._dead(marks, table)

    def put_dead(self, sends: Sequence[Send], table: SegmentTable) -> bool:
        """Take in new messages of queues that are acked already: no row tells of them. Returns whether a segment that
        takes no more holds no live message now."""
        self._remember(sends)
        return self._dead(sends, table)

    def _dead(self, sends: Sequence[Send | Mark], table: SegmentTable) -> bool:
        """Note where records are of which nothing lives; returns as `put_dead`."""
        lsns = sorted([send.own[0] for send in sends])
        first, emptied = table.find(lsns[0]), False
        for segment, part in ((first, lsns),) if first is table.find(lsns[-1]) else groupby(lsns, table.find):
            if segment is None:
                raise AssertionError(f"index: one of the messages {sends[0].seq} to {sends[-1].seq} has no segment")
            segment.mark_dead(*part)
            emptied |= not segment.live and segment.end is not None
        return emptied

    def move(self, number: int, seq: int, own: tuple[int, int, int], what: object) -> bool:
        """Move a message of a destination: from now on it is there. False: it has died."""
        key = _pack_key(number, seq)
        value = self._txn.get(key, db=self._messages_db)
        if value is None and self.waits:
            key = _pack_key(number | WAITING, seq)
            value = self._txn.get(key, db=self._messages_db)
        if value is None:
            return False
        lsn, _, length = _unpack_where(value)
        self._txn.put(key, WHERE.pack(*own) + value[WHERE.size :], db=self._messages_db)
        self._remove_live(lsn, length, what)
        return True

    def ack(self, acks: Sequence[Ack]) -> list[tuple[int, int]]:
        """Ack messages. Returns the records (LSN, length) of plain ones, of which no more than a row told: their caller
        sees that they are live no more."""
        pop, db, plain = self._txn.pop, self._messages_db, WHERE.size if not self.waits and not self.counted else 0
        dead: list[tuple[int, int]] = []
        for state, some in groupby(acks, attrgetter("state")):
            number, before, size = state.number, len(dead), 0
            for ack in some:
                if ack.number:
                    self.ack_for(state, ack.seq, ack.number)
                    continue
                value = pop(_pack_key(number, ack.seq), db=db)
                if value is None or len(value) != plain:
                    self._remove(state, ack.seq, value)
                else:
                    lsn, _, length = _unpack_where(value)
                    dead.append((lsn, length))
                    size += length
            count = len(dead) - before
            if count and not state.own.leaving:
                self._catalog.count(state, -count, SEND_OVERHEAD * count - size)
                self.changed[state] = None
        return dead

    def remove(self, state: DestinationState, seq: int) -> None:
        """Remove a message that is dead, for all."""
        self._remove(state, seq, self._txn.pop(_pack_key(state.number, seq), db=self._messages_db))

    def _remove(self, state: DestinationState, seq: int, value: bytes | None) -> None:
        """Remove a message whose row, if it did not wait, was this."""
        if value is not None:
            self._removed(state, seq, value)
        elif state.delayed:
            value = self._txn.pop(_pack_key(state.number | WAITING, seq), db=self._messages_db)
            if value is not None:
                self._removed(state, seq, value, WAITING)

    def _removed(self, state: DestinationState, seq: int, value: bytes, waiting: int = 0) -> None:
        """Follow the removal of a message's row. `waiting`: what was added to its destination's number."""
        lsn, _, length = _unpack_where(value)
        if self.waits:
            self._forget_waits(state, seq, value, waiting)
        if len(value) > WHERE.size:
            (order, _, expires, *_), pending = read_row(seq, value)
            if self.priorities:
                self._txn.delete(LANE_KEY.pack(state.number | waiting, order, seq), db=self._lanes_db)
            if expires:
                self._txn.delete(EXPIRY_KEY.pack(expires, seq), db=self._expiries_db)
            if state.is_map:
                self._forget_key(state, seq, value[MORE_AT:])
            elif pending:
                if (before := self.before) is not None:
                    before.keep(state.number, seq, pending)
                for subscriber in state.own.subscriptions.values():
                    if subscriber.own.bit & pending:
                        subscriber.count -= 1
                        self.changed_subscriptions[subscriber] = None
        if self.counted:
            self._forget_deliveries(seq)
        self._remove_live(lsn, length, state.destination)
        if not state.own.leaving:
            self._catalog.count(state, -1, SEND_OVERHEAD - length)
            self.changed[state] = None

    def replaced_by(self, sends: Sequence[Send]) -> None:
        """Remove the values that values of maps among these have replaced. These are dead already; the others that are
        applied with them are in the rows."""
        for send in sends:
            if send.state.is_map and send.name is not None:
                self._remove_before(send.state, send.name, send.seq)

    def _remove_before(self, state: DestinationState, name: bytes, seq: int) -> bool:
        """Remove the value that a key of a map had before this seq. False if it has a later one."""
        former = self._txn.get(ID.pack(state.number) + name, db=self._keys_db)
        last = KEYED_SEQ.unpack(former)[0] if former is not None else 0
        if 0 < last <= seq:
            self.remove(state, last)
        return last <= seq

    def _forget_key(self, state: DestinationState, seq: int, name: bytes) -> None:
        """Forget the key of a value that is dead: the key has none, unless that was put anew."""
        key = ID.pack(state.number) + name
        if self._txn.get(key, db=self._keys_db) == KEYED_SEQ.pack(seq):
            self._txn.delete(key, db=self._keys_db)

    def ack_for(self, state: DestinationState, seq: int, number: int) -> None:
        """Ack a message for one subscription."""
        subscriber = state.own.subscriptions.get(number)
        key, value = self._find(state, seq)
        if subscriber is not None and value is not None:
            self._ack_rows(state, subscriber, ((key, value),))

    def ack_range(self, state: DestinationState, first: int, last: int, number: int) -> int:
        """Ack all between two seqs, for one subscription or (number 0) for all. Returns how many rows were looked
        at."""
        count = 0
        if state.delayed:
            count = self._ack_range(state, state.number | WAITING, first, last, number)
        return count + self._ack_range(state, state.number, first, last, number)

    def _ack_range(self, state: DestinationState, under: int, first: int, last: int, number: int) -> int:
        """Ack the messages between two seqs whose rows are under this number."""
        if not number:
            return self._remove_range(state, under, first, last)
        count = 0
        subscriber = state.own.subscriptions.get(number)
        while subscriber is not None and first <= last:
            rows = self._raw(self._messages_db, KEY.pack(under, first), PREFIX_BYTES, PAGE)
            self._ack_rows(state, subscriber, [row for row in rows if KEY_SEQ.unpack(row[0])[0] <= last])
            count += len(rows)
            if len(rows) < PAGE:
                break
            first = KEY_SEQ.unpack(rows[-1][0])[0] + 1
        return count

    def _ack_rows(
        self, state: DestinationState, subscriber: SubscriptionState, rows: Sequence[tuple[bytes, bytes]]
    ) -> None:
        """Ack these messages for a subscription."""
        bit, kept = subscriber.own.bit, 0
        for key, value in rows:
            pending = int.from_bytes(value[MORE_AT:], "little")
            if not pending & bit:
                continue
            seq = KEY_SEQ.unpack(key)[0]
            if pending == bit:
                self.remove(state, seq)
                continue
            if (before := self.before) is not None:
                before.keep(state.number, seq, pending)
            self._txn.put(key, with_pending(value, pending & ~bit), db=self._messages_db)
            kept += 1
            if self.waits:
                if is_waiting(key):
                    subscriber.delayed -= 1
                self._wait_no_longer(subscriber, seq)
            if self.counted and self._txn.delete(DELIVERIES_KEY.pack(seq, subscriber.number), db=self._deliveries_db):
                self.counted -= 1
        subscriber.count -= kept
        self.changed_subscriptions[subscriber] = None

    def _remove_range(self, state: DestinationState, under: int, first: int, last: int) -> int:
        count = 0
        with self._txn.cursor(db=self._messages_db) as cursor:
            there = cursor.set_range(KEY.pack(under, first))
            while there:
                number, seq = KEY.unpack(cursor.key())
                if number != under or seq > last:
                    break
                self._removed(state, seq, cursor.value(), under & WAITING)
                there = cursor.delete() and bool(cursor.key())
                count += 1
        return count

    def returned(self, state: DestinationState, seq: int, number: int, count: int, place: Place | None) -> None:
        """Set how often a message was given back by now, if it is still there."""
        row = self._row(state, seq)
        if row is None or (state.is_topic and not self._is_pending(state, number, row[1])):
            return
        key, value = DELIVERIES_KEY.pack(seq, number), DELIVERIES.pack(count, state.number)
        self.counted += self._txn.replace(key, value, db=self._deliveries_db) is None

    def _is_pending(self, state: DestinationState, number: int, pending: int) -> bool:
        subscriber = state.own.subscriptions.get(number)
        return subscriber is not None and not subscriber.own.ended and bool(subscriber.own.bit & pending)

    def _forget_deliveries(self, seq: int) -> None:
        with self._txn.cursor(db=self._deliveries_db) as cursor:
            there = cursor.set_range(DELIVERIES_KEY.pack(seq, 0))
            while there and DELIVERIES_KEY.unpack(cursor.key())[0] == seq:
                self.counted -= 1
                there = cursor.delete() and bool(cursor.key())

    # Messages that wait

    def postpone(self, state: DestinationState, seq: int, number: int, due: int) -> None:
        """Let a message that is still there wait until then, or (0) no longer, for all or for one subscription."""
        key, value = self._find(state, seq)
        if value is None:
            return
        waiting = key if is_waiting(key) else None
        if not state.is_topic or not number:
            self._postpone_whole(state, seq, key, value, due)
            return
        if not self._is_pending(state, number, read_row(seq, value)[1]):
            ended = state.own.subscriptions.get(number)
            if ended is not None:
                self._wait_no_longer(ended, seq)
            return
        if waiting is not None:  # it was due, or nobody could give it back
            self._postpone_whole(state, seq, key, value, 0)
        subscriber = state.own.subscriptions[number]
        self._wait_no_longer(subscriber, seq)
        if due:
            self._put_wait(state, seq, number, due)
            subscriber.delayed += 1
            self.changed_subscriptions[subscriber] = None

    def _postpone_whole(self, state: DestinationState, seq: int, key: bytes, value: bytes, due: int) -> None:
        was = WAITING if is_waiting(key) else 0
        if was:
            self._delete_wait(seq, 0)
        if due:
            self._put_wait(state, seq, 0, due)
        if bool(was) == bool(due):
            return
        self._txn.delete(key, db=self._messages_db)
        self._txn.put(_pack_key((state.number | WAITING) ^ was, seq), value, db=self._messages_db)
        more = -1 if was else 1
        state.delayed += more
        self.changed[state] = None
        if len(value) > WHERE.size:
            (order, *_), pending = read_row(seq, value)
            if self.priorities:
                self._txn.delete(LANE_KEY.pack(state.number | was, order, seq), db=self._lanes_db)
                self._txn.put(LANE_KEY.pack((state.number | WAITING) ^ was, order, seq), b"", db=self._lanes_db)
            self._count_waiting(state, pending, more)

    def _count_waiting(self, state: DestinationState, pending: int, more: int) -> None:
        """Count so many more messages that wait for the subscriptions with these bits."""
        for subscriber in state.own.subscriptions.values() if pending else ():
            if subscriber.own.bit & pending:
                subscriber.delayed += more
                self.changed_subscriptions[subscriber] = None

    def _put_wait(self, state: DestinationState, seq: int, number: int, due: int) -> None:
        self._txn.put(DELIVERIES_KEY.pack(seq, number), WAIT.pack(due, state.number), db=self._waits_db)
        self._txn.put(DUE_KEY.pack(due, seq, number), ID.pack(state.number), db=self._dues_db)
        self.waits += 1

    def _delete_wait(self, seq: int, number: int) -> bool:
        """Delete a wait; return whether there was one."""
        value = self._txn.pop(DELIVERIES_KEY.pack(seq, number), db=self._waits_db)
        if value is None:
            return False
        self._txn.delete(DUE_KEY.pack(WAIT.unpack(value)[0], seq, number), db=self._dues_db)
        self.waits -= 1
        return True

    def _wait_no_longer(self, subscriber: SubscriptionState, seq: int) -> None:
        """End a message's wait for this subscription alone."""
        if self._delete_wait(seq, subscriber.number):
            subscriber.delayed -= 1
            self.changed_subscriptions[subscriber] = None

    def _forget_waits(self, state: DestinationState, seq: int, value: bytes, waiting: int) -> None:
        """Forget the waits of a message that is dead."""
        if waiting:
            self._delete_wait(seq, 0)
            state.delayed -= 1
            self.changed[state] = None
        if state.is_topic:
            if waiting:
                self._count_waiting(state, read_row(seq, value)[1], -1)
            for key, _ in self._raw(self._waits_db, DELIVERIES_KEY.pack(seq, 0), 8, PAGE):
                number = DELIVERIES_KEY.unpack(key)[1]
                subscriber = state.own.subscriptions.get(number)
                if subscriber is not None:
                    self._wait_no_longer(subscriber, seq)
                else:
                    self._delete_wait(seq, number)

    def _find(self, state: DestinationState, seq: int) -> tuple[bytes, bytes | None]:
        """Return a message's row, wherever it is."""
        key = _pack_key(state.number, seq)
        value = self._txn.get(key, db=self._messages_db)
        if value is None and state.delayed:
            key = _pack_key(state.number | WAITING, seq)
            value = self._txn.get(key, db=self._messages_db)
        return key, value

    def next_due(self) -> int:
        found = self._raw(self._dues_db, FIRST_KEY, 0, 1) if self.waits else []
        due: int = DUE_KEY.unpack(found[0][0])[0] if found else 0
        return due

    def due(self, now: int, limit: int) -> list[tuple[DestinationState, int, Place]]:
        found: list[tuple[DestinationState, int, Place]] = []
        for key, value in self._raw(self._dues_db, FIRST_KEY, 0, limit) if self.waits else ():
            due, seq, number = DUE_KEY.unpack(key)
            if due > now:
                break
            state = self._states.get(ID.unpack(value)[0])
            place = self.row(state, None, seq) if state is not None else None
            if state is not None and place is not None:
                found.append((state, number, place))
        return found

    def until(self, state: DestinationState, subscription: SubscriptionState | None, seq: int) -> int:
        if not self.waits:
            return 0
        numbers = (0,) if subscription is None else (0, subscription.number)
        found = [self._txn.get(DELIVERIES_KEY.pack(seq, number), db=self._waits_db) for number in numbers]
        return max((WAIT.unpack(value)[0] for value in found if value is not None), default=0)

    def all_waits(self, ask: Ask = at_once) -> Iterator[tuple[int, int, int, int]]:
        """Yield seq, subscription, until when and destination of all that wait."""
        if self.waits:
            for key, value in self.pages(self._waits_db, ask):
                yield (*DELIVERIES_KEY.unpack(key), *WAIT.unpack(value))

    def all_dues(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield until when, seq, subscription and destination, for checking."""
        for key, value in self.pages(self._dues_db):
            yield (*DUE_KEY.unpack(key), ID.unpack(value)[0])

    def begin(self, subscriber: SubscriptionState) -> None:
        """Begin a subscription: all that the topic holds from its start on is for it, of a retroactive one everything.
        But for what only subscriptions that have ended were to ack: an opening removes that without a word in the
        journal, so a rebuild would meet it here where the store did not."""
        state = subscriber.topic
        self._begin(subscriber, state.number)
        if state.delayed:
            self._begin(subscriber, state.number | WAITING)

    def _begin(self, subscriber: SubscriptionState, under: int) -> None:
        after, state, bit = subscriber.start, subscriber.topic, subscriber.own.bit
        while rows := self._raw(self._messages_db, KEY.pack(under, after + 1), PREFIX_BYTES, PAGE):
            for key, value in rows:
                pending = read_row(0, value)[1]
                if not pending & state.own.mask:
                    continue
                self._txn.put(key, with_pending(value, pending | bit), db=self._messages_db)
                subscriber.count += not pending & bit
                subscriber.delayed += bool(under & WAITING and not pending & bit)
            after = KEY_SEQ.unpack(rows[-1][0])[0]

    # Asking

    def _by_seq(self, state: DestinationState, first: int, count: int, also: int = 0) -> list[Row]:
        """Return rows by seq. `also`: WAITING, for those too that wait."""
        rows = self._raw(self._messages_db, KEY.pack(state.number, first), PREFIX_BYTES, count)
        found = [read_row(KEY_SEQ.unpack(key)[0], value) for key, value in rows]
        if also and state.delayed:
            rows = self._raw(self._messages_db, KEY.pack(state.number | also, first), PREFIX_BYTES, count)
            found += [read_row(KEY_SEQ.unpack(key)[0], value) for key, value in rows]
            found.sort(key=_seq_of)
            del found[count:]
        return found

    def _raw(self, db: Any, start: bytes, prefix_bytes: int, count: int) -> list[tuple[bytes, bytes]]:
        """Return up to `count` rows from `start` on that share its prefix. Callers go on behind the last, so with one
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

    def _by_order(self, state: DestinationState, order: int, first: int, count: int, also: int = 0) -> list[Row]:
        """Return rows by order, in a store with priorities."""
        found = self._raw(self._lanes_db, LANE_KEY.pack(state.number, order, first), LANE_PREFIX_BYTES, count)
        if also and state.delayed:
            start = LANE_KEY.pack(state.number | also, order, first)
            found += self._raw(self._lanes_db, start, LANE_PREFIX_BYTES, count)
            found.sort(key=lambda row: LANE_KEY.unpack(row[0])[2])
            del found[count:]
        rows = []
        for key, _ in found:
            seq = LANE_KEY.unpack(key)[2]
            row = self._row(state, seq)
            if row is None or row[0][ORDER] != order:
                error = lmdb.CorruptedError(f"the index's row of message {seq} is missing or of another order")
                self.on_damage(error)
                raise error
            rows.append(row)
        return rows

    def next_order(self, state: DestinationState, subscription: SubscriptionState | None, order: int) -> int | None:
        if subscription is not None and not subscription.count:
            return None
        also = order & ALSO_WAITING
        order -= also
        found = self._raw(self._lanes_db, LANE_KEY.pack(state.number, order, 0), PREFIX_BYTES, 1)
        if also and state.delayed:
            found += self._raw(self._lanes_db, LANE_KEY.pack(state.number | WAITING, order, 0), PREFIX_BYTES, 1)
        return min((LANE_KEY.unpack(key)[1] for key, _ in found), default=-1) + also if found else None

    def rows(
        self, state: DestinationState, subscription: SubscriptionState | None, order: int | None, after: int, limit: int
    ) -> Sequence[Place]:
        own: IndexedDestination | None = state.own
        if own is None:
            return ()
        also = 0
        if order is None:
            also = WAITING
        elif order & ALSO_WAITING:
            order, also = order & ~ALSO_WAITING, WAITING
        if state.is_topic or (self.priorities and order is not None):
            places = self._some(state, subscription, order, after, limit, also)
        elif also and state.delayed:
            places = [place for place, _ in self._by_seq(state, after + 1, limit, also)]
        else:
            places = self._scan(state, after, limit)
        if self.counted:
            number = subscription.number if subscription is not None else 0
            return [self._with_deliveries(state, number, place) for place in places]
        return places

    def _scan(self, state: DestinationState, after: int, count: int) -> list[Place]:
        """Return the places of the commonest scan: of a queue by seq."""
        rows = self._raw(self._messages_db, KEY.pack(state.number, after + 1), PREFIX_BYTES, count)
        return places_of(rows)

    def _some(
        self, state: DestinationState, subscription: SubscriptionState | None, order: int | None, after: int,
        limit: int, also: int,
    ) -> list[Place]:  # fmt: skip
        """Return the messages that a subscription has yet to ack, or of one order."""
        bit = 0
        if subscription is not None:
            if state.own.subscriptions.get(subscription.number) is not subscription or not subscription.count:
                return []
            bit = subscription.own.bit
        found: list[Place] = []
        size = max(limit, PAGE) if bit else limit
        while True:
            if self.priorities and order is not None:
                rows = self._by_order(state, order, after + 1, size, also)
            else:
                rows = self._by_seq(state, after + 1, size, also)
            some = [place for place, pending in rows if not bit or pending & bit]
            if subscription is not None and subscription.delayed and not also:
                number, waits, get = subscription.number, self._waits_db, self._txn.get
                some = [place for place in some if get(DELIVERIES_KEY.pack(place[SEQ], number), db=waits) is None]
            found += some
            if len(rows) < size or len(found) >= limit:
                return found[:limit]
            after = rows[-1][0][SEQ]

    def _row(self, state: DestinationState, seq: int) -> Row | None:
        try:
            value = self._txn.get(KEY.pack(state.number, seq), db=self._messages_db)
            if value is None and state.delayed:
                value = self._txn.get(KEY.pack(state.number | WAITING, seq), db=self._messages_db)
        except lmdb.Error as error:
            self.on_damage(error)
            raise
        return None if value is None else read_row(seq, value)

    def row(
        self, state: DestinationState, subscription: SubscriptionState | None, seq: int, order: int | None = None
    ) -> Place | None:
        row = self._row(state, seq)
        if row is None or state.own is None:
            return None
        number = 0
        if subscription is not None:
            number = subscription.number
            if not self._is_pending(state, number, row[1]):
                return None
        return self._with_deliveries(state, number, row[0]) if self.counted else row[0]

    def keyed(self, state: DestinationState, names: Sequence[bytes]) -> dict[bytes, Place]:
        """Return where the values of keys are, as Backend.keyed."""
        found = {}
        for name in names:
            try:
                seq = self._txn.get(ID.pack(state.number) + name, db=self._keys_db)
            except lmdb.Error as error:
                self.on_damage(error)
                raise
            place = None if seq is None else self.row(state, None, KEYED_SEQ.unpack(seq)[0])
            if place is not None:
                found[name] = place
        return found

    def keys(self, state: DestinationState, start: bytes, limit: int) -> list[tuple[bytes, Place]]:
        """Return keys and their values' places, as Backend.keys."""
        found: list[tuple[bytes, Place]] = []
        for key, value in self._raw(self._keys_db, ID.pack(state.number) + start, PREFIX_BYTES, limit):
            place = self.row(state, None, KEYED_SEQ.unpack(value)[0])
            if place is None:
                error = lmdb.CorruptedError(f"the index's row of the value of key {key.hex()} is missing")
                self.on_damage(error)
                raise error
            found.append((key[ID.size :], place))
        return found

    def _with_deliveries(self, state: DestinationState, number: int, place: Place) -> Place:
        """Return a place with its count of deliveries; of a topic as a whole (number 0), the most of any
        subscription."""
        seq = place[SEQ]
        if state.is_topic and not number:
            rows = self._raw(self._deliveries_db, DELIVERIES_KEY.pack(seq, 0), 8, PAGE)
            count = max((DELIVERIES.unpack(value)[0] for _, value in rows), default=0)
        else:
            found = self._txn.get(DELIVERIES_KEY.pack(seq, number), db=self._deliveries_db)
            count = DELIVERIES.unpack(found)[0] if found is not None else 0
        return (place[ORDER], seq, place[2], count, place[OWN]) if count else place

    def unacked(self, state: DestinationState, seq: int) -> list[Channel]:
        row = self._row(state, seq)
        if row is None or state.own is None:
            return []
        pending = row[1] & state.own.mask
        return [subscriber.channel for subscriber in state.own.subscriptions.values() if subscriber.own.bit & pending]

    def expired(self, start: bytes, now: int) -> tuple[list[tuple[DestinationState, Place]], bytes | None]:
        """Return a page of those that have expired, from this key of `expiries` on. Returns also the key to go on from;
        None at the end."""
        found: list[tuple[DestinationState, Place]] = []
        rows = self._raw(self._expiries_db, start, 0, PAGE)
        for key, value in rows:
            expires, seq = EXPIRY_KEY.unpack(key)
            if expires > now:
                return found, None
            state = self._states.get(ID.unpack(value)[0])
            place = self.row(state, None, seq) if state is not None else None
            if state is not None and place is not None:
                found.append((state, place))
        return found, rows[-1][0] + b"\0" if rows else None

    def limited(self, start: bytes, least: int) -> tuple[list[tuple[Channel, Place]], bytes | None]:
        """Return a page of those that have come back so often, from this key of `deliveries` on. Returns also the key
        to go on from; None at the end."""
        found: list[tuple[Channel, Place]] = []
        rows = self._raw(self._deliveries_db, start, 0, PAGE) if self.counted else []
        for key, value in rows:
            seq, number = DELIVERIES_KEY.unpack(key)
            count, destination = DELIVERIES.unpack(value)
            state = self._states.get(destination)
            for channel in (
                state.channels(number) if state is not None and count >= least and not state.own.leaving else ()
            ):
                place = self.row(channel.state, channel.subscription, seq)
                if place is not None:
                    found.append((channel, place))
        return found, rows[-1][0] + b"\0" if rows else None

    def pending(self, state: DestinationState, ask: Ask) -> Iterator[tuple[int, int]]:
        """Yield the seq of each of a topic's messages, and the bits of those that have yet to ack it. The bits are as
        of `before` if there is one."""
        first = 0
        while rows := ask(partial(self._pending_page, state, first)):
            yield from rows
            first = rows[-1][0] + 1

    def _pending_page(self, state: DestinationState, first: int) -> list[tuple[int, int]]:
        page = {place[SEQ]: pending for place, pending in self._by_seq(state, first, PAGE, WAITING)}
        if self.before is not None:
            page |= self.before.take(state.number, first, max(page) if len(page) == PAGE else SEQ_MAX)
        return sorted(page.items())

    def pages(self, db: Any, ask: Ask = at_once) -> Iterator[tuple[bytes, bytes]]:
        """Yield all rows. No cursor is open while the caller looks at one (rule X1)."""
        start = FIRST_KEY
        while rows := ask(partial(self._raw, db, start, 0, PAGE)):
            yield from rows
            start = rows[-1][0] + b"\0"

    def all_deliveries(self, ask: Ask = at_once) -> Iterator[tuple[int, int, int, int]]:
        """Yield seq, subscription, count and destination of all that were given back."""
        if self.counted:
            for key, value in self.pages(self._deliveries_db, ask):
                yield (*DELIVERIES_KEY.unpack(key), *DELIVERIES.unpack(value))

    def all(self) -> Iterator[tuple[int, Place, int]]:
        """Yield destination, place and pending bits of every message, for checking."""
        for key, value in self.pages(self._messages_db):
            number, seq = KEY.unpack(key)
            place, pending = read_row(seq, value)
            yield number & ~WAITING, place, pending

    def all_waiting(self) -> Iterator[tuple[int, int, int]]:
        """Yield destination, seq and pending bits of every message that waits as a whole, for checking."""
        start = KEY.pack(WAITING, 0)
        while rows := self._raw(self._messages_db, start, 0, PAGE):
            for key, value in rows:
                number, seq = KEY.unpack(key)
                yield number & ~WAITING, seq, read_row(seq, value)[1]
            start = rows[-1][0] + b"\0"

    def all_keys(self) -> Iterator[tuple[int, bytes, int]]:
        """Yield destination, key and seq, for checking."""
        for key, value in self.pages(self._keys_db):
            yield ID.unpack_from(key)[0], key[ID.size :], KEYED_SEQ.unpack(value)[0]

    def all_lanes(self) -> Iterator[tuple[int, int, int]]:
        """Yield destination, order and seq, for checking; to a destination's number WAITING is added where they
        wait."""
        for key, _ in self.pages(self._lanes_db):
            yield LANE_KEY.unpack(key)

    def all_expiries(self) -> Iterator[tuple[int, int, int]]:
        """Yield expiry (ms), seq and destination, for checking."""
        for key, value in self.pages(self._expiries_db):
            yield (*EXPIRY_KEY.unpack(key), ID.unpack(value)[0])
