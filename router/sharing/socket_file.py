"""The sockets by which a directory's owner is reached, for this user alone.

One that is started to serve has `serve.sock` in the directory. A path in a Unix socket's address takes 107 bytes at
most. Where the directory's is longer, it is reached through a descriptor of the directory (/proc/self/fd), which is as
long as any.

A router that has the directory for itself listens under a name without a file, which is the directory's device and
inode (Linux's abstract addresses). Nothing is left in the directory when it is killed, and whoever copies the directory
meets files alone. Whoever has a network namespace of its own does not find it.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from contextlib import suppress
from pathlib import Path
from typing import Final

NAME: Final = "serve.sock"
PATH_BYTES_MAX: Final = 107


class _Socket(socket.socket):
    """A socket that may be let go of: whoever was given it was interrupted."""

    def __del__(self) -> None:
        self.close()


def _call(directory: Path, name: str, call: object) -> None:
    """Call with the address of a file in a directory."""
    path = os.fsencode(directory / name)
    if len(path) <= PATH_BYTES_MAX:
        call(path)  # type: ignore[operator]
        return
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        call(f"/proc/self/fd/{fd}/{name}")  # type: ignore[operator]
    finally:
        os.close(fd)


Identity = tuple[int, int]
"""The device and the inode of a file."""


def identity_of(found: os.stat_result) -> Identity:
    """Return which file it is."""
    return found.st_dev, found.st_ino


def bound(directory: Path, backlog: int) -> tuple[socket.socket, Identity]:
    """Return a socket that listens in a directory, instead of any that an owner before has left, and which file it is.
    The caller holds the directory's lock. Raises OSError."""
    making = f"{NAME}.{os.getpid()}"
    sock = _Socket(socket.AF_UNIX)
    try:
        (directory / making).unlink(missing_ok=True)
        _call(directory, making, sock.bind)
        (directory / making).chmod(0o600)
        sock.listen(backlog)
        identity = identity_of((directory / making).lstat())
        (directory / making).rename(directory / NAME)  # whole or not at all
    except BaseException:
        sock.close()
        with suppress(OSError):
            (directory / making).unlink(missing_ok=True)
        raise
    return sock, identity


def bound_without_file(directory: Path, backlog: int) -> socket.socket:
    """Return a socket that listens under the name of a directory. Raises OSError: EADDRINUSE where it is taken, as for
    a moment by a child of fork that is on its way to another program."""
    sock = _Socket(socket.AF_UNIX)
    try:
        sock.bind(_name_of(directory))
        sock.listen(backlog)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock


def _name_of(directory: Path) -> bytes:
    return b"\0anabranch/%x-%x" % identity_of(directory.stat())


def user_of(sock: socket.socket) -> int:
    """Return the user of the process at the other end. Raises OSError where the operating system does not say."""
    return peer_of(sock)[1]


def peer_of(sock: socket.socket) -> tuple[int, int]:
    """Return the process at the other end, and its user. Raises OSError where the operating system does not say."""
    if not hasattr(socket, "SO_PEERCRED"):
        raise OSError(errno.ENOTSUP, "this operating system does not say who is at the other end of a socket")
    process, user, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return process, user


def is_left(directory: Path) -> bool:
    """Return whether a socket is there, or nobody can say."""
    try:
        (directory / NAME).lstat()
    except FileNotFoundError:
        return False
    except OSError:
        pass
    return True


def remove(directory: Path, identity: Identity) -> None:
    """Remove the socket of an owner that ends, unless another's is there by now: the directory may be another."""
    with suppress(OSError):
        if identity_of((directory / NAME).lstat()) == identity:
            (directory / NAME).unlink(missing_ok=True)


def connected(directory: Path) -> socket.socket:
    """Return a socket that is connected to the owner. Raises OSError: ConnectionRefusedError or FileNotFoundError
    where nobody serves."""
    sock = _Socket(socket.AF_UNIX)
    try:
        try:
            _call(directory, NAME, sock.connect)
        except (FileNotFoundError, ConnectionRefusedError):
            sock.connect(_name_of(directory))
        if user_of(sock) not in (os.getuid(), 0, directory.stat().st_uid):  # anybody may take a name
            raise ConnectionRefusedError(f"a process of user {user_of(sock)} is in the place of {directory}'s owner")
    except BaseException:
        sock.close()
        raise
    return sock
