"""Shared stores under test, each in tables of its own on a server, and routers that use one together."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from sqlalchemy import create_engine
from sqlalchemy.engine import make_url

from anabranch.adapters.core import Store
from anabranch.adapters.core.messages import Message
from anabranch.adapters.core.store_types import Counts, Prepared, StoreStats
from anabranch.adapters.sql import SqlStore
from anabranch.adapters.sql.shared import SharedStore
from anabranch.adapters.sql.shared.statements import TABLES
from anabranch.adapters.sql.shared.tables import VERSION
from anabranch.policies.config.options import SqlOptions

from ..contract.disk import Disk, eventually
from .server import PostgresServer

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

    @contextmanager
    def locked(self, table: str) -> Iterator[None]:
        """Let nobody else use a table meanwhile, for which somebody waits by now."""
        with self._engine.begin() as connection:
            connection.exec_driver_sql(f"LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE")
            eventually(lambda: connection.exec_driver_sql("SELECT 1 FROM pg_locks WHERE NOT granted").all())
            yield

    def run(self, statements: list[str]) -> None:
        with self._engine.begin() as connection:
            for statement in statements:
                connection.exec_driver_sql(statement)

    def copy(self, source: str, target: str) -> None:
        """What one has into another."""
        self.run([f"DELETE FROM {target}shared_routers"])
        self.run([f"UPDATE {target}shared_store SET storeid = (SELECT storeid FROM {source}shared_store)"])
        self.run([f"INSERT INTO {target}{n} OVERRIDING SYSTEM VALUE SELECT * FROM {source}{n}" for n in NAMES])
        for name, column in (("messages", "id"), ("queues", "number")):
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


def shared_tables(postgres: PostgresServer) -> Iterator[SharedTables]:
    """A fixture: tables in a database of their own, on the server of the tests."""
    if postgres.pid is None:
        postgres.start()
    sets = SharedTables(postgres.new_database())
    yield sets
    sets.close()


class SharedDisk(Disk):
    """Shared stores of one router each; a crash is a copy of the tables, opened as the same router."""

    def __init__(self, path: Path, sets: SharedTables, **options: Any) -> None:
        super().__init__()
        self._path, self._sets, self._options = path, sets, options
        self._numbers = itertools.count(1)
        self._given: dict[Path, dict[str, Any]] = {}
        self._taken: list[str] = []

    def _prefix(self) -> str:
        prefix = self._sets.take()
        self._taken.append(prefix)
        return prefix

    def _new(self, given: dict[str, Any]) -> Path:
        path = self._path / f"store-{next(self._numbers)}"
        self._given[path] = given
        return path

    def create(self, **options: Any) -> SqlStore:
        given = {"url": self._sets.url, "shared": True, "pool_min": 0, **self._options, **options}
        return self._created({**given, "schema_prefix": self._prefix()})

    def beside(self, store: Store, **options: Any) -> SqlStore:
        """Another router's store over the same tables."""
        return self._created({**self._given[store.directory], **options})

    def _created(self, given: dict[str, Any]) -> SqlStore:
        path = self._new(given)
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
        return self._copied([store], options)[0]

    def _copied(self, stores: Sequence[Store], options: dict[str, Any]) -> list[SqlStore]:
        """What these stores of the same tables are in a copy of them."""
        given = {**self._given[stores[0].directory], **options, "schema_prefix": self._prefix()}
        paths = [self._new(dict(given)) for _ in stores]
        for store, path in zip(stores, paths, strict=True):
            path.mkdir()
            for name in ("store.id", "store.node"):
                (path / name).write_bytes((store.directory / name).read_bytes())
        self._sets.copy(self._given[stores[0].directory]["schema_prefix"], given["schema_prefix"])
        return list(map(self.open, paths))

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._sets.give_back(self._taken)


HOLDING: Final = {
    "ack", "ack_nowait", "claim", "count_expired", "extend", "failure_of", "listen", "note_failure", "note_rejected",
    "receive", "receive_many", "receive_or_watch", "release", "release_nowait", "send_leased", "take_undelivered",
    "token", "unclaim",
}  # fmt: skip
"""Calls for who holds a message, or waits for one: who stands in one line, and what is settled at once, is one
router's."""


class Both:
    """Two routers' stores over the same tables, as if they were one: what the first one sends the second one receives.
    All that is not in HOLDING goes to the one and the other in turn, each kind of call by itself."""

    def __init__(self, *stores: Any) -> None:
        self.routers = stores
        self._holder = stores[-1]
        self._turns = {name: itertools.cycle(stores) for name in dir(SharedStore) if name not in HOLDING}

    def __getattr__(self, name: str) -> Any:
        return getattr(next(self._turns[name]) if name in self._turns else self._holder, name)

    def _acking(self, name: str, acks: Sequence[Message[Any]]) -> Any:
        """That call of who holds what it acks."""
        return getattr(self._holder if acks else next(self._turns[name]), name)

    def commit(self, sends: Any, acks: Any, *given: Any, **named: Any) -> Any:
        return self._acking("commit", acks)(sends, acks, *given, **named)

    def commit_nowait(self, sends: Any, acks: Any, *given: Any, **named: Any) -> Any:
        return self._acking("commit_nowait", acks)(sends, acks, *given, **named)

    def prepare(self, transaction: bytes, stores: Any, sends: Any, acks: Any, *given: Any, **named: Any) -> Any:
        return self._acking("prepare", acks)(transaction, stores, sends, acks, *given, **named)

    def recover_prepared(self) -> list[Prepared]:
        """What either prepared."""
        return sorted({one for store in self.routers for one in store.recover_prepared()})

    def counts(self, *given: Any) -> Counts:
        """As either counts; who holds messages has found those that had expired."""
        counts: Counts = next(self._turns["counts"]).counts(*given)
        found = Counts(*counts[:3], self._holder.counts(*given).expired)
        found.oldest_ready_seconds = counts.oldest_ready_seconds
        return found

    def stats(self) -> StoreStats:
        """As either says; what was done by both is added up."""
        each: list[StoreStats] = [store.stats() for store in self.routers]
        added = "sends", "acks", "redelivered", "syncs", "batches", "dropped", "waiting"
        done: Any = {name: sum(getattr(one, name) for one in each) for name in added}
        return replace(each[-1], **done)

    def retire(self, to_remove: bool = False) -> bool:
        """Both retire, or neither: one that has is closed and opened again."""
        for number, store in enumerate(self.routers):
            if not store.retire(to_remove):
                for retired in self.routers[:number]:
                    retired.close()
                    retired.open()
                return False
        return True

    def open(self) -> None:
        for store in self.routers:
            store.open()

    def close(self) -> None:
        for store in self.routers:
            store.close()


class TwoRouters(SharedDisk):
    """Shared stores of two routers each, which never take each other for dead, however busy the machine is, and though
    a test puts the clock forward by hours."""

    many_leases = 300  # each is a transaction

    def __init__(self, path: Path, sets: SharedTables) -> None:
        super().__init__(path, sets, router_timeout=3600.0)

    def create(self, **options: Any) -> Any:
        first = super().create(**options)
        return Both(first, self.beside(first))

    def unopened(self, store: Any) -> Any:
        return Both(*map(super().unopened, store.routers))

    def reopen(self, store: Any, **options: Any) -> Any:
        store.close()
        return Both(*[SharedDisk.reopen(self, one, **options) for one in store.routers])

    def crash(self, store: Any, **options: Any) -> Any:
        return Both(*self._copied(store.routers, options))
