"""Large bodies as they come from a client: each is a file, of which it has passed a descriptor."""

from __future__ import annotations

import os
import stat
import weakref
from typing import Final

from ....adapters.core.messages import Readable
from ....policies.errors import ClosedError
from ..descriptors import Descriptor
from ..protocol import Body
from ..socket_file import identity_of

READ_BYTES: Final = 1 << 20


class GivenFile:
    """A file that a client has given as a body, which may be sent several times."""

    def __init__(self, descriptor: Descriptor, request: Body) -> None:
        self._descriptor: Descriptor | None = descriptor
        self.request = request
        all_given.add(self)

    def reader(self) -> Readable:
        """Return what reads it once, from its first byte on."""
        return _Reader(self)

    def close(self) -> None:
        """Let go of the file once nobody reads it: an error that was raised may hold this for long."""
        self._descriptor = None
        all_given.discard(self)

    def read(self, offset: int, size: int) -> bytes:
        """Return bytes of the body. Raises ValueError for a file that has changed since it was given, or is none that a
        body can be, and OSError."""
        found = self._read(offset, size)
        if isinstance(found, bytes):
            return found
        raise found  # from here: the frame of `_read` would hold the descriptor as long as the error is there

    def _read(self, offset: int, size: int) -> bytes | Exception:
        descriptor, request = self._descriptor, self.request
        if descriptor is None:
            return ClosedError("the client that gave a body has gone")
        try:
            found = os.fstat(descriptor.fd)
            data = b""
            if stat.S_ISREG(found.st_mode) and identity_of(found) == request.identity:
                data = os.pread(descriptor.fd, min(size, request.size - offset), request.offset + offset)
            if (data or offset >= request.size) and os.fstat(descriptor.fd).st_mtime_ns == request.mtime_ns:
                return data
        except OSError as error:
            return OSError(*error.args)
        return ValueError("the file of a body was changed while it was sent: send it again. Nothing was sent")


class _Reader:
    def __init__(self, file: GivenFile) -> None:
        self._file, self._at = file, 0

    def read(self, size: int = -1) -> bytes:
        """Return what comes next."""
        data = self._file.read(self._at, READ_BYTES if size < 0 else size)
        self._at += len(data)
        return data


all_given: Final[weakref.WeakSet[GivenFile]] = weakref.WeakSet()
"""Those of all clients."""
