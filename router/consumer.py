"""Where messages come out: of a queue, or of one durable subscription of a topic.

They may lie in two stores: the destination's own, and the companion that keeps what is not persistent. Each message of
a companion knows how far the other store had come when it was sent, so the two are one destination in one order.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

from ..adapters.base import Message, Store, SubscriptionKey
from ..policies.destination import Destination
from ..policies.errors import AnabranchError, ClosedError, UnknownSubscriptionError

if TYPE_CHECKING:
    from .nonpersistent import NonpersistentStore
    from .store_registry import StoreRegistry

T = TypeVar("T")


class Consumer:
    """Any thread may use it. What each call promises: adapters/base.py, Store."""

    __slots__ = ("_destination", "_places", "_subscription")

    def __init__(self, places: StoreRegistry, destination: Destination, subscription: SubscriptionKey | None) -> None:
        self._places, self._destination, self._subscription = places, destination, subscription

    def receive(self, timeout: float | None) -> Message | None:
        """As Store.receive. Raises TypeError and ValueError for what is no time to wait."""
        if timeout != 0:
            _require_timeout(timeout)
        companion = self._places.companion_of(self._destination)
        if companion is None:
            if timeout == 0 and self._places.store_of(self._destination) is None:
                return None
            if timeout == 0:
                return self._for_store(self._receive_now)
            return self._receive(None, timeout)
        return self._receive(companion, timeout)

    def _receive_now(self, store: Store) -> Message | None:
        return store.receive(self._destination, 0, self._subscription)

    def _receive(self, companion: NonpersistentStore | None, timeout: float | None) -> Message | None:
        """From both, now or in time. A companion may be made while we wait."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            message = self._first(companion)
            left = None if deadline is None else deadline - time.monotonic()
            if message is not None or (left is not None and left <= 0):
                return message
            message = self._watch(companion, left)
            if message is not None:
                return message
            companion = self._places.companion_of(self._destination)

    def _watch(self, companion: NonpersistentStore | None, left: float | None) -> Message | None:
        """Wait until there may be something; what came before we watched is returned."""
        woken = threading.Lock()
        woken.acquire()

        def wake() -> None:
            try:
                woken.release()
            except RuntimeError:
                pass  # it was released before

        ends: list[Callable[[], None]] = []
        message: Message | None = None
        try:
            ends.append(self._places.watch_companions(wake))
            ends.append(self._for_store(lambda store: store.watch(self._destination, self._subscription, wake)))
            if companion is not None:
                ends.append(self._there(companion, lambda: self._watch_companion(companion, wake)))
            elif self._places.companion_of(self._destination) is not None:
                return None  # it was made just now
            message = self._first(companion)
            if message is None:
                woken.acquire(timeout=-1 if left is None else left)
            _end(ends)
            return message
        except BaseException:
            _let_go(message)
            raise
        finally:
            _end(ends)

    def _watch_companion(self, companion: NonpersistentStore, wake: Callable[[], None]) -> Callable[[], None]:
        return companion.store.watch(self._destination, self._subscription, wake)

    def _first(self, companion: NonpersistentStore | None) -> Message | None:
        """The first message of both stores that nobody holds, leased. Who is interrupted holds neither."""
        if companion is None:
            return self._for_store(self._receive_now)
        transient: Message | None = None
        durable: Message | None = None
        try:
            transient = self._there(companion, lambda: self._receive_now(companion.store))
            durable = self._for_store(self._receive_now)
            if transient is None or durable is None:
                return transient or durable
            first, second = sorted((durable, transient), key=companion.order)
            second.store.release([second], delivered=False)
            return first
        except BaseException:
            _let_go(transient)
            _let_go(durable)
            raise

    def _there(self, companion: NonpersistentStore, call: Callable[[], T]) -> T:
        """Call with a companion. What it knows not of a subscription, as one who began it was interrupted before he
        came to the companion, it is told. Raises UnknownSubscriptionError if the durable store does not know it."""
        try:
            return call()
        except UnknownSubscriptionError:
            self._for_store(self._places.align_companion)
            return call()

    def browse(self, limit: int | None, after: int | Message) -> Iterator[Message]:
        """As Store.browse. It may take its time: a store that is closed for being idle meanwhile is opened again."""
        if limit is not None and limit < 0:
            raise ValueError(f"browse takes a limit of 0 or more, or None for all; not {limit}")
        if self._places.store_of(self._destination) is None:
            return iter(())
        companion = self._places.companion_of(self._destination)
        if companion is None:
            return self._browse(limit, after)
        both = heapq.merge(
            self._browse(None, self._durable_after(companion, after)), self._browse_companion(companion, after),
            key=companion.order,
        )  # fmt: skip
        if isinstance(after, Message):
            both = (message for message in both if companion.order(message) > companion.order(after))
        return islice(both, limit)

    def _durable_after(self, companion: NonpersistentStore, after: int | Message) -> int | Message:
        """Where to begin in the durable store."""
        if isinstance(after, Message) and after.store is companion.store:
            return 0 if companion.priorities else companion.position(after)
        return after

    def _browse_companion(self, companion: NonpersistentStore, after: int | Message) -> Iterator[Message]:
        self._there(companion, lambda: companion.store.depth(self._destination, self._subscription))
        for message in companion.store.browse(self._destination, None, 0, self._subscription):
            if isinstance(after, Message) or companion.position(message) >= after:
                yield message

    def _browse(self, left: int | None, after: int | Message) -> Iterator[Message]:
        while left is None or left > 0:
            store = self._places.store_for(self._destination)
            try:
                for message in store.browse(self._destination, left, after, self._subscription):
                    after = message
                    left = left if left is None else left - 1
                    yield message
                return
            except ClosedError:
                self._places.forget_closed(self._destination, store)

    def purge(self) -> int:
        """Remove all messages that nobody holds; returns how many."""
        return self._sum(lambda store: store.purge(self._destination, self._subscription))

    def depth(self) -> int:
        """Messages held, leased ones included."""
        return self._sum(lambda store: store.depth(self._destination, self._subscription))

    def _sum(self, call: Callable[[Store], int]) -> int:
        if self._places.store_of(self._destination) is None:
            return 0
        companion = self._places.companion_of(self._destination)
        count = self._for_store(call)
        return count if companion is None else count + self._there(companion, lambda: call(companion.store))

    def _for_store(self, call: Callable[[Store], T]) -> T:
        return self._places.for_store(self._destination, call)


def _require_timeout(timeout: object) -> None:
    """Raise TypeError or ValueError for what cannot be waited for."""
    if timeout is None:
        return
    if not isinstance(timeout, int | float):
        raise TypeError(f"timeout is a number of seconds, not {type(timeout).__name__}: {timeout!r}")
    if not timeout <= threading.TIMEOUT_MAX:
        raise ValueError(
            f"timeout is a number of seconds up to {threading.TIMEOUT_MAX:.0f}, not {timeout!r}; None is for ever"
        )


def _end(ends: list[Callable[[], None]]) -> None:
    """May be done again."""
    while ends:
        ends[-1]()
        ends.pop()


def _let_go(message: Message | None) -> None:
    """If it is leased still."""
    if message is not None:
        with suppress(AnabranchError):
            message.store.release([message], delivered=False)
