"""The duplicate window: which message ids a store has seen lately (invariant 3, rule X7).

Asked and filled by one thread at a time, in the order in which messages are stored. In a journal that is who submits: a
send whose id an earlier batch holds is queued behind that one, and a send twice in one batch shares its fate. So no
second sender ever waits for a first one's ticket.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from itertools import islice

from ...system.acceleration import inner_loop

Key = tuple[int, bytes]
"""Destination id and message id."""


class DuplicateWindow:
    """The last `limit` ids and the seq of each one's message. The durable copy, if there is one, the store keeps."""

    __slots__ = ("counts", "limit", "order", "seqs")

    def __init__(self, limit: int) -> None:
        self.limit: int = limit
        self.seqs: dict[Key, int] = {}
        self.order: deque[tuple[Key, int]] = deque()
        """Ids and seqs, oldest first, and some that `seqs` does not have, or not so."""
        self.counts: dict[int, int] = {}
        """How many of each destination there are, or more: Ctrl-C may come between."""

    def get(self, key: Key) -> int | None:
        return self.seqs.get(key)

    def add(self, ids: Mapping[Key, int]) -> None:
        """Remember them, forget the oldest beyond the limit. May be called again with the same."""
        remember(self, ids)

    def forget(self, destination: int) -> None:
        """Forget the ids of a destination that is removed: should it come back, it knows nothing of them. From the
        latest back to its first: of a queue that was there for a moment they are among the last."""
        its = (key for key in reversed(self.seqs) if key[0] == destination)
        for key in list(islice(its, self.counts.get(destination, 0))):
            self.seqs.pop(key, None)
        self.counts.pop(destination, None)
        if len(self.order) > 2 * self.limit:
            self.order = deque(self.items())

    def __len__(self) -> int:
        return len(self.seqs)

    def items(self) -> list[tuple[Key, int]]:
        """Return ids and seqs, oldest first."""
        return list({key: seq for key, seq in list(self.order) if self.seqs.get(key) == seq}.items())


@inner_loop
def remember(window: DuplicateWindow, ids: Mapping[Key, int]) -> None:
    """Do what DuplicateWindow.add says."""
    seqs, counts, order = window.seqs, window.counts, window.order
    for key, seq in ids.items():
        before = seqs.get(key)
        if before == seq:
            continue
        if before is None:
            counts[key[0]] = counts.get(key[0], 0) + 1
        order.append((key, seq))  # a requeued one is among the latest again
        seqs[key] = seq
    while len(seqs) > window.limit:
        key, seq = order[0]
        if seqs.get(key) == seq and seqs.pop(key, None) is not None:
            counts[key[0]] -= 1
        order.popleft()
    if len(order) > 2 * window.limit:  # ids that were requeued stand there more than once
        window.order = deque(window.items())
