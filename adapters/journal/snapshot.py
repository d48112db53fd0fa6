"""Snapshots: everything that the journal says except message bodies, as of one LSN (rule J6).

Once one is durable, and an index checkpoint as well, a segment older than it is kept for its live messages alone: no
ack, no name and no id in it is needed any more, and chains of acks as KahaDB's cannot form. It is one record, so that
it is there whole or not at all; it is written when it is small beside what it frees.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from ..core.operations.plan import Sequencer
from ..core.state.leases import Channel, DestinationState, SubscriptionState
from ..core.state.states import Catalog
from ..wal.format import RECORD_HEADER
from ..wal.recovery.survey import Kept, Needed
from ..wal.segment import DEAD_BYTES_MORE, Segment
from ..wal.ticket import Tail
from .pending_before import PendingBefore

if TYPE_CHECKING:
    from .index.index import Index
    from .index.rows import Ask, MessageRows

RANGE = struct.Struct("<QQ")
WAIT = struct.Struct("<QQII")
assert WAIT.size == 24
RECORD_MIN: Final = 44
"""No message takes fewer bytes in a segment."""
ID_BYTES: Final = 64
"""Bytes that an id takes, and a name."""
WAIT_BYTES: Final = 16
"""Bytes that a message that waits takes, deflated."""
INFLATED_MAX: Final = 1 << 30
"""Bytes of rows, more than any snapshot has."""
PIECE_ROWS: Final = 4096
"""Rows that are inflated at once."""
WORTH: Final = 4
"""A snapshot is written when it frees at least so many times its own size."""


def inflated(data: bytes, most: int) -> bytes:
    """Return inflated bytes. Raises ValueError for what was not deflated, or is more than `most` bytes."""
    work = zlib.decompressobj()
    try:
        plain = work.decompress(data, most + 1)  # of 0 there would be no limit
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if not work.eof or len(plain) > most:
        raise ValueError(f"{len(data)} deflated bytes have no end, or hold more than {most}")
    return plain


def inflated_rows(data: bytes, row: struct.Struct) -> Iterator[tuple[int, ...]]:
    """Yield rows one after another, deflated, of which only a piece is in memory. Raises ValueError as `inflated`,
    struct.error for half a row."""
    work, rest, total = zlib.decompressobj(), data, 0
    while not work.eof:
        try:
            plain = work.decompress(rest, PIECE_ROWS * row.size)
        except zlib.error as error:
            raise ValueError(str(error)) from error
        rest, total = work.unconsumed_tail, total + len(plain)
        if total > INFLATED_MAX or not (plain or work.eof):
            raise ValueError(f"{len(data)} deflated bytes have no end, or hold more than {INFLATED_MAX}")
        yield from row.iter_unpack(plain)


def _dead_bytes_max(size: int) -> int:
    """Return at most how many bytes say which records are dead in a file of so many bytes."""
    return min(size, INFLATED_MAX) // (8 * RECORD_HEADER.size) + 2 * DEAD_BYTES_MORE


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
        """Return the bits that `dead` holds. Raises ValueError."""
        return inflated(self.dead, _dead_bytes_max(self.end)) if self.dead else b""


class Snapshot(msgspec.Struct, frozen=True, array_like=True):
    """The payload of a SNAPSHOT record, in msgpack."""

    lsn: int
    """The LSN up to which the snapshot reflects all."""
    seq: int
    """The highest given out by then."""
    first_needed: int
    """The segment that was being written: it and all after it are needed whole."""
    last_number: int
    """The highest that a destination or a subscription had by then."""
    kept: list[KeptSegment]
    """Segments before `first_needed` that hold live messages. Others before it are released, or about to be."""
    first_dead: bytes
    """Bits of the messages of the segment `first_needed` that are dead, of those up to `lsn`; deflated as of a kept
    one."""
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
    """Destinations among `destinations` that are removed, with messages still to go."""
    ended: list[int] = []
    """Subscriptions among `subscriptions` that have ended, with messages still to go."""
    waits: bytes = b""
    """Messages that wait for their time: seq, until when (ms), subscription (0: a queue, or all of a topic's),
    destination; deflated."""

    def first_dead_bits(self, size: int) -> bytes:
        """Return the bits that `first_dead` holds. `size`: of that segment's file. Raises ValueError."""
        return inflated(self.first_dead, _dead_bytes_max(size))

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)


def decode(payload: bytes) -> Snapshot:
    """Return the snapshot in a payload. Raises ValueError for what is no snapshot."""
    try:
        return msgspec.msgpack.decode(payload, type=Snapshot)
    except msgspec.MsgspecError as error:
        raise ValueError(str(error)) from error


def needed_by(payload: bytes) -> Needed:
    """Return which segments a snapshot's payload says must be there."""
    latest = decode(payload)
    return Needed(latest.first_needed, {kept.number: Kept(kept.end, kept.last_lsn) for kept in latest.kept}, latest.lsn)


class Start(NamedTuple):
    """The state of one moment for a snapshot, copied under the store's lock. All that takes longer follows in pages,
    each under the lock, with others in between (`take`). The journal also says what they change by then, behind `tail`
    and before the snapshot. To be told it once more changes nothing (rule X2). But of acks of topics' messages the
    snapshot says what was so at that moment (`pending_before`)."""

    tail: Tail
    """The index as it stands reflects all up to here."""
    kept: list[tuple[Segment, bytes]]
    """Kept segments, with the bits of what is dead in them."""
    first_dead: bytes
    states: list[DestinationState]
    subscriptions: list[SubscriptionState]
    leaving: list[Channel]
    last_number: int
    before: PendingBefore


def start(tail: Tail, kept: Iterable[Segment], index: Index, catalog: Catalog) -> Start:
    """Start a snapshot, under the store's lock. From now on the index keeps what `take` needs, until `end`."""
    with_dead = [(segment, bytes(segment.dead or b"")) for segment in kept]
    first_dead = bytes(tail.segment.dead or b"")
    index.rows.before = before = PendingBefore(tail.counter)
    return Start(tail, with_dead, first_dead, *index.there(), list(catalog.leaving), catalog.last_number, before)


def take(begun: Start, index: Index, sequencer: Sequencer, ask: Ask) -> Snapshot:
    """Take the rest. Called without the lock, which `ask` takes for each page."""
    tail, states, subscriptions = begun.tail, begun.states, begun.subscriptions
    bits: dict[DestinationState, list[tuple[int, int]]] = {}
    for subscriber in subscriptions:
        bits.setdefault(subscriber.topic, []).append((subscriber.number, subscriber.own.bit))
    return Snapshot(
        lsn=tail.lsn,
        seq=sequencer.last_seq,
        first_needed=tail.segment.number,
        last_number=begun.last_number,
        kept=[KeptSegment(s.number, s.nonce, s.base_lsn, s.last_lsn, s.end or 0, _deflate(d)) for s, d in begun.kept],
        first_dead=zlib.compress(begun.first_dead, 1),
        destinations=[(state.number, state.destination.kind.value, state.destination.name) for state in states],
        subscriptions=[_subscription(subscriber) for subscriber in subscriptions],
        acked=[acked for topic, some in bits.items() for acked in _acked(topic, some, tail.counter, index.rows, ask)],
        deliveries=[row for row in index.rows.all_deliveries(ask) if row[0] <= tail.counter],
        duplicates=[(key[0], seq, key[1]) for key, seq in sequencer.window.items()],
        committed=index.committed(ask),
        removed=[channel.state.number for channel in begun.leaving if not channel.number],
        ended=[channel.number for channel in begun.leaving if channel.number],
        waits=_waits(index.rows.all_waits(ask), tail.counter),
    )


def end(index: Index) -> None:
    """End the snapshot, taken or given up."""
    index.rows.before = None


def _subscription(subscriber: SubscriptionState) -> tuple[int, int, str, str, str | None, bool, int]:
    _, name, client, selector, no_local = subscriber.subscription
    return subscriber.number, subscriber.topic.number, client, name, selector, no_local, subscriber.start


def _acked(
    topic: DestinationState, subscriptions: Sequence[tuple[int, int]], last_seq: int, rows: MessageRows, ask: Ask
) -> Iterator[tuple[int, bytes]]:
    """Return, for each subscription of a topic, given by number and bit, the ranges of messages that it has acked, or
    that are not for it, of those up to a seq."""
    runs: list[tuple[int, int, int]] = []  # first and last seq of neighbours that the same ones have yet to ack
    for seq, pending in rows.pending(topic, ask):
        if seq > last_seq:
            break
        if runs and runs[-1][2] == pending:
            runs[-1] = (runs[-1][0], seq, pending)
        else:
            runs.append((seq, seq, pending))
    for number, bit in subscriptions:
        ranges: list[int] = []
        joined = False
        for first, last, pending in runs:
            if pending & bit:
                joined = False
                continue
            if joined:
                ranges[-1] = last
            else:
                ranges += (first, last)
            joined = True
        if ranges:
            yield number, zlib.compress(struct.pack(f"<{len(ranges)}Q", *ranges), 1)


def _waits(rows: Iterable[tuple[int, int, int, int]], last_seq: int) -> bytes:
    """Return the packed waits of messages up to a seq; empty if none waits."""
    packed = bytearray()
    for seq, number, due, destination in rows:
        if seq <= last_seq:
            packed += WAIT.pack(seq, due, number, destination)
    return zlib.compress(packed, 1) if packed else b""


def waits_of(waits: bytes) -> Iterator[tuple[int, int, int, int]]:
    """Return what `Snapshot.waits` holds: seq, until when, subscription, destination."""
    return inflated_rows(waits, WAIT) if waits else iter(())  # type: ignore[return-value]


def ranges_of(acked: bytes) -> Iterator[tuple[int, int]]:
    """Return what `Snapshot.acked` holds of one subscription."""
    return inflated_rows(acked, RANGE)  # type: ignore[return-value]


def size_expected(kept: Iterable[Segment], states: int, ids: int) -> int:
    """Return about how many bytes a snapshot would take, without making it."""
    return sum(40 + len(s.dead or b"") // 8 for s in kept) + 40 * states + 30 * ids


def size_most(segments: Iterable[Segment], allocated: int) -> int:
    """Return about how many bytes of a snapshot say what is dead in these segments. The last one may be written up to
    `allocated`: deflated bits may take all that they took."""
    sealed = sum(64 + (s.last_lsn + 1 - s.base_lsn) // 8 for s in segments if s.end is not None)
    return sealed + allocated // (8 * RECORD_MIN)


def _deflate(dead: bytes) -> bytes:
    return zlib.compress(dead, 1) if dead else b""
