"""Round trips of the journal's bytes, and the units that read and count them."""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from google_crc32c import extend as crc32c
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.adapters.duplicates import DuplicateWindow
from anabranch.adapters.journal import format as f
from anabranch.adapters.journal import messages, snapshot
from anabranch.adapters.journal.batch import Branch, Flight, Operation, Tail, Ticket, encode
from anabranch.adapters.journal.destinations import DestinationState
from anabranch.adapters.journal.files import File
from anabranch.adapters.journal.index import Index
from anabranch.adapters.journal.reader import BatchReader
from anabranch.adapters.journal.segment import Segment, SegmentTable
from anabranch.adapters.journal.transactions import branch_of, new_branch
from anabranch.policies.destination import Destination
from anabranch.policies.errors import CorruptionError

u64 = st.integers(0, 2**64 - 1)


def header_of(number: int = 1, base_lsn: int = 1, **fields: int) -> f.SegmentHeader:
    values = dict.fromkeys(
        ("nonce", "durable_lsn", "prev_number", "prev_end", "prev_lsn", "last_seq", "snapshot_number",
         "snapshot_offset"), 0,
    )  # fmt: skip
    return f.SegmentHeader(
        store_id=b"0123456789abcdef", number=number, base_lsn=base_lsn, capacity=65536, **{**values, **fields}
    )


def batch_of(seed: int, offset: int, lsn: int, payloads: list[bytes], watermark: int = 0) -> bytes:
    """A whole batch at `offset`, of records of type ACK with any payload."""
    records, at = b"", offset + f.BATCH_HEADER.size
    for payload in payloads:
        rest = f.RECORD_REST.pack(len(payload), lsn, f.ACK, 0, 0) + payload
        records += f.CRC.pack(crc32c(seed ^ (at + len(records)), rest)) + rest
        lsn += 1
    return f.encode_batch_header(seed, offset, len(records), len(payloads), lsn - len(payloads), watermark) + records


class TestSegmentHeader:
    @given(
        st.builds(
            f.SegmentHeader,
            store_id=st.binary(min_size=16, max_size=16),
            number=u64,
            nonce=u64,
            base_lsn=u64,
            durable_lsn=u64,
            prev_number=u64,
            prev_end=u64,
            prev_lsn=u64,
            last_seq=u64,
            snapshot_number=u64,
            snapshot_offset=u64,
            capacity=u64,
        )
    )
    def test_round_trip(self, header: f.SegmentHeader) -> None:
        page = header.encode()
        assert len(page) == f.HEADER_BYTES
        assert f.SegmentHeader.decode(page, "x.seg") == header
        assert f.SegmentHeader.decode(page[:120], "x.seg") == header

    @given(st.integers(0, 120 * 8 - 1))
    def test_a_flipped_bit_is_found(self, bit: int) -> None:
        page = bytearray(header_of().encode())
        page[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptionError, match=r"x\.seg"):
            f.SegmentHeader.decode(bytes(page), "x.seg")

    @pytest.mark.parametrize("page", [b"", b"ANBRSEG\n", bytes(4096), b"x" * 4096])
    def test_what_is_no_header(self, page: bytes) -> None:
        with pytest.raises(CorruptionError, match="not a journal segment"):
            f.SegmentHeader.decode(page, "x.seg")

    def test_a_newer_version_is_told_from_damage(self) -> None:
        page = bytearray(header_of().encode())
        struct.pack_into("<H", page, 8, 2)
        with pytest.raises(CorruptionError, match=r"version 2; this program reads version 1.*use the version"):
            f.SegmentHeader.decode(bytes(page), "x.seg")

    def test_seeds_differ(self) -> None:
        """By store and by nonce, so that nothing parses in another's place."""
        assert len({f.segment_seed(bytes([store]) * 16, nonce) for store in range(8) for nonce in range(8)}) == 64


class TestBatches:
    @given(
        st.integers(0, 2**32 - 1), st.integers(0, 2**40), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), u64, u64
    )
    def test_header_round_trip(
        self, seed: int, offset: int, length: int, count: int, base_lsn: int, watermark: int
    ) -> None:
        data = f.encode_batch_header(seed, offset, length, count, base_lsn, watermark)
        assert f.decode_batch_header(data, seed, offset) == f.BatchHeader(length, count, base_lsn, watermark)
        assert f.decode_batch_header(data, seed, offset + 1) is None
        assert f.decode_batch_header(data, seed ^ 1, offset) is None
        assert f.decode_batch_header(data[:-1], seed, offset) is None

    def read(self, path: Path, header: f.SegmentHeader, data: bytes) -> BatchReader:
        path.write_bytes(header.encode() + data)
        return BatchReader(File(path, os.O_RDONLY), header.seed, f.HEADER_BYTES, header.base_lsn - 1)

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

    @settings(deadline=None)
    @given(data=st.data())
    def test_damage_ends_the_reading_before_its_batch(
        self, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
    ) -> None:
        """Rule J2: a batch is there whole or not at all."""
        header = header_of()
        batches, at, lsn = [], f.HEADER_BYTES, 1
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
            offset = f.HEADER_BYTES + gap
            data = bytes(gap) + batch_of(header.seed, offset, 5, [b"x"])
            found = list(self.read(tmp_path / "s", header, data).headers_beyond())
            assert [(h.base_lsn, h.count) for h in found] == [(5, 1)], gap

    def test_a_body_that_holds_a_journal_is_a_body(self, tmp_path: Path) -> None:
        """Rule J1."""
        header = header_of()
        inner = batch_of(header.seed, 4096, 2, [b"inner"])  # right for its store, wrong for its place
        outer = batch_of(header.seed, 4096, 1, [inner * 3])
        reader = self.read(tmp_path / "s", header, outer)
        assert [batch.header.count for batch in reader] == [1]
        broken = bytearray(outer)
        broken[40] ^= 1
        reader = self.read(tmp_path / "s", header, bytes(broken))
        assert list(reader) == []
        assert [header.length for header in reader.headers_beyond()] == [len(outer) - f.BATCH_HEADER.size]

    def test_an_lsn_out_of_sequence_ends_the_reading(self, tmp_path: Path) -> None:
        header = header_of()
        one = batch_of(header.seed, 4096, 1, [b"x"])
        assert (
            len(list(self.read(tmp_path / "s", header, one + batch_of(header.seed, 4096 + len(one), 3, [b"x"])))) == 1
        )


class TestSnapshot:
    def test_round_trip(self, tmp_path: Path) -> None:
        dead = bytearray(b"\x01\x80") + bytes(62)
        segment = Segment(header_of(5, 100, nonce=9), Path("x"))
        segment.end, segment.last_lsn, segment.dead = 5000, 199, dead
        active = Segment(header_of(6, 200, nonce=9), Path("y"))
        window = DuplicateWindow(10)
        window.add({(1, b"x"): 3, (1, b"y"): 4})
        index = Index(tmp_path / "index.mdb", bytes(16), 10)
        index.create()
        index.declare(1, Destination.parse("a"))
        index.next_destination = 3
        index.states[2] = DestinationState(2, Destination.parse("ü"), False)
        index.remember_committed(b"t" * 32)
        taken = snapshot.take(250, 77, active, [segment], index, window)
        index.close()
        again = snapshot.decode(taken.encode())
        assert again == taken
        assert (again.lsn, again.seq, again.first_needed, again.next_destination) == (250, 77, 6, 3)
        (kept,) = again.kept
        assert (kept.number, kept.nonce, kept.base_lsn, kept.last_lsn, kept.end) == (5, 9, 100, 199, 5000)
        assert kept.dead_bits() == bytes(dead)
        assert again.destinations == [(1, 0, "a")]
        assert again.duplicates == [(1, 3, b"x"), (1, 4, b"y")]
        assert again.committed == [b"t" * 32]

    def test_no_bits_are_none(self) -> None:
        assert snapshot.KeptSegment(1, 2, 3, 4, 5, b"").dead_bits() == b""


class TestSegments:
    def test_a_segment_counts_its_dead(self) -> None:
        segment = Segment(header_of(base_lsn=100), Path("x"))
        for _ in range(3):
            segment.born(50)
        segment.kill(101, 50)
        segment.kill(2000, 50)
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


class TestDuplicateWindow:
    def test_the_oldest_goes_first(self) -> None:
        window = DuplicateWindow(3)
        for seq, name in enumerate((b"a", b"b", b"c", b"d"), 1):
            window.add({(1, name): seq})
        assert window.get((1, b"a")) is None
        assert window.items() == [((1, b"b"), 2), ((1, b"c"), 3), ((1, b"d"), 4)]

    def test_adding_again_changes_nothing(self) -> None:
        window = DuplicateWindow(2)
        for _ in range(3):
            window.add({(1, b"a"): 1, (1, b"b"): 2})
        assert window.items() == [((1, b"a"), 1), ((1, b"b"), 2)]

    def test_forgetting_a_destination(self) -> None:
        window = DuplicateWindow(5)
        window.add({(1, b"a"): 1, (2, b"a"): 2})
        window.forget(1)
        assert window.items() == [((2, b"a"), 2)]

    def test_no_window(self) -> None:
        window = DuplicateWindow(0)
        window.add({(1, b"a"): 1})
        assert window.items() == []


ids = st.one_of(st.none(), st.text(min_size=1, max_size=9))


class Numbered:
    """Destinations' states, numbered from `first` in the order in which they are asked for."""

    def __init__(self, first: int) -> None:
        self._first, self._states = first, dict[Destination, DestinationState]()

    def state(self, destination: Destination) -> DestinationState:
        number = self._first + len(self._states)
        return self._states.setdefault(destination, DestinationState(number, destination, True))


header_values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(allow_nan=False),
    st.text(max_size=9),
    st.binary(max_size=9),
)


class TestBranches:
    @given(
        st.lists(st.tuples(st.sampled_from(["a", "topic://a", "ü/.."]), st.binary(max_size=50), ids), max_size=6),
        st.lists(st.tuples(st.sampled_from(["a", "topic://a"]), u64), max_size=6),
        st.lists(st.binary(min_size=16, max_size=16), max_size=3),
    )
    def test_round_trip(
        self, sends: list[tuple[str, bytes, str | None]], acks: list[tuple[str, int]], participants: list[bytes]
    ) -> None:
        """Destinations by name: read back they may have other numbers."""
        before, after = Numbered(1), Numbered(1000)
        operations: list[Operation] = []
        for name, body, message_id in sends:
            state = before.state(Destination.parse(name))
            operations.append((f.SEND, state, *messages.encode(state, body, None, message_id, 10_000), None))
        operations += [(f.ACK, before.state(Destination.parse(name)), seq, 0) for name, seq in acks]
        branch = new_branch(b"t" * 32, participants, operations, 0)
        again = branch_of(branch.payload, after.state)
        assert (again.transaction, again.participants) == (b"t" * 32, tuple(participants))
        assert len(again.operations) == len(operations)
        for (kind, state, what, *key), (kind_before, state_before, what_before, *key_before) in zip(
            again.operations, operations, strict=True
        ):
            assert (kind, state.destination) == (kind_before, state_before.destination)
            assert state.id >= 1000
            if kind == f.SEND:
                assert what == f.GONE_PAYLOAD.pack(state.id) + what_before[4:]
                assert key == [(state.id, key_before[0][1]) if key_before[0] else None, None]
            else:
                assert [what, *key] == [what_before, *key_before]
        assert new_branch(b"t" * 32, participants, again.operations, 0).payload == branch.payload

    def settle(self, *operations: Operation, prepared: Sequence[Branch] = ()) -> Flight:
        segment = Segment(header_of(base_lsn=1), Path("x"))
        waiting = {branch.transaction: branch for branch in prepared}
        tickets = [Ticket([operation], 0, False) for operation in operations]
        return encode(Tail(segment, f.HEADER_BYTES, 0, 0), tickets, DuplicateWindow(0), 0, waiting)

    def test_an_outcome_is_written_once_and_only_of_what_is_prepared(self) -> None:
        state = DestinationState(1, Destination.parse("a"), True)
        one = new_branch(b"1" * 32, [], [(f.ACK, state, 7, 0)], 0)
        other = new_branch(b"2" * 32, [], [(f.ACK, state, 8, 0)], 0)
        for outcome in (f.COMMIT, f.ROLLBACK):
            nothing = self.settle((outcome, one))
            assert (nothing.data, nothing.entries, nothing.settled) == (b"", [], None)
        flight = self.settle((f.COMMIT, one), (f.COMMIT, one), (f.ROLLBACK, one), (f.ROLLBACK, other), prepared=[one])
        assert [entry[0] for entry in flight.entries] == [f.ACK, f.COMMIT]
        assert flight.settled == [one]
        flight = self.settle((f.PREPARE, other), (f.ROLLBACK, other), (f.COMMIT, other))
        assert [entry[0] for entry in flight.entries] == [f.PREPARE, f.ROLLBACK]
        assert (flight.prepared, flight.settled) == ([other], [other])


class TestMessages:
    @given(
        st.binary(max_size=200),
        st.dictionaries(st.text(max_size=5), header_values, max_size=4),
        st.one_of(st.none(), st.text(min_size=1, max_size=9)),
    )
    def test_round_trip(self, body: bytes, headers: dict[str, Any], message_id: str | None) -> None:
        state = DestinationState(7, Destination.parse("a"), True)
        rest, key = messages.encode(state, body, headers, message_id, 10_000)
        assert key == (None if message_id is None else (7, message_id.encode()))
        seq, lsn, offset, seed = 11, 13, 4128, 99
        record = f.SEND_START.pack(len(rest) + 8, lsn, f.SEND, 0, 0, seq) + rest
        record = f.CRC.pack(crc32c(seed ^ offset, record)) + record
        place = (0, seq, 0, lsn, offset, len(record))
        store: object = object()
        message = messages.decode(store, state, seed, place, record, state.feed)  # type: ignore[arg-type]
        assert message is not None
        assert (message.body, message.headers, message.message_id, message.seq) == (body, headers, message_id, seq)
        for wrong in ((0, 12, 0, lsn, offset), (0, seq, 0, 14, offset), (0, seq, 0, lsn, 4129)):
            assert messages.decode(store, state, seed, (*wrong, len(record)), record, state.feed) is None  # type: ignore[arg-type]
        assert messages.decode(store, state, seed, place, record[:-1], state.feed) is None  # type: ignore[arg-type]
