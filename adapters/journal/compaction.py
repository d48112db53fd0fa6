"""Compaction: what still lives in segments that are mostly dead is copied, all of it into one file as large as that
takes, and then those segments are released as any in which nothing lives (rule J8).

All is done beside the senders: messages are read and copied by a thread of the background, in small pieces with pauses
between them, into a file of their own (wal/files/copies.py). Once that is on disk the log gets one short record, which
says
that its messages count from there on. A message that was acked before that record has died; one that is acked behind
it dies in its new place.

Which segments, and how often one message is copied, policies/compaction.py says.

The record of a prepared transaction is not copied, so its segment stays until the outcome is there.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Final

from ...policies.compaction import MESSAGES_MAX, choose, is_dying, look_after
from ...policies.config.options import JournalOptions
from ...policies.errors import AnabranchError, ClosedError, StoreFullError
from ..core.backend import Host
from ..core.operations.tickets import Ticket
from ..system.background import CoalescedJob
from ..system.files import FULL
from ..system.rare_warnings import RareWarnings
from ..wal import format as w
from ..wal.files.copies import CopiesWriter
from ..wal.log import Log
from ..wal.reader import Record
from ..wal.segment import Segment
from ..wal.skimming import Skimmer
from ..wal.ticket import Tail
from .changes import Compacted, Copied
from .encoding import SEND, SEND_START
from .index.index import Index

log: logging.Logger = logging.getLogger(__name__)

SLICE: Final = 0.0001
PAUSE: Final = 0.001
"""Seconds of work, and of rest behind it. A thread that computes without a pause keeps the interpreter from senders,
for 5 ms at a time; with these, one send of some hundred waits for one slice."""
HURRIED_SLICE: Final = 0.001
HURRIED_PAUSE: Final = 0.0005
"""The pause where segments die faster than they are compacted. Senders that wait for nothing keep the interpreter for 5
ms behind each pause: with short slices a busy store would grow for as long as it is busy."""
AGAIN_SECONDS: Final = 5.0
"""Behind a full disk, or one that could not be written or read, it is tried again."""


class Compactor:
    """The compaction of one open store. One at a time; any thread may ask for it."""

    def __init__(
        self,
        host: Host,
        wal: Log,
        index: Index,
        options: JournalOptions,
        applied: Callable[[], Tail],
        release: Callable[[], object],
    ) -> None:
        """Take `applied`, how far the index is in the log, and `release`, which releases segments in which nothing
        lives."""
        self._host, self._log, self._index, self._options, self._applied = host, wal, index, options, applied
        self._release = release
        self._lock = threading.Lock()
        """One compaction at a time."""
        self._job = CoalescedJob(self._run_in_background, never=not options.compact_live_percent)
        self._failures: RareWarnings[str] = RareWarnings(
            lambda error, count: log.warning("%s: compaction failed (%d times): %s", wal.name, count, error)
        )
        self._stopping = False
        self._unreadable: set[int] = set()
        self._pause_at = 0.0
        self._slice, self._rest = SLICE, PAUSE
        self.compactions: int = 0
        """How many files of copies count since it was made."""

    # When

    def notice(self) -> None:
        """Look whether to compact. Under the store's lock; costs next to nothing where there is nothing to do."""
        if self._job.last.begun and not self._stopping and self._choose(self._options.compact_min_segments):
            self._job.schedule(0)

    def _choose(self, min_segments: int) -> list[Segment]:
        """Choose segments to compact, and set when to look again, under the store's lock."""
        table, options = self._log.table, self._options
        sealed = table.sealed(self._applied().segment.number)
        bytes_max = options.segment_size - w.HEADER_BYTES
        self._index.until_look = look_after(sum(segment.live_bytes for segment in sealed), bytes_max)
        left = self._unreadable
        if self._index.transactions.count:
            places = [table.find(lsn) for _, (lsn, _, _) in self._index.transactions.prepared()]
            left = left | {place.number for place in places if place is not None}
        if left:
            sealed = [segment for segment in sealed if segment.number not in left]
        return choose(sealed, options.compact_live_percent, min_segments, bytes_max, w.HEADER_BYTES)

    def _run_in_background(self) -> None:
        if self._log.forked:
            return
        if self._log.out_of_room:
            self._job.schedule(AGAIN_SECONDS)
            return
        try:
            while self.run(self._options.compact_min_segments):
                self._release()  # before the next are copied: else all of them would be on the disk twice
        except AnabranchError as error:
            if isinstance(error, StoreFullError):
                self._job.schedule(AGAIN_SECONDS)
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
            sources = self._host.asked(lambda: self._choose(min_segments))
            if not sources or self._stopping:
                return 0
            try:
                self._compact(sources)
            except (OSError, StoreFullError) as error:
                self._job.schedule(AGAIN_SECONDS)
                if isinstance(error, OSError) and error.errno not in FULL:
                    self._failures.count([str(error)])
                return 0
            return len(sources)

    def _compact(self, sources: Sequence[Segment]) -> None:
        generation = 1 + max(segment.generation for segment in sources)
        self._slice, self._rest = (HURRIED_SLICE, HURRIED_PAUSE) if self._is_behind() else (SLICE, PAUSE)
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
        # Messages not found in them still count there; without this they would come here again at once.
        left = [segment for segment in sources if segment.live and segment in self._log.table.all]
        self._unreadable.update(segment.number for segment in left)

    def _is_behind(self) -> bool:
        """Return whether many more segments wait than are compacted together."""
        percent = self._options.compact_live_percent
        waiting = sum(is_dying(s, percent, w.HEADER_BYTES) for s in self._log.table.segments if s.live)
        return waiting > 2 * self._options.compact_min_segments

    def _next_number(self) -> int:
        """Return the number of the next file of copies, behind COPIES: never used before, since each that counts has a
        record of the log."""
        last = max((copies.number for copies in self._log.table.copies), default=w.COPIES - 1)
        return max(self._log.tail.lsn, last - w.COPIES + 1)

    def _takes(self, writer: CopiesWriter, record: Record) -> bool:
        end = writer.end + record.length
        return writer.count < MESSAGES_MAX and end <= self._options.segment_size and writer.takes(len(record.payload))

    def _living(self, sources: Sequence[Segment]) -> Iterator[Record]:
        """Yield the messages of these segments that live, as far as is known. Raises ClosedError once the store
        closes."""
        for source in sources:
            try:
                skimmer = Skimmer(source, SEND, source.is_dead)
            except FileNotFoundError:
                continue  # all of it has died meanwhile, and it was released
            try:
                for record in skimmer:
                    self._pause()
                    if record is not None:
                        yield record
            except OSError as error:
                if error.errno != errno.EIO:
                    raise
                log.debug("%s: %s: %s", self._log.name, source.path, error)  # one bad sector holds up no other segment
            if skimmer.offset != source.end and source in self._log.table.all:
                self._unreadable.add(source.number)
                log.warning(
                    "%s: %s does not read back from offset %d on, and is not compacted; `anabranch check` says more",
                    self._log.name, source.path, skimmer.offset,
                )  # fmt: skip

    def _pause(self) -> None:
        """Let others have the interpreter, if this thread has had it for long enough."""
        if self._stopping:
            raise ClosedError(f"{self._log.name} is being closed")
        if time.perf_counter() >= self._pause_at:
            time.sleep(self._rest)
            self._pause_at = time.perf_counter() + self._slice

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
        self._apply()
        log.debug("%s: %d messages compacted into %s", wal.name, len(messages), copies.path)

    def _apply(self) -> None:
        """Have what was published applied. Applying takes a while: senders, who only help with it, do not wait."""
        host = self._host
        host.check()
        with host.lock:
            host.writing_out = True
            try:
                host.current()
            finally:
                host.writing_out = False


def _remove(writer: CopiesWriter) -> None:
    """Remove a file of copies that no record says counts. The next opening removes it if that cannot be done now."""
    with suppress(OSError):
        writer.give_up()
