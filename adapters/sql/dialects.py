"""What differs from one database to another: here and nowhere else."""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import event
from sqlalchemy.engine import URL, Connection, Engine

SQLITE_FILE: Final = "store.db"
WRITES: Final = "anabranch_writes"
"""An execution option of connections: its transactions write."""
BUSY_SECONDS: Final = 10.0
"""How long SQLite waits for another one's lock: a backup tool's, say."""


LIBPQ: Final = {
    "application_name": "anabranch",
    "connect_timeout": 10,
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}
"""A server whose machine is gone is noticed within half a minute; the URL's query may say other numbers."""


def connect_args(url: URL) -> dict[str, Any]:
    """What the driver's connect() is given."""
    if url.get_backend_name() == "sqlite":
        return {"check_same_thread": False, "timeout": BUSY_SECONDS}
    if url.get_backend_name() == "postgresql" and url.get_driver_name() in ("psycopg", "psycopg2"):
        return {name: value for name, value in LIBPQ.items() if name not in url.query}
    return {}


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
