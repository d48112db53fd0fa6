"""Very many, or very large: what it takes. A program, so that memory and descriptors are those of a process of its own.

    python -m tests.bench.scale large --kind sql --n 5120         # a body of so many MiB, through two stores
    python -m tests.bench.scale delays --kind journal --n 1000000 # messages that wait, at random times over a day
    python -m tests.bench.scale maps --kind journal --n 1000000   # keys with a value of 100 bytes
    python -m tests.bench.scale stores --kind journal --n 2000    # stores in turn, at `ulimit -n 256`

It checks what comes back, and prints one line of JSON: seconds, and by how much the process's memory has grown
(`grown_mib`: without the pages of mapped files, which the system takes back). As of all benchmarks, seconds say nothing
on a machine that does something else.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import resource
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import anabranch
from anabranch.adapters.system.descriptors import shares

MIB: Final = 1 << 20
KINDS: Final[dict[str, Any]] = {
    "journal": anabranch.JournalOptions(sync=anabranch.Sync.NEVER, duplicate_window=0),
    "sql": anabranch.SqlOptions(duplicate_window=0),
    "memory": anabranch.MemoryOptions(duplicate_window=0, max_bytes=512 * MIB),
}
DAY: Final = 86_400
BATCH: Final = 1000


def grown() -> int:
    """Anonymous memory of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


class Watched:
    """Which is the most that it has been, since this was made."""

    def __init__(self) -> None:
        self.before = self.most = grown()

    def look(self) -> None:
        self.most = max(self.most, grown())

    @property
    def mib(self) -> float:
        self.look()
        return round((self.most - self.before) / MIB, 1)


def config(directory: Path, kind: str, **more: Any) -> anabranch.Config:
    """Stores `a` and `b` of that kind, for what begins so."""
    options = {kind: KINDS[kind]}
    stores = [anabranch.StoreConfig(name, [f"{name}.>"], **options, **more) for name in ("a", "b")]
    return anabranch.Config(directory, stores)


class Film(io.RawIOBase):
    """So many MiB, each different; a file that is never there as a whole."""

    def __init__(self, mib: int, watched: Watched) -> None:
        self._left, self._watched = mib, watched
        self._piece = b""
        self.crc = 0

    def read(self, size: int = -1) -> bytes:
        if not self._piece and self._left:
            self._piece = random.Random(self._left).randbytes(1024) * 1024
            self.crc = zlib.crc32(self._piece, self.crc)
            self._left -= 1
            self._watched.look()
        data, self._piece = self._piece[:size], self._piece[size:]
        return data


def large(directory: Path, kind: str, n: int) -> dict[str, Any]:
    """Sent in a transaction, received, and sent on to another store in the transaction that acks it."""
    with anabranch.open(config(directory, kind)) as router:
        for queue in map(router.queue, ("a.films", "b.films")):
            queue.send(b"what is imported on first use")
            queue.purge()
        watched, started = Watched(), time.monotonic()
        film = Film(n, watched)
        with router.transaction() as tx:
            tx.send("a.films", film, size=n * MIB)
        sent = time.monotonic() - started
        message = router.queue("a.films").receive()
        assert message is not None
        assert _crc(message, watched) == film.crc
        with router.transaction() as tx:
            tx.send("b.films", message.content)
            tx.ack(message)
        message = router.queue("b.films").receive()
        assert message is not None
        assert _crc(message, watched) == film.crc
        message.ack()
        return {
            "mib": n,
            "sent_s": round(sent, 2),
            "all_s": round(time.monotonic() - started, 2),
            "grown_mib": watched.mib,
        }


def _crc(message: anabranch.Message, watched: Watched) -> int:
    crc = 0
    with message.open() as body:
        while data := body.read(MIB):
            crc = zlib.crc32(data, crc)
            watched.look()
    return crc


def delays(directory: Path, kind: str, n: int) -> dict[str, Any]:
    """None is received, nor in the way of what waits for nothing; those that are due soon come within their second."""
    chance = random.Random(1)
    found: dict[str, Any] = {"messages": n}
    watched, started = Watched(), time.monotonic()
    with anabranch.open(config(directory, kind)) as router:
        queue = router.queue("a.delayed")
        later = time.time_ns() // 1_000_000 + 3_600_000
        for first in range(0, n, BATCH):
            queue.send_many(
                anabranch.Outgoing(b"%d" % number, deliver_at_ms=later + chance.randrange(DAY * 1000))
                for number in range(first, min(first + BATCH, n))
            )
            watched.look()
        found["sent_s"] = round(time.monotonic() - started, 2)
        assert queue.receive() is None
        _punctual(queue, chance, found)
        assert queue.counts() == (0, 0, n, 0)
        found["grown_mib"] = watched.mib
    if kind == "memory":
        return found
    with anabranch.open(config(directory, kind)) as router:
        started = time.monotonic()
        queue = router.queue("a.delayed")
        assert queue.counts() == (0, 0, n, 0)
        found["opened_s"] = round(time.monotonic() - started, 3)
        _punctual(queue, chance, found)
    return found


def _punctual(queue: anabranch.Queue, chance: random.Random, found: dict[str, Any]) -> None:
    queue.send(b"now")
    message = queue.receive()
    assert message is not None
    assert message.body == b"now"
    message.ack()
    for _ in range(50):
        due = time.time() + 2 * chance.random()
        queue.send(repr(due).encode(), deliver_at=due)
    late = []
    for message in queue.consume(timeout=30):
        late.append(time.time() - float(message.body))
        message.ack()
        if len(late) == 50:
            break
    assert len(late) == 50
    assert min(late) > -0.002  # to the millisecond
    found["late_s"] = round(max([*late, found.get("late_s", 0.0)]), 3)


def maps(directory: Path, kind: str, n: int) -> dict[str, Any]:
    """Puts of new keys, then pairs of put and pop beside them."""
    with anabranch.open(config(directory, kind)) as router:
        values = router.map("a.map")
        values.put("first", b"1")
        watched, started = Watched(), time.monotonic()
        for number in range(n):
            values.put(f"key-{number:09d}", b"v" * 100)
            if number % BATCH == 0:
                watched.look()
        put = time.monotonic() - started
        pairs, started = min(n, 20_000), time.monotonic()
        for number in range(pairs):
            values.put(f"job-{number}", b"v" * 100)
            assert values.pop(f"job-{number}") == b"v" * 100
        popped = time.monotonic() - started
        assert values.count() == n + 1
        assert values.get(f"key-{n - 1:09d}") == b"v" * 100
        return {
            "keys": n, "puts_a_second": round(n / put), "pairs_a_second": round(pairs / popped),
            "grown_mib": watched.mib,
        }  # fmt: skip


def stores(directory: Path, kind: str, n: int) -> dict[str, Any]:
    """Each is sent to, then browsed, then received from: never are more descriptors open than the limit leaves."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    watched, started, most = Watched(), time.monotonic(), 0
    with anabranch.open(config(directory, kind, per_destination=True)) as router:
        queues = [router.queue(f"a.{number}") for number in range(n)]
        for number, queue in enumerate(queues):
            queue.send(b"%d" % number)
            most = max(most, len(list(Path("/proc/self/fd").iterdir())))
        for number, queue in enumerate(queues):
            assert [message.body for message in queue.browse()] == [b"%d" % number]
        for number, queue in enumerate(queues):
            message = queue.receive()
            assert message is not None
            assert message.body == b"%d" % number
            message.ack()
            most = max(most, len(list(Path("/proc/self/fd").iterdir())))
            if number % 10 == 0:
                watched.look()
        assert most <= 256 - shares().application
        return {
            "stores": n, "all_s": round(time.monotonic() - started, 2), "descriptors": most, "grown_mib": watched.mib,
        }  # fmt: skip


SCENARIOS: Final[dict[str, Callable[[Path, str, int], dict[str, Any]]]] = {
    "large": large, "delays": delays, "maps": maps, "stores": stores,
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.scale", description=__doc__.partition("\n")[0])
    parser.add_argument("scenario", choices=SCENARIOS)
    parser.add_argument("--kind", choices=KINDS, default="journal")
    parser.add_argument("--n", type=int, required=True)
    parser.add_argument("--dir", type=Path, default=Path("build/bench"), help="where to make the directory")
    options = parser.parse_args(arguments)
    options.dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="scale-", dir=options.dir) as place:
        found = SCENARIOS[options.scenario](Path(place) / "data", options.kind, options.n)
    print(json.dumps({"scenario": options.scenario, "kind": options.kind, **found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
