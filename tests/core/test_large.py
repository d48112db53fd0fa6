"""Large bodies, and their files."""

from __future__ import annotations

import errno
import io
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from anabranch.adapters.core.features.large import files as large_files
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
from anabranch.policies.errors import CorruptionError, OutOfDescriptorsError, StoreFailedError, StoreFullError

# The bytes of a large body, and the stream of them


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


# Large bodies as files


CHUNK = chunk_of(NAME, 0, b"chunk")


@pytest.fixture
def files(tmp_path: Path) -> LargeFiles:
    return LargeFiles("a", tmp_path)


def write(files: LargeFiles, sync: bool = True) -> None:
    files.begin(NAME, start_of(NAME, 0))
    files.append(NAME, 0, CHUNK, 100)
    files.publish(NAME, sync)


def names(files: LargeFiles) -> list[str]:
    return sorted(path.name for path in files.directory.iterdir()) if files.directory.exists() else []


def test_a_body_is_a_file_of_its_name(files: LargeFiles) -> None:
    assert list(files.kept()) == []
    assert names(files) == []
    files.begin(NAME, start_of(NAME, 0))
    assert names(files) == [f"{NAME.hex()}.part"]
    assert list(files.kept()) == [(NAME, None)]
    files.append(NAME, 0, CHUNK, 100)
    files.publish(NAME, sync=True)
    assert names(files) == [f"{NAME.hex()}.body"]
    assert list(files.kept()) == [(NAME, start_of(NAME, 0))]
    assert (files.read(NAME, 0, 100), files.read(NAME, 1, 100)) == (CHUNK, b"")
    files.note(NAME, named_by(1, 2), sync=True)
    ((_, start),) = files.kept()
    assert start is not None
    assert start[NAMED_AT : NAMED_AT + 16] == named_by(1, 2)
    files.remove(NAME)
    files.remove(NAME)
    assert (names(files), files.read(NAME, 0, 100)) == ([], b"")
    files.note(NAME, named_by(1, 2), sync=False)


def test_the_directory_of_another_is_not_trusted_to_be_durable(
    files: LargeFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread has just made it, and not synced its name yet: without that a power failure takes the body with
    it, whose message is synced (rule B5)."""
    files.directory.mkdir()
    synced: list[Path] = []
    monkeypatch.setattr(large_files, "sync_directory", synced.append)
    write(files)
    assert synced == [files.directory, files.directory.parent]
    files.remove(NAME)
    write(files)
    assert synced[2:] == [files.directory]


def test_its_files_have_the_mode_of_the_store(tmp_path: Path) -> None:
    files = LargeFiles("a", tmp_path, 0o640)
    write(files)
    (path,) = files.directory.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert stat.S_IMODE(files.directory.stat().st_mode) == 0o750


def test_what_is_none_of_ours_stays(files: LargeFiles) -> None:
    write(files)
    for name in ("notes.txt", "zz.body", "00.part"):
        (files.directory / name).write_text("mine")
    assert [name for name, _ in files.kept()] == [NAME]
    assert len(names(files)) == 4


@pytest.mark.parametrize(
    ("number", "error"),
    [
        (errno.ENOSPC, StoreFullError),
        (errno.EMFILE, OutOfDescriptorsError),
        (errno.EIO, StoreFailedError),
    ],
)
@pytest.mark.parametrize("call", ["open_file", "write_all", "sync_directory", "os.fsync"])
def test_what_the_disk_refuses_leaves_nothing(
    files: LargeFiles, monkeypatch: pytest.MonkeyPatch, number: int, error: type[Exception], call: str
) -> None:
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    files.directory.mkdir()
    monkeypatch.setattr(*((os, "fsync", fail) if call == "os.fsync" else (large_files, call, fail)))
    with pytest.raises(error, match="Nothing was sent"):
        write(files)
    monkeypatch.undo()
    assert names(files) == []
    write(files)
    assert names(files) == [f"{NAME.hex()}.body"]


def test_a_note_that_must_last_says_so_if_it_does_not(files: LargeFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    write(files)

    def failing(number: int) -> Callable[..., None]:
        def fail(*_: object) -> None:
            raise OSError(number, os.strerror(number))

        return fail

    for number, error in ((errno.ENOSPC, StoreFullError), (errno.EIO, StoreFailedError)):
        monkeypatch.setattr(large_files, "write_all", failing(number))
        files.note(NAME, named_by(0, 0), sync=False)
        with pytest.raises(error, match="Nothing was sent"):
            files.note(NAME, named_by(0, 0), sync=True)


def test_closing_it_closes_what_is_being_written(files: LargeFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    files.begin(NAME, start_of(NAME, 0))
    fd = files._writing[NAME]
    files.close()
    files.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
