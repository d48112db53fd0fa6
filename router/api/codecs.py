"""Codecs turn a body into bytes and back, above the stores, which know bytes alone.

    orders = router.queue("orders", codec="json")
    orders.send({"number": 17})                     # with the header content_type: application/json
    orders.receive().body["number"]

Such a queue carries ordinary messages: a user without the codec sees bytes, and the header `content_type`. A body is
decoded when it is asked for, not when its message is received. So a message that does not decode holds up no other, and
is in hand, to be released or rejected.

`json` and `msgpack` take plain values; `pickle` takes nearly all, and runs whatever code the bytes name, so it is used
only where it is asked for by this name. Any object that has what `Codec` says is one.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar, cast

import msgspec

from ...adapters.core.messages import Headers, Message, Outgoing, T, decoded
from ...policies.errors import DecodeError
from ...policies.names.destination import Destination

if TYPE_CHECKING:
    import typing_extensions

    V = typing_extensions.TypeVar("V", default=Any)
else:
    V = TypeVar("V")
"""The type of a codec's values: anything where nobody says otherwise."""

CONTENT_TYPE: Final = "content_type"
"""The header that says which codec has made a body."""
SHOWN_MAX: Final = 80
"""Characters of a value that an error shows."""


class Codec(Protocol[V]):
    """Turns values into bytes and back. Any thread calls a codec, several at once."""

    @property
    def content_type(self) -> str:
        """The content type of encoded bodies, for the header `content_type` of a message: `application/json`."""

    def encode(self, value: V, /) -> bytes:
        """Return the bytes to store. The send raises a failure of this as TypeError or ValueError; nothing is sent."""

    def decode(self, body: bytes, /) -> V:
        """Return the value of the bytes. An error raised here becomes the cause of a DecodeError."""


class JsonCodec:
    """Writes JSON, in UTF-8. Values that JSON lacks (NaN, bytes, sets) are refused. A tuple comes back as a list, and a
    key that is a number as text."""

    __slots__ = ()

    content_type: Final = "application/json"

    def encode(self, value: Any, /) -> bytes:
        """Return the JSON of a value. Raises TypeError, ValueError."""
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()

    def decode(self, body: bytes, /) -> Any:
        """Return the value of JSON. Raises ValueError."""
        return json.loads(body)


class MsgpackCodec:
    """Writes MessagePack: all values of JSON, and bytes, keys of any kind, and times of a zone. It is smaller and
    faster than JSON."""

    __slots__ = ()

    content_type: Final = "application/msgpack"

    def encode(self, value: Any, /) -> bytes:
        """Return the MessagePack of a value. Raises TypeError, ValueError."""
        return msgspec.msgpack.encode(value)

    def decode(self, body: bytes, /) -> Any:
        """Return the value of MessagePack. Raises ValueError."""
        return msgspec.msgpack.decode(body)


class PickleCodec:
    """Pickles values. To decode is to run the code that the sender has put there: for queues that nobody else can send
    to."""

    __slots__ = ()

    content_type: Final = "application/x-python-pickle"

    def encode(self, value: Any, /) -> bytes:
        """Return the pickle of a value. Raises whatever the value raises."""
        return pickle.dumps(value)

    def decode(self, body: bytes, /) -> Any:
        """Return the value of a pickle. Raises whatever the value raises."""
        return pickle.loads(body)


CODECS: Final[dict[str, Codec]] = {"json": JsonCodec(), "msgpack": MsgpackCodec(), "pickle": PickleCodec()}
"""The codecs that can be asked for by name."""


def codec_of(codec: str | Codec[V] | None) -> Codec[V] | None:
    """Return the codec that is meant; None for none. Raises ValueError for a name that none has, TypeError for what is
    no codec."""
    if codec is None:
        return None
    if isinstance(codec, str):
        found = CODECS.get(codec)
        if found is None:
            raise ValueError(f"there is no codec {codec!r}; there are {', '.join(CODECS)}; or give one of your own")
        return found
    content_type = getattr(codec, "content_type", None)
    if (
        isinstance(codec, type) or not isinstance(content_type, str) or not content_type
        or not callable(getattr(codec, "encode", None)) or not callable(getattr(codec, "decode", None))
    ):  # fmt: skip
        raise TypeError(
            f"a codec is one of {', '.join(CODECS)}, or an object with a text content_type and the methods encode and "
            f"decode; not {codec!r}"
        )
    return codec


def encoded(codec: Codec[V], value: V, what: str, destination: Destination) -> bytes:
    """Return the bytes of a value, which is `what` for that destination. Raises TypeError and ValueError, which name
    what is wrong with the value."""
    try:
        body = codec.encode(value)
    except Exception as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(
            f"{what} for {destination} cannot be encoded as {codec.content_type}: {error or type(error).__name__}; "
            f"it is {_shown(value)}"
        ) from error
    if not isinstance(body, bytes | bytearray | memoryview):
        raise TypeError(
            f"the codec of {codec.content_type} has encoded {_shown(value)} as {type(body).__name__}, not bytes"
        )
    return body


def encode(codec: Codec[T], value: T, headers: Headers | None, destination: Destination) -> tuple[bytes, Headers]:
    """Return the body for a destination, and the headers with the content type. Raises TypeError and ValueError, which
    name what is wrong with the value; and ValueError for headers that say another content type."""
    content_type = codec.content_type
    body = encoded(codec, value, "a body", destination)
    if not headers:
        return body, {CONTENT_TYPE: content_type}
    given = headers.get(CONTENT_TYPE) if isinstance(headers, Mapping) else content_type  # else the store refuses them
    if given is None:
        return body, {**headers, CONTENT_TYPE: content_type}
    if not _is_of(given, content_type):
        raise ValueError(
            f"the header {CONTENT_TYPE} is {given!r}, and the codec of {destination} writes {content_type}; "
            "leave the header out"
        )
    return body, headers


def encode_one(codec: Codec[T], message: T | Outgoing[T], destination: Destination) -> Outgoing:
    """Encode one of many messages that are sent together."""
    if not isinstance(message, Outgoing):
        return Outgoing(*encode(codec, message, None, destination))
    body, headers = encode(codec, cast("T", message.body), message.headers, destination)  # no codec takes a file
    return cast("Outgoing", message)._replace(body=body, headers=headers)


def wrap_any(codec: Codec[T] | None, message: Message[Any] | None) -> Message[T] | None:
    """Return what a receive has found, decoded as `wrap` does; without a codec, or a message, as it is."""
    return message if message is None or codec is None else wrap(codec, message)


def wrap(codec: Codec[T], message: Message[Any]) -> Message[T]:
    """Return the message with a body that the codec decodes."""
    return decoded(message, partial(_decode, codec))


def _decode(codec: Codec[T], message: Message[Any], body: bytes) -> T:
    content_type = codec.content_type
    given = message.headers.get(CONTENT_TYPE)
    if given is not None and not _is_of(given, content_type):
        raise DecodeError(
            f"{message!r} is of content type {given!r}, and is read here as {content_type}; its raw_body has the "
            "bytes: release it for a consumer that reads it, or reject it",
            message,
        )
    try:
        return codec.decode(body)
    except Exception as error:
        raise DecodeError(
            f"{message!r} does not decode as {content_type}: {error or type(error).__name__}; its raw_body has the "
            "bytes: release it, or reject it",
            message,
        ) from error


def _is_of(given: object, content_type: str) -> bool:
    """Return whether a header says this content type, perhaps with parameters: `application/json; charset=utf-8`."""
    return isinstance(given, str) and given.partition(";")[0].strip().lower() == content_type.lower()


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except Exception:  # it is nested too deeply, or its own
        return f"a {type(value).__name__}"
    return text if len(text) <= SHOWN_MAX else f"{text[:SHOWN_MAX]}..."
