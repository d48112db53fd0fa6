"""One owner for a directory (invariant 8): a lock file that holds the owner's pid and host, so that the next one who
comes can be told who it is.

The lock is the kernel's, on the file that was opened. If that file is deleted or replaced, the next process locks
another one, and there are two owners; so an owner looks whether the name is still that of its file: once a second for
all locks of the process together, and at `require`, which owners call before what cannot be undone.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import threading
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

from filelock import FileLock, Timeout

from ..policies.errors import StoreFailedError, StoreLockedError
from .background import shared
from .files import FILE_MODE

log = logging.getLogger(__name__)

WATCH_SECONDS: Final = 1.0
"""How often it is looked whether the locks' files are still there."""
_GONE: Final = frozenset((errno.ENOENT, errno.ENOTDIR, errno.ESTALE))
"""What the operating system says of a file that is not there; any other error says nothing about it."""

generation = 0
"""Differs in a forked child from what it was in its parent (rule D4). Read it as locking.generation."""


class _Watch:
    """Looks after all locks that this process holds. It keeps none of them alive."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # guards both; a signal handler may come back to it in the same thread
        self._held: weakref.WeakSet[DirectoryLock] = weakref.WeakSet()
        self._due = False

    def add(self, lock: DirectoryLock) -> None:
        with self._lock:
            self._held.add(lock)
            self._look_later()

    def _look_later(self) -> None:
        """With the lock held."""
        if self._held and not self._due:
            # No method of ours: the next look does not wait for one whose disk hangs.
            shared().schedule(WATCH_SECONDS, partial(_Watch._look, self))
            self._due = True  # not before: Ctrl-C between the two would leave it due for ever

    def remove(self, lock: DirectoryLock) -> None:
        with self._lock:
            self._held.discard(lock)

    def _look(self) -> None:
        with self._lock:
            self._due = False
            held = [weakref.ref(lock) for lock in self._held]  # nor while one waits for its disk
            self._look_later()
        for _, _, error in shared().for_each(held, _look_after):
            if error is not None:
                log.error("it cannot be looked whether a lock is still held", exc_info=error)


def _look_after(alive: weakref.ref[DirectoryLock]) -> None:
    lock = alive()
    if lock is not None:
        lock.look_after()


_watch = _Watch()


def _after_fork_in_child() -> None:
    global generation, _watch
    generation += 1
    _watch = _Watch()  # the child holds none of them


os.register_at_fork(after_in_child=_after_fork_in_child)


class DirectoryLock:
    """Held from `acquire` to `release`, or until nobody holds this object any more: who can write in the directory
    holds it. A forked child does not hold the lock, and never releases it (rule D4)."""

    def __init__(
        self,
        path: Path,
        what: str,
        file_mode: int = FILE_MODE,
        on_lost: Callable[[StoreFailedError], None] | None = None,
    ) -> None:
        """`what` is locked, for errors. `on_lost` is called once, by whoever notices, if the file is found deleted or
        replaced: the owner stops then."""
        self._path = path
        self._file = str(path)
        """The same: each prepare asks for it."""
        self._what = what
        self._file_mode = file_mode
        self._on_lost = on_lost
        self._lock: FileLock | None = None
        self._identity: tuple[int, int] | None = None
        self._lost: StoreFailedError | None = None
        self._looking = threading.Lock()

    def acquire(self) -> None:
        """Raises StoreLockedError at once if another holds it."""
        identity: list[tuple[int, int]] = []
        # What the lock calls must not lead back here: its finalizer brings it back to life for a moment, and with it
        # all that it leads to, which would then be open still when the lock is not held any more.
        mark = partial(_mark, self._path, identity)
        lock = FileLock(self._path, timeout=0, mode=self._file_mode, thread_local=False, on_acquired=mark)
        self._lock, self._generation = lock, generation  # first: interrupted from here on, `release` lets go of it
        try:
            lock.acquire()
        except Timeout:
            self._lock = None
            raise StoreLockedError(
                f"{self._what} in {self._path.parent} is open already, by {owner_of(self._path)}; close it there "
                "first, or use another directory"
            ) from None
        self._identity, self._lost = identity[-1], None
        _watch.add(self)

    @property
    def held(self) -> bool:
        """Whether this process holds it."""
        return self._lock is not None and self._lock.is_locked and self._generation == generation

    def lost(self) -> StoreFailedError | None:
        """Why it is held no more, if the file was deleted or replaced since `acquire`; asks the operating system, at
        the price of one stat."""
        identity = self._identity
        if self._lost is None and identity is not None and self._generation == generation:
            found = self._found(identity)
            if found is not None and self._identity is identity:  # else it was released meanwhile: the file may go
                self._lost = StoreFailedError(
                    f"the lock file {self._path} {found} while {self._what} was open, so that another process may have "
                    f"opened the same directory; nothing is written there any more. See that no other process uses it "
                    "before you open it again. A lock file that is left over does no harm: never delete one"
                )
                if self._on_lost is not None:
                    self._on_lost(self._lost)
        return self._lost

    def look_after(self) -> None:
        """As `lost`, unless another thread is at it, since the disk hangs."""
        if self._looking.acquire(blocking=False):
            try:
                self.lost()
            finally:
                self._looking.release()

    def _found(self, identity: tuple[int, int]) -> str | None:
        """What has become of the file; None if it is there, or if that cannot be said."""
        try:
            found = os.stat(self._file)  # noqa: PTH116  a path of pathlib's takes half as long again
        except OSError as error:
            return "was deleted" if error.errno in _GONE else None
        return None if (found.st_dev, found.st_ino) == identity else "was replaced by another"

    def require(self) -> None:
        """Raise StoreFailedError if it was lost; see `lost`."""
        error = self.lost()
        if error is not None:
            raise StoreFailedError(str(error)) from error

    def release(self, remove: bool = False) -> None:
        """Idempotent. With `remove` the file goes while it is locked: who has it open by then finds that it has no name
        any more, and tries again."""
        lock, identity = self._lock, self._identity
        self._identity = None  # first: what is being removed was not lost
        if lock is not None and self._generation == generation:
            _watch.remove(self)
            try:
                if remove and identity is not None and self._found(identity) is None:  # else it is another's
                    self._path.unlink(missing_ok=True)
            finally:
                lock.release()
        self._lock = None  # last: an interrupted release is done again


def _mark(path: Path, identity: list[tuple[int, int]], fd: int) -> None:
    """Say who owns the file that was locked; which one that is comes into `identity`."""
    found = os.fstat(fd)
    identity.append((found.st_dev, found.st_ino))
    try:
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()} {socket.gethostname()}\n".encode(), 0)
    except OSError as error:  # a full disk, say: the lock holds without it
        log.warning("%s does not say who its owner is: %s", path, error)


def owner_of(path: Path) -> str:
    """Who holds a lock file, or held it last, as its text says."""
    try:
        pid, host = path.read_text().split()
    except (OSError, ValueError):
        return "another process"
    if pid == str(os.getpid()):
        return f"this process on {host}, in which a queue or a message of it keeps it open"
    return f"{'the parent process' if pid == str(os.getppid()) else 'process'} {pid} on {host}"
