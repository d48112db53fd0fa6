"""What is put in the place of what does not read back."""

from __future__ import annotations

from pathlib import Path

import pytest

from anabranch.adapters.wal import format as w
from anabranch.adapters.wal.files.segment_files import read_header
from anabranch.adapters.wal.reader import Batch, BatchReader, records_of
from anabranch.adapters.wal.recovery.stretch import Stretch, lost_record
from anabranch.adapters.wal.segment import Segment

from .logs import created

PAYLOADS = [bytes([65 + number]) * (30 + 7 * number) for number in range(6)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A segment of six batches, each of one record."""
    log = created(tmp_path / "log")
    log.write(*PAYLOADS)
    log.close()
    return next((tmp_path / "log").glob("*.seg"))


def batches(path: Path) -> list[Batch]:
    header = read_header(path)
    return list(BatchReader(Segment(header, path), w.HEADER_BYTES, header.base_lsn - 1))


def mended(path: Path, start: int, end: int, first: int, last: int) -> tuple[list[tuple[int, int, bytes]], list[int]]:
    """LSN, kind and payload of all records once a stretch was mended; the LSNs that are lost."""
    data, losses = Stretch(Segment(read_header(path), path), start, end, first, last).mend(0)
    content = bytearray(path.read_bytes())
    content[start : start + len(data)] = data
    path.write_bytes(content)
    records = [record for batch in batches(path) for record in records_of(batch)]
    lost = [lsn for loss in losses for lsn in range(loss.first_lsn, loss.last_lsn + 1)]
    return [(record.lsn, record.kind, record.payload) for record in records], lost


def zeroed(path: Path, start: int, end: int) -> None:
    content = bytearray(path.read_bytes())
    content[start:end] = bytes(end - start)
    path.write_bytes(content)


def test_a_record_that_is_damaged_is_lost_alone(path: Path) -> None:
    found = batches(path)
    zeroed(path, found[2].offset + w.BATCH_HEADER.size + 25, found[2].offset + w.BATCH_HEADER.size + 26)
    records, lost = mended(path, found[2].offset, found[2].end, 3, 3)
    assert lost == [3]
    assert [(lsn, kind) for lsn, kind, _ in records] == [(1, 1), (2, 1), (3, w.LOST), (4, 1), (5, 1), (6, 1)]


def test_a_batchs_header_that_is_damaged_costs_nothing(path: Path) -> None:
    found = batches(path)
    zeroed(path, found[2].offset, found[2].offset + w.BATCH_HEADER.size)
    records, lost = mended(path, found[2].offset, found[2].end, 3, 3)
    assert lost == []
    assert [payload for _, _, payload in records] == PAYLOADS


def test_of_several_batches_all_that_is_whole_stays(path: Path) -> None:
    """Two headers and the record between them are gone."""
    found = batches(path)
    zeroed(path, found[1].offset, found[2].offset + w.BATCH_HEADER.size)
    zeroed(path, found[3].offset, found[3].offset + 4)
    records, lost = mended(path, found[1].offset, found[4].offset, 2, 4)
    assert lost == [2]
    assert [payload for _, kind, payload in records if kind == 1] == [PAYLOADS[0], *PAYLOADS[2:]]


def test_a_file_that_was_cut_short_is_long_enough_again(path: Path) -> None:
    found = batches(path)
    content = path.read_bytes()
    path.write_bytes(content[: found[4].offset + 10])
    records, lost = mended(path, found[4].offset, found[5].end, 5, 6)
    assert lost == [5, 6]
    assert [lsn for lsn, _, _ in records] == [1, 2, 3, 4, 5, 6]


def test_a_lost_record_is_as_long_as_it_is_asked_to_be() -> None:
    for size in (w.RECORD_HEADER.size, 100):
        assert len(lost_record(1, 4096, 7, size)) == size
