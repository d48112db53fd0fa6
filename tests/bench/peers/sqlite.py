"""sqlite3 of the standard library: one table, WAL.

Durable: `synchronous=FULL`, one fdatasync of the log a commit. Not durable: `synchronous=OFF`. A message in hand is
not leased: it is read, then deleted by its ack, which is what the table alone can say. Threads take turns at one
connection, which is faster than a connection each (they would sleep on each other's locks).
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Sequence
from pathlib import Path


class Sqlite:
    name = "sqlite3"

    def __init__(self, directory: Path, *, durable: bool) -> None:
        self._lock = threading.Lock()
        self._directory = directory
        self._attached = False
        self._db = sqlite3.connect(directory / "queue.db", isolation_level=None, check_same_thread=False)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute(f"PRAGMA synchronous={'FULL' if durable else 'OFF'}")
        self._db.execute("CREATE TABLE IF NOT EXISTS messages (id INTEGER PRIMARY KEY AUTOINCREMENT, body BLOB)")

    def sender(self) -> Callable[[bytes], None]:
        execute, lock = self._db.execute, self._lock

        def send(body: bytes) -> None:
            with lock:
                execute("INSERT INTO messages (body) VALUES (?)", (body,))

        return send

    def batch_sender(self) -> Callable[[list[bytes]], None]:
        def send(bodies: list[bytes]) -> None:
            with self._lock, self._db:
                self._db.execute("BEGIN IMMEDIATE")
                self._db.executemany("INSERT INTO messages (body) VALUES (?)", [(body,) for body in bodies])

        return send

    transaction = batch_sender

    def cross_transaction(self, stores: int) -> Callable[[list[bytes]], None]:
        """Databases attached to one connection. A commit is atomic over them only with rollback journals, by way of a
        super-journal; with WAL it is not."""
        self._db.execute("PRAGMA journal_mode=DELETE")
        if not self._attached:
            for number in range(1, stores):
                self._db.execute("ATTACH ? AS ?", (str(self._directory / f"{number}.db"), f"apart{number}"))
                self._db.execute(f"PRAGMA apart{number}.journal_mode=DELETE")
                self._db.execute(f"PRAGMA apart{number}.synchronous=FULL")
                self._db.execute(f"CREATE TABLE apart{number}.messages (id INTEGER PRIMARY KEY, body BLOB)")
            self._attached = True
        tables = ["messages", *(f"apart{number}.messages" for number in range(1, stores))]

        def send(bodies: list[bytes]) -> None:
            with self._lock, self._db:
                self._db.execute("BEGIN IMMEDIATE")
                for number, body in enumerate(bodies):
                    self._db.execute(f"INSERT INTO {tables[number % stores]} (body) VALUES (?)", (body,))

        return send

    def receiver(self) -> Callable[[], bytes]:
        execute, lock = self._db.execute, self._lock

        def take() -> bytes:
            with lock:
                number, body = execute("SELECT id, body FROM messages ORDER BY id LIMIT 1").fetchone()
                execute("DELETE FROM messages WHERE id = ?", (number,))
            return bytes(body)

        return take

    def reader(self) -> Callable[[], int]:
        return lambda: sum(1 for _ in self._db.execute("SELECT body FROM messages ORDER BY id"))

    def close(self) -> None:
        self._db.close()

    @staticmethod
    def sql(directory: Path) -> Sqlite:
        return Sqlite(directory, durable=True)

    @staticmethod
    def day(directory: Path) -> Day:
        return Day(directory)


class Day:
    """The toy maker's queues as one table. It uses freed pages again, so it never needs more than its fullest hour."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._db = sqlite3.connect(directory / "queue.db", isolation_level=None)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=OFF")
        self._db.execute(
            "CREATE TABLE messages (destination TEXT, id INTEGER, body BLOB, PRIMARY KEY (destination, id))"
        )

    def send(self, messages: Sequence[tuple[str, int, bytes]]) -> None:
        with self._db:
            self._db.execute("BEGIN")
            self._db.executemany("INSERT INTO messages VALUES (?, ?, ?)", messages)

    def ack(self, destination: str, id: int) -> None:
        self._db.execute("DELETE FROM messages WHERE destination = ? AND id = ?", (destination, id))

    def disk(self) -> tuple[int, int]:
        sizes = [path.stat().st_size for path in self._directory.iterdir()]
        return len(sizes), sum(sizes)

    def close(self) -> None:
        self._db.close()


PEERS = [Sqlite]
