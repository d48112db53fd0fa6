"""SqlStore: the contract of adapters/base.py over the tables of a database.

    state      what is where, without the messages                   (state.py, under its lock)
    writer     one thread, one database transaction for many callers (writer.py)
    database   reading, by whoever needs it                          (database.py)
    receiving  what comes out                                        (receiving.py)

A call that changes something queues a ticket and waits for it; the writer commits, brings it into the state, and wakes
the caller. A call that looks reads the state, and the tables for what is not in it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar, Final, Generic, TypeVar

from pydantic import BaseModel
from sqlalchemy.exc import SQLAlchemyError

from ...policies.destination import Destination
from ...policies.errors import (
    AnabranchError,
    ClosedError,
    OutcomeUnknownError,
    StoreFailedError,
    UnknownMessageError,
)
from ...policies.options import SqlOptions
from ..base import (
    DEFAULT_PRIORITY,
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
from ..delivery import CLAIMED, LEASED, LEAVING, Delivery, feeds_of
from ..files import FILE_MODE, disk_errors
from ..subscriptions import checked
from . import dialects, native, tables
from .branches import Branch
from .browsing import browse
from .checking import violations
from .database import Database
from .directory import StoreDirectory
from .lease import Lease
from .lease import statements as lease_statements
from .loading import Loader
from .messages import Sending, sending
from .pool import cut_off, database_url, open_engine, open_single, shown_url
from .receiving import Receiving, durable_of
from .room import Room
from .schema import schema
from .state import State
from .statements import Statements, keepalive_statement
from .tickets import (
    ACK,
    COMMIT,
    DELETE,
    DELIVERED,
    FORGET,
    PREPARE,
    PURGE,
    ROLLBACK,
    SEND,
    SUBSCRIBE,
    UNSUBSCRIBE,
    Operation,
    Ticket,
)
from .writer import Writer

log = logging.getLogger(__name__)

T = TypeVar("T")

SEND_MANY: Final = 500
"""Messages of send_many that are stored together."""


def _descriptors(options: SqlOptions) -> int:
    """How many a store keeps open: its lock, its lease's connection, and those that one thread writes and another reads
    on: each of SQLite's is a file and a write-ahead log, and all of them share a third."""
    leased = options.lease_expiration is not None
    if options.url is None:
        return 1 + 2 * (2 + leased) + 1
    return 1 + max(2, options.pool_min) + leased


class SqlStore:
    """A store in tables of its own. Threads: all. Forks: a child's calls raise ClosedError (rule D4)."""

    options_model: ClassVar[type[BaseModel]] = SqlOptions

    def __init__(self, name: str, directory: Path, options: SqlOptions, index_directory: Path | None = None) -> None:
        """`index_directory` means nothing here: the database has its own."""
        self.name = name
        self.options = options
        self.store_id = b""
        self.owner: object = None
        self.volatile = False
        self.shared = options.lease_expiration is not None
        self.descriptors = _descriptors(options)
        self._directory = StoreDirectory(name, directory, options.file_mode, self._lose_directory)
        self._opened = False
        self._state_: State | None = None
        self._writer_: Writer | None = None
        self._lease: Lease | None = None
        self._native: native.Native | None = None
        self._receiving = Receiving(self)

    @classmethod
    def check_options(cls, options: SqlOptions) -> None:
        """Raises ConfigError and MissingExtraError for what `create` would refuse before it connects."""
        found = schema(options.schema_prefix, options.table_names)
        Statements(found, options.statements)
        keepalive_statement(options)
        open_single(options, Path()).dispose()

    @classmethod
    def create(cls, name: str, directory: Path, options: SqlOptions) -> bytes:
        found = schema(options.schema_prefix, options.table_names)
        Statements(found, options.statements)
        keepalive_statement(options)

        def fill(path: Path, store_id: bytes) -> bytes:
            dialects.make_sqlite_file(database_url(options, path), options.file_mode or FILE_MODE)
            engine = open_engine(options, path)
            try:
                database = Database(name, engine)
                if options.native_two_phase:
                    native.require(database)
                made = tables.prepare(database, found, options, store_id)
                database.require_keepalive(options)
                return made
            finally:
                engine.dispose()

        with disk_errors(f"store {name!r} cannot be created"):
            return StoreDirectory(name, directory, options.file_mode).create(fill)

    @classmethod
    def is_contained(cls, options: SqlOptions) -> bool:
        """Whether all of a store lies in its directory."""
        return options.url is None

    @classmethod
    def identify(cls, directory: Path) -> bytes | None:
        return StoreDirectory("", directory).identify()

    # Opening and closing

    def open(self, progress: Progress | None = None) -> None:
        with disk_errors(f"store {self.name!r} cannot be opened"):
            store_id = self._directory.lock()
        try:
            self._open(store_id, progress)
            self._directory.require_lock()
        except BaseException:
            self._let_go()
            raise
        self._opened = True

    def _open(self, store_id: bytes, progress: Progress | None) -> None:
        started = time.monotonic()
        options = self.options
        found = schema(options.schema_prefix, options.table_names)
        statements = Statements(found, options.statements)
        self._engine = open_engine(options, self._directory.path)
        self._database = Database(self.name, self._engine)
        if options.native_two_phase:
            native.require(self._database)
        tables.require(self._database, found, options, store_id)
        self._database.require_keepalive(options)
        if options.lease_expiration is not None:
            self._lease = Lease(
                open_single(options, self._directory.path), lease_statements(found), store_id, options,
                f"store {self.name!r}", self._directory.path, self._lose,
            )  # fmt: skip
            self._lease.acquire()
        self._delivery = Delivery(self.name, options.max_leases, options.max_deliveries)
        state = State(options, statements, self._delivery, self._database.read)
        self._room = Room(self.name, options, state.held)
        try:
            with self._engine.connect() as connection:
                loader = Loader(state, connection, store_id, shown_url(self._engine.url))
                loader.load(progress)
                loader.prepared(self._room)
        except SQLAlchemyError as error:
            raise self._database.error(error) from None
        self._native = None
        if native.is_possible(self._database):  # also without the option, with which it may have been open before
            branches = list(state.prepared.values())
            self._native = native.Native(
                self._database, statements, found.messages, store_id, options.chunk_size, branches
            )
            self._native.recover(branches)
        require = self._lease.require if self._lease is not None else _nothing
        writer = Writer(self._database, state, self._room, store_id, require)
        writer.on_stop = self._wake_all
        self.store_id, self._state_, self._writer_ = store_id, state, writer
        log.info("store %s: opened with %d messages in %.2f s", self.name, state.messages, time.monotonic() - started)

    def close(self) -> None:
        if not self._opened:
            return
        assert self._writer_ is not None
        if self._writer_.forked:
            self._writer_.closed = True
            self._opened = False
            return
        self._writer_.close()
        if self._native is not None and self._writer_.failed is None and self._state_ is not None:
            self._native.close(self._state_.prepared.values())
        self._opened = False
        self._let_go()
        self._wake_all()

    def _let_go(self) -> None:
        if self._lease is not None:
            self._lease.release()
            self._lease = None
        engine = getattr(self, "_engine", None)
        if engine is not None:
            engine.dispose()
        self._directory.unlock()

    def _lose_directory(self, error: StoreFailedError) -> None:
        """The lock's file is gone, or is another's: so may the directory be."""
        self._lose(str(error))

    def _lose(self, reason: str) -> None:
        """The lease, or the directory, is ours no more against our will."""
        if self._writer_ is not None:
            self._writer_.fail(StoreFailedError(reason))
            cut_off(self._engine)  # or those whom the database keeps waiting would hear of it much later

    @property
    def _writer(self) -> Writer:
        if self._writer_ is None:
            raise ClosedError(f"store {self.name!r} is closed; open it again")
        return self._writer_

    def _usable(self) -> State:
        """The state, if the store is open and well."""
        self._writer.ensure_usable()
        if self._lease is not None:
            self._lease.require()
        assert self._state_ is not None
        return self._state_

    @property
    def last_seq(self) -> int:
        if self._writer.failed is not None:
            self._writer.ensure_usable()
        assert self._state_ is not None
        return self._state_.last_seq

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
        self._usable()
        outgoing = Outgoing(body, headers, message_id, priority, expires_at_ms)
        return Receipt(destination, *self._writer.run(self._ticket(destination, outgoing))[0])

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
        self._usable()
        ticket = self._ticket(destination, Outgoing(body, headers, message_id, priority, expires_at_ms))
        future: Future[Receipt] = Future()
        future.set_running_or_notify_cancel()  # it may be on its way: no cancel() can call it back
        ticket.future = (future, lambda done: Receipt(destination, *done.outcomes[0]))
        self._writer.submit_nowait(ticket)
        return future

    def send_many(
        self, destination: Destination, messages: Iterable[Outgoing | bytes], sync: bool | None = None
    ) -> list[Receipt]:
        self._usable()
        prepared = [self._sending(destination, message) for message in messages]  # what is wrong with one refuses all
        tickets = [
            Ticket([(SEND, some) for some in part], sum(some.size for some in part))
            for part in (prepared[at : at + SEND_MANY] for at in range(0, len(prepared), SEND_MANY))
        ]
        for ticket in tickets:
            self._writer.submit_nowait(ticket)
        return [Receipt(destination, *done) for ticket in tickets for done in self._writer.wait(ticket)]

    def _ticket(self, destination: Destination, outgoing: Outgoing) -> Ticket:
        message = self._sending(destination, outgoing)
        return Ticket([(SEND, message)], message.size)

    def _sending(self, destination: Destination, message: Outgoing | bytes) -> Sending:
        outgoing = message if isinstance(message, Outgoing) else Outgoing(message)
        return sending(destination, outgoing, self.options.message_bytes_max)

    def _sendings(self, sends: Sequence[tuple[Destination, Outgoing]]) -> list[Sending]:
        return [self._sending(destination, message) for destination, message in sends]

    # Receiving

    def receive(
        self, destination: Destination, timeout: float | None = 0, subscription: SubscriptionKey | None = None
    ) -> Message | None:
        return self._receiving.receive(destination, timeout, subscription)

    def watch(
        self, destination: Destination, subscription: SubscriptionKey | None, wake: Callable[[], None]
    ) -> Callable[[], None]:
        return self._receiving.watch(destination, subscription, wake)

    def take_undelivered(self, limit: int = 100) -> Sequence[Undelivered]:
        return self._receiving.take_undelivered(limit)

    def _wake_all(self) -> None:
        if self._state_ is not None:
            for known in list(self._state_.destinations.values()):
                known.wake()

    def browse(
        self,
        destination: Destination,
        limit: int | None = None,
        after: int | Message = 0,
        subscription: SubscriptionKey | None = None,
    ) -> Iterator[Message]:
        if not isinstance(after, Message) and after and self.options.priorities:
            raise ValueError(
                f"store {self.name!r} orders by priority, so that a seq alone tells no place: browse after a message"
            )
        return browse(self, destination, limit, after, subscription)

    # Settling

    def ack(self, messages: Sequence[Message]) -> None:
        self._usable()
        self._settle(messages, LEASED, lambda acks: Ticket(acks))

    def _settle(
        self, messages: Sequence[Message], hold: int, ticket_of: Callable[[list[Operation]], Ticket]
    ) -> list[Any]:
        """Ack what is held so, with what else is in the ticket."""
        try:
            taken = self._delivery.take(self, messages, hold, LEAVING)
            ticket = ticket_of([(ACK, ack) for ack in taken])
            return self._writer.run(ticket) if ticket.operations else []
        except (UnknownMessageError, OutcomeUnknownError):
            raise
        except (AnabranchError, KeyboardInterrupt, RuntimeError):
            self._delivery.put_back(messages, hold)  # what the ack has reached is not held any more
            raise

    def release(self, messages: Sequence[Message], delivered: bool = True) -> None:
        self._give_back(messages, LEASED, delivered)

    def claim(self, message: Message) -> None:
        self._usable()
        self._delivery.take(self, [message], LEASED, CLAIMED)

    def unclaim(self, messages: Sequence[Message]) -> None:
        self._give_back(messages, CLAIMED, True)

    def _give_back(self, messages: Sequence[Message], hold: int, delivered: bool) -> None:
        """All or none of them, wherever Ctrl-C strikes."""
        state = self._usable()
        counted: list[Operation] = []
        try:
            self._delivery.take(self, messages, hold, LEAVING)
            if delivered:
                counted = self._count(state, messages)
            with state.lock:
                try:
                    self._delivery.give_back(messages, state)
                except KeyboardInterrupt:
                    self._delivery.give_back(messages, state)  # the rest; nobody can have leased any of them yet
                    raise
        except UnknownMessageError:  # another thread may be settling them
            raise
        except (KeyboardInterrupt, AnabranchError):
            self._delivery.put_back(messages, hold)  # unless they are all given back
            raise
        if counted:
            try:
                self._writer.run(Ticket(counted))
            except AnabranchError as error:  # they are free all the same, and counted until the store closes
                log.warning("store %s: that messages came back is not written: %s", self.name, error)

    def _count(self, state: State, messages: Sequence[Message]) -> list[Operation]:
        counted: list[Operation] = []
        with state.lock:
            for message in messages:
                for feed in feeds_of(message.note):
                    count = message.deliveries
                    state.counts[feed.base + message.seq] = count
                    counted.append((DELIVERED, (feed, message.seq, count)))
        return counted

    # Durable subscriptions

    def subscribe(self, subscription: Subscription, retroactive: bool = False) -> bool:
        self._usable()
        checked = _checked(subscription)
        return bool(self._writer.run(Ticket([(SUBSCRIBE, (Change(checked, True, retroactive), True))]))[0])

    def unsubscribe(self, topic: Destination, subscription: SubscriptionKey) -> int:
        durable = durable_of(self._usable(), topic, subscription)
        assert durable is not None
        return int(self._writer.run(Ticket([(UNSUBSCRIBE, (Change(durable.subscription, False), True))]))[0])

    def subscriptions(self) -> Sequence[Subscription]:
        state = self._usable()
        with state.lock:
            return [durable.subscription for durable in state.durables.values()]

    # Transactions

    def commit(
        self,
        sends: Sequence[tuple[Destination, Outgoing]],
        acks: Sequence[Message],
        sync: bool | None = None,
        changes: Sequence[Change] = (),
    ) -> list[Receipt]:
        self._usable()
        prepared = self._sendings(sends)
        first: list[Operation] = [(_kind(change), (_checked_change(change), False)) for change in changes]
        first += [(SEND, some) for some in prepared]
        size = sum(some.size for some in prepared)
        outcomes = self._settle(acks, CLAIMED, lambda operations: Ticket(first + operations, size))
        done = outcomes[len(changes) : len(changes) + len(sends)]
        return [Receipt(destination, *result) for (destination, _), result in zip(sends, done, strict=True)]

    def reserve(self, sends: Sequence[tuple[Destination, Outgoing]]) -> object:
        state = self._usable()
        prepared = self._sendings(sends)
        if self.options.max_messages is None and self.options.max_bytes is None:
            return None
        new = [
            some for some in prepared
            if some.message_id is None or some.requeued or state.window.get((some.destination, some.message_id)) is None
        ]  # fmt: skip
        return self._room.reserve((len(new), sum(some.size for some in new)))

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
        self._usable()
        self._directory.require_lock()
        prepared = self._sendings(sends)
        checked = [_checked_change(change) for change in changes]
        taken = self._delivery.take(self, acks, CLAIMED, CLAIMED)
        branch = Branch(transaction, participants, prepared, taken, checked)
        branch.reservation, branch.messages = room, acks
        if self._native is None or not self.options.native_two_phase or not prepared:
            ticket = Ticket([(PREPARE, branch)], sum(some.size for some in prepared))
            self._writer.submit(ticket)
            return Step(self._writer, ticket, lambda outcomes: None)
        return self._prepare_natively(self._native, branch, prepared)

    def _prepare_natively(self, its: native.Native, branch: Branch, sends: Sequence[Sending]) -> Pending[None]:
        def failed(error: BaseException | None = None) -> None:
            if not isinstance(error, OutcomeUnknownError):  # else it may be prepared, and shows when its outcome comes
                its.abandon(branch.transaction)

        try:
            staged = its.stage(branch.transaction, sends)
        except BaseException:
            failed()
            raise
        size = sum(some.size for some in sends)
        if staged is not None:
            branch.stage, branch.sends = staged
            size = 0
        ticket = Ticket([(PREPARE, branch)], size)
        try:
            self._writer.submit(ticket)
        except (AnabranchError, RuntimeError):  # not so if Ctrl-C strikes: it may be queued
            failed()
            raise
        return Step(self._writer, ticket, lambda outcomes: None, failed)

    def commit_prepared(self, transaction: bytes) -> Pending[list[Receipt]]:
        branch = self._prepared(transaction)
        if branch is None:
            return Done([])
        if self._native is not None:
            self._native.commit(branch)
        destinations = [some.destination for some in branch.sends]

        def receipts(outcomes: list[Any]) -> list[Receipt]:
            # No outcomes where another thread had committed it before.
            return [Receipt(d, *done) for d, done in zip(destinations, outcomes[0], strict=False)]

        return self._outcome(COMMIT, branch, receipts)

    def rollback_prepared(self, transaction: bytes) -> Pending[bool]:
        branch = self._prepared(transaction)
        if self._native is not None:
            if branch is None:
                self._native.abandon(transaction)
            else:
                self._native.roll_back(branch)
        return Done(False) if branch is None else self._outcome(ROLLBACK, branch, lambda outcomes: bool(outcomes[0]))

    def _prepared(self, transaction: bytes) -> Branch | None:
        """The branch, if it is prepared once all that is queued is written: a thread may have been interrupted before
        it could wait."""
        state = self._usable()
        if transaction not in state.prepared:
            self._writer.flush()
        return state.prepared.get(transaction)

    def _outcome(self, kind: int, branch: Branch, result: Callable[[list[Any]], T]) -> Pending[T]:
        size = 0 if branch.stage else sum(some.size for some in branch.sends)
        ticket = Ticket([(kind, branch)], size, alone=bool(branch.changes))
        self._writer.submit(ticket)
        return Step(self._writer, ticket, result)

    def recover_prepared(self) -> Sequence[Prepared]:
        state = self._usable()
        with state.lock:
            branches = list(state.prepared.values())
        return [branch.summary() for branch in sorted(branches, key=lambda branch: branch.transaction)]

    def committed(self) -> Sequence[bytes]:
        state = self._usable()
        with state.lock:
            return sorted(state.committed)

    def forget(self, transactions: Sequence[bytes]) -> None:
        self._usable()
        self._writer.run(Ticket([(FORGET, list(transactions))]))

    def sync(self) -> None:
        """Everything is synced as it is committed; what is queued is yet to be."""
        self._usable()
        self._writer.flush()

    def purge(self, destination: Destination, subscription: SubscriptionKey | None = None) -> int:
        state = self._usable()
        durable = durable_of(state, destination, subscription)
        known = state.destinations.get(destination)
        if known is None:
            return 0
        return int(self._writer.run(Ticket([(PURGE, (known, durable))]))[0])

    def delete(self, destination: Destination) -> int:
        state = self._usable()
        known = state.destinations.get(destination)
        return 0 if known is None else int(self._writer.run(Ticket([(DELETE, known)]))[0])

    # Asking

    def retire(self) -> bool:
        state = self._usable()
        try:
            self._writer.flush()
        except StoreFailedError as error:  # its database is away: not now
            log.debug("store %s does not retire: %s", self.name, error)
            return False
        with state.lock:
            if self._delivery.waiting or self._delivery.held or state.prepared:
                return False
            self._writer.refuse_more()
            return True

    def destinations(self) -> Sequence[Destination]:
        state = self._usable()
        with state.lock:
            return [known.destination for known in state.destinations.values() if known.number]

    def depth(self, destination: Destination, subscription: SubscriptionKey | None = None) -> int:
        state = self._usable()
        durable = durable_of(state, destination, subscription)
        known = state.destinations.get(destination)
        if durable is not None:
            return durable.count
        return known.count if known is not None else 0

    def reclaim(self) -> int:
        """What the database can give back by itself."""
        self._usable()
        with disk_errors(f"store {self.name!r} cannot give back space"):
            return self._database.read(dialects.reclaim)

    def stats(self) -> StoreStats:
        writer = self._writer
        if writer.failed is None:
            writer.ensure_usable()
        state = self._state_
        assert state is not None
        with state.lock:
            there = [known for known in state.destinations.values() if known.number]
            return StoreStats(
                name=self.name,
                kind="sql",
                messages=state.messages,
                destinations={known.destination: known.count for known in there},
                leased=len(self._delivery.held),
                sends=writer.sends,
                acks=writer.acks,
                syncs=writer.batches,
                batches=writer.batches,
                failed=str(writer.failed) if writer.failed is not None else None,
                subscriptions={durable.subscription: durable.count for durable in state.durables.values()},
                dropped=writer.dropped,
            )

    def check(self) -> Iterator[str]:
        state = self._usable()
        self._writer.flush()
        yield from self._writer.undisturbed(lambda: violations(state, self._database))


class Step(Generic[T]):
    """A Pending of this store: a ticket in its queue."""

    def __init__(
        self,
        writer: Writer,
        ticket: Ticket,
        result: Callable[[list[Any]], T],
        failed: Callable[[BaseException], None] | None = None,
    ) -> None:
        self._writer, self._ticket, self._result, self._failed = writer, ticket, result, failed

    def proceed(self) -> None:
        """It goes on by itself."""

    def wait(self) -> T:
        try:
            return self._result(self._writer.wait(self._ticket))
        except AnabranchError as error:
            if self._failed is not None:
                self._failed(error)
            raise


def _nothing() -> None:
    """No lease is asked for."""


def _kind(change: Change) -> int:
    return SUBSCRIBE if change.subscribe else UNSUBSCRIBE


def _checked_change(change: Change) -> Change:
    return change._replace(subscription=_checked(change.subscription))


def _checked(subscription: Subscription) -> Subscription:
    """Raises what `checked` raises."""
    return checked(subscription)._replace(no_local=bool(subscription.no_local))
