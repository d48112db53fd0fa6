"""The subscriptions that had yet to ack a topic's messages when a snapshot began. A snapshot is taken page by page,
with other changes in between."""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Final

KEPT_MAX: Final = 100_000
"""Messages; where more change, the snapshot is taken later (invariant 10)."""


class _Topic:
    __slots__ = ("bits", "seqs", "taken")

    def __init__(self) -> None:
        self.bits: dict[int, int] = {}
        """By seq."""
        self.seqs: list[int] = []
        """A heap of the same seqs, of some twice."""
        self.taken = -1
        """Nobody asks for those up to this one any more."""


class PendingBefore:
    """The bits of the messages that have changed since, as they were (rule J6).

    Records behind the snapshot's beginning are replayed at an open, but that is not enough: a message which its last
    subscription acks meanwhile has no row any more that says who had acked it before; and one whose only subscription
    acks it meanwhile would be gone before a retroactive one, begun in between, is told. All is called under the store's
    lock."""

    def __init__(self, last_seq: int) -> None:
        """Keep the bits of messages up to `last_seq`."""
        self._last_seq = last_seq
        self._topics: dict[int, _Topic] = {}
        """By number."""
        self._left = KEPT_MAX

    @property
    def is_whole(self) -> bool:
        """Return whether all is kept."""
        return self._left > 0

    def keep(self, topic: int, seq: int, bits: int) -> None:
        """Keep the bits of a message that is about to change."""
        kept = self._topics.setdefault(topic, _Topic())
        if kept.taken < seq <= self._last_seq and seq not in kept.bits and self._left:
            self._left -= 1
            heappush(kept.seqs, seq)  # first: Ctrl-C may come between the two, and then it is kept once more
            kept.bits[seq] = bits

    def take(self, topic: int, first: int, last: int) -> dict[int, int]:
        """Return the bits of those between two seqs, by seq. The caller goes on behind `last`: these are forgotten."""
        kept = self._topics.setdefault(topic, _Topic())
        kept.taken = last
        taken: dict[int, int] = {}
        while kept.seqs and kept.seqs[0] <= last:
            seq = heappop(kept.seqs)
            if seq in kept.bits:
                taken[seq] = kept.bits.pop(seq)
        return {seq: bits for seq, bits in taken.items() if seq >= first}
