"""What comes out of a memory store: messages received, looked at, or taken because they are not delivered any more."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from ...policies.destination import Destination
from ..base import EXPIRED, Message, Store, SubscriptionKey, Undelivered
from ..delivery import Feed, Note, Place, feeds_of
from .browsing import Browser
from .contents import CHUNK, INDEX, owners
from .core import Core
from .records import StoredMessage, decode


class Receiving:
    """Of one store. Threads: all."""

    def __init__(self, store: Store, core: Core) -> None:
        self._store, self._core = store, core

    def receive(
        self, destination: Destination, timeout: float | None = 0, subscription: SubscriptionKey | None = None
    ) -> Message | None:
        core = self._core
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            core.require_open()
            with core.lock:
                core.enter()
                feed = core.feed(destination, subscription, make=timeout != 0)
                if feed is None:
                    return None
                core.delivery.require_room()
                message = self._lease(feed)
            if message is not None:
                return message
            if timeout == 0 or not core.delivery.wait(feed, deadline, partial(self._has_news, feed)):
                return None

    def _lease(self, feed: Feed) -> Message | None:
        core = self._core
        place = core.delivery.lease(feed, core.contents)
        if place is None:
            return None
        try:
            return self._message(place, feed, feed.key)
        except BaseException:  # Ctrl-C, or damage in the swap
            core.delivery.unlease([feed], place[1], core.contents)
            raise

    def _message(self, place: Place, note: Note | None, subscription: SubscriptionKey | None) -> StoredMessage:
        """Read a message that lives. Raises CorruptionError and StoreFailedError."""
        chunk, index = place[CHUNK], place[INDEX]
        record = self._core.residence.load(chunk)[index]
        assert record is not None, "it is dead"
        count = chunk.counts.get((feeds_of(note)[0].number, index), 0) if note is not None else 0
        return decode(self._store, chunk.lane.state.destination, chunk, index, record, note, count, subscription)

    def _has_news(self, feed: Feed) -> bool:
        """Whether who waits shall look again."""
        core = self._core
        core.require_open()
        with core.lock:
            core.enter()
            state, subscription = owners(feed)
            known = core.contents.states.get(state.destination) is state and (
                subscription is None or state.subscriptions.get(subscription.subscription.key) is subscription
            )
            return not known or core.delivery.anything(feed, core.contents)

    def watch(
        self, destination: Destination, subscription: SubscriptionKey | None, wake: Callable[[], None]
    ) -> Callable[[], None]:
        core = self._core
        core.require_open()
        with core.lock:
            core.enter()
            feed = core.feed(destination, subscription, make=True)
            assert feed is not None
            return core.delivery.watch(feed, wake)

    def browse(
        self,
        destination: Destination,
        limit: int | None = None,
        after: int | Message = 0,
        subscription: SubscriptionKey | None = None,
    ) -> Iterator[Message]:
        core = self._core
        browser = Browser(core.contents, core.residence, self._store, destination, subscription, after)
        core.require_open()
        with core.lock:
            core.enter()
            core.owners(destination, subscription)
        left = limit if limit is not None else -1
        while left != 0:
            core.require_open()
            with core.lock:
                core.enter()
                page = browser.page(left)
            if not page:
                return
            for message in page:
                core.require_open()
                if browser.lives(message):
                    yield message
                    left -= 1

    def take_undelivered(self, limit: int = 100) -> Sequence[Undelivered]:
        core = self._core
        core.require_open()
        with core.lock:
            core.enter()
            lost = core.delivery.take_undelivered(limit, core.contents)
            try:
                found = []
                for feeds, place, reason in lost:
                    key = feeds[0].key if reason != EXPIRED else None
                    found.append(Undelivered(self._message(place, feeds, key), reason))
                return found
            except BaseException:
                for feeds, place, _ in lost:
                    core.delivery.unlease(feeds, place[1], core.contents)
                raise
