"""Listeners that look for their messages themselves when they are woken: callbacks that run on threads of ours, one
message at a time, in order.

A kind of listener says where it looks, and how it leaves; credit, callbacks and the end are the same for all.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

from ...system.background import Job, shared
from ..messages import Message, note_received
from .listening import call, require_credit, tell_end

PAGE: Final = 32
"""The most messages that are taken at once."""


class LookingListener(ABC):
    """One listener. Threads: all; `close` may be called from the callback."""

    def __init__(
        self, source: object, on_message: Callable[[Message], object], credit: int,
        on_end: Callable[[Exception], object] | None, run_by: Callable[[Job], object] | None = None,
    ) -> None:  # fmt: skip
        """`source`: what it listens to, as shown in the log. `run_by` has the work done, by a thread of ours if it is
        None."""
        require_credit(credit)
        self._source, self._on_message, self._on_end = source, on_message, on_end
        self._run_by = run_by or shared().lead
        self._lock = threading.RLock()
        self._looking = threading.RLock()
        """Held while it takes messages: who has closed it finds nothing leased by it."""
        self._credit = credit
        self._messages: deque[Message] = deque()
        self._runs = self._again = self._calling = False
        self.is_over: bool = False

    @abstractmethod
    def _take(self, most: int) -> Sequence[Message]:
        """Lease up to so many messages. If there are none, it is to be woken once there may be. An error ends it."""

    @abstractmethod
    def _rest(self) -> None:
        """Want nothing for now: who waits behind it is next."""

    @abstractmethod
    def _leave(self) -> None:
        """Be there no longer. Idempotent."""

    @abstractmethod
    def _free(self, messages: Sequence[Message]) -> None:
        """Give messages back as if nobody had held them. Raises nothing of ours."""

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
        """Take back credit, as the contract says: once it is known what of it a look has used."""
        require_credit(most)
        with self._looking:
            with self._lock:
                taken = 0 if self.is_over else min(most, self._credit)
                self._credit -= taken
                leaves = taken and not self._credit
            if leaves:
                self._rest()
        return taken

    def close(self) -> bool:
        """End it; returns whether a callback runs."""
        with self._lock:
            self.is_over = True
            calling = self._calling
        with self._looking, self._lock:
            left = list(self._messages)
            self._messages.clear()
        self._leave()
        if left:
            self._free(left)
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
                except Exception as error:
                    self._end(error)
            del message

    def _look(self) -> None:
        with self._looking:
            with self._lock:
                credit = min(self._credit, PAGE)
            if self.is_over or not credit:
                return
            messages: Sequence[Message[Any]] = self._take(credit)
            with self._lock:
                self._credit -= len(messages)
                self._messages += messages
                self._again |= bool(messages)  # there may be more

    def _call(self, message: Message) -> None:
        try:
            call(self._on_message, message, self._source)
        finally:
            self._calling = False

    def _end(self, error: Exception) -> None:
        with self._lock:
            was_over, self.is_over, self._runs = self.is_over, True, False
        self._leave()
        if not was_over:
            tell_end(self._on_end, error, self._source)
