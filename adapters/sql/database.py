"""The database of a store: reading from it, and what its errors mean to who called."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from ...policies.errors import AnabranchError, StoreFailedError, StoreFullError
from ..files import refused
from . import dialects
from .pool import scrubbed, shown_url

T = TypeVar("T")


class Database:
    """Threads: all."""

    def __init__(self, name: str, engine: Engine) -> None:
        self.name, self.engine = name, engine

    def read(self, work: Callable[[Connection], T]) -> T:
        """What `work` finds, in a transaction of its own that changes nothing. Raises StoreFailedError."""
        for last in (False, True):
            try:
                with self.engine.connect() as connection:
                    return work(connection)
            except SQLAlchemyError as error:
                if last or not is_cut_off(error):  # a connection that had lain idle may be dead
                    raise self.error(error) from None
        raise AssertionError

    def writing(self) -> Connection:
        """A connection for a transaction that writes. Raises SQLAlchemyError."""
        return self.engine.connect().execution_options(**{dialects.WRITES: True})

    def error(self, error: SQLAlchemyError) -> AnabranchError:
        """What to raise for it. Without its cause: a driver may have put a password there."""
        said = self.said(error)
        out_of_files = dialects.out_of_files(error)
        if out_of_files is not None:
            return refused(f"store {self.name!r}: {said}", out_of_files)
        if dialects.is_full(error):
            return StoreFullError(f"store {self.name!r}: its database is full: {said}; free some space")
        where = shown_url(self.engine.url)
        if isinstance(error, DBAPIError) and not is_cut_off(error) and dialects.is_mistake(error):
            return StoreFailedError(f"store {self.name!r}: the database {where} refuses: {said}; nothing was changed")
        return StoreFailedError(
            f"store {self.name!r}: the database {where} cannot be used now: {said}; each call tries again"
        )

    def disk_failed(self, error: SQLAlchemyError) -> StoreFailedError:
        """What the store fails for if the database says that the disk has failed, or that its file is damaged."""
        where = shown_url(self.engine.url)
        return StoreFailedError(f"its database {where} is damaged, or its disk has failed: {self.said(error)}")

    def said(self, error: BaseException) -> str:
        """The driver's words, on one line."""
        original = getattr(error, "orig", None) or error
        words = " ".join(str(original).split()) or type(original).__name__
        return scrubbed(words, self.engine.url)


def is_cut_off(error: SQLAlchemyError) -> bool:
    """Whether the connection broke, and not what was asked of it."""
    return isinstance(error, DBAPIError) and error.connection_invalidated
