"""Large bodies as files."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from anabranch.adapters.core.features.large import files as large_files
from anabranch.adapters.core.features.large.files import LargeFiles
from anabranch.adapters.core.record.large import NAMED_AT, chunk_of, named_by, start_of
from anabranch.policies.errors import OutOfDescriptorsError, StoreFailedError, StoreFullError

NAME = bytes(range(16))
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
