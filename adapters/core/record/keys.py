"""The keys of a map, which are its messages' ids, and the messages that put and remove a value."""

from __future__ import annotations

from typing import Final, NamedTuple

from ..messages import DEFAULT_PRIORITY, Outgoing, checked, encoded_text
from .encoding import REMOVAL

KEY_BYTES_MAX: Final = 480
"""Bytes of a key in UTF-8: more has no room in the index of a journal."""


def put_of(key: str, value: bytes, expires_at_ms: int = 0) -> Outgoing:
    """Return the message by which a transaction puts a value."""
    key_bytes(key)
    require_value(value)
    return checked(value, None, None, DEFAULT_PRIORITY, expires_at_ms)._replace(message_id=key)


def require_value(value: object) -> None:
    """Raise TypeError for what is no value of a map."""
    if not isinstance(value, bytes | bytearray | memoryview):
        raise TypeError(
            f"a value of a map is bytes, not {type(value).__name__}; encode it first, or give the map a codec"
        )


def removal_of(key: str) -> Outgoing:
    """Return the message by which a transaction removes a key."""
    key_bytes(key)
    return Outgoing(b"", None, key, DEFAULT_PRIORITY, REMOVAL)


def key_bytes(key: str) -> bytes:
    """Return a key as it is kept. Raises TypeError, and ValueError for one that is empty, too long or no valid
    unicode."""
    name = key.encode() if type(key) is str and key.isascii() else text_bytes(key, "key")  # most take no other call
    if not name or len(name) > KEY_BYTES_MAX:
        raise ValueError(f"the key {key[:40]!r} takes {len(name)} bytes; 1 to {KEY_BYTES_MAX} are allowed in a map")
    return name


def text_bytes(text: str, what: str) -> bytes:
    """Return a key, or the beginning of one, in UTF-8. Raises TypeError and ValueError, by the name of the
    parameter."""
    if not isinstance(text, str):
        raise TypeError(f"{'a key' if what == 'key' else what} of a map is a str, not {type(text).__name__}: {text!r}")
    return encoded_text(text, what)


class KeyRange(NamedTuple):
    """A range of a map's keys, in the order of their bytes."""

    prefix: bytes
    """All begin so."""
    start: bytes
    """The first that may be in it."""
    end: bytes | None
    """None of it is so high, or higher; None: there is no end."""

    def holds(self, name: bytes) -> bool:
        """Return whether a key is in it."""
        return name >= self.start and name.startswith(self.prefix) and (self.end is None or name < self.end)


def range_of(prefix: str, after: str | None, before: str | None) -> KeyRange:
    """Return the range of the keys with this prefix, behind one key and before another. Raises TypeError and
    ValueError."""
    first = text_bytes(prefix, "prefix")
    start = first if after is None else max(first, text_bytes(after, "after") + b"\0")
    return KeyRange(first, start, None if before is None else text_bytes(before, "before"))
