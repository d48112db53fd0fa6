"""The placement record: which store holds which destination (invariant 6, rules D1 and X5).

LMDB, in `placement.mdb`. A row is durable before its destination's first record, and goes only with its data. It is
created under another name, synced and renamed. What several threads record at once is one commit; a row that goes
leaves the file with the next commit, within a second or when the record is closed. If it is lost, reconcile.py records
the stores anew that lie where the configuration has them.

    stores         store id                ->  path, kind, the configuration's name for it
    destinations   hash of the destination ->  kind, name, store id, pattern
    meta           "version"               ->  the version, in digits
                   "sum"                   ->  the transaction that wrote this row, the sum of all rows' digests

LMDB has no checksums, and a damaged file may kill the process that opens it. So what the file holds is read without
LMDB (lmdb_file.py), compared with its sum, and given to LMDB only if all of it is right. The last commit and the one
before it are: of one that was lost by a flipped bit in a meta page, the other one tells.
"""

from __future__ import annotations

import hashlib
import logging
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import lmdb
import msgspec

from ..adapters.background import shared
from ..adapters.files import FILE_MODE, FULL, create_lmdb, fill_lmdb, open_lmdb, refused
from ..adapters.lmdb_file import Commit, Rows, read_commits
from ..adapters.lmdb_format import LmdbDamagedError
from ..policies.destination import Destination, Kind
from ..policies.errors import AnabranchError, ClosedError, CorruptionError, PlacementError, StoreLockedError

log = logging.getLogger(__name__)

VERSION: Final = 2
"""Version 1 had no sum."""
FLUSH_SECONDS: Final = 1.0
"""After so long rows that are gone leave the file, if no other commit has taken them along."""
MAP_BYTES: Final = 1 << 30
PAGES_AHEAD: Final = 64
"""More than the change of one row takes."""
SUM: Final = struct.Struct(">QQ")
"""Transaction, sum."""
assert SUM.size == 16
_SUM_END: Final = 1 << 64
_TABLES: Final = (b"stores", b"destinations", b"meta")
_WAY_OUT: Final = (
    "put the file aside and open again: the stores that lie where the configuration has them are then recorded anew, "
    "with all they hold. Where one was moved since, a backup of the file is better"
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


class _Batch:
    """Rows that one caller wants in the file, and what came of it."""

    __slots__ = ("committed", "destinations", "gone", "stores")

    def __init__(
        self,
        stores: Sequence[StoreRow] = (),
        destinations: Sequence[DestinationRow] = (),
        gone: Sequence[bytes | Destination] = (),
    ) -> None:
        """`gone` says whose rows are to leave it: ids of stores, and destinations."""
        self.stores, self.destinations, self.gone = stores, destinations, gone
        self.committed = False

    @property
    def grows(self) -> bool:
        """Whether there is more in the file after it."""
        return bool(self.stores or self.destinations)

    def __len__(self) -> int:
        return len(self.stores) + len(self.destinations) + len(self.gone)


class DestinationsTable:
    """The record, open. `_lock` guards the file; the two tables are read by anybody, and a row comes into them only
    after its commit. The constructor touches nothing."""

    def __init__(self, path: Path, file_mode: int = FILE_MODE, require_lock: Callable[[], None] = lambda: None) -> None:
        """`require_lock` raises StoreFailedError if the file may be another's."""
        self._path, self._file_mode, self._require_lock = path, file_mode, require_lock
        self._env: Any = None
        self._lock = threading.Lock()
        self.stores: dict[bytes, StoreRow] = {}
        self.destinations: dict[Destination, DestinationRow] = {}
        self._by_path: dict[str, bytes] = {}
        self._waiting: deque[_Batch] = deque()
        """What the next commit takes together."""
        self._leaving: dict[bytes | Destination, None] = {}
        """Ids of stores and destinations that are in no table any more, and in the file still."""
        self._flush_due = False

    def open(self) -> None:
        """Read all rows. Raises CorruptionError, and PlacementError for a record of another version."""
        if not self._path.exists():
            create_lmdb(self._path, MAP_BYTES, self._file_mode)
        try:
            version, total = self._read()
            self._env = self._open_env()
            with suppress(OSError):  # a full disk; what was kept for that is there
                fill_lmdb(self._env, self._path, PAGES_AHEAD)
            self._dbs = {name: self._env.open_db(name) for name in _TABLES}
            if version != VERSION:
                self._begin(total)
        except LmdbDamagedError as error:
            raise self._damaged(str(error), error.offset) from error
        except (lmdb.Error, msgspec.MsgspecError, ValueError) as error:
            raise self._damaged(str(error)) from error

    def _damaged(self, reason: str, offset: int = 0) -> CorruptionError:
        return CorruptionError(str(self._path), offset, f"the placement record is damaged: {reason}", _WAY_OUT)

    def _read(self) -> tuple[int, int]:
        """Set the rows to those of the file; returns its version, 0 for a new one, and the sum of its rows."""
        last, before = read_commits(self._path)
        version = _version(last)
        if version > VERSION:
            raise PlacementError(
                f"{self._path} has format version {version}; this program reads {VERSION}: use the version that wrote "
                "it"
            )
        for commit in (last, before):
            if _version(commit) == VERSION:
                _require_sum(commit)
        if _version(before) > version:
            raise LmdbDamagedError(0, "the commit before the last is of a later version")
        stores = [msgspec.msgpack.decode(row, type=StoreRow) for _, row in last.tables.get(b"stores", [])]
        rows = [msgspec.msgpack.decode(row, type=DestinationRow) for _, row in last.tables.get(b"destinations", [])]
        self.stores = {row.store_id: row for row in stores}
        self._by_path = {row.path: row.store_id for row in stores}
        self.destinations = {row.destination: row for row in rows}
        for row in rows:
            if row.store_id not in self.stores:
                raise LmdbDamagedError(0, f"{row.destination} is in store {row.store_id.hex()}, which it does not have")
        return version, _sum(last)

    def _open_env(self) -> Any:
        try:
            return open_lmdb(self._path, MAP_BYTES, max_dbs=len(_TABLES))
        except lmdb.Error as error:
            if "already open in this process" in str(error):  # nothing is wrong with it
                raise StoreLockedError(
                    f"{self._path} is open already, by this process; close the router that has it, and whatever it "
                    "gave out, first"
                ) from error
            raise

    def _begin(self, total: int) -> None:
        """Write the sum for the first time. Before it the tables of a new file are empty."""
        with self._env.begin(write=True) as txn:
            txn.put(b"version", str(VERSION).encode(), db=self._dbs[b"meta"])
            txn.put(b"sum", SUM.pack(txn.id(), total), db=self._dbs[b"meta"])

    def close(self) -> None:
        """Idempotent."""
        try:
            self.flush()
        except (AnabranchError, OSError, lmdb.Error) as error:  # the store's next opening finds them out
            log.warning("%d rows that are gone stay in %s: %s", len(self._leaving), self._path, error)
        with self._lock:
            if self._env is not None:
                self._env.close()
            self._env = None

    def store_at(self, path: str) -> StoreRow | None:
        """The store that is recorded at a path."""
        store_id = self._by_path.get(path)
        return self.stores.get(store_id) if store_id is not None else None

    def destinations_in(self, store_id: bytes) -> list[Destination]:
        """Those that are recorded in a store."""
        return [held.destination for held in list(self.destinations.values()) if held.store_id == store_id]

    def record_store(self, row: StoreRow, destinations: Sequence[DestinationRow] = ()) -> None:
        """The store, and what it holds already, as one. Durable on return."""
        self._commit(_Batch([row], destinations))

    def record_destinations(self, rows: Sequence[DestinationRow]) -> None:
        """Durable on return."""
        self._commit(_Batch(destinations=rows))

    def forget_store(self, store_id: bytes) -> None:
        """Durable on return. Only for a store that no destination is recorded in."""
        self._commit(_Batch(gone=[store_id]))

    def forget_destination(self, destination: Destination) -> None:
        """Durable on return."""
        self._commit(_Batch(gone=[destination]))

    def let_go(self, gone: bytes | Destination) -> None:
        """The row of a store, by its id, or of a destination goes at once from the tables, and soon from the file."""
        if gone in self.stores or gone in self.destinations:
            self._leaving[gone] = None  # first: Ctrl-C may come between
            self._remove(gone)
            if not self._flush_due:
                shared().schedule_while_alive(FLUSH_SECONDS, self._flush_in_background)
                self._flush_due = True  # not before: Ctrl-C between the two would leave it due for ever

    def flush(self) -> None:
        """The file is without the rows that are gone, on return."""
        if self._leaving and self._env is not None:
            self._commit(_Batch())

    def _flush_in_background(self) -> None:
        self._flush_due = False
        try:
            self.flush()
        except (AnabranchError, OSError, lmdb.Error) as error:
            log.warning("rows that are gone stay in %s for now: %s", self._path, error)

    def _remove(self, gone: bytes | Destination) -> None:
        if isinstance(gone, Destination):
            self.destinations.pop(gone, None)
            return
        row = self.stores.pop(gone, None)
        if row is not None and self._by_path.get(row.path) == gone:
            self._by_path.pop(row.path)

    def _commit(self, batch: _Batch) -> None:
        """Whoever comes first commits what all others want by then: they wait for the disk together."""
        self._waiting.append(batch)
        try:
            with self._lock:
                if not batch.committed:
                    if self._env is None:
                        raise ClosedError("the router is closed; open it with anabranch.open(...)")
                    self._require_lock()
                    waiting = [waiting for waiting in list(self._waiting) if not waiting.committed]
                    self._write(self._affordable(batch, waiting))
        finally:
            with suppress(ValueError):  # after an error, or Ctrl-C: the next one writes the others
                self._waiting.remove(batch)

    def _affordable(self, own: _Batch, batches: Sequence[_Batch]) -> Sequence[_Batch]:
        """All of them, or on a full disk those that need no room. With the lock held. Raises StoreFullError if `own`,
        the caller's, needs some."""
        rows = len(self._leaving) + sum(map(len, batches))
        try:
            fill_lmdb(self._env, self._path, PAGES_AHEAD + (2 * rows if rows > 1 else 0))
        except OSError as error:
            if error.errno not in FULL:
                raise
            if own.grows:
                raise refused(f"{self._path} cannot grow: {error.strerror}", error, ". Nothing was written") from error
            return [batch for batch in batches if not batch.grows]  # PAGES_AHEAD were kept for these (rule J10)
        return batches

    def _write(self, batches: Sequence[_Batch]) -> None:
        """All of them in one transaction. With the lock held."""
        leaving = list(self._leaving)
        with self._env.begin(write=True) as txn:
            change = _Change(txn, self._dbs)
            for gone in leaving:
                if gone not in self.stores and gone not in self.destinations:  # else it was recorded again
                    change.remove(gone)
            for batch in batches:
                for gone in batch.gone:
                    change.remove(gone)
                for store in batch.stores:
                    change.put(b"stores", store.store_id, msgspec.msgpack.encode(store))
                for held in batch.destinations:
                    change.put(b"destinations", _key(held.destination), msgspec.msgpack.encode(held))
            change.end()
        for gone in leaving:
            self._leaving.pop(gone, None)
        for batch in batches:
            self._take(batch)
            batch.committed = True

    def _take(self, batch: _Batch) -> None:
        """Into the tables."""
        for gone in batch.gone:
            self._remove(gone)
        self.destinations.update((held.destination, held) for held in batch.destinations)
        for row in batch.stores:
            before = self.stores.get(row.store_id)
            if before is not None and before.path != row.path:
                self._by_path.pop(before.path, None)
            self._by_path[row.path] = row.store_id
            self.stores[row.store_id] = row


class _Change:
    """Rows that change together, and the sum with them."""

    def __init__(self, txn: Any, dbs: dict[bytes, Any]) -> None:
        self._txn, self._dbs = txn, dbs
        # Read back each time: Ctrl-C may have struck between a commit and whatever we would remember of it.
        self._sum: int = SUM.unpack(txn.get(b"sum", db=dbs[b"meta"]))[1]

    def put(self, table: bytes, key: bytes, row: bytes) -> None:
        self._drop(table, key)
        self._txn.put(key, row, db=self._dbs[table])
        self._sum = (self._sum + _digest(table, key, row)) % _SUM_END

    def remove(self, gone: bytes | Destination) -> None:
        """The row of a store, by its id, or of a destination."""
        table, key = (b"destinations", _key(gone)) if isinstance(gone, Destination) else (b"stores", gone)
        self._drop(table, key)
        self._txn.delete(key, db=self._dbs[table])

    def _drop(self, table: bytes, key: bytes) -> None:
        before = self._txn.get(key, db=self._dbs[table])
        if before is not None:
            self._sum = (self._sum - _digest(table, key, before)) % _SUM_END

    def end(self) -> None:
        """Before the commit."""
        self._txn.put(b"sum", SUM.pack(self._txn.id(), self._sum), db=self._dbs[b"meta"])


def _digest(table: bytes, key: bytes, row: bytes) -> int:
    """64 bits of one row; the sum of all tells whether any is another one, without reading the others."""
    digest = hashlib.blake2b(b"%b %d %b" % (table, len(key), key) + row, digest_size=8).digest()
    return int.from_bytes(digest, "big")


def _sum(commit: Commit) -> int:
    return sum(_digest(table, *row) for table in _TABLES[:2] for row in commit.tables.get(table, [])) % _SUM_END


def _meta(commit: Commit) -> dict[bytes, bytes]:
    rows: Rows = commit.tables.get(b"meta", [])
    return dict(rows)


def _version(commit: Commit) -> int:
    """0 where nothing was committed yet that counts."""
    text = _meta(commit).get(b"version")
    if text is None:
        if any(commit.tables.values()):
            raise LmdbDamagedError(0, "it says no version")
        return 0
    if not text.isdigit():
        raise LmdbDamagedError(0, f"its version is {text!r}")
    return int(text)


def _require_sum(commit: Commit) -> None:
    """Raise unless the rows are those that were written, in the transaction that the file says."""
    written = _meta(commit).get(b"sum", b"")
    if set(commit.tables) != set(_TABLES) or written != SUM.pack(commit.transaction, _sum(commit)):
        raise LmdbDamagedError(0, f"the rows of transaction {commit.transaction} do not have the sum that is written")


def _key(destination: Destination) -> bytes:
    # Names may be longer than LMDB's keys.
    return hashlib.sha256(str(destination).encode()).digest()
