"""Free space of disks: one count for each disk in the process, so that no two stores on one take the same for theirs.

The file system is asked rarely: once a second, or for each MiB, while there is enough, and where there may not be. Room
that was reserved since it was asked counts as used, also after it is written; what indexes and preallocated files take
beside that shows when it is asked next.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from pathlib import Path
from typing import Final

from .reservation import Reservation

KNOWN_SECONDS: Final = 1.0
"""Seconds for which what the file system has said holds, less what was reserved since."""
KNOWN_BYTES: Final = 1 << 20
"""Bytes reserved since beyond which it does not hold: what is written takes more space than it counts for."""
ASKED_SECONDS: Final = 0.01
"""Seconds after which the file system is asked again where that is too little."""


class Volume:
    """One disk. Threads: all."""

    def __init__(self, path: Path) -> None:
        self.path = path
        """The path where the disk is mounted."""
        self._lock = threading.RLock()  # a signal handler may come back to it in the same thread
        self._reserved: deque[int] = deque()
        self._given_back: deque[int] = deque()
        self._in_flight = 0
        """Bytes that are reserved, as far as they are counted."""
        self._free = self._since = 0
        """Free bytes as the file system has said, less what was reserved since then; how much that is."""
        self._asked_at = -KNOWN_SECONDS

    def reserve(self, size: int) -> Reservation[int]:
        """Reserve so many bytes that are about to be written, until the reservation is released."""
        with self._lock:
            self._free -= size
            self._since += size
            return Reservation(size, self._given_back, self._reserved)

    def free(self, wanted: int) -> int:
        """Return how many bytes are free for who has no special rights, less what is reserved. As it was lately, if
        that is at least `wanted`."""
        with self._lock:
            age = time.monotonic() - self._asked_at
            old = age >= KNOWN_SECONDS or self._since >= KNOWN_BYTES
            if old or (self._free < wanted and age >= ASKED_SECONDS):
                self._ask()
            return self._free

    def _ask(self) -> None:
        for changes, sign in (self._reserved, 1), (self._given_back, -1):
            while changes:
                self._in_flight += sign * changes[0]
                changes.popleft()
        try:
            found = os.statvfs(self.path)
        except OSError:  # whoever writes there next is told what is wrong with it
            self._asked_at = time.monotonic()
            return
        self._free, self._since = found.f_bavail * found.f_frsize - self._in_flight, 0
        self._asked_at = time.monotonic()


_volumes: dict[int, Volume] = {}
"""By the device's number."""
_lock = threading.Lock()


def volume_of(path: Path) -> Volume:
    """Return the disk that a directory is on. Raises OSError if that is not there."""
    device, top = path.stat().st_dev, path.absolute()
    while top != top.parent and top.parent.stat().st_dev == device:
        top = top.parent  # a store's directory may be removed while others are on the same disk
    with _lock:
        return _volumes.setdefault(device, Volume(top))


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.Lock()
    _volumes.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
