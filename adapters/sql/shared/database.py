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
from contextlib import suppress
from typing import Any, Final, TypeVar

import psycopg
from psycopg.types.numeric import Int8BinaryDumper, Int8Dumper
from sqlalchemy import event
from sqlalchemy.engine import Engine
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.pool import PoolProxiedConnection

from ....policies.errors import AnabranchError, OutcomeUnknownError
from ..database.connections import driver_error, on_driver
from ..database.dialects import is_collision
from ..database.errors import Database, is_cut_off
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
_SETTINGS: Final = (
    # The indexes are right whatever the statistics say, which are late for tables that are empty one second and full
    # the next.
    *(f"SET enable_{name} = off" for name in ("seqscan", "bitmapscan", "hashjoin", "mergejoin")),
    "SET plan_cache_mode = force_generic_plan",
    "SET default_transaction_isolation = 'read committed'",
    "SET jit = off",
)


def configure(engine: Engine) -> None:
    """Let each connection be as the statements need it."""

    def connected(connection: Any, _record: Any) -> None:
        connection.autocommit = True
        connection.execute("; ".join(_SETTINGS))
        connection.prepare_threshold = 0
        # Of one type whatever the number: else each size of number has a plan of its own.
        for dumper in (Int8Dumper, Int8BinaryDumper):
            connection.adapters.register_dumper(int, dumper)

    event.listen(engine, "connect", connected)


class _Mark:
    """A connection's row in CONNECTIONS."""

    __slots__ = ("number", "router", "uses")

    def __init__(self) -> None:
        self.number, self.uses, self.router = 0, USES, 0


class _UnmarkedError(Exception):
    """A connection's row is gone: nothing was done (D11)."""


class SharedDatabase(Database):
    """The database of one shared store. Threads: all."""

    def __init__(self, name: str, engine: Engine, statements: Statements, outcome_timeout: float) -> None:
        """`engine`: one that was configured."""
        super().__init__(name, engine)
        self._statements, self._outcome_timeout = statements, outcome_timeout
        self.commits = 0
        """How often it has waited for a COMMIT, about."""
        self.router = 0
        """The router whose connections they are."""
        self.on_failover: Callable[[], None] = lambda: None
        """Called when the database is another server than before, which may lack what was committed last."""
        self._timeline: str | None = None
        event.listen(engine, "connect", self._connected)

    def _connected(self, connection: Any, _record: Any) -> None:
        """Notice a standby that was promoted: it counts its log anew. The call that has met it first fails, as calls do
        in an outage, since what it knows may not be so any more."""
        ((timeline,),) = connection.execute("SELECT left(pg_walfile_name(pg_current_wal_lsn()), 8)").fetchall()
        before, self._timeline = self._timeline, timeline
        if before not in (None, timeline):
            self.on_failover()
            raise psycopg.OperationalError(
                "a standby has become the primary; what was known of its queues is forgotten"
            )

    def look(self, name: str, *given: Any) -> list[Any]:
        """Return the rows of a statement that may be carried out twice. Raises StoreFailedError."""
        for last in (False, True):
            try:
                return on_driver(self.engine, lambda connection: self._run(connection, self._statements[name], given))
            except SQLAlchemyError as error:
                if last or not (is_cut_off(error) or is_collision(error)):
                    raise self.error(error) from None
        raise AssertionError

    def once(self, name: str, *given: Any, lost: Callable[[int], list[Any]]) -> list[Any]:
        """Return the rows of one statement that changes something, a transaction by itself. `lost` returns them if it
        has taken effect, and its answer is lost; it is given the id of a message that was sent so. Raises
        StoreFailedError and StoreFullError (nothing took effect), OutcomeUnknownError."""
        rows: list[Any] | None = None

        def run(ask: Ask) -> None:
            nonlocal rows
            rows = ask(name, *given)

        sent = self._marked(run, is_one=True)
        return lost(sent) if rows is None else rows

    def change(self, work: Callable[[Ask], T]) -> T:
        """Return what `work` returns, once the transaction in which it has asked is committed. Raises what `work`
        raises, StoreFailedError and StoreFullError (nothing took effect), OutcomeUnknownError."""
        done: list[T] = []

        def run(ask: Ask) -> None:
            done[:] = [work(ask)]

        self._marked(run, is_one=False)
        return done[0]

    def _marked(self, work: Callable[[Ask], None], is_one: bool) -> int:
        """Do work that changes something: `is_one` statement, or several. Returns what CONNECTIONS has as the id of a
        message that was sent, if that was asked, else 0."""
        token = random.getrandbits(62)
        for left in reversed(range(TRIES)):
            number: list[int] = []
            """Its row, once it may take effect."""

            def run(connection: PoolProxiedConnection, number: list[int] = number) -> None:
                mark = self._mark(connection)

                def ask(name: str, *given: Any) -> list[Any]:
                    marked = (token, mark.number) if name in self._statements.marked else ()
                    rows = self._run(connection, self._statements[name], (*marked, *given))
                    last = self._statements["last"]
                    if marked and not rows and name != "take" and not self._run(connection, last, marked[1:]):
                        mark.uses = USES
                        raise _UnmarkedError
                    return rows

                if is_one:
                    number.append(mark.number)
                    work(ask)
                    return
                self._run(connection, self._statements["begin"].format(token=token, number=mark.number))
                try:
                    work(ask)
                    number.append(mark.number)
                    self._run(connection, "COMMIT")
                except BaseException:
                    if connection.is_valid:
                        with suppress(SQLAlchemyError):
                            self._run(connection, "ROLLBACK")
                    raise

            try:
                on_driver(self.engine, run)
                self.commits += 1
                return 0
            except _UnmarkedError:
                continue
            except SQLAlchemyError as error:
                cut_off = is_cut_off(error)
                if cut_off and number:
                    last, sent = self._ended(number[0], token, self.error(error))
                    if last == token:
                        self.commits += 1
                        return sent
                if not left or not (cut_off or is_collision(error)):
                    raise self.error(error) from None
        raise AssertionError

    def _mark(self, connection: PoolProxiedConnection) -> _Mark:
        """Return the row of a connection."""
        mark: _Mark = connection.info.setdefault("mark", _Mark())
        if mark.uses >= USES or mark.router != self.router:  # those of one that others took for dead are removed
            number, router = random.getrandbits(62), self.router
            self._run(connection, self._statements["connection"], (mark.number, number, router))
            mark.number, mark.router, mark.uses = number, router, 0
        mark.uses += 1
        return mark

    def _run(self, connection: PoolProxiedConnection, statement: str, given: tuple[Any, ...] = ()) -> list[Any]:
        """Return the rows. Raises SQLAlchemyError."""
        driver: Any = connection.driver_connection
        try:
            cursor = driver.cursor(binary=bool(given))
            if given:
                cursor.execute(statement, given)
            else:
                cursor.execute(statement, prepare=False)  # one of several cannot be
            return cursor.fetchall() if cursor.pgresult.nfields else []
        except psycopg.Error as error:
            is_gone = driver.closed
            if is_gone:
                connection.invalidate(error)
            raise driver_error(error, self.engine, is_gone) from None

    def _ended(self, number: int, token: int, cause: AnabranchError) -> tuple[int, int]:
        """Return what a connection's row has, which is removed (D12). Raises OutcomeUnknownError."""
        deadline = time.monotonic() + self._outcome_timeout
        while True:
            try:
                # The answer to the second may be lost, too: then it is not there the next time.
                found = [one for one in self.look("last", number) if one[0] == token]
                gone = self.look("disconnect", number)
            except AnabranchError:
                if time.monotonic() >= deadline:
                    raise self._lost() from cause
                time.sleep(PAUSE)
                continue
            if not gone and not found:
                raise self._lost() from cause
            last, sent = (gone or found)[0]
            return last, sent

    def _lost(self) -> OutcomeUnknownError:
        return OutcomeUnknownError(
            f"store {self.name!r}: the connection to its database was lost in a COMMIT, and nobody can tell whether "
            "that took effect; repeat a send with the same message_id, which is stored once"
        )
