"""The survey of a log when it is opened: which segments count, and where the log ends. Broken bytes were torn by a
crash (never acknowledged: cut), or they are damage (CorruptionError). Decides, and writes nothing (rules J4, J5,
J7)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Final, NamedTuple

from ....policies.errors import CorruptionError
from .. import format as f
from ..files.segment_files import SegmentFiles, read_header
from ..files.watermark import Watermark, WatermarkFile
from ..reader import BatchReader, Record, read_at, records_of
from ..segment import Segment, SegmentTable

log: logging.Logger = logging.getLogger(__name__)


class Kept(NamedTuple):
    """An older segment that holds something which is needed: where its records end."""

    end: int
    last_lsn: int
    required: bool = True
    """True if the segment must be there; else it may have been released."""


class Needed(NamedTuple):
    """The segments that are needed, as a snapshot says (rule J6)."""

    first: int
    """The first segment from which all are needed whole."""
    kept: Mapping[int, Kept]
    """Segments before it that are needed in part, by number."""
    since: int = 0
    """The LSN behind which the snapshot knows nothing of what is said."""


class Checkpoint(NamedTuple):
    """The owner's durable knowledge of how far it has read the log. Reading begins there."""

    lsn: int
    """All up to it was on disk."""
    segment: int
    nonce: int
    offset: int
    """The offset where the batch after that LSN begins."""
    last_number: int
    """The highest segment number by then."""
    snapshot: tuple[int, int]
    """The place of the latest snapshot by then, as Encoder.snapshot_at."""
    clean: bool
    """The log was closed in order there."""
    kept: Mapping[int, Kept]
    """The segments before `segment` that the owner knows, by number."""


class Position(NamedTuple):
    """A batch boundary: the segment's place in the chain, the offset, the last LSN before it."""

    link: int
    offset: int
    lsn: int


@dataclass(slots=True)
class Survey:
    """The result of `survey`."""

    older: list[Segment]
    """Segments before the chain that still hold live messages, oldest first."""
    chain: list[Segment]
    """The segments from the first one that is needed whole to the one where the log ends, none missing between."""
    end: Position
    watermark: int
    """All up to this LSN is known to be on disk."""
    unsynced: list[tuple[Segment, int, int]]
    """Stretches above the watermark that count: segment, from, to."""
    highest_lsn: int
    """The highest LSN ever seen, void ones included (rule I1)."""
    highest_number: int
    highest_counter: int
    """The highest counter, as the headers say; records may say more."""
    clean: bool
    """Closed in order: the log goes on where it ended."""
    snapshot_at: tuple[int, int]
    """The place of the latest snapshot, (0, 0) without one."""
    snapshot: bytes | None = None
    """The payload of the latest snapshot; None without one, or if a checkpoint stands in for it."""
    void: list[Path] = field(default_factory=list)
    """Files that nothing accounts for: released, or void by rule J1."""
    copies: list[Segment] = field(default_factory=list)
    """The files of copies that a checkpoint or a snapshot knows, and what `add_copies` was told of."""

    def table(self) -> SegmentTable:
        return SegmentTable((*self.older, *self.chain), sorted(self.copies, key=lambda copies: copies.base_lsn))

    def add_copies(self, copies: Segment) -> None:
        """Add a file of copies that a record of the log accounts for."""
        self.copies.append(copies)
        self.void = [path for path in self.void if path != copies.path]


def survey(
    files: SegmentFiles,
    log_id: bytes,
    checkpoint: Checkpoint | None = None,
    needed: Callable[[bytes], Needed] | None = None,
) -> Survey:
    """Decide. Without a `checkpoint` all is to be read; `needed` says then what the payload of a snapshot says about
    segments. Writes nothing. Raises CorruptionError, CheckpointMismatchError, OSError."""
    headers = _headers(files, log_id)
    mark = WatermarkFile(files.directory, log_id).read() or Watermark(0, 0, 0)
    newest = headers[max(headers)]
    if newest.number < mark.segment or (newest.number == mark.segment and newest.nonce != mark.nonce):
        raise _gone(files, mark.segment)
    chain = _chain(headers, files)
    watermark = max([h.durable_lsn for h in headers.values()] + [mark.lsn, checkpoint.lsn if checkpoint else 0])
    start = _start(chain, headers, checkpoint, watermark, files)
    log_end = _find_end(chain, start, watermark, checkpoint)
    last = headers[chain[log_end.end.link].number]
    snapshot_at = log_end.snapshot or (last.snapshot_number, last.snapshot_offset)
    snapshot = None
    if checkpoint is not None:
        snapshot_at = max(snapshot_at, checkpoint.snapshot)
        needs = Needed(checkpoint.segment, checkpoint.kept)
    elif snapshot_at[0] and needed is not None:
        snapshot = _read_snapshot(files, headers, snapshot_at)
        needs = _parsed(needed, snapshot, files.path(snapshot_at[0]), snapshot_at[1])
    else:
        needs = Needed(1, {})
    older, first = _account(headers, files, chain[: log_end.end.link + 1], needs)
    whole = chain[first : log_end.end.link + 1]
    for segment in (*older, *whole):
        _require_length(segment, log_end.watermark, checkpoint)
    counted = {s.number for s in whole} | {s.number for s in older}
    there = files.copies()
    copies = [
        open_copies(files, number, kept.end, kept.last_lsn, log_id)
        for number, kept in sorted(needs.kept.items())
        if number >= f.COPIES and (kept.required or number in there)
    ]
    known = {segment.number for segment in copies}
    return Survey(
        older=older,
        chain=whole,
        end=log_end.end._replace(link=log_end.end.link - first),
        watermark=log_end.watermark,
        unsynced=[(s, start, end) for s, start, end in _stretches(chain, log_end) if s.number in counted],
        highest_lsn=max([log_end.highest_lsn] + [h.base_lsn - 1 for h in headers.values()]),
        highest_number=max([*headers, files.load_pool(), checkpoint.last_number if checkpoint else 0]),
        highest_counter=max(header.counter for header in headers.values()),
        clean=log_end.clean,
        snapshot_at=snapshot_at,
        snapshot=snapshot,
        void=[files.path(number) for number in headers if number not in counted]
        + [path for number, path in there.items() if number not in known],
        copies=copies,
    )


def _headers(files: SegmentFiles, log_id: bytes) -> dict[int, f.SegmentHeader]:
    """Return the headers by number. Raises CorruptionError if there are none, or those of another store."""
    headers = {header.number: header for header in files.headers()}
    if not headers:
        raise CorruptionError(str(files.directory), 0, "the journal's segments are gone", f.RESTORE)
    for header in headers.values():
        if header.log_id != log_id:
            reason = f"this segment belongs to store {header.log_id.hex()}, not to {log_id.hex()}"
            raise CorruptionError(str(files.path(header.number)), 20, reason)
    return headers


def open_copies(
    files: SegmentFiles, number: int, end: int, last_lsn: int, log_id: bytes, nonce: int | None = None
) -> Segment:
    """Open the file of copies that a record of the log speaks of, or a snapshot, or a checkpoint. Raises
    CorruptionError if it is not there, or is another one."""
    path = files.path(number)
    try:
        header = read_header(path)
    except FileNotFoundError:
        reason = "this file of copies is missing, and messages that count are in it"
        raise CorruptionError(str(path), 0, reason, f.RESTORE) from None
    if (header.log_id, header.number) != (log_id, number) or (nonce is not None and header.nonce != nonce):
        raise CorruptionError(str(path), 16, "this file of copies is another one's, not that of this journal")
    segment = _segment(header, files)
    segment.end, segment.last_lsn = end, last_lsn
    if segment.allocated < end:
        reason = f"the file is cut short: records up to offset {end} were known to be on disk"
        raise CorruptionError(str(path), segment.allocated, reason, f.RESTORE)
    return segment


def adopt_copies(surveyed: Survey, files: SegmentFiles, log_id: bytes) -> None:
    """Let all files of copies count, where what told which of them do is lost (mending.py). Raises CorruptionError."""
    known = {copies.number for copies in surveyed.copies}
    for number, path in sorted(files.copies().items()):
        if number not in known:
            header = read_header(path)
            reader = BatchReader(Segment(header, path), f.HEADER_BYTES, header.base_lsn - 1, header.capacity)
            for _ in reader:
                pass
            surveyed.add_copies(open_copies(files, number, reader.offset, reader.lsn, log_id))


def _stretches(chain: list[Segment], log_end: _End) -> Iterator[tuple[Segment, int, int]]:
    """Yield what is above the watermark, by segment: from, to. The stretch may begin before the first segment that is
    needed whole."""
    for link in range(log_end.unsynced.link, log_end.end.link + 1):
        start = log_end.unsynced.offset if link == log_end.unsynced.link else f.HEADER_BYTES
        end = log_end.end.offset if link == log_end.end.link else chain[link].end
        if end is None:
            raise AssertionError(f"nothing says where {chain[link].path} ends, and it is not the last")
        yield chain[link], start, end


def _require_length(segment: Segment, watermark: int, checkpoint: Checkpoint | None) -> None:
    """Raise CorruptionError for a file that ends before what is known to be in it. Starting at the checkpoint does not
    find such a file out."""
    end = segment.end if segment.end is not None and segment.last_lsn <= watermark else 0
    if checkpoint is not None and checkpoint.segment == segment.number:
        end = max(end, checkpoint.offset)
    size = segment.path.stat().st_size
    if size < end:
        reason = f"the file is cut short: records up to offset {end} were known to be on disk"
        raise CorruptionError(str(segment.path), size, reason, f.RESTORE)


def _chain(headers: dict[int, f.SegmentHeader], files: SegmentFiles) -> list[Segment]:
    """Return the segments from the newest one back along the headers, as far as files are there; oldest first.

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
    """Return where to begin looking for the end: at the checkpoint, else in the first segment that is not known
    durable."""
    if checkpoint is not None:
        for link, segment in enumerate(chain):
            if segment.number == checkpoint.segment:
                if segment.nonce != checkpoint.nonce or (segment.end or checkpoint.offset) < checkpoint.offset:
                    raise CheckpointMismatchError("it is ahead of the journal")
                return Position(link, checkpoint.offset, checkpoint.lsn)
        # The owner knows that it was there, and on disk.
        newest = chain[-1].number
        raise _gone(files, checkpoint.segment if checkpoint.segment > newest else headers[chain[0].number].prev_number)
    for link, segment in enumerate(chain):
        if segment.end is None or segment.last_lsn > watermark:
            return Position(link, f.HEADER_BYTES, segment.base_lsn - 1)
    raise AssertionError("the newest segment is never sealed")


class CheckpointMismatchError(Exception):
    """The checkpoint does not belong to this log as it is: read all of it."""


def _gone(files: SegmentFiles, number: int) -> CorruptionError:
    reason = f"segment {number} is missing, and records that count may have been in it"
    return CorruptionError(str(files.path(number)), 0, reason, f.RESTORE)


@dataclass(slots=True)
class _End:
    end: Position
    watermark: int
    unsynced: Position
    highest_lsn: int
    clean: bool
    snapshot: tuple[int, int] | None


_SNAPSHOT: Final = bytes([f.SNAPSHOT])


def _find_end(chain: list[Segment], start: Position, watermark: int, checkpoint: Checkpoint | None) -> _End:
    """Walk from `start` to the first batch that is not whole; torn or corrupt, that is the question (rule J4)."""
    boundaries: list[tuple[int, int, int, int]] = []  # plain, which costs the garbage collector nothing
    end, snapshot, highest = start, None, start.lsn
    hole = False
    for link in range(start.link, len(chain)):
        segment = chain[link]
        offset, lsn = (start.offset, start.lsn) if link == start.link else (f.HEADER_BYTES, segment.base_lsn - 1)
        reader = BatchReader(segment, offset, lsn, segment.end)
        for batch in reader:
            boundaries.append((batch.last_lsn, link, batch.offset, batch.header.base_lsn - 1))
            watermark = max(watermark, batch.header.watermark)
            if _SNAPSHOT in batch.records and any(record.kind == f.SNAPSHOT for record in records_of(batch)):
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
            for header in BatchReader(segment, offset, 0).headers_beyond():
                if segment.end is None or segment is not last or hole:
                    watermark = max(watermark, header.watermark)
                    highest = max(highest, header.base_lsn + header.count - 1)
    if watermark > end.lsn:
        reason = f"records {end.lsn + 1} to {watermark} were known to be on disk and do not read back"
        raise CorruptionError(str(last.path), end.offset, reason, f.RESTORE)
    if hole or highest > end.lsn:
        log.warning(
            "%s: torn tail cut at offset %d: records after %d were never acknowledged", last.path, end.offset, end.lsn
        )
    unsynced = next((Position(*where) for last_lsn, *where in boundaries if last_lsn > watermark), end)
    return _End(end, watermark, unsynced, highest, clean, snapshot)


def _account(
    headers: dict[int, f.SegmentHeader], files: SegmentFiles, chain: list[Segment], needs: Needed
) -> tuple[list[Segment], int]:
    """Return the older segments that must be there, and the link of the first one that is needed whole. None may be
    missing (rule J7)."""
    older = []
    for number, kept in sorted(needs.kept.items()):
        if number >= needs.first:
            continue
        if number not in headers:
            if kept.required:
                raise _gone(files, number)
            continue
        segment = _segment(headers[number], files)
        segment.end, segment.last_lsn = kept.end, kept.last_lsn
        older.append(segment)
    for link, segment in enumerate(chain):
        if segment.number == needs.first or (needs.first == 1 and headers[segment.number].prev_number == 0):
            return older, link
    raise _gone(files, headers[chain[0].number].prev_number or needs.first)


def _parsed(needed: Callable[[bytes], Needed], snapshot: bytes, path: Path, offset: int) -> Needed:
    """Return what a snapshot says about segments. Raises CorruptionError if it does not parse."""
    try:
        return needed(snapshot)
    except ValueError as error:
        reason = f"the latest snapshot does not parse: {error}"
        raise CorruptionError(str(path), offset, reason, f.RESTORE) from error


def _read_snapshot(files: SegmentFiles, headers: dict[int, f.SegmentHeader], place: tuple[int, int]) -> bytes:
    """Return the payload of the snapshot in the batch at `place`. Raises CorruptionError if it is not there."""
    number, offset = place
    if number not in headers:
        raise _gone(files, number)
    segment = Segment(headers[number], files.path(number))
    for record in _one_batch(segment, offset):
        if record.kind == f.SNAPSHOT:
            return record.payload
    raise CorruptionError(str(segment.path), offset, "the latest snapshot does not read back", f.RESTORE)


def _one_batch(segment: Segment, offset: int) -> Iterator[Record]:
    """Yield the records of the batch at `offset`, none if it is not whole."""
    header = f.decode_batch_header(read_at(segment.reading(), offset, f.BATCH_HEADER.size), segment.seed, offset)
    if header is not None:
        for batch in islice(BatchReader(segment, offset, header.base_lsn - 1), 1):
            yield from records_of(batch)
