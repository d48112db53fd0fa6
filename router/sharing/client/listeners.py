"""Listeners of a client: callbacks that run on threads of the library, within the credit that the owner has."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final

from msgspec import structs

from ....adapters.core.messages import Message, note_received
from ....adapters.core.service.listening import call, require_credit, tell_end
from ....adapters.core.store_types import SubscriptionKey
from ....adapters.system.background import shared
from ....policies.errors import AnabranchError, ClosedError, StoreFailedError
from ..protocol import Call, Credit, Listen, Request, Unlisten
from .exchange import RETRY_SECONDS


class Listeners:
    """The listeners of one client, by number. Threads: all."""

    def __init__(
        self, ask: Callable[..., Any], later: Callable[[Callable[[], None]], None],
        schedule: Callable[[float, Callable[[], None]], None], give_back: Callable[[list[str]], None],
    ) -> None:  # fmt: skip
        """`later` makes a call that asks, `schedule` calls such a method in so many seconds. `give_back` gives back
        leases, by their tokens, as if nobody had held them."""
        self._later = later
        self.schedule = schedule
        self.ask = ask
        self.give_back = give_back
        self._listeners: dict[int, RemoteListener] = {}
        self._numbers = itertools.count(1)

    def begin(
        self, destination: str, on_message: Callable[[Message], object], credit: int, key: SubscriptionKey | None,
        on_end: Callable[[Exception], object] | None, lease: float | None, patterns: list[str] | None = None,
    ) -> RemoteListener:  # fmt: skip
        """Begin to listen, with `patterns` to all queues that they name; `destination` is what the log says then.
        Raises TypeError, ValueError for a credit that is none."""
        require_credit(credit)
        number = next(self._numbers)
        begin = Listen(number, destination, key, credit, lease, credit, patterns)
        listener = self._listeners[number] = RemoteListener(self, begin, on_message, on_end)
        try:
            self.ask(begin, None, lambda _: self._later(partial(self._unlisten, number)))
        except BaseException:
            self._listeners.pop(number, None)
            raise
        return listener

    def again(self) -> list[Request]:
        """Return the requests by which all begin at the next owner."""
        return [one.again() for one in list(self._listeners.values()) if not one.is_over]

    def lease_of(self, number: int) -> float | None:
        """Return the seconds for which a listener's messages are leased."""
        listener = self._listeners.get(number)
        return None if listener is None else listener.lease

    def has(self, number: int) -> bool:
        """Return whether there is such a listener still."""
        return number in self._listeners

    def take(self, number: int, messages: list[Message]) -> bool:
        """Give a listener messages; returns False if it is closed meanwhile."""
        listener = self._listeners.get(number)
        if listener is not None:
            listener.take(messages)
        return listener is not None

    def fail(self, number: int, error: Exception) -> None:
        """Note that the owner has ended a listener, or the next one does not begin it again."""
        listener = self._listeners.pop(number, None)
        if listener is not None:
            listener.end(error)

    def end(self, number: int) -> None:
        """End a listener. What it is given comes before the answer. Raises StoreFailedError."""
        if number in self._listeners:
            with suppress(ClosedError):
                self.ask(Unlisten(number))
            self._listeners.pop(number, None)

    def _unlisten(self, number: int) -> None:
        """End a listener that has begun all the same, though its caller was interrupted or has given up."""
        with suppress(AnabranchError):
            self.ask(Unlisten(number))

    def close(self, error: Exception) -> None:
        """End all."""
        while self._listeners:
            self._listeners.popitem()[1].end(error)

    def forget(self) -> None:
        """Have none: in a forked child."""
        self._listeners.clear()


class RemoteListener:
    """A listener of a client: its callback runs on a thread of the library, one message at a time, in order."""

    def __init__(
        self,
        listeners: Listeners,
        begin: Listen,
        on_message: Callable[[Message], object],
        on_end: Callable[[Exception], object] | None,
    ) -> None:
        self._listeners, self._begin = listeners, begin
        self._on_message, self._on_end = on_message, on_end
        self.lease: Final = begin.lease
        """Seconds for which its messages are leased."""
        self._wanted = self._granted = begin.credit
        """How many messages the owner may still give it, and how many it could give it since the beginning."""
        self._lock = threading.RLock()
        self._messages: deque[Message] = deque()
        self._runs = self._calling = False
        self.is_over: bool = False
        self._error: Exception | None = None

    def add_credit(self, more: int) -> None:
        """Ask for more messages."""
        require_credit(more)
        with self._lock:
            self._wanted += more
            self._granted += more
        self._tell_credit()

    def _tell_credit(self) -> None:
        """Tell the owner of all credit so far, once it answers: told again it changes nothing."""
        try:
            self._listeners.ask(Credit(self._begin.listener, self._granted))
        except ClosedError:
            pass
        except StoreFailedError:
            self._listeners.schedule(RETRY_SECONDS, self._tell_credit)

    def withdraw_credit(self, most: int) -> int:
        """Take back what the owner has not used, as Listener.withdraw_credit."""
        require_credit(most)
        request, taken = Call("withdraw_credit", (self._begin.listener, most)), None
        with suppress(ClosedError):
            # An owner that has just come may be asked before it is told of the listener, and knows none.
            while taken is None and not self.is_over and self._listeners.has(self._begin.listener):
                taken = self._listeners.ask(request, self._withdrawn, self._withdrawn)
        return taken or 0

    def _withdrawn(self, taken: int | None) -> int | None:
        """Note what the owner has taken off the credit. By the thread that reads: the next owner is not told of it."""
        with self._lock:
            self._wanted -= taken or 0
        return taken

    def again(self) -> Listen:
        """Return the request by which it begins at the next owner."""
        with self._lock:
            return structs.replace(self._begin, credit=self._wanted, granted=self._granted)

    def close(self) -> bool:
        """End it; returns whether a callback runs."""
        with self._lock:
            self.is_over = True
            calling = self._calling
        self._leave()
        return calling

    def _leave(self) -> None:
        """Let the owner end it, and give back what it was given meanwhile: once the owner answers."""
        try:
            self._listeners.end(self._begin.listener)
        except BaseException as error:
            self._listeners.schedule(RETRY_SECONDS, self._leave)
            if isinstance(error, StoreFailedError):
                return
            raise
        with self._lock:
            left = [message._note.token for message in self._messages]
            self._messages.clear()
        if left:
            self._listeners.give_back(left)

    def take(self, messages: list[Message]) -> None:
        """Take messages that have come. By the thread that reads."""
        with self._lock:
            self._wanted -= len(messages)
            self._messages += messages
            if not self.is_over:
                self._run()

    def end(self, error: Exception) -> None:
        """End it: the owner has."""
        with self._lock:
            self._error = error
            self._run()

    def _run(self) -> None:
        if not self._runs:
            self._runs = True
            shared().lead(self._call_all)

    def _call_all(self) -> None:
        while True:
            with self._lock:
                if not self._messages or self.is_over:
                    self._runs = False
                    break
                message = self._messages.popleft()
                self._calling = True
            note_received(message)
            try:
                call(self._on_message, message, self._begin.destination)
            finally:
                self._calling = False
            del message
        error_of_end = self._error
        if error_of_end is not None and not self.is_over:
            self.is_over = True
            tell_end(self._on_end, error_of_end, self._begin.destination)
