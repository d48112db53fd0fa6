"""The database of a store: how to read from it, and what its errors mean to who called."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from ....policies.config.options import SqlOptions
from ....policies.errors import AnabranchError, ConfigError, StoreFailedError, StoreFullError
from ...system.files import MAKE_ROOM, refused
from . import dialects
from .connections import on_connection, shown_url, words_of
from .statements import keepalive_statement

T = TypeVar("T")


class Database:
    """The database of one store. Threads: all."""

    def __init__(self, name: str, engine: Engine) -> None:
        self.name = name
        self.engine = engine

    def read(self, work: Callable[[Connection], T]) -> T:
        """Return what `work` finds, in a transaction of its own that changes nothing. Raises StoreFailedError."""
        for last in (False, True):
            try:
                return on_connection(self.engine, work)
            except SQLAlchemyError as error:
                if last or not is_cut_off(error):  # a connection that had lain idle may be dead
                    raise self.error(error) from None
        raise AssertionError

    def write(self, work: Callable[[Connection], T]) -> T:
        """Return what `work` returns, in a transaction that writes and that `work` commits. Raises SQLAlchemyError."""
        return on_connection(self.engine, work, **{dialects.WRITES: True})

    def require_keepalive(self, options: SqlOptions) -> None:
        """Run `keepalive_statement` once, before anything depends on it. Raises ConfigError if the database takes it
        for wrong, StoreFailedError if it cannot be used now."""
        statement = keepalive_statement(options)
        if not statement or self.engine.dialect.name == "sqlite":  # connections to a file are not kept alive
            return

        def run(connection: Connection) -> None:
            try:
                connection.execution_options(no_parameters=True).exec_driver_sql(statement)
            except DBAPIError as error:
                if is_cut_off(error) or not dialects.is_mistake(error):
                    raise
                raise ConfigError(
                    [
                        f"store {self.name!r}: keepalive_statement {statement!r} is wrong, "
                        f"{shown_url(self.engine.url)} says: {self.words(error)}; mend it, or leave it out"
                    ]
                ) from None

        self.read(run)

    def error(self, error: SQLAlchemyError) -> AnabranchError:
        """Return the error to raise for one of the database. It has no cause: a driver may have put a password
        there."""
        words = self.words(error)
        out_of_files = dialects.out_of_files(error)
        if out_of_files is not None:
            return refused(f"store {self.name!r}: {words}", out_of_files)
        if dialects.is_full(error):
            what = f"store {self.name!r}: its database is full: {words}; free some space and try again"
            return StoreFullError(f"{what}: {MAKE_ROOM}")
        where = shown_url(self.engine.url)
        if isinstance(error, DBAPIError) and not is_cut_off(error) and dialects.is_mistake(error):
            return StoreFailedError(f"store {self.name!r}: the database {where} refuses: {words}; nothing was changed")
        return StoreFailedError(
            f"store {self.name!r}: the database {where} cannot be used now: {words}; each call tries again"
        )

    def disk_failed(self, error: SQLAlchemyError) -> StoreFailedError:
        """Return what the store fails for if its disk has failed or its file is damaged, as the database says."""
        where = shown_url(self.engine.url)
        return StoreFailedError(f"its database {where} is damaged, or its disk has failed: {self.words(error)}")

    def words(self, error: BaseException) -> str:
        """Return the driver's words, on one line, without the secrets of the URL."""
        return words_of(error, self.engine.url)


def is_cut_off(error: SQLAlchemyError) -> bool:
    """Return whether the connection broke, and not what was asked of it."""
    return isinstance(error, DBAPIError) and error.connection_invalidated
