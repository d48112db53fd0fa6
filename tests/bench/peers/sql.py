"""SQL stores beside the bare loop that they cannot be faster than, alone: one insert, one commit.

`anabranch` in sql-send is the store on SQLite, `anabranch-postgresql` the one on a PostgreSQL server that each run
starts for itself in the system's temporary directory; `-alone`: with batches of one, so that no two sends share a
database transaction. `sqlite3` and `psycopg` are the bare loops, psycopg with a connection for each thread. All of them
are durable: SQLite `synchronous=FULL`, PostgreSQL `fsync=on` and `synchronous_commit=on`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anabranch
from tests.sql.server import PostgresServer


class SqlStore:
    """A router with one SQL store."""

    def __init__(self, directory: Path, server: PostgresServer | None, **options: Any) -> None:
        self._server = server
        url: dict[str, Any] = {"url": server.new_database()} if server else {}
        sql = anabranch.SqlOptions(**url, **options)
        store = anabranch.StoreConfig("all", [">"], sql=sql)
        self._router = anabranch.open(anabranch.Config(directory=directory, stores=[store]))
        self._queue = self._router.queue("bench")

    def sender(self) -> Callable[[bytes], object]:
        return self._queue.send

    def close(self) -> None:
        self._router.close()
        if self._server is not None:
            self._server.close()


class Loop:
    """One table."""

    def __init__(self, server: PostgresServer) -> None:
        self._server = server
        self._connections = [server.connect()]
        self._connections[0].execute("CREATE TABLE messages (id BIGSERIAL PRIMARY KEY, body BYTEA)")

    def sender(self) -> Callable[[bytes], object]:
        connection = self._server.connect()
        self._connections.append(connection)
        cursor = connection.cursor()  # in autocommit: each statement is a transaction

        def send(body: bytes) -> None:
            cursor.execute("INSERT INTO messages (body) VALUES (%s)", (body,), prepare=True)

        return send

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        self._server.close()


def _peer(name: str, sql: Callable[[Path], SqlStore | Loop]) -> type[Any]:
    return type(name, (), {"name": name, "sql": staticmethod(sql)})


PEERS = [
    _peer("anabranch-alone", lambda directory: SqlStore(directory, None, batch_operations_max=1)),
    _peer("anabranch-postgresql", lambda directory: SqlStore(directory, PostgresServer())),
    _peer(
        "anabranch-postgresql-alone", lambda directory: SqlStore(directory, PostgresServer(), batch_operations_max=1)
    ),
    _peer("psycopg", lambda _: Loop(PostgresServer())),
]
