"""The amount that a store may still take: room is reserved before a send is queued, so that no two senders get the
same.

A `Room` is one limit: of the store, of a destination, of messages that are not persistent, of a disk. What a call needs
in several of them it gets together, as a `Grant` (reserving.py).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from ....policies.config.when_full import WhenFull
from ....policies.errors import StoreFullError
from ...system.background import shared
from ...system.reservation import Reservation
from ...system.volumes import Volume

if TYPE_CHECKING:
    from .leases import DestinationState, Lease

Amount = tuple[int, int]
"""Messages and their bytes."""

NOTHING: Final[Amount] = (0, 0)

SHRINK_MESSAGES: Final = 100
SHRINK_BYTES: Final = 1 << 20
"""Under `drop_old`: so much more than is sent goes with each send, where there is more than there may be."""

T = TypeVar("T")
What = TypeVar("What")


class NoRoomYetError(StoreFullError):
    """No room is there now, and who asked for it wanted to wait for none, or elsewhere."""


class _Waiting(threading.local):
    allowed = True


_waiting = _Waiting()


def without_waiting(work: Callable[[], T]) -> T:
    """Return the result of `work`, whose sends do not wait where a store is full, but fail at once. For work that
    serves many stores, or tries again by itself."""
    before = _waiting.allowed
    try:
        _waiting.allowed = False
        return work()
    finally:
        _waiting.allowed = before


def may_wait() -> bool:
    """Return whether this thread may be held up where a store is full."""
    return _waiting.allowed


class Grant:
    """The room that a call was given in all quotas that concern it; and how it was made, where messages were dropped.

    Whoever lets go of it gives all of it back, as with a Reservation: also the messages that were to go and are held so
    long. What was written of it is none of that any more.
    """

    __slots__ = ("_free", "dropped", "evicted", "parts", "sizes")

    def __init__(self, free: Callable[[Sequence[Lease]], None] | None = None) -> None:
        """`free` gives back what is held of messages that were to go and have not. Any thread; takes the store's
        lock."""
        self._free = free
        self.parts: list[Reservation[Any]] = []
        self.evicted: list[Lease] = []
        """Messages that go when it is written, to make room. LEAVING, so that nobody else gets them meanwhile."""
        self.sizes: list[int] = []
        """Sizes of their records, in bytes."""
        self.dropped: frozenset[int] = frozenset()
        """Places, among the sends that the grant was asked for, of those that are not stored, but dropped."""

    def release_room(self) -> None:
        """Give back the room alone: nobody knows yet whether what it is for has taken effect."""
        for part in self.parts:
            part.release()

    def release(self) -> None:
        """Give it back now, as Reservation.release. Takes no lock: messages that have not gone are free soon."""
        self.release_room()
        left = [lease for lease in self.evicted if lease.is_held]
        if left and self._free is not None:
            shared().lead(partial(self._free, left))
        self.evicted = []

    def cancel(self) -> None:
        """Give back the room where the caller holds no lock: messages that have not gone are free on return.
        Idempotent."""
        self.release_room()
        if self.evicted and self._free is not None:
            self._free(self.evicted)
            self.evicted = []

    def __del__(self) -> None:
        if hasattr(self, "dropped") and self.evicted and self._free is not None:
            shared().lead(partial(self._free, self.evicted))  # else its constructor was interrupted, or it was used


def release(reservation: Reservation[Any] | Grant | None) -> None:
    """Release what a store reserved; a store without quotas reserves None."""
    if reservation is not None:
        reservation.release()


def cancel(grant: Grant | None) -> None:
    """Cancel a grant whose purpose has taken no effect. Takes the store's lock."""
    if grant is not None:
        grant.cancel()


class Room:
    """One limit. All but `hold`, and what it gives out, under the lock of who has it; giving back takes no lock,
    whoever does it holds which."""

    def __init__(
        self,
        name: str,
        max_messages: int | None,
        max_bytes: int | None,
        held: Callable[[], Amount],
        bytes_option: str = "max_bytes",
        messages_option: str = "max_messages",
        what: str = "messages",
        when_full: WhenFull = WhenFull.FAIL,
        timeout: float = 0.0,
        state: DestinationState | None = None,
        volatile: bool = False,
    ) -> None:
        """`name`: whose limit it is, as errors say it; `held` tells what is there; the options are what users know the
        limits by, and `what` what is counted. `state`: of this destination alone; `volatile`: of messages alone that
        are not persistent."""
        self.name = name
        self.when_full = when_full
        self.timeout = timeout
        self.state = state
        self.volatile = volatile
        self._held, self._what = held, what
        self._max_messages, self._max_bytes = max_messages, max_bytes
        self._messages_option, self._bytes_option = messages_option, bytes_option
        self._messages = self._bytes = 0
        self._reserved: deque[Amount] = deque()
        """Since it was counted last; and what was given back since then."""
        self._given_back: deque[Amount] = deque()

    def hold(self, amount: Amount) -> Reservation[Amount]:
        """Hold room for so much, whether or not it is there."""
        return Reservation(amount, self._given_back, self._reserved)

    def taken(self) -> Amount:
        """Return what is held and what is reserved. Meanwhile nothing that is reserved becomes held: it would be
        counted twice, or not at all. No call comes between counting a change and taking it out, so Ctrl-C does not,
        either."""
        messages, size = self._held()
        reserved = self.reserved()
        return messages + reserved[0], size + reserved[1]

    def reserved(self) -> Amount:
        """Return what is reserved and not held yet."""
        for changes, sign in (self._reserved, 1), (self._given_back, -1):
            while changes:
                count, size = changes[0]
                self._messages, self._bytes = self._messages + sign * count, self._bytes + sign * size
                changes.popleft()
        return self._messages, self._bytes

    def lacking(self, more: Amount) -> Amount:
        """Return by how much the room is too small for so much more: (0, 0) if that fits."""
        taken = self.taken()
        return _beyond(self._max_messages, taken[0], more[0]), _beyond(self._max_bytes, taken[1], more[1])

    def to_go(self, more: Amount, lack: Amount) -> Amount:
        """Return how much has to go for so much to come, where the room is too small by `lack`. One that was made
        smaller than what is there shrinks a little with each."""
        messages, size = self.taken()
        over = _over(self._max_messages, messages), _over(self._max_bytes, size)
        return (
            lack[0] - over[0] + min(over[0], SHRINK_MESSAGES) if lack[0] else 0,
            lack[1] - over[1] + min(over[1], SHRINK_BYTES) if lack[1] else 0,
        )

    @property
    def counts_bytes(self) -> bool:
        """Return whether the size of a message matters to the room."""
        return self._max_bytes is not None

    def is_too_small(self, more: Amount) -> bool:
        """Return whether so much would not fit were there nothing else."""
        return _beyond(self._max_messages, 0, more[0]) + _beyond(self._max_bytes, 0, more[1]) > 0

    def error(self, more: Amount, kind: type[StoreFullError] = StoreFullError, why: str = "") -> StoreFullError:
        """Return the error that so much more does not fit."""
        messages, size = self.taken()
        found = (self._messages_option, self._max_messages, messages, more[0], self._what)
        if not _beyond(self._max_messages, messages, more[0]):
            found = (self._bytes_option, self._max_bytes, size, more[1], f"bytes of {self._what}")
        option, limit, held, count, what = found
        step = "receive and ack some, remove some if they are values of a map, or raise the limit"
        if self.is_too_small(more):
            step = "that is more than it ever holds; send less at once, or raise the limit"
        return kind(
            f"{self.name} holds {held} {what}, {count} more would come; {option} is {limit}{why}: {step}. "
            "Nothing was sent"
        )


def _over(limit: int | None, held: int) -> int:
    return max(0, held - limit) if limit is not None else 0


def _beyond(limit: int | None, held: int, more: int) -> int:
    return max(0, held + more - limit) if limit is not None and more else 0


class DiskRoom(Room):
    """The free space of a disk below which a store takes nothing more."""

    def __init__(self, name: str, path: Path, volume: Volume, least: int, when_full: WhenFull, timeout: float) -> None:
        """`path`: the store's directory on that disk."""
        super().__init__(name, None, None, lambda: NOTHING, when_full=when_full, timeout=timeout)
        self._path, self._volume, self._least = path, volume, least

    def hold(self, amount: Amount) -> Reservation[Any]:
        return self._volume.reserve(amount[1])

    def lacking(self, more: Amount) -> Amount:
        return (0, max(0, self._least + more[1] - self._volume.free(self._least + more[1]))) if more[1] else NOTHING

    def to_go(self, more: Amount, lack: Amount) -> Amount:
        return 0, more[1]  # its files go once all in them is dead: the store holds no more than before

    @property
    def counts_bytes(self) -> bool:
        return True

    def is_too_small(self, more: Amount) -> bool:
        return False

    def error(self, more: Amount, kind: type[StoreFullError] = StoreFullError, why: str = "") -> StoreFullError:
        return kind(
            f"{self.name}: {self._volume.free(0)} bytes are free on the disk of {self._path}, less what is about to be "
            f"written, {more[1]} more would come; min_free_disk is {self._least}{why}: free some space, or lower the "
            "limit. Nothing was sent"
        )
