"""Filling the index from the journal: what came after its checkpoint, or all of it. Records become the changes that
they were made of, and these are applied as they were the first time."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Final

import lmdb

from ....policies.errors import CorruptionError, DestinationError
from ....policies.names.destination import Destination, Kind
from ...core.operations.branches import Forget
from ...core.operations.changes import Change, Send
from ...core.operations.destination_changes import Declare, Remove, Subscribe, Unsubscribe
from ...core.operations.table import SEQ_MAX, apply_all
from ...core.state.leases import DestinationState, SubscriptionState
from ...core.store_types import Progress, Subscription
from ...wal import format as w
from ...wal.reader import Batch, BatchReader, Record, records_of
from ...wal.recovery.opening import require_end
from ...wal.recovery.survey import Survey
from ...wal.segment import Segment, SegmentTable
from ...wal.ticket import Tail
from .. import snapshot as snapshots
from ..changes import Compacted
from ..encoding import (
    COMPACTED,
    COMPACTED_PAYLOAD,
    DECLARE,
    DECODERS,
    NUMBER,
    NUMBER_MAX,
    PREPARE,
    SEND,
    SEND_START,
    decode_declare,
    decode_prepare,
    decode_send,
    require_number,
)
from ..index.index import Checkpoint, Index

PARTIAL_OPERATIONS: Final = 200_000
"""A rebuild commits after so many, so that LMDB's transaction stays of bounded size; without a checkpoint in it such a
file counts for nothing."""


MALFORMED: Final = (struct.error, ValueError, KeyError, DestinationError)
"""Errors that decoding raises for bytes that are no record."""
IMPOSSIBLE: Final = (*MALFORMED, IndexError, OverflowError, TypeError, lmdb.BadValsizeError)
"""Errors that applying raises for records that never were written one after another."""
UNNAMED: Final = "salvaged"
"""Messages of a destination whose name is lost are in the queue of this name, a dot and the destination's number."""


_PAGE_BITS: Final = 12
_PAGE_MASK: Final = (1 << _PAGE_BITS) - 1

_OF_NAMES: Final = (Declare, Remove, Subscribe, Unsubscribe)


class Replay:
    """Applies to an index what the segments of a table say."""

    def __init__(
        self,
        index: Index,
        table: SegmentTable,
        open_copies: Callable[[int, int, int, int], Segment] | None = None,
    ) -> None:
        """`open_copies` opens a file of copies that a record speaks of and `table` does not have; None: it has all."""
        self._index, self._table, self._open_copies = index, table, open_copies
        index.table = table
        index.find_copies = self._find_copies
        self.seq: int = 0
        """The highest that was met."""
        self._met = _Seqs()
        """Seqs of all messages whose records were read."""
        self._sent = 0
        """The seq of the message before: one that is not above it may be there already."""
        self._after: Callable[[Tail], None] = lambda position: None
        self.is_mended: bool = False
        """There was a record in the place of which there is none any more: it may have declared a destination."""
        self._counted: set[int] = set()
        """Files of copies that count from the beginning, in a journal that was mended."""
        self._names: dict[Destination, int] = {}
        """The numbers of destinations that were declared, or removed, and no other has their names."""
        self._removed: set[int] = set()
        """Numbers of those that were removed. They are never used again."""
        self._reflected_lsn = 0
        """A snapshot tells all that is needed of what comes before, but for the messages that live (rule J6)."""

    def from_checkpoint(
        self, checkpoint: Checkpoint, end: Tail, after: Callable[[Tail], None] = lambda position: None
    ) -> None:
        """Apply all that lies between the index's checkpoint and `end`; `after` is called behind each batch. Raises
        CorruptionError, OSError, and what `after` raises."""
        self._after = after
        rows = self._index.rows
        before = rows.before
        try:
            rows.before = None  # what is told again may have been so before a snapshot began
            self._from_checkpoint(checkpoint, end)
        finally:
            rows.before = before

    def _from_checkpoint(self, checkpoint: Checkpoint, end: Tail) -> None:
        for segment in self._table.segments:
            if checkpoint.segment <= segment.number <= end.segment.number:
                offset, lsn = w.HEADER_BYTES, segment.base_lsn - 1
                if segment.number == checkpoint.segment:
                    offset, lsn = checkpoint.offset, checkpoint.lsn
                self._segment(segment, offset, lsn, end.offset if segment is end.segment else segment.end)

    def everything(self, survey: Survey, progress: Progress | None) -> None:
        """Apply the whole journal, to an empty index. Raises CorruptionError, OSError."""
        try:
            self._everything(survey, progress)
        except IMPOSSIBLE as error:
            reason = f"the latest snapshot does not parse: {error}"
            number, offset = survey.snapshot_at
            path = next((str(s.path) for s in self._table.all if s.number == number), f"segment {number}")
            raise CorruptionError(path, offset, reason, w.RESTORE) from error

    def _everything(self, survey: Survey, progress: Progress | None) -> None:
        kept: dict[int, snapshots.KeptSegment] = {}
        latest: snapshots.Snapshot | None = None
        if survey.snapshot is not None:
            latest = snapshots.decode(survey.snapshot)
            kept = {segment.number: segment for segment in latest.kept}
            self._begin_with(latest)
        elif self._table.segments[0].number > 1:
            self.is_mended = True  # the snapshot is lost that let those before it go
        total = sum(segment.end or survey.end.offset for segment in self._table.all)
        done = 0
        self._counted = {copies.number for copies in survey.copies} if self.is_mended else set()
        if self._counted and latest is None:
            self._declare_early(survey)
        for segment in (*survey.older, *survey.copies):
            segment.counts = True
            dead = kept[segment.number].dead_bits() if segment.number in kept else b""
            self._old_segment(segment, dead, segment.end)
            done = _report(progress, done, segment.end or 0, total)
        for link, segment in enumerate(survey.chain):
            end = survey.end.offset if link == survey.end.link else segment.end
            if latest is not None and segment.number == latest.first_needed:
                self._old_segment(
                    segment, latest.first_dead_bits(segment.allocated), end, partial(self._restore_rest, latest)
                )
            else:
                self._segment(segment, w.HEADER_BYTES, segment.base_lsn - 1, end)
            done = _report(progress, done, end or 0, total)

    def _declare_early(self, survey: Survey) -> None:
        """Declare destinations early: without a snapshot, files of copies are read before the records that declare
        their messages' destinations."""
        for segment in survey.chain:
            for batch in BatchReader(segment, w.HEADER_BYTES, segment.base_lsn - 1, segment.end):
                for record in records_of(batch):
                    if record.kind == DECLARE:
                        with suppress(*MALFORMED):  # told when its turn comes
                            self._index.declare(decode_declare(record, self._index).state)

    def _begin_with(self, latest: snapshots.Snapshot) -> None:
        index = self._index
        self.seq = max(self.seq, latest.seq)
        self._reflected_lsn = latest.lsn
        index.last_number = max(index.last_number, latest.last_number)
        leaving = set(latest.removed)
        for number, kind, name in latest.destinations:
            require_number(number)
            destination = Destination(Kind(kind), name)
            if number not in leaving and self._names.setdefault(destination, number) != number:
                raise ValueError(f"{destination} has two numbers, {number} too")
            index.declare(DestinationState(number, destination))
        for number, seq, message_id in latest.duplicates:
            index.remember_id((number, message_id), seq)
        for transaction in latest.committed:
            index.transactions.remember_committed(transaction)
        for number, topic, client, name, selector, no_local, start in latest.subscriptions:
            state = index.states[topic]
            require_number(number)
            if not state.is_topic:
                raise ValueError(f"{state.destination} is no topic")
            subscription = Subscription(state.destination, name, client, selector, no_local)
            index.subscribe(SubscriptionState(number, state, subscription, start))

    def _restore_rest(self, latest: snapshots.Snapshot) -> None:
        """Restore the rest once all live messages that the snapshot reflects are in the index: who has acked them, how
        often they have come back."""
        index = self._index
        for number, acked in latest.acked:
            topic = index.subscriptions[number].topic
            for first, last in snapshots.ranges_of(acked):
                index.ack_range(topic, first, last, number)
        for seq, number, count, destination in latest.deliveries:
            index.returned(index.states[destination], seq, number, count, None)
        for seq, due, number, destination in snapshots.waits_of(latest.waits):
            index.postpone(index.states[destination], seq, number, due, None)
        for number in latest.removed:
            index.remove(index.states[number])
        for number in latest.ended:
            ended = index.subscriptions[number]
            index.unsubscribe(ended)
            # To its end, as at any opening: its slot was perhaps free as the pages were read, and another's by then.
            index.ack_range(ended.topic, 0, SEQ_MAX, number)

    def _find_copies(self, number: int, nonce: int, end: int, count: int) -> Segment:
        """Return the file of copies of which a record says so much, as Numbers' (encoding.py)."""
        for copies in self._table.copies:
            if copies.number == number and copies.nonce == nonce:
                return copies
        if self._open_copies is None:
            raise AssertionError(f"the file of copies {number - w.COPIES} is not in the table")
        copies = self._open_copies(number, nonce, end, count)
        self._index.table = self._table = self._table.with_copies(copies)
        return copies

    def _old_segment(
        self, segment: Segment, dead: bytes, end: int | None, reflected: Callable[[], None] | None = None
    ) -> None:
        """Apply a segment that a snapshot reflects, as far as it does: of that part only what is live. `reflected` is
        called where that part ends."""
        segment.dead = bytearray(dead) if dead else None
        self._segment(segment, w.HEADER_BYTES, segment.base_lsn - 1, end, dead, reflected)

    def _segment(
        self,
        segment: Segment,
        offset: int,
        lsn: int,
        end: int | None,
        dead: bytes | None = None,
        reflected: Callable[[], None] | None = None,
    ) -> None:
        index = self._index
        reader = BatchReader(segment, offset, lsn, end)
        for batch in reader:
            if reflected is not None and batch.last_lsn > self._reflected_lsn:
                reflected()
                dead = reflected = None
            # Each record is read once what comes before it is applied: it may speak of what begins there.
            self._apply(batch, self._changes(batch) if dead is None else self._live(batch, dead))
            index.operations += batch.header.count
            self._after(Tail(segment, reader.offset, reader.lsn, self.seq))
            if index.operations >= PARTIAL_OPERATIONS and index.checkpointed is None:
                index.commit_partial()
        require_end(reader, segment, end)
        if reflected is not None:
            reflected()

    def _apply(self, batch: Batch, changes: Iterator[Change]) -> None:
        """Apply the changes of a batch. Where the index is filled from the beginning, it is not the index that is
        wrong."""
        try:
            apply_all(changes, self._index)
        except IMPOSSIBLE as error:
            if self._index.checkpointed is not None:
                raise
            first, last = batch.header.base_lsn, batch.last_lsn
            reason = f"records {first} to {last} contradict what is before them: {error!r}"
            raise CorruptionError(str(batch.segment.path), batch.offset, reason, w.RESTORE) from error

    def _changes(self, batch: Batch) -> Iterator[Change]:
        """Yield the changes of a batch."""
        for record in records_of(batch):
            if record.kind == SEND:
                send = self._send(record)
                if send.seq <= self._sent:
                    yield from self._again(send, record)
                self._sent = send.seq
                if not (self.is_mended and self._is_there(send)):
                    yield send
                continue
            if record.kind == w.LOST:
                self.is_mended = True
                continue
            if record.kind == COMPACTED and COMPACTED_PAYLOAD.unpack(record.payload)[0] in self._counted:
                continue  # that file counts already
            decode = DECODERS.get(record.kind)
            if decode is None:
                reason = f"record of unknown kind {record.kind}; a newer version wrote it"
                raise CorruptionError(str(batch.segment.path), record.offset, reason)
            try:
                change = decode(record, self._index)
                if change is not None and type(change) in _OF_NAMES and not self.is_mended:
                    self._name(change)
            except MALFORMED as error:
                raise _malformed(record, error) from error
            if isinstance(change, Compacted) and self.is_mended and self._index.checkpointed is None:
                yield from self._compacted(change)
            elif change is not None:
                yield change

    def _compacted(self, change: Compacted) -> Iterator[Change]:
        """Let a file of copies count. In a mended journal the segments may be lost from which messages were copied,
        with the snapshot that let them go. Those of which no other record was read count from here on; the others that
        are not there have died, some of them while the file was being written."""
        there, known = self._index.rows, {}
        states = self._index.states
        yield Forget(())  # what is told before is applied first
        for one in change.messages:
            state = states.get(one.number)
            is_there = state is not None and there.row(state, None, one.seq) is not None
            known[one.own[0]] = is_there or one.seq in self._met
        yield Compacted(change.copies, [one for one in change.messages if known[one.own[0]]])
        copies = change.copies
        for batch in BatchReader(copies, w.HEADER_BYTES, copies.base_lsn - 1, copies.end):
            for record in records_of(batch):
                if record.kind == SEND and not known.get(record.lsn, True):
                    yield self._send(record)

    def _name(self, change: Change) -> None:
        """Note a destination, or a subscription, that comes or goes. Raises ValueError for what cannot come."""
        if isinstance(change, Remove):
            self._removed.add(change.state.number)
            self._names.pop(change.state.destination, None)
        elif isinstance(change, Unsubscribe):
            self._removed.add(change.subscriber.number)
        elif isinstance(change, Subscribe):
            if change.subscriber.number in self._removed:
                raise ValueError(f"{change.subscriber.subscription} has the number of one that ended")
        elif isinstance(change, Declare):
            state = change.state
            if state.number in self._removed:
                raise ValueError(f"{state.destination} has the number of one that was removed")
            if self._names.setdefault(state.destination, state.number) != state.number:
                raise ValueError(f"{state.destination} has two numbers, {state.number} too")

    def _live(self, batch: Batch, dead: bytes) -> Iterator[Change]:
        """Yield the messages and prepared branches of a batch whose bit is not set in `dead`. The message ids the
        snapshot tells, but for the keys of maps."""
        base_lsn = batch.segment.base_lsn
        for record in records_of(batch):
            if record.kind == SEND:
                self._meet(SEND_START.unpack_from(record.payload)[1])
            if record.kind in (SEND, PREPARE) and not _bit(dead, record.lsn - base_lsn):
                if record.kind == SEND:
                    send = self._send(record)
                    if send.seq <= self._sent:
                        yield from self._again(send, record)
                    self._sent = send.seq
                    if self.is_mended and self._is_there(send):
                        continue
                    if not send.state.is_map:
                        send.name = None
                    yield send
                else:
                    yield decode_prepare(record, self._index)

    def _is_there(self, send: Send) -> bool:
        """Return whether a message was met before, as what told that it was copied is lost: then it is dead here."""
        segment = self._table.find(send.own[0])
        if segment is None or self._index.rows.row(send.state, None, send.seq) is None:
            return False
        segment.mark_dead(send.own[0])
        return True

    def _send(self, record: Record) -> Send:
        try:
            send = decode_send(record, self._index)
        except KeyError as error:
            number = NUMBER.unpack_from(record.payload)[0]
            if self.is_mended and 0 < number <= NUMBER_MAX:
                self._index.declare(DestinationState(number, Destination.queue(f"{UNNAMED}.{number}")))
                return self._send(record)
            reason = f"record {record.lsn} is a message of destination {error}, which no record declares"
            raise CorruptionError(str(record.segment.path), record.offset, reason) from None
        except MALFORMED as error:
            raise _malformed(record, error) from error
        self._meet(send.seq)
        return send

    def _again(self, send: Send, record: Record) -> Iterator[Change]:
        """Raise CorruptionError for a message that was met before, unless the journal was mended. Yields what lets
        those before it be applied."""
        yield Forget(())
        if not self.is_mended and self._index.rows.row(send.state, None, send.seq) is not None:
            raise _malformed(record, ValueError(f"there is another message {send.seq} of {send.state.destination}"))

    def _meet(self, seq: int) -> None:
        self._met.add(seq)
        if seq > self.seq:
            self.seq = seq


class _Seqs:
    """A set of seqs, a bit for each where they are dense."""

    def __init__(self) -> None:
        self._pages: dict[int, bytearray] = {}

    def add(self, seq: int) -> None:
        page = self._pages.get(seq >> _PAGE_BITS)
        if page is None:
            page = self._pages[seq >> _PAGE_BITS] = bytearray(1 << _PAGE_BITS - 3)
        page[(seq & _PAGE_MASK) >> 3] |= 1 << (seq & 7)

    def __contains__(self, seq: int) -> bool:
        return _bit(self._pages.get(seq >> _PAGE_BITS, b""), seq & _PAGE_MASK)


def _malformed(record: Record, error: Exception) -> CorruptionError:
    """Return the error for bytes that were written, as their checksum is right, and are none that this version
    writes."""
    reason = f"record {record.lsn} of kind {record.kind} does not parse: {error}"
    return CorruptionError(str(record.segment.path), record.offset, reason, w.RESTORE)


def _bit(bits: bytes | bytearray, ordinal: int) -> bool:
    return ordinal >> 3 < len(bits) and bool(bits[ordinal >> 3] & 1 << (ordinal & 7))


def _report(progress: Progress | None, done: int, more: int, total: int) -> int:
    if progress is not None:
        progress("rebuilding the index", done + more, total)
    return done + more
