"""The encoder of logs whose tickets are simply records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from google_crc32c import extend as crc32c

from . import format as f
from .segment import Segment
from .ticket import GROWS, OWED, SHRINKS, Tail, Ticket, WriteBatch

_RECORD_BYTES = f.RECORD_HEADER.size

RecordOf = tuple[int, bytes, Any]
"""Kind, payload, and what it says, for whoever it is delivered to."""


class RecordTicket(Ticket):
    """Records that go into the log together."""

    shrinks = False
    """Less is needed after them than before: a full disk does not refuse them (rule J10)."""


def record_ticket(records: Sequence[RecordOf], sync: bool = False, shrinks: bool = False) -> Ticket:
    """Return a ticket for a log with a RecordEncoder."""
    ticket = RecordTicket(records, sum([_RECORD_BYTES + len(payload) for _, payload, _ in records]), sync)
    ticket.shrinks = shrinks
    return ticket


class RecordBatch(WriteBatch):
    """Records that are written together."""

    records: Sequence[RecordOf] = ()


class RecordEncoder:
    """An Encoder (ticket.py) for tickets that hold lists of records."""

    promised = 0

    def __init__(
        self,
        deliver: Callable[[RecordBatch], None],
        stopped: Callable[[], None] = lambda: None,
        snapshot_bytes: Callable[[], int] = lambda: 0,
    ) -> None:
        """`deliver` takes each batch that counts, in order; `stopped` is called if the log fails. `snapshot_bytes`
        says how many a snapshot takes at most."""
        self.deliver = deliver
        self.stopped = stopped
        self._snapshot_bytes = snapshot_bytes
        self.snapshot_at: tuple[int, int] = (0, 0)

    @property
    def spare_bytes(self) -> int:
        return self._snapshot_bytes()

    def leaves(self, ticket: Ticket) -> int:
        if all(kind == f.SNAPSHOT for kind, _, _ in ticket.content):
            return OWED
        return SHRINKS if isinstance(ticket, RecordTicket) and ticket.shrinks else GROWS

    def needed_bytes(self, segment: Segment) -> None:
        return None

    def reserve(self, size: int) -> None:
        """Reserve nothing: what is read of the log is kept in memory."""

    def encode(self, tail: Tail, ticket: Ticket | None, watermark: int) -> RecordBatch:
        records: Sequence[RecordOf] = [] if ticket is None else ticket.content
        data, end = (b"", tail) if ticket is not None and not records else encode_records(tail, records, watermark)
        batch = RecordBatch(tail, end, ticket, data)
        batch.records = records
        return batch

    def rest(self) -> None:
        """Forget nothing: nothing was remembered."""

    def accept(self, batch: RecordBatch) -> None:
        for kind, _, _ in batch.records:
            if kind == f.SNAPSHOT:
                self.snapshot_at = (batch.segment.number, batch.offset)


def encode_records(tail: Tail, records: Sequence[RecordOf], watermark: int) -> tuple[bytes, Tail]:
    """Return the batch after `tail` that holds these records, and the log's end behind it."""
    seed, lsn, offset = tail.segment.seed, tail.lsn, tail.offset + f.BATCH_HEADER.size
    parts = [b""]
    for kind, payload, _ in records:
        lsn += 1
        record = f.RECORD_REST.pack(len(payload), lsn, kind, 0, 0) + payload
        parts += (f.CRC.pack(crc32c(seed ^ offset, record)), record)
        offset += len(record) + f.CRC.size
    length = offset - tail.offset - f.BATCH_HEADER.size
    parts[0] = f.encode_batch_header(seed, tail.offset, length, len(records), tail.lsn + 1, watermark)
    return b"".join(parts), Tail(tail.segment, offset, lsn, tail.counter)
