"""The writers, which make tickets into writes: one after the other on the thread of whoever comes (Direct), or many
together on a thread of the store's own (Threaded). A backend may bring a third way (Backend.writer): a journal's is its
log.

All of them keep the order of submission, and none loses a ticket whose caller is interrupted.
"""

from __future__ import annotations

import copy
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, Final, Protocol, TypeVar

from ....policies.errors import AnabranchError, ClosedError, OutcomeUnknownError, StoreFailedError
from ...system.conditions import Thread
from ..operations.plan import Plan
from ..operations.tickets import Ticket
from .host import Host, NotTakenError, Writes

log: logging.Logger = logging.getLogger(__name__)

T = TypeVar("T")

IDLE_SECONDS: Final = 5.0
"""A store's thread ends when it had nothing to do for so long; the next ticket starts another."""
PATIENCE: Final = 1.0
"""Seconds after which one who waits looks whether the thread is there."""
QUEUE_CHANGES_MAX: Final = 20_000
QUEUE_BYTES_MAX: Final = 64 << 20
"""Beyond either, who does not want to wait for its message does (invariant 10)."""
BATCH_BYTES_MAX: Final = 16 << 20
GATHER_SECONDS: Final = 0.0005
"""At most, where several callers shared the write before."""
PAUSE_FIRST: Final = 0.02
PAUSE_MAX: Final = 0.5
"""Seconds between two looks for the outcome of a write."""


class Writer(Protocol):
    """The methods that a store needs of each writer."""

    def submit(self, ticket: Ticket, /) -> object:
        """Queue it. Raises what Engine.ensure_usable raises, and RuntimeError in a signal handler (rule G3); then it is
        not queued."""

    def submit_all(self, tickets: Sequence[Ticket], /) -> object:
        """Queue them next to each other: all, or none if this raises."""

    def wait(self, ticket: Ticket, /) -> list[Any]:
        """Wait until a ticket is done. Returns the outcomes of its changes, or raises its error. An interruption leaves
        its outcome unknown (rule G3)."""

    def proceed(self) -> None:
        """See that what is queued is written without its caller."""

    def flush(self) -> None:
        """Wait until all that is queued now is written or refused."""

    def undisturbed(self, work: Callable[[], T]) -> T:
        """Return the result of `work`, done while nothing is written and all that was is applied."""

    def refuse_more(self) -> None:
        """Take nothing more (`Engine.closed` is set); what is queued is still written."""

    def close(self) -> None:
        """Write what is queued; refuse what comes later. Idempotent."""


class Queued:
    """A write that is queued: the half of a Pending that all have."""

    __slots__ = ("_writer",)

    def __init__(self, writer: Writer) -> None:
        self._writer = writer

    def proceed(self) -> None:
        """Go on with it in the background."""
        self._writer.proceed()


def raise_error(ticket: Ticket) -> list[Any]:
    """Return the outcomes of a ticket that is done, or raise its error."""
    if ticket.error is not None:
        error = copy.copy(ticket.error)  # others raise the same: each thread has its own traceback
        raise error from ticket.error.__cause__
    return ticket.outcomes


class Direct:
    """Whoever calls writes, under the store's lock. The rest of an interrupted write is finished by whoever comes
    next."""

    def __init__(self, host: Host, writes: Writes) -> None:
        self._host, self._writes = host, writes

    def submit(self, ticket: Ticket) -> None:
        host = self._host
        host.check()
        with host.lock:
            host.current(host.behind)
            plan = host.sequencer.plan((ticket,))
            if ticket.error is None and (plan.changes or plan.beside):
                try:
                    if plan.changes:
                        self._writes.write(plan)
                except AnabranchError as error:
                    ticket.finish(error)
                    return
                host.written = plan
                host.drain()
            else:
                ticket.finish(ticket.error)

    def submit_all(self, tickets: Sequence[Ticket]) -> None:
        for ticket in tickets:
            self.submit(ticket)

    def wait(self, ticket: Ticket) -> list[Any]:
        return raise_error(ticket)

    def proceed(self) -> None:
        """Do nothing: nothing is ever queued."""

    def flush(self) -> None:
        self._host.asked(lambda: None)

    def undisturbed(self, work: Callable[[], T]) -> T:
        return work()  # it holds the lock whenever it looks

    def refuse_more(self) -> None:
        """Do nothing: the writer asks the host."""

    def close(self) -> None:
        with self._host.lock:
            self._host.finish()


class Threaded:
    """A thread of the store's own writes what many ask for together.

    W1  Everything is written by one thread at a time, which holds `_lead`; it is no thread in which Ctrl-C may strike.
        Who is interrupted while waiting has its ticket written all the same.
    W2  A write of which nobody knows whether it took effect is the last before the backend has told (`_unknown`). What
        it did is then applied; or else what its callers, who have been told that nobody knows, held is free.
    W3  A backend that is away fails the calls, not the store: the next call tries again.
    """

    def __init__(self, host: Host, writes: Writes) -> None:
        self._host, self._writes = host, writes
        self._settings = writes.settings
        self._lead = threading.Lock()
        self._queue: deque[Ticket] = deque()
        self._count_lock = threading.RLock()  # guards what is queued; a signal handler may come back to it
        self._queued_changes = self._queued_bytes = 0
        self._signals: SimpleQueue[None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._idle = False
        self._last: Ticket | None = None
        """Nothing is written after it."""
        self._ended = False
        self._together = 1
        """How many tickets the last write had."""
        self._unknown: Plan | None = None
        """A write whose outcome is not known yet: nothing else is written before it is."""

    def submit(self, ticket: Ticket) -> None:
        self._host.check()
        self._host.settle()  # what a thread commits, and then does, is done in this order
        self._put([ticket])

    def submit_all(self, tickets: Sequence[Ticket]) -> None:
        self._host.check()
        self._host.settle()
        self._put(tickets)
        if tickets and (self._queued_changes > QUEUE_CHANGES_MAX or self._queued_bytes > QUEUE_BYTES_MAX):
            self._await(tickets[-1])

    def wait(self, ticket: Ticket) -> list[Any]:
        self._await(ticket)
        return raise_error(ticket)

    def proceed(self) -> None:
        """Do nothing: the thread goes on by itself."""

    def flush(self) -> None:
        ticket = Ticket([], 0)
        self.submit(ticket)
        self.wait(ticket)

    def refuse_more(self) -> None:
        """Do nothing: the writer asks the host."""

    def undisturbed(self, work: Callable[[], T]) -> T:
        self.flush()
        with self._lead:
            return work()

    def close(self) -> None:
        while not self._ended:
            self._last = last = Ticket([], 0)
            with suppress(ClosedError):  # another thread has closed it
                self._put([last])
                self._await(last)

    def _put(self, tickets: Sequence[Ticket]) -> None:
        with self._count_lock:
            self._queue.extend(tickets)
            self._queued_changes += sum(len(ticket.content) for ticket in tickets)
            self._queued_bytes += sum(ticket.size for ticket in tickets)
        self._nudge()
        if self._ended:
            self._require_written(tickets)

    def _require_written(self, tickets: Sequence[Ticket]) -> None:
        """Raise ClosedError for tickets that came after the end of a writer closed meanwhile (rule G7). Tickets queued
        before its end are written. The tickets' caller may not wait for them."""
        with self._lead:
            self._refuse_queued()
        if any(type(ticket.error) is ClosedError for ticket in tickets):
            raise ClosedError(f"store {self._host.name!r} is closed")

    def _await(self, ticket: Ticket) -> None:
        while not ticket.done:
            ticket.wait(PATIENCE)
            if not ticket.done:
                self._nudge()
                if self._ended:
                    with self._lead:
                        self._refuse_queued()

    def _nudge(self) -> None:
        """See that the thread is there and looks at the queue."""
        if self._idle:
            self._signals.put(None)
        if self._thread is None and not self._host.forked:
            with self._count_lock:
                if self._thread is None:
                    thread = Thread(_work, f"writer-{self._host.name}", (weakref.ref(self), self._signals))
                    thread.start()
                    self._thread = thread

    def _refuse_queued(self) -> None:
        while self._queue:
            try:
                ticket = self._pop()
            except IndexError:
                return
            ticket.finish(ClosedError(f"store {self._host.name!r} is closed"))

    # The thread

    def step(self) -> bool:
        """Write what is queued; False if there was nothing. Called by the thread alone."""
        with self._lead:
            tickets: list[Ticket] = []
            if self._ended:
                self._refuse_queued()
                return False
            self._fetch(tickets)
            if not tickets:
                return False
            self._gather(tickets)
            self._write_all(tickets)
            if self._last is not None and any(ticket is self._last for ticket in tickets):
                self._ended = True  # first: who queues from now on looks whether that was too late
                while self._queue:
                    rest: list[Ticket] = []
                    self._fetch(rest)
                    self._write_all(rest)
            return True

    def _write_all(self, tickets: list[Ticket]) -> None:
        try:
            self._write(tickets)
        except BaseException as error:  # a fault of ours, or of memory: who waits must hear of it
            log.exception("store %s: a write has failed", self._host.name)
            self._host.fail(error)
            _refuse(tickets, self._host.failure())

    def _fetch(self, tickets: list[Ticket]) -> None:
        """Add those from the queue that the same write has room for."""
        changes, size = sum(len(ticket.content) for ticket in tickets), sum(ticket.size for ticket in tickets)
        while self._queue:
            changes += len(self._queue[0].content)
            size += self._queue[0].size
            if tickets and (changes > self._settings.batch_changes_max or size > BATCH_BYTES_MAX):
                break
            tickets.append(self._pop())

    def _gather(self, tickets: list[Ticket]) -> None:
        """Let others come who want to be in the same write. Who was in the one before has just been woken, and will
        soon be back with the next."""
        if self._last is not None:
            return
        if self._settings.gather_seconds:
            time.sleep(self._settings.gather_seconds)
            self._fetch(tickets)
        elif len(tickets) < self._together:
            deadline = time.monotonic() + GATHER_SECONDS
            while len(tickets) < self._together and time.monotonic() < deadline:
                time.sleep(GATHER_SECONDS / 10)
                self._fetch(tickets)
        self._together = len(tickets)

    def _pop(self) -> Ticket:
        with self._count_lock:
            ticket = self._queue.popleft()
            self._queued_changes -= len(ticket.content)
            self._queued_bytes -= ticket.size
        return ticket

    def _write(self, tickets: Sequence[Ticket]) -> None:
        host = self._host
        if host.failed is None:
            try:
                self._settle_unknown()
            except AnabranchError as error:
                _refuse(tickets, error)
        if host.failed is not None:
            _refuse(tickets, host.failure())
        if any(ticket.done for ticket in tickets):
            return
        plan = host.sequencer.plan(tickets)
        refusal = self._write_plan(plan) if plan.changes else None
        if plan.beside and not plan.changes:
            self._done(plan)
        if refusal is not None and self._may_be_one(plan, refusal):
            for ticket in plan.tickets:
                self._write([ticket])
        elif refusal is not None:
            _refuse(plan.tickets, refusal)
        for ticket in tickets:
            if not ticket.done:
                ticket.finish(ticket.error)

    def _may_be_one(self, plan: Plan, error: AnabranchError) -> bool:
        """Return whether some of a plan's tickets may do without the others."""
        of_all = isinstance(error, StoreFailedError) and not isinstance(error, NotTakenError)
        return len(plan.tickets) > 1 and not of_all and self._host.failed is None

    def _write_plan(self, plan: Plan) -> AnabranchError | None:
        """Write a plan; return the error that its tickets are refused with, None if it is done. A write that was cut
        off and took no effect is tried again once."""
        for last in (False, True):
            try:
                self._writes.write(plan)
            except OutcomeUnknownError as error:
                took_effect = self._outcome(plan)
                if took_effect is None:
                    self._unknown = plan
                    return error
                if not took_effect and not last and self._host.failed is None:
                    continue
                if not took_effect:
                    return self._refusal(error.__cause__ if isinstance(error.__cause__, AnabranchError) else error)
            except AnabranchError as error:
                return self._refusal(error)
            self._done(plan)
            return None
        raise AssertionError

    def _refusal(self, error: AnabranchError) -> AnabranchError:
        return error if self._host.failed is None else self._host.failure()

    def _outcome(self, plan: Plan) -> bool | None:
        """Return whether a write took effect; None if that cannot be told in time."""
        host = self._host
        deadline = time.monotonic() + self._settings.outcome_timeout
        pause = PAUSE_FIRST
        while host.failed is None:
            try:
                return self._writes.took_effect(plan)
            except AnabranchError as error:
                if time.monotonic() + pause >= deadline or self._last is not None:
                    log.warning("store %s: the outcome of a write is not known yet: %s", host.name, error)
                    return None
            time.sleep(pause)
            pause = min(2 * pause, PAUSE_MAX)
        return None

    def _settle_unknown(self) -> None:
        """Ask what became of the write whose outcome is not known. Raises AnabranchError if that cannot be told now."""
        plan = self._unknown
        if plan is None:
            return
        if self._writes.took_effect(plan):
            self._done(plan)
        else:
            self._host.undo(plan)
        self._unknown = None

    def _done(self, plan: Plan) -> None:
        """Count and show a written plan in one step, so that nobody else has to apply it."""
        host = self._host
        host.batches += 1
        host.sequencer.accept(plan)
        with host.lock:
            host.take(plan)
            host.drain()


def _refuse(tickets: Iterable[Ticket], error: AnabranchError) -> None:
    for ticket in tickets:
        if not ticket.done:
            ticket.finish(error)


def _work(writer: weakref.ref[Threaded], signals: SimpleQueue[None]) -> None:
    """Run as the thread. It holds the writer only while it works, so that a store that nobody closed can go."""
    while (its := writer()) is not None:
        its._idle = False
        while its.step():
            pass
        its._idle = True
        if its._queue:
            continue
        del its
        try:
            signals.get(timeout=IDLE_SECONDS)
        except Empty:
            its = writer()
            if its is None:
                return
            # First it says that it is gone, then it looks once more: who queues does it the other way round.
            its._thread = None
            if not its._queue:
                return
            its._thread = threading.current_thread()
