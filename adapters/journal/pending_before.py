"""Who had yet to ack a topic's messages when a snapshot began: it is taken page by page, with others in between."""

from __future__ import annotations

from typing import Final

KEPT_MAX: Final = 100_000
"""Messages; where more change, the snapshot is taken later (invariant 10)."""


class PendingBefore:
    """The bits of the messages that have changed since, as they were (rule J6).

    What the journal says behind the snapshot's beginning is told again when it is replayed, but that is not enough: a
    message which its last subscription acks meanwhile has no row any more that says who had acked it before; and one
    whose only subscription acks it meanwhile would be gone before a retroactive one, begun in between, is told.
    All is called under the store's lock."""

    def __init__(self, last_seq: int) -> None:
        """Of messages up to `last_seq`."""
        self._last_seq = last_seq
        self._bits: dict[int, dict[int, int]] = {}
        """By topic's number and seq."""
        self._taken: dict[int, int] = {}
        """Up to which seq, by topic's number: nobody asks for those any more."""
        self._left = KEPT_MAX
        self.is_whole = True
        """Whether all is kept."""

    def keep(self, topic: int, seq: int, bits: int) -> None:
        """One that is about to change."""
        if self._taken.get(topic, -1) < seq <= self._last_seq and self.is_whole:
            self._bits.setdefault(topic, {}).setdefault(seq, bits)
            self._left -= 1
            self.is_whole = self._left > 0

    def take(self, topic: int, first: int, last: int) -> dict[int, int]:
        """The bits of those between two seqs, by seq. Who asks goes on behind `last`: these are forgotten."""
        kept = self._bits.get(topic, {})
        self._taken[topic] = last
        self._bits[topic] = {seq: bits for seq, bits in kept.items() if seq > last}
        return {seq: bits for seq, bits in kept.items() if first <= seq <= last}
