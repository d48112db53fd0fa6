"""A map as its users hold it: keyed values, in the same stores and transactions as messages.

results = router.map("results")
with router.transaction() as tx:
    tx.ack(message)
    tx.put(results, "job-1", b"42")     # the message is gone and its result there, or neither
results.wait("job-1", timeout=5)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Final, Generic, TypeVar, cast

from ...adapters.core import Store
from ...adapters.core.messages import plain_body
from ...adapters.core.record.keys import key_bytes, range_of, require_value
from ...policies.errors import DecodeError
from ...policies.names.destination import Destination
from .background import in_background
from .codecs import Codec, encoded
from .consumer import countdown
from .endpoint import expiry

if TYPE_CHECKING:
    from ..placement.registry import StoreRegistry

if TYPE_CHECKING:
    import typing_extensions

    V = typing_extensions.TypeVar("V", default=bytes)
else:
    V = TypeVar("V")
T = TypeVar("T")

_NUMBERS: Final = "application/json"
"""The content type whose whole numbers are decimal digits."""


class Map(Generic[V]):
    """Keys, texts of 1 to 480 bytes in UTF-8, and a value of each: bytes, or what the map's codec takes. Cheap to make,
    cheap to keep; any thread may use it, and what one call does nobody sees half done.

    A `ttl` is in seconds: after that the value is gone. Without one it stays until it is replaced or removed. A change
    is as durable, on return, as the policy of the map's store says (invariant 1). An interrupted caller does not know
    whether it was written (rule G3). Raises TypeError and ValueError for what is no key, no value or no time. Two are
    equal if their router, their name and their codec are the same.
    """

    __slots__ = ("_codec", "_registry", "destination")

    def __init__(self, registry: StoreRegistry, destination: Destination, codec: Codec[V] | None = None) -> None:
        self._registry = registry
        self.destination: Destination = destination
        self._codec = codec

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Map) and other._registry is self._registry
            and (other.destination, other._codec) == (self.destination, self._codec)
        )  # fmt: skip

    def __hash__(self) -> int:
        return hash((self._registry, self.destination))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.destination.name}>"

    # Reading

    def get(self: Map[V], key: str, default: T | None = None) -> V | T | None:
        """Return the value of a key; `default` if it has none. Raises DecodeError for one that the codec does not
        take."""
        body = self._held(lambda store: store.maps.get(self.destination, key), None)
        return self._missing(key, default) if body is None else self._decoded(key, body)

    def get_many(self: Map[V], keys: Iterable[str]) -> dict[str, V]:
        """Return the values of these keys, by key, in their order; a key without a value is left out. Some are looked
        up at a time, and others may write meanwhile. Raises DecodeError as `get`."""
        if isinstance(keys, str):
            raise TypeError(f"get_many takes several keys, not one str: {keys!r}; use get, or a list")
        names = list(dict.fromkeys(keys))
        for key in names:
            key_bytes(key)

        def look(store: Store) -> list[tuple[str, bytes | None]]:
            return list(zip(names, store.maps.get_many(self.destination, names), strict=True))

        found: list[tuple[str, bytes | None]] = self._held(look, [])
        return {key: self._decoded(key, body) for key, body in found if body is not None}

    def items(self, prefix: str = "", after: str | None = None, before: str | None = None) -> Iterator[tuple[str, V]]:
        """Yield the keys that begin with `prefix`, come behind `after` and before `before`, with their values. They
        come in the order of their bytes in UTF-8. Some are looked up at a time, and others may write meanwhile. A key
        that is there all the time comes once, with a value that it had on the way."""
        range_of(prefix, after, before)  # which says what is wrong with it
        while True:
            with self._registry.attempt(self.destination, self._registry.store_of) as store:
                found = store.maps.items(self.destination, prefix, after, before) if store is not None else ()
                for key, body in found:
                    after = key
                    yield key, self._decoded(key, body)
                return

    def count(self) -> int:
        """Return how many keys have a value. One whose time is over may be counted for a second longer."""
        return self._held(lambda store: store.maps.count(self.destination), 0)

    def wait(
        self, key: str, timeout: float | None = None, default: T | None = None, *, unless: V | None = None
    ) -> V | T | None:
        """Return the value of a key as soon as it has one, and another one than `unless`; `default` if it has none in
        `timeout` seconds (None: for ever). Values are the same as in `compare_and_set`. One that is there for a moment
        between two others may go by unseen."""
        left = countdown(timeout)
        seen = encoded = None if unless is None else self._encoded(unless)
        while True:
            body = self._changed(lambda store: store.maps.wait(self.destination, key, left(), seen))  # noqa: B023
            if body is None:
                return default
            if unless is None or not self._is(key, body, unless, encoded):
                return self._decoded(key, body)
            seen = body  # other bytes of the same value

    # Writing

    def put(self, key: str, value: V, *, ttl: float | None = None, sync: bool | None = None) -> None:
        """Give a key a value, instead of that which it has. `sync=True` asks for power-failure durability of this one
        whatever the policy. Raises StoreFullError and MessageTooLargeError: nothing was changed."""
        body, expires_at_ms = self._encoded(value), _expiry(ttl)
        self._changed(lambda store: store.maps.put(self.destination, key, body, expires_at_ms, sync))

    def put_if_absent(self, key: str, value: V, *, ttl: float | None = None) -> bool:
        """Give a key a value if it has none; returns whether that was so."""
        body, expires_at_ms = self._encoded(value), _expiry(ttl)
        return self._changed(lambda store: store.maps.put_if_absent(self.destination, key, body, expires_at_ms)) is None

    def compare_and_set(self, key: str, expected: V | None, value: V | None, *, ttl: float | None = None) -> bool:
        """Give a key a value if the one that it has is `expected`; returns whether that was so. None in place of either
        is no value: the key has none, or is to have none. With a codec two values are the same if they are equal, or
        are encoded to the same bytes. A value that does not decode is never the expected one."""
        before = None if expected is None else self._encoded(expected)
        after, expires_at_ms = None if value is None else self._encoded(value), _expiry(ttl)
        if self._codec is None or expected is None:
            return self._changed(partial(_replaced, self.destination, key, before, after, expires_at_ms))
        while True:
            there = self._held(lambda store: store.maps.get(self.destination, key), None)
            if there is None or not self._is(key, there, expected, before):
                return self._missing(key, False)
            if self._changed(partial(_replaced, self.destination, key, there, after, expires_at_ms)):
                return True

    def _is(self, key: str, there: bytes, expected: V, encoded: bytes | None) -> bool:
        """Return whether the bytes of a key are the expected value, which is encoded so now."""
        try:
            return there == encoded or bool(self._decoded(key, there) == expected)
        except DecodeError:
            return False

    def pop(self: Map[V], key: str, default: T | None = None) -> V | T | None:
        """Remove a key; returns the value that it had, `default` if it had none. Raises DecodeError for one that the
        codec does not take, which stays."""
        if self._codec is not None:
            return self._popped(key, default)
        body = self._held(lambda store: store.maps.pop(self.destination, key), None)
        return self._missing(key, default) if body is None else cast("V", body)

    def _popped(self, key: str, default: T | None) -> V | T | None:
        """Decode a value, then remove it if nobody has changed it meanwhile."""
        while True:
            body = self._held(lambda store: store.maps.get(self.destination, key), None)
            if body is None:
                return self._missing(key, default)
            value = self._decoded(key, body)
            if self._changed(partial(_replaced, self.destination, key, body, None, 0)):
                return value

    def increment(self, key: str, by: int = 1, *, ttl: float | None = None) -> int:
        """Add to the whole number that a key has, in decimal digits, 0 if it has none; returns the sum. A `ttl` is for
        a number that begins: later ones keep its time. Raises ValueError for a value that is no number, and for a codec
        that does not write numbers so (`json` does)."""
        if not isinstance(by, int) or isinstance(by, bool):
            raise TypeError(f"a number is incremented by an int, not {type(by).__name__}: {by!r}")
        if self._codec is not None and self._codec.content_type != _NUMBERS:
            raise ValueError(
                f"{self.destination} has a codec of {self._codec.content_type}, whose numbers are no decimal digits; "
                "count in a map without a codec, or with `json`"
            )
        expires_at_ms = _expiry(ttl)
        return self._changed(lambda store: store.maps.increment(self.destination, key, by, expires_at_ms))

    def touch(self, key: str, ttl: float | None = None) -> bool:
        """Begin a new time for the value that a key has, None: it stays until it is replaced or removed. Returns
        whether there is a value. Its store writes the value once more, without it going through this process: it costs
        as much as a `put`, and is refused as one where there is no room."""
        expires_at_ms = _expiry(ttl)
        touched = self._held(lambda store: store.maps.touch(self.destination, key, expires_at_ms), False)
        return touched or self._missing(key, False)

    def declare(self) -> None:
        """Declare the map: it is there, empty, until it is deleted; as Queue.declare."""
        self._changed(lambda store: store.declare(self.destination))

    def delete(self) -> int:
        """Remove the map with all its values; returns how many there were. Nothing of it is left behind; a store that
        was its own goes with it, if nobody waits there."""
        return self._registry.removal.delete(self.destination)

    # Without waiting

    get_nowait: Final = in_background(get)
    get_many_nowait: Final = in_background(get_many)
    put_nowait: Final = in_background(put)
    put_if_absent_nowait: Final = in_background(put_if_absent)
    compare_and_set_nowait: Final = in_background(compare_and_set)
    pop_nowait: Final = in_background(pop)
    increment_nowait: Final = in_background(increment)
    touch_nowait: Final = in_background(touch)

    # Its store, and its codec

    def _missing(self, key: str, default: T) -> T:
        key_bytes(key)  # where no store holds the map yet, none has looked at the key
        return default

    def _held(self, call: Callable[[Store], T], otherwise: T) -> T:
        return self._registry.for_held(self.destination, call, otherwise)

    def _changed(self, call: Callable[[Store], T]) -> T:
        return self._registry.for_store(self.destination, call)

    def _encoded(self, value: V) -> bytes:
        if self._codec is None:
            if type(value) is not bytes:
                require_value(value)
            return plain_body(value)
        return plain_body(encoded(self._codec, value, "a value", self.destination))

    def _decoded(self, key: str, body: bytes) -> V:
        if self._codec is None:
            return cast("V", body)
        try:
            return self._codec.decode(body)
        except Exception as error:
            raise DecodeError(
                f"the value of {key!r} in {self.destination} does not decode as {self._codec.content_type}: "
                f"{error or type(error).__name__}; a map without the codec gives its bytes, {body[:40]!r}",
                None,
            ) from error


def _replaced(
    destination: Destination, key: str, there: bytes | None, value: bytes | None, expires_at_ms: int, store: Store
) -> bool:
    return store.maps.compare_and_set(destination, key, there, value, expires_at_ms)


def _expiry(ttl: float | None) -> int:
    return 0 if ttl is None else expiry(ttl, "ttl")
