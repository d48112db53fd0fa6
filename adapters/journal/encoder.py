"""The encoder of a store's log: operations in, the bytes of one batch out (rule J2), and what has to be remembered of
them to encode the next ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

from google_crc32c import extend as crc32c

from ..base import Subscription, SubscriptionKey
from ..duplicates import DuplicateWindow
from ..wal import format as w
from ..wal.ticket import Tail, Ticket, WriteBatch
from . import format as f
from .batch import Branch, Entry, Operation, Outcome, Subscribed, is_requeued
from .destinations import DestinationState, SubscriptionState


class JournalBatch(WriteBatch):
    """A write batch and what the index and the encoder have to know of it."""

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

    def __init__(
        self, start: Tail, tail: Tail, tickets: list[Ticket], data: bytes, sync: bool, entries: list[Entry]
    ) -> None:
        self.segment = start.segment  # not by the base's: one call less for a send
        self.offset = start.offset
        self.tail = tail
        self.tickets = tickets
        self.data = data
        """Empty if there are duplicates only."""
        self.sync = sync
        self.entries = entries


class Encoder:
    """The journal's side of its log (ticket.Encoder). All is the leader's, but for looking at it."""

    def __init__(
        self,
        window: DuplicateWindow,
        deliver: Callable[[JournalBatch], None] = lambda batch: None,
        stopped: Callable[[], None] = lambda: None,
        promise_max: int = 0,
    ) -> None:
        """`deliver` takes each batch that counts, in order; `stopped` wakes whoever waits for one, after a failure. A
        branch that needs more than `promise_max` bytes for its outcome is promised none."""
        self.window = window
        self.deliver, self.stopped = deliver, stopped
        self.prepared: dict[bytes, Branch] = {}
        """Branches that wait for their outcome, by transaction. Those of any other transaction are skipped."""
        self.subscribed: dict[Subscribed, int] = {}
        """The durable subscriptions that are there, and their numbers: to begin one of them, or end another, says
        nothing."""
        self.snapshot_at = (0, 0)
        self.promised = 0
        """Bytes that their outcomes take; after Ctrl-C it may say too much until nothing is prepared."""
        self._promise_max = promise_max

    def promise(self, branch: Branch) -> int:
        """Bytes to keep free for its outcome, which takes at most so many. None where that needs a segment of its own:
        on a full disk such a one waits for room."""
        size = w.BATCH_HEADER.size + f.OUTCOME_BYTES + branch.size
        return size if size <= self._promise_max else 0

    def restore(self, branch: Branch) -> None:
        """At open: it waits for its outcome."""
        branch.promise = self.promise(branch)
        self.prepared[branch.transaction] = branch
        self.promised += branch.promise

    def encode(self, tail: Tail, tickets: list[Ticket], watermark: int) -> JournalBatch:
        """Give LSNs and seqs, the log's `counter`, and build the bytes."""
        if len(tickets) == 1:
            operations = tickets[0].content
            if len(operations) == 1 and operations[0][0] == f.SEND:
                _, state, rest, key, extra = operations[0]
                if key is None and state.declared:
                    return _encode_one_send(tail, tickets, state, rest, extra, watermark)
            elif len(operations) == 1 and operations[0][0] == f.ACK:
                return _encode_one_ack(tail, tickets, watermark)
        return _Builder(tail, self.window, self.prepared, self.subscribed).encode(tickets, watermark)

    def written(self, batch: JournalBatch) -> None:
        for state in batch.gone or ():
            state.declared = False
            self.window.forget(state.id)
        for state in batch.declared or ():
            state.declared = True
        if batch.ids:
            self.window.add(batch.ids)
        if batch.snapshot is not None:
            self.snapshot_at = batch.snapshot
        for key, number in (batch.subscribed or {}).items():
            if number:
                self.subscribed[key] = number
            else:
                self.subscribed.pop(key, None)
        for branch in batch.prepared or ():
            if branch.transaction not in self.prepared:
                self.promised += branch.promise
            self.prepared[branch.transaction] = branch
        for branch in batch.settled or ():
            if self.prepared.pop(branch.transaction, None) is not None:
                self.promised -= branch.promise
            branch.reservation = None
        if not self.prepared:
            self.promised = 0


def _encode_one_send(
    start: Tail, tickets: list[Ticket], state: DestinationState, rest: bytes, extra: Any, watermark: int
) -> JournalBatch:
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
    data = _batch_of_one(segment.seed, offset, lsn, watermark, record)
    return JournalBatch(start, tail, tickets, data, ticket.sync, entries)


def _encode_one_ack(start: Tail, tickets: list[Ticket], watermark: int) -> JournalBatch:
    """The other common one: a consumer that acks what it received."""
    segment, offset, lsn, seq = start
    ticket = tickets[0]
    ((_, state, acked, number),) = ticket.content
    lsn += 1
    record = f.ACK_RECORD.pack(f.ACK_PAYLOAD.size, lsn, f.ACK, 0, 0, state.id, number, acked)
    tail = tuple.__new__(Tail, (segment, offset + _BATCH_BYTES + f.ACK_BYTES, lsn, seq))
    data = _batch_of_one(segment.seed, offset, lsn, watermark, record)
    return JournalBatch(start, tail, tickets, data, ticket.sync, ticket.content)


def _batch_of_one(seed: int, offset: int, lsn: int, watermark: int, record: bytes) -> bytes:
    """`record` is without its CRC."""
    header = _pack_batch(len(record) + 4, 1, lsn, watermark)
    record_crc = crc32c(seed ^ (offset + _BATCH_BYTES), record)
    return b"".join((w.BATCH_MAGIC, _pack_crc(crc32c(seed ^ offset, header)), header, _pack_crc(record_crc), record))


_BATCH_BYTES = w.BATCH_HEADER.size
_pack_crc = w.CRC.pack
_pack_send = f.SEND_START.pack
_pack_batch = w.BATCH_REST.pack


class _Builder:
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
        self._lsn, self._seq = tail.lsn, tail.counter
        self._parts: list[bytes] = [b""]
        self._entries: list[Entry] = []
        self._ids: dict[tuple[int, bytes], int] = {}
        self._declared: list[DestinationState] = []
        self._gone: list[DestinationState] = []
        self._snapshot: tuple[int, int] | None = None

    def encode(self, tickets: list[Ticket], watermark: int) -> JournalBatch:
        sync = not tickets
        for ticket in tickets:
            sync = sync or ticket.sync
            outcomes: list[Outcome] = []
            self._all(ticket.content, outcomes)
            ticket.outcomes = outcomes
        start, data, tail = self._start, b"", self._start
        count = self._lsn - start.lsn
        if count or not tickets:
            length = self._offset - start.offset - _BATCH_BYTES
            self._parts[0] = w.encode_batch_header(self._seed, start.offset, length, count, start.lsn + 1, watermark)
            data = b"".join(self._parts)
            tail = Tail(start.segment, self._offset, self._lsn, self._seq)
        batch = JournalBatch(start, tail, tickets, data, sync, self._entries)
        batch.ids, batch.snapshot = self._ids or None, self._snapshot
        batch.subscribed = self._changed or None
        batch.declared, batch.gone = self._declared or None, self._gone or None
        batch.prepared, batch.settled = self._prepared or None, self._settled or None
        batch.changes = bool(
            self._ids or self._snapshot or self._changed or self._declared or self._gone or self._prepared
            or self._settled
        )  # fmt: skip
        batch.unsynced = bool(tickets) and all(ticket.unsynced for ticket in tickets)
        return batch

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
        record = w.RECORD_REST.pack(len(payload), self._lsn, kind, 0, 0) + payload
        self._parts += (_pack_crc(crc32c(self._seed ^ self._offset, record)), record)
        self._offset += len(record) + 4
