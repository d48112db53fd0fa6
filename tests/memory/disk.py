"""The disk of a memory store under test."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from anabranch.adapters.core import Store
from anabranch.adapters.memory import MemoryStore
from anabranch.policies.config.options import MemoryOptions

from ..contract.disk import Disk

SMALL: Mapping[str, Any] = {"max_bytes": 96 * 1024, "roll_over_size": 64 * 1024}
"""So little that swapping and roll-over happen."""


class MemoryDisk(Disk):
    """Memory stores in directories below one; of a crash nothing is left."""

    volatile: ClassVar[bool] = True

    def __init__(self, path: Path, **options: Any) -> None:
        super().__init__()
        self._path = path
        self._options = options
        self.many_priorities = 40 if "max_bytes" in options else 600
        self._numbers = itertools.count(1)
        self._given: dict[Path, dict[str, Any]] = {}

    def create(self, **options: Any) -> MemoryStore:
        if "max_bytes" in options:
            options["max_stored_bytes"] = options.pop("max_bytes")
        path = self._path / f"store-{next(self._numbers)}"
        self._given[path] = {**self._options, **options}
        MemoryStore.create(path.name, path, MemoryOptions(**self._given[path]))
        return self._open(path)

    def _open(self, path: Path) -> MemoryStore:
        store = self._at(path)
        store.open()
        self.opened.append(store)
        return store

    def _at(self, path: Path) -> MemoryStore:
        return MemoryStore(path.name, path, MemoryOptions(**self._given[path]))

    def unopened(self, store: Store) -> MemoryStore:
        return self._at(directory_of(store))

    def reopen(self, store: Store, **options: Any) -> MemoryStore:
        store.close()
        path = directory_of(store)
        self._given[path].update(options)
        return self._open(path)

    def crash(self, store: Store, **options: Any) -> MemoryStore:
        """What the process leaves is its id, and swap files that nobody asks for."""
        source, path = directory_of(store), self._path / f"store-{next(self._numbers)}"
        self._given[path] = {**self._given[source], **options}
        for file in sorted(source.rglob("*")):
            if file.is_file() and file.name != "store.lock":
                copied = path / file.relative_to(source)
                copied.parent.mkdir(parents=True, exist_ok=True)
                copied.write_bytes(file.read_bytes())
        return self._open(path)


def directory_of(store: Store) -> Path:
    """Where a memory store lies."""
    assert isinstance(store, MemoryStore)
    return store.directory


def swap_files(store: Store) -> list[Path]:
    """Its swap files, oldest first."""
    return sorted((directory_of(store) / "swap").glob("*.swap"), key=lambda path: int(path.stem))
