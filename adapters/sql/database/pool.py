"""A pool that keeps its connections: SQLAlchemy's Pool with what its own QueuePool has no options for.

It keeps `least` connections open, opens more as they are asked for up to `most`, and closes those beyond the least that
nobody needed for a while; on each that idles it runs a statement now and then, so that no firewall forgets it; it
drops those that do not answer and makes up for them. Locks are C locks held by `with` alone: QueuePool's conditions
can be left locked by a Ctrl-C.
"""

from __future__ import annotations

import itertools
import logging
import os
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final, NamedTuple

from sqlalchemy import exc
from sqlalchemy.pool import ConnectionPoolEntry, Pool

from ...system.background import shared

log: logging.Logger = logging.getLogger(__name__)

TRUST: Final = 1.0
"""Seconds for which a connection that was in use is believed to work still; after that it is asked first."""
TICK_MAX: Final = 1.0
SLOT: Final = "slot"
CURSORS: Final = "cursors"
CURSORS_MAX: Final = 8
"""The number of cursors that are noted of a connection. More than one statement is at work only while rows of another
are read."""
SLICE: Final = 0.1
"""The seconds after which a wake-up that an interrupted thread failed to give is made up for."""


class _Use(NamedTuple):
    """The use of a connection by a thread."""

    since: float
    """The monotonic time at which the use began."""
    thread: int
    """The thread whose use it is."""
    number: int
    """The number that `taken` gave."""

    def is_since(self, number: int, thread: int) -> bool:
        """Return whether this thread has taken the connection after that number."""
        return self.thread == thread and self.number > number


_numbers: Final = itertools.count(1)


def taken() -> int:
    """Return a number. Connections that are taken from now on, from any pool, have a higher one."""
    return next(_numbers)


def _use() -> _Use:
    return tuple.__new__(_Use, (time.monotonic(), threading.get_ident(), next(_numbers)))  # as its own, less two calls


class _Slot:
    """One connection's place among the most that there may be. It is given back, or lost with the last who knew it: one
    who was interrupted, say."""

    __slots__ = ("__weakref__", "_record", "asked", "use", "used")

    def __init__(self, use: _Use) -> None:
        self.use: _Use | None = use
        """Whose the connection is now; None: nobody's."""
        self.used = self.asked = 0.0
        """When it was in use last, and when it was asked last whether it answers (monotonic)."""
        self._record: weakref.ref[ConnectionPoolEntry] | None = None

    @property
    def record(self) -> ConnectionPoolEntry | None:
        """Return the connection; None before it is made. One whose user was interrupted before he had it is closed when
        nobody knows it."""
        return None if self._record is None else self._record()

    def fill(self, record: ConnectionPoolEntry) -> None:
        """Note the connection that was made."""
        self.used = time.monotonic()
        record.record_info[SLOT] = self  # type: ignore[index]
        self._record = weakref.ref(record)


class KeptPool(Pool):
    """A pool that keeps its connections. Safe for all threads. A forked child neither uses nor closes its parent's
    connections (`leave`)."""

    def __init__(
        self,
        creator: Any,
        least: int = 0,
        most: int = -1,
        timeout: float = 30.0,
        idle_timeout: float = 120.0,
        keepalive_interval: float = 60.0,
        keepalive_statement: str = "",
        response_timeout: float = 0.0,
        words_of: Callable[[BaseException], str] = str,
        name: str = "the database",
        **more: Any,
    ) -> None:
        """Make a pool. All times are seconds. `most` -1: as many as are asked for. `keepalive_statement` "": none is
        run. `response_timeout`: a connection that has been in one user's hands for longer is cut off; 0: never.
        `words_of` gives what an error of the driver's says. `name` is for the log."""
        Pool.__init__(self, creator, **more)
        self._settings: dict[str, Any] = {
            "least": least, "most": most, "timeout": timeout, "idle_timeout": idle_timeout,
            "keepalive_interval": keepalive_interval, "keepalive_statement": keepalive_statement,
            "response_timeout": response_timeout, "words_of": words_of, "name": name,
        }  # fmt: skip
        self._least, self._most, self._timeout = least, most, timeout
        self._idle_timeout, self._response_timeout = idle_timeout, response_timeout
        self._interval, self._statement, self._words_of = keepalive_interval, keepalive_statement, words_of
        self._name = name
        self._wrong = False
        """True once it was told that the database takes the statement for wrong."""
        # Guards all below. Re-entrant: a connection that nobody holds any more comes back wherever the collector runs,
        # perhaps in a thread that is in here, and so may a signal handler.
        self._lock = threading.RLock()
        self._idle: deque[ConnectionPoolEntry] = deque()  # used last: at the right, and taken first
        self._slots: weakref.WeakKeyDictionary[_Slot, None] = weakref.WeakKeyDictionary()
        self._waiters: deque[threading.Lock] = deque()
        self._kept = self._disposed = self._down = False
        self._round: threading.Thread | None = None

    # Methods that Pool asks of its kinds

    def _do_get(self) -> ConnectionPoolEntry:
        deadline = 0.0
        while True:
            use, new = _use(), None
            deadline = deadline or use.since + self._timeout
            with self._lock:
                record = self._idle[-1] if self._idle else None
                if record is not None:
                    slot = _slot_of(record)
                    slot.use = use  # first: who is struck now finds it there (`end_since`)
                    self._idle.remove(record)  # another one may have come back in this very thread
                    idled = use.since - slot.used
                elif self._most < 0 or len(self._slots) < self._most:
                    new = _Slot(use)
                    self._slots[new] = None
                else:
                    gate = threading.Lock()
                    gate.acquire()
                    self._waiters.append(gate)
            if record is not None:
                if idled >= TRUST:
                    self._doubted(record)
                return record
            if new is not None:
                return self._made(new)
            left = deadline - time.monotonic()
            if left <= 0 or not gate.acquire(timeout=min(left, SLICE)):
                with self._lock:
                    if gate in self._waiters:
                        self._waiters.remove(gate)
            if time.monotonic() >= deadline and not self._idle:
                raise exc.TimeoutError(
                    f"all {self._most} connections were in use for {self._timeout:g} seconds; "
                    "give the store more (pool_max) or fewer threads"
                )

    def _made(self, slot: _Slot) -> ConnectionPoolEntry:
        try:
            record = self._create_connection()
        except BaseException:
            with self._lock:  # some other thread may walk through them
                self._slots.pop(slot, None)  # now, not when the frames are gone that the error's traceback keeps
            raise
        with self._lock:
            slot.fill(record)
            kept, self._kept = self._kept, True
        if not kept:
            self._tick(weakref.ref(self))
        return record

    def _do_return_conn(self, record: ConnectionPoolEntry) -> None:
        slot = _slot_of(record)
        slot.used = time.monotonic()
        close_cursors(record)
        self._put(record, slot)

    def _put(self, record: ConnectionPoolEntry, slot: _Slot) -> None:
        with self._lock:
            dropped = self._disposed or record.dbapi_connection is None
            if not dropped:
                self._idle.append(record)
            slot.use = None  # not before: who is struck between the two finds it there
            gate = self._waiters.popleft() if self._waiters else None
        if dropped:
            self._give_up(record)
        if gate is not None:
            gate.release()

    def recreate(self) -> KeptPool:
        return self.__class__(
            self._creator, recycle=self._recycle, echo=self.echo, logging_name=self._orig_logging_name,
            reset_on_return=self._reset_on_return, pre_ping=self._pre_ping, _dispatch=self.dispatch,
            dialect=self._dialect, **self._settings,
        )  # fmt: skip

    def dispose(self) -> None:
        """Close the connections that are idle now, and the others when they come back."""
        with self._lock:
            self._disposed = True
            idle = list(self._idle)
            self._idle.clear()
        for record in idle:
            self._give_up(record)

    def status(self) -> str:
        return f"{len(self._slots)} connections, {len(self._idle)} of them idle; {self._least} to {self._most} are kept"

    def counts(self) -> tuple[int, int]:
        """Return how many connections there are, and how many of them idle."""
        with self._lock:
            return len(self._slots), len(self._idle)

    # Looking after them

    def _doubted(self, record: ConnectionPoolEntry) -> None:
        """Ask a connection that has idled for a while. A dead one is made anew on its way out, and so are the
        others."""
        if record.dbapi_connection is not None and not self._answers(record):
            record.invalidate()
            self.drop_idle()

    def _answers(self, record: ConnectionPoolEntry, statement: str = "") -> bool:
        connection: Any = record.dbapi_connection
        try:
            if statement:
                self._keep_alive(connection, statement)
            else:
                self._dialect._do_ping_w_event(connection)
        except Exception as error:
            log.info("a connection to the database is dropped, it does not answer: %s", type(error).__name__)
            return False
        return connection is not None and not getattr(connection, "closed", False)

    def _keep_alive(self, connection: Any, statement: str) -> None:
        """Run the statement. One that the database takes for wrong has been answered too: that is told, once."""
        driver, cursor = self._driver, connection.cursor()
        try:
            cursor.execute(statement)
        except (driver.OperationalError, driver.InterfaceError):
            raise
        except driver.Error as error:
            if not self._wrong:
                self._wrong = True
                log.error(
                    "keepalive_statement %r is wrong, %s says: %s; its connections are kept, mend the "
                    "statement and open the store again", statement, self._name, self._words_of(error),
                )  # fmt: skip
        finally:
            cursor.close()
        connection.rollback()

    @property
    def _driver(self) -> Any:
        """Return the driver's module."""
        dialect: Any = self._dialect
        return dialect.loaded_dbapi

    def drop_idle(self) -> None:
        """Close the idle connections: one of them has told that none is good any more. Those in use stay."""
        with self._lock:
            idle = list(self._idle)
            self._idle.clear()
        for record in idle:
            self._give_up(record)

    def _give_up(self, record: ConnectionPoolEntry) -> None:
        with self._lock:
            self._slots.pop(_slot_of(record), None)
        record.close()

    @staticmethod
    def _tick(reference: weakref.ref[KeptPool]) -> None:
        """Look after the pool now and then, for as long as it is in use. Work that may wait for the database has a
        thread of its own: threads that all stores share must not wait."""
        pool = reference()
        if pool is None or pool._disposed:
            return
        try:
            pool._cut_off()
            if pool._is_due() and (pool._round is None or not pool._round.is_alive()):
                pool._round = threading.Thread(target=pool._look_after, name="anabranch-connections", daemon=True)
                pool._round.start()
        finally:
            shared().schedule(pool._pause(), partial(KeptPool._tick, reference))

    def _pause(self) -> float:
        times = [self._idle_timeout, self._response_timeout or TICK_MAX]
        times += [self._interval] if self._statement else []
        return min(TICK_MAX, max(0.01, min(times) / 4))

    def _is_due(self) -> bool:
        with self._lock:
            return len(self._slots) < self._least or any(self._due(record) for record in self._idle)

    def _due(self, record: ConnectionPoolEntry) -> str:
        """Return what is to be done with an idle connection: "" nothing, "ask", or "close" it."""
        slot, now = _slot_of(record), time.monotonic()
        if now - slot.used >= self._idle_timeout and len(self._slots) > self._least:
            return "close"
        if self._statement and now - max(slot.used, slot.asked) >= self._interval:
            return "ask"
        return ""

    def _look_after(self) -> None:
        self._see_to_idle()
        self._refill()

    def _see_to_idle(self) -> None:
        asked, closed = [], []
        with self._lock:
            for record in list(self._idle):  # the longest idle first
                due = self._due(record)
                if not due:
                    continue
                self._idle.remove(record)
                if due == "close":
                    closed.append(record)
                    self._slots.pop(_slot_of(record), None)  # the next one counts without it
                else:
                    asked.append(record)
                    _slot_of(record).use = _use()
        for record in closed:
            record.close()
        for record in asked:
            if not self._answers(record, self._statement):
                record.invalidate()
                self.drop_idle()
            else:
                _slot_of(record).asked = time.monotonic()
            self._put_first(record)

    def _put_first(self, record: ConnectionPoolEntry) -> None:
        """Put a connection back to where it was: it has not been of use."""
        self._put(record, _slot_of(record))
        with self._lock:
            if self._idle and self._idle[-1] is record:
                self._idle.rotate(1)

    def _refill(self) -> None:
        while True:
            with self._lock:
                if self._disposed or len(self._slots) >= self._least:
                    self._down = False
                    return
                slot = _Slot(_use())
                self._slots[slot] = None
            try:
                record = self._made(slot)
            except Exception as error:
                if not self._down:  # once an outage
                    log.warning("%s takes no connections; tried again: %s", self._name, self._words_of(error))
                self._down = True
                return
            self._put(record, slot)
            del record, slot

    def _cut_off(self) -> None:
        """Give users who have waited too long an error: nobody hangs on a database that is unresponsive."""
        if not self._response_timeout:
            return
        overdue = time.monotonic() - self._response_timeout
        late = []
        with self._lock:
            for record in self._in_use():
                slot = _slot_of(record)
                if slot.use is not None and slot.use.since < overdue:
                    slot.use = slot.use._replace(since=time.monotonic())
                    late.append(record)
        for record in late:
            log.error("the database has not answered for %g seconds: the connection is cut off", self._response_timeout)
            self._shut_down(record)

    def cut_off_all(self) -> None:
        """Cut off all connections that are in use, whatever they are at. Their users get errors, at once."""
        with self._lock:
            records = self._in_use()
        for record in records:
            self._shut_down(record)

    def end_since(self, number: int) -> None:
        """End what this thread has taken since `taken` gave this number, and has not given back. The thread was struck
        in a call that began then. Each such connection is closed, with all that it was at: the thread's traceback may
        hold it for long."""
        me, lost = threading.get_ident(), []
        with self._lock:
            for slot in self._used_slots():
                if slot.use is None or not slot.use.is_since(number, me):
                    continue
                record = slot.record
                if record is None:
                    self._slots.pop(slot, None)  # of a connection that was not made
                    continue
                if record in self._idle:
                    self._idle.remove(record)
                slot.use = None
                lost.append(record)
        for record in lost:
            fairy = getattr(record, "fairy_ref", None)  # what SQLAlchemy would give it back by, later
            ((fairy() if fairy is not None else None) or record).invalidate()
            self._give_up(record)

    def _shut_down(self, record: ConnectionPoolEntry) -> None:
        """Shut down this connection's socket: whoever waits for it finds it at its end. No lock, no waiting. Nothing
        happens to one that was closed meanwhile, nor for a driver without a socket: SQLite's."""
        connection = record.dbapi_connection
        if connection is None or not hasattr(connection, "fileno"):
            return
        try:
            with socket.socket(fileno=os.dup(connection.fileno())) as its:
                its.shutdown(socket.SHUT_RDWR)
        except (OSError, self._driver.Error) as error:
            log.debug("a connection to the database has gone already: %s", type(error).__name__)

    def _used_slots(self) -> list[_Slot]:
        """Return the slots in use. All are taken in one step, as one may come back in between, by this very thread."""
        slots = [slot for reference in self._slots.keyrefs() if (slot := reference()) is not None]
        return [slot for slot in slots if slot.use is not None]

    def _in_use(self) -> list[ConnectionPoolEntry]:
        """Return the connections in use."""
        return [record for slot in self._used_slots() if (record := slot.record) is not None]

    def leave(self) -> None:
        """Forget the connections in a forked child. To close them would end them for the parent too."""
        _left.append((list(self._idle), self._in_use()))
        self._lock = threading.RLock()
        self._idle, self._slots, self._disposed = deque(), weakref.WeakKeyDictionary(), True


_left: Final[list[Any]] = []
"""The connections that a forked child keeps, so that they are never closed."""


def note_cursor(about: dict[Any, Any], cursor: Any) -> None:
    """Note a cursor of a connection. Its driver ends a transaction for good only when what was being read is closed.
    `about` is the connection's `info`."""
    about.setdefault(CURSORS, deque(maxlen=CURSORS_MAX)).append(weakref.ref(cursor))


def close_cursors(record: ConnectionPoolEntry) -> None:
    """Close the cursors of a connection. A thread that was struck while reading may hold some, and with them the
    transaction."""
    cursors = record.info.get(CURSORS)
    while cursors:
        cursor = cursors.pop()()
        if cursor is not None:
            with suppress(Exception):  # its connection is closed already
                cursor.close()


def _slot_of(record: ConnectionPoolEntry) -> _Slot:
    slot: _Slot = record.record_info[SLOT]  # type: ignore[index]  # a record of a pool's has a dict there
    return slot
