"""Messages from the last one backwards, over rows that are asked for forwards (rows.py): a backend need know nothing of
it, and who receives the first pays nothing for it.

    stack = channel.stack       what was looked up ahead: the next one is given without asking the rows

The last message of a queue is looked for below the place where it was found before, if few have come since; else
below the highest seq of its store. Windows grow as long as they are empty, and shrink where one holds more than a page.
So it takes a number of questions that grows with the logarithm of how many messages other queues of the store were sent
since.

O4  The last free messages of a channel that has a stack are in it, as of the plans up to its `number`, without a gap:
    each that is free and not in it comes before all of it. What comes later is put on top (arrivals.follow).
O5  Whatever else may free a message, or take one away, takes the stack away (Channel.stack); so does a channel that
    fetches its first messages, which could be the same. Ctrl-C leaves none: it is away while it is changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from ..record.place import ORDER_MAX, SEQ, Place

if TYPE_CHECKING:
    from .leases import Channel
    from .rows import Rows

PAGE_MIN: Final = 4
PAGE_MAX: Final = 512
"""Messages that are asked for at once: few, since the last one is nearly always free, and more behind those."""


def newest_first(channel: Channel, rows: Rows, highest: int, priorities: bool) -> Iterator[Place]:
    """Yield the messages that wait for nothing from the last one on, those of the most urgent order first. `highest`:
    no seq is above it."""
    if not priorities:
        yield from _of_order(channel, rows, highest, 0)
        return
    order: int | None = 0
    while order is not None and order <= ORDER_MAX:
        order = rows.next_order(channel.state, channel.subscription, order)
        if order is not None:
            yield from _of_order(channel, rows, highest, order)
            order += 1


def _of_order(channel: Channel, rows: Rows, highest: int, order: int) -> Iterator[Place]:
    size = window = PAGE_MIN
    grows = True
    if 0 < channel.newest <= highest:
        after = max(channel.newest - 1 - window, 0)
        places = rows.rows(channel.state, channel.subscription, order, after, 2 * size)
        if len(places) < 2 * size:  # those are all: few have come since, or none
            yield from reversed(places)
            highest = after
    while highest > 0:
        after = max(highest - window, 0)
        places = rows.rows(channel.state, channel.subscription, order, after, size)
        if len(places) == size and places[-1][SEQ] < highest and window > size:  # there may be more behind
            window, grows = max(window // 2, size), False
            continue
        found = [place for place in reversed(places) if place[SEQ] <= highest]
        yield from found
        highest = after
        if found:
            size = window = min(2 * size, PAGE_MAX)
            grows = True
        elif grows:
            window *= 2
