"""`max_messages` and `max_bytes`: what a store may still take, with what the batch takes that is being written."""

from __future__ import annotations

from collections.abc import Callable

from ...policies.options import SqlOptions
from .. import room
from ..room import Amount, Reservation


class Room:
    """Any thread may reserve; only the one that writes batches takes."""

    def __init__(self, name: str, options: SqlOptions, held: Callable[[], Amount]) -> None:
        """`held` tells what the store holds."""
        self._room = room.Room(name, options.max_messages, options.max_bytes, held)
        self._under_way: list[Reservation] = []
        self.hold, self.reserve = self._room.hold, self._room.reserve

    def take(self, amount: Amount, reserved: bool = False) -> None:
        """A batch is about to store so much. Raises StoreFullError, unless there is a reservation for it."""
        if self._room.limited:
            self._under_way.append(self.hold(amount) if reserved else self.reserve(amount))

    def settled(self) -> None:
        """The batch is over: what it has stored is held."""
        self._under_way.clear()
