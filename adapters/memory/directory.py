"""A memory store's directory. Beside its id and its lock:

swap/           while it is open and has swapped: swap.py

Closed, it holds nothing but its id.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from .. import directory


class StoreDirectory(directory.StoreDirectory):
    """One store's. The constructor touches nothing."""

    advice = "Nothing is lost with it, since a memory store keeps nothing: remove the directory, and it is made anew"

    def unlock(self) -> None:
        """Idempotent. The lock's file goes too."""
        with suppress(OSError):
            self._lock.release(remove=True)


class TransientDirectory:
    """One that is there only while something is swapped; of a store that nobody opens again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._store_id = os.urandom(16)

    def lock(self) -> bytes:
        """Returns the id. Its owner sees to it that there is one only."""
        return self._store_id

    def require_lock(self) -> None:
        """Its owner has one."""

    def look_after_lock(self) -> None:
        """Likewise."""

    def unlock(self) -> None:
        """Idempotent. It goes if it is empty."""
        with suppress(OSError):
            self.path.rmdir()
