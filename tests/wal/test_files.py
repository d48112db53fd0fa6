"""A log's directory: what is published, released, pooled and removed."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from anabranch.adapters.wal import SegmentFiles, create_log
from anabranch.adapters.wal.files.archive import Archive
from anabranch.adapters.wal.files.file import FILL_MAX
from anabranch.adapters.wal.files.segment_files import read_header
from anabranch.policies.errors import CorruptionError

from .logs import LOG_ID, SEGMENT_BYTES
from .made import header_of


def nothing() -> None:
    """A seal of nobody's."""


def names(path: Path) -> list[str]:
    return sorted(one.name for one in path.iterdir())


def published(path: Path, *numbers: int) -> SegmentFiles:
    files = SegmentFiles(path, SEGMENT_BYTES)
    for number in numbers:
        file, _ = files.publish(header_of(number), nothing)
        os.ftruncate(file.fd, SEGMENT_BYTES)
    return files


def test_a_new_log_has_one_segment_and_a_watermark(tmp_path: Path) -> None:
    create_log(tmp_path / "log", LOG_ID, SEGMENT_BYTES)
    files = SegmentFiles(tmp_path / "log", SEGMENT_BYTES)
    (header,) = files.headers()
    assert (header.number, header.base_lsn, header.log_id) == (1, 1, LOG_ID)
    assert names(tmp_path / "log") == ["000000000001.seg", "watermark"]


def test_a_segment_is_seen_once_it_is_sealed(tmp_path: Path) -> None:
    files = SegmentFiles(tmp_path, SEGMENT_BYTES)
    seen: list[list[str]] = []
    files.publish(header_of(7), lambda: seen.append([one for one in names(tmp_path) if one.endswith(".seg")]))
    assert seen == [[]]
    assert read_header(files.path(7)) == header_of(7)
    assert [header.number for header in files.headers()] == [7]


def test_one_that_cannot_be_made_durable_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a file nor a hole in the pool, and nobody's seal."""
    files = SegmentFiles(tmp_path, SEGMENT_BYTES)
    files.prepare()
    pool, there = list(files.pool), names(tmp_path)

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patches:
        patches.setattr(os, "fsync", full)
        for header in (header_of(1), header_of(1, capacity=2 * SEGMENT_BYTES)):
            with pytest.raises(OSError, match="No space"):
                files.publish(header, lambda: pytest.fail("it is not there"))
    assert (files.pool, names(tmp_path)) == (pool, there)


def test_what_is_released_is_used_again(tmp_path: Path) -> None:
    files = published(tmp_path, 1, 2, 3, 4, 5)
    files.release([(1, SEGMENT_BYTES), (2, SEGMENT_BYTES)], 2, None, files.names())
    assert (len(files.reserve.files), names(tmp_path)[:2]) == (2, ["000000000003.seg", "000000000004.seg"])
    for path, _ in files.reserve.files:  # it lacked files, and had them first
        path.rename(tmp_path.with_name(path.name))
    files.release([(3, SEGMENT_BYTES), (4, SEGMENT_BYTES), (5, SEGMENT_BYTES)], 2, None, files.names())
    assert (len(files.pool), files.pool_bytes) == (2, 2 * SEGMENT_BYTES)
    assert names(tmp_path) == ["pool-1.free", "pool-2.free"]
    _, allocated = files.publish(header_of(6), nothing)
    assert (allocated, names(tmp_path)) == (SEGMENT_BYTES, ["000000000006.seg", "pool-1.free"])
    again = SegmentFiles(tmp_path, SEGMENT_BYTES)
    assert (again.load_pool(), len(again.pool)) == (3, 1)  # no number is used twice (rule I1)


def test_what_is_archived_is_kept(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    files = published(tmp_path / "log", 1, 2)
    files.release([(1, SEGMENT_BYTES)], 2, Archive(tmp_path / "archive"), files.names())
    assert (names(tmp_path / "archive"), names(tmp_path / "log")) == (["000000000001.seg"], ["000000000002.seg"])
    assert files.pool == []


@pytest.mark.parametrize(("missing", "pooled"), [(1, True), (FILL_MAX + 1, False)])
def test_one_that_is_short_is_filled_up_or_goes(tmp_path: Path, missing: int, pooled: bool) -> None:
    size = 2 * FILL_MAX
    files = SegmentFiles(tmp_path, size)
    file, _ = files.publish(header_of(1, capacity=size), nothing)
    os.ftruncate(file.fd, size - missing)
    files.reserve.keep(0, 0, 0)  # it lacks no file
    files.release([(1, size)], 1, None, files.names())
    assert [bytes_ for _, bytes_ in files.pool] == ([size] if pooled else [])
    assert [name for name in names(tmp_path) if not name.endswith(".spare")] == (["pool-1.free"] if pooled else [])


def test_what_was_interrupted_is_removed(tmp_path: Path) -> None:
    (tmp_path / "000000000009.tmp").write_bytes(b"half a header")
    (tmp_path / "pool-3.free").write_bytes(b"too short for the pool")
    files = published(tmp_path, 1)
    files.prepare()
    again = SegmentFiles(tmp_path, SEGMENT_BYTES)
    again.load_pool()
    again.clean()
    assert names(tmp_path) == ["000000000001.seg", "pool-1.free"]
    again.prepare()
    assert names(tmp_path) == ["000000000001.seg", "pool-1.free", "pool-4.free"]


def test_a_segment_of_another_number_is_damage(tmp_path: Path) -> None:
    files = published(tmp_path, 1)
    files.path(1).rename(files.path(2))
    with pytest.raises(CorruptionError, match="this is segment 1"):
        list(files.headers())


def test_a_directory_that_is_not_there_holds_nothing(tmp_path: Path) -> None:
    files = SegmentFiles(tmp_path / "none", SEGMENT_BYTES)
    assert (list(files.headers()), files.load_pool()) == ([], 0)
