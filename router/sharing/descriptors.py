"""Descriptors of files that go along with the frames: large bodies are read by them, and are in no frame.

The kernel hands a descriptor over with the bytes that it was sent with. The identity of its file, which is in a frame,
tells which one it is: so one that the receiver had no room for is missed, and none is taken for another.
"""

from __future__ import annotations

import os
import socket
from array import array
from contextlib import suppress
from typing import Any, Final

from .protocol import ProtocolError
from .socket_file import Identity, identity_of

READ_BYTES: Final = 1 << 16
"""Bytes that are read of a socket at once. For a buffer of 128 KiB the C library maps memory anew for each read, which
takes ten times as long as to read a small frame."""
MOST: Final = 64
"""Descriptors that may have come and not been asked for."""
SPACE: Final = socket.CMSG_SPACE(MOST * 4)
CLOSED_ON_EXEC: Final = int(getattr(socket, "MSG_CMSG_CLOEXEC", 0))  # flags of an enum are slow to combine

NONE: Final = (0, 0)
"""The identity of no file."""


class Descriptor:
    """A descriptor that is closed once nobody holds it."""

    __slots__ = ("__weakref__", "fd")

    def __init__(self, fd: int) -> None:
        self.fd: Final = fd

    def __del__(self) -> None:
        with suppress(OSError):
            os.close(self.fd)


def send(sock: socket.socket, frame: bytes | bytearray | memoryview, fd: int) -> int:
    """Send a frame with a descriptor, or without one (-1); returns how many bytes of it have gone. Raises OSError."""
    if fd < 0:
        return sock.send(frame)
    return sock.sendmsg([frame], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [fd]))])


class Arrived:
    """The descriptors that have come over a socket, until they are taken."""

    def __init__(self) -> None:
        self._descriptors: list[tuple[Identity, Descriptor]] = []

    def __len__(self) -> int:
        return len(self._descriptors)

    def receive(self, sock: socket.socket, size: int) -> bytes:
        """Return what has come, of so many bytes at most. Raises OSError."""
        received = sock.recvmsg(size, SPACE, CLOSED_ON_EXEC)
        return self.note(received) if received[1] else received[0]

    def note(self, received: tuple[bytes, list[tuple[int, int, bytes]], int, Any]) -> bytes:
        """Keep the descriptors of what has come; returns its bytes."""
        data, ancillary, _, _ = received
        for level, kind, content in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds = array("i")
                fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
                self._descriptors += [(identity_of(os.fstat(one.fd)), one) for one in list(map(Descriptor, fds))]
        return data

    def take(self, identity: Identity) -> Descriptor | None:
        """Return the descriptor of a file; None if it has not come."""
        for place, (its, descriptor) in enumerate(self._descriptors):
            if its == tuple(identity):
                del self._descriptors[place]
                return descriptor
        return None

    def let_go(self, most: int = MOST) -> None:
        """Close the eldest beyond so many."""
        if len(self._descriptors) > most:
            del self._descriptors[: len(self._descriptors) - most]

    def require_few(self) -> None:
        """Raise ProtocolError for more than may wait."""
        if len(self._descriptors) > MOST:
            raise ProtocolError(f"more than {MOST} descriptors have come that no frame speaks of")
