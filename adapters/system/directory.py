"""A store's directory: how it is made, locked and recognised (rules D2, D3, I4). Every kind has there what follows.

store.id        16 random bytes in hex
store.lock      while it is open: the owner's pid and host
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import ClassVar, Final

from ...policies.errors import ConfigError, PlacementError, StoreFailedError
from .files import (
    DENIED,
    FILE_MODE,
    make_directory,
    new_directory,
    read_file,
    require_no_links,
    sync_directory,
    unfinished,
    write_file,
)
from .locking import DirectoryLock

Fill = Callable[[Path, bytes], bytes]
"""Puts into a new directory what belongs there beside the store's id; takes the id that it is given, and returns the
one that it is to have: another where other nodes have the same store."""


def nothing(path: Path, store_id: bytes) -> bytes:
    """Return the id alone, as the Fill of a store that has nothing else."""
    return store_id


def is_empty(path: Path) -> bool:
    """Return whether a directory is there, with nothing in it."""
    return path.is_dir() and next(path.iterdir(), None) is None


class StoreDirectory:
    """The directory of one store. The constructor touches nothing."""

    advice: ClassVar[str]
    """Advice on what to do where store.id is lost."""

    def __init__(
        self,
        name: str,
        path: Path,
        file_mode: int | None = None,
        on_lost: Callable[[StoreFailedError], None] | None = None,
    ) -> None:
        """`file_mode` is that of all files here, None the usual one. `on_lost` as of DirectoryLock."""
        self.name = name
        self.path = path
        self.file_mode: Final = file_mode or FILE_MODE
        self._lock = DirectoryLock(path / "store.lock", f"store {name!r}", self.file_mode, on_lost)
        self.require_lock: Final = self._lock.require
        """Raises StoreFailedError if the lock was lost: see DirectoryLock."""

    def create(self, fill: Fill = nothing) -> bytes:
        """Make it under another name, whole and durable, then rename it (rule D2). Returns the store id. An empty
        directory may be there already."""
        if self.path.exists() and not is_empty(self.path):
            raise PlacementError(f"{self.path} exists already; store {self.name!r} cannot be made there")
        store_id = os.urandom(16)
        make_directory(self.path.parent, self.file_mode)
        making = unfinished(self.path, store_id)
        try:
            new_directory(making, self.file_mode)
            store_id = fill(making, store_id)
            write_file(making / "store.id", f"{store_id.hex()}\n".encode(), self.file_mode)
            sync_directory(making)
            making.rename(self.path)
        except Exception:
            shutil.rmtree(making, ignore_errors=True)
            raise
        sync_directory(self.path.parent)
        with suppress(PermissionError):  # of a directory that another user made
            sync_directory(self.path.parent.parent)  # who made ours may be about to, or was killed before that
        return store_id

    def identify(self) -> bytes | None:
        """Return the id that is written here, None if there is none that reads. Raises OSError."""
        try:
            store_id = bytes.fromhex(read_file(self.path / "store.id").decode().strip())
        except (FileNotFoundError, NotADirectoryError, ValueError):
            return None
        return store_id if len(store_id) == 16 else None

    def read_id(self) -> bytes:
        """Return the id that is written here. Raises PlacementError if this is no store's directory."""
        store_id = self.identify()
        if store_id is None:
            what = "damaged" if (self.path / "store.id").exists() else "missing"
            raise PlacementError(f"{self.path} holds no store {self.name!r}: its store.id is {what}. {self.advice}")
        return store_id

    def lock(self) -> bytes:
        """Lock the directory; return the id. Raises StoreLockedError, PlacementError if there is no such store,
        ConfigError if this user may not use it, and OSError if there is no room for it now, the disk fails, or
        something in it is a symbolic link."""
        if not self.path.is_dir():
            raise PlacementError(f"{self.path}, the directory of store {self.name!r}, is missing; nothing was created")
        try:
            require_no_links(self.path)
            store_id = self.read_id()  # what is no store gets no lock file
            self._lock.acquire()
            self._locked(store_id)
        except OSError as error:
            self._lock.release()
            if error.errno not in DENIED:
                raise
            raise ConfigError(
                [f"store {self.name!r} cannot be opened in {self.path}: {error.strerror} ({error.filename})"]
            ) from error
        return store_id

    def _locked(self, store_id: bytes) -> None:
        """Do what follows once the directory has just been locked."""

    def look_after_lock(self) -> None:
        """Look after the lock: if it was lost, `on_lost` has been called on return."""
        self._lock.lost()

    def unlock(self) -> None:
        """Unlock the directory. Idempotent."""
        self._lock.release()
