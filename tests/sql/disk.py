"""The disks of SQL stores under test."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from anabranch.adapters.base import Store
from anabranch.adapters.sql import SqlStore
from anabranch.policies.options import SqlOptions

from ..contract.disk import Disk

SMALL = {"chunk_size": 64 * 1024}
"""Chunks so small that bodies are split."""


class SqliteDisk(Disk):
    """Stores in SQLite; a crash is a copy of the directory of an open store while nothing is written."""

    def __init__(self, path: Path, **options: Any) -> None:
        super().__init__()
        self._path = path
        self._options = {**SMALL, **options}
        self._numbers = itertools.count(1)
        self._given: dict[Path, dict[str, Any]] = {}

    def create(self, **options: Any) -> SqlStore:
        path = self._path / f"store-{next(self._numbers)}"
        self._given[path] = {**self._options, **options}
        SqlStore.create(path.name, path, SqlOptions(**self._given[path]))
        return self.open(path)

    def open(self, path: Path) -> SqlStore:
        """The store in a directory that create or crash made."""
        store = SqlStore(path.name, path, SqlOptions(**self._given[path]))
        store.open()
        self.opened.append(store)
        return store

    def unopened(self, store: Store) -> SqlStore:
        path = directory_of(store)
        return SqlStore(path.name, path, SqlOptions(**self._given[path]))

    def reopen(self, store: Store, **options: Any) -> SqlStore:
        store.close()
        path = directory_of(store)
        self._given[path].update(options)
        return self.open(path)

    def crash(self, store: Store, **options: Any) -> SqlStore:
        assert isinstance(store, SqlStore)
        source, target = directory_of(store), self._path / f"store-{next(self._numbers)}"
        target.mkdir()
        with store._writer._lead:
            for name in ("store.id", "store.db", "store.db-wal"):
                if (source / name).exists():
                    (target / name).write_bytes((source / name).read_bytes())
        self._given[target] = {**self._given[source], **options}
        return self.open(target)


def directory_of(store: Store) -> Path:
    """Where an SQL store lies."""
    assert isinstance(store, SqlStore)
    return store._directory.path
