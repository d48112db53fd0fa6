"""Where the next batch finds room."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from anabranch.adapters.system.files import zero_fill
from anabranch.policies.errors import StoreFullError

from .logs import SEGMENT_BYTES, created, opened


def test_a_large_record_is_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its room is taken without writing zeros first."""
    one = created(tmp_path / "log", pool_files=0)
    one.write(b"small")
    written = 0
    real = os.pwrite

    def counting(fd: int, data: Any, offset: int) -> int:
        nonlocal written
        size = real(fd, data, offset)
        written += size
        return size

    monkeypatch.setattr(os, "pwrite", counting)
    large = os.urandom(5 << 20)
    one.write(large)
    assert len(large) < written < len(large) + SEGMENT_BYTES
    one.write(b"after")
    one.close()
    assert opened(tmp_path / "log").held == [b"small", large, b"after"]


@pytest.mark.parametrize("system", ["takes it", "has no such call"])
def test_a_large_record_that_finds_no_room_is_refused_before_its_first_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, system: str
) -> None:
    one = created(tmp_path / "log", pool_files=0)
    one.write(b"small")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        if system == "takes it":
            patch.setattr(os, "posix_fallocate", full)
        else:
            patch.delattr(os, "posix_fallocate")
            patch.setattr("anabranch.adapters.system.files.write_all", full)
        with pytest.raises(StoreFullError, match="Nothing was written"):
            one.write(bytes(5 << 20))
    one.write(b"goes on")
    one.write(bytes(5 << 20))
    one.close()
    assert opened(tmp_path / "log").held == [b"small", b"goes on", bytes(5 << 20)]


def test_space_is_allocated_ahead(tmp_path: Path) -> None:
    """So that an append changes no file's size."""
    one = created(tmp_path / "log")
    one.write(b"first")
    segment = one.log.tail.segment
    size = segment.path.stat().st_size
    assert size == segment.allocated
    assert size > one.log.tail.offset
    one.write(b"second")
    assert segment.path.stat().st_size == size
    one.close()


def test_zero_fill_writes_zeros(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w+b") as file:
        zero_fill(file.fileno(), 10, 3 << 20)
        assert (tmp_path / "file").read_bytes() == bytes(3 << 20)
