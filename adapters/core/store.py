"""The contract of adapters/base.py, once for every kind of store.

engine      what is written becomes seen                       (engine.py)
writer      tickets become writes                              (writers.py)
receiving   what comes out                                     (receiving.py)
backend     where the bytes live: the kind of the store        (backend.py)
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar, Final, TypeVar

from pydantic import BaseModel

from ...policies.destination import Destination
from ...policies.errors import (
    AnabranchError,
    StoreFailedError,
    StoreLockedError,
    UnknownMessageError,
)
from ..background import shared
from ..base import (
    DEFAULT_PRIORITY,
    Change,
    Counts,
    Headers,
    Listener,
    Message,
    Outgoing,
    Pending,
    Prepared,
    Progress,
    Receipt,
    Settlement,
    StoreStats,
    Subscription,
    SubscriptionKey,
    Undelivered,
    require_leased,
)
from ..files import disk_errors
from .backend import Backend, Found
from .changes import Remove, Unsubscribe
from .delivery import CLAIMED, LEASED, Feed, Lease, claimed
from .engine import Engine
from .headers import pack_id
from .nonpersistent import sweep
from .purging import drop, drop_volatile, purge
from .receiving import Receiving
from .records import decode
from .sending import Sending
from .settling import Settling
from .states import DestinationState, SubscriptionState
from .subscriptions import require_same, require_unclaimed, shown, unknown
from .transactions import Transactions
from .writers import Direct, Threaded, Writer

log = logging.getLogger(__name__)

T = TypeVar("T")

DROP_SECONDS: Final = 1.0
"""After so long the background removes what a removed destination has left behind, if nobody else does, and tries again
after an error."""


class CoreStore:
    """One store over a backend. A kind of store is a subclass that names its backend and its options' model. Threads:
    all. Forks: a child's calls raise ClosedError (rule D4). A signal handler that interrupted a call of its own thread
    gets RuntimeError (rule G3)."""

    backend_type: ClassVar[type[Backend]]
    options_model: ClassVar[type[BaseModel]]

    def __init__(self, name: str, directory: Path, options: Any, index_directory: Path | None = None) -> None:
        self.name = name
        self.directory = directory
        self.options = options
        self.backend: Backend = self.backend_type(name, directory, options, index_directory)
        self.volatile = self.backend.volatile
        self.shared = self.backend.shared
        self.descriptors = self.backend.descriptors
        self.store_id = b""
        self._opened = False
        self._begin()

    def _begin(self) -> None:
        """The state of a store that is not open yet."""
        owner: object = self._engine.owner if hasattr(self, "_engine") else None
        self._engine: Engine = Engine(self.name, self.backend)
        engine = self._engine
        engine.owner = owner
        drop_later = weakref.WeakMethod(self._drop_later)  # nothing that works for the engine keeps the store alive
        engine.on_leaving = lambda: (call := drop_later()) and call()
        self._drop_due = False
        self._dropping = threading.Lock()
        """Held by who removes what something has left behind: two would do it twice."""
        own = self.backend.writer(engine)
        self._writer: Writer = own or (Threaded(engine) if self.backend.threaded else Direct(engine))
        self._sending = Sending(engine, self._writer, self.directory, getattr(self.options, "file_mode", None))
        self._receiving = Receiving(self, engine)
        self._settling = Settling(self, engine, self._writer, self._sending.write)
        self._transactions = Transactions(self, engine, self._writer, self._sending, self._settling)

    @classmethod
    def create(cls, name: str, directory: Path, options: Any) -> bytes:
        """Make an empty store, whole or not at all (rule D2); returns its id. The directory must not exist."""
        with disk_errors(f"store {name!r} cannot be created"):
            return cls.backend_type.create(name, directory, options)  # type: ignore[attr-defined,no-any-return]

    @classmethod
    def identify(cls, directory: Path) -> bytes | None:
        """The id of the store in a directory, None if there is none."""
        return cls.backend_type.identify(directory)  # type: ignore[attr-defined,no-any-return]

    @classmethod
    def is_contained(cls, options: Any) -> bool:
        """Whether all of a store lies in its directory."""
        return cls.backend_type.is_contained(options)

    @property
    def owner(self) -> object:
        """As the contract says. What works in the background for a store that nobody holds any more reaches it too."""
        return self._engine.owner

    @owner.setter
    def owner(self, owner: object) -> None:
        self._engine.owner = owner

    # Opening and closing

    def open(self, progress: Progress | None = None) -> None:
        if self._opened:
            raise StoreLockedError(f"store {self.name!r} is open already, in this process")
        started = time.monotonic()
        self._begin()
        engine = self._engine
        with disk_errors(f"store {self.name!r} cannot be opened"):
            try:
                self.store_id, found = self.backend.open(engine.host(), progress)
                self._load(found)
                self.backend.require_owned()
                if not self.volatile:
                    sweep(self.directory)
                engine.start()
                self._opened = True
                if engine.leaving:  # there was no room to remove it while nobody else was there
                    engine.on_leaving()
            except BaseException:
                self._opened, engine.closed = False, True
                self.backend.close(clean=False)
                raise
        if engine.catalog.messages:
            log.info(
                "store %s: opened with %d messages in %.2f s", self.name, engine.catalog.messages,
                time.monotonic() - started,
            )  # fmt: skip

    def _load(self, found: Found) -> None:
        engine = self._engine
        engine.sequencer.load(found.last_seq, found.ids)
        engine.committed = dict.fromkeys(found.committed)
        self._transactions.load(found.prepared)

    @property
    def last_seq(self) -> int:
        if self._engine.failed is not None:
            self._engine.ensure_usable()
        return self._engine.sequencer.last_seq

    def close(self) -> None:
        if not self._opened:
            return
        engine = self._engine
        if engine.forked:
            self._opened = False
            return
        self._look_after_owner()
        try:
            self._writer.close()
            engine.closed = True
            with engine.lock:
                if engine.failed is None:
                    engine.drain()
                if engine.nonpersistent is not None:
                    engine.nonpersistent.close(clean=engine.failed is None)
                self.backend.close(clean=engine.failed is None)
        except Exception:
            engine.closed = True
            with engine.lock:
                self.backend.close(clean=False)  # whatever has failed: the directory is free
            self._ended()
            raise
        finally:
            engine.wake_all()
        self._ended()  # not after Ctrl-C: then close() may be called again

    def _ended(self) -> None:
        self._opened = False
        for feed in self._engine.catalog.feeds():
            feed.held.clear()  # leases end with it, also where the same object is opened again

    def _look_after_owner(self) -> None:
        """A store that has lost its directory writes nothing more."""
        try:
            self.backend.require_owned()
        except StoreFailedError as error:
            self._engine.fail(error)

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
        persistent: bool = True,
    ) -> Receipt:
        sending = self._sending
        if not persistent:
            message = Outgoing(body, headers, message_id, priority, expires_at_ms, persistent)
            return sending.send_nonpersistent(destination, message)
        ticket = sending.ticket(destination, body, headers, message_id, sync, priority, expires_at_ms)
        self._writer.submit(ticket)
        seq, duplicate = sending.wait(ticket)[0]
        return Receipt(destination, seq, duplicate)

    def send_nowait(
        self,
        destination: Destination,
        body: bytes,
        headers: Headers | None = None,
        message_id: str | None = None,
        sync: bool | None = None,
        priority: int = DEFAULT_PRIORITY,
        expires_at_ms: int = 0,
        persistent: bool = True,
    ) -> Future[Receipt]:
        if not persistent:
            message = Outgoing(body, headers, message_id, priority, expires_at_ms, persistent)
            return self._sending.send_nonpersistent_nowait(destination, message)
        ticket = self._sending.ticket(destination, body, headers, message_id, sync, priority, expires_at_ms)
        return self._sending.send_nowait(destination, ticket)

    def send_many(
        self, destination: Destination, messages: Iterable[Outgoing | bytes], sync: bool | None = None
    ) -> list[Receipt]:
        return self._sending.send_many(destination, messages, sync)

    # Receiving

    def receive(
        self, destination: Destination, timeout: float | None = 0, subscription: SubscriptionKey | None = None
    ) -> Message | None:
        return self._receiving.receive(destination, timeout, subscription)

    def listen(
        self,
        destination: Destination,
        on_message: Callable[[Message], object],
        credit: int = 1,
        subscription: SubscriptionKey | None = None,
        on_end: Callable[[Exception], object] | None = None,
    ) -> Listener:
        return self._receiving.listen(destination, on_message, credit, subscription, on_end)

    def take_undelivered(self, limit: int = 100) -> Sequence[Undelivered]:
        return self._receiving.take_undelivered(limit)

    def browse(
        self,
        destination: Destination,
        limit: int | None = None,
        after: int | Message = 0,
        subscription: SubscriptionKey | None = None,
    ) -> Iterator[Message]:
        return self._receiving.browse(destination, limit, after, subscription)

    # Settling

    def ack(self, messages: Sequence[Message]) -> None:
        self._engine.ensure_usable()
        self._settling.ack(messages, LEASED)

    def ack_nowait(self, messages: Sequence[Message]) -> Future[None]:
        self._engine.ensure_usable()
        return self._settling.ack_nowait(messages, LEASED)

    def release(self, messages: Sequence[Message], delivered: bool = True) -> None:
        self._engine.ensure_usable()
        self._settling.give_back(messages, LEASED, delivered)

    def release_nowait(self, messages: Sequence[Message], delivered: bool = True) -> Future[None]:
        self._engine.ensure_usable()
        return self._settling.give_back_nowait(messages, LEASED, delivered)

    def claim(self, message: Message) -> None:
        self._engine.ensure_usable()
        self._settling.claim(message)

    def unclaim(self, messages: Sequence[Message]) -> None:
        self._engine.ensure_usable()
        self._settling.give_back(messages, CLAIMED, delivered=True)

    def token(self, message: Message) -> str:
        if not isinstance(message._note, Lease):
            require_leased(message)
            raise UnknownMessageError(f"{message!r} is not leased here any more")
        return self._settling.token(message._note)

    def leased(self, token: str) -> Message:
        self._engine.ensure_usable()
        message = self._receiving.read(self._settling.lease(token))
        if message is None:
            raise UnknownMessageError(f"the message of token {token} is not there any more")
        return message

    def settle(self, tokens: Sequence[str], how: Settlement) -> list[AnabranchError | None]:
        self._engine.ensure_usable()
        return self._settling.settle(tokens, how)

    def settle_nowait(self, tokens: Sequence[str], how: Settlement) -> Future[list[AnabranchError | None]]:
        self._engine.ensure_usable()
        return self._settling.settle_nowait(tokens, how)

    # Durable subscriptions

    def subscribe(self, subscription: Subscription, retroactive: bool = False) -> bool:
        engine = self._engine
        engine.ensure_usable()
        change = self._sending.change(Change(subscription, True, bool(retroactive)))
        ((subscriber, there),) = self._sending.write([change])
        engine.asked(lambda: None)  # at once, so that who receives need not look for it
        if there:
            require_same(subscriber.subscription, subscription)
        return not there

    def unsubscribe(self, topic: Destination, subscription: SubscriptionKey) -> int:
        engine = self._engine
        subscriber = self._receiving.subscription(topic, subscription)
        held, count = engine.asked(lambda: (claimed(subscriber.feed), subscriber.total))
        require_unclaimed(f"the {shown(topic, subscription)}", "removed", held)
        ((ended, _),) = self._sending.write([Unsubscribe(subscriber.topic, subscription)])
        engine.asked(lambda: None)
        if ended is None:
            raise unknown(topic, subscription)
        self._drop(ended.feed)
        return count

    def subscriptions(self) -> Sequence[Subscription]:
        catalog = self._engine.catalog
        return self._engine.asked(
            lambda: [
                subscriber.subscription
                for state in catalog.destinations.values()
                for subscriber in state.subscriptions.values()
            ]
        )

    # Transactions

    def commit(
        self,
        sends: Sequence[tuple[Destination, Outgoing]],
        acks: Sequence[Message],
        sync: bool | None = None,
        changes: Sequence[Change] = (),
    ) -> list[Receipt]:
        return self._transactions.commit(sends, acks, sync, changes)

    def commit_nowait(
        self,
        sends: Sequence[tuple[Destination, Outgoing]],
        acks: Sequence[Message],
        sync: bool | None = None,
        changes: Sequence[Change] = (),
    ) -> Future[list[Receipt]]:
        return self._transactions.commit_nowait(sends, acks, sync, changes)

    def reserve(self, sends: Sequence[tuple[Destination, Outgoing]]) -> object:
        self._engine.ensure_usable()
        sending = self._sending
        return sending.reserve(sending.sends(sends)) if sending.room.limited else None

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
        return self._transactions.prepare(transaction, participants, sends, acks, sync, room, changes)

    def commit_prepared(self, transaction: bytes) -> Pending[list[Receipt]]:
        return self._transactions.commit_prepared(transaction)

    def rollback_prepared(self, transaction: bytes) -> Pending[bool]:
        return self._transactions.rollback_prepared(transaction)

    def recover_prepared(self) -> Sequence[Prepared]:
        return self._transactions.recover_prepared()

    def committed(self) -> Sequence[bytes]:
        return self._engine.asked(lambda: sorted(self._engine.committed))

    def forget(self, transactions: Sequence[bytes]) -> None:
        self._transactions.forget(transactions)

    def sync(self) -> None:
        self._engine.ensure_usable()
        if self.backend.threaded:
            self._writer.flush()  # who was interrupted does not wait for what it had queued
        self.backend.sync()

    # Upkeep

    def purge(self, destination: Destination, subscription: SubscriptionKey | None = None) -> int:
        engine = self._engine
        if subscription is not None:
            subscriber = self._receiving.subscription(destination, subscription)
            return purge(engine, subscriber.topic, (subscriber.feed,), self._sending.write)[0]
        state = engine.catalog.destinations.get(destination)
        if state is None:
            engine.ensure_usable()
            return 0
        free, gone = purge(engine, state, state.feeds(), self._sending.write)
        return gone if state.is_topic else free

    def delete(self, destination: Destination) -> int:
        engine = self._engine
        state = engine.catalog.destinations.get(destination)
        if state is None:
            engine.ensure_usable()
            return 0
        held, count = engine.asked(lambda: (sum(claimed(feed) for feed in state.feeds()), state.total))
        require_unclaimed(str(destination), "deleted", held)
        remove = Remove(state)
        self._sending.write([remove])
        volatile = engine.nonpersistent
        if volatile is not None:
            engine.asked(lambda: volatile.remove(state))
        engine.asked(lambda: None)  # at once, so that nothing fetched ahead is received, nothing leased acked
        self._drop(remove.state.feed)
        return count

    def _drop(self, feed: Feed) -> None:
        """Remove what is left of a destination that is no more. That it is gone stands: if this fails, or is
        interrupted, the background goes on, or the next opening."""
        try:
            with self._dropping:
                drop_volatile(self._engine)
                drop(self._engine, feed, self._sending.write)
        except AnabranchError as error:
            log.debug("store %s: %s is not removed whole yet: %s", self.name, feed.state.destination, error)

    def _drop_all(self) -> None:
        """All that is left of what is gone."""
        if self._engine.leaving:
            with self._dropping:
                drop_volatile(self._engine)
                for feed in list(self._engine.catalog.leaving):
                    drop(self._engine, feed, self._sending.write)

    def _drop_later(self) -> None:
        if not self._drop_due:
            self._drop_due = True
            shared().schedule_while_alive(DROP_SECONDS, self._drop_in_background)

    def _drop_in_background(self) -> None:
        self._drop_due = False
        try:
            self._drop_all()
        except AnabranchError as error:
            log.debug("store %s: nothing more is removed now: %s", self.name, error)
            if not self._engine.closed and self._engine.failed is None:
                self._drop_later()

    def retire(self) -> bool:
        engine = self._engine
        try:
            self._writer.flush()
        except StoreFailedError as error:  # its database is away: not now
            if engine.failed is not None:
                raise
            log.debug("store %s does not retire: %s", self.name, error)
            return False
        engine.check()
        with engine.lock:
            engine.current()
            if any(feed.is_used for feed in engine.catalog.feeds()) or engine.sequencer.prepared:
                return False
            if self.volatile and self._holds_anything():
                return False
            if engine.nonpersistent is not None and engine.nonpersistent.holds_anything:
                return False
            engine.closed = True
            self._writer.refuse_more()
            return True

    def _holds_anything(self) -> bool:
        """Whether closing it would lose something."""
        engine = self._engine
        return bool(
            engine.catalog.messages or len(engine.sequencer.window) or engine.committed or engine.catalog.subscriptions
        )

    def reclaim(self) -> int:
        self._engine.ensure_usable()
        with disk_errors(f"store {self.name!r} cannot give back space"):
            return self.backend.reclaim()

    def checkpoint(self) -> None:
        """Write out what shortens the next opening. Happens by itself; durability never depends on it."""
        self._engine.ensure_usable()
        self.backend.checkpoint()

    # Asking

    def destinations(self) -> Sequence[Destination]:
        catalog = self._engine.catalog
        return self._engine.counted(lambda: [state.destination for state in catalog.declared()])

    def depth(self, destination: Destination, subscription: SubscriptionKey | None = None) -> int:
        if subscription is not None:
            subscriber = self._receiving.subscription(destination, subscription)
            return self._engine.counted(lambda: self._count(subscriber))
        state = self._engine.catalog.destinations.get(destination)
        return self._engine.counted(lambda: self._count(state) if state is not None else 0)

    def _count(self, state: DestinationState | SubscriptionState) -> int:
        return state.total + self._engine.pending_counts().get(state, 0)

    def counts(self, destination: Destination, subscription: SubscriptionKey | None = None) -> Counts:
        if subscription is not None:
            subscriber = self._receiving.subscription(destination, subscription)
            return self._engine.counted(lambda: _counts(self._count(subscriber), (subscriber.feed,)))
        state = self._engine.catalog.destinations.get(destination)
        return self._engine.counted(
            lambda: _counts(self._count(state), state.feeds()) if state is not None else Counts(0, 0)
        )

    def find(self, destination: Destination, message_id: str) -> Message | None:
        engine, state = self._engine, self._engine.catalog.destinations.get(destination)
        name = pack_id(message_id)
        if state is None:
            engine.ensure_usable()
            return None
        key, sequencer = (state.number, name), engine.sequencer
        seq = sequencer.window.get(key) or sequencer.volatile_window.get(key)
        place = engine.asked(lambda: engine.rows.row(state, None, seq)) if seq is not None else None
        for record in engine.rows.bodies(state, [place]) if place is not None else ():
            if record is not None:
                return decode(self, destination, place, record, None)  # type: ignore[arg-type]
        return None

    def stats(self) -> StoreStats:
        engine = self._engine
        if engine.failed is None:
            try:
                return engine.counted(self._stats)
            except StoreFailedError:
                pass  # it has just failed
        with engine.lock:
            return self._stats()

    def _stats(self) -> StoreStats:
        engine = self._engine
        more = engine.pending_counts()
        counts = {state: state.total + more.get(state, 0) for state in engine.catalog.declared()}
        backend = self.backend.stats()
        volatile = engine.nonpersistent
        return StoreStats(
            name=self.name,
            kind=self.backend.kind,
            messages=sum(counts.values()),
            destinations={state.destination: count for state, count in counts.items()},
            leased=sum(len(feed.held) for feed in engine.catalog.feeds()),
            sends=engine.sends,
            acks=engine.acks,
            syncs=backend.syncs,
            batches=engine.batches,
            journal_bytes=backend.journal_bytes,
            capacity_bytes=backend.capacity_bytes,
            pool_bytes=backend.pool_bytes,
            segments=backend.segments,
            live_percent=backend.live_percent,
            failed=str(engine.failed) if engine.failed is not None else None,
            subscriptions={
                subscriber.subscription: subscriber.total + more.get(subscriber, 0)
                for state in counts
                for subscriber in state.subscriptions.values()
            },
            memory_bytes=backend.memory_bytes + (volatile.memory_bytes if volatile is not None else 0),
            swap_bytes=backend.swap_bytes + (volatile.swap_bytes if volatile is not None else 0),
            dropped=engine.sequencer.dropped + (volatile.dropped if volatile is not None else 0),
            waiting=sum(len(feed.takers) for feed in engine.catalog.feeds()),
        )

    def check(self) -> Iterator[str]:
        with disk_errors(f"store {self.name!r} cannot be checked"):
            found: list[str] | None = None
            while found is None:
                self._drop_all()
                found = self._writer.undisturbed(lambda: self._engine.asked(self._violations))
            yield from found

    def _violations(self) -> list[str] | None:
        """None if something is being removed just now."""
        if self._engine.leaving:
            return None
        found = list(self.backend.check())
        if self._engine.nonpersistent is not None:
            found += self._engine.nonpersistent.check()
        return found


def _counts(held: int, feeds: Sequence[Feed]) -> Counts:
    leased = sum(len(feed.held) for feed in feeds)
    return Counts(max(held - leased, 0), leased)
