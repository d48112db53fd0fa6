"""Mending a damaged log, so that all that can be read of it counts.

    mender = Mender(directory, log_id)
    for loss in mender.look(): ...               what does not read back; nothing is written
    mender.write(aside)                          now it is mended; the damaged files are moved to `aside`

Unreadable records are replaced, in their place, by records of kind LOST that have their LSNs: so all that is whole
keeps its LSN and its offset, and whoever knows where a record is still finds it. A header is made anew from what the
records behind it say. A tail that a crash tore, and that was never acknowledged, stays torn (rule J4).

MD1  Nothing is invented: every record that counts afterwards was there before, byte for byte, or is a LOST one.
MD2  Nothing that is whole, and counted before the damage, is given up.
MD3  Each file is replaced as a whole, by rename: a crash leaves it damaged or mended, and the next run goes on.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, NamedTuple

from google_crc32c import extend as crc32c

from ....policies.errors import CorruptionError
from ...system.files import FILE_MODE, make_directory, open_file, open_to_read, sync_directory, sync_file, write_all
from .. import format as f
from ..files.copies import base_of
from ..files.segment_files import COPIES_SUFFIX, SEGMENT_SUFFIX, UNFINISHED_SUFFIX, read_header, segment_path
from ..files.watermark import Watermark, WatermarkFile
from ..reader import BatchReader, Record, read_at, records_of
from ..segment import Segment
from .crc import nonce_for, start_of
from .stretch import Loss, Stretch
from .survey import Kept, Needed

log: logging.Logger = logging.getLogger(__name__)

HEADER: Final = "the file's header is damaged"
MISSING: Final = "the segment is missing, or nothing in it reads back; nobody knows what came after these records"
UNTOLD: Final = "nobody knows whether this file counts: the index and the snapshot that said so are lost"
UNNEEDED: Final = "the file is missing, in which nothing was that still counts"
SEEK_BYTES: Final = 16 << 20
"""Bytes through which a whole batch is looked for where a segment's header is damaged."""


class Copies(NamedTuple):
    """A file of copies that counts: what a record of the log says of it."""

    number: int
    nonce: int
    end: int
    records: int


@dataclass(frozen=True, slots=True)
class Hints:
    """The knowledge of the log that its owner has from elsewhere, and trusts."""

    needed: Needed | None = None
    """The segments that there must be."""
    needed_by: Callable[[bytes], Needed] | None = None
    """A function that tells them by the payload of a snapshot, where `needed` is not known."""
    copies_in: Callable[[Record], Copies | None] = lambda record: None
    """The file of copies that a record speaks of."""
    mark: Watermark | None = None
    """The watermark, as the log's own: what was there, and on disk."""
    boundary: tuple[int, int, int] = (0, 0, 0)
    """A place between two batches: segment, offset, the last LSN before it."""
    bases: Mapping[int, int] = field(default_factory=dict)
    """The first LSN of segments, by number."""


@dataclass(slots=True)
class _Scanned:
    """One segment, read through."""

    end: int
    last_lsn: int
    patches: list[tuple[int, bytes]] = field(default_factory=list)
    losses: list[Loss] = field(default_factory=list)
    snapshots: list[tuple[int, bytes]] = field(default_factory=list)
    """Offset of the batch and payload, of each that is whole."""
    copies: list[tuple[int, Copies]] = field(default_factory=list)
    """LSN, and what is said there."""


class Mender:
    """The mender of one log that nobody has open. `look`, then `write`."""

    def __init__(self, directory: Path, log_id: bytes, hints: Hints | None = None, file_mode: int = FILE_MODE) -> None:
        self._directory, self._log_id, self._file_mode = directory, log_id, file_mode
        self._hints = hints or Hints()
        self._headers: dict[int, f.SegmentHeader] = {}
        self._changed: dict[int, list[tuple[int, bytes]]] = {}
        """Writes to do, by segment: offset and bytes."""
        self._missing: set[int] = set()
        """Segments that are made anew."""
        self._losses: list[Loss] = []
        self._scanned: dict[int, _Scanned] = {}
        self._needed = self._hints.needed
        self._is_unsure = False
        """True if what told which files of copies count is lost: they are all kept."""
        self._ends: dict[int, Kept] = {}
        """Ends of files of copies."""
        self._watermark = self._newest = 0

    # Looking

    def look(self) -> list[Loss]:
        """Return all that is lost, in the order of the log. Nothing is written. Raises CorruptionError for what is not
        damage: a segment of another version or of another log; and OSError."""
        numbers = sorted(number for number in map(_number, self._directory.glob(f"*{SEGMENT_SUFFIX}")) if number)
        mark = WatermarkFile(self._directory, self._log_id).read() or Watermark(0, 0, 0)
        if self._hints.mark is not None:
            mark = max(mark, self._hints.mark)
        self._watermark = mark.lsn
        damaged = self._read_headers(numbers)
        self._newest = max([mark.segment, *numbers])
        for number in numbers:
            if number in damaged:
                known = mark.nonce if mark.segment == number else None
                found = _find_batch(self._path(number), self._log_id, known)
                if found is not None:
                    self._make_header(number, *found)
            if number in self._headers and not self._is_void(number):
                self._scanned[number] = self._scan(number)
        if self._needed is None and self._hints.needed_by is not None:
            self._ask_snapshot(self._hints.needed_by)
        lost = any(_kind(loss) == f.SNAPSHOT for one in self._scanned.values() for loss in one.losses)
        self._is_unsure = lost and self._hints.needed is None
        was_released = lost or any(header.snapshot_number for header in self._headers.values())
        self._replace_missing(mark, was_released)
        self._point_to_snapshot()
        self._mend_copies(was_released)
        for number, one in self._scanned.items():
            if one.patches:
                self._changed.setdefault(number, []).extend(one.patches)
                self._losses += one.losses
        return sorted(self._losses, key=lambda loss: (loss.path, loss.offset))

    def _path(self, number: int) -> Path:
        return segment_path(self._directory, number)

    def _read_headers(self, numbers: list[int]) -> set[int]:
        """Read the headers; return the numbers of those that do not read."""
        damaged = set()
        for number in numbers:
            path = self._path(number)
            try:
                header = read_header(path)
            except CorruptionError:
                if _is_of_other_version(path):
                    raise
                damaged.add(number)
                continue
            if header.log_id != self._log_id or header.number != number:
                reason = f"segment {header.number} of log {header.log_id.hex()}, not {number} of {self._log_id.hex()}"
                raise CorruptionError(str(path), 20, reason, "move it away, and restore the one that belongs there")
            self._headers[number] = header
            self._watermark = max(self._watermark, header.durable_lsn)
        return damaged

    def _is_void(self, number: int) -> bool:
        """Return whether a later header passes over a segment (rule J1)."""
        return any(header.prev_number < number < header.number for header in self._headers.values())

    def _make_header(self, number: int, nonce: int, offset: int, base_lsn: int) -> None:
        """Make the header of a segment anew, whose first batch that is whole is at `offset`. Those before it are
        scanned."""
        path = self._path(number)
        before = max(self._scanned, default=0)
        header, previous = self._headers.get(before), self._scanned.get(before)
        after = self._headers.get(min((other for other in self._headers if other > number), default=0))
        if offset != f.HEADER_BYTES:
            base_lsn = previous.last_lsn + 1 if previous is not None else 1
        made = f.SegmentHeader(
            log_id=self._log_id, number=number, nonce=nonce, base_lsn=self._hints.bases.get(number, base_lsn),
            durable_lsn=0, prev_number=0, prev_end=0, prev_lsn=0, counter=after.counter if after else 0,
            snapshot_number=0, snapshot_offset=0, capacity=max(path.stat().st_size, f.HEADER_BYTES),
        )  # fmt: skip
        if header is not None and previous is not None:
            made = replace(
                made, durable_lsn=header.durable_lsn, prev_number=before, prev_end=previous.end,
                prev_lsn=previous.last_lsn, counter=max(made.counter, header.counter),
                snapshot_number=header.snapshot_number, snapshot_offset=header.snapshot_offset,
            )  # fmt: skip
        self._headers[number] = made
        self._changed[number] = [(0, made.encode())]
        self._losses.append(Loss(str(path), 0, f.HEADER_BYTES, 1, 0, reason=HEADER))

    def _ask_snapshot(self, needed_by: Callable[[bytes], Needed]) -> None:
        """Let the latest snapshot tell which segments there must be, and scan those anew whose end it tells."""
        found = [
            (number, offset, payload) for number, one in self._scanned.items() for offset, payload in one.snapshots
        ]
        if found:
            self._needed = needed_by(max(found)[2])
            for number in self._needed.kept:
                if number in self._scanned and self._known_end(number, chained=True)[0] is None:
                    self._scanned[number] = self._scan(number)

    def _known_end(self, number: int, chained: bool = False) -> tuple[int | None, int]:
        """Return where a segment's records end and the last LSN there, if anything says so. `chained`: the segment
        after it says so."""
        for header in self._headers.values():
            if header.prev_number == number:
                return header.prev_end, header.prev_lsn
        kept = self._needed.kept.get(number) if self._needed is not None and not chained else None
        kept = self._ends.get(number, kept)
        return (kept.end, kept.last_lsn) if kept is not None and kept.end else (None, 0)

    def _scan(self, number: int) -> _Scanned:
        """Walk through one segment, up to where it is known to end, or to the first batch that was torn."""
        header, path = self._headers[number], self._path(number)
        limit, last_lsn = self._known_end(number)
        segment = Segment(header, path)
        found = _Scanned(f.HEADER_BYTES, header.base_lsn - 1)
        watermark = header.durable_lsn
        stop = limit if limit is not None else max(path.stat().st_size, self._boundary(number)[0])
        while True:
            reader = BatchReader(segment, found.end, found.last_lsn, stop)
            for batch in reader:
                watermark = max(watermark, batch.header.watermark)
                for record in records_of(batch):
                    if record.kind == f.SNAPSHOT:
                        found.snapshots.append((batch.offset, record.payload))
                    elif (copies := self._hints.copies_in(record)) is not None:
                        found.copies.append((record.lsn, copies))
            found.end, found.last_lsn = reader.offset, reader.lsn
            if limit is not None and found.end >= limit:
                break
            following = self._next_batch(segment, found.end, found.last_lsn, stop)
            if limit is None:
                beyond = [header.watermark for header in BatchReader(segment, found.end, 0, stop).headers_beyond()]
                durable = max([self._watermark if number == self._newest else 0, *beyond])
                if durable <= found.last_lsn and (following is None or following[0] > self._boundary(number)[0]):
                    break  # torn, and never acknowledged
                if following is None or following[1] > durable:
                    following = None
                    end, last = stop, durable
                else:
                    end, last = following
            else:
                end, last = following if following is not None else (limit, last_lsn)
            stretch = Stretch(
                segment, found.end, end, found.last_lsn + 1, last, open_ended=limit is None and following is None
            )
            data, losses = stretch.mend(watermark)
            found.patches.append((found.end, data))
            found.losses += losses
            found.end, found.last_lsn = found.end + len(data), last
            if following is None:
                break
        self._watermark = max(self._watermark, watermark)
        return found

    def _boundary(self, number: int) -> tuple[int, int]:
        """Return the offset and last LSN of the hints' boundary, if it is in this segment; else (0, 0)."""
        segment, offset, lsn = self._hints.boundary
        return (offset, lsn) if segment == number else (0, 0)

    def _next_batch(self, segment: Segment, offset: int, lsn: int, stop: int) -> tuple[int, int] | None:
        """Return where the batch after the one that is not whole begins, and the LSN before it; None if nothing
        tells."""
        found = self._find_next_batch(segment, offset, lsn, stop)
        known = self._boundary(segment.number)
        if known[0] > offset and known[1] >= lsn and (found is None or known[0] < found[0]):
            return known
        return found

    def _find_next_batch(self, segment: Segment, offset: int, lsn: int, stop: int) -> tuple[int, int] | None:
        here = f.decode_batch_header(read_at(segment.reading(), offset, f.BATCH_HEADER.size), segment.seed, offset)
        if here is not None and here.base_lsn == lsn + 1 and here.count:
            end, last = offset + f.BATCH_HEADER.size + here.length, here.base_lsn + here.count - 1
            if end <= stop:
                return end, last
        file = segment.reading()
        position = offset + 1
        while position < stop:
            data = read_at(file, position, min(1 << 20, stop - position))
            index = data.find(f.BATCH_MAGIC)
            while index >= 0:
                at = position + index
                header = f.decode_batch_header(read_at(file, at, f.BATCH_HEADER.size), segment.seed, at)
                if header is not None and header.base_lsn > lsn:
                    return at, header.base_lsn - 1
                index = data.find(f.BATCH_MAGIC, index + 1)
            position += max(1, len(data) - len(f.BATCH_MAGIC) + 1)
        return None

    def _replace_missing(self, mark: Watermark, was_released: bool) -> None:
        """Put a segment in the place of those that must be there and are not: all in it is lost."""
        newest = max(self._headers, default=0)
        if newest < mark.segment:
            before = self._before(mark.segment)
            base = self._hints.bases.get(mark.segment, before[2] + 1)
            end, lost = self._boundary(mark.segment)
            if mark.lsn > lost:
                end, lost = max(end, f.HEADER_BYTES) + _blank_bytes(mark.lsn - max(lost, base - 1)), mark.lsn
            self._make_segment(mark.segment, mark.nonce, base, before, max(end, f.HEADER_BYTES), lost)
            newest = mark.segment
        if not newest:
            raise CorruptionError(str(self._directory), 0, "nothing of the log can be read", f.RESTORE)
        needed, number = self._needed, newest
        while (missing := self._headers[number].prev_number) != 0:
            header = self._headers[number]
            if missing not in self._headers:
                if needed is None and was_released and missing < min(self._scanned):
                    self._begin_at(number)
                    break
                if needed is not None and missing < needed.first:
                    break
                before = self._before(missing)
                base = self._hints.bases.get(missing, before[2] + 1)
                self._make_segment(missing, None, base, before, header.prev_end, header.prev_lsn)
            number = missing
        for number, kept in needed.kept.items() if needed is not None else ():
            if not kept.required and not self._path(number).exists():
                self._losses.append(Loss(str(self._path(number)), 0, 0, 1, 0, reason=UNNEEDED))
            elif kept.required and number not in self._headers and number < f.COPIES:
                base = self._hints.bases.get(number, 1)
                self._make_segment(number, None, base, self._before(number), kept.end, kept.last_lsn)

    def _before(self, number: int) -> tuple[int, int, int]:
        """Return the segment before this one, where it ends and its last LSN."""
        older = max((other for other in self._scanned if other < number), default=0)
        previous = self._scanned.get(older)
        return (older, previous.end, previous.last_lsn) if previous is not None else (0, 0, 0)

    def _begin_at(self, number: int) -> None:
        """Let the log begin here: nothing tells what was before this segment, nor whether it was still needed."""
        header = self._headers[number]
        self._losses.append(
            Loss(
                str(self._path(header.prev_number)), 0, 0, 1, header.prev_lsn,
                reason="this segment is missing, and those before it; nobody knows whether they were needed",
            )
        )  # fmt: skip
        self._headers[number] = begun = replace(header, prev_number=0, prev_end=0, prev_lsn=0)
        self._changed.setdefault(number, []).append((0, begun.encode()))

    def _make_segment(
        self,
        number: int,
        nonce: int | None,
        base: int,
        before: tuple[int, int, int],
        end: int,
        last_lsn: int,
    ) -> None:
        """Make a segment in which all is lost, from LSN `base` to `last_lsn`, which ends at `end`."""
        room = (end - f.HEADER_BYTES - f.BATCH_HEADER.size) // f.RECORD_HEADER.size
        base = max(base, last_lsn - max(room, 0) + 1)
        near = min(self._headers, key=lambda other: abs(other - number), default=0)
        beside = self._headers.get(near)
        if nonce is None:
            known = self._hints.mark
            is_known = known is not None and known.segment == number
            nonce = known.nonce if known is not None and is_known else int.from_bytes(os.urandom(8), "little")
        if number >= f.COPIES:
            beside = None
        header = f.SegmentHeader(
            log_id=self._log_id, number=number, nonce=nonce, base_lsn=base, durable_lsn=base - 1,
            prev_number=before[0], prev_end=before[1], prev_lsn=before[2], counter=beside.counter if beside else 0,
            snapshot_number=beside.snapshot_number if beside else 0,
            snapshot_offset=beside.snapshot_offset if beside else 0,
            capacity=max(beside.capacity if beside else 0, end),
        )  # fmt: skip
        path = self._path(number)
        patches = [(0, header.encode())]
        start, first = f.HEADER_BYTES, base
        for stop, last in sorted({self._boundary(number), (end, last_lsn)}):
            if start < stop <= end and last >= first:
                patches.append((start, Stretch(Segment(header, path), start, stop, first, last).blank(base - 1)))
                start, first = stop, last + 1
        self._losses.append(Loss(str(path), 0, end, base, last_lsn, reason=MISSING))
        self._headers[number] = header
        self._missing.add(number)
        self._changed[number] = patches
        self._scanned[number] = _Scanned(end, last_lsn)

    def _point_to_snapshot(self) -> None:
        """Let the newest header name the latest snapshot that is whole."""
        newest = max(self._headers)
        header = self._headers[newest]
        found = [(number, offset) for number, one in self._scanned.items() for offset, _ in one.snapshots]
        latest = max((place for place in found if place[0] < newest), default=(0, 0))
        if (header.snapshot_number, header.snapshot_offset) not in [*found, latest]:
            self._headers[newest] = replace(header, snapshot_number=latest[0], snapshot_offset=latest[1])
            self._changed.setdefault(newest, []).append((0, self._headers[newest].encode()))

    def _mend_copies(self, was_released: bool) -> None:
        """Mend the files of copies that count, as segments. `was_released`: there was a snapshot."""
        needed = self._needed
        there = {number for number in map(_copies_number, self._directory.glob(f"*{COPIES_SUFFIX}")) if number}
        counting: dict[int, tuple[int | None, Kept]] = {}
        for number, kept in needed.kept.items() if needed is not None else ():
            if number >= f.COPIES and (kept.required or number in there):
                counting[number] = None, kept
        since = needed.since if needed is not None else 0
        for one in list(self._scanned.values()):
            for lsn, copies in one.copies:
                if copies.number in counting or lsn > since:
                    base = base_of(copies.number)
                    counting[copies.number] = copies.nonce, Kept(copies.end, base + copies.records - 1)
        if needed is None and was_released:
            self._adopt(there - counting.keys(), counting)
        for number, (nonce, kept) in sorted(counting.items()):
            base, path = base_of(number), self._path(number)
            self._ends[number] = kept
            try:
                header = read_header(path)
            except (CorruptionError, FileNotFoundError):
                found = _find_batch(path, self._log_id, nonce) if number in there else None
                if found is None:
                    self._make_segment(number, nonce, base, (0, 0, 0), kept.end, kept.last_lsn)
                    continue
                header = self._copies_header(number, found[0], kept.end)
                self._changed[number] = [(0, header.encode())]
                self._losses.append(Loss(str(path), 0, f.HEADER_BYTES, 1, 0, reason=HEADER))
            self._headers[number] = header
            self._scanned[number] = self._scan(number)

    def _adopt(self, numbers: set[int], counting: dict[int, tuple[int | None, Kept]]) -> None:
        """Adopt files of copies of which nothing tells any more whether what is in them counts: all of it does. One
        whose header does not read says nothing of where it ends."""
        for number in numbers:
            path = self._path(number)
            with suppress(CorruptionError):
                header = read_header(path)
                segment, lsn = Segment(header, path), base_of(number) - 1
                for beyond in BatchReader(segment, f.HEADER_BYTES, lsn, header.capacity).headers_beyond():
                    lsn = max(lsn, beyond.base_lsn + beyond.count - 1)
                counting[number] = header.nonce, Kept(header.capacity, lsn)
                self._losses.append(Loss(str(path), 0, 0, 1, 0, reason=UNTOLD))

    def _copies_header(self, number: int, nonce: int, end: int) -> f.SegmentHeader:
        return f.SegmentHeader(
            log_id=self._log_id, number=number, nonce=nonce, base_lsn=base_of(number), durable_lsn=0, prev_number=0,
            prev_end=0, prev_lsn=0, counter=1, snapshot_number=0, snapshot_offset=0, capacity=end,
        )  # fmt: skip

    # Writing

    def write(self, aside: Path | None = None) -> None:
        """Put in place what `look` found to be missing. The damaged files go to `aside`, if that is given. Raises
        OSError; what was done by then is done."""
        if aside is not None and self._is_unsure:
            for path in self._directory.glob(f"*{COPIES_SUFFIX}"):
                self._keep(path, aside)
        for number, patches in sorted(self._changed.items()):
            path = self._path(number)
            unfinished = path.with_suffix(UNFINISHED_SUFFIX)
            was_there = path.exists() and number not in self._missing
            fd = open_file(unfinished, os.O_RDWR | os.O_CREAT | os.O_TRUNC, self._file_mode)
            try:
                if was_there:
                    with open_to_read(path) as original, open(fd, "wb", closefd=False) as copy:
                        shutil.copyfileobj(original, copy, 1 << 20)
                for offset, data in patches:
                    write_all(fd, data, offset)
                sync_file(fd)
            finally:
                os.close(fd)
            if aside is not None and path.exists():
                self._keep(path, aside)
            unfinished.rename(path)
            sync_directory(self._directory)

    def _keep(self, path: Path, aside: Path) -> None:
        make_directory(aside, self._file_mode, is_ours=True)
        if not (aside / path.name).exists():
            os.link(path, aside / path.name)
            sync_directory(aside)


def _kind(loss: Loss) -> int:
    """Return the kind of a loss's first record, by what its damaged bytes look like."""
    return int(f.RECORD_HEADER.unpack_from(loss.remnant)[3]) if len(loss.remnant) >= f.RECORD_HEADER.size else 0


def _blank_bytes(records: int) -> int:
    """Return how many bytes a batch takes in which all is lost."""
    return f.BATCH_HEADER.size + records * f.RECORD_HEADER.size if records > 0 else 0


def _number(path: Path) -> int:
    return int(path.stem) if path.stem.isdigit() else 0


def _is_of_other_version(path: Path) -> bool:
    """Return whether the header is whole, and of another version."""
    with open_to_read(path) as file:
        page = file.read(f.SEGMENT_HEADER.size)
    if len(page) < f.SEGMENT_HEADER.size or page[:8] != f.MAGIC:
        return False
    magic, version, flags, crc, log_id, *fields = f.SEGMENT_HEADER.unpack(page)
    blank = f.SEGMENT_HEADER.pack(magic, version, flags, 0, log_id, *fields)
    return bool(version != f.VERSION and crc32c(0, blank) == crc)


def _find_batch(path: Path, log_id: bytes, nonce: int | None) -> tuple[int, int, int] | None:
    """Return the nonce of a segment whose header does not read. Returns also offset and first LSN of the first whole
    batch.

    A batch's checksum starts from the segment's seed: it gives that away, and the batch's first record proves it. Any
    nonce with that seed will do.
    """
    with open_to_read(path) as file:
        file.seek(f.HEADER_BYTES)
        data = file.read(SEEK_BYTES)
    for at in _finds(data, f.BATCH_MAGIC):
        if at + f.BATCH_HEADER.size + f.RECORD_HEADER.size > len(data):
            break
        offset = f.HEADER_BYTES + at
        crc, rest = f.CRC.unpack_from(data, at + 4)[0], data[at + 8 : at + f.BATCH_HEADER.size]
        length, count, base_lsn, _ = f.BATCH_REST.unpack(rest)
        seed = f.segment_seed(log_id, nonce) if nonce is not None else start_of(crc, rest) ^ offset
        if crc32c(seed ^ offset, rest) != crc or not count:
            continue
        record = at + f.BATCH_HEADER.size
        record_crc, record_length, lsn, _, _, _ = f.RECORD_HEADER.unpack_from(data, record)
        end = record + f.RECORD_HEADER.size + record_length
        if lsn != base_lsn or record_length > length or end > len(data):
            continue
        if crc32c(seed ^ (f.HEADER_BYTES + record), data[record + f.CRC.size : end]) == record_crc:
            return nonce if nonce is not None else nonce_for(crc32c(0, log_id), seed), offset, base_lsn
    return None


def _copies_number(path: Path) -> int:
    return f.COPIES | int(path.stem) if path.stem.isdigit() else 0


def _finds(data: bytes, pattern: bytes) -> Iterator[int]:
    at = data.find(pattern)
    while at >= 0:
        yield at
        at = data.find(pattern, at + 1)
