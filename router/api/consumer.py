"""Consumers: messages come out of a queue, or of one durable subscription of a topic."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import filterfalse, islice
from typing import TYPE_CHECKING, Any, Final, Generic

from ...adapters.core import Store
from ...adapters.core.engine.lease_times import require_seconds
from ...adapters.core.messages import Message, T
from ...adapters.core.store_types import Counts, Listener, SubscriptionKey
from ...policies.errors import ClosedError
from ...policies.names.destination import Destination
from .background import in_background
from .codecs import Codec, wrap, wrap_any
from .dead_letter import DeadLetter, dead_letter_of, dead_letter_queue

if TYPE_CHECKING:
    from ..placement.registry import StoreRegistry

PAUSE_MIN: Final = 0.0005
"""The first pause between two looks, in seconds."""
PAUSE_MAX: Final = 0.25
"""The longest, where a look does not take long."""
PAUSE_FOR_LOOK: Final = 4
"""A pause is at least as many times as long as a look: looking takes no more than a fifth of the time."""


class Backlog(Generic[T]):
    """The messages of a queue, a topic or a subscription, to look at. Any thread may use it. Promises of each call:
    adapters/core/store.py. Two are equal if their router, their name and their codec are the same."""

    __slots__ = ()

    _registry: StoreRegistry
    destination: Destination
    _key: SubscriptionKey | None = None
    """The subscription whose messages these are; None for all of the destination."""
    _codec: Codec[T] | None = None
    """The codec of their bodies; None: they are bytes."""

    def __eq__(self, other: object) -> bool:
        return (
            type(other) is type(self) and isinstance(other, Backlog) and other._registry is self._registry
            and (other.destination, other._key, other._codec) == (self.destination, self._key, self._codec)
        )  # fmt: skip

    def __hash__(self) -> int:
        return hash((self._registry, self.destination, self._key))

    def browse(self, limit: int | None = None, after: int | Message[Any] = 0) -> Iterator[Message[T]]:
        """Look at the messages in order without taking them, at most `limit` from the one after `after`: a message, or
        the seq of one where the store has no `priorities`. A topic gives all messages that some subscription has yet to
        ack, a subscription its own. The caller may take long: a store that is closed for being idle meanwhile is opened
        again."""
        return self._looked_at(limit, after, True)

    def _looked_at(self, limit: int | None, after: int | Message[Any], leased: bool) -> Iterator[Message[T]]:
        if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool)):
            raise TypeError(f"limit is a number of messages, not {type(limit).__name__}: {limit!r}")
        if not isinstance(after, int | Message) or isinstance(after, bool):
            raise TypeError(f"after is a message, or the seq of one, not {type(after).__name__}: {after!r}")
        if limit is not None and limit < 0:
            raise ValueError(f"browse takes a limit of 0 or more, or None for all; not {limit}")
        if self._registry.store_of(self.destination) is None:
            return iter(())
        found: Iterator[Any] = islice(self._browse(limit, after, leased), limit)
        return found if self._codec is None else map(partial(wrap, self._codec), found)

    def _browse(self, limit: int | None, after: int | Message[Any], leased: bool) -> Iterator[Message]:
        last, asked = deque((after,), maxlen=1), (self.destination, limit)
        while True:
            with self._registry.attempt(self.destination, partial(self._store_after, last[0])) as store:
                # Each is noted before it is given: `append` returns None.
                yield from filterfalse(last.append, store.browse(*asked, last[0], self._key, leased))
                return

    def _store_after(self, after: int | Message[Any], destination: Destination) -> Store:
        """Return the store to go on in with browsing. Raises ClosedError if it is another one since `after`."""
        store = self._registry.store_for(destination)
        if isinstance(after, Message) and after._store.store_id != store.store_id:
            raise place_moved(destination, after)
        return store

    def dead_letters(self) -> Iterator[DeadLetter[T]]:
        """Look at the dead letters that come from here, in order, without taking them; of a subscription, those that it
        has given up. Walks all of the dead-letter queue, whatever else is in there: with a queue for each destination
        (`dead_letter: dlq.{name}`) that is nothing else. Gives none if its store names no dead-letter queue."""
        pattern = self._registry.option_for(self.destination, "dead_letter")
        if pattern is not None:
            queue = dead_letter_queue(pattern, self.destination)
            for message in _Letters(self._registry, queue, self._codec).browse():
                letter = dead_letter_of(message)
                if (
                    letter is not None
                    and letter.source == self.destination
                    and self._key in (None, letter.subscription)
                ):
                    yield letter

    def depth(self) -> int:
        """Return how many messages are held, leased ones included. A topic counts those that some subscription has yet
        to ack, each once; a subscription counts its own."""
        return self._registry.for_held(self.destination, lambda store: store.depth(self.destination, self._key), 0)


class _Letters(Backlog[T]):
    """The messages of a dead-letter queue, of one codec's bodies."""

    __slots__ = ("_codec", "_registry", "destination")

    def __init__(self, registry: StoreRegistry, destination: Destination, codec: Codec[T] | None) -> None:
        self._registry, self.destination, self._codec = registry, destination, codec


class Consumer(Backlog[T]):
    """Receives messages from a queue or a subscription."""

    __slots__ = ()

    def browse(
        self, limit: int | None = None, after: int | Message[Any] = 0, *, leased: bool = True
    ) -> Iterator[Message[T]]:
        """Look at the messages in order without taking them, at most `limit` from the one after `after`, as
        Backlog.browse; without `leased` only at those that nobody has leased, or claimed in a transaction, when it is
        their turn. Those that wait for their time are among them."""
        return self._looked_at(limit, after, leased)

    def receive(
        self, timeout: float | None = 0, *, lease: float | None = None, newest: bool = False
    ) -> Message[T] | None:
        """Lease the first message that nobody holds, waiting up to `timeout` seconds for one (None: for ever).

        With `newest` it is the last one that was sent, of the most urgent priority: last in, first out. A call that
        waits gets the first one that comes.

        The message is this process's until `message.ack()` or `message.release()`; when the process ends, all its
        leases do. With `lease`, or the store's option `lease_timeout`, it is free again after so many seconds, counted
        as a delivery, unless `message.extend()` gives it more. A `timeout` that is over already, below 0, does not
        wait. Raises TypeError and ValueError for what is no number of seconds, and UnknownSubscriptionError for a
        subscription that was ended. A body that does not decode is found when `message.body` is asked for.
        """
        if lease is not None:
            require_seconds(lease, "lease")
        destination = self.destination
        store = self._registry.by_destination.get(destination) if timeout == 0 else None
        message: Message[Any] | None
        try:  # what nearly always comes of it; the rest would take a receive half a microsecond more
            message = None if store is None else store.receive(destination, 0, self._key, lease, newest)
        except ClosedError:
            store = None
        if store is None:
            message = self._in_time(timeout, None, "receive", lease=lease, newest=newest)
        return message if self._codec is None else wrap_any(self._codec, message)

    def _in_time(self, timeout: float | None, none: Any, name: str, **options: Any) -> Any:
        """Call a method of the store with the seconds that are left to wait; once more as `for_store`. Returns `none`
        if no store has the destination yet and nothing is waited for."""

        def call(store: Store, left: float | None) -> Any:
            return getattr(store, name)(self.destination, timeout=left, subscription=self._key, **options)

        if timeout == 0:
            return self._registry.for_held(self.destination, lambda store: call(store, 0), none)
        left = countdown(timeout)
        if timeout is None:
            self._registry.routing.hint_at_slip(self.destination)
        return self._registry.for_store(self.destination, lambda store: call(store, left()))

    def receive_many(self, n: int, timeout: float | None = 0, *, lease: float | None = None) -> list[Message[T]]:
        """Lease up to `n` messages, in order, waiting up to `timeout` seconds for the first (None: for ever): as soon
        as there is one, all that are there then, up to `n`. Returns an empty list if none has come.

        Each is settled on its own, or several at once with `router.ack(messages)`. Raises as `receive`; and TypeError
        and ValueError for what is no number of messages.
        """
        require_count(n)
        if lease is not None:
            require_seconds(lease, "lease")
        messages: list[Any] = self._in_time(timeout, [], "receive_many", most=n, lease=lease)
        return messages if self._codec is None else [wrap(self._codec, message) for message in messages]

    def consume(self, timeout: float | None = None, *, lease: float | None = None) -> Iterator[Message[T]]:
        """Yield each message, leased, one after the other. The next one is received when it is asked for, so that none
        is leased ahead. Ends when none has come for `timeout` seconds. With None it goes on until the router is closed,
        which raises ClosedError here. Raises as `receive`."""
        require_timeout(timeout)
        if lease is not None:
            require_seconds(lease, "lease")
        return iter(lambda: self.receive(timeout, lease=lease), None)

    def wait_empty(self, timeout: float | None = None) -> bool:
        """Wait up to `timeout` seconds (None: for ever) until nothing is held here any more: nothing ready, leased,
        claimed, or waiting for its time. Returns whether that was so. Others may send again at once.

        Nobody who sends or acks pays for it: it looks by itself, at first after half a millisecond, later four times a
        second, and less often where a look takes long. Raises as `depth`, and TypeError and ValueError for what is no
        number of seconds.
        """
        pauses = pauses_of(timeout)
        while self.depth():
            pause = next(pauses, None)
            if pause is None:
                return False
            time.sleep(pause)
        return True

    def listen(
        self,
        on_message: Callable[[Message[T]], object],
        credit: int = 1,
        *,
        on_end: Callable[[Exception], object] | None = None,
        lease: float | None = None,
    ) -> Listener:
        """Call `on_message` with each message, leased, up to `credit` of them; more with `Listener.add_credit`.

        Listeners and those who wait in `receive` stand in one line: what becomes free goes to who came first. The
        callback runs on a background thread of the library, one message at a time, in order; never inside a sender's
        `send`, never in this call. A callback that takes long holds up nobody but its own listener. The callback
        settles the message then or later, from any thread; if it raises, the message is released. `lease` is as for
        `receive`, from the call on.

        The store is opened, and stays open until the listener is closed. The listener ends if the store closes all the
        same or fails (`router.close()`, `router.reopen()`), its disk does not give a message, or the subscription is
        ended. Then `on_end` is called with the error, on such a thread. Raises TypeError and ValueError for what is no
        function, no credit or no time.
        """
        require_callbacks(on_message, on_end)
        codec, call = self._codec, on_message
        heard: Callable[[Any], object] = call if codec is None else lambda message: call(wrap(codec, message))
        self._registry.routing.hint_at_slip(self.destination)
        return self._registry.for_store(
            self.destination, lambda store: store.listen(self.destination, heard, credit, self._key, on_end, lease)
        )

    listen_nowait: Final = in_background(listen)

    def purge(self) -> int:
        """Remove all messages that nobody holds, for a subscription: ack them; returns how many."""
        return self._registry.for_held(self.destination, lambda store: store.purge(self.destination, self._key), 0)

    def counts(self) -> Counts:
        """Return the numbers of messages: ready, leased or claimed by a transaction, waiting for their time, and
        expired since the store was opened. `oldest_ready_seconds` is the age of the next one. Takes the same time
        however many there are."""
        return self._registry.for_held(
            self.destination, lambda store: store.counts(self.destination, self._key), Counts(0, 0)
        )


def place_moved(destination: Destination, after: Message[Any]) -> ClosedError:
    """Return the error of a browse that cannot go on behind a message."""
    return ClosedError(
        f"{destination} has moved to another store since {after!r} was browsed, and its messages have other places "
        "there; browse it from the beginning"
    )


def require_callbacks(on_message: object, on_end: object) -> None:
    """Raise TypeError for what cannot be called."""
    if not callable(on_message):
        raise TypeError(f"on_message is a function of one message, not {type(on_message).__name__}: {on_message!r}")
    if on_end is not None and not callable(on_end):
        raise TypeError(f"on_end is a function of one error, not {type(on_end).__name__}: {on_end!r}")


def countdown(timeout: float | None) -> Callable[[], float | None]:
    """Return a function that returns how many seconds are left of a time, which begins now (None: for ever). Raises as
    `require_timeout`."""
    require_timeout(timeout)
    if timeout is None:
        return lambda: None
    deadline = time.monotonic() + timeout
    return lambda: max(deadline - time.monotonic(), 0)


def pauses_of(timeout: float | None) -> Iterator[float]:
    """Return how many seconds to pause before each further look at something, until the time is over: the longer, the
    more looks there were, and the longer one takes. Raises as `require_timeout`."""
    return _pauses(countdown(timeout))


def _pauses(left: Callable[[], float | None]) -> Iterator[float]:
    grown, pause, began = PAUSE_MIN, 0.0, time.monotonic()
    while (rest := left()) is None or rest > 0:
        looked = time.monotonic() - began - pause
        pause = max(grown, PAUSE_FOR_LOOK * looked)
        if rest is not None:
            pause = min(pause, rest)
        grown, began = min(2 * grown, PAUSE_MAX), time.monotonic()
        yield pause


def require_timeout(timeout: object) -> None:
    """Raise TypeError or ValueError for what cannot be waited for."""
    if timeout is None:
        return
    if not isinstance(timeout, int | float) or isinstance(timeout, bool):
        raise TypeError(f"timeout is a number of seconds, not {type(timeout).__name__}: {timeout!r}")
    if not timeout <= threading.TIMEOUT_MAX:
        raise ValueError(
            f"timeout is a number of seconds up to {threading.TIMEOUT_MAX:.0f}, not {timeout!r}; None is for ever"
        )


def require_count(n: object) -> None:
    """Raise TypeError or ValueError for what is no number of messages to receive."""
    if not isinstance(n, int) or isinstance(n, bool):
        raise TypeError(f"n is a number of messages, not {type(n).__name__}: {n!r}")
    if n < 1:
        raise ValueError(f"n is a number of messages, 1 or more, not {n}")
