"""Looking at messages in order, page by page."""

from __future__ import annotations

from typing import Final

from ...policies.destination import Destination
from ..base import Message, Store, SubscriptionKey
from ..delivery import order_of
from .contents import Contents
from .records import StoredMessage, decode
from .residence import Residence

PAGE: Final = 256
PAGE_BYTES: Final = 256 * 1024
"""So much is read at once, or one message."""


class Browser:
    """Where a look has come to. `page` is called under the store's lock."""

    def __init__(
        self,
        contents: Contents,
        residence: Residence,
        store: Store,
        destination: Destination,
        subscription: SubscriptionKey | None,
        after: int | Message,
    ) -> None:
        self._contents, self._residence, self._store = contents, residence, store
        self._destination, self._subscription = destination, subscription
        if isinstance(after, Message):
            self._after = order_of(after.priority, contents.priorities), after.seq
        elif after and contents.priorities:
            raise ValueError(
                f"store {store.name!r} orders by priority, so that a seq alone tells no place: browse after a message"
            )
        else:
            self._after = 0, after

    def page(self, limit: int) -> list[StoredMessage]:
        """The next messages, at most `limit` unless that is negative; none at the end."""
        found: list[StoredMessage] = []
        state = self._contents.states.get(self._destination)
        if state is None:
            return found
        subscription = state.subscriptions.get(self._subscription) if self._subscription is not None else None
        if self._subscription is not None and subscription is None:
            return found
        number = subscription.number if subscription is not None else 0
        order, seq = self._after
        size = 0
        for lane_order in sorted(state.lanes):
            if lane_order < order:
                continue
            for chunk, which in state.pages(subscription, lane_order, seq if lane_order == order else 0):
                records = self._residence.load(chunk)
                for index in which:
                    record = records[index]
                    assert record is not None
                    count = chunk.counts.get((number, index), 0)
                    message = decode(
                        self._store, self._destination, chunk, index, record, None, count, self._subscription
                    )
                    found.append(message)
                    self._after = lane_order, message.seq
                    size += message.size
                    if len(found) == limit or len(found) >= PAGE or size >= PAGE_BYTES:
                        return found
        return found

    def lives(self, message: StoredMessage) -> bool:
        """Whether it is there still. Needs no lock."""
        chunk = message.chunk
        if chunk.is_dead(message.index):
            return False
        if self._subscription is None:
            return True
        subscription = chunk.lane.state.subscriptions.get(self._subscription)
        return subscription is not None and not chunk.acked.get(subscription.number, 0) >> message.index & 1
