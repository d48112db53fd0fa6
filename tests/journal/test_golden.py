"""Format version 3 as it is on disk: these bytes must be made, and must open, for ever."""

from __future__ import annotations

import json
import os
import tarfile
import zlib
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

import anabranch
from anabranch.adapters.core.engine.engine import Engine
from anabranch.adapters.core.features.keyed.keyed import Keys
from anabranch.adapters.core.operations.branches import Branch, Commit, Forget, Prepare, Rollback, branch_of, payload_of
from anabranch.adapters.core.operations.changes import Ack, AckRange, Change, Postponed, Returned, Send
from anabranch.adapters.core.operations.destination_changes import Declare, Remove, Subscribe, Unsubscribe
from anabranch.adapters.core.record.encoding import HEAD, REMOVAL
from anabranch.adapters.core.state.states import Catalog
from anabranch.adapters.core.store_types import Subscription
from anabranch.adapters.journal import snapshot
from anabranch.adapters.journal.changes import Compacted, Copied, WriteSnapshot
from anabranch.adapters.journal.encoding import CODECS, DECODERS, SEND, copied_in
from anabranch.adapters.journal.index import checksums
from anabranch.adapters.journal.index.index import Checkpoint
from anabranch.adapters.wal import format as w
from anabranch.adapters.wal.files.copies import RECORDS_MAX, CopiesWriter
from anabranch.adapters.wal.files.segment_files import SegmentFiles
from anabranch.adapters.wal.reader import BatchReader, Record, records_of
from anabranch.adapters.wal.records import RecordEncoder
from anabranch.adapters.wal.segment import Segment
from anabranch.adapters.wal.ticket import Tail, Ticket
from anabranch.policies.config.durability import Sync
from anabranch.policies.names.destination import Destination, Kind
from anabranch.router.transactions import decision_log
from anabranch.router.transactions.decision_log import Decision, DecisionLog, External
from anabranch.router.transactions.xid import Xid

from .golden import make
from .made import batch_of, engine_of, state_of

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
    version=4,
    store_id=STORE_ID,
    priorities=True,
    lsn=107,
    segment=3,
    nonce=0x0123456789ABCDEF,
    offset=4600,
    seq=52,
    last_segment=3,
    last_number=7,
    snapshot=(3, 4096),
    clean=True,
)


TRANSACTION = b"the router's id." + (1_700_000_000_000_000).to_bytes(8, "big") + (258).to_bytes(8, "big")
OLDER = TRANSACTION[:-8] + bytes(8)


def golden(name: str) -> bytes:
    return bytes.fromhex((GOLDEN / f"{name}.hex").read_text())


def document() -> bytes:
    """A snapshot's payload."""
    return snapshot.Snapshot(
        lsn=99, seq=50, first_needed=3, last_number=7, kept=[snapshot.KeptSegment(1, 7, 1, 60, 64000, b"")],
        first_dead=zlib.compress(b"\5"), destinations=[(2, 1, "prices")],
        subscriptions=[(5, 2, "client 1", "desk/ü", "price > 10", True, 50)],
        acked=[(5, zlib.compress(snapshot.RANGE.pack(51, 52)))], deliveries=[(49, 5, 3, 2)],
        duplicates=[(2, 49, b"id-a")], committed=[OLDER], removed=[2], ended=[5],
        waits=zlib.compress(snapshot.WAIT.pack(49, 1_700_000_600_000, 5, 2)),
    ).encode()  # fmt: skip


def tail_of(header: w.SegmentHeader) -> Tail:
    return Tail(Segment(header, Path("000000000003.seg")), w.HEADER_BYTES, 99, 50)


def read(path: Path, data: bytes) -> list[Record]:
    """The records of the batch that `data` is."""
    path.write_bytes(HEADER.encode() + data)
    (batch,) = BatchReader(Segment(HEADER, path), w.HEADER_BYTES, 99)
    records = list(records_of(batch))
    assert (batch.header.base_lsn, batch.header.count, batch.header.watermark) == (100, len(records), 98)
    return records


PRICES = Destination.parse("topic://prices")
DESK = Subscription(PRICES, "desk/ü", "client 1", "price > 10", no_local=True)
PLAIN = Subscription(PRICES, "plain")
ORDERS = Destination.parse("queue://orders.ü")
IDS = (STORE_ID, b"another store id")


class Made:
    """A store's changes, of every kind."""

    priorities = False

    def __init__(self) -> None:
        self.engine: Engine = engine_of(last_seq=50)
        self.orders = state_of(self.engine, 1, "queue://orders.ü", declared=False)
        self.prices = state_of(self.engine, 2, "topic://prices")
        self.states = {1: self.orders, 2: self.prices}
        self.subscriptions: dict[int, Any] = {}

    def find_copies(self, number: int, nonce: int, end: int, count: int) -> Segment:
        return copies_of(number, nonce, end, count, Path("000000000098.copies"))

    def sends(self) -> list[Change]:
        headers = msgspec.msgpack.encode({"sku": "T-1"})
        start = HEAD.pack(4, 0, 4, len(headers), 1_700_000_000_000, 0)
        plain = HEAD.pack(4, 0, 0, 0, 1_700_000_000_001, 0)
        return [Send(self.orders, start + b"id-1" + headers + b"body", b"id-1"), Send(self.prices, plain, None)]

    def acks(self) -> list[Change]:
        return [Ack(self.prices, 48, 0), AckRange(self.prices, 10, 20, 0)]

    def subscribed(self) -> list[Change]:
        return [Subscribe(self.prices, 5, DESK, False), Subscribe(self.prices, 6, PLAIN, True)]

    def of_subscriptions(self) -> list[Change]:
        return [
            *self.subscribed(), Ack(self.prices, 48, 5), AckRange(self.prices, 10, 20, 6),
            Returned(self.prices, 49, 5, 3), Unsubscribe(self.prices, PLAIN.key),
        ]  # fmt: skip

    def branch(self, transaction: bytes, changes: list[Change]) -> Branch:
        branch = Branch(transaction, IDS, changes)
        branch.payload = payload_of(IDS, changes)
        return branch

    def branches(self) -> list[Change]:
        """One that is committed, one that is rolled back, one that stays prepared."""
        everything = [*self.subscribed(), *self.sends(), Ack(self.prices, 48, 0), Ack(self.prices, 48, 5)]
        committed = self.branch(TRANSACTION, everything)
        rolled_back = self.branch(OLDER, [Ack(self.prices, 48, 0)])
        rolled_back.returned = [Returned(self.prices, 48, 0, 1)]
        left = self.branch(OLDER[:-1] + b"\1", self.sends()[1:])
        return [Prepare(committed), Prepare(rolled_back), Prepare(left), Commit(committed), Rollback(rolled_back)]

    def everything(self) -> list[Change]:
        return [
            *self.sends(), *self.acks(), *self.of_subscriptions(), *self.branches(), Forget([OLDER, TRANSACTION]),
            WriteSnapshot(document()), Remove(self.prices), Compacted(self.find_copies(*COPIES), ()),
            Postponed(self.prices, 49, 5, 1_700_000_600_000), Postponed(self.orders, 51, 0, 0),
        ]  # fmt: skip


COPIES = (w.COPIES + 98, 0x0123456789ABCDEF, 4261, 2)
"""Number, nonce, end and how many records."""


def copies_of(number: int, nonce: int, end: int, count: int, path: Path) -> Segment:
    """A file of copies."""
    base_lsn = w.COPIES + (number - w.COPIES) * RECORDS_MAX
    header = replace(HEADER, number=number, nonce=nonce, base_lsn=base_lsn, counter=1)
    copies = Segment(header, path)
    copies.end, copies.last_lsn = end, base_lsn + count - 1
    return copies


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
    made = Made()
    assert batch_of(made.engine, tail_of(HEADER), made.everything(), 98).data == data
    records = read(tmp_path / "golden.seg", data)
    names = {codec.kind: change.__name__ for change, codec in CODECS.items()}
    assert [names[record.kind] for record in records] == [
        "Declare", "Send", "Send", "Ack", "AckRange", "Subscribe", "Subscribe", "Ack", "AckRange", "Returned",
        "Unsubscribe", "Prepare", "Prepare", "Prepare", "Subscribe", "Send", "Ack", "Ack", "Commit", "Returned",
        "Rollback", "Forget", "WriteSnapshot", "Remove", "Compacted", "Postponed", "Postponed",
    ]  # fmt: skip
    assert {record.kind for record in records} == set(DECODERS)
    taken = snapshot.decode(records[-5].payload)
    assert list(snapshot.waits_of(taken.waits)) == [(49, 1_700_000_600_000, 5, 2)]
    assert (taken.committed, taken.first_dead_bits(4096), taken.last_number) == ([OLDER], b"\5", 7)
    assert [(number, list(snapshot.ranges_of(ranges))) for number, ranges in taken.acked] == [(5, [(51, 52)])]


def test_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole file of them, and the record that says that it counts."""
    monkeypatch.setattr(os, "urandom", lambda size: COPIES[1].to_bytes(size, "little"))
    made = Made()
    writer = CopiesWriter(SegmentFiles(tmp_path, 64 * 1024), STORE_ID, 98, 1)
    for send in made.sends():
        assert isinstance(send, Send)
        send.seq = 51
        own = writer.add(SEND, CODECS[Send].encode(send))
    copies = writer.finish()
    assert copies.path == tmp_path / "000000000098.copies"
    data = golden("copies")
    written = copies.path.read_bytes()
    assert (written[:120], written[120:4096].strip(b"\0"), written[4096:]) == (data[:120], b"", data[120:])
    found = [(number, seq) for number, seq, _ in copied_in(copies)]
    assert found == [(1, 51), (2, 51)]
    assert (copies.number, copies.last_lsn, own[0]) == (COPIES[0], own[0], w.COPIES + 98 * 65536 + 1)
    (record,) = [r for r in read(tmp_path / "golden.seg", golden("records")) if r.kind == 15]
    change = DECODERS[15](record, Found(copies))
    assert isinstance(change, Compacted)
    assert change.messages == [Copied(1, 51, (own[0] - 1, 4128, 75)), Copied(2, 51, own)]


class Found(Made):
    """With a file of copies."""

    def __init__(self, copies: Segment) -> None:
        super().__init__()
        self.copies = copies

    def find_copies(self, number: int, nonce: int, end: int, count: int) -> Segment:
        assert (number, nonce) == (self.copies.number, self.copies.nonce)
        return self.copies


def test_values_of_a_map(tmp_path: Path) -> None:
    """Two of a key, one that takes a key away, and one that was popped."""
    made = Made()
    made.engine.sequencer.naming[Kind.MAP] = Keys()
    results = state_of(made.engine, 3, "map://results", declared=False)
    made.states[3] = results

    def value(key: bytes, body: bytes, expires_at_ms: int = 0) -> Send:
        head = HEAD.pack(4, 0, len(key), 0, 1_700_000_000_000, expires_at_ms)
        return Send(results, head + key + body, key, 0, expires_at_ms)

    changes = [
        value(b"job-1", b"first"), value(b"job-1", b"then", 1_700_000_100_000), value("ü".encode(), b"gone"),
        value("ü".encode(), b"", REMOVAL), Ack(results, 52, 0),
    ]  # fmt: skip
    data = golden("values")
    assert batch_of(made.engine, tail_of(HEADER), changes, 98).data == data
    declare, *sends, ack = (DECODERS[record.kind](record, made) for record in read(tmp_path / "golden.seg", data))
    assert isinstance(declare, Declare)
    assert declare.state.destination == Destination.map("results")
    assert [(send.name, send.seq, send.expires_at_ms) for send in sends if isinstance(send, Send)] == [
        (b"job-1", 51, 0), (b"job-1", 52, 1_700_000_100_000), ("ü".encode(), 53, 0), ("ü".encode(), 54, REMOVAL),
    ]  # fmt: skip
    assert isinstance(ack, Ack)
    assert (ack.state, ack.seq) == (results, 52)


def test_what_is_said_of_subscriptions(tmp_path: Path) -> None:
    """They read back as they were given."""
    made = Made()
    found: list[Any] = []
    for record in read(tmp_path / "golden.seg", golden("records"))[5:11]:
        found.append(change := DECODERS[record.kind](record, made))
        if isinstance(change, Subscribe) and change.subscriber is not None:
            made.subscriptions[change.number] = change.subscriber
    desk, plain, ack, acks, returned, end = found
    assert [(one.subscriber.number, one.subscriber.subscription, one.subscriber.start) for one in (desk, plain)] == [
        (5, DESK, 52),
        (6, PLAIN, 0),
    ]
    assert (ack.state, ack.seq, ack.number) == (made.prices, 48, 5)
    assert (acks.first, acks.last, acks.number) == (10, 20, 6)
    assert (returned.seq, returned.number, returned.count) == (49, 5, 3)
    assert end.subscriber is plain.subscriber


def test_what_a_prepare_says() -> None:
    """The branch reads back as it was prepared, whatever numbers its destinations have by then."""
    prepared = Made().branches()[0]
    assert isinstance(prepared, Prepare)
    catalog = Catalog()
    catalog.last_number = 69
    branch = branch_of(TRANSACTION, prepared.branch.payload, catalog, False)
    prices, orders = catalog.destinations[PRICES], catalog.destinations[ORDERS]
    assert (prices.number, orders.number) == (70, 71)
    assert (branch.transaction, branch.participants) == (TRANSACTION, IDS)
    begin, begin_other, to, to_other, *acks = branch.changes
    assert isinstance(begin, Subscribe)
    assert isinstance(begin_other, Subscribe)
    assert (begin.state, begin.subscription, begin.retroactive) == (prices, DESK, False)
    assert (begin_other.state, begin_other.subscription, begin_other.retroactive) == (prices, PLAIN, True)
    assert isinstance(to, Send)
    assert isinstance(to_other, Send)
    assert (to.state, to.name, to_other.state, to_other.name) == (orders, b"id-1", prices, None)
    assert [(ack.state, ack.seq, ack.number) for ack in acks if isinstance(ack, Ack)] == [
        (prices, 48, 0),
        (prices, 48, 5),
    ]
    assert payload_of(branch.participants, branch.changes) == prepared.branch.payload


def test_decision_log(tmp_path: Path) -> None:
    data = golden("decisions")
    records_to_write = [(kind, payload, None) for kind, payload in every_decision()]
    encoder = RecordEncoder(lambda batch: None)
    assert encoder.encode(tail_of(HEADER), Ticket(records_to_write, 0, False), 98).data == data
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


def test_index_checkpoint() -> None:
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
            for store in router._registry.open_stores():
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
            for store in router._registry.open_stores():
                assert list(store.check()) == []
    with anabranch.open(make.transactions_config(tmp_path / "data")) as router:
        router.commit(anabranch.Xid(*make.HELD))
        assert (router.recover(), router.in_doubt()) == ([], [])
        (known,) = router.heuristics()
        router.forget(known.transaction)
        assert router.queue("audit.log").send(b"again", message_id="tx-1000").duplicate
        new = [message for message in router.queue("audit.log").browse() if message.message_id == "tx-1000"]
        assert [message.body for message in new] == [b"ack 1000"]
