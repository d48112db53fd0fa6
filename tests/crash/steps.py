"""Transactions over a journal and SQLite: each step of theirs is the last one of its process, or fails.

    python -m tests.crash.steps [--kind K] [--only STEP] [--share 1/10] [--seconds 60]

SQLite makes its system calls itself, so what is counted here is what it is asked for, statements and commits, and what
the router asks of the journal and of the decision log. Kinds: `killed`, by SIGKILL before the step; `killed-after`,
when it is done; `ioerr`, `full`, `locked`: SQLite's errors instead of it; `told`: the error though it was done.

What has to hold is what mixed.py verifies; and that what was refused took no effect, that a store which has failed
opens again, and that nothing is left in doubt.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sqlite3
import sys
import tempfile
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import sqlalchemy
from sqlalchemy.engine.default import DefaultDialect

import anabranch
from anabranch.adapters.journal import JournalStore
from anabranch.adapters.sql.shared.database import SharedDatabase
from anabranch.router.transactions.decision_log import DecisionLog

from ..contract.children import forked, reaped
from ..contract.disk import eventually
from ..shares import Share, add_options, of_options
from . import mixed
from .ledger import Held, Marks, Operation, name, nothing_else_waits, read_marks, sends_of, whole_lines
from .power.cross import opened
from .power.kinds import config

OPTIONS: Final = {"stores": "js", "checkpoint_operations": 20}
ERRORS: Final = {
    "ioerr": ("disk I/O error", "SQLITE_IOERR_WRITE"),
    "full": ("database or disk is full", "SQLITE_FULL"),
    "locked": ("database is locked", "SQLITE_BUSY"),
    "told": ("disk I/O error", "SQLITE_IOERR_FSYNC"),
}
KINDS: Final = ("killed", "killed-after", *ERRORS)
LIVES: Final = 2
TURNS: Final = 4


class Steps:
    """Counts the steps, and spoils number `at`. Threads: all."""

    def __init__(self, kind: str = "", at: int = 0) -> None:
        self.kind, self.at = kind, at
        self.log: list[str] = []
        self.hit = False
        self._lock = threading.Lock()

    def wrap(self, owner: type, method: str) -> None:
        real = getattr(owner, method)

        def step(self_: Any, *arguments: Any, **named: Any) -> Any:
            what = method
            if method.startswith(("do_execute", "_run")):
                what = " ".join(str(arguments[1]).split()[:3])
            return self.call(what, owner is DefaultDialect, partial(real, self_, *arguments, **named))

        setattr(owner, method, step)

    def wrap_all(self) -> None:
        """In a process that does nothing else."""
        for method in ("do_execute", "do_execute_no_params", "do_executemany", "do_commit"):
            self.wrap(DefaultDialect, method)
        self.wrap(SharedDatabase, "_run")
        for method in ("prepare", "commit_prepared", "rollback_prepared", "commit", "sync"):
            self.wrap(JournalStore, method)
        for method in ("decide", "hold"):
            self.wrap(DecisionLog, method)

    def call(self, what: str, of_database: bool, do: Callable[[], Any]) -> Any:
        with self._lock:
            self.log.append(what)
            hit = len(self.log) == self.at
            self.hit = self.hit or hit
        if not hit:
            return do()
        if self.kind == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.kind in ("killed-after", "told"):
            result = do()
            if self.kind == "killed-after":
                os.kill(os.getpid(), signal.SIGKILL)
        if self.kind in ERRORS and of_database:
            text, code = ERRORS[self.kind]
            error = sqlite3.OperationalError(text)
            error.sqlite_errorname = code
            raise error
        return result if self.kind == "told" else do()


class Script:
    """What the child does; it goes on after errors."""

    def __init__(self, directory: Path, steps: Steps) -> None:
        self.setup = config(directory, OPTIONS)
        self.path = directory.parent / "marks"
        self.marks = Marks(self.path)
        self.steps = steps
        self.refused: list[Operation] = []
        self.late: list[Operation] = []
        """Transactions in which a store was struck: it may have been told again after others (rule T2)."""
        self.wrong: list[str] = []
        self.tried: Operation = {}
        self.marks.trying, trying = self._trying, self.marks.trying  # type: ignore[method-assign]
        self._try = trying

    def _trying(self, operation: Operation) -> None:
        self.tried = operation
        self._try(operation)

    def attempt(self, act: Callable[[], object]) -> bool:
        """Do it. An error says what became of what was tried last."""
        self.tried, hit = {}, self.steps.hit
        try:
            act()
            if self.steps.hit != hit:
                self.late.append(self.tried)
        except (anabranch.OutcomeUnknownError, anabranch.TransactionInDoubt):
            return False
        except anabranch.AnabranchError:
            if self.tried and not self.tried.get("xid"):
                self.refused.append(self.tried)
            return False
        except sqlalchemy.exc.DBAPIError:
            return False  # a caller's own connection: its outcome is what its database says
        except AssertionError as error:
            self.wrong.append(f"{error}")
            return False
        return True

    def run(self) -> None:
        for life in range(LIVES):
            router = self._open()
            hand = mixed.Hand(router, self.marks, f"l{life}t", random.Random(life))
            steps: list[Callable[[], object]] = [
                partial(hand.send, "j.q"),
                partial(hand.send, "s.q"),
                partial(hand.send, "topic://s.t"),
                hand.transaction,
                hand.transaction,
                partial(self._external, hand),
                partial(hand.release, "s.q"),
                hand.within,
                partial(self._large, hand),
                router.sweep,
                partial(hand.ack, "s.q"),
            ]
            for _ in range(TURNS):
                for step in steps:
                    if not self.attempt(step):
                        self._mend(router)
            waiting = partial(nothing_else_waits, router)
            eventually(partial(self._is_over, waiting), waiting)
            router.close()

    def _is_over(self, waiting: Callable[[], list[str]]) -> bool:
        return bool(self.wrong) or not waiting()

    def _open(self) -> anabranch.Router:
        """Whatever fails while it opens: the next time it does."""
        for last in (False, True):
            router = None
            try:
                router = opened(self.setup)
                mixed.prepare(router)
                mixed.Hand(router, self.marks, "first", random.Random(0)).end_left(Held.of(whole_lines(self.path)), 0.3)
                break
            except anabranch.AnabranchError:
                if router is not None:
                    router.close()
                if last:
                    raise
        assert router is not None
        return router

    def _large(self, hand: mixed.Hand) -> None:
        """A body that is kept apart."""
        hand.perform(mixed.sent_to("s.q", hand.new("s.q", 4), size=mixed.LARGE, named=True, priority=4))

    def _external(self, hand: mixed.Hand) -> None:
        prepared = hand.prepare()
        if prepared and hand.chance.random() < 0.7:
            hand.end(prepared, hand.chance.random() < 0.6)

    def _mend(self, router: anabranch.Router) -> None:
        """A failed store is opened again; the others have not failed (invariant 7)."""
        for store, stats in router.stats().stores.items():
            if stats.failed is not None:
                if store != "s":
                    self.wrong.append(f"store {store} has failed: {stats.failed}")
                self.attempt(partial(router.reopen, store))


def work(directory: Path, kind: str, at: int) -> list[str]:
    """The child: what is wrong while it works."""
    steps = Steps(kind, at)
    script = Script(directory, steps)
    steps.wrap_all()
    script.run()
    (directory.parent / "refused").write_text(json.dumps([script.refused, script.late]))
    (directory.parent / "steps").write_text(json.dumps(steps.log))
    return script.wrong


def look(directory: Path) -> list[str]:
    """Another one: what is wrong with what it left."""
    base = directory.parent
    held = Held.of(whole_lines(base / "marks"))
    refused, late = json.loads((base / "refused").read_text()) if (base / "refused").exists() else ([], [])
    with opened(config(directory, OPTIONS)) as router:
        found = mixed.Found.of(router)
        wrong = mixed.verify(router, *read_marks(base / "marks"), held, power=True)
    here = {(where, identity) for where, ids in found.channels.items() for identity in ids}
    gone = {pair for operation in refused for pair in sends_of(operation)}
    overtaken = {identity for operation in late if operation for _, identity in sends_of(operation)}
    wrong = [line for line in wrong if "out of order" not in line or not overtaken.intersection(line.split())]
    return wrong + [f"refused, and there: {name(pair)}" for pair in sorted(here & gone)]


def trial(base: Path, kind: str, at: int) -> tuple[list[str], int]:
    """The steps that there were, and the code of what went wrong."""
    directory = base / "data"
    for old in ("data", "marks", "refused", "steps"):
        path = base / old
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    code = reaped(forked(partial(work, directory, kind, at)), 300)
    if code not in ((-signal.SIGKILL, 0) if kind.startswith("killed") else (0,)):
        return [], code if code is not None else 99
    left = reaped(forked(partial(look, directory)), 300)
    log = json.loads((base / "steps").read_text()) if (base / "steps").exists() else []
    return log, left if left is not None else 99


def campaign(kinds: list[str], report: Callable[[str], None], share: Share, every: int, only: int) -> int:
    """How many trials went wrong."""
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    bad = trials = 0
    with tempfile.TemporaryDirectory(prefix="steps-", dir=memory) as place:
        log, code = trial(Path(place), "", 0)
        bad += code != 0
        report(f"{len(log)} steps; {'WRONG without faults' if code else 'all is well without faults'}")
        for kind in kinds:
            for at in [only] if only else share.of(range(1, len(log) + 1), every, kinds.index(kind)):
                code = trial(Path(place), kind, at)[1]
                trials += 1
                bad += code != 0
                if code:
                    report(f"{kind} at {at}, {log[at - 1]}: WRONG ({code})")
            report(f"{kind}: {trials} trials of {len(log)} steps each, {bad} wrong so far")
    return bad


def main() -> int:
    parser = argparse.ArgumentParser(description="Spoil every step of transactions over a journal and SQLite.")
    parser.add_argument("--kind", choices=KINDS, action="append")
    parser.add_argument("--only", type=int, default=0)
    add_options(parser)
    arguments = parser.parse_args()
    kinds = arguments.kind or list(KINDS)
    bad = campaign(kinds, lambda line: print(line, flush=True), *of_options(arguments), arguments.only)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
