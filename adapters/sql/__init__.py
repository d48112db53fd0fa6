"""SQL stores: tables of a database, by SQLAlchemy Core. SQLite in the store's own directory, or a server.

    SqlStore.create("ledger", directory, SqlOptions(url="postgresql+psycopg://app@localhost/ledger"))
    store = SqlStore("ledger", directory, SqlOptions(url=...))
    store.open()

    store.lock   locked while open; holds the owner's pid and host       (directory.py)
    store.id     the store's id, the same as in the table STORE
    store.db     SQLite's, where no url is given

The store itself is the core's (adapters/core), this package its backend:

    backend.py           opening and closing, one database transaction for each write, what became of a cut-off COMMIT
    writing.py           which statements a write runs;  effects.py: what it changes of the counts kept in memory
    reading.py           where messages are, and what is in them;  loading.py: at open
    outbox.py            what callers send and ack in transactions of their own (core/features/outbox.py)
    duplicates.py        rows of the duplicate window;  checking.py: Store.check
    database/            connections, kept alive; the tables and how they come to be; every statement by its name; what
                         differs between databases and what their errors mean; the lease of a database that several
                         nodes own in turn

The tables are described in docs/sql.md. Calls of many callers at one time share one database transaction
(core/writers.py); a call returns once that is committed: on SQLite with `synchronous=FULL`, on PostgreSQL with
`synchronous_commit = on`. So whatever has returned survives a kill of the process, of the server, and a power failure,
as far as the database's own disks do. A branch of a transaction over several stores is a row of XALOG until its
outcome. While the database cannot be reached calls raise StoreFailedError; when it is back, the next call finds it.
"""

from __future__ import annotations

from ...policies.errors import MissingExtraError

try:
    import sqlalchemy  # noqa: F401
except ModuleNotFoundError:
    raise MissingExtraError("SQL stores need SQLAlchemy: pip install 'anabranch[sql]'") from None

from .store import SqlStore

__all__ = ["SqlStore"]
