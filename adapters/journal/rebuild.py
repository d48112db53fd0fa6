"""Filling the index from the journal: what came after its checkpoint, or all of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from ...policies.destination import Destination, Kind
from ..base import Progress, Subscription
from ..wal import format as w
from ..wal.reader import BatchReader
from ..wal.recovery import require_end
from ..wal.segment import Segment, SegmentTable
from ..wal.survey import Survey
from ..wal.ticket import Tail
from . import snapshot as snapshots
from .destinations import SubscriptionState
from .index import Checkpoint, Index
from .replay import Replayer

PARTIAL_OPERATIONS: Final = 200_000
"""A rebuild commits after so many, so that LMDB's transaction stays of bounded size; without a checkpoint in it such a
file counts for nothing."""


def replay(found: Survey, index: Index, checkpoint: Checkpoint, replayer: Replayer) -> None:
    """Apply to the index what the journal says after its checkpoint."""
    table = found.table()
    for link, segment in enumerate(found.chain):
        last = link == found.end.link
        offset, lsn = w.HEADER_BYTES, segment.base_lsn - 1
        if segment.number == checkpoint.segment:
            offset, lsn = checkpoint.offset, checkpoint.lsn
        _apply(segment, offset, lsn, found.end.offset if last else segment.end, index, table, replayer)


def replay_between(
    table: SegmentTable, index: Index, checkpoint: Checkpoint, applied: Tail, replayer: Replayer
) -> None:
    """Apply what lies between the index's checkpoint and `applied`, in an open store."""
    for segment in table.segments:
        if checkpoint.segment <= segment.number <= applied.segment.number:
            offset, lsn = w.HEADER_BYTES, segment.base_lsn - 1
            if segment.number == checkpoint.segment:
                offset, lsn = checkpoint.offset, checkpoint.lsn
            end = applied.offset if segment is applied.segment else segment.end
            _apply(segment, offset, lsn, end, index, table, replayer)


def _apply(
    segment: Segment,
    offset: int,
    lsn: int,
    end: int | None,
    index: Index,
    table: SegmentTable,
    replayer: Replayer,
    dead: bytes | None = None,
    reflected: Callable[[], None] | None = None,
) -> None:
    """With `dead` the segment, or its part up to where a snapshot reflects it, is read for its live messages alone;
    `reflected` is called where that part ends."""
    reader = BatchReader(segment, offset, lsn, end)
    replayer.path = str(segment.path)
    for batch in reader:
        if reflected is not None and batch.last_lsn > replayer.reflected_lsn:
            reflected()
            dead = reflected = None
        entries = replayer.entries(batch, segment.number, dead, segment.base_lsn)
        while replayer.skipped:
            segment.mark_dead(replayer.skipped.pop())
        if entries:
            index.apply(entries, segment, table)
            if index.operations >= PARTIAL_OPERATIONS and index.checkpointed is None:
                index.commit_partial()
    require_end(reader, segment, end)
    if reflected is not None:
        reflected()


def rebuild(found: Survey, index: Index, replayer: Replayer, progress: Progress | None) -> None:
    """Fill an empty index from the whole journal."""
    table = found.table()
    kept: dict[int, snapshots.KeptSegment] = {}
    latest: snapshots.Snapshot | None = None
    if found.snapshot is not None:
        latest = snapshots.decode(found.snapshot)
        kept = {segment.number: segment for segment in latest.kept}
        replayer.seq = max(replayer.seq, latest.seq)
        replayer.reflected_lsn = latest.lsn
        index.next_destination = max(index.next_destination, latest.next_destination)
        for number, kind, name in latest.destinations:
            index.declare(number, Destination(Kind(kind), name))
        for number, seq, message_id in latest.duplicates:
            index.remember((number, message_id), seq)
        for transaction in latest.committed:
            index.remember_committed(transaction)
        index.next_subscription = max(index.next_subscription, latest.next_subscription)
        for number, destination, client, name, selector, no_local, start in latest.subscriptions:
            state = index.states[destination]
            subscription = Subscription(state.destination, name, client, selector, no_local)
            index.subscribe(SubscriptionState(number, state, subscription, start))
    total = sum(s.end or found.end.offset for s in table.segments)
    done = 0
    for segment in found.older:
        bits = kept[segment.number].dead_bits() if segment.number in kept else b""
        segment.dead = bytearray(bits) if bits else None
        _apply(segment, w.HEADER_BYTES, segment.base_lsn - 1, segment.end, index, table, replayer, bits)
        done = _report(progress, done, segment.end or 0, total)
    for link, segment in enumerate(found.chain):
        end = found.end.offset if link == found.end.link else segment.end
        known: bytes | None = None
        reflected = None
        if latest is not None and segment.number == latest.first_needed and latest.first_dead is not None:
            known = latest.first_dead_bits() or b""
            segment.dead = bytearray(known) if known else None
            reflected = partial(_restore_rest, latest, index, table)
        _apply(segment, w.HEADER_BYTES, segment.base_lsn - 1, end, index, table, replayer, known, reflected)
        done = _report(progress, done, end or 0, total)


def _restore_rest(latest: snapshots.Snapshot, index: Index, table: SegmentTable) -> None:
    """All live messages that the snapshot reflects are in the index: who has acked them, how often they came back."""
    for number, acked in latest.acked:
        known = index.subscribers[number]
        for first, last in snapshots.ranges_of(acked):
            index.rows.ack_range(known.state, first, last, number, table)
    for seq, number, count, destination in latest.deliveries:
        index.rows.delivered(index.states[destination], number, seq, count)


def _report(progress: Progress | None, done: int, more: int, total: int) -> int:
    if progress is not None:
        progress("rebuilding the index", done + more, total)
    return done + more
