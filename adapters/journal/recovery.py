"""Recovery: find out what the journal says, make one durable step, fill the index (invariant 9, rules J3 to J7).

`survey` decides and writes nothing: which segments count, where the log ends, whether what is broken was torn by a
crash (never acknowledged: cut) or is damage (CorruptionError). `settle` makes it durable. `replay` and `rebuild` bring
the index up to it. A crash anywhere leaves a directory in which the next recovery finds the same.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from ...policies.destination import Destination, Kind
from ...policies.errors import CorruptionError
from ..base import Progress, Subscription
from ..files import write_all
from . import format as f
from . import snapshot as snapshots
from .batch import Tail
from .destinations import SubscriptionState
from .files import File, SegmentFiles
from .index import Checkpoint, Index
from .log import Log
from .reader import Batch, BatchReader, Replayer, read_at, records_of
from .segment import Segment, SegmentTable

log = logging.getLogger(__name__)

RESTORE: Final = f.RESTORE

PARTIAL_OPERATIONS: Final = 200_000
"""A rebuild commits after so many, so that LMDB's transaction stays of bounded size; without a checkpoint in it such a
file counts for nothing."""


class Position(NamedTuple):
    """A batch boundary: the segment's place in the chain, the offset, the last LSN before it."""

    link: int
    offset: int
    lsn: int


@dataclass(slots=True)
class Survey:
    """What the journal says."""

    older: list[Segment]
    """Segments before the chain that still hold live messages, oldest first."""
    chain: list[Segment]
    """The segments from the first one that is needed whole to the one where the log ends, none missing between."""
    end: Position
    watermark: int
    """All up to this LSN is known to be on disk."""
    unsynced: list[tuple[Segment, int, int]]
    """What is above the watermark and counts: segment, from, to."""
    highest_lsn: int
    """The highest LSN ever seen, void ones included (rule I1)."""
    highest_number: int
    highest_seq: int
    """As the headers say; records may say more."""
    clean: bool
    """Closed in order: the log goes on where it ended."""
    snapshot: tuple[int, int]
    void: list[Path] = field(default_factory=list)
    """Files that nothing accounts for: released, or void by rule J1."""

    def table(self) -> SegmentTable:
        return SegmentTable((*self.older, *self.chain))


def survey(files: SegmentFiles, store_id: bytes, checkpoint: Checkpoint | None, index: Index | None) -> Survey:
    """Decide. With no `checkpoint` the index is to be rebuilt. Writes nothing. Raises CorruptionError."""
    headers = {header.number: header for header in files.headers()}
    if not headers:
        raise CorruptionError(str(files.directory), 0, "the journal's segments are gone", RESTORE)
    for header in headers.values():
        if header.store_id != store_id:
            reason = f"this segment belongs to store {header.store_id.hex()}, not to {store_id.hex()}"
            raise CorruptionError(str(files.path(header.number)), 20, reason)
    chain = _chain(headers, files)
    watermark = max([h.durable_lsn for h in headers.values()] + ([checkpoint.lsn] if checkpoint else []))
    start = _start(chain, headers, checkpoint, watermark, files)
    found = _find_end(chain, start, watermark, checkpoint)
    older, first, pointer = _account(headers, files, chain[: found.end.link + 1], found.snapshot, checkpoint, index)
    needed = chain[first : found.end.link + 1]
    for segment in (*older, *needed):
        _require_length(segment, found.watermark, checkpoint)
    counted = {s.number for s in needed} | {s.number for s in older}
    return Survey(
        older=older,
        chain=needed,
        end=found.end._replace(link=found.end.link - first),
        watermark=found.watermark,
        unsynced=[(s, start, end) for s, start, end in _stretches(chain, found) if s.number in counted],
        highest_lsn=max([found.highest_lsn] + [h.base_lsn - 1 for h in headers.values()]),
        highest_number=max([*headers, files.load_pool(), checkpoint.last_number if checkpoint else 0]),
        highest_seq=max(header.last_seq for header in headers.values()),
        clean=found.clean,
        snapshot=pointer,
        void=[files.path(number) for number in headers if number not in counted],
    )


def _stretches(chain: list[Segment], found: _End) -> Iterator[tuple[Segment, int, int]]:
    """What is above the watermark, by segment: from, to. It may begin before the first segment that is needed whole."""
    for link in range(found.unsynced.link, found.end.link + 1):
        start = found.unsynced.offset if link == found.unsynced.link else f.HEADER_BYTES
        end = found.end.offset if link == found.end.link else chain[link].end
        if end is None:
            raise AssertionError(f"nothing says where {chain[link].path} ends, and it is not the last")
        yield chain[link], start, end


def _require_length(segment: Segment, watermark: int, checkpoint: Checkpoint | None) -> None:
    """A file that ends before what is known to be in it is not found out by starting at the checkpoint."""
    end = segment.end if segment.end is not None and segment.last_lsn <= watermark else 0
    if checkpoint is not None and checkpoint.segment == segment.number:
        end = max(end, checkpoint.offset)
    size = segment.path.stat().st_size
    if size < end:
        reason = f"the file is cut short: records up to offset {end} were known to be on disk"
        raise CorruptionError(str(segment.path), size, reason, RESTORE)


def _chain(headers: dict[int, f.SegmentHeader], files: SegmentFiles) -> list[Segment]:
    """From the newest segment back along the headers, as far as files are there; oldest first.

    A segment between a header's number and the one before that it names is void: the header was written by a recovery
    that did not count it, or by a roll whose first try was interrupted.
    """
    newest = headers[max(headers)]
    chain = [_segment(newest, files)]
    header = newest
    while header.prev_number and header.prev_number in headers:
        before = headers[header.prev_number]
        segment = _segment(before, files)
        segment.end, segment.last_lsn = header.prev_end, header.prev_lsn
        chain.append(segment)
        header = before
    return chain[::-1]


def _segment(header: f.SegmentHeader, files: SegmentFiles) -> Segment:
    segment = Segment(header, files.path(header.number))
    segment.allocated = segment.path.stat().st_size
    return segment


def _start(
    chain: list[Segment],
    headers: dict[int, f.SegmentHeader],
    checkpoint: Checkpoint | None,
    watermark: int,
    files: SegmentFiles,
) -> Position:
    """Where to begin looking for the end: at the checkpoint, else in the first segment that is not known durable."""
    if checkpoint is not None:
        for link, segment in enumerate(chain):
            if segment.number == checkpoint.segment:
                if segment.nonce != checkpoint.nonce or (segment.end or checkpoint.offset) < checkpoint.offset:
                    raise IndexMismatchError("it is ahead of the journal")
                return Position(link, checkpoint.offset, checkpoint.lsn)
        # The index knows that it was there, and on disk.
        newest = chain[-1].number
        raise _gone(files, checkpoint.segment if checkpoint.segment > newest else headers[chain[0].number].prev_number)
    for link, segment in enumerate(chain):
        if segment.end is None or segment.last_lsn > watermark:
            return Position(link, f.HEADER_BYTES, segment.base_lsn - 1)
    raise AssertionError("the newest segment is never sealed")


class IndexMismatchError(Exception):
    """The index does not belong to this journal as it is: rebuild it."""


def _gone(files: SegmentFiles, number: int) -> CorruptionError:
    return CorruptionError(
        str(files.path(number)), 0, f"segment {number} is missing, and records that count may have been in it", RESTORE
    )


@dataclass(slots=True)
class _End:
    end: Position
    watermark: int
    unsynced: Position
    highest_lsn: int
    clean: bool
    snapshot: tuple[int, int] | None


def _find_end(chain: list[Segment], start: Position, watermark: int, checkpoint: Checkpoint | None) -> _End:
    """Walk from `start` to the first batch that is not whole; torn or corrupt, that is the question (rule J4)."""
    boundaries: list[tuple[Position, int]] = []
    end, snapshot, highest = start, None, start.lsn
    hole = False
    for link in range(start.link, len(chain)):
        segment = chain[link]
        offset, lsn = (start.offset, start.lsn) if link == start.link else (f.HEADER_BYTES, segment.base_lsn - 1)
        reader = BatchReader(segment.reading(), segment.seed, offset, lsn, segment.end)
        for batch in reader:
            boundaries.append((Position(link, batch.offset, batch.header.base_lsn - 1), batch.last_lsn))
            watermark = max(watermark, batch.header.watermark)
            if any(record.kind == f.SNAPSHOT for record in records_of(batch)):
                snapshot = (segment.number, batch.offset)
        end = Position(link, reader.offset, reader.lsn)
        hole = segment.end is not None and (reader.offset, reader.lsn) != (segment.end, segment.last_lsn)
        if hole:
            break
    last = chain[end.link]
    clean = (
        checkpoint is not None and checkpoint.clean and end == start and end.link == len(chain) - 1 and not boundaries
    )
    highest = max(highest, end.lsn)
    if not clean:
        for segment, offset in [(last, end.offset)] + [(s, f.HEADER_BYTES - 1) for s in chain[end.link + 1 :]]:
            for header in BatchReader(segment.reading(), segment.seed, offset, 0).headers_beyond():
                if segment.end is None or segment is not last or hole:
                    watermark = max(watermark, header.watermark)
                    highest = max(highest, header.base_lsn + header.count - 1)
    if watermark > end.lsn:
        reason = f"records {end.lsn + 1} to {watermark} were known to be on disk and do not read back"
        raise CorruptionError(str(last.path), end.offset, reason, RESTORE)
    if hole or highest > end.lsn:
        log.warning(
            "%s: torn tail cut at offset %d: records after %d were never acknowledged", last.path, end.offset, end.lsn
        )
    unsynced = next((position for position, last_lsn in boundaries if last_lsn > watermark), end)
    return _End(end, watermark, unsynced, highest, clean, snapshot)


def _account(
    headers: dict[int, f.SegmentHeader],
    files: SegmentFiles,
    chain: list[Segment],
    found: tuple[int, int] | None,
    checkpoint: Checkpoint | None,
    index: Index | None,
) -> tuple[list[Segment], int, tuple[int, int]]:
    """Which older segments must be there, by the index or by the latest snapshot; none may be missing (rule J7).

    Returns them, the link of the first segment that is needed whole, and where the latest snapshot is.
    """
    newest = headers[chain[-1].number]
    pointer = found or (newest.snapshot_number, newest.snapshot_offset)
    if checkpoint is not None and checkpoint.snapshot > pointer:
        pointer = checkpoint.snapshot
    expected: dict[int, tuple[int, int]] = {}  # number -> (end, last LSN)
    if checkpoint is not None and index is not None:
        first_needed = checkpoint.segment
        for number, (_, last_lsn, end, live) in index.segment_rows().items():
            # One without live messages may just have been released; one that is there may still be needed to rebuild.
            if number < first_needed and (live or number in headers):
                expected[number] = (end, last_lsn)
    elif pointer[0]:
        latest = read_snapshot(files, headers, pointer)
        first_needed = latest.first_needed
        expected = {kept.number: (kept.end, kept.last_lsn) for kept in latest.kept}
    else:
        first_needed = 1
    older = []
    for number, (end, last_lsn) in sorted(expected.items()):
        if number not in headers:
            raise _gone(files, number)
        segment = _segment(headers[number], files)
        segment.end, segment.last_lsn = end, last_lsn
        older.append(segment)
    for link, segment in enumerate(chain):
        if segment.number == first_needed or (first_needed == 1 and headers[segment.number].prev_number == 0):
            return older, link, pointer
    raise _gone(files, headers[chain[0].number].prev_number or first_needed)


def read_snapshot(
    files: SegmentFiles, headers: dict[int, f.SegmentHeader], pointer: tuple[int, int]
) -> snapshots.Snapshot:
    """The snapshot in the batch at `pointer`. Raises CorruptionError if it is not there."""
    number, offset = pointer
    path = files.path(number)
    if number not in headers:
        raise _gone(files, number)
    file = File(path, os.O_RDONLY)
    header = headers[number]
    for batch in _one_batch(file, header.seed, offset):
        for record in records_of(batch):
            if record.kind == f.SNAPSHOT:
                return snapshots.decode(record.payload)
    raise CorruptionError(str(path), offset, "the latest snapshot does not read back", RESTORE)


def _one_batch(file: File, seed: int, offset: int) -> Iterator[Batch]:
    header = f.decode_batch_header(read_at(file.fd, offset, f.BATCH_HEADER.size), seed, offset)
    if header is not None:
        for batch in BatchReader(file, seed, offset, header.base_lsn - 1):
            yield batch
            return


def settle(found: Survey, files: SegmentFiles) -> None:
    """Put on disk what is read above the watermark, before anybody sees it (rules J3, J5).

    The same bytes are written again in place: after a SIGKILL the page cache may hold what the disk does not, and
    after a failed fsync its pages may be clean all the same. Writing makes them dirty, whichever it was.
    """
    for segment, position, end in found.unsynced:
        if position < end:
            file = File(segment.path, os.O_RDWR)
            while position < end:
                data = read_at(file.fd, position, min(1 << 20, end - position))
                write_all(file.fd, data, position)
                position += len(data)
            os.fdatasync(file.fd)
    files.clean()


def resume_in(found: Survey) -> bool:
    """Whether the log may go on in its last segment: after a clean close, or if that segment is still empty (J5)."""
    return found.clean or (found.end.offset == f.HEADER_BYTES and found.highest_lsn == found.end.lsn)


def take_over(found: Survey, the_log: Log, seq: int, snapshot_at: tuple[int, int]) -> None:
    """From reading to writing: the one durable step of recovery (rule J5)."""
    last = found.chain[-1]
    last.end = None
    the_log.snapshot_at = snapshot_at
    tail = Tail(last, found.end.offset, found.end.lsn, seq)
    the_log.start(found.table(), tail, found.end.lsn, found.highest_number)
    if resume_in(found):
        last.file = File(last.path, os.O_RDWR)
        last.allocated = max(os.fstat(last.file.fd).st_size, found.end.offset)  # an empty one may have been cut short
    else:
        the_log.begin_segment(found.highest_lsn + 1)
    if found.void:
        names = the_log.files.names()
        for path in found.void:
            path.unlink(missing_ok=True)
        the_log.files.sync_names(names)


def replay(found: Survey, index: Index, checkpoint: Checkpoint, replayer: Replayer) -> None:
    """Apply to the index what the journal says after its checkpoint."""
    table = found.table()
    for link, segment in enumerate(found.chain):
        last = link == found.end.link
        offset, lsn = f.HEADER_BYTES, segment.base_lsn - 1
        if segment.number == checkpoint.segment:
            offset, lsn = checkpoint.offset, checkpoint.lsn
        _apply(segment, offset, lsn, found.end.offset if last else segment.end, index, table, replayer)


def replay_between(
    table: SegmentTable, index: Index, checkpoint: Checkpoint, applied: Tail, replayer: Replayer
) -> None:
    """Apply what lies between the index's checkpoint and `applied`, in an open store."""
    for segment in table.segments:
        if checkpoint.segment <= segment.number <= applied.segment.number:
            offset, lsn = f.HEADER_BYTES, segment.base_lsn - 1
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
    reader = BatchReader(segment.reading(), segment.seed, offset, lsn, end)
    replayer.path = str(segment.path)
    for batch in reader:
        if reflected is not None and batch.last_lsn > replayer.reflected_lsn:
            reflected()
            dead = reflected = None
        entries = replayer.entries(batch, segment.number, dead, segment.base_lsn)
        while replayer.passed_over:
            segment.bury(replayer.passed_over.pop())
        if entries:
            index.apply(entries, segment, table)
            if index.operations >= PARTIAL_OPERATIONS and index.checkpointed is None:
                index.commit_partial()
    if reader.offset != end:
        reason = f"records after {reader.lsn} do not read back"
        raise CorruptionError(str(segment.path), reader.offset, reason, RESTORE)
    if reflected is not None:
        reflected()


def rebuild(found: Survey, files: SegmentFiles, index: Index, replayer: Replayer, progress: Progress | None) -> None:
    """Fill an empty index from the whole journal."""
    table = found.table()
    kept: dict[int, snapshots.KeptSegment] = {}
    latest: snapshots.Snapshot | None = None
    headers = {header.number: header for header in files.headers()}
    if found.snapshot[0]:
        latest = read_snapshot(files, headers, found.snapshot)
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
        _apply(segment, f.HEADER_BYTES, segment.base_lsn - 1, segment.end, index, table, replayer, bits)
        done = _report(progress, done, segment.end or 0, total)
    for link, segment in enumerate(found.chain):
        end = found.end.offset if link == found.end.link else segment.end
        known: bytes | None = None
        reflected = None
        if latest is not None and segment.number == latest.first_needed and latest.first_dead is not None:
            known = latest.first_dead_bits() or b""
            segment.dead = bytearray(known) if known else None
            reflected = partial(_restore_rest, latest, index, table)
        _apply(segment, f.HEADER_BYTES, segment.base_lsn - 1, end, index, table, replayer, known, reflected)
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
