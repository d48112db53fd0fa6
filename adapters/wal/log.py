"""The log's writing end: what callers hand in is put in order, gathered, written and synced as the policy says, with
marks that vouch for what is on disk (rules G1 to G5, J2 to J4).

    submit      the caller's ticket becomes a batch behind the last one: planned, encoded, and queued (`appending`)
    wait        until it is written, or on disk: one thread writes and syncs what many have queued
    deliver     whoever comes back first tells the owner of all that counts by then, in order

The batches that are not delivered yet are a chain: `_delivered`, the last that was, and by `next` those behind it. A
batch is in the log from the moment it is linked, in one step. `_accepted` is the last that the owner plans behind: who
is struck by KeyboardInterrupt just after the link leaves the next caller to accept it. Any other step may be done
again, too.
"""

from __future__ import annotations

import copy
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import get_ident
from time import monotonic
from typing import Any, Final, cast

from ...policies.config.durability import Sync
from ...policies.errors import (
    AnabranchError,
    ClosedError,
    CorruptionError,
    OutcomeUnknownError,
    StoreFailedError,
)
from ..system import locking
from ..system.acceleration import inner_loop
from ..system.background import CoalescedJob, shared
from ..system.conditions import RLock
from ..system.durations import Durations
from ..system.files import FULL, is_out_of_files, refused
from ..system.locking import gone_directory
from . import format as f
from .appending import Appender
from .files.segment_files import SegmentFiles
from .segment import Segment, SegmentTable
from .segment_writer import SegmentWriter
from .syncing import Syncer
from .ticket import GROWS, SHRINKS, Encoder, LogOptions, Tail, Ticket, WriteBatch

log: logging.Logger = logging.getLogger(__name__)

BATCH_BYTES: Final = f.BATCH_HEADER.size
QUEUED_MAX: Final = 64 << 20
"""Bytes; who would queue more waits for those before (invariant 10)."""
_NOWHERE: Final = Tail(cast(Segment, None), 0, 0, 0)
OBJECT_BYTES: Final = 1024
"""Bytes that a batch takes in memory beside its own."""
BACKLOG_PAUSE: Final = 0.001
"""Seconds between two looks whether the backlog is gone."""
IDLE_SECONDS: Final = 0.1
"""After so long without a write a synced mark is written, so that the last batch has a watermark behind it (J4)."""
NEVER_IDLES: Final = 10
"""Under `never` after so many times as long: who writes now and then has three syncs a second at most."""


class Log:
    """A log that is open for writing. Threads: all of them. A forked child may only let go of it.

    `_planning` guards what is linked, the writer, and making room; `_delivering` guards `_delivered`. Neither is held
    while somebody waits for the disk, but to make room.
    """

    # The compiled loops find these at their places.
    __slots__ = (
        "__dict__", "__weakref__", "_accepted", "_always", "_appender", "_backlog", "_closed", "_delivered",
        "_delivering", "_done", "_encoder", "_ended", "_generation", "_idle_job", "_last_write", "_left", "_periodic",
        "_planning", "_queued", "_sync_number", "_syncer", "_writer", "failed",
    )  # fmt: skip

    def __init__(self, name: str, log_id: bytes, files: SegmentFiles, options: LogOptions, encoder: Encoder) -> None:
        """`name` is what errors call it, such as "store 'a'"."""
        self.name = name
        self.log_id = log_id
        self.files = files
        self.options = options
        self.failed: BaseException | None = None
        """Why it has stopped for good, if it has (invariant 7)."""
        self._encoder = encoder
        self._appender = Appender()
        self._syncer = Syncer(self._appender)
        self._writer = SegmentWriter(name, log_id, files, options, encoder, self._appender, self._syncer, self._drain)
        self._planning = RLock()
        self._delivering = RLock()
        self._accepted = self._delivered = WriteBatch(_NOWHERE, _NOWHERE, None, b"")  # until `start`
        self._delivered.delivered = True
        self._queued = self._done = 0
        """Bytes of the batches that were linked, and that were delivered."""
        self._backlog: deque[Ticket] = deque()
        """Tickets whose callers wait for nothing, and that found no room ready, with those that came behind them: a
        background thread, which no signal strikes, makes the room and plans them."""
        self._left = 0
        """Bytes of the backlog, about."""
        self._sync_number = 0
        """All up to this batch is to be on disk before what is linked next is delivered."""
        self._always = options.sync is Sync.ALWAYS
        self._periodic = options.sync is Sync.PERIODIC
        self._never = options.sync is Sync.NEVER
        self._attending = False
        """A background thread is about to wait for what is queued."""
        self._unattended = False
        """Something is queued for which nobody may wait."""
        self._marked = 0
        """The number of the last mark."""
        self._last_write = 0.0
        self._idle_job = CoalescedJob(self._idle)
        self._closed = True
        """True if no more tickets are taken."""
        self._ended = True
        """Nor is anything linked. Set while nobody plans."""
        self._generation = locking.generation
        self.releases = 0
        """How often segments were released since it was made."""
        self.relief: Callable[[], object] = lambda: None
        """Releases segments, if it can. Called by a thread whose ticket waits for room."""
        self._relief = threading.Lock()  # one at a time; the others wait for it
        self.releasing = 0
        """The thread that releases segments, if one does: it does not wait for room to be made."""
        self._out_of_room = False
        """Tickets wait for room to be made."""
        self._out_of_room_at = 0
        self._hopeless = False
        """Nothing could be released for those that wait."""
        self._hopeless_lsn = -1
        """The end of the log when that was last so: nothing can have died until it is another. -1: what makes the log
        hold more has found room since."""

    # Opening and closing

    def start(self, table: SegmentTable, tail: Tail, last_number: int) -> None:
        """Take over from recovery: all up to `tail` is on disk. `last_number` is the highest segment number ever seen
        (rule I1)."""
        self._begin(tail)
        self._writer.start(table, tail, last_number)
        self._generation = locking.generation
        self._closed = self._ended = False

    def resume(self) -> None:
        """Go on, after an orderly end, in the last segment."""
        self._writer.vouch()

    def begin_segment(self, base_lsn: int) -> None:
        """Go on, after a crash, in a fresh segment, with LSNs never seen before (rules I1, J5). Raises OSError."""
        self._writer.begin(base_lsn)
        self._begin(self._writer.tail)

    def _begin(self, tail: Tail) -> None:
        """Begin the chain of batches behind `tail`."""
        self._accepted = self._delivered = first = WriteBatch(tail, tail, None, b"")
        first.delivered = True
        self._appender.restart(first)

    def refuse_more(self) -> None:
        """Take no more tickets; those queued are still written."""
        self._closed = True

    def close(self) -> None:
        """Write what is queued, sync it, leave a mark. Does nothing to the files of a failed log."""
        self._closed = True
        if self.forked:
            return
        self._require_no_reentry()
        while not self._ended:
            self._wait_for_backlog()
            with self._planning:
                # What is linked by now is written; a ticket that is refused from here on has taken no effect (rule G7).
                self._ended = not self._backlog
        self._finish()
        self._writer.stop_preparing()
        if self.failed is None:
            self.sync()
            self._mark()

    def let_go(self) -> None:
        """Wait, after close, until nothing of ours makes files any more, since the directory may soon be another's."""
        self._closed = True
        if not self.forked:
            self._appender.segment(-1, 0)
        self._writer.let_go()
        self._syncer.let_go()

    def fail(self, cause: BaseException) -> None:
        """Stop for good (invariant 7). All that wait get their error. A directory that was deleted is told as that."""
        if self.failed is None:
            gone = gone_directory(self.files.directory / "*", self.name) if isinstance(cause, FileNotFoundError) else ""
            self.failed = StoreFailedError(gone) if gone else cause
            log.error("%s has failed: %s", self.name, self.failed)
            self._appender.stop()  # from here on it is certain what may have been written
            self._writer.stop_preparing()
            self._encoder.stopped()
            shared().schedule(0, self._finish)

    # Whether it can be used

    @property
    def forked(self) -> bool:
        """Return whether this is a forked child of the process that opened the log."""
        return self._generation != locking.generation

    def ensure_usable(self) -> None:
        """Raise if closed, forked or failed."""
        if self._closed:
            raise ClosedError(f"{self.name} is closed; open it again")
        if self.forked:
            raise ClosedError(f"{self.name} was opened by the parent process; open it anew in a forked child")
        if self.failed is not None:
            raise self._failure()

    def _refusal(self) -> AnabranchError:
        return self._failure() if self.failed is not None else ClosedError(f"{self.name} is closed")

    def _failure(self) -> StoreFailedError:
        error = StoreFailedError(f"{self.name} has stopped after an error: {self.failed}; close it and open it again")
        error.__cause__ = self.failed
        return error

    def _require_no_reentry(self) -> None:
        """Raise instead of deadlocking (rule G3)."""
        owned = self._planning._is_owned() or self._delivering._is_owned()  # type: ignore[attr-defined]
        if owned or self._syncer.is_syncing:
            raise RuntimeError(
                f"{self.name} was called from a signal handler that interrupted its own write; "
                "do it after the handler, or in another thread"
            )

    # The contents of the log

    @property
    def table(self) -> SegmentTable:
        """Return the segments, oldest first."""
        return self._writer.table

    @property
    def tail(self) -> Tail:
        """Return where the next batch goes."""
        return self._writer.tail

    def written(self) -> Tail:
        """Return the end of the log, with all before it handed to the operating system."""
        tail, number = self._writer.tail, self._last.number
        try:
            self._appender.settle(number, 0)
        except OSError as error:
            self._lose(error)
        return tail

    @contextmanager
    def still(self) -> Iterator[tuple[SegmentTable, Tail]]:
        """Queue nothing while the block runs: whoever would waits. Gives the segments, and the end of what is queued,
        which need not be written. Raises StoreFailedError, ClosedError."""
        self.ensure_usable()
        self._require_no_reentry()
        with self._planning:
            self._accept()
            yield self._writer.table, self._writer.tail

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
    def batches(self) -> int:
        """Return how many batches were queued since it was made."""
        return self._accepted.number

    @property
    def syncs(self) -> int:
        """Return how often the log has waited for the disk since it was made."""
        return self._syncer.count + self._appender.syncs

    @property
    def sync_seconds(self) -> float:
        """Return how long it waits for the disk each time, lately."""
        return self._appender.sync_seconds

    @property
    def sync_durations(self) -> Durations:
        """Return how long it has waited for the disk, each time that somebody waited for it."""
        return self._appender.sync_durations + self._syncer.durations

    def count_sync(self) -> None:
        """Count that somebody has waited for the disk on the log's behalf."""
        self._syncer.count += 1

    def add_copies(self, copies: Segment) -> None:
        """Add a file of copies: its records may be found from now on."""
        self._writer.add_copies(copies)

    def forget_segments(self, numbers: set[int]) -> None:
        """Take released segments out of the table."""
        self._writer.forget(numbers)

    @property
    def _last(self) -> WriteBatch:
        """Return the last batch in the log. Who sees what the owner made of it makes it durable with `sync`, though it
        may not be accepted altogether."""
        return self._accepted.next or self._accepted

    # Submitting

    def submit(self, ticket: Ticket) -> Ticket:
        """Queue it, and return it, once there is room for it; one with a future, at once. It will be written in the
        order of submission, also if the log is closed by then; where it raises, it was not queued. One for which there
        is no room is done."""
        try:
            if not self.submit_plain(ticket):
                self._submit(ticket)
        except BaseException as error:
            if not isinstance(error, Exception):
                shared().schedule(0, self._finish)  # it may be in the log, and nobody waits for it
            raise
        return ticket

    @inner_loop
    def submit_plain(self, ticket: Ticket) -> bool:
        """Do `submit` if there is room for the ticket, and nothing else to see to. False: nothing was done."""
        return False

    def _submit(self, ticket: Ticket) -> None:
        """Do `submit` where there may be more to see to."""
        if self._closed or self.failed is not None or self._generation != locking.generation:
            self.ensure_usable()
        planning = self._planning
        if planning._is_owned() or self._delivering._is_owned() or self._syncer.sealed:  # type: ignore[attr-defined]
            self._require_no_reentry()
        if self._queued - self._done + self._left > QUEUED_MAX:
            self._wait_for_backlog()
            self._finish()
        while True:
            with planning:
                if ticket.future is not None:
                    self._plan_or_leave(ticket)
                    return
                is_next = not self._backlog or self.releasing == get_ident()
                if is_next and self._plan(ticket):
                    return
            if is_next:
                self._relieve()
            else:
                self._wait_for_backlog()

    def _plan_or_leave(self, ticket: Ticket) -> None:
        """Plan a ticket with a future, or leave it to a background thread where that may take long."""
        if self._ended or self.failed is not None:
            raise self._refusal()
        if self._backlog or self._lacks_room(ticket) or not self._plan(ticket):
            self._left += ticket.size + OBJECT_BYTES  # first: too many, if struck now
            self._backlog.append(ticket)
        self._unattended = True

    def _wait_for_backlog(self) -> None:
        """Wait until the backlog is planned. Who releases segments does not: the backlog may wait for that."""
        while self._backlog and self.releasing != get_ident():
            self._unattended = True
            self.proceed()
            time.sleep(BACKLOG_PAUSE)

    def _plan_backlog(self) -> None:
        """Plan the backlog. In a thread that no signal strikes."""
        while self._backlog:
            with self._planning:
                try:
                    planned = self._plan(self._backlog[0])
                except AnabranchError as error:
                    self._backlog[0].finish(error)
                    planned = True
                if planned:
                    self._left -= self._backlog.popleft().size + OBJECT_BYTES
            if not planned:
                self._relieve()

    def submit_all(self, tickets: Sequence[Ticket]) -> None:
        """Queue them in this order. Where it raises, none was queued; an error that comes later is the ticket's."""
        for position, ticket in enumerate(tickets):
            try:
                self.submit(ticket)
            except AnabranchError as error:
                if not position:
                    raise
                ticket.finish(error)

    def _plan(self, ticket: Ticket) -> bool:
        """Link the ticket's batch, with `_planning` held, or finish the ticket with an error. False: try again once
        segments were released."""
        if self._accepted.next is not None:
            self._accept()
        if self._ended or self.failed is not None:
            raise self._refusal()
        encoder, writer = self._encoder, self._writer
        promised = encoder.promised + ticket.promise
        if self._lacks_room(ticket) and not self._make_room(ticket, BATCH_BYTES + ticket.size, promised):
            return ticket.done
        tail = writer.tail
        try:
            batch = encoder.encode(tail, ticket, self._syncer.durable_lsn)
            if batch.tail.offset > tail.segment.allocated:
                # It declares what earlier tickets were to declare, and is larger than its size had said.
                if not self._make_room(ticket, batch.tail.offset - tail.offset, promised):
                    return ticket.done
                batch = encoder.encode(writer.tail, ticket, self._syncer.durable_lsn)
        except Exception as error:  # our bug; it is for this caller, not for all who come after
            ticket.finish(error)
            return True
        ticket.batch = batch
        self._link(batch)
        return True

    def _lacks_room(self, ticket: Ticket) -> bool:
        """Return whether room has to be made for a ticket, which may take long."""
        writer = self._writer
        return (
            writer.must_roll
            or writer.tail.offset + BATCH_BYTES + ticket.size > writer.limit
            or self._encoder.promised + ticket.promise > writer.promised
        )

    def _link(self, batch: WriteBatch) -> None:
        """Queue a batch that follows all others, with `_planning` held. Raises StoreFailedError."""
        needs_sync = batch.sync or (self._always and not batch.unsynced)
        last = self._accepted
        batch.number = number = last.number + 1
        batch.filled = filled = number if batch.data else last.filled
        if needs_sync:
            self._sync_number = filled
        batch.sync_number = self._sync_number
        try:
            self._appender.put(batch.data, batch.tail.lsn, needs_sync, last, batch)
        except OSError as error:
            self.fail(error)
            raise self._failure() from error
        self._accept()

    def _accept(self) -> None:
        """Build on what is linked, with `_planning` held. May be done again."""
        writer = self._writer
        while (batch := self._accepted.next) is not None:
            writer.tail = batch.tail
            self._encoder.accept(batch)
            self._accepted = batch
            self._queued += len(batch.data) + OBJECT_BYTES
            if batch.data:
                self._last_write = now = monotonic()
                if self._syncer.dirty_since is None:
                    self._syncer.dirty_since = now
                if self._idle_job.last.begun:  # asked for each write: Ctrl-C may have struck between the two
                    self._schedule_idle()
            if not writer.prepared_ahead and batch.tail.offset > batch.segment.capacity // 2:
                writer.look_ahead()

    def proceed(self) -> None:
        """See that what is queued is written without its caller, and delivered if nobody may wait for it."""
        self._appender.kick()
        if self._unattended and not self._attending:
            self._attending = True
            try:
                shared().lead(self._attend)
            except BaseException:  # else nobody would ever deliver what does not wait
                shared().lead(self._attend)
                raise

    def _attend(self) -> None:
        try:
            while self._unattended:
                self._unattended = False
                self._plan_backlog()
                self._finish()
        finally:
            self._attending = False
            if self._unattended:  # since it was looked at
                self.proceed()

    # Waiting

    def wait(self, ticket: Ticket) -> list[Any]:
        """Wait until the ticket is done; return its outcomes. Raises StoreFullError if nothing was written for want of
        room, OutcomeUnknownError if the log failed while it wrote, and what the encoder raised. An interruption leaves
        the outcome unknown (rule G3)."""
        batch = ticket.batch  # first: it has none once it is done
        if not ticket.done:
            try:
                assert batch is not None
                self._settle(batch)
            except BaseException as interrupt:  # a signal handler may raise anything
                shared().schedule(0, self._finish)
                if isinstance(interrupt, KeyboardInterrupt):
                    what = f"{self.name}: it is not known whether the interrupted operation took effect"
                    interrupt.add_note(f"{what}; {self.options.advice}" if self.options.advice else what)
                raise
        if ticket.error is not None:
            error = copy.copy(ticket.error)  # others raise the same: each thread has its own traceback
            raise error from ticket.error.__cause__
        return ticket.outcomes

    def flush(self) -> None:
        """Wait until all that is queued now is written, and delivered. Raises StoreFailedError, ClosedError."""
        self.ensure_usable()
        self._require_no_reentry()
        self._wait_for_backlog()
        self._finish()
        if self.failed is not None:
            raise self._failure()

    def _finish(self) -> None:
        """Write and deliver all that is linked; whoever waits for it may have been interrupted."""
        self._require_no_reentry()
        with self._planning:
            self._accept()
            self._encoder.rest()
            last = self._accepted
        self._settle(last)

    @inner_loop
    def _settle(self, batch: WriteBatch) -> None:
        """Wait until a batch is written, or on disk, as the policy asks, and deliver all up to it. If the log fails
        their tickets are told."""
        if batch.delivered:
            return
        number, sync_number, syncer = batch.number, batch.sync_number, self._syncer
        try:
            if self._periodic and self._overdue():
                syncer.dirty_since = None
                self._make_durable(batch.filled)
            while not batch.delivered:
                if self.failed is not None:
                    self._lose(self.failed)
                    return
                if syncer.sealed:
                    syncer.sync_sealed(sync_number)
                self._appender.settle(number, sync_number)
                if not self._deliver():
                    with self._planning:
                        self._accept()
        except OSError as error:
            self._lose(error)

    @inner_loop
    def _deliver(self) -> bool:
        """Deliver, in order, what is as durable as the policy asks. False: one of them has to be accepted first."""
        appender, encoder, syncer = self._appender, self._encoder, self._syncer
        with self._delivering:
            while (batch := self._delivered.next) is not None:
                durable = (syncer if syncer.sealed else appender).durable
                if batch.number > appender.written or batch.sync_number > durable:
                    break
                if self._accepted is self._delivered:
                    return False
                encoder.deliver(batch)
                if batch.ticket is not None:
                    batch.ticket.finish(None)
                self._delivered, batch.delivered = batch, True
                self._done += len(batch.data) + OBJECT_BYTES
                batch.ticket, batch.data = None, b""  # a thread may hold on to it, as the chain does to the last one
        return True

    def _lose(self, error: BaseException) -> None:
        """Fail, since a write or a sync has failed, and tell the tickets: what became of those that may have been
        written is unknown."""
        self.fail(error)
        attempted, error = self._appender.attempted, self.failed or error
        what = f"{self.name} failed while it wrote: {error}. Whether this operation took effect shows once it is opened"
        advice = self.options.advice
        unknown = OutcomeUnknownError(f"{what} again; {advice}" if advice else f"{what} again")
        unknown.__cause__ = error
        with self._planning:
            self._accept()
            while self._backlog:
                self._left -= self._backlog[0].size + OBJECT_BYTES
                self._backlog.popleft().finish(self._failure())
        self._deliver()  # what was on disk before counts
        with self._delivering:
            while (batch := self._delivered.next) is not None:
                if batch.ticket is not None:
                    batch.ticket.finish(unknown if batch.number <= attempted else self._failure())
                self._delivered, batch.delivered = batch, True
                batch.ticket, batch.data = None, b""

    # Room: only with `_planning` held, but for `_relieve`

    def _make_room(self, ticket: Ticket | None, size: int, promised: int) -> bool:
        """See that a batch of this size fits into the segment and its space is allocated, with the reserve behind it
        that it has to leave. On a full disk, or where the process can open no file any more, the ticket gets
        StoreFullError before any byte of it is written (invariant 7): first one that makes the log hold more. False:
        it is done, or waits for segments to be released."""
        kind = SHRINKS if ticket is None else self._encoder.leaves(ticket)
        if kind == GROWS and self._hopeless_lsn >= 0 and self._may_be_relieved() and self._sealing_pays():
            self._wait_for_room()  # first: what is written here would keep the segment
            return False
        try:
            self._writer.make_room(size, promised, kind)
        except StoreFailedError as error:
            self._refuse(ticket, error)
            return False
        except (OSError, CorruptionError) as error:
            if (
                not isinstance(error, OSError) or error.errno not in FULL
                or self._writer.must_roll or self.failed is not None
            ):  # fmt: skip
                self.fail(error)
                self._refuse(ticket, self._failure())
                return False
            if self.releasing != get_ident() and ticket is not None and self._may_wait(kind, error):
                self._wait_for_room()
                return False
            self._hopeless = False
            what = f"{self.name} cannot grow: {error.strerror} ({self.files.directory})"
            full = refused(what, error, ". Nothing was written", self.options.room_advice)
            full.__cause__ = error.with_traceback(None)  # its frames would keep files open until they are collected
            self._refuse(ticket, full)
            return False
        self._hopeless = False
        if kind == GROWS:
            self._hopeless_lsn = -1
        elif self._hopeless_lsn >= 0:
            self._writer.limit = 0  # who makes it hold more comes here first
        return True

    def _refuse(self, ticket: Ticket | None, error: AnabranchError) -> None:
        if ticket is not None:
            ticket.finish(error)

    def _may_wait(self, kind: int, error: OSError) -> bool:
        return not self._hopeless if kind == SHRINKS else self._may_be_relieved(error)

    def _wait_for_room(self) -> None:
        self._out_of_room_at, self._out_of_room = self.releases, True

    def _may_be_relieved(self, error: OSError | None = None) -> bool:
        """Return whether a ticket that makes the log hold more should look if anything can be released. Once after each
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

    def _relieve(self) -> None:
        """Have segments released for those tickets that wait for room. If none is, the tickets get their error next."""
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
        with self._planning:
            try:
                self._accept()
                if self._ended or self.failed is not None or not self._sealing_pays():
                    return False
                self._writer.seal()
                return True
            except OSError as error:
                if self._writer.must_roll:
                    self.fail(error)
                log.debug("%s: no spare file could be begun: %s", self.name, error)
                return False

    def _drain(self) -> None:
        """Have all that is queued written, or synced if that is due: the writer is about to leave its segment. Raises
        StoreFailedError."""
        number, filled, syncer = self._accepted.number, self._accepted.filled, self._syncer
        try:
            if full := syncer.is_full:
                syncer.sync_sealed(filled)
            self._appender.settle(number, filled if full or self._always else 0)
        except OSError as error:
            self.fail(error)
            raise self._failure() from error

    # Syncing

    def _overdue(self) -> bool:
        """Return whether the interval of `periodic` is over: who comes then waits for the disk, and the loss stays
        bounded (rule G5)."""
        since = self._syncer.dirty_since
        return since is not None and monotonic() - since > self.options.sync_interval

    def sync(self) -> None:
        """Make all that has been queued durable. Raises StoreFailedError."""
        syncer = self._syncer
        self._require_no_reentry()
        if self.failed is not None:
            raise self._failure()
        syncer.dirty_since = None  # first: what is queued from now on is younger
        try:
            self._make_durable(self._last.filled)
        except OSError as error:
            self._lose(error)
            raise self._failure() from error

    def _make_durable(self, number: int) -> None:
        """Have all up to a batch on disk. Raises OSError."""
        syncer = self._syncer
        while number > syncer.durable:  # again: a segment may be sealed between the two
            syncer.sync_sealed(number)
            self._appender.settle(number, number)

    def _mark(self) -> None:
        """Write an empty batch, whose watermark vouches for all before it (rule J4)."""
        with self._planning:
            self._accept()
            number = self._accepted.filled
            if self.failed is not None or self._marked == number or self._syncer.durable < number:
                return
            if not self._make_room(None, BATCH_BYTES, 0):
                return
            mark = self._encoder.encode(self._writer.tail, None, self._syncer.durable_lsn)
            self._link(mark)
        self._settle(mark)
        if self.failed is None:
            with self._planning:
                self._marked = mark.number
            self._writer.vouch()  # whoever writes meanwhile does not wait for the disk

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
                if self._syncer.durable < self._accepted.filled:
                    self._schedule_idle()  # it was written during the sync: no other write may follow
        except AnabranchError as error:
            log.debug("%s: no mark: %s", self.name, error)
