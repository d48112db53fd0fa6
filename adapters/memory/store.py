"""MemoryStore: the contract of adapters/base.py in memory, with swap files for what does not fit.

    contents    what there is: destinations, chunks of messages, subscriptions      (contents.py, chunks.py)
    delivery    who holds which message and which comes next                        (adapters/delivery.py)
    residence   which chunks are in memory, which in the swap                       (residence.py, swap.py)

One lock guards all of it. What changes is worked out first and then carried out in a way that can be done again
(changes.py), so that Ctrl-C at any point leaves it whole.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import ClassVar, Final, TypeVar, cast

from pydantic import BaseModel

from ...policies.destination import Destination, Kind
from ...policies.errors import (
    ClosedError,
    DestinationError,
    StoreFailedError,
    StoreFullError,
    SubscriptionError,
    TransactionError,
    UnknownSubscriptionError,
)
from ...policies.options import MemoryOptions
from ..base import (
    DEFAULT_PRIORITY,
    EXPIRED,
    Change,
    Done,
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
from ..delivery import CLAIMED, LEASED, LEAVING, Delivery, Feed, Note, Place, feeds_of
from ..files import disk_errors
from ..locking import fork_generation
from . import changes, check, removal
from .branches import Branch, Branches
from .browsing import Browser
from .chunks import CHUNK_COST
from .contents import CHUNK, DESTINATION_COST, INDEX, Contents, DestinationState, SubscriptionState, owners
from .directory import StoreDirectory, TransientDirectory
from .limits import Room
from .records import Encoded, StoredMessage, decode, encode
from .residence import Residence
from .swap import Swap

log = logging.getLogger(__name__)

T = TypeVar("T")

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
        self._directory: StoreDirectory | TransientDirectory = StoreDirectory(name, directory)
        self._position = position
        self._lock = threading.RLock()
        """Taken by `with` itself, so that Ctrl-C cannot leak it. Guards all that `_begin` makes."""
        self._opened = self._accepting = False
        self._generation = fork_generation()
        self._begin()

    def _begin(self) -> None:
        """The state of a store that holds nothing."""
        options = self.options
        self._contents = Contents(options.priorities, options.duplicate_window)
        self._delivery = Delivery(self.name, options.max_leases, options.max_deliveries)
        self._steps = changes.Steps()
        self._swap = Swap(self._directory.path, options.roll_over_size)
        self._residence = Residence(self.name, self._contents, self._swap, self._steps, options.max_bytes)
        self._room = Room(self.name, options, self._contents)
        self._branches = Branches()
        self._sends = self._acks = self._batches = 0

    @classmethod
    def create(cls, name: str, directory: Path, options: MemoryOptions) -> bytes:
        """Make its directory, whole or not at all (rule D2); returns its id. The directory must not exist."""
        with disk_errors(f"store {name!r} cannot be created"):
            return StoreDirectory(name, directory).create()

    @classmethod
    def identify(cls, directory: Path) -> bytes | None:
        """The id of the store in a directory, None if there is none."""
        return StoreDirectory("", directory).identify()

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
        with disk_errors(f"store {self.name!r} cannot be opened"):
            if self._opened:
                self._directory.lock()  # which says that it is open
            try:
                store_id = self._directory.lock()
                last = self._contents.seq
                self._begin()
                self._swap.wipe()
                # By the clock, so that no seq comes twice, neither in a next life of the store nor in a next process.
                self._contents.seq = max(last, time.time_ns() // 1000)
                self.store_id = store_id
                self._generation = fork_generation()
                self._opened = self._accepting = True
            except BaseException:
                self._opened = self._accepting = False
                self._directory.unlock()
                raise

    def close(self) -> None:
        if not self._opened or self._generation != fork_generation():
            return
        self._accepting = False
        with self._lock:
            last = self._contents.seq
            self._wake_all()
            try:
                self._swap.wipe()
            except OSError as error:
                log.warning("store %s: its swap files cannot be removed now, the next open does: %s", self.name, error)
            self._directory.unlock()
            self._begin()
            self._contents.seq = last
            self._opened = False

    def _wake_all(self) -> None:
        for state in list(self._contents.states.values()):
            for feed in (state.feed, *state.feeds):
                feed.wake()

    def _require_open(self) -> None:
        """Before taking the lock: in a forked child another thread's hold on it would last for ever."""
        if self._generation != fork_generation():
            raise ClosedError(f"store {self.name!r} was opened by the parent process; a forked child cannot use it")
        if not self._accepting:
            raise ClosedError(f"store {self.name!r} is closed")
        if self._lock._is_owned():  # type: ignore[attr-defined]
            raise RuntimeError(
                f"store {self.name!r} was called from a signal handler that interrupted it in the same thread"
            )

    def _enter(self) -> None:
        """With the lock held, first of all."""
        if not self._accepting:
            raise ClosedError(f"store {self.name!r} is closed")
        self._steps.finish()

    @property
    def last_seq(self) -> int:
        return self._contents.seq

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
            self._require_open()
        return receipts

    def _send(self, messages: Sequence[Encoded]) -> list[Receipt]:
        self._require_open()
        with self._lock:
            self._enter()
            self._make_room(messages)
            change = self._change()
            receipts = [change.send(message) for message in messages]
            self._carry_out(change)
        return receipts

    def _make_room(self, messages: Sequence[Encoded], required: bool = True) -> None:
        """In memory, for these. Raises StoreFullError and StoreFailedError if `required`."""
        more = sum(message.cost for message in messages) + (DESTINATION_COST + CHUNK_COST) * (1 + len(messages) // 64)
        try:
            self._residence.make_room(more)
        except (StoreFullError, StoreFailedError):
            if required:
                raise

    def _change(self) -> changes.Change:
        position = self._position() if self._position is not None else None
        return changes.Change(self._contents, self._delivery, self._residence.chunk_bytes, position)

    def _carry_out(
        self, change: changes.Change, required: bool = True, more: Callable[[], object] | None = None
    ) -> None:
        """All of it takes effect, with `more` (which may be done again); or it raises, and nothing does. What is not
        `required` to keep its limits raises nothing."""
        if required:
            self._room.require(change.added, change.added_bytes)
        change.finish()
        written = self._residence.add(change, required)
        sends, acks, batches = self._sends + change.sends, self._acks + change.acks, self._batches + 1

        def carry_out() -> None:
            change.apply()
            self._residence.take(change)
            if more is not None:
                more()
            self._sends, self._acks, self._batches = sends, acks, batches

        try:
            self._steps.do(carry_out)
        except BaseException:
            if self._batches != batches:
                self._residence.drop(written)
            raise

    # Receiving

    def receive(
        self, destination: Destination, timeout: float | None = 0, subscription: SubscriptionKey | None = None
    ) -> Message | None:
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            self._require_open()
            with self._lock:
                self._enter()
                feed = self._feed(destination, subscription, make=timeout != 0)
                if feed is None:
                    return None
                self._delivery.require_room()
                message = self._lease(feed)
            if message is not None:
                return message
            if timeout == 0 or not self._delivery.wait(feed, deadline, partial(self._has_news, feed)):
                return None

    def _lease(self, feed: Feed) -> Message | None:
        place = self._delivery.lease(feed, self._contents)
        if place is None:
            return None
        try:
            return self._message(place, feed, feed.key)
        except BaseException:  # Ctrl-C, or damage in the swap
            self._delivery.unlease([feed], place[1], self._contents)
            raise

    def _message(self, place: Place, note: Note | None, subscription: SubscriptionKey | None) -> StoredMessage:
        """Read a message that lives. Raises CorruptionError and StoreFailedError."""
        chunk, index = place[CHUNK], place[INDEX]
        record = self._residence.load(chunk)[index]
        assert record is not None, "it is dead"
        count = chunk.counts.get((feeds_of(note)[0].number, index), 0) if note is not None else 0
        return decode(self, chunk.lane.state.destination, chunk, index, record, note, count, subscription)

    def _feed(self, destination: Destination, key: SubscriptionKey | None, make: bool = False) -> Feed | None:
        """What is received from. None for a queue that is not there. Raises DestinationError, UnknownSubscription-
        Error."""
        state, subscription = self._owners(destination, key)
        if subscription is not None:
            return subscription.feed
        if destination.kind is Kind.TOPIC:
            raise DestinationError(f"{destination} is a topic: receive for one of its subscriptions")
        if state is None:
            if not make:
                return None
            state = DestinationState(self._contents.next_number(), destination)
            made, memory = state, self._contents.memory + DESTINATION_COST

            def add() -> None:
                self._contents.states[destination] = made
                self._contents.memory = memory

            self._steps.do(add)
        return state.feed

    def _owners(
        self, destination: Destination, key: SubscriptionKey | None
    ) -> tuple[DestinationState | None, SubscriptionState | None]:
        """Of what is known by these. Raises DestinationError for a queue's subscription, UnknownSubscriptionError."""
        state = self._contents.states.get(destination)
        if key is None:
            return state, None
        if destination.kind is not Kind.TOPIC:
            raise DestinationError(f"{destination} is a queue: it has no subscriptions")
        subscription = state.subscriptions.get(key) if state is not None else None
        if subscription is None:
            raise UnknownSubscriptionError(
                f"{destination} has no durable subscription {key[1]!r} of client {key[0]!r}; subscribe first"
            )
        return state, subscription

    def _has_news(self, feed: Feed) -> bool:
        """Whether who waits shall look again."""
        self._require_open()
        with self._lock:
            self._enter()
            state, subscription = owners(feed)
            known = self._contents.states.get(state.destination) is state and (
                subscription is None or state.subscriptions.get(subscription.subscription.key) is subscription
            )
            return not known or self._delivery.anything(feed, self._contents)

    def watch(
        self, destination: Destination, subscription: SubscriptionKey | None, wake: Callable[[], None]
    ) -> Callable[[], None]:
        self._require_open()
        with self._lock:
            self._enter()
            feed = self._feed(destination, subscription, make=True)
            assert feed is not None
            return self._delivery.watch(feed, wake)

    def browse(
        self,
        destination: Destination,
        limit: int | None = None,
        after: int | Message = 0,
        subscription: SubscriptionKey | None = None,
    ) -> Iterator[Message]:
        browser = Browser(self._contents, self._residence, self, destination, subscription, after)
        self._require_open()
        with self._lock:
            self._enter()
            self._owners(destination, subscription)
        left = limit if limit is not None else -1
        while left != 0:
            self._require_open()
            with self._lock:
                self._enter()
                page = browser.page(left)
            if not page:
                return
            for message in page:
                self._require_open()
                if browser.lives(message):
                    yield message
                    left -= 1

    # Settling

    def ack(self, messages: Sequence[Message]) -> None:
        self._settle(messages, LEASED, [], [])

    def _settle(
        self,
        messages: Sequence[Message],
        hold: int,
        sends: Sequence[Encoded],
        subscriptions: Sequence[Change],
    ) -> list[Receipt]:
        """Changes, sends and acks as one. Raises, and then nothing took effect and the messages are held as before."""
        self._require_open()
        with self._lock:
            self._enter()
            if sends:
                self._make_room(sends)
            try:
                self._delivery.take(self, messages, hold, LEAVING)
                change = self._change()
                for one in subscriptions:
                    change.change(one, self._residence.records)
                receipts = [change.send(message) for message in sends]
                for message in messages:
                    change.ack(cast("StoredMessage", message))
                self._carry_out(change, required=bool(sends or subscriptions))
            except BaseException:
                self._delivery.put_back(messages, hold)  # what the change has reached is not held any more
                raise
        return receipts

    def release(self, messages: Sequence[Message], delivered: bool = True) -> None:
        self._give_back(messages, LEASED, delivered)

    def claim(self, message: Message) -> None:
        self._require_open()
        with self._lock:
            self._enter()
            self._delivery.take(self, [message], LEASED, CLAIMED)

    def unclaim(self, messages: Sequence[Message]) -> None:
        self._give_back(messages, CLAIMED, True)

    def _give_back(self, messages: Sequence[Message], hold: int, delivered: bool) -> None:
        """All or none of them, wherever Ctrl-C strikes."""
        self._require_open()
        with self._lock:
            self._enter()
            try:
                self._delivery.take(self, messages, hold, LEAVING)
                self._steps.do(self._returning(messages, delivered))
            except BaseException:
                self._delivery.put_back(messages, hold)  # unless they are all given back
                raise

    def _returning(self, messages: Sequence[Message], delivered: bool) -> Callable[[], None]:
        """A step: these are free again, each at its old place."""
        counts: list[tuple[dict[tuple[int, int], int], tuple[int, int], int]] = []
        if delivered:
            for message in cast("Sequence[StoredMessage]", messages):
                for feed in feeds_of(message.note):
                    if feed.base + message.seq in self._delivery.held:  # else the subscription is gone
                        key = (feed.number, message.index)
                        counts.append((message.chunk.counts, key, message.chunk.counts.get(key, 0) + 1))

        def give_back() -> None:
            for counted, key, count in counts:
                counted[key] = count
            self._delivery.give_back(messages, self._contents)

        return give_back

    def take_undelivered(self, limit: int = 100) -> Sequence[Undelivered]:
        self._require_open()
        with self._lock:
            self._enter()
            lost = self._delivery.take_undelivered(limit, self._contents)
            try:
                found = []
                for feeds, place, reason in lost:
                    key = feeds[0].key if reason != EXPIRED else None
                    found.append(Undelivered(self._message(place, feeds, key), reason))
                return found
            except BaseException:
                for feeds, place, _ in lost:
                    self._delivery.unlease(feeds, place[1], self._contents)
                raise

    # Durable subscriptions

    def subscribe(self, subscription: Subscription, retroactive: bool = False) -> bool:
        self._require_open()
        if subscription.topic.kind is not Kind.TOPIC:
            raise DestinationError(f"{subscription.topic} is a queue: only topics have subscriptions")
        with self._lock:
            self._enter()
            state = self._contents.states.get(subscription.topic)
            known = state.subscriptions.get(subscription.key) if state is not None else None
            if known is not None:
                if known.subscription != subscription:
                    raise SubscriptionError(
                        f"{subscription.topic} has a durable subscription {subscription.name!r} of client "
                        f"{subscription.client_id!r} with another selector or no_local; unsubscribe it first, which "
                        "gives up its backlog"
                    )
                return False
            self._make_room([])
            change = self._change()
            change.change(Change(subscription, True, retroactive), self._residence.records)
            self._carry_out(change)
            return True

    def unsubscribe(self, topic: Destination, subscription: SubscriptionKey) -> int:
        self._require_open()
        with self._lock:
            self._enter()
            known = self._owners(topic, subscription)[1]
            assert known is not None
            self._require_unclaimed([known.feed], f"subscription {subscription[1]!r} of {topic}", "removed")
            change = self._change()
            count = change.change(Change(known.subscription, False), self._residence.records)
            self._carry_out(change, required=False)
            return count

    def _require_unclaimed(self, feeds: Iterable[Feed], what: str, done: str) -> None:
        claimed = sum(self._delivery.claimed(feed) for feed in feeds)
        if claimed:
            raise TransactionError(
                f"{what} cannot be {done}: a transaction has claimed {claimed} of its messages; commit it or roll it "
                "back first"
            )

    def subscriptions(self) -> Sequence[Subscription]:
        self._require_open()
        with self._lock:
            self._enter()
            return [some.subscription for some in self._contents.subscriptions()]

    # Transactions

    def commit(
        self,
        sends: Sequence[tuple[Destination, Outgoing]],
        acks: Sequence[Message],
        sync: bool | None = None,
        changes: Sequence[Change] = (),
    ) -> list[Receipt]:
        return self._settle(acks, CLAIMED, self._encode(sends), changes)

    def _encode(self, sends: Sequence[tuple[Destination, Outgoing]]) -> list[Encoded]:
        limit = self.options.message_bytes_max
        return [encode(destination, message, limit) for destination, message in sends]

    def reserve(self, sends: Sequence[tuple[Destination, Outgoing]]) -> object:
        self._require_open()
        encoded = self._encode(sends)
        with self._lock:
            self._enter()
            return self._room.reserve(encoded)

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
        self._require_open()
        encoded = self._encode(sends)
        with self._lock:
            self._enter()
            self._make_room(encoded)
            self._delivery.take(self, acks, CLAIMED, CLAIMED)
            branch = Branch(
                transaction, tuple(participants), encoded, cast("Sequence[StoredMessage]", list(acks)), changes, room
            )

            def prepare() -> None:
                self._branches.prepared[transaction] = branch
                self._residence.prepared = self._branches.cost

            self._steps.do(prepare)
        return Done(None)

    def commit_prepared(self, transaction: bytes) -> Pending[list[Receipt]]:
        self._require_open()
        with self._lock:
            self._enter()
            branch = self._branches.prepared.get(transaction)
            if branch is None:
                return Done([])
            self._make_room([], required=False)
            change = self._change()
            for one in branch.changes:
                change.change(one, self._residence.records)
            receipts = [change.send(message) for message in branch.sends]
            for message in branch.acks:
                change.ack(message)
            self._carry_out(change, False, lambda: self._ended(branch, True))
            return Done(receipts)

    def rollback_prepared(self, transaction: bytes) -> Pending[bool]:
        self._require_open()
        with self._lock:
            self._enter()
            branch = self._branches.prepared.get(transaction)
            if branch is None:
                return Done(False)
            give_back = self._returning(branch.acks, True)

            def roll_back() -> None:
                give_back()
                self._ended(branch, False)

            self._steps.do(roll_back)
            return Done(True)

    def _ended(self, branch: Branch, committed: bool) -> None:
        self._branches.ended(branch, committed)
        self._residence.prepared = self._branches.cost

    def recover_prepared(self) -> Sequence[Prepared]:
        return self._asked(
            lambda: sorted((branch.summary for branch in self._branches.prepared.values()), key=lambda p: p.transaction)
        )

    def committed(self) -> Sequence[bytes]:
        return self._asked(self._branches.committed)

    def forget(self, transactions: Sequence[bytes]) -> None:
        self._asked(lambda: self._branches.forget(transactions))

    def sync(self) -> None:
        self._require_open()

    # Upkeep

    def purge(self, destination: Destination, subscription: SubscriptionKey | None = None) -> int:
        self._require_open()
        with self._lock:
            self._enter()
            state, only = self._owners(destination, subscription)
            if state is None:
                return 0
            change = self._change()
            count = removal.purge(change, state, only, self._delivery, self._residence)
            if count:
                self._carry_out(change, False, partial(removal.purged, state, self._delivery, self._contents))
            return count

    def delete(self, destination: Destination) -> int:
        self._require_open()
        with self._lock:
            self._enter()
            state = self._contents.states.get(destination)
            if state is None:
                return 0
            self._require_unclaimed(state.feeds, str(destination), "deleted")
            self._steps.do(removal.deletion(state, self._contents, self._delivery, self._residence))
            return state.count

    def retire(self) -> bool:
        """As the contract says; closing it would lose what it holds, so it refuses as long as it holds anything: a
        message, a subscription, a message id, an outcome."""
        self._require_open()
        with self._lock:
            self._enter()
            contents, delivery = self._contents, self._delivery
            if delivery.waiting or delivery.held or contents.messages or self._branches.prepared:
                return False
            if len(contents.window) or self._branches.committed() or any(True for _ in contents.subscriptions()):
                return False
            self._accepting = False
            return True

    # Asking

    def _asked(self, question: Callable[[], T]) -> T:
        self._require_open()
        with self._lock:
            self._enter()
            return question()

    def destinations(self) -> Sequence[Destination]:
        return self._asked(lambda: [d for d, state in self._contents.states.items() if state.declared])

    def depth(self, destination: Destination, subscription: SubscriptionKey | None = None) -> int:
        self._require_open()
        with self._lock:
            self._enter()
            state, only = self._owners(destination, subscription)
            if only is not None:
                return only.count
            return state.count if state is not None else 0

    def reclaim(self) -> int:
        """Nothing: swap files go by themselves."""
        self._require_open()
        return 0

    def stats(self) -> StoreStats:
        return self._asked(self._stats)

    def _stats(self) -> StoreStats:
        contents = self._contents
        return StoreStats(
            name=self.name,
            kind="memory",
            messages=contents.messages,
            destinations={d: state.count for d, state in contents.states.items() if state.declared},
            leased=len(self._delivery.held),
            sends=self._sends,
            acks=self._acks,
            syncs=0,
            batches=self._batches,
            subscriptions={some.subscription: some.count for some in contents.subscriptions()},
            memory_bytes=contents.memory + self._residence.prepared,
            swap_bytes=self._swap.bytes,
        )

    def check(self) -> Iterator[str]:
        yield from self._asked(lambda: list(check.violations(self._contents, self._residence, self._swap)))


def companion(
    name: str, directory: Path, options: MemoryOptions, position: Callable[[], int] | None = None
) -> MemoryStore:
    """MemoryStore.companion."""
    return MemoryStore.companion(name, directory, options, position)


def position_of(message: Message) -> int:
    """What the `position` of its store said when the message took effect; 0 if it has none."""
    return cast("StoredMessage", message).position
