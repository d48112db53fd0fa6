"""OpenWire as KahaDB stores it: loose encoding, no caching, a length before each command.

An object is its type byte and its fields in a fixed order; most fields have no fixed size, so reading one means
walking all before it. Only what a usage trace, an explanation or an import asks for is decoded; the rest is stepped
over, and where content and properties lie is told: content.py reads them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

_SHORT = struct.Struct(">h")
_UNSIGNED_SHORT = struct.Struct(">H")
_INT = struct.Struct(">i")
_LONG = struct.Struct(">q")

MESSAGE_CLASSES = {23: "message", 24: "bytes", 25: "map", 26: "object", 27: "stream", 28: "text", 29: "blob"}
ACK_TYPES = {
    0: "delivered",
    1: "poison",
    2: "standard",
    3: "redelivered",
    4: "individual",
    5: "unmatched",
    6: "expired",
}
_MESSAGE_ACK = 22
_SUBSCRIPTION_INFO = 55
_MESSAGE_ID = 110
_LOCAL_TRANSACTION, _XA_TRANSACTION = 111, 112
_SCHEMES = {100: "queue://", 101: "topic://", 102: "temp-queue://", 103: "temp-topic://"}


class OpenWireError(ValueError):
    """The bytes are not the object that was expected; says why."""


# Errors that reading past the end of the bytes raises, and the one for what is plainly wrong.
_MALFORMED = (OpenWireError, IndexError, struct.error)


class LocalTransaction(NamedTuple):
    connection: str
    number: int


class XaTransaction(NamedTuple):
    format_id: int
    global_id: bytes
    branch: bytes


class MessageInfo(NamedTuple):
    """The fields of a stored message. Times are milliseconds since the epoch; sizes are bytes."""

    type: int
    transaction: LocalTransaction | XaTransaction | None
    group_id: str | None
    correlation_id: str | None
    persistent: bool
    expiration: int
    """0: never."""
    priority: int
    timestamp: int
    """When the client sent it, by the client's clock."""
    jms_type: str | None
    body_size: int
    """The content as stored: deflated if compressed, with the length that goes before a text."""
    compressed: bool
    redeliveries: int
    broker_in_time: int
    """When the broker took it, by the broker's clock."""
    broker_out_time: int
    text_view: str | None
    """The message id as its sender wrote it, where that is not the broker's own form."""
    original_destination: str | None
    """The destination that it was sent to first, of a dead letter say. As `reply_to`: `queue://name`, or another
    scheme."""
    reply_to: str | None
    group_sequence: int
    user: str | None
    body_at: int
    """The place where the content begins among the bytes that were read; `body_size` says how far it reaches."""
    properties_at: int
    properties_size: int


class AckInfo(NamedTuple):
    type: int
    message_count: int

    @property
    def type_name(self) -> str:
        return ACK_TYPES.get(self.type, f"type {self.type}")


class SubscriptionInfo(NamedTuple):
    client_id: str | None
    name: str | None
    selector: str | None
    no_local: bool


def read_message(data: bytes) -> MessageInfo:
    """Return the message in an AddMessage command. Raises OpenWireError."""
    try:
        return _message(data, has_text_view=True)
    except _MALFORMED:
        pass
    try:
        return _message(data, has_text_view=False)  # a store from before OpenWire version 10
    except (IndexError, struct.error):
        raise OpenWireError("the message is cut") from None


def read_ack(data: bytes) -> AckInfo:
    """Return the ack in a RemoveMessage command. Raises OpenWireError."""
    with _refused_if_cut("the ack"):
        reader = _Reader(data)
        reader.expect(_MESSAGE_ACK, "an ack")
        reader.skip(5)  # command id, response required
        for _ in range(3):  # destination, transaction, consumer
            reader.skip_object()
        ack_type = reader.uint8()
        for _ in range(2):  # first message, last message
            reader.skip_object()
        return AckInfo(ack_type, reader.int32())


def read_subscription(data: bytes) -> SubscriptionInfo:
    """Return the subscription in a Subscription command. Raises OpenWireError."""
    with _refused_if_cut("the subscription"):
        reader = _Reader(data)
        reader.expect(_SUBSCRIPTION_INFO, "a subscription")
        client_id = reader.text()
        reader.skip_object()  # destination
        selector = reader.text()
        name = reader.text()
        if reader.left == 0:  # before version 4 nothing follows
            return SubscriptionInfo(client_id, name, selector, False)
        reader.skip_object()  # subscribed destination
        return SubscriptionInfo(client_id, name, selector, reader.flag() if reader.left else False)


@contextmanager
def _refused_if_cut(what: str) -> Iterator[None]:
    try:
        yield
    except (IndexError, struct.error):
        raise OpenWireError(f"{what} is cut") from None


def _message(data: bytes, *, has_text_view: bool) -> MessageInfo:
    reader = _Reader(data, has_text_view=has_text_view)
    kind = reader.expect(None, "a message")
    if kind not in MESSAGE_CLASSES:
        raise OpenWireError(f"type {kind} is not a message")
    reader.skip(5)  # command id, response required
    reader.skip_object()  # producer
    reader.skip_object()  # destination
    info: dict[str, Any] = {"type": kind}
    info["transaction"] = reader.transaction()
    info["original_destination"] = reader.destination()
    info["text_view"] = reader.message_id()
    reader.skip_object()  # original transaction
    info["group_id"] = reader.text()
    info["group_sequence"] = reader.int32()
    info["correlation_id"] = reader.text()
    info["persistent"] = reader.flag()
    info["expiration"] = reader.int64()
    info["priority"] = reader.uint8()
    info["reply_to"] = reader.destination()
    info["timestamp"] = reader.int64()
    info["jms_type"] = reader.text()
    info["body_size"] = reader.skip_bytes()
    info["body_at"] = reader.at - info["body_size"]
    info["properties_size"] = reader.skip_bytes()
    info["properties_at"] = reader.at - info["properties_size"]
    reader.skip_object()  # data structure
    reader.skip_object()  # target consumer
    info["compressed"] = reader.flag()
    info["redeliveries"] = reader.int32()
    reader.skip_objects()  # broker path
    reader.skip(8)  # arrival
    info["user"] = reader.text()
    reader.skip(2)  # received by a bridge, droppable
    reader.skip_objects()  # cluster
    info["broker_in_time"] = reader.int64()
    info["broker_out_time"] = reader.int64()
    return MessageInfo(**info)


class _Reader:
    """A cursor over one marshalled object."""

    __slots__ = ("_at", "_data", "_end", "_has_text_view")

    def __init__(self, data: bytes, *, has_text_view: bool = True) -> None:
        self._data = data
        self._end = len(data)
        self._at = 0
        self._has_text_view = has_text_view

    @property
    def left(self) -> int:
        return self._end - self._at

    @property
    def at(self) -> int:
        return self._at

    def expect(self, kind: int | None, what: str) -> int:
        """Read the length and the type; the type is `kind`, or any."""
        if self._end < 5:
            raise OpenWireError(f"{what} of {self._end} bytes")
        if self.int32() != self._end - 4:
            raise OpenWireError(f"the length before {what} is not that of its bytes")
        found = self.uint8()
        if kind is not None and found != kind:
            raise OpenWireError(f"type {found} is not {what}")
        return found

    def skip(self, count: int) -> int:
        """Step over `count` bytes; return where they began. Past the end, the next thing read fails."""
        at = self._at
        self._at = at + count
        return at

    def uint8(self) -> int:
        self._at += 1
        return self._data[self._at - 1]

    def flag(self) -> bool:
        value = self._data[self._at]
        self._at += 1
        if value > 1:
            raise OpenWireError(f"{value} is no boolean, at byte {self._at - 1}")
        return value == 1

    def int32(self) -> int:
        value: int = _INT.unpack_from(self._data, self.skip(4))[0]
        return value

    def int64(self) -> int:
        value: int = _LONG.unpack_from(self._data, self.skip(8))[0]
        return value

    def text(self) -> str | None:
        if not self.flag():
            return None
        length = _UNSIGNED_SHORT.unpack_from(self._data, self.skip(2))[0]
        at = self.skip(length)
        return modified_utf8(self._data[at : at + length])

    def skip_string(self) -> None:
        if self.flag():
            self._at += 2 + _UNSIGNED_SHORT.unpack_from(self._data, self._at)[0]

    def skip_bytes(self) -> int:
        """Step over a byte array; return how long it is."""
        length = self.int32() if self.flag() else 0
        if length < 0:
            raise OpenWireError(f"a byte array of length {length}, at byte {self._at}")
        self.skip(length)
        return length

    def blob(self) -> bytes:
        length = self.skip_bytes()
        at = self._at - length
        return self._data[at : at + length]

    def destination(self) -> str | None:
        if not self.flag():
            return None
        kind = self.uint8()
        if kind not in _SCHEMES:
            raise OpenWireError(f"type {kind} is not a destination")
        return _SCHEMES[kind] + (self.text() or "")

    def message_id(self) -> str | None:
        """Step over a message id; return its text view, if it has one."""
        if not self.flag():
            return None
        if (kind := self.uint8()) != _MESSAGE_ID:
            raise OpenWireError(f"type {kind} is not a message id")
        text_view = self.text() if self._has_text_view else None
        self.skip_object()  # producer
        self.skip(16)
        return text_view

    def transaction(self) -> LocalTransaction | XaTransaction | None:
        if not self.flag():
            return None
        kind = self.uint8()
        if kind == _LOCAL_TRANSACTION:
            number = self.int64()
            if not self.flag() or self.uint8() != 120:
                raise OpenWireError("a local transaction without a connection")
            return LocalTransaction(self.text() or "", number)
        if kind == _XA_TRANSACTION:
            return XaTransaction(self.int32(), self.blob(), self.blob())
        raise OpenWireError(f"type {kind} is not a transaction")

    def skip_objects(self) -> None:
        if self.flag():
            for _ in range(_SHORT.unpack_from(self._data, self.skip(2))[0]):
                self.skip_object()

    def skip_object(self) -> None:
        if not self.flag():
            return
        kind = self.uint8()
        if 100 <= kind <= 103 or kind in (120, 124):  # destinations, connection, broker
            self.skip_string()
        elif kind == _MESSAGE_ID:
            if self._has_text_view:
                self.skip_string()
            self.skip_object()
            self.skip(16)
        elif kind == 121:  # session
            self.skip_string()
            self.skip(8)
        elif kind in (122, 123):  # consumer, producer
            self.skip_string()
            self.skip(16)
        elif kind == _LOCAL_TRANSACTION:
            self.skip(8)
            self.skip_object()
        elif kind == _XA_TRANSACTION:
            self.skip(4)
            self.skip_bytes()
            self.skip_bytes()
        else:
            raise OpenWireError(f"an object of type {kind} at byte {self._at - 1}, which no stored message holds")


def modified_utf8(data: bytes) -> str:
    """Return text in Java's form of UTF-8: NUL in two bytes, characters outside the basic plane as two surrogates."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        pass
    try:
        text = data.replace(b"\xc0\x80", b"\x00").decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return data.decode("utf-8", "backslashreplace")
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
