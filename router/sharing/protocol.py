"""The frames that a directory's owner and its clients exchange over a Unix stream socket (docs/processes.md).

    frame       length (4 bytes, little endian), then a msgpack array
    request     [number, [op, ...]]          number: 1 and up, the client's own; op and fields: the classes below
    reply       [number, ok, value]          ok: True, or False with an error as the value; in any order
    push        [0, listener, messages]      messages of a listener, or, with None, [0, listener, None, error]: its end
    goodbye     [0, None, None]              what has no answer behind it was not begun
    sign        [0, True, None]              the owner lives, and reads nothing of this client for now

Any number of frames may be in one write. Nothing of it is a pickle: values are what msgpack has, and an error goes as
the name of its class, with plain fields. A destination goes as its text, but for that of a subscription.
"""

from __future__ import annotations

import builtins
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple, Union

import msgspec

from ...adapters.core.messages import LargeBody, Message
from ...adapters.core.store_types import Change, Settlement, SubscriptionKey
from ...adapters.system.acceleration import inner_loop
from ...policies import errors
from ...policies.errors import AnabranchError
from ...policies.names.destination import Destination
from ..transactions.xid import Xid

VERSION: Final = 9
"""Rises with each change of what goes over the socket. An owner refuses a client of another version, by name."""
FRAME_MAX: Final = 1 << 30
"""Bytes of a frame that an owner sends: the largest message that a store may be configured to take."""
REQUEST_MAX: Final = 128 << 20
"""Bytes of a request: of the largest message and the largest transaction that are taken by default, and some more.
What is larger is sent from a file."""
LENGTH = struct.Struct("<I")
PAGE: Final = 256
"""Messages of a browse or a send, or values of a map, that go over at once."""
EVENTS: Final = 0
"""The number of no listener: with it come the events of the owner's router."""
PASSES: Final = -1
"""Likewise: with it comes the descriptor of a body, of which a frame behind it speaks."""


class ProtocolError(ValueError):
    """The other side has sent something that is no frame of this protocol."""


# Requests


class Request(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A request of a client: its tag, which is its op, and its fields, in order. They have these types once it came."""


class Held(NamedTuple):
    """A message that a client holds, as it tells an owner that does not know."""

    token: str
    destination: str
    key: SubscriptionKey | None
    seq: int
    lease: float | None
    """Seconds."""


class OutgoingFields(NamedTuple):
    """The fields of an Outgoing. A body that is kept apart is its size, and its number: of a Body, or the owner's."""

    body: bytes | tuple[int, int]
    headers: Mapping[str, Any] | None
    message_id: str | None
    priority: int
    expires_at_ms: int
    persistent: bool
    requeued: bool
    deliver_at_ms: int


class Hello(Request, frozen=True, tag=0, forbid_unknown_fields=False):
    """Greets, first of all. Its version is in the same place whatever the version."""

    version: int
    client: str = ""
    pid: int = 0
    owner: str = ""
    """The owner that the client knew."""
    held: list[Held] = []


class Body(Request, frozen=True, tag=20):
    """Gives the owner a file, whose descriptor goes with it, as a body that is to be sent."""

    body: int
    """The client's number of it, below 0."""
    identity: tuple[int, int]
    """Tells the file from others: its device and inode."""
    offset: int
    """The body's first byte in it."""
    size: int
    mtime_ns: int
    """The file is as it was as long as this is."""


class Send(Request, frozen=True, tag=1):
    """Sends one message. Answered by its seq, and whether it is a duplicate."""

    destination: str
    message: OutgoingFields
    sync: bool


class SendMany(Request, frozen=True, tag=2):
    """Sends many messages to one destination."""

    destination: str
    messages: list[OutgoingFields]
    sync: bool


class Receive(Request, frozen=True, tag=3):
    """Receives from one destination."""

    destination: str
    key: SubscriptionKey | None
    most: int
    timeout: float | None
    lease: float | None
    newest: bool = False
    """One, the last."""


class ReceivePattern(Request, frozen=True, tag=4):
    """Receives one message from many queues."""

    pattern: str
    timeout: float | None
    lease: float | None


class Listen(Request, frozen=True, tag=5):
    """Begins to listen, at the first owner or at the next."""

    listener: int
    destination: str
    key: SubscriptionKey | None
    credit: int
    """What is left of `granted`."""
    lease: float | None
    granted: int
    """All credit that the client has given it since its beginning."""
    patterns: list[str] | None = None
    """Of what it listens to, if that is many queues."""


class Credit(Request, frozen=True, tag=6):
    """Grants a listener credit: so much since its beginning."""

    listener: int
    granted: int


class Unlisten(Request, frozen=True, tag=7):
    """Ends a listener. What it is given comes before the answer."""

    listener: int


class Ack(Request, frozen=True, tag=8):
    """Acks messages, all or none. Answered by what was wrong with each, None where nothing was with any."""

    tokens: list[str]


class Settle(Request, frozen=True, tag=9):
    """Ends leases in any way. Answered as an Ack."""

    tokens: list[str]
    how: Settlement = Settlement.ACK
    reason: tuple[str | None, str] | None = None
    """The fields of a Failure."""
    delivered: bool = True
    delay: float | None = None
    whole: bool = False
    """All or none."""


class Commit(Request, frozen=True, tag=10):
    """Commits a whole transaction, prepares it under its xid, or lets it vote, which is answered by a number."""

    again: bool
    """It may have been committed before."""
    xid: Xid | None
    mode: Literal["commit", "prepare", "vote"]
    sends: list[tuple[str, OutgoingFields]]
    acks: list[str]
    changes: list[Change]
    acked: list[str] = []
    """The destinations of what it acks."""
    rejected: dict[str, tuple[str | None, str]] = {}
    """Of these tokens those that it rejects, and the fields of a Failure of each."""


class Call(Request, frozen=True, tag=11):
    """Calls a function of owner/calls.py, which says what it takes."""

    name: str
    given: Sequence[Any]

    @property
    def changes(self) -> bool:
        """True if it may change something that lasts and others see."""
        return self.name not in LOOKS


LOOKS: Final = frozenset({
    "browse", "extend", "depth", "counts", "exists", "find", "newer", "newest", "destinations",
    "subscriptions_of", "subscriptions", "body_file", "bodies_end", "map_get", "map_get_many", "map_count",
    "map_items", "map_keys", "map_wait", "recover", "in_doubt", "heuristics", "decisions_damage", "events",
    "stats", "configuration", "usage_stats", "option", "bytes_of", "overview", "sessions", "explain",
    "dead_letters",
})  # fmt: skip
"""The calls that change nothing that lasts."""
ONCE: Final = frozenset({"map_increment", "map_pop", "map_put_if_absent", "map_compare_and_set"})
"""Those that are not made once more where nobody knows whether they took effect."""
TOLD_AGAIN: Final = frozenset({"commit_xid", "rollback_xid", "send_leased"})
"""Those whose last field says whether they may have been made before."""


class Cancel(Request, frozen=True, tag=12):
    """Ends a receive that waits."""

    number: int


class Ping(Request, frozen=True, tag=13):
    """Asks whether the owner lives. Answered before all else that has come."""


_request: msgspec.msgpack.Decoder[tuple[int, Request]] = msgspec.msgpack.Decoder(
    tuple[int, Union[tuple(Request.__subclasses__())]]  # type: ignore[misc]  # noqa: UP007
)
_of_any_fields: Final = msgspec.msgpack.Decoder(tuple[int, list[Any]])


class Unfit(Request, frozen=True, tag=-1):
    """Stands for a request that is none, which is refused."""

    reason: str


def request_of(data: memoryview) -> tuple[int, Request]:
    """Return the number and the request of a frame; an Unfit one if its fields are of other types."""
    try:
        return _request.decode(data)
    except msgspec.ValidationError as error:
        number, fields = _of_any_fields.decode(data)
        match fields:
            case [0, int(version), *_] if version != VERSION:
                return number, Hello(version)
        return number, Unfit(f"a request that is none: {error}")


# Frames


def _packed(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    try:
        return value.packed  # a large body, which stays as long as the request that refers to it has no answer
    except AttributeError:
        raise TypeError(f"{type(value).__name__} is nothing that goes to another process: {value!r}") from None


_encoder = msgspec.msgpack.Encoder(enc_hook=_packed)
any_frame: Final = msgspec.msgpack.Decoder(list).decode


def pack(*values: Any) -> bytes:
    """Return a frame. Raises TypeError, ValueError for what cannot be in one."""
    try:
        data = _encoder.encode(values)
    except OverflowError as error:
        raise ValueError(f"a number is beyond 64 bits: {error}") from error
    return LENGTH.pack(len(data)) + data


@inner_loop
def pack_sent(number: int, outcome: tuple[int, bool]) -> bytes:
    """Return the answer to a send, a frame."""
    return pack(number, True, outcome)


def pack_request(number: int, request: Request) -> bytes:
    """Return the frame of a request. Raises as `pack`, and MessageTooLargeError."""
    frame = pack(number, request)
    if len(frame) > REQUEST_MAX:
        raise errors.MessageTooLargeError(
            f"a request of {len(frame):,} bytes is beyond the limit of {REQUEST_MAX:,} for the owner of a shared "
            "directory: send a large body from a file, and fewer messages with one call or in one transaction"
        )
    return frame


def unpack(buffer: bytearray, decode: Callable[[memoryview], Any] = any_frame, most: int = FRAME_MAX) -> list[Any]:
    """Return the whole frames at the head of a buffer, which are removed from it. Raises ProtocolError, also where one
    is announced that has more bytes than `most`."""
    found: list[Any] = []
    at, end = 0, len(buffer)
    with memoryview(buffer) as view:
        while end - at >= LENGTH.size:
            (size,) = LENGTH.unpack_from(view, at)
            if size > most:
                raise ProtocolError(f"a frame of {size} bytes was announced; at most {most} are taken")
            if end - at - LENGTH.size < size:
                break
            at += LENGTH.size
            try:
                found.append(decode(view[at : at + size]))
            except Exception as error:  # no msgpack, or text that is no UTF-8, or nested too deeply, or too large
                raise ProtocolError(f"a frame of {size} bytes does not parse: {error}") from error
            at += size
    del buffer[:at]
    return found


# Messages and destinations


def pack_message(message: Message[Any], token: str | bytes | None, place_of: Callable[[Any], list[Any]]) -> list[Any]:
    """Return a message as it goes over the socket: of a large body its place, from which it is read; last, whether its
    lease runs out. One that is not leased has the id of its store as the token: its place is one there."""
    content = message.content
    body = place_of(content) if isinstance(content, LargeBody) else content
    return [
        token, message.seq, body, message.headers, message.message_id, message.timestamp_ms, message.priority,
        message.expires_at_ms, message.deliveries, message.persistent, str(message.destination), message.subscription,
        type(token) is str and message._note.time_limit is not None,
    ]  # fmt: skip


_destinations: dict[str, Destination] = {}


def destination_of(text: str) -> Destination:
    """Return the destination of that text, the same object for the same text while it is among the latest."""
    found = _destinations.get(text)
    if found is None:
        if len(_destinations) > 10_000:
            _destinations.clear()
        found = _destinations[text] = Destination.restored(text)
    return found


# Errors

_CLASSES: Final[dict[str, type[BaseException]]] = {
    name: one
    for source in (builtins, errors)
    for name, one in vars(source).items()
    if isinstance(one, type) and issubclass(one, Exception)
}


def pack_error(error: BaseException) -> list[Any]:
    """Return an error as it goes over the socket: as one of the nearest class that clients know."""
    name = next((one.__name__ for one in type(error).__mro__ if one.__name__ in _CLASSES), "RuntimeError")
    fields = {key: value for key, value in vars(error).items() if _is_plain(value) and not key.startswith("__")}
    args = [arg if _is_plain(arg) else str(arg) for arg in error.args]
    if isinstance(error, errors.ConfigError):
        fields = {"problems": [[one.message, one.line, one.of_variable] for one in error.problems], "path": error.path}
    return [name, args, fields, list(getattr(error, "__notes__", ()))]


def unpack_error(packed: list[Any]) -> Exception:
    """Return the error that these are the parts of."""
    name, args, fields, notes = packed
    kind = _CLASSES.get(name, RuntimeError)
    error = kind.__new__(kind, *args)
    error.args = tuple(args)
    if isinstance(error, errors.ConfigError):
        fields["problems"] = [errors.Problem(*one) for one in fields["problems"]]
    for key, value in fields.items():
        setattr(error, key, value)
    for note in notes:
        error.add_note(note)
    assert isinstance(error, Exception)
    return error


def is_expected(error: BaseException) -> bool:
    """Return whether an error is the caller's to deal with, not a defect of the owner's."""
    return isinstance(error, AnabranchError | TypeError | ValueError)


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(one) for key, one in value.items())
    return value is None or isinstance(value, str | int | float | bool | bytes)
