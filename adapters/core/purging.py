"""Removing many messages: a page at a time, so that others get their turn in between. Those of a queue that is purged,
and those that a removed destination, or a subscription that has ended, has left behind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import sleep
from typing import Final

from .changes import SEQ_MAX, AckRange, Change
from .delivery import Feed
from .engine import Engine
from .place import SEQ, Place
from .states import DestinationState, SubscriptionState

PAGE: Final = 512
"""Messages that are looked at under the store's lock at once."""
PAGES: Final = 4
"""Pages whose messages are removed by one write."""
PAUSE: Final = 0.0005
"""Seconds after such a write: a lock that is free for a moment only goes to who had it, not to who waits for it."""

Write = Callable[[Sequence[Change]], object]


RowsOf = Callable[[DestinationState, SubscriptionState | None, None, int, int], Sequence[Place]]
"""As Rows.rows."""


def purge(engine: Engine, state: DestinationState, feeds: Sequence[Feed], write: Write) -> tuple[int, int]:
    """Remove what nobody holds of these feeds. Returns how many were free, of all feeds together, and by how many
    messages the destination is less."""
    kinds: list[tuple[RowsOf, Write]] = [(engine.backend.rows, write)]
    if engine.nonpersistent is not None:  # apart: the messages of one kind may lie between those of the other
        kinds.append((engine.nonpersistent.volatile_rows, engine.nonpersistent.write))
    free = gone = 0
    for feed in feeds:
        for rows, write_range in kinds:
            after: int | None = 0
            while after is not None:
                found, less, after = _purge_some(engine, state, feed, after, rows, write_range)
                free += found
                gone += less
                if after is not None:
                    sleep(PAUSE)
    return free, gone


def _purge_some(
    engine: Engine, state: DestinationState, feed: Feed, after: int, rows: RowsOf, write: Write
) -> tuple[int, int, int | None]:
    """The next pages. Returns how many messages were free, by how many the destination is less, and the seq to go on
    behind, None at the end."""
    mark, less = object(), 0
    try:
        engine.check()
        with engine.lock:
            engine.current()
            if state.removed or engine.is_gone(feed):
                return 0, 0, None
            ranges, count, last = _free_ranges(rows, state, feed, after)
            before = state.total
            if not ranges:
                return 0, 0, last
            feed.purging.add(mark)  # nobody shall receive what is about to go
        write([AckRange(state, first, to, feed.number) for first, to in ranges])
        engine.check()
        with engine.lock:
            engine.current()
            less = max(before - state.total, 0)
    finally:
        feed.purging.discard(mark)
        feed.wake()
    return count, min(less, count), last


def _free_ranges(
    rows: RowsOf, state: DestinationState, feed: Feed, after: int
) -> tuple[list[tuple[int, int]], int, int | None]:
    """The seqs of some pages that nobody holds, as ranges between those that somebody holds, and how many; and the last
    seq that was looked at, None if there are no more."""
    ranges: list[tuple[int, int]] = []
    count = start = end = 0
    for _ in range(PAGES):
        places = rows(state, feed.subscription, None, after, PAGE)
        for place in places:
            seq = place[SEQ]
            if seq in feed.held:
                if start:
                    ranges.append((start, end))
                start = 0
            else:
                start, end, count = start or seq, seq, count + 1
        if len(places) < PAGE:
            break
        after = places[-1][SEQ]
    else:
        if start:
            ranges.append((start, end))
        return ranges, count, after
    if start:
        ranges.append((start, end))
    return ranges, count, None


def drop(engine: Engine, feed: Feed, write: Write) -> None:
    """Remove what is left of a removed destination, or for a subscription that has ended. Nobody sees it any more, so
    that no page need know what somebody holds."""
    first = 0
    while True:
        engine.check()
        with engine.lock:
            engine.current()
            if feed not in engine.catalog.leaving:
                return
            last = _last_of_pages(engine, feed.state, first)
        write([AckRange(feed.state, first, SEQ_MAX if last is None else last, feed.number)])
        if last is None:
            return
        first = last + 1
        sleep(PAUSE)


def drop_volatile(engine: Engine) -> None:
    """The same of messages that are not persistent, of all removed destinations."""
    volatile = engine.nonpersistent
    while volatile is not None and volatile.is_leaving and volatile.drop_some(PAGES * PAGE):
        sleep(PAUSE)


def _last_of_pages(engine: Engine, state: DestinationState, first: int) -> int | None:
    """The last seq of the next pages, None if there are no more behind them."""
    after = max(first - 1, 0)
    for _ in range(PAGES):
        places = engine.backend.rows(state, None, None, after, PAGE)
        if len(places) < PAGE:
            return None
        after = places[-1][SEQ]
    return after
