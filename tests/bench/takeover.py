"""Owners of a shared directory that are killed: how long its clients are without one, and whether anything is lost.

    python -m tests.bench.takeover --kind journal --kills 100 --dir /var/tmp

Four processes send, receive and ack on one queue; the owner is killed each half second. One JSON line: the longest
pause of a call round each kill, in ms, and what was lost or doubled. A memory store loses what it has with its owner.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import signal
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import anabranch
from anabranch.router.sharing import starting
from anabranch.router.sharing.socket_file import connected

CLIENTS: Final = 4
STORES: Final = "directory: .\nstores:\n  - name: all\n    match: ['>']\n    {}: {{}}\n"
Book = tuple[list[float], list[bytes], list[bytes]]
"""The times at which calls had ended, and the bodies that were sent and acked."""


def work(directory: Path, number: int, all_there: Any, over: Any, books: Any) -> None:
    """Send, receive and ack until it is over; tell what was done."""
    ended, sent, acked = list[float](), list[bytes](), list[bytes]()
    with anabranch.open(directory, shared=True) as router:
        queue = router.queue("q")
        all_there.wait()
        while not over.is_set():
            body = b"%d.%d" % (number, len(sent))
            queue.send(body)
            sent.append(body)
            ended.append(time.monotonic())
            message = queue.receive(timeout=5)
            if message is not None:
                with suppress(anabranch.UnknownMessageError):  # its store has died
                    message.ack()
                    acked.append(message.body)
            ended.append(time.monotonic())
    books.put((ended, sent, acked))


def next_owner(directory: Path, last: int) -> int:
    """Wait until another owner than this one serves; return its pid."""
    while True:
        with suppress(OSError, IndexError):
            pid = int((directory / "router.lock").read_text().split()[0])
            if pid != last:
                connected(directory).close()
                return pid
        time.sleep(0.002)


def longest(book: Book, begin: float, end: float) -> float:
    """Return the longest pause of a client between two times, from the first of them on."""
    pauses = zip(book[0], book[0][1:], strict=False)
    return max((b - max(a, begin) for a, b in pauses if b > begin and a < end), default=0.0)


def measure(kind: str, count: int, place: Path) -> dict[str, Any]:
    """Return what so many kills have come to."""
    context, chance = multiprocessing.get_context("spawn"), random.Random(1)
    with tempfile.TemporaryDirectory(dir=place, ignore_cleanup_errors=True) as directory:
        data = Path(directory)
        (data / "stores.yaml").write_text(STORES.format(kind))
        all_there, over, books = context.Barrier(CLIENTS + 1), context.Event(), context.Queue()
        workers = [
            context.Process(target=work, args=(data, number, all_there, over, books)) for number in range(CLIENTS)
        ]
        with anabranch.open(data, shared=True) as router:
            for one in workers:
                one.start()
            all_there.wait()
            kills, pid = list[float](), 0
            while len(kills) < count:
                pid = next_owner(data, pid)
                time.sleep(chance.uniform(0.4, 0.8))
                kills.append(time.monotonic())
                os.kill(pid, signal.SIGKILL)
            time.sleep(3)
            over.set()
            done: list[Book] = [books.get() for _ in workers]
            for one in workers:
                one.join()
            left = [message.body for message in router.queue("q").browse()]
    sent = [body for _, bodies, _ in done for body in bodies]
    acked = [body for _, _, bodies in done for body in bodies]
    pauses = sorted(
        max(longest(book, begin, end) for book in done)
        for begin, end in zip(kills, [*kills[1:], kills[-1] + 3], strict=True)
    )
    return {
        "kind": kind, "kills": count, "sent": len(sent), "acked": len(acked), "lost": len({*sent} - {*acked} - {*left}),
        "doubled": sum(times - 1 for times in Counter(acked + left).values()),
        **{f"p{q}_ms": round(pauses[min(len(pauses) * q // 100, len(pauses) - 1)] * 1000) for q in (50, 99, 100)},
    }  # fmt: skip


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=("journal", "sql", "memory"), default="journal")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--dir", type=Path, default=Path("/var/tmp"))
    given = parser.parse_args()
    vars(starting)["LINGER"] = 1
    print(json.dumps(measure(given.kind, given.kills, given.dir)))


if __name__ == "__main__":
    main()
