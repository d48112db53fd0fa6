"""What the journal's operations do to who holds what (adapters/delivery.py)."""

from __future__ import annotations

from collections.abc import Iterable

from ..delivery import Delivery
from . import format as f
from .batch import Entry
from .destinations import SEQ, DestinationState
from .index import Index


def settle(delivery: Delivery, entries: Iterable[Entry], index: Index) -> None:
    """These operations take effect now, for the first time. Under the index lock."""
    for entry in entries:
        kind = entry[0]
        if kind == f.ACK:
            delivery.acked(entry[1].feed, entry[2])
        elif kind == f.ROLLBACK:
            for state, seq in entry[2].acks:
                delivery.free(state.feed, seq, index)
            for message in entry[2].messages:  # as in give_back: an interrupted rollback is done once more
                message.note = None
        elif kind == f.DESTINATION_GONE:
            delivery.gone(entry[1].feed)


def free_ranges(
    delivery: Delivery, state: DestinationState, index: Index, page: int
) -> tuple[list[tuple[int, int]], int]:
    """The seqs of a destination that nobody holds, as ranges between those that somebody holds, and how many."""
    ranges: list[tuple[int, int]] = []
    count, after, start, last = 0, 0, 0, 0
    while places := index.scan(state, after, page):
        for place in places:
            seq = place[SEQ]
            if seq in delivery.held:
                if start:
                    ranges.append((start, last))
                start = 0
            else:
                start, last, count = start or seq, seq, count + 1
        after = places[-1][SEQ]
    if start:
        ranges.append((start, last))
    return ranges, count
