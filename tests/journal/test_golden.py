"""Format version 1 as it is on disk: these bytes must be made, and must open, for ever."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import msgspec
import pytest

import anabranch
from anabranch.adapters.journal import format as f
from anabranch.adapters.journal import snapshot
from anabranch.adapters.journal.batch import Operation, Tail, Ticket, encode
from anabranch.adapters.journal.destinations import DestinationState
from anabranch.adapters.journal.duplicates import DuplicateWindow
from anabranch.adapters.journal.files import File
from anabranch.adapters.journal.index import Checkpoint
from anabranch.adapters.journal.reader import BatchReader, records_of
from anabranch.adapters.journal.segment import Segment
from anabranch.policies.destination import Destination

from .golden import make

GOLDEN = Path(__file__).parent / "golden"
STORE_ID = bytes(range(16))

HEADER = f.SegmentHeader(
    store_id=STORE_ID,
    number=3,
    nonce=0x0123456789ABCDEF,
    base_lsn=100,
    durable_lsn=98,
    prev_number=2,
    prev_end=65000,
    prev_lsn=99,
    last_seq=50,
    snapshot_number=2,
    snapshot_offset=4096,
    capacity=65536,
)
CHECKPOINT = Checkpoint(
    version=1,
    store_id=STORE_ID,
    lsn=107,
    segment=3,
    nonce=0x0123456789ABCDEF,
    offset=4600,
    seq=52,
    last_number=3,
    next_destination=3,
    snapshot=(3, 4096),
    clean=True,
)


def golden(name: str) -> bytes:
    return bytes.fromhex((GOLDEN / f"{name}.hex").read_text())


def every_record() -> tuple[Tail, list[Ticket]]:
    """A batch in which each type of record occurs."""
    orders = DestinationState(1, Destination.parse("queue://orders.ü"), declared=False)
    prices = DestinationState(2, Destination.parse("topic://prices"), declared=True)
    plain = f.MESSAGE.pack(2, f.DEFAULT_PRIORITY, 0, 0, 0, 1_700_000_000_001, 0)
    headers = msgspec.msgpack.encode({"sku": "T-1"})
    start = f.MESSAGE.pack(1, f.DEFAULT_PRIORITY, 0, 4, len(headers), 1_700_000_000_000, 0)
    document = snapshot.Snapshot(
        lsn=99,
        seq=50,
        first_needed=3,
        next_destination=3,
        kept=[snapshot.KeptSegment(1, 7, 1, 60, 64000, b"")],
        destinations=[(2, 1, "prices")],
        duplicates=[(2, 49, b"id-a")],
    ).encode()
    operations: list[Operation] = [
        (f.SEND, orders, start + b"id-1" + headers + b"body", (1, b"id-1")),
        (f.SEND, prices, plain, None),
        (f.ACK, prices, 48),
        (f.ACK_RANGE, prices, 10, 20),
        (f.SNAPSHOT, document),
        (f.DESTINATION_GONE, prices),
    ]
    segment = Segment(HEADER, Path("000000000003.seg"))
    return Tail(segment, f.HEADER_BYTES, 99, 50), [Ticket(operations, 0, False)]


def test_segment_header() -> None:
    data = golden("segment-header")
    assert HEADER.encode() == data.ljust(f.HEADER_BYTES, b"\0")
    assert f.SegmentHeader.decode(data, "golden") == HEADER


def test_batch(tmp_path: Path) -> None:
    data = golden("batch")
    assert encode(*every_record(), DuplicateWindow(10), 98).data == data
    (tmp_path / "golden.seg").write_bytes(HEADER.encode() + data)
    (batch,) = BatchReader(File(tmp_path / "golden.seg", 0), HEADER.seed, f.HEADER_BYTES, 99)
    assert (batch.header.base_lsn, batch.header.count, batch.header.watermark) == (100, 7, 98)
    kinds = [record.kind for record in records_of(batch)]
    assert kinds == [f.DESTINATION, f.SEND, f.SEND, f.ACK, f.ACK_RANGE, f.SNAPSHOT, f.DESTINATION_GONE]
    assert set(kinds) == f.RECORD_TYPES


@pytest.mark.parametrize("kind", ["send", "ack"])
def test_the_short_ways_make_the_same_bytes(kind: str) -> None:
    """A batch of one send or one ack is built by code of its own; beside a duplicate it is not."""
    tail, _ = every_record()
    state = DestinationState(2, Destination.parse("topic://prices"), declared=True)
    rest = f.MESSAGE.pack(2, 4, 0, 0, 0, 1, 0) + b"body"
    operation: Operation = (f.SEND, state, rest, None) if kind == "send" else (f.ACK, state, 48)
    window = DuplicateWindow(10)
    window.add({(2, b"known"): 7})
    duplicate: Operation = (f.SEND, state, rest, (2, b"known"))
    short = encode(tail, [Ticket([operation], 0, False)], window, 98)
    long = encode(tail, [Ticket([operation, duplicate], 0, False)], window, 98)
    assert short.data == long.data
    assert short.tail == long.tail
    assert list(short.entries) == list(long.entries)


def test_index_checkpoint() -> None:
    data = golden("index-checkpoint")
    assert msgspec.msgpack.encode(CHECKPOINT) == data
    assert msgspec.msgpack.decode(data, type=Checkpoint) == CHECKPOINT


@pytest.mark.parametrize("with_index", [True, False])
def test_a_data_directory(tmp_path: Path, with_index: bool) -> None:
    with tarfile.open(GOLDEN / "data.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    if not with_index:
        for path in (tmp_path / "data").rglob("index.mdb"):
            path.unlink()
    expected = json.loads((GOLDEN / "data.json").read_text())
    for _ in range(2):
        with anabranch.open(make.config(tmp_path / "data")) as router:
            assert make.content(router) == expected
            for store in list(router._open_stores.values()):
                assert list(store.check()) == []
            for name in ("closed", "killed"):
                assert router.queue(f"{name}.orders").send(b"again", message_id="tx").duplicate
    with anabranch.open(make.config(tmp_path / "data")) as router:
        for name in ("closed", "killed"):
            last = expected[f"queue://{name}.orders"][-1]["seq"]
            assert router.queue(f"{name}.orders").send(b"new").seq > last
