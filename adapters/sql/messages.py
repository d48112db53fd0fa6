"""A message as it is stored, and read back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from ...policies.destination import Destination
from ...policies.errors import MessageTooLargeError
from ..base import Outgoing, plain_body, require_order
from ..clock import now_ms
from ..headers import pack_headers, pack_id, unpack_headers

OVERHEAD: Final = 64
"""Bytes that a message counts beside what it holds."""


class Sending(NamedTuple):
    """A message that is about to be stored. Its seq comes when it is."""

    destination: Destination
    body: bytes
    headers: bytes | None
    message_id: str | None
    priority: int
    expires_at_ms: int
    sent_at_ms: int
    requeued: bool = False
    """Stored even if its id is in the duplicate window."""

    @property
    def size(self) -> int:
        """What it counts for `max_bytes`."""
        return OVERHEAD + len(self.body) + len(self.headers or b"") + len(self.message_id or "")


STAGE_BITS: Final = 24
"""A branch that is prepared natively sends less than 2 to the power of this."""


class Staged(NamedTuple):
    """One that is in MESSAGES already, where nothing finds it, until its branch has its outcome (native.py)."""

    destination: Destination
    message_id: str | None
    priority: int
    expires_at_ms: int
    size: int
    parts: int
    stage: int
    """The number of its branch."""
    place: int
    """Among the branch's sends."""
    requeued: bool = False

    @property
    def row(self) -> int:
        """Its ID meanwhile."""
        return -(self.stage << STAGE_BITS | self.place)


def message_values(sending: Sending, row: int, number: int, parts: int) -> dict[str, Any]:
    """A row of MESSAGES: its ID, its destination's number, and in how many rows of CHUNKS its body is."""
    return {
        "id": row,
        "queuename": str(sending.destination),
        "destination": number,
        "priority": sending.priority,
        "deliverycount": 0,
        "expirationtime": sending.expires_at_ms,
        "sentat": sending.sent_at_ms,
        "size": sending.size,
        "parts": parts,
        "messageid": None if sending.message_id is None else escaped(sending.message_id),
        "headers": sending.headers,
        "content": None if parts else sending.body,
    }


class Row(NamedTuple):
    """What MESSAGES says of a message."""

    seq: int
    priority: int
    expires_at_ms: int
    size: int
    parts: int
    deliveries: int
    sent_at_ms: int
    message_id: str | None
    headers: bytes | None
    content: bytes | None
    """None: in CHUNKS, or too long to be read ahead."""


def sending(destination: Destination, message: Outgoing, limit: int) -> Sending:
    """Raises TypeError for a body that is not bytes or headers that are not plain values, ValueError for a message id
    or a value that has no place, MessageTooLargeError, and ClockError."""
    body, headers, message_id, priority, expires_at_ms, _, requeued = message
    if not isinstance(body, bytes):
        body = plain_body(body)
    require_order(priority, expires_at_ms)
    packed = pack_headers(headers) if headers else None
    if message_id is not None:
        pack_id(message_id)  # which refuses what is none
    found = Sending(
        destination, body, packed, message_id, priority, expires_at_ms, now_ms(), requeued
    )  # fmt: skip
    size = found.size - OVERHEAD
    if size > limit:
        raise MessageTooLargeError(
            f"a message of {size} bytes for {destination} is larger than message_bytes_max, {limit}; raise the limit "
            "or send it in parts"
        )
    return found


def headers_of(row: Row) -> dict[str, Any]:
    return unpack_headers(row.headers) if row.headers else {}


def row_of(found: Any) -> Row:
    """A row as a statement gives it."""
    seq, priority, expires, size, parts, deliveries, sent_at, message_id, headers, content = found
    return Row(
        seq, priority, expires, size, parts, deliveries, sent_at,
        None if message_id is None else unescaped(message_id),
        None if headers is None else bytes(headers),
        None if content is None else bytes(content),
    )  # fmt: skip


def chunks(body: bytes, size: int) -> Iterator[bytes]:
    for start in range(0, len(body), size):
        yield body[start : start + size]


# PostgreSQL's texts hold no NUL, which a message id or a subscription's name may.


def escaped(text: str) -> str:
    return text.replace("\x1a", "\x1a1").replace("\0", "\x1a0") if "\0" in text or "\x1a" in text else text


def unescaped(text: str) -> str:
    return text.replace("\x1a0", "\0").replace("\x1a1", "\x1a") if "\x1a" in text else text
