"""A body of any size, kept apart from its message: what the message's record says of it, its bytes, and the stream that
its receiver reads.

A record with the flag LARGE (encoding.py) has a *reference* in place of the body: the body's name, its size, the size
of its chunks, and the CRC-32C of all of it. The body itself is a *start* and its chunks, each behind its CRC-32C, in
whatever a backend keeps them (LargeStorage): files beside a journal, rows beside MESSAGES. Drawn in docs/format.md.

start (64 bytes)     what the store must know of a body that no message names: `low`, the highest seq before it was
                     written, so that whatever names it comes behind that; and, once it is known, which message that is
chunk 0, 1, ...      1 MiB each, the last one shorter
"""

from __future__ import annotations

import io
import struct
import weakref
from collections.abc import Iterator
from typing import Any, BinaryIO, Final, NamedTuple, Protocol, runtime_checkable

from google_crc32c import extend as crc32c

from ....policies.errors import ClosedError, CorruptionError
from ..messages import LargeBody, Readable

NAME_BYTES: Final = 16
CHUNK_BYTES: Final = 1 << 20

REFERENCE: Final = struct.Struct("<16sQII")
"""Name, size, bytes of a chunk, CRC-32C of the whole body."""
assert REFERENCE.size == 32
START: Final = struct.Struct("<4sHH16sQ")
"""Magic, version, 0, name, low. Then its CRC-32C, and what NAMED says."""
assert START.size == 32
NAMED: Final = struct.Struct("<IQ")
"""Number of the destination and seq of the message that names it; a hint, which may be missing, or of another one. Then
its CRC-32C."""
assert NAMED.size == 12
CRC: Final = struct.Struct("<I")
START_BYTES: Final = 64
NAMED_AT: Final = START.size + CRC.size
MAGIC: Final = b"ABlb"
VERSION: Final = 1
_NUMBER: Final = struct.Struct("<Q")

NEVER: Final = (1 << 64) - 1
"""The `low` of a body whose message does not outlive its process: none that names it is ever found at open."""


DIRECTORY: Final = "large"
PART: Final = ".part"
BODY: Final = ".body"
"""The place of bodies that are files, in a store's directory: the ends of the names of those being written, and of
whole ones."""


class Sized(NamedTuple):
    """A body of which its sender said how long it is."""

    body: object
    size: int


class Kept(NamedTuple):
    """A body that is found at open."""

    name: bytes
    low: int
    number: int
    seq: int
    """0: none is known."""


class BodyFiles(Protocol):
    """The place where bodies are read. Threads: all."""

    def read(self, name: bytes, number: int, chunk_bytes: int) -> bytes:
        """Return a chunk with its CRC; shorter, or nothing, if it is not there. Raises OSError for what the disk does
        not give."""

    def place(self, name: bytes, number: int, chunk_bytes: int = CHUNK_BYTES) -> tuple[str, int]:
        """Return where a chunk is, for errors: a path, or a table, and an offset."""


class LargeStorage(BodyFiles, Protocol):
    """The storage of a store's large bodies, by name. A body that is begun and not published is nobody's. Threads: all,
    each body one at a time. Raises StoreFullError and StoreFailedError."""

    def begin(self, name: bytes, start: bytes) -> None:
        """Begin a new body."""

    def append(self, name: bytes, number: int, chunk: bytes, chunk_bytes: int) -> None:
        """Append a body's next chunk, with its CRC before it. All but the last have so many bytes behind that."""

    def publish(self, name: bytes, sync: bool) -> None:
        """Publish a body, which is whole. With `sync` the body survives a power failure once this has returned."""

    def note(self, name: bytes, named: bytes, sync: bool) -> None:
        """Write over what stands at NAMED_AT. May be done by halves, and need not be durable unless `sync`."""

    def remove(self, name: bytes) -> None:
        """Remove a body, begun or published. Idempotent."""

    def kept(self) -> Iterator[tuple[bytes, bytes | None]]:
        """Yield all bodies, each with its start; None for one that was never published."""

    def close(self) -> None:
        """Close the storage. Idempotent."""


@runtime_checkable
class KeepsFiles(Protocol):
    """A storage that keeps each body in a file."""

    def descriptor(self, name: bytes) -> int:
        """Return a descriptor of a body's file, to read from. Raises OSError, StoreFullError."""


@runtime_checkable
class KeepsBodies(Protocol):
    """A backend that keeps large bodies itself; any other's lie in files in the store's directory."""

    large_storage: LargeStorage
    """There once the backend is open."""


class BodyHost(Protocol):
    """The bodies of one open store (features/large)."""

    streams: weakref.WeakSet[LargeStream]
    """Streams that somebody may read."""

    @property
    def storage(self) -> BodyFiles:
        """Return where they are."""

    def require_open(self) -> None:
        """Raise ClosedError or StoreFailedError if the store is not usable."""

    def planned(self, plan: Any, send: Any) -> None:
        """Note a message of a plan (operations' Plan, Send) that names a body."""


def start_of(name: bytes, low: int) -> bytes:
    """Return the first bytes of a body."""
    start = START.pack(MAGIC, VERSION, 0, name, low)
    return (start + CRC.pack(crc32c(0, start))).ljust(START_BYTES, b"\0")


def named_by(number: int, seq: int) -> bytes:
    """Return the bytes that are written into a body once a message names it."""
    named = NAMED.pack(number, seq)
    return named + CRC.pack(crc32c(0, named))


def read_start(name: bytes, start: bytes) -> Kept | None:
    """Return what a body's first bytes say; None if they are damaged, or another's."""
    if len(start) < START_BYTES or CRC.unpack_from(start, START.size)[0] != crc32c(0, start[: START.size]):
        return None
    magic, version, _, found, low = START.unpack_from(start)
    if (magic, version, found) != (MAGIC, VERSION, name):
        return None
    named = start[NAMED_AT : NAMED_AT + NAMED.size]
    if CRC.unpack_from(start, NAMED_AT + NAMED.size)[0] != crc32c(0, named):
        return Kept(name, low, 0, 0)
    return Kept(name, low, *NAMED.unpack(named))


def chunk_offset(number: int, chunk_bytes: int) -> int:
    """Return where a chunk begins in a body's file."""
    return START_BYTES + number * (CRC.size + chunk_bytes)


def chunk_of(name: bytes, number: int, data: bytes | memoryview) -> bytes:
    """Return a chunk as it is kept: a chunk of another body, or another one of this, does not pass for it."""
    return CRC.pack(crc32c(crc32c(0, name + _NUMBER.pack(number)), bytes(data))) + data


class StoredBody(LargeBody):
    """A LargeBody as its store knows it. Whoever stages, sends, holds or reads a body keeps it, and so does a message
    that is not dead (large/bodies.py, rule B3)."""

    __slots__ = ("__weakref__", "bodies", "chunk_bytes", "crc", "lasting", "name", "names", "promised", "shared",
                 "size")  # fmt: skip

    def __init__(self, bodies: BodyHost, name: bytes, size: int = 0, chunk_bytes: int = CHUNK_BYTES) -> None:
        self.bodies: BodyHost = bodies
        self.name: bytes = name
        self.size: int = size
        self.chunk_bytes: int = chunk_bytes
        self.crc: int = 0
        self.lasting: bool = True
        """True if the body was synced, and may be named by a message that is to survive."""
        self.names: int = 0
        """How many messages that are not known to be dead name it."""
        self.promised: bool = False
        """A message names it, or did, or is about to."""
        self.shared: bool = False
        """Several may, and it says so (rule B6)."""

    @property
    def reference(self) -> bytes:
        """Return the reference that stands in the record of the body's message."""
        return REFERENCE.pack(self.name, self.size, self.chunk_bytes, self.crc)

    def describe(self, reference: bytes) -> None:
        """Take over what a record says of it."""
        _, self.size, self.chunk_bytes, self.crc = REFERENCE.unpack(reference)

    def __len__(self) -> int:
        return REFERENCE.size

    @property
    def chunks(self) -> int:
        """Return how many chunks the body has."""
        return -(-self.size // self.chunk_bytes)

    def chunk(self, number: int) -> bytes:
        """Return the bytes of one chunk. Raises CorruptionError, ClosedError, StoreFailedError."""
        expected = min(self.chunk_bytes, self.size - number * self.chunk_bytes)
        storage = self.bodies.storage
        self.bodies.require_open()
        try:
            found = storage.read(self.name, number, self.chunk_bytes)
        except OSError as error:
            path, offset = storage.place(self.name, number, self.chunk_bytes)
            raise CorruptionError(path, offset, f"the disk cannot read chunk {number} of a body: {error}") from error
        if len(found) == CRC.size + expected:
            data = found[CRC.size :]
            if CRC.unpack_from(found)[0] == crc32c(crc32c(0, self.name + _NUMBER.pack(number)), data):
                return data
        path, offset = storage.place(self.name, number, self.chunk_bytes)
        raise CorruptionError(
            path, offset,
            f"chunk {number} of a large body of {self.size} bytes is damaged or missing, from byte "
            f"{number * self.chunk_bytes} of the body on",
            "its message is whole; restore the file from a backup to have the body again",
        )  # fmt: skip

    def descriptor(self) -> int:
        """Return a descriptor of the body's file, to read from. Raises as `chunk`; ClosedError too where it is in no
        file."""
        self.bodies.require_open()
        storage = self.bodies.storage
        if not isinstance(storage, KeepsFiles):
            raise ClosedError("the body is in no file")
        return storage.descriptor(self.name)

    def copy_into(self, file: BinaryIO) -> None:
        """Write the body as it would be in a file of its own. Raises as `chunk`."""
        for number in range(self.chunks):
            file.seek(chunk_offset(number, self.chunk_bytes))
            file.write(chunk_of(self.name, number, self.chunk(number)))

    def verify(self) -> str | None:
        """Return what is wrong with the body, if anything. Reads all of it."""
        crc = 0
        try:
            for number in range(self.chunks):
                crc = crc32c(crc, self.chunk(number))
        except CorruptionError as error:
            return str(error)
        if crc != self.crc:
            return f"{self.bodies.storage.place(self.name, 0)[0]}: the CRC of the body is not what its message says"
        return None

    def open(self) -> BinaryIO:
        """Return a stream of the body's bytes, which can seek. Raises ClosedError."""
        self.bodies.require_open()
        return io.BufferedReader(LargeStream(self), 1 << 16)


def body_size(body: object) -> int:
    """Return how many bytes a body has; of a file that is not read yet, 0."""
    if isinstance(body, StoredBody):
        return body.size
    return len(body) if isinstance(body, bytes) else 0


class BodyRef(weakref.ref[StoredBody]):
    """Calls who is to know that nobody holds a body any more, with itself. Not a finalizer in Python: Ctrl-C may strike
    that anywhere, and is then lost, and so is what it had to do."""

    name = b""
    owned = False
    """The body goes with its object."""


class LargeStream(io.RawIOBase):
    """Reads a body. A chunk is verified before any byte of it is given out; one is held at a time. No file is open
    between two reads."""

    def __init__(self, body: StoredBody) -> None:
        super().__init__()
        self._body: StoredBody | None = body
        self._size = body.size
        self._at = 0
        self._number = -1
        self._chunk = memoryview(b"")
        body.bodies.streams.add(self)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        self._require_open()
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._require_open()
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}.get(whence)
        if start is None:
            raise ValueError(f"whence is 0, 1 or 2, not {whence!r}")
        if start + offset < 0:
            raise ValueError(f"a body has no byte {start + offset}")
        self._at = start + offset
        return self._at

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        body, view = self._require_open(), memoryview(buffer).cast("B")
        if self._at >= self._size or not len(view):
            return 0
        number, start = divmod(self._at, body.chunk_bytes)
        if number != self._number:
            self._chunk, self._number = memoryview(b""), -1  # first: at no time two of them are held
            self._chunk = memoryview(body.chunk(number))
            self._number = number
        part = self._chunk[start : start + len(view)]
        view[: len(part)] = part
        self._at += len(part)
        return len(part)

    def _require_open(self) -> StoredBody:
        body = self._body
        if body is None:
            raise ValueError("I/O operation on a closed stream")
        return body

    def close(self) -> None:
        self._chunk, self._body = memoryview(b""), None
        super().close()


def read_bytes(file: Readable, size: int) -> bytearray:
    """Return so many bytes, fewer at the end alone. Raises TypeError for what reads no bytes."""
    found = bytearray()
    while len(found) < size:
        data = file.read(size - len(found))
        if not isinstance(data, bytes | bytearray | memoryview):
            what = "it has nothing to read now, and does not wait" if data is None else "open it for reading bytes"
            raise TypeError(f"{file!r} reads {type(data).__name__} instead of bytes; {what}")
        if len(data) > size - len(found):
            raise ValueError(f"{file!r} was asked for {size - len(found)} bytes, and gave {len(data)}")
        if not data:
            break
        found += data
    return found


def require_size(size: object) -> None:
    """Raise TypeError or ValueError for what is no size of a body."""
    if not isinstance(size, int) or isinstance(size, bool):
        raise TypeError(f"size is a number of bytes, not {type(size).__name__}: {size!r}")
    if size < 0:
        raise ValueError(f"size is a number of bytes, not {size}")


def not_as_said(found: int, said: int, least: str = "") -> ValueError:
    """Return the error of a body that is not as long as was said."""
    return ValueError(f"the body has {least}{found} bytes, and size says {said}. Nothing was sent")
