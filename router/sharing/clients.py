"""The files of living clients: each keeps one locked in `clients/` of the directory. So the owner, and the next one,
see who lives, whatever has become of a connection.

A file is removed by its client, or by an owner that finds it unlocked: a client that was killed has left it.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from ...adapters.system.files import disk_errors, make_directory, open_file

DIRECTORY: Final = "clients"
FILE_MODE: Final = 0o600
GRACE_SECONDS: Final = 2.0
"""For so long a new owner waits for the clients of the one before to tell what they hold; and for a client that lives
and has lost its connection, until what it held is given back."""


def clients_of(directory: Path) -> Path:
    """Return where the clients of a data directory keep their files."""
    return directory / DIRECTORY


class ClientFile:
    """The file of one client, locked until it is closed, or its process ends. Raises as `disk_errors`."""

    def __init__(self, directory: Path, client: str) -> None:
        self._path = clients_of(directory) / client
        with disk_errors(f"{directory} cannot be shared"):
            self._make()

    def _make(self) -> None:
        make_directory(self._path.parent, FILE_MODE)
        while True:
            self._fd = open_file(self._path, os.O_RDWR | os.O_CREAT, FILE_MODE)
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(self._fd), self._path.stat()):
                    return
            os.close(self._fd)  # an owner that came between the two took it for one that was left over

    def close(self) -> None:
        """Remove the file and let go of it."""
        self._path.unlink(missing_ok=True)
        self.leave()

    def leave(self) -> None:
        """Let go of the file: in a forked child, whose parent keeps it."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def is_living(directory: Path, client: str) -> bool:
    """Return whether a client lives, or nobody can say. The file of one that does not is removed."""
    path = clients_of(directory) / client
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        return error.errno in (errno.EMFILE, errno.ENFILE)  # for want of a descriptor
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink(missing_ok=True)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def living(directory: Path) -> Iterator[str]:
    """Yield the clients that live."""
    with suppress(FileNotFoundError):
        for path in clients_of(directory).iterdir():
            if is_living(directory, path.name):
                yield path.name
