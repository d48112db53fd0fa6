"""What differs from one database to another: here and nowhere else."""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import event
from sqlalchemy.engine import Connection, Engine

SQLITE_FILE: Final = "store.db"
WRITES: Final = "anabranch_writes"
"""An execution option of connections: its transactions write."""
BUSY_SECONDS: Final = 10.0
"""How long SQLite waits for another one's lock: a backup tool's, say."""


def connect_args(sqlite: bool) -> dict[str, Any]:
    """What the driver's connect() is given."""
    return {"check_same_thread": False, "timeout": BUSY_SECONDS} if sqlite else {}


def configure(engine: Engine) -> None:
    """Every connection and transaction of this engine is as durable as it must be (rule T6)."""
    if engine.dialect.name == "sqlite":
        event.listen(engine, "connect", _sqlite_connect)
        event.listen(engine, "begin", _sqlite_begin)
    elif engine.dialect.name == "postgresql":
        event.listen(engine, "connect", _postgresql_connect)


def _sqlite_connect(connection: Any, _record: Any) -> None:
    connection.isolation_level = None  # BEGIN is ours, below
    cursor = connection.cursor()
    for pragma in ("journal_mode=WAL", "synchronous=FULL"):
        cursor.execute(f"PRAGMA {pragma}").fetchall()
    cursor.close()


def _sqlite_begin(connection: Connection) -> None:
    # A transaction that begins as a reader and then writes fails at once when another one has written meanwhile.
    writes = connection.get_execution_options().get(WRITES, False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _postgresql_connect(connection: Any, _record: Any) -> None:
    with connection.cursor() as cursor:
        cursor.execute("SET synchronous_commit = on")
    connection.commit()
