"""Group commit: many threads, one writer at a time, one sync for all that wait (rules G1 to G5).

A caller makes a Ticket and queues it. Whoever finds nobody leading takes the lead: writes a batch of what is queued
with one call, syncs if anyone in it must, and wakes the others. Nothing that matters lives in a leader's local
variables, so that a leader may be struck by KeyboardInterrupt at any bytecode and the next one carries on.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from threading import get_ident
from typing import Any, Final

from ...policies.errors import AnabranchError, ClosedError, StoreFailedError, StoreFullError
from ..system import locking
from ..system.background import shared
from . import format as f
from .ticket import Ticket

log = logging.getLogger(__name__)

_BATCH_BYTES: Final = f.BATCH_HEADER.size
HINT_WAIT: Final = 0.05
"""Seconds after which a waiter looks whether anybody leads: handing on is a hint, never a debt (rule G1)."""
QUEUE_MAX: Final = 50_000
"""Tickets; who would queue more leads first."""
SLOW_SYNC_SECONDS: Final = 0.0005
GATHER_SHARE: Final = 0.25
"""The share of a slow sync's time for which a leader waits at most for all who may come."""
QUICK_SYNC_SECONDS: Final = 0.00005
GATHER_MIN: Final = 4
GATHER_MAX: Final = 8
"""Tickets for which a leader waits where a sync is neither slow nor quicker than this. It waits for them if they are so
many, at most for as long as the sync takes: the work for more keeps the interpreter busy during a sync. With fewer,
parking costs about as much as it saves."""


class GroupCommit(ABC):
    """The queue in front of a log, and who leads it. Threads: all of them. A forked child may only let go of it.

    `_lead` guards the heads of the queues, and all that `_lead_once` does.
    """

    def __init__(self, name: str, batch_bytes_max: int, advice: str) -> None:
        self.name = name
        self.batch_bytes_max = batch_bytes_max
        self.failed: BaseException | None = None
        """Why it has stopped for good, if it has (invariant 7)."""
        self._advice = advice
        self._queue: deque[Ticket] = deque()
        self._unsynced_queue: deque[Ticket] = deque()
        """Tickets that need no sync go first, in batches of their own: they wait for no disk. Earlier work of their
        callers is written already, since they had to wait for what these tickets settle."""
        self._lead = threading.Lock()
        self._leader = 0
        self._lead_due = False
        self._unattended = False
        """Something is queued for which nobody may wait."""
        self._expected = 0
        """How many tickets shared the last sync, or waited for it to end; 0 where syncs are quick. Their threads are
        likely to come again at once, just after a leader that did not wait for them has begun the next sync: then they
        would wait for two."""
        self._gathering: threading.Lock | None = None
        """The lock for which a leader waits: released once so many are queued."""
        self._gather_seconds = 0.0
        self._out_of_room = False
        """Tickets that make room wait at the head of the queue for some to be made first."""
        self._closed = True
        """True if no more tickets are taken."""
        self._ended = True
        """Nor is any written. Set with the lead, once nothing is queued."""
        self._generation = locking.generation

    @abstractmethod
    def _lead_once(self) -> None:
        """Finish what an interrupted leader left, then write one batch of what is queued. With `_lead` held."""

    @abstractmethod
    def _has_work(self) -> bool:
        """Return whether anything is queued, or written by halves."""

    @abstractmethod
    def _stop(self) -> None:
        """Do what follows once the log has just failed."""

    @abstractmethod
    def _relieve(self) -> None:
        """Make room, without the lead, for tickets that wait for it."""

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

    def fail(self, cause: BaseException) -> None:
        """Stop for good (invariant 7). All that wait get their error from whoever leads next."""
        if self.failed is None:
            self.failed = cause
            log.error("%s has failed: %s", self.name, cause)
            self._stop()
            shared().schedule(0, self._lead_queued)

    def refuse_more(self) -> None:
        """Take no more tickets; those queued are still written."""
        self._closed = True

    # Submitting

    def submit(self, ticket: Ticket) -> Ticket:
        """Queue it, and return it. It will be written in the order of submission, also if the log is closed by then;
        where it raises, it was not queued."""
        if self._leader or self._closed or self.failed is not None or len(self._queue) >= QUEUE_MAX:
            self._require_usable()
        elif self._generation != locking.generation:
            self.ensure_usable()
        (self._unsynced_queue if ticket.unsynced else self._queue).append(ticket)
        if self._closed:
            self._require_written((ticket,))
        if self._gathering is not None:
            self._look_whether_gathered()
        return ticket

    def _require_written(self, tickets: Sequence[Ticket]) -> None:
        """Raise ClosedError for tickets that came after the end of a log closed meanwhile (rule G7). Closing writes
        what is queued, and then ends it. The tickets' caller may not wait for them."""
        with self._lead:
            if self._ended:
                self._dismiss([ticket for ticket in tickets if not ticket.done], self._refusal())
                self._drop_done()
        if any(type(ticket.error) is ClosedError for ticket in tickets):
            raise self._refusal()

    def submit_first(self, ticket: Ticket) -> None:
        """Queue a ticket before all that are queued: those wait for what it does."""
        self.ensure_usable()
        self._refuse_reentry()
        with self._lead:
            if self._ended:
                raise self._refusal()
            self._unsynced_queue.appendleft(ticket)

    def _require_usable(self) -> None:
        """Refuse before anything is queued, so that what is refused has taken no effect."""
        self.ensure_usable()
        self._refuse_reentry()
        if len(self._queue) >= QUEUE_MAX:
            self._lead_queued()

    def _refuse_reentry(self) -> None:
        """Raise instead of deadlocking (rule G3)."""
        if self._leader and self._leader == get_ident() and self._lead.locked():
            raise RuntimeError(
                f"{self.name} was called from a signal handler that interrupted its own write; "
                "do it after the handler, or in another thread"
            )

    def submit_all(self, tickets: Sequence[Ticket]) -> None:
        """Queue them, next to each other: all, or none if this raises."""
        self._require_usable()
        self._queue.extend(tickets)
        if self._closed:
            self._require_written(tickets)
        if self._gathering is not None:
            self._look_whether_gathered()

    def proceed(self) -> None:
        """See that what is queued is written without its caller."""
        self._unattended = True  # first: whoever leads now looks for it afterwards
        if not self._lead.locked():
            self._attend()

    def _attend(self) -> None:
        if not self._lead_due:
            self._lead_due = True
            try:
                shared().lead(self._lead_queued)
            except BaseException:  # else nobody would ever lead what does not wait
                shared().lead(self._lead_queued)
                raise

    def flush(self) -> None:
        """Wait until all that is queued now is written, or refused on a full disk. Raises StoreFailedError,
        ClosedError."""
        ticket = Ticket((), 0, sync=False)
        self.submit(ticket)
        with contextlib.suppress(StoreFullError):  # it takes no room itself; it shared a batch with what did
            self.wait(ticket)

    # Waiting: lead or follow

    def wait(self, ticket: Ticket) -> list[Any]:
        """Wait until the ticket is done; return its outcomes. Raises StoreFullError if nothing was written for want of
        room, OutcomeUnknownError if the log failed while it wrote, and what the encoder raised. An interruption leaves
        the outcome unknown (rule G3)."""
        lead = self._lead
        try:
            while not ticket.done:
                if lead.locked():
                    ticket.attend()  # first: who lets go of the lead from now on wakes this thread
                    if lead.locked():
                        ticket.wait(HINT_WAIT)  # until it is done, or it may be time to lead
                    continue
                with lead:
                    self._lead_once()
                if self._queue or self._unsynced_queue:
                    self._hand_on()
        except BaseException as interrupt:  # a signal handler may raise anything
            shared().schedule(0, self._lead_queued)  # others may wait for what this thread was about to write
            if isinstance(interrupt, KeyboardInterrupt):
                what = f"{self.name}: it is not known whether the interrupted operation took effect"
                interrupt.add_note(f"{what}; {self._advice}" if self._advice else what)
            raise
        if ticket.error is not None:
            error = copy.copy(ticket.error)  # others raise the same: each thread has its own traceback
            raise error from ticket.error.__cause__
        return ticket.outcomes

    def _hand_on(self) -> None:
        if self._out_of_room:
            self._relieve()
        try:
            head = (self._unsynced_queue or self._queue)[0]
            if head.done:  # one that was refused alone stands at the head until somebody leads
                head = next(ticket for ticket in [*self._unsynced_queue, *self._queue] if not ticket.done)
        except (IndexError, StopIteration):
            return  # another thread leads
        if self._unattended and head.waiter is None:
            self._attend()
        else:
            head.wake()  # who leads next hands on in turn

    def _lead_queued(self) -> None:
        """Write until the queue is empty."""
        self._refuse_reentry()
        try:
            while self._lead_due or self._has_work():
                with self._lead:
                    # Not before: as long as this thread waits, no other need come.
                    self._lead_due = self._unattended = False
                    self._lead_once()
                if self._out_of_room:
                    self._relieve()
        except BaseException as error:
            if threading.current_thread() is threading.main_thread() or not isinstance(error, Exception):
                shared().schedule(0, self._lead_queued)  # as in `wait`
            else:
                self.fail(error)  # a fault of ours
            raise

    def _look_whether_gathered(self) -> None:
        """Let the leader go on that waits for more tickets, if there are enough, or one that should not wait."""
        gathering = self._gathering
        if gathering is not None and (len(self._queue) >= self._expected or self._unsynced_queue):
            try:
                gathering.release()
            except RuntimeError:
                pass  # another thread has

    # Only with _lead held

    def _gather(self) -> None:
        """Wait a little for those who shared the last sync, parked until they are there."""
        gathering = threading.Lock()
        gathering.acquire()
        try:
            self._gathering = gathering
            if len(self._queue) < self._expected and not self._unsynced_queue:
                gathering.acquire(timeout=self._gather_seconds)
        finally:
            self._gathering = None

    def _synced(self, seconds: float) -> None:
        """Note the end of a sync that took so long; its tickets are still queued."""
        queued = len(self._queue)
        if seconds > SLOW_SYNC_SECONDS:
            self._expected = queued if queued > 1 else 0
            self._gather_seconds = seconds * GATHER_SHARE
        else:
            self._expected = min(queued, GATHER_MAX) if queued >= GATHER_MIN and seconds > QUICK_SYNC_SECONDS else 0
            self._gather_seconds = seconds

    def _take(self) -> tuple[list[Ticket], int]:
        """Return the tickets of the next batch and its size, at most; they stay at the head of the queue until they are
        done."""
        queue = self._unsynced_queue or self._queue
        if queue and queue[0].done:
            self._drop_done()
            queue = self._unsynced_queue or self._queue
        size, waiting = _BATCH_BYTES, len(queue)
        if waiting == 1:
            ticket = queue[0]
            return [ticket], size + ticket.size
        tickets: list[Ticket] = []
        for position in range(waiting):
            ticket = queue[position]
            if ticket.done:
                continue  # refused alone, out of the midst of others
            if tickets and size + ticket.size > self.batch_bytes_max:
                break
            tickets.append(ticket)
            size += ticket.size
        return tickets, size

    def _drop_done(self) -> None:
        for queue in (self._unsynced_queue, self._queue):
            while queue and queue[0].done:
                queue.popleft()

    def _dismiss(self, tickets: Sequence[Ticket], error: BaseException) -> None:
        for ticket in tickets:
            ticket.finish(error)
