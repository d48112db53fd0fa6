"""Where messages come out: of a queue, or of one durable subscription of a topic."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeVar

from ..adapters.base import Counts, Listener, Message, Store, SubscriptionKey
from ..policies.destination import Destination
from ..policies.errors import ClosedError

if TYPE_CHECKING:
    from .store_registry import StoreRegistry

T = TypeVar("T")


class Consumer:
    """Any thread may use it. What each call promises: adapters/base.py, Store."""

    __slots__ = ("_destination", "_registry", "_subscription")

    def __init__(self, registry: StoreRegistry, destination: Destination, subscription: SubscriptionKey | None) -> None:
        self._registry, self._destination, self._subscription = registry, destination, subscription

    def receive(self, timeout: float | None) -> Message | None:
        """As Store.receive. Raises TypeError and ValueError for what is no time to wait."""
        if timeout == 0:
            return self._receive_now()
        _require_timeout(timeout)
        deadline = None if timeout is None else time.monotonic() + timeout

        def receive(store: Store) -> Message | None:  # called again if the store was closed for being idle
            left = None if deadline is None else max(deadline - time.monotonic(), 0)
            return store.receive(self._destination, left, self._subscription)

        return self._for_store(receive)

    def _receive_now(self) -> Message | None:
        registry, destination = self._registry, self._destination
        while (store := registry.store_of(destination)) is not None:
            try:
                return store.receive(destination, 0, self._subscription)
            except ClosedError:
                registry.forget_closed(destination, store)
        return None

    def _is_there(self) -> bool:
        return self._registry.store_of(self._destination) is not None

    def browse(self, limit: int | None, after: int | Message) -> Iterator[Message]:
        """As Store.browse. It may take its time: a store that is closed for being idle meanwhile is opened again."""
        if limit is not None and limit < 0:
            raise ValueError(f"browse takes a limit of 0 or more, or None for all; not {limit}")
        if not self._is_there():
            return iter(())
        return self._browse(limit, after)

    def _browse(self, left: int | None, after: int | Message) -> Iterator[Message]:
        while left is None or left > 0:
            store = self._registry.store_for(self._destination)
            try:
                for message in store.browse(self._destination, left, after, self._subscription):
                    after = message
                    left = left if left is None else left - 1
                    yield message
                return
            except ClosedError:
                self._registry.forget_closed(self._destination, store)

    def listen(
        self,
        on_message: Callable[[Message], object],
        credit: int,
        on_end: Callable[[Exception], object] | None,
    ) -> Listener:
        """As Store.listen."""
        return self._for_store(
            lambda store: store.listen(self._destination, on_message, credit, self._subscription, on_end)
        )

    def counts(self) -> Counts:
        """As Store.counts."""
        if self._registry.store_of(self._destination) is None:
            return Counts(0, 0)
        return self._for_store(lambda store: store.counts(self._destination, self._subscription))

    def purge(self) -> int:
        """Remove all messages that nobody holds; returns how many."""
        return self._sum(lambda store: store.purge(self._destination, self._subscription))

    def depth(self) -> int:
        """Messages held, leased ones included."""
        return self._sum(lambda store: store.depth(self._destination, self._subscription))

    def _sum(self, call: Callable[[Store], int]) -> int:
        if not self._is_there():
            return 0
        return self._for_store(call)

    def _for_store(self, call: Callable[[Store], T]) -> T:
        return self._registry.for_store(self._destination, call)


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
