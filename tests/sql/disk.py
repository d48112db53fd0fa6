"""The disks of SQL stores under test."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from sqlalchemy.schema import CreateIndex, CreateTable

from anabranch.adapters.base import Store
from anabranch.adapters.sql import SqlStore
from anabranch.adapters.sql.schema import schema
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


class PostgresDisk(SqliteDisk):
    """Stores in one schema of a server, each with tables of its own; a crash is a copy of them while nothing is
    written."""

    def __init__(self, path: Path, url: str, **options: Any) -> None:
        super().__init__(path, url=url, pool_min=0, **options)

    def create(self, **options: Any) -> SqlStore:
        return super().create(**{"schema_prefix": f"s{next(self._numbers)}_", **options})

    def crash(self, store: Store, **options: Any) -> SqlStore:
        assert isinstance(store, SqlStore)
        source, target = directory_of(store), self._path / f"store-{next(self._numbers)}"
        given = {**self._given[source], "schema_prefix": f"s{next(self._numbers)}_", **options}
        target.mkdir()
        (target / "store.id").write_bytes((source / "store.id").read_bytes())
        ours, copies = (schema(prefix) for prefix in (store.options.schema_prefix, given["schema_prefix"]))
        with store._writer._lead, store._engine.begin() as connection:
            for table, copy in zip(ours.tables, copies.tables, strict=True):
                connection.execute(CreateTable(copy))
                connection.execute(copy.insert().from_select(list(table.c.keys()), table.select()))
            for copy in copies.tables:
                for index in copy.indexes:
                    connection.execute(CreateIndex(index))
        self._given[target] = given
        return self.open(target)
