"""The simplest encoder."""

from __future__ import annotations

from pathlib import Path

from anabranch.adapters.wal import SNAPSHOT, RecordEncoder, Tail, record_ticket
from anabranch.adapters.wal import format as w
from anabranch.adapters.wal.reader import BatchReader, records_of
from anabranch.adapters.wal.segment import Segment

from .made import header_of


def test_records_of_a_ticket_come_back_in_one_batch(tmp_path: Path) -> None:
    header = header_of(base_lsn=10)
    path = tmp_path / "s"
    segment = Segment(header, path)
    ticket = record_ticket([(1, b"a", None), (2, b"", None), (3, b"c" * 1000, "what it says")])
    batch = RecordEncoder(lambda batch: None).encode(Tail(segment, w.HEADER_BYTES, 9, 77), ticket, 5)
    assert len(batch.data) == ticket.size + w.BATCH_HEADER.size
    assert batch.tail == Tail(segment, w.HEADER_BYTES + len(batch.data), 12, 77)
    path.write_bytes(header.encode() + batch.data)
    (read,) = BatchReader(segment, w.HEADER_BYTES, 9)
    assert read.header.watermark == 5
    assert [(r.lsn, r.kind, r.payload) for r in records_of(read)] == [(10, 1, b"a"), (11, 2, b""), (12, 3, b"c" * 1000)]


def test_encoding_again_says_the_same(tmp_path: Path) -> None:
    """Who submits may be interrupted anywhere."""
    tail = Tail(Segment(header_of(), tmp_path / "s"), w.HEADER_BYTES, 0, 0)
    encoder = RecordEncoder(lambda batch: None)
    ticket = record_ticket([(1, b"a", None)])
    assert encoder.encode(tail, ticket, 0).data == encoder.encode(tail, ticket, 0).data


def test_the_latest_snapshot_is_remembered(tmp_path: Path) -> None:
    segment = Segment(header_of(4), tmp_path / "s")
    encoder = RecordEncoder(lambda batch: None)
    batch = encoder.encode(Tail(segment, 5000, 0, 0), record_ticket([(SNAPSHOT, b"all", None)]), 0)
    encoder.accept(batch)
    assert encoder.snapshot_at == (4, 5000)


def test_what_holds_no_record_writes_nothing_and_a_mark_is_an_empty_batch(tmp_path: Path) -> None:
    tail = Tail(Segment(header_of(), tmp_path / "s"), w.HEADER_BYTES, 0, 0)
    encoder = RecordEncoder(lambda batch: None)
    assert encoder.encode(tail, record_ticket([]), 0).data == b""
    assert len(encoder.encode(tail, None, 0).data) == w.BATCH_HEADER.size
