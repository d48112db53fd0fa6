"""A memory store's directory, beside its id and its lock.

swap/           while it is open and has swapped: swap.py

Closed, it holds nothing but its id.
"""

from __future__ import annotations

from contextlib import suppress

from ..system import directory


class StoreDirectory(directory.StoreDirectory):
    """The directory of one memory store. The constructor touches nothing."""

    advice = "Nothing is lost with it, since a memory store keeps nothing: remove the directory, and it is made anew"

    def unlock(self) -> None:
        """Unlock the directory. Idempotent. The lock's file goes too."""
        with suppress(OSError):
            self._lock.release(remove=True)
