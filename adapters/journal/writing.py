"""The encoder of a store's log (wal/ticket.py), and the log as the core's Writer. The encoder writes what a ticket asks
for as the bytes of one batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, TypeVar

from google_crc32c import extend as crc32c

from ..core.backend import Host
from ..core.operations.branches import Prepare
from ..core.operations.changes import Ack, Change, Mark, Postponed, Returned, Send, SendMany
from ..core.operations.plan import Plan, Sequencer
from ..system.acceleration import inner_loop
from ..wal import format as w
from ..wal.log import Log
from ..wal.segment import Segment
from ..wal.ticket import GROWS, OWED, Tail, Ticket, WriteBatch
from .applying import Applier
from .changes import WriteSnapshot
from .encoding import ACK, ACK_PAYLOAD, ACK_RECORD, CODECS, SEND, SEND_HEAD, SEND_START

_BATCH_BYTES = w.BATCH_HEADER.size
_SEND_BYTES = SEND_START.size
_ACK_PAYLOAD_BYTES = ACK_PAYLOAD.size
_pack_crc = w.CRC.pack
_pack_record = w.RECORD_REST.pack
_pack_batch = w.BATCH_REST.pack
_pack_send = SEND_HEAD.pack
_pack_ack = ACK_RECORD.pack


HEAVY_BYTES: Final = 16 << 10
"""Bytes that count as a change more: what is written and not applied yet is held in memory."""

_NO_TICKETS: list[Any] = []

T = TypeVar("T")


class JournalBatch(WriteBatch):
    """A write batch and the plan that it is made of; None in a mark."""

    __slots__ = ("plan",)

    def __init__(self, start: Tail, tail: Tail, ticket: Ticket | None, data: bytes, plan: Plan | None) -> None:
        super().__init__(start, tail, ticket, data)
        self.plan: Plan | None = plan


class JournalEncoder:
    """The journal's side of its log. All but `deliver` is called by who submits, one at a time; any thread may look."""

    __slots__ = ("__dict__", "_host", "promised", "sequencer")

    def __init__(self, host: Host) -> None:
        self._host = host
        self.sequencer: Final = host.sequencer
        self.snapshot_at: tuple[int, int] = (0, 0)
        self.promised: int = 0
        """Bytes that the outcomes of prepared branches take; after Ctrl-C it may say too much until nothing is
        prepared."""
        self.encode: Callable[[Tail, Ticket | None, int], JournalBatch] = partial(encode_ticket, self.sequencer)
        self.accept: Callable[[JournalBatch], None] = partial(accept_batch, self)
        self._log: Log
        self._applier: Applier

    def start(self, wal: Log, snapshot_at: tuple[int, int], applier: Applier) -> None:
        """Start with the log to encode for, its latest snapshot's place, and what keeps the index up to it."""
        self._log, self.snapshot_at, self._applier = wal, snapshot_at, applier

    def load(self) -> None:
        """Count what is promised to prepared branches: the core knows them by now."""
        self.promised = sum(branch.promise for branch in self.sequencer.prepared.values())

    @property
    def spare_bytes(self) -> int:
        return self._applier.snapshot_bytes

    def leaves(self, ticket: Any) -> int:
        if not self._applier.may_count and any(
            type(change) is Returned or (type(change) is Postponed and change.due) for change in ticket.content
        ):
            return GROWS
        return max((change.leaves for change in ticket.content), default=OWED)

    def needed_bytes(self, segment: Segment) -> int:
        return segment.live_bytes

    def reserve(self, size: int) -> None:
        self._applier.reserve(size)

    def promise(self, plan: Plan) -> None:
        """Count what is promised to the branches of a plan that is about to be accepted."""
        prepared = self.sequencer.prepared
        change = 0
        for branch in plan.prepared:
            if branch.transaction not in prepared:
                change += branch.promise
        for branch in plan.settled:
            if branch.transaction in prepared:
                change -= branch.promise
        self.promised += change

    @inner_loop
    def deliver(self, batch: JournalBatch) -> None:
        plan, host = batch.plan, self._host
        if plan is None:
            return
        if batch.data:
            plan.own = batch.tail
            host.batches += 1
        elif plan.beside is None:
            return  # nothing is written: there are duplicates only
        host.take(plan)
        plan.tickets = _NO_TICKETS  # who keeps the plan needs them no more
        if len(batch.data) > HEAVY_BYTES:
            host.pending_changes += len(batch.data) // HEAVY_BYTES
        batch.plan = None  # last: who is struck before does all again

    def rest(self) -> None:
        self.sequencer.rest()

    def stopped(self) -> None:
        if self._log.failed is not None:
            self._host.stop(self._log.failed)


class JournalWriter:
    """A log as the core's Writer: its methods are the log's own. Before there is a log they raise what
    Engine.ensure_usable raises."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._close: Callable[[], None] = lambda: None
        self.submit: Callable[[Ticket], object] = self._refuse
        self.submit_all: Callable[[Sequence[Ticket]], object] = self._refuse
        self.wait: Callable[[Ticket], list[Any]] = self._refuse
        self.proceed: Callable[[], None] = self._refuse
        self.flush: Callable[[], None] = self._refuse
        self.refuse_more: Callable[[], None] = self._refuse
        self._log: Log | None = None

    def _refuse(self, *_: object) -> Any:
        self._host.ensure_usable()
        raise self._host.refusal()

    def start(self, wal: Log, close: Callable[[], None]) -> None:
        """Start: from now on the writer is this log's. `close` is called after the log's."""
        self._log, self._close = wal, close
        self.submit, self.submit_all, self.wait = wal.submit, wal.submit_all, wal.wait
        self.proceed, self.flush, self.refuse_more = wal.proceed, wal.flush, wal.refuse_more

    def undisturbed(self, work: Callable[[], T]) -> T:
        return work()  # what is read stays as it is while more is written behind it

    def close(self) -> None:
        if self._log is not None:
            self._log.close()
            self._close()


@inner_loop
def encode_ticket(sequencer: Sequencer, tail: Tail, ticket: Any, watermark: int) -> JournalBatch:
    """Return the batch of a ticket behind `tail`, as Encoder.encode."""
    if ticket is None:
        data = w.encode_batch_header(tail.segment.seed, tail.offset, 0, 0, tail.lsn + 1, watermark)
        return JournalBatch(tail, tail._replace(offset=tail.offset + _BATCH_BYTES), None, data, None)
    plan = sequencer.plan([ticket])
    changes = plan.changes
    data, end = encode_batch(tail, changes, plan.last_seq, watermark) if changes else (b"", tail)
    return JournalBatch(tail, end, ticket, data, plan)


@inner_loop
def accept_batch(encoder: JournalEncoder, batch: JournalBatch) -> None:
    """Build on a batch, as Encoder.accept."""
    plan = batch.plan
    if plan is None:
        return
    if plan.prepared or plan.settled:
        encoder.promise(plan)
    if type(plan.own) is WriteSnapshot:
        encoder.snapshot_at = (batch.segment.number, batch.offset)
    encoder.sequencer.accept(plan)
    if encoder.promised and not encoder.sequencer.prepared:
        encoder.promised = 0


@inner_loop
def encode_batch(start: Tail, changes: list[Change], counter: int, watermark: int) -> tuple[bytes, Tail]:
    """Return the batch after `start` with a record for each of these changes, at least one, and the log's end."""
    if len(changes) == 1 and type(changes[0]) is not SendMany:
        return _encode_one(start, changes[0], counter, watermark)
    return _encode_all(start, changes, counter, watermark)


def _encode_one(start: Tail, change: Change, counter: int, watermark: int) -> tuple[bytes, Tail]:
    """Return the batch of one change, and the log's end behind it."""
    segment, offset, lsn, _ = start
    lsn += 1
    at = offset + _BATCH_BYTES
    if type(change) is Send:  # the commonest: without another call
        body = change.record
        size = len(body) + _SEND_BYTES
        record = _pack_send(size, lsn, SEND, 0, 0, change.state.number, change.seq) + body
        change.own = (lsn, at, size + 20)
    else:
        record = _record(change, lsn, at)
    length = len(record) + 4
    rest = _pack_batch(length, 1, lsn, watermark)
    seed = segment.seed
    crc = _pack_crc(crc32c(seed ^ offset, rest))
    data = b"".join((w.BATCH_MAGIC, crc, rest, _pack_crc(crc32c(seed ^ at, record)), record))
    return data, tuple.__new__(Tail, (segment, at + length, lsn, counter))


def _record(change: Change, lsn: int, at: int) -> bytes:
    """Return a record without its CRC, which stands at an offset in its segment."""
    if type(change) is Send or type(change) is Mark:
        body = change.record
        size = len(body) + _SEND_BYTES
        change.own = (lsn, at, size + 20)
        return _pack_send(size, lsn, SEND, 0, 0, change.state.number, change.seq) + body
    if type(change) is Ack:
        return _pack_ack(_ACK_PAYLOAD_BYTES, lsn, ACK, 0, 0, change.state.number, change.number, change.seq)
    codec = CODECS[type(change)]
    payload = codec.encode(change)
    if type(change) is Prepare:
        change.branch.own = (lsn, at, len(payload) + w.RECORD_HEADER.size)
    return _pack_record(len(payload), lsn, codec.kind, 0, 0) + payload


def _encode_all(start: Tail, changes: Sequence[Change], counter: int, watermark: int) -> tuple[bytes, Tail]:
    """Return the batch of many changes, and the log's end behind it."""
    segment, first, lsn, _ = start
    seed, offset = segment.seed, first + _BATCH_BYTES
    parts = [b""]
    for change in changes:
        each: Sequence[Change] = (change,)
        if type(change) is SendMany:
            change.own, each = (lsn + 1, offset), change
        for one in each:
            lsn += 1
            record = _record(one, lsn, offset)
            parts += (_pack_crc(crc32c(seed ^ offset, record)), record)
            offset += len(record) + 4
    length = offset - first - _BATCH_BYTES
    parts[0] = w.encode_batch_header(seed, first, length, lsn - start.lsn, start.lsn + 1, watermark)
    return b"".join(parts), tuple.__new__(Tail, (segment, offset, lsn, counter))
