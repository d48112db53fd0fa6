"""Messages that are handed to a callback: what blocking receive is to a thread, this is to an event loop.

A listener stands in the same line as those who wait in `receive`. Its callback runs on a thread of ours, one message at
a time, in order; never inside a sender's `send`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from ...policies.errors import AnabranchError
from ..background import shared
from ..base import Message
from .delivery import Feed, Lease, Taker

if TYPE_CHECKING:
    from .receiving import Receiving

log = logging.getLogger(__name__)


class Listener(Taker):
    """Threads: all. `cancel` may be called from the callback."""

    __slots__ = ("_credit", "_due", "_ended", "_feed", "_lock", "_on_message", "_receiving")

    def __init__(self, receiving: Receiving, feed: Feed, on_message: Callable[[Message], object], credit: int) -> None:
        super().__init__()
        self._receiving, self._feed, self._on_message = receiving, feed, on_message
        self._credit = credit
        """How many messages it still wants. Belongs to the store's lock."""
        self._lock = threading.Lock()  # held while the callback's thread is at work
        self._due = False
        self._ended = False

    def wake(self) -> None:
        """There may be something: look on a thread of ours."""
        if not self._due:
            self._due = True
            shared().lead(self._run)

    def add_credit(self, more: int) -> None:
        """It wants so many more messages than it has asked for so far."""
        with self._receiving.engine.lock:
            self._credit += more
        self.wake()

    def cancel(self) -> bool:
        """No message is handed over any more once this has returned, but one whose callback runs. Returns whether one
        was on its way, which is free again. Idempotent."""
        self._ended = True
        self._feed.takers.pop(self, None)
        lease, self.lease = self.lease, None
        if lease is not None:
            self._receiving.give_back(lease)
        if self._feed.takers:
            self._feed.wake()
        return lease is not None

    def _run(self) -> None:
        if not self._lock.acquire(blocking=False):
            return  # who is at work looks once more
        try:
            while self._due and not self._ended:
                self._due = False
                try:
                    while (lease := self._next()) is not None:
                        self._hand(lease)
                except AnabranchError as error:  # the store has stopped or its subscription is gone
                    log.debug("a listener of %s ends: %s", self._feed.state.destination, error)
                    self._ended = True
        finally:
            self._lock.release()
        if self._due and not self._ended:
            shared().lead(self._run)

    def _next(self) -> Lease | None:
        """What it is given now; None if there is nothing, or it wants no more."""
        engine, feed = self._receiving.engine, self._feed
        engine.check()
        with engine.lock:
            engine.current()
            if feed.subscription is None:  # its queue may have been dropped, and be there anew
                feed = self._feed = engine.catalog.current(feed.state).feed
            if self.lease is None and self._credit > 0 and not self._ended:
                feed.takers.setdefault(self)
                engine.delivery.hand_over(feed, engine.rows)
            lease, self.lease = self.lease, None
            self._credit -= lease is not None
            return lease

    def _hand(self, lease: Lease) -> None:
        message = None
        try:
            message = self._receiving.read(lease)
            if message is None:
                self._receiving.let_go(lease)
        except AnabranchError as error:
            log.error("store %s: a message cannot be read for who listens: %s", self._receiving.engine.name, error)
            self._receiving.give_back_unless_damaged(lease, error)
        if message is None:
            with self._receiving.engine.lock:
                self._credit += 1
            return
        if self._ended:
            self._receiving.give_back(lease)
            return
        try:
            self._on_message(message)
        except Exception:
            log.exception("who listens to %s raised an error; its message is free again", self._feed.state.destination)
            self._receiving.give_back(lease)
