"""A campaign: every call that a workload makes is spoiled, one after the other (calls.py), in each of some ways.

What faults.py, large.py, moving.py, moving_live.py and transactions.py do to workloads of their own.
"""

from __future__ import annotations

import argparse
import gc
import math
import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ..shares import Share, add_options, of_options
from .calls import KINDS, READS, Jobs, simulated
from .disk import Recorder, State, build, differences

POWER: Final = "power"
"""A kind that is no call: lose_power."""
Trial = Callable[[str, int], list[str]]
"""Runs the workload with call number `at` spoiled in this way; what is wrong."""
Report = Callable[[str], None]


def places(calls: Sequence[str], kind: str) -> list[int]:
    """The numbers of those calls which can be spoiled in this way, with other consequences than the next one."""
    names = [call.split()[0] for call in calls]
    return [
        at
        for at, name in enumerate(names, 1)
        if (kind != "short" or name == "pwrite") and (kind != "crash" or name not in READS)
    ]


@dataclass
class Campaign:
    """How much of it is done, and who is told."""

    kinds: Sequence[str]
    report: Report
    share: Share
    every: int = 1
    only: int = 0
    enough: float = math.inf
    """It ends once so many trials went wrong."""
    name: str = ""
    bad: int = 0
    """Trials that went wrong."""

    def begin(self, calls: Sequence[str], wrong: Sequence[str]) -> None:
        """Tell of the run in which nothing was spoiled."""
        self.bad += bool(wrong)
        self.report(f"{self.name}{len(calls)} calls; {list(wrong[:3]) or 'all is well without faults'}")

    def spoil(self, calls: Sequence[str], trial: Trial, base: Path) -> int:
        """Each of the calls of the run without faults, which made its directories in `base`; how many went wrong."""
        for kind in self.kinds:
            if kind == POWER:
                continue
            found, trials = places(calls, kind), 0
            for at in [self.only] if self.only else self.share.of(found, self.every, self.kinds.index(kind)):
                trials += 1
                try:
                    wrong = trial(kind, at)
                except Exception as error:
                    wrong = [f"{kind} at {at}, {calls[at - 1]}: {type(error).__name__}: {error}"]
                    for left in ("data", "killed"):
                        shutil.rmtree(base / left, ignore_errors=True)
                if self.note(wrong):
                    return self.bad
            self.report(f"{self.name}{kind}: {trials} of {len(found)} calls, {self.bad} wrong so far")
        return self.bad

    def lose_power(self, states: Sequence[State], look: Callable[[State], list[str]]) -> int:
        """Look at what a disk may hold; how many states were looked at."""
        checked = 0
        for state in self.share.of([one for one in states if self.only in (0, one.point)], self.every):
            checked += 1
            if self.note(look(state)):
                break
        return checked

    def note(self, wrong: Sequence[str]) -> bool:
        """Of one trial. Returns whether that is enough."""
        self.bad += bool(wrong)
        for line in wrong[:3]:
            self.report(line)
        return self.bad >= self.enough


def require_recorded(base: Path, recorder: Recorder) -> None:
    """Check that the calls make the directory that is there, which is removed."""
    whole = State((1 << recorder.now()) - 1, None, recorder.now(), "whole")
    build(recorder.calls, whole, base / "replayed")
    for aside in (base / "replayed").rglob(".*.tmp"):
        shutil.rmtree(aside)  # that a store's files go is not recorded: each may be there still
    wrong = differences(base / "data", base / "replayed" / "data")
    shutil.rmtree(base / "replayed")
    gc.collect()
    shutil.rmtree(base / "data")
    if wrong:
        raise AssertionError(f"what was recorded is not what is there: {wrong}")


def without_power(
    base: Path, recorder: Recorder, state: State, within: Callable[[], AbstractContextManager[None]],
    look: Callable[[Path, Jobs], list[str]],
) -> list[str]:  # fmt: skip
    """What is wrong in the directory of one state."""
    place, jobs = base / "state", Jobs()
    try:
        build(recorder.calls, state, place)
        with simulated(jobs, f"{state.point} {state.what}"), within():
            wrong = look(place / "data", jobs)
    except Exception as error:
        wrong = [f"{type(error).__name__}: {error}"]
    finally:
        shutil.rmtree(place, ignore_errors=True)
    call = recorder.calls[state.point - 1] if state.point else None
    where = f"{call.kind} {call.path}" if call else "nothing"
    return [f"power after {state.point}, {where}, {state.what}: {line}" for line in wrong]


def parser(description: str, *more_kinds: str) -> argparse.ArgumentParser:
    """The options that all such programs have."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--kind", choices=(*KINDS, *more_kinds), action="append")
    made.add_argument("--only", type=int, default=0, help="this call alone (power: states at this point)")
    add_options(made)
    return made


def of_arguments(given: argparse.Namespace, *more_kinds: str, name: str = "") -> Campaign:
    share, every = of_options(given)
    kinds = given.kind or (*KINDS, *more_kinds)
    return Campaign(kinds, lambda line: print(line, flush=True), share, every, given.only, name=name)
