"""persist-queue's SQLiteQueue, the fastest of its queues that keeps what it was given.

WAL; it leaves `synchronous` at SQLite's default, FULL, so that a put is durable: one fdatasync a put. It has no option
for less: where a scenario asks for no sync, `PRAGMA synchronous=OFF` is set on its connection from outside. `get`
deletes at once: a message in hand is lost with its process. (SQLiteAckQueue has acks, but keeps every acked row until
told, and looks for the next message from the first row on, so that pairs slow down with the square of their number;
the file Queue replaces an index file at every put and syncs neither.) Bodies are stored as they are, not pickled.
One commit a call is all it has: no batches, no transactions.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import persistqueue


class AsIs:
    """A serializer that leaves bytes alone."""

    @staticmethod
    def dumps(body: bytes) -> bytes:
        return body

    @staticmethod
    def loads(body: bytes) -> bytes:
        return body


class PersistQueue:
    name = "persist-queue"

    def __init__(self, directory: Path, *, durable: bool) -> None:
        self._queue: Any = persistqueue.SQLiteQueue(
            str(directory), multithreading=True, auto_commit=True, serializer=AsIs
        )
        if not durable:
            putter: Any = self._queue._putter
            putter.execute("PRAGMA synchronous=OFF")

    def sender(self) -> Callable[[bytes], object]:
        put: Callable[[bytes], object] = self._queue.put
        return put

    def receiver(self) -> Callable[[], bytes]:
        get: Callable[[], bytes] = self._queue.get_nowait
        return get

    def reader(self) -> Callable[[], int]:
        return lambda: len(self._queue.queue())

    def close(self) -> None:
        self._queue.close()


PEERS = [PersistQueue]
