from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from queuelib.queue import FifoDiskQueue as Files
from queuelib.queue import FifoSQLiteQueue, LifoSQLiteQueue

from anabranch.hosts.scrapy import FifoDiskQueue, LifoDiskQueue

from .working import timed

QUEUES: dict[str, Any] = {
    "anabranch": FifoDiskQueue, "anabranch, LIFO": LifoDiskQueue, "FifoSQLiteQueue fsync": FifoSQLiteQueue,
    "LifoSQLiteQueue fsync": LifoSQLiteQueue, "FifoDiskQueue no sync": Files,
}  # fmt: skip
BACKENDS = {name: 300 if "SQLite" in name else 3000 for name in QUEUES}


def run(backend: str, directory: Path, count: int) -> Iterator[tuple[str, float]]:
    queue = QUEUES[backend](directory / "queue")
    queue.push(b"first")
    yield "scrapy-push", timed(lambda: queue.push(b"x" * 1024), count)
    yield "scrapy-pop", timed(queue.pop, count)
    queue.close()
