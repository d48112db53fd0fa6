"""The commands that records carry, decoded from their protobuf form.

One byte of command number, a varint count, then the fields. Fields are looked up by tag, that is by number *and* wire
type: in ActiveMQ's local transaction id both fields have the number 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

QUEUE, TOPIC, TEMP_QUEUE, TEMP_TOPIC = range(4)
_SCHEMES = ("queue://", "topic://", "queue://", "topic://")
MULTI_STORE_FORMAT = 61616
"""The XA format number under which mKahaDB stores a local transaction that may touch several stores."""


class CommandError(ValueError):
    """The payload is not a command that we know; says why."""


@dataclass(frozen=True, slots=True)
class KahaDestination:
    """The destination that a message is stored in: always a single one."""

    type: int
    name: str

    @property
    def is_topic(self) -> bool:
        return self.type in (TOPIC, TEMP_TOPIC)

    def __str__(self) -> str:
        return _SCHEMES[self.type] + self.name


@dataclass(frozen=True, slots=True)
class TransactionId:
    """A local transaction (a connection and a number) or an XA one. Equal text, same transaction."""

    text: str
    is_xa: bool
    format_id: int = 0


@dataclass(frozen=True, slots=True)
class Trace:
    message: str | None


@dataclass(frozen=True, slots=True)
class AddMessage:
    transaction: TransactionId | None
    destination: KahaDestination
    message_id: str
    message: bytes
    priority: int = 4
    priority_supported: bool = False


@dataclass(frozen=True, slots=True)
class RemoveMessage:
    transaction: TransactionId | None
    destination: KahaDestination
    message_id: str
    ack: bytes | None
    subscription_key: str | None = None


@dataclass(frozen=True, slots=True)
class Prepare:
    transaction: TransactionId


@dataclass(frozen=True, slots=True)
class Commit:
    transaction: TransactionId


@dataclass(frozen=True, slots=True)
class Rollback:
    transaction: TransactionId


@dataclass(frozen=True, slots=True)
class RemoveDestination:
    destination: KahaDestination


@dataclass(frozen=True, slots=True)
class Subscription:
    """A durable subscription is made, or, with no `info`, ended."""

    destination: KahaDestination
    subscription_key: str
    retroactive: bool
    info: bytes | None


@dataclass(frozen=True, slots=True)
class ProducerAudit:
    audit: bytes


@dataclass(frozen=True, slots=True)
class AckMessageFileMap:
    map: bytes


@dataclass(frozen=True, slots=True)
class UpdateMessage:
    message: AddMessage


@dataclass(frozen=True, slots=True)
class SchedulerCommand:
    """A command of the job scheduler, whose journal has the same form: none of it is about a message of a store."""

    number: int


@dataclass(frozen=True, slots=True)
class RewrittenDataFile:
    """The file holds copies of the acks of another one. They count only once that other file is gone."""

    source_file: int
    rewrite_type: int
    skip_if_source_exists: bool


Command = (
    Trace
    | AddMessage
    | RemoveMessage
    | Prepare
    | Commit
    | Rollback
    | RemoveDestination
    | Subscription
    | ProducerAudit
    | AckMessageFileMap
    | UpdateMessage
    | SchedulerCommand
    | RewrittenDataFile
)


def decode(payload: bytes) -> Command:
    """Return the command in a record's payload. Raises CommandError."""
    try:
        size, at = _varint(payload, 1)
        if at + size != len(payload):
            raise CommandError(f"the command says {size} bytes, the record holds {len(payload) - at}")
        if payload[0] in _SCHEDULER:
            return SchedulerCommand(payload[0])
        decoder = _DECODERS.get(payload[0])
        if decoder is None:
            raise CommandError(f"unknown command number {payload[0]}; a newer broker wrote it")
        return decoder(_Fields(payload, at))
    except IndexError:
        raise CommandError("the command is cut") from None


class _Fields:
    """The fields of one protobuf message, by tag. The last one of a field that comes twice counts."""

    __slots__ = ("_values",)

    def __init__(self, data: bytes, at: int = 0) -> None:
        values: dict[int, int | bytes] = {}
        end = len(data)
        while at < end:
            tag = data[at]
            at += 1
            if tag & 0x80:
                tag, at = _varint(data, at - 1)
            value = data[at]
            at += 1
            if value & 0x80:
                value, at = _varint(data, at - 1)
            if tag & 7 == 0:
                values[tag] = value
            elif tag & 7 == 2:
                if at + value > end:
                    raise CommandError(f"field {tag >> 3} is cut")
                values[tag] = data[at : at + value]
                at += value
            else:
                raise CommandError(f"field {tag >> 3} has wire type {tag & 7}, which no command uses")
        self._values = values

    def blob_or_none(self, number: int) -> bytes | None:
        value = self._values.get(number << 3 | 2)
        return value if isinstance(value, bytes) else None

    def blob(self, number: int) -> bytes:
        value = self._values.get(number << 3 | 2)
        if not isinstance(value, bytes):
            raise CommandError(f"required field {number} is missing")
        return value

    def text(self, number: int) -> str:
        return _text(self.blob(number))

    def text_or_none(self, number: int) -> str | None:
        value = self.blob_or_none(number)
        return None if value is None else _text(value)

    def integer(self, number: int, default: int | None = None) -> int:
        value = self._values.get(number << 3, default)
        if not isinstance(value, int):
            raise CommandError(f"required field {number} is missing")
        return value - (1 << 64) if value >= 1 << 63 else value

    def boolean(self, number: int, default: bool) -> bool:
        return bool(self._values.get(number << 3, default))


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, at
        shift += 7
        if shift > 63:
            raise CommandError("a number is longer than 10 bytes")


def _text(data: bytes) -> str:
    return data.decode("utf-8", "backslashreplace")


@lru_cache(maxsize=4096)
def _destination(data: bytes) -> KahaDestination:
    fields = _Fields(data)
    kind = fields.integer(1, QUEUE)
    if kind not in range(4):
        raise CommandError(f"unknown destination type {kind}")
    return KahaDestination(kind, fields.text(2))


@lru_cache(maxsize=4096)
def _transaction(data: bytes) -> TransactionId:
    info = _Fields(data)
    if (local := info.blob_or_none(1)) is not None:
        fields = _Fields(local)
        return TransactionId(f"{fields.text(1)}:{fields.integer(1)}", is_xa=False)
    fields = _Fields(info.blob(2))
    format_id, branch, name = fields.integer(1), fields.blob(2), fields.blob(3)
    if format_id == MULTI_STORE_FORMAT:  # a local transaction in disguise: the same text, so that it can be joined
        return TransactionId(f"{_text(name)}:{_text(branch)}", True, format_id)
    return TransactionId(f"xa:{format_id}:{name.hex()}:{branch.hex()}", True, format_id)


def _optional_transaction(fields: _Fields) -> TransactionId | None:
    data = fields.blob_or_none(1)
    return None if data is None else _transaction(data)


def _add_message(fields: _Fields) -> AddMessage:
    return AddMessage(
        _optional_transaction(fields),
        _destination(fields.blob(2)),
        fields.text(3),
        fields.blob(4),
        fields.integer(5, 4),
        fields.boolean(6, False),
    )


def _remove_message(fields: _Fields) -> RemoveMessage:
    return RemoveMessage(
        _optional_transaction(fields),
        _destination(fields.blob(2)),
        fields.text(3),
        fields.blob_or_none(4),
        fields.text_or_none(5),
    )


def _subscription(fields: _Fields) -> Subscription:
    return Subscription(_destination(fields.blob(1)), fields.text(2), fields.boolean(3, False), fields.blob_or_none(4))


_DECODERS: dict[int, Callable[[_Fields], Command]] = {
    0: lambda f: Trace(f.text_or_none(1)),
    1: _add_message,
    2: _remove_message,
    3: lambda f: Prepare(_transaction(f.blob(1))),
    4: lambda f: Commit(_transaction(f.blob(1))),
    5: lambda f: Rollback(_transaction(f.blob(1))),
    6: lambda f: RemoveDestination(_destination(f.blob(1))),
    7: _subscription,
    8: lambda f: ProducerAudit(f.blob(1)),
    9: lambda f: AckMessageFileMap(f.blob(1)),
    10: lambda f: UpdateMessage(_add_message(_Fields(f.blob(1)))),
    16: lambda f: RewrittenDataFile(f.integer(1), f.integer(2, 0), f.boolean(3, True)),
}
_SCHEDULER = range(11, 16)
