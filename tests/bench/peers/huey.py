"""huey's SqliteStorage, the storage under its task queue, without the tasks.

WAL. Durable: `fsync=True` (`synchronous=FULL`), one fdatasync an enqueue. Not durable: `fsync=False`. `dequeue`
deletes at once: a message in hand is lost with its process. No batches, no transactions.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from huey.storage import SqliteStorage


class Huey:
    name = "huey"

    def __init__(self, directory: Path, *, durable: bool) -> None:
        self._storage = SqliteStorage("bench", filename=str(directory / "huey.db"), fsync=durable)

    def sender(self) -> Callable[[bytes], object]:
        return self._storage.enqueue  # type: ignore[no-any-return]

    def receiver(self) -> Callable[[], bytes]:
        return self._storage.dequeue  # type: ignore[no-any-return]

    def reader(self) -> Callable[[], int]:
        return lambda: len(self._storage.enqueued_items())

    def close(self) -> None:
        self._storage.close()


PEERS = [Huey]
