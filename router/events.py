"""Events of a router that no call returns: messages that expire or are dead-lettered, stores that fail.

    def tell(event: anabranch.Event) -> None:
        if isinstance(event, anabranch.StoreFailed):
            page_somebody(event.store, event.reason)

    listener = router.on_event(tell)

Callbacks run on background threads of the library, for each listener one event after the other. Nothing waits for them:
events that a slow one has not come to yet are kept, up to EVENTS_MAX, and events beyond that are counted.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from ..adapters.core import Store
from ..adapters.system.background import shared
from ..adapters.system.conditions import unless_busy
from ..policies.names.destination import Destination

log: logging.Logger = logging.getLogger(__name__)

EVENTS_MAX: Final = 1000
"""The number of events that wait for one listener."""


@dataclass(frozen=True, slots=True)
class Event:
    """An event. Its class says what has happened."""

    store: str
    """The store's name."""
    at_ms: int = field(default_factory=lambda: time.time_ns() // 1_000_000, kw_only=True, compare=False)
    """When it was noticed, in milliseconds since the epoch."""


@dataclass(frozen=True, slots=True)
class MessageEvent(Event):
    """An event of one message, with the place where the message was."""

    destination: Destination
    seq: int
    """Its place in its store's order."""
    message_id: str | None


@dataclass(frozen=True, slots=True)
class MessageExpired(MessageEvent):
    """A message's time was over. The message was dead-lettered or dropped: another event says which."""


@dataclass(frozen=True, slots=True)
class MessageDeadLettered(MessageEvent):
    """A message is in a dead-letter queue now."""

    reason: str
    """The reason, as in the header `dead_letter_reason`."""
    deliveries: int
    """How often it had been handed out."""
    dead_letter_queue: Destination


@dataclass(frozen=True, slots=True)
class MessageDropped(MessageEvent):
    """A message is gone, since its store has no dead-letter queue."""

    reason: str
    deliveries: int


@dataclass(frozen=True, slots=True)
class StoreFailed(Event):
    """A store has stopped itself. Nothing is sent to it or received from it until it is opened again."""

    reason: str


@dataclass(frozen=True, slots=True)
class StoreOpened(Event):
    """A store was opened: on first use, after it was closed for being idle, or again after a failure."""

    after_failure: bool


class EventListener:
    """The listener of one callback. Threads: all. `close` may be called from the callback."""

    def __init__(self, on_event: Callable[[Event], object], forget: Callable[[EventListener], None]) -> None:
        self._on_event, self._forget = on_event, forget
        self._waiting: deque[Event] = deque()
        self._lock = threading.RLock()  # a signal handler may come back to it in the same thread
        """Guards `_dropped`."""
        self._work = threading.Lock()
        """Held by the thread that calls."""
        self._dropped = 0
        self._closed = False

    @property
    def dropped(self) -> int:
        """The number of events that the callback was not told of, since so many waited already."""
        return self._dropped

    def close(self) -> None:
        """Stop telling of events, but for one that is on its way to the callback just now. Idempotent."""
        self._closed = True
        self._waiting.clear()
        self._forget(self)

    def _tell(self, event: Event) -> None:
        """Tell of an event soon, on a thread of ours. Never waits."""
        if len(self._waiting) >= EVENTS_MAX:
            with self._lock:
                self._dropped += 1
        else:
            self._waiting.append(event)
        shared().lead(self._run)

    def _run(self) -> None:
        while self._waiting:
            if not unless_busy(self._work, self._call_all):
                return  # who is at work looks once more

    def _call_all(self) -> bool:
        while (event := self._next()) is not None:
            self._call(event)
        return True

    def _next(self) -> Event | None:
        try:
            return self._waiting.popleft()
        except IndexError:
            return None

    def _call(self, event: Event) -> None:
        if self._closed:
            return
        try:
            self._on_event(event)
        except BaseException:  # a SystemExit too ends nothing
            log.exception("a listener of events raised an error at %r", event)


class Events:
    """The listeners of one router. Threads: all. A caller with an event asks first whether there is a listener: `if
    events`."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._listeners: tuple[EventListener, ...] = ()
        """Replaced under the lock, not changed."""
        self._failed: dict[bytes, None] = {}
        """The stores that have failed and were not opened since."""

    def __bool__(self) -> bool:
        return bool(self._listeners)

    def listen(self, on_event: Callable[[Event], object]) -> EventListener:
        """Add a listener. Raises TypeError for what cannot be called."""
        if not callable(on_event):
            raise TypeError(f"on_event takes a function of one event, not {on_event!r}")
        listener = EventListener(on_event, self._forget)
        with self._lock:
            self._listeners = (*self._listeners, listener)
        return listener

    def watch(self, store: Store) -> None:
        """Tell that a store was opened, and when it fails."""
        store.on_failed(partial(self._store_failed, store.name, store.store_id))
        after_failure = self._failed.pop(store.store_id, 0) is None
        if self:
            self.tell(StoreOpened(store.name, after_failure))

    def _store_failed(self, name: str, store_id: bytes, cause: BaseException) -> None:
        self._failed[store_id] = None
        if self:
            self.tell(StoreFailed(name, str(cause)))

    def _forget(self, listener: EventListener) -> None:
        with self._lock:
            self._listeners = tuple(other for other in self._listeners if other is not listener)

    def tell(self, event: Event) -> None:
        """Tell all who listen. Never waits, and raises nothing."""
        for listener in self._listeners:
            listener._tell(event)
