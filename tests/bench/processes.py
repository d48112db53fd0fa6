"""Many processes on one queue: Anabranch's shared directory beside what other Python programs use for that.

    python -m tests.bench.processes --work send,pipe,work --processes 1,4,16 --rounds 3 --dir /var/tmp
    python -m tests.bench.processes --work work --processes 4 --not-durable

    send     200 B, each on disk before the call returns
    pipe     the same with 16 in flight in each process
    work     one sent, one received and acked, in turn, all processes on one queue
    many     as send, by 32 threads of each process (peer threads; own: of one that has the directory for itself), or by
             1,000 awaits of anabranch.aio (awaits)
    many_work  as work, likewise
    many_take  received and acked, likewise; sent before, 4,000 in one call, within the time

Each run is `--seconds` long, in processes that begin at once. Peers take turns in each round. sqlite3: one table, WAL,
`synchronous=FULL`, a message in hand leased by a column and deleted by its ack, as SQLite-based queues do. Redis: an
append-only file, `appendfsync always`, LMOVE and LREM (peers/brokers.py); 16 in flight are a pipeline. One JSON line
for each run; the medians, and ratios to the first of them, go to stderr. `owner_us`: processor time of the
owner for each operation, where there is one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sqlite3
import statistics
import sys
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import anabranch
import anabranch.aio

from .working import worked

BODY: Final = b"x" * 200
BURST: Final = 4000
WINDOW: Final = 16
LEASE_SECONDS: Final = 60.0
STORES: Final = "directory: .\nstores:\n  - name: all\n    match: ['>']\n    journal: {{sync: {}}}\n"


def configure(directory: Path, durable: bool) -> None:
    (directory / "stores.yaml").write_text(STORES.format("always" if durable else "never"))


class Shared:
    """A directory that the processes share."""

    def __init__(self, place: str) -> None:
        self._router = anabranch.open(place, shared=True)
        self._queue = self._router.queue("q")
        self._window: deque[Any] = deque()

    @staticmethod
    def begin(directory: Path, durable: bool) -> tuple[str, Any]:
        configure(directory, durable)
        router = anabranch.open(directory, shared=True)
        router.queue("q").declare()
        return str(directory), router

    @staticmethod
    def owner(server: Any) -> int | None:
        return int((server.config.directory / "router.lock").read_text().split()[0])

    def send(self) -> None:
        self._queue.send(BODY)

    def pipe(self) -> int:
        self._window.append(self._queue.send_nowait(BODY))
        if len(self._window) < WINDOW:
            return 0
        self._window.popleft().result()
        return 1

    def work(self) -> None:
        self._queue.send(BODY)
        self.take()

    def take(self) -> None:
        message = self._queue.receive(timeout=10.0)
        assert message is not None
        message.ack()


class Threads(Shared):
    """A directory that the processes share, each with so many threads."""

    THREADS: Final = 32

    def __init__(self, place: str) -> None:
        super().__init__(place)
        self._pool = ThreadPoolExecutor(self.THREADS)

    def _all(self, call: Callable[[], object]) -> int:
        def some() -> None:
            for _ in range(BURST // self.THREADS):
                call()

        for done in [self._pool.submit(some) for _ in range(self.THREADS)]:
            done.result()
        return BURST

    def many(self) -> int:
        return self._all(lambda: self._queue.send(BODY))

    def many_work(self) -> int:
        return self._all(self.work)

    def many_take(self) -> int:
        self._queue.send_many([BODY] * BURST)
        return self._all(self.take)


class Own(Threads):
    """The threads of a process that has the directory for itself."""

    def __init__(self, place: str) -> None:
        self._router = anabranch.open(place)
        self._queue = self._router.queue("q")
        self._pool = ThreadPoolExecutor(self.THREADS)

    @staticmethod
    def begin(directory: Path, durable: bool) -> tuple[str, Any]:
        configure(directory, durable)
        return str(directory), contextlib.ExitStack()

    @staticmethod
    def owner(server: Any) -> None:
        """There is none."""


class Awaits:
    """A directory that the processes share, each with so many awaits in flight."""

    AWAITS: Final = 1000
    begin, owner = Shared.begin, Shared.owner

    def __init__(self, place: str) -> None:
        self._runner = asyncio.Runner()
        self._router = self._runner.run(self._opened(place))
        self._queue = self._router.queue("q")

    @staticmethod
    async def _opened(place: str) -> anabranch.aio.AsyncRouter:
        return await anabranch.aio.open(place)

    def _all(self, call: Callable[[], Awaitable[object]]) -> int:
        async def some() -> None:
            for _ in range(BURST // self.AWAITS):
                await call()

        async def all_of_them() -> None:
            await asyncio.gather(*(some() for _ in range(self.AWAITS)))

        self._runner.run(all_of_them())
        return BURST

    async def _worked(self) -> None:
        await self._queue.send(BODY)
        await self._taken()

    async def _taken(self) -> None:
        message = await self._queue.receive(timeout=10.0)
        assert message is not None
        await message.ack()

    def many(self) -> int:
        return self._all(lambda: self._queue.send(BODY))

    def many_work(self) -> int:
        return self._all(self._worked)

    def many_take(self) -> int:
        self._runner.run(self._queue.send_many([BODY] * BURST))
        return self._all(self._taken)


class Sqlite:
    """A table, with a connection for each process."""

    def __init__(self, place: str) -> None:
        path, synchronous = json.loads(place)
        self._db = sqlite3.connect(path, isolation_level=None, timeout=120.0)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute(f"PRAGMA synchronous={synchronous}")

    @staticmethod
    def begin(directory: Path, durable: bool) -> tuple[str, Any]:
        place = json.dumps([str(directory / "queue.db"), "FULL" if durable else "OFF"])
        peer = Sqlite(place)
        peer._db.execute("CREATE TABLE messages (id INTEGER PRIMARY KEY, body BLOB, until REAL DEFAULT 0)")
        peer._db.execute("CREATE INDEX free ON messages (until, id)")
        return place, peer._db

    @staticmethod
    def owner(server: Any) -> int | None:
        return None

    def send(self) -> None:
        self._db.execute("INSERT INTO messages (body) VALUES (?)", (BODY,))

    def work(self) -> None:
        self.send()
        now = time.time()
        ((number, _),) = self._db.execute(
            "UPDATE messages SET until = ? WHERE id = (SELECT id FROM messages WHERE until <= ? ORDER BY until, id "
            "LIMIT 1) RETURNING id, body",
            (now + LEASE_SECONDS, now),
        ).fetchall()
        self._db.execute("DELETE FROM messages WHERE id = ?", (number,))


class Redis:
    """A server, and a client in each process."""

    def __init__(self, place: str) -> None:
        import redis

        self._client = redis.Redis("127.0.0.1", int(place))

    @staticmethod
    def begin(directory: Path, durable: bool) -> tuple[str, Any]:
        from .peers.brokers import Redis as Server

        server = Server(directory, durable=durable)
        return str(server.port), server

    @staticmethod
    def owner(server: Any) -> int:
        return int(server.pid)

    def send(self) -> None:
        self._client.rpush("q", BODY)

    def pipe(self) -> int:
        pipeline = self._client.pipeline(transaction=False)
        for _ in range(WINDOW):
            pipeline.rpush("q", BODY)
        pipeline.execute()
        return WINDOW

    def work(self) -> None:
        self._client.rpush("q", BODY)
        body: Any = self._client.lmove("q", "in-hand", "LEFT", "RIGHT")
        self._client.lrem("in-hand", 1, body)


PEERS: Final[dict[str, Any]] = {
    "anabranch": Shared, "threads": Threads, "own": Own, "awaits": Awaits, "sqlite3": Sqlite, "redis": Redis,
}  # fmt: skip


def run_worker(peer: str, place: str, work: str, seconds: float) -> None:
    """Do it for so long once a line comes; print how many."""
    call: Callable[[], int | None] = getattr(PEERS[peer](place), work)
    print("ready", flush=True)
    sys.stdin.readline()
    count, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        done = call()
        count += 1 if done is None else done
    print(count, flush=True)


def processor_seconds(pid: int) -> float:
    """Return the processor time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def measure(peer: str, work: str, processes: int, seconds: float, durable: bool, place: Path) -> dict[str, Any]:
    """Return what a run has come to."""
    with tempfile.TemporaryDirectory(dir=place, ignore_cleanup_errors=True) as directory:
        where, server = PEERS[peer].begin(Path(directory), durable)
        looks = list[float]()

        def look() -> None:
            owner = PEERS[peer].owner(server)
            if owner is not None:
                looks.append(processor_seconds(owner))

        try:
            told = worked(__spec__.name, [[peer, where, work, str(seconds)]] * processes, look)
        finally:
            server.close()
    count = sum(map(int, told))
    line = {"peer": peer, "work": work, "processes": processes, "durable": durable, "per_second": count / seconds}
    return line | ({"owner_us": (looks[1] - looks[0]) / count * 1e6} if looks and count else {})


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog=f"python -m {__spec__.name}", description=__doc__)
    parser.add_argument("--work", default="send,pipe,work")
    parser.add_argument("--processes", default="1,4,16")
    parser.add_argument("--peers", default="anabranch,sqlite3,redis")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--not-durable", action="store_true")
    parser.add_argument("--dir", type=Path, default=Path("/var/tmp"))
    options = parser.parse_args(arguments)
    for work in options.work.split(","):
        for processes in map(int, options.processes.split(",")):
            rates = defaultdict[str, list[float]](list)
            owners = defaultdict[str, list[float]](list)
            for _ in range(options.rounds):
                for peer in options.peers.split(","):
                    if not hasattr(PEERS[peer], work):
                        continue
                    line = measure(peer, work, processes, options.seconds, not options.not_durable, options.dir)
                    print(json.dumps(line), flush=True)
                    rates[peer].append(line["per_second"])
                    owners[peer].append(line.get("owner_us", 0.0))
            first = next(iter(rates))
            ours = statistics.median(rates[first])
            for peer, some in rates.items():
                rate = statistics.median(some)
                print(
                    f"{work} {processes}: {peer} {rate:,.0f}/s, {first} {ours / rate:.2f} of it, "
                    f"owner {statistics.median(owners[peer]):.0f} us",
                    file=sys.stderr,
                )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        peer, place, work, seconds = sys.argv[2:6]
        run_worker(peer, place, work, float(seconds))
    else:
        main()
