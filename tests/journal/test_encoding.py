"""Changes become records and come back: what is written is what is applied again."""

from __future__ import annotations

import inspect
import struct
import tracemalloc
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google_crc32c import extend as crc32c
from hypothesis import given
from hypothesis import strategies as st

from anabranch.adapters.core.engine.engine import Engine
from anabranch.adapters.core.features.keyed.keyed import Unchanged
from anabranch.adapters.core.features.outbox import EntriesDone
from anabranch.adapters.core.features.transient.changes import TransientChange
from anabranch.adapters.core.migration.copying import Migrated
from anabranch.adapters.core.operations.branches import Branch, Commit, Forget, Prepare, Rollback, payload_of
from anabranch.adapters.core.operations.changes import (
    Ack,
    AckRange,
    Change,
    Dropped,
    Mark,
    Refused,
    Returned,
    Send,
    SendMany,
)
from anabranch.adapters.core.operations.destination_changes import CloseGate, Declare, Remove, Subscribe, Unsubscribe
from anabranch.adapters.core.operations.leased_sends import LeasedSend, _Beginning
from anabranch.adapters.core.record.encoding import encode
from anabranch.adapters.core.state.leases import DestinationState, SubscriptionState
from anabranch.adapters.core.state.states import Catalog
from anabranch.adapters.core.store_types import Subscription
from anabranch.adapters.journal import snapshot
from anabranch.adapters.journal.bodies import body_of
from anabranch.adapters.journal.changes import WriteSnapshot
from anabranch.adapters.journal.encoding import CODECS, DECODERS, SEND, SEND_HEAD
from anabranch.adapters.journal.index.index import Index
from anabranch.adapters.wal import format as w
from anabranch.adapters.wal.reader import BatchReader, Record, records_of
from anabranch.adapters.wal.segment import Segment
from anabranch.adapters.wal.ticket import Tail
from anabranch.policies.names.destination import Destination

from ..wal.made import header_of
from .made import batch_of, engine_of, state_of

TOPIC = Destination.parse("topic://prices")
DESK = Subscription(TOPIC, "desk/ü", "client 1" * 200, "price > 10 " * 9000, no_local=True)
"""Names and selectors of any length."""
PLAIN = Subscription(TOPIC, "plain")


class Made:
    """What a reader knows, and records to read."""

    priorities = True

    def __init__(self) -> None:
        self.engine: Engine = engine_of(last_seq=50)
        self.queue = state_of(self.engine, 1, "orders.ü")
        self.topic = state_of(self.engine, 2, "topic://prices")
        self.states: dict[int, DestinationState] = {1: self.queue, 2: self.topic}
        self.desk = SubscriptionState(5, self.topic, DESK, 52)
        self.subscriptions: dict[int, SubscriptionState] = {}
        self.segment = Segment(header_of(base_lsn=1), Path("x"))
        self.prepared = self.engine.sequencer.prepared

    def find_copies(self, number: int, nonce: int, end: int, count: int) -> Segment:
        raise AssertionError("there is no file")

    def back(self, change: Any) -> Any:
        """The change as it is read."""
        codec = CODECS[type(change)]
        payload = codec.encode(change)
        record = Record(17, codec.kind, payload, self.segment, 4128, w.RECORD_HEADER.size + len(payload))
        return DECODERS[codec.kind](record, self)

    def batch(self, *changes: Any) -> list[int]:
        """The kinds of record that become of changes."""
        batch = batch_of(self.engine, Tail(self.segment, w.HEADER_BYTES, 0, 50), changes)
        return [record.kind for record in read(batch.data, self.segment)] if batch.data else []

    def begin(self, subscription: Subscription, number: int, start: int) -> Subscribe:
        change = Subscribe(self.topic, number, subscription, retroactive=not start)
        change.subscriber = SubscriptionState(number, self.topic, subscription, start)
        return change


def read(data: bytes, segment: Segment) -> list[Record]:
    """The records of a batch at the start of a segment."""
    position, found = w.BATCH_HEADER.size, []
    while position < len(data):
        crc, length, lsn, kind, _, _ = w.RECORD_HEADER.unpack_from(data, position)
        end = position + w.RECORD_HEADER.size + length
        offset = w.HEADER_BYTES + position
        assert crc32c(segment.seed ^ offset, data[position + 4 : end]) == crc
        found.append(Record(lsn, kind, data[position + w.RECORD_HEADER.size : end], segment, offset, end - position))
        position = end
    return found


def test_every_change_has_a_record_of_its_own() -> None:
    ours = {one for one in Change.__subclasses__() if one.__module__.startswith("anabranch.")}
    # Of SendMany, Mark and Migrated a SEND each is written; no backend is told of the others.
    untold = {TransientChange, CloseGate, Unchanged, Dropped, EntriesDone, Refused, LeasedSend, _Beginning}
    assert set(CODECS) == ours - untold - {SendMany, Mark, Migrated}
    assert len(DECODERS) == len(CODECS)


class TestChanges:
    @given(
        st.binary(max_size=200),
        st.dictionaries(st.text(max_size=5), st.one_of(st.none(), st.booleans(), st.text(max_size=9)), max_size=4),
        st.one_of(st.none(), st.text(min_size=1, max_size=9)),
        st.integers(0, 9),
        st.integers(0, 2**63 - 1),
    )
    def test_a_message(
        self, body: bytes, headers: dict[str, Any], message_id: str | None, priority: int, expires: int
    ) -> None:
        made = Made()
        record, name = encode(made.queue.destination, body, headers, message_id, 10_000, priority, expires)
        send = Send(made.queue, record, name, 65_535 - priority, expires)
        send.seq = 77
        back = made.back(send)
        assert type(back) is Send
        for field in ("state", "record", "name", "order", "expires_at_ms", "seq"):
            assert getattr(back, field) == getattr(send, field), field
        assert back.own == (17, 4128, w.RECORD_HEADER.size + 12 + len(record))

    def test_a_message_of_nobody(self) -> None:
        made = Made()
        send = Send(made.queue, encode(made.queue.destination, b"x", None, None, 100)[0], None)
        send.seq = 1
        del made.states[1]
        with pytest.raises(KeyError):
            made.back(send)

    @pytest.mark.parametrize(
        "change",
        [
            lambda made: Ack(made.topic, 48, 5),
            lambda made: AckRange(made.topic, 10, 2**64 - 1, 6),
            lambda made: Returned(made.queue, 49, 0, 3),
            lambda made: Declare(made.queue),
            lambda made: Remove(made.topic),
        ],
    )
    def test_the_small_ones(self, change: Any) -> None:
        made = Made()
        one = change(made)
        back = made.back(one)
        assert type(back) is type(one)
        assert {name: getattr(back, name) for name in one.__slots__} == {
            name: getattr(one, name) for name in one.__slots__
        }

    @pytest.mark.parametrize("change", [Ack, AckRange, Returned, Remove])
    def test_what_concerns_a_destination_that_is_gone(self, change: Any) -> None:
        made = Made()
        one = change(made.topic, *(1,) * (len(inspect.signature(change).parameters) - 1 - (change is Ack)))
        del made.states[2]
        assert made.back(one) is None

    def test_a_count_that_has_no_place(self) -> None:
        made = Made()
        assert made.back(Returned(made.queue, 1, 0, 1 << 40)).count == (1 << 32) - 1

    def test_a_destination_that_is_new(self) -> None:
        made = Made()
        made.states.clear()
        back = made.back(Declare(made.queue))
        assert (back.state.number, back.state.destination) == (1, made.queue.destination)

    @pytest.mark.parametrize(("subscription", "start"), [(DESK, 52), (PLAIN, 0)])
    def test_a_subscription(self, subscription: Subscription, start: int) -> None:
        made = Made()
        back = made.back(made.begin(subscription, 5, start))
        assert (back.subscriber.number, back.subscriber.subscription, back.subscriber.start) == (5, subscription, start)
        assert back.subscriber.topic is made.topic
        made.subscriptions[5] = back.subscriber
        assert made.back(made.begin(subscription, 5, start)).subscriber is back.subscriber, "the same as before"
        end = Unsubscribe(made.topic, subscription.key)
        end.subscriber = back.subscriber
        assert made.back(end).subscriber is back.subscriber
        made.subscriptions.clear()
        assert made.back(end) is None

    def test_branches_and_their_outcomes(self) -> None:
        made = Made()
        acks = [Ack(made.queue, 7, 0), Ack(made.topic, 8, 5)]
        branch = Branch(b"t" * 32, (b"a" * 16, b"b" * 16), acks)
        branch.payload = payload_of(branch.participants, acks)
        back = made.back(Prepare(branch)).branch
        assert (back.transaction, back.payload) == (branch.transaction, branch.payload)
        assert back.own == (17, 4128, w.RECORD_HEADER.size + 32 + len(branch.payload))
        for outcome in (Commit, Rollback):
            back = made.back(outcome(branch))
            assert (type(back), back.branch.transaction) == (outcome, branch.transaction)
        assert made.back(Forget([b"1" * 32, b"2" * 32])).transactions == [b"1" * 32, b"2" * 32]
        assert made.back(WriteSnapshot(b"all")) is None


class TestBatches:
    def test_an_outcome_is_written_once_and_only_of_what_is_prepared(self) -> None:
        made = Made()
        one = Branch(b"1" * 32, (), [Ack(made.queue, 7, 0)])
        other = Branch(b"2" * 32, (), [Ack(made.queue, 8, 0)])
        kind = {change: codec.kind for change, codec in CODECS.items()}
        for outcome in (Commit, Rollback):
            assert made.batch(outcome(one)) == []
        made.prepared[one.transaction] = one
        assert made.batch(Commit(one), Commit(one), Rollback(one), Rollback(other)) == [kind[Ack], kind[Commit]]
        assert made.batch(Prepare(other), Rollback(other), Commit(other)) == [kind[Prepare], kind[Rollback]]

    @pytest.mark.parametrize("kind", ["send", "ack", "other"])
    def test_the_short_ways_make_the_same_bytes(self, kind: str) -> None:
        """A batch of one record is built by code of its own; beside another it is not."""
        made = Made()
        changes: dict[str, Any] = {
            "send": Send(made.queue, encode(made.queue.destination, b"body", None, None, 100)[0], None),
            "ack": Ack(made.queue, 48, 0),
            "other": Returned(made.queue, 48, 0, 2),
        }
        change = changes[kind]
        tail = Tail(made.segment, w.HEADER_BYTES, 0, 50)
        short = batch_of(made.engine, tail, [change], 98)
        long = batch_of(made.engine, tail, [change, Ack(made.queue, 1, 0)], 98)
        (record,) = read(short.data, made.segment)
        assert record == read(long.data, made.segment)[0]
        assert (short.tail.lsn, short.tail.offset) == (1, w.HEADER_BYTES + len(short.data))
        assert short.tail.counter == long.tail.counter == 50 + (kind == "send")
        if kind == "send":
            assert change.own == (1, record.offset, record.length)

    def test_it_reads_back(self, tmp_path: Path) -> None:
        made = Made()
        changes = [Ack(made.queue, number, 0) for number in range(20)]
        data = batch_of(made.engine, Tail(made.segment, w.HEADER_BYTES, 0, 50), changes, 7).data
        (tmp_path / "x.seg").write_bytes(header_of(base_lsn=1).encode() + data)
        (batch,) = BatchReader(Segment(header_of(base_lsn=1), tmp_path / "x.seg"), w.HEADER_BYTES, 0)
        assert batch.header.watermark == 7
        assert [DECODERS[record.kind](record, made).seq for record in records_of(batch)] == list(range(20))  # type: ignore[union-attr]


class TestBodies:
    def test_what_is_not_where_it_should_be(self) -> None:
        record, seq, lsn, offset, seed = b"the message", 11, 13, 4128, 99
        data = SEND_HEAD.pack(len(record) + 12, lsn, SEND, 0, 0, 7, seq) + record
        data = w.CRC.pack(crc32c(seed ^ offset, data)) + data
        own = (lsn, offset, len(data))
        assert body_of(data, offset, seed, 7, (0, seq, 0, 0, own)) == record
        assert body_of(data, offset, seed, 8, (0, seq, 0, 0, own)) is None
        assert body_of(data, offset, seed, 7, (0, 12, 0, 0, own)) is None
        assert body_of(data, offset, seed, 7, (0, seq, 0, 0, (14, offset, len(data)))) is None
        assert body_of(data, offset, seed, 7, (0, seq, 0, 0, (lsn, 4129, len(data)))) is None
        assert body_of(data[:-1], offset, seed, 7, (0, seq, 0, 0, own)) is None
        assert body_of(data[:-1] + b"x", offset, seed, 7, (0, seq, 0, 0, own)) is None


class TestSnapshot:
    @pytest.fixture
    def index(self, tmp_path: Path) -> Iterator[Index]:
        index = Index(tmp_path / "index.mdb", bytes(16), Catalog(), 10)
        index.create()
        yield index
        index.close()

    def test_round_trip(self, index: Index) -> None:
        dead = bytearray(b"\x01\x80") + bytes(62)
        segment = Segment(header_of(5, 100, nonce=9), Path("x"))
        segment.end, segment.last_lsn, segment.dead = 5000, 199, dead
        active = Segment(header_of(6, 200, nonce=9), Path("y"))
        engine = engine_of(last_seq=77)
        engine.sequencer.window.add({(1, b"x"): 3, (1, b"y"): 4})
        index.declare(state_of(engine, 1, "a"))
        gone = state_of(engine, 2, "ü")
        index.declare(gone)
        index.remove(gone)
        index.transactions.remember_committed(b"t" * 32)
        engine.catalog.last_number = 9
        begun = snapshot.start(Tail(active, 5000, 250, 77), [segment], index, engine.catalog)
        taken = snapshot.take(begun, index, engine.sequencer, lambda question: question())
        again = snapshot.decode(taken.encode())
        assert again == taken
        assert (again.lsn, again.seq, again.first_needed, again.last_number) == (250, 77, 6, 9)
        (kept,) = again.kept
        assert (kept.number, kept.nonce, kept.base_lsn, kept.last_lsn, kept.end) == (5, 9, 100, 199, 5000)
        assert kept.dead_bits() == bytes(dead)
        assert again.destinations == [(1, 0, "a")]
        assert again.duplicates == [(1, 3, b"x"), (1, 4, b"y")]
        assert again.committed == [b"t" * 32]

    def test_no_bits_are_none(self) -> None:
        assert snapshot.KeptSegment(1, 2, 3, 4, 5, b"").dead_bits() == b""

    def test_no_more_is_inflated_than_there_can_be(self) -> None:
        """A few deflated bytes may stand for gigabytes."""
        bomb = zlib.compress(bytes(10_000_000))
        with pytest.raises(ValueError, match="hold more than"):
            snapshot.KeptSegment(1, 2, 3, 4, 64 * 1024, bomb).dead_bits()
        rows = snapshot.ranges_of(bomb)
        tracemalloc.start()
        try:
            assert sum(1 for _ in rows) == 10_000_000 // 16
            assert tracemalloc.get_traced_memory()[1] < 1_000_000
        finally:
            tracemalloc.stop()

    @pytest.mark.parametrize("data", [b"", b"no zlib", zlib.compress(bytes(64))[:-2], zlib.compress(bytes(17))])
    def test_what_is_no_table_of_rows(self, data: bytes) -> None:
        with pytest.raises((ValueError, struct.error)):
            list(snapshot.ranges_of(data))
