"""Where the tests' stores of the third party lie, and how it is installed."""

from __future__ import annotations

import itertools
import shutil
import sys
from pathlib import Path
from typing import Any

from anabranch.adapters.core import Store

from ..contract.disk import Disk

SITE = Path(__file__).parent / "site"
"""What `pip install anabranch-onefile` would put into site-packages: a package and its metadata."""
if str(SITE) not in sys.path:
    sys.path.append(str(SITE))

from anabranch_onefile import OneFileOptions, OneFileStore  # noqa: E402


class OneFileDisk(Disk):
    """Stores below a directory; a crash is a copy of the one file."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self._numbers = itertools.count(1)
        self._given: dict[Path, dict[str, Any]] = {}

    def create(self, **options: Any) -> OneFileStore:
        path = self._path / f"store-{next(self._numbers)}"
        self._given[path] = options
        OneFileStore.create(path.name, path, OneFileOptions(**options))
        return self._open(path)

    def _open(self, path: Path) -> OneFileStore:
        store = OneFileStore(path.name, path, OneFileOptions(**self._given[path]))
        store.open()
        self.opened.append(store)
        return store

    def unopened(self, store: Store) -> OneFileStore:
        assert isinstance(store, OneFileStore)
        return OneFileStore(store.name, store.directory, store.options)

    def reopen(self, store: Store, **options: Any) -> OneFileStore:
        assert isinstance(store, OneFileStore)
        store.close()
        self._given[store.directory] |= options
        return self._open(store.directory)

    def crash(self, store: Store, **options: Any) -> OneFileStore:
        assert isinstance(store, OneFileStore)
        path = self._path / f"store-{next(self._numbers)}"
        shutil.copytree(store.directory, path, ignore=shutil.ignore_patterns("*.lock", "*.tmp"))
        self._given[path] = self._given[store.directory] | options
        return self._open(path)
