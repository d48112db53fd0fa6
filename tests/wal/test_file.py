"""One open file: it closes itself, and its space is allocated ahead."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest

from anabranch.adapters.system.files import allocate, zero_fill
from anabranch.adapters.wal.files.file import FILL_MAX, File

FLAGS = os.O_RDWR | os.O_CREAT


def test_it_is_open_until_its_last_user_lets_go(tmp_path: Path) -> None:
    """Whatever becomes of its name."""
    file = File(tmp_path / "a", FLAGS)
    fd = file.fd
    os.write(fd, b"kept")
    other = file
    (tmp_path / "a").unlink()
    del file
    gc.collect()
    assert os.pread(other.fd, 4, 0) == b"kept"
    del other
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_one_that_cannot_be_opened_leaves_nothing_to_close(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        File(tmp_path / "nowhere" / "a", FLAGS)
    gc.collect()


def test_zeros_go_where_they_are_asked_for(tmp_path: Path) -> None:
    file = File(tmp_path / "a", FLAGS)
    os.write(file.fd, b"x" * 10)
    zero_fill(file.fd, 5, FILL_MAX + 7)
    assert os.fstat(file.fd).st_size == FILL_MAX + 7
    assert os.pread(file.fd, 20, 0) == b"x" * 5 + bytes(15)
    assert os.pread(file.fd, 20, FILL_MAX) == bytes(7)


@pytest.mark.parametrize("by_the_system", [True, False])
def test_allocated_space_keeps_what_is_there(
    tmp_path: Path, by_the_system: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not by_the_system:
        monkeypatch.delattr(os, "posix_fallocate", raising=False)
    file = File(tmp_path / "a", FLAGS)
    os.write(file.fd, b"kept")
    allocate(file.fd, 4, 100_000)
    status = os.fstat(file.fd)
    assert (status.st_size, os.pread(file.fd, 4, 0)) == (100_000, b"kept")
    assert status.st_blocks * 512 >= 96_000
