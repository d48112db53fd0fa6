"""OUTBOX: what callers send and ack in transactions of their own, on connections of their own (core/outbox.py).

A row is written by the caller's connection, and commits or not with all else that its transaction does. That this is
the same database is asked of the database itself, once for each transaction: on PostgreSQL the table's OID, the
database's and the server's start, on SQLite the file. A copy of the database, which knows the same store id, is another
one.

Whether a transaction is over is known from its connection, where that is still there, and on PostgreSQL from
`txid_status`: one whose COMMIT was cut off may be at it still.
"""

from __future__ import annotations

import logging
import secrets
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from sqlalchemy import event, text
from sqlalchemy.engine import Connection, RootTransaction
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from ...policies.errors import TransactionError
from ..core.backend.outbox_rows import Caller as AnyCaller
from ..core.backend.outbox_rows import EndListener, Entry, Written
from .database.connections import shown_url
from .database.drivers import (
    DriverTransaction,
    begin,
    begin_advice,
    borrowed,
    driver_of,
    errors_of,
    is_in_transaction,
    url_of,
)
from .database.errors import Database, is_cut_off
from .database.schema import Schema
from .database.statements import Statements

log: logging.Logger = logging.getLogger(__name__)

TAKING_PART: Final = ("postgresql", "sqlite")
"""Databases whose transactions callers can have sends and acks in: those where it can be told how one ended."""

_where_postgresql: Final = text(
    "SELECT CAST(CAST(to_regclass(:name) AS OID) AS BIGINT), "
    "CAST((SELECT oid FROM pg_database WHERE datname = current_database()) AS BIGINT), "
    "CAST(pg_postmaster_start_time() AS TEXT)"
)
_transaction_postgresql: Final = text("SELECT txid_current()")
_status_postgresql: Final = text("SELECT txid_status(CAST(:transaction AS BIGINT))")


class Caller:
    """One transaction of a caller."""

    __slots__ = ("is_open", "key", "listener", "transaction")

    def __init__(self, is_open: Callable[[], bool], listener: EndListener, transaction: int) -> None:
        self.key: str = secrets.token_hex(16)
        self.is_open: Final = is_open
        """Tells whether the transaction's connection is still in it, as far as is known."""
        self.listener: Final = weakref.ref(listener)
        self.transaction: int = transaction
        """PostgreSQL's number of the transaction; 0 elsewhere."""

    def ending(self) -> None:
        """Tell that it is about to end, or has just ended."""
        listener = self.listener()
        if listener is not None:
            listener.ending(self)


class Outbox:
    """The outbox of one store. Threads: all."""

    def __init__(self, name: str, database: Database, statements: Statements, tables: Schema, chunk_size: int) -> None:
        self._name, self._database, self._statements = name, database, statements
        self._table, self._chunk_size = tables.outbox.fullname, chunk_size
        self._lock = threading.RLock()  # the collector may come back to it
        self._callers: weakref.WeakKeyDictionary[RootTransaction, Caller] = weakref.WeakKeyDictionary()
        self._heard: weakref.WeakSet[Connection] = weakref.WeakSet()
        """Connections whose events are listened to."""
        self._of_drivers: dict[int, tuple[DriverTransaction, Caller]] = {}
        """What is open on connections that are not SQLAlchemy's, by their ids."""
        self._here: tuple[Any, ...] | None = None
        """The values that tell our database from others, as it was asked last."""

    # Callers

    def enlist(self, connection: Any, listener: EndListener) -> Caller:
        """Return the transaction that is open on a connection, as OutboxRows."""
        driver = driver_of(connection)
        if driver is not None:
            with errors_of(connection):
                return self._enlisted_of_driver(connection, driver, listener)
        self._require_connection(connection)
        self._require_transaction(connection, connection)
        root = connection.get_transaction()
        with self._lock:
            caller = self._callers.get(root) if root is not None else None
        if caller is None:
            caller = self._enlisted(connection, listener)
        return caller

    def _enlisted(self, connection: Connection, listener: EndListener) -> Caller:
        self._require_here(connection)
        number = _number(connection)
        root = connection.get_transaction() or connection.begin()
        caller = Caller(partial(_is_in, weakref.ref(connection), weakref.ref(root)), listener, number)
        with self._lock:
            if connection not in self._heard:
                _listen(connection, weakref.ref(self))
                self._heard.add(connection)
            self._callers[root] = caller
        return caller

    def _enlisted_of_driver(self, given: Any, driver: Any, listener: EndListener) -> Caller:
        if getattr(driver, "closed", False):
            raise _closed()
        with borrowed(driver) as connection:
            self._require_connection(connection)
            self._require_transaction(connection, given)
            with self._lock:
                is_open, caller = self._of_drivers.get(id(driver), (None, None))
            if connection.dialect.name == "sqlite" and getattr(driver, "autocommit", True) is False:
                raise TransactionError(
                    "a connection of sqlite3's with autocommit=False begins the next transaction as it ends one, so "
                    "nobody sees the end; leave autocommit out. Nothing was done"
                )
            goes_on = is_open is not None and is_open.is_on(driver)
            begin(driver)
            number = _number(connection)
            if caller is None or not goes_on or caller.transaction != number:
                self._require_here(connection)
                if is_open is not None:
                    is_open.end()
                is_open = DriverTransaction(driver)
                caller = Caller(is_open, listener, number)
                with self._lock:
                    left = {key: one for key, one in self._of_drivers.items() if one[0]()}
                    self._of_drivers = left | {id(driver): (is_open, caller)}
        if getattr(given, "in_atomic_block", False):  # of Django's, which tells
            given.on_commit(caller.ending)
        return caller

    def ending(self, connection: Connection) -> None:
        """Tell that the transaction on a connection is about to end. Raises nothing: the caller's transaction would
        fail."""
        try:
            root = connection.get_transaction()
            with self._lock:
                caller = self._callers.get(root) if root is not None else None
            if caller is not None:
                caller.ending()
        except Exception:
            log.exception("store %s: the end of a caller's transaction is found out later", self._name)

    def _require_connection(self, connection: Any) -> None:
        if not isinstance(connection, Connection):
            given = type(connection)
            advice = {
                "Session": "; session.connection() is that of its transaction",
                "AsyncConnection": "; await connection.run_sync(...) gives one to a function",
                "Engine": "; engine.begin() makes one with its transaction",
            }
            raise TypeError(
                f"connection is one of psycopg, sqlite3 or Django, or a sqlalchemy.Connection, not {given.__name__}"
                f"{advice.get(given.__name__, '') if given.__module__.startswith('sqlalchemy') else ''}"
            )
        if connection.closed:
            raise _closed()
        ours, theirs = self._database.engine.dialect.name, connection.dialect.name
        if ours != theirs:
            raise self._elsewhere(connection, f"is {theirs}")

    def _elsewhere(self, connection: Connection, why: str) -> TransactionError:
        return TransactionError(
            f"store {self._name!r} is in {shown_url(self._database.engine.url)}, and the connection to "
            f"{shown_url(url_of(connection))} {why}: it cannot send or ack there; give one to the store's database. "
            "Nothing was done"
        )

    def _require_transaction(self, connection: Connection, given: Any) -> None:
        """Check that the connection has transactions: what is written on it is not committed at once. Raises
        TransactionError."""
        driver: Any = connection.connection.dbapi_connection
        level = connection.get_execution_options().get("isolation_level")
        autocommit = level == "AUTOCOMMIT" or (
            getattr(driver, "autocommit", False) is True and not is_in_transaction(driver)
        )
        if connection.dialect.name == "sqlite" and not autocommit:
            # Without `autocommit`, or where it says that the older attribute counts: None begins no transaction.
            older = getattr(driver, "autocommit", -1) == -1 and getattr(driver, "isolation_level", "") is None
            autocommit = older and not getattr(driver, "in_transaction", True) and connection.in_transaction()
            if older and not connection.in_transaction():
                connection.begin()  # an engine whose `begin` event begins it has done so now
                autocommit = not driver.in_transaction
                if autocommit:
                    connection.rollback()
        if autocommit:
            raise TransactionError(
                f"the connection to {shown_url(url_of(connection))} commits each statement at once (autocommit), so "
                f"there is no transaction to send or ack in; {begin_advice(given)}. Nothing was done"
            )

    def _require_here(self, connection: Connection) -> None:
        theirs = self._where(connection)
        if self._here != theirs:
            self._here = self._database.read(self._where)  # a server that was started again is another one
        if theirs[0] is None:
            raise self._elsewhere(connection, f"does not find its table {self._table}")
        if self._here != theirs:
            raise self._elsewhere(connection, "is to another database")

    def _where(self, connection: Connection) -> tuple[Any, ...]:
        """Return the values that no other database has."""
        if connection.dialect.name == "postgresql":
            return tuple(connection.execute(_where_postgresql, {"name": self._table}).one())
        for row in connection.exec_driver_sql("PRAGMA database_list").all():
            if row[1] == "main" and row[2]:
                try:
                    status = Path(row[2]).stat()
                except FileNotFoundError:
                    break
                return (status.st_dev, status.st_ino)
        return (None,)

    def is_over(self, caller: AnyCaller) -> bool:
        """Return whether a transaction has ended for certain, as OutboxRows."""
        assert isinstance(caller, Caller)
        if caller.is_open():
            return False
        if not caller.transaction:
            return not isinstance(caller.is_open, DriverTransaction) or self._nobody_commits()

        def status(connection: Connection) -> bool:
            try:
                there = connection.execute(_status_postgresql, {"transaction": caller.transaction}).scalar()
            except DBAPIError as error:
                if is_cut_off(error):
                    raise
                return True  # the server knows no such number: it is another one's copy, where this never was
            return there != "in progress"

        return self._database.read(status)

    def _nobody_commits(self) -> bool:
        """Return whether no COMMIT is under way in SQLite, waiting for one as for any lock. It has the lock for writing
        until it is done, and sqlite3's `in_transaction` is false before."""
        try:
            self._database.write(lambda connection: connection.begin().rollback())
        except SQLAlchemyError:
            return False
        return True

    # Rows

    def put(self, connection: Any, caller: AnyCaller, entries: Sequence[Entry]) -> None:
        """Write the entries down in the caller's transaction, as OutboxRows."""
        rows = [row for entry in entries for row in self._rows(caller.key, entry)]
        driver = driver_of(connection)
        with errors_of(connection), nullcontext(connection) if driver is None else borrowed(driver) as ours:
            ours.execute(self._statements["insert.outbox"], rows if len(rows) > 1 else rows[0])

    def _rows(self, caller: str, entry: Entry) -> Iterator[dict[str, Any]]:
        number, destination, seq, subscription, record, _ = entry
        for part, start in enumerate(range(0, len(record) or 1, self._chunk_size)):
            yield {
                "number": number, "part": part, "caller": caller, "destination": destination, "id": seq,
                "durable": subscription, "content": record[start : start + self._chunk_size] or None,
            }  # fmt: skip

    def written(self, after: int, most: int, caller: str | None = None) -> Sequence[Written]:
        """Return the committed entries behind a number, as OutboxRows."""
        name, parameters = "select.outbox", {"after": after, "most": most}
        if caller is not None:
            name, parameters = "select.outbox.caller", {**parameters, "caller": caller}  # type: ignore[dict-item]
        rows = self._database.read(lambda connection: connection.execute(self._statements[name], parameters).all())
        return [Written(number, key, int(size or 0)) for number, key, size in rows]

    def entries(self, caller: str, first: int, last: int) -> Sequence[Entry]:
        """Return the entries of one transaction between two numbers, as OutboxRows."""
        statement = self._statements["select.outbox.rows"]
        parameters = {"caller": caller, "first": first, "last": last}
        rows = self._database.read(lambda connection: connection.execute(statement, parameters).all())
        entries = []
        for number, parts in groupby(rows, lambda row: row[0]):
            those = list(parts)
            _, destination, seq, subscription, _ = those[0]
            record = b"".join(bytes(row[4] or b"") for row in those)
            entries.append(Entry(number, destination, seq, subscription, record, len(those)))
        return entries


def _number(connection: Connection) -> int:
    """Return PostgreSQL's number of the transaction, which begins with that; 0 elsewhere."""
    if connection.dialect.name != "postgresql":
        return 0
    return int(connection.execute(_transaction_postgresql).scalar_one())


def _is_in(connection: weakref.ref[Connection], root: weakref.ref[RootTransaction]) -> bool:
    """Return whether a connection is still in its transaction."""
    its, transaction = connection(), root()
    return its is not None and transaction is not None and its.get_transaction() is transaction


def _closed() -> TransactionError:
    return TransactionError("the connection is closed; open one, and use it before it is closed")


def _listen(connection: Connection, outbox: weakref.ref[Outbox]) -> None:
    """Hear of the ends of the connection's transactions, from now on."""

    def ending(connection: Connection, *_: Any) -> None:
        its = outbox()
        if its is not None:
            its.ending(connection)

    for name in ("commit", "rollback", "commit_twophase", "rollback_twophase"):
        event.listen(connection, name, ending, named=False)
