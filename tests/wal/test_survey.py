"""Torn or corrupt, needed or released: what a survey decides, writing nothing."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from anabranch.adapters.wal import Checkpoint, CheckpointMismatchError, Kept, SegmentFiles, Survey, survey
from anabranch.policies.errors import CorruptionError

from .logs import LOG_ID, SEGMENT_BYTES, created, killed, newest, opened

BODIES = [f"{number:04d}".encode() * 700 for number in range(60)]


def surveyed(path: Path, checkpoint: Checkpoint | None = None) -> Survey:
    return survey(SegmentFiles(path, SEGMENT_BYTES), LOG_ID, checkpoint)


def content(path: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in path.iterdir()}


@pytest.fixture
def left(tmp_path: Path) -> Path:
    """By a kill: several segments, nothing marked in the last."""
    one = created(tmp_path / "log")
    one.write(*BODIES)
    copy = killed(one, tmp_path / "left")
    one.close()
    return copy


def test_it_writes_nothing(left: Path) -> None:
    before = content(left)
    found = surveyed(left)
    assert len(found.chain) > 2
    assert content(left) == before


def test_any_segment_that_is_missing_is_named(left: Path, tmp_path: Path) -> None:
    for segment in sorted(left.glob("*.seg")):
        data = segment.read_bytes()
        segment.unlink()
        with pytest.raises(CorruptionError, match=r"\.seg"):
            surveyed(left)
        segment.write_bytes(data)
    assert surveyed(left).chain


def test_a_torn_tail_is_cut_wherever_it_tore(left: Path, tmp_path: Path) -> None:
    segment = newest(left)
    whole = segment.read_bytes()
    used = len(whole.rstrip(b"\0"))
    ends = set()
    for cut in range(4096, used, 977):
        segment.write_bytes(whole[:cut] + bytes(len(whole) - cut))
        found = surveyed(left) if cut > 4096 + 2900 else None
        if found is not None:
            assert found.end.offset <= cut
            ends.add(found.end.lsn)
    assert len(ends) > 3


def test_a_log_of_somebody_else_is_refused(left: Path) -> None:
    with pytest.raises(CorruptionError, match="belongs to store"):
        survey(SegmentFiles(left, SEGMENT_BYTES), bytes(16))


def test_a_checkpoint_says_where_reading_begins_and_which_segments_there_are(left: Path) -> None:
    whole = surveyed(left)
    last, first = whole.chain[-1], whole.chain[0]
    assert first.end is not None
    kept = {first.number: Kept(first.end, first.last_lsn)}
    at = Checkpoint(last.base_lsn - 1, last.number, last.nonce, 4096, last.number, (0, 0), clean=False, kept=kept)
    found = surveyed(left, at)
    assert [segment.number for segment in found.older] == [first.number]
    assert [segment.number for segment in found.chain] == [last.number]
    assert {path.name for path in found.void} == {segment.path.name for segment in whole.chain[1:-1]}
    first.path.unlink()
    with pytest.raises(CorruptionError, match="is missing"):
        surveyed(left, at)
    assert surveyed(left, at._replace(kept={first.number: kept[first.number]._replace(required=False)})).older == []


def test_a_checkpoint_of_another_log_is_told_apart(left: Path) -> None:
    last = surveyed(left).chain[-1]
    at = Checkpoint(last.base_lsn - 1, last.number, last.nonce ^ 1, 4096, last.number, (0, 0), clean=False, kept={})
    with pytest.raises(CheckpointMismatchError):
        surveyed(left, at)


def test_numbers_that_were_used_are_not_used_again(left: Path) -> None:
    """Neither LSNs nor segment numbers (rule I1)."""
    before = surveyed(left)
    again = opened(left)
    assert again.log.tail.segment.number == before.highest_number + 1
    again.write(b"more")
    assert again.log.tail.lsn > before.highest_lsn
    again.close()
