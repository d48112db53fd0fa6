"""SqlBackend: the tables of a database as a backend of the core (core/backend).

    writing    what a plan does to the tables, in one database transaction   (writing.py)
    effects    what it changes of the counts in memory                       (effects.py)
    reading    where messages are, and what is in them                       (reading.py)
    database   connections, and what errors mean                             (database/)

U1  STORE.BATCH counts the database transactions that wrote. Each says which one it is, so that one whose COMMIT was cut
    off can be looked up, and somebody else's is noticed (schema.py, S3).
U2  What was cut off before its COMMIT, or met another transaction, has done nothing, and is written once more.
U3  A database that cannot be reached fails the calls, not the store. The store fails for good if a disk of ours failed,
    if it has lost its lease, or if somebody else has written to its tables.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from time import monotonic

from sqlalchemy import ColumnElement, select
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import SQLAlchemyError

from ...policies.config.options import SqlOptions
from ...policies.errors import AnabranchError, OutcomeUnknownError, StoreFailedError, StoreFullError
from ..core.backend import BackendStats, Found, Host, NotTakenError, Settings, WrittenBackend
from ..core.operations.branches import Prepare
from ..core.operations.changes import Change
from ..core.operations.plan import Plan
from ..core.record.place import Place
from ..core.state.leases import Channel, DestinationState, SubscriptionState
from ..core.state.states import Catalog
from ..core.store_types import Progress
from ..system.durations import DurationCounter
from ..system.files import FILE_MODE
from . import removals
from .checking import violations
from .copying import SqliteCopier
from .database import create_tables, dialects
from .database.connections import cut_off, database_url, on_connection, open_engine, open_single, shown_url
from .database.errors import Database, is_cut_off
from .database.lease import Lease
from .database.schema import schema
from .database.statements import Statements, keepalive_statement
from .directory import StoreDirectory
from .duplicates import DuplicateRows
from .effects import Effects
from .large_rows import LargeRows
from .loading import Loader
from .outbox import TAKING_PART, Outbox
from .reading import Reading
from .writing import LAST, Write


def _descriptors(options: SqlOptions) -> int:
    """Return how many files and sockets a store keeps open: its lock, its lease's connection, and two more connections.
    One thread writes on the first of these; another reads on the second. In SQLite each connection is a file and a
    write-ahead log; all of them share a third file."""
    leased = options.lease_expiration is not None
    if options.url is None:
        return 1 + 2 * (2 + leased) + 1
    return 1 + max(2, options.pool_min) + leased


class SqlBackend(WrittenBackend):
    """The tables of one store. The thread that writes calls `write` and `took_effect`."""

    kind = "sql"
    volatile = False

    def __init__(self, name: str, directory: Path, options: SqlOptions, index_directory: Path | None = None) -> None:
        """Make the backend of a closed store. `index_directory` means nothing here: the database has its own."""
        self.name = name
        self.options = options
        self.settings: Settings = Settings.of(
            options,
            max_bytes=options.max_bytes,
            batch_changes_max=options.batch_operations_max,
            gather_seconds=options.sync_period,
            outcome_timeout=options.outcome_timeout,
        )
        self.shared: bool = self.is_shared(options)
        self.descriptors: int = _descriptors(options)
        self._directory = StoreDirectory(name, directory, options.file_mode, self._lose_directory)
        self._host: Host | None = None
        self.large_storage: LargeRows
        self.outbox: Outbox | None = None
        self._engine: Engine | None = None
        self._lease: Lease | None = None
        self._stopped: StoreFailedError | None = None
        self._write_lock = threading.Lock()
        """The lock that is held while something is written: SQLite is made smaller when nothing is."""

    @classmethod
    def check_options(cls, options: SqlOptions) -> None:
        """Raise ConfigError and MissingExtraError for what `create` would refuse before it connects."""
        tables = schema(options.schema_prefix, options.table_names)
        Statements(tables, options.statements)
        keepalive_statement(options)
        open_single(options, Path()).dispose()

    @classmethod
    def create(cls, name: str, directory: Path, options: SqlOptions) -> bytes:
        tables = schema(options.schema_prefix, options.table_names)
        Statements(tables, options.statements)
        keepalive_statement(options)

        def fill(path: Path, store_id: bytes) -> bytes:
            dialects.make_sqlite_file(database_url(options, path), options.file_mode or FILE_MODE)
            engine = open_engine(options, path)
            try:
                database = Database(name, engine)
                made = create_tables.prepare(database, tables, options, store_id)
                database.require_keepalive(options)
                return made
            finally:
                engine.dispose()

        return StoreDirectory(name, directory, options.file_mode).create(fill)

    @classmethod
    def is_contained(cls, options: SqlOptions) -> bool:
        return options.url is None

    @classmethod
    def is_shared(cls, options: SqlOptions) -> bool:
        return options.lease_expiration is not None

    @classmethod
    def identify(cls, directory: Path) -> bytes | None:
        return StoreDirectory("", directory).identify()

    @classmethod
    def peek(cls, directory: Path, options: SqlOptions, store_id: bytes, transaction: bytes) -> bool | None:
        tables = schema(options.schema_prefix, options.table_names)
        engine = open_single(options, directory)
        dialects.require_sqlite_file(engine.url)

        def has(connection: Connection, column: ColumnElement[str], value: bytes) -> bool:
            found = connection.execute(select(column).where(column == value.hex())).first() is not None
            connection.rollback()  # the next question is to be answered anew, whatever the isolation
            return found

        def ask(connection: Connection) -> bool | None:
            if not has(connection, tables.store.c.storeid, store_id):
                raise StoreFailedError(f"the database {shown_url(engine.url)} holds no store {store_id.hex()}")
            # In this order: with the commit the row goes from the one to the other.
            is_prepared = has(connection, tables.xalog.c.xid, transaction)
            return has(connection, tables.committed.c.xid, transaction) or (None if is_prepared else False)

        try:
            return on_connection(engine, ask)
        except SQLAlchemyError as error:
            raise Database(directory.name, engine).error(error) from None
        finally:
            engine.dispose()

    # Opening and closing

    def open(self, host: Host, progress: Progress | None) -> tuple[bytes, Found]:
        store_id = self._directory.lock()
        self._host, self._stopped = host, None
        return store_id, self._open(host, store_id, progress)

    def _open(self, host: Host, store_id: bytes, progress: Progress | None) -> Found:
        options = self.options
        tables = schema(options.schema_prefix, options.table_names)
        self._statements = statements = Statements(tables, options.statements)
        self._engine = open_engine(options, self._directory.path)
        self._database = database = Database(self.name, self._engine)
        create_tables.require(database, tables, options, store_id)
        database.require_keepalive(options)
        if options.lease_expiration is not None:
            self._lease = Lease(
                open_single(options, self._directory.path), statements, store_id, options,
                f"store {self.name!r}", self._directory.path, self._lose,
            )  # fmt: skip
            self._lease.acquire()
            self.guard: Callable[[], None] | None = self._lease.require
        self._owner = store_id.hex()
        self.large_storage = LargeRows(database, statements, tables.large.fullname)
        self._reading = Reading(database, statements, host.catalog, options.priorities)
        if self._engine.dialect.name in TAKING_PART:
            self.outbox = Outbox(self.name, database, statements, tables, options.chunk_size)
        self._ids = DuplicateRows(options.duplicate_window)
        try:
            removals.complete(database, statements)
            loader, found = on_connection(self._engine, partial(self._load, host.catalog, progress))
        except SQLAlchemyError as error:
            raise database.error(error) from None
        self._batch = self._opened_at = loader.batch
        self._commits = DurationCounter()
        """How long commits take."""
        self._effects: Effects | None = None
        for number, key in loader.ids:
            self._ids.load(number, key)
        self._ids.last_number = loader.last_id
        self._branches = loader.branches
        self._branch_rows = itertools.count(min(self._branches.values(), default=0) - 1, -1)
        """IDs of new rows in XALOG, below 0: CHUNKS has parts of rows in MESSAGES too."""
        self._reading.last_seq, self._reading.next_expiry = found.last_seq, loader.next_expiry
        return found

    def _load(self, catalog: Catalog, progress: Progress | None, connection: Connection) -> tuple[Loader, Found]:
        assert self._engine is not None
        where = shown_url(self._engine.url)
        loader = Loader(connection, self._statements, catalog, self.options.priorities, where)
        return loader, loader.load(self._owner, progress)

    def close(self, clean: bool) -> None:
        if self._lease is not None:
            self._lease.release()
            self._lease = None
        self.guard = None
        self.outbox = None
        if self._engine is not None:
            self._engine.pool.dispose()  # the engine's own would make another, and ask for a logger: see connections.py
        self._directory.unlock()

    def require_owned(self) -> None:
        self._directory.require_lock()
        if self._lease is not None:
            self._lease.require()

    def _lose_directory(self, error: StoreFailedError) -> None:
        """Fail the store: the lock's file is gone, or is another's, and so may be the directory."""
        self._lose(str(error))

    def _lose(self, reason: str) -> None:
        """Fail the store and cut off its connections: its lease or directory was lost against our will."""
        self._fail(StoreFailedError(reason))
        if self._engine is not None:
            cut_off(self._engine)  # or those whom the database keeps waiting would hear of it much later

    def _fail(self, cause: StoreFailedError) -> StoreFailedError:
        if self._host is not None:
            self._stopped = cause
            self._host.fail(cause)
        return cause

    # Writing

    def write(self, plan: Plan) -> None:
        if plan.last_seq > LAST:
            raise StoreFullError(
                f"store {self.name!r} has given out all its ids, up to 2^63 - 1: receive its messages, and make a new "
                "store for later ones. Nothing was sent"
            )
        for last in (False, True):
            try:
                self._write(plan)
                return
            except SQLAlchemyError as error:
                if self._stopped is not None:  # its connections were cut off
                    raise self._stopped from None
                if not last and (is_cut_off(error) or dialects.is_collision(error)):
                    continue
                raise self._refusal(error) from None

    def _write(self, plan: Plan) -> None:
        """Write a plan in one transaction. Raises SQLAlchemyError if nothing took effect."""
        committing: Effects | None = None
        options = self.options

        def write(connection: Connection) -> Effects:
            nonlocal committing
            written = Write(
                connection, self._statements, options.chunk_size, options.priorities, self._branches,
                self._branch_rows,
            )  # fmt: skip
            written.run_plan(plan, self._ids)
            self._claim(connection, plan)
            committing = written.effects
            began = monotonic()
            connection.commit()
            self._commits.count(monotonic() - began)
            return written.effects

        try:
            with self._write_lock:
                effects = self._database.write(write)
        except SQLAlchemyError as error:
            if committing is None:
                raise
            # Its connection is closed by now: SQLite's holds no lock any more.
            self._unknown = committing
            raise self._outcome_unknown(error) from self._refusal(error)
        self._took(effects)

    def _claim(self, connection: Connection, plan: Plan) -> None:
        """Say which transaction this is (U1). Raises StoreFailedError, for good, if it is not its turn."""
        assert self._host is not None
        values = {
            "owner": self._owner, "before": self._batch, "now": self._batch + 1, "last": plan.last_seq,
            "number": self._host.catalog.last_number,
        }  # fmt: skip
        if connection.execute(self._statements["update.store"], values).rowcount != 1:
            raise self._fail(
                StoreFailedError(
                    f"somebody else has written to the tables of store {self.name!r}: another process owns them, or "
                    "they were restored from a backup"
                )
            )
        self._require_lease()

    def _require_lease(self) -> None:
        """Raise StoreFailedError, for good, if the lease is not ours for certain."""
        if self._lease is not None:
            try:
                self._lease.require()
            except StoreFailedError as error:
                raise self._fail(error) from None

    def _took(self, effects: Effects) -> None:
        """Note that a database transaction has taken effect. Ctrl-C cannot strike here: the thread that writes is at
        it."""
        self._batch += 1
        self._effects = effects

    def _refusal(self, error: SQLAlchemyError) -> AnabranchError:
        """Return the error that callers of a write that took no effect get."""
        if dialects.is_of_the_disk(error):
            return self._fail(self._database.disk_failed(error))
        refusal = self._database.error(error)
        if type(refusal) is StoreFailedError and dialects.is_data(error):
            return NotTakenError(str(refusal))
        return refusal

    def _outcome_unknown(self, error: SQLAlchemyError) -> OutcomeUnknownError:
        return OutcomeUnknownError(
            f"store {self.name!r}: the database was cut off, or failed, while it committed: "
            f"{self._database.words(error)}; whether the operation took effect shows when it is back. A send is safe "
            "to repeat with the same message_id"
        )

    def took_effect(self, plan: Plan) -> bool:
        # FOR UPDATE: the server may not have noticed yet that we are cut off, and still be at it.
        statement = self._statements["select.store.locked"]
        try:
            row = self._database.write(lambda c: c.execute(statement, {"owner": self._owner}).one_or_none())
        except SQLAlchemyError as error:
            raise self._database.error(error) from None
        self._require_lease()  # after the row was read: who takes the lease raises BATCH too (L2)
        last_batch = None if row is None else row[0]
        if last_batch == self._batch + 1:
            self._took(self._unknown)
            return True
        if last_batch != self._batch:
            raise self._fail(
                StoreFailedError(
                    f"somebody else has written to the tables of store {self.name!r}: nobody knows whether the last "
                    "operations took effect"
                )
            )
        return False

    def apply(self, changes: Sequence[Change], last: Plan) -> None:
        effects, self._effects = self._effects, None
        assert effects is not None
        if effects.prepared:
            for change in changes:
                if type(change) is Prepare:
                    change.branch.payload = b""  # XALOG has it
        for transaction in effects.settled:
            self._branches.pop(transaction, None)
        self._branches.update(
            (transaction, row) for transaction, row in effects.prepared.items() if transaction not in effects.settled
        )
        for state in effects.removed:
            self._ids.forget(state.number)
        self._ids.add(effects.ids)
        self._reading.apply(effects)

    # Reading

    def next_order(self, state: DestinationState, subscription: SubscriptionState | None, order: int) -> int | None:
        return self._reading.next_order(state, subscription, order)

    def rows(
        self, state: DestinationState, subscription: SubscriptionState | None, order: int | None, after: int, limit: int
    ) -> Sequence[Place]:
        return self._reading.rows(state, subscription, order, after, limit)

    def row(
        self, state: DestinationState, subscription: SubscriptionState | None, seq: int, order: int | None = None
    ) -> Place | None:
        return self._reading.row(state, subscription, seq)

    def keyed(self, state: DestinationState, names: Sequence[bytes]) -> Mapping[bytes, Place]:
        return self._reading.keyed(state, names)

    def keys(self, state: DestinationState, start: bytes, limit: int) -> Sequence[tuple[bytes, Place]]:
        return self._reading.keys(state, start, limit)

    def unacked(self, state: DestinationState, seq: int) -> Sequence[Channel]:
        return self._reading.unacked(state, seq)

    def expired(self, since: int, now: int) -> Iterable[tuple[DestinationState, Place]]:
        return self._reading.expired(since, now)

    def limited(self, least: int) -> Iterable[tuple[Channel, Place]]:
        return self._reading.limited(least)

    def next_due(self) -> int:
        return self._reading.next_due()

    def due(self, now: int, limit: int) -> Sequence[tuple[DestinationState, int, Place]]:
        return self._reading.due(now, limit)

    def until(self, state: DestinationState, subscription: SubscriptionState | None, seq: int) -> int:
        return self._reading.until(state, subscription, seq)

    def bodies(self, state: DestinationState, places: Sequence[Place]) -> Iterator[bytes | None]:
        return self._reading.bodies(places)

    # Upkeep

    def reclaim(self, copying: bool = False) -> int:
        with self._write_lock:  # else it would give up where it meets a write
            return self._database.read(dialects.compact if copying else dialects.reclaim)

    def stats(self) -> BackendStats:
        return BackendStats(
            syncs=self._batch - self._opened_at, sync_seconds=self._commits.mean, sync_durations=self._commits.durations
        )

    def copier(self) -> SqliteCopier | None:
        if self.options.url is not None:
            return None
        path = self._directory.path / "store.db"
        return SqliteCopier(self.name, path, self._write_lock, self.options.file_mode)

    def check(self) -> Iterator[str]:
        assert self._host is not None
        check = partial(
            violations, catalog=self._host.catalog, statements=self._statements, branches=self._branches,
            last_seq=self._reading.last_seq,
        )  # fmt: skip
        yield from self._database.read(check)
