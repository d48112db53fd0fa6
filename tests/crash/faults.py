"""One system call of a scripted workload fails, or is the last one: for every call, one after the other.

    python -m tests.crash.faults [--kind eio] [--only 17]

The calls are those of the os module and the commits of LMDB; background jobs run where the script says, so that call
number k is the same in every run. Kinds: `eio`, `enospc`; `short`, a write that writes half, then ENOSPC; `crash`, the
process is gone before the call (every later call fails too, and the directory is looked at as it is then).
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import gc
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import lmdb

import anabranch
from anabranch.adapters.journal import JournalStore, background

from .ledger import Operation, body_of, compare, contents, identity_of, violations

CALLS = ("open", "pwrite", "pread", "fsync", "fdatasync", "rename", "unlink", "truncate", "mkdir")
KINDS = ("eio", "enospc", "short", "crash")


class Crash(BaseException):
    """The process is gone."""


@dataclass
class Faults:
    """Counts the calls and spoils number `at`."""

    root: Path
    kind: str = ""
    at: int = 0
    count: int = 0
    log: list[str] = field(default_factory=list)
    dead: bool = False
    hit: str = ""
    """What was spoilt."""
    failed_syncs: set[str] = field(default_factory=set)
    retried: list[str] = field(default_factory=list)
    """Syncs that were tried again after they had failed."""
    on: bool = True

    def call(self, name: str, real: Callable[..., Any], target: str, *arguments: Any) -> Any:
        if self.dead:
            raise Crash
        if not self.on:
            return real(*arguments)
        self.count += 1
        self.log.append(f"{name} {target}")
        if name in ("fsync", "fdatasync") and target in self.failed_syncs:
            self.retried.append(target)
        if self.count != self.at:
            return real(*arguments)
        self.hit = self.log[-1]
        if self.kind == "crash":
            self.dead = True
            raise Crash
        if self.kind == "short" and name == "pwrite":
            fd, data, offset = arguments
            self.at += 1
            self.kind = "enospc"
            return real(fd, memoryview(data)[: max(1, len(data) // 2)], offset)
        if name in ("fsync", "fdatasync") and target.endswith(".seg"):
            self.failed_syncs.add(target)
        number = errno.EIO if self.kind == "eio" else errno.ENOSPC
        if name == "commit":
            kind = lmdb.Error if self.kind == "eio" else lmdb.DiskError
            raise kind(f"mdb_txn_commit: {os.strerror(number)}")
        raise OSError(number, os.strerror(number), target)

    def name(self, target: Any) -> str:
        """What a call is about, short."""
        if isinstance(target, int):
            target = str(Path(f"/proc/self/fd/{target}").readlink())
        return str(os.fspath(target)).removeprefix(str(self.root))

    @contextlib.contextmanager
    def patched(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for name in CALLS:
                stack.enter_context(mock.patch.object(os, name, self._wrapped(name, getattr(os, name))))
            stack.enter_context(mock.patch.object(lmdb, "open", self._lmdb_open(lmdb.open)))
            yield

    def _wrapped(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(target: Any, *arguments: Any, **named: Any) -> Any:
            text = self.name(target)
            if text.startswith("/dev/") or text.endswith((".lock", ".pyc")) or "/data" not in text:
                return real(target, *arguments, **named)
            return self.call(name, lambda *a: real(*a, **named), text, target, *arguments)

        return call

    def _lmdb_open(self, real: Callable[..., Any]) -> Callable[..., Any]:
        return lambda path, **named: _Environment(self, real(path, **named), self.name(path))


class _Environment:
    """An LMDB environment whose commits can fail."""

    def __init__(self, faults: Faults, real: Any, name: str) -> None:
        self._faults, self._real, self._name = faults, real, name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def begin(self, write: bool = False, **named: Any) -> Any:
        txn = self._real.begin(write=write, **named)
        return _Transaction(self._faults, txn, self._name) if write else txn


class _Transaction:
    def __init__(self, faults: Faults, real: Any, name: str) -> None:
        self._faults, self._real, self._name = faults, real, name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def __enter__(self) -> _Transaction:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        self._real.abort() if kind else self.commit()

    def commit(self) -> None:
        try:
            self._faults.call("commit", self._real.commit, self._name)
        except BaseException:
            self._real.abort()
            raise


class Jobs(background.Background):
    """Background work that waits until the script lets it run."""

    def schedule(self, delay: float, job: Callable[[], None]) -> None:
        self._jobs.append((delay, 0, job))

    def run(self) -> None:
        """All that waits, in order, whatever its delay; what they schedule in turn is left for the next time."""
        waiting, self._jobs = self._jobs, []
        for _, _, job in waiting:
            job()


class Script:
    """The workload: what was tried, what was promised, what was refused, and every error of a wrong type."""

    def __init__(self, directory: Path, jobs: Jobs) -> None:
        options = anabranch.JournalOptions(
            segment_size=64 * 1024, batch_bytes_max=16 * 1024, checkpoint_interval=3600.0, pool_files=1
        )
        stores = [
            anabranch.StoreConfig("all", [">"], journal=options),
            anabranch.StoreConfig("own", ["queue://own.>"], journal=options),
        ]
        self.config = anabranch.Config(directory, stores)
        self.jobs = jobs
        self.promised: list[Operation] = []
        self.maybe: list[Operation] = []
        self.refused: list[Operation] = []
        """Those that are said to have had no effect."""
        self.errors: list[str] = []
        self.wrong: list[str] = []
        self.router: anabranch.Router | None = None
        self.sent = 0

    def attempt(self, what: str, act: Callable[[], object], operation: Operation | None = None) -> object:
        """Do it; note the outcome."""
        try:
            result = act()
        except anabranch.AnabranchError as error:
            self.errors.append(f"{what}: {type(error).__name__}: {error}")
            if operation:
                no_effect = isinstance(error, (anabranch.StoreFullError, anabranch.UnknownMessageError))
                (self.refused if no_effect else self.maybe).append(operation)
            return None
        except Crash:
            if operation:
                self.maybe.append(operation)
            raise
        except BaseException as error:
            self.wrong.append(f"{what} raised {type(error).__name__}: {error}")
            if operation:
                self.maybe.append(operation)
            return None
        if operation:
            self.promised.append(operation)
        return result

    def run(self, lives: int) -> None:
        for life in range(lives):
            if self.router is None:
                self.attempt("open", self._open)
            if self.router is None:
                continue
            for step in range(3):
                self.send("q", 300)
                self.send("own.q", 300)
                self.many("q", 9000, 4)
                self.ack("q", 4 if step else 2)
                self.transaction("q", "audit")
                self.ack("own.q", 1)
                if step == 1:
                    self.attempt("checkpoint", self._checkpoint)
                self.attempt("background", self.jobs.run)
            self.attempt("reclaim", self.router.reclaim)
            self.send("q", 300)
            self.send("own.q", 300)
            self.attempt("background", self.jobs.run)
            if life < lives - 1 and not self.errors:
                self.attempt("close", self.router.close)
                self.router = None

    def _open(self) -> None:
        self.router = None
        self.router = anabranch.open(self.config)

    def _checkpoint(self) -> None:
        for store in stores_of(self.router):
            store.checkpoint()

    def _new(self, count: int = 1) -> list[str]:
        self.sent += count
        return [f"s.{n}" for n in range(self.sent - count, self.sent)]

    def send(self, queue: str, size: int) -> None:
        (identity,) = ids = self._new()
        target = self.router.queue(queue)  # type: ignore[union-attr]
        self.attempt("send", lambda: target.send(body_of(identity, size)), {"op": "send", "q": queue, "ids": ids})

    def many(self, queue: str, size: int, count: int) -> None:
        ids = self._new(count)
        target = self.router.queue(queue)  # type: ignore[union-attr]
        self.attempt(
            "send_many",
            lambda: target.send_many([body_of(i, size) for i in ids]),
            {"op": "send", "q": queue, "ids": ids},
        )

    def receive(self, queue: str, count: int) -> list[anabranch.Message]:
        target = self.router.queue(queue)  # type: ignore[union-attr]
        found = [self.attempt("receive", target.receive) for _ in range(count)]
        return [message for message in found if isinstance(message, anabranch.Message)]

    def ack(self, queue: str, count: int) -> None:
        messages = self.receive(queue, count)
        ids = [identity_of(message.body) for message in messages]
        if ids:
            router = self.router
            assert router is not None
            self.attempt("ack", lambda: router.ack(messages), {"op": "ack", "q": queue, "ids": ids})

    def transaction(self, taken: str, given: str) -> None:
        (identity,) = self._new()
        messages = self.receive(taken, 1)

        def act() -> None:
            with self.router.transaction() as tx:  # type: ignore[union-attr]
                tx.send(given, body_of(identity))
                for message in messages:
                    tx.ack(message)

        acks = [[taken, identity_of(message.body)] for message in messages]
        self.attempt("transaction", act, {"op": "tx", "send": [[given, identity]], "ack": acks})


def stores_of(router: anabranch.Router | None) -> list[JournalStore]:
    assert router is not None
    return [store for store in router._open_stores.values() if isinstance(store, JournalStore)]


def trial(base: Path, kind: str, at: int, lives: int = 2) -> tuple[Faults, list[str]]:
    """Run the script with call number `at` spoilt; what is wrong, in the store's behaviour and in what it leaves."""
    directory = base / "data"
    faults, jobs = Faults(base, kind, at), Jobs()
    with mock.patch.object(background, "_shared", jobs):
        script = Script(directory, jobs)
        with faults.patched():
            with contextlib.suppress(Crash):
                script.run(lives)
            wrong = script.wrong
            if not faults.dead:
                faults.on = False
                wrong += _behaviour(script, faults)
            faults.dead = True  # what the abandoned objects still try to do does not reach the disk
            killed = base / "killed"
        shutil.copytree(directory, killed / "data") if directory.exists() else None
        wrong += _left(killed / "data", script)
        script.router = None
        gc.collect()
    shutil.rmtree(directory, ignore_errors=True)
    shutil.rmtree(killed, ignore_errors=True)
    return faults, [f"{kind} at {at}, {faults.hit}: {line}" for line in wrong]


def _behaviour(script: Script, faults: Faults) -> list[str]:
    """The fault is over: a failed store stays failed, the others work, everything closes and opens again."""
    wrong = [f"sync of {target} was tried again after it had failed" for target in faults.retried]
    router = script.router
    if router is None:
        return wrong
    stores = stores_of(router)
    failed = [store for store in stores if store.stats().failed]
    if len(failed) > 1:
        wrong.append(f"{len(failed)} stores failed")
    for queue in ("q", "own.q"):
        before = len(script.errors)
        script.send(queue, 10)
        store = next((s for s in stores if s.name == ("own" if queue == "own.q" else "all")), None)
        if store in failed and (len(script.errors) == before or "StoreFailed" not in script.errors[-1]):
            wrong.append(f"failed store {store.name} took a send: {script.errors[before:]}")
        if store not in failed and len(script.errors) > before:
            wrong.append(f"store {queue} has not failed and refuses a send: {script.errors[before:]}")
    for store in failed:
        script.attempt("reopen", partial(router.reopen, store.name))
        before = len(script.errors)
        script.send("own.q" if store.name == "own" else "q", 10)
        if len(script.errors) > before:
            wrong.append(f"reopened, store {store.name} refuses a send: {script.errors[before:]}")
    wrong += violations(router)
    return wrong + [line for line in compare(contents(router), script.promised, script.maybe) if line not in wrong]


def _left(directory: Path, script: Script) -> list[str]:
    """What a new process finds, with and without the indexes."""
    wrong: list[str] = []
    gone = {(o["q"], i) for o in script.refused if o["op"] == "send" for i in o["ids"]}
    config = anabranch.Config(directory, script.config.stores)
    found: dict[str, list[str]] = {}
    for _ in range(2):
        with anabranch.open(config) as router:
            again = contents(router)
            wrong += compare(again, script.promised, script.maybe) + violations(router)
            wrong += [f"refused, but there: {i} of {q}" for q, ids in again.items() for i in ids if (q, i) in gone]
        if found and again != found:
            wrong.append("without its indexes it holds something else")
        found = again
        for index in directory.rglob("index.mdb"):
            index.unlink()
    return wrong


def campaign(kinds: list[str], report: Callable[[str], None], only: int = 0, lives: int = 2) -> tuple[int, int]:
    """Every call, every kind: trials and how many went wrong. A life is open, work, close."""
    trials = bad = 0
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None  # what is simulated needs no disk
    with tempfile.TemporaryDirectory(prefix="faults-", dir=memory) as base:
        faults, wrong = trial(Path(base), "", 0, lives)
        calls = faults.count
        report(f"{calls} calls; {wrong or 'all is well without faults'}")
        for kind in kinds:
            for at in [only] if only else range(1, calls + 1):
                if kind == "short" and not faults.log[at - 1].startswith("pwrite"):
                    continue
                trials += 1
                try:
                    _, wrong = trial(Path(base), kind, at, lives)
                except BaseException as error:
                    if isinstance(error, KeyboardInterrupt):
                        raise
                    wrong = [f"{kind} at {at}, {faults.log[at - 1]}: {type(error).__name__}: {error}"]
                    shutil.rmtree(Path(base) / "data", ignore_errors=True)
                    shutil.rmtree(Path(base) / "killed", ignore_errors=True)
                bad += bool(wrong)
                for line in wrong[:3]:
                    report(line)
    report(f"{trials} trials, {bad} wrong")
    return trials, bad


def main() -> int:
    parser = argparse.ArgumentParser(description="Spoil every system call of a workload, one after the other.")
    parser.add_argument("--kind", choices=KINDS, action="append")
    parser.add_argument("--only", type=int, default=0)
    arguments = parser.parse_args()
    return 1 if campaign(arguments.kind or list(KINDS), lambda line: print(line, flush=True), arguments.only)[1] else 0


if __name__ == "__main__":
    sys.exit(main())
