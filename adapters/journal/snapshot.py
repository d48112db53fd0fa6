"""Snapshots: everything that the journal says except message bodies, as of one LSN (rule J6).

Once one is durable, and an index checkpoint as well, a segment older than it is kept for its live messages alone: no
ack, no name and no id in it is needed any more, and chains of acks as KahaDB's cannot form. It is one record, so that
it is there whole or not at all; it is written when it is small beside what it frees.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Final

import msgspec

from .destinations import DestinationState
from .duplicates import DuplicateWindow
from .segment import Segment

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
    next_destination: int
    kept: list[KeptSegment]
    """Those before `first_needed` that hold live messages. Others before it are released, or about to be."""
    destinations: list[tuple[int, int, str]]
    """Id, kind, name."""
    duplicates: list[tuple[int, int, bytes]]
    """Destination id, seq, message id; oldest first."""
    committed: list[bytes] = []
    """Transactions over several stores that are committed here and not forgotten yet. Those that are prepared have
    their records in `kept` segments, as live messages have."""
    carried: list[tuple[int, bytes]] = []
    """Of a decision log: type and payload of each record that is still in force."""

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)


def decode(payload: bytes) -> Snapshot:
    return msgspec.msgpack.decode(payload, type=Snapshot)


def take(
    lsn: int,
    seq: int,
    first_needed: int,
    next_destination: int,
    kept: Iterable[Segment],
    states: Iterable[DestinationState],
    window: DuplicateWindow,
    committed: list[bytes],
) -> Snapshot:
    """A snapshot of the index as it stands. Called under the index lock."""
    return Snapshot(
        lsn=lsn,
        seq=seq,
        first_needed=first_needed,
        next_destination=next_destination,
        kept=[KeptSegment(s.number, s.nonce, s.base_lsn, s.last_lsn, s.end or 0, _deflate(s.dead)) for s in kept],
        destinations=[(s.id, s.destination.kind.value, s.destination.name) for s in states if s.declared or s.named],
        duplicates=[(key[0], seq, key[1]) for key, seq in window.items()],
        committed=committed,
    )


def size_expected(kept: Iterable[Segment], states: int, ids: int) -> int:
    """About how many bytes a snapshot would take, without making it."""
    return sum(40 + len(s.dead or b"") // 8 for s in kept) + 40 * states + 30 * ids


def _deflate(dead: bytearray | None) -> bytes:
    return zlib.compress(bytes(dead), 1) if dead else b""
