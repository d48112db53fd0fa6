"""The duplicate window: which message ids a store has seen lately (invariant 3, rule X7).

Asked and filled by one thread at a time, in the order in which messages are stored. In a journal that is who submits: a
send whose id an earlier batch holds is queued behind that one, and a send twice in one batch shares its fate. So no
second sender ever waits for a first one's ticket.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice

Key = tuple[int, bytes]
"""Destination id and message id."""


class DuplicateWindow:
    """The last `limit` ids and the seq of each one's message. The durable copy, if there is one, the store keeps."""

    __slots__ = ("_counts", "_seqs", "limit")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._seqs: dict[Key, int] = {}
        self._counts: dict[int, int] = {}
        """How many of each destination there are, or more: Ctrl-C may come between."""

    def get(self, key: Key) -> int | None:
        return self._seqs.get(key)

    def add(self, ids: Mapping[Key, int]) -> None:
        """Remember them, forget the oldest beyond the limit. May be called again with the same."""
        seqs, counts = self._seqs, self._counts
        for key in ids:
            if key not in seqs:
                counts[key[0]] = counts.get(key[0], 0) + 1
        expected = len(seqs) + len(ids)
        seqs.update(ids)
        if len(seqs) != expected:  # one was there: requeued, it is among the latest again
            for key, seq in ids.items():
                del seqs[key]
                seqs[key] = seq
        while len(seqs) > self.limit:
            oldest = next(iter(seqs))
            if seqs.pop(oldest, None) is not None:
                counts[oldest[0]] -= 1

    def forget(self, destination: int) -> None:
        """Forget the ids of a destination that is removed: should it come back, it knows nothing of them. From the
        latest back to its first: of a queue that was there for a moment they are among the last."""
        its = (key for key in reversed(self._seqs) if key[0] == destination)
        for key in list(islice(its, self._counts.get(destination, 0))):
            self._seqs.pop(key, None)
        self._counts.pop(destination, None)

    def __len__(self) -> int:
        return len(self._seqs)

    def items(self) -> list[tuple[Key, int]]:
        """Return ids and seqs, oldest first."""
        return list(self._seqs.items())
