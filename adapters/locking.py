"""One owner for a directory (invariant 8): a lock file that holds the owner's pid and host, so that the next one who
comes can be told who it is."""

from __future__ import annotations

import logging
import os
import socket
from pathlib import Path

from filelock import FileLock, Timeout

from ..policies.errors import StoreLockedError

log = logging.getLogger(__name__)

_generation = 0


def fork_generation() -> int:
    """Differs in a forked child from what it was in its parent (rule D4)."""
    return _generation


def _after_fork_in_child() -> None:
    global _generation
    _generation += 1


os.register_at_fork(after_in_child=_after_fork_in_child)


class DirectoryLock:
    """Held from `acquire` to `release`. A forked child does not hold it, and never releases it (rule D4)."""

    def __init__(self, path: Path, what: str) -> None:
        self._path = path
        self._what = what
        self._lock: FileLock | None = None

    def acquire(self) -> None:
        """Raises StoreLockedError at once if another holds it."""
        lock = FileLock(self._path, timeout=0, thread_local=False)
        try:
            lock.acquire()
        except Timeout:
            raise StoreLockedError(
                f"{self._what} in {self._path.parent} is open already, by {self._owner()}; close it there first, "
                "or use another directory"
            ) from None
        self._lock, self._generation = lock, fork_generation()
        try:
            self._path.write_text(f"{os.getpid()} {socket.gethostname()}\n")
        except OSError as error:  # a full disk, say: the lock holds without it
            log.warning("%s does not say who its owner is: %s", self._path, error)

    def _owner(self) -> str:
        try:
            pid, host = self._path.read_text().split()
        except (OSError, ValueError):
            return "another process"
        known = {str(os.getpid()): "this process", str(os.getppid()): f"the parent process {pid}"}
        return f"{known.get(pid, f'process {pid}')} on {host}"

    @property
    def held(self) -> bool:
        """Whether this process holds it."""
        return self._lock is not None and self._lock.is_locked and self._generation == fork_generation()

    def release(self) -> None:
        """Idempotent."""
        if self._lock is not None and self._generation == fork_generation():
            self._lock.release()
        self._lock = None
