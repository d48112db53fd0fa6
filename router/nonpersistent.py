"""The companions of durable stores: memory stores that keep, beside each, what was sent to it with
`persistent=False`.

They are made on first need and gone when the router closes. What does not fit into memory lies in swap files, in
`transient/<store id>` in the data directory.
"""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ..adapters.base import PRIORITY_MAX, Change, Message, Store, Subscription
from ..adapters.memory import companion as open_companion
from ..adapters.memory import position_of
from ..policies.errors import UnknownSubscriptionError
from ..policies.options import MemoryOptions, StoreOptions

log = logging.getLogger(__name__)


class NonpersistentStore(NamedTuple):
    """A companion, and how its messages and its durable store's are one order."""

    store: Store
    priorities: bool

    def order(self, message: Message) -> tuple[int, int, int, int]:
        """What the messages of both sort by."""
        lane = PRIORITY_MAX - message.priority if self.priorities else 0
        if message.store is self.store:
            return lane, self.position(message), 1, message.seq
        return lane, message.seq, 0, 0

    def position(self, message: Message) -> int:
        """The seq of the durable store's message that one of the companion comes after."""
        return position_of(message)

    def mirror(self, subscription: Subscription, subscribe: bool) -> int:
        """Begin or end what was begun or ended in the durable store; returns how many messages went with it. Nothing
        is refused: it has happened, and who has claimed one of these messages has claimed what is gone."""
        subscription = _plain(subscription)
        count = 0
        if not subscribe:
            try:
                count = self.store.depth(subscription.topic, subscription.key)
            except UnknownSubscriptionError:
                return 0
        self.store.commit([], [], changes=[Change(subscription, subscribe)])
        return count

    def align(self, durable: Store) -> None:
        """Begin and end what was begun and ended in the durable store, by a transaction that was prepared, say."""
        mine = {(known.topic, known.key): known for known in self.store.subscriptions()}
        there = {(known.topic, known.key): known for known in durable.subscriptions()}  # last: it comes first there
        for name in there.keys() - mine.keys():
            self.mirror(there[name], True)
        for name in mine.keys() - there.keys():
            self.mirror(mine[name], False)


def _plain(subscription: Subscription) -> Subscription:
    """What only the durable store hands back is left out."""
    return Subscription(subscription.topic, subscription.name, subscription.client_id)


class NonpersistentStores:
    """Threads: all. Each store's companion is made under a lock of that store's own, so that one whose disk hangs holds
    up no other; who looks one up takes none. `_lock` guards the fields."""

    def __init__(self, directory: Path, owner: object = None) -> None:
        """`owner` as of StoreRegistry."""
        self._directory, self._owner = directory, owner
        self._lock = threading.RLock()  # re-entrant, for signal handlers
        self._locks: dict[bytes, threading.RLock] = {}
        self._by_store: dict[bytes, NonpersistentStore] = {}
        """By the durable store's id."""
        self._durable: dict[bytes, bytes] = {}
        """The durable store's id, by the companion's."""
        self._watchers: list[Callable[[], None]] = []
        """Called when one is made: who waits for a message now waits for two stores."""

    def sweep(self) -> None:
        """Remove what those of a killed process have left. By the directory's owner, before any is made."""
        try:
            shutil.rmtree(self._directory)
        except FileNotFoundError:
            pass
        except OSError as error:
            log.warning("what was swapped by a process that was killed cannot be removed: %s", error)

    def lock(self, store_id: bytes) -> threading.RLock:
        """Held while the companion of a store is made with the subscriptions that the store has: who has begun or ended
        one there takes it before looking whether there is a companion."""
        with self._lock:
            return self._locks.setdefault(store_id, threading.RLock())

    def get(self, store_id: bytes) -> NonpersistentStore | None:
        return self._by_store.get(store_id)

    def stores(self) -> list[Store]:
        return [companion.store for companion in list(self._by_store.values())]

    def __bool__(self) -> bool:
        return bool(self._by_store)

    def durable_of(self, store_id: bytes) -> bytes | None:
        """The id of the store whose companion has this id; None if none has."""
        return self._durable.get(store_id)

    def made_for(self, durable: Store, options: object, last_seq: Callable[[], int]) -> NonpersistentStore:
        """That of a durable store, made if need be. `last_seq` tells how far the durable store has come. Raises
        ClosedError if it has to be made and the durable store is closed."""
        companion = self._by_store.get(durable.store_id)
        if companion is None:
            with self.lock(durable.store_id):
                companion = self._by_store.get(durable.store_id)
                if companion is None:
                    companion = self._make(durable, options, last_seq)
                    self._durable[companion.store.store_id] = durable.store_id
                    self._by_store[durable.store_id] = companion
            while self._watchers:
                try:
                    self._watchers.pop()()
                except IndexError:
                    pass  # another thread woke it
        return companion

    def _make(self, durable: Store, options: object, last_seq: Callable[[], int]) -> NonpersistentStore:
        common = options if isinstance(options, StoreOptions) else StoreOptions()
        shared = {name: getattr(common, name) for name in StoreOptions.model_fields}
        subscriptions = durable.subscriptions()  # before anything is made: it may have been closed for being idle
        store = open_companion(
            f"{durable.name} (not persistent)",
            self._directory / durable.store_id.hex(),
            MemoryOptions(**shared),
            last_seq,
        )
        store.owner = self._owner
        for subscription in subscriptions:
            store.subscribe(_plain(subscription))
        return NonpersistentStore(store, common.priorities)

    def discard(self, store_id: bytes) -> None:
        """The store of that id is gone, and its companion with it."""
        with self.lock(store_id):
            companion = self._by_store.pop(store_id, None)
            if companion is not None:
                companion.store.close()
                self._durable.pop(companion.store.store_id, None)
        with self._lock:
            self._locks.pop(store_id, None)

    def watch(self, wake: Callable[[], None]) -> Callable[[], None]:
        """Call `wake` once when a companion is made. Returns what ends that."""
        self._watchers.append(wake)

        def end() -> None:
            try:
                self._watchers.remove(wake)
            except ValueError:
                pass  # it was called

        return end

    def close(self) -> None:
        """Drop them with all they hold. Idempotent."""
        for companion in list(self._by_store.values()):
            companion.store.close()
        self._by_store.clear()
        self._durable.clear()
        with suppress(OSError):
            self._directory.rmdir()
        while self._watchers:
            self._watchers.pop()()
