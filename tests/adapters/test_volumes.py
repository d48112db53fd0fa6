"""Free space of disks is counted once for all that write there."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from anabranch.adapters.system import volumes
from anabranch.adapters.system.volumes import Volume, volume_of


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The file system has 1000 bytes free, and is not asked but here."""
    calls: list[Path] = []

    def statvfs(path: Path) -> SimpleNamespace:
        calls.append(path)
        return SimpleNamespace(f_bavail=10, f_frsize=100)

    monkeypatch.setattr("os.statvfs", statvfs)
    return calls


def test_all_directories_of_a_disk_are_one(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    first.mkdir()
    second.mkdir()
    assert volume_of(first) is volume_of(second)
    assert os.path.ismount(volume_of(first).path)
    with pytest.raises(FileNotFoundError):
        volume_of(tmp_path / "c")


def test_what_is_reserved_is_nobody_elses(tmp_path: Path, asked: list[Path]) -> None:
    volume = Volume(tmp_path)
    assert volume.free(0) == 1000
    first, second = volume.reserve(300), volume.reserve(200)
    assert volume.free(0) == 500
    first.release()
    assert volume.free(0) == 500  # it may have been written since
    volume._asked_at = -1e9
    assert volume.free(0) == 800
    del second
    volume._asked_at = -1e9
    assert volume.free(0) == 1000
    assert len(asked) == 3


def test_the_file_system_is_asked_rarely(tmp_path: Path, asked: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("anabranch.adapters.system.volumes.time.monotonic", lambda: now[0])
    volume = Volume(tmp_path)
    for _ in range(1000):
        volume.reserve(1).release()
        volume.free(0)
    assert len(asked) == 1
    for _ in range(1000):
        volume.free(1 << 40)
    assert len(asked) == 1
    volume.reserve(volumes.KNOWN_BYTES).release()
    volume.free(0)
    assert asked.pop()
    now[0] += volumes.ASKED_SECONDS
    volume.free(0)
    assert len(asked) == 1
    volume.free(1 << 40)
    assert len(asked) == 2
    now[0] += volumes.KNOWN_SECONDS
    volume.free(0)
    assert len(asked) == 3


def test_a_disk_that_does_not_say_is_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    volume = Volume(tmp_path)
    free = volume.free(0)

    def statvfs(path: Path) -> None:
        raise OSError("no")

    monkeypatch.setattr("os.statvfs", statvfs)
    volume._asked_at = -1e9
    assert volume.free(0) == free
