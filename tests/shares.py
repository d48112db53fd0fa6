"""How much of a long enumeration is done: every system call, every power failure, every place for Ctrl-C.

`make test` does a representative share of each, the same every time. `make test-all` does all of it, in tests that bear
the mark `campaign`, or as much as its MINUTES allow: then in an order that is spread over the whole of it, so that what
is left out lies between what was done.

    def test_it(share): ...              the fixture of conftest.py: once as a share, once, as a campaign, in full
    @pytest.mark.weight(3)               what the campaign gets of the minutes, beside the others; else 1
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

from .children import run_module

PATIENCE: Final = 1200.0
"""Seconds after which a share hangs, or a campaign whose time is over."""
T = TypeVar("T")


@dataclass
class Share:
    """One of every so many, or all; for so many seconds at most."""

    whole: bool = False
    seconds: float = math.inf
    counts: list[str] = field(default_factory=list)
    """What is told of it at the end of the run."""

    def count(self, few: int, many: int) -> int:
        """How many, of what has no end."""
        return many if self.whole else few

    def every(self, number: int) -> int:
        """One of every `number`, or each one."""
        return 1 if self.whole else number

    def of(self, items: Sequence[T], every: int = 1, first: int = 0) -> Iterator[T]:
        """These items, of which at least one is given out: every so many-th from `first` on, or in full."""
        every = self.every(every)
        if self.seconds == math.inf:
            yield from items[first % every :: every]
            return
        deadline = time.monotonic() + self.seconds
        for item in spread(items):
            yield item
            if time.monotonic() > deadline:
                return

    def run(self, module: str, *arguments: str, every: int = 1) -> None:
        """The campaign `python -m module`, in a process of its own; its last line is told at the end."""
        endless = self.whole and self.seconds == math.inf
        patience = None if endless else PATIENCE + (self.seconds if self.whole else 0)
        code, told = run_module(module, *arguments, *self.options(every), seconds=patience)
        assert code == 0, told
        self.counts.append(told.strip().splitlines()[-1])

    def options(self, every: int = 1) -> list[str]:
        """The same on a command line."""
        every = self.every(every)
        share = [] if every == 1 else ["--share", f"1/{every}"]
        return share if self.seconds == math.inf else [*share, "--seconds", f"{self.seconds:.0f}"]


def spread(items: Sequence[T]) -> Iterator[T]:
    """All of them, each far from those before it."""
    size = len(items)
    stride = max(1, round(size * (math.sqrt(5) - 1) / 2))
    while math.gcd(stride, size) > 1:
        stride += 1
    return (items[number * stride % size] for number in range(size))


def add_options(parser: argparse.ArgumentParser) -> None:
    """--share and --seconds, for `of_options`."""
    parser.add_argument("--share", default="1/1", help="1/10: every tenth")
    parser.add_argument("--seconds", type=float, default=math.inf, help="after so many, each enumeration ends")


def of_options(given: argparse.Namespace) -> tuple[Share, int]:
    """The share, and one of every how many."""
    every = int(given.share.partition("/")[2])
    return Share(every == 1, given.seconds), every
