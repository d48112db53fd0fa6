"""The stores that are open: opened on first use, closed when there are too many, opened again after a failure."""

from __future__ import annotations

import logging
import os
import random
import threading
from collections.abc import Callable, Iterator
from typing import Final, TypeVar
from weakref import WeakSet, WeakValueDictionary

from ...adapters.core import Store
from ...adapters.core.store_types import Progress
from ...adapters.system.background import shared
from ...adapters.system.conditions import unless_busy
from ...adapters.system.descriptors import STORE, read_files, shares
from ...adapters.system.files import is_out_of_files, refused
from ...adapters.system.malloc import give_memory_back
from ...policies.config.adapters import load_adapter
from ...policies.errors import (
    AnabranchError,
    ClosedError,
    ConfigError,
    CorruptionError,
    MissingExtraError,
    PlacementError,
)
from ...policies.names.destination import Destination
from .on_disk.directories import StoreDirectories
from .record import DestinationsTable, StoreRow

log: logging.Logger = logging.getLogger(__name__)

OPEN_STORES_MAX: Final = 2048
"""Stores that a router keeps open at once, if the process may have so many files open; beyond either limit an idle one
is closed for each that is opened."""
SHED: Final = 2
"""Idle stores that are closed at once where the process can open no file any more."""
CLOSE_SECONDS: Final = 0.25
"""Seconds to wait for another store to be closed. After that a third one is closed, since the other's disk may hang."""
MEMORY_STORES: Final = 16
"""The number of stores closed together after which the memory that they leave behind is given back to the system."""

T = TypeVar("T")

_all: Final[WeakSet[OpenStores]] = WeakSet()
"""The open stores of all routers of this process."""
_all_lock = threading.RLock()  # re-entrant, for signal handlers


def _after_fork_in_child() -> None:
    global _all_lock
    _all_lock = threading.RLock()
    for stores in _all:  # those of the parent: what they have open is open here too, and is counted
        stores.after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)


def descriptors_held() -> int:
    """Return how many files and sockets the open stores of this process keep open, as they say."""
    with _all_lock:
        opened = list(_all)
    return sum(stores.descriptors for stores in opened)


class OpenStores:
    """The stores that are open, by the path in their row.

    `_lock` guards all fields; nothing waits for a disk under it. Each store has a lock of its own besides, held while
    it is made, opened or closed. So a store that rebuilds its index for minutes holds up nobody else (invariant 7).
    """

    def __init__(
        self, directories: StoreDirectories, table: DestinationsTable, owner: object, require_lock: Callable[[], None]
    ) -> None:
        """Make the table of a router that has no store open. `owner` and `require_lock` are as for StoreRegistry."""
        self._directories, self._table = directories, table
        self._owner, self._require_lock = owner, require_lock
        self._lock = threading.RLock()  # re-entrant, for signal handlers: another router's call may come here too
        self._open: dict[str, Store] = {}
        self._loaded: dict[str, Store] = {}
        """Stores, by path, that nobody may hold yet. If Ctrl-C struck whoever was to, the next one closes them."""
        # By path, while somebody has or wants them: of a store that nobody is at nothing stays.
        self._exclusive: WeakValueDictionary[str, threading.RLock] = WeakValueDictionary()
        self._removing: WeakValueDictionary[str, threading.RLock] = WeakValueDictionary()
        self.by_destination: dict[Destination, Store] = {}
        """The stores of destinations that were found before, so that a send need not look for its store."""
        self._found_in: dict[str, set[Destination]] = {}
        """The destinations of `by_destination`, by the store's path."""
        self._period = 0
        """The number of times that all of `by_destination` was forgotten. So `open` sees again which stores are used,
        at no cost to a send."""
        self._used_in: dict[str, int] = {}
        """The latest period in which each store was looked for."""
        self._idle: list[str] = []
        """Candidates for closing: the half that was used least recently, in random order. In order of use, stores that
        are used in turn would each be closed just before they are used again."""
        self._closings_left = 0
        """The number of closings until the next period."""
        self.accepting = False
        """Set by the router: True if stores may be opened."""
        self.progress: Progress | None = None
        self.on_open: Callable[[Store], None] = lambda store: None
        """Called with each store that was opened, before anybody else has it."""
        self.descriptors: int = 0
        """The number of descriptors that the open stores keep open, as they say. Counted anew now and then, since
        Ctrl-C may strike between a change of `_open` and of this."""
        with _all_lock:
            _all.add(self)

    def after_fork(self) -> None:
        """Replace the lock in a child: another thread of the parent may have held it."""
        self._lock = threading.RLock()

    def values(self) -> list[Store]:
        with self._lock:
            return list(self._open.values())

    def get(self, row: StoreRow) -> Store | None:
        """Return the store of a row if it is open."""
        return self._open.get(row.path)

    def exclusive(self, path: str) -> threading.RLock:
        """Return a lock. While it is held nobody else makes, opens or closes the store at this path."""
        return self._lock_of(self._exclusive, path)

    def removing(self, path: str) -> threading.RLock:
        """Return a lock. While it is held nobody else removes a destination of the store at this path, or finds that
        store by one. Taken before `exclusive`."""
        return self._lock_of(self._removing, path)

    def _lock_of(self, locks: WeakValueDictionary[str, threading.RLock], path: str) -> threading.RLock:
        with self._lock:
            lock = locks.get(path)
            if lock is None:
                lock = locks[path] = threading.RLock()
            return lock

    def open(self, row: StoreRow) -> Store:
        """Return the store of a row, opened if it is not open."""
        self._used_in[row.path] = self._period
        store = self._open.get(row.path)
        if store is not None:
            return store
        self._make_way()
        return self.with_descriptors(lambda: self._opened(row))

    def with_descriptors(self, call: Callable[[], T]) -> T:
        """Return the result of `call`, which opens or makes a store. If it could open no file any more, since the
        application has more open than is left for it, some idle stores are closed, and it is called once more."""
        try:
            return call()
        except (AnabranchError, OSError) as error:
            if not is_out_of_files(error) or not self._shed():
                raise
        return call()

    def _shed(self) -> bool:
        """Close files and some idle stores, whatever the limits; returns whether there were any."""
        files = read_files.let_go()
        closed = [self._close_idle_one() for _ in range(SHED)]
        return files or any(closed)

    def _opened(self, row: StoreRow) -> Store:
        with self.exclusive(row.path):
            self._require_accepting()
            store = self._open.get(row.path)
            if store is None:
                self._require_lock()
                store = self.load(row)
                try:
                    self.on_open(store)
                except BaseException:
                    self.unload(row.path)
                    raise
                with self._lock:
                    self._open[row.path] = store
                    self._loaded.pop(row.path, None)
                    self.descriptors += getattr(store, "descriptors", STORE)
            return store

    def remember(self, destination: Destination, row: StoreRow, store: Store) -> None:
        """Let a destination's store be found in `by_destination` from now on, until the store is closed."""
        self._found_in.setdefault(row.path, set()).add(destination)
        self.by_destination[destination] = store

    def forget(self, destination: Destination, row: StoreRow, store: Store | None = None) -> None:
        """Look for the store of a destination again. If a store is given, only where it is that one."""
        if store is not None and self.by_destination.get(destination) is not store:
            return
        self.by_destination.pop(destination, None)
        self._found_in.get(row.path, set()).discard(destination)

    def forget_found(self) -> None:
        """Look for the store of each destination again."""
        self.by_destination.clear()
        self._found_in.clear()

    def load(self, row: StoreRow) -> Store:
        """Return a store by its row, opened for the caller, who has it exclusively and has to `unload` it."""
        self.unload(row.path)
        config, path = self._directories.options_of(row), self._directories.path(row)
        self._directories.require_own(path)
        store = self.adapter(row.kind)(row.name, path, self._directories.options(config), config.index_directory)
        store.owner = self._owner
        self._loaded[row.path] = store
        try:
            store.open(self.progress)
            if store.store_id != row.store_id:
                raise PlacementError(
                    f"{path} holds another store ({store.store_id.hex()}) than the recorded one "
                    f"({row.store_id.hex()}); put the recorded one back there"
                )
            self._require_accepting()
        except BaseException as error:
            if isinstance(error, CorruptionError) and not error.held:
                error._name_held(dict.fromkeys(map(str, self._table.destinations_in(row.store_id))), "this store")
            self.unload(row.path)
            raise
        return store

    def unload(self, path: str) -> None:
        """Close a store that was loaded and counts not as open. Idempotent."""
        store = self._loaded.get(path)
        if store is not None:
            store.close()
            self._loaded.pop(path, None)

    def adapter(self, kind: str) -> type[Store]:
        """Return the adapter of a kind. Raises ConfigError for a kind that is not installed, MissingExtraError,
        OutOfDescriptorsError."""
        try:
            adapter: type[Store] = load_adapter(kind)
        except MissingExtraError as error:
            config = self._directories.config
            places = [config._place_of(store) for store in config.stores if store.kind == kind]
            raise MissingExtraError(": ".join([*places[:1], str(error)])) from None
        except ValueError as error:
            cause = error.__cause__
            if isinstance(cause, OSError) and is_out_of_files(cause):
                raise refused(f"stores of kind {kind!r} cannot be used: {error}", cause) from error
            raise ConfigError([f"stores of kind {kind!r} cannot be used: {error}"]) from cause
        return adapter

    def _require_accepting(self) -> None:
        if not self.accepting:
            raise ClosedError("the router was closed meanwhile; open it with anabranch.open(...)")

    def forget_closed(self, destination: Destination | None, row: StoreRow | None, store: Store) -> None:
        """Wait, after a ClosedError of an open router's store, until its closing is over: it was closed for being idle,
        or closing it was interrupted. The next call opens it again. `destination`: the one by which it was found, if it
        was."""
        if row is not None and self._open.get(row.path) is store:
            with self.exclusive(row.path):
                if self._open.get(row.path) is store:
                    self._close(row.path)
        if destination is not None and self.by_destination.get(destination) is store:
            self.by_destination.pop(destination, None)

    def discard(self, row: StoreRow, remove: Callable[[], None]) -> bool:
        """Close a store that has no destination if nobody needs it open, call `remove`, and keep nothing of it; returns
        whether it did. With `removing` held."""
        with self.exclusive(row.path):
            store = self._open.get(row.path)
            if store is None or not self._retired(store, to_remove=True):
                return False
            self._close(row.path)
            remove()
            return True

    def close_at(self, path: str) -> None:
        """Close the store at a path if it is open."""
        with self.exclusive(path):
            self._close(path)

    def close_all(self, before: Callable[[bytes], None]) -> None:
        """Close every store, after a call of `before` with its id, and wait for those that are being opened. Raises the
        first error after closing all."""
        self.forget_found()

        def close(path: str) -> None:
            store = self._open.get(path)
            if store is not None:
                before(store.store_id)
            self.close_at(path)

        with self._lock:
            # Stores that are being opened too; and Ctrl-C may have struck a thread that looked into one.
            paths = list(dict.fromkeys((*self._open, *self._exclusive, *self._loaded)))
        count = len(self._open)
        errors = [error for _, _, error in shared().for_each(paths, close) if error is not None]
        if count >= MEMORY_STORES:
            give_memory_back()
        if errors:
            raise next((error for error in errors if not isinstance(error, (AnabranchError, OSError))), errors[0])

    def _close(self, path: str) -> None:
        """Close a store, under its lock. It counts as open until it is closed: an interrupted close is called again."""
        self.unload(path)
        store = self._open.get(path)
        if store is None:
            return
        for destination in self._found_in.pop(path, set()):
            if self.by_destination.get(destination) is store:
                self.by_destination.pop(destination, None)
        try:
            store.close()
        except Exception:
            self._drop(path)
            raise
        self._drop(path)

    def _drop(self, path: str) -> None:
        with self._lock:
            self._used_in.pop(path, None)
            store = self._open.pop(path, None)
            if store is not None:
                self.descriptors -= getattr(store, "descriptors", STORE)

    def _make_way(self) -> None:
        """Make way for one more store: keep the number of open stores, and of what they have open, bounded."""
        while (
            len(self._open) >= OPEN_STORES_MAX or descriptors_held() + STORE > shares().stores
        ) and self._close_idle_one():
            pass

    def _close_idle_one(self) -> bool:
        """Close a store that nobody needs open, of those that were not used lately; returns whether there was one. If
        closing it hangs, a thread of the background waits for the end."""
        for path in self._candidates():
            for _, closed, _ in shared().for_each([path], self.close_if_idle, CLOSE_SECONDS):
                if closed:
                    return True
        return False

    def _candidates(self) -> Iterator[str]:
        """Yield stores to close: some that were not used lately, then all."""
        if self._closings_left <= 0:
            self._begin_period()
        self._closings_left -= 1
        while self._idle:
            path = self._idle.pop()
            if path in self._open and self._used_in.get(path) != self._period:
                yield path
        self._begin_period()
        yield from self._by_age()

    def _by_age(self) -> list[str]:
        """Return the paths of open stores, by the period of their latest use."""
        with self._lock:
            paths = random.sample(list(self._open), len(self._open))
        return sorted(paths, key=lambda path: self._used_in.get(path, 0))

    def _begin_period(self) -> None:
        by_age = self._by_age()
        with self._lock:
            self.descriptors = sum(getattr(store, "descriptors", STORE) for store in self._open.values())
            self._idle = by_age[: max(1, len(by_age) // 2)]
            random.shuffle(self._idle)
            self._closings_left = len(by_age) // 8
            self._period += 1
            self.forget_found()

    def close_if_idle(self, path: str) -> bool:
        """Close the store at a path unless somebody needs it open, or is closing or opening it; returns whether it
        did."""
        store = self._open.get(path)
        return store is not None and bool(
            unless_busy(self.exclusive(path), lambda: self._close_if_retired(path, store))
        )

    def _close_if_retired(self, path: str, store: Store) -> bool:
        try:
            if self._open.get(path) is not store or not self._retired(store):
                return False
            self._close(path)
        except (AnabranchError, OSError) as error:
            log.warning("store %s failed while it was closed for being idle: %s", path, error)
        return True

    @staticmethod
    def _retired(store: Store, to_remove: bool = False) -> bool:
        try:
            return store.retire(to_remove)
        except AnabranchError:
            return False  # failed: it stays, for its users to hear why and to reopen it
