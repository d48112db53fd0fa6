"""Format version 1 as it is on disk: these bytes must be made, and must open, for ever."""

from __future__ import annotations

import json
import tarfile
import zlib
from array import array
from pathlib import Path
from typing import Any

import msgspec
import pytest

import anabranch
from anabranch.adapters.base import DEFAULT_PRIORITY, Subscription
from anabranch.adapters.duplicates import DuplicateWindow
from anabranch.adapters.journal import checksums, snapshot
from anabranch.adapters.journal import format as f
from anabranch.adapters.journal.batch import Operation
from anabranch.adapters.journal.destinations import DestinationState
from anabranch.adapters.journal.encoder import Encoder
from anabranch.adapters.journal.index import Checkpoint, Index
from anabranch.adapters.journal.replay import Replayer
from anabranch.adapters.journal.transactions import branch_of, new_branch
from anabranch.adapters.wal import format as w
from anabranch.adapters.wal.reader import BatchReader, Record, records_of
from anabranch.adapters.wal.records import RecordEncoder
from anabranch.adapters.wal.segment import Segment
from anabranch.adapters.wal.ticket import Tail, Ticket
from anabranch.policies.destination import Destination
from anabranch.policies.durability import Sync
from anabranch.router import decision_log
from anabranch.router.decision_log import Decision, DecisionLog, External
from anabranch.router.xid import Xid

from .golden import make

GOLDEN = Path(__file__).parent / "golden"
STORE_ID = bytes(range(16))

HEADER = w.SegmentHeader(
    log_id=STORE_ID,
    number=3,
    nonce=0x0123456789ABCDEF,
    base_lsn=100,
    durable_lsn=98,
    prev_number=2,
    prev_end=65000,
    prev_lsn=99,
    counter=50,
    snapshot_number=2,
    snapshot_offset=4096,
    capacity=65536,
)
CHECKPOINT = Checkpoint(
    version=2,
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
    next_subscription=7,
    priorities=True,
)


TRANSACTION = b"the router's id." + (1_700_000_000_000_000).to_bytes(8, "big") + (258).to_bytes(8, "big")
OLDER = TRANSACTION[:-8] + bytes(8)


def golden(name: str) -> bytes:
    return bytes.fromhex((GOLDEN / f"{name}.hex").read_text())


def document(**fields: Any) -> bytes:
    """A snapshot's payload."""
    said: dict[str, Any] = {
        "lsn": 99, "seq": 50, "first_needed": 3, "next_destination": 3,
        "kept": [snapshot.KeptSegment(1, 7, 1, 60, 64000, b"")], "destinations": [(2, 1, "prices")],
        "duplicates": [(2, 49, b"id-a")],
    }  # fmt: skip
    return snapshot.Snapshot(**(said | fields)).encode()


def tail_of(header: w.SegmentHeader) -> Tail:
    return Tail(Segment(header, Path("000000000003.seg")), w.HEADER_BYTES, 99, 50)


def read(path: Path, data: bytes) -> list[Record]:
    """The records of the batch that `data` is."""
    path.write_bytes(HEADER.encode() + data)
    (batch,) = BatchReader(Segment(HEADER, path), w.HEADER_BYTES, 99)
    records = list(records_of(batch))
    assert (batch.header.base_lsn, batch.header.count, batch.header.watermark) == (100, len(records), 98)
    return records


def messages_and_acks() -> list[Operation]:
    orders = DestinationState(1, Destination.parse("queue://orders.ü"), declared=False)
    prices = DestinationState(2, Destination.parse("topic://prices"), declared=True)
    plain = f.MESSAGE.pack(2, DEFAULT_PRIORITY, 0, 0, 0, 1_700_000_000_001, 0)
    headers = msgspec.msgpack.encode({"sku": "T-1"})
    start = f.MESSAGE.pack(1, DEFAULT_PRIORITY, 0, 4, len(headers), 1_700_000_000_000, 0)
    return [
        (f.SEND, orders, start + b"id-1" + headers + b"body", (1, b"id-1"), None),
        (f.SEND, prices, plain, None, None),
        (f.ACK, prices, 48, 0),
        (f.ACK_RANGE, prices, 10, 20, 0),
    ]


PRICES = Destination.parse("topic://prices")
DESK = Subscription(PRICES, "desk/ü", "client 1", "price > 10", no_local=True)
PLAIN = Subscription(PRICES, "plain")


def subscriptions_and_deliveries() -> list[Operation]:
    prices = DestinationState(2, PRICES, declared=True)
    return [
        (f.SUBSCRIBE, prices, 5, DESK, False),
        (f.SUBSCRIBE, prices, 6, PLAIN, True),
        (f.ACK, prices, 48, 5),
        (f.ACK_RANGE, prices, 10, 20, 6),
        (f.DELIVERED, prices, 49, 5, 3),
        (f.UNSUBSCRIBE, prices, PLAIN.key),
    ]


def branches() -> list[Operation]:
    """One that is committed, one that is rolled back, one that stays prepared."""
    begin, begin_other, acked, *_ = subscriptions_and_deliveries()
    operations = [begin, begin_other, *messages_and_acks()[:3], acked]
    ids = [STORE_ID, b"another store id"]
    committed, rolled_back = new_branch(TRANSACTION, ids, operations, 0), new_branch(OLDER, ids, operations[4:5], 0)
    rolled_back.delivered = [(f.DELIVERED, operations[4][1], 48, 0, 1)]
    left = new_branch(OLDER[:-1] + b"\1", ids, operations[3:4], 0)
    return [
        (f.PREPARE, committed),
        (f.PREPARE, rolled_back),
        (f.PREPARE, left),
        (f.COMMIT, committed),
        (f.ROLLBACK, rolled_back),
    ]


def every_record() -> list[Operation]:
    gone = DestinationState(2, Destination.parse("topic://prices"), declared=True)
    said = document(
        committed=[OLDER], first_dead=zlib.compress(b"\5"), next_subscription=7,
        subscriptions=[(5, 2, "client 1", "desk/ü", "price > 10", True, 50)],
        acked=[(5, zlib.compress(snapshot.RANGE.pack(51, 52)))], deliveries=[(49, 5, 3, 2)],
    )  # fmt: skip
    return [
        *messages_and_acks(), *subscriptions_and_deliveries(), *branches(), (f.SNAPSHOT, said),
        (f.DESTINATION_GONE, gone),
    ]  # fmt: skip


def every_decision() -> list[tuple[int, bytes]]:
    """What a decision log holds: type and payload."""
    ids = [STORE_ID, b"another store id"]
    xid = Xid(7, "global/ü", "branch")
    said: list[tuple[int, Any]] = [
        (decision_log.EPOCH, 1_700_000_000_000_000),
        (decision_log.XA_PREPARED, External(OLDER, ids, xid)),
        (decision_log.DECISION, Decision(TRANSACTION, True, ids)),
        (decision_log.DECISION, Decision(OLDER, False, ids, xid, True)),
    ]
    packed = [(kind, msgspec.msgpack.encode(what)) for kind, what in said]
    taken = msgspec.msgpack.encode(decision_log._Snapshot(102, 3, packed[:2]))
    return [*packed, (decision_log.FORGOTTEN, TRANSACTION + OLDER), (w.SNAPSHOT, taken)]


def test_segment_header() -> None:
    data = golden("segment-header")
    assert HEADER.encode() == data.ljust(w.HEADER_BYTES, b"\0")
    assert w.SegmentHeader.decode(data, "golden") == HEADER


def test_batch(tmp_path: Path) -> None:
    data = golden("records")
    assert Encoder(DuplicateWindow(10)).encode(tail_of(HEADER), [Ticket(every_record(), 0, False)], 98).data == data
    records = read(tmp_path / "golden.seg", data)
    kinds = [record.kind for record in records]
    assert kinds == [
        f.DESTINATION, f.SEND, f.SEND, f.ACK, f.ACK_RANGE, f.SUBSCRIBE, f.SUBSCRIBE, f.ACK, f.ACK_RANGE, f.DELIVERED,
        f.UNSUBSCRIBE, f.PREPARE, f.PREPARE, f.PREPARE, f.SUBSCRIBE, f.SEND, f.ACK, f.ACK, f.COMMIT, f.DELIVERED,
        f.ROLLBACK, f.SNAPSHOT, f.DESTINATION_GONE,
    ]  # fmt: skip
    assert set(kinds) == f.RECORD_TYPES
    taken = snapshot.decode(records[-2].payload)
    assert (taken.committed, taken.first_dead_bits(), taken.next_subscription) == ([OLDER], b"\5", 7)
    assert [(number, list(snapshot.ranges_of(said))) for number, said in taken.acked] == [(5, [(51, 52)])]


def test_what_is_said_of_subscriptions(tmp_path: Path) -> None:
    """They read back as they were given."""
    index = Index(tmp_path / "none", STORE_ID, 0)
    index.states[2] = prices = DestinationState(2, PRICES, declared=True)
    (tmp_path / "golden.seg").write_bytes(HEADER.encode() + golden("records"))
    (batch,) = BatchReader(Segment(HEADER, tmp_path / "golden.seg"), w.HEADER_BYTES, 99)
    entries = Replayer(index, "golden", live=True)
    records = list(records_of(batch))[5:11]
    desk, plain, *others = (entries._settle(record) for record in records)
    assert desk is not None
    assert plain is not None
    assert [(known.number, known.subscription, known.start) for known in (desk[2], plain[2])] == [
        (5, DESK, 52),
        (6, PLAIN, 0),
    ]
    assert others == [
        (f.ACK, prices, 48, 5),
        (f.ACK_RANGE, prices, 10, 20, 6),
        (f.DELIVERED, prices, 49, 5, 3),
        (f.UNSUBSCRIBE, prices, 6),
    ]


def test_what_a_prepare_says() -> None:
    """The branch reads back as it was prepared, whatever numbers its destinations have by then."""
    states: dict[Destination, DestinationState] = {}

    def state_of(destination: Destination) -> DestinationState:
        return states.setdefault(destination, DestinationState(70 + len(states), destination, declared=False))

    (_, prepared), *_ = branches()
    numbers = iter((8, 9))
    branch = branch_of(prepared.payload, state_of, next_subscription=lambda: next(numbers))
    orders, prices = state_of(Destination.parse("queue://orders.ü")), state_of(Destination.parse("topic://prices"))
    assert (orders.id, prices.id) == (71, 70)
    assert branch.transaction == TRANSACTION
    assert branch.participants == (STORE_ID, b"another store id")
    begin, begin_other, (_, to, rest, key, _), (_, to_other, _, no_key, _), *acks = branch.operations
    assert begin == (f.SUBSCRIBE, prices, 8, DESK, False)
    assert begin_other == (f.SUBSCRIBE, prices, 9, PLAIN, True)
    assert (to, key, to_other, no_key) == (orders, (71, b"id-1"), prices, None)
    assert f.MESSAGE.unpack_from(rest)[0] == 71
    assert acks == [(f.ACK, prices, 48, 0), (f.ACK, prices, 48, 5)]
    assert branch.acks == [(prices, 48, 0), (prices, 48, 5)]
    again = new_branch(TRANSACTION, branch.participants, branch.operations, 0)
    assert again.payload == prepared.payload


def test_a_newer_snapshot_is_read_by_what_was_before() -> None:
    """Fields come at the end: a reader that knows fewer passes over them."""

    class Known(msgspec.Struct, array_like=True):
        lsn: int
        seq: int

    taken = msgspec.msgpack.decode(document(committed=[OLDER]), type=Known)
    assert (taken.lsn, taken.seq) == (99, 50)


def test_decision_log(tmp_path: Path) -> None:
    data = golden("decisions")
    records_to_write = [(kind, payload, None) for kind, payload in every_decision()]
    encoder = RecordEncoder(lambda batch: None)
    assert encoder.encode(tail_of(HEADER), [Ticket(records_to_write, 0, False)], 98).data == data
    records = read(tmp_path / "golden.seg", data)
    assert [(record.kind, record.payload) for record in records] == every_decision()
    log = DecisionLog(tmp_path / "none", Sync.ALWAYS)
    for record in records[:4]:
        log._note(record.kind, record.payload)
    said = log.decisions[TRANSACTION]
    assert (said.commit, said.participants, said.xid, said.by_hand) == (
        True,
        [STORE_ID, b"another store id"],
        None,
        False,
    )
    assert log.decisions[OLDER] == Decision(OLDER, False, said.participants, Xid(7, "global/ü", "branch"), True)
    assert (log.externals, log.epochs) == ({}, {1_700_000_000_000_000})
    log._note(records[4].kind, records[4].payload)
    assert log.decisions == {}
    assert decision_log._decode_snapshot(records[5].payload).carried == every_decision()[:2]


@pytest.mark.parametrize("kind", ["send", "ack"])
def test_the_short_ways_make_the_same_bytes(kind: str) -> None:
    """A batch of one send or one ack is built by code of its own; beside a duplicate it is not."""
    tail = tail_of(HEADER)
    state = DestinationState(2, Destination.parse("topic://prices"), declared=True)
    rest = f.MESSAGE.pack(2, 4, 0, 0, 0, 1, 0) + b"body"
    operation: Operation = (f.SEND, state, rest, None, None) if kind == "send" else (f.ACK, state, 48, 0)
    window = DuplicateWindow(10)
    window.add({(2, b"known"): 7})
    duplicate: Operation = (f.SEND, state, rest, (2, b"known"), None)
    short = Encoder(window).encode(tail, [Ticket([operation], 0, False)], 98)
    long = Encoder(window).encode(tail, [Ticket([operation, duplicate], 0, False)], 98)
    assert short.data == long.data
    assert short.tail == long.tail
    assert list(short.entries) == list(long.entries)


def test_index_checkpoint() -> None:
    data = golden("index-checkpoint-1")  # of an index that is made anew
    assert msgspec.msgpack.decode(data, type=Checkpoint).version == 1
    data = golden("index-checkpoint")
    assert msgspec.msgpack.encode(CHECKPOINT) == data
    assert msgspec.msgpack.decode(data, type=Checkpoint) == CHECKPOINT


def test_the_checksums_of_an_index() -> None:
    data = golden("index-sums")
    assert checksums.encode(77, 4096, array("I", [1, 0, 0xDEADBEEF])) == data
    assert checksums.decode(data) == (77, 4096, array("I", [1, 0, 0xDEADBEEF]))


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
            for store in router.places.open_stores():
                assert list(store.check()) == []
            for name in ("closed", "killed"):
                assert router.queue(f"{name}.orders").send(b"again", message_id="tx").duplicate
    with anabranch.open(make.config(tmp_path / "data")) as router:
        for name in ("closed", "killed"):
            last = expected[f"queue://{name}.orders"][-1]["seq"]
            assert router.queue(f"{name}.orders").send(b"new").seq > last


@pytest.mark.parametrize("without", ["nothing", "the indexes"])
def test_a_data_directory_with_transactions(tmp_path: Path, without: str) -> None:
    """Killed in the middle of transactions over two stores: one decided and not carried out, one undecided, one that
    waits for its manager; a decision log that had begun a new segment."""
    with tarfile.open(GOLDEN / "transactions.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    if without == "the indexes":
        for path in (tmp_path / "data").rglob("index.mdb"):
            path.unlink()
    expected = json.loads((GOLDEN / "transactions.json").read_text())
    for _ in range(2):
        with anabranch.open(make.transactions_config(tmp_path / "data")) as router:
            assert make.waiting(router) == expected
            for store in router.places.open_stores():
                assert list(store.check()) == []
    with anabranch.open(make.transactions_config(tmp_path / "data")) as router:
        router.commit(anabranch.Xid(*make.HELD))
        assert (router.recover(), router.in_doubt()) == ([], [])
        (known,) = router.heuristics()
        router.forget(known.transaction)
        assert router.queue("audit.log").send(b"again", message_id="tx-1000").duplicate
        new = [message for message in router.queue("audit.log").browse() if message.message_id == "tx-1000"]
        assert [message.body for message in new] == [b"ack 1000"]
