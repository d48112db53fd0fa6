"""Messages of JMS as messages of ours."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.adapters.core.record.encoding import HEAD
from anabranch.adapters.core.record.headers import unpack_headers
from anabranch.adapters.kahadb import content
from anabranch.adapters.kahadb.commands import AddMessage, decode
from anabranch.adapters.kahadb.content import NotCarriedError, carried, read_properties
from anabranch.adapters.kahadb.openwire import OpenWireError

from . import writer as w

MIB = 1 << 20


def command(openwire: bytes) -> AddMessage:
    found = decode(w.add("q", "ID:a-1:1:1:1", openwire=openwire))
    assert isinstance(found, AddMessage)
    return found


def parts(openwire: bytes, limit: int = MIB) -> tuple[tuple[int, ...], str, dict[str, Any], bytes, int]:
    """Head (priority, sent at, expires at), id, headers, body, deliveries."""
    record, deliveries = carried(command(openwire), limit)
    priority, flags, id_bytes, header_bytes, sent, expires = HEAD.unpack_from(record)
    assert flags == 0
    name, rest = record[HEAD.size : HEAD.size + id_bytes], record[HEAD.size + id_bytes :]
    return (
        (priority, sent, expires),
        name.decode(),
        unpack_headers(rest[:header_bytes]),
        rest[header_bytes:],
        deliveries,
    )


def utf(value: bytes) -> bytes:
    return struct.pack(">i", len(value)) + value


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize(
    ("kind", "stored", "body", "content_type"),
    [
        (23, None, b"", "application/x-activemq-message"),
        (24, b"\x00\xff", b"\x00\xff", "application/octet-stream"),
        (25, b"\x00\x00\x00\x00", b"\x00\x00\x00\x00", "application/x-activemq-map"),
        (26, b"\xac\xed", b"\xac\xed", "application/x-java-serialized-object"),
        (27, b"\x09\x00\x01x", b"\x09\x00\x01x", "application/x-activemq-stream"),
        (28, utf(b"a\xc0\x80\xed\xa0\xbd\xed\xb8\x80"), "a\0😀".encode(), "text/plain; charset=utf-8"),
        (28, None, b"", "text/plain; charset=utf-8"),
    ],
)
def test_each_class_of_message(
    kind: int, stored: bytes | None, body: bytes, content_type: str, compressed: bool
) -> None:
    if compressed and stored is not None:
        stored = (struct.pack(">i", len(stored)) if kind == 24 else b"") + zlib.compress(stored)
    found = parts(w.any_message(kind, stored, compressed=compressed))
    assert found == ((4, 1_700_000_000_000, 0), "ID:a-1:1:1:1", {"content-type": content_type}, body, 0)


@pytest.mark.parametrize(("length", "body"), [(3, b"abc"), (0, b"")])
def test_a_compressed_bytes_message_ends_where_it_says(length: int, body: bytes) -> None:
    """ActiveMQ compresses its whole buffer."""
    stored = struct.pack(">i", length) + zlib.compress(b"abc" + bytes(61))
    assert parts(w.any_message(24, stored, compressed=True))[3] == body


def test_what_jms_says_of_a_message() -> None:
    head, name, headers, _, deliveries = parts(
        w.any_message(
            24, b"", text_view="ID:other", original="elsewhere", reply_to=b"\x01\x65" + w.text("answers"), group="g",
            correlation="c", jms_type="t", user="u", priority=9, expiration=5, timestamp=7, redeliveries=2,
        )
    )  # fmt: skip
    assert (head, name, deliveries) == ((9, 7, 5), "ID:other", 2)
    assert headers == {
        "content-type": "application/octet-stream",
        "JMSType": "t",
        "JMSCorrelationID": "c",
        "JMSReplyTo": "topic://answers",
        "JMSXGroupID": "g",
        "JMSXGroupSeq": 3,
        "message_group": "g",
        "JMSXUserID": "u",
        "ActiveMQOriginalDestination": "queue://elsewhere",
    }


def test_an_id_of_another_protocol_is_as_jms_shows_it() -> None:
    assert parts(w.any_message(24, b"", text_view="order-17"))[1] == "ID:order-17"


def test_what_the_classes_of_activemq_wrote() -> None:
    """Six classes of messages, plain and then compressed, as version 5.17.2 marshals them for its store."""
    lines = (Path(__file__).parent / "data" / "messages.hex").read_text().split()
    found = [parts(bytes.fromhex(line)) for line in lines]
    plain, compressed = found[:6], found[6:]
    assert plain == compressed and len(lines[6]) != len(lines[0])
    assert [body for _, _, _, body, _ in plain] == [
        b"\1\2\3\0\3xyz",
        "hä\0😀".encode(),
        b"\0\0\0\2\0\1i\5\0\0\0\5\0\1k\x09\0\1v",
        b"\x09\0\1x\6\0\0\0\0\0\0\0\7",
        b"\xac\xed\0\5sr\0\x0ejava.util.Datehj\x81\1KYt\x19\3\0\0xpw\x08\0\0\0\0\0\0\0\0xy",
        b"",
    ]
    for head, _, headers, _, deliveries in plain:
        assert (head, deliveries) == ((0, 9, 0), 3)
        headers.pop("content-type")
        assert headers == {
            "s": "ä", "i": -1, "l": 1 << 40, "d": 0.1, "f": 0.5, "b": True, "y": -2, "h": -3, "m": {"a": [1, "z"]},
            "n": None, "JMSReplyTo": "temp-queue://ID:c:1", "JMSXGroupID": "g", "JMSXGroupSeq": 2, "JMSXUserID": "u",
            "message_group": "g",
        }  # fmt: skip


VALUES: dict[str, tuple[bytes, Any]] = {
    "null": (b"\x00", None),
    "bool": (b"\x01\x01", True),
    "byte": (b"\x02\xff", -1),
    "char": (b"\x03\x00\xe4", "ä"),
    "short": (b"\x04\xff\xfe", -2),
    "int": (b"\x05\x00\x00\x00\x07", 7),
    "long": (b"\x06" + struct.pack(">q", -(1 << 63)), -(1 << 63)),
    "double": (b"\x07" + struct.pack(">d", 0.1), 0.1),
    "float": (b"\x08" + struct.pack(">f", 0.5), 0.5),
    "text": (b"\x09\x00\x01x", "x"),
    "bytes": (b"\x0a\x00\x00\x00\x01\xff", b"\xff"),
    "map": (b"\x0b\x00\x00\x00\x01\x00\x01k\x00", {"k": None}),
    "list": (b"\x0c\x00\x00\x00\x02\x01\x00\x01\x01", [False, True]),
    "long text": (b"\x0d\x00\x00\x00\x02xy", "xy"),
}


def properties(values: dict[str, bytes]) -> bytes:
    return struct.pack(">i", len(values)) + b"".join(w.short_text(name) + value for name, value in values.items())


def test_properties_of_every_type() -> None:
    data = properties({name: value for name, (value, _) in VALUES.items()})
    headers = parts(w.any_message(24, b"", properties=data))[2]
    assert headers == {name: value for name, (_, value) in VALUES.items()} | {
        "content-type": "application/octet-stream"
    }


def test_a_content_type_that_the_sender_gave_stays() -> None:
    data = properties({"content-type": b"\x09" + w.short_text("text/xml")})
    assert parts(w.any_message(28, utf(b"<a/>"), properties=data))[2]["content-type"] == "text/xml"


@pytest.mark.parametrize(
    ("openwire", "what"),
    [
        (w.any_message(29, b""), content.BLOB),
        (w.any_message(24, b"x" * MIB), content.TOO_LARGE),
        (w.any_message(26, zlib.compress(bytes(100 * MIB)), compressed=True), content.TOO_LARGE),
        (w.any_message(26, zlib.compress(b"123")[:-2], compressed=True), content.UNREADABLE),
        (w.any_message(24, struct.pack(">i", 4) + zlib.compress(b"abc"), compressed=True), content.UNREADABLE),
        (w.any_message(24, struct.pack(">i", -1) + zlib.compress(b"abc"), compressed=True), content.UNREADABLE),
        (w.any_message(24, struct.pack(">i", 2 * MIB) + b"", compressed=True), content.TOO_LARGE),
        (w.any_message(26, b"not compressed", compressed=True), content.UNREADABLE),
        (w.any_message(28, struct.pack(">i", 9) + b"abc"), content.UNREADABLE),
        (w.any_message(28, b"ab"), content.UNREADABLE),
        (w.any_message(24, b"", properties=properties({"x": b"\x63"})), content.UNREADABLE),
        (w.any_message(24, b"", properties=properties({"x": b"\x0c\x00\x00\x00\x01" * 40})), content.UNREADABLE),
        (w.any_message(24, b"", properties=b"\x00\x00\x00\x01"), content.UNREADABLE),
        (w.any_message(24, b"", properties=b"\x00\x00\x00\x00\x00"), content.UNREADABLE),
        (w.any_message(24, b"")[:40], content.UNREADABLE),
        (b"", content.UNREADABLE),
    ],
)
def test_what_cannot_be_carried_over_says_why(openwire: bytes, what: str) -> None:
    with pytest.raises(NotCarriedError, match=what):
        carried(command(openwire), MIB)


def test_a_message_just_as_large_as_it_may_be() -> None:
    openwire = w.any_message(28, zlib.compress(utf(bytes(1000).replace(b"\0", b"a"))), compressed=True)
    record = carried(command(openwire), MIB).record
    limit = len(record) - HEAD.size
    assert carried(command(openwire), limit).record == record
    with pytest.raises(NotCarriedError, match=content.TOO_LARGE):
        carried(command(openwire), limit - 1)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=60))
def test_any_bytes_are_properties_or_an_error(data: bytes) -> None:
    try:
        read_properties(data)
    except (OpenWireError, IndexError, struct.error):
        pass
