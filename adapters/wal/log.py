"""The log's writing end: one batch after the other, synced as the policy says, with marks that vouch for what is on
disk (rules J2 to J4, G2).

The batch under way is `_in_flight`, the end of the log is the writer's `tail`, and each moves by one assignment.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from threading import get_ident
from time import monotonic
from typing import Final

from ...policies.config.durability import Sync
from ...policies.errors import AnabranchError, CorruptionError, OutcomeUnknownError, StoreFailedError
from ..system import locking
from ..system.background import CoalescedJob
from ..system.files import FULL, is_out_of_files, refused, write_small
from ..system.locking import gone_directory
from . import format as f
from .files.segment_files import SegmentFiles
from .group_commit import GroupCommit
from .segment import Segment, SegmentTable
from .segment_writer import SegmentWriter
from .syncing import Syncer
from .ticket import GROWS, SHRINKS, Encoder, LogOptions, Tail, Ticket, WriteBatch

log = logging.getLogger(__name__)

IDLE_SECONDS: Final = 0.1
"""After so long without a write a synced mark is written, so that the last batch has a watermark behind it (J4)."""
NEVER_IDLES: Final = 10
"""Under `never` after so many times as long: who writes now and then has three syncs a second at most."""


class Log(GroupCommit):
    """A log that is open for writing. Threads: all of them. A forked child may only let go of it.

    `_lead` (GroupCommit) guards all writing of the log's files, the writer's `tail` and `_in_flight`.
    """

    def __init__(self, name: str, log_id: bytes, files: SegmentFiles, options: LogOptions, encoder: Encoder) -> None:
        """`name` is what errors call it, such as "store 'a'"."""
        super().__init__(name, min(options.batch_bytes_max, options.segment_bytes - f.HEADER_BYTES), options.advice)
        self.log_id, self.files, self.options = log_id, files, options
        self.batches = 0
        """Written since it was made."""
        self._encoder, self._deliver = encoder, encoder.deliver
        self._syncer = Syncer(self._written, self.fail, self._require_not_failed)
        self._writer = SegmentWriter(name, log_id, files, options, encoder, self._syncer)
        self._always = options.sync is Sync.ALWAYS
        self._periodic = options.sync is Sync.PERIODIC
        self._in_flight: WriteBatch | None = None
        self._marked_lsn = 0
        self._last_write = 0.0
        self._never = options.sync is Sync.NEVER
        self._idle_job = CoalescedJob(self._idle)
        self._ended = True
        self.releases = 0
        """How often segments were released since it was made."""
        self.relief: Callable[[], object] = lambda: None
        """Releases segments, if it can. Called by a thread whose tickets wait for room."""
        self._relief = threading.Lock()  # one at a time; the others wait for it
        self.releasing = 0
        """The thread that releases segments, if one does: it does not wait for room to be made."""
        self._out_of_room_at = 0
        self._hopeless = False
        """Nothing could be released for those that wait."""
        self._hopeless_lsn = -1
        """The end of the log when that was last so: nothing can have died until it is another. -1: what makes the log
        hold more has found room since."""
        self._most = 0
        """Tickets that are tried together, the disk being full; 0: as many as there are."""

    # Opening and closing

    def start(self, table: SegmentTable, tail: Tail, durable_lsn: int, last_number: int) -> None:
        """Take over from recovery. `last_number` is the highest segment number ever seen (rule I1)."""
        self._syncer.durable_lsn = self._marked_lsn = durable_lsn
        self._writer.start(table, tail, last_number)
        self._generation = locking.generation
        self._closed = self._ended = False

    def resume(self) -> None:
        """Go on, after an orderly end, in the last segment."""
        self._writer.vouch()

    def begin_segment(self, base_lsn: int) -> None:
        """Go on, after a crash, in a fresh segment, with LSNs never seen before (rules I1, J5). Raises OSError."""
        self._writer.begin(base_lsn)

    def close(self) -> None:
        """Write what is queued, sync it, leave a mark. Does nothing to the files of a failed log."""
        if self.forked:
            self._closed = True
            return
        self._lead_queued()
        self._closed = True
        while not self._ended:
            self._lead_queued()
            try:
                with self._lead:
                    # In one piece with finding the queue empty: a ticket that is refused has taken no effect.
                    self._ended = not self._has_work()
            finally:
                if self._has_work():
                    self._hand_on()
        self._writer.stop_preparing()
        if self.failed is None:
            self.sync()
            self._mark()

    def let_go(self) -> None:
        """Wait, after close, until nothing of ours makes files any more, since the directory may soon be another's."""
        self._closed = True
        self._writer.let_go()
        self._syncer.let_go()

    def fail(self, cause: BaseException) -> None:
        """Stop for good as GroupCommit's; a directory that was deleted is told as that."""
        gone = gone_directory(self.files.directory / "*", self.name) if isinstance(cause, FileNotFoundError) else ""
        super().fail(StoreFailedError(gone) if gone else cause)

    def _stop(self) -> None:
        self._writer.stop_preparing()
        self._encoder.stopped()

    def _require_not_failed(self) -> None:
        if self.failed is not None:
            raise self._failure()

    # The contents of the log

    @property
    def table(self) -> SegmentTable:
        """Return the segments, oldest first."""
        return self._writer.table

    @property
    def tail(self) -> Tail:
        """Return where the next batch goes."""
        return self._writer.tail

    @property
    def last_number(self) -> int:
        """Return the highest segment number ever given out."""
        return self._writer.last_number

    @property
    def durable_lsn(self) -> int:
        """Return an LSN: all up to it is on disk."""
        return self._syncer.durable_lsn

    @property
    def out_of_room(self) -> bool:
        """Return whether tickets wait for segments to be released, the disk being full and the reserve used."""
        return self._out_of_room or self.files.reserve.is_short

    @property
    def syncs(self) -> int:
        """Return how often the log has waited for the disk since it was made."""
        return self._syncer.count

    def count_sync(self) -> None:
        """Count that somebody has waited for the disk on the log's behalf."""
        self._syncer.count += 1

    def add_copies(self, copies: Segment) -> None:
        """Add a file of copies: its records may be found from now on."""
        self._writer.add_copies(copies)

    def forget_segments(self, numbers: set[int]) -> None:
        """Take released segments out of the table."""
        self._writer.forget(numbers)

    # Leading: only with _lead held

    def _has_work(self) -> bool:
        return bool(self._queue or self._unsynced_queue or self._in_flight is not None)

    def _lead_once(self) -> None:
        try:
            self._leader = get_ident()
            if self._in_flight is not None:
                self._finish(self._in_flight)
            if self._expected > len(self._queue) > 0 and not self._unsynced_queue and not self._ended:
                self._gather()
            tickets, size = self._take()
            if not tickets:
                return
            if self._ended or self.failed is not None:
                self._dismiss(tickets, self._refusal())
                return
            if self._most:
                tickets, size = self._fewer(tickets)
            encoder, writer, promised = self._encoder, self._writer, 0
            tail = writer.tail
            if encoder.promised or len(tickets) > 1 or tickets[0].promise:
                promised = self._promised(tickets)
            if writer.must_roll or tail.offset + size > writer.limit or promised > writer.promised:
                if not self._make_room(tickets, size, promised):
                    return
                tail = writer.tail
            try:
                batch = encoder.encode(tail, tickets, self._syncer.durable_lsn)
            except Exception as error:  # our bug; it is for these callers, not for all who come after them
                self._dismiss(tickets, error)
                return
            if batch.tail.offset > tail.segment.allocated:
                # Earlier entries of the queue made the batch larger than its size had said.
                if not self._make_room(tickets, batch.tail.offset - tail.offset, promised):
                    return
                batch = encoder.encode(writer.tail, tickets, self._syncer.durable_lsn)
            self._in_flight = batch
            self._finish(batch)
        finally:
            self._leader = 0

    def _promised(self, tickets: list[Ticket]) -> int:
        """Return how many bytes are promised once this batch is written (rule J10)."""
        if len(tickets) == 1:
            return self._encoder.promised + tickets[0].promise
        return self._encoder.promised + sum([ticket.promise for ticket in tickets])

    def _make_room(self, tickets: list[Ticket], size: int, promised: int) -> bool:
        """See that the batch fits into the segment and its space is allocated, with the reserve behind it that it has
        to leave. On a full disk, or where the process can open no file any more, tickets get StoreFullError before any
        byte of the batch is written (invariant 7): first those that make the log hold more.
        """
        leaves = [self._encoder.leaves(ticket) for ticket in tickets]
        most = max(leaves, default=SHRINKS)
        if tickets and most == GROWS and self._hopeless_lsn >= 0 and self._may_be_relieved() and self._sealing_pays():
            self._out_of_room_at, self._out_of_room = (
                self.releases,
                True,
            )  # first: what is written here would keep the segment
            return False
        try:
            self._writer.make_room(size, promised, most)
        except StoreFailedError as error:
            self._dismiss(tickets, error)
            return False
        except (OSError, CorruptionError) as error:
            if (
                not isinstance(error, OSError) or error.errno not in FULL
                or self._writer.must_roll or self.failed is not None
            ):  # fmt: skip
                self.fail(error)
                self._dismiss(tickets, self._failure())
                return False
            if most < GROWS and len(tickets) > 1:
                self._most = len(tickets) // 2  # what is left of the reserve may do for some of them
                return False
            if tickets and (not self._hopeless if most == SHRINKS else self._may_be_relieved(error)):
                self._out_of_room_at, self._out_of_room = self.releases, True
                return False
            self._most, self._hopeless = 0, False
            what = f"{self.name} cannot grow: {error.strerror} ({self.files.directory})"
            full = refused(what, error, ". Nothing was written", self.options.room_advice)
            full.__cause__ = error.with_traceback(None)  # its frames would keep files open until they are collected
            self._dismiss([ticket for ticket, kind in zip(tickets, leaves, strict=True) if kind == most], full)
            return False
        self._most, self._hopeless = 0, False
        if most == GROWS:
            self._hopeless_lsn = -1
        elif self._hopeless_lsn >= 0:
            self._writer.limit = 0  # who makes it hold more comes here first
        return True

    def _may_be_relieved(self, error: OSError | None = None) -> bool:
        """Return whether tickets that make the log hold more should look if anything can be released. Once after each
        change, where it is counted what is needed."""
        tail = self._writer.tail
        return (
            not self._hopeless and self._hopeless_lsn != tail.lsn
            and (error is None or not is_out_of_files(error))
            and self._encoder.needed_bytes(tail.segment) is not None
        )  # fmt: skip

    def _sealing_pays(self) -> bool:
        needed = self._encoder.needed_bytes(self._writer.tail.segment)
        return needed is not None and self._writer.sealing_pays(needed)

    def _fewer(self, tickets: list[Ticket]) -> tuple[list[Ticket], int]:
        """Return the first of the tickets, as many as may be tried together, and the size of their batch."""
        tickets = tickets[: self._most]
        return tickets, f.BATCH_HEADER.size + sum(ticket.size for ticket in tickets)

    def _relieve(self) -> None:
        """Have segments released, without the lead, for those tickets that wait for room. If none is, the tickets get
        their error next."""
        if self.releasing == get_ident():
            return
        with self._relief:
            if not self._out_of_room:
                return  # another thread has
            lsn = self._writer.tail.lsn
            try:
                if self.releases == self._out_of_room_at:
                    self.relief()  # all is applied then: it is known what is needed
                if self.releases == self._out_of_room_at and self._seal_spent():
                    self.relief()
            except AnabranchError as error:
                log.debug("%s: nothing released: %s", self.name, error)
            self._hopeless = self.releases == self._out_of_room_at
            if self._hopeless:
                self._hopeless_lsn = lsn
            self._out_of_room = False

    def _seal_spent(self) -> bool:
        """Leave the segment that is being written, on a disk that one segment fills, if most of it is needed no more.
        The segment is released once the rest is needed no more. Returns whether it was left."""
        with self._lead:
            try:
                self._leader = get_ident()
                if self._in_flight is not None:
                    self._finish(self._in_flight)
                if self._ended or self.failed is not None or not self._sealing_pays():
                    return False
                self._writer.seal()
                return True
            except OSError as error:
                if self._writer.must_roll:
                    self.fail(error)
                log.debug("%s: no spare file could be begun: %s", self.name, error)
                return False
            finally:
                self._leader = 0

    def _finish(self, batch: WriteBatch) -> None:
        """Write the batch, sync it if need be, make it count. Every step may be done twice."""
        writer = self._writer
        try:
            if self.failed is not None:
                raise self._failure()
            if batch.sync or (self._always and not batch.unsynced):
                self._write_synced(batch)
            else:
                self._write(batch)
        except (OSError, StoreFailedError) as error:
            self._lose(batch, error)
            return
        writer.tail = batch.tail  # first: who sees what the encoder remembers of it makes that durable with `sync`
        if batch.changes:
            self._encoder.written(batch)
        if batch.data:
            self._deliver(batch)
        for ticket in batch.tickets:
            ticket.finish(None)
        queue = self._queue
        while queue and queue[0].done:
            queue.popleft()
        if self._unsynced_queue:
            self._drop_done()
        self._in_flight = None
        if not writer.prepared_ahead and batch.tail.offset > batch.segment.capacity // 2:
            writer.look_ahead()

    def _write_synced(self, batch: WriteBatch) -> None:
        syncer, began = self._syncer, monotonic()
        if batch.data:
            self.batches += 1
            if syncer.dirty_since is None and self._idle_job.last.begun:
                self._schedule_idle()
            syncer.write_through(batch.data, batch.offset, batch.tail)
            self._last_write = ended = monotonic()
        else:
            syncer.through(batch.tail)
            ended = monotonic()
        self._synced(ended - began)

    def _write(self, batch: WriteBatch) -> None:
        syncer = self._syncer
        if batch.data:
            self.batches += 1
            file = batch.segment.file or batch.segment.open()
            write_small(file.fd, batch.data, batch.offset)
            self._last_write = monotonic()
            if syncer.dirty_since is None:
                syncer.dirty_since = self._last_write
            if self._idle_job.last.begun:  # asked for each write: Ctrl-C may have struck between the two
                self._schedule_idle()
        if self._periodic and self._overdue():
            began = monotonic()
            syncer.through(batch.tail)
            self._synced(monotonic() - began)

    def _lose(self, batch: WriteBatch, error: Exception) -> None:
        """Fail, since the write or the sync has failed: what the batch became is unknown."""
        self.fail(error)
        what = f"{self.name} failed while it wrote: {error}. Whether this operation took effect shows once it is opened"
        unknown = OutcomeUnknownError(f"{what} again; {self._advice}" if self._advice else f"{what} again")
        unknown.__cause__ = error
        self._dismiss(batch.tickets, unknown)
        self._in_flight = None

    # Syncing

    def _written(self) -> Tail:
        return self._writer.tail

    def _overdue(self) -> bool:
        """Return whether the interval of `periodic` is over: who comes then waits for the disk, and the loss stays
        bounded (rule G5)."""
        since = self._syncer.dirty_since
        return since is not None and monotonic() - since > self.options.sync_interval

    def sync(self) -> None:
        """Make all that has been written durable. Raises StoreFailedError."""
        tail = self._writer.tail
        if tail.lsn > self._syncer.durable_lsn:
            try:
                self._syncer.through(tail)
            except OSError as error:
                raise self._failure() from error

    def _mark(self) -> None:
        """Write an empty batch, whose watermark vouches for all before it (rule J4)."""
        try:
            with self._lead:
                self._mark_once()
        finally:  # an error, too: others have left to who leads what nobody waits for
            if self._has_work():
                self._hand_on()

    def _mark_once(self) -> None:
        try:
            self._leader = get_ident()
            if self._in_flight is not None:
                self._finish(self._in_flight)
            durable = self._syncer.durable_lsn
            if self.failed is not None or self._marked_lsn >= self._writer.tail.lsn:
                return
            if durable < self._writer.tail.lsn or not self._make_room([], f.BATCH_HEADER.size, 0):
                return
            self._in_flight = batch = self._encoder.encode(self._writer.tail, [], durable)
            self._finish(batch)
            self._marked_lsn = durable
            self._writer.vouch()
        finally:
            self._leader = 0

    def _idle_seconds(self) -> float:
        return IDLE_SECONDS * NEVER_IDLES if self._never else IDLE_SECONDS

    def _until_idle(self) -> float:
        """Return the seconds until nobody has written for so long that a mark is due; 0 once it is."""
        return max(0.0, self._last_write + self._idle_seconds() - monotonic())

    def _schedule_idle(self) -> None:
        self._idle_job.schedule(self.options.sync_interval if self._periodic else self._idle_seconds())

    def _idle(self) -> None:
        """Sync, some time after a write, what is due, and once nobody writes any more leave a mark."""
        if self._closed or self.failed is not None:
            return
        try:
            if not self._never or not self._until_idle():
                self.sync()  # under `always` too: unsynced tickets
            if left := self._until_idle():
                self._idle_job.schedule(self.options.sync_interval if self._periodic else left)
            else:
                self._mark()
                if self._syncer.durable_lsn < self._writer.tail.lsn:
                    self._schedule_idle()  # it was written during the sync: no other write may follow
        except AnabranchError as error:
            log.debug("%s: no mark: %s", self.name, error)
