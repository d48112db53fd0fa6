"""The values of maps, as their clients see them (core/engine/hooks.py's KeyedValues)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ....adapters.core.record.keys import key_bytes
from ....policies.names.destination import Destination
from ..protocol import PAGE


class RemoteMaps:
    """Asks the owner, each method by a call of its name. Threads: all."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def _of_key(self, name: str, destination: Destination, key: str, *given: Any) -> Any:
        key_bytes(key)
        return self._call(f"map_{name}", str(destination), key, *given)

    def count(self, destination: Destination) -> int:
        """Return how many keys have a value."""
        return int(self._call("map_count", str(destination)))

    def get_many(self, destination: Destination, keys: Iterable[str]) -> Iterator[bytes | None]:
        """Yield the values of keys, a page at a time."""
        left = list(keys)
        for key in left:
            key_bytes(key)
        while left:
            page = self._call("map_get_many", str(destination), left[:PAGE])
            del left[: len(page)]
            yield from page

    def items(
        self, destination: Destination, prefix: str = "", after: str | None = None, before: str | None = None
    ) -> Iterator[tuple[str, bytes]]:
        """Yield keys and values, a page at a time."""
        while page := self._call("map_items", str(destination), prefix, after, before):
            for key, body in page:
                after = key
                yield key, body

    def keys(
        self, destination: Destination, prefix: str = "", after: str | None = None, before: str | None = None
    ) -> Iterator[str]:
        """Yield keys, a page at a time."""
        while page := self._call("map_keys", str(destination), prefix, after, before):
            after = page[-1]
            yield from page

    def get(self, destination: Destination, key: str) -> bytes | None:
        """Return the value of a key."""
        body: bytes | None = self._of_key("get", destination, key)
        return body

    def wait(
        self, destination: Destination, key: str, timeout: float | None, unless: bytes | None = None
    ) -> bytes | None:
        """Return the value of a key once it has one, and another than `unless`."""
        body: bytes | None = self._of_key("wait", destination, key, unless, timeout)
        return body

    def put(
        self, destination: Destination, key: str, value: bytes, expires_at_ms: int = 0, sync: bool | None = None
    ) -> None:
        """Give a key a value."""
        self._of_key("put", destination, key, value, expires_at_ms, sync)

    def put_if_absent(
        self, destination: Destination, key: str, value: bytes, expires_at_ms: int = 0, sync: bool = False
    ) -> bytes | None:
        """Put a value unless the key has one."""
        before: bytes | None = self._of_key("put_if_absent", destination, key, value, expires_at_ms, sync)
        return before

    def compare_and_set(
        self, destination: Destination, key: str, expected: bytes | None, value: bytes | None,
        expires_at_ms: int = 0, sync: bool = False,
    ) -> bool:  # fmt: skip
        """Put a value if the key has the expected one."""
        return bool(self._of_key("compare_and_set", destination, key, expected, value, expires_at_ms, sync))

    def pop(self, destination: Destination, key: str, sync: bool = False) -> bytes | None:
        """Remove a key."""
        before: bytes | None = self._of_key("pop", destination, key, sync)
        return before

    def increment(
        self, destination: Destination, key: str, by: int = 1, expires_at_ms: int = 0, sync: bool = False
    ) -> int:
        """Add to the number of a key."""
        added = str(by) if type(by) is int else by  # of any size
        return int(self._of_key("increment", destination, key, [added], expires_at_ms, sync))

    def touch(self, destination: Destination, key: str, expires_at_ms: int = 0, sync: bool = False) -> bool:
        """Give the value of a key another time."""
        return bool(self._of_key("touch", destination, key, expires_at_ms, sync))
