"""How much a store may still take: room is reserved before a send is queued, so that no two senders get the same."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from ...policies.errors import StoreFullError

Amount = tuple[int, int]
"""Messages and their bytes."""

What = TypeVar("What")


class Reservation(Generic[What]):
    """Room that is given back once: by `release`, or when its last user lets go of it, since a KeyboardInterrupt may
    come before any call. By then the messages are counted as held, or failed."""

    __slots__ = ("_given_back", "_left", "what")

    def __init__(self, what: What, given_back: deque[What], taken: deque[What] | None = None) -> None:
        """What is to be given back is told by `taken`, in the same step for Ctrl-C: it strikes after calls."""
        self.what = what
        self._given_back = given_back
        self._left = iter((what,))
        if taken is not None:
            taken.append(what)

    def release(self) -> None:
        """Give it back now, though others may hold this still: the traceback of an error, say. Again it does
        nothing."""
        self._given_back.extend(self._left)  # one step: Ctrl-C comes before or after it

    def __del__(self) -> None:
        if hasattr(self, "_left"):  # not so if its constructor was interrupted
            self._given_back.extend(self._left)


def release(reservation: Reservation[Any] | None) -> None:
    """Of what a store reserved, which has no limits perhaps."""
    if reservation is not None:
        reservation.release()


class Room:
    """Of one store. Any thread may reserve; giving back takes no lock, whoever does it holds which."""

    def __init__(
        self,
        name: str,
        max_messages: int | None,
        max_bytes: int | None,
        held: Callable[[], Amount],
        bytes_option: str = "max_bytes",
        asked: Callable[[Callable[[], Amount]], Amount] = lambda question: question(),
    ) -> None:
        """`held` tells what the store holds; `bytes_option` is what users know `max_bytes` by. `asked` answers a
        question while nothing that is reserved becomes held: or else that would be counted twice, or not at all."""
        self._name, self._held, self._asked = name, held, asked
        self._max_messages, self._max_bytes, self._bytes_option = max_messages, max_bytes, bytes_option
        self.limited = max_messages is not None or max_bytes is not None
        self._lock = threading.RLock()  # guards what is reserved; a signal handler may come back to it
        self._messages = self._bytes = 0
        self._reserved: deque[Amount] = deque()
        """Since it was counted last; and what was given back since then."""
        self._given_back: deque[Amount] = deque()

    def hold(self, amount: Amount) -> Reservation[Amount]:
        """Room for so much, whether or not it is there: of a prepared branch found at open."""
        return Reservation(amount, self._given_back, self._reserved)

    def reserve(self, amount: Amount) -> Reservation[Amount]:
        """Room for so much. Raises StoreFullError, and then nothing is reserved."""
        with self._lock:
            self.require(amount)
            return self.hold(amount)

    def reserve_each(self, amounts: Sequence[Amount]) -> list[Reservation[Amount] | None]:
        """The same for several, of which each is given back by itself: room for all of them, or none."""
        with self._lock:
            self.require((sum(amount[0] for amount in amounts), sum(amount[1] for amount in amounts)))
            return [self.hold(amount) for amount in amounts]

    def require(self, amount: Amount) -> None:
        """Raise StoreFullError unless so much more fits."""
        with self._lock:
            messages, size = self._asked(self._taken)
            self._check("max_messages", self._max_messages, messages, amount[0], "messages")
            self._check(self._bytes_option, self._max_bytes, size, amount[1], "bytes of messages")

    def _taken(self) -> Amount:
        """What is held and what is reserved. No call comes between counting a change and taking it out, so that Ctrl-C
        does not, either."""
        for changes, sign in (self._reserved, 1), (self._given_back, -1):
            while changes:
                count, size = changes[0]
                self._messages, self._bytes = self._messages + sign * count, self._bytes + sign * size
                changes.popleft()
        messages, size = self._held()
        return messages + self._messages, size + self._bytes

    def _check(self, option: str, limit: int | None, held: int, more: int, what: str) -> None:
        if limit is not None and more and held + more > limit:
            raise StoreFullError(
                f"store {self._name!r} holds {held} {what}, {more} more would come; {option} is {limit}: "
                "receive and ack some, or raise the limit. Nothing was sent"
            )
