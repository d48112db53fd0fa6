"""Our disk queues for Scrapy beside queuelib's on SQLite: a push and a pop of 1 KiB each, in turn.

    .venv-hosts/scrapy/bin/python -m tests.bench.queuelib --count 2000 --rounds 3 --dir /var/tmp

One line each: pushes and pops a second, the median of the rounds. SQLite's survive a power failure, ours (`periodic`)
all but the last second of them; queuelib's own files lose what they hold with a `kill -9`.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from queuelib.queue import FifoDiskQueue as Files
from queuelib.queue import FifoSQLiteQueue, LifoSQLiteQueue

from anabranch.hosts.scrapy import FifoDiskQueue, LifoDiskQueue

KINDS: list[Any] = [FifoDiskQueue, FifoSQLiteQueue, LifoDiskQueue, LifoSQLiteQueue, Files]


def measure(kind: Any, count: int, place: Path) -> tuple[float, float]:
    """Return pushes and pops a second."""
    with tempfile.TemporaryDirectory(dir=place) as directory:
        queue = kind(Path(directory, "queue"))
        begin = time.perf_counter()
        for _ in range(count):
            queue.push(b"x" * 1024)
        pushed = time.perf_counter()
        for _ in range(count):
            queue.pop()
        popped = time.perf_counter()
        queue.close()
        return count / (pushed - begin), count / (popped - pushed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dir", type=Path, default=Path("/var/tmp"))
    options = parser.parse_args()
    rounds = [[measure(kind, options.count, options.dir) for kind in KINDS] for _ in range(options.rounds)]
    for kind, figures in zip(KINDS, zip(*rounds, strict=True), strict=True):
        pushes, pops = (statistics.median(one) for one in zip(*figures, strict=True))
        print(f"{kind.__module__}.{kind.__name__}: {pushes:,.0f} pushes a second, {pops:,.0f} pops")


if __name__ == "__main__":
    main()
