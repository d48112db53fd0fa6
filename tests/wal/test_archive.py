"""The archive's limits: the oldest segments go first, and nothing but segments."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import pytest

from anabranch.adapters.wal.files.archive import Archive


def filled(path: Path, sizes: list[int], ages: list[float] | None = None) -> Path:
    """Segments of these bytes, last written so many seconds ago."""
    place = path / "archive"
    archive = Archive(place)
    now = time.time()
    for number, size in enumerate(sizes, 1):
        segment = path / f"{number:012d}.seg"
        segment.write_bytes(bytes(size))
        if ages is not None:
            os.utime(segment, (now, now - ages[number - 1]))
        archive.take(segment)
    return place


def left(place: Path) -> list[int]:
    return sorted(int(path.stem) for path in place.glob("*.seg"))


def test_the_oldest_go_that_are_too_much(tmp_path: Path) -> None:
    place = filled(tmp_path, [100] * 5)
    (place / "notes.txt").write_text("mine" * 1000)
    Archive(place, max_bytes=250).trim()
    assert left(place) == [4, 5]
    assert (place / "notes.txt").exists()
    Archive(place, max_bytes=250).trim()
    assert left(place) == [4, 5]
    Archive(place, max_bytes=50).trim()
    assert left(place) == []


def test_those_that_are_too_old_go(tmp_path: Path) -> None:
    place = filled(tmp_path, [10] * 4, [9000.0, 50.0, 8000.0, 10.0])
    Archive(place, max_age=3600.0).trim()
    assert left(place) == [2, 4]


def test_without_limits_all_stays(tmp_path: Path) -> None:
    place = filled(tmp_path, [10] * 3, [1e9] * 3)
    Archive(place).trim()
    assert left(place) == [1, 2, 3]


def test_a_directory_that_is_not_there_is_empty(tmp_path: Path) -> None:
    Archive(tmp_path / "none", max_bytes=1).trim()
    assert not (tmp_path / "none").exists()


def test_what_cannot_be_removed_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    place = filled(tmp_path, [100] * 3)

    unlink = Path.unlink

    def refuse(self: Path, missing_ok: bool = False) -> None:
        if self.stem.endswith("1"):
            raise PermissionError(13, "no", str(self))
        unlink(self)

    monkeypatch.setattr(Path, "unlink", refuse)
    Archive(place, max_bytes=150).trim()
    assert left(place) == [1]
    assert "000000000001.seg stays in the archive beyond its limits" in caplog.text


def test_on_another_disk_it_is_there_before_it_is_here_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a link that lies there is replaced, not written through."""
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    (tmp_path / "archive").mkdir()
    (tmp_path / "archive/000000000002.seg").symlink_to(victim)
    rename = Path.rename

    def across(self: Path, target: Path) -> Path:
        if self.parent != target.parent:
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), str(self))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", across)
    place = filled(tmp_path, [100, 200], [7000.0, 10.0])
    assert [path.name for path in sorted(place.iterdir())] == ["000000000001.seg", "000000000002.seg"]
    assert [path.stat().st_size for path in sorted(place.iterdir())] == [100, 200]
    assert not list(tmp_path.glob("*.seg"))
    assert victim.read_bytes() == b"precious"
    Archive(place, max_age=3600.0).trim()
    assert left(place) == [2]
