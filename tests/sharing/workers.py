"""Processes that share a directory while they, and its owner, are killed; and what was promised, held against what is
left.

    python -m tests.sharing.workers --rounds 10 [--seconds 60] [--seed 1] [--directory DIR] [--kind journal]

In each round eight processes work at once over two stores: they send (waiting, not waiting, many), receive (one, many,
by a listener), ack, release, and commit what moves a message from one store to the other. Each writes down what it
begins and what it was told. Meanwhile owners and workers are killed, or stopped for a while, at random moments. Then
the books are added up: what was sent and not acked is there, once; what was acked is not; what moved moved once; what
nobody was told of is there or not, and at most once.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from queue import Empty, Queue
from typing import ClassVar

import anabranch
from anabranch.router.sharing import starting

from ..children import CONTEXT
from ..shares import add_options, of_options

WORKERS = 8
KINDS = {"journal": "journal", "sqlite": "sql"}
QUEUES = ("q", "other.q")
MOVED = {"q": "other.done", "other.q": "done"}
PATIENCE = 120.0
LINGER = 1.0
"""Seconds for which owners stay after the round."""


def config(directory: Path, kind: str) -> anabranch.Config:
    """Return two stores of a kind, over which transactions go."""
    stores = [
        anabranch.StoreConfig("rest", [">"], kind=KINDS[kind]),
        anabranch.StoreConfig("other", ["queue://other.>"], kind=KINDS[kind]),
    ]
    return anabranch.Config(directory, stores)


class Worker:
    """One process: it does random things until its time is over, and writes each down before and behind it."""

    queues: ClassVar[tuple[str, ...]] = QUEUES
    moved: ClassVar[dict[str, str]] = MOVED

    def __init__(self, router: anabranch.Router, name: str, book: Path, seed: int) -> None:
        self._router, self._name = router, name
        self._chance = random.Random(seed)
        self._fd = os.open(book, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._count = 0
        self._calls = Counter[str]()

    def note(self, what: str, *names: str) -> None:
        """Write down, in one step which a kill does not split."""
        os.write(self._fd, "".join(f"{what} {name}\n" for name in names).encode())

    def _choices(self) -> list[Callable[[], None]]:
        """Return what it does, the more often the more often it is there."""
        sends = [self._send, self._send, self._send_many, self._send_nowait]
        return [*sends, self._take, self._take, self._take_many, self._listen]

    def run(self, until: float) -> None:
        """Work until a time (monotonic)."""
        do = self._choices()
        while time.monotonic() < until:
            with suppress(anabranch.OutcomeUnknownError):
                self._chance.choice(do)()

    def _names(self, count: int) -> list[str]:
        names = [f"{self._name}.{self._count + n}" for n in range(count)]
        self._count += count
        return names

    def _send(self) -> None:
        queue, (name,) = self._chance.choice(self.queues), self._names(1)
        self.note("begin", name)
        receipt = self._router.queue(queue).send(
            name.encode(), message_id=name if self._chance.random() < 0.5 else None
        )
        self.note("sent", name)
        assert receipt.seq

    def _send_many(self) -> None:
        queue, names = self._chance.choice(self.queues), self._names(20)
        self.note("begin", *names)
        self._router.queue(queue).send_many([name.encode() for name in names])
        self.note("sent", *names)

    def _send_nowait(self) -> None:
        queue, names = self._chance.choice(self.queues), self._names(20)
        self.note("begin", *names)
        futures = [self._router.queue(queue).send_nowait(name.encode()) for name in names]
        for name, future in zip(names, futures, strict=True):
            future.result(PATIENCE)
            self.note("sent", name)

    def _take(self) -> None:
        message = self._router.queue(self._chance.choice(self.queues)).receive(self._chance.choice((0, 0.05)))
        if message is not None:
            self._settle(message)

    def _take_many(self) -> None:
        for message in self._router.queue(self._chance.choice(self.queues)).receive_many(5):
            self._settle(message)

    def _listen(self) -> None:
        taken: Queue[anabranch.Message[bytes]] = Queue()
        listener = self._router.queue(self._chance.choice(self.queues)).listen(taken.put, credit=3)
        for _ in range(6):
            with suppress(Empty):
                self._settle(taken.get(timeout=0.1))
                listener.add_credit(1)
        listener.close()
        while not taken.empty():
            taken.get().release()

    def _settle(self, message: anabranch.Message[bytes]) -> None:
        """Ack, release or move it. Where the owner hands out again what a stopped process held, that hears of it."""
        name, chance = message.body.decode(), self._chance.random()
        with suppress(anabranch.UnknownMessageError):
            if chance < 0.2:
                message.release()
            elif chance < 0.6:
                self.note("ending", name)
                message.ack()
                self.note("acked", name)
            else:
                self.note("ending", name)
                with self._router.transaction() as transaction:
                    transaction.ack(message)
                    transaction.send(self.moved[message.destination.name], message.body)
                self.note("moved", name)


def _work(given: anabranch.Config, name: str, book: Path, seed: int, until: float) -> None:
    vars(starting)["LINGER"] = LINGER
    with anabranch.open(given, shared=True) as router:
        Worker(router, name, book, seed).run(until)


class Books:
    """What the workers of a directory have written down."""

    def __init__(self, directory: Path) -> None:
        self.noted: dict[str, Counter[str]] = {}
        for book in directory.glob("book.*"):
            for line in book.read_text().splitlines():
                what, name = line.split()
                self.noted.setdefault(what, Counter())[name] += 1

    def names(self, what: str) -> set[str]:
        """Return the messages of which that was written down."""
        return set(self.noted.get(what, ()))

    def wrong(self, router: anabranch.Router) -> list[str]:
        """Return what is wrong with what is left."""
        left = Counter(message.body.decode() for queue in QUEUES for message in router.queue(queue).browse())
        moved = Counter(message.body.decode() for queue in MOVED.values() for message in router.queue(queue).browse())
        return self.wrong_with(left, moved)

    def wrong_with(self, left: Counter[str], moved: Counter[str]) -> list[str]:
        """Return what is wrong if these are left, and these have moved."""
        ended = self.names("acked") | self.names("moved")
        there = set(left) | set(moved)
        found = {
            "lost": self.names("sent") - there - self.names("ending"),
            "twice": {name for name, count in (left + moved).items() if count > 1},
            "left, and acked": set(left) & ended,
            "moved, and said to be acked": set(moved) & self.names("acked"),
            "not moved": self.names("moved") - set(moved),
            "never sent": there - self.names("begin"),
            "acked twice": {
                name for name in ended if sum(self.noted.get(w, Counter())[name] for w in ("acked", "moved")) > 1
            },
        }
        return [f"{what}: {' '.join(sorted(names)[:5])} ({len(names)})" for what, names in found.items() if names]


def owner_of(directory: Path) -> int | None:
    """Return the owner's pid, if it says one."""
    with suppress(OSError, IndexError, ValueError):
        return int((directory / "router.lock").read_text().split()[0])
    return None


def play(directory: Path, kind: str, seed: int, seconds: float) -> tuple[int, int, list[str]]:
    """Play one round; returns how many messages there were, how many kills, and what was wrong."""
    chance = random.Random(seed)
    given = config(directory / "data", kind)
    until = time.monotonic() + seconds
    workers: list[BaseProcess] = []

    def start() -> None:
        number = len(workers)
        process = CONTEXT.Process(
            target=_work,
            args=(given, f"{seed}.{number}", directory / f"book.{seed}.{number}", seed * 1000 + number, until),
        )
        process.start()
        workers.append(process)

    with anabranch.open(given, shared=True) as router:
        for _ in range(WORKERS):
            start()
        kills = 0
        while time.monotonic() < until - 0.5:
            time.sleep(chance.uniform(0.2, 0.8))
            kind_of_fault = chance.choice(("owner", "worker", "stop worker", "stop owner"))
            pid = owner_of(given.directory) if "owner" in kind_of_fault else chance.choice(workers).pid
            with suppress(ProcessLookupError):
                if pid is None or pid == os.getpid():
                    continue
                if "stop" in kind_of_fault:
                    os.kill(pid, signal.SIGSTOP)
                    time.sleep(chance.uniform(0.01, 0.3))
                    os.kill(pid, signal.SIGCONT)
                else:
                    os.kill(pid, signal.SIGKILL)
                    kills += 1
                    if kind_of_fault == "worker":
                        start()
        for process in workers:
            process.join(PATIENCE)
            if process.is_alive():
                process.kill()
                return 0, kills, [f"process {process.pid} hangs"]
        failed = [process.exitcode for process in workers if process.exitcode not in (0, -signal.SIGKILL)]
        books = Books(directory)
        wrong = books.wrong(router) + [f"a worker ended with {code}" for code in failed]
        return len(books.names("begin")), kills, wrong


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kind", choices=list(KINDS), default="journal")
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--work", type=float, default=4.0, help="seconds of a round")
    add_options(parser)
    given = parser.parse_args()
    share, _ = of_options(given)
    vars(starting)["LINGER"] = LINGER
    messages = kills = 0
    complaints: list[str] = []
    for seed in share.of(range(given.seed, given.seed + given.rounds)):
        # The owner stays for LINGER, and may write there while it is deleted.
        with tempfile.TemporaryDirectory(dir=given.directory, ignore_cleanup_errors=True) as place:
            some, killed, wrong = play(Path(place), given.kind, seed, given.work)
        messages, kills = messages + some, kills + killed
        complaints += [f"seed {seed}: {one}" for one in wrong]
    print(*complaints, sep="\n", end="\n" if complaints else "")
    print(f"{messages} messages, {kills} kills, {len(complaints)} wrong")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
