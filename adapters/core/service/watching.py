"""Watches, for callers that look at many queues at once: each is told of a message in one, without waiting for it.

    found = store.receive_or_watch(destination, on_wake)    # a Message; or a Watch: there is none
    found.leave()                                           # who is not interested any more

A watch stands in the line of a feed as those who wait do, but nothing is handed to it: the first that happens there
takes it out of the line for good, tells its owner, and is passed on to who stands behind. So it costs senders what a
waiting receiver costs them, and the queue's own receivers come first. It does not keep a store open.

Y3  A watch that is in line, of a feed of which all that has returned is applied, means that nobody could be given a
    message there since: it comes in after the feed was found empty, under the store's lock, and what was taken in
    meanwhile is looked for once more.
Y4  Whoever takes a watch out of its line, but `leave`, tells its owner after that, also when struck by Ctrl-C: the
    owner may look again at once, and get another watch. It may be told twice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ..messages import Message, note_received
from ..state.leases import Feed, Taker
from .damaged import is_damage

if TYPE_CHECKING:
    from ....policies.names.destination import Destination
    from ..engine.engine import Engine
    from .receiving import Receiving

OnWake = Callable[[bool], object]
"""Called in any thread, within a send too, and with the store's lock held: it must not wait. It is told whether the
store is just being closed: then there is nothing until it is opened again."""


class Watch(Taker):
    """A watch on one feed, woken once. Threads: all."""

    __slots__ = ("_engine", "_feed", "_on_wake")

    watches = True

    def __init__(self, engine: Engine, feed: Feed, on_wake: OnWake) -> None:
        super().__init__()
        self._engine, self._feed, self._on_wake = engine, feed, on_wake

    def is_in_line(self, feed: Feed) -> bool:
        """Return whether the watch is this feed's, and was not woken."""
        return self in feed.takers

    def wake(self) -> None:
        """Wake the watch as Taker.wake does, and take it out of the line."""
        feed = self._feed
        if self not in feed.takers:
            return
        try:
            feed.takers.pop(self, None)
            self._tell()
        except BaseException:
            self._tell()
            raise
        finally:
            feed.wake()

    def _tell(self) -> None:
        engine = self._engine
        self._on_wake(engine.closed and engine.failed is None)

    def leave(self) -> None:
        """Leave the line; nobody is told. Idempotent."""
        self._feed.takers.pop(self, None)


def receive_or_watch(
    receiving: Receiving, destination: Destination, on_wake: OnWake, watch: Watch | None, seconds: float | None
) -> Message | Watch:
    """Return a message or a watch, as Store.receive_or_watch; `seconds`: its `lease`."""
    engine, hand_out = receiving.engine, receiving.hand_out
    if seconds is not None:
        hand_out.check(seconds)
    while True:
        feed = receiving.feed(destination, None, make=True)
        assert feed is not None
        taker = Taker()
        in_line: Watch | None = None
        try:
            engine.check()
            if engine.delivery.next_due and engine.schedule is not None:
                engine.schedule.bring()
            if not engine.lease_ready(feed, taker):
                engine.settle()
                with engine.lock:
                    in_line = _lease_or_watch(engine, feed, taker, on_wake, watch)
            if taker.lease is not None:
                message = receiving.read(taker.lease)
                if message is not None:
                    if hand_out.needed or seconds is not None:
                        hand_out((taker.lease,), seconds)
                    note_received(message)
                    return message
        except BaseException as error:
            if not is_damage(error):
                receiving.cancel(feed, taker)
            raise
        if taker.lease is not None:
            receiving.let_go(taker.lease)  # it was purged after it had been fetched
        elif in_line is not None:
            return in_line


def _lease_or_watch(engine: Engine, feed: Feed, taker: Taker, on_wake: OnWake, watch: Watch | None) -> Watch | None:
    """Return the watch that is in line if the taker was not given a message. None without either: the queue is to be
    looked up anew. With the store's lock held, after `check`."""
    engine.current()
    if engine.sequencer.gates:
        engine.require_here(feed.state.destination)
    if feed.state.removed:
        return None
    delivery = engine.delivery
    if feed.takers:
        engine.hand_over(feed)  # those who wait get theirs first
    if delivery.has_room(feed) and delivery.lease(feed, engine.rows, taker):
        return None
    if engine.catalog.current(feed.state) is not feed.state:
        return None  # it was dropped, and is there anew
    if watch is None or not watch.is_in_line(feed):
        watch = Watch(engine, feed, on_wake)
        feed.takers[watch] = None
    if not delivery.has_room(feed):
        feed.state.at_limit[feed] = None  # its next ack tells
    if engine.behind:  # what was taken in before it stood in line told nobody
        engine.drain()
        if feed.state.removed or (delivery.has_room(feed) and delivery.lease(feed, engine.rows, taker)):
            watch.leave()
            return None
    return watch
