"""A workload that goes on whatever fails, and the trial in which one of its calls does (faults.py, large.py)."""

from __future__ import annotations

import contextlib
import gc
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import anabranch

from ..garbage import set_aside
from ..places import in_memory
from .calls import Crash, Faults, Jobs, simulated
from .ledger import Operation
from .power.waiting import Clock
from .spoiling import of_arguments, parser

LIVES: Final = 2
"""A life is open, work, close."""


class Scripted(ABC):
    """What was tried, what was promised, what was refused, and every error of a wrong type."""

    def __init__(self, config: anabranch.Config, jobs: Jobs, full: bool) -> None:
        self.config = config
        self.jobs = jobs
        self.full = full
        """The disk may be full: what is given back then is free at once, and not counted."""
        self.promised: list[Operation] = []
        self.maybe: list[Operation] = []
        self.refused: list[Operation] = []
        """Those that are said to have had no effect."""
        self.errors: list[str] = []
        self.wrong: list[str] = []
        self.router: anabranch.Router | None = None
        self.sent = 0
        self.clock = Clock()
        self.watch: Callable[[str, str, tuple[Any, ...], Any], None] = lambda *_: None
        """Told of each call (Faults.watch)."""

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

    def run(self) -> None:
        """All its lives. What was closed without an error is opened again."""
        for life in range(LIVES):
            if self.router is None:
                self.attempt("open", self.open)
            if self.router is not None:
                self.live(life, self.router)

    def open(self) -> None:
        self.router = None
        self.router = anabranch.open(self.config)

    def close(self) -> None:
        """Unless there was an error."""
        if self.router is not None and not self.errors:
            self.attempt("close", self.router.close)
            self.router = None

    def new(self, count: int = 1) -> list[str]:
        """Identities."""
        self.sent += count
        return [f"s.{number}" for number in range(self.sent - count, self.sent)]

    def reopen(self, store: str) -> None:
        assert self.router is not None
        self.attempt("reopen", partial(self.router.reopen, store))

    @abstractmethod
    def live(self, life: int, router: anabranch.Router) -> None:
        """One life."""

    @abstractmethod
    def behaviour(self, router: anabranch.Router, faults: Faults) -> list[str]:
        """The fault is over: what is wrong with what it does then."""

    @abstractmethod
    def left(self, directory: Path) -> list[str]:
        """What is wrong with what a new process finds."""


def trial(base: Path, make: Callable[[Path, Jobs, bool], Scripted], kind: str, at: int) -> tuple[Faults, list[str]]:
    """Run the script with call number `at` spoilt; what is wrong, in the store's behaviour and in what it leaves."""
    directory, killed = base / "data", base / "killed" / "data"
    faults, jobs = Faults(base, kind, at), Jobs()
    script = make(directory, jobs, kind in ("enospc", "short"))
    faults.watch = script.watch
    with simulated(jobs, f"{kind} {at}"), script.clock.stopped():
        with faults.patched():
            with contextlib.suppress(Crash):
                script.run()
            wrong = script.wrong + jobs.raised
            if not faults.dead:
                faults.on = False
                wrong += script.behaviour(script.router, faults) if script.router is not None else []
            faults.dead = True  # what the abandoned objects still try to do does not reach the disk
        if directory.exists():
            shutil.copytree(directory, killed)
        wrong += script.left(killed)
        script.router = None
        gc.collect()
    shutil.rmtree(directory, ignore_errors=True)
    shutil.rmtree(killed.parent, ignore_errors=True)
    return faults, [f"{kind} at {at}, {faults.hit}: {line}" for line in wrong]


def campaign(make: Callable[[Path, Jobs, bool], Scripted], name: str) -> int:
    """The program: every call, every kind, or a share of them. Its exit code."""
    begun = of_arguments(parser("Spoil every system call of a workload, one after the other.").parse_args())
    begun.name = f"{name}, "
    with tempfile.TemporaryDirectory(prefix=f"{name}-", dir=in_memory()) as place:
        base = Path(place)
        faults, wrong = trial(base, make, "", 0)
        calls = faults.log[: faults.count]
        begun.begin(calls, wrong)
        set_aside()  # each trial collects what it made, and nothing else
        return 1 if begun.spoil(calls, lambda kind, at: trial(base, make, kind, at)[1], base) else 0
