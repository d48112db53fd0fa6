"""A journal store's directory: how it is made, locked and recognised (rules D2, D3, I4).

store.lock      locked while open; holds the owner's pid and host
store.id        16 random bytes in hex, the same as in every segment
journal/        the segments
index.mdb       the index, here or in `index_directory`
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from ...policies.errors import ConfigError, PlacementError
from ..files import make_directory, sync_directory, unfinished
from ..locking import DirectoryLock
from . import format as f
from .files import SegmentFiles


class StoreDirectory:
    """One store's directory. The constructor touches nothing."""

    def __init__(self, name: str, path: Path, index_directory: Path | None) -> None:
        self.name = name
        self.path = path
        self.journal = path / "journal"
        self._index_directory = index_directory
        self._lock = DirectoryLock(path / "store.lock", f"store {name!r}")

    @property
    def index(self) -> Path:
        if self._index_directory is None:
            return self.path / "index.mdb"
        return self._index_directory / f"{self.read_id().hex()}.mdb"

    def create(self, segment_size: int) -> bytes:
        """Make it under another name, whole and durable, then rename it (rule D2). Returns the store id."""
        if self.path.exists():
            raise PlacementError(f"{self.path} exists already; store {self.name!r} cannot be made there")
        store_id = os.urandom(16)
        make_directory(self.path.parent)
        unfinished_path = unfinished(self.path, store_id)
        try:
            self._make(unfinished_path, store_id, segment_size)
            unfinished_path.rename(self.path)
        except Exception:
            shutil.rmtree(unfinished_path, ignore_errors=True)
            raise
        sync_directory(self.path.parent)
        return store_id

    def _make(self, path: Path, store_id: bytes, segment_size: int) -> None:
        journal = path / "journal"
        journal.mkdir(parents=True)
        header = f.SegmentHeader(
            store_id=store_id, number=1, nonce=int.from_bytes(os.urandom(8), "little"), base_lsn=1, durable_lsn=0,
            prev_number=0, prev_end=0, prev_lsn=0, last_seq=0, snapshot_number=0, snapshot_offset=0,
            capacity=segment_size,
        )  # fmt: skip
        SegmentFiles(journal, lambda: None).publish(header, segment_size, lambda: None)
        with (path / "store.id").open("w") as file:
            file.write(store_id.hex() + "\n")
            file.flush()
            os.fsync(file.fileno())
        sync_directory(path)

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
            raise PlacementError(
                f"{self.path} holds no store: its store.id is {what}. If it lies on another disk, mount that first; if "
                "only this file is lost, restore it (the segments' headers hold the same id)"
            )
        return store_id

    def lock(self) -> None:
        """Raises StoreLockedError, PlacementError if there is no such store, and ConfigError if it cannot be used."""
        if not self.path.is_dir():
            raise PlacementError(f"{self.path}, the directory of store {self.name!r}, is missing; nothing was created")
        self.read_id()  # what is no store gets no lock file
        try:
            self._lock.acquire()
            if self._index_directory is not None:
                self._index_directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            self._lock.release()
            raise ConfigError(
                [f"store {self.name!r} cannot be opened in {self.path}: {error.strerror} ({error.filename})"]
            ) from error

    def unlock(self) -> None:
        self._lock.release()
