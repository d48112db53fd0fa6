"""The last messages of a queue, looked up ahead (rules O4 and O5 of newest.py)."""

from __future__ import annotations

from typing import Final

from ..record.place import Place

STACK_MIN: Final = 4
STACK_MAX: Final = 128
"""Messages that are looked up ahead: twice as many as were given of those before."""


class Stack:
    """The last messages of a queue in a store without priorities. Belongs to the store's lock."""

    __slots__ = ("given", "number", "places")

    def __init__(self, number: int, places: list[Place]) -> None:
        self.number: int = number
        """The number of the last plan whose messages are in it."""
        self.places: list[Place] = places
        """By seq: the last one is the next."""
        self.given: int = 0
        """Messages that were given of it."""

    @property
    def next_size(self) -> int:
        """Return how many messages it pays to look up once this one is used up."""
        return min(max(2 * self.given, STACK_MIN), STACK_MAX)
