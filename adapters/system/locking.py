"""One owner for a directory (invariant 8): a lock file that holds the owner's pid, its host and where it opened the
directory, so that the next one who comes can be told who it is.

The lock is the kernel's (flock), on the file that was opened. If that file is deleted or replaced, the next process
locks another one, and there are two owners; so an owner looks whether the name is still that of its file: once a second
for all locks of the process together, and at `require`, which owners call before what cannot be undone.

Why flock: it belongs to the open file. fcntl's record locks belong to the process, and closing any descriptor of the
file drops them. Locks of open file descriptions (F_OFD_SETLK) are like flock's, and only Linux has them.

No signal leaves anything locked that nobody can unlock (rule G6). The table of this process (`_Watch`) knows each lock
file from before it is opened until it is closed, and closes those whose DirectoryLock is gone.
"""

from __future__ import annotations

import errno
import fcntl
import gc
import logging
import os
import socket
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Final

from ...policies.errors import StoreFailedError, StoreLockedError
from .background import shared
from .conditions import unless_busy
from .files import FILE_MODE, open_file

log: logging.Logger = logging.getLogger(__name__)

WATCH_SECONDS: Final = 1.0
"""How often it is looked whether the locks' files are still there."""
_GONE: Final = frozenset((errno.ENOENT, errno.ENOTDIR, errno.ESTALE))
"""Errors by which the operating system says that a file is not there; any other error says nothing about it."""
_FLAGS: Final = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
_ROOT: Final = __name__.partition(".")[0]
_COMMANDS: Final = f"{_ROOT}.router.cli."
_OWNER: Final = f"{_ROOT}.router.sharing.owner.process"
_SERVES: Final = f"`{_ROOT} serve`"
_FOR_CLIENTS: Final = "for its clients, which opened it with shared=True"
"""What opens a directory for clients: the command, or the owner that one of them has started."""

generation: int = 0
"""Differs in a forked child from what it was in its parent (rule D4). Read it as locking.generation."""


class _LockFile:
    """A lock file that is open in this process for a DirectoryLock, or about to be."""

    __slots__ = ("_closing", "_descriptors", "_table", "identity", "lock", "opened_at")

    def __init__(self, lock: DirectoryLock, opened_at: str, table: dict[_LockFile, None]) -> None:
        self.opened_at = opened_at
        """The place where the directory was opened, as `_caller` says."""
        self.identity: tuple[int, int] | None = None
        """Inode and device of the file that was opened."""
        self._descriptors: list[int] = []
        """The one that the lock is on, from when it is opened until it is closed."""
        self._closing = threading.RLock()  # one closes it at a time; a signal handler may come back to it
        self._table = table
        self.lock = weakref.ref(lock, self._left)

    def take(self, path: str, file_mode: int) -> bool:
        """Open the file and lock it. False if its name is another's by then: try again. Raises BlockingIOError if it is
        locked, and OSError; `close` it then."""
        # One step, as in `close`: Ctrl-C comes before or after it, and the number is never lost or noted wrongly.
        self._descriptors += map(open_file, (Path(path),), (_FLAGS,), (file_mode,))
        fd = self._descriptors[-1]
        self.identity = _identity(os.fstat(fd))
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError as error:
            raise OSError(error.errno, f"its file system gives no locks: {error.strerror}", path) from error
        if _found(path, self.identity) is None:
            return True
        self.close()
        return False

    def say(self, path: str) -> None:
        """Write into the file who its owner is."""
        fd = self._descriptors[-1]
        try:
            os.ftruncate(fd, 0)
            os.pwrite(fd, os.fsencode(f"{os.getpid()} {socket.gethostname()} {self.opened_at}".rstrip() + "\n"), 0)
        except OSError as error:  # a full disk, say: the lock holds without it
            log.warning("%s does not say who its owner is: %s", path, error)

    def close(self) -> None:
        """Unlock and close it. Idempotent."""
        with self._closing:
            try:
                # Not by closing alone: a child that is on its way to another program has the descriptor too.
                fcntl.flock(self._descriptors[-1], fcntl.LOCK_UN)
            except IndexError:
                pass  # it is closed
            except OSError as error:
                log.debug("a lock file is closed, which could not be unlocked: %s", error)
            self._let_go()
        self._table.pop(self, None)

    def leave(self) -> None:
        """Close the file in a forked child, so that the lock ends with the parent. That unlocks nothing."""
        with suppress(OSError, IndexError):  # a thread of the parent was just opening or closing it
            if _identity(os.fstat(self._descriptors[-1])) == self.identity:
                self._let_go()

    def _let_go(self) -> None:
        try:
            deque(map(os.close, map(self._descriptors.pop, (-1,))), 0)
        except (IndexError, OSError):
            pass  # it was closed before; or is now, whatever the operating system says

    def _left(self, _: object) -> None:
        """Close the file: nobody holds the DirectoryLock any more."""
        self.close()


class _Watch:
    """Looks after all locks that this process holds. It keeps none of them alive."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # guards `_due`; a signal handler may come back to it in the same thread
        self._held: dict[_LockFile, None] = {}
        """Each change is one step."""
        self._due = False

    def open(self, lock: DirectoryLock, opened_at: str) -> _LockFile:
        """Return a file that will be locked for a DirectoryLock."""
        file = _LockFile(lock, opened_at, self._held)
        self._held[file] = None
        with self._lock:
            self._look_later()
        return file

    def of(self, identity: tuple[int, int] | None) -> list[DirectoryLock]:
        """Return the locks that hold the file of that device and inode."""
        locks = [file.lock() for file in list(self._held) if file.identity == identity]
        return [lock for lock in locks if lock is not None and lock.held]

    def knows(self, identity: tuple[int, int] | None) -> bool:
        """Return whether a file of this process is that one."""
        return any(file.identity == identity for file in list(self._held))

    def close_left(self) -> None:
        """Close those whose DirectoryLock is gone. Whoever had to was interrupted."""
        for file in list(self._held):
            if file.lock() is None:
                file.close()

    def _look_later(self) -> None:
        """Schedule the next look, unless it is due already. With the lock held."""
        if self._held and not self._due:
            # No method of ours: the next look does not wait for one whose disk hangs.
            shared().schedule(WATCH_SECONDS, partial(_Watch._look, self))
            self._due = True  # not before: Ctrl-C between the two would leave it due for ever

    def _look(self) -> None:
        with self._lock:
            self._due = False
            self._look_later()
        self.close_left()
        held = [file.lock for file in list(self._held)]
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
    inherited, _watch = _watch, _Watch()  # the child holds none of them
    for file in list(inherited._held):
        file.leave()


os.register_at_fork(after_in_child=_after_fork_in_child)


class DirectoryLock:
    """A lock that is held from `acquire` to `release`, or until nobody holds this object any more: who can write in the
    directory holds it. A forked child does not hold the lock, and never releases it (rule D4)."""

    def __init__(
        self,
        path: Path,
        what: str,
        file_mode: int = FILE_MODE,
        on_lost: Callable[[StoreFailedError], None] | None = None,
        describe: Callable[[], str] | None = None,
        step: str = "",
    ) -> None:
        """Say in errors that `what` is locked, and by `step` what else may be done about it. `on_lost` is called once,
        by whoever notices, if the file is found deleted or replaced: the owner stops then. `describe` says who the
        owner is, to others in this process."""
        self._path = path
        self._file = str(path)
        """The path as text: each prepare asks for it."""
        self._what = what
        self._file_mode = file_mode
        self._on_lost = on_lost
        self._describe = describe
        self._step = f"{step}, " if step else ""
        self._open: _LockFile | None = None
        self._identity: tuple[int, int] | None = None
        self._generation = generation
        self._lost: StoreFailedError | None = None
        self._looking = threading.Lock()

    def acquire(self) -> None:
        """Acquire the lock. Raises StoreLockedError at once if it is held, and OSError where the file cannot be opened
        or locked."""
        if self.held:
            raise self._refusal()
        try:
            self._acquire(_caller())
        except BaseException:
            self.release()
            raise

    def _acquire(self, opened_at: str) -> None:
        self._generation = generation
        collected = False
        while True:
            file = self._open = _watch.open(self, opened_at)  # first: interrupted from here on, `release` closes it
            try:
                if file.take(self._file, self._file_mode):
                    break
            except BlockingIOError:
                file.close()
                if collected or not _watch.knows(file.identity):
                    raise self._refusal() from None
                collected = True
                gc.collect()  # a router that Ctrl-C struck as it was opened is in a circle, and nobody's
                _watch.close_left()
        file.say(self._file)
        self._lost, self._identity = None, file.identity

    def _refusal(self) -> StoreLockedError:
        owner = owner_of(self._path)
        steps = f"close it there first, {self._step}"
        if self._step and owner.endswith((f"by {_SERVES}", _FOR_CLIENTS)):  # nobody is there to close it
            steps = f"{self._step}end that process, "
        error = StoreLockedError(
            f"{self._what} in {self._path.parent} is open already, by {owner}; {steps}or use another directory"
        )
        error.path = self._file
        return error

    @property
    def held(self) -> bool:
        """Return whether this process holds the lock."""
        return self._identity is not None and self._generation == generation

    def described(self) -> str:
        """Return who holds the lock, in words for others in this process."""
        owner = f": {self._describe()}" if self._describe is not None else ""
        opened_at = self._open.opened_at if self._open is not None else ""
        return f"this process{owner}{_opened(opened_at)}"

    def lost(self) -> StoreFailedError | None:
        """Return why the lock is held no more, if the file was deleted or replaced since `acquire`; asks the operating
        system, at the price of one stat."""
        identity, file = self._identity, self._open
        if self._lost is None and identity is not None and file is not None and self._generation == generation:
            found = _found(self._file, identity) if file._descriptors else "was unlocked by the garbage collector"
            if found is not None and self._identity is identity:  # else it was released meanwhile: the file may go
                self._lost = StoreFailedError(
                    gone_directory(self._file, self._what)
                    or f"the lock file {self._path} {found} while {self._what} was open, so that another process may "
                    "have opened the same directory; nothing is written there any more. See that no other process uses "
                    "it before you open it again. A lock file that is left over does no harm: never delete one"
                )
                if self._on_lost is not None:
                    self._on_lost(self._lost)
        return self._lost

    def look_after(self) -> None:
        """Look for a loss as `lost`, unless another thread is at it, since the disk hangs."""
        unless_busy(self._looking, self.lost)

    def require(self) -> None:
        """Raise StoreFailedError if it was lost; see `lost`."""
        file = self._open
        try:  # each prepare and each decision comes here: without another call
            if file and file._descriptors and not self._lost and os.stat(self._file)[1:3] == self._identity:  # noqa: PTH116
                return
        except OSError:
            pass
        error = self.lost()  # which looks closely
        if error is not None:
            raise StoreFailedError(str(error)) from error

    def release(self, remove: bool = False) -> None:
        """Release the lock. Idempotent. With `remove` the file goes while it is locked: who has it open by then finds
        that it has no name any more, and tries again."""
        file, identity = self._open, self._identity
        self._identity = None  # first: what is being removed was not lost
        if file is not None and self._generation == generation:
            try:
                if remove and identity is not None and _found(self._file, identity) is None:  # else it is another's
                    self._path.unlink(missing_ok=True)
            finally:
                file.close()
        self._open = None  # last: an interrupted release is done again


def _found(path: str, identity: tuple[int, int]) -> str | None:
    """Return what has become of the file that was opened; None if it is there, or if that cannot be said."""
    try:
        found = _identity(os.stat(path))  # noqa: PTH116  a path of pathlib's takes half as long again
    except OSError as error:
        return "was deleted" if error.errno in _GONE else None
    return None if found == identity else "was replaced by another"


def _identity(found: os.stat_result) -> tuple[int, int]:
    """Return the inode and the device of a file, which are the second and third that `stat` tells."""
    return found.st_ino, found.st_dev


def gone_directory(path: str | Path, what: str) -> str:
    """Return the text that a directory above this path was lost while `what` was open; empty where all are there."""
    gone = [directory for directory in Path(path).parents if not directory.exists()]
    if not gone:
        return ""
    return (
        f"the directory {gone[-1]} was deleted or renamed, or its disk went away, while {what} was open; nothing is "
        "written there any more. Put it back, and see that no other process uses it, before you open it again"
    )


def _caller() -> str:
    """Return where code has called that is neither ours nor Python's own: `file:line`. Returns the name of a command,
    in backquotes, and `_FOR_CLIENTS` in an owner that a client has started. Empty where there is none, as in a thread
    of ours."""
    frame: FrameType | None = sys._getframe(1)
    owns = False
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        root = module.partition(".")[0]
        owns |= module == _OWNER
        if module.startswith(_COMMANDS):
            if frame.f_code.co_name.endswith("_command"):
                return f"`{_ROOT} {frame.f_code.co_name.removesuffix('_command')}`"
        elif not (owns or root == _ROOT or root in sys.stdlib_module_names):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return _FOR_CLIENTS if owns else ""


def owner_of(path: Path) -> str:
    """Return who holds a lock file, or held it last: this process, or another one as the file's text says."""
    with suppress(OSError):
        for lock in _watch.of(_identity(path.stat())):
            return lock.described()
    try:
        pid, host, *opened_at = path.read_text(errors="replace").split(maxsplit=2)
    except (OSError, ValueError):
        return "another process"
    owner = f"{'the parent process' if pid == str(os.getppid()) else 'process'} {pid} on {host}"
    return f"{owner}{_opened(opened_at[0].rstrip() if opened_at else '')}"


def _opened(where: str) -> str:
    """Return what `_caller` has found, to be put behind who the owner is."""
    how = "by " if where.startswith("`") else "at " if where != _FOR_CLIENTS else ""
    return f", opened {how}{where}" if where else ""
