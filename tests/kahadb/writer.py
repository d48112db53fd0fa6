"""Writes small KahaDB journals, for what the real ones do not hold."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

END_MARK = b"-qMa4"
QUEUE, TOPIC = 0, 1


def varint(value: int) -> bytes:
    value &= 0xFFFFFFFFFFFFFFFF
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def field(number: int, value: int | bytes | str) -> bytes:
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(data)) + data


def command(number: int, *fields: bytes) -> bytes:
    body = b"".join(fields)
    return bytes([number]) + varint(len(body)) + body


def record(payload: bytes) -> bytes:
    return struct.pack(">IB", len(payload) + 5, 1) + payload


def batch(*payloads: bytes, checksum: bool = True) -> bytes:
    body = b"".join(record(payload) for payload in payloads)
    return b"\x00\x00\x00\x1c\x02WRITE BATCH" + struct.pack(">IQ", len(body), zlib.adler32(body) * checksum) + body


def write_file(path: Path, *batches: bytes, size: int = 0, mark: bool = True) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = b"".join(batches) + (END_MARK if mark else b"")
    path.write_bytes(data.ljust(size, b"\x00"))


def destination(name: str, kind: int = QUEUE) -> bytes:
    return field(1, kind) + field(2, name)


def local(connection: str, number: int) -> bytes:
    return field(1, field(1, connection) + field(1, number))


def xa(format_id: int, name: bytes, branch: bytes) -> bytes:
    return field(2, field(1, format_id) + field(2, branch) + field(3, name))


def message(body: bytes = b"", broker_in: int = 1_700_000_000_000, timestamp: int = 0) -> bytes:
    """A bytes message with hardly anything in it."""
    head = struct.pack(">i?", 1, False) + bytes(6)  # no producer, destination, transaction, ids
    grouped = b"\x00" + struct.pack(">i", 0) + b"\x00" + struct.pack(">?qb", True, 0, 4) + b"\x00"
    content = struct.pack(">?i", True, len(body)) + body
    middle = (
        struct.pack(">q", timestamp or broker_in) + b"\x00" + content + b"\x00\x00\x00" + struct.pack(">?i", False, 0)
    )
    tail = b"\x00" + struct.pack(">q", 0) + b"\x00\x00\x00\x00" + struct.pack(">qq?", broker_in, 0, False)
    data = bytes([24]) + head + grouped + middle + tail
    return struct.pack(">i", len(data)) + data


def add(name: str, message_id: str, tx: bytes = b"", kind: int = QUEUE, openwire: bytes | None = None) -> bytes:
    return command(
        1,
        field(1, tx) if tx else b"",
        field(2, destination(name, kind)),
        field(3, message_id),
        field(4, message() if openwire is None else openwire),
    )


def remove(name: str, message_id: str, tx: bytes = b"", kind: int = QUEUE, subscription: str = "") -> bytes:
    return command(
        2,
        field(1, tx) if tx else b"",
        field(2, destination(name, kind)),
        field(3, message_id),
        field(4, b""),
        field(5, subscription) if subscription else b"",
    )


def prepare(tx: bytes) -> bytes:
    return command(3, field(1, tx))


def commit(tx: bytes) -> bytes:
    return command(4, field(1, tx))


def rollback(tx: bytes) -> bytes:
    return command(5, field(1, tx))


def remove_destination(name: str, kind: int = QUEUE) -> bytes:
    return command(6, field(1, destination(name, kind)))


def subscribe(name: str, key: str, *, retroactive: bool = False, end: bool = False) -> bytes:
    info = b"" if end else field(4, b"\x00\x00\x00\x01\x37")
    return command(7, field(1, destination(name, TOPIC)), field(2, key), field(3, int(retroactive)), info)


def update(added: bytes) -> bytes:
    size_bytes = 1 if added[1] < 0x80 else 2
    return command(10, field(1, added[1 + size_bytes :]))


def rewritten(source: int, *, skip_if_source_exists: bool = True) -> bytes:
    return command(16, field(1, source), field(2, 1), field(3, int(skip_if_source_exists)))


def loaded() -> bytes:
    return command(0, field(1, "LOADED Sat Nov 21 21:07:48 UTC 2026"))


def subscription(topic: str, client: str, name: str, selector: str | None = None, retroactive: bool = False) -> bytes:
    """A durable subscription begins."""
    info = b"\x37" + text(client) + b"\x00" + text(selector) + text(name) + b"\x00" + b"\x00"
    return command(
        7,
        field(1, destination(topic, TOPIC)),
        field(2, f"{client}:{name}"),
        field(3, int(retroactive)),
        field(4, struct.pack(">i", len(info)) + info),
    )


def text(value: str | None) -> bytes:
    """A string of OpenWire's."""
    return b"\x00" if value is None else b"\x01" + short_text(value)


def short_text(value: str) -> bytes:
    data = value.encode()
    return struct.pack(">H", len(data)) + data


def blob(value: bytes | None) -> bytes:
    """A byte array of OpenWire's."""
    return b"\x00" if value is None else b"\x01" + struct.pack(">i", len(value)) + value


def any_message(
    kind: int,
    content: bytes | None,
    *,
    properties: bytes | None = None,
    compressed: bool = False,
    text_view: str | None = None,
    original: str | None = None,
    reply_to: bytes = b"\x00",
    group: str | None = None,
    correlation: str | None = None,
    jms_type: str | None = None,
    user: str | None = None,
    priority: int = 4,
    expiration: int = 0,
    timestamp: int = 1_700_000_000_000,
    redeliveries: int = 0,
) -> bytes:
    """A message of any class, as version 11 of OpenWire has it."""
    message_id = b"\x01\x6e" + text(text_view) + b"\x00" + bytes(16)
    origin = b"\x00" if original is None else b"\x01\x64" + text(original)
    data = b"".join(
        (
            struct.pack(">Bi?", kind, 1, False),
            b"\x00\x00\x00",  # producer, destination, transaction
            origin,
            message_id,
            b"\x00",  # original transaction
            text(group),
            struct.pack(">i", 3),
            text(correlation),
            struct.pack(">?qb", True, expiration, priority),
            reply_to,
            struct.pack(">q", timestamp),
            text(jms_type),
            blob(content),
            blob(properties),
            b"\x00\x00",  # data structure, target consumer
            struct.pack(">?i", compressed, redeliveries),
            b"\x00" + bytes(8),  # broker path, arrival
            text(user),
            b"\x00\x00\x00",  # bridge, droppable, cluster
            struct.pack(">qq?", timestamp, 0, False),
        )
    )
    return struct.pack(">i", len(data)) + data
