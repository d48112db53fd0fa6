"""Files of copies: whole and durable under their name, or not there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from anabranch.adapters.wal import format as w
from anabranch.adapters.wal.files.copies import RECORDS_MAX, CopiesWriter
from anabranch.adapters.wal.files.segment_files import SegmentFiles, read_header
from anabranch.adapters.wal.reader import BatchReader, records_of
from anabranch.adapters.wal.segment import Segment, SegmentTable
from anabranch.policies.compaction import BATCH_BYTES

LOG_ID = b"0123456789abcdef"


def begun(path: Path, number: int = 7, generation: int = 2) -> CopiesWriter:
    return CopiesWriter(SegmentFiles(path, 64 * 1024), LOG_ID, number, generation)


def test_it_reads_back_as_a_segment(tmp_path: Path) -> None:
    writer = begun(tmp_path)
    payloads = [bytes([n]) * size for n, size in enumerate((1, 0, BATCH_BYTES, 70_000, 5, 200_000, 9))]
    own = [writer.add(3, payload) for payload in payloads]
    copies = writer.finish()
    assert copies.path.name == "000000000007.copies"
    assert copies.path.stat().st_size == copies.end == copies.allocated == copies.capacity
    assert (copies.number, copies.generation, copies.counts) == (w.COPIES + 7, 2, False)
    reader = BatchReader(copies, w.HEADER_BYTES, copies.base_lsn - 1, copies.end)
    found = [record for batch in reader for record in records_of(batch)]
    assert [(r.lsn, r.offset, r.length) for r in found] == own
    assert [(r.kind, r.payload) for r in found] == [(3, payload) for payload in payloads]
    assert reader.offset == copies.end
    assert copies.last_lsn == found[-1].lsn == w.COPIES + 7 * RECORDS_MAX + 6
    again = Segment(read_header(copies.path), copies.path)
    assert (again.seed, again.base_lsn, again.generation) == (copies.seed, copies.base_lsn, 2)


def test_it_has_its_name_once_it_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    fsync = os.fsync

    def noting(fd: int) -> None:
        path = Path(f"/proc/self/fd/{fd}").readlink()
        done.append("directory" if path == tmp_path else path.name)
        fsync(fd)

    monkeypatch.setattr(os, "fsync", noting)
    writer = begun(tmp_path)
    writer.add(3, b"x")
    assert [path.name for path in tmp_path.iterdir()] == ["000000000007.copies.tmp"]
    writer.finish()
    assert done == ["000000000007.copies.tmp", "directory"]
    assert [path.name for path in tmp_path.iterdir()] == ["000000000007.copies"]


def test_what_is_given_up_leaves_nothing(tmp_path: Path) -> None:
    writer = begun(tmp_path)
    writer.add(3, b"x" * 100_000)
    writer.give_up()
    writer.give_up()
    assert not list(tmp_path.iterdir())


def test_it_takes_no_more_than_its_numbers_reach(tmp_path: Path) -> None:
    writer = begun(tmp_path)
    assert writer.takes(1 << 33)  # alone in its file, as it was in its segment
    writer.add(3, b"")
    assert not writer.takes(1 << 33)
    writer.count = RECORDS_MAX - 1
    assert not writer.takes(1)


def test_a_table_finds_what_is_in_it(tmp_path: Path) -> None:
    files = SegmentFiles(tmp_path, 64 * 1024)
    made = []
    for number in (7, 9):
        writer = begun(tmp_path, number)
        first, *_ = writer.add(3, b"")
        made.append((writer.finish(), first))
    table = SegmentTable((), [copies for copies, _ in made])
    for copies, first in made:
        assert table.find(first) is copies
        assert table.find(first - 1) is None
        assert table.find(first + 1) is None
    assert table.find(5) is None
    assert table.all == table.copies
    assert table.without({made[0][0].number}).copies == (made[1][0],)
    assert set(files.copies()) == {copies.number for copies, _ in made}
