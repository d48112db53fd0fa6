"""Group commit: many threads, one writer at a time, one sync for all that wait (rules J1 to J3 and G1 to G5).

A caller makes a Ticket and queues it. Whoever finds nobody leading takes the lead: writes a batch of what is queued
with one call, syncs if anyone in it must, and wakes the others. Nothing that matters lives in a leader's local
variables: the batch under way is `_flight`, the end of the log is `_tail`, and each moves by one assignment, so that
a leader may be struck by KeyboardInterrupt at any bytecode and the next one carries on.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from threading import get_ident
from time import monotonic
from typing import Final

from ...policies.config import JournalOptions
from ...policies.durability import Sync
from ...policies.errors import (
    AnabranchError,
    ClosedError,
    CorruptionError,
    OutcomeUnknownError,
    StoreFailedError,
    StoreFullError,
)
from ..background import shared
from ..descriptors import shares, unsynced_files
from ..duplicates import DuplicateWindow
from ..files import FULL, refused, write_all
from ..locking import fork_generation
from . import format as f
from .batch import Branch, Flight, Outcome, Subscribed, Tail, Ticket, encode
from .files import FILL_MAX, FILL_MIN, File, SegmentFiles, zero_fill
from .segment import Segment, SegmentTable

log = logging.getLogger(__name__)

HINT_WAIT: Final = 0.05
"""Seconds after which a waiter looks whether anybody leads: handing on is a hint, never a debt (rule G1)."""
IDLE_SECONDS: Final = 0.1
"""After so long without a write a synced mark is written, so that the last batch has a watermark behind it (J4)."""
QUEUE_MAX: Final = 50_000
"""Tickets; who would queue more leads first."""
UNSYNCED_FILES_MAX: Final = 32
"""Sealed segments that are not synced yet, under `periodic` and `never`; beyond it the next one waits for the disk."""


class Log:
    """The journal's writing end. Threads: all of them. A forked child may only let go of it.

    `_lead` guards all writing of the log's files and `_tail`, `_flight`, the heads of the queues; `_sync_lock` guards
    fdatasync and `durable_lsn`, so that of two syncs at once none misses the other's error (invariant 7).
    """

    def __init__(
        self,
        name: str,
        store_id: bytes,
        files: SegmentFiles,
        options: JournalOptions,
        window: DuplicateWindow,
        deliver: Callable[[Flight], None],
        stopped: Callable[[], None],
    ) -> None:
        """`deliver` takes each batch that counts, in order; `stopped` wakes whoever waits for one, after a failure."""
        self.name, self.store_id = name, store_id
        self.files, self.options, self.window = files, options, window
        self.table = SegmentTable(())
        self.prepared: dict[bytes, Branch] = {}
        """Branches that wait for their outcome, by transaction. The leader's."""
        self.subscribed: dict[Subscribed, int] = {}
        """The durable subscriptions that are there, and their numbers. The leader's."""
        self._promised = 0
        """Bytes that their outcomes take; after Ctrl-C it may say too much until nothing is prepared."""
        self.durable_lsn = 0
        self.snapshot_at = (0, 0)
        self.batch_bytes_max = min(options.batch_bytes_max, options.segment_size - f.HEADER_BYTES)
        self.failed: BaseException | None = None
        self.syncs = self.batches = 0
        self._deliver, self._stopped = deliver, stopped
        self._always = options.sync is Sync.ALWAYS
        self._periodic = options.sync is Sync.PERIODIC
        self._queue: deque[Ticket] = deque()
        self._lazy: deque[Ticket] = deque()
        """Tickets that need no sync go first, in batches of their own: they wait for no disk. What their callers did
        before is written already, since they had to wait for what these tickets settle."""
        self._lead = threading.Lock()
        self._leader = 0
        self._flight: Flight | None = None
        self._sync_lock = threading.Lock()
        self._unsynced: list[File] = []
        self._table_lock = threading.Lock()
        self._prepare_lock = threading.Lock()
        self._dirty_since: float | None = None
        self._marked_lsn = 0
        self._last_write = 0.0
        self._idle_due = self._lead_due = self._prepare_due = False
        self._closed = self._ended = True
        self._generation = fork_generation()
        self._last_number = 0
        self._must_roll = False

    # Opening and closing

    def start(self, table: SegmentTable, tail: Tail, durable_lsn: int, last_number: int) -> None:
        """Take over from recovery. `last_number` is the highest segment number ever seen (rule I1)."""
        self.table, self._tail = table, tail
        self.durable_lsn = self._marked_lsn = durable_lsn
        self._last_number = last_number
        self._generation = fork_generation()
        self._closed = self._ended = False

    def restore(self, branch: Branch) -> None:
        """At open: it waits for its outcome."""
        branch.promise = self.promise(branch)
        self.prepared[branch.transaction] = branch
        self._promised += branch.promise

    def promise(self, branch: Branch) -> int:
        """Bytes to keep free for its outcome, which takes at most so many. None where that needs a segment of its own:
        on a full disk such a one waits for room."""
        size = f.BATCH_HEADER.size + f.OUTCOME_BYTES + branch.size
        return size if size <= self.options.segment_size - f.HEADER_BYTES else 0

    @property
    def tail(self) -> Tail:
        return self._tail

    def ensure_usable(self) -> None:
        """Raise if closed, forked or failed."""
        if self._closed:
            raise ClosedError(f"store {self.name!r} is closed; open it again")
        if self.forked:
            raise ClosedError(f"store {self.name!r} was opened by the parent process; open it anew in a forked child")
        if self.failed is not None:
            raise self._failure()

    def _refusal(self) -> AnabranchError:
        return self._failure() if self.failed is not None else ClosedError(f"store {self.name!r} is closed")

    def _failure(self) -> StoreFailedError:
        error = StoreFailedError(
            f"store {self.name!r} has stopped after an error: {self.failed}; close it and open it again"
        )
        error.__cause__ = self.failed
        return error

    def fail(self, cause: BaseException) -> None:
        """Stop for good (invariant 7). All that wait get their error from whoever leads next."""
        if self.failed is None:
            self.failed = cause
            log.error("store %s has failed: %s", self.name, cause)
            self._stopped()
            shared().schedule(0, self._lead_queued)

    def refuse_more(self) -> None:
        """Take no more tickets; those queued are still written."""
        self._closed = True

    def close(self) -> None:
        """Write what is queued, sync it, leave a mark. Does nothing to the files of a failed store."""
        if self.forked:
            self._closed = True
            return
        self._lead_queued()
        self._closed = True
        while not self._ended:
            self._lead_queued()
            with self._lead:
                # In one piece with finding the queue empty: a ticket that is refused has taken no effect.
                self._ended = not self._queue and not self._lazy and self._flight is None
        if self.failed is None:
            self.sync()
            self._mark()

    def let_go(self) -> None:
        """After close: wait until nothing of ours makes files any more, since the directory may soon be another's."""
        self._closed = True
        with self._prepare_lock:
            pass
        for segment in self.table.segments:
            segment.close()
        unsynced_files.difference_update(self._unsynced)
        self._unsynced.clear()

    @property
    def forked(self) -> bool:
        return self._generation != fork_generation()

    @property
    def last_number(self) -> int:
        return self._last_number

    def forget_segments(self, numbers: set[int]) -> None:
        """Take released segments out of the table."""
        with self._table_lock:
            gone = [segment for segment in self.table.segments if segment.number in numbers]
            self.table = self.table.without(numbers)
        for segment in gone:
            segment.close()  # an open file keeps its space on the disk

    # Submitting

    def submit(self, ticket: Ticket) -> None:
        """Queue it. It will be written in the order of submission."""
        self._require_usable()
        (self._lazy if ticket.lazy else self._queue).append(ticket)

    def _require_usable(self) -> None:
        """Refuse before anything is queued, so that what is refused has taken no effect."""
        if self._closed or self.failed is not None or self._generation != fork_generation():
            self.ensure_usable()
        self._refuse_reentry()
        if len(self._queue) >= QUEUE_MAX:
            self._lead_queued()

    def _refuse_reentry(self) -> None:
        """Raise instead of deadlocking (rule G3)."""
        if self._leader and self._leader == get_ident() and self._lead.locked():
            raise RuntimeError(
                f"store {self.name!r} was called from a signal handler that interrupted its own write; "
                "do it after the handler, or in another thread"
            )

    def submit_all(self, tickets: list[Ticket]) -> None:
        """Queue them, next to each other: all, or none if this raises."""
        self._require_usable()
        self._queue.extend(tickets)

    def submit_nowait(self, ticket: Ticket) -> None:
        """Queue it for a background thread, or whoever comes first, to write (rule G4)."""
        self.submit(ticket)
        self.proceed()

    def proceed(self) -> None:
        """See that what is queued is written without its caller."""
        if not self._lead_due:
            self._lead_due = True
            shared().lead(self._lead_queued)

    def flush(self) -> None:
        """Until all that is queued now is written, or refused on a full disk. Raises StoreFailedError, ClosedError."""
        ticket = Ticket([], 0, sync=False)
        self.submit(ticket)
        with contextlib.suppress(StoreFullError):  # it takes no room itself; it shared a batch with what did
            self.wait(ticket)

    def wait(self, ticket: Ticket) -> list[Outcome]:
        """Lead or follow until the ticket is done. An interruption leaves its outcome unknown (rule G3)."""
        lead = self._lead
        try:
            while not ticket.done:
                if lead.locked():
                    self._follow(ticket)
                    continue
                with lead:
                    self._lead_once()
                if self._queue or self._lazy:
                    self._hand_on()
        except KeyboardInterrupt as interrupt:
            shared().schedule(0, self._lead_queued)  # others may wait for what this thread was about to write
            interrupt.add_note(
                f"store {self.name!r}: it is not known whether the interrupted operation took effect; "
                "a send can be retried with the same message_id"
            )
            raise
        if ticket.error is not None:
            error = copy.copy(ticket.error)  # others raise the same: each thread has its own traceback
            raise error from ticket.error.__cause__
        return ticket.outcomes

    def _follow(self, ticket: Ticket) -> None:
        """Wait until the ticket is done, or until it may be time to lead."""
        waiter = ticket.waiter
        if waiter is None:
            waiter = threading.Lock()
            waiter.acquire()
            ticket.waiter = waiter
        if not ticket.done:
            waiter.acquire(timeout=HINT_WAIT)

    def _hand_on(self) -> None:
        try:
            (self._lazy or self._queue)[0].hint()
        except IndexError:
            pass  # nobody waits

    def _lead_queued(self) -> None:
        """Write until the queue is empty."""
        self._lead_due = False
        self._refuse_reentry()
        while self._queue or self._lazy or self._flight is not None:
            with self._lead:
                self._lead_once()

    # Leading: only with _lead held

    def _lead_once(self) -> None:
        """Finish what an interrupted leader left, then write one batch."""
        try:
            self._leader = get_ident()
            if self._flight is not None:
                self._finish(self._flight)
            tickets, size = self._take()
            if not tickets:
                return
            if self._ended or self.failed is not None:
                self._dismiss(tickets, self._refusal())
                return
            tail, owed = self._tail, 0
            if self._promised or len(tickets) > 1 or tickets[0].promise:
                owed = self._owed(tickets)
            if self._must_roll or tail.offset + size + owed > tail.segment.allocated:
                if not self._make_room(tickets, size, owed):
                    return
                tail = self._tail
            try:
                flight = encode(tail, tickets, self.window, self.durable_lsn, self.prepared, self.subscribed)
            except Exception as error:  # our bug; it is for these callers, not for all who come after them
                self._dismiss(tickets, error)
                return
            if flight.tail.offset > tail.segment.allocated:
                # A removal queued before it made a destination need its name again, which the sender had not counted.
                if not self._make_room(tickets, flight.tail.offset - tail.offset):
                    return
                flight = encode(self._tail, tickets, self.window, self.durable_lsn, self.prepared, self.subscribed)
            self._flight = flight
            self._finish(flight)
        finally:
            self._leader = 0

    def _take(self) -> tuple[list[Ticket], int]:
        """The tickets of the next batch, which stay at the head of the queue until they are done."""
        self._drop_done()
        queue = self._lazy or self._queue
        size, waiting = f.BATCH_HEADER.size, len(queue)
        if waiting == 1:
            ticket = queue[0]
            return [ticket], size + ticket.size
        tickets: list[Ticket] = []
        for position in range(waiting):
            ticket = queue[position]
            if tickets and size + ticket.size > self.batch_bytes_max:
                break
            tickets.append(ticket)
            size += ticket.size
        return tickets, size

    def _drop_done(self) -> None:
        for queue in (self._lazy, self._queue):
            while queue and queue[0].done:
                queue.popleft()

    def _dismiss(self, tickets: list[Ticket], error: BaseException) -> None:
        for ticket in tickets:
            ticket.finish(error)

    def _owed(self, tickets: list[Ticket]) -> int:
        """Bytes to keep free behind this batch for the outcomes of all that is prepared, and is in it (rule J10). The
        outcomes themselves may use them."""
        if all(ticket.lazy or ticket.frees for ticket in tickets):
            return 0
        return self._promised + sum(ticket.promise for ticket in tickets)

    def _make_room(self, tickets: list[Ticket], size: int, owed: int = 0) -> bool:
        """See that the batch fits into the segment and its space is allocated, with `owed` bytes behind it here or in
        the pool; on a full disk, or where the process can open no file any more, the tickets get StoreFullError before
        any byte of the batch is written (invariant 7).
        """
        try:
            self._grow(size, owed)
        except StoreFailedError as error:
            self._dismiss(tickets, error)
            return False
        except OSError as error:
            if error.errno not in FULL or self._must_roll or self.failed is not None:
                self.fail(error)
                self._dismiss(tickets, self._failure())
                return False
            what = f"store {self.name!r} cannot grow: {error.strerror} ({self.files.directory})"
            full = refused(what, error, ". Nothing was written")
            full.__cause__ = error
            self._dismiss(tickets, full)
            return False
        return True

    def _grow(self, size: int, owed: int) -> None:
        """Find room for a batch of `size` bytes, and for `owed` behind it. Raises OSError."""
        try:
            self._find_room(size, owed)
        except OSError as error:
            if error.errno not in FULL or self._must_roll:
                raise
            with self._prepare_lock:
                pass  # a file that was being prepared ahead had the last of the disk: it is in the pool, or gone
            self._find_room(size, owed)

    def _find_room(self, size: int, owed: int) -> None:
        if self._must_roll or self._tail.offset + size > self._tail.segment.capacity:
            self._roll(size)
        self._allocate(self._tail.segment, self._tail.offset + size)
        if owed:
            self._keep_free(self._tail.offset + size, owed)

    def _keep_free(self, end: int, owed: int) -> None:
        """So many bytes of allocated space behind `end`, or in files of the pool: as many as it takes if outcomes fill
        each to more than a half only."""
        segment, file_bytes = self._tail.segment, self.options.segment_size - f.HEADER_BYTES
        if end + owed <= segment.capacity:
            self._allocate(segment, end + owed)
            return
        files = -(-2 * owed // file_bytes)
        with self._prepare_lock:
            while len(self.files.pool) < files:
                self.files.prepare()

    def _allocate(self, segment: Segment, end: int) -> None:
        """Zero-fill ahead of the appends, in chunks that grow (rule D5)."""
        if end <= segment.allocated or segment.file is None:
            return
        if segment.allocated < self._tail.offset:
            reason = f"the file ends before its records do, at {self._tail.offset}: zeros would overwrite some"
            self.fail(CorruptionError(str(segment.path), segment.allocated, reason))
            raise self._failure()
        chunk = min(max(segment.allocated, FILL_MIN), FILL_MAX)
        target = min(segment.capacity, max(end, segment.allocated + chunk))
        try:
            zero_fill(segment.file.fd, segment.allocated, target)
        except OSError as error:
            target = min(target, os.fstat(segment.file.fd).st_size)  # the disk had room for less than a chunk
            if error.errno not in FULL or target < end:
                raise
        segment.allocated = target

    def begin_segment(self, base_lsn: int) -> None:
        """After a crash: go on in a fresh segment, with LSNs never seen before (rules I1, J5)."""
        self._roll(0, base_lsn)

    def _roll(self, size: int, base_lsn: int | None = None) -> None:
        """Go on in a new segment, whose header says where the old one ended (rule J1).

        From just before the new header may be seen, the old segment takes no more: the header voids what would follow.
        """
        tail, standard = self._tail, self.options.segment_size
        if base_lsn is None:
            base_lsn = tail.lsn + 1
        if len(self._unsynced) >= UNSYNCED_FILES_MAX or len(unsynced_files) >= shares().unsynced:
            self._sync_through(tail)
        self._last_number += 1
        header = f.SegmentHeader(
            store_id=self.store_id, number=self._last_number, nonce=int.from_bytes(os.urandom(8), "little"),
            base_lsn=base_lsn, durable_lsn=self.durable_lsn, prev_number=tail.segment.number,
            prev_end=tail.offset, prev_lsn=tail.lsn, last_seq=tail.seq, snapshot_number=self.snapshot_at[0],
            snapshot_offset=self.snapshot_at[1], capacity=max(standard, f.HEADER_BYTES + size),
        )  # fmt: skip
        file, allocated = self.files.publish(header, self._seal)
        segment = Segment(header, self.files.path(header.number), file)
        segment.allocated = allocated
        old = tail.segment
        if old.file is not None and self.durable_lsn < tail.lsn:
            self._unsynced.append(old.file)
            unsynced_files.add(old.file)
        old.file = None  # whoever reads it opens it again, and is counted
        old.end, old.last_lsn = tail.offset, tail.lsn
        old.changed = True
        # An interrupted roll may have left a void segment of the same base.
        with self._table_lock:
            kept = (s for s in self.table.segments if s is old or s.base_lsn != header.base_lsn)
            self.table = SegmentTable((*kept, segment))
        self._tail = Tail(segment, f.HEADER_BYTES, base_lsn - 1, tail.seq)
        self._must_roll = self._prepare_due = False

    def _seal(self) -> None:
        self._must_roll = True

    def _finish(self, flight: Flight) -> None:
        """Write the flight, sync it if need be, make it count. Every step may be done twice."""
        try:
            if self.failed is not None:
                raise self._failure()
            if flight.data:
                self.batches += 1
                write_all(flight.segment.open().fd, flight.data, flight.offset)
                self._last_write = monotonic()
                if self._dirty_since is None:
                    self._dirty_since = self._last_write
                    if not self._idle_due:
                        self._schedule_idle()
            if flight.sync or (self._always and not flight.lazy) or (self._periodic and self._overdue()):
                self._sync_through(flight.tail)
        except (OSError, StoreFailedError) as error:
            self._lose(flight, error)
            return
        self._tail = flight.tail  # first: who sees that a branch is prepared no more makes that durable with `sync`
        if (
            flight.declared or flight.gone or flight.ids or flight.snapshot or flight.prepared or flight.settled
            or flight.subscribed
        ):  # fmt: skip
            self._note(flight)
        if flight.data:
            self._deliver(flight)
        for ticket in flight.tickets:
            ticket.finish(None)
        self._drop_done()
        self._flight = None
        flight.data, flight.tickets = b"", []  # the index needs only the entries
        if not self._prepare_due and flight.tail.offset > flight.segment.capacity // 2:
            self._schedule_prepare()

    def _lose(self, flight: Flight, error: Exception) -> None:
        """The write or the sync failed: the store has failed, and what the flight became is unknown."""
        self.fail(error)
        unknown = OutcomeUnknownError(
            f"store {self.name!r} failed while it wrote: {error}. Whether this operation took effect shows once "
            "the store is opened again; retry a send with the same message_id"
        )
        unknown.__cause__ = error
        self._dismiss(flight.tickets, unknown)
        self._flight = None

    def _note(self, flight: Flight) -> None:
        """What the leader remembers of a batch that is written."""
        for state in flight.gone or ():
            state.declared = False
            self.window.forget(state.id)
        for state in flight.declared or ():
            state.declared = True
        if flight.ids:
            self.window.add(flight.ids)
        if flight.snapshot is not None:
            self.snapshot_at = flight.snapshot
        for key, number in (flight.subscribed or {}).items():
            if number:
                self.subscribed[key] = number
            else:
                self.subscribed.pop(key, None)
        for branch in flight.prepared or ():
            if branch.transaction not in self.prepared:
                self._promised += branch.promise
            self.prepared[branch.transaction] = branch
        for branch in flight.settled or ():
            if self.prepared.pop(branch.transaction, None) is not None:
                self._promised -= branch.promise
            branch.reservation = None
        if not self.prepared:
            self._promised = 0

    # Syncing

    def _overdue(self) -> bool:
        """Under `periodic`, who comes after the interval waits for the disk: the loss stays bounded (rule G5)."""
        return self._dirty_since is not None and monotonic() - self._dirty_since > self.options.sync_interval

    def _sync_through(self, tail: Tail) -> None:
        """Make all that was written up to `tail` durable. Never tried again after an error (invariant 7)."""
        with self._sync_lock:
            if self.failed is not None:
                raise self._failure()
            if self.durable_lsn >= tail.lsn and self._dirty_since is None:
                return
            current = tail.segment.file  # first: a segment being sealed is the one or among the others, never neither
            earlier = list(self._unsynced)
            try:
                for file in earlier if current is None or current in earlier else [*earlier, current]:
                    self.syncs += 1
                    os.fdatasync(file.fd)
            except OSError as error:
                self.fail(error)
                raise
            for file in earlier:
                self._unsynced.remove(file)  # in place: the leader may be adding one
                unsynced_files.discard(file)
            self.durable_lsn = max(self.durable_lsn, tail.lsn)
            self._dirty_since = None if self._tail.lsn <= tail.lsn else monotonic()

    def sync(self) -> None:
        """Make all that has been written durable. Raises StoreFailedError."""
        if self._tail.lsn > self.durable_lsn:
            try:
                self._sync_through(self._tail)
            except OSError as error:
                raise self._failure() from error

    def _mark(self) -> None:
        """An empty batch, whose watermark vouches for all before it (rule J4)."""
        with self._lead:
            try:
                self._leader = get_ident()
                if self._flight is not None:
                    self._finish(self._flight)
                if self.failed is not None or self._marked_lsn >= self._tail.lsn:
                    return
                if self.durable_lsn < self._tail.lsn or not self._make_room([], f.BATCH_HEADER.size):
                    return
                self._flight = flight = encode(self._tail, [], self.window, self.durable_lsn)
                self._finish(flight)
                self._marked_lsn = self.durable_lsn
            finally:
                self._leader = 0

    def _schedule_idle(self) -> None:
        if not self._idle_due:
            self._idle_due = True
            delay = self.options.sync_interval if self.options.sync is Sync.PERIODIC else IDLE_SECONDS
            shared().schedule(delay, self._idle)

    def _idle(self) -> None:
        """Some time after a write: sync what is due, and once nobody writes any more leave a mark."""
        self._idle_due = False
        if self._closed or self.failed is not None or self.options.sync is Sync.NEVER:
            return
        try:
            self.sync()  # under `always` too: lazy tickets
            if monotonic() - self._last_write < IDLE_SECONDS:
                self._schedule_idle()
            else:
                self._mark()
        except AnabranchError as error:
            log.debug("store %s: no mark: %s", self.name, error)

    # The file after this one

    def _schedule_prepare(self) -> None:
        if self.options.pool_files > 0 and not self.files.pool:
            self._prepare_due = True
            shared().schedule(0, self._prepare)

    def _prepare(self) -> None:
        try:
            with self._prepare_lock:
                if not self._closed and self.failed is None and not self.files.pool:
                    self.files.prepare()
        except OSError as error:  # one try a segment: on a full disk it would take the last space, again and again
            log.warning("store %s: no segment could be prepared ahead: %s", self.name, error)
