"""File descriptors: what the stores of this process may have open, of the number that `ulimit -n` allows it (rule D5).

The limit is shared out anew each time somebody asks, so that an application which changes it need not say so:

    a quarter            left for the application: its sockets, its files, its other libraries
    of the rest  11/16   stores that are open: each says in `descriptors` how many it keeps
                  2/16   sealed segments that are kept open for reading, of all stores together
                  2/16   sealed segments that are written and not synced yet, of all stores together
                  1/16   what a call has open until it returns

Nobody counts what the application has open. Where it takes more than its share the operating system refuses (EMFILE),
which is then treated as a full disk is: adapters/system/files.py.
"""

from __future__ import annotations

import os
import resource
import threading
from collections import OrderedDict
from typing import Any, Final, NamedTuple, Protocol
from weakref import ReferenceType, WeakSet, ref

LIMIT_MAX: Final = 1 << 16
"""Descriptors that are shared out of a higher limit, or of none."""
READING_MAX: Final = 256
"""Segments that are kept open for reading, however many files the process may have open."""
STORE: Final = 5
"""Descriptors of a store that does not say how many it keeps open: as many as a journal store has."""


class Shares(NamedTuple):
    """The numbers of descriptors, by what they are for."""

    application: int
    stores: int
    reading: int
    unsynced: int


def limit() -> int:
    """Return how many files this process may have open: `ulimit -n`, the soft limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return LIMIT_MAX if soft == resource.RLIM_INFINITY else min(soft, LIMIT_MAX)


def shares() -> Shares:
    """Return how the limit of now is shared out."""
    allowed = limit()
    application = allowed // 4
    part = (allowed - application) / 16
    return Shares(application, max(STORE, int(11 * part)), min(max(1, int(2 * part)), READING_MAX), int(2 * part))


class Readable(Protocol):
    """An object that keeps a file open for reading. Whoever reads holds the file itself, which closes when nobody
    does."""

    file: Any


class ReadFiles:
    """The files of all stores of this process that are kept open for reading: the least recently used one is let go
    of when there is one too many. It is closed when its last reader is done.

    Threads: all. Forks: a child begins with what its parent had open. Re-entrant, for signal handlers.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # guards _recent, and taking a file from a Readable
        self._recent: OrderedDict[ReferenceType[Readable], None] = OrderedDict()
        """The least recently used first. Weak: a store that nobody knows any more keeps no file open."""
        self._latest: ReferenceType[Readable] | None = None

    def __len__(self) -> int:
        return len(self._recent)

    def used(self, readable: Readable) -> None:
        """Note that a file was opened, or is used once more."""
        key = ref(readable)
        if key is self._latest:
            return
        closed: list[Any] = []
        with self._lock:
            if key not in self._recent:
                self._make_room(shares().reading, closed)
            self._recent[key] = None
            self._recent.move_to_end(key)
            self._latest = key
        del closed  # not before: nobody waits while a file of another store closes, whose disk may hang

    def _make_room(self, most: int, closed: list[Any]) -> None:
        """Make room for one more file. The files that are let go of come into `closed`."""
        while len(self._recent) >= most:
            key = next(iter(self._recent))
            oldest = key()
            if oldest is not None:
                closed.append(oldest.file)
                oldest.file = None
            self._recent.pop(key, None)

    def forget(self, readable: Readable) -> None:
        """Let go of its file, if it is open. Idempotent."""
        key = ref(readable)
        with self._lock:
            if key is self._latest:
                self._latest = None
            file, readable.file = readable.file, None
            self._recent.pop(key, None)
        del file  # as above

    def let_go(self) -> bool:
        """Close all files that nobody reads just now; returns whether any was kept open."""
        closed: list[Any] = []
        with self._lock:
            any_open = bool(self._recent)
            self._latest = None
            self._make_room(1, closed)
        del closed
        return any_open

    def after_fork(self) -> None:
        """Start anew in a child: another thread of the parent may have held the lock."""
        self._lock = threading.RLock()


read_files: Final = ReadFiles()
unsynced_files: Final[WeakSet[object]] = WeakSet()
"""Open files of sealed segments that wait for their sync, of all stores of this process."""

os.register_at_fork(after_in_child=read_files.after_fork)
