"""The placement record: which store holds which destination (invariant 6, rules D1 and X5).

LMDB, in `placement.mdb`. A row is durable before its destination's first record, and goes only with its data. It
cannot be rebuilt from anything, so it is created under another name, synced and renamed, and every change is committed
at once.

    stores         store id                ->  path, kind, the configuration's name for it
    destinations   hash of the destination ->  kind, name, store id, pattern
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Final

import lmdb
import msgspec

from ..adapters.files import create_lmdb, fill_lmdb, is_cut_short, open_lmdb
from ..policies.destination import Destination, Kind
from ..policies.errors import CorruptionError, PlacementError

VERSION: Final = 1
MAP_BYTES: Final = 1 << 30
PAGES_AHEAD: Final = 64
"""More than one change takes."""


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
    """The record, open. Called under the router's lock. The constructor touches nothing."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._env: Any = None
        self.stores: dict[bytes, StoreRow] = {}
        self.destinations: dict[Destination, DestinationRow] = {}

    def open(self) -> None:
        """Read all rows. Raises CorruptionError, and PlacementError for a record of another version."""
        if not self._path.exists():
            create_lmdb(self._path, MAP_BYTES)
        if is_cut_short(self._path):
            size = self._path.stat().st_size
            raise CorruptionError(str(self._path), size, "the placement record is cut short; restore it from a backup")
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
                str(self._path), 0, f"the placement record does not read: {error}; restore it from a backup"
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
        if self._env is not None:
            self._env.close()
        self._env = None

    def record_store(self, row: StoreRow) -> None:
        """Durable on return."""
        with self._env.begin(write=True, db=self._stores_db) as txn:
            txn.put(row.store_id, msgspec.msgpack.encode(row))
        fill_lmdb(self._env, self._path, PAGES_AHEAD)
        self.stores[row.store_id] = row

    def record_destination(self, row: DestinationRow) -> None:
        """Durable on return."""
        with self._env.begin(write=True, db=self._destinations_db) as txn:
            txn.put(_key(row.destination), msgspec.msgpack.encode(row))
        fill_lmdb(self._env, self._path, PAGES_AHEAD)
        self.destinations[row.destination] = row

    def forget_destination(self, destination: Destination) -> None:
        """Durable on return."""
        with self._env.begin(write=True, db=self._destinations_db) as txn:
            txn.delete(_key(destination))
        fill_lmdb(self._env, self._path, PAGES_AHEAD)
        self.destinations.pop(destination, None)


def _key(destination: Destination) -> bytes:
    # Names may be longer than LMDB's keys.
    return hashlib.sha256(str(destination).encode()).digest()
