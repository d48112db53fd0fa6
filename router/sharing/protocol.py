"""The frames that a directory's owner and its clients exchange over a Unix stream socket (docs/processes.md).

    frame       length (4 bytes, little endian), then a msgpack array
    request     [number, op, ...]            number: 1 and up, the client's own
    reply       [number, ok, value]          ok: True, or False with an error as the value; in any order
    push        [0, listener, messages]      messages of a listener, or, with None, [0, listener, None, error]: its end
    goodbye     [0, None, None]                what has no answer behind it was not begun

Any number of frames may be in one write. Nothing of it is a pickle: values are what msgpack has, and an error goes as
the name of its class, with plain fields.
"""

from __future__ import annotations

import builtins
import enum
import struct
from collections.abc import Callable
from typing import Any, Final

import msgspec

from ...adapters.core.messages import LargeBody, Message
from ...policies import errors
from ...policies.errors import AnabranchError
from ..events import Event

VERSION: Final = 1
"""Rises with each change of what goes over the socket. An owner refuses a client of another version, by name."""

FRAME_MAX: Final = 1 << 30
"""Bytes of one frame. The largest body that a message has in memory is far below it."""
LENGTH = struct.Struct("<I")


def _packed(value: Any) -> Any:
    try:
        return value.packed  # a large body, which stays as long as the request that refers to it has no answer
    except AttributeError:
        raise TypeError(f"{type(value).__name__} is nothing that goes to another process: {value!r}") from None


_encoder = msgspec.msgpack.Encoder(enc_hook=_packed)
_decoder: msgspec.msgpack.Decoder[list[Any]] = msgspec.msgpack.Decoder(list)


class Op(enum.IntEnum):
    """What is asked."""

    HELLO = 0
    SEND = 1
    SEND_MANY = 2
    RECEIVE = 3
    RECEIVE_PATTERN = 4
    LISTEN = 5
    CREDIT = 6
    UNLISTEN = 7
    ACK = 8
    SETTLE = 9
    EXTEND = 10
    BROWSE = 11
    COMMIT = 12
    CALL = 13
    CANCEL = 14


EVENTS: Final = 0
"""The number of no listener: with it come the events of the owner's router."""


class ProtocolError(ValueError):
    """What the other side has sent is no frame of this protocol."""


def pack(*values: Any) -> bytes:
    """Return a frame. Raises TypeError, ValueError for what cannot be in one."""
    try:
        data = _encoder.encode(values)
    except OverflowError as error:
        raise ValueError(f"a number is beyond 64 bits: {error}") from error
    return LENGTH.pack(len(data)) + data


def unpack(buffer: bytearray) -> list[list[Any]]:
    """Return the whole frames at the head of a buffer, which are removed from it. Raises ProtocolError."""
    found: list[list[Any]] = []
    at, end = 0, len(buffer)
    with memoryview(buffer) as view:
        while end - at >= LENGTH.size:
            (size,) = LENGTH.unpack_from(view, at)
            if size > FRAME_MAX:
                raise ProtocolError(f"a frame of {size} bytes was announced; at most {FRAME_MAX} are taken")
            if end - at - LENGTH.size < size:
                break
            at += LENGTH.size
            try:
                found.append(_decoder.decode(view[at : at + size]))
            except Exception as error:  # no msgpack, or text that is no UTF-8, or nested too deeply, or too large
                raise ProtocolError(f"a frame of {size} bytes does not parse: {error}") from error
            at += size
    del buffer[:at]
    return found


# Messages


def pack_message(message: Message[Any], token: str | None, number_of: Callable[[LargeBody], int]) -> list[Any]:
    """Return a message as it goes over the socket: a large body as its size, and the number by which it is read."""
    content = message.content
    body = [content.size, number_of(content)] if isinstance(content, LargeBody) else content
    return [
        token, message.seq, body, message.headers, message.message_id, message.timestamp_ms, message.priority,
        message.expires_at_ms, message.deliveries, message.persistent, str(message.destination), message.subscription,
    ]  # fmt: skip


def pack_event(event: Event) -> list[Any]:
    """Return an event of a router as it goes over the socket."""
    return [type(event).__name__, msgspec.to_builtins(event)]


# Errors

_CLASSES: Final[dict[str, type[BaseException]]] = {
    name: one
    for source in (builtins, errors)
    for name, one in vars(source).items()
    if isinstance(one, type) and issubclass(one, Exception)
}


def pack_error(error: BaseException) -> list[Any]:
    """Return an error as it goes over the socket. One of a class that clients do not know goes as a RuntimeError."""
    known = next(one for one in type(error).__mro__ if one.__name__ in _CLASSES or one is BaseException)
    name = known.__name__ if known.__name__ in _CLASSES else "RuntimeError"
    fields = {key: value for key, value in vars(error).items() if _is_plain(value) and not key.startswith("__")}
    args = [arg if _is_plain(arg) else str(arg) for arg in error.args]
    if isinstance(error, errors.ConfigError):
        fields = {"problems": [[one.message, one.line] for one in error.problems], "path": error.path}
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
