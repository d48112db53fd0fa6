"""What the journal's records mean: from the log into what the index applies."""

from __future__ import annotations

from typing import Any

from ...policies.destination import Destination, Kind
from ...policies.errors import CorruptionError
from ..base import TRANSACTION_BYTES, Subscription
from ..wal.reader import Batch, Record, records_of
from . import format as f
from .batch import Entry
from .destinations import DestinationState, SubscriptionState
from .index import Index
from .messages import order_of


class Replayer:
    """Turns records into what the index applies. Keeps the counters that only records tell.

    `live`: the log is at work meanwhile; which destinations are declared at its end is its own to know.
    """

    def __init__(self, index: Index, path: str, live: bool = False) -> None:
        self.index = index
        self.path = path
        self.live = live
        self.seq = 0
        self.snapshot: tuple[int, int] | None = None
        self.skipped: list[int] = []
        """LSNs of messages that turned out to be dead, since the caller last asked."""
        self.reflected_lsn = 0
        """A snapshot tells all names and message ids up to this LSN, and which are no more (rule J6)."""

    def entries(self, batch: Batch, segment_number: int, dead: bytes | None = None, base_lsn: int = 0) -> list[Entry]:
        """The entries of a batch. With `dead`, only its sends whose bit there is not set: how a segment older than a
        snapshot is read (rule J6)."""
        entries: list[Entry] = []
        for record in records_of(batch):
            kind = record.kind
            if kind == f.SEND:
                entry = self._send(record, dead, base_lsn)
            elif kind == f.SNAPSHOT:
                self.snapshot = (segment_number, batch.offset)
                continue
            elif kind not in f.RECORD_TYPES:
                reason = f"record of unknown type {kind}; a newer version wrote it"
                raise CorruptionError(self.path, record.offset, reason)
            elif kind == f.PREPARE:
                entry = self._prepare(record, dead, base_lsn)
            elif dead is not None:
                continue
            elif kind in (f.COMMIT, f.ROLLBACK):
                entry = (kind, record.payload, None)
            elif kind == f.DESTINATION:
                entry = self._declare(record)
            else:
                entry = self._settle(record)
            if entry is not None:
                entries.append(entry)
        return entries

    def _send(self, record: Record, dead: bytes | None, base_lsn: int) -> Entry | None:
        payload = record.payload
        seq = f.SEQ.unpack_from(payload)[0]
        if seq > self.seq:
            self.seq = seq
        if dead is not None and _bit(dead, record.lsn - base_lsn):
            return None
        number, _, _, id_bytes, _, _, _ = f.MESSAGE.unpack_from(payload, f.SEQ.size)
        state = self.index.states.get(number)
        if state is None:
            if dead is None and record.lsn <= self.reflected_lsn:
                self.skipped.append(record.lsn)  # its destination was removed before the snapshot
                return None
            reason = f"record {record.lsn} names destination {number}, which no record declares"
            raise CorruptionError(self.path, record.offset, reason)
        key: Any = None
        if id_bytes and record.lsn > self.reflected_lsn:
            start = f.SEQ.size + f.MESSAGE.size
            key = (number, payload[start : start + id_bytes])
        extra = order_of(payload[f.SEQ.size :], self.index.priorities)
        return (f.SEND, state, seq, record.lsn, record.offset, record.length, key, extra)

    def _prepare(self, record: Record, dead: bytes | None, base_lsn: int) -> Entry | None:
        """One whose outcome a snapshot knows is dead."""
        if dead is not None and _bit(dead, record.lsn - base_lsn):
            return None
        return (f.PREPARE, record.payload[:TRANSACTION_BYTES], record.lsn, record.offset, record.length)

    def _declare(self, record: Record) -> Entry | None:
        if record.lsn <= self.reflected_lsn:
            return None
        number, kind = f.DESTINATION_PAYLOAD.unpack_from(record.payload)
        name = record.payload[f.DESTINATION_PAYLOAD.size :].decode()
        if not self.live:
            self.index.declare(number, Destination(Kind(kind), name))
        return (f.DESTINATION, self.index.states[number])

    def _settle(self, record: Record) -> Entry | None:
        """None for what concerns a destination that was removed: all its messages are dead already."""
        state = self.index.states.get(f.GONE_PAYLOAD.unpack_from(record.payload)[0])
        if state is None:
            return None
        if record.kind == f.ACK:
            _, subscription, seq = f.ACK_PAYLOAD.unpack(record.payload)
            return (f.ACK, state, seq, subscription)
        if record.kind == f.ACK_RANGE:
            _, subscription, first, last = f.RANGE_PAYLOAD.unpack(record.payload)
            return (f.ACK_RANGE, state, first, last, subscription)
        if record.kind == f.DELIVERED:
            _, subscription, seq, count = f.DELIVERED_PAYLOAD.unpack(record.payload)
            return (f.DELIVERED, state, seq, subscription, count)
        if record.kind == f.SUBSCRIBE:
            return (f.SUBSCRIBE, state, _subscription(state, record.payload))
        if record.kind == f.UNSUBSCRIBE:
            return (f.UNSUBSCRIBE, state, f.UNSUBSCRIBE_PAYLOAD.unpack(record.payload)[1])
        if record.lsn <= self.reflected_lsn:  # it came back before the snapshot, which tells its message ids
            return (f.ACK_RANGE, state, 0, f.SEQ_MAX, 0)
        if not self.live:
            state.declared = False
        return (f.DESTINATION_GONE, state)


def _subscription(state: DestinationState, payload: bytes) -> SubscriptionState:
    _, number, start, flags, client_bytes, name_bytes, _ = f.SUBSCRIBE_PAYLOAD.unpack_from(payload)
    name_at = f.SUBSCRIBE_PAYLOAD.size + client_bytes
    client = payload[f.SUBSCRIBE_PAYLOAD.size : name_at].decode()
    name = payload[name_at : name_at + name_bytes].decode()
    selector = payload[name_at + name_bytes :].decode() if flags & f.HAS_SELECTOR else None
    subscription = Subscription(state.destination, name, client, selector, bool(flags & f.NO_LOCAL))
    return SubscriptionState(number, state, subscription, start)


def _bit(bits: bytes, ordinal: int) -> bool:
    return ordinal >> 3 < len(bits) and bool(bits[ordinal >> 3] & 1 << (ordinal & 7))
