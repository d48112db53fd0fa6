"""From reading to writing, and again after a crash in between."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from anabranch.adapters.wal import SegmentFiles, records, settle, survey
from anabranch.adapters.wal.files.file import File

from .logs import LOG_ID, SEGMENT_BYTES, created, killed, newest, opened

BODIES = [f"{number:04d}".encode() * 700 for number in range(40)]


def test_what_is_shown_is_on_disk_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a kill the page cache may hold what the disk does not (rule J5)."""
    one = created(tmp_path / "log")
    one.write(*BODIES)
    left = killed(one, tmp_path / "left")
    one.close()
    synced: list[str] = []
    real = os.fdatasync

    def watched(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))  # noqa: PTH115
        real(fd)

    monkeypatch.setattr(os, "fdatasync", watched)
    names = names_synced(monkeypatch)
    files = SegmentFiles(left, SEGMENT_BYTES)
    found = survey(files, LOG_ID)
    settle(found, files)
    assert synced == [str(segment.path) for segment, start, end in found.unsynced if start < end]
    assert synced
    assert names == [str(left)], "and before a file of the pool, whose name may be another on disk, is written to"
    assert [record.payload for record in records(found)] == BODIES


def names_synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The directories whose names are synced from now on."""
    synced: list[str] = []
    real = os.fsync

    def watched(fd: int) -> None:
        path = os.readlink(f"/proc/self/fd/{fd}")  # noqa: PTH115
        if Path(path).is_dir():
            synced.append(path)
        real(fd)

    monkeypatch.setattr(os, "fsync", watched)
    return synced


def test_the_log_goes_on_in_a_segment_whose_name_is_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill comes between the rename of a segment and the sync of its name; then power fails."""
    one = created(tmp_path / "log")
    left, names = tmp_path / "left", []
    rename, sync_names = Path.rename, SegmentFiles.sync_names

    def renamed(path: Path, target: Path) -> Path:
        if target.suffix == ".seg":
            names.append((path.name, target.name))
        return rename(path, target)

    def kill(files: SegmentFiles, directory: File) -> None:
        shutil.copytree(files.directory, left, ignore=shutil.ignore_patterns("*.tmp"))
        sync_names(files, directory)

    with monkeypatch.context() as patches:
        patches.setattr(Path, "rename", renamed)
        patches.setattr(SegmentFiles, "sync_names", kill)
        for body in BODIES:
            if not names:
                one.write(body)
    one.close()
    ((before, after),) = names
    synced = names_synced(monkeypatch)
    again = opened(left)
    assert newest(left).name == after, "it is empty, and used"
    again.write(b"acked")
    last = killed(again, tmp_path / "last")
    again.close()
    if str(left) not in synced:
        (last / after).rename(last / before)
    found = opened(last)
    found.close()
    assert found.held == [*again.held, b"acked"]


def test_a_recovery_that_is_interrupted_is_done_again(tmp_path: Path) -> None:
    one = created(tmp_path / "log")
    one.write(*BODIES)
    left = killed(one, tmp_path / "left")
    one.close()
    for attempt in range(3):
        again = opened(left)
        assert again.held == BODIES
        left = killed(again, tmp_path / f"left-{attempt}")
        again.close()
    segments = len(list(left.glob("*.seg")))
    again = opened(left)
    again.close()
    assert len(list(left.glob("*.seg"))) == segments, "an empty recovery segment is used again"


def test_what_an_interrupted_creation_left_goes_away(tmp_path: Path) -> None:
    one = created(tmp_path / "log")
    one.write(b"kept")
    one.close()
    (tmp_path / "log" / "000000000009.tmp").write_bytes(b"half")
    shutil.copy(next((tmp_path / "log").glob("*.seg")), tmp_path / "log" / "pool-7.free")
    os.truncate(tmp_path / "log" / "pool-7.free", 100)
    again = opened(tmp_path / "log")
    assert again.held == [b"kept"]
    assert not list((tmp_path / "log").glob("*.tmp"))
    assert not (tmp_path / "log" / "pool-7.free").exists()
    again.close()
