"""A message as bytes: what every kind of store keeps of it beside its destination and its seq.

head (26 bytes): priority, flags, length of the message id, length of the headers, sent at (ms), expires at (ms)
message id, headers, body
"""

from __future__ import annotations

import struct
import time
from typing import Final, NamedTuple

import msgspec

from ....policies.errors import MessageTooLargeError
from ....policies.names.destination import Destination, Kind
from ...system.clock import before_1970
from ..messages import DEFAULT_PRIORITY, GROUP, Headers, Outgoing, in_group, plain_body, require_order
from .headers import pack_headers, pack_id, unpack_headers
from .large import REFERENCE, StoredBody

HEAD: Final = struct.Struct("<HHHIQQ")
assert HEAD.size == 26

REQUEUED: Final = 1
"""A flag: stored even if its id is in the duplicate window."""

NONPERSISTENT: Final = 2
"""A flag: sent with `persistent=False`."""

LARGE: Final = 4
"""A flag: the body is kept apart, and here is what says which it is (reference.py)."""

REMOVAL: Final = 1
"""The expiry (ms) of a map's value that was never there. A value that is sent so takes the place of the value before,
and is dead at once, so that its key has none."""

_NEVER: Final = 0
_pack = HEAD.pack
_unpack = HEAD.unpack_from
_GROUP: Final = pack_headers({GROUP: "x"})[1:-2]
"""The name of the header as it stands among packed ones."""
_FLAGS: Final = struct.Struct("<H")
_FLAGS_AT: Final = struct.calcsize("<H")  # behind the priority
_pack_flags = _FLAGS.pack


def encode(
    destination: Destination,
    body: object,
    headers: Headers | None,
    message_id: str | None,
    limit: int,
    priority: int = DEFAULT_PRIORITY,
    expires_at_ms: int = 0,
    flags: int = 0,
) -> tuple[bytes, bytes | None]:
    """Return the record, and the message id as bytes if it has one.

    Raises TypeError for a body that is not bytes or headers that are not plain values, ValueError for a message id or
    a value that has no place in the format, MessageTooLargeError beyond `limit` bytes, and ClockError.
    """
    if priority is not DEFAULT_PRIORITY or expires_at_ms is not _NEVER:
        require_order(priority, expires_at_ms)
    now = time.time_ns() // 1_000_000
    if now < 0:
        raise before_1970(now)
    if type(body) is not bytes:
        body = plain_body(body)
    packed = pack_headers(headers) if headers else b""
    if message_id is None:
        name = None
        start = _pack(priority, flags, 0, len(packed), now, expires_at_ms)
        record = start + packed + body if packed else start + body
    else:
        name = pack_id(message_id, destination.kind is Kind.MAP)
        start = _pack(priority, flags, len(name), len(packed), now, expires_at_ms)
        record = b"".join((start, name, packed, body))
    size = len(record) - HEAD.size
    if size > limit:
        raise MessageTooLargeError(
            f"a message of {size} bytes for {destination} is larger than message_bytes_max, {limit}; "
            "raise the limit or send it in parts"
        )
    return record, name


def encode_outgoing(destination: Destination, message: Outgoing, limit: int) -> tuple[bytes, bytes | None]:
    """Return the record and the id, as `encode`, of a message that a transaction, or a send of many, gathers."""
    body, headers, message_id, priority, expires_at_ms, persistent, requeued, _, group = message
    if group is not None:
        headers = in_group(headers, group)
    flags = (REQUEUED if requeued else 0) | (0 if persistent else NONPERSISTENT)
    if isinstance(body, StoredBody):
        body, flags = body.reference, flags | LARGE
    return encode(destination, body, headers, message_id, limit, priority, expires_at_ms, flags)


def encode_sent(
    body: bytes, headers: Headers, message_id: str, priority: int, sent_at_ms: int, expires_at_ms: int
) -> bytes:
    """Return the record of a message that was sent elsewhere, with the time at which it was. Raises TypeError and
    ValueError as `encode`."""
    parts = Parts(pack_id(message_id), headers, priority, sent_at_ms, expires_at_ms)
    return encode_parts(parts, body)


class Parts(NamedTuple):
    """A record's parts but for its body."""

    name: bytes
    """The message id; empty: it has none."""
    headers: Headers
    priority: int
    sent_at_ms: int
    expires_at_ms: int


def encode_parts(parts: Parts, body: bytes | StoredBody) -> bytes:
    """Return the record of these parts. Raises TypeError and ValueError as `encode`."""
    name, headers, priority, sent, expires = parts
    require_order(priority, expires)
    require_order(priority, sent)
    packed, flags = pack_headers(headers) if headers else b"", 0
    if isinstance(body, StoredBody):
        body, flags = body.reference, LARGE
    return b"".join((_pack(priority, flags, len(name), len(packed), sent, expires), name, packed, body))


def parts_of(record: bytes) -> Parts:
    """Return the parts of a record. Raises msgspec.MsgspecError for headers that do not read."""
    priority, _, id_bytes, headers_bytes, sent, expires = _unpack(record)
    end = HEAD.size + id_bytes
    headers = unpack_headers(record[end : end + headers_bytes]) if headers_bytes else {}
    return Parts(record[HEAD.size : end], headers, priority, sent, expires)


def order_and_expiry(record: bytes) -> tuple[int, int]:
    """Return a record's priority, and when it expires (ms, 0: never)."""
    head = _unpack(record)
    return head[0], head[5]


def sent_at_ms(record: bytes) -> int:
    """Return when a record's message was sent."""
    sent: int = _unpack(record)[4]
    return sent


def name_of(record: bytes) -> bytes | None:
    """Return a record's message id, None if it has none."""
    length = _unpack(record)[2]
    return record[HEAD.size : HEAD.size + length] if length else None


def body_of(record: bytes) -> bytes:
    """Return a record's body alone."""
    head = _unpack(record)
    return record[HEAD.size + head[2] + head[3] :]


def group_of(record: bytes) -> str | None:
    """Return the group of a record's message; None if it has none, or does not parse."""
    try:
        _, _, id_bytes, headers_bytes, _, _ = _unpack(record)
        first = HEAD.size + id_bytes
        last = first + headers_bytes
        if record.find(_GROUP, first, last) < 0:
            return None
        group = unpack_headers(record[first:last]).get(GROUP)  # it may be another header's value
    except (struct.error, ValueError, msgspec.MsgspecError, RecursionError):
        return None
    return group if isinstance(group, str) else None


def is_requeued(record: bytes) -> bool:
    """Return whether a record is stored whatever the duplicate window says."""
    return bool(_unpack(record)[1] & REQUEUED)


def as_carried(record: bytes) -> bytes:
    """Return the record as another store of any kind is given it: without what only its first store had to know."""
    flags = _unpack(record)[1]
    if not flags & (REQUEUED | NONPERSISTENT):
        return record
    return record[:_FLAGS_AT] + _pack_flags(flags & ~(REQUEUED | NONPERSISTENT)) + record[_FLAGS_AT + _FLAGS.size :]


def is_large(record: bytes) -> bool:
    """Return whether the body of a record is kept apart."""
    return bool(_unpack(record)[1] & LARGE)


def reference_in(record: bytes) -> bytes:
    """Return the reference in the record of a large message: it says which body is the message's."""
    return record[-REFERENCE.size :]
