"""Threads do what chance tells them over journals whose compiled appender meets errors of the C library.

    python -m tests.crash.native --seconds 3600 [--rounds 10] [--seed 1] [--directory DIR]

A round is a directory with some lives. Each opens it, works, and closes it whatever has failed. native_faults.c, which
is preloaded, stands between the appender as it is installed and the C library: writes and syncs are interrupted, late
and short, and in the end fail. Then the directory is opened again and compared with the ledger: what was promised is
there, once and in order; what was refused took no effect; what ended unknown is there whole or not at all. The work is
that of mixed.py, with sends of many and without waiting, browse, purge and reopen beside it. The seed repeats all
choices, but not how threads take turns.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import logging
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import traceback
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import anabranch
from anabranch.policies.errors import OutcomeUnknownError, TransactionInDoubt

from ..contract.disk import PATIENCE
from ..places import in_memory
from ..shares import Share, add_options, of_options
from . import mixed
from .ledger import Held, Marks, Operation, body_of, identity_of, read_marks, sends_of, whole_lines
from .power.cross import opened
from .power.worker import SEGMENT

LIVES: Final = 4
THREADS: Final = 6
STEPS: Final = 40
ENOUGH: Final = 6
"""Errors after which a thread goes home."""
KINDS: Final = ("interrupted", "slow", "short", "torn", "full", "broken")
"""As in native_faults.c. The last three are the end of a log."""
REFUSED: Final = ("tx", "ack", "prepare", "rollback")
"""Operations that take effect as a whole, or are refused."""
SOURCE: Final = Path(__file__).with_name("native_faults.c")


class Faults:
    """The preloaded library's variables."""

    def __init__(self, library: Path) -> None:
        loaded = ctypes.CDLL(str(library))
        names = ("seed", "calls", "retried")
        self._seed, self._calls, self.retried = (ctypes.c_uint64.in_dll(loaded, f"faults_{name}") for name in names)
        self._one_in = (ctypes.c_uint * len(KINDS)).in_dll(loaded, "faults_one_in")
        self._met = (ctypes.c_uint64 * (2 * len(KINDS))).in_dll(loaded, "faults_met")

    @contextmanager
    def met(self, chance: random.Random) -> Iterator[None]:
        """Calls meet them; the end of a log comes sooner or later, or not at all."""
        self._seed.value, self._calls.value, self.retried.value = chance.getrandbits(63), 0, 0
        ends = [chance.choice((0, 60, 300, 1000)) for _ in range(3)]
        self._one_in[:] = [chance.choice((5, 20)), chance.choice((20, 100)), chance.choice((3, 10)), *ends]
        try:
            yield
        finally:
            self._one_in[:] = [0] * len(KINDS)

    def counts(self) -> dict[str, int]:
        names = [f"{kind} {call}" for call in ("writes", "syncs") for kind in KINDS]
        return {name: count for name, count in zip(names, self._met, strict=True) if count}


def config(directory: Path, seed: int) -> anabranch.Config:
    """A journal of mixed.py three times, under all policies; what dies in one lies in the next."""
    stores = []
    for number, (name, dead) in enumerate((("j", "k"), ("k", "l"), ("l", "j"))):
        update = {"dead_letter": f"{dead}.dead", "sync": list(anabranch.Sync)[(seed + number) % 3]}
        options = mixed.config(directory, seed).stores[0].options.model_copy(update=update | {"segment_size": SEGMENT})
        assert isinstance(options, anabranch.JournalOptions)
        stores.append(anabranch.StoreConfig(name, [f"{name}.>"], journal=options))
    return anabranch.Config(directory, stores)


class Told(Marks):
    """Marks of one life, and what was refused: it is said to have had no effect."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.refused: list[Operation] = []
        self.counts = Counter[str]()
        self._begun = threading.local()

    def write(self, word: str, operation: Operation) -> None:
        self._begun.operation = operation if word == "TRY" else None
        self.counts[word] += 1
        super().write(word, operation)

    @property
    def begun(self) -> Operation | None:
        """What this thread has begun."""
        return getattr(self._begun, "operation", None)

    def ended(self, error: anabranch.AnabranchError, operation: Operation | None = None) -> bool:
        """The operation, or what this thread has begun, ended so. Returns whether it was refused: of many that are sent
        some may be there, and what was given back may be counted."""
        operation = operation or self.begun
        unknown = isinstance(error, (OutcomeUnknownError, TransactionInDoubt))
        unknown = unknown or operation is None or operation["op"] not in REFUSED
        if operation is not None and not unknown:
            self.refused.append(operation)
            self.write("NOT", operation)
        self.write("ERR", {"of": operation, "error": repr(error)})
        return not unknown


class Hand(mixed.Hand):
    """One thread, with a queue of its own whose contents it knows."""

    def __init__(self, router: anabranch.Router, told: Told, name: str, chance: random.Random) -> None:
        super().__init__(router, told, name, chance)
        self.told, self.wrong = told, list[str]()
        self.own = f"{chance.choice(self.stores)}.own.{name}"
        self.there: list[str] | None = []
        """What its own queue holds; None: that is unknown."""
        self._taken: list[anabranch.Message] = []

    def work(self) -> None:
        waiting: list[Operation] = []
        errors = steps = 0
        while steps < STEPS and errors < ENOUGH and not self.wrong:
            self._taken.clear()
            steps += 1
            try:
                self.step(waiting)
            except anabranch.AnabranchError as error:
                errors += 1
                begun, back = self.told.begun, self._back(self._taken)
                if begun is not None and begun["op"] in ("requeue", "tx"):  # a dead letter too
                    back["ids"] += begun.get("ids") or begun["ack"]
                self.told.ended(error)
                self.marks.trying(back)  # they may come back by themselves
                self.name += "v"  # another producer: what is sent again comes behind what was sent since
                if self.chance.random() < 0.2:
                    self._mend()
            except BaseException:
                self.wrong.append(traceback.format_exc())

    def step(self, waiting: list[Operation]) -> None:
        what = self.chance.random()
        if what < 0.05:
            self._send_many()
        elif what < 0.12:
            self._send_nowait()
        elif what < 0.15:
            self._look()
        elif what < 0.17:
            self._purge()
        else:
            super().step(waiting)

    def receive(self, where: str) -> anabranch.Message | None:
        message = super().receive(where)
        self._taken += [message] if message is not None else []
        return message

    def filled(self, tx: anabranch.Transaction, prefix: str = "") -> tuple[Operation, list[anabranch.Message]]:
        """As what is prepared: a store that has failed carries it out later, and other sends overtake it."""
        return super().filled(tx, prefix or f"x{self.name}n{self.sent}")

    def subscriptions(self) -> None:
        """Not here: what is carried out later depends on what came between."""

    def _mend(self) -> None:
        """Open again what has failed, while others use it."""
        try:
            for store in self.router._registry.open_stores():
                if store.stats().failed:
                    self.router.reopen(store.name)
            if self.router._coordinator.log.unusable is not None:
                self.router.reopen_decisions()
        except anabranch.AnabranchError:
            self.told.counts["not reopened"] += 1

    def _new(self) -> tuple[str, bytes]:
        identity = self.new(self.own, 4)
        return identity, body_of(identity, self.chance.choice((20, 400, 3000)))

    def _send_many(self) -> None:
        sent, before = [self._new() for _ in range(self.chance.randrange(2, 9))], self.there
        ids, self.there = [identity for identity, _ in sent], None
        operation = {"op": "send", "q": self.own, "ids": ids}
        self.marks.trying(operation)
        self.router.queue(self.own).send_many([body for _, body in sent], sync=self.chance.choice((None, True)))
        self.marks.promised(operation)
        self.there = before + ids if before is not None else None

    def _send_nowait(self) -> None:
        begun, last = [], None
        for _ in range(self.chance.randrange(1, 6)):
            identity, body = self._new()
            operation = mixed.sent_to(self.own, identity, named=False)
            self.marks.trying(operation)
            try:
                future = self.router.queue(self.own).send_nowait(body)
            except anabranch.AnabranchError as error:
                (future := Future()).set_exception(error)
            begun.append((operation, future))
        for operation, future in begun:
            failure = future.exception(PATIENCE)
            last = failure or last
            if failure is None:
                self.marks.promised(operation)
                self.there = [*self.there, operation["id"]] if self.there is not None else None
            elif isinstance(failure, anabranch.AnabranchError) and not self.told.ended(failure, operation):
                self.there = None
        if last is not None:
            raise last

    def _look(self) -> list[str]:
        found = [identity_of(message.read()) for message in self.router.queue(self.own).browse()]
        if self.there not in (None, found):
            self.wrong.append(f"{self.own} shows {found}, not {self.there}")
        return found

    def _purge(self) -> None:
        operation: Operation = {"op": "ack", "q": self.own, "ids": self._look()}
        self.there = None
        self.marks.trying(operation)
        count = self.router.queue(self.own).purge()
        self.marks.promised(operation)
        if count != len(operation["ids"]):
            self.wrong.append(f"{count} of {self.own} were purged, not {operation['ids']}")
        self.there = []


def life(directory: Path, seed: int, turn: int, faults: Faults, counts: Counter[str]) -> list[str]:
    """What is wrong after one more."""
    path, chance, setup = directory.parent / "marks", random.Random(f"{seed} {turn}"), config(directory, seed)
    try:
        with faults.met(chance):
            router = opened(setup)
    except anabranch.AnabranchError:
        counts["failed openings"] += 1
        router = opened(setup)
    mixed.prepare(router)
    told = Told(path)
    first, *hands = [
        Hand(router, told, f"r{turn}t{n}", random.Random(f"{seed} {turn} {n}")) for n in range(THREADS + 1)
    ]
    first.end_left(Held.of(whole_lines(path)), 0.3)
    mixed.retry(first, *read_marks(path))
    threads = [threading.Thread(target=hand.work, daemon=True) for hand in hands]
    with faults.met(chance):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
    if any(thread.is_alive() for thread in threads):
        faulthandler.dump_traceback(sys.stdout)
        os._exit(2)
    counts["failed logs"] += sum(bool(store.stats().failed) for store in router._registry.open_stores())
    router.close()
    wrong = [line for hand in hands for line in hand.wrong]
    wrong += [f"{faults.retried.value} calls were tried again after they had failed"] * (faults.retried.value > 0)
    with opened(setup) as router:
        wrong += mixed.verify(router, *read_marks(path), Held.of(whole_lines(path)), power=True)
        wrong += took_effect(router, told.refused)
    for word, name in (("TRY", "operations"), ("NOT", "refused"), ("ERR", "errors"), ("not reopened",) * 2):
        counts[name] += told.counts[word]
    os.close(told._fd)
    return wrong


def took_effect(router: anabranch.Router, refused: list[Operation]) -> list[str]:
    """What was refused, and is there all the same. (That a refused ack took effect the ledger sees: it is lost.)"""
    found = mixed.Found.of(router)
    there = {(where, identity) for where, ids in found.channels.items() for identity in ids}
    there |= {*found.dead, *found.expired}
    waiting = {xid.global_id for xid in router.recover()}
    wrong = [f"refused, and waits: {each}" for each in refused if each["op"] == "prepare" and each["xid"] in waiting]
    sent = [pair for each in refused if "send" in each for pair in sends_of({**each, "op": "tx"})]
    return wrong + [f"refused, and there: {pair}" for pair in sent if pair in there]


def rounds(count: int, first: int, base: Path, faults: Faults, share: Share) -> int:
    """Do so many, with seeds from `first` on; how many were found wrong, whose directories are kept."""
    counts = Counter(wrong=0)
    for seed in share.of(range(first, first + count)):
        place = base / f"seed-{seed}"
        place.mkdir()
        (place / "marks").touch()
        counts["rounds"] += 1
        for turn in range(LIVES):
            try:
                wrong = life(place / "data", seed, turn, faults, counts)
            except Exception:
                wrong = [traceback.format_exc()]
            if wrong:
                print(f"seed {seed} is WRONG in life {turn}: kept in {place}", *wrong[:10], sep="\n", flush=True)
                counts["wrong"] += 1
                break
        else:
            shutil.rmtree(place)
    print(", ".join(f"{count} {name}" for name, count in {**counts, **faults.counts()}.items()))
    return counts["wrong"]


def main() -> int:
    parser = argparse.ArgumentParser(description="Work over journals whose writes fail in C.")
    parser.add_argument("--rounds", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--directory", type=Path)
    add_options(parser)
    arguments = parser.parse_args()
    base = arguments.directory or Path(tempfile.mkdtemp(prefix="native-", dir=in_memory()))
    library = base / "native_faults.so"
    if os.environ.get("LD_PRELOAD") != str(library):
        flags = ["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror"]
        subprocess.run([shutil.which("cc") or "gcc", *flags, str(SOURCE), "-o", str(library), "-ldl"], check=True)
        again = [sys.executable, "-m", "tests.crash.native", *sys.argv[1:], "--directory", str(base)]
        os.execve(sys.executable, again, os.environ | {"LD_PRELOAD": str(library)})
    logging.disable()
    return 1 if rounds(arguments.rounds, arguments.seed, base, Faults(library), of_options(arguments)[0]) else 0


if __name__ == "__main__":
    sys.exit(main())
