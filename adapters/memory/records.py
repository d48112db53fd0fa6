"""A message as it lies in memory and in a swap file.

    head (16 bytes): priority, length of the message id, length of the headers, time stamp in ms
    message id, headers, body

A large body is kept apart, so that it is not copied: the record is then a pair of what comes before it and the body.
"""

from __future__ import annotations

import struct
import sys
import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ...policies.destination import Destination
from ...policies.errors import MessageTooLargeError
from ..base import Message, Outgoing, Store, SubscriptionKey, plain_body, require_order
from ..clock import before_1970
from ..delivery import Note
from ..headers import pack_headers, pack_id, unpack_headers

if TYPE_CHECKING:
    from .chunks import Chunk

HEAD: Final = struct.Struct("<BxHIQ")
assert HEAD.size == 16

APART: Final = 64 * 1024
"""Bytes; a body of at least so many is kept apart."""

Record = bytes | tuple[bytes, bytes]

SLOT: Final = 9
"""Bytes that a record takes in the list of its chunk, which grows ahead."""
PAIR: Final = 64
"""Bytes of the pair itself, where the body is kept apart."""


class Encoded(NamedTuple):
    """A message that is to be sent."""

    destination: Destination
    record: Record
    name: bytes | None
    """Its id."""
    priority: int
    expires_at_ms: int
    size: int
    cost: int
    requeued: bool = False
    """Stored even if its id is in the duplicate window."""


def encode(destination: Destination, message: Outgoing, limit: int) -> Encoded:
    """Raises TypeError and ValueError for what is no message, MessageTooLargeError beyond `limit` bytes,
    ClockError."""
    body, headers, message_id, priority, expires_at_ms, _, requeued = message
    if type(body) is not bytes:
        body = bytes(plain_body(body))
    require_order(priority, expires_at_ms)
    packed = pack_headers(headers) if headers else b""
    name = pack_id(message_id) if message_id is not None else b""
    size = len(name) + len(packed) + len(body)
    if size > limit:
        raise MessageTooLargeError(
            f"a message of {size} bytes for {destination} is larger than message_bytes_max, {limit}; "
            "raise the limit or send it in parts"
        )
    now = time.time_ns() // 1_000_000
    if now < 0:
        raise before_1970(now)
    start = HEAD.pack(priority, len(name), len(packed), now)
    record: Record
    if len(body) >= APART:
        record = (start + name + packed, body)
    elif name or packed:
        record = b"".join((start, name, packed, body))
    else:
        record = start + body
    size += HEAD.size
    return Encoded(destination, record, name or None, priority, expires_at_ms, size, cost_of(record), requeued)


def cost_of(record: Record) -> int:
    """Bytes that it takes in memory, its place in a chunk's lists included."""
    if isinstance(record, tuple):
        return SLOT + PAIR + _rounded(sys.getsizeof(record[0])) + _rounded(sys.getsizeof(record[1]))
    return SLOT + _rounded(sys.getsizeof(record))


def _rounded(size: int) -> int:
    # CPython gives out multiples of 16 bytes up to 512; beyond it malloc keeps 8 to 16 for itself.
    return (size + 15) & ~15 if size <= 512 else (size + 31) & ~15


def size_of(record: Record) -> int:
    """Bytes of the message as they count for the store's limits."""
    return len(record[0]) + len(record[1]) if isinstance(record, tuple) else len(record)


class StoredMessage(Message):
    """One of a memory store, which finds it again without looking."""

    __slots__ = ("chunk", "cost", "index", "position", "size")

    chunk: Chunk
    index: int
    size: int
    cost: int
    position: int
    """What the store's `position` said when the message took effect."""


def decode(
    store: Store,
    destination: Destination,
    chunk: Chunk,
    index: int,
    record: Record,
    note: Note | None,
    deliveries: int,
    subscription: SubscriptionKey | None,
) -> StoredMessage:
    """The message; leased if there is a `note`. `deliveries`: how often it has come back."""
    head, body = record if isinstance(record, tuple) else (record, None)
    priority, id_bytes, headers_bytes, timestamp_ms = HEAD.unpack_from(head)
    at = HEAD.size + id_bytes
    headers: dict[str, Any] = unpack_headers(head[at : at + headers_bytes]) if headers_bytes else {}
    message = StoredMessage(
        store,
        destination,
        chunk.seq(index),
        head[at + headers_bytes :] if body is None else body,
        headers,
        head[HEAD.size : at].decode() if id_bytes else None,
        timestamp_ms,
        note is not None,
        note,
        priority,
        chunk.expires_at(index),
        deliveries + (note is not None),
        subscription,
    )
    message.chunk, message.index, message.size, message.cost = chunk, index, size_of(record), cost_of(record)
    message.position = chunk.positions[index] if chunk.positions is not None else 0
    return message
