"""Where the messages of a queue begin, about.

Rows that were removed lie before the first one, and as long as some transaction in the database is open each look from
the start passes through all of them: millions after an hour. So a router begins where it has found the first one last
time. It looks from the start now and then, since what came back, or was committed late, may lie before; the longer that
takes the more seldom, so that it never comes to more than a part of all.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Final

SHARE: Final = 20
"""A look from the start is followed by so many times its time without another."""
QUICK: Final = 0.002
"""Seconds of a look from the start that is done whenever the other finds nothing."""

LATE: Final = 250
"""It begins so many ids before the first one that it has found: whose commit was late is still the first."""


class _Head:
    __slots__ = ("costs", "due", "first")

    def __init__(self) -> None:
        self.first, self.due = 0, 0.0
        self.costs = deque([0.0, 0.0, 0.0], maxlen=3)
        """Seconds that the last looks from the start took. One alone may have been slow for other reasons."""

    @property
    def cost(self) -> float:
        return min(self.costs)


class Heads:
    """The heads of the queues of one store, by number. Threads: all."""

    def __init__(self) -> None:
        self._heads: dict[int, _Head] = {}

    def first(self, queue: int) -> int:
        """Return the id to begin with."""
        head = self._heads.get(queue)
        return head.first if head is not None and time.monotonic() < head.due else 0

    def looks(self, queue: int) -> Iterator[int]:
        """Yield the ids to begin with, one after the other, until something is found."""
        first = self.first(queue)
        yield first
        head = self._heads.get(queue)
        if first and (head is None or head.cost < QUICK):
            yield 0

    def note(self, queue: int, first: int, seconds: float, found: Iterable[int] = ()) -> None:
        """Note that a look which began there took so long, and the ids that it has found."""
        if not first:
            head = self._heads.setdefault(queue, _Head())
            head.costs.append(seconds)
            head.due = time.monotonic() + SHARE * head.cost
        known = self._heads.get(queue)
        if known is not None and (lowest := min(found, default=0)):
            known.first = max(0, lowest - LATE)

    def forget(self, queue: int) -> None:
        """Look from the start: something came back."""
        self._heads.pop(queue, None)
