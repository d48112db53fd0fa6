"""What a segment counts, and how the table finds it."""

from __future__ import annotations

from pathlib import Path

from anabranch.adapters.wal.segment import Segment, SegmentTable

from .made import header_of


class TestSegments:
    def test_a_segment_counts_its_dead(self) -> None:
        segment = Segment(header_of(base_lsn=100), Path("x"))
        for _ in range(3):
            segment.add_live(50)
        segment.remove_live(101, 50)
        segment.remove_live(2000, 50)
        assert (segment.live, segment.live_bytes) == (1, 50)
        assert [lsn for lsn in range(100, 2100) if segment.is_dead(lsn)] == [101, 2000]
        assert not segment.is_dead(10**6)

    def test_a_table_finds_the_segment_of_an_lsn(self) -> None:
        segments = [Segment(header_of(number, base), Path(str(number))) for number, base in ((1, 1), (2, 50), (5, 90))]
        segments[0].end, segments[0].last_lsn = 5000, 40
        segments[1].end, segments[1].last_lsn = 5000, 89
        table = SegmentTable(segments)
        found = {lsn: table.find(lsn) for lsn in (0, 1, 40, 41, 49, 50, 89, 90, 10**9)}
        assert {lsn: segment.number if segment else None for lsn, segment in found.items()} == {
            0: None, 1: 1, 40: 1, 41: None, 49: None, 50: 2, 89: 2, 90: 5, 10**9: 5,
        }  # fmt: skip
        rest = table.without({2})
        assert [s.number for s in rest.segments] == [1, 5]
        assert rest.find(60) is None
        assert table.find(60) is segments[1]
        assert SegmentTable(()).find(1) is None
