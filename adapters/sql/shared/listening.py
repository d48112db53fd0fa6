"""Listeners of a shared store: callbacks that run on threads of ours, one message at a time, in order."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from ....policies.errors import AnabranchError
from ....policies.names.destination import Destination
from ...core.messages import Message, note_received
from ...core.service.listening import require_credit
from ...core.store_types import SubscriptionKey
from ...system.background import Job, shared

log = logging.getLogger(__name__)

PAGE: Final = 32
"""The most messages that are taken at once for a listener."""


class SharedListener:
    """One listener. Threads: all; `close` may be called from the callback."""

    def __init__(
        self, store: Any, destination: Destination, subscription: SubscriptionKey | None, number: int,
        on_message: Callable[[Message], object], credit: int, on_end: Callable[[Exception], object] | None,
        seconds: float | None, run_by: Callable[[Job], object] | None,
    ) -> None:  # fmt: skip
        require_credit(credit)
        self._store, self._destination, self._subscription, self._number = store, destination, subscription, number
        self._on_message, self._on_end, self._seconds = on_message, on_end, seconds
        self._run_by = run_by or shared().lead
        self._lock = threading.RLock()
        self._looking = threading.RLock()
        """Held while it takes messages: who has closed it finds nothing leased by it."""
        self._credit = credit
        self._messages: deque[Message] = deque()
        self._runs = self._again = self._calling = self.is_over = False

    def wake(self) -> None:
        """Have it looked for: there may be something."""
        with self._lock:
            self._again = True
            if self._runs or self.is_over:
                return
            self._runs = True
        self._run_by(self._run)

    def add_credit(self, more: int) -> None:
        """Ask for more messages."""
        require_credit(more)
        with self._lock:
            self._credit += more
        self.wake()

    def withdraw_credit(self, most: int) -> int:
        """Take back credit, as the contract says: once it is known what of it a look at the database has used."""
        require_credit(most)
        with self._looking:
            with self._lock:
                taken = 0 if self.is_over else min(most, self._credit)
                self._credit -= taken
                leaves = taken and not self._credit
            if leaves:
                self._store.left(self, self._number, more=True)
        return taken

    def close(self) -> bool:
        """End it; returns whether a callback runs."""
        with self._lock:
            self.is_over = True
            calling = self._calling
        with self._looking, self._lock:
            left = list(self._messages)
            self._messages.clear()
        self._store.left(self, self._number)
        if left:
            with suppress(AnabranchError):  # else they are free when this router is gone, or their leases are over
                self._store.leases.free([one._note for one in left], 0)
        return calling

    def _run(self) -> None:
        while True:
            with self._lock:
                if self.is_over or not (self._again or self._messages):
                    self._runs = False
                    return
                message = self._messages.popleft() if self._messages else None
                if message is None:
                    self._again, looks = False, self._credit > 0
                else:
                    self._calling = True
                    note_received(message)
            if message is not None:
                self._call(message)
            elif looks:
                try:
                    self._look()
                except AnabranchError as error:
                    self._end(error)
            del message

    def _look(self) -> None:
        store = self._store
        with self._looking:
            with self._lock:
                credit = min(self._credit, PAGE)
            if self.is_over or not credit:
                return
            asked = self._destination, credit, self._seconds, self._subscription
            messages: list[Message[Any]] = store.take(*asked)
            if not messages:
                store.waiting.leave(self._number, self)  # a subscription may have ended, and begun anew
                self._number = store.receiving(self._destination, self._subscription)
                store.waiting.enter(self._number, self)
                messages = store.take(*asked)
            with self._lock:
                self._credit -= len(messages)
                self._messages += messages
                self._again |= bool(messages)  # there may be more
        if messages:
            store.left(self, self._number, more=True)

    def _call(self, message: Message) -> None:
        try:
            self._on_message(message)
        except BaseException as error:
            log.exception("who listens to %s raised an error; its message is free again", self._destination)
            try:
                message.release(reason=error)
            except AnabranchError as wrong:
                log.debug("it could not be given back: %s", wrong)
        finally:
            self._calling = False

    def end(self) -> None:
        """End it: the store is being closed."""
        self._run_by(lambda: self._end(self._store.closed_error()))

    def _end(self, error: Exception) -> None:
        with self._lock:
            was_over, self.is_over, self._runs = self.is_over, True, False
        self._store.left(self, self._number)
        if not was_over and self._on_end is not None:
            try:
                self._on_end(error)
            except BaseException:
                log.exception("who listens to %s raised an error when told of the end", self._destination)
