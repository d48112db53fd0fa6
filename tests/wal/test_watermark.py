"""A lost newest segment, or its records, is never silence (rules J4, J7)."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from anabranch.adapters.wal import format as w
from anabranch.adapters.wal import log
from anabranch.adapters.wal.files.watermark import NAME, PAGE_BYTES, Watermark, WatermarkFile
from anabranch.policies.errors import CorruptionError

from .logs import LOG_ID, created, killed, newest, opened

BODIES = [f"{number:04d}".encode() * 700 for number in range(60)]
"""More than one segment."""


def wiped(segment: Path) -> None:
    """Only its header is left."""
    data = segment.read_bytes()
    segment.write_bytes(data[: w.HEADER_BYTES] + bytes(len(data) - w.HEADER_BYTES))


def last_page_wiped(segment: Path) -> None:
    """The page that holds its last batch, and the mark behind that, is zeros."""
    data = segment.read_bytes()
    used = len(data.rstrip(b"\0"))
    start = (used - 1) // PAGE_BYTES * PAGE_BYTES
    segment.write_bytes(data[:start] + bytes(len(data) - start))


LOSSES: dict[str, Callable[[Path], None]] = {
    "gone": Path.unlink,
    "wiped": wiped,
    "its last page wiped": last_page_wiped,
}


@pytest.mark.parametrize("lost", LOSSES)
@pytest.mark.parametrize("state", ["closed", "killed after a mark"])
def test_a_newest_segment_that_lost_what_was_on_disk_is_named(tmp_path: Path, lost: str, state: str) -> None:
    one = created(tmp_path / "log")
    one.write(*BODIES)
    one.log._mark()
    left = killed(one, tmp_path / "killed")
    one.close()
    if state == "closed":
        left = tmp_path / "log"
    shutil.copytree(left, tmp_path / "whole")
    assert opened(tmp_path / "whole").held == BODIES
    LOSSES[lost](newest(left))
    with pytest.raises(CorruptionError):
        opened(left)


def test_a_segment_that_is_gone_before_anything_in_it_was_marked_is_named(tmp_path: Path) -> None:
    one = created(tmp_path / "log")
    one.write(*BODIES)
    assert len(one.log.table.segments) > 2
    left = killed(one, tmp_path / "left")
    newest(left).unlink()
    with pytest.raises(CorruptionError, match="is missing, and records that count may have been in it"):
        opened(left)
    one.close()


def test_what_was_never_marked_may_be_cut_and_the_log_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing vouches for the last batches of a killed process but themselves."""
    monkeypatch.setattr(log, "IDLE_SECONDS", 3600.0)
    one = created(tmp_path / "log")
    one.write(b"a", b"b")
    left = killed(one, tmp_path / "left")
    one.close()
    segment = newest(left)
    data = bytearray(segment.read_bytes())
    data[len(bytes(data).rstrip(b"\0")) - 1] ^= 1
    segment.write_bytes(data)
    again = opened(left)
    assert again.held == [b"a"]
    again.write(b"c")
    again.close()
    assert opened(left).held == [b"a", b"c"]


@pytest.mark.parametrize("page", [0, 1])
def test_half_of_it_may_be_torn_by_a_power_failure(tmp_path: Path, page: int) -> None:
    file = WatermarkFile(tmp_path, LOG_ID)
    marks = [Watermark(3, lsn, 7) for lsn in (10, 20)]
    for mark in marks:
        file.write(mark)
    path = tmp_path / NAME
    data = bytearray(path.read_bytes())
    data[page * PAGE_BYTES + 40] ^= 1
    path.write_bytes(data)
    again = WatermarkFile(tmp_path, LOG_ID)
    assert again.read() == marks[1 - page]
    again.write(Watermark(3, 30, 7))  # over the half that says nothing
    assert WatermarkFile(tmp_path, LOG_ID).read() == Watermark(3, 30, 7)
    data = bytearray(path.read_bytes())
    assert bytes(data[(1 - page) * PAGE_BYTES :][:8]) == b"ANBRMARK"


@pytest.mark.parametrize("damage", ["gone", "empty", "zeros", "another log's", "a directory"])
def test_without_it_a_whole_log_opens(tmp_path: Path, damage: str) -> None:
    """It is there to find damage, not to make it."""
    one = created(tmp_path / "log")
    one.write(*BODIES)
    one.close()
    path = tmp_path / "log" / NAME
    path.unlink()
    if damage == "empty":
        path.touch()
    elif damage == "zeros":
        path.write_bytes(bytes(2 * PAGE_BYTES))
    elif damage == "another log's":
        WatermarkFile(tmp_path / "log", b"another log's id").write(Watermark(99, 10**6, 1))
    elif damage == "a directory":
        path.mkdir()
    again = opened(tmp_path / "log")
    assert again.held == BODIES
    again.write(b"more")
    again.close()
    assert opened(tmp_path / "log").held == [*BODIES, b"more"]
    if damage != "a directory":
        newest(tmp_path / "log").unlink()
        with pytest.raises(CorruptionError):
            opened(tmp_path / "log")


def test_it_costs_a_send_nothing(tmp_path: Path) -> None:
    """It is written at roll-over, at a mark and at close."""
    one = created(tmp_path / "log")
    before = (tmp_path / "log" / NAME).read_bytes()
    one.write(b"1", b"2", b"3")
    assert (tmp_path / "log" / NAME).read_bytes() == before
    one.close()
    assert (tmp_path / "log" / NAME).read_bytes() != before
