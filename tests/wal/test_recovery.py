"""From reading to writing, and again after a crash in between."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from anabranch.adapters.wal import SegmentFiles, records, settle, survey

from .logs import LOG_ID, SEGMENT_BYTES, created, killed, opened

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
    files = SegmentFiles(left, SEGMENT_BYTES)
    found = survey(files, LOG_ID)
    settle(found, files)
    assert synced == [str(segment.path) for segment, start, end in found.unsynced if start < end]
    assert synced
    assert [record.payload for record in records(found)] == BODIES


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
