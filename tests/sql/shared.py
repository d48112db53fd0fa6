"""Shared stores under test, each in tables of its own on a server, and routers that use one together."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

from sqlalchemy import create_engine
from sqlalchemy.engine import make_url

from anabranch.adapters.core import Store
from anabranch.adapters.sql import SqlStore
from anabranch.adapters.sql.shared.statements import TABLES
from anabranch.adapters.sql.shared.tables import VERSION
from anabranch.policies.config.options import SqlOptions

from ..contract.disk import Disk

NAMES = [text.split("{p}")[1].split()[0] for text in TABLES if text.startswith("CREATE") and "TABLE" in text][1:]
"""The tables, but that which says whose they are."""


CLOCK = [
    "CREATE SCHEMA tests",
    "CREATE TABLE ahead AS SELECT 0::bigint AS ms",
    "CREATE FUNCTION clock_timestamp() RETURNS timestamptz LANGUAGE sql AS "
    "'SELECT pg_catalog.clock_timestamp() + ms * interval ''1 ms'' FROM ahead'",
]
"""A clock that a test puts forward."""


class SharedTables:
    """Tables of shared stores, by prefix, which one test after the other uses."""

    def __init__(self, url: str) -> None:
        # A function of the tests' own is found before that of the server.
        given = make_url(url).update_query_dict({"options": "-csearch_path=tests,pg_catalog"})
        self.url = given.render_as_string(hide_password=False)
        self._engine = create_engine(self.url)
        self.run(CLOCK)
        self._numbers = itertools.count(1)
        self._free: list[str] = []

    def take(self) -> str:
        """A prefix, under which there are empty tables that belong to nobody."""
        if self._free:
            return self._free.pop()
        prefix = f"n{next(self._numbers)}_"
        self.run([text.replace("{p}", prefix) for text in TABLES])
        self.run([f"INSERT INTO {prefix}shared_store (storeid, version) VALUES ('{os.urandom(16).hex()}', {VERSION})"])
        return prefix

    def set_clock(self, ms: int) -> None:
        """Let the database's clock be so much ahead of what it is."""
        self.run([f"UPDATE ahead SET ms = {ms}"])

    def run(self, statements: list[str]) -> None:
        with self._engine.begin() as connection:
            for statement in statements:
                connection.exec_driver_sql(statement)

    def copy(self, source: str, target: str) -> None:
        """What one has into another."""
        self.run([f"DELETE FROM {target}shared_routers"])
        self.run([f"UPDATE {target}shared_store SET storeid = (SELECT storeid FROM {source}shared_store)"])
        self.run([f"INSERT INTO {target}{n} OVERRIDING SYSTEM VALUE SELECT * FROM {source}{n}" for n in NAMES])
        for name, column in (("messages", "id"), ("queues", "number"), ("routers", "number")):
            one, other = (f"pg_get_serial_sequence('{p}shared_{name}', '{column}')" for p in (source, target))
            self.run([f"SELECT setval({other}, nextval({one}))"])

    def give_back(self, prefixes: list[str]) -> None:
        for prefix in prefixes:
            self.run([f"UPDATE {prefix}shared_store SET storeid = '{os.urandom(16).hex()}'"])
            self.run([f"TRUNCATE {', '.join(prefix + name for name in NAMES)}"])
            self.run([TABLES[[t.startswith("INSERT") for t in TABLES].index(True)].replace("{p}", prefix)])
            self._free.append(prefix)

    def close(self) -> None:
        self._engine.dispose()


class SharedDisk(Disk):
    """Shared stores of one router each; a crash is a copy of the tables, opened as the same router."""

    def __init__(self, path: Path, sets: SharedTables, **options: Any) -> None:
        super().__init__()
        self._path, self._sets, self._options = path, sets, options
        self._numbers = itertools.count(1)
        self._given: dict[Path, dict[str, Any]] = {}
        self._taken: list[str] = []

    def _new(self, **options: Any) -> tuple[Path, dict[str, Any]]:
        prefix = self._sets.take()
        self._taken.append(prefix)
        path = self._path / f"store-{next(self._numbers)}"
        given = {"url": self._sets.url, "shared": True, "pool_min": 0, **self._options, **options}
        given["schema_prefix"] = prefix
        self._given[path] = given
        return path, given

    def create(self, **options: Any) -> SqlStore:
        path, given = self._new(**options)
        SqlStore.create(path.name, path, SqlOptions(**given))
        return self.open(path)

    def beside(self, store: Store, **options: Any) -> SqlStore:
        """Another router's store over the same tables."""
        path = self._path / f"store-{next(self._numbers)}"
        self._given[path] = given = {**self._given[store.directory], **options}
        SqlStore.create(path.name, path, SqlOptions(**given))
        return self.open(path)

    def open(self, path: Path) -> SqlStore:
        """The store in a directory that create or crash made."""
        store = SqlStore(path.name, path, SqlOptions(**self._given[path]))
        store.open()
        self.opened.append(store)
        return store

    def unopened(self, store: Store) -> SqlStore:
        return SqlStore(store.directory.name, store.directory, SqlOptions(**self._given[store.directory]))

    def reopen(self, store: Store, **options: Any) -> SqlStore:
        store.close()
        self._given[store.directory].update(options)
        return self.open(store.directory)

    def crash(self, store: Store, **options: Any) -> SqlStore:
        source = self._given[store.directory]
        path, given = self._new(**{**source, **options})
        path.mkdir()
        for name in ("store.id", "store.node"):
            (path / name).write_bytes((store.directory / name).read_bytes())
        self._sets.copy(source["schema_prefix"], given["schema_prefix"])
        return self.open(path)

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._sets.give_back(self._taken)
