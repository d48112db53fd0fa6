"""Reading a directory that nobody has open, without writing anything there, not even who reads."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...policies.errors import StoreLockedError
from .locking import owner_of


@contextmanager
def kept_closed(lock_file: Path, what: str) -> Iterator[None]:
    """Keep closed, while the block runs, what the lock file guards (locking.py); others may read it too.

    A process that tries to open it is refused, with the last owner's name. Where there is no lock file, `what` was
    never open there, or the directory is a copy: then it is looked at the end whether somebody has opened it meanwhile.
    Raises StoreLockedError, OSError.
    """
    try:
        fd = os.open(lock_file, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        fd = None
    try:
        if fd is not None:
            try:
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                raise StoreLockedError(
                    f"{what} in {lock_file.parent} is open, by {owner_of(lock_file)}; its files change while they "
                    "are read. Close it there first, or read a copy of the directory"
                ) from None
        yield
    finally:
        if fd is not None:
            os.close(fd)
    if fd is None and lock_file.exists():
        raise StoreLockedError(
            f"{what} in {lock_file.parent} was opened while it was read, by {owner_of(lock_file)}; try again once it "
            "is closed"
        )
