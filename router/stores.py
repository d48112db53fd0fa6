"""The stores that are open: opened on first use, closed when there are too many, opened again after a failure."""

from __future__ import annotations

import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Final, TypeVar
from weakref import WeakSet

from ..adapters.background import shared
from ..adapters.base import Adapter, Progress, Store
from ..adapters.descriptors import STORE, read_files, shares
from ..adapters.files import is_out_of_files
from ..policies.destination import Destination
from ..policies.errors import AnabranchError, ClosedError, ConfigError, CorruptionError, PlacementError
from ..policies.kinds import load_adapter
from .layout import Layout
from .placement import StoreRow

log = logging.getLogger(__name__)

OPEN_STORES_MAX: Final = 256
"""Stores that a router keeps open at once, if the process may have so many files open; beyond either limit an idle one
is closed, of those not used since the last was closed the first."""
SHED: Final = 2
"""Idle stores that are closed at once where the process can open no file any more."""

T = TypeVar("T")

_all: Final[WeakSet[OpenStores]] = WeakSet()
"""Those of all routers of this process."""
_all_lock = threading.RLock()  # re-entrant, for signal handlers


def _after_fork_in_child() -> None:
    global _all_lock
    _all_lock = threading.RLock()
    for stores in _all:  # those of the parent: what they have open is open here too, and is counted
        stores.after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)


def descriptors_held() -> int:
    """How many files and sockets the open stores of this process keep open, as they say."""
    with _all_lock:
        opened = list(_all)
    return sum(getattr(store, "descriptors", STORE) for stores in opened for store in stores.values())


class OpenStores:
    """Which stores are open, by the path in their row.

    `_lock` guards all fields; nothing waits for a disk under it. Each store has a lock of its own besides, held while
    it is made, opened or closed, so that one that rebuilds its index for minutes holds up nobody else (invariant 7).
    """

    def __init__(self, layout: Layout, owner: object = None, require_lock: Callable[[], None] = lambda: None) -> None:
        """As of Places."""
        self._layout, self._owner, self._require_lock = layout, owner, require_lock
        self._lock = threading.RLock()  # re-entrant, for signal handlers: another router's call may come here too
        self._open: OrderedDict[str, Store] = OrderedDict()
        self._exclusive: dict[str, threading.RLock] = {}
        self._last_seqs: dict[str, int] = {}
        """Of stores that were closed."""
        self.by_destination: dict[Destination, Store] = {}
        """Found before. It is emptied whenever a store is closed for being idle: a store that is used goes through
        `open` again then, which is how `_open` knows the order of use at no cost to a send."""
        self.accepting = False
        """Set by the router: whether stores may be opened."""
        self.progress: Progress | None = None
        self.on_open: Callable[[Store], None] = lambda store: None
        """Called with each store that was opened, before anybody else has it."""
        self.recorded_in: Callable[[StoreRow], Iterable[Destination]] = lambda row: ()
        """The destinations that are recorded in a store."""
        with _all_lock:
            _all.add(self)

    def after_fork(self) -> None:
        """In a child: another thread of the parent may have held the lock."""
        self._lock = threading.RLock()

    def values(self) -> list[Store]:
        with self._lock:
            return list(self._open.values())

    def is_open(self, row: StoreRow) -> bool:
        return row.path in self._open

    def last_seq(self, path: str) -> int:
        """The highest seq that the store at a path has given out, also if it was closed for being idle."""
        store = self._open.get(path)
        return store.last_seq if store is not None else self._last_seqs.get(path, 0)

    @contextmanager
    def exclusive(self, path: str) -> Iterator[None]:
        """Nobody else makes, opens or closes the store at this path meanwhile."""
        with self._lock:
            lock = self._exclusive.setdefault(path, threading.RLock())
        with lock:
            yield

    def open(self, row: StoreRow) -> Store:
        """The store of a row, opened if it is not open."""
        with self._lock:
            store = self._open.get(row.path)
            if store is not None:
                self._open.move_to_end(row.path)
                return store
        self._close_idle()
        return self.with_descriptors(lambda: self._opened(row))

    def with_descriptors(self, call: Callable[[], T]) -> T:
        """What `call`, which opens or makes a store, returns. If it could open no file any more, since the application
        has more open than is left for it, some idle stores are closed, and it is called once more."""
        try:
            return call()
        except (AnabranchError, OSError) as error:
            if not is_out_of_files(error) or not self._shed():
                raise
        return call()

    def _shed(self) -> bool:
        """Close files and some idle stores, whatever the limits; returns whether there were any."""
        files = read_files.let_go()
        closed = sum(self._close_one() for _ in range(SHED))
        return files or closed > 0

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
                    store.close()
                    raise
                with self._lock:
                    self._open[row.path] = store
            return store

    def load(self, row: StoreRow) -> Store:
        """A store by its row, opened for the caller, who has to close it."""
        config, path = self._layout.options_of(row), self._layout.path(row)
        store = self.adapter(row.kind)(row.name, path, self._layout.options(config), config.index_directory)
        store.owner = self._owner
        try:
            store.open(self.progress)
        except CorruptionError as error:
            if not error.held:
                error.name_held(dict.fromkeys(map(str, self.recorded_in(row))), "this store")
            raise
        if self.accepting and store.store_id == row.store_id:
            return store
        store.close()
        self._require_accepting()
        raise PlacementError(
            f"{path} holds another store ({store.store_id.hex()}) than the recorded one ({row.store_id.hex()}); put "
            f"the recorded one back there"
        )

    def adapter(self, kind: str) -> Adapter:
        """Raises ConfigError for a kind that is not installed."""
        try:
            adapter: Adapter = load_adapter(kind)
        except ValueError as error:
            raise ConfigError([f"stores of kind {kind!r} cannot be used: {error}"]) from error
        return adapter

    def _require_accepting(self) -> None:
        if not self.accepting:
            raise ClosedError("the router was closed meanwhile; open it with anabranch.open(...)")

    def forget_closed(self, destination: Destination | None, store: Store) -> None:
        """After a ClosedError of an open router's store: it was closed for being idle, or closing it was interrupted.
        Waits until that is over; the next call opens it again. `destination`: by which it was found, if it was."""
        with self._lock:
            path = next((path for path, known in self._open.items() if known is store), None)
        if path is not None:
            with self.exclusive(path):
                if self._open.get(path) is store:
                    self._close(path)
        if destination is not None and self.by_destination.get(destination) is store:
            self.by_destination.pop(destination, None)

    def close_at(self, path: str) -> None:
        """Close the store at a path if it is open."""
        with self.exclusive(path):
            self._close(path)

    def close_all(self, before: Callable[[bytes], None]) -> None:
        """Close every store, after a call of `before` with its id, and wait for those that are being opened. Raises the
        first error after closing all."""
        self.by_destination.clear()

        def close(path: str) -> None:
            store = self._open.get(path)
            if store is not None:
                before(store.store_id)
            self.close_at(path)

        with self._lock:
            paths = list(self._exclusive)
        errors = [error for _, _, error in shared().for_each(paths, close) if error is not None]
        if errors:
            raise next((error for error in errors if not isinstance(error, (AnabranchError, OSError))), errors[0])

    def _close(self, path: str) -> None:
        """Under its lock. It counts as open until it is closed: an interrupted close is called again."""
        store = self._open.get(path)
        if store is None:
            return
        for destination in [d for d, known in list(self.by_destination.items()) if known is store]:
            self.by_destination.pop(destination, None)
        try:
            store.close()
        except Exception:
            self._drop(path)
            raise
        self._drop(path)

    def _drop(self, path: str) -> None:
        with suppress(AnabranchError):
            self._last_seqs[path] = self._open[path].last_seq
        with self._lock:
            self._open.pop(path, None)

    def _close_idle(self) -> None:
        """Keep the number of open stores, and of what they have open, bounded: close those that nobody needs open, the
        least recently used first."""
        with self._lock:
            count = len(self._open)
        if count >= OPEN_STORES_MAX:
            self._close_one()
        while descriptors_held() + STORE > shares().stores and self._close_one():
            pass

    def _close_one(self) -> bool:
        """Close the least recently used store that nobody needs open; returns whether there was one."""
        with self._lock:
            candidates = list(self._open.items())
            locks = [self._exclusive[path] for path, _ in candidates]
        self.by_destination.clear()
        for (path, store), lock in zip(candidates, locks, strict=True):
            if not lock.acquire(blocking=False):
                continue  # it is being closed already
            try:
                if self._open.get(path) is store and self._retired(store):
                    self._close(path)
                    return True
            except (AnabranchError, OSError) as error:
                log.warning("store %s failed while it was closed for being idle: %s", store.name, error)
                return True
            finally:
                lock.release()
        return False

    @staticmethod
    def _retired(store: Store) -> bool:
        try:
            return store.retire()
        except AnabranchError:
            return False  # failed: it stays, for its users to hear why and to reopen it
