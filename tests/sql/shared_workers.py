"""Routers in processes of their own that use one database together while they are killed and their connections are cut;
and what was promised, held against what is left.

    python -m tests.sql.shared_workers --rounds 10 [--seconds 60] [--seed 1] [--work 6]

In each round eight routers, each with a directory of its own, work at once over three queues of a shared store: they
send (one, many, the same id twice), receive (one, many, by a listener), ack, release, reject, and move messages in
transactions to another shared queue, or to a journal of their own. Meanwhile processes are killed and start again in
the same directory, stand still for a while, and connections are cut. One more receives all of a fourth queue alone.
Then the books are added up, as those of tests/sharing/workers.py.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import ExitStack, suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final

import anabranch

from ..children import CONTEXT
from ..contract.disk import eventually
from ..shares import add_options, of_options
from ..sharing.workers import PATIENCE, WORKERS, Books, Worker
from .outages import insist
from .server import PostgresServer

QUEUES: Final = ("q", "r", "s")
ORDERED: Final = "ordered"
"""One receives all of it, and nothing there is given back."""
DEAD: Final = "dead"
MOVED: Final = {"q": "local.done", "r": "done", "s": "local.done"}
ROUTER_TIMEOUT: Final = 2.0
"""Seconds of silence after which the others take one for dead; some stand still for longer."""


def config(directory: Path, url: str) -> anabranch.Config:
    """Return what each has: a journal of its own, and the shared store for all else."""
    options: dict[str, Any] = {
        "url": url, "shared": True, "pool_min": 0, "dead_letter": DEAD, "router_timeout": ROUTER_TIMEOUT,
        "outcome_timeout": 60.0,
    }  # fmt: skip
    journal = anabranch.JournalOptions(segment_size=1 << 20)
    return anabranch.Config(
        directory,
        [
            anabranch.StoreConfig("local", ["queue://local.>"], journal=journal),
            anabranch.StoreConfig("shared", ["queue://>"], sql=anabranch.SqlOptions(**options)),
        ],
    )


class SharedWorker(Worker):
    """One process."""

    queues, moved = QUEUES, MOVED

    def _choices(self) -> list[Any]:
        return [*super()._choices(), self._send_twice, self._send_ordered, self._send_ordered, self._reject]

    def _send_twice(self) -> None:
        queue, (name,) = self._router.queue(self._chance.choice(self.queues)), self._names(1)
        self.note("begin", name)
        first = queue.send(name.encode(), message_id=name)
        self.note("sent", name)
        again = queue.send(name.encode(), message_id=name)
        assert (again.duplicate, again.seq) == (True, first.seq), (first, again)

    def _send_ordered(self) -> None:
        names = self._names(self._chance.choice((1, 3)))
        self.note("begin", *names)
        self._router.queue(ORDERED).send_many([name.encode() for name in names])
        self.note("sent", *names)

    def _reject(self) -> None:
        message = self._router.queue(self._chance.choice(self.queues)).receive()
        if message is not None:
            name = message.body.decode()
            self.note("ending", name)
            with suppress(anabranch.UnknownMessageError):
                message.reject("at random")
                self.note("moved", name)


def _work(given: anabranch.Config, name: str, book: Path, seed: int, over: Path) -> None:
    with insist(lambda: anabranch.open(given)) as router:
        worker = SharedWorker(router, name, book, seed)
        while not over.exists():
            # Its connections are cut; what it held when it stood still is free.
            with suppress(anabranch.StoreFailedError, anabranch.TransactionError, anabranch.UnknownMessageError):
                worker.run(time.monotonic() + 0.2)


class Receiver:
    """The one that receives ORDERED, on a thread of this process."""

    def __init__(self, router: anabranch.Router, book: Path) -> None:
        self.seen: list[str] = []
        self._worker = SharedWorker(router, "receiver", book, 0)
        self._queue = router.queue(ORDERED)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            message = insist(lambda: self._queue.receive(timeout=0.2))
            if message is None:
                if self._stopping.is_set():
                    return
                continue
            name = message.body.decode()
            self.seen.append(name)
            self._worker.note("ending", name)
            insist(message.ack)
            self._worker.note("acked", name)

    def stop(self) -> list[str]:
        """Return what was wrong with the order."""
        self._stopping.set()
        self._thread.join(PATIENCE)
        if self._thread.is_alive():
            return ["the receiver hangs"]
        wrong = []
        for worker in {name.rpartition(".")[0] for name in self.seen}:
            numbers = [int(name.rpartition(".")[2]) for name in self.seen if name.rpartition(".")[0] == worker]
            if numbers != sorted(set(numbers)):
                wrong.append(f"out of order, or twice: those of {worker}")
        return wrong


def wrong_with(books: Books, routers: list[anabranch.Router]) -> list[str]:
    """Return what is wrong with what is left, once nothing is in doubt."""
    for router in routers:
        eventually(lambda router=router: not router.in_doubt(), router.in_doubt)  # type: ignore[misc]
    first = routers[0]
    left = Counter(body for name in (*QUEUES, ORDERED) for body in bodies(first, name))
    moved = Counter(body for name in ("done", DEAD) for body in bodies(first, name))
    for router in routers:
        moved.update(bodies(router, "local.done"))
    seqs = Counter(message.seq for name in (*QUEUES, "done", DEAD) for message in first.queue(name).browse())
    doubled = [seq for seq, count in seqs.items() if count > 1]
    return books.wrong_with(left, moved) + ([f"ids doubled: {doubled[:5]}"] if doubled else [])


def bodies(router: anabranch.Router, name: str) -> list[str]:
    return [message.body.decode() for message in router.queue(name).browse()]


def cut_some(server: PostgresServer, chance: random.Random) -> int:
    """Cut some connections at random, and return how many."""
    with server.connect() as connection:
        pids = [
            pid for (pid,) in connection.execute(
                "SELECT pid FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
            )
        ]  # fmt: skip
        some = chance.sample(pids, min(len(pids), chance.randint(1, 4)))
        for pid in some:
            connection.execute("SELECT pg_terminate_backend(%s)", (pid,))
    return len(some)


def play(server: PostgresServer, directory: Path, seed: int, seconds: float) -> tuple[int, Counter[str], list[str]]:
    """Play one round; returns how many messages there were, what was done to whom, and what was wrong."""
    chance = random.Random(seed)
    url = server.new_schema()
    homes = [config(directory / f"home.{place}", url) for place in range(WORKERS)]
    over = directory / "over"
    workers: list[BaseProcess] = []
    at: dict[int, BaseProcess] = {}
    done: Counter[str] = Counter()

    def start(place: int) -> None:
        number = len(workers)
        process = CONTEXT.Process(
            target=_work,
            args=(homes[place], f"{seed}.{number}", directory / f"book.{seed}.{number}", seed * 1000 + number, over),
        )
        process.start()
        workers.append(process)
        at[place] = process

    with anabranch.open(config(directory / "receiver", url)) as router:
        receiver = Receiver(router, directory / f"book.{seed}.receiver")
        for place in range(WORKERS):
            start(place)
        eventually(lambda: len(list(directory.glob("book.*"))) > WORKERS)
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            time.sleep(chance.uniform(0.1, 0.5))
            what = chance.choice(("kill", "kill", "stop", "cut", "cut"))
            place = chance.randrange(WORKERS)
            process = at[place]
            if what == "cut":
                done["cuts"] += cut_some(server, chance)
            elif process.pid is not None and process.is_alive():
                if what == "stop":
                    os.kill(process.pid, signal.SIGSTOP)
                    time.sleep(chance.choice((0.1, 0.1, 1.5 * ROUTER_TIMEOUT)))
                    os.kill(process.pid, signal.SIGCONT)
                    done["stops"] += 1
                else:
                    os.kill(process.pid, signal.SIGKILL)
                    process.join(PATIENCE)
                    done["kills"] += 1
                    start(place)
        over.touch()
        for process in workers:
            process.join(PATIENCE)
            if process.is_alive():
                process.kill()
                return 0, done, [f"process {process.pid} hangs"]
        wrong = [f"a worker ended with {p.exitcode}" for p in workers if p.exitcode not in (0, -signal.SIGKILL)]
        wrong += receiver.stop()
        books = Books(directory)
        with ExitStack() as stack:
            routers = [stack.enter_context(insist(lambda home=home: anabranch.open(home))) for home in homes]  # type: ignore[misc]
            wrong += insist(lambda: wrong_with(books, routers))
            wrong += [f"nobody received {name}" for name in sorted(set(bodies(router, ORDERED)))[:5]]
    server.drop_schema(url)
    return len(books.names("begin")), done, wrong


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sql.shared_workers")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--work", type=float, default=6.0, help="seconds of a round")
    add_options(parser)
    given = parser.parse_args()
    messages, done = 0, Counter[str]()
    complaints: list[str] = []
    with PostgresServer() as server:
        for seed in of_options(given)[0].of(range(given.seed, given.seed + given.rounds)):
            with tempfile.TemporaryDirectory(prefix="anabranch-shared-", ignore_cleanup_errors=True) as place:
                some, more, wrong = play(server, Path(place), seed, given.work)
            messages += some
            done += more
            complaints += [f"seed {seed}: {one}" for one in wrong]
    print(*complaints, sep="\n", end="\n" if complaints else "")
    print(f"{messages} messages, {dict(done)}, {len(complaints)} wrong")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
