"""The router: destinations in, stores behind. What users open, and hold.

with anabranch.open("stores.yaml") as router:
    router.queue("orders.custom").send(b"...")
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from ..adapters.base import Headers, Message, Outgoing, Progress, Receipt, Store, StoreStats
from ..adapters.files import disk_errors, make_directory
from ..adapters.locking import DirectoryLock, fork_generation
from ..policies.config import Config, StoreConfig, load
from ..policies.destination import Destination, Kind
from ..policies.errors import (
    AnabranchError,
    ClosedError,
    ConfigError,
    DestinationError,
    NoRouteError,
    PlacementError,
    TransactionError,
)
from ..policies.wildcard import Match
from .names import directory_name
from .placement import DestinationRow, Placement, StoreRow
from .queue import Queue
from .reconcile import Misplaced, misplaced_error
from .transaction import Transaction

log = logging.getLogger(__name__)

OPEN_STORES_MAX: Final = 256
"""Stores kept open at once; beyond it the least recently used idle one is closed (rule M1)."""


@dataclass(frozen=True, slots=True)
class RouterStats:
    """What a router says about itself."""

    stores: Mapping[str, StoreStats]
    """By the store's name; a store of one destination is `name:destination`."""


class Router:
    """Threads: all may use it. Forks: a child must open its own (rule D4).

    `_lock` guards the placement record and which stores are open; a call on a destination whose store is open takes
    no lock. `_opening` has a lock for each store, held while it opens.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self._routes = config.routes()
        self._lock = threading.RLock()
        self._directory_lock = DirectoryLock(config.directory / "router.lock", "the router")
        self._placement = Placement(config.directory / "placement.mdb")
        self._open_stores: OrderedDict[bytes, Store] = OrderedDict()
        self._opening: dict[bytes, threading.Lock] = {}
        self._by_destination: dict[Destination, Store] = {}
        self._adapters: dict[str, Any] = {}
        self._opened = False
        self._generation = fork_generation()
        self._progress: Progress | None = None

    # Opening and closing

    def open(self, progress: Progress | None = None) -> Router:
        """Take the data directory, which is made if it is not there, and compare it with the configuration.

        Stores open on first use. Raises StoreLockedError, PlacementError (see invariant 6), CorruptionError.
        """
        self._progress = progress
        self._generation = fork_generation()
        try:
            make_directory(self.config.directory)
            self._directory_lock.acquire()
        except OSError as error:
            raise ConfigError(
                [f"the data directory {self.config.directory} cannot be used: {error.strerror}"]
            ) from error
        try:
            with disk_errors(f"the placement record of {self.config.directory} cannot be opened"):
                self._placement.open()
                self._locate_stores()
                self._opened = True
                self._reconcile()
        except BaseException:
            self.close()
            raise
        return self

    def close(self) -> None:
        """Close all stores and free the directory. Idempotent. Raises the first error of a store after closing all."""
        if self._generation != fork_generation():
            self._opened = False  # all of it belongs to the parent
            return
        with self._lock:
            self._opened = False
            errors: list[Exception] = []
            self._by_destination.clear()
            for store_id, store in list(self._open_stores.items()):
                try:
                    store.close()
                except (AnabranchError, OSError) as error:
                    errors.append(error)
                del self._open_stores[store_id]  # not before: an interrupted close() is called again
            self._placement.close()
            self._directory_lock.release()
            if errors:
                raise errors[0]

    def __enter__(self) -> Router:
        return self if self._opened else self.open()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Comparing what is on disk with the configuration

    def _locate_stores(self) -> None:
        """Every recorded store must be where it was, or where the configuration has its directory now (D1, D2)."""
        by_id = None
        for row in list(self._placement.stores.values()):
            if _store_id(self._path(row.path)) == row.store_id:
                continue
            if by_id is None:
                by_id = self._ids_of_configured_directories()
            found = by_id.get(row.store_id)
            if found is None:
                raise PlacementError(
                    f"store {row.name!r} is missing: {self._path(row.path)} "
                    f"{'holds another store' if _store_id(self._path(row.path)) else 'is not there'}. Mount its disk, "
                    "or restore it from a backup; it is never created anew, since it held messages"
                )
            self._placement.record_store(StoreRow(row.store_id, self._relative(found), row.kind, row.name))
            log.info("store %s has moved to %s", row.name, found)

    def _ids_of_configured_directories(self) -> dict[bytes, Path]:
        found: dict[bytes, Path] = {}
        for config in self.config.stores:
            directory = self.config.directory_of(config)
            candidates = directory.iterdir() if config.per_destination and directory.is_dir() else [directory]
            for path in candidates:
                store_id = _store_id(path)
                if store_id is not None:
                    found[store_id] = path
        return found

    def _reconcile(self) -> None:
        """Refuse to hide data: a destination with messages must be routed to where they are (invariant 6)."""
        misplaced: list[Misplaced] = []
        for row in list(self._placement.destinations.values()):
            store_row = self._placement.stores[row.store_id]
            match = self._routes.route(row.destination)
            if match is not None and self._expected(match.target, row.destination) == self._path(store_row.path):
                continue
            count = self._open(store_row).depth(row.destination)
            if count:
                misplaced.append(Misplaced(row.destination, count, store_row.name, match))
            else:
                self._placement.forget_destination(row.destination)
        if misplaced:
            raise misplaced_error(misplaced)

    def _expected(self, config: StoreConfig, destination: Destination) -> Path:
        directory = self.config.directory_of(config)
        return directory / directory_name(destination) if config.per_destination else directory

    def _path(self, recorded: str) -> Path:
        return self.config.directory / recorded

    def _relative(self, path: Path) -> str:
        try:
            return str(path.relative_to(self.config.directory))
        except ValueError:
            return str(path.absolute())

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

    def parse_composite(self, text: str) -> tuple[Destination, ...]:
        """The destinations in `queue://a,queue://b`. Raises DestinationError."""
        parts = Destination.parse_composite(text)
        for part in parts:
            _require_queue(part)
        return parts

    def store_of(self, destination: Destination) -> Store | None:
        """The open store that holds a destination; None if it has none yet."""
        store = self._by_destination.get(destination)
        if store is None:
            self.route(destination)
            self._require_open()
            with self._lock:
                self._require_open()
                row = self._placement.destinations.get(destination)
                store_row = self._placement.stores[row.store_id] if row is not None else None
            if store_row is not None:
                store = self._by_destination[destination] = self._open(store_row)
        return store

    def forget_closed(self, destination: Destination, store: Store) -> None:
        """After a ClosedError: if the store was closed for being idle, the next call opens it again."""
        self._require_open()
        with self._lock:
            self._require_open()
            if any(store is known for known in self._open_stores.values()):
                raise ClosedError(f"store {store.name!r} is closed, or this process is a fork of its owner")
            if self._by_destination.get(destination) is store:
                del self._by_destination[destination]

    def store_for(self, destination: Destination) -> Store:
        """The open store for a destination, made and recorded if it is not there yet (rule D1)."""
        store = self._by_destination.get(destination)
        if store is None:
            store = self.store_of(destination)
        if store is None:
            match = self.route(destination)
            with self._lock, disk_errors(f"{destination} cannot be recorded in {self.config.directory}"):
                self._require_open()
                row = self._store_row(match.target, destination)
                self._placement.record_destination(
                    DestinationRow(destination.kind.value, destination.name, row.store_id, match.pattern.text)
                )
            store = self._by_destination[destination] = self._open(row)
        return store

    def _store_row(self, config: StoreConfig, destination: Destination) -> StoreRow:
        """The row of the store that a destination is routed to; the store is made if need be (rule D2)."""
        path = self._expected(config, destination)
        relative = self._relative(path)
        for row in self._placement.stores.values():
            if row.path == relative:
                return row
        name = f"{config.name}:{destination}" if config.per_destination else config.name
        if path.exists():
            store_id = _store_id(path)
            if store_id is None or not self._is_empty(config, name, path):
                raise PlacementError(
                    f"{path} exists and is not a store that this router has recorded; nothing was changed. Choose "
                    f"another directory for store {name!r}, or move that one away"
                )
        else:
            store_id = self._adapter(config.kind).create(name, path, config.options)
        row = StoreRow(store_id, relative, config.kind, name)
        self._placement.record_store(row)
        return row

    def _is_empty(self, config: StoreConfig, name: str, path: Path) -> bool:
        """Whether a store holds nothing: made, but a crash came before it was recorded."""
        store = self._adapter(config.kind)(name, path, config.options, config.index_directory)
        store.open()
        try:
            return not store.destinations()
        finally:
            store.close()

    def _open(self, row: StoreRow) -> Store:
        """The store of a row, opened if it is not open. Without the router's lock while it opens: one store that
        rebuilds its index for minutes holds up nobody else (invariant 7)."""
        with self._lock:
            opening = self._opening.setdefault(row.store_id, threading.Lock())
        with opening:
            with self._lock:
                self._require_open()
                store = self._open_stores.get(row.store_id)
                if store is not None:
                    self._open_stores.move_to_end(row.store_id)
                    return store
                self._close_idle()
            config, path = self._config_of(row), self._path(row.path)
            opened: Store = self._adapter(row.kind)(row.name, path, config.options, config.index_directory)
            opened.open(self._progress)
            with self._lock:
                if self._opened and opened.store_id == row.store_id:
                    self._open_stores[row.store_id] = opened
                    return opened
            opened.close()
            self._require_open()
            raise PlacementError(f"{path} holds another store than the recorded one")

    def _config_of(self, row: StoreRow) -> StoreConfig:
        """The configuration for a recorded store: that of its directory, else of its name."""
        path = self._path(row.path)
        for config in self.config.stores:
            directory = self.config.directory_of(config)
            if path == directory or (config.per_destination and path.parent == directory):
                return config
        for config in self.config.stores:
            if config.name == row.name.partition(":")[0] and config.kind == row.kind:
                return config
        return StoreConfig(row.name.partition(":")[0], [">"])

    def _close_idle(self) -> None:
        """Keep the number of open stores bounded."""
        if len(self._open_stores) < OPEN_STORES_MAX:
            return
        for store_id, store in self._open_stores.items():
            try:
                if not store.retire():
                    continue
            except AnabranchError:
                continue  # failed: it stays, for its users to hear why and to reopen it
            for destination in [d for d, s in self._by_destination.items() if s is store]:
                del self._by_destination[destination]
            del self._open_stores[store_id]
            try:
                store.close()
            except AnabranchError as error:
                log.warning("store %s failed while it was closed for being idle: %s", store.name, error)
            return

    def _adapter(self, kind: str) -> Any:
        if kind not in self._adapters:
            found = tuple(entry_points(group="anabranch.adapters", name=kind))
            if not found:
                raise ConfigError([f"no adapter is installed for stores of kind {kind!r}"])
            self._adapters[kind] = found[0].load()
        return self._adapters[kind]

    def _require_open(self) -> None:
        if not self._opened:
            raise ClosedError("the router is closed; open it with anabranch.open(...)")
        if self._generation != fork_generation():
            raise ClosedError("this process is a fork of the one that opened the router; open it anew here")

    # What users do

    def queue(self, name: str) -> Queue:
        """The queue of that name (`orders.custom` or `queue://orders.custom`). Nothing is created before the first
        send. Raises DestinationError, NoRouteError."""
        destination = Destination.parse(name)
        _require_queue(destination)
        self.route(destination)
        return Queue(self, destination)

    def send(
        self, destination: str, body: bytes, headers: Headers | None = None, message_id: str | None = None
    ) -> list[Receipt]:
        """Send to one destination, or to all parts of a composite (`queue://a,queue://b`) as one: all of them or none.

        Raises TransactionError if the parts live in different stores; nothing was sent.
        """
        parts = self.parse_composite(destination)
        stores = {id(store): store for store in map(self.store_for, parts)}
        if len(stores) > 1:
            names = ", ".join(repr(store.name) for store in stores.values())
            raise TransactionError(f"the parts of {destination} live in different stores ({names}); send to each")
        (store,) = stores.values()
        return store.commit([(part, Outgoing(body, headers, message_id)) for part in parts], [])

    def transaction(self) -> Transaction:
        """Begin a transaction over one store; see transaction.py."""
        self._require_open()
        return Transaction(self)

    def ack(self, messages: list[Message]) -> None:
        """Ack leased messages; those of one store with one wait for the disk."""
        by_store: dict[int, list[Message]] = {}
        for message in messages:
            by_store.setdefault(id(message.store), []).append(message)
        for some in by_store.values():
            some[0].store.ack(some)

    def destinations(self) -> list[Destination]:
        """All that have been sent to and not deleted, in order of their names."""
        return sorted({d for stats in self.stats().stores.values() for d in stats.destinations}, key=str)

    def delete(self, destination: Destination) -> int:
        """Remove a destination and its messages; returns how many."""
        store = self.store_of(destination)
        if store is None:
            return 0
        return store.delete(destination)  # its place stays: somebody may be sending to it right now

    def stats(self) -> RouterStats:
        """Of every store that exists; those that are not open are opened for it."""
        with self._lock:
            self._require_open()
            rows = sorted(self._placement.stores.values(), key=lambda row: row.name)
        return RouterStats({row.name: self._open(row).stats() for row in rows})

    def reclaim(self) -> int:
        """Free what can be freed now in all open stores; returns bytes. Happens by itself in the background."""
        with self._lock:
            self._require_open()
            stores = list(self._open_stores.values())
        return sum(store.reclaim() for store in stores)

    def reopen(self, name: str) -> None:
        """Close a store that has failed and open it again, which recovers it (invariant 7)."""
        with self._lock:
            self._require_open()
            for store_id, store in list(self._open_stores.items()):
                if store.name == name:
                    for destination in [d for d, s in self._by_destination.items() if s is store]:
                        del self._by_destination[destination]
                    del self._open_stores[store_id]
                    store.close()
            rows = [row for row in self._placement.stores.values() if row.name == name]
            if not rows:
                known = ", ".join(sorted(row.name for row in self._placement.stores.values()))
                raise ConfigError([f"there is no store {name!r} to reopen; there are: {known or 'none yet'}"])
        self._open(rows[0])


def open(source: str | Path | Config, progress: Progress | None = None) -> Router:
    """Open a router from a YAML file or from a Config. Use it with `with`, or close it.

    Raises ConfigError with all that is wrong in the file, StoreLockedError, PlacementError, CorruptionError.
    """
    config = source if isinstance(source, Config) else load(source)
    return Router(config).open(progress)


def _require_queue(destination: Destination) -> None:
    if destination.kind is not Kind.QUEUE:
        raise DestinationError(f"{destination} is a topic; this version stores messages in queues only")


def _store_id(path: Path) -> bytes | None:
    """The id of the store in a directory, None if it is none."""
    try:
        return bytes.fromhex((path / "store.id").read_text().strip())
    except (OSError, ValueError):
        return None
