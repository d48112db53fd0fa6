"""The thread that writes: what callers ask for at the same time shares one database transaction.

W1  Everything is written by one thread at a time, which holds `_lead`; it is no thread in which Ctrl-C may strike. A
    caller queues a ticket and waits; if he is interrupted his ticket is written all the same.
W2  A batch whose COMMIT was cut off may have taken effect. Nothing else is written before STORE.BATCH has told
    (schema.py, S3), and what it has done is then applied or undone.
W3  A database that cannot be reached fails the calls, not the store: the next call tries again. The store fails for
    good if a disk of ours failed, if it has lost its lease, or if somebody else has written to its tables.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any, Final

from sqlalchemy.exc import SQLAlchemyError

from ...policies.errors import AnabranchError, ClosedError, OutcomeUnknownError, StoreFailedError
from ..background import shared
from ..delivery import CLAIMED, LEAVING, Note, feeds_of
from ..locking import fork_generation
from . import dialects
from .applying import apply
from .batch import Batch
from .database import Database, is_cut_off
from .room import Room
from .state import State
from .tickets import ACK, PREPARE, Ticket

log = logging.getLogger(__name__)

IDLE_SECONDS: Final = 5.0
"""The thread ends when it had nothing to do for so long; the next ticket starts another."""
PATIENCE: Final = 1.0
"""Seconds after which one who waits looks whether the thread is there."""
QUEUE_OPERATIONS_MAX: Final = 20_000
QUEUE_BYTES_MAX: Final = 64 << 20
"""Beyond either, who does not want to wait for his message does (invariant 10)."""
GATHER_SECONDS: Final = 0.0005
"""At most, where several callers shared the batch before."""
BATCH_BYTES_MAX: Final = 16 << 20
PAUSE_FIRST: Final = 0.02
PAUSE_MAX: Final = 0.5
"""Seconds between two looks for the outcome of a batch."""


class Writer:
    """Of one store that is open. Threads: all. `_lead` guards what is being written."""

    def __init__(
        self, database: Database, state: State, room: Room, store_id: bytes, require: Callable[[], None]
    ) -> None:
        """`require` raises StoreFailedError if the store's lease is not ours for certain."""
        self._database, self._state, self._room, self._require = database, state, room, require
        self._owner = store_id.hex()
        self._name = database.name
        self._options = state.options
        self._generation = fork_generation()
        self.closed = False
        self.failed: BaseException | None = None
        self.on_stop: Callable[[], None] = lambda: None
        """Called when the store stops: to wake those who wait for messages."""
        self.batches = self.sends = self.acks = self.dropped = 0
        self._lead = threading.Lock()
        self._queue: deque[Ticket] = deque()
        self._count_lock = threading.RLock()  # guards what is queued; a signal handler may come back to it
        self._queued_operations = self._queued_bytes = 0
        self._signals: SimpleQueue[None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._start_lock = threading.RLock()
        self._idle = False
        self._unresolved: Batch | None = None
        self._ended = False
        self._company = 1

    # What callers do

    @property
    def forked(self) -> bool:
        return self._generation != fork_generation()

    def ensure_usable(self) -> None:
        """Raise if closed, forked or failed; RuntimeError in a signal handler that interrupted its own thread."""
        if self.closed:
            raise ClosedError(f"store {self._name!r} is closed; open it again")
        if self.forked:
            raise ClosedError(f"store {self._name!r} was opened by the parent process; open it anew in a forked child")
        if self.failed is not None:
            raise self._failure()
        if self._state.lock._is_owned():  # type: ignore[attr-defined]
            raise RuntimeError(
                f"store {self._name!r} was called from a signal handler that interrupted it in the same thread"
            )

    def _failure(self) -> StoreFailedError:
        error = StoreFailedError(
            f"store {self._name!r} has stopped after an error: {self.failed}; close it and open it again"
        )
        error.__cause__ = self.failed
        return error

    def fail(self, cause: BaseException) -> None:
        """Stop for good (invariant 7)."""
        if self.failed is None:
            self.failed = cause
            log.error("store %s has failed: %s", self._name, cause)
            self._nudge()
            self.on_stop()

    def submit(self, ticket: Ticket) -> None:
        """Queue it. Raises what `ensure_usable` raises, and then it is not queued."""
        self.ensure_usable()
        self._put(ticket)

    def submit_nowait(self, ticket: Ticket) -> None:
        """Likewise; waits only if too much is queued."""
        self.submit(ticket)
        if self._queued_operations > QUEUE_OPERATIONS_MAX or self._queued_bytes > QUEUE_BYTES_MAX:
            self._await(ticket)

    def wait(self, ticket: Ticket) -> list[Any]:
        """What came of its operations. Raises what it failed with."""
        self._await(ticket)
        if ticket.error is not None:
            raise ticket.error
        return ticket.outcomes

    def run(self, ticket: Ticket) -> list[Any]:
        self.submit(ticket)
        return self.wait(ticket)

    def flush(self) -> None:
        """Until all that is queued now has been written or refused."""
        self.run(Ticket([]))

    def undisturbed(self, work: Callable[[], list[str]]) -> list[str]:
        """Do it while nothing is written."""
        with self._lead:
            return work()

    def refuse_more(self) -> None:
        """Take no more tickets; those queued are still written."""
        self.closed = True

    def close(self) -> None:
        """Write what is queued. Idempotent."""
        self.closed = True
        while not self._ended:
            last = Ticket([], last=True)
            self._put(last)
            self._await(last)

    def _put(self, ticket: Ticket) -> None:
        with self._count_lock:
            self._queue.append(ticket)
            self._queued_operations += len(ticket.operations)
            self._queued_bytes += ticket.size
        self._nudge()
        if self._ended:
            self._refuse_queued()

    def _await(self, ticket: Ticket) -> None:
        while not ticket.done.acquire(timeout=PATIENCE):
            self._nudge()
            if self._ended:
                self._refuse_queued()
        ticket.done.release()

    def _nudge(self) -> None:
        """See that the thread is there and looks at the queue."""
        if self._idle:
            self._signals.put(None)
        if self._thread is None and not self.forked:
            with self._start_lock:
                if self._thread is None:
                    thread = threading.Thread(
                        target=_work, args=(weakref.ref(self), self._signals), name=f"anabranch-sql-{self._name}",
                        daemon=True,
                    )  # fmt: skip
                    thread.start()
                    self._thread = thread

    def _refuse_queued(self) -> None:
        while self._queue:
            try:
                ticket = self._pop()
            except IndexError:
                return
            ticket.error = ClosedError(f"store {self._name!r} is closed")
            self._tell([ticket])

    # The thread

    def step(self) -> bool:
        """Write what is queued; False if there was nothing. Called by the thread alone."""
        with self._lead:
            tickets = self._next()
            if not tickets:
                return False
            self._gather(tickets)
            try:
                self._write(tickets)
            except BaseException as error:  # a fault of ours, or of memory: who waits must hear of it
                log.exception("store %s: a batch has failed", self._name)
                self.fail(error)
                self._refuse(tickets, self._failure)
            finally:
                self._room.settled()
                self._tell(tickets)
            return True

    def _gather(self, tickets: list[Ticket]) -> None:
        """Let others come who want to be in the same database transaction. Who was in the one before has just been
        woken, and will soon be back with the next."""
        if tickets[0].alone or self.closed:
            return
        if self._options.sync_period:
            time.sleep(self._options.sync_period)
            self._next(tickets)
        elif len(tickets) < self._company:
            deadline = time.monotonic() + GATHER_SECONDS
            while len(tickets) < self._company and time.monotonic() < deadline:
                time.sleep(GATHER_SECONDS / 10)
                self._next(tickets)
        self._company = len(tickets)

    def _next(self, tickets: list[Ticket] | None = None) -> list[Ticket]:
        """Those that share the next database transaction."""
        tickets = [] if tickets is None else tickets
        operations, size = sum(len(t.operations) for t in tickets), sum(t.size for t in tickets)
        queue = self._queue
        while queue and (not tickets or not (queue[0].alone or tickets[0].alone)):
            operations += len(queue[0].operations)
            size += queue[0].size
            if tickets and (operations > self._options.batch_operations_max or size > BATCH_BYTES_MAX):
                break
            tickets.append(self._pop())
        return tickets

    def _pop(self) -> Ticket:
        with self._count_lock:
            ticket = self._queue.popleft()
            self._queued_operations -= len(ticket.operations)
            self._queued_bytes -= ticket.size
        return ticket

    def _write(self, tickets: list[Ticket]) -> None:
        if tickets[0].last:
            self._ended = True
            self._refuse_queued()
            return
        if self.failed is not None:
            self._refuse(tickets, self._failure)
            return
        if self._unresolved is not None:
            try:
                self._resolve()
            except SQLAlchemyError as error:
                self._refuse_for(tickets, error)
                return
            if self.failed is not None:
                self._refuse(tickets, self._failure)
                return
        if not any(ticket.operations for ticket in tickets):
            return
        for last in (False, True):
            for ticket in tickets:
                ticket.error = None
            try:
                self._once(tickets)
            except SQLAlchemyError as error:
                self._room.settled()
                if self.failed is not None:  # meanwhile: its lease is lost, and the connections were cut off
                    self._refuse(tickets, self._failure)
                    return
                if not last and (is_cut_off(error) or dialects.is_collision(error)):
                    continue
                self._failed(tickets, error)
            except _NotDone as error:
                self._room.settled()
                if not last:
                    continue
                self._refuse_for(tickets, error.cause)
            return

    def _once(self, tickets: Sequence[Ticket]) -> None:
        """Raises SQLAlchemyError or _NotDone if nothing took effect."""
        batch: Batch | None = None
        cut_off: SQLAlchemyError | None = None
        try:
            with self._database.writing() as connection:
                batch = Batch(self._state, self._room, connection)
                if not self._fill(batch, tickets):
                    return
                self._unresolved = batch
                connection.commit()
        except SQLAlchemyError as error:
            if batch is None or self._unresolved is not batch:
                raise
            cut_off = error
        finally:
            if batch is not None and self._unresolved is not batch:
                batch.over()
        if cut_off is None:
            self._done(batch)
        else:  # its connection is closed by now: SQLite's holds no lock any more
            self._commit_failed(batch, tickets, cut_off)

    def _fill(self, batch: Batch, tickets: Sequence[Ticket]) -> bool:
        """Put it together and write it; whether it is to be committed."""
        for ticket in tickets:
            batch.add(ticket)
        if not batch.tickets or batch.changes_nothing:
            return False
        batch.write()
        if not self._claim(batch):
            self.fail(
                StoreFailedError(
                    f"somebody else has written to the tables of store {self._name!r}: another process owns them, or "
                    "they were restored from a backup"
                )
            )
        else:
            try:
                self._require()
                return True
            except StoreFailedError as error:
                self.fail(error)
        self._refuse(tickets, self._failure)
        return False

    def _claim(self, batch: Batch) -> bool:
        """Say which transaction this is (S3); False if it is not its turn."""
        values = {
            "owner": self._owner, "before": batch.number - 1, "now": batch.number, "last": batch.last_seq,
            "number": batch.last_number,
        }  # fmt: skip
        return batch.connection.execute(self._state.statements["update.store"], values).rowcount == 1

    def _done(self, batch: Batch) -> None:
        self._unresolved = None
        apply(batch)
        batch.over()
        self.batches += 1
        self.sends += batch.sends
        self.acks += batch.acknowledged
        self.dropped += batch.unwanted

    # When it fails

    def _failed(self, tickets: Sequence[Ticket], error: SQLAlchemyError) -> None:
        """The batch took no effect."""
        if dialects.is_of_the_disk(error):
            self.fail(self._database.disk_failed(error))
            self._refuse(tickets, self._failure)
        elif dialects.is_data(error) and len(tickets) > 1:
            for ticket in tickets:  # one of them has something that the database does not take
                ticket.error = None
                try:
                    self._once([ticket])
                except SQLAlchemyError as its:
                    self._refuse_for([ticket], its)
                except _NotDone as its:
                    self._refuse_for([ticket], its.cause)
        else:
            self._refuse_for(tickets, error)

    def _commit_failed(self, batch: Batch, tickets: Sequence[Ticket], error: SQLAlchemyError) -> None:
        """Find out whether it took effect (W2). Raises _NotDone if not."""
        of_the_disk = dialects.is_of_the_disk(error)
        if of_the_disk:
            self.fail(self._database.disk_failed(error))
        elif self.failed is not None:  # its lease is lost: who asks now is asked by another owner too
            self._refuse(tickets, lambda: self._unknown(error))
            return
        deadline = time.monotonic() + self._options.outcome_timeout
        pause = PAUSE_FIRST
        while True:
            try:
                done = self._resolve()
                break
            except SQLAlchemyError as its:
                if time.monotonic() + pause >= deadline or self.closed:
                    log.warning("store %s: the outcome of a batch is not known yet: %s", self._name, type(its).__name__)
                    self._refuse(tickets, lambda: self._unknown(error))
                    return
            time.sleep(pause)
            pause = min(2 * pause, PAUSE_MAX)
        if of_the_disk:  # what it had written of its log may be whole all the same, and count at the next open; or not
            self._refuse(tickets, lambda: self._unknown(error))
        elif self.failed is not None and not done:
            self._refuse(tickets, self._failure)
        elif not done:
            raise _NotDone(error)

    def _resolve(self) -> bool:
        """Whether the batch whose COMMIT was cut off has taken effect; then it is applied. Raises SQLAlchemyError if
        that cannot be told now."""
        batch = self._unresolved
        assert batch is not None
        with self._database.writing() as connection:
            # FOR UPDATE: the server may not have noticed yet that we are cut off, and still be at it.
            row = connection.execute(
                self._state.statements["select.store.locked"], {"owner": self._owner}
            ).one_or_none()
            found = None if row is None else row[0]
        if found == batch.number:
            self._done(batch)
            return True
        self._unresolved = None
        if found != batch.number - 1:
            self.fail(
                StoreFailedError(
                    f"somebody else has written to the tables of store {self._name!r}: whether the last operations "
                    "took effect cannot be told"
                )
            )
        self._undo(batch)
        batch.over()
        return False

    def _undo(self, batch: Batch) -> None:
        """It has not taken effect: what it would have acked or claimed for good, and who did that no longer waits, is
        free. Who waits still is told, and sees to it."""
        with self._state.lock:
            for ticket in batch.tickets:
                for kind, subject in ticket.operations if ticket.told else ():
                    if kind == ACK:
                        note, seq = subject
                        self._free(note, seq, LEAVING)
                    elif kind == PREPARE:
                        for note, seq in subject.acks:
                            self._free(note, seq, CLAIMED)
                        subject.reservation = None
                        for message in subject.messages:  # the claims are others' from now on
                            message.note = None

    def _free(self, note: Note, seq: int, hold: int) -> None:
        """Under the state's lock, if it is held so."""
        for feed in feeds_of(note):
            if self._state.delivery.held.get(feed.base + seq) == (feed, hold):
                self._state.delivery.free(feed, seq, self._state)

    def _unknown(self, error: SQLAlchemyError) -> OutcomeUnknownError:
        return OutcomeUnknownError(
            f"store {self._name!r}: the database was cut off, or failed, while it committed: "
            f"{self._database.said(error)}; whether the operation took effect shows when it is back. A send is safe to "
            "repeat with the same message_id"
        )

    def _refuse(self, tickets: Sequence[Ticket], error: Callable[[], AnabranchError]) -> None:
        """Each its own: several threads raise it."""
        for ticket in tickets:
            if ticket.error is None:
                ticket.error = error()

    def _refuse_for(self, tickets: Sequence[Ticket], error: SQLAlchemyError) -> None:
        self._refuse(tickets, lambda: self._database.error(error))

    def _tell(self, tickets: Sequence[Ticket]) -> None:
        outcomes: list[tuple[Future[Any], Any, BaseException | None]] = []
        for ticket in tickets:
            if ticket.told:
                continue
            ticket.told = True
            if ticket.future is not None:
                future, result = ticket.future
                outcomes.append((future, None if ticket.error else result(ticket), ticket.error))
            ticket.done.release()
        if outcomes:
            shared().resolve(outcomes)


class _NotDone(Exception):  # noqa: N818  it is no error yet
    """A batch has certainly not taken effect, though its COMMIT was sent."""

    def __init__(self, cause: SQLAlchemyError) -> None:
        self.cause = cause


def _work(reference: weakref.ref[Writer], signals: SimpleQueue[None]) -> None:
    """The thread. It holds the writer only while it works, so that a store that nobody closed can go."""
    while (writer := reference()) is not None:
        writer._idle = False
        while writer.step():
            pass
        writer._idle = True
        if writer._queue:
            continue
        del writer
        try:
            signals.get(timeout=IDLE_SECONDS)
        except Empty:
            writer = reference()
            if writer is None:
                return
            # First it says that it is gone, then it looks once more: who queues does it the other way round.
            writer._thread = None
            if not writer._queue:
                return
            writer._thread = threading.current_thread()
