"""A stored message's body and properties, and all of it as a record of ours: how each JMS thing maps.

| JMS | here |
|---|---|
| JMSMessageID, JMSPriority, JMSTimestamp, JMSExpiration | the message's id, priority, time and expiry |
| redelivery count | deliveries |
| properties | headers of the same names; a char is a str, lists and maps nest |
| JMSXGroupID | the message's group, too, if it is not longer than one may be |
| JMSType, JMSCorrelationID, JMSReplyTo, JMSXGroupID, JMSXGroupSeq, JMSXUserID | headers of these names, if set |
| where it was sent to first | header `ActiveMQOriginalDestination`, if it lies elsewhere now |
| class of the message | header `content-type`, unless a property of that name says more |
| body | the text as UTF-8; the bytes; of a map, stream or object ActiveMQ's own bytes; none is compressed |
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from ..core.messages import EXPIRES_MAX_MS, GROUP, GROUP_BYTES_MAX
from ..core.record.encoding import HEAD, encode_sent
from .commands import AddMessage
from .openwire import MessageInfo, OpenWireError, modified_utf8, read_message

_BYTES, _BLOB, _TEXT = 24, 29, 28

CONTENT_TYPES: Final = {
    23: "application/x-activemq-message",
    _BYTES: "application/octet-stream",
    25: "application/x-activemq-map",
    26: "application/x-java-serialized-object",
    27: "application/x-activemq-stream",
    _TEXT: "text/plain; charset=utf-8",
}
CONTENT_TYPE: Final = "content-type"
ORIGINAL: Final = "ActiveMQOriginalDestination"

BLOB: Final = "blob messages: their bodies lie on another server"
UNREADABLE: Final = "messages that cannot be decoded"
TOO_LARGE: Final = "messages larger than message_bytes_max of their store"
_NESTED_MAX: Final = 32


class NotCarriedError(Exception):
    """A message that cannot be brought over; its argument says what kind of message that is."""


class Carried(NamedTuple):
    """A message as a store of ours keeps it."""

    record: bytes
    """The record, as core/record/encoding.py makes it."""
    deliveries: int


def carried(command: AddMessage, limit: int) -> Carried:
    """Return a stored message of ActiveMQ's as one of ours. `limit`: the most bytes that body, headers and id may take.
    Raises NotCarriedError."""
    try:
        info = read_message(command.message)
        if info.type == _BLOB:
            raise NotCarriedError(BLOB)
        body = _body(command.message, info, limit)
        headers = _headers(command, info)
        record = encode_sent(
            body,
            headers,
            _message_id(command, info),
            info.priority,
            max(0, info.timestamp),
            min(max(0, info.expiration), EXPIRES_MAX_MS),
        )
    except (OpenWireError, ValueError, TypeError, struct.error, IndexError, zlib.error) as error:
        raise NotCarriedError(UNREADABLE) from error
    if len(record) - HEAD.size > limit:
        raise NotCarriedError(TOO_LARGE)
    return Carried(record, max(0, info.redeliveries))


def _message_id(command: AddMessage, info: MessageInfo) -> str:
    """Return the JMSMessageID, as a client of the broker sees it."""
    if info.text_view is None:
        return command.message_id
    return info.text_view if info.text_view.startswith("ID:") else f"ID:{info.text_view}"


def _headers(command: AddMessage, info: MessageInfo) -> dict[str, Any]:
    at = info.properties_at
    headers = read_properties(command.message[at : at + info.properties_size]) if info.properties_size else {}
    headers.setdefault(CONTENT_TYPE, CONTENT_TYPES[info.type])
    given: dict[str, str | None] = {
        "JMSType": info.jms_type,
        "JMSCorrelationID": info.correlation_id,
        "JMSReplyTo": info.reply_to,
        "JMSXGroupID": info.group_id,
        "JMSXUserID": info.user,
        ORIGINAL: info.original_destination if info.original_destination != str(command.destination) else None,
    }
    headers.update({name: value for name, value in given.items() if value is not None})
    if info.group_id is not None:
        headers["JMSXGroupSeq"] = info.group_sequence
        if 0 < len(info.group_id.encode()) <= GROUP_BYTES_MAX:
            headers[GROUP] = info.group_id
    return headers


# Bodies


def _body(message: bytes, info: MessageInfo, limit: int) -> bytes:
    content = message[info.body_at : info.body_at + info.body_size]
    if info.compressed and content:
        content = _inflated_bytes(content, limit) if info.type == _BYTES else _inflated(content, limit)
    if info.type != _TEXT or not content:
        return content
    (length,) = struct.unpack_from(">i", content)
    if length != len(content) - 4:
        raise OpenWireError(f"a text of {length} bytes in a content of {len(content)}")
    return modified_utf8(content[4:]).encode()


def _inflated_bytes(content: bytes, limit: int) -> bytes:
    """Return the inflated body of a bytes message: its length goes before it, and ActiveMQ compresses what lies behind
    it in its buffer too."""
    (length,) = struct.unpack_from(">i", content)
    if length > limit:
        raise NotCarriedError(TOO_LARGE)
    plain = zlib.decompressobj().decompress(content[4:], length) if length > 0 else b""
    if len(plain) != length:
        raise OpenWireError(f"a compressed body of {len(plain)} bytes, which says it has {length}")
    return plain


def _inflated(data: bytes, limit: int) -> bytes:
    """Return inflated bytes, never more than a little beyond `limit`: a few bytes may stand for gigabytes."""
    inflater = zlib.decompressobj()
    plain = inflater.decompress(data, limit + 5)
    if len(plain) > limit + 4:
        raise NotCarriedError(TOO_LARGE)
    if not inflater.eof:
        raise OpenWireError("a compressed body is cut")
    return plain


# Properties


def read_properties(data: bytes) -> dict[str, Any]:
    """Return the properties of a message: ActiveMQ's marshalled map. Raises OpenWireError, IndexError, struct.error."""
    values = _Values(data)
    found = values.mapping(0)
    if values.at != len(data):
        raise OpenWireError(f"{len(data) - values.at} bytes follow the properties")
    return found


class _Values:
    """A cursor over marshalled values: a type byte each, then the value."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.at = 0

    def mapping(self, depth: int) -> dict[str, Any]:
        """Return a map, which is int32 count (-1: there is none), then name and value of each."""
        return {self._string(">H"): self._value(depth) for _ in range(self._number(">i"))}

    def _value(self, depth: int) -> Any:
        kind = self._number(">b")
        if kind == 0:
            return None
        if kind in _NUMBERS:
            return self._number(_NUMBERS[kind])
        if depth > _NESTED_MAX:
            raise OpenWireError("properties nest too deep")
        read = {
            1: lambda: self._number(">?"),
            3: lambda: chr(self._number(">H")),
            9: lambda: self._string(">H"),
            10: lambda: self._bytes(self._number(">i")),
            11: lambda: self.mapping(depth + 1),
            12: lambda: [self._value(depth + 1) for _ in range(self._number(">i"))],
            13: lambda: self._string(">i"),
        }.get(kind)
        if read is None:
            raise OpenWireError(f"a property of type {kind}")
        call: Callable[[], Any] = read
        return call()

    def _number(self, form: str) -> Any:
        (value,) = struct.unpack_from(form, self._data, self.at)
        self.at += struct.calcsize(form)
        return value

    def _bytes(self, length: int) -> bytes:
        if not 0 <= length <= len(self._data) - self.at:
            raise OpenWireError(f"{length} bytes of a property, of which {len(self._data) - self.at} are there")
        self.at += length
        return self._data[self.at - length : self.at]

    def _string(self, length: str) -> str:
        return modified_utf8(self._bytes(self._number(length)))


_NUMBERS: Final = {2: ">b", 4: ">h", 5: ">i", 6: ">q", 7: ">d", 8: ">f"}
