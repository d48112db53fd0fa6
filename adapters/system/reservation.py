"""Room that was set aside, and is given back once: of a disk, of a store, of memory."""

from __future__ import annotations

from collections import deque
from typing import Final, Generic, TypeVar

What = TypeVar("What")


class Reservation(Generic[What]):
    """Room that is given back once: by `release`, or when its last user lets go of it, since a KeyboardInterrupt may
    come before any call. By then the messages are counted as held, or failed."""

    __slots__ = ("_given_back", "_left", "what")

    def __init__(self, what: What, given_back: deque[What], taken: deque[What] | None = None) -> None:
        """Tell `taken` of what is to be given back, in the same step for Ctrl-C: it strikes after calls."""
        self.what: Final = what
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
