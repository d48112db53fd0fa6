"""Attempt is the way to try again after a store was closed meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Generic, TypeVar

from ...policies.errors import ClosedError

S = TypeVar("S")


class Attempt(Generic[S]):
    """One attempt at a call of a store, which may be closed between it was found and it was called: for being idle,
    say, or since the destination moves.

        while True:
            with Attempt(find, again) as store:
                return call(store)

    The loop comes round after a ClosedError for which `again` returns True, and the next `find` opens the store. Any
    other error leaves the block.
    """

    __slots__ = ("_again", "_find", "_found")

    def __init__(self, find: Callable[[], S], again: Callable[[S, ClosedError], bool]) -> None:
        self._find, self._again = find, again

    def __enter__(self) -> S:
        self._found = self._find()
        return self._found

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        return isinstance(error, ClosedError) and self._again(self._found, error)
