"""The tables of a shared store: made by the first router, recognised by the others."""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy.engine import Connection

from ....policies.errors import ConfigError, PlacementError
from ..database.connections import shown_url
from ..database.dialects import one_at_a_time
from ..database.errors import Database
from .statements import TABLES

VERSION: Final = 2


def prepare(database: Database, prefix: str, store_id: bytes) -> bytes:
    """Make the tables, whole or not at all, unless they are there; return the id of the store that they are. Raises
    ConfigError, StoreFailedError."""

    def create(connection: Connection) -> bytes:
        _require_server(database, connection)
        one_at_a_time(connection)
        found = _found(database, connection, prefix)
        if found is None:
            if "." in prefix:
                connection.exec_driver_sql(f"CREATE SCHEMA IF NOT EXISTS {prefix.partition('.')[0]}")
            for text in TABLES:
                connection.exec_driver_sql(text.replace("{p}", prefix))
            connection.exec_driver_sql(
                f"INSERT INTO {prefix}shared_store (storeid, version) VALUES (%s, %s)", (store_id.hex(), VERSION)
            )
            connection.commit()
        return found or store_id

    return database.read(create)


def require(database: Database, prefix: str, store_id: bytes) -> str:
    """Check that the tables of a store that is about to be opened are there, and its own; return their sequence of ids,
    as SQL. Raises ConfigError, PlacementError, StoreFailedError."""

    def look(connection: Connection) -> tuple[bytes | None, str]:
        _require_server(database, connection)
        found = _found(database, connection, prefix)
        if found is None:
            return None, ""
        ids = f"SELECT quote_literal(pg_get_serial_sequence('{prefix}shared_messages', 'id')) || '::regclass'"
        return found, connection.exec_driver_sql(ids).scalar_one()

    found, ids = database.read(look)
    where = f"store {database.name!r}: {shown_url(database.engine.url)}"
    if found is None:
        raise PlacementError(
            f"{where} has no table {prefix}shared_store; nothing was created. See to the url and schema_prefix, which "
            "say where the store's tables are, or restore the database"
        )
    if found != store_id:
        raise PlacementError(
            f"{where}: the tables belong to the store with the id {found.hex()}, this one is {store_id.hex()}; give it "
            "another schema_prefix or database"
        )
    return ids


def _found(database: Database, connection: Connection, prefix: str) -> bytes | None:
    """Return the id of the store whose tables are there; None without tables."""
    if connection.exec_driver_sql("SELECT to_regclass(%s)", (f"{prefix}shared_store",)).scalar() is None:
        return None
    rows = connection.exec_driver_sql(f"SELECT storeid, version FROM {prefix}shared_store").all()
    where = f"store {database.name!r}: the tables {prefix}shared_* in {shown_url(database.engine.url)}"
    if len(rows) != 1:
        raise PlacementError(f"{where} belong to {len(rows)} stores, as {prefix}shared_store says; restore its row")
    if rows[0].version != VERSION:
        raise ConfigError(
            [f"{where} are of version {rows[0].version}, this is version {VERSION}; use the other release"]
        )
    return bytes.fromhex(rows[0].storeid)


def _require_server(database: Database, connection: Connection) -> None:
    """Raise ConfigError for a server that lacks what the statements need."""
    where = f"store {database.name!r}: {shown_url(database.engine.url)}"
    version = int(connection.exec_driver_sql("SHOW server_version_num").scalar_one())
    encoding = connection.exec_driver_sql("SHOW server_encoding").scalar_one()
    if version < 130_000:
        raise ConfigError([f"{where} is PostgreSQL {version // 10_000}; a shared store needs 13 or later"])
    if encoding != "UTF8":
        raise ConfigError([f"{where} has the encoding {encoding}; it must be UTF8"])
    if _is_pooled(database, connection):
        raise ConfigError(
            [
                f"{where} is a pooler that gives each transaction another connection (pgbouncer's pool_mode "
                "transaction), over which nobody hears of messages; give the server's own address, or that of a pooler "
                "of sessions"
            ]
        )


def _is_pooled(database: Database, connection: Connection) -> bool:
    """Return whether the transactions of a connection do not stay with one process of the server. In between anybody
    may have had that, and it is free for another connection."""

    def process(of: Connection) -> int:
        return int(of.exec_driver_sql("SELECT pg_backend_pid()").scalar_one())

    first = process(connection)
    driver: Any = connection.connection.driver_connection
    if driver.info.backend_pid == first:  # as it was told when it connected
        return False
    connection.rollback()
    with database.engine.connect() as other:
        return process(other) == first or process(connection) != first
