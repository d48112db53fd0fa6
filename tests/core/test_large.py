"""The bytes of a large body, and the stream of them."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import pytest

from anabranch.adapters.core.features.large.files import LargeFiles
from anabranch.adapters.core.record.large import (
    CHUNK_BYTES,
    NAMED_AT,
    NEVER,
    REFERENCE,
    START_BYTES,
    BodyRef,
    Kept,
    StoredBody,
    body_size,
    chunk_of,
    named_by,
    read_start,
    start_of,
)
from anabranch.policies.errors import CorruptionError

NAME = bytes(range(16))
OTHER = bytes(range(1, 17))


class _Bodies:
    """Of a store that is always open."""

    def __init__(self, directory: Path) -> None:
        self.storage = LargeFiles("a", directory)
        self.streams: set[object] = set()

    def require_open(self) -> None:
        """It is."""


@pytest.fixture
def bodies(tmp_path: Path) -> Any:
    return _Bodies(tmp_path)


def written(bodies: Any, content: bytes, chunk_bytes: int = 100) -> StoredBody:
    """A body whose chunks are so small; in a file each has the room of a whole one."""
    body = StoredBody(bodies, NAME, len(content), chunk_bytes)
    bodies.storage.begin(NAME, start_of(NAME, 0))
    for number in range(body.chunks):
        data = content[number * chunk_bytes : (number + 1) * chunk_bytes]
        bodies.storage.append(NAME, number, chunk_of(NAME, number, data), chunk_bytes)
    bodies.storage.publish(NAME, sync=False)
    return body


def test_a_start_says_its_name_and_who_names_the_body() -> None:
    start = start_of(NAME, 7)
    assert len(start) == START_BYTES
    assert read_start(NAME, start) == Kept(NAME, 7, 0, 0)
    noted = start[:NAMED_AT] + named_by(3, 99) + start[NAMED_AT + 16 :]
    assert read_start(NAME, noted) == Kept(NAME, 7, 3, 99)
    assert read_start(NAME, start_of(NAME, NEVER)) == Kept(NAME, NEVER, 0, 0)


def test_a_start_that_is_damaged_or_another_says_nothing() -> None:
    start = start_of(NAME, 7)
    assert read_start(OTHER, start) is None
    assert read_start(NAME, start[:-1]) is None
    for at in range(NAMED_AT):
        assert read_start(NAME, start[:at] + bytes([start[at] ^ 1]) + start[at + 1 :]) is None
    noted = start[:NAMED_AT] + named_by(3, 99) + start[NAMED_AT + 16 :]
    for at in range(NAMED_AT, NAMED_AT + 16):  # half written
        torn = noted[:at] + bytes([noted[at] ^ 1]) + noted[at + 1 :]
        assert read_start(NAME, torn) == Kept(NAME, 7, 0, 0)


def test_a_stream_reads_and_seeks_over_its_chunks(bodies: Any) -> None:
    content = os.urandom(1050)
    body = written(bodies, content)
    assert (body.chunks, body_size(body), body_size(b"abc"), body_size(object())) == (11, 1050, 3, 0)
    with body.open() as stream:
        assert stream.readable()
        assert stream.seekable()
        assert stream.read() == content
        for at in (0, 99, 100, 101, 555, 1049, 1050, 2000):
            stream.seek(at)
            assert stream.read(250) == content[at : at + 250]
        assert stream.seek(-10, io.SEEK_END) == 1040
        with pytest.raises((ValueError, OSError)):
            stream.seek(-1)
    with pytest.raises(ValueError, match="closed"):
        stream.read()


def test_a_stream_may_be_read_as_it_comes(bodies: Any) -> None:
    body = written(bodies, b"abc" * 100)
    stream: Any = body.open()
    raw = stream.raw
    buffer = bytearray(1000)
    assert raw.readinto(buffer) == 100, "a chunk at a time"
    assert (raw.tell(), raw.seek(5, io.SEEK_CUR)) == (100, 105)
    assert raw.readinto(bytearray()) == 0
    with pytest.raises(ValueError, match="whence"):
        raw.seek(0, 7)
    with pytest.raises(ValueError, match="no byte -1"):
        raw.seek(-1)
    raw.close()
    with pytest.raises(ValueError, match="closed"):
        raw.tell()


def test_damage_names_the_file_and_the_offset(bodies: Any) -> None:
    body = written(bodies, os.urandom(350))
    path, offset = bodies.storage.place(NAME, 2, 100)
    assert body.verify() == f"{path}: the CRC of the body is not what its message says", "it was never told"
    data = bytearray(Path(path).read_bytes())
    data[offset + 50] ^= 1
    Path(path).write_bytes(data)
    assert body.chunk(1)
    with pytest.raises(CorruptionError) as error:
        body.chunk(2)
    assert (error.value.path, error.value.offset) == (path, offset)
    assert "from byte 200 of the body on" in str(body.verify())
    with body.open() as stream, pytest.raises(CorruptionError):
        stream.read()
    Path(path).write_bytes(data[: offset + 10])
    with pytest.raises(CorruptionError, match="damaged or missing"):
        body.chunk(2)
    Path(path).unlink()
    with pytest.raises(CorruptionError, match="damaged or missing"):
        body.chunk(0)


def test_a_chunk_of_another_body_or_place_does_not_pass(bodies: Any) -> None:
    content = os.urandom(200)
    body = written(bodies, content)
    path, first = bodies.storage.place(NAME, 0)
    _, second = bodies.storage.place(NAME, 1, 100)
    data = bytearray(Path(path).read_bytes())
    for chunk in (chunk_of(NAME, 1, content[:100]), chunk_of(OTHER, 0, content[:100])):
        data[first : first + len(chunk)] = chunk
        Path(path).write_bytes(data)
        with pytest.raises(CorruptionError):
            body.chunk(0)
    assert second - first == 104
    assert body.chunk(1) == content[100:]


def test_golden_bytes() -> None:
    """A changed one is another version of the format (docs/format.md)."""
    start = start_of(NAME, 7)
    noted = start[:NAMED_AT] + named_by(3, 99) + start[NAMED_AT + 16 :]
    assert noted.hex() == (
        "41426c6201000000000102030405060708090a0b0c0d0e0f0700000000000000"
        "f5bb0f20030000006300000000000000cfe0b6b4000000000000000000000000"
    )
    assert chunk_of(NAME, 2, b"chunk").hex() == "392dd0746368756e6b"
    assert REFERENCE.pack(NAME, 5, CHUNK_BYTES, 9).hex() == (
        "000102030405060708090a0b0c0d0e0f05000000000000000000100009000000"
    )


def test_what_goes_is_told(bodies: Any) -> None:
    told: list[object] = []
    body = StoredBody(bodies, NAME)
    assert len(body) == REFERENCE.size
    ref = BodyRef(body, told.append)
    assert (ref() is body, ref.name, ref.owned) == (True, b"", False)
    del body
    assert told == [ref]
