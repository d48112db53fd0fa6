"""The duplicate window: which message ids a store has seen lately (rule X7). Asked and filled by the thread that writes
batches alone, in the order of the commits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ...policies.destination import Destination

Key = tuple[Destination, str]


class DuplicateWindow:
    """The last `limit` ids, each with the number of its row in DUPLICATES and the seq of its message."""

    __slots__ = ("_found", "limit", "number")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.number = 0
        """The highest that a row has."""
        self._found: dict[Key, tuple[int, int]] = {}

    def get(self, key: Key) -> int | None:
        found = self._found.get(key)
        return None if found is None else found[1]

    def add(self, found: Iterable[tuple[int, Key, int]]) -> None:
        """Number, key and seq of each, oldest first; the oldest beyond the limit are forgotten."""
        for number, key, seq in found:
            self._found.pop(key, None)  # requeued: it is among the latest again, and `first_kept` goes by the order
            self._found[key] = (number, seq)
            self.number = number
        while len(self._found) > self.limit:
            self._found.pop(next(iter(self._found)))

    def first_kept(self, more: int) -> int:
        """The number of the oldest that stays once so many more come; 0: all stay."""
        beyond = len(self._found) + more - self.limit
        if beyond <= 0:
            return 0
        if beyond >= len(self._found):
            return self.number + 1 + beyond - len(self._found)
        return next(number for place, (number, _) in enumerate(self._found.values()) if place == beyond)

    def forget(self, destination: Destination) -> None:
        """The ids of a destination that is removed: should it come back, it knows nothing of them."""
        self._found = {key: found for key, found in self._found.items() if key[0] != destination}

    def __len__(self) -> int:
        return len(self._found)

    def __iter__(self) -> Iterator[Key]:
        return iter(self._found)
