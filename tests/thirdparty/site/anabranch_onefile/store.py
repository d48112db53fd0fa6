"""The store: the methods of the protocol, over contents.py and Anabranch's delivery."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
from pydantic import Field

from anabranch.adapters.base import (
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
    checked,
)  # fmt: skip
from anabranch.adapters.delivery import (
    CLAIMED,
    LEASED,
    LEAVING,
    Delivery,
    Feed,
    Note,
    feeds_of,
    order_of,
)  # fmt: skip
from anabranch.adapters.files import sync_directory, unfinished
from anabranch.adapters.headers import unpack_headers
from anabranch.adapters.locking import DirectoryLock, fork_generation
from anabranch.policies.destination import Destination, Kind
from anabranch.policies.errors import (
    AnabranchError,
    ClosedError,
    CorruptionError,
    DestinationError,
    MessageTooLargeError,
    OutcomeUnknownError,
    StoreFailedError,
    StoreFullError,
    SubscriptionError,
    TransactionError,
)  # fmt: skip
from anabranch.policies.options import StoreOptions

from .contents import COMMITTED_MAX, QUEUE, Acked, Branch, Changed, Contents, Sent, checked_send
from .file import FILE, read, write
from .source import Source

PAGE = 100
T = TypeVar("T")


class OneFileOptions(StoreOptions):
    """What the file may say under `onefile:`, beside what every kind of ours has."""

    max_bytes: Annotated[int, Field(ge=1)] | None = None
    """The most bytes of messages that the store holds; a send beyond it fails. None: no limit."""


class Room:
    """What is reserved for a transaction, until it is let go of."""

    def __init__(self, rooms: list[tuple[int, int]], amount: tuple[int, int]) -> None:
        self._rooms, self._amount = rooms, amount
        rooms.append(amount)

    def give_back(self) -> None:
        if self._amount in self._rooms:
            self._rooms.remove(self._amount)
        self._amount = (-1, -1)

    __del__ = give_back


class Usable:
    """`with store._usable:` holds the lock of a store that can be used. Raises ClosedError, StoreFailedError."""

    def __init__(self, store: OneFileStore) -> None:
        self._store = store

    def __enter__(self) -> None:
        store = self._store
        if store._generation != fork_generation():  # some thread of the parent may have held the lock, for ever
            raise ClosedError(f"store {store.name!r} belongs to the parent of this process")
        store._lock.acquire()
        if store._failed is None and store._closed is None:
            return
        store._lock.release()
        if store._closed is not None:
            raise ClosedError(f"store {store.name!r} {store._closed}")
        raise StoreFailedError(f"store {store.name!r} has failed: {store._failed}; reopen it") from store._failed

    def __exit__(self, *_: object) -> None:
        self._store._lock.release()


class OneFileStore:
    """Any thread may call it. Everything happens under one lock but waiting for a message."""

    options_model = OneFileOptions
    volatile = False
    shared = False

    def __init__(
        self, name: str, directory: Path, options: OneFileOptions, index_directory: Path | None = None
    ) -> None:
        self.name, self.directory, self.options = name, directory, options
        self.store_id = b""
        self.owner: object = None
        self._lock = threading.RLock()
        self._contents = Contents(b"")
        self._encoded = b""
        self._closed: str | None = "is not open"
        self._failed: BaseException | None = None
        self._generation = fork_generation()
        self._usable = Usable(self)

    # Its life

    @classmethod
    def create(cls, name: str, directory: Path, options: OneFileOptions) -> bytes:
        store_id = uuid.uuid4().bytes
        temporary = unfinished(directory, store_id)
        temporary.mkdir(parents=True)
        write(temporary / FILE, msgspec.msgpack.encode(Contents(store_id)))
        temporary.rename(directory)
        sync_directory(directory.parent)
        return store_id

    @classmethod
    def identify(cls, directory: Path) -> bytes | None:
        try:
            return read(directory / FILE)[0].store_id
        except (FileNotFoundError, NotADirectoryError, CorruptionError):
            return None

    def open(self, progress: Progress | None = None) -> None:
        directory_lock = DirectoryLock(self.directory / "store.lock", f"store {self.name!r}")
        directory_lock.acquire()
        try:
            self._contents, self._encoded = read(self.directory / FILE)
        except BaseException:
            directory_lock.release()
            raise
        self._directory_lock = directory_lock
        self._generation = fork_generation()
        self._delivery = Delivery(self.name, self.options.max_leases, self.options.max_deliveries)
        self._source = Source(self._contents, self.options.priorities)
        self._rooms: list[tuple[int, int]] = []
        self._claimed_by: dict[bytes, Sequence[Message]] = {}
        self._sends = self._acks = self._syncs = self._batches = self._dropped = 0
        self.store_id = self._contents.store_id
        for branch in self._contents.branches.values():
            self._delivery.claim_again((self._source.note_of(acked), acked.seq) for acked in branch.acks)
        self._failed = self._closed = None

    def close(self) -> None:
        if self._closed == "is not open" or self._generation != fork_generation():
            return
        with self._lock:
            self._closed = "is closed"
            self._directory_lock.release()
        self._wake_all()

    def retire(self) -> bool:
        with self._usable:
            if self._delivery.waiting or self._delivery.held or self._contents.branches:
                return False
            self._closed = "is retired"
            return True

    def _wake_all(self) -> None:
        for feed in list(self._source.feeds.values()):
            feed.wake()

    # The one way to change anything

    def _change(self, change: Callable[[Contents], T], limited: bool = False) -> T:
        """Under the lock: durable and visible on return, or nothing of it. `limited`: what would hold too much is
        refused."""
        contents = msgspec.msgpack.decode(self._encoded, type=Contents)
        result = change(contents)
        if limited:
            self._require_room(contents.held())
        encoded = msgspec.msgpack.encode(contents)
        if encoded == self._encoded:
            return result
        try:
            write(self.directory / FILE, encoded)
        except BaseException as error:  # Ctrl-C too: who knows what the file holds now
            self._failed = error
            self._wake_all()
            if isinstance(error, OSError):
                raise OutcomeUnknownError(f"store {self.name!r} could not be written: {error}; reopen it") from error
            raise
        self._contents = self._source.contents = contents
        self._encoded = encoded
        self._syncs += 2
        self._batches += 1
        return result

    def _require_room(self, held: tuple[int, int], more: Sequence[Sent] = ()) -> None:
        limits = (("max_messages", self.options.max_messages), ("max_bytes", self.options.max_bytes))
        for place, (option, limit) in enumerate(limits):
            used = held[place] + sum(room[place] for room in self._rooms) + amount(more)[place]
            if limit is not None and used > limit:
                raise StoreFullError(f"store {self.name!r} would hold {used}; {option} is {limit}. Nothing was sent")

    # Sending

    def send(
        self,
        destination: Destination,
        body: bytes,
        headers: Headers | None = None,
        message_id: str | None = None,
        sync: bool | None = None,
        priority: int = 4,
        expires_at_ms: int = 0,
    ) -> Receipt:
        return self.send_many(destination, [Outgoing(body, headers, message_id, priority, expires_at_ms)])[0]

    def send_nowait(
        self,
        destination: Destination,
        body: bytes,
        headers: Headers | None = None,
        message_id: str | None = None,
        sync: bool | None = None,
        priority: int = 4,
        expires_at_ms: int = 0,
    ) -> Future[Receipt]:
        message = checked(body, headers, message_id, priority, expires_at_ms)
        self._checked([(destination, message)])
        future: Future[Receipt] = Future()
        future.set_running_or_notify_cancel()
        with self._usable:
            try:
                result = self.send_many(destination, [message])[0]
            except AnabranchError as error:
                future.set_exception(error)
            else:
                future.set_result(result)
        return future

    def send_many(
        self, destination: Destination, messages: Iterable[Outgoing | bytes], sync: bool | None = None
    ) -> list[Receipt]:
        outgoing = [message if isinstance(message, Outgoing) else Outgoing(message) for message in messages]
        return self.commit([(destination, message) for message in outgoing], [])

    def _checked(self, sends: Sequence[tuple[Destination, Outgoing]]) -> list[Sent]:
        found = [checked_send(destination, checked(*message)) for destination, message in sends]
        for sent in found:
            if len(sent.body) + len(sent.headers) > self.options.message_bytes_max:
                raise MessageTooLargeError(
                    f"a message for {sent.destination} takes {len(sent.body) + len(sent.headers)} bytes; "
                    f"message_bytes_max is {self.options.message_bytes_max}"
                )
        return found

    # Receiving

    def receive(
        self, destination: Destination, timeout: float | None = 0, subscription: SubscriptionKey | None = None
    ) -> Message | None:
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            with self._usable:
                feed = self._source.feed_of(destination, subscription)
                self._delivery.require_room()
                place = self._delivery.lease(feed, self._source)
                if place is not None:
                    return self._message(destination, place[1], feed)
            if timeout == 0 or not self._delivery.wait(feed, deadline, partial(self._anything, feed)):
                return None

    def _anything(self, feed: Feed) -> bool:
        with self._usable:
            gone = self._source.feeds.get((feed.owner, feed.number)) is not feed
            return gone or self._delivery.anything(feed, self._source)

    def watch(
        self, destination: Destination, subscription: SubscriptionKey | None, wake: Callable[[], None]
    ) -> Callable[[], None]:
        with self._usable:
            return self._delivery.watch(self._source.feed_of(destination, subscription), wake)

    def _message(
        self, destination: Destination, seq: int, note: Note | None, whose: SubscriptionKey | None = None
    ) -> Message:
        """Leased, if it has a note."""
        stored = self._contents.of(str(destination))[seq]
        sent = stored.sent
        if isinstance(note, Feed):
            whose, count = note.key, stored.pending[note.number]
        else:
            number = QUEUE if whose is None else self._source.number(destination, whose)
            count = stored.pending[number] if number in stored.pending else max(stored.pending.values())
        return Message(
            self, destination, seq, sent.body, unpack_headers(sent.headers) if sent.headers else {}, sent.message_id,
            sent.timestamp_ms, note is not None, note, sent.priority, sent.expires_at_ms,
            count + (note is not None), whose,
        )  # fmt: skip

    def browse(
        self,
        destination: Destination,
        limit: int | None = None,
        after: int | Message = 0,
        subscription: SubscriptionKey | None = None,
    ) -> Iterator[Message]:
        if self.options.priorities and after != 0 and not isinstance(after, Message):
            raise ValueError("a store with priorities does not go by seqs; give the message to browse after")
        start = (
            (order_of(after.priority, self.options.priorities), after.seq) if isinstance(after, Message) else (0, after)
        )
        left = limit
        while left is None or left > 0:
            with self._usable:
                number = None if subscription is None else self._source.number(destination, subscription)
                waiting = (s for s in self._contents.of(str(destination)).values() if number in (None, *s.pending))
                page = sorted(key for stored in waiting if (key := self._source.key_of(stored)[:2]) > start)[:PAGE]
            if not page:
                return
            for key in page:
                with self._usable:
                    stored = self._contents.of(str(destination)).get(key[1])
                    if stored is None or number not in (None, *stored.pending):
                        continue
                    message = self._message(destination, key[1], None, subscription)
                yield message
                left = None if left is None else left - 1
                if left == 0:
                    return
            start = page[-1]

    # Settling

    def ack(self, messages: Sequence[Message]) -> None:
        self._settle(messages, LEASED, (), ())

    def commit(
        self,
        sends: Sequence[tuple[Destination, Outgoing]],
        acks: Sequence[Message],
        sync: bool | None = None,
        changes: Sequence[Change] = (),
    ) -> list[Receipt]:
        sent = self._checked(sends)
        outcomes = self._settle(acks, CLAIMED, sent, [Changed.of(change) for change in changes])
        return [Receipt(destination, *outcome) for (destination, _), outcome in zip(sends, outcomes, strict=True)]

    def _settle(
        self, messages: Sequence[Message], hold: int, sends: Sequence[Sent], changes: Sequence[Changed]
    ) -> list[tuple[int, bool]]:
        with self._usable:
            taken = self._delivery.take(self, messages, hold, LEAVING)
            acks = [acked_of(note, message) for (note, _), message in zip(taken, messages, strict=True)]
            window = self.options.duplicate_window
            try:
                outcomes = self._change(lambda contents: contents.apply(changes, sends, acks, window), bool(sends))
            except BaseException:
                self._delivery.put_back(messages, hold)
                raise
            self._applied(taken, sends, acks, outcomes)
            return outcomes

    def _applied(
        self,
        taken: Iterable[tuple[Note, int]],
        sends: Sequence[Sent],
        acks: Sequence[Acked],
        outcomes: Sequence[tuple[int, bool]],
    ) -> None:
        """Tell Delivery what is gone, and who waits what has come."""
        for sent, (seq, duplicate) in zip(sends, outcomes, strict=True):
            self._dropped += not duplicate and seq not in self._contents.of(sent.destination)
        for note, seq in taken:
            for feed in feeds_of(note):
                self._delivery.acked(feed, seq)
        self._sends += len(sends)
        self._acks += len(acks)
        sent_to = {sent.destination for sent in sends}
        for (destination, number), feed in list(self._source.feeds.items()):
            if number != QUEUE and number not in self._contents.subscriptions:
                del self._source.feeds[destination, number]
                self._delivery.gone(feed)
            elif str(destination) in sent_to:
                feed.wake()

    def release(self, messages: Sequence[Message], delivered: bool = True) -> None:
        self._give_back(messages, LEASED, delivered)

    def claim(self, message: Message) -> None:
        with self._usable:
            self._delivery.take(self, [message], LEASED, CLAIMED)

    def unclaim(self, messages: Sequence[Message]) -> None:
        self._give_back(messages, CLAIMED, True)

    def _give_back(self, messages: Sequence[Message], hold: int, delivered: bool) -> None:
        with self._usable:
            taken = self._delivery.take(self, messages, hold, LEAVING)
            acks = [acked_of(note, message) for (note, _), message in zip(taken, messages, strict=True)]
            if delivered:
                self._change(lambda contents: contents.returned(acks))
            self._delivery.give_back(messages, self._source)

    def take_undelivered(self, limit: int = 100) -> Sequence[Undelivered]:
        with self._usable:
            found = []
            for feeds, place, reason in self._delivery.take_undelivered(limit, self._source):
                destination = feeds[0].owner
                whole = reason == EXPIRED and destination.kind is Kind.TOPIC
                found.append(Undelivered(self._message(destination, place[1], feeds if whole else feeds[0]), reason))
            return found

    def purge(self, destination: Destination, subscription: SubscriptionKey | None = None) -> int:
        with self._usable:
            number = None if subscription is None else self._source.number(destination, subscription)
            feeds = {
                n: self._source.feed(destination, n) for n in self._source.numbers(destination) if number in (None, n)
            }
            held = self._delivery.held
            free = [
                Acked(str(destination), stored.seq, n)
                for stored in self._contents.of(str(destination)).values()
                for n in stored.pending
                if n in feeds and feeds[n].base + stored.seq not in held
            ]
            self._change(lambda contents: contents.apply((), (), free, self.options.duplicate_window))
            for feed in feeds.values():
                self._delivery.purged(feed, self._source)
            return len({acked.seq for acked in free})

    def delete(self, destination: Destination) -> int:
        with self._usable:
            self._require_unclaimed(destination, self._source.numbers(destination), "deleted")
            feeds = [self._source.feed(destination, number) for number in self._source.numbers(destination)]
            count = self._change(lambda contents: contents.delete(str(destination)))
            for feed in feeds:
                self._source.feeds.pop((destination, feed.number), None)
                self._delivery.gone(feed)
            return count

    def _require_unclaimed(self, destination: Destination, numbers: Iterable[int], what: str) -> None:
        claimed = sum(self._delivery.claimed(self._source.feed(destination, number)) for number in numbers)
        if claimed:
            raise TransactionError(f"{destination} cannot be {what}: a transaction has claimed {claimed} messages")

    # Subscriptions

    def subscribe(self, subscription: Subscription, retroactive: bool = False) -> bool:
        if subscription.topic.kind is not Kind.TOPIC:
            raise DestinationError(f"{subscription.topic} is no topic: a queue has no subscriptions")
        change = Changed.of(Change(subscription, True, retroactive))
        with self._usable:
            known = next(
                (s for s in self.subscriptions() if (s.topic, s.key) == (subscription.topic, subscription.key)), None
            )
            if known not in (None, subscription):
                raise SubscriptionError(f"{subscription.topic} has another subscription {subscription.key!r}: {known}")
            return self._change(lambda contents: contents.subscribe(change))

    def unsubscribe(self, topic: Destination, subscription: SubscriptionKey) -> int:
        with self._usable:
            self._require_unclaimed(topic, [self._source.number(topic, subscription)], "unsubscribed from")
            count = self._change(lambda contents: contents.unsubscribe(str(topic), *subscription))
            self._applied((), (), (), ())
            return count

    def subscriptions(self) -> Sequence[Subscription]:
        with self._usable:
            return [known.subscription for known in self._contents.subscriptions.values()]

    # Transactions over several stores

    def reserve(self, sends: Sequence[tuple[Destination, Outgoing]]) -> object:
        sent = self._checked(sends)
        with self._usable:
            self._require_room(self._contents.held(), sent)
            return Room(self._rooms, amount(sent))

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
        sent = self._checked(sends)
        with self._usable:
            taken = self._delivery.take(self, acks, CLAIMED, CLAIMED)
            acked = [acked_of(note, message) for (note, _), message in zip(taken, acks, strict=True)]
            branch = Branch(list(participants), [Changed.of(change) for change in changes], sent, acked)
            if isinstance(room, Room):
                room.give_back()  # the branch has it from now on
            self._change(lambda contents: contents.branches.update({transaction: branch}), limited=bool(sent))
            self._claimed_by[transaction] = list(acks)
            return Done(None)

    def commit_prepared(self, transaction: bytes) -> Pending[list[Receipt]]:
        with self._usable:
            branch = self._contents.branches.get(transaction)
            if branch is None:
                return Done([])
            taken = [(self._source.note_of(acked), acked.seq) for acked in branch.acks]

            def change(contents: Contents) -> list[tuple[int, bool]]:
                del contents.branches[transaction]
                contents.committed = sorted([*contents.committed, transaction])[-COMMITTED_MAX:]
                return contents.apply(branch.changes, branch.sends, branch.acks, self.options.duplicate_window)

            outcomes = self._change(change)
            self._claimed_by.pop(transaction, None)
            self._applied(taken, branch.sends, branch.acks, outcomes)
            destinations = [Destination.restored(sent.destination) for sent in branch.sends]
            return Done([Receipt(d, *outcome) for d, outcome in zip(destinations, outcomes, strict=True)])

    def rollback_prepared(self, transaction: bytes) -> Pending[bool]:
        with self._usable:
            branch = self._contents.branches.get(transaction)
            if branch is None:
                return Done(False)

            def change(contents: Contents) -> None:
                del contents.branches[transaction]
                contents.returned(branch.acks)

            self._change(change)
            for message in self._claimed_by.pop(transaction, ()):
                message.note = None  # who had it can do nothing more with it
            for acked in branch.acks:
                self._delivery.unlease(feeds_of(self._source.note_of(acked)), acked.seq, self._source)
            return Done(True)

    def recover_prepared(self) -> Sequence[Prepared]:
        with self._usable:
            return [
                Prepared(name, tuple(branch.participants), len(branch.sends), len(branch.acks))
                for name, branch in sorted(self._contents.branches.items())
            ]

    def committed(self) -> Sequence[bytes]:
        with self._usable:
            return list(self._contents.committed)

    def forget(self, transactions: Sequence[bytes]) -> None:
        def change(contents: Contents) -> None:
            contents.committed = [name for name in contents.committed if name not in transactions]

        with self._usable:
            self._change(change)

    def sync(self) -> None:
        with self._usable:
            """Everything is, always."""

    # Asking

    @property
    def last_seq(self) -> int:
        return self._contents.last_seq

    def destinations(self) -> Sequence[Destination]:
        with self._usable:
            return [Destination.restored(name) for name in self._contents.destinations]

    def depth(self, destination: Destination, subscription: SubscriptionKey | None = None) -> int:
        with self._usable:
            number = None if subscription is None else self._source.number(destination, subscription)
            return sum(number in (None, *stored.pending) for stored in self._contents.of(str(destination)).values())

    def reclaim(self) -> int:
        with self._usable:
            return 0

    def stats(self) -> StoreStats:
        with self._lock if self._failed is not None else self._usable:
            found = self._contents.destinations
            pending = [number for messages in found.values() for s in messages.values() for number in s.pending]
            return StoreStats(
                self.name, "onefile", sum(map(len, found.values())),
                {Destination.restored(name): len(messages) for name, messages in found.items()},
                len(self._delivery.held), self._sends, self._acks, self._syncs, self._batches,
                journal_bytes=len(self._encoded), failed=str(self._failed) if self._failed is not None else None,
                subscriptions={s.subscription: pending.count(n) for n, s in self._contents.subscriptions.items()},
                dropped=self._dropped,
            )  # fmt: skip

    def check(self) -> Iterator[str]:
        with self._usable:
            found = list(self._contents.violations())
            if read(self.directory / FILE)[1] != self._encoded:
                found.append("the file is not what the store holds")
        yield from found


def amount(sends: Sequence[Sent]) -> tuple[int, int]:
    """How many, and their bytes."""
    return len(sends), sum(sent.size for sent in sends)


def acked_of(note: Note, message: Message) -> Acked:
    return Acked(str(message.destination), message.seq, note.number if isinstance(note, Feed) else None)
