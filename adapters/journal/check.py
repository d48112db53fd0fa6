"""The journal store's invariants, walked one by one.

C1  every segment reads back whole, from its header to its end
C2  every message in the index reads back from the journal, with its seq and destination
C3  a destination's count and bytes are those of its messages in the index
C4  a segment's live count and bytes are those of the index's messages that lie in it, and none of them is marked dead;
    a prepared branch's record counts as one
C5  the record of every prepared branch reads back
C6  a topic's message is for subscriptions that are there, for one at least; a subscription's count is that of the
    messages that are for it
C7  what says in which order messages come, when they expire and how often they were given back speaks of messages
    that are there, and speaks of all that it should
C8  each key of a map leads to its value, and each value has its key
C9  what says until when messages wait speaks of messages that are there, of all that lie apart, and says the same by
    message and by time; a destination and a subscription count what waits there
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator

from ...policies.errors import CorruptionError
from ..core.record.place import EXPIRES, ORDER, OWN, SEQ, Place
from ..wal import format as w
from ..wal.reader import BatchReader, read_record
from ..wal.segment import Segment, SegmentTable
from ..wal.ticket import Tail
from .bodies import body_of
from .encoding import PREPARE, SEND_OVERHEAD
from .index.index import Index
from .index.row_format import WAITING


class _Counted:
    """The counts of what the index holds."""

    def __init__(self) -> None:
        self.messages: Counter[int] = Counter()
        self.bytes: Counter[int] = Counter()
        """By destination, both."""
        self.live: Counter[int] = Counter()
        self.live_bytes: Counter[int] = Counter()
        """By segment number, both."""

        self.pending: Counter[tuple[int, int]] = Counter()
        """By destination and pending bits."""
        self.keyed: dict[tuple[int, int], int] = {}
        """The bytes of a map's key as one number, by destination and seq."""
        self.ordered: dict[int, tuple[int, int, int]] = {}
        """Destination, order and expiry by seq, of those that have one or the other, or whose store orders all."""

    def row(self, number: int, place: Place, pending: int, ordered: bool) -> None:
        """Count a message."""
        self.pending[number, pending] += 1
        if ordered or place[ORDER] or place[EXPIRES]:
            self.ordered[place[SEQ]] = (number, place[ORDER], place[EXPIRES])

    def record(self, segment: Segment, length: int) -> None:
        """Count a record that is needed."""
        self.live[segment.number] += 1
        self.live_bytes[segment.number] += length


def violations(index: Index, table: SegmentTable, applied: Tail) -> Iterator[str]:
    """Yield each violation found, as a sentence. Called under the store's lock, with nothing pending."""
    counted = _Counted()
    yield from _segments(table, applied)
    yield from _messages(index, table, counted)
    yield from _branches(index, table, counted)
    yield from _counts(index, table, counted)
    yield from _subscriptions(index, counted)
    yield from _rows(index, counted)
    yield from _waits(index)


def _segments(table: SegmentTable, applied: Tail) -> Iterator[str]:
    for segment in table.all:
        if not segment.counts or applied.segment.number < segment.number < w.COPIES:
            continue
        end = applied.offset if segment is applied.segment else segment.end
        reader = BatchReader(segment, w.HEADER_BYTES, segment.base_lsn - 1, end)
        for _ in reader:
            pass
        if reader.offset != end:
            yield f"C1 {CorruptionError(str(segment.path), reader.offset, f'records after {reader.lsn} are damaged')}"


def _messages(index: Index, table: SegmentTable, counted: _Counted) -> Iterator[str]:
    reading = None
    for number, place, pending in index.rows.all():
        seq, (lsn, offset, length) = place[SEQ], place[OWN]
        state = index.states.get(number)
        if state is None:
            yield f"C2 message {seq} is of destination {number}, which is not there"
        elif state.is_map:
            counted.keyed[number, seq], pending = pending, 0
        counted.row(number, place, pending, index.priorities)
        segment = table.find(lsn)
        if segment is None:
            yield f"C2 message {seq} of destination {number} lies in no segment (record {lsn})"
            continue
        if segment is not reading:
            reading, file = segment, segment.reading()
        if body_of(os.pread(file.fd, length, offset), offset, segment.seed, number, place) is None:
            yield f"C2 message {seq} of destination {number} does not read back at {segment.path}:{offset}"
        counted.messages[number] += 1
        counted.bytes[number] += length - SEND_OVERHEAD
        counted.record(segment, length)
        if segment.is_dead(lsn):
            yield f"C4 message {seq} of destination {number} is in the index and marked dead in {segment.path}"


def _branches(index: Index, table: SegmentTable, counted: _Counted) -> Iterator[str]:
    for transaction, (lsn, offset, length) in index.transactions.prepared():
        segment = table.find(lsn)
        if segment is None or read_record(segment, PREPARE, lsn, offset, length) is None:
            yield f"C5 the prepared transaction {transaction.hex()} (record {lsn}) does not read back"
            continue
        counted.record(segment, length)
        if segment.is_dead(lsn):
            yield f"C4 the prepared transaction {transaction.hex()} is marked dead in {segment.path}"


def _counts(index: Index, table: SegmentTable, counted: _Counted) -> Iterator[str]:
    for number, state in index.states.items():
        held = counted.messages[number], counted.bytes[number]
        if (state.count, state.bytes) != held:
            yield (
                f"C3 {state.destination} counts {state.count} messages of {state.bytes} bytes; "
                f"the index holds {held[0]} of {held[1]}"
            )
    for segment in table.all:
        live = counted.live[segment.number], counted.live_bytes[segment.number]
        if (segment.live, segment.live_bytes) != live:
            yield (
                f"C4 {segment.path} counts {segment.live} live messages of {segment.live_bytes} bytes; "
                f"the index has {live[0]} of {live[1]} in it"
            )


def _subscriptions(index: Index, counted: _Counted) -> Iterator[str]:
    for number, state in index.states.items():
        held = {pending: count for (of, pending), count in counted.pending.items() if of == number}
        for pending, count in held.items():
            if pending & ~state.own.mask or bool(pending) != state.is_topic:
                yield f"C6 {count} messages of {state.destination} are for {pending:b}; there are {state.own.mask:b}"
        for subscriber in state.own.subscriptions.values():
            unacked = sum(count for pending, count in held.items() if pending & subscriber.own.bit)
            if subscriber.count != unacked:
                yield f"C6 {subscriber.subscription} counts {subscriber.count} messages; the index holds {unacked}"


def _rows(index: Index, counted: _Counted) -> Iterator[str]:
    rows = index.rows
    if index.priorities:
        waiting = {seq for _, seq, _ in rows.all_waiting()}
        lanes = {seq: (number, order) for number, order, seq in rows.all_lanes()}
        expected = {
            seq: (number | WAITING if seq in waiting else number, order)
            for seq, (number, order, _) in counted.ordered.items()
        }
        if lanes != expected:
            yield f"C7 the order of messages {sorted({*lanes.items()} ^ {*expected.items()})[:10]} is not theirs"
    elif any(order for _, order, _ in counted.ordered.values()):
        yield "C7 messages have an order in a store without priorities"
    expiries = {(expires, seq, number) for expires, seq, number in rows.all_expiries()}
    expiring = {(expires, seq, number) for seq, (number, _, expires) in counted.ordered.items() if expires}
    if expiries != expiring:
        yield f"C7 the expiry of messages {sorted(expiries ^ expiring)[:10]} is not theirs"
    keyed = {(number, seq): int.from_bytes(name, "little") for number, name, seq in rows.all_keys()}
    if keyed != counted.keyed:
        yield f"C8 keys of maps lead elsewhere, or nowhere: {sorted({*keyed.items()} ^ {*counted.keyed.items()})[:10]}"
    deliveries = 0
    for seq, number, _, destination in rows.all_deliveries():
        deliveries += 1
        state = index.states[destination]
        subscriber = state.own.subscriptions.get(number)
        if state.is_topic != (subscriber is not None) or rows.row(state, subscriber, seq) is None:
            yield f"C7 message {seq} of destination {destination} has come back to {number}, which has it not"
    if deliveries != rows.counted:
        yield f"C7 {deliveries} messages were given back; {rows.counted} are counted"


def _waits(index: Index) -> Iterator[str]:
    rows = index.rows
    waits = list(rows.all_waits())
    if len(waits) != rows.waits:
        yield f"C9 {len(waits)} messages wait; {rows.waits} are counted"
    by_time = {(seq, number, due, destination) for due, seq, number, destination in rows.all_dues()}
    if by_time != set(waits):
        yield f"C9 by time other messages wait than by seq: {sorted(by_time ^ set(waits))[:10]}"
    apart = {(number, seq): pending for number, seq, pending in rows.all_waiting()}
    whole = {(destination, seq) for seq, number, _, destination in waits if not number}
    if whole != apart.keys():
        yield f"C9 what lies apart does not wait, or the other way round: {sorted(whole ^ apart.keys())[:10]}"
    of_destination = Counter(number for number, _ in apart)
    of_subscription = Counter(number for _, number, _, _ in waits if number)
    for seq, number, _, destination in waits:
        state = index.states[destination]
        subscriber = state.own.subscriptions.get(number)
        if bool(number) != (subscriber is not None) or rows.row(state, subscriber, seq) is None:
            yield f"C9 message {seq} of destination {destination} waits for {number}, which has it not"
    for number, state in index.states.items():
        if state.delayed != of_destination[number]:
            there = of_destination[number]
            yield f"C9 {state.destination} counts {state.delayed} messages that wait; there are {there}"
        for subscriber in state.own.subscriptions.values():
            bit = subscriber.own.bit
            there = sum(bool(pending & bit) for (of, _), pending in apart.items() if of == number)
            there += of_subscription[subscriber.number]
            if subscriber.delayed != there:
                yield f"C9 {subscriber.subscription} counts {subscriber.delayed} messages that wait; there are {there}"
