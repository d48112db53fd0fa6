"""A store's tables in its database: made, adopted, or refused.

They belong to one store, whose id is in STORE. When a store is created, tables that are there already are adopted if
they are empty, or if nobody has written an id there; those of another store are refused. With a lease they may be
another node's: then this is one more node of the same store, under the same id.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final

from sqlalchemy import Table, inspect, literal, select
from sqlalchemy.engine import Connection
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.schema import CreateSchema

from ....policies.config.options import SqlOptions
from ....policies.errors import ConfigError, PlacementError
from .connections import on_connection, shown_url
from .dialects import is_locked, now_ms, one_at_a_time, wait_for_locks
from .errors import Database, is_cut_off
from .schema import VERSION, Schema, priority_index

log: logging.Logger = logging.getLogger(__name__)

LOCKED_SECONDS: Final = 3.0


def prepare(database: Database, tables: Schema, options: SqlOptions, store_id: bytes) -> bytes:
    """Make or adopt the tables of a new store, whole or not at all, where the database can do that. Return the id that
    the store has. Raises ConfigError, PlacementError if the tables are another store's, StoreFailedError."""

    def create(connection: Connection) -> bytes:
        _require_unicode(database, connection)
        one_at_a_time(connection)
        existing = _existing_columns(connection, tables)
        missing = [table for table in tables.tables if table.name not in existing]
        if missing and not options.create_tables:
            step = "create them (`anabranch schema create`), or see to the url and schema_prefix"
            raise ConfigError([f"{_have_not(database, missing)}; {step}"])
        _require_columns(database, tables, existing)
        _create(connection, tables, missing)
        adopted = _adopt(database, connection, tables, store_id, options.lease_expiration is not None)
        connection.commit()
        return adopted

    try:
        return database.write(create)
    except SQLAlchemyError as error:
        raise database.error(error) from None


def require(database: Database, tables: Schema, options: SqlOptions, store_id: bytes) -> None:
    """Check that the tables of a store that is about to be opened are there, and its own. Raises ConfigError,
    PlacementError, StoreFailedError."""

    def look(connection: Connection) -> Sequence[Any]:
        _require_unicode(database, connection)
        if not _all_there(connection, tables):
            existing = _existing_columns(connection, tables)
            missing = [table for table in tables.tables if table.name not in existing]
            if missing:
                raise PlacementError(
                    f"{_have_not(database, missing)}; nothing was created. See to the url, schema_prefix and "
                    "table_names, which say where the store's tables are; to move messages from the old tables, give "
                    "the new store another name and run `anabranch repartition`; or restore the database"
                )
            _require_columns(database, tables, existing)
        return connection.execute(tables.store.select()).all()

    try:
        _require_owner(database, on_connection(database.engine, look), store_id)
        if options.priorities and options.create_tables:
            _index(database, tables)
    except SQLAlchemyError as error:
        raise database.error(error) from None


def _index(database: Database, tables: Schema) -> None:
    """Make the index by priority, unless somebody else keeps MESSAGES locked, as another node does that owns the store
    and stands still. Then a later open makes it."""

    def create(connection: Connection) -> None:
        wait_for_locks(connection, LOCKED_SECONDS)
        try:
            priority_index(tables).create(connection, checkfirst=True)
            connection.commit()
        except DBAPIError as error:
            if not is_locked(error):
                raise
            log.warning("store %s: MESSAGES is in use, it gets its index by priority at a later open", database.name)

    database.write(create)


def _all_there(connection: Connection, tables: Schema) -> bool:
    """Return whether all tables have all columns. To ask the database what it has would cost much more."""
    everything = [select(*table.columns).exists() for table in tables.tables]
    try:
        connection.execute(select(literal(1)).where(literal(0) == 1, *everything))
    except DBAPIError as error:
        if is_cut_off(error):
            raise
        connection.rollback()
        return False
    return True


def _existing_columns(connection: Connection, tables: Schema) -> dict[str, set[str]]:
    """Return the columns of those of our tables that are there."""
    names = [table.name for table in tables.tables]
    inspected = inspect(connection).get_multi_columns(schema=tables.metadata.schema, filter_names=names)
    return {name.lower(): {column["name"].lower() for column in columns} for (_, name), columns in inspected.items()}


def _have_not(database: Database, missing: Sequence[Table]) -> str:
    names = ", ".join(table.fullname for table in missing)
    return f"store {database.name!r}: {shown_url(database.engine.url)} has no {names}"


def _create(connection: Connection, tables: Schema, missing: Sequence[Table]) -> None:
    schema = tables.metadata.schema
    if missing and schema is not None and not inspect(connection).has_schema(schema):
        connection.execute(CreateSchema(schema))
    for table in missing:
        table.create(connection, checkfirst=False)


def _require_columns(database: Database, tables: Schema, existing: Mapping[str, set[str]]) -> None:
    problems = []
    for table in tables.tables:
        columns = existing.get(table.name)
        lacking = [column.name for column in table.columns if columns is not None and column.name not in columns]
        if lacking:
            problems.append(
                f"store {database.name!r}: the table {table.fullname} in {shown_url(database.engine.url)} lacks "
                f"{', '.join(lacking)}: it is of another version or another program's; choose another schema_prefix"
            )
    if problems:
        raise ConfigError(problems)


def _adopt(database: Database, connection: Connection, tables: Schema, store_id: bytes, leased: bool) -> bytes:
    rows = connection.execute(tables.store.select()).all()
    if len(rows) == 1 and rows[0].version == VERSION and leased:
        return bytes.fromhex(rows[0].storeid)
    if rows:
        holding = [tables.messages, tables.xalog, tables.durables, tables.outbox]
        owned = tables.lease.select().where(tables.lease.c.holder.is_not(None), tables.lease.c.expires > now_ms())
        held = any(connection.execute(table.select().limit(1)).first() for table in holding)
        if held or connection.execute(owned).first() or rows[0].version != VERSION:
            _require_owner(database, rows, store_id)
        for table in tables.tables:
            connection.execute(table.delete())
    connection.execute(
        tables.store.insert(),
        {"storeid": store_id.hex(), "version": VERSION, "batch": 0, "lastid": 0, "lastnumber": 0},
    )
    return store_id


def _require_owner(database: Database, rows: Sequence[object], store_id: bytes) -> None:
    where = f"store {database.name!r}: the tables in {shown_url(database.engine.url)}"
    if len(rows) != 1:
        raise PlacementError(
            f"{where} belong to {len(rows)} stores, as STORE says; restore the row of {store_id.hex()}"
        )
    owner, version = rows[0][0], rows[0][1]  # type: ignore[index]
    if version != VERSION:
        raise ConfigError([f"{where} are of version {version}, this is version {VERSION}; use the other release"])
    if owner != store_id.hex():
        raise PlacementError(
            f"{where} belong to the store with the id {owner}, this one is {store_id.hex()}; give it another "
            "schema_prefix or database"
        )


def _require_unicode(database: Database, connection: Connection) -> None:
    if connection.dialect.name != "postgresql":
        return
    encoding = connection.exec_driver_sql("SHOW server_encoding").scalar()
    if encoding != "UTF8":
        raise ConfigError(
            [f"store {database.name!r}: {shown_url(database.engine.url)} has the encoding {encoding}; it must be UTF8"]
        )
