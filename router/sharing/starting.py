"""The process that owns a shared directory, as the first client starts it, and its successor.

One client at a time starts it: whoever has locked `serve.starting` in the directory. All others wait, and find it.

An owner that a client has started has a successor standing by: a copy of it, made before it opened anything, which
waits for the end of a pipe. The operating system closes that however the owner ends. So the next owner is there some
milliseconds after the one before was killed. It makes a copy of itself first. `serve.successor` is locked as long as
any of them lives.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import select
import signal
import sys
import time
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from ...adapters.system.files import disk_errors, make_directory, open_file
from ...policies.config.writing import plain_data
from ...policies.errors import StoreFailedError, StoreLockedError
from ..placement.on_disk.in_force import write_in_force
from .protocol import pack_error, unpack_error
from .socket_file import connected

if TYPE_CHECKING:
    from ...policies.config import Config

STARTING: Final = "serve.starting"
LOG: Final = "serve.log"
START_SECONDS: Final = 600.0
"""In so many seconds an owner is there, or it has said why not. It may have to recover large stores."""
LINGER: Final = 10
"""Seconds for which an owner stays after its last client has gone."""
SUCCESSOR: Final = "serve.successor"
SUCCESSION_SECONDS: Final = 5.0
"""For so long the locks of an owner that has just been killed may hold still."""


def start(config: Config) -> None:
    """Start an owner, unless there is one by now. Returns once it can be connected to, or has ended without a word.
    Raises what it could not start for."""
    with disk_errors(f"no owner of {config.directory} can be started"):
        _start(config)


def _start(config: Config) -> None:
    directory = config.directory
    make_directory(directory, config.file_mode)
    fd = open_file(directory / STARTING, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        _wait_for_start(fd, directory)
        if not _is_there(directory) and not _comes(directory):
            try:
                _tell_start(config)
            except StoreLockedError:
                if not _comes(directory):  # a successor that had not come to stand by when its owner was killed
                    raise
    finally:
        os.close(fd)


def _wait_for_start(fd: int, directory: Path) -> None:
    """Wait until no other process starts an owner, or there is one. Not for a process that is stopped: if it goes on,
    the directory's lock has the say. Raises StoreFailedError."""
    deadline = time.monotonic() + START_SECONDS
    while True:
        if _locked(fd):
            return
        starts = os.pread(fd, 10, 0).decode().strip()
        if _is_there(directory) or _is_stopped(starts):
            return
        if time.monotonic() > deadline:
            raise StoreFailedError(
                f"process {starts or 'unknown'} holds {directory / STARTING} locked: it starts an owner of the "
                f"directory, and has not ended in {START_SECONDS:.0f} s; look what it waits for, or end it"
            )
        time.sleep(0.005)


def _locked(fd: int) -> bool:
    """Lock a file, and write into it whose it is, unless another process has; return whether that is done."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    os.pwrite(fd, b"%-10d" % os.getpid(), 0)
    return True


def _is_stopped(pid: str) -> bool:
    with suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    return False


def hold_start(directory: Path) -> None:
    """Let nobody start an owner until this process, which is one, has ended: it lets go of the directory only then."""
    deadline = time.monotonic() + 1.0  # somebody may be just looking
    with suppress(OSError):
        fd = open_file(directory / STARTING, os.O_RDWR | os.O_CREAT, 0o600)
        while not _locked(fd) and time.monotonic() < deadline:
            time.sleep(0.002)


def _comes(directory: Path) -> bool:
    """Return whether an owner is coming, as a successor does, and is there now."""
    try:
        fd = os.open(directory / SUCCESSOR, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        deadline = time.monotonic() + START_SECONDS
        while not _is_there(directory) and time.monotonic() < deadline:
            try:
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return _is_there(directory)
            except BlockingIOError:
                time.sleep(0.002)
        return True
    finally:
        os.close(fd)


def _is_there(directory: Path) -> bool:
    with suppress(OSError):
        connected(directory).close()
        return True
    return False


def _tell_start(config: Config) -> None:
    """Start the process and wait until it says that it serves, or why not. One that a signal has ended before has said
    nothing: whoever needs an owner tries again. Raises what it says, or StoreFailedError with what it has logged, if it
    ended by itself."""
    if config.file is None:
        write_in_force(config)
    log = config.directory / LOG
    os.close(open_file(log, os.O_WRONLY | os.O_CREAT, 0o600))  # if that fails, it is said of which file
    size = log.stat().st_size
    reading, writing = os.pipe()
    try:
        try:
            pid = _spawn(config, writing)
            _started.append(pid)
        finally:
            os.close(writing)
        said = _said(reading)
    finally:
        os.close(reading)
    error = msgspec.msgpack.decode(said) if said else None
    if error:
        raise unpack_error(error)
    code = 0
    if not said:
        with suppress(ChildProcessError):
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    _reap()
    if 0 < code < 128:  # else a signal has ended it
        with log.open("rb") as file:
            file.seek(size)
            text = file.read().decode(errors="replace").strip() or f"exit code {code}"
        raise StoreFailedError(f"the owner of {config.directory} could not be started: {text}")


def _spawn(config: Config, fd: int) -> int:
    """Start an owner (owner/process.py), apart from this process and with a descriptor of it; returns its pid."""
    source = os.fspath((config.file or config.directory).absolute())
    log = os.fspath(config.directory / LOG)
    words = [sys.executable, "-m", f"{__package__}.owner", source, str(LINGER), str(_GIVEN)]
    return os.posix_spawn(
        sys.executable,
        words,
        os.environ,
        file_actions=[
            *((os.POSIX_SPAWN_CLOSE, one) for one in _inheritable() if one != fd),
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600),
            (os.POSIX_SPAWN_DUP2, 1, 2),
            (os.POSIX_SPAWN_DUP2, fd, _GIVEN),
        ],
        setsid=True,
        setsigmask=[],  # not that of this thread: SIGTERM is to reach it
    )


def _inheritable() -> list[int]:
    """Return the descriptors of this process that a program is given which it starts. An owner stays longer: whoever
    waits for the end of a pipe waits for it too."""
    found = []
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if int(path.name) > 2 and os.get_inheritable(int(path.name)):
                found.append(int(path.name))
    return found


_GIVEN: Final = 3
"""The descriptor as the process finds it."""
_started: Final[list[int]] = []
"""Owners that this process has started, which it has to wait for once they end."""


def _reap() -> None:
    """Wait for those that have ended."""
    for pid in list(_started):
        with suppress(ChildProcessError):
            if os.waitpid(pid, os.WNOHANG)[0] == 0:
                continue
        _started.remove(pid)


def _said(fd: int) -> bytes:
    """Return what the process has said, of which nothing is the word of one that has ended. Raises StoreFailedError if
    it takes too long."""
    said = b""
    deadline = time.monotonic() + START_SECONDS
    while True:
        poll = select.poll()  # not select, which takes no descriptor above 1023
        poll.register(fd, select.POLLIN)
        if not poll.poll(max(deadline - time.monotonic(), 0) * 1000):
            raise StoreFailedError(f"an owner was started, and does not serve after {START_SECONDS:.0f} s")
        data = os.read(fd, 65536)
        if not data:
            return said
        said += data


def mark_of(config: Config) -> str:
    """Return what tells a configuration from others of the directory: not of what `shared` and `control` say."""
    data = {name: value for name, value in plain_data(config).items() if name not in ("shared", "control")}
    return hashlib.sha256(repr(data).encode()).hexdigest()


# In the owner's process


def tell(told: FileIO, error: Exception | None) -> None:
    """Tell who has started this process that it serves, or why not: once, and nobody in a successor."""
    if not told.closed:
        with suppress(OSError), told:
            told.write(msgspec.msgpack.encode(None if error is None else pack_error(error)))


def hold_place(directory: Path) -> None:
    """Keep `serve.successor` locked until this process and all its successors have ended."""
    fd = open_file(directory / SUCCESSOR, os.O_RDWR | os.O_CREAT, 0o600)
    with suppress(BlockingIOError):  # others wait for an owner all the same, and the directory's lock has the say
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


class Successor:
    """The process that stands by. The pipe to it is closed with this process, whatever ends that."""

    def __init__(self, pid: int, pipe: int) -> None:
        self._pid, self._pipe = pid, pipe

    @classmethod
    def forked(cls, told: FileIO) -> Successor | None:
        """Let a copy of this process stand by. This process has no threads yet; `told` is its own alone.

        Returns None in the copy, once this process has served and ended. Raises StoreFailedError there if it has not
        served: it may have died of what it read, and so would one after the other."""
        reading, pipe = os.pipe()
        pid = os.fork()
        if pid:
            os.close(reading)
            return cls(pid, pipe)
        os.setsid()  # who ends the owner by its group does not end this one
        os.close(pipe)
        told.close()
        has_served = os.read(reading, 1)
        os.read(reading, 1)  # nothing more comes but the end
        os.close(reading)
        if not has_served:
            raise StoreFailedError("the owner has died before it served; its successor leaves it to the clients")
        return None

    def owner_serves(self) -> None:
        """Let it take over once this process ends."""
        with suppress(OSError):  # it was killed
            os.write(self._pipe, b"1")

    def dismiss(self) -> None:
        """End it: nothing is to be taken over."""
        with suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(self._pid, 0)
        os.close(self._pipe)
