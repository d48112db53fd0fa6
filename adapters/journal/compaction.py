"""Compaction: what still lives in segments that are mostly dead is copied, all of it into one file as large as that
takes, and then those segments are released as any in which nothing lives (rule J8).

All is done beside the senders: messages are read and copied by a thread of the background, in small pieces with pauses
between them, into a file of their own (wal/copies.py). Once that is on disk the log gets one short record, which says
that its messages count from there on. A message that was acked before that record has died; one that is acked behind
it dies in its new place.

How often one message is copied. Segments are taken together that were copied equally often, and whose live part is at
most `compact_live_percent`. So all that is ever copied for the n-th time is at most that share of what was copied n - 1
times: at 50 percent, of a TiB that was written no byte is copied more than 40 times, and all of it together costs no
more than it cost to write it. Files of copies that stay small because what is in them goes on living are put together,
TOGETHER of them at a time.

What is not copied: the record of a prepared transaction, and so its segment stays until the outcome is there.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Final

from ...policies.errors import AnabranchError, ClosedError, StoreFullError
from ...policies.options import JournalOptions
from ..background import CoalescedJob
from ..core.engine import Engine
from ..core.tickets import Ticket
from ..wal import format as w
from ..wal.copies import CopiesWriter
from ..wal.log import Log
from ..wal.reader import BatchReader, Record, records_of
from ..wal.segment import Segment
from ..wal.ticket import Tail
from .copied import Compacted, Copied
from .encoding import SEND, SEND_START
from .index import Index

log = logging.getLogger(__name__)

MESSAGES_MAX: Final = 8192
"""In one file of copies: so many rows change at once, under the store's lock."""
TOGETHER: Final = 16
"""So many small files of copies are put together, each with at most one part in TOGETHER of a segment."""
PIECE_BYTES: Final = 128 * 1024
PAUSE: Final = 0.0005
"""Seconds. A thread that computes without a pause keeps the interpreter from senders, for 5 ms at a time."""
AGAIN_SECONDS: Final = 5.0
"""After a full disk, or one that could not be written or read."""


def choose(sealed: Iterable[Segment], live_percent: int, min_segments: int, bytes_max: int) -> list[Segment]:
    """The segments that are to be compacted next, oldest first, none if it does not pay: of one generation, each with
    at most `live_percent` of live bytes, of all that it takes on the disk, at least `min_segments`, with about
    `bytes_max` of live bytes in all. Segments without any live message are not among them."""
    dying: dict[int, list[Segment]] = {}
    small: dict[int, list[Segment]] = {}
    for segment in sealed:
        used = max(segment.end or 0, segment.allocated) - w.HEADER_BYTES
        if not segment.live:
            continue
        if segment.live_bytes * 100 <= live_percent * used:
            dying.setdefault(segment.generation, []).append(segment)
        elif segment.generation and used * TOGETHER <= bytes_max:
            small.setdefault(segment.generation, []).append(segment)
    for least, groups in ((min_segments, dying), (TOGETHER, small)):
        for _, group in sorted(groups.items()):
            if len(group) >= least:
                return _first(group, least, bytes_max)
    return []


def _first(group: Sequence[Segment], least: int, bytes_max: int) -> list[Segment]:
    taken: list[Segment] = []
    size = 0
    for segment in group:
        size += segment.live_bytes
        if size > bytes_max and len(taken) >= least:
            break
        taken.append(segment)
    return taken


class Compactor:
    """Of one store that is open. One at a time; any thread may ask for it."""

    def __init__(
        self, engine: Engine, wal: Log, index: Index, options: JournalOptions, applied: Callable[[], Tail]
    ) -> None:
        """`applied` says how far the index is in the log."""
        self._engine, self._log, self._index, self._options, self._applied = engine, wal, index, options, applied
        self._lock = threading.Lock()
        """One compaction at a time."""
        self._job = CoalescedJob(self._run_in_background, never=not options.compact_live_percent)
        self._stopping = False
        self._not_before = 0.0
        self._unreadable: set[int] = set()
        self._piece = 0
        self.compactions = 0
        """How many files of copies count since it was made."""
        self.copied = 0
        """Messages that were copied."""

    # When

    def notice(self) -> None:
        """It is time to look. Under the store's lock; costs next to nothing where there is nothing to do."""
        if (
            self._job.last.begun
            and not self._stopping
            and time.monotonic() >= self._not_before
            and self._choose(self._min_segments)
        ):
            self._job.schedule(0)

    @property
    def _min_segments(self) -> int:
        return self._options.compact_min_segments

    def _choose(self, min_segments: int) -> list[Segment]:
        table, tail, options = self._log.table, self._applied(), self._options
        sealed = [s for s in table.segments if s.number < tail.segment.number and s.number not in self._unreadable]
        sealed += [s for s in table.copies if s.counts and s.number not in self._unreadable]
        if self._index.transactions.count:
            places = [self._log.table.find(lsn) for _, (lsn, _, _) in self._index.transactions.prepared()]
            sealed = [segment for segment in sealed if segment not in places]
        bytes_max = options.segment_size - w.HEADER_BYTES
        return choose(sealed, options.compact_live_percent, min_segments, bytes_max)

    def _run_in_background(self) -> None:
        if self._log.forked or self._log.starved:
            return
        try:
            while self.run(self._min_segments):
                pass
        except AnabranchError as error:
            log.debug("%s: nothing compacted: %s", self._log.name, error)

    def finish(self) -> None:
        """Wait for the one under way, if one is, which gives up soon; the log is closed, so that no other begins."""
        self._stopping = True
        with self._lock:
            pass

    # How

    def run(self, min_segments: int) -> int:
        """Compact once, if there are so many segments for it; returns how many segments were copied from. A disk that
        has no room, or that fails, changes nothing: it is tried again later. Raises AnabranchError."""
        with self._lock:
            sources = self._engine.asked(lambda: self._choose(min_segments))
            if not sources or self._stopping:
                return 0
            try:
                self._compact(sources)
            except (OSError, StoreFullError) as error:
                self._not_before = time.monotonic() + AGAIN_SECONDS
                log.debug("%s: nothing is compacted for now: %s", self._log.name, error)
                return 0
            return len(sources)

    def _compact(self, sources: Sequence[Segment]) -> None:
        generation = 1 + max(segment.generation for segment in sources)
        writer: CopiesWriter | None = None
        messages: list[Copied] = []
        try:
            for record in self._living(sources):
                if writer is not None and not self._takes(writer, record):
                    whole, writer = writer, None
                    self._publish(whole, messages)
                    messages = []
                if writer is None:
                    writer = CopiesWriter(self._log.files, self._log.log_id, self._next_number(), generation)
                own = writer.add(record.kind, record.payload)
                number, seq = SEND_START.unpack_from(record.payload)
                messages.append(Copied(number, seq, own))
            if writer is not None:
                whole, writer = writer, None
                self._publish(whole, messages)
        except BaseException:
            if writer is not None:
                _remove(writer)
            raise
        left = [segment for segment in sources if segment.live and segment in self._log.table.all]
        self._unreadable.update(segment.number for segment in left)  # else it would come here again at once

    def _next_number(self) -> int:
        """Of a file of copies, behind COPIES: never used before, since each that counts has a record of the log."""
        last = max((copies.number for copies in self._log.table.copies), default=w.COPIES - 1)
        return max(self._log.tail.lsn, last - w.COPIES + 1)

    def _takes(self, writer: CopiesWriter, record: Record) -> bool:
        end = writer.end + record.length
        return writer.count < MESSAGES_MAX and end <= self._options.segment_size and writer.takes(len(record.payload))

    def _living(self, sources: Sequence[Segment]) -> Iterator[Record]:
        """The messages of these segments that live, as far as is known. Raises ClosedError once the store closes."""
        for source in sources:
            try:
                reader = BatchReader(source, w.HEADER_BYTES, source.base_lsn - 1, source.end)
            except FileNotFoundError:
                continue  # all of it has died meanwhile, and it was released
            for batch in reader:
                self._pause(batch.end - batch.offset)
                for record in records_of(batch):
                    if record.kind == SEND and not source.is_dead(record.lsn):
                        self._pause(record.length)
                        yield record
            if reader.offset != source.end and source in self._log.table.all:
                self._unreadable.add(source.number)
                log.warning(
                    "%s: %s does not read back from offset %d on, and is not compacted; `anabranch verify` tells more",
                    self._log.name, source.path, reader.offset,
                )  # fmt: skip

    def _pause(self, size: int) -> None:
        """So many bytes were looked at."""
        if self._stopping:
            raise ClosedError(f"{self._log.name} is being closed")
        self._piece += size
        if self._piece >= PIECE_BYTES:
            self._piece = 0
            time.sleep(PAUSE)

    def _publish(self, writer: CopiesWriter, messages: list[Copied]) -> None:
        """Let a file count. Raises AnabranchError, OSError; the file is removed then, unless it may count."""
        wal = self._log
        try:
            copies = writer.finish()
        except BaseException:
            _remove(writer)
            raise
        change = Compacted(copies, messages)
        ticket = Ticket([change], change.size, unsynced=True)  # what it replaces is there until a snapshot is synced
        wal.add_copies(copies)  # before anybody can read that it counts
        try:
            wal.submit(ticket)
            wal.wait(ticket)
        except (StoreFullError, ClosedError):  # nothing was written
            wal.forget_segments({copies.number})
            _remove(writer)
            raise
        self.compactions += 1
        self.copied += len(messages)
        self._engine.asked(lambda: None)
        log.debug("%s: %d messages compacted into %s", wal.name, len(messages), copies.path)


def _remove(writer: CopiesWriter) -> None:
    """No record says that it counts. What cannot be removed now the next opening removes."""
    with suppress(OSError):
        writer.give_up()
