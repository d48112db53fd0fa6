"""The row of DUPLICATES for each message id of the duplicate window: rows go as ids leave it (rule X7)."""

from __future__ import annotations

from collections.abc import Iterable

from ..core.state.duplicates import Key


class DuplicateRows:
    """The last `limit` ids, oldest first, each with the number of its row. Used by the thread that writes alone."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.last_number: int = 0
        """The highest number that a row ever had."""
        self._numbers: dict[Key, int] = {}

    def add(self, keys: Iterable[Key]) -> None:
        """Give the ids the next numbers; forget the oldest beyond the limit."""
        for key in keys:
            self.load(self.last_number + 1, key)

    def load(self, number: int, key: Key) -> None:
        """Add an id whose row has this number; forget the oldest beyond the limit."""
        self._numbers.pop(key, None)  # requeued: it is among the latest again, and `first_kept` goes by the order
        self._numbers[key] = number
        self.last_number = number
        if len(self._numbers) > self.limit:
            del self._numbers[next(iter(self._numbers))]

    def first_kept(self, more: int) -> int:
        """Return the number of the oldest row that stays once so many more come; 0: all stay."""
        beyond = len(self._numbers) + more - self.limit
        if beyond <= 0:
            return 0
        if beyond >= len(self._numbers):
            return self.last_number + 1 + beyond - len(self._numbers)
        return next(number for place, number in enumerate(self._numbers.values()) if place == beyond)

    def forget(self, destination: int) -> None:
        """Forget the ids of a destination that is removed."""
        self._numbers = {key: number for key, number in self._numbers.items() if key[0] != destination}
