"""A store's directory: how it is made, locked and recognised (rules D2, D3, I4). What every kind has there:

store.id        16 random bytes in hex
store.lock      while it is open: the owner's pid and host
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

from ..policies.errors import ConfigError, PlacementError
from .files import FULL, make_directory, sync_directory, unfinished
from .locking import DirectoryLock

Fill = Callable[[Path, bytes], bytes]
"""Puts into a new directory what belongs there beside the store's id; takes the id that it is given, and returns the
one that it is to have: another where other nodes have the same store."""


def nothing(path: Path, store_id: bytes) -> bytes:
    """The Fill of a store that has its id alone."""
    return store_id


class StoreDirectory:
    """One store's. The constructor touches nothing."""

    advice: ClassVar[str]
    """What to do where store.id is lost."""

    def __init__(self, name: str, path: Path) -> None:
        self.name, self.path = name, path
        self._lock_file = path / "store.lock"
        self._lock = DirectoryLock(self._lock_file, f"store {name!r}")

    def create(self, fill: Fill = nothing) -> bytes:
        """Make it under another name, whole and durable, then rename it (rule D2). Returns the store id."""
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

    def read_id(self) -> bytes:
        """Raises PlacementError if this is no store's directory."""
        store_id = self.identify()
        if store_id is None:
            what = "damaged" if (self.path / "store.id").exists() else "missing"
            raise PlacementError(f"{self.path} holds no store {self.name!r}: its store.id is {what}. {self.advice}")
        return store_id

    def lock(self) -> bytes:
        """Returns the id. Raises StoreLockedError, PlacementError if there is no such store, ConfigError if it cannot
        be used, and OSError if there is no room for it now."""
        if not self.path.is_dir():
            raise PlacementError(f"{self.path}, the directory of store {self.name!r}, is missing; nothing was created")
        store_id = self.read_id()  # what is no store gets no lock file
        try:
            self._lock.acquire()
            self._locked(store_id)
        except OSError as error:
            self._lock.release()
            if error.errno in FULL:
                raise
            raise ConfigError(
                [f"store {self.name!r} cannot be opened in {self.path}: {error.strerror} ({error.filename})"]
            ) from error
        return store_id

    def _locked(self, store_id: bytes) -> None:
        """It has just been locked."""

    def unlock(self) -> None:
        """Idempotent."""
        self._lock.release()
