"""MemoryStore: the contract of adapters/base.py in memory, with swap files for what does not fit."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import ClassVar, Final, cast

from pydantic import BaseModel

from ...policies.destination import Destination
from ...policies.errors import StoreFailedError, StoreFullError
from ...policies.options import MemoryOptions
from ..base import (
    DEFAULT_PRIORITY,
    Change,
    Headers,
    Message,
    Outgoing,
    Pending,
    Prepared,
    Progress,
    Receipt,
    StoreStats,
    Subscription,
    SubscriptionKey,
    Undelivered,
)
from ..clock import now_us
from ..delivery import CLAIMED, LEASED
from ..files import disk_errors
from ..locking import fork_generation
from ..subscriptions import checked, require_same, require_unclaimed, shown
from . import check, removal
from .branches import Branch
from .core import Core
from .directory import StoreDirectory, TransientDirectory
from .receiving import Receiving
from .records import Encoded, StoredMessage, encode
from .settling import Settling

log = logging.getLogger(__name__)

SENDS_AT_ONCE: Final = 256
"""Messages of one send_many that take effect together; others may come between."""


class MemoryStore:
    """A store that keeps nothing. Threads: all. Forks: a child's calls raise ClosedError (rule D4). A signal handler
    that interrupted a call of its own thread gets RuntimeError (rule G3)."""

    options_model: ClassVar[type[BaseModel]] = MemoryOptions
    volatile = True
    shared = False

    def __init__(
        self,
        name: str,
        directory: Path,
        options: MemoryOptions,
        index_directory: Path | None = None,
        *,
        position: Callable[[], int] | None = None,
    ) -> None:
        """`position` is asked, under the store's lock, when messages take effect, and kept with them (position_of)."""
        self.name = name
        self.options = options
        self.store_id = b""
        self.descriptors = 1
        self.owner: object = None
        self._directory: StoreDirectory | TransientDirectory = StoreDirectory(
            name, directory, options.file_mode, self._lose
        )
        self._core = Core(name, directory, options, position)
        self._receiving = Receiving(self, self._core)
        self._settling = Settling(self, self._core)
        self._opened = False

    @classmethod
    def create(cls, name: str, directory: Path, options: MemoryOptions) -> bytes:
        """Make its directory, whole or not at all (rule D2); returns its id. The directory must not exist."""
        with disk_errors(f"store {name!r} cannot be created"):
            return StoreDirectory(name, directory, options.file_mode).create()

    @classmethod
    def identify(cls, directory: Path) -> bytes | None:
        """The id of the store in a directory, None if there is none."""
        return StoreDirectory("", directory).identify()

    @classmethod
    def is_contained(cls, options: MemoryOptions) -> bool:
        """Whether all of a store lies in its directory."""
        return True

    @classmethod
    def companion(
        cls, name: str, directory: Path, options: MemoryOptions, position: Callable[[], int] | None = None
    ) -> MemoryStore:
        """A store with an id of its own, open, that nobody opens again. Its directory is made when something is
        swapped, and removed at close."""
        store = cls(name, directory, options, position=position)
        store._directory = TransientDirectory(directory)
        store.open()
        return store

    # Opening and closing

    def open(self, progress: Progress | None = None) -> None:
        core = self._core
        with disk_errors(f"store {self.name!r} cannot be opened"):
            if self._opened:
                self._directory.lock()  # which says that it is open
            try:
                store_id = self._directory.lock()
                last = core.contents.seq
                core.begin()
                core.swap.wipe()
                # By the clock, so that no seq comes twice, neither in a next life of the store nor in a next process.
                core.contents.seq = max(last, now_us())
                self.store_id = store_id
                core.generation = fork_generation()
                core.failed = None
                self._directory.require_lock()
                self._opened = core.accepting = True
            except BaseException:
                self._opened = core.accepting = False
                self._directory.unlock()
                raise

    def close(self) -> None:
        core = self._core
        if not self._opened or core.generation != fork_generation():
            return
        self._directory.look_after_lock()
        core.accepting = False
        with core.lock:
            last = core.contents.seq
            self._wake_all()
            try:
                if core.failed is None:  # else the files there may be another's
                    core.swap.wipe()
            except OSError as error:
                log.warning("store %s: its swap files cannot be removed now, the next open does: %s", self.name, error)
            self._directory.unlock()
            core.begin()
            core.contents.seq = last
            self._opened = False

    def _lose(self, error: StoreFailedError) -> None:
        """The lock's file is gone, or is another's: so may the swap files be."""
        log.error("store %s has failed: %s", self.name, error)
        self._core.failed = error
        self._wake_all()

    def _wake_all(self) -> None:
        for state in list(self._core.contents.states.values()):
            for feed in (state.feed, *state.feeds):
                feed.wake()

    @property
    def last_seq(self) -> int:
        return self._core.contents.seq

    # Sending

    def send(
        self,
        destination: Destination,
        body: bytes,
        headers: Headers | None = None,
        message_id: str | None = None,
        sync: bool | None = None,
        priority: int = DEFAULT_PRIORITY,
        expires_at_ms: int = 0,
    ) -> Receipt:
        message = Outgoing(body, headers, message_id, priority, expires_at_ms)
        return self._send([encode(destination, message, self.options.message_bytes_max)])[0]

    def send_nowait(
        self,
        destination: Destination,
        body: bytes,
        headers: Headers | None = None,
        message_id: str | None = None,
        sync: bool | None = None,
        priority: int = DEFAULT_PRIORITY,
        expires_at_ms: int = 0,
    ) -> Future[Receipt]:
        future: Future[Receipt] = Future()
        future.set_running_or_notify_cancel()
        try:
            future.set_result(self.send(destination, body, headers, message_id, sync, priority, expires_at_ms))
        except (StoreFullError, StoreFailedError) as error:
            future.set_exception(error)
        return future

    def send_many(
        self, destination: Destination, messages: Iterable[Outgoing | bytes], sync: bool | None = None
    ) -> list[Receipt]:
        limit = self.options.message_bytes_max
        encoded = [
            encode(destination, message if isinstance(message, Outgoing) else Outgoing(message), limit)
            for message in messages
        ]  # all of them before any is sent: what is wrong with one refuses all
        receipts: list[Receipt] = []
        for at in range(0, len(encoded), SENDS_AT_ONCE):
            receipts += self._send(encoded[at : at + SENDS_AT_ONCE])
        if not encoded:
            self._core.require_open()
        return receipts

    def _send(self, messages: Sequence[Encoded]) -> list[Receipt]:
        core = self._core
        core.require_open()
        with core.lock:
            core.enter()
            core.make_room(messages)
            change = core.change()
            receipts = [change.send(message) for message in messages]
            core.carry_out(change)
        return receipts

    # Receiving

    def receive(
        self, destination: Destination, timeout: float | None = 0, subscription: SubscriptionKey | None = None
    ) -> Message | None:
        return self._receiving.receive(destination, timeout, subscription)

    def watch(
        self, destination: Destination, subscription: SubscriptionKey | None, wake: Callable[[], None]
    ) -> Callable[[], None]:
        return self._receiving.watch(destination, subscription, wake)

    def browse(
        self,
        destination: Destination,
        limit: int | None = None,
        after: int | Message = 0,
        subscription: SubscriptionKey | None = None,
    ) -> Iterator[Message]:
        return self._receiving.browse(destination, limit, after, subscription)

    def take_undelivered(self, limit: int = 100) -> Sequence[Undelivered]:
        return self._receiving.take_undelivered(limit)

    # Settling

    def ack(self, messages: Sequence[Message]) -> None:
        self._settling.settle(messages, LEASED, [], [])

    def release(self, messages: Sequence[Message], delivered: bool = True) -> None:
        self._settling.give_back(messages, LEASED, delivered)

    def claim(self, message: Message) -> None:
        self._settling.claim(message)

    def unclaim(self, messages: Sequence[Message]) -> None:
        self._settling.give_back(messages, CLAIMED, True)

    # Durable subscriptions

    def subscribe(self, subscription: Subscription, retroactive: bool = False) -> bool:
        core = self._core
        core.require_open()
        checked(subscription)
        with core.lock:
            core.enter()
            state = core.contents.states.get(subscription.topic)
            known = state.subscriptions.get(subscription.key) if state is not None else None
            if known is not None:
                require_same(known.subscription, subscription)
                return False
            core.make_room([])
            change = core.change()
            change.change(Change(subscription, True, retroactive), core.residence.records)
            core.carry_out(change)
            return True

    def unsubscribe(self, topic: Destination, subscription: SubscriptionKey) -> int:
        core = self._core
        core.require_open()
        with core.lock:
            core.enter()
            known = core.owners(topic, subscription)[1]
            assert known is not None
            require_unclaimed(f"the {shown(topic, subscription)}", "removed", core.delivery.claimed(known.feed))
            change = core.change()
            count = change.change(Change(known.subscription, False), core.residence.records)
            core.carry_out(change, required=False)
            return count

    def subscriptions(self) -> Sequence[Subscription]:
        return self._core.asked(lambda: [some.subscription for some in self._core.contents.subscriptions()])

    # Transactions

    def commit(
        self,
        sends: Sequence[tuple[Destination, Outgoing]],
        acks: Sequence[Message],
        sync: bool | None = None,
        changes: Sequence[Change] = (),
    ) -> list[Receipt]:
        for change in changes:
            checked(change.subscription)
        return self._settling.settle(acks, CLAIMED, self._encode(sends), changes)

    def _encode(self, sends: Sequence[tuple[Destination, Outgoing]]) -> list[Encoded]:
        limit = self.options.message_bytes_max
        return [encode(destination, message, limit) for destination, message in sends]

    def reserve(self, sends: Sequence[tuple[Destination, Outgoing]]) -> object:
        core = self._core
        core.require_open()
        encoded = self._encode(sends)
        with core.lock:
            core.enter()
            return core.room.reserve(core.room_for(encoded)) if core.room.limited else None

    def prepare(
        self,
        transaction: bytes,
        participants: Sequence[bytes],
        sends: Sequence[tuple[Destination, Outgoing]],
        acks: Sequence[Message],
        sync: bool,
        room: object = None,
        changes: Sequence[Change] = (),
    ) -> Pending[None]:
        self._core.require_open()
        self._directory.require_lock()
        for change in changes:
            checked(change.subscription)
        taken = cast("Sequence[StoredMessage]", list(acks))
        return self._settling.prepare(
            Branch(transaction, tuple(participants), self._encode(sends), taken, changes, room)
        )

    def commit_prepared(self, transaction: bytes) -> Pending[list[Receipt]]:
        return self._settling.commit_prepared(transaction)

    def rollback_prepared(self, transaction: bytes) -> Pending[bool]:
        return self._settling.rollback_prepared(transaction)

    def recover_prepared(self) -> Sequence[Prepared]:
        return self._core.asked(self._core.branches.summaries)

    def committed(self) -> Sequence[bytes]:
        return self._core.asked(self._core.branches.committed)

    def forget(self, transactions: Sequence[bytes]) -> None:
        self._core.asked(lambda: self._core.branches.forget(transactions))

    def sync(self) -> None:
        self._core.require_open()

    # Upkeep

    def purge(self, destination: Destination, subscription: SubscriptionKey | None = None) -> int:
        core = self._core
        core.require_open()
        with core.lock:
            core.enter()
            state, only = core.owners(destination, subscription)
            if state is None:
                return 0
            change = core.change()
            count = removal.purge(change, state, only, core.delivery, core.residence)
            if count:
                core.carry_out(change, False, partial(removal.purged, state, core.delivery, core.contents))
            return count

    def delete(self, destination: Destination) -> int:
        core = self._core
        core.require_open()
        with core.lock:
            core.enter()
            state = core.contents.states.get(destination)
            if state is None:
                return 0
            claimed = sum(core.delivery.claimed(feed) for feed in state.feeds)
            require_unclaimed(str(destination), "deleted", claimed)
            core.steps.do(removal.deletion(state, core.contents, core.delivery, core.residence))
            return state.count

    def retire(self) -> bool:
        """As the contract says; closing it would lose what it holds, so it refuses as long as it holds anything: a
        message, a subscription, a message id, an outcome."""
        core = self._core
        core.require_open()
        with core.lock:
            core.enter()
            contents, delivery = core.contents, core.delivery
            if delivery.waiting or delivery.held or contents.messages or core.branches.prepared:
                return False
            if len(contents.window) or core.branches.committed() or any(True for _ in contents.subscriptions()):
                return False
            core.accepting = False
            return True

    # Asking

    def destinations(self) -> Sequence[Destination]:
        return self._core.asked(lambda: [d for d, state in self._core.contents.states.items() if state.declared])

    def depth(self, destination: Destination, subscription: SubscriptionKey | None = None) -> int:
        core = self._core
        core.require_open()
        with core.lock:
            core.enter()
            state, only = core.owners(destination, subscription)
            if only is not None:
                return only.count
            return state.count if state is not None else 0

    def reclaim(self) -> int:
        """Nothing: swap files go by themselves."""
        self._core.require_open()
        return 0

    def stats(self) -> StoreStats:
        core = self._core
        if core.failed is None:
            return core.asked(self._stats)
        with core.lock:
            return self._stats()

    def _stats(self) -> StoreStats:
        core = self._core
        contents = core.contents
        return StoreStats(
            name=self.name,
            kind="memory",
            messages=contents.messages,
            destinations={d: state.count for d, state in contents.states.items() if state.declared},
            leased=len(core.delivery.held),
            sends=core.sends,
            acks=core.acks,
            syncs=0,
            batches=core.batches,
            subscriptions={some.subscription: some.count for some in contents.subscriptions()},
            memory_bytes=contents.memory + core.residence.prepared,
            swap_bytes=core.swap.bytes,
            failed=str(core.failed) if core.failed is not None else None,
            dropped=core.dropped,
        )

    def check(self) -> Iterator[str]:
        core = self._core
        yield from core.asked(lambda: list(check.violations(core.contents, core.residence, core.swap)))


def companion(
    name: str, directory: Path, options: MemoryOptions, position: Callable[[], int] | None = None
) -> MemoryStore:
    """MemoryStore.companion."""
    return MemoryStore.companion(name, directory, options, position)


def position_of(message: Message) -> int:
    """What the `position` of its store said when the message took effect; 0 if it has none."""
    return cast("StoredMessage", message).position
