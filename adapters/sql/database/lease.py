"""A lease, for a database that several nodes may own in turn: one owner at a time, by the clock of the database.

L1  A node owns the store while its name is in the row of LEASE and the row has not expired, both as the database says.
L2  Nobody takes the row before it has expired or was given back; who takes it raises STORE.BATCH in the same database
    transaction. Each transaction of an owner that writes says which batch it follows (S3), so that one that believes
    to own it still, having slept through its end, cannot write.
L3  The owner renews it in the background. It counts from before it sent the renewal, by a clock that no one sets, and
    stops while a tenth of the lease is left: before anyone else can have it, even if clocks do not run alike.
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from sqlalchemy import Executable
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import IntegrityError, SQLAlchemyError

from ....policies.config.options import SqlOptions
from ....policies.errors import StoreFailedError, StoreLockedError
from ...system.conditions import Thread
from . import dialects
from .connections import on_connection, scrubbed, shown_url

log: logging.Logger = logging.getLogger(__name__)

MARGIN: Final = 0.1
"""The part of the lease that is left when the owner stops."""
POLL_MAX: Final = 0.5
"""Seconds between two looks at a lease that another one holds and may give back."""
LOCKED_MAX: Final = 1.0
"""Seconds that taking it waits for a transaction of the one before to end, if it need not wait longer."""


def clock() -> float:
    """Return seconds, for spans alone. The clock goes on while the machine sleeps, where there is such a clock."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


_secret: Final = os.urandom(16)


def _node(directory: Path) -> str:
    """Return this node's name: the same one again when this process opens the same directory again. Nobody else can
    have that directory open meanwhile. So the node need not wait for its own lease, if that was renewed while given up
    for lost."""
    pid = os.getpid()
    digest = hashlib.sha256(b"%d %b %b" % (pid, _secret, os.fsencode(directory.resolve()))).hexdigest()
    return f"process {pid} on {socket.gethostname()} ({digest[:8]})"


class _Held(NamedTuple):
    """A lease that somebody else has."""

    holder: str
    left: float
    """The seconds left; below 0: it has expired, but its last transaction is not over."""


class Lease:
    """The lease of a store, from `acquire` to `release` or until it is lost. Safe for all threads; a forked child has
    none."""

    def __init__(
        self,
        engine: Engine,
        statements: Mapping[str, Executable],
        store_id: bytes,
        options: SqlOptions,
        what: str,
        directory: Path,
        lost: Callable[[str], None],
    ) -> None:
        """Make a lease that is yet to be acquired. `engine` is open_single's, so that no renewal waits for a
        connection. `what` is whose lease it is, for errors; `directory` the node's own, which has one owner. `lost`, a
        method, is called once, by a thread of ours, if the lease ends against our will."""
        assert options.lease_expiration is not None
        self.node: Final = _node(directory)
        self._engine, self._statements, self._what = engine, statements, what
        self._owner = {"owner": store_id.hex()}
        self._expiration = options.lease_expiration
        self._renewal = options.lease_renewal or self._expiration / 4
        self._wait = options.lease_wait
        self._lost: weakref.WeakMethod[Callable[[str], None]] = weakref.WeakMethod(lost)
        self._lock = threading.Lock()  # guards _until and _over
        self._until = 0.0
        self._over = False
        self._connection: Connection | None = None  # the renewing thread's
        self._gates: list[threading.Lock] = []

    @property
    def held(self) -> bool:
        """Return whether the lease is ours for certain, now."""
        return clock() < self._until

    def require(self) -> None:
        """Raise StoreFailedError if the lease is not ours for certain, now."""
        if not self.held:
            raise StoreFailedError(
                f"{self._what} is no longer ours: its lease could not be renewed in time; reopen it to have it again"
            )

    # Taking it and giving it back

    def acquire(self) -> None:
        """Wait for the lease for `lease_wait`. Raises StoreLockedError with the holder's name, StoreFailedError if the
        database cannot be reached."""
        deadline = time.monotonic() + self._wait
        while True:
            sent = clock()
            held: _Held | SQLAlchemyError
            try:
                holder = self._try(max(LOCKED_MAX, deadline - time.monotonic()))
                if holder is None:
                    break
                held = holder
            except SQLAlchemyError as error:
                held = error
            pause = deadline - time.monotonic()
            if pause <= 0:
                raise self._refused(held) from (held if isinstance(held, SQLAlchemyError) else None)
            left = held.left if isinstance(held, _Held) and held.left > 0 else POLL_MAX
            time.sleep(min(pause, left + 0.002, POLL_MAX, self._renewal / 2))
        with self._lock:
            self._until, self._over = self._end(sent), False
        self._gates = [_taken(), _taken()]
        for target, gate, name in ((_renew, self._gates[0], "lease"), (_watch, self._gates[1], "lease-watch")):
            Thread(target, name, (weakref.ref(self), gate)).start()
        log.info("%s: the lease is ours, %s, for %g seconds", self._what, self.node, self._expiration)

    def _refused(self, held: _Held | SQLAlchemyError) -> StoreLockedError | StoreFailedError:
        if isinstance(held, SQLAlchemyError):
            return StoreFailedError(
                f"{self._what}: its lease cannot be had, {shown_url(self._engine.url)} does not answer as it should: "
                f"{scrubbed(str(held), self._engine.url)}"
            )
        state = f"for {held.left:.1f} s more" if held.left > 0 else "and has not ended its last transaction"
        return StoreLockedError(
            f"{self._what} belongs to {held.holder} {state}; close it there first, or give lease_wait to wait for it"
        )

    def _try(self, locked_max: float) -> _Held | None:
        """Take the lease if it is free. Return its holder, None if it is ours now."""
        taken = {**self._owner, "node": self.node, "span": round(self._expiration * 1000)}

        def take(connection: Connection) -> _Held | None:
            holder, left = self._row(connection)
            if holder is not None and holder != self.node and left > 0:
                return _Held(holder, left)
            dialects.wait_for_locks(connection, locked_max)
            try:
                if connection.execute(self._statements["update.lease.taken"], taken).rowcount != 1:
                    return _Held(*self._row(connection))
                connection.execute(self._statements["update.store.taken"], self._owner)  # L2
            except SQLAlchemyError as error:
                if not dialects.is_locked(error):
                    raise
                return _Held(holder or "a node that has given it back", min(left, 0.0))
            connection.commit()
            return None

        return on_connection(self._engine, take, **{dialects.WRITES: True})

    def _row(self, connection: Connection) -> tuple[str, float]:
        """Return who has the lease, and for how many seconds more."""
        row = connection.execute(self._statements["select.lease"], self._owner).one_or_none()
        if row is None:
            try:
                connection.execute(self._statements["insert.lease"], self._owner)
                connection.commit()
            except IntegrityError:
                connection.rollback()
            return self._row(connection)
        return row[0], row[1] / 1000

    def release(self) -> None:
        """Give the lease back, for the next one to have it at once. Never raises; idempotent."""
        with self._lock:
            had, self._over, self._until = not self._over and self._until > 0, True, 0.0
        for gate in self._gates:
            _open(gate)
        if not had:
            return

        def give_back(connection: Connection) -> None:
            connection.execute(self._statements["update.lease.released"], {**self._owner, "node": self.node})
            connection.commit()

        try:
            on_connection(self._engine, give_back, **{dialects.WRITES: True})
        except SQLAlchemyError as error:
            log.warning("%s: the lease is not given back, it expires: %s", self._what, type(error).__name__)

    # Keeping it

    def _end(self, sent: float) -> float:
        """Return when we stop, if the database has said yes to what was sent then."""
        return sent + self._expiration * (1 - MARGIN)

    def _renew(self) -> float:
        """Ask for more; return the seconds until it is to be asked again."""
        sent = clock()
        try:
            if self._connection is None:
                self._connection = self._engine.connect().execution_options(**{dialects.WRITES: True})
            values = {**self._owner, "node": self.node, "span": round(self._expiration * 1000)}
            renewed = self._connection.execute(self._statements["update.lease.renewed"], values).rowcount == 1
            if not renewed:
                holder, _ = self._row(self._connection)
            self._connection.commit()
        except Exception as error:  # whatever it is: the next try may do better, and the other thread watches the time
            log.warning("%s: the lease could not be renewed, tried again: %s", self._what, type(error).__name__)
            self._disconnect()
            return self._renewal / 4
        if not renewed:
            self._lose(f"it expired{f', and belongs to {holder} now' if holder != self.node else ''}")
            return 0.0
        with self._lock:
            if not self._over:
                self._until = self._end(sent)
        return self._renewal

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            try:
                connection.close()
            except Exception:
                log.debug("a connection that had failed did not close", exc_info=True)

    def _lose(self, reason: str) -> None:
        with self._lock:
            if self._over:
                return
            self._over, self._until = True, 0.0
        for gate in self._gates:
            _open(gate)
        log.error("%s: its lease is lost: %s", self._what, reason)
        lost = self._lost()
        if lost is not None:
            lost(f"{self._what}: its lease is lost: {reason}; reopen it to have it again")


# Two threads: one may hang in the database, so that another one watches the time. They hold a lease only while they
# work for it.


def _renew(reference: weakref.ref[Lease], gate: threading.Lock) -> None:
    pause = 0.0
    lease = reference()
    if lease is not None:
        pause = lease._renewal
    while lease is not None and not lease._over:
        del lease
        gate.acquire(timeout=pause)
        lease = reference()
        if lease is not None and not lease._over:
            pause = lease._renew()
    if lease is not None:
        lease._disconnect()


def _watch(reference: weakref.ref[Lease], gate: threading.Lock) -> None:
    while (lease := reference()) is not None and not lease._over:
        pause = lease._until - clock()
        if pause <= 0:
            lease._lose("it could not be renewed in time")
            return
        del lease
        gate.acquire(timeout=pause)


def _taken() -> threading.Lock:
    gate = threading.Lock()
    gate.acquire()
    return gate


def _open(gate: threading.Lock) -> None:
    """Release the gate, so that who waits there goes on. An open gate stays open."""
    try:
        gate.release()
    except RuntimeError:  # it was open
        pass
