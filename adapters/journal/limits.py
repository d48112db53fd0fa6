"""`max_messages` and `max_bytes`: room is reserved before a send is queued, so that no two senders get the same."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable

from ...policies.config import JournalOptions
from ...policies.errors import StoreFullError
from ..duplicates import DuplicateWindow
from . import format as f
from .batch import Operation


class Reservation:
    """Room that is given back when its last user lets go of it: by then the messages are counted as held, or failed.

    Not by a call, since a KeyboardInterrupt may come before any call.
    """

    __slots__ = ("_amount", "_given_back")

    def __init__(self, amount: tuple[int, int], given_back: deque[tuple[int, int]]) -> None:
        self._amount = amount
        self._given_back = given_back

    def __del__(self) -> None:
        self._given_back.append(self._amount)


class Room:
    """What a store may still take. Any thread may reserve; giving back takes no lock, whoever does it holds which."""

    def __init__(
        self, name: str, options: JournalOptions, window: DuplicateWindow, held: Callable[[], tuple[int, int]]
    ) -> None:
        """`held` tells the messages and bytes that the store holds."""
        self._name, self._options, self._window, self._held = name, options, window, held
        self._lock = threading.Lock()  # guards what is reserved
        self._messages = self._bytes = 0
        self._given_back: deque[tuple[int, int]] = deque()

    def hold(self, operations: Iterable[Operation]) -> Reservation:
        """Room for the sends of a prepared branch found at open, whether or not it is there."""
        messages, size = self._size(operation for operation in operations if operation[0] == f.SEND)
        with self._lock:
            self._messages += messages
            self._bytes += size
        return Reservation((messages, size), self._given_back)

    def _size(self, operations: Iterable[Operation]) -> tuple[int, int]:
        """Messages and their bytes, without those that are stored already."""
        sizes = [
            len(operation[2]) + f.SEND_OVERHEAD - f.MESSAGE.size
            for operation in operations
            if operation[3] is None or self._window.get(operation[3]) is None
        ]
        return len(sizes), sum(sizes)

    def reserve(self, operations: Iterable[Operation]) -> Reservation:
        """Room for all these sends. Raises StoreFullError, and then nothing is reserved."""
        messages, size = self._size(operations)
        with self._lock:
            while self._given_back:  # before `held` is asked, which counts what these have become
                done = self._given_back.popleft()
                self._messages -= done[0]
                self._bytes -= done[1]
            held, used = self._held()
            self._check("max_messages", self._options.max_messages, held + self._messages, messages, "messages")
            self._check("max_bytes", self._options.max_bytes, used + self._bytes, size, "bytes of messages")
            self._messages += messages
            self._bytes += size
        return Reservation((messages, size), self._given_back)

    def _check(self, option: str, limit: int | None, held: int, more: int, what: str) -> None:
        if limit is not None and more and held + more > limit:
            raise StoreFullError(
                f"store {self._name!r} holds {held} {what}, {more} more would come; {option} is {limit}: "
                "receive and ack some, or raise the limit. Nothing was sent"
            )
