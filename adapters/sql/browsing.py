"""Looking at the messages of a destination, page by page, without holding anything between two of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from ...policies.destination import Destination
from ..base import Message, SubscriptionKey
from ..delivery import order_of
from .messages import Row, headers_of
from .receiving import durable_of
from .state import Look, State

if TYPE_CHECKING:
    from .store import SqlStore

PAGE: Final = 256


def browse(
    store: SqlStore, destination: Destination, limit: int | None, after: int | Message, key: SubscriptionKey | None
) -> Iterator[Message]:
    state = store._usable()
    durable = durable_of(state, destination, key)
    known = state.destinations.get(destination)
    if known is None:
        return
    priorities = state.options.priorities
    if isinstance(after, Message):
        order, seq = order_of(after.priority, priorities), after.seq
    else:
        order, seq = 0, after
    feed = durable.feed if durable is not None else None
    look = Look(known, feed)
    left = -1 if limit is None else limit
    with state.lock:
        state.looks.add(look)
    try:
        while left:
            state = store._usable()
            with state.lock:
                if durable is not None and durable.number not in state.durables:
                    return
                lane = known.lanes.get(order)
                most = PAGE if left < 0 else min(PAGE, left)
                rows = state.page(known, durable, order, seq, most) if lane is not None and lane.count else ()
                look.left, look.stale = {row.seq for row in rows}, False
            if not rows:
                following = [other for other in sorted(known.lanes) if other > order]
                if not following:
                    return
                order, seq = following[0], 0
                continue
            for row in rows:
                seq = row.seq
                if row.seq not in look.left:
                    if look.stale:
                        break
                    continue
                message = _message(store, state, look, row, key)
                if message is not None:
                    yield message
                    left -= 1
                    if not left:
                        return
                if look.stale:
                    break
    finally:
        with state.lock:
            state.looks.discard(look)


def _message(store: SqlStore, state: State, look: Look, row: Row, key: SubscriptionKey | None) -> Message | None:
    store._usable()
    whole: Row | None = row
    if row.content is None:
        whole = store._database.read(lambda connection: state.whole_row(connection, row.seq))
    if whole is None or whole.content is None:
        return None
    feed = look.feed or look.state.feed
    with state.lock:
        known = state.counts.get(row.seq, whole.deliveries)
        count = state.deliveries(feed, row.seq) if look.feed is not None else known
    return Message(
        store, look.state.destination, row.seq, whole.content, headers_of(whole), whole.message_id, whole.sent_at_ms,
        False, None, whole.priority, whole.expires_at_ms, count, key,
    )  # fmt: skip
