"""How tickets become writes: one after the other on the thread of whoever comes (Direct), or many together on a thread
of the store's own (Threaded). A journal has a third way, its log (adapters/wal).

All of them keep the order of submission, and none loses a ticket whose caller is interrupted.
"""

from __future__ import annotations

import copy
import logging
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from queue import Empty, SimpleQueue
from typing import Any, Final, Protocol

from ...policies.errors import AnabranchError, ClosedError, OutcomeUnknownError, StoreFailedError
from .engine import Engine
from .plan import Plan
from .tickets import Ticket

log = logging.getLogger(__name__)

IDLE_SECONDS: Final = 5.0
"""A store's thread ends when it had nothing to do for so long; the next ticket starts another."""
PATIENCE: Final = 1.0
"""Seconds after which one who waits looks whether the thread is there."""
QUEUE_CHANGES_MAX: Final = 20_000
QUEUE_BYTES_MAX: Final = 64 << 20
"""Beyond either, who does not want to wait for its message does (invariant 10)."""
BATCH_CHANGES_MAX: Final = 1000
BATCH_BYTES_MAX: Final = 16 << 20


class Writer(Protocol):
    """What the store needs of each."""

    def submit(self, ticket: Ticket) -> None:
        """Queue it. Raises what Engine.ensure_usable raises, and RuntimeError in a signal handler (rule G3); then it is
        not queued."""

    def submit_all(self, tickets: Sequence[Ticket]) -> None:
        """Queue them next to each other: all, or none if this raises."""

    def wait(self, ticket: Ticket) -> list[Any]:
        """Until it is done. Returns what came of its changes, or raises what it failed with. An interruption leaves
        its outcome unknown (rule G3)."""

    def proceed(self) -> None:
        """See that what is queued is written without its caller."""

    def flush(self) -> None:
        """Until all that is queued now is written or refused."""

    def close(self) -> None:
        """Write what is queued; refuse what comes later. Idempotent."""


def raise_error(ticket: Ticket) -> list[Any]:
    """What came of a ticket that is done, or what it failed with."""
    if ticket.error is not None:
        error = copy.copy(ticket.error)  # others raise the same: each thread has its own traceback
        raise error from ticket.error.__cause__
    return ticket.outcomes


class Direct:
    """Whoever calls writes, under the store's lock. What an interruption leaves is finished by whoever comes next."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def submit(self, ticket: Ticket) -> None:
        engine = self._engine
        engine.check()
        with engine.lock:
            engine.current(engine.behind)
            plan = engine.sequencer.plan((ticket,))
            if ticket.error is None and plan.changes:
                try:
                    engine.backend.write(plan)
                except AnabranchError as error:
                    ticket.finish(error)
                    return
                engine.written = plan
                engine.drain()
            else:
                ticket.finish(ticket.error)

    def submit_all(self, tickets: Sequence[Ticket]) -> None:
        for ticket in tickets:
            self.submit(ticket)

    def wait(self, ticket: Ticket) -> list[Any]:
        return raise_error(ticket)

    def proceed(self) -> None:
        """Nothing is ever queued."""

    def flush(self) -> None:
        self._engine.asked(lambda: None)

    def close(self) -> None:
        with self._engine.lock:
            self._engine.finish()


class Threaded:
    """A thread of the store's own writes what many ask for together. `_lead` guards what is being written."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lead = threading.Lock()
        self._queue: deque[Ticket] = deque()
        self._count_lock = threading.RLock()  # guards what is queued; a signal handler may come back to it
        self._queued_changes = self._queued_bytes = 0
        self._signals: SimpleQueue[None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._idle = self._ended = False
        self._unknown: Plan | None = None
        """A write whose outcome is not known yet: nothing else is written before it is."""

    def submit(self, ticket: Ticket) -> None:
        self._engine.check()
        self._put([ticket])

    def submit_all(self, tickets: Sequence[Ticket]) -> None:
        self._engine.check()
        self._put(tickets)
        if tickets and (self._queued_changes > QUEUE_CHANGES_MAX or self._queued_bytes > QUEUE_BYTES_MAX):
            self._await(tickets[-1])

    def wait(self, ticket: Ticket) -> list[Any]:
        self._await(ticket)
        return raise_error(ticket)

    def proceed(self) -> None:
        """It goes on by itself."""

    def flush(self) -> None:
        ticket = Ticket([], 0)
        self.submit(ticket)
        self.wait(ticket)

    def close(self) -> None:
        self._ended = True
        self._nudge()
        with self._lead:
            pass  # what is being written is done
        while self._step():
            pass
        self._refuse_queued()

    def _put(self, tickets: Sequence[Ticket]) -> None:
        with self._count_lock:
            self._queue.extend(tickets)
            self._queued_changes += sum(len(ticket.changes) for ticket in tickets)
            self._queued_bytes += sum(ticket.size for ticket in tickets)
        self._nudge()
        if self._ended:
            self._refuse_queued()

    def _await(self, ticket: Ticket) -> None:
        while not ticket.done:
            ticket.wait(PATIENCE)
            if not ticket.done:
                self._nudge()
                if self._ended:
                    self._refuse_queued()

    def _nudge(self) -> None:
        """See that the thread is there and looks at the queue."""
        if self._idle:
            self._signals.put(None)
        if self._thread is None and not self._engine.forked:
            with self._count_lock:
                if self._thread is None:
                    thread = threading.Thread(
                        target=_work, args=(weakref.ref(self), self._signals),
                        name=f"anabranch-writer-{self._engine.name}", daemon=True,
                    )  # fmt: skip
                    thread.start()
                    self._thread = thread

    def _refuse_queued(self) -> None:
        while self._queue:
            try:
                ticket = self._pop()
            except IndexError:
                return
            ticket.finish(ClosedError(f"store {self._engine.name!r} is closed"))

    # The thread

    def _step(self) -> bool:
        """Write what is queued; False if there was nothing."""
        with self._lead:
            tickets = self._next()
            if not tickets:
                return False
            try:
                self._write(tickets)
            except BaseException as error:  # a fault of ours, or of memory: who waits must hear of it
                log.exception("store %s: a write has failed", self._engine.name)
                self._engine.fail(error)
                self._refuse(tickets, self._engine.failure())
            return True

    def _next(self) -> list[Ticket]:
        tickets: list[Ticket] = []
        changes = size = 0
        while self._queue:
            changes += len(self._queue[0].changes)
            size += self._queue[0].size
            if tickets and (changes > BATCH_CHANGES_MAX or size > BATCH_BYTES_MAX):
                break
            tickets.append(self._pop())
        return tickets

    def _pop(self) -> Ticket:
        with self._count_lock:
            ticket = self._queue.popleft()
            self._queued_changes -= len(ticket.changes)
            self._queued_bytes -= ticket.size
        return ticket

    def _write(self, tickets: Sequence[Ticket]) -> None:
        engine = self._engine
        if engine.failed is not None:
            self._refuse(tickets, engine.refusal())
            return
        if self._unknown is not None:
            try:
                took_effect = engine.backend.took_effect(self._unknown)
            except AnabranchError as error:
                self._refuse(tickets, error)
                return
            self._settle_unknown(took_effect)
        plan = engine.sequencer.plan(tickets)
        try:
            if plan.changes:
                engine.backend.write(plan)
                self._done(plan)
        except OutcomeUnknownError as error:
            self._unknown = plan
            self._refuse(plan.tickets, error)
        except StoreFailedError as error:
            self._refuse(plan.tickets, error)
        except AnabranchError as error:
            if len(plan.tickets) > 1:  # one of them has something that the backend does not take
                for ticket in plan.tickets:
                    self._write([ticket])
            else:
                self._refuse(plan.tickets, error)
        for ticket in tickets:
            if not ticket.done:
                ticket.finish(ticket.error)

    def _settle_unknown(self, took_effect: bool) -> None:
        plan, self._unknown = self._unknown, None
        if took_effect and plan is not None:
            self._done(plan)

    def _done(self, plan: Plan) -> None:
        engine = self._engine
        engine.batches += 1
        engine.sequencer.accept(plan)
        engine.take(plan)
        with engine.lock:
            engine.drain()

    def _refuse(self, tickets: Iterable[Ticket], error: AnabranchError) -> None:
        for ticket in tickets:
            if not ticket.done:
                ticket.finish(error)


def _work(writer: weakref.ref[Threaded], signals: SimpleQueue[None]) -> None:
    """The thread. It keeps no store alive."""
    while True:
        its = writer()
        if its is None:
            return
        while its._step():
            pass
        its._idle = True
        if its._queue:
            its._idle = False
            continue
        if its._ended:
            its._thread = None
            return
        del its
        try:
            signals.get(timeout=IDLE_SECONDS)
        except Empty:
            its = writer()
            if its is None:
                return
            its._thread = None
            if its._queue:  # it came while nobody listened
                its._nudge()
            return
        its = writer()
        if its is not None:
            its._idle = False
        del its
