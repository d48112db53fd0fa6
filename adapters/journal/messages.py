"""A message's bytes inside a SEND record: made by the sender's thread, read back by the receiver's."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any, Final

from google_crc32c import extend as crc32c

from ...policies.errors import MessageTooLargeError
from .. import delivery
from ..base import DEFAULT_PRIORITY, Headers, Message, Store, plain_body, require_order
from ..clock import before_1970
from ..delivery import Feed, Note
from ..headers import pack_headers, pack_id, unpack_headers
from ..wal import format as w
from ..wal.segment import Segment
from . import format as f
from .destinations import LENGTH, OFFSET, DestinationState, Place

SPAN_BYTES: Final = 1 << 20
"""Messages that lie so close together are read with one call."""

_MESSAGE_AT: Final = w.RECORD_HEADER.size + f.SEQ.size + f.MESSAGE.size
_unpack = f.MESSAGE_READ.unpack_from
_unpack_crc = w.CRC.unpack_from
_NEVER: Final = 0


def encode(
    state: DestinationState,
    body: bytes,
    headers: Headers | None,
    message_id: str | None,
    limit: int,
    priority: int = DEFAULT_PRIORITY,
    expires_at_ms: int = 0,
    flags: int = 0,
) -> tuple[bytes, tuple[int, bytes] | None]:
    """What follows the seq in a SEND's payload, and the message's key in the duplicate window.

    Raises TypeError for a body that is not bytes or headers that are not plain values, ValueError for a message id or
    a value that has no place in the format, MessageTooLargeError, and ClockError.
    """
    if priority is not DEFAULT_PRIORITY or expires_at_ms is not _NEVER:
        require_order(priority, expires_at_ms)
    now = time.time_ns() // 1_000_000
    if now < 0:
        raise before_1970(now)
    if not isinstance(body, bytes):
        body = plain_body(body)
    packed = pack_headers(headers) if headers else b""
    if message_id is None:
        start = f.MESSAGE.pack(state.id, priority, flags, 0, len(packed), now, expires_at_ms)
        rest = start + packed + body if packed else start + body
        key = None
    else:
        name = pack_id(message_id)
        start = f.MESSAGE.pack(state.id, priority, flags, len(name), len(packed), now, expires_at_ms)
        rest = b"".join((start, name, packed, body))
        key = (state.id, name)
    if len(rest) > limit:
        raise MessageTooLargeError(
            f"a message of {len(rest)} bytes for {state.destination} is larger than message_bytes_max, {limit}; "
            "raise the limit or send it in parts"
        )
    return rest, key


def decode(
    store: Store,
    state: DestinationState,
    seed: int,
    place: Place,
    record: bytes,
    note: Note | None,
    deliveries: int = 0,
) -> Message | None:
    """The message in `record`, which was read at `place`; None if it is not there (damage, or a file used again).
    `note`: the feed or feeds it is leased for; None if it is only looked at. `deliveries`: how often it has come back.
    """
    _, seq, _, lsn, offset, length = place
    if len(record) != length or length < _MESSAGE_AT or _unpack_crc(record)[0] != crc32c(seed ^ offset, record[4:]):
        return None
    found_lsn, kind, found_seq, number, priority, id_bytes, headers_bytes, timestamp_ms, expires = _unpack(record)
    if found_seq != seq or found_lsn != lsn or kind != f.SEND or number != state.id:
        return None
    message_id, at = None, _MESSAGE_AT + id_bytes
    headers: dict[str, Any] = {}
    if id_bytes:
        message_id = record[_MESSAGE_AT:at].decode()
    if headers_bytes:
        headers = unpack_headers(record[at : at + headers_bytes])
        at += headers_bytes
    leased = note is not None
    message = Message(
        store, state.destination, seq, record[at:], headers, message_id, timestamp_ms, leased, note, priority, expires,
        deliveries + leased,
    )  # fmt: skip
    if leased and state.is_topic and type(note) is Feed:
        message.subscription = note.key
    return message


def order_of(rest: bytes, priorities: bool) -> tuple[int, int] | None:
    """Order and expiry (ms) of a message that `encode` made; None where nobody needs to know either."""
    _, priority, _, _, _, _, expires = f.MESSAGE.unpack_from(rest)
    return (delivery.order_of(priority, priorities), expires) if priorities or expires else None


def key_of(state: DestinationState, rest: bytes) -> tuple[int, bytes] | None:
    """The key in the duplicate window of a message that `encode` made."""
    id_bytes = f.MESSAGE.unpack_from(rest)[3]
    return (state.id, rest[f.MESSAGE.size : f.MESSAGE.size + id_bytes]) if id_bytes else None


def read_record(segment: Segment, place: Place) -> bytes:
    """The bytes at a place, fewer at the end of the file."""
    file = segment.open()
    return os.pread(file.fd, place[LENGTH], place[OFFSET])


def span_of(places: Sequence[Place]) -> tuple[int, int]:
    """Where the first of some places in one segment begins, and where the last of them ends."""
    return min(place[OFFSET] for place in places), max(place[OFFSET] + place[LENGTH] for place in places)


def read_span(segment: Segment, first: int, last: int) -> bytes:
    """The bytes between, in one call."""
    file = segment.open()
    return os.pread(file.fd, last - first, first)
