"""The router: destinations in, stores behind. What users open, and hold.

with anabranch.open("stores.yaml") as router:
    router.queue("orders.custom").send(b"...")
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ..adapters.base import TRANSACTION_BYTES, Headers, Message, Progress, Receipt, Store, StoreStats
from ..adapters.files import disk_errors, make_directory, sweep_unfinished
from ..adapters.locking import DirectoryLock, fork_generation
from ..policies.config import Config, StoreConfig, load
from ..policies.destination import Destination
from ..policies.errors import (
    AnabranchError,
    ClosedError,
    ConfigError,
    MissingExtraError,
    NoRouteError,
    PlacementError,
    TransactionError,
    UnknownMessageError,
)
from ..policies.wildcard import Match
from .addresses import Address, resolve
from .coordinator import Coordinator
from .decision_log import COMMIT, ROLLBACK
from .doubt import Heuristic, InDoubt
from .layout import Layout
from .open_transactions import OpenTransactions
from .parts import Part
from .placement import DestinationRow, Placement, StoreRow
from .queue import Queue
from .reconcile import Reconciler
from .stores import OpenStores
from .tpc import Connection
from .transaction import Transaction
from .xid import Xid, as_xid

if TYPE_CHECKING:
    from .datamanager import DataManager

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RouterStats:
    """What a router says about itself."""

    stores: Mapping[str, StoreStats]
    """By the store's name; a store of one destination is `name:destination`."""
    decision_syncs: int = 0
    """How often the decision log, which transactions over several stores need, waited for the disk since open."""


class Router:
    """Threads: all may use it. Forks: a child must open its own (rule D4).

    `_lock` is held while the router is opened and closed. A call on a destination whose store is open takes no lock
    of the router's; stores.py says which locks are taken while one opens.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self._routes = config.routes()
        self._layout = Layout(config)
        self._lock = threading.RLock()
        self._directory_lock = DirectoryLock(config.directory / "router.lock", "the router")
        self._placement = Placement(config.directory / "placement.mdb")
        self._open_stores = OpenStores(self._layout)
        self._by_destination = self._open_stores.by_destination
        self._reconciler = Reconciler(self._layout, self._routes, self._placement, self._open_stores)
        self.coordinator = Coordinator(config.directory / "decisions", config.transactions, self)
        self._open_stores.on_open = self.coordinator.settling.settle
        self._transactions = OpenTransactions(config.transactions, lambda: len(self.coordinator.externals))
        self._opened = False
        self._generation = fork_generation()

    # Opening and closing

    def open(self, progress: Progress | None = None) -> Router:
        """Take the data directory, which is made if it is not there, and compare it with the configuration.

        Stores open on first use. Raises StoreLockedError, PlacementError (see invariant 6), CorruptionError, and
        ConfigError for a directory that cannot be used.
        """
        directory = self.config.directory
        with self._lock:
            try:
                make_directory(directory)
                self._directory_lock.acquire()
            except OSError as error:
                raise ConfigError(
                    [
                        f"the data directory {directory} cannot be used: {error.strerror} ({error.filename}); it must "
                        "be a directory that this user may write in, or another be chosen with `directory:`"
                    ]
                ) from error
            self._generation = fork_generation()
            try:
                self._sweep()
                with disk_errors(f"the stores of {directory} cannot be looked at"):
                    self._placement.open()
                    self._open_stores.progress, self._open_stores.accepting = progress, True
                    self.coordinator.open()
                    self._reconciler.run()
                    self.coordinator.require_participants(self._placement.stores)
                self._opened = True
                self.coordinator.settling.recover()
            except BaseException:
                self.close()
                raise
        return self

    def _sweep(self) -> None:
        """Remove what a crash left of stores that were being made (rule D2)."""
        try:
            for config in self.config.stores:
                directory = self.config.directory_of(config)
                swept = sweep_unfinished(directory) if config.per_destination else 0
                swept += sweep_unfinished(directory.parent, directory.name)
                if swept:
                    log.info("removed %d unfinished store(s) of %s", swept, config.name)
        except OSError as error:
            log.warning("an unfinished store cannot be removed: %s", error)

    def close(self) -> None:
        """Close all stores and free the directory. Idempotent. Raises the first error of a store after closing all."""
        if self._generation != fork_generation():
            self._opened = False  # all of it belongs to the parent
            return
        with self._lock:
            self.coordinator.close()
            self._opened = self._open_stores.accepting = False
            try:
                self._open_stores.close_all()
                self.coordinator.log.close()
            except (AnabranchError, OSError):
                self._let_go()
                raise
            self._let_go()  # not after Ctrl-C: then close() may be called again

    def _let_go(self) -> None:
        try:
            self.coordinator.log.close()
        finally:
            self._placement.close()
            self._directory_lock.release()

    def __enter__(self) -> Router:
        return self if self._opened else self.open()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def require_open(self) -> None:
        """Raise ClosedError if the router is closed, or in a forked child."""
        # The fork first: what a child sees of its parent's locks and flags means nothing.
        if self._generation != fork_generation():
            raise ClosedError(
                "this router was opened by the parent process; close it there first and open it here, or open another "
                "directory"
            )
        if not self._opened:
            raise ClosedError("the router is closed; open it with anabranch.open(...)")

    # Routing

    def route(self, destination: Destination) -> Match[StoreConfig]:
        """The pattern and the store for a destination. Raises NoRouteError, which names the closest patterns."""
        match = self._routes.route(destination)
        if match is None:
            near = ", ".join(self._routes.nearest(destination))
            raise NoRouteError(
                f'no pattern matches {destination}; the closest are {near}. Add one, or a store that matches ">"'
            )
        return match

    def store_of(self, destination: Destination) -> Store | None:
        """The open store that holds a destination; None if it has none yet."""
        store = self._by_destination.get(destination)
        if store is None:
            match = self.route(destination)
            self.require_open()
            known = self._placement.destinations.get(destination)
            if known is None:
                return self._unrecorded(destination, match)
            store = self._open_stores.open(self._placement.stores[known.store_id])
            self._by_destination[destination] = store
        return store

    def _unrecorded(self, destination: Destination, match: Match[StoreConfig]) -> Store | None:
        """A destination without a row has nothing, unless the record was restored from an old backup: then its
        messages are in the store that it is routed to, and it is recorded again."""
        path = self._layout.expected(match.target, destination)
        row = self._placement.store_at(self._layout.recorded(path))
        if row is None or not self._open_stores.open(row).depth(destination):
            return None
        return self.store_for(destination)

    def store_for(self, destination: Destination) -> Store:
        """The open store for a destination, made and recorded if it is not there yet (rule D1)."""
        store = self._by_destination.get(destination)
        if store is None:
            match = self.route(destination)
            self.require_open()
            known = self._placement.destinations.get(destination)
            row = self._placement.stores[known.store_id] if known is not None else self._place(destination, match)
            store = self._by_destination[destination] = self._open_stores.open(row)
        return store

    def _place(self, destination: Destination, match: Match[StoreConfig]) -> StoreRow:
        """Record a destination in the store that it is routed to; the store is made if need be (rules D1, D2)."""
        config = match.target
        path, name = self._layout.expected(config, destination), self._layout.name(config, destination)
        with (
            disk_errors(f"{destination} cannot be given a place in {path}"),
            self._open_stores.exclusive(self._layout.recorded(path)),
        ):
            self.require_open()
            row = self._placement.store_at(self._layout.recorded(path))
            if row is None and path.exists():
                row = self._reconciler.adopt(config, name, path)
            elif row is None:
                store_id = self._open_stores.adapter(config.kind).create(name, path, config.options)
                row = StoreRow(store_id, self._layout.recorded(path), config.kind, name)
                self._placement.record_store(row)
            self._placement.record_destination(
                DestinationRow(destination.kind.value, destination.name, row.store_id, match.pattern.text)
            )
        return row

    def forget_closed(self, destination: Destination, store: Store) -> None:
        """After a ClosedError: if the store was closed for being idle, the next call opens it again. Raises
        ClosedError if the router is closed too."""
        self.require_open()
        self._open_stores.forget_closed(destination, store)

    # What users do

    def queue(self, name: Address) -> Queue:
        """The queue of that name (`orders.custom` or `queue://orders.custom`). Nothing is created before the first
        send. Raises DestinationError, NoRouteError, and TypeError for what names no destination."""
        self.require_open()
        destination = resolve(name)
        self.route(destination)
        return Queue(self, destination)

    def send(
        self, destination: Address, body: bytes, headers: Headers | None = None, message_id: str | None = None
    ) -> list[Receipt]:
        """Send to one destination, or to all parts of a composite (`queue://a,queue://b`) as one transaction: to all of
        them or to none, whichever stores they live in."""
        with self.transaction() as transaction:
            transaction.send(destination, body, headers, message_id)
            return transaction.commit()

    # Transactions

    def transaction(self, xid: Xid | None = None) -> Transaction:
        """Begin a transaction over any stores; see transaction.py. With an `xid` it is an external one, which can be
        prepared. Raises TransactionError for an xid that is in use, and at the limit of open transactions."""
        self.require_open()
        if xid is None:
            return Transaction(self, self._transactions)
        xid = as_xid(xid)
        transaction = Transaction(self, self._transactions, xid)
        try:
            self.coordinator.externals.require_free(xid)
        except TransactionError:
            self._transactions.remove(transaction)
            raise
        return transaction

    def join(self, manager: Any = None, xid: Xid | None = None) -> DataManager:
        """Take part in the current transaction of the `transaction` package, of its thread's manager or of the one
        given; see datamanager.py. Joined already, it is the same data manager again.

        With an `xid` it outlives a process that ends in the middle of the commit. Raises MissingExtraError without the
        extra `transaction`, and what `transaction` raises.
        """
        try:
            from . import datamanager
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] not in {"transaction", "zope"}:
                raise
            raise MissingExtraError(
                "the transaction package is not installed; install it with: pip install 'anabranch[transaction]'"
            ) from error
        self.require_open()
        return datamanager.join(self, manager, xid)

    def connection(self) -> Connection:
        """Transactions under the names of Python's DB-API (PEP 249); see tpc.py."""
        self.require_open()
        return Connection(self)

    def commit(self, xid: Xid, one_phase: bool = False) -> None:
        """Commit a prepared external transaction, or with `one_phase` one that is open and not prepared.

        It stands on return, whatever becomes of a store meanwhile (in_doubt shows that). Said again it changes nothing.
        Raises TransactionError for one that is not prepared here or was rolled back by hand, and TransactionInDoubt.
        """
        self.require_open()
        opened = self._transactions.by_xid(as_xid(xid))
        if opened is None:
            self.coordinator.externals.end(as_xid(xid), commit=True)
        elif one_phase:
            opened.commit()
        else:
            raise TransactionError(f"transaction {opened.xid} is not prepared; prepare() it or commit it in one phase")

    def rollback(self, xid: Xid) -> None:
        """Roll back an external transaction, prepared or open. Else as commit."""
        self.require_open()
        opened = self._transactions.by_xid(as_xid(xid))
        if opened is None:
            self.coordinator.externals.end(as_xid(xid), commit=False)
        else:
            opened.rollback()

    def recover(self) -> list[Xid]:
        """The external transactions that are prepared and wait for commit or rollback, oldest first. Raises
        StoreFailedError if the decision log cannot be read."""
        self.require_open()
        return self.coordinator.externals.waiting()

    def in_doubt(self) -> list[InDoubt]:
        """The transactions that are prepared in some store and wait: for their manager, for a store that has failed,
        for a word of yours. All stores are opened for it."""
        self.require_open()
        return self.coordinator.doubt.in_doubt(self._all_stores())

    def resolve(self, transaction: str, outcome: str) -> None:
        """Decide by hand, `commit` or `rollback`, what nobody else will: a transaction of in_doubt() that has no
        outcome. That is recorded, and kept until forget(). Raises TransactionError."""
        self.require_open()
        if outcome not in (COMMIT, ROLLBACK):
            raise ValueError(f"an outcome is {COMMIT!r} or {ROLLBACK!r}, not {outcome!r}")
        self.coordinator.doubt.resolve(_transaction_id(transaction), outcome == COMMIT, self._all_stores())

    def heuristics(self) -> list[Heuristic]:
        """The outcomes that were decided by hand and not forgotten since, oldest first."""
        self.require_open()
        return self.coordinator.doubt.heuristics()

    def forget(self, transaction: str) -> None:
        """Drop the record of an outcome that was decided by hand. Raises TransactionError."""
        self.require_open()
        self.coordinator.doubt.forget(_transaction_id(transaction))

    def reopen_decisions(self) -> None:
        """Read the decision log again after it has failed or was moved aside (invariant 7). Raises CorruptionError."""
        self.require_open()
        self.coordinator.reopen()

    def _all_stores(self) -> list[Store]:
        """Every store that can be opened."""
        stores = []
        for name, row in self._rows_by_name().items():
            try:
                stores.append(self._open_stores.open(row))
            except (AnabranchError, OSError) as error:
                log.warning("store %s cannot say what is prepared in it: %s", name, error)
        return stores

    # What the coordinator asks

    def store_by_id(self, store_id: bytes) -> Store:
        """The open store of that id, opened if need be. Raises PlacementError for one that is not recorded."""
        row = self._placement.stores.get(store_id)
        if row is None:
            raise PlacementError(f"no store {store_id.hex()} is recorded in {self.config.directory}")
        return self._open_stores.open(row)

    def name_of(self, store_id: bytes) -> str:
        """A store's name, or its id where it has none."""
        row = self._placement.stores.get(store_id)
        return row.name if row is not None else store_id.hex()

    def open_stores(self) -> list[Store]:
        """Those that are open."""
        return self._open_stores.values()

    def reopened(self, part: Part) -> Store:
        """After a ClosedError: the part's store, opened again if it was closed for being idle."""
        self.forget_closed(part.first, part.store)
        return self.store_for(part.first)

    def require_own(self, message: Message) -> None:
        """Raise UnknownMessageError for a message of another router."""
        if message.store.store_id not in self._placement.stores:
            raise UnknownMessageError(f"{message!r} was received from another router; ack it there")

    def ack(self, messages: Message | Iterable[Message]) -> None:
        """Ack leased messages; those of one store as one, with one wait for the disk.

        If a store raises, what lives in other stores may have been acked before.
        """
        by_store: dict[int, list[Message]] = {}
        for message in [messages] if isinstance(messages, Message) else messages:
            if not isinstance(message, Message):
                raise TypeError(f"messages that were received can be acked, not {type(message).__name__}: {message!r}")
            by_store.setdefault(id(message.store), []).append(message)
        for some in by_store.values():
            some[0].store.ack(some)

    def destinations(self) -> list[Destination]:
        """All that have been sent to and not deleted, in order of their names."""
        return sorted({d for stats in self.stats().stores.values() for d in stats.destinations}, key=str)

    def delete(self, destination: Address) -> int:
        """Remove a destination and its messages; returns how many."""
        return self.queue(destination).delete()

    def stats(self) -> RouterStats:
        """Of every store that exists; those that are not open are opened for it."""
        self.require_open()
        stores = {name: self._open_stores.open(row).stats() for name, row in self._rows_by_name().items()}
        return RouterStats(stores, self.coordinator.log.syncs)

    def reclaim(self) -> int:
        """Free what can be freed now in all open stores; returns bytes. Happens by itself in the background.

        Raises the first error of a store after trying all.
        """
        self.require_open()
        freed, errors = 0, []
        for store in self._open_stores.values():
            try:
                freed += store.reclaim()
            except ClosedError:
                continue  # it was closed for being idle
            except AnabranchError as error:
                errors.append(error)
        self.require_open()
        if errors:
            raise errors[0]
        return freed

    def reopen(self, name: str) -> None:
        """Close a store that has failed and open it again, which recovers it (invariant 7)."""
        self.require_open()
        rows = self._rows_by_name()
        if name not in rows:
            raise ConfigError([f"there is no store {name!r} to reopen; there are: {', '.join(rows) or 'none yet'}"])
        row = rows[name]
        try:
            self._open_stores.close_at(row.path)
        except (AnabranchError, OSError) as error:
            log.warning("store %s: closing it after a failure: %s", name, error)
        self._open_stores.open(row)

    def _rows_by_name(self) -> dict[str, StoreRow]:
        """All recorded stores. One whose name another has been given since is told apart by its directory."""
        rows: dict[str, StoreRow] = {}
        for row in sorted(self._placement.stores.values(), key=lambda row: (row.name, row.path)):
            rows[row.name if row.name not in rows else f"{row.name} ({row.path})"] = row
        return rows


def _transaction_id(text: str) -> bytes:
    """A transaction's id as in_doubt() shows it. Raises TransactionError."""
    try:
        transaction = bytes.fromhex(text)
    except (TypeError, ValueError):
        transaction = b""
    if len(transaction) != TRANSACTION_BYTES:
        raise TransactionError(
            f"{text!r} is no transaction's id: that is {2 * TRANSACTION_BYTES} hexadecimal digits, as in_doubt() shows"
        )
    return transaction


def open(source: str | Path | Config, progress: Progress | None = None) -> Router:
    """Open a router from a YAML file or from a Config. Use it with `with`, or close it.

    Raises ConfigError with all that is wrong in the file, StoreLockedError, PlacementError, CorruptionError.
    """
    config = source if isinstance(source, Config) else load(source)
    return Router(config).open(progress)
