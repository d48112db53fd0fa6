"""A store's directory: who the store is, and who has it open (rules D2, D3, I4).

store.lock   locked while open; holds the owner's pid and host
store.id     16 random bytes in hex, the same as in STORE
store.db     the tables, if they are in SQLite and not on a server; beside it SQLite's store.db-wal and store.db-shm
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from ...policies.errors import ConfigError, PlacementError
from ..files import make_directory, sync_directory, unfinished
from ..locking import DirectoryLock


class StoreDirectory:
    """One store's directory. The constructor touches nothing."""

    def __init__(self, name: str, path: Path) -> None:
        self.name, self.path = name, path
        self._lock = DirectoryLock(path / "store.lock", f"store {name!r}")

    def create(self, fill: Callable[[Path, bytes], bytes]) -> bytes:
        """Make it under another name, whole and durable, then rename it (rule D2); `fill` puts there what belongs to
        it beside its id, and returns the id that it is to have: the one that it is given, or that of a store which
        other nodes have too. Returns the id."""
        if self.path.exists():
            raise PlacementError(f"{self.path} exists already; store {self.name!r} cannot be made there")
        store_id = os.urandom(16)
        make_directory(self.path.parent)
        making = unfinished(self.path, store_id)
        try:
            making.mkdir()
            store_id = fill(making, store_id)
            with (making / "store.id").open("w") as file:
                file.write(store_id.hex() + "\n")
                file.flush()
                os.fsync(file.fileno())
            sync_directory(making)
            making.rename(self.path)
        except Exception:
            shutil.rmtree(making, ignore_errors=True)
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
        if not self.path.is_dir():
            raise PlacementError(f"{self.path}, the directory of store {self.name!r}, is missing; nothing was created")
        store_id = self.identify()
        if store_id is None:
            what = "damaged" if (self.path / "store.id").exists() else "missing"
            raise PlacementError(
                f"{self.path} holds no store: its store.id is {what}. If it lies on another disk, mount that first; if "
                "only this file is lost, restore it (the table STORE holds the same id)"
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
        self._lock.release()
