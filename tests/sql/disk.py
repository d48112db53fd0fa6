"""The disks of SQL stores under test."""

from __future__ import annotations

import atexit
import itertools
import shutil
import tempfile
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import psycopg
from psycopg.pq import TransactionStatus
from sqlalchemy import create_engine, make_url

from anabranch.adapters.core import Store
from anabranch.adapters.core.backend.writers import Threaded
from anabranch.adapters.sql import SqlStore
from anabranch.adapters.sql.backend import SqlBackend
from anabranch.adapters.sql.database.schema import schema
from anabranch.policies.config.options import SqlOptions

from ..contract.disk import Disk
from ..places import in_memory
from .server import PostgresServer

SMALL = {"chunk_size": 64 * 1024}
"""Chunks so small that bodies are split."""


_new_stores: Final[dict[str, Path]] = {}


def _new_store(given: dict[str, Any]) -> Path:
    """A store in SQLite that was made with these options and never opened, to be copied: to make thirteen tables takes
    longer than most tests. All copies have one id, so a disk has one of them at most."""
    options = repr(sorted(given.items()))
    if options not in _new_stores:
        place = Path(tempfile.mkdtemp(prefix="anabranch-new-store-", dir=in_memory()))
        atexit.register(shutil.rmtree, place, ignore_errors=True)
        SqlStore.create("new", place / "new", SqlOptions(**given))
        _new_stores[options] = place / "new"
    return _new_stores[options]


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
        self._given[path] = given = {**self._options, **options}
        if "url" in given or len(self._given) > 1:
            SqlStore.create(path.name, path, SqlOptions(**given))
        else:
            shutil.copytree(_new_store(given), path)
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
        with lead_of(store):
            for name in ("store.id", "store.db", "store.db-wal"):
                if (source / name).exists():
                    (target / name).write_bytes((source / name).read_bytes())
        self._given[target] = {**self._given[source], **options}
        return self.open(target)


def directory_of(store: Store) -> Path:
    """Where an SQL store lies."""
    assert isinstance(store, SqlStore)
    return store.directory


def lead_of(store: Store) -> threading.Lock:
    """While somebody holds it nothing is written."""
    assert isinstance(store, SqlStore) and isinstance(store._writer, Threaded)
    return store._writer._lead


def backend_of(store: Store) -> SqlBackend:
    """The tables of an SQL store."""
    assert isinstance(store, SqlStore) and isinstance(store.backend, SqlBackend)
    return store.backend


class TableSets:
    """Tables on a server, by prefix, which one test after the other uses: a database takes its time to create some."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._engine = create_engine(url)
        self.connections = Connections(url)
        self._numbers = itertools.count(1)
        self._free: list[str] = []

    def take(self) -> str:
        """A prefix, under which there are empty tables that belong to nobody."""
        if self._free:
            return self._free.pop()
        prefix = f"s{next(self._numbers)}_"
        with self._engine.begin() as connection:
            schema(prefix).metadata.create_all(connection, checkfirst=False)
        return prefix

    def copy(self, source: str, target: str) -> None:
        """What one has into another."""
        pairs = zip(schema(source).tables, schema(target).tables, strict=True)
        self._run([f"INSERT INTO {copy.name} SELECT * FROM {table.name}" for table, copy in pairs])

    def give_back(self, prefixes: Iterable[str]) -> None:
        for prefix in prefixes:
            self._run([f"DELETE FROM {table.name}" for table in schema(prefix).tables])
            self._free.append(prefix)

    def _run(self, statements: list[str]) -> None:
        with self._engine.begin() as connection:
            connection.exec_driver_sql("; ".join(statements))

    def close(self) -> None:
        self._engine.dispose()
        self.connections.close()


def table_sets(postgres: PostgresServer) -> Iterator[TableSets]:
    """Yield those on the tests' server: for a fixture."""
    if postgres.pid is None:
        postgres.start()
    sets = TableSets(postgres.new_schema())
    yield sets
    sets.close()


class KeptConnection(psycopg.Connection[Any]):
    """A connection to a server that `close` gives back to those that are kept, if it is as if new: a server starts a
    process for each, which then reads its catalogue."""

    kept: list[KeptConnection] | None = None

    def close(self) -> None:
        fine = not self.closed and self.info.transaction_status is TransactionStatus.IDLE
        if self.kept is None or self in self.kept or not fine:
            super().close()
            return
        try:
            self.execute("RESET ALL")
            self.commit()
        except psycopg.Error:
            super().close()
        else:
            self.kept.append(self)


class Connections:
    """Connections to the database of a URL, used again and again by one store after the other."""

    def __init__(self, url: str) -> None:
        given = make_url(url)
        self._named = given.translate_connect_args(username="user", database="dbname") | dict(given.query)
        self._kept: list[KeptConnection] = []

    def connect(self) -> KeptConnection:
        """One that nobody uses."""
        with suppress(IndexError):
            while (connection := self._kept.pop()).broken:
                pass
            return connection
        connection = KeptConnection.connect(**self._named)
        connection.kept = self._kept
        return connection

    def close(self) -> None:
        while self._kept:
            connection = self._kept.pop()
            connection.kept = None
            connection.close()


class PostgresDisk(SqliteDisk):
    """Stores on a server, each with tables of its own; a crash is a copy of them while nothing is written."""

    def __init__(self, path: Path, sets: TableSets, **options: Any) -> None:
        super().__init__(path, url=sets.url, pool_min=0, creator=sets.connections.connect, **options)
        self._sets = sets
        self._taken: list[str] = []

    def create(self, **options: Any) -> SqlStore:
        prefix = self._sets.take()
        self._taken.append(prefix)
        return super().create(**{"schema_prefix": prefix, **options})

    def crash(self, store: Store, **options: Any) -> SqlStore:
        assert isinstance(store, SqlStore)
        source, target = directory_of(store), self._path / f"store-{next(self._numbers)}"
        prefix = self._sets.take()
        self._taken.append(prefix)
        target.mkdir()
        (target / "store.id").write_bytes((source / "store.id").read_bytes())
        with lead_of(store):
            self._sets.copy(store.options.schema_prefix, prefix)
        self._given[target] = {**self._given[source], "schema_prefix": prefix, **options}
        return self.open(target)

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._sets.give_back(self._taken)
