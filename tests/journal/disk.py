"""The disk of a journal store under test, and what its tests look at from inside."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import MappingProxyType
from typing import Any

from anabranch.adapters.core import Store
from anabranch.adapters.journal import JournalStore
from anabranch.policies.config import JournalOptions

from ..contract.disk import Disk
from ..wal.logs import quiet

SMALL = {"segment_size": 64 * 1024}
"""Segments so small that roll-over and reclaiming happen."""


class JournalDisk(Disk):
    """Journal stores in directories below one; a crash is a copy of the directory of an open store."""

    idle = MappingProxyType({"checkpoint_interval": 3600.0})

    def __init__(self, path: Path, **options: Any) -> None:
        super().__init__()
        self._path = path
        self._options = {**SMALL, **options}
        self._numbers = itertools.count(1)
        self._given: dict[Path, dict[str, Any]] = {}

    def create(self, **options: Any) -> JournalStore:
        path = self._new_path()
        self._given[path] = {**self._options, **options}
        JournalStore.create(path.name, path, JournalOptions(**self._given[path]))
        return self.open(path)

    def open(self, path: Path) -> JournalStore:
        """The store in a directory that create or crash made."""
        store = JournalStore(path.name, path, JournalOptions(**self._given[path]))
        store.open()
        self.opened.append(store)
        return store

    def unopened(self, store: Store) -> JournalStore:
        path = directory_of(store)
        return JournalStore(path.name, path, JournalOptions(**self._given[path]))

    def reopen(self, store: Store, **options: Any) -> JournalStore:
        store.close()
        path = directory_of(store)
        self._given[path].update(options)
        return self.open(path)

    def crash(self, store: Store, **options: Any) -> JournalStore:
        path = self.copy(store)
        self._given[path].update(options)
        return self.open(path)

    def copy(self, store: Store) -> Path:
        """What the process would leave if it were killed now: the page cache outlives it, so a copy shows it all."""
        assert isinstance(store, JournalStore)
        source, target = directory_of(store), self._new_path()
        self._given[target] = dict(self._given[source])
        # No write may come between two files of the copy; unfinished files come and go as they like.
        with store.backend._reclaimer._lock, quiet(store.backend._log), store._engine.lock:
            for file in sorted(source.rglob("*")):
                copied = target / file.relative_to(source)
                if file.is_file() and file.name != "store.lock" and file.suffix != ".tmp":
                    copied.parent.mkdir(parents=True, exist_ok=True)
                    copied.write_bytes(file.read_bytes())
        return target

    def _new_path(self) -> Path:
        return self._path / f"store-{next(self._numbers)}"


def directory_of(store: Store) -> Path:
    """Where a journal store lies."""
    assert isinstance(store, JournalStore)
    return store.directory


def segments_of(store: Store) -> list[Path]:
    """Its segment files, oldest first."""
    return sorted((directory_of(store) / "journal").glob("*.seg"))


def content(store: Store) -> dict[str, list[tuple[int, bytes, str | None]]]:
    """All that a store holds."""
    return {str(d): [(m.seq, m.body, m.message_id) for m in store.browse(d)] for d in store.destinations()}


def rebuilt(disk: JournalDisk, store: JournalStore, closed: bool) -> JournalStore:
    """The store as the journal alone tells it, after close or crash."""
    if closed:
        store.close()
        (directory_of(store) / "index.mdb").unlink()
        return disk.reopen(store)
    path = disk.copy(store)
    (path / "index.mdb").unlink()
    return disk.open(path)


def listing(directory: Path) -> dict[str, bytes]:
    """Every file but the lock."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file() and path.name != "store.lock"
    }
