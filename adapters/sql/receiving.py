"""What comes out of an SQL store: messages that are leased, those that are not delivered any more, and who waits.

The messages' places are in the state; their bodies, where they were not fetched ahead, in the tables.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ...policies.destination import Destination, Kind
from ...policies.errors import DestinationError
from ..base import EXPIRED, Message, SubscriptionKey, Undelivered
from ..delivery import Feed, Note, Place, feeds_of
from ..subscriptions import require_topic, unknown
from .destinations import Durable
from .messages import headers_of
from .state import State

if TYPE_CHECKING:
    from .store import SqlStore


class Receiving:
    """Of one store. Threads: all. Keeps nothing: a store that is opened again has another state."""

    def __init__(self, store: SqlStore) -> None:
        self._store = store

    def receive(
        self, destination: Destination, timeout: float | None = 0, subscription: SubscriptionKey | None = None
    ) -> Message | None:
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            state = self._store._usable()
            feed = feed_of(state, destination, subscription)
            with state.lock:
                place = state.lease(feed)
            if place is not None:
                message = self._read(feed, place)
                if message is not None:
                    return message
            elif timeout == 0 or not self._store._delivery.wait(feed, deadline, lambda feed=feed: self._anything(feed)):  # type: ignore[misc]
                self._store._usable()
                return None

    def _read(self, feed: Feed, place: Place) -> Message | None:
        """The message that was leased; None if it was removed after it had been looked up."""
        try:
            message = self._message(feed, place, leased=True)
        except BaseException:
            state = self._store._state_
            assert state is not None
            with state.lock:
                self._store._delivery.unlease((feed,), place[1], state)
            raise
        if message is None:
            state = self._store._state_
            assert state is not None
            with state.lock:
                state.let_go(feed, place[1])
        return message

    def _message(self, note: Note, place: Place, leased: bool) -> Message | None:
        state = self._store._usable()
        feed = feeds_of(note)[0]
        with state.lock:
            row = state.rows.get(place[1])
            count = (
                state.deliveries(feed, place[1]) if feed.key is not None or feed.base + place[1] in state.counts else -1
            )
        if row is None or row.content is None:
            row = self._store._database.read(lambda connection: state.whole_row(connection, place[1]))
        if row is None:
            return None
        assert row.content is not None
        one = isinstance(note, Feed)
        return Message(
            self._store, feed.owner.destination, row.seq, row.content, headers_of(row), row.message_id, row.sent_at_ms,
            leased, note, row.priority, row.expires_at_ms, (row.deliveries if count < 0 else count) + 1,
            feed.key if one else None,
        )  # fmt: skip

    def _anything(self, feed: Feed) -> bool:
        """Whether who waits shall look again."""
        state = self._store._usable()
        with state.lock:
            gone = feed.key is not None and feed.number not in state.durables
            return gone or self._store._delivery.anything(feed, state)

    def watch(
        self, destination: Destination, subscription: SubscriptionKey | None, wake: Callable[[], None]
    ) -> Callable[[], None]:
        state = self._store._usable()
        return self._store._delivery.watch(feed_of(state, destination, subscription), wake)

    def take_undelivered(self, limit: int) -> Sequence[Undelivered]:
        state = self._store._usable()
        found: list[Undelivered] = []
        with state.lock:
            lost = self._store._delivery.take_undelivered(limit, state)
            for feeds, place, _ in lost:
                for feed in feeds:
                    state.places[feed.base + place[1]] = place
        try:
            for feeds, place, reason in lost:
                whole = reason == EXPIRED and feeds[0].key is not None
                message = self._message(feeds if whole else feeds[0], place, leased=True)
                if message is not None:
                    found.append(Undelivered(message, reason))
                    continue
                with state.lock:
                    for feed in feeds:
                        state.let_go(feed, place[1])
        except BaseException:
            with state.lock:
                for feeds, place, _ in lost:
                    self._store._delivery.unlease(feeds, place[1], state)
            raise
        return found


def feed_of(state: State, destination: Destination, key: SubscriptionKey | None) -> Feed:
    """What is received from. Raises DestinationError, UnknownSubscriptionError."""
    durable = durable_of(state, destination, key)
    if durable is not None:
        return durable.feed
    if destination.kind is Kind.TOPIC:
        raise DestinationError(f"{destination} is a topic: receive for one of its subscriptions")
    return state.destination(destination).feed


def durable_of(state: State, destination: Destination, key: SubscriptionKey | None) -> Durable | None:
    """The subscription of that key; None if none is asked for. Raises likewise."""
    if key is None:
        return None
    require_topic(destination)
    known = state.destinations.get(destination)
    durable = known.durables.get(key) if known is not None else None
    if durable is None:
        raise unknown(destination, key)
    return durable
