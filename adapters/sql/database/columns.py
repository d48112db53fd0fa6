"""A message's record (core/record/encoding.py) as the columns of MESSAGES, and back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from ...core.operations.changes import Send
from ...core.record.encoding import HEAD, LARGE
from ...core.record.place import Place, order_of

# Where a row has what `select.message` and `select.messages` find.
ID, PRIORITY, EXPIRES, SIZE, PARTS, DELIVERIES, SENT_AT, MESSAGE_ID, HEADERS, CONTENT = range(10)

KEPT_APART: Final = -1
"""The value of PARTS for a message whose CONTENT says which body in LARGE it has."""

_unpack: Final = HEAD.unpack_from
_pack: Final = HEAD.pack


def message_row(send: Send, number: int, queue_name: str, chunk_size: int) -> tuple[dict[str, Any], bytes]:
    """Return a row of MESSAGES with this destination's number, and the body if that belongs into CHUNKS, else b""."""
    record = send.record
    priority, flags, id_bytes, headers_bytes, sent_at_ms, expires_at_ms = _unpack(record)
    headers_at = HEAD.size + id_bytes
    body_at = headers_at + headers_bytes
    body = record[body_at:]
    parts = -(-len(body) // chunk_size) if len(body) > chunk_size else 0
    if flags & LARGE:
        parts = KEPT_APART
    values = {
        "id": send.seq,
        "queuename": queue_name,
        "destination": number,
        "priority": priority,
        "deliverycount": 0,
        "expirationtime": expires_at_ms,
        "sentat": sent_at_ms,
        "size": len(record),
        "parts": parts,
        "messageid": escaped(record[HEAD.size : headers_at].decode()) if id_bytes else None,
        "headers": record[headers_at:body_at] if headers_bytes else None,
        "content": None if parts > 0 else body,
        "mapkey": send.name if send.state.is_map else None,
        "due": None,
    }
    return values, body if parts > 0 else b""


def place_of(row: Sequence[Any], priorities: bool) -> Place:
    """Return where a row's message is. SIZE and PARTS are the part of core's Place that is ours."""
    return (
        order_of(row[PRIORITY], priorities), row[ID], row[EXPIRES], row[DELIVERIES], (row[SIZE], row[PARTS]),
    )  # fmt: skip


def record_of(row: Sequence[Any], body: bytes | None = None) -> bytes:
    """Return the record of a row. `body` is its body, if that is not in the row."""
    if body is None:
        body = bytes(row[CONTENT])
    name = b"" if row[MESSAGE_ID] is None else unescaped(row[MESSAGE_ID]).encode()
    headers = b"" if row[HEADERS] is None else bytes(row[HEADERS])
    head = _pack(
        row[PRIORITY], LARGE if row[PARTS] == KEPT_APART else 0, len(name), len(headers), row[SENT_AT], row[EXPIRES]
    )
    return head + name + headers + body if name or headers else head + body


def chunk_rows(row: int, body: bytes, size: int) -> Iterator[dict[str, Any]]:
    """Yield the rows of CHUNKS for a body."""
    for part, start in enumerate(range(0, len(body), size)):
        yield {"id": row, "part": part, "content": body[start : start + size]}


# PostgreSQL's texts hold no NUL, which a message id or a subscription's name may.


def escaped(text: str) -> str:
    return text.replace("\x1a", "\x1a1").replace("\0", "\x1a0") if "\0" in text or "\x1a" in text else text


def unescaped(text: str) -> str:
    return text.replace("\x1a0", "\0").replace("\x1a1", "\x1a") if "\x1a" in text else text
