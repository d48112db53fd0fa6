"""Reading batches in order, and what ends it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.adapters.wal import format as w
from anabranch.adapters.wal.reader import BatchReader
from anabranch.adapters.wal.segment import Segment

from .made import batch_of, header_of


class TestReading:
    def read(self, path: Path, header: w.SegmentHeader, data: bytes) -> BatchReader:
        path.write_bytes(header.encode() + data)
        return BatchReader(Segment(header, path), w.HEADER_BYTES, header.base_lsn - 1)

    def test_batches_follow_each_other(self, tmp_path: Path) -> None:
        header = header_of(base_lsn=7)
        one = batch_of(header.seed, 4096, 7, [b"a", b"bc"], watermark=6)
        mark = batch_of(header.seed, 4096 + len(one), 9, [], watermark=8)
        two = batch_of(header.seed, 4096 + len(one) + len(mark), 9, [b""])
        reader = self.read(tmp_path / "s", header, one + mark + two + bytes(1000))
        assert [(b.offset, b.header.base_lsn, b.last_lsn, b.header.watermark) for b in reader] == [
            (4096, 7, 8, 6), (4096 + len(one), 9, 8, 8), (4096 + len(one) + len(mark), 9, 9, 0)
        ]  # fmt: skip
        assert (reader.offset, reader.lsn) == (4096 + len(one + mark + two), 9)

    @given(data=st.data())
    def test_damage_ends_the_reading_before_its_batch(
        self, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
    ) -> None:
        header = header_of()
        batches, at, lsn = [], w.HEADER_BYTES, 1
        for _ in range(3):
            payloads = data.draw(st.lists(st.binary(max_size=30), min_size=1, max_size=3))
            batches.append(batch_of(header.seed, at, lsn, payloads))
            at += len(batches[-1])
            lsn += len(payloads)
        whole = bytearray(b"".join(batches))
        bit = data.draw(st.integers(0, len(whole) * 8 - 1))
        whole[bit // 8] ^= 1 << bit % 8
        ends = [len(b"".join(batches[: n + 1])) for n in range(3)]
        good = sum(end <= bit // 8 for end in ends)
        path = tmp_path_factory.mktemp("damage") / "s"
        reader = self.read(path, header, bytes(whole))
        assert len(list(reader)) == good
        found = list(reader.headers_beyond())
        assert len(found) >= 3 - good - 1, "what lies behind the damage is found again"

    def test_headers_are_found_over_window_boundaries(self, tmp_path: Path) -> None:
        header = header_of()
        for gap in (1, 2, 3, (1 << 20) - 5, (1 << 20) - 3, (1 << 20) - 1, (1 << 20), (1 << 20) + 1):
            offset = w.HEADER_BYTES + gap
            data = bytes(gap) + batch_of(header.seed, offset, 5, [b"x"])
            found = list(self.read(tmp_path / "s", header, data).headers_beyond())
            assert [(h.base_lsn, h.count) for h in found] == [(5, 1)], gap

    def test_a_body_that_holds_a_journal_is_a_body(self, tmp_path: Path) -> None:
        header = header_of()
        inner = batch_of(header.seed, 4096, 2, [b"inner"])  # right for its store, wrong for its place
        outer = batch_of(header.seed, 4096, 1, [inner * 3])
        reader = self.read(tmp_path / "s", header, outer)
        assert [batch.header.count for batch in reader] == [1]
        broken = bytearray(outer)
        broken[40] ^= 1
        reader = self.read(tmp_path / "s", header, bytes(broken))
        assert list(reader) == []
        assert [header.length for header in reader.headers_beyond()] == [len(outer) - w.BATCH_HEADER.size]

    def test_an_lsn_out_of_sequence_ends_the_reading(self, tmp_path: Path) -> None:
        header = header_of()
        one = batch_of(header.seed, 4096, 1, [b"x"])
        assert (
            len(list(self.read(tmp_path / "s", header, one + batch_of(header.seed, 4096 + len(one), 3, [b"x"])))) == 1
        )
