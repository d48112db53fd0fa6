"""A memory store's directory: how it is made, locked and recognised (rules D2, D3, I4).

store.id        16 random bytes in hex; all that is there while the store is closed
store.lock      while it is open: the owner's pid and host
swap/           while it is open and has swapped: swap.py
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

from ...policies.errors import ConfigError, PlacementError
from ..files import make_directory, sync_directory, unfinished
from ..locking import DirectoryLock


class StoreDirectory:
    """One store's directory. The constructor touches nothing."""

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self.path = path
        self._lock_file = path / "store.lock"
        self._lock = DirectoryLock(self._lock_file, f"store {name!r}")

    def create(self) -> bytes:
        """Make it under another name, whole and durable, then rename it (rule D2). Returns the store id."""
        if self.path.exists():
            raise PlacementError(f"{self.path} exists already; store {self.name!r} cannot be made there")
        store_id = os.urandom(16)
        make_directory(self.path.parent)
        path = unfinished(self.path, store_id)
        try:
            path.mkdir()
            with (path / "store.id").open("w") as file:
                file.write(store_id.hex() + "\n")
                file.flush()
                os.fsync(file.fileno())
            sync_directory(path)
            path.rename(self.path)
        except Exception:
            shutil.rmtree(path, ignore_errors=True)
            raise
        sync_directory(self.path.parent)
        return store_id

    def identify(self) -> bytes | None:
        """The id that is written here, None if there is none that reads."""
        try:
            store_id = bytes.fromhex((self.path / "store.id").read_text().strip())
        except (FileNotFoundError, NotADirectoryError, ValueError):
            return None
        return store_id if len(store_id) == 16 else None

    def lock(self) -> bytes:
        """Returns the id. Raises StoreLockedError, PlacementError if there is no such store, and ConfigError if it
        cannot be used."""
        store_id = self.identify()
        if store_id is None:
            raise PlacementError(
                f"{self.path} holds no store {self.name!r}: its store.id is missing or damaged. Nothing is lost with "
                "it, since a memory store keeps nothing: remove the directory, and it is made anew"
            )
        try:
            self._lock.acquire()
        except OSError as error:
            self._lock.release()
            raise ConfigError(
                [f"store {self.name!r} cannot be opened in {self.path}: {error.strerror} ({error.filename})"]
            ) from error
        return store_id

    def unlock(self) -> None:
        """Idempotent. The lock's file goes while it is locked: who has it open by then finds that it has no name any
        more, and tries again."""
        if self._lock.held:
            with suppress(OSError):
                self._lock_file.unlink(missing_ok=True)
        self._lock.release()


class TransientDirectory:
    """One that is there only while something is swapped; of a store that nobody opens again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._store_id = os.urandom(16)

    def lock(self) -> bytes:
        """Returns the id. Its owner sees to it that there is one only."""
        return self._store_id

    def unlock(self) -> None:
        """Idempotent. It goes if it is empty."""
        with suppress(OSError):
            self.path.rmdir()
