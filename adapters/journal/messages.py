"""A message's bytes inside a SEND record: made by the sender's thread, read back by the receiver's."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
from google_crc32c import extend as crc32c

from ...policies.errors import MessageTooLargeError
from ..base import Headers, Message, Store
from . import format as f
from .destinations import DestinationState, Place
from .segment import Segment

MESSAGE_ID_BYTES_MAX: Final = 1024
SPAN_BYTES: Final = 1 << 20
"""Neighbouring messages are read with one call of at most this many bytes."""

_PLAIN: Final = frozenset((str, int, float, bool, bytes, type(None)))
_encode_headers = msgspec.msgpack.Encoder().encode
_decode_headers = msgspec.msgpack.Decoder(dict[str, Any]).decode
_MESSAGE_AT: Final = f.RECORD_HEADER.size + f.SEQ.size + f.MESSAGE.size
_unpack = f.MESSAGE_IN_RECORD.unpack_from
_unpack_crc = f.CRC.unpack_from


def encode(
    state: DestinationState, body: bytes, headers: Headers | None, message_id: str | None, limit: int
) -> tuple[bytes, tuple[int, bytes] | None]:
    """What follows the seq in a SEND's payload, and the message's key in the duplicate window.

    Raises TypeError for a body that is not bytes or headers that are not plain values, ValueError for a message id or
    a value that has no place in the format, and MessageTooLargeError.
    """
    if not isinstance(body, bytes):
        if not isinstance(body, (bytearray, memoryview)):
            raise TypeError(f"a message body is bytes, not {type(body).__name__}; encode it first")
        body = bytes(body)
    packed = _pack_headers(headers) if headers else b""
    if message_id is None:
        start = f.MESSAGE.pack(state.id, f.DEFAULT_PRIORITY, 0, 0, len(packed), time.time_ns() // 1_000_000, 0)
        rest = start + packed + body if packed else start + body
        key = None
    else:
        if not isinstance(message_id, str):
            raise TypeError(f"a message_id is a str, not {type(message_id).__name__}: {message_id!r}")
        name = message_id.encode()
        if not name or len(name) > MESSAGE_ID_BYTES_MAX:
            raise ValueError(
                f"message_id {message_id[:40]!r} takes {len(name)} bytes; 1 to {MESSAGE_ID_BYTES_MAX} are allowed"
            )
        start = f.MESSAGE.pack(state.id, f.DEFAULT_PRIORITY, 0, len(name), len(packed), time.time_ns() // 1_000_000, 0)
        rest = b"".join((start, name, packed, body))
        key = (state.id, name)
    if len(rest) > limit:
        raise MessageTooLargeError(
            f"a message of {len(rest)} bytes for {state.destination} is larger than message_bytes_max, {limit}; "
            "raise the limit or send it in parts"
        )
    return rest, key


def _pack_headers(headers: Headers) -> bytes:
    if not isinstance(headers, Mapping):
        raise TypeError(f"headers map names to plain values; found {type(headers).__name__}")
    plain = {}
    for name, value in headers.items():
        if type(name) is not str or type(value) not in _PLAIN:
            name, value = _plain_header(name, value)
        plain[name] = value
    try:
        return _encode_headers(plain)
    except OverflowError:
        raise ValueError(f"a header's integer is beyond 64 bits: {plain!r}; send it as a str") from None


def _plain_header(name: object, value: object) -> tuple[str, Any]:
    """A header of derived types (an IntEnum, say) as the plain ones that it comes back as."""
    if isinstance(name, str):
        name = str.__str__(name)
        if type(value) in _PLAIN:
            return name, value
        if isinstance(value, str):
            return name, str.__str__(value)
        for kind in (int, float, bytes):
            if isinstance(value, kind):
                return name, kind(value)
    raise TypeError(
        f"header {name!r}: {value!r} is not plain: names are str, values str, int, float, bool, bytes or None"
    )


def decode(
    store: Store, state: DestinationState, seed: int, place: Place, record: bytes, leased: bool
) -> Message | None:
    """The message in `record`, which was read at `place`; None if it is not there (damage, or a file used again)."""
    seq, lsn, offset, length = place
    if len(record) != length or _unpack_crc(record)[0] != crc32c(seed ^ offset, record[4:]):
        return None
    _, found_lsn, kind, _, _, found_seq, number, _, _, id_bytes, headers_bytes, timestamp_ms, _ = _unpack(record, 4)
    if found_seq != seq or found_lsn != lsn or kind != f.SEND or number != state.id:
        return None
    if not id_bytes and not headers_bytes:
        return Message(store, state.destination, seq, record[_MESSAGE_AT:], {}, None, timestamp_ms, leased, state)
    at = _MESSAGE_AT + id_bytes
    message_id = record[_MESSAGE_AT:at].decode() if id_bytes else None
    headers = _decode_headers(record[at : at + headers_bytes]) if headers_bytes else {}
    return Message(
        store, state.destination, seq, record[at + headers_bytes :], headers, message_id, timestamp_ms, leased, state
    )


def read_record(segment: Segment, place: Place) -> bytes:
    """The bytes at a place, fewer at the end of the file."""
    return os.pread(segment.open().fd, place[3], place[2])


def read_run(segment: Segment, places: Sequence[Place]) -> list[bytes]:
    """The records at places that follow each other in one segment, with one call."""
    start = places[0][2]
    data = os.pread(segment.open().fd, places[-1][2] + places[-1][3] - start, start)
    return [data[offset - start : offset - start + length] for _, _, offset, length in places]


def runs(places: Sequence[Place], segments: Sequence[Segment | None]) -> list[tuple[Segment | None, list[Place]]]:
    """Cut a page of places into stretches of one segment that are worth one read each."""
    found: list[tuple[Segment | None, list[Place]]] = []
    end = size = 0
    for place, segment in zip(places, segments, strict=True):
        _, _, offset, length = place
        near = bool(found) and found[-1][0] is segment and segment is not None and 0 <= offset - end <= 4 * length
        if near and size + (offset - end) + length <= SPAN_BYTES:
            found[-1][1].append(place)
            size += offset - end + length
        else:
            found.append((segment, [place]))
            size = length
        end = offset + length
    return found
