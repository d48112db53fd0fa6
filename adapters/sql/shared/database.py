"""The database of a shared store: what is asked of it, and what became of what was cut off.

D11  Each connection has a row in CONNECTIONS. Whatever changes something sets LAST there to a number of its own, in the
    same transaction, and does nothing without that row.
D12  Where the connection is lost before the answer has come, that row is removed over another one, and LAST tells
    whether it has taken effect. What is at work still holds the row, and is waited for; what comes later finds none. So
    an outcome is known as soon as the database can be asked, also if it has crashed since.
D13  A row is used for a while alone: the versions of one that is updated for ever would all be kept for as long as some
    transaction is open, and each use would pass through them.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any, Final, TypeVar

import psycopg
from sqlalchemy import event
from sqlalchemy.engine import Engine
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.pool import ConnectionPoolEntry

from ....policies.errors import AnabranchError, OutcomeUnknownError, StoreFailedError
from ...system.durations import DurationCounter
from ..database.connections import driver_error, on_driver
from ..database.dialects import is_collision
from ..database.errors import Database, is_cut_off
from .prepared import Prepared
from .statements import Statements

T = TypeVar("T")
Ask = Callable[..., list[Any]]
"""Runs the statement of that name with these parameters, and returns its rows."""
PAUSE: Final = 0.05
"""Seconds between two questions for an outcome."""
TRIES: Final = 5
"""How often a transaction is begun that meets others, or a dead connection."""
USES: Final = 500
"""How often a row of CONNECTIONS is used."""
SESSION: Final = "session"
"""The name of a connection's session in its `info`."""
_SETTINGS: Final = (
    # The indexes are right whatever the statistics say, which are late for tables that are empty one second and full
    # the next.
    *(f"SET enable_{name} = off" for name in ("seqscan", "bitmapscan", "hashjoin", "mergejoin")),
    "SET plan_cache_mode = force_generic_plan",
    "SET default_transaction_isolation = 'read committed'",
    "SET jit = off",
    "SET client_encoding = 'UTF8'",
    # What a machine that is cut off has locked: the server would know of that after hours.
    "SET idle_in_transaction_session_timeout = '60s'",
)


def configure(engine: Engine) -> None:
    """Let each connection be as the statements need it."""

    def connected(connection: Any, _record: Any) -> None:
        connection.autocommit = True
        Prepared(connection).script("; ".join(_SETTINGS))

    event.listen(engine, "connect", connected)


class _Session(Prepared):
    """What one connection has: its prepared statements, and its row in CONNECTIONS."""

    __slots__ = ("number", "router", "uses")

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        super().__init__(connection)
        self.number, self.uses, self.router = 0, USES, 0


class _UnmarkedError(Exception):
    """A connection's row is gone: nothing was done (D11)."""


class NotAllError(Exception):
    """A statement that does all or nothing did nothing: it divides by 0 then."""


class SharedDatabase(Database):
    """The database of one shared store. Threads: all."""

    def __init__(self, name: str, engine: Engine, statements: Statements, outcome_timeout: float) -> None:
        """`engine`: one that was configured."""
        super().__init__(name, engine)
        self._statements, self._outcome_timeout = statements, outcome_timeout
        self.commits: int = 0
        """How often it has waited for a COMMIT, about."""
        self.took: Final = DurationCounter()
        """How long transactions take, from the first statement to the commit."""
        self.router: int = 0
        """The router whose connections they are."""
        self.on_failover: Callable[[], None] = lambda: None
        """Called when the database is another server than before, which may lack what was committed last."""
        self._timeline: str | None = None
        event.listen(engine, "connect", self._connected)

    def _connected(self, connection: Any, entry: ConnectionPoolEntry) -> None:
        """Begin a session. Notice a standby that was promoted: it counts its log anew. The call that has met it first
        fails, as calls do in an outage, since what it knows may not be so any more."""
        entry.info[SESSION] = _Session(connection)
        ((timeline,),) = connection.execute("SELECT left(pg_walfile_name(pg_current_wal_lsn()), 8)").fetchall()
        before, self._timeline = self._timeline, timeline
        if before not in (None, timeline):
            self.on_failover()
            raise psycopg.OperationalError(
                "a standby has become the primary; what was known of its queues is forgotten"
            )

    def look(self, name: str, *given: Any) -> list[Any]:
        """Return the rows of a statement that may be carried out twice. Raises StoreFailedError."""
        statement = self._statements[name]
        for last in (False, True):
            try:
                return on_driver(self.engine, self._run, statement, given)
            except SQLAlchemyError as error:
                if last or not (is_cut_off(error) or is_collision(error)):
                    raise self.error(error) from None
        raise AssertionError

    def once(self, name: str, *given: Any, lost: Callable[[list[int]], list[Any]]) -> list[Any]:
        """Return the rows of one statement that changes something, a transaction by itself. `lost` returns them if it
        has taken effect, and its answer is lost; it is given the ids of messages that were sent so. Raises
        NotAllError, StoreFailedError and StoreFullError (nothing took effect), OutcomeUnknownError."""
        rows: list[Any] | None
        rows, sent = self._trying(self._once, name, given)
        if rows is not None:
            return rows
        try:
            return lost(sent)
        except OutcomeUnknownError:
            raise
        except StoreFailedError as error:  # it has taken effect
            raise self._lost() from error

    def _once(
        self, connection: ConnectionPoolEntry, token: int, risked: list[int], name: str, given: tuple[Any, ...]
    ) -> list[Any]:
        began = time.monotonic()
        number = self._marked(connection)
        risked.append(number)
        rows = self._changed(connection, token, number, name, given)
        self.took.count(time.monotonic() - began)
        return rows

    def change(self, work: Callable[[Ask], T]) -> T:
        """Return what `work` returns, once the transaction in which it has asked is committed. Raises what `work`
        raises, StoreFailedError and StoreFullError (nothing took effect), OutcomeUnknownError."""
        done: list[T] = []

        def run(connection: ConnectionPoolEntry, token: int, risked: list[int]) -> None:
            began = time.monotonic()
            number = self._marked(connection)

            def ask(name: str, *given: Any) -> list[Any]:
                if name in self._statements.marked:
                    return self._changed(connection, token, number, name, given)
                return self._run(connection, self._statements[name], given)

            try:
                self._script(connection, self._statements["begin"].format(token=token, number=number))
                done[:] = [work(ask)]
                risked.append(number)
                self._script(connection, "COMMIT")
                self.took.count(time.monotonic() - began)
            except BaseException:
                if connection.dbapi_connection is not None:
                    try:
                        self._script(connection, "ROLLBACK")
                    except SQLAlchemyError as error:
                        connection.invalidate(error)
                raise

        self._trying(run)
        return done[0]

    def _trying(self, run: Callable[..., Any], *given: Any) -> tuple[Any, list[int]]:
        """Run what changes something, with the number that it sets as LAST, over a connection whose row it puts into
        the list before it may take effect. Returns its answer; None where that is lost, and it has taken effect, and
        the ids of messages that were sent, if that was asked."""
        token = random.getrandbits(62)
        for left in reversed(range(TRIES)):
            risked: list[int] = []
            try:
                answer = on_driver(self.engine, run, token, risked, *given)
                self.commits += 1
                return answer, []
            except _UnmarkedError:
                continue
            except SQLAlchemyError as error:
                if isinstance(getattr(error, "orig", None), psycopg.errors.DivisionByZero):
                    raise NotAllError from None
                cut_off = is_cut_off(error)
                if cut_off and risked:
                    last, sent = self._ended(risked[0], token, self.error(error))
                    if last == token:
                        self.commits += 1
                        return None, sent
                if not left or not (cut_off or is_collision(error)):
                    raise self.error(error) from None
        raise AssertionError

    def _changed(
        self, connection: ConnectionPoolEntry, token: int, number: int, name: str, given: tuple[Any, ...]
    ) -> list[Any]:
        """Return the rows of a marked statement (D11)."""
        rows = self._run(connection, self._statements[name], (token, number, *given))
        if not rows and not name.startswith("take") and not self._run(connection, self._statements["last"], (number,)):
            connection.info[SESSION].uses = USES
            raise _UnmarkedError
        return rows

    def _marked(self, connection: ConnectionPoolEntry) -> int:
        """Return the number of a connection's row, which is there."""
        session: _Session = connection.info[SESSION]
        if session.uses >= USES or session.router != self.router:  # those of one that others took for dead are removed
            number, router = random.getrandbits(62), self.router
            self._run(connection, self._statements["connection"], (session.number, number, router))
            session.number, session.router, session.uses = number, router, 0
        session.uses += 1
        return session.number

    def _run(self, connection: ConnectionPoolEntry, statement: str, given: tuple[Any, ...] = ()) -> list[Any]:
        """Return the rows. Raises SQLAlchemyError."""
        try:
            session: _Session = connection.info[SESSION]
            return session.run(statement, given)
        except BaseException as error:
            raise self._failed(connection, error) from None

    def _script(self, connection: ConnectionPoolEntry, statements: str) -> None:
        try:
            connection.info[SESSION].script(statements)
        except BaseException as error:
            raise self._failed(connection, error) from None

    def _failed(self, connection: ConnectionPoolEntry, error: BaseException) -> BaseException:
        """Return what an error of a connection is to its users: one of the driver's as SQLAlchemy's."""
        if not isinstance(error, psycopg.Error):
            connection.invalidate(error)  # the answer may still come
            return error
        driver: Any = connection.driver_connection
        is_gone = driver.closed
        if is_gone:
            connection.invalidate(error)
        return driver_error(error, self.engine, is_gone)

    def _ended(self, number: int, token: int, cause: AnabranchError) -> tuple[int, list[int]]:
        """Return what a connection's row has, which is removed (D12). Raises OutcomeUnknownError."""
        deadline, found = time.monotonic() + self._outcome_timeout, list[Any]()
        while True:
            try:
                # The answer to the second may be lost, too: then it is not there the next time.
                found = found or [one for one in self.look("last", number) if one[0] == token]
                gone = self.look("disconnect", number)
            except AnabranchError:
                if time.monotonic() >= deadline:
                    raise self._lost() from cause
                time.sleep(PAUSE)
                continue
            if not gone and not found:
                raise self._lost() from cause
            return (gone or found)[0]  # type: ignore[no-any-return]

    def _lost(self) -> OutcomeUnknownError:
        return OutcomeUnknownError(
            f"store {self.name!r}: the connection to its database was lost in a COMMIT, and nobody can tell whether "
            "that took effect; repeat a send with the same message_id, which is stored once"
        )
