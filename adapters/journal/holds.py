"""What the journal's operations do to who holds what (adapters/delivery.py)."""

from __future__ import annotations

from collections.abc import Iterable

from ..base import Message
from ..delivery import SUBSCRIPTION_SHIFT, Delivery, Feed, Note, feeds_of
from . import format as f
from .batch import Branch, Entry, Operation
from .destinations import SEQ
from .rows import Rows


def settle(delivery: Delivery, entries: Iterable[Entry], rows: Rows) -> None:
    """These operations take effect now, for the first time. Under the index lock."""
    held = delivery.held
    for entry in entries:
        kind = entry[0]
        if kind == f.ACK:
            _, state, seq, number = entry
            if number or not state.is_topic:
                held.pop((number << SUBSCRIPTION_SHIFT) + seq, None)
            else:
                for feed in state.feeds():
                    delivery.acked(feed, seq)
        elif kind == f.ROLLBACK:
            counts = {(seq, number): count for _, _, seq, number, count in entry[2].delivered}
            for state, seq, number in entry[2].acks:
                for feed in state.feeds(number):
                    delivery.free(feed, seq, rows, counts.get((seq, number)))
            for message in entry[2].messages:  # as in give_back: an interrupted rollback is done once more
                message.note = None
        elif kind == f.UNSUBSCRIBE:
            for feed in entry[1].feeds(entry[2]):
                delivery.gone(feed)
        elif kind == f.DESTINATION_GONE:
            for feed in entry[1].feeds():
                delivery.gone(feed)


def acks_of(taken: Iterable[tuple[Note, int]]) -> list[Operation]:
    """What was taken, as acks. One that was leased for a topic as a whole is dead for all."""
    return [
        (f.ACK, feed.owner, seq, feed.number) if type(feed) is Feed else (f.ACK, feeds_of(feed)[0].owner, seq, 0)
        for feed, seq in taken
    ]


def delivered_of(messages: Iterable[Message]) -> list[Operation]:
    """How often these have come back, now that they are released. One that was leased for a topic as a whole was not
    delivered to anybody."""
    return [
        (f.DELIVERED, message.note.owner, message.seq, message.note.number, message.deliveries)
        for message in messages
        if type(message.note) is Feed
    ]


def come_back(branch: Branch, rows: Rows) -> list[Operation]:
    """The same for what a branch acks, when it is rolled back."""
    return [
        (f.DELIVERED, state, seq, number, rows.deliveries(feed, seq) + 1)
        for state, seq, number in branch.acks
        for feed in state.feeds(number)
        if feed.number == number
    ]


def free_ranges(delivery: Delivery, feed: Feed, rows: Rows, page: int) -> tuple[list[tuple[int, int]], int]:
    """The seqs of a feed that nobody holds, as ranges between those that somebody holds, and how many."""
    ranges: list[tuple[int, int]] = []
    count, after, start, last = 0, 0, 0, 0
    while places := rows.scan(feed.owner, after, page):
        for place in places:
            seq = place[SEQ]
            if feed.base + seq in delivery.held:
                if start:
                    ranges.append((start, last))
                start = 0
            elif not feed.number or rows.place(feed, seq) is not None:
                start, last, count = start or seq, seq, count + 1
        after = places[-1][SEQ]
    if start:
        ranges.append((start, last))
    return ranges, count
