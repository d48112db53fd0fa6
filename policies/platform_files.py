"""How a file is made durable on each platform: nothing else of ours syncs, the compiled loops included, which go by
BY_FDATASYNC. adapters/system/files.py has what all parts that keep files do with it.

                 bytes of a file          a whole file          a name in a directory
    Linux        fdatasync                fsync                 fsync of the directory
    macOS        fcntl F_FULLFSYNC        fcntl F_FULLFSYNC     fcntl F_FULLFSYNC of the directory
    others       fdatasync, or fsync      fsync                 fsync of the directory

On macOS fsync leaves what was written in the drive's own cache, and there is no fdatasync. A file system that knows
nothing of F_FULLFSYNC, such as one over a network, gets fsync there too.
"""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import Final

if not hasattr(os, "register_at_fork"):
    raise ImportError(
        f"anabranch needs the files, locks and processes of POSIX: it runs on Linux and macOS, not on {sys.platform}. "
        "On Windows use it inside WSL"
    )

import fcntl

FULL_SYNC: Final[int | None] = getattr(fcntl, "F_FULLFSYNC", None)
BY_FDATASYNC: Final[bool] = FULL_SYNC is None and hasattr(os, "fdatasync")
"""True if fdatasync makes a file's bytes durable."""
_UNKNOWN: Final = frozenset((errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOTTY, errno.EINVAL))
"""The errors of file systems that know nothing of F_FULLFSYNC. Any other error is the disk's."""


def sync_data(fd: int) -> None:
    """Make a file's bytes durable. Raises OSError; it is never called again for the same bytes then (invariant 7)."""
    if BY_FDATASYNC:
        os.fdatasync(fd)
    else:
        sync_file(fd)


def sync_file(fd: int) -> None:
    """Make a file durable with all that is known of it, or a directory with the names in it. Raises OSError."""
    if FULL_SYNC is not None:
        try:
            fcntl.fcntl(fd, FULL_SYNC)
            return
        except OSError as error:
            if error.errno not in _UNKNOWN:
                raise
    os.fsync(fd)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        sync_file(fd)
    finally:
        os.close(fd)
