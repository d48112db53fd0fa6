"""What goes into the journal together: tickets in, the bytes of one batch out (rule J2)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from itertools import islice
from types import MappingProxyType
from typing import Any, NamedTuple

from google_crc32c import extend as crc32c

from ..background import shared
from ..base import Message, Subscription, SubscriptionKey
from ..duplicates import DuplicateWindow
from ..room import Amount
from . import format as f
from .destinations import DestinationState, SubscriptionState
from .segment import Segment

Operation = tuple[Any, ...]
"""(SEND, state, rest of the payload, duplicate key or None, (order, expires) or None where nobody needs either), (ACK,
state, seq, subscription), (ACK_RANGE, state, first, last, subscription), (DELIVERED, state, seq, subscription, count),
(SUBSCRIBE, state, subscription's number, Subscription, retroactive), (UNSUBSCRIBE, state, key), (DESTINATION_GONE,
state), (PREPARE, branch), (COMMIT, branch), (ROLLBACK, branch); (SNAPSHOT, document); and, in the router's decision
log, (type, payload, what it says). `subscription`: its number, 0 for a queue or for all of a topic's."""
Entry = tuple[Any, ...]
"""An operation as the index wants it: (SEND, state, seq, lsn, offset, length, duplicate key or None, (order, expires)
or None), (SUBSCRIBE, state, its state), (UNSUBSCRIBE, state, number), (DESTINATION, state), (PREPARE, transaction, lsn,
offset, length), (COMMIT, transaction), (ROLLBACK, transaction, branch), else the same as the operation; a snapshot has
none."""
Outcome = tuple[int, bool]
"""Of a SEND: its seq, and whether it was a duplicate. Of a SUBSCRIBE: the subscription's number, and whether it was
there already; of an UNSUBSCRIBE the same, number 0 if it was not."""
Subscribed = tuple[int, SubscriptionKey]
"""Destination id and key: what the leader knows a subscription by."""


def room_for(operations: Iterable[Operation], window: DuplicateWindow) -> Amount:
    """What these sends take of a store's room; those that are stored already, nothing."""
    sizes = [
        len(operation[2]) + f.SEND_OVERHEAD - f.MESSAGE.size
        for operation in operations
        if operation[3] is None or window.get(operation[3]) is None or is_requeued(operation)
    ]
    return len(sizes), sum(sizes)


def is_requeued(send: Operation) -> bool:
    """Whether it is stored whatever the duplicate window says."""
    return bool(send[2][f.FLAGS_AT] & f.REQUEUED)


class Branch:
    """A store's part of a transaction that is prepared: what its commit will do."""

    __slots__ = (
        "acks",
        "changes",
        "delivered",
        "messages",
        "operations",
        "participants",
        "payload",
        "promise",
        "reservation",
        "size",
        "transaction",
    )

    def __init__(
        self,
        transaction: bytes,
        participants: tuple[bytes, ...],
        operations: list[Operation],
        size: int,
        payload: bytes,
    ) -> None:
        self.transaction = transaction
        self.participants = participants
        """Ids of all stores that take part."""
        self.operations = operations
        """Changes of subscriptions, sends, then acks."""
        self.delivered: list[Operation] = []
        """What a rollback writes of the messages that come back."""
        self.size = size
        """At most so many bytes the operations' records take."""
        self.payload = payload
        """Of the PREPARE record."""
        self.acks: list[tuple[DestinationState, int, int]] = [op[1:] for op in operations if op[0] == f.ACK]
        """State, seq, subscription."""
        self.changes = sum(op[0] in (f.SUBSCRIBE, f.UNSUBSCRIBE) for op in operations)
        self.promise = 0
        """Bytes kept free for its outcome (Log.promise)."""
        self.messages: Sequence[Message] = ()
        """Those that it acks, where this process received them."""
        self.reservation: object = None
        """Room in the store until the outcome (limits.py)."""


class Ticket:
    """Operations that go into the journal together, in one batch, and what became of them."""

    done = False
    error: BaseException | None = None
    outcomes: list[Outcome] = []  # noqa: RUF012  set by the leader, never changed in place
    waiter: Any = None
    future: tuple[Future[Any], Callable[[Ticket], Any]] | None = None
    reservation: object = None
    """Room in the store that the ticket holds until it is done (limits.py)."""
    lazy = False
    """Need not be synced even under `always`: a durable decision stands behind it, and recovery does it again."""

    promise = 0
    """Bytes that its outcome will take, if it prepares a branch."""
    frees = False
    """A snapshot, after which there is more room than before: it may use what is promised."""

    def __init__(self, operations: list[Operation], size: int, sync: bool) -> None:
        self.operations = operations
        self.size = size
        """At most so many bytes the operations' records take."""
        self.sync = sync

    def finish(self, error: BaseException | None) -> None:
        """Done, well or not. May be called again with the same by a leader that makes up for an interrupted one."""
        if error is not None:
            self.error = error
            for operation in self.operations:
                if operation[0] == f.PREPARE:  # the error's traceback may hold the branch for long
                    operation[1].reservation = None
        self.reservation = None
        future = self.future
        if future is not None and not self.done:
            result = None if error is not None else future[1](self)
            shared().resolve([(future[0], result, error)])
        self.done = True
        if self.waiter is not None:
            self.hint()

    def hint(self) -> None:
        """Wake the thread that waits for it, if one does."""
        try:
            self.waiter.release()
        except (AttributeError, RuntimeError):
            pass  # nobody waits, or it was awake already


class Tail(NamedTuple):
    """The end of the log: what has been written."""

    segment: Segment
    offset: int
    lsn: int
    seq: int


class Flight:
    """A batch on its way to the disk: enough to write it again, same bytes, same place (rule G2)."""

    ids: dict[tuple[int, bytes], int] | None = None
    """New in the duplicate window."""
    declared: list[DestinationState] | None = None
    """Declared in this batch."""
    gone: list[DestinationState] | None = None
    """Removed in this batch: to be declared anew before their next message."""
    subscribed: dict[Subscribed, int] | None = None
    """What has become of subscriptions in this batch: the number, 0 for what is gone."""
    snapshot: tuple[int, int] | None = None
    """Where the snapshot in it is."""
    prepared: list[Branch] | None = None
    """Prepared in this batch."""
    settled: list[Branch] | None = None
    """Committed or rolled back in this batch."""
    lazy = False
    """Every ticket in it is lazy."""

    def __init__(
        self, start: Tail, tail: Tail, tickets: list[Ticket], data: bytes, entries: list[Entry], sync: bool
    ) -> None:
        self.segment = start.segment
        self.offset = start.offset
        self.tail = tail
        """The end of the log once it is written."""
        self.tickets = tickets
        self.data = data
        """Empty if there is nothing to write: duplicates only."""
        self.entries = entries
        self.sync = sync


def encode(
    tail: Tail,
    tickets: list[Ticket],
    window: DuplicateWindow,
    watermark: int,
    prepared: Mapping[bytes, Branch] = MappingProxyType({}),
    subscribed: Mapping[Subscribed, int] = MappingProxyType({}),
) -> Flight:
    """Give LSNs and seqs and build the bytes of the batch after `tail`; no tickets make an empty batch, a mark.
    `prepared`: the branches that wait for their outcome; one of any other transaction is passed over. `subscribed`: the
    subscriptions that are there; to begin one of them, or end another, says nothing.

    Changes nothing but the tickets' `outcomes`, so that it may be done again after an interruption.
    """
    if len(tickets) == 1:
        operations = tickets[0].operations
        if len(operations) == 1 and operations[0][0] == f.SEND:
            _, state, rest, key, extra = operations[0]
            if key is None and state.declared:
                return _encode_one_send(tail, tickets, state, rest, extra, watermark)
        elif len(operations) == 1 and operations[0][0] == f.ACK:
            return _encode_one_ack(tail, tickets, watermark)
    return _Encoder(tail, window, prepared, subscribed).encode(tickets, watermark)


def _encode_one_send(
    start: Tail, tickets: list[Ticket], state: DestinationState, rest: bytes, extra: Any, watermark: int
) -> Flight:
    """The commonest batch, without the general machinery: one thread that sends to a known destination."""
    segment, offset, lsn, seq = start
    lsn += 1
    seq += 1
    record = _pack_send(len(rest) + 8, lsn, f.SEND, 0, 0, seq) + rest
    length = len(record) + 4
    ticket = tickets[0]
    ticket.outcomes = [(seq, False)]
    entries: list[Entry] = [(f.SEND, state, seq, lsn, offset + _BATCH_BYTES, length, None, extra)]
    tail = tuple.__new__(Tail, (segment, offset + _BATCH_BYTES + length, lsn, seq))
    return Flight(
        start, tail, tickets, _batch_of_one(segment.seed, offset, lsn, watermark, record), entries, ticket.sync
    )


def _encode_one_ack(start: Tail, tickets: list[Ticket], watermark: int) -> Flight:
    """The other common one: a consumer that acks what it received."""
    segment, offset, lsn, seq = start
    ticket = tickets[0]
    ((_, state, acked, number),) = ticket.operations
    lsn += 1
    record = f.ACK_RECORD.pack(f.ACK_PAYLOAD.size, lsn, f.ACK, 0, 0, state.id, number, acked)
    tail = tuple.__new__(Tail, (segment, offset + _BATCH_BYTES + f.ACK_BYTES, lsn, seq))
    data = _batch_of_one(segment.seed, offset, lsn, watermark, record)
    return Flight(start, tail, tickets, data, ticket.operations, ticket.sync)


def _batch_of_one(seed: int, offset: int, lsn: int, watermark: int, record: bytes) -> bytes:
    """`record` is without its CRC."""
    header = _pack_batch(len(record) + 4, 1, lsn, watermark)
    record_crc = crc32c(seed ^ (offset + _BATCH_BYTES), record)
    return b"".join((f.BATCH_MAGIC, _pack_crc(crc32c(seed ^ offset, header)), header, _pack_crc(record_crc), record))


_BATCH_BYTES = f.BATCH_HEADER.size
_pack_crc = f.CRC.pack
_pack_send = f.SEND_START.pack
_pack_batch = f.BATCH_REST.pack


class _Encoder:
    """Builds one batch of any tickets."""

    def __init__(
        self,
        tail: Tail,
        window: DuplicateWindow,
        prepared: Mapping[bytes, Branch],
        subscribed: Mapping[Subscribed, int],
    ) -> None:
        self._start = tail
        self._window = window
        self._waiting = prepared
        self._subscribed = subscribed
        self._changed: dict[Subscribed, int] = {}
        self._prepared: list[Branch] = []
        self._settled: list[Branch] = []
        self._seed = tail.segment.seed
        self._offset = tail.offset + _BATCH_BYTES
        self._lsn, self._seq = tail.lsn, tail.seq
        self._parts: list[bytes] = [b""]
        self._entries: list[Entry] = []
        self._ids: dict[tuple[int, bytes], int] = {}
        self._declared: list[DestinationState] = []
        self._gone: list[DestinationState] = []
        self._snapshot: tuple[int, int] | None = None

    def encode(self, tickets: list[Ticket], watermark: int) -> Flight:
        sync = not tickets
        for ticket in tickets:
            sync = sync or ticket.sync
            outcomes: list[Outcome] = []
            self._all(ticket.operations, outcomes)
            ticket.outcomes = outcomes
        start, data, tail = self._start, b"", self._start
        count = self._lsn - start.lsn
        if count or not tickets:
            length = self._offset - start.offset - _BATCH_BYTES
            self._parts[0] = f.encode_batch_header(self._seed, start.offset, length, count, start.lsn + 1, watermark)
            data = b"".join(self._parts)
            tail = Tail(start.segment, self._offset, self._lsn, self._seq)
        flight = Flight(start, tail, tickets, data, self._entries, sync)
        flight.ids, flight.snapshot = self._ids or None, self._snapshot
        flight.subscribed = self._changed or None
        flight.declared, flight.gone = self._declared or None, self._gone or None
        flight.prepared, flight.settled = self._prepared or None, self._settled or None
        flight.lazy = bool(tickets) and all(ticket.lazy for ticket in tickets)
        return flight

    def _all(self, operations: list[Operation], outcomes: list[Outcome]) -> None:
        position = 0
        while position < len(operations):
            operation = operations[position]
            kind = operation[0]
            position += 1
            if kind == f.SEND:
                outcomes.append(self._send(operation))
                position = self._plain_sends(operations, position, outcomes)
            elif kind in (f.COMMIT, f.ROLLBACK):
                self._settle(kind, operation[1], outcomes)
            elif kind == f.SUBSCRIBE:
                outcomes.append(self._subscribe(*operation[1:]))
            elif kind == f.UNSUBSCRIBE:
                outcomes.append(self._unsubscribe(operation[1], operation[2]))
            else:
                self._other(operation)

    def _settle(self, kind: int, branch: Branch, outcomes: list[Outcome]) -> None:
        """The outcome of a prepared branch. A commit writes what was prepared as if it were done now, in one batch with
        the record of the outcome. Told twice, the second time says nothing: who was interrupted tells it again."""
        if branch in self._settled or (branch.transaction not in self._waiting and branch not in self._prepared):
            return
        if kind == f.COMMIT:
            self._all(branch.operations, outcomes)
        else:
            self._all(branch.delivered, outcomes)
        self._append(kind, branch.transaction)
        self._entries.append((kind, branch.transaction, branch))
        self._settled.append(branch)

    def _send(self, operation: Operation) -> Outcome:
        _, state, rest, key, extra = operation
        if key is not None:
            first = self._ids.get(key) or (self._window.get(key) if state not in self._gone else None)
            if first is not None and not is_requeued(operation):
                return first, True
        self._declare(state)
        self._lsn += 1
        self._seq += 1
        offset, seq = self._offset, self._seq
        record = _pack_send(len(rest) + 8, self._lsn, f.SEND, 0, 0, seq) + rest
        length = len(record) + 4
        self._parts += (_pack_crc(crc32c(self._seed ^ offset, record)), record)
        self._entries.append((f.SEND, state, seq, self._lsn, offset, length, key, extra))
        self._offset = offset + length
        if key is not None:
            self._ids[key] = seq
        return seq, False

    def _plain_sends(self, operations: list[Operation], position: int, outcomes: list[Outcome]) -> int:
        """The sends without message id that follow one to the same destination: the body of a send_many, in local
        variables. Returns the position of the first operation that is something else."""
        state = operations[position - 1][1]
        seed, offset, lsn, seq = self._seed, self._offset, self._lsn, self._seq
        parts, entries = self._parts, self._entries
        for operation in islice(operations, position, None):
            if operation[0] != f.SEND or operation[1] is not state or operation[3] is not None:
                break
            _, _, rest, _, extra = operation
            lsn += 1
            seq += 1
            record = _pack_send(len(rest) + 8, lsn, f.SEND, 0, 0, seq) + rest
            length = len(record) + 4
            parts += (_pack_crc(crc32c(seed ^ offset, record)), record)
            entries.append((f.SEND, state, seq, lsn, offset, length, None, extra))
            outcomes.append((seq, False))
            offset += length
            position += 1
        self._offset, self._lsn, self._seq = offset, lsn, seq
        return position

    def _declare(self, state: DestinationState) -> None:
        """Give the id its name, if it has none yet."""
        if (not state.declared or state in self._gone) and state not in self._declared:
            self._declared.append(state)
            self._append(f.DESTINATION, state.declaration())
            self._entries.append((f.DESTINATION, state))

    def _subscribe(
        self, state: DestinationState, number: int, subscription: Subscription, retroactive: bool
    ) -> Outcome:
        """Of two that begin the same one the first in the log does."""
        key = (state.id, subscription.key)
        known = self._changed.get(key, self._subscribed.get(key, 0))
        if known:
            return known, True
        self._declare(state)
        begun = SubscriptionState(number, state, subscription, 0 if retroactive else self._seq)
        self._append(f.SUBSCRIBE, begun.record())
        self._entries.append((f.SUBSCRIBE, state, begun))
        self._changed[key] = number
        return number, False

    def _unsubscribe(self, state: DestinationState, subscription: SubscriptionKey) -> Outcome:
        key = (state.id, subscription)
        number = self._changed.get(key, self._subscribed.get(key, 0))
        if not number:
            return 0, False
        self._append(f.UNSUBSCRIBE, f.UNSUBSCRIBE_PAYLOAD.pack(state.id, number))
        self._entries.append((f.UNSUBSCRIBE, state, number))
        self._changed[key] = 0
        return number, True

    def _other(self, operation: Operation) -> None:
        kind = operation[0]
        if kind == f.ACK:
            _, state, seq, number = operation
            self._append(kind, f.ACK_PAYLOAD.pack(state.id, number, seq))
        elif kind == f.ACK_RANGE:
            _, state, first, last, number = operation
            self._append(kind, f.RANGE_PAYLOAD.pack(state.id, number, first, last))
        elif kind == f.DELIVERED:
            _, state, seq, number, count = operation
            self._append(kind, f.DELIVERED_PAYLOAD.pack(state.id, number, seq, min(count, f.DELIVERIES_MAX)))
        elif kind == f.DESTINATION_GONE:
            self._append(kind, f.GONE_PAYLOAD.pack(operation[1].id))
            self._gone.append(operation[1])
            self._declared = [state for state in self._declared if state is not operation[1]]
            self._ids = {key: seq for key, seq in self._ids.items() if key[0] != operation[1].id}
            for known in (*self._subscribed, *self._changed):
                if known[0] == operation[1].id:
                    self._changed[known] = 0
        elif kind == f.PREPARE:
            branch, offset = operation[1], self._offset
            self._append(kind, branch.payload)
            self._entries.append((kind, branch.transaction, self._lsn, offset, self._offset - offset))
            self._prepared.append(branch)
            return
        else:
            self._append(kind, operation[1])
            if kind == f.SNAPSHOT:
                self._snapshot = (self._start.segment.number, self._start.offset)
                return
        self._entries.append(operation)

    def _append(self, kind: int, payload: bytes) -> None:
        self._lsn += 1
        record = f.RECORD_REST.pack(len(payload), self._lsn, kind, 0, 0) + payload
        self._parts += (_pack_crc(crc32c(self._seed ^ self._offset, record)), record)
        self._offset += len(record) + 4
