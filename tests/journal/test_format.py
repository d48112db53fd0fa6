"""Round trips of the journal's bytes, and the units that read and count them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from google_crc32c import extend as crc32c
from hypothesis import given
from hypothesis import strategies as st

from anabranch.adapters.duplicates import DuplicateWindow
from anabranch.adapters.journal import format as f
from anabranch.adapters.journal import messages, snapshot
from anabranch.adapters.journal.batch import Branch, Operation
from anabranch.adapters.journal.destinations import DestinationState
from anabranch.adapters.journal.encoder import Encoder, JournalBatch
from anabranch.adapters.journal.index import Index
from anabranch.adapters.journal.transactions import branch_of, new_branch
from anabranch.adapters.wal import format as w
from anabranch.adapters.wal.segment import Segment
from anabranch.adapters.wal.ticket import Tail, Ticket
from anabranch.policies.destination import Destination

from ..wal.made import header_of

u64 = st.integers(0, 2**64 - 1)


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

    def settle(self, *operations: Operation, prepared: Sequence[Branch] = ()) -> JournalBatch:
        segment = Segment(header_of(base_lsn=1), Path("x"))
        encoder = Encoder(DuplicateWindow(0))
        encoder.prepared = {branch.transaction: branch for branch in prepared}
        tickets = [Ticket([operation], 0, False) for operation in operations]
        return encoder.encode(Tail(segment, w.HEADER_BYTES, 0, 0), tickets, 0)

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
        record = w.CRC.pack(crc32c(seed ^ offset, record)) + record
        place = (0, seq, 0, lsn, offset, len(record))
        store: object = object()
        message = messages.decode(store, state, seed, place, record, state.feed)  # type: ignore[arg-type]
        assert message is not None
        assert (message.body, message.headers, message.message_id, message.seq) == (body, headers, message_id, seq)
        for wrong in ((0, 12, 0, lsn, offset), (0, seq, 0, 14, offset), (0, seq, 0, lsn, 4129)):
            assert messages.decode(store, state, seed, (*wrong, len(record)), record, state.feed) is None  # type: ignore[arg-type]
        assert messages.decode(store, state, seed, place, record[:-1], state.feed) is None  # type: ignore[arg-type]
