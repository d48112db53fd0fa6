"""The placement record: which store holds which destination (invariant 6, rules D1 and X9).

`placement.records`, a RecordFile (wal/files/record_file.py) of what was recorded and what has gone, in order. A row is
durable before its destination's first record, and goes only with its data. Rows that several threads record at once are
one commit; a row that goes leaves the file with the next commit, within a second or when the record is closed. If the
file is lost, reconcile.py records the stores anew that lie where the configuration has them.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import msgspec

from ...adapters.system.background import CoalescedJob
from ...adapters.system.files import FILE_MODE, FULL, refused
from ...adapters.wal.files.record_file import DamagedError, RecordFile
from ...policies.errors import AnabranchError, CorruptionError, PlacementError, router_closed
from ...policies.names.destination import Destination, Kind

log: logging.Logger = logging.getLogger(__name__)

RECORD: Final = "placement.records"
"""The file's name."""
VERSION: Final = 3
FLUSH_SECONDS: Final = 1.0
"""Seconds after which rows that are gone leave the file, if no other commit has taken them along."""
_WAY_OUT: Final = (
    "move the file away and open again: the stores that lie where the configuration has them are then recorded anew, "
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


class Changes(msgspec.Struct, frozen=True, array_like=True):
    """The rows that one caller records, or lets go of. A record of the file, in msgpack, is a list of these."""

    stores: Sequence[StoreRow] = ()
    destinations: Sequence[DestinationRow] = ()
    gone_stores: Sequence[bytes] = ()
    gone: Sequence[tuple[int, str]] = ()
    """Kinds and names of destinations."""

    @classmethod
    def without(cls, gone: Iterable[bytes | Destination]) -> Changes:
        """Return changes by which the rows of stores, by their ids, and of destinations leave."""
        names = [(one.kind.value, one.name) for one in gone if isinstance(one, Destination)]
        return cls(gone_stores=[one for one in gone if isinstance(one, bytes)], gone=names)

    @property
    def grows(self) -> bool:
        """True if they add to the file."""
        return bool(self.stores or self.destinations)


_decoder: Final = msgspec.msgpack.Decoder(list[Changes])


class _Batch:
    """One caller's changes to the file, and whether they are committed."""

    __slots__ = ("changes", "committed", "still", "wanted")

    def __init__(self, changes: Changes, still: Callable[[DestinationRow], bool] | None = None) -> None:
        """Make a batch. `still`: for destinations that have no row yet, whether one of its rows is still wanted. Raises
        DestinationError for a name that is none."""
        for row in changes.destinations:
            row.destination  # noqa: B018  before any byte is written
        self.wanted = self.changes = changes
        self.still = still
        self.committed = False


class DestinationsTable:
    """The open record. `_lock` guards the file; the two tables are read by anybody, and a row comes into them only
    after its commit. The constructor touches nothing."""

    def __init__(self, path: Path, file_mode: int = FILE_MODE, require_lock: Callable[[], None] = lambda: None) -> None:
        """Make a table that is not open. `require_lock` raises StoreFailedError if the file may be another's."""
        self._path, self._require_lock = path, require_lock
        self._file = RecordFile(path, VERSION, file_mode)
        self._is_open = False
        self._lock = threading.RLock()
        self._writing = False
        """True while the lock's owner is at the file: another call of it, in a signal handler, is refused."""
        self.stores: dict[bytes, StoreRow] = {}
        self.destinations: dict[Destination, DestinationRow] = {}
        self.on_record: Callable[[Iterable[Destination]], object] = lambda destinations: None
        """Called with the destinations that get a row, before they have it and after: a thread that Ctrl-C strikes in
        between has said it all the same. With the lock held: it must not wait."""
        self._by_path: dict[str, bytes] = {}
        self._waiting: deque[_Batch] = deque()
        """The batches that the next commit takes together."""
        self._leaving: dict[bytes | Destination, None] = {}
        """Ids of stores and destinations that are in no table any more, and in the file still. `_gone` finds those: one
        that is just leaving, or was recorded again meanwhile, is in a table."""

    def open(self) -> None:
        """Read all rows. Raises CorruptionError, and PlacementError for a record of another version."""
        self._flush_job = CoalescedJob(self._flush_in_background)
        old = self._path.with_name("placement.mdb")
        if old.is_file() and not self._path.exists():
            raise PlacementError(
                f"{old} has a format version of 2 or less; this program reads {self._path.name}, version {VERSION}: "
                "use the version that wrote it. Or, if all stores lie where the configuration has them, move the file "
                "away and open again: they are then recorded anew, with all they hold"
            )
        self._file.create()
        try:
            version, records = self._file.open()
            if version != VERSION:
                raise PlacementError(
                    f"{self._path} has format version {version}; this program reads {VERSION}: use the version that "
                    "wrote it"
                )
            self.stores, self.destinations, self._by_path = {}, {}, {}
            for record in records:
                for changes in _decoder.decode(record):
                    self._take(changes)
            for row in self.destinations.values():
                if row.store_id not in self.stores:
                    reason = f"{row.destination} is in store {row.store_id.hex()}, which it does not have"
                    raise DamagedError(0, reason)
            self._is_open = True
        except DamagedError as error:
            raise self._damaged(str(error), error.offset) from error
        except (msgspec.MsgspecError, ValueError) as error:
            raise self._damaged(str(error)) from error
        finally:
            if not self._is_open:
                self._file.close()

    def _damaged(self, reason: str, offset: int = 0) -> CorruptionError:
        return CorruptionError(str(self._path), offset, f"the placement record is damaged: {reason}", _WAY_OUT)

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Commit nothing to the file while the block runs."""
        with self._lock:
            self._refuse_reentry()
            yield

    def close(self) -> None:
        """Close the record. Idempotent."""
        try:
            self.flush()
        except (AnabranchError, OSError) as error:  # the store's next opening finds them out
            log.warning("%d rows that are gone stay in %s: %s", len(self._leaving), self._path, error)
        with self._lock:
            self._refuse_reentry()
            self._is_open = False
            self._file.close()

    def store_at(self, path: str) -> StoreRow | None:
        """Return the store that is recorded at a path."""
        store_id = self._by_path.get(path)
        return self.stores.get(store_id) if store_id is not None else None

    def destinations_in(self, store_id: bytes) -> list[Destination]:
        """Return the destinations that are recorded in a store."""
        return [held.destination for held in list(self.destinations.values()) if held.store_id == store_id]

    def record_store(self, row: StoreRow, destinations: Sequence[DestinationRow] = ()) -> None:
        """Record a store, and what it holds already, as one. Durable on return."""
        self._commit(Changes([row], destinations))

    def record_destinations(self, rows: Sequence[DestinationRow]) -> None:
        """Record destinations. Durable on return."""
        self._commit(Changes(destinations=rows))

    def record_new(self, rows: Sequence[DestinationRow], still: Callable[[DestinationRow], bool]) -> None:
        """Record those of these destinations that have no row by then, if `still` returns True for that row. Durable on
        return."""
        self._commit(Changes(destinations=rows), still)

    def forget_store(self, store_id: bytes) -> None:
        """Remove the row of a store that no destination is recorded in. Durable on return."""
        self._commit(Changes(gone_stores=[store_id]))

    def forget_destination(self, destination: Destination) -> None:
        """Remove the row of a destination. Durable on return."""
        self._commit(Changes.without([destination]))

    def let_go(self, gone: bytes | Destination) -> None:
        """Remove the row of a store, by its id, or of a destination: at once from the tables, and soon from the
        file."""
        if gone in self.stores or gone in self.destinations:
            self._leaving[gone] = None  # first: Ctrl-C may come between
            self._remove(gone)
            self._flush_job.schedule(FLUSH_SECONDS)

    def flush(self) -> None:
        """Remove from the file the rows that are gone. Durable on return."""
        if self._is_open and self._gone():
            self._commit(Changes())

    @property
    def has_leaving(self) -> bool:
        """Return whether rows that are gone are in the file still."""
        return bool(self._gone())

    def _flush_in_background(self) -> None:
        try:
            self.flush()
        except (AnabranchError, OSError) as error:
            log.warning("rows that are gone stay in %s for now: %s", self._path, error)

    def _remove(self, gone: bytes | Destination) -> None:
        if isinstance(gone, Destination):
            self.destinations.pop(gone, None)
            return
        row = self.stores.pop(gone, None)
        if row is not None and self._by_path.get(row.path) == gone:
            self._by_path.pop(row.path)

    def _commit(self, changes: Changes, still: Callable[[DestinationRow], bool] | None = None) -> None:
        """Commit changes. The first caller commits what all others want by then: they wait for the disk together."""
        batch = _Batch(changes, still)
        self._waiting.append(batch)
        try:
            with self._lock:
                self._refuse_reentry()
                if not batch.committed:
                    if not self._is_open:
                        raise router_closed()
                    self._require_lock()
                    waiting = [waiting for waiting in list(self._waiting) if not waiting.committed]
                    together = self._without_known(batch, waiting)
                    try:
                        self._writing = True
                        self._write(self._affordable(batch, together))
                    finally:
                        self._writing = False
        except DamagedError as error:  # after an error the file is read again
            raise self._damaged(str(error), error.offset) from error
        finally:
            with suppress(ValueError):  # after an error, or Ctrl-C: the next one writes the others
                self._waiting.remove(batch)

    def _without_known(self, own: _Batch, batches: Sequence[_Batch]) -> list[_Batch]:
        """Return those of these batches that can be written together, `own` among them, without the rows of new
        destinations that have a row by now, or are to be elsewhere. With the lock held."""
        taken: list[_Batch] = []
        coming: set[Destination] = set()
        for batch in sorted(batches, key=lambda one: one is not own):
            rows = batch.wanted.destinations
            names = {row.destination for row in rows}
            if batch.still is not None:
                if not coming.isdisjoint(names):
                    continue  # it looks again once these are written, if they are
                rows = [row for row in rows if row.destination not in self.destinations and batch.still(row)]
                batch.changes = Changes(destinations=rows)
            coming |= names
            taken.append(batch)
        return taken

    def _refuse_reentry(self) -> None:
        """Raise instead of writing in the middle of a write (rule G3). With the lock held."""
        if self._writing:
            raise RuntimeError(
                f"{self._path} was called from a signal handler that interrupted its own write; "
                "do it after the handler, or in another thread"
            )

    def _affordable(self, own: _Batch, batches: Sequence[_Batch]) -> Sequence[_Batch]:
        """Return all of these batches, or on a full disk those that need no room. With the lock held. Raises
        StoreFullError if `own`, the caller's, needs some."""
        if not any(batch.changes.grows for batch in batches):
            return batches  # there is room for these (rule J10)
        try:
            self._file.reserve(len(_encoded(self._changes(batches, self._gone()))))
        except OSError as error:
            if error.errno not in FULL:
                raise
            if own.changes.grows:
                raise refused(f"{self._path} cannot grow: {error.strerror}", error, ". Nothing was written") from error
            return [batch for batch in batches if not batch.changes.grows]
        return batches

    def _gone(self) -> list[bytes | Destination]:
        """Return the ids and destinations that are in no table, and in the file still."""
        # A copy: other threads let go meanwhile.
        return [one for one in list(self._leaving) if one not in self.stores and one not in self.destinations]

    def _changes(self, batches: Sequence[_Batch], gone: Iterable[bytes | Destination]) -> list[Changes]:
        """Return the changes of one commit: first of all what is gone, for a batch may record it again."""
        return [Changes.without(gone), *(batch.changes for batch in batches)]

    def _write(self, batches: Sequence[_Batch]) -> None:
        """Write all batches in one commit. With the lock held."""
        gone = self._gone()  # once: who lets go meanwhile is not in what is written
        changes = self._changes(batches, gone)
        record = _encoded(changes)
        if self._file.is_crowded(len(record)):
            self._file.replace(_encoded([self._after(changes)]))
        else:
            self._file.append(record)
        for one in gone:
            self._leaving.pop(one, None)
        for batch in batches:
            self._take(batch.changes)
            batch.committed = True

    def _after(self, changes: Sequence[Changes]) -> Changes:
        """Return all rows, once these changes are made."""
        after = DestinationsTable(self._path)
        after.stores, after.destinations = dict(self.stores), dict(self.destinations)
        for some in changes:
            after._take(some)
        return Changes(list(after.stores.values()), list(after.destinations.values()))

    def _take(self, changes: Changes) -> None:
        """Take changes into the tables."""
        for store_id in changes.gone_stores:
            self._remove(store_id)
        for kind, name in changes.gone:
            self._remove(Destination(Kind(kind), name))
        rows = {row.destination: row for row in changes.destinations}
        self.on_record(rows)
        self.destinations.update(rows)
        self.on_record(rows)
        for store in changes.stores:
            before = self.stores.get(store.store_id)
            if before is not None and before.path != store.path:
                self._by_path.pop(before.path, None)
            self._by_path[store.path] = store.store_id
            self.stores[store.store_id] = store


def _encoded(changes: list[Changes]) -> bytes:
    return msgspec.msgpack.encode(changes)
