"""Large bodies of a client: they are in no frame, but in files, which both sides read by a descriptor.

A body that is sent is the file that was given, or an unnamed one into which it is copied. One that is received is the
file that the owner keeps it in, or a copy, and so can be read whatever becomes of its message, and of the owner.
"""

from __future__ import annotations

import io
import itertools
import os
import stat
import tempfile
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeVar
from weakref import WeakValueDictionary

from ....adapters.core.messages import LargeBody, Readable, plain_body
from ....adapters.core.record.large import (
    CHUNK_BYTES,
    CRC,
    REFERENCE,
    LargeStream,
    Sized,
    StoredBody,
    chunk_offset,
    not_as_said,
    read_bytes,
    require_size,
)
from ....policies.errors import OutOfDescriptorsError
from ..descriptors import Descriptor
from ..protocol import Body, Call, Request
from ..socket_file import identity_of
from .exchange import Exchange

T = TypeVar("T")
RECENT_NS: Final = 2_000_000_000
"""A file that was written to more lately than that may be written to once more, and have the same time still."""
_FILES: Final = (io.FileIO, io.BufferedReader, io.BufferedRandom)
"""The files whose descriptors give what they read."""


class Bodies:
    """The large bodies of one client. Threads: all."""

    def __init__(self, directory: Path, ask: Callable[[Request], Any], exchange: Callable[[], Exchange]) -> None:
        """`exchange` returns what the descriptors go with, and come from."""
        self._directory = directory
        self.ask = ask
        self.exchange = exchange
        self.unused: deque[int] = deque()
        """Numbers of bodies that the owner need not keep any more, and is yet to be told of."""
        self.numbers: Final = itertools.count(-1, -1)  # the owner's are above 0
        self._given: WeakValueDictionary[int, GivenBody] = WeakValueDictionary()
        """Those that are to be sent, by number."""

    def keep(self, body: object) -> bytes | LargeBody:
        """Return a body as it is sent, as Store.keep; a file stands at its end then."""
        size = None
        if isinstance(body, Sized):
            body, size = body
            require_size(size)
        if isinstance(body, LargeBody):
            if size is not None and size != body.size:
                raise not_as_said(body.size, size)
            return body if isinstance(body, RemoteBody | GivenBody) else self.keep(body.open())
        if isinstance(body, bytes | bytearray | memoryview) or not isinstance(body, Readable):
            plain = plain_body(body)
            if size is not None and size != len(plain):
                raise not_as_said(len(plain), size)
            return plain
        file = _file_of(body)
        with self._copied(body, size) if file is None else nullcontext(file) as found:
            offset = found.tell()
            given = GivenBody(self, Descriptor(os.dup(found.fileno())), offset)
            if size is not None and given.size != size:
                raise not_as_said(given.size, size)
            found.seek(0, io.SEEK_END)
        self._given[given.number] = given
        self.ask(given.request)
        return given

    def _copied(self, body: Readable, size: int | None) -> BinaryIO:
        """Return an unnamed file with what can be read of a body, from its start."""
        file: Any = tempfile.TemporaryFile(dir=self._directory)  # noqa: SIM115
        try:
            while data := read_bytes(body, CHUNK_BYTES if size is None else min(CHUNK_BYTES, size - file.tell() + 1)):
                file.write(data)
                if size is not None and file.tell() > size:
                    raise not_as_said(file.tell(), size, "at least ")
            file.seek(0)
        except BaseException:
            file.close()
            raise
        return file  # type: ignore[no-any-return]

    def again(self) -> list[Request]:
        """Return the requests by which the next owner is given what is to be sent."""
        return [one.request for one in list(self._given.values())]


def taken_out(noted: deque[T]) -> list[T]:
    """Take out what there is. Any thread, beside others."""
    found = []
    with suppress(IndexError):
        while True:
            found.append(noted.popleft())
    return found


def _file_of(body: Any) -> Any:
    """Return the file on disk that a body is, if it can be read by its descriptor, and if its time would tell that it
    was written to meanwhile; else None."""
    file: Any = getattr(body, "file", None) if type(body).__module__ == "tempfile" else body
    if type(file) not in _FILES or type(getattr(file, "raw", file)) is not io.FileIO:
        return None
    file.flush()
    found = os.fstat(file.fileno())  # a file of /proc says that it is empty, and is not
    if not stat.S_ISREG(found.st_mode) or not file.readable() or found.st_size <= file.tell():
        return None
    return file if time.time_ns() - found.st_mtime_ns > RECENT_NS else None


class GivenBody(LargeBody):
    """A body that is to be sent, as a file from an offset on. The owner has its descriptor as long as it is there."""

    __slots__ = ("__weakref__", "_bodies", "descriptor", "number", "request", "size")

    def __init__(self, bodies: Bodies, descriptor: Descriptor, offset: int) -> None:
        self._bodies = bodies
        self.number: Final = next(bodies.numbers)
        self.descriptor: Final = descriptor
        bodies.exchange().descriptors[self.number] = descriptor
        found = os.fstat(descriptor.fd)
        self.size: int = max(found.st_size - offset, 0)
        self.request: Final = Body(self.number, identity_of(found), offset, self.size, found.st_mtime_ns)

    @property
    def packed(self) -> list[int]:
        """Return the body as it goes over the socket."""
        return [self.size, self.number]

    def __len__(self) -> int:
        return REFERENCE.size

    def __del__(self) -> None:
        self._bodies.unused.append(self.number)


class RemoteBody(StoredBody):
    """A body that was received. The owner keeps it for this client as long as this object is there."""

    __slots__ = ("number",)

    def __init__(self, bodies: Bodies, reference: bytes, number: int, device: int, inode: int) -> None:
        descriptor = bodies.exchange().arrived.take((device, inode))
        super().__init__(_File(bodies, number, descriptor), REFERENCE.unpack(reference)[0])
        self.describe(reference)
        self.number: int = number

    @property
    def packed(self) -> list[int]:
        """Return the body as it goes over the socket."""
        return [self.size, self.number]


class _File:
    """The file that a received body is in (BodyHost, LargeStorage)."""

    def __init__(self, bodies: Bodies, number: int, descriptor: Descriptor | None) -> None:
        self._bodies, self._number, self._descriptor = bodies, number, descriptor
        self.streams: weakref.WeakSet[LargeStream] = weakref.WeakSet()

    @property
    def storage(self) -> _File:
        """Return what reads the body."""
        return self

    def require_open(self) -> None:
        """Ask the owner for the descriptor, if it has not come. Raises ClosedError where the body is gone with it."""
        if self._descriptor is None:
            identity = self._bodies.ask(Call("body_file", (self._number,)))
            self._descriptor = self._bodies.exchange().arrived.take(identity)
        if self._descriptor is None:
            raise OutOfDescriptorsError(
                "a large body cannot be read now: this process has no descriptor left (`ulimit -n`); close some files "
                "and open it again"
            )

    def read(self, name: bytes, number: int, chunk_bytes: int) -> bytes:
        assert self._descriptor is not None
        return os.pread(self._descriptor.fd, CRC.size + chunk_bytes, chunk_offset(number, chunk_bytes))

    def place(self, name: bytes, number: int, chunk_bytes: int = CHUNK_BYTES) -> tuple[str, int]:
        return f"large/{name.hex()}.body", chunk_offset(number, chunk_bytes)

    def planned(self, plan: Any, send: Any) -> None:
        raise AssertionError("a client plans nothing")

    def __del__(self) -> None:
        self._bodies.unused.append(self._number)
