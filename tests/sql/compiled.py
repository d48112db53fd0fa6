"""Statements that a process compiles once. SQLAlchemy compiles them for each engine, and each test has engines of its
own: that is half of what opening a store takes. What comes of it depends on the kind and the version of the database.
"""

from __future__ import annotations

from typing import Any, Final

import sqlalchemy
from sqlalchemy.engine.default import DefaultDialect
from sqlalchemy.util import LRUCache

from anabranch.adapters.sql.database import connections

_COMPILED: Final[LRUCache[Any, Any]] = LRUCache(20_000)


def _of(dialect: object) -> tuple[object, ...]:
    return type(dialect), getattr(dialect, "paramstyle", None), getattr(dialect, "server_version_info", None)


def _create_engine(*arguments: Any, **options: Any) -> sqlalchemy.Engine:
    engine = sqlalchemy.create_engine(*arguments, **options)
    engine._compiled_cache = _COMPILED
    return engine


def share(shared: bool) -> None:
    """Let all stores' engines that are made from now on share them, or none."""
    connections.create_engine = _create_engine if shared else sqlalchemy.create_engine  # type: ignore[attr-defined]


# A dialect is part of each key, and each engine has its own.
DefaultDialect.__eq__ = lambda self, other: _of(self) == _of(other)  # type: ignore
DefaultDialect.__hash__ = lambda self: hash(type(self))  # type: ignore
