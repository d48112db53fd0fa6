"""Where the messages of a queue begin, about, and whether some have groups.

Rows that were removed lie before the first one, and as long as some transaction in the database is open each look from
the start passes through all of them: millions after an hour. So a router whose look was slow begins the next ones at
the first row that is there, whoever holds it. It looks from the start now and then, since what was committed very late
may lie before; the longer that takes the more seldom, so that it never comes to more than a part of all.

A queue is looked at for messages of groups before its first look, and after each one that was slow (rule Q19).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from ....policies.errors import AnabranchError

SHARE: Final = 20
"""A look from the start, with the search after it, is followed by so many times its time without another, and so is a
search for the first row: a machine that is busy makes every look slow."""
SLOW: Final = 0.002
"""Seconds of a look that is slow: of the server's, until it has found all that was asked for."""
LOOKS: Final = 8
"""After so many looks the first row is searched for again, if a look was slow: as many rows may have been removed."""
LATE: Final = 50
"""It begins so many ids before the first row: whose commit was late is still the first."""


class _Head:
    __slots__ = ("due", "first", "looks", "search_at")

    def __init__(self) -> None:
        self.first, self.due, self.search_at, self.looks = 0, 0.0, 0.0, 0


class Heads:
    """The heads of the queues of one store, by number. Threads: all."""

    def __init__(self) -> None:
        self._heads: dict[int, _Head] = {}
        self._grouped: dict[int, bool] = {}

    def begin(self, queue: int, ask: Callable[[int], bool]) -> tuple[int, bool]:
        """Return the id to begin with, and whether a queue had messages of groups when it was looked for, which is
        asked of `ask`."""
        head, is_grouped = self._heads.get(queue), self._grouped.get(queue)
        if is_grouped is None:
            is_grouped = self._grouped[queue] = ask(queue)
        return 0 if head is None else self._due(head), is_grouped

    def first(self, queue: int) -> int:
        """Return the id to begin with."""
        head = self._heads.get(queue)
        return 0 if head is None else self._due(head)

    @staticmethod
    def _due(head: _Head) -> int:
        return head.first if time.monotonic() < head.due else 0

    def known(self, queue: int) -> int:
        """Return the id that a look began with which was not from the start."""
        head = self._heads.get(queue)
        return 0 if head is None else head.first

    def note(self, queue: int, first: int, seconds: float, live: Callable[[int, int], int]) -> None:
        """Note that a look which began there took so long. `live` returns the first row of the queue from an id on."""
        head = self._heads.get(queue)
        if seconds < SLOW:
            if head is None:
                return
            if not first:  # nothing lies before it any more
                self._heads.pop(queue, None)
                return
            head.looks += 1
            if head.looks < LOOKS:
                return
        if head is None:
            head = self._heads.setdefault(queue, _Head())
        with suppress(AnabranchError):  # what was taken is not lost for it
            self._search(queue, head, first, seconds, live)

    def _search(self, queue: int, head: _Head, first: int, seconds: float, live: Callable[[int, int], int]) -> None:
        began = time.monotonic()
        if began >= head.search_at:
            if seconds >= SLOW:
                self._grouped.pop(queue, None)
            # After a look from the start it is searched from there: what was committed late may be the first row.
            head.looks, head.first = 0, max(0, live(queue, max(first, head.first) if first else 0) - LATE)
            head.search_at = began + (SHARE * (time.monotonic() - began) if first else 0)
        if not first:
            head.due = time.monotonic() + SHARE * (time.monotonic() - began + seconds)

    def forget(self, queue: int) -> None:
        """Look from the start."""
        self._heads.pop(queue, None)
        self._grouped.pop(queue, None)
