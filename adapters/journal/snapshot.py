"""Snapshots: everything that the journal says except message bodies, as of one LSN (rule J6).

Once one is durable, and an index checkpoint as well, a segment older than it is kept for its live messages alone: no
ack, no name and no id in it is needed any more, and chains of acks as KahaDB's cannot form. It is one record, so that
it is there whole or not at all; it is written when it is small beside what it frees.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Final

import msgspec

from ..core.changes import Table
from ..core.delivery import Delivery
from ..core.plan import Plan, Sequencer
from ..core.states import DestinationState, SubscriptionState
from ..wal.segment import Segment
from ..wal.survey import Kept, Needed

if TYPE_CHECKING:
    from .index import Index
    from .rows import MessageRows

RANGE = struct.Struct("<QQ")
RECORD_MIN: Final = 44
"""No message takes fewer bytes in a segment."""
ID_BYTES: Final = 64
"""What an id takes, and a name."""
WORTH: Final = 4
"""A snapshot is written when it frees at least so many times its own size."""


class KeptSegment(msgspec.Struct, frozen=True, array_like=True):
    """A sealed segment that the snapshot expects to exist, and which of its messages are dead."""

    number: int
    nonce: int
    base_lsn: int
    last_lsn: int
    end: int
    dead: bytes
    """The bits of Segment.dead, deflated."""

    def dead_bits(self) -> bytes:
        return zlib.decompress(self.dead) if self.dead else b""


class Snapshot(msgspec.Struct, frozen=True, array_like=True):
    """The payload of a SNAPSHOT record, in msgpack."""

    lsn: int
    """It reflects all up to this one."""
    seq: int
    """The highest given out by then."""
    first_needed: int
    """The segment that was being written: it and all after it are needed whole."""
    last_number: int
    """The highest that a destination or a subscription had by then."""
    kept: list[KeptSegment]
    """Those before `first_needed` that hold live messages. Others before it are released, or about to be."""
    first_dead: bytes
    """Which messages of the segment `first_needed` are dead, of those up to `lsn`; deflated bits as of a kept one."""
    destinations: list[tuple[int, int, str]]
    """Number, kind, name."""
    subscriptions: list[tuple[int, int, str, str, str | None, bool, int]]
    """Number, destination's number, client, name, selector, no_local, start."""
    acked: list[tuple[int, bytes]]
    """Subscription, and what it has acked of the messages that live: ranges of seqs, first and last as 64 bits each,
    deflated."""
    deliveries: list[tuple[int, int, int, int]]
    """Seq, subscription (0: a queue), how often it has been given back, destination; where it has."""
    duplicates: list[tuple[int, int, bytes]]
    """Destination, seq, message id; oldest first."""
    committed: list[bytes]
    """Transactions over several stores that are committed here and not forgotten yet. Those that are prepared have
    their records in `kept` segments, as live messages have."""
    removed: list[int] = []
    """Those of `destinations` that are removed, with messages still to go."""
    ended: list[int] = []
    """Those of `subscriptions` that have ended, likewise."""

    def first_dead_bits(self) -> bytes:
        return zlib.decompress(self.first_dead)

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)


def decode(payload: bytes) -> Snapshot:
    return msgspec.msgpack.decode(payload, type=Snapshot)


def needed_by(payload: bytes) -> Needed:
    """Which segments a snapshot's payload says must be there."""
    latest = decode(payload)
    return Needed(latest.first_needed, {kept.number: Kept(kept.end, kept.last_lsn) for kept in latest.kept})


class WriteSnapshot:
    """The change that puts a snapshot into the journal: nothing else comes of it."""

    __slots__ = ("payload",)

    def __init__(self, payload: bytes) -> None:
        self.payload = payload

    @property
    def size(self) -> int:
        return len(self.payload)

    def plan(self, plan: Plan) -> None:
        plan.changes.append(self)
        plan.own, plan.is_more = self, True

    def apply(self, table: Table) -> None:
        """It says what is in the index already."""

    def settle(self, delivery: Delivery) -> None:
        """It concerns no message."""

    def states(self) -> Iterable[DestinationState]:
        return ()


def take(
    lsn: int, active: Segment, kept: Iterable[Segment], index: Index, sequencer: Sequencer, last_number: int
) -> Snapshot:
    """A snapshot of the index as it stands, up to `lsn` in the segment `active`. Called under the store's lock."""
    states = [state for state in index.states.values() if state.own.named or state.own.leaving]
    subscriptions = [known for state in states for known in state.own.subscriptions.values()]
    return Snapshot(
        lsn=lsn,
        seq=sequencer.last_seq,
        first_needed=active.number,
        last_number=last_number,
        kept=[KeptSegment(s.number, s.nonce, s.base_lsn, s.last_lsn, s.end or 0, _deflate(s.dead)) for s in kept],
        first_dead=zlib.compress(bytes(active.dead or b""), 1),
        destinations=[(state.number, state.destination.kind.value, state.destination.name) for state in states],
        subscriptions=[_subscription(known) for known in subscriptions],
        acked=[acked for state in states if state.own.subscriptions for acked in _acked(state, index.rows)],
        deliveries=list(index.rows.all_deliveries()),
        duplicates=[(key[0], seq, key[1]) for key, seq in sequencer.window.items()],
        removed=[state.number for state in states if state.own.leaving],
        ended=[known.number for known in subscriptions if known.own.ended],
        committed=index.committed(),
    )


def _subscription(known: SubscriptionState) -> tuple[int, int, str, str, str | None, bool, int]:
    _, name, client, selector, no_local = known.subscription
    return known.number, known.topic.number, client, name, selector, no_local, known.start


def _acked(state: DestinationState, rows: MessageRows) -> Iterator[tuple[int, bytes]]:
    """For each subscription of a topic the ranges of messages that it has acked, or that are not for it."""
    runs: list[tuple[int, int, int]] = []  # first and last seq of neighbours that the same ones have yet to ack
    for seq, pending in rows.pending(state):
        if runs and runs[-1][2] == pending:
            runs[-1] = (runs[-1][0], seq, pending)
        else:
            runs.append((seq, seq, pending))
    for known in state.own.subscriptions.values():
        ranges: list[int] = []
        joined = False
        for first, last, pending in runs:
            if pending & known.own.bit:
                joined = False
                continue
            if joined:
                ranges[-1] = last
            else:
                ranges += (first, last)
            joined = True
        if ranges:
            yield known.number, zlib.compress(struct.pack(f"<{len(ranges)}Q", *ranges), 1)


def ranges_of(acked: bytes) -> Iterator[tuple[int, int]]:
    """What `Snapshot.acked` holds of one subscription."""
    return RANGE.iter_unpack(zlib.decompress(acked))


def size_expected(kept: Iterable[Segment], states: int, ids: int) -> int:
    """About how many bytes a snapshot would take, without making it."""
    return sum(40 + len(s.dead or b"") // 8 for s in kept) + 40 * states + 30 * ids


def size_most(segments: Iterable[Segment], allocated: int) -> int:
    """About how many bytes of a snapshot say what is dead in these segments, the last of which may be written up to
    `allocated`: deflated bits may take all that they took."""
    sealed = sum(64 + (s.last_lsn + 1 - s.base_lsn) // 8 for s in segments if s.end is not None)
    return sealed + allocated // (8 * RECORD_MIN)


def _deflate(dead: bytearray | None) -> bytes:
    return zlib.compress(bytes(dead), 1) if dead else b""
