"""A pass over a segment for the few records of it that are wanted."""

from __future__ import annotations

import random
from pathlib import Path

from anabranch.adapters.wal import format as w
from anabranch.adapters.wal.reader import WINDOW, BatchReader, records_of
from anabranch.adapters.wal.segment import Segment
from anabranch.adapters.wal.skimming import Skimmer

from .made import KIND, batch_of, header_of


def made(path: Path, payloads: list[list[bytes]]) -> Segment:
    """A sealed segment of these batches."""
    header = header_of()
    data, lsn = header.encode(), 1
    for batch in payloads:
        data += batch_of(header.seed, len(data), lsn, batch)
        lsn += len(batch)
    path.write_bytes(data + bytes(5000))
    segment = Segment(header, path)
    segment.end, segment.last_lsn = len(data), lsn - 1
    return segment


def test_it_finds_what_a_reader_finds(tmp_path: Path) -> None:
    chance = random.Random(3)
    sizes = [[chance.choice([0, 10, 3000, 70_000]) for _ in range(chance.randrange(1, 9))] for _ in range(120)]
    sizes[40] = [WINDOW + 5, 3]
    segment = made(tmp_path / "1.seg", [[bytes(size) for size in batch] for batch in sizes])
    for share in (0.0, 0.1, 1.0):
        dead = {lsn for lsn in range(1, segment.last_lsn + 1) if chance.random() >= share}
        reader = BatchReader(segment, w.HEADER_BYTES, 0, segment.end)
        expected = [record for batch in reader for record in records_of(batch) if record.lsn not in dead]
        skimmer = Skimmer(segment, KIND, dead.__contains__)
        found = list(skimmer)
        assert [record for record in found if record is not None] == expected
        assert found.count(None) == len(sizes)
        assert skimmer.offset == segment.end
    assert [record for record in Skimmer(segment, KIND + 1, lambda lsn: False) if record is not None] == []


def test_it_stops_at_damage(tmp_path: Path) -> None:
    """What is passed over needs not be whole; what is wanted, and what says how long things are, does."""
    segment = made(tmp_path / "1.seg", [[b"a" * 100, b"b" * 100], [b"c" * 100], [b"d" * 100]])
    assert segment.end is not None
    data = segment.path.read_bytes()
    third = next(r.offset for r in Skimmer(segment, KIND, lambda lsn: lsn != 3) if r is not None)
    for at in range(w.HEADER_BYTES, segment.end):
        segment.path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        skimmer = Skimmer(segment, KIND, lambda lsn: lsn != 3)
        found = [record for record in skimmer if record is not None]
        if found:
            assert (found[0].lsn, found[0].offset, found[0].payload) == (3, third, b"c" * 100)
        else:  # its kind alone may be wrong unnoticed: its owner counts what is left
            assert skimmer.offset < segment.end or at == third + 16
