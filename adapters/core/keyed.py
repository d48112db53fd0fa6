"""What a change of a map's keys has to know while it is planned: whether a key is still as its caller saw it.

E3  A value is a message of its map, with the key as its message id. What is put later takes the place of what is there
    when it is applied (Table.put), so a put asks nothing. What depends on the value before is decided by its caller,
    who reads, and says behind which plan that was (`Unchanged`): if the key has been written by a later one, or may
    have been, the ticket is refused whole, and its caller looks again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

from ...policies.errors import AnabranchError
from .changes import Change
from .duplicates import Key
from .states import DestinationState

if TYPE_CHECKING:
    from .plan import Plan

VERSIONS_MAX: Final = 10_000
"""Keys of which is remembered which plan wrote them last."""


class KeyChangedError(AnabranchError):
    """The key was written since its caller has read it, or perhaps was; nothing was done. Never shown to users."""


class Unchanged(Change):
    """What follows in the ticket writes these keys of a map, and is for who has read them as they were after plan
    `number`. No backend is told of it."""

    __slots__ = ("names", "number", "state")

    size: int = 0

    def __init__(self, state: DestinationState, names: Sequence[bytes], number: int) -> None:
        self.state, self.names, self.number = state, names, number

    def plan(self, plan: Plan) -> None:
        """Raises KeyChangedError."""
        state = self.state
        if state.removed or plan.removed or any(plan.version((state.number, n)) > self.number for n in self.names):
            raise KeyChangedError(f"{state.destination} has changed")
        for name in self.names:
            plan.touch((state.number, name))


class KeyVersions:
    """Which plan wrote a key last. Used by the thread that plans."""

    def __init__(self) -> None:
        self._numbers: dict[Key, int] = {}
        self._floor = 0
        """Of a key that is not in `_numbers`: it may have been written by this plan, and by none after it."""

    def get(self, key: Key) -> int:
        """No later plan has written it."""
        return self._numbers.get(key, self._floor)

    def add(self, keys: Iterable[Key], number: int) -> None:
        """This plan writes these. Idempotent."""
        numbers = self._numbers
        for key in keys:
            numbers.pop(key, None)
            numbers[key] = number
        while len(numbers) > VERSIONS_MAX:
            oldest = next(iter(numbers))
            self._floor = max(self._floor, numbers[oldest])
            del numbers[oldest]

    def add_all(self, number: int) -> None:
        """This plan may write any."""
        self._floor = number
        self._numbers.clear()
