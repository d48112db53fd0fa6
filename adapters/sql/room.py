"""`max_messages` and `max_bytes`: what a store may still take, what is reserved for prepared branches included."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from ...policies.errors import StoreFullError
from ...policies.options import SqlOptions

Amount = tuple[int, int]
"""Messages and their bytes."""


class Reservation:
    """Room that is given back when its last user lets go of it. Not by a call, since a KeyboardInterrupt may come
    before any call."""

    __slots__ = ("_amount", "_given_back")

    def __init__(self, amount: Amount, given_back: deque[Amount]) -> None:
        self._amount = amount
        self._given_back = given_back

    def __del__(self) -> None:
        self._given_back.append(self._amount)


class Room:
    """Any thread may reserve; only the one that writes batches takes. Giving back takes no lock."""

    def __init__(self, name: str, options: SqlOptions, held: Callable[[], Amount]) -> None:
        """`held` tells the messages and bytes that the store holds."""
        self._name, self._options, self._held = name, options, held
        self._lock = threading.RLock()  # guards what is reserved and under way; a signal handler may come back to it
        self._messages = self._bytes = 0
        self._under_way: Amount = (0, 0)
        self._given_back: deque[Amount] = deque()

    def hold(self, amount: Amount) -> Reservation:
        """Room for the sends of a prepared branch found at open, whether or not it is there."""
        with self._lock:
            self._messages += amount[0]
            self._bytes += amount[1]
        return Reservation(amount, self._given_back)

    def reserve(self, amount: Amount) -> Reservation:
        """Raises StoreFullError, and then nothing is reserved."""
        with self._lock:
            self._check(amount)
            return self.hold(amount)

    def take(self, amount: Amount, reserved: bool = False) -> None:
        """A batch is about to store so much. Raises StoreFullError, unless there is a reservation for it."""
        with self._lock:
            if not reserved:
                self._check(amount)
            self._under_way = (self._under_way[0] + amount[0], self._under_way[1] + amount[1])

    def settled(self) -> None:
        """The batch is over: what it has stored is held."""
        self._under_way = (0, 0)

    def _check(self, amount: Amount) -> None:
        while self._given_back:  # before `held` is asked, which counts what these have become
            done = self._given_back.popleft()
            self._messages -= done[0]
            self._bytes -= done[1]
        messages, size = self._held()
        options = self._options
        self._compare("max_messages", options.max_messages, messages + self._messages, self._under_way[0], amount[0])
        self._compare("max_bytes", options.max_bytes, size + self._bytes, self._under_way[1], amount[1])

    def _compare(self, option: str, limit: int | None, held: int, under_way: int, more: int) -> None:
        if limit is not None and more and held + under_way + more > limit:
            what = "messages" if option == "max_messages" else "bytes of messages"
            raise StoreFullError(
                f"store {self._name!r} holds {held + under_way} {what}, {more} more would come; {option} is {limit}: "
                "receive and ack some, or raise the limit. Nothing was sent"
            )
