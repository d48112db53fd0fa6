"""The placement record: which store holds which destination (invariant 6, rules D1 and X5).

LMDB, in `placement.mdb`. A row is durable before its destination's first record, and goes only with its data. It is
created under another name, synced and renamed, and every change is committed at once. If it is lost, reconcile.py
records the stores anew that lie where the configuration has them.

    stores         store id                ->  path, kind, the configuration's name for it
    destinations   hash of the destination ->  kind, name, store id, pattern
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import lmdb
import msgspec

from ..adapters.files import create_lmdb, fill_lmdb, is_cut_short, open_lmdb
from ..policies.destination import Destination, Kind
from ..policies.errors import ClosedError, CorruptionError, PlacementError

VERSION: Final = 1
MAP_BYTES: Final = 1 << 30
PAGES_AHEAD: Final = 64
"""More than the change of one row takes."""
_WAY_OUT: Final = (
    "restore it from a backup, or, if there is none, put it aside and open again: the stores that lie where the "
    "configuration has them are then recorded anew"
)


class StoreRow(msgspec.Struct, frozen=True, array_like=True):
    """A store that exists. `path` is relative to the data directory where it lies in it."""

    store_id: bytes
    path: str
    kind: str
    name: str


class DestinationRow(msgspec.Struct, frozen=True, array_like=True):
    """A destination that has, or had, messages in a store."""

    kind: int
    name: str
    store_id: bytes
    pattern: str

    @property
    def destination(self) -> Destination:
        return Destination(Kind(self.kind), self.name)


class Placement:
    """The record, open. `_lock` guards the file; the two tables are read by anybody, and never changed but after the
    commit. The constructor touches nothing."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._env: Any = None
        self._lock = threading.Lock()
        self.stores: dict[bytes, StoreRow] = {}
        self.destinations: dict[Destination, DestinationRow] = {}

    def open(self) -> None:
        """Read all rows. Raises CorruptionError, and PlacementError for a record of another version."""
        if not self._path.exists():
            create_lmdb(self._path, MAP_BYTES)
        if is_cut_short(self._path):
            size = self._path.stat().st_size
            raise CorruptionError(str(self._path), size, f"the placement record is cut short; {_WAY_OUT}")
        try:
            self._env = open_lmdb(self._path, MAP_BYTES, max_dbs=3)
            fill_lmdb(self._env, self._path, PAGES_AHEAD)
            self._stores_db = self._env.open_db(b"stores")
            self._destinations_db = self._env.open_db(b"destinations")
            self._meta_db = self._env.open_db(b"meta")
            with self._env.begin(write=True) as txn:
                version = txn.get(b"version", db=self._meta_db)
                if version is None:
                    txn.put(b"version", str(VERSION).encode(), db=self._meta_db)
                stores = [msgspec.msgpack.decode(v, type=StoreRow) for _, v in txn.cursor(db=self._stores_db)]
                rows = [msgspec.msgpack.decode(v, type=DestinationRow) for _, v in txn.cursor(db=self._destinations_db)]
        except (lmdb.Error, msgspec.MsgspecError) as error:
            raise CorruptionError(
                str(self._path), 0, f"the placement record does not read: {error}; {_WAY_OUT}"
            ) from error
        if version not in (None, str(VERSION).encode()):
            raise PlacementError(
                f"{self._path} has format version {version.decode(errors='replace')}; this program reads {VERSION}: "
                "use the version that wrote it"
            )
        self.stores = {row.store_id: row for row in stores}
        self.destinations = {row.destination: row for row in rows}

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            if self._env is not None:
                self._env.close()
            self._env = None

    def store_at(self, path: str) -> StoreRow | None:
        """The store that is recorded at a path."""
        return next((row for row in list(self.stores.values()) if row.path == path), None)

    def record_store(self, row: StoreRow, destinations: Sequence[DestinationRow] = ()) -> None:
        """The store, and what it holds already, as one. Durable on return."""
        with self._changing(1 + len(destinations)) as txn:
            txn.put(row.store_id, msgspec.msgpack.encode(row), db=self._stores_db)
            for held in destinations:
                txn.put(_key(held.destination), msgspec.msgpack.encode(held), db=self._destinations_db)
        self.destinations.update((held.destination, held) for held in destinations)
        self.stores[row.store_id] = row

    def forget_store(self, store_id: bytes) -> None:
        """Durable on return. Only for a store that no destination is recorded in."""
        with self._changing() as txn:
            txn.delete(store_id, db=self._stores_db)
        self.stores.pop(store_id, None)

    def record_destination(self, row: DestinationRow) -> None:
        """Durable on return."""
        with self._changing() as txn:
            txn.put(_key(row.destination), msgspec.msgpack.encode(row), db=self._destinations_db)
        self.destinations[row.destination] = row

    def forget_destination(self, destination: Destination) -> None:
        """Durable on return."""
        with self._changing() as txn:
            txn.delete(_key(destination), db=self._destinations_db)
        self.destinations.pop(destination, None)

    @contextmanager
    def _changing(self, rows: int = 1) -> Iterator[Any]:
        with self._lock:
            if self._env is None:
                raise ClosedError("the router is closed; open it with anabranch.open(...)")
            if rows > 1:
                fill_lmdb(self._env, self._path, PAGES_AHEAD + 2 * rows)
            with self._env.begin(write=True) as txn:
                yield txn
            fill_lmdb(self._env, self._path, PAGES_AHEAD)


def _key(destination: Destination) -> bytes:
    # Names may be longer than LMDB's keys.
    return hashlib.sha256(str(destination).encode()).digest()
