"""Processes that are killed while eight threads send and ack, and what they leave.

    python -m tests.crash.sigkill --rounds 1000 [--seconds 60] [--seed 1] [--directory DIR] [--mixed]

Each round forks a worker, which opens the directory (recovering from the round before), retries what was left of
unknown outcome, works, and dies by SIGKILL at a random moment: at work, while it recovers, while it makes the
directory. Now and then another process opens what is left, sometimes without its index, and compares it with the
marks: transactions over several stores took effect everywhere or nowhere, external ones wait unless they had an
outcome. A directory serves some rounds under one sync policy, then a fresh one takes over. With --mixed the stores are
of all kinds, and the workload is that of mixed.py.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import anabranch
import anabranch.adapters.journal
import anabranch.adapters.memory
import anabranch.adapters.sql  # here, not in each child

from ..contract.children import forked, reaped
from ..shares import Share, add_options, of_options
from ..sql.server import PostgresServer
from . import mixed
from .ledger import (
    Held,
    Marks,
    Operation,
    compare,
    contents,
    nothing_else_waits,
    read_marks,
    violations,
    whole_lines,
)
from .power.cross import opened
from .power.worker import Worker

THREADS = 8
ROUNDS_A_DIRECTORY = 10
WORK_SECONDS = (0.06, 0.3, 0.6)
VERIFY_SECONDS = 180


def config(directory: Path, seed: int) -> anabranch.Config:
    """A policy and limits that depend on the directory's seed alone."""
    chance = random.Random(seed)
    other = chance.choice(list(anabranch.Sync))
    options = anabranch.JournalOptions(
        sync=(anabranch.Sync.ALWAYS, anabranch.Sync.PERIODIC, anabranch.Sync.NEVER)[seed % 3],
        sync_interval=0.05,
        segment_size=64 * 1024,
        checkpoint_operations=chance.choice((7, 200, 20_000)),
        checkpoint_interval=chance.choice((0.03, 5.0)),
        batch_bytes_max=chance.choice((4096, 32 * 1024)),
        pool_files=chance.choice((0, 1, 3)),
        compact_live_percent=chance.choice((0, 50, 90)),
        compact_min_segments=chance.choice((1, 2, 4)),
    )
    return anabranch.Config(
        directory,
        [
            anabranch.StoreConfig("rest", [">"], journal=options),
            anabranch.StoreConfig("each", ["queue://own.>"], per_destination=True, journal=options),
            anabranch.StoreConfig("other", ["queue://other.>"], journal=options.model_copy(update={"sync": other})),
        ],
    )


class Thread(Worker):
    """One of the eight; does what chance tells it until the process dies."""

    def run(self, chance: random.Random) -> None:
        shared, private = f"shared.{chance.randrange(3)}", f"own.{self.name[-1]}"
        waiting: list[Operation] = []
        while True:
            queue = chance.choice((shared, shared, private))
            what = chance.random()
            if what < 0.35:
                self.send(queue, chance.choice((20, 400, 3000)), named=chance.random() < 0.5)
            elif what < 0.42:
                self.send(queue, 700, count=chance.randrange(2, 12), named=chance.random() < 0.5)
            elif what < 0.75:
                self.ack(queue, chance.choice((1, 1, 1, 6)))
            elif what < 0.80:
                self.transaction({shared: 1, f"audit.{self.name[-1]}": 1}, {shared: 1}, 300)
                self.ack(f"audit.{self.name[-1]}", 2)
            elif what < 0.90:
                self.transaction({shared: 1, private: 1, "other.all": 2}, {queue: 1, "other.all": 1}, 300)
                self.transaction({queue: 1}, {"other.all": 1, private: 1}, 20)
            elif what < 0.95:
                self.sent += 1
                waiting.append(self.prepare(f"x{self.name}n{self.sent}", [shared, "other.all"], [private, "other.all"]))
                if len(waiting) > 2 or chance.random() < 0.6:
                    self.end(waiting.pop(chance.randrange(len(waiting))), chance.random() < 0.7)
            elif what < 0.99:
                for message in self.receive(queue, 2):
                    message.release()
            else:
                self.router.reclaim()


def work(directory: Path, seed: int, turn: int) -> None:
    """The worker's life. Returns only if a thread fails."""
    base = directory.parent
    promised, maybe = read_marks(base / "marks")
    marks = Marks(base / "marks")
    held = Held.of(whole_lines(base / "marks"))
    with opened(config(directory, seed)) as router:
        worker = Thread(router, marks, "retry")
        worker.end_left(held, 0.3, random.Random(f"{seed} {turn}"))
        for operation in maybe:
            if operation["op"] == "send":
                retry(worker, operation, {identity for other in promised for identity in other.get("ids", ())})
        running = [Thread(router, marks, f"r{turn}t{number}") for number in range(THREADS)]
        failed = threading.Event()
        for number, thread in enumerate(running):
            chance = random.Random(f"{seed} {turn} {number}")
            threading.Thread(target=guarded, args=(failed, lambda t=thread, c=chance: t.run(c)), daemon=True).start()
        failed.wait()
        os._exit(3)


def work_mixed(directory: Path, seed: int, turn: int, url: str | None) -> None:
    """The same over all kinds of stores."""
    path = directory.parent / "marks"
    promised, maybe = read_marks(path)
    marks, held = Marks(path), Held.of(whole_lines(path))
    with opened(mixed.config(directory, seed, url)) as router:
        mixed.prepare(router)
        first = mixed.Hand(router, marks, f"r{turn}t", random.Random(f"{seed} {turn}"))
        first.end_left(held, 0.3)
        mixed.retry(first, promised, maybe)
        failed = threading.Event()
        for number in range(THREADS):
            hand = mixed.Hand(router, marks, f"r{turn}t{number}", random.Random(f"{seed} {turn} {number}"))
            threading.Thread(target=guarded, args=(failed, hand.run), daemon=True).start()
        failed.wait()
        os._exit(3)


def retry(worker: Worker, operation: Operation, settled: set[str]) -> None:
    """Send again what may not have been stored, as a careful sender does; only what had a message_id."""
    if not operation.get("named") or settled.intersection(operation["ids"]):
        return
    worker.perform(operation)


def guarded(failed: threading.Event, run: Callable[[], None]) -> None:
    try:
        run()
    except BaseException:
        traceback.print_exc()
        failed.set()


def verify(directory: Path, seed: int, without_index: bool) -> list[str]:
    """What is wrong with what is left; empty if nothing is."""
    promised, maybe = read_marks(directory.parent / "marks")
    held = Held.of(whole_lines(directory.parent / "marks"))
    if without_index:
        for index in directory.rglob("index.mdb"):
            index.unlink()
    with opened(config(directory, seed)) as router:
        found = contents(router)
        wrong = compare(found, promised, maybe) + violations(router) + nothing_else_waits(router)
        wrong += held.compare((xid.global_id for xid in router.recover()), found)
        if not maybe or without_index:
            router.reclaim()
            wrong += violations(router)
    return wrong


def verify_mixed(directory: Path, seed: int, without_index: bool, url: str | None) -> list[str]:
    """The same over all kinds of stores."""
    path = directory.parent / "marks"
    if without_index:
        for index in directory.rglob("index.mdb"):
            index.unlink()
    with opened(mixed.config(directory, seed, url)) as router:
        return mixed.verify(router, *read_marks(path), Held.of(whole_lines(path)))


def has_grown(path: Path, size: int) -> bool:
    """Whether the file has more bytes than these."""
    return path.stat().st_size > size


def rounds(
    count: int,
    first: int,
    base: Path,
    report: Callable[[str], None],
    share: Share,
    all_kinds: bool = False,
    server: PostgresServer | None = None,
) -> int:
    """Do so many, with seeds from `first` on; the number of directories that were found wrong, which are kept."""
    chance, bad = random.Random(first), 0
    kills = early = operations = 0
    turns = min(count, ROUNDS_A_DIRECTORY)
    directories = -(-count // ROUNDS_A_DIRECTORY)
    for number in share.of(range(directories)):
        seed = first + number
        place = base / f"seed-{seed}"
        place.mkdir()
        path = place / "marks"
        path.touch()
        directory, wrong = place / "data", False
        url = server.new_database() if server is not None else None
        for turn in range(turns):
            run = partial(work_mixed, directory, seed, turn, url) if all_kinds else partial(work, directory, seed, turn)
            busy = all_kinds and chance.random() < 0.8  # else most would die while they open so many stores
            code = reaped(
                forked(run),
                chance.choice(WORK_SECONDS) * chance.random() * (1 if busy or not all_kinds else 4),
                partial(has_grown, path, path.stat().st_size) if busy else lambda: True,
            )
            kills += code is None
            early += code is None and not any(f'"r{turn}t' in line for line in path.open())
            wrong |= code is not None
            if chance.random() < 0.4 or turn == turns - 1:
                without = chance.random() < 0.4
                look = partial(verify, directory, seed, without)
                if all_kinds:
                    look = partial(verify_mixed, directory, seed, without, url)
                code = reaped(forked(look), VERIFY_SECONDS)
                wrong |= code != 0
                if code is None:
                    report(f"seed {seed}: recovery hangs")
            if wrong:
                break
        operations += sum(1 for _ in path.open())
        if wrong:
            bad += 1
            report(f"seed {seed} is WRONG in round {turn}: kept in {place}")
        else:
            shutil.rmtree(place)
        if server is not None and url is not None and not wrong:
            server.drop_database(url)
    report(f"{kills} kills ({early} of them before the first work), {operations} marks, {bad} directories wrong")
    return bad


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill workers at random moments and look at what they leave.")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--mixed", action="store_true", help="over all kinds of stores")
    parser.add_argument("--postgres", action="store_true", help="and tables on a server of its own")
    add_options(parser)
    arguments = parser.parse_args()
    base = arguments.directory or Path(tempfile.mkdtemp(prefix="sigkill-"))
    base.mkdir(parents=True, exist_ok=True)
    all_kinds = arguments.mixed or arguments.postgres
    with PostgresServer() if arguments.postgres else nullcontext() as server:
        share, _ = of_options(arguments)
        report = partial(print, flush=True)
        bad = rounds(arguments.rounds, arguments.seed, base, report, share, all_kinds, server)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
