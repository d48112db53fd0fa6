"""Large bodies of a client: the owner keeps them, and they go over in chunks."""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Callable
from typing import Any, BinaryIO, Final

from ....adapters.core.messages import LargeBody, Readable, plain_body
from ....adapters.core.record.large import Sized, not_as_said, read_bytes, require_size

CHUNK_BYTES: Final = 1 << 20
"""Bytes of a large body that go over at once."""


class Bodies:
    """The large bodies that the owner keeps for this client. Threads: all."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call
        self.unused: deque[int] = deque()
        """Numbers of bodies that the owner need not keep any more."""

    def keep(self, body: object) -> bytes | LargeBody:
        """Read a body into the owner's keeping, as Store.keep."""
        size = None
        if isinstance(body, Sized):
            body, size = body
            require_size(size)
        if isinstance(body, LargeBody):
            if size is not None and size != body.size:
                raise not_as_said(body.size, size)
            return body if isinstance(body, RemoteBody) else self.keep(body.open())
        if isinstance(body, bytes | bytearray | memoryview) or not isinstance(body, Readable):
            plain = plain_body(body)
            if size is not None and size != len(plain):
                raise not_as_said(len(plain), size)
            return plain
        kept = RemoteBody(self, 0, self.call("body_begin"))
        while data := read_bytes(body, CHUNK_BYTES if size is None else min(CHUNK_BYTES, size - kept.size + 1)):
            kept.size += len(data)
            if size is not None and kept.size > size:
                raise not_as_said(kept.size, size, "at least ")
            self.call("body_more", kept.number, bytes(data))
        if size is not None and kept.size != size:
            raise not_as_said(kept.size, size)
        return kept

    def take_unused(self) -> list[int]:
        """Return the numbers of those that the owner is yet to be told of."""
        numbers = []
        while self.unused:
            numbers.append(self.unused.popleft())
        return numbers


class RemoteBody(LargeBody):
    """A large body, which the owner keeps for this client as long as this object is there."""

    __slots__ = ("_bodies", "number", "size")

    def __init__(self, bodies: Bodies, size: int, number: int) -> None:
        self._bodies, self.size, self.number = bodies, size, number

    def open(self) -> BinaryIO:
        """Return a stream of the body."""
        return io.BufferedReader(_BodyStream(self), CHUNK_BYTES)

    def read(self, offset: int, size: int) -> bytes:
        """Return bytes of the body."""
        data: bytes = self._bodies.call("body_read", self.number, offset, size)
        return data

    @property
    def packed(self) -> list[int]:
        """Return the body as it goes over the socket."""
        return [self.size, self.number]

    def __len__(self) -> int:
        return 64

    def __del__(self) -> None:
        self._bodies.unused.append(self.number)


class _BodyStream(io.RawIOBase):
    def __init__(self, body: RemoteBody) -> None:
        self._body: RemoteBody | None = body
        self._at = 0

    @property
    def _opened(self) -> RemoteBody:
        if self._body is None:
            raise ValueError("I/O operation on a closed file")
        return self._body

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._opened.size}[whence]
        if start + offset < 0:
            raise ValueError(f"negative seek position {start + offset}")
        self._at = start + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def close(self) -> None:
        self._body = None  # the owner need not keep it for this stream any more
        super().close()

    def readinto(self, buffer: Any) -> int:
        body = self._opened
        size = min(len(buffer), max(body.size - self._at, 0), CHUNK_BYTES)
        data = body.read(self._at, size) if size else b""
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)
