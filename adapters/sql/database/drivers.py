"""Connections of callers' that are not SQLAlchemy's: a driver's own, of psycopg or sqlite3, and Django's over one.

    with borrowed(driver) as connection: ...    # SQLAlchemy's, in the transaction that is open there

They tell nobody when their transactions end, so that they are asked.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any, Final

from sqlalchemy import create_engine
from sqlalchemy.engine import URL, Connection, Engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool

_URLS: Final = {"psycopg": "postgresql+psycopg://", "sqlite3": "sqlite://"}
"""By the module of the driver."""

_given = threading.local()
"""`driver`: the one that the thread is just borrowing."""


def driver_of(connection: Any) -> Any:
    """Return the driver's connection that this one is, or has, if it is Django's; None for any other."""
    if hasattr(connection, "ensure_connection"):
        connection.ensure_connection()
        connection = connection.connection
    return connection if _module_of(connection) is not None else None


def errors_of(connection: Any) -> AbstractContextManager[None]:
    """Return what makes a driver's errors Django's, where the connection is."""
    return getattr(connection, "wrap_database_errors", None) or nullcontext()


def url_of(connection: Connection) -> URL:
    """Return where a connection of SQLAlchemy's leads, a borrowed one too; its password may be left out."""
    driver = connection.connection.dbapi_connection
    if not isinstance(driver, _Borrowed):
        return connection.engine.url
    if connection.dialect.name == "sqlite":
        paths = [path for _, name, path in connection.exec_driver_sql("PRAGMA database_list") if name == "main"]
        return connection.engine.url.set(database=paths[0])
    info = driver.info
    return connection.engine.url.set(username=info.user, host=info.host, port=info.port, database=info.dbname)


def begin_advice(connection: Any) -> str:
    """Return how a transaction is begun on a caller's connection that is in none."""
    if hasattr(connection, "ensure_connection"):
        return f"call it within django.db.transaction.atomic({connection.alias!r})"
    if isinstance(connection, Connection):
        return "use one without isolation_level AUTOCOMMIT"
    return "begin one before, or use a connection without autocommit"


def _module_of(driver: Any) -> str | None:
    for one in type(driver).__mro__:
        module = one.__module__.partition(".")[0]
        if one.__name__ == "Connection" and module in _URLS:
            return module
    return None


def is_in_transaction(driver: Any) -> bool:
    """Return whether a transaction is open on a driver's connection, as that knows without asking its database. False
    for one that is closed, or does not tell."""
    try:
        if getattr(driver, "closed", False):
            return False
        info = getattr(driver, "info", None)
        return bool(driver.in_transaction if info is None else info.transaction_status)
    except Exception:  # sqlite3's own, of one that is closed
        return False


class DriverTransaction:
    """Tells whether the transaction that is open on a driver's connection is open still. Once it is not it never is
    again; another one may have begun unnoticed if nobody has asked in between."""

    def __init__(self, driver: Any) -> None:
        self._driver: Callable[[], Any]
        try:
            self._driver = weakref.ref(driver)
        except TypeError:  # sqlite3's, which is kept until its transaction has ended
            self._driver = lambda: driver

    def __call__(self) -> bool:
        driver = self._driver()
        if driver is not None and not is_in_transaction(driver):
            self.end()
        return self._driver() is not None

    def is_on(self, driver: Any) -> bool:
        """Return whether it is open, and on this connection."""
        return self() and self._driver() is driver

    def end(self) -> None:
        """Note that it has ended."""
        self._driver = lambda: None


class _Borrowed:
    """The driver's connection as SQLAlchemy may use it. Its owner alone ends transactions, and closes it."""

    def __init__(self, driver: Any) -> None:
        self._driver, self._rows = driver, None
        if _module_of(driver) == "psycopg":
            from psycopg.rows import tuple_row

            self._rows = tuple_row

    def __getattr__(self, name: str) -> Any:
        return getattr(self._driver, name)

    def cursor(self, *given: Any, **named: Any) -> Any:
        """Return a cursor whose rows are tuples."""
        cursor = self._driver.cursor(*given, **named)
        cursor.row_factory = self._rows
        return cursor

    def _ignored(self, *_: Any, **__: Any) -> None:
        pass

    commit = rollback = close = _ignored
    create_function = add_notice_handler = _ignored
    """SQLAlchemy's REGEXP, which would replace its owner's, and its log of notices."""


@cache
def _engine(url: str) -> Engine:
    options = {"use_native_hstore": False} if url.startswith("postgresql") else {}
    return create_engine(url, creator=lambda: _Borrowed(_given.driver), poolclass=NullPool, **options)


@contextmanager
def borrowed(driver: Any) -> Iterator[Connection]:
    """Give a connection of SQLAlchemy's over a driver's, in whose transaction it is. Errors are the driver's own."""
    _given.driver = driver
    try:
        with _engine(_URLS[str(_module_of(driver))]).connect() as connection:
            yield connection
    except DBAPIError as error:
        raise (error.orig or error) from None
    finally:
        _given.driver = None


def begin(driver: Any) -> None:
    """Begin a transaction, where sqlite3 would with the first statement that writes."""
    if _module_of(driver) == "sqlite3" and not driver.in_transaction:
        driver.execute(f"BEGIN {driver.isolation_level or ''}")
