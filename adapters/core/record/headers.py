"""A message's headers and its id as bytes: the same in every store that keeps them so."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from ..messages import Headers, encoded_id, encoded_text, plain_headers

MESSAGE_ID_BYTES_MAX: Final = 1024

_encode = msgspec.msgpack.Encoder().encode
unpack_headers: Final = msgspec.msgpack.Decoder(dict[str, Any]).decode
"""The inverse of `pack_headers`."""


def pack_headers(headers: Headers) -> bytes:
    """Return headers as bytes. Raises TypeError for what is not plain, ValueError for a value that has no place in the
    format."""
    plain = plain_headers(headers)
    try:
        return _encode(plain)
    except OverflowError:
        raise ValueError(f"a header's integer is beyond 64 bits: {plain!r}; send it as a str") from None
    except UnicodeEncodeError as error:
        raise ValueError(f"a header is not valid unicode: {plain!r}: {error.reason}; send it as bytes") from None


def pack_id(message_id: str, is_key: bool = False) -> bytes:
    """Return an id as bytes. Raises TypeError, and ValueError for one that is too long, empty or no valid unicode, or
    begins as the library's own do. A key of a map may begin with any character."""
    name = encoded_text(message_id, "key") if is_key else encoded_id(message_id)
    if not name or len(name) > MESSAGE_ID_BYTES_MAX:
        raise ValueError(
            f"message_id {str(message_id)[:40]!r} takes {len(name)} bytes; 1 to {MESSAGE_ID_BYTES_MAX} are allowed"
        )
    return name
