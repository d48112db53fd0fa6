"""`max_messages` and `max_stored_bytes`, and the room that a transaction reserves before it is prepared (rule T1)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ...policies.errors import StoreFullError
from ...policies.options import MemoryOptions
from ..journal.limits import Reservation
from .contents import Contents
from .records import Encoded


class Room:
    """What a store may still take. Under the store's lock; a reservation is given back by letting go of it."""

    def __init__(self, name: str, options: MemoryOptions, contents: Contents) -> None:
        self._name, self._options, self._contents = name, options, contents
        self._messages = self._bytes = 0
        self._given_back: deque[tuple[int, int]] = deque()

    @property
    def limited(self) -> bool:
        return self._options.max_messages is not None or self._options.max_stored_bytes is not None

    def require(self, messages: int, size: int) -> None:
        """Raise StoreFullError unless so many more fit."""
        if not self.limited:
            return
        while self._given_back:
            done = self._given_back.popleft()
            self._messages -= done[0]
            self._bytes -= done[1]
        contents, options = self._contents, self._options
        self._check("max_messages", options.max_messages, contents.messages + self._messages, messages, "messages")
        used = contents.live_bytes + self._bytes
        self._check("max_stored_bytes", options.max_stored_bytes, used, size, "bytes of messages")

    def reserve(self, sends: Sequence[Encoded]) -> Reservation | None:
        """Room for all of them, until it is let go of; those that are stored already need none. Raises StoreFullError,
        and then nothing is reserved."""
        if not self.limited:
            return None
        messages, size = self._size(sends)
        self.require(messages, size)
        reservation = Reservation((messages, size), self._given_back)
        self._messages += messages
        self._bytes += size
        return reservation

    def _size(self, sends: Sequence[Encoded]) -> tuple[int, int]:
        contents = self._contents
        messages = size = 0
        for message in sends:
            state = contents.states.get(message.destination)
            known = (
                contents.window.get((state.number, message.name))
                if state is not None and message.name is not None
                else None
            )
            if known is None:
                messages += 1
                size += message.size
        return messages, size

    def _check(self, option: str, limit: int | None, held: int, more: int, what: str) -> None:
        if limit is not None and more and held + more > limit:
            raise StoreFullError(
                f"store {self._name!r} holds {held} {what}, {more} more would come; {option} is {limit}: "
                "receive and ack some, or raise the limit. Nothing was sent"
            )
