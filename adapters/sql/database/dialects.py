"""The differences between databases: here and nowhere else."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from sqlalchemy import BigInteger, event, text
from sqlalchemy.engine import URL, Connection, Engine, ExceptionContext
from sqlalchemy.exc import DataError, DBAPIError, InterfaceError, OperationalError, SQLAlchemyError, StatementError
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.pool import ConnectionPoolEntry
from sqlalchemy.sql.functions import FunctionElement

from ...system.files import OUT_OF_FILES, open_file
from .pool import KeptPool, close_cursors, note_cursor

SQLITE_FILE: Final = "store.db"
WRITES: Final = "anabranch_writes"
"""An execution option of connections whose transactions write."""
BARE: Final = "anabranch_bare"
"""An execution option of connections on which statements run outside of any transaction. SQLite alone asks for it."""
SQLITE_FILES: Final = 4
"""The number of files that SQLite has open at once for one connection. They are the database, its directory, the
write-ahead log and its index."""
BUSY_SECONDS: Final = 10.0
"""The seconds for which SQLite waits for another one's lock: a backup tool's, say."""


LIBPQ: Final[dict[str, Any]] = {
    "application_name": "anabranch",
    "connect_timeout": 10,
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
    "target_session_attrs": "read-write",
}
"""Options by which a server whose machine is gone is noticed within half a minute, and no standby is taken for the
primary. The URL's query may say others."""


def connect_args(url: URL) -> dict[str, Any]:
    """Return what the driver's connect() is given."""
    if url.get_backend_name() == "sqlite":
        return {"check_same_thread": False, "timeout": BUSY_SECONDS}
    if url.get_backend_name() == "postgresql" and url.get_driver_name() in ("psycopg", "psycopg2"):
        return {name: value for name, value in LIBPQ.items() if name not in url.query}
    return {}


def make_sqlite_file(url: URL, file_mode: int) -> None:
    """Make SQLite's file before SQLite would, whose own heeds the umask alone. The files that SQLite makes beside it
    get the mode of this one. Nothing is made for a server or for a `file:` URI. A file that is there stays; it may be a
    link where a URL names it. Raises OSError."""
    path = _sqlite_file(url)
    if path is not None and not path.exists():
        os.close(open_file(path, os.O_RDWR | os.O_CREAT, file_mode))


def require_sqlite_file(url: URL) -> None:
    """Raise FileNotFoundError where SQLite would make a new file."""
    path = _sqlite_file(url)
    if path is not None:
        path.stat()


def _sqlite_file(url: URL) -> Path | None:
    """Return SQLite's file; None for a server and for a `file:` URI."""
    if url.get_backend_name() == "sqlite" and url.database and not url.database.startswith("file:"):
        return Path(url.database)
    return None


def configure(engine: Engine) -> None:
    """Make every connection and transaction of this engine as durable as it must be (rule T6)."""
    if engine.dialect.name == "sqlite":
        event.listen(engine, "connect", _sqlite_connect)
        event.listen(engine, "begin", _sqlite_begin)
        event.listen(engine, "before_cursor_execute", _sqlite_cursor)
        event.listen(engine, "close", _sqlite_close)
        event.listen(engine, "handle_error", _sqlite_error)
    elif engine.dialect.name == "postgresql":
        event.listen(engine, "connect", _postgresql_connect)


def _sqlite_connect(connection: Any, _record: Any) -> None:
    connection.isolation_level = None  # BEGIN is ours, below
    cursor = connection.cursor()
    # The last two are macOS's F_FULLFSYNC, and mean nothing elsewhere.
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "fullfsync=1", "checkpoint_fullfsync=1"):
        cursor.execute(f"PRAGMA {pragma}").fetchall()
    cursor.close()


def _sqlite_begin(connection: Connection) -> None:
    # A transaction that begins as a reader and then writes fails at once when another one has written meanwhile.
    options = connection.get_execution_options()
    if not options.get(BARE, False):
        connection.exec_driver_sql("BEGIN IMMEDIATE" if options.get(WRITES, False) else "BEGIN")


def _sqlite_cursor(connection: Connection, cursor: Any, *_: Any) -> None:
    note_cursor(connection.info, cursor)


def _sqlite_close(_connection: Any, record: ConnectionPoolEntry) -> None:
    # A cursor that is not closed would keep its connection's files open, and its transaction: SQLAlchemy leaves it so
    # where the connection broke, or Ctrl-C struck.
    close_cursors(record)


def _sqlite_error(context: ExceptionContext) -> None:
    # SQLite opens a file for reading that it once cannot open for writing, after an I/O error say. The connection stays
    # so: it is given up as one that broke, and the next one opens the files anew. The index of the log (store.db-shm)
    # is opened once for all connections of the process, so those that idle have to go too.
    if _is_read_only(context.original_exception):
        context.is_disconnect = True
        if context.engine is not None and isinstance(context.engine.pool, KeptPool):
            context.engine.pool.drop_idle()


def _is_read_only(error: BaseException) -> bool:
    return str(getattr(error, "sqlite_errorname", "")).startswith("SQLITE_READONLY")


def _postgresql_connect(connection: Any, _record: Any) -> None:
    with connection.cursor() as cursor:
        cursor.execute("SET synchronous_commit = on")
    connection.commit()


# The lease's ---------------------------------------------------------------------------------------------------------

LEASED: Final = ("postgresql", "sqlite")
"""Databases that can keep a lease: those whose clock is known."""


class now_ms(FunctionElement[int]):  # noqa: N801  as SQL writes it
    """The clock of the database, not the transaction's beginning: milliseconds since the epoch."""

    type: BigInteger = BigInteger()
    inherit_cache: bool | None = True


@compiles(now_ms, "postgresql")
def _postgresql_now(*_: Any, **__: Any) -> str:
    return "CAST(EXTRACT(EPOCH FROM clock_timestamp()) * 1000 AS BIGINT)"


@compiles(now_ms, "sqlite")
def _sqlite_now(*_: Any, **__: Any) -> str:
    return "CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)"


def one_at_a_time(connection: Connection) -> None:
    """Let nodes that make the tables of one store at the same time do so one after the other. SQLite's transactions
    that write do so anyway."""
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(724062571)"))  # a number of ours, nothing else


def wait_for_locks(connection: Connection, seconds: float) -> None:
    """Set the most seconds that this transaction waits for another one to end. SQLite has BUSY_SECONDS."""
    if connection.dialect.name == "postgresql":
        connection.execute(text(f"SET LOCAL lock_timeout = {max(1, round(seconds * 1000))}"))


def is_locked(error: Exception) -> bool:
    """Return whether a transaction has waited as long as `wait_for_locks` lets it."""
    return isinstance(error, DBAPIError) and getattr(error.orig, "sqlstate", None) == "55P03"


def end_idle_transactions(engine: Engine, seconds: float) -> None:
    """Let the database end a transaction whose process stands still: who takes over waits for its locks."""

    def connected(connection: Any, _record: Any) -> None:
        with connection.cursor() as cursor:
            cursor.execute(f"SET idle_in_transaction_session_timeout = {max(1, round(seconds * 1000))}")
        connection.commit()

    if engine.dialect.name == "postgresql":
        event.listen(engine, "connect", connected)


# Meanings of errors ---------------------------------------------------------------------------------------------------


def _codes(error: SQLAlchemyError) -> tuple[str, str]:
    """Return SQLite's name of the error and PostgreSQL's SQLSTATE, as far as there are any."""
    original = getattr(error, "orig", None)
    return str(getattr(original, "sqlite_errorname", "")), str(getattr(original, "sqlstate", None) or "")


def is_full(error: SQLAlchemyError) -> bool:
    """Return whether nothing more fits into the database. The call took no effect."""
    name, state = _codes(error)
    return name == "SQLITE_FULL" or state == "53100"


def out_of_files(error: SQLAlchemyError) -> OSError | None:
    """Return the operating system's error, if this process could open no more files or sockets. Where a server
    answered, the trouble is the server's own."""
    name, state = _codes(error)
    if name == "SQLITE_CANTOPEN":
        return _try_files(SQLITE_FILES)
    if not state and not name:
        message = str(getattr(error, "orig", None) or "")
        return next((OSError(n, os.strerror(n)) for n in OUT_OF_FILES if os.strerror(n) in message), None)
    return None


def _try_files(count: int) -> OSError | None:
    """Return the error, if this process cannot open so many files now. SQLite tells only that one could not be
    opened."""
    with ExitStack() as opened:
        try:
            for _ in range(count):
                opened.callback(os.close, os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        except OSError as error:
            return error if error.errno in OUT_OF_FILES else None
    return None


def is_operational(error: SQLAlchemyError) -> bool:
    """Return whether the trouble is the database's, and passes, rather than that of what was asked."""
    return isinstance(error, OperationalError | InterfaceError)


def is_mistake(error: SQLAlchemyError) -> bool:
    """Return whether what was asked is wrong, and will be another time. SQLite calls that operational too."""
    return not is_operational(error) or _codes(error)[0] == "SQLITE_ERROR"


def is_data(error: SQLAlchemyError) -> bool:
    """Return whether one of the values was wrong, so that the others would do."""
    return isinstance(error, DataError | StatementError) and not is_operational(error)


def is_collision(error: SQLAlchemyError) -> bool:
    """Return whether the same would do if it were tried again at once: it met another transaction."""
    return _codes(error)[1] in ("40001", "40P01")


def is_of_the_disk(error: SQLAlchemyError) -> bool:
    """Return whether a disk of ours has failed, so that earlier writes may be lost too. SQLite alone tells."""
    name, _ = _codes(error)
    return name.startswith(("SQLITE_IOERR", "SQLITE_CORRUPT", "SQLITE_NOTADB"))


# Space ---------------------------------------------------------------------------------------------------------------


def reclaim(connection: Connection) -> int:
    """Give back space that the database does not need; return the bytes. A server sees to that by itself. Raises
    SQLAlchemyError, OSError. The connection has not been used before."""
    database = connection.engine.url.database
    if connection.dialect.name != "sqlite" or not database:
        return 0
    wal = Path(f"{database}-wal")
    before = _size(wal)
    _truncate(connection.execution_options(**{BARE: True}))
    return max(0, before - _size(wal))


def compact(connection: Connection) -> int:
    """Make the database's file as small as what is in it; return the bytes given back. A server sees to that by itself.
    Nobody else writes meanwhile. Raises SQLAlchemyError, OSError. The connection has not been used before."""
    database = connection.engine.url.database
    if connection.dialect.name != "sqlite" or not database:
        return 0
    before = _size(Path(database)) + _size(Path(f"{database}-wal"))
    connection.execution_options(**{BARE: True}).exec_driver_sql("VACUUM")
    _truncate(connection)
    return max(0, before - _size(Path(database)) - _size(Path(f"{database}-wal")))


def damages(connection: Connection) -> list[str]:
    """Return what the database finds damaged in its own file: SQLite compares its tables with their indexes, and its
    pages with each other. It has no checksums, and does not see a byte that is another one inside a value. A server
    checks itself. Raises SQLAlchemyError."""
    if connection.dialect.name != "sqlite":
        return []
    found = connection.exec_driver_sql("PRAGMA integrity_check").scalars().all()
    return [f"SQLite says: {one}" for one in found if one != "ok"]


def _truncate(connection: Connection) -> None:
    """Truncate SQLite's write-ahead log, without a transaction. This waits for nobody: it would keep the lock for
    writing meanwhile. A reader such as a backup tool may take long. The rest of the log is for the next time."""
    before = connection.exec_driver_sql("PRAGMA busy_timeout").scalar_one()
    connection.exec_driver_sql("PRAGMA busy_timeout = 0")
    try:
        connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)").all()
    finally:
        connection.exec_driver_sql(f"PRAGMA busy_timeout = {before}")


def _size(path: Path) -> int:
    """Return the bytes of a file that may not be there. SQLite removes its log with the last connection."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
