"""The tables as a script: printed for who runs it himself, run for who does not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from sqlalchemy import func, inspect, select
from sqlalchemy.dialects import registry
from sqlalchemy.engine import Connection, Dialect
from sqlalchemy.schema import CreateIndex, CreateSchema, CreateTable, DDLElement, DropTable

from . import dialects
from .schema import Schema, priority_index

DIALECTS = ("postgresql", "sqlite")
"""The dialects that a script can be had for."""


class Held(NamedTuple):
    """The contents of the tables that would be missed."""

    messages: int
    prepared: int
    """Transactions that wait for their outcome."""
    owner: str | None
    """The node that has the lease now."""


def create_script(tables: Schema, dialect: str, priorities: bool) -> list[str]:
    """Return the statements that make the tables, each one a line or more, without their semicolons."""
    return [_compiled(element, registry.load(dialect)()) for element in _creating(tables, priorities)]


def drop_script(tables: Schema, dialect: str) -> list[str]:
    """Return the statements that remove the tables, with all that is in them."""
    return [_compiled(element, registry.load(dialect)()) for element in _dropping(tables)]


def _compiled(element: DDLElement, dialect: Dialect) -> str:
    lines = str(element.compile(dialect=dialect)).strip().splitlines()
    return "\n".join(line.rstrip().replace("\t", "    ") for line in lines)


def _creating(tables: Schema, priorities: bool) -> Iterator[DDLElement]:
    if tables.metadata.schema is not None:
        yield CreateSchema(tables.metadata.schema, if_not_exists=True)
    for table in tables.tables:
        yield CreateTable(table, if_not_exists=True)
        indexes = {index for index in table.indexes if index is not _order(tables)}
        for index in sorted(indexes, key=lambda index: str(index.name)):
            yield CreateIndex(index, if_not_exists=True)
    if priorities:
        yield CreateIndex(priority_index(tables), if_not_exists=True)


def _order(tables: Schema) -> object:
    """Return the index of stores with priorities, if somebody has asked for it."""
    name = f"{tables.messages.name}_order"
    return next((index for index in tables.messages.indexes if index.name == name), None)


def _dropping(tables: Schema) -> Iterator[DDLElement]:
    for table in reversed(tables.tables):
        yield DropTable(table, if_exists=True)


def create(connection: Connection, tables: Schema, priorities: bool) -> list[str]:
    """Make what is missing; return the names of the tables made. Commits nothing."""
    there = _there(connection, tables)
    for element in _creating(tables, priorities):
        connection.execute(element)
    return [table.name for table in tables.tables if table.name not in there]


def drop(connection: Connection, tables: Schema) -> list[str]:
    """Remove the tables with all that is in them; return the names of those that were there. Commits nothing."""
    there = _there(connection, tables)
    for element in _dropping(tables):
        connection.execute(element)
    return [table.name for table in tables.tables if table.name in there]


def _there(connection: Connection, tables: Schema) -> set[str]:
    names = inspect(connection).get_table_names(schema=tables.metadata.schema)
    return {table.name for table in tables.tables} & set(names)


def held(connection: Connection, tables: Schema) -> Held:
    """Return what is lost if the tables are dropped now."""
    there = _there(connection, tables)

    def count(name: str) -> int:
        table = getattr(tables, name)
        if table.name not in there:
            return 0
        return int(connection.execute(select(func.count()).select_from(table)).scalar_one())

    owner = None
    if tables.lease.name in there and connection.dialect.name in dialects.LEASED:
        lease = tables.lease.c
        owner = connection.execute(select(lease.holder).where(lease.expires > dialects.now_ms())).scalar()
    return Held(count("messages") + count("outbox"), count("xalog"), owner)
