"""The registry finds the store of a destination, by what the configuration says and the placement record knows."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from ...adapters.core import Store
from ...adapters.core.engine.forwarding import follow
from ...adapters.core.messages import Message
from ...adapters.core.migration.copying import is_shared
from ...adapters.core.state.gates import Gate, MovedError
from ...adapters.core.store_types import Progress, StoreStats, Subscription
from ...adapters.system import locking
from ...adapters.system.background import shared
from ...adapters.system.directory import is_empty
from ...adapters.system.files import disk_errors, sweep_unfinished
from ...policies.errors import (
    AnabranchError,
    ClosedError,
    ConfigError,
    OutOfDescriptorsError,
    PlacementError,
    StoreFailedError,
    UnknownMessageError,
    router_closed,
)
from ...policies.names.destination import Destination
from ...policies.names.routes import Match, RouteTable
from ...policies.text import count_of
from .attempt import Attempt
from .deferred_sends import DeferredSends
from .gates import Gates
from .on_disk.directories import StoreDirectories, require_directories
from .on_disk.import_marker import require_no_import
from .on_disk.repartition_progress import require_none
from .open_stores import OpenStores
from .reconcile import Reconciler
from .record import RECORD, DestinationRow, DestinationsTable, StoreRow
from .removal import Removal
from .routing import Routing
from .store_statistics import StoreStatistics

if TYPE_CHECKING:
    from ...policies.config import Config, StoreConfig

log: logging.Logger = logging.getLogger(__name__)

S = TypeVar("S", bound=Store | None)
T = TypeVar("T")

PAUSE: Final = 0.001
"""Seconds between two looks."""

HEALTH_SECONDS: Final = 5.0
"""Seconds after which a store that has not put on disk what it has written is stalled."""


class StoreRegistry:
    """The stores of a router: found by destination, by id, by name; made and opened when they are needed.

    Threads: all, between `open` and `close_stores`. A call on a destination whose store is open takes no lock;
    open_stores.py says which are taken while one opens.
    """

    def __init__(self, config: Config, owner: object = None, require_lock: Callable[[], None] = lambda: None) -> None:
        """Make a registry whose stores are not open yet. `owner` is kept alive by all that keeps the registry or one of
        its stores alive. `require_lock` raises StoreFailedError if the data directory may be another's."""
        self._owner = owner
        self._directories = StoreDirectories(config)
        self.table: DestinationsTable = DestinationsTable(config.bindings / RECORD, config.file_mode, require_lock)
        """The stores and destinations that there are; all read the table, and changes are made here."""
        self.routing: Final = Routing(config, self.table)
        """The routes of the configuration in force."""
        self.route: Final = self.routing.route
        self._stores = OpenStores(self._directories, self.table, owner, require_lock)
        self.by_destination: Final = self._stores.by_destination
        """The stores that were found before. One may have been closed since."""
        self._reconciler = Reconciler(
            self._directories, self.routing.routes, self.table, self._stores, self._may_remove
        )
        self._generation = locking.generation
        self.opened: bool = False
        """Set by the router, once all is compared: True if users may come."""
        self._stopped: StoreFailedError | None = None
        self._statistics = StoreStatistics(
            lambda row: self._stores.get(row) is not None, partial(self.with_row, call=lambda store: store.stats())
        )
        self._health = StoreStatistics(
            lambda row: self._stores.get(row) is not None, partial(self.with_row, call=_synced_stats), HEALTH_SECONDS
        )
        lock = threading.RLock()  # re-entrant, for signal handlers
        self.gates: Final = Gates(self._stores, lock, self.require_open)
        """The gates of destinations that are about to move, and the counters by which callers notice it."""
        self.removal: Final = Removal(
            self.table, self._stores, self._directories, self.gates, self.store_of, self.with_row
        )
        """The removal of destinations."""
        self.records_late: bool = False
        """True once some transaction has sent to a destination that had no row by then: `record_missing` gives it
        one."""
        self.deferred: Final = DeferredSends(
            self.by_destination, lock, self.require_open, self.gates, self.for_store, self.record_again, self.store_of
        )
        """The sends that must not wait until the store of their destination is open."""
        self.moving: bool = False
        """True if the stores are open to be repartitioned, not to be used: a destination routed elsewhere is no
        error."""
        self.importing = False
        """True if an import from ActiveMQ has opened the stores, and nobody else uses them."""
        self._unchecked: dict[bytes, list[Destination]] = {}
        """The destinations that were recorded when the router was opened, by the store's id, until that is opened."""

    def _may_remove(self, store_id: bytes) -> bool:
        return self.removal.may_remove(store_id)

    def on_open(self, call: Callable[[Store], None]) -> None:
        """Call a function with each store that is opened, before anybody else has it."""

        def opened(store: Store) -> None:
            call(store)
            self._compare(store)
            if is_shared(store):
                setattr(store, "on_destinations", partial(self._came, store))  # noqa: B010  some stores alone have it

        self._stores.on_open = opened

    def _compare(self, store: Store) -> None:
        """Compare the record with a store that is opened for the first time. Rows of destinations that the store does
        not know go, which a crash has left behind; a destination that it knows gets a row."""
        recorded = self._unchecked.pop(store.store_id, None)
        if recorded is None or store.recover_prepared():
            return
        known = set(store.destinations())
        self.gates.removals += 1  # first: who found one of these rows looks again
        for destination in recorded:
            held = self.table.destinations.get(destination)
            if destination not in known and held is not None and held.store_id == store.store_id:
                self.table.let_go(destination)
        row = self.table.stores[store.store_id]
        subscribed = {subscription.topic for subscription in store.subscriptions()}
        lost = [
            name
            for name in known.difference(self.table.destinations)
            if (match := self.routing.routes.route(name)) is not None
            and (self._reconciler.lies_at(row, match, name) or name in subscribed or store.depth(name))
        ]
        if lost:
            what = count_of(len(lost), "destination")
            level = logging.DEBUG if is_shared(store) else logging.WARNING
            log.log(level, "store %s: %s had no row in the placement record", store.name, what)
            self._record(lost, row)

    def _came(self, store: Store, destinations: Iterable[Destination]) -> None:
        """Record destinations that another router has made in a store."""
        routed = [name for name in destinations if (match := self.routing.routes.route(name)) is not None
                  and match.target.name == store.name]  # fmt: skip
        try:
            self.record_missing(store, routed, late=True)
        except MovedError:
            pass  # they are in another store by now
        except (AnabranchError, OSError) as error:
            log.warning("store %s: destinations that came are not recorded: %s", store.name, error)

    # Opening and closing, by the router

    def open(self, progress: Progress | None) -> None:
        """Read the placement record; stores open on first use from now on. The record is compared with configuration
        and disk (invariant 6). Raises PlacementError, CorruptionError."""
        if not self.moving:
            require_none(self.config.directory)
        if not self.importing:
            require_no_import(self.config.directory)
        self._generation = locking.generation
        self._stopped = None
        self._directories.remember_in_force()
        self._sweep()
        self.table.open()
        self._unchecked = {store_id: [] for store_id in self.table.stores}
        for destination, held in self.table.destinations.items():
            self._unchecked[held.store_id].append(destination)
        self._stores.progress, self._stores.accepting = progress, True
        if self.moving:
            self._reconciler.find_stores()
            self._reconciler.clear_volatile()
        else:
            self._reconciler.run()

    # Moving, by repartition.py and live.py

    @property
    def config(self) -> Config:
        """The configuration in force."""
        return self.routing.config

    def reroute(self, config: Config) -> None:
        """Route destinations without a row by this configuration from now on. The options that stores are opened with
        follow it too. Open stores keep theirs, but for one that was not configured until now: it is opened anew, unless
        somebody needs it open."""
        opened = [row for row in list(self.table.stores.values()) if self._stores.get(row) is not None]
        unconfigured = [row for row in opened if self._directories.configured(row) is None]
        before = self.config
        with self.table.unchanged():  # what is recorded from now on goes by it
            self.routing.reroute(config)
        self.gates.moves += 1  # a transaction that has found a store for what has no row looks again
        self._directories.config, self._directories.before = config, before
        self._reconciler.reroute(self.routing.routes)
        for row in unconfigured:
            self._stores.close_if_idle(row.path)

    def elsewhere_by(self, config: Config) -> list[tuple[StoreRow, Destination, Match[StoreConfig] | None]]:
        """Return `routed_elsewhere` by another configuration of this directory."""
        directories = StoreDirectories(config)
        directories.before = self.config
        return Reconciler(directories, config.routes(), self.table, self._stores).routed_elsewhere()

    def discard_idle(self, row: StoreRow, remove: Callable[[], None]) -> bool:
        """Discard a store as `discard`, unless somebody needs it open; returns whether it did."""
        with self._stores.removing(row.path):
            return self._stores.discard(row, remove)

    def move(self, before: Config | None) -> None:
        """Open the stores to be repartitioned. `before`: the configuration that they were used with until now, where
        that is known."""
        self.moving = self._directories.moving = True
        self._directories.before = before

    def routed_elsewhere(self) -> list[tuple[StoreRow, Destination, Match[StoreConfig] | None]]:
        """Return destinations that are in another store than the configuration routes them to, or that it routes
        nowhere."""
        return self._reconciler.routed_elsewhere()

    @property
    def directories(self) -> StoreDirectories:
        """The places of stores."""
        return self._directories

    def target(self, destination: Destination, match: Match[StoreConfig]) -> StoreRow:
        """Return the store that a destination is routed to, made and recorded if it is not there."""
        config = match.target
        path, name = self._directories.expected(config, destination), self._directories.name(config, destination)
        recorded = self._directories.recorded(path)
        with disk_errors(f"{destination} cannot be given a place in {path}"), self._stores.exclusive(recorded):
            return self._routed_row(destination, match) or self._made(config, path, name)

    def discard(self, row: StoreRow, remove: Callable[[], None]) -> None:
        """Close a store and call `remove`, while nobody can open it."""
        with self._stores.exclusive(row.path):
            self._stores.close_at(row.path)
            remove()

    def _sweep(self) -> None:
        """Remove the remains of stores that were being made when a crash came (rule D2)."""
        try:
            for config in self.config.stores:
                directory = self.config.directory_of(config)
                swept = sweep_unfinished(directory) if config.per_destination else 0
                swept += sweep_unfinished(directory.parent, directory.name)
                if swept:
                    log.info("removed %s of %s", count_of(swept, "unfinished store"), config.name)
        except OSError as error:
            log.warning("an unfinished store cannot be removed: %s", error)

    def close_stores(self, before: Callable[[bytes], None] = lambda store_id: None) -> None:
        """Take no more calls, close all stores, each after a call of `before` with its id. One that hangs holds up no
        other. Raises the first error of a store after closing all."""
        self.opened = self._stores.accepting = False
        self._stores.close_all(before)

    def stop(self, error: StoreFailedError) -> None:
        """Refuse all from now on: the data directory may be another's."""
        self._stopped = error
        self._stores.forget_found()  # after it: a call that finds its store there asks nothing else

    def let_go(self) -> None:
        """Close the record. Idempotent."""
        self.table.close()

    @property
    def forked(self) -> bool:
        """True if this is a child of the process that opened it: all of it belongs to the parent."""
        return self._generation != locking.generation

    def require_open(self) -> None:
        """Raise ClosedError if the router is closed, or in a forked child."""
        # The fork first: what a child sees of its parent's locks and flags means nothing.
        if self._generation != locking.generation:
            raise ClosedError(
                "this router was opened by the parent process. In a server that forks, open it after the fork, with "
                "shared=True, by which all processes use the directory together. Else close it there first and open it "
                "here, or open another directory"
            )
        if not self.opened:
            raise router_closed()
        if self._stopped is not None:
            self._stores.forget_found()  # what another thread was just putting there when it stopped
            raise StoreFailedError(f"the router has stopped: {self._stopped}") from self._stopped

    # By destination

    def store_of(self, destination: Destination) -> Store | None:
        """Return the open store that holds a destination; None if it has none yet."""
        store = self.by_destination.get(destination)
        if store is None:
            match = self.route(destination)
            self.require_open()
            store = self._recorded_store(destination) or self._unrecorded(destination, match)
        return store

    def _recorded_store(self, destination: Destination) -> Store | None:
        """Return the store that the record has a destination in, opened if need be; None if it has it in none. The
        store is found without looking from now on, unless the router has stopped meanwhile, or sends to it are
        deferred."""
        self.deferred.wait(destination)
        while True:
            self.gates.wait(destination)
            known = self.table.destinations.get(destination)
            row = self.table.stores.get(known.store_id) if known is not None else None
            if row is None:
                return None
            with self._stores.removing(row.path):
                if self.table.destinations.get(destination) is not known or destination in self.gates:
                    continue
                store = self._stores.open(row)
                if self.table.destinations.get(destination) is not known:
                    continue  # the store was opened for the first time, and knew nothing of it
                with self.deferred.lock:
                    if not self.deferred.holds(destination):
                        self._stores.remember(destination, row, store)
            if self._stopped is not None:
                self.require_open()
            return store

    def _unrecorded(self, destination: Destination, match: Match[StoreConfig]) -> Store | None:
        """Return the store of a destination without a row; None if nothing is there. An old backup of the record may
        lack the row: then the messages are in the store that the destination is routed to, and it is recorded again."""
        row = self._routed_row(destination, match)
        if row is None and not match.target.per_destination and self._is_shared(match.target):
            row = self.target(destination, match)  # other processes may have used its tables
        if row is None or not self.with_row(row, lambda store: store.depth(destination)):
            return None
        return self.store_for(destination)

    def _routed_row(self, destination: Destination, match: Match[StoreConfig]) -> StoreRow | None:
        """Return the row of the store that a destination is routed to; None if that was never made."""
        return self.table.store_at(self._directories.recorded(self._directories.expected(match.target, destination)))

    def store_for(self, destination: Destination) -> Store:
        """Return the open store for a destination, made and recorded if it is not there yet (rule D1)."""
        store = self.by_destination.get(destination)
        while store is None:
            routes = self.routing.routes
            match = self.route(destination)
            self.require_open()
            store = self._recorded_store(destination)
            if store is None:
                self._place(destination, match, routes)
        return store

    def store_to_be(self, destination: Destination) -> Store:
        """Return the open store that a destination is in, or will be once it is recorded. `record_missing` does that
        before the first record: many new destinations of a transaction are recorded at once."""
        store = self.store_of(destination)
        if store is None:
            match = self.route(destination)
            row = self._routed_row(destination, match)
            if row is None or match.target.per_destination:
                return self.store_for(destination)
            self.records_late = True
            store = self._stores.open(row)
        return store

    def _place(self, destination: Destination, match: Match[StoreConfig], routes: RouteTable[StoreConfig]) -> None:
        """Record a destination in the store that it is routed to; the store is made if need be (rules D1, D2). Records
        nothing if another thread has, or the router goes by other routes by then: making a store may take long."""
        config = match.target
        path, name = self._directories.expected(config, destination), self._directories.name(config, destination)
        with disk_errors(f"{destination} cannot be given a place in {path}"):
            with self._stores.exclusive(self._directories.recorded(path)):
                self.require_open()
                row = self._routed_row(destination, match)
                if row is None:
                    row = self._made(config, path, name)
                if config.per_destination:  # else the store could be removed before
                    self._record([destination], row, routes)
            if not config.per_destination:  # outside: what several threads declare at once is one commit
                self._record([destination], row, routes)

    def _made(self, config: StoreConfig, path: Path, name: str) -> StoreRow:
        """Make a store that is not recorded, unless a crash came after it was made. With its `exclusive` held."""
        self._directories.require_own(path)
        if path.exists() and (self.config._may_create(config) or not is_empty(path)):
            adopted = self._reconciler.adopt(config, name, path)
            if adopted is not None:
                return adopted
        require_directories(self.config, [config])
        adapter, options = self._stores.adapter(config.kind), self._directories.options(config)
        store_id = self._stores.with_descriptors(lambda: adapter.create(name, path, options))
        row = StoreRow(store_id, self._directories.recorded(path), config.kind, name)
        self.table.record_store(row)
        return row

    def _record(
        self, destinations: Sequence[Destination], row: StoreRow, routes: RouteTable[StoreConfig] | None = None
    ) -> None:
        """Record in a store, durably, those of these destinations that have no row by then; none if the router goes by
        other routes than these."""
        rows = [_row(destination, row, self.route(destination)) for destination in destinations]
        with disk_errors(f"{', '.join(map(str, destinations))} cannot be recorded in store {row.name!r}"):
            self.table.record_new(rows, lambda row: routes is None or self.routing.routes is routes)

    def for_store(self, destination: Destination, call: Callable[[Store], T]) -> T:
        """Call with the store of a destination; once more if it had just been closed for being idle."""
        while True:
            removals = self.gates.removals
            with self.attempt(destination, self.store_for) as store:
                result = call(store)
                break
        if self.gates.removals != removals:
            self.record_again(destination)
        return result

    def for_held(self, destination: Destination, call: Callable[[Store], T], otherwise: T) -> T:
        """Call with the store that holds a destination; once more as `for_store`. Returns `otherwise` if no store holds
        it yet."""
        found = self.by_destination.get(destination)
        if found is not None:
            with suppress(ClosedError):  # what nearly always comes of it, a microsecond sooner
                return call(found)
        while True:
            with self.attempt(destination, self.store_of) as store:
                return otherwise if store is None else call(store)

    def attempt(self, destination: Destination, find: Callable[[Destination], S]) -> Attempt[S]:
        """Return an attempt at a call of a destination's store, which `store_of` or `store_for` finds."""
        return Attempt(partial(find, destination), partial(self.may_try_again, destination))

    def record_again(self, destination: Destination) -> None:
        """Record a destination again, after a call with a store that was found before `removals` rose to its value now.
        The destination may have been removed before the call, and its row with it. The call has taken effect, so
        nothing is raised: the next opening of the store finds destinations without a row."""
        try:
            self._record_again(destination)
        except (AnabranchError, OSError) as error:
            log.warning("%s has messages and no row in the placement record: %s", destination, error)

    def _record_again(self, destination: Destination) -> None:
        if destination not in self.by_destination and self._recorded_store(destination) is None:
            row = self._routed_row(destination, self.route(destination))
            if row is not None and destination in self.with_row(row, lambda store: store.destinations()):
                with self._stores.exclusive(row.path):
                    if self.table.stores.get(row.store_id) is row:
                        self._record([destination], row)

    def with_row(self, row: StoreRow, call: Callable[[Store], T]) -> T:
        """Call with the store of a row, opened if it is not open; once more as `for_store`."""
        while True:
            with Attempt(partial(self._stores.open, row), partial(self.may_try_again, None)) as store:
                return call(store)

    def may_try_again(self, destination: Destination | None, store: Store | None, error: ClosedError) -> bool:
        """Return whether to look for a store again after a ClosedError; without a destination not if one in the store
        moves. A store that was closed for being idle is opened by that. If the destination is moving to another store,
        wait for the end. Raises ClosedError if the router is closed too."""
        if store is None or (destination is None and isinstance(error, MovedError)):
            return False
        self.require_open()
        row = self.table.stores.get(store.store_id)
        if destination is not None and isinstance(error, MovedError):
            if row is not None:
                self._stores.forget(destination, row, store)
            if destination not in self.gates:
                known = self.table.destinations.get(destination)
                if known is not None and known.store_id == store.store_id and not error.gate.reserves:
                    store.forget_gate(error.gate)  # it had left this store, was deleted, and is here anew
                else:
                    time.sleep(PAUSE)  # it was deleted, and is there anew where a copy of it was being made
            self.gates.wait(destination)
        else:
            self._stores.forget_closed(destination, row, store)
        return True

    # One topic, one store

    def subscriptions_of(self, topic: Destination) -> list[Subscription]:
        """Return the durable subscriptions of a topic."""
        known: Sequence[Subscription] = self.for_held(topic, lambda store: store.subscriptions(), ())
        return [subscription for subscription in known if subscription.topic == topic]

    def dead_letter_of(self, store: Store) -> str | None:
        """Return the pattern of the name of a store's dead-letter queue. None: undelivered messages are dropped."""
        row = self.table.stores.get(store.store_id)
        return getattr(self._directories.options_of(row).options, "dead_letter", None) if row is not None else None

    def option_for(self, destination: Destination, name: str) -> Any:
        """Return an option of the store that a destination is in, or would be; None if its kind has none of that
        name."""
        held = self.table.destinations.get(destination)
        row = self.table.stores.get(held.store_id) if held is not None else None
        config = self.route(destination).target if row is None else self._directories.options_of(row)
        return getattr(config.options, name, None)

    # By id, by name, all

    def with_id(self, store_id: bytes, call: Callable[[Store], T]) -> T:
        """Call with the store of that id; as `with_row`. Raises PlacementError for one that is not recorded."""
        return self.with_row(self._row_with_id(store_id), call)

    def _row_with_id(self, store_id: bytes) -> StoreRow:
        row = self.table.stores.get(store_id)
        if row is None:
            raise PlacementError(f"no store {store_id.hex()} is recorded in {self.config.directory}")
        return row

    def shared_rows(self) -> list[StoreRow]:
        """Return the stores that another process may have had before (Store.shared). One that was never used from here
        is made and recorded: its tables may be there."""
        rows = [row for row in self.table.stores.values() if self._is_shared(self._directories.options_of(row))]
        for config in self.config.stores:
            path = self.config.directory_of(config)
            if not config.per_destination and self._is_shared(config):
                with self._stores.exclusive(self._directories.recorded(path)):
                    if self.table.store_at(self._directories.recorded(path)) is None:
                        rows.append(self._made(config, path, config.name))
        return rows

    def peek(self, store_id: bytes, transaction: bytes) -> bool | None:
        """Return whether a store has committed a transaction, as Store.peek. Raises PlacementError for one that is not
        recorded, StoreFailedError."""
        row = self._row_with_id(store_id)
        options = self._directories.options_of(row).options
        peek = getattr(self._stores.adapter(row.kind), "peek", None)
        return None if peek is None else peek(self._directories.path(row), options, store_id, transaction)

    def _is_shared(self, config: StoreConfig) -> bool:
        asked = getattr(self._stores.adapter(config.kind), "is_shared", None)
        return asked is not None and bool(asked(config.options))

    def open_store_of(self, destination: Destination) -> Store | None:
        """Return the store that a destination is recorded in, if it is open. Never waits."""
        known = self.table.destinations.get(destination)
        return self.open_store(known.store_id) if known is not None else None

    def open_store(self, store_id: bytes) -> Store | None:
        """Return the store of that id if it is open. Never waits."""
        row = self.table.stores.get(store_id)
        return self._stores.get(row) if row is not None else None

    def name_of(self, store_id: bytes) -> str:
        """Return a store's name, or its id where it has none."""
        row = self.table.stores.get(store_id)
        return row.name if row is not None else store_id.hex()

    def open_stores(self) -> list[Store]:
        """Return the stores that are open."""
        return list(self._stores.values())

    def stats(self) -> tuple[dict[str, StoreStats], tuple[str, ...]]:
        """Return the statistics of each store, by its name, and the names of the unresponsive ones. Stores that are not
        open are opened for it. Of a store that cannot be asked `failed` says why, beside its latest figures, if any."""
        while True:
            rows, errors = self.rows_by_name(), dict[str, BaseException]()
            stores, unresponsive = self._statistics.of(rows, errors)
            for error in errors.values():
                ours = isinstance(error, ClosedError | OutOfDescriptorsError)  # it says nothing of the store
                if ours or not isinstance(error, AnabranchError | OSError):
                    raise error
            if all(rows[name].store_id in self.table.stores for name in errors):  # else it was removed meanwhile
                stores |= {name: self._failed_stats(rows[name], stores.get(name), errors[name]) for name in errors}
                return {name: stores[name] for name in rows if name in stores}, unresponsive

    def _failed_stats(self, row: StoreRow, latest: StoreStats | None, error: BaseException) -> StoreStats:
        known = latest or StoreStats(row.name, row.kind, 0, {}, leased=0, sends=0, acks=0, syncs=0, batches=0)
        there = dict.fromkeys(self.table.destinations_in(row.store_id), 0) | dict(known.destinations)
        return replace(known, destinations=there, failed=str(error))

    def synced_stats(
        self, rows: Mapping[str, StoreRow], errors: dict[str, BaseException]
    ) -> tuple[dict[str, StoreStats], dict[str, float]]:
        """Return the statistics of stores, by name, each once all that it has written is on disk; and the names of
        those that wait for their disk, with for how many seconds. A store's error is put into `errors`."""
        answers, silent = self._health.of(rows, errors)
        return answers, {name: self._health.unanswered_seconds(name) for name in silent}

    def subscriptions(self) -> set[Subscription]:
        """Return the durable subscriptions of all stores; those that are not open are opened."""
        rows = list(self.table.stores.values())
        found = shared().for_each(rows, lambda row: self.with_row(row, lambda store: store.subscriptions()))
        for row, _, error in found:
            if error is not None and row.store_id in self.table.stores:  # else it was removed meanwhile
                raise error
        return {subscription for _, known, _ in found for subscription in known or ()}

    def record_missing(self, store: Store, destinations: Iterable[Destination], late: bool = False) -> None:
        """Record those of these destinations of a store, to which a transaction sends or subscribes, that have no
        row. `late`: it has taken effect there, whatever the routes say. Raises MovedError if another store has one of
        them, or is to have it by the routes in force."""
        missing = [name for name in destinations if self.by_destination.get(name) is not store]
        if not missing:
            return
        routes, row = self.routing.routes, self.table.stores.get(store.store_id)
        if row is None:
            raise ClosedError(f"store {store.name!r} was removed")
        with self._stores.removing(row.path):
            new = [name for name in missing if name not in self.table.destinations]
            if new:
                with self._stores.exclusive(row.path):
                    if self.table.stores.get(row.store_id) is not row:
                        raise ClosedError(f"store {row.name!r} was removed")
                    if late:
                        self._record(new, row)
                    elif all(self._routed_row(name, self.route(name)) is row for name in new):
                        self._record(new, row, routes)
        for name in missing:
            held = self.table.destinations.get(name)
            if held is None and late:
                continue  # it was left out, and is recorded when the store is opened next
            if held is None or held.store_id != store.store_id:
                raise MovedError(Gate.passed(name))

    def require_own(self, message: Message) -> None:
        """Raise UnknownMessageError for a message of another router."""
        if message._store.store_id not in self.table.stores and not follow(message):
            raise UnknownMessageError(f"{message!r} was received from another router; ack it there")

    def all_stores(self) -> list[Store]:
        """Return every store that can be opened, those of `shared_rows` too."""
        stores = []
        try:
            self.shared_rows()
        except (AnabranchError, OSError) as error:
            log.warning("a store that other processes use too cannot be made here: %s", error)
        for name, row in self.rows_by_name().items():
            try:
                stores.append(self._stores.open(row))
            except (AnabranchError, OSError) as error:
                log.warning("store %s cannot say what is prepared in it: %s", name, error)
        return stores

    def reopen(self, name: str) -> None:
        """Close a store and open it again. Raises ConfigError for a name that none has."""
        rows = self.rows_by_name()
        if name not in rows:
            raise ConfigError([f"there is no store {name!r} to reopen; there are: {', '.join(rows) or 'none yet'}"])
        row = rows[name]
        try:
            self._stores.close_at(row.path)
        except (AnabranchError, OSError) as error:
            log.warning("store %s: closing it after a failure: %s", name, error)
        self._stores.open(row)

    def rows_by_name(self) -> dict[str, StoreRow]:
        """Return all recorded stores by their names. A store whose name another has been given since is told apart by
        its directory."""
        rows: dict[str, StoreRow] = {}
        for row in sorted(self.table.stores.values(), key=lambda row: (row.name, row.path)):
            rows[row.name if row.name not in rows else f"{row.name} ({row.path})"] = row
        return rows


def _synced_stats(store: Store) -> StoreStats:
    stats = store.stats()
    if stats.failed is None:
        store.sync()
    return stats


def _row(destination: Destination, row: StoreRow, match: Match[StoreConfig]) -> DestinationRow:
    return DestinationRow(destination.kind.value, destination.name, row.store_id, match.pattern.text)
