"""What comes out of a journal store: messages received, looked at, or taken because they are not delivered any more."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Final

from ...policies.destination import Destination, Kind
from ...policies.errors import AnabranchError, CorruptionError, DestinationError
from ..base import EXPIRED, Message, SubscriptionKey, Undelivered
from ..delivery import Delivery, Feed, Lost, order_of
from ..subscriptions import require_topic, unknown
from ..wal.log import Log
from .applying import Applier
from .bodies import Bodies, UnreadableError
from .destinations import SEQ, DestinationState, Place, SubscriptionState

log = logging.getLogger(__name__)

PAGE: Final = 512
"""Messages that browse looks up at once."""


class Receiving:
    """Of one store, over its parts. Threads: all."""

    def __init__(
        self,
        the_log: Log,
        applier: Applier,
        delivery: Delivery,
        bodies: Bodies,
        state_of: Callable[[Destination], DestinationState],
    ) -> None:
        """`state_of` makes a destination that is new."""
        self._log, self._applier, self._delivery, self._bodies = the_log, applier, delivery, bodies
        self._state_of = state_of

    def receive(
        self, destination: Destination, timeout: float | None = 0, subscription: SubscriptionKey | None = None
    ) -> Message | None:
        deadline = None if timeout is None else time.monotonic() + timeout
        feed = self._feed(destination, subscription, make=timeout != 0)
        if feed is None:
            return None
        while True:
            place = self._lease(feed)
            if place is not None:
                try:
                    deliveries = self._deliveries(feed, place[SEQ]) if self._applier.index.rows.counted else 0
                    message = self._bodies.one(feed.owner, place, feed, deliveries)
                except BaseException as error:
                    if not _is_damage(error):
                        self._give_back((feed,), place)
                    raise
                if message is not None:
                    return message
                self._delivery.acked(feed, place[SEQ])  # it was purged after it had been fetched
            elif timeout == 0 or not self._delivery.wait(feed, deadline, lambda: self._has_ready(feed)):
                return None

    def _give_back(self, feeds: Sequence[Feed], place: Place) -> None:
        """A message that could not be read is free again; in a store that has stopped nobody holds anything."""
        with suppress(AnabranchError), self._applier.lock:
            self._delivery.unlease(feeds, place[SEQ], self._applier.current(drained=False).rows)

    def _feed(self, destination: Destination, subscription: SubscriptionKey | None, make: bool) -> Feed | None:
        """What one receives from there draws from. None for a queue that is new here, unless `make`."""
        state = self._applier.index.by_destination.get(destination)
        if state is not None and subscription is None and not state.is_topic:
            return state.feed
        if destination.kind is Kind.TOPIC:
            if subscription is None:
                raise DestinationError(f"{destination} is received from by a durable subscription; say which")
            known = state.subscriber(subscription) if state is not None else None
            return (known or self.subscriber(destination, subscription)).feed
        if subscription is not None:
            require_topic(destination)
        if state is None:
            self._log.ensure_usable()
            if not make:
                return None
            state = self._state_of(destination)
        return state.feed

    def subscriber(self, topic: Destination, key: SubscriptionKey) -> SubscriptionState:
        """The subscription, with all that has returned. Raises UnknownSubscriptionError."""
        require_topic(topic)
        self._applier.check()
        with self._applier.lock:
            state = self._applier.current().by_destination.get(topic)
            known = state.subscriber(key) if state is not None else None
        if known is None:
            raise unknown(topic, key)
        return known

    def _deliveries(self, feed: Feed, seq: int) -> int:
        """How often a message that somebody holds has come back."""
        self._applier.check()
        with self._applier.lock:
            return self._applier.current(drained=False).rows.deliveries(feed, seq)

    def _lease(self, feed: Feed) -> Place | None:
        self._applier.check()
        with self._applier.lock:
            index, delivery = self._applier.current(drained=False), self._delivery
            place = None
            pending = feed.number and self._applier.unsubscribing
            if feed.has_ready and not pending and not delivery.at_limit():
                place = delivery.lease(feed, index.rows)  # what was fetched before comes before all that is pending
            if place is None:
                self._applier.drain()
                delivery.require_room()
                place = delivery.lease(feed, index.rows)
                if feed.number and place is None and feed.number not in feed.owner.subscribers:
                    raise unknown(feed.owner.destination, feed.key or ("", ""))
            return place

    def _has_ready(self, feed: Feed) -> bool:
        self._applier.check()
        with self._applier.lock:
            rows = self._applier.current().rows
            return self._delivery.anything(feed, rows) or (
                feed.number != 0 and feed.number not in feed.owner.subscribers
            )

    def watch(
        self, destination: Destination, subscription: SubscriptionKey | None, wake: Callable[[], None]
    ) -> Callable[[], None]:
        self._log.ensure_usable()
        feed = self._feed(destination, subscription, make=True)
        assert feed is not None
        return self._delivery.watch(feed, wake)

    def take_undelivered(self, limit: int = 100) -> Sequence[Undelivered]:
        self._applier.check()
        lost: list[Lost] = []
        found: list[Undelivered] = []
        try:
            with self._applier.lock:
                rows = self._applier.current().rows
                self._delivery.take_undelivered(limit, rows, lost)
                counts = [max(rows.deliveries(feed, place[SEQ]) for feed in feeds) for feeds, place, _ in lost]
            for (feeds, place, reason), count in zip(lost, counts, strict=True):
                state: DestinationState = feeds[0].owner
                note = feeds if state.is_topic and reason == EXPIRED else feeds[0]
                try:
                    message = self._bodies.one(state, place, note, count)
                except CorruptionError as error:  # others go on
                    log.error("%s: %s", self._log.name, error)
                    if not _is_damage(error):
                        self._give_back(feeds, place)
                    continue
                if message is not None:
                    found.append(Undelivered(message, reason))
                else:
                    for feed in feeds:
                        self._delivery.acked(feed, place[SEQ])
            return found
        except BaseException:
            with self._applier.lock:  # the caller knows of none of them
                for feeds, place, _ in lost:
                    self._delivery.unlease(feeds, place[SEQ], self._applier.current().rows)
            raise

    def browse(
        self,
        destination: Destination,
        limit: int | None = None,
        after: int | Message = 0,
        subscription: SubscriptionKey | None = None,
    ) -> Iterator[Message]:
        if isinstance(after, Message):
            position = (order_of(after.priority, self._applier.index.priorities), after.seq)
        elif after and self._applier.index.priorities:
            raise ValueError(
                f"{self._log.name} orders by priority: the seq {after} is no place in its order; give the message"
            )
        else:
            position = (0, after)
        return self._browse(destination, limit, position, subscription)

    def _browse(
        self,
        destination: Destination,
        limit: int | None,
        after: tuple[int, int],
        subscription: SubscriptionKey | None,
    ) -> Iterator[Message]:
        self._log.ensure_usable()
        known = None if subscription is None else self.subscriber(destination, subscription)
        state = self._applier.index.by_destination.get(destination)
        left = limit if limit is not None else -1
        while state is not None and left != 0:
            self._applier.check()
            with self._applier.lock:
                rows = self._applier.current().rows
                if known is not None and known.number not in state.subscribers:
                    return
                count = PAGE if left < 0 else min(PAGE, left)
                places = rows.look(state, known.bit if known is not None else 0, after, count, across=True)
                number = known.number if known is not None else None if state.is_topic else 0
                counts = rows.deliveries_of(places, number)
            if not places:
                return
            for message in self._bodies.page(state, places, counts, known.feed if known is not None else None):
                yield message
                left -= 1
            after = places[-1][:2]


def _is_damage(error: BaseException) -> bool:
    """Whether a message's bytes were read and are damaged: it stays leased, for receivers to go on behind it. What the
    disk did not give may be tried again."""
    return isinstance(error, CorruptionError) and not isinstance(error, UnreadableError)
