"""The bytes of the index's rows of messages (docs/format.md draws them): their keys and values, packed and unpacked."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Final

from ...core.operations.changes import Send, SendMany
from ...core.record.place import Place
from ...system.acceleration import inner_loop
from ..encoding import NUMBER_MAX, SEND_OVERHEAD

KEY = struct.Struct(">IQ")
assert KEY.size == 12
KEY_SEQ = struct.Struct(">4xQ")
assert KEY_SEQ.size == 12
PREFIX_BYTES: Final = 4
"""Bytes that the keys of one destination's messages share."""
WHERE = struct.Struct("<QII")
"""An Own (encoding.py)."""
assert WHERE.size == 16
MORE = struct.Struct("<QH")
"""Expires at (ms, 0: never) and order. Then, of a topic's message, the bits of those that have yet to ack it, in as
many bytes as that takes; of a map's, its key."""
assert MORE.size == 10
MORE_AT: Final = WHERE.size + MORE.size
LANE_KEY = struct.Struct(">IHQ")
assert LANE_KEY.size == 14
LANE_PREFIX_BYTES: Final = 6
"""Bytes that the keys of one order of a destination share."""
EXPIRY_KEY = struct.Struct(">QQ")
assert EXPIRY_KEY.size == 16
DELIVERIES_KEY = struct.Struct(">QI")
assert DELIVERIES_KEY.size == 12
DELIVERIES = struct.Struct("<II")
assert DELIVERIES.size == 8
ID = struct.Struct(">I")
"""A destination's number; what the keys of one map share."""
assert ID.size == 4
KEYED_SEQ = struct.Struct("<Q")
assert KEYED_SEQ.size == 8
WAIT = struct.Struct("<QI")
assert WAIT.size == 12
DUE_KEY = struct.Struct(">QQI")
assert DUE_KEY.size == 20
WAITING: Final = NUMBER_MAX + 1
"""Added to the number of a destination where its messages wait. Numbers are given out one by one, and do not come to
it."""

Row = tuple[Place, int]
"""A message's place, and the bits of those that have yet to ack it."""


def read_row(seq: int, value: bytes) -> Row:
    own = WHERE.unpack_from(value)
    if len(value) == WHERE.size:
        return (0, seq, 0, 0, own), 0
    expires, order = MORE.unpack_from(value, WHERE.size)
    return (order, seq, expires, 0, own), int.from_bytes(value[MORE_AT:], "little")


Packed = tuple[list[tuple[bytes, bytes]], int]
"""Rows of messages, and how many bytes their records take together."""


@inner_loop
def pack_rows(number: int, sends: Sequence[Send]) -> Packed | None:
    """Return the rows of a queue's messages in a store without priorities; None if one of them expires."""
    puts, size = [], 0
    pack_key, pack_where = KEY.pack, WHERE.pack
    for send in sends:
        if send.expires_at_ms:
            return None
        own = send.own
        puts.append((pack_key(number, send.seq), pack_where(*own)))
        size += own[2]
    return puts, size


@inner_loop
def note_ids(ids: dict[int, tuple[int, bytes]], sends: Sequence[Send]) -> None:
    """Note by their seqs the destinations and the ids of messages that have one which is no key of a map."""
    for send in sends:
        if send.name is not None and not send.state.is_map:
            ids[send.seq] = (send.state.number, send.name)


@inner_loop
def rows_of_many(number: int, sends: SendMany) -> Iterable[tuple[bytes, bytes]]:
    """Yield the rows of messages that follow each other in the journal; each row once it is asked for."""
    lsn, offset = sends.own
    head = SEND_OVERHEAD + len(sends.head)
    for at, body in enumerate(sends.bodies):
        length = head + len(body)
        yield KEY.pack(number, sends.seq + at), WHERE.pack(lsn + at, offset, length)
        offset += length


@inner_loop
def places_of(rows: list[tuple[bytes, bytes]]) -> list[Place]:
    """Return the places that the rows of a queue's messages say."""
    unpack_seq, unpack_where, plain = KEY_SEQ.unpack, WHERE.unpack, WHERE.size
    return [
        (0, *unpack_seq(key), 0, 0, unpack_where(value))
        if len(value) == plain
        else read_row(unpack_seq(key)[0], value)[0]
        for key, value in rows
    ]


def expiry_key(since: int) -> bytes:
    """Return a key of `expiries`: all that expires later (ms) comes behind it."""
    return EXPIRY_KEY.pack(since + 1, 0)


def is_waiting(key: bytes) -> bool:
    """Return whether this is the key of a message that waits as a whole: the number's highest bit."""
    return key[0] >= 0x80


def more_of(order: int, expires: int, pending: int) -> bytes:
    """Return what a row has behind where its message is."""
    return MORE.pack(expires, order) + pending.to_bytes((pending.bit_length() + 7) // 8, "little")


def with_pending(value: bytes, pending: int) -> bytes:
    """Return the same row of a topic's message with other bits."""
    return value[:MORE_AT] + pending.to_bytes((pending.bit_length() + 7) // 8, "little")
