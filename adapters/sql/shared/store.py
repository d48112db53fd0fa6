"""SharedStore: the face of a store whose tables any number of routers use at once. adapters/core/store.py says what
each call promises; here is what differs.

Every call is a transaction of its own in the database, and durable on return, as its COMMIT is. A lease is a row's: it
outlives the process that has it, until its time or that process's row in ROUTERS is gone.
"""

from __future__ import annotations

import io
import logging
import os
import random
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Final

import msgspec

from ....policies.config.options import SqlOptions, refused_to_clients
from ....policies.errors import (
    AnabranchError,
    ClosedError,
    OutcomeUnknownError,
    PlacementError,
    StoreFailedError,
    StoreLockedError,
    TransactionError,
    UnknownMessageError,
)
from ....policies.names.destination import Destination, Kind
from ...core.backend.settings import Settings
from ...core.engine.lease_times import require_seconds
from ...core.engine.usage import Recorder
from ...core.messages import (
    DEFAULT_PRIORITY,
    DELIVERY_LIMIT,
    EXPIRED,
    Headers,
    Message,
    Outgoing,
    Reason,
    Receipt,
    Rejecting,
    Undelivered,
    note_received,
    shown_id,
)
from ...core.migration.copying import Amount
from ...core.record.headers import pack_id, unpack_headers
from ...core.service.failures import Failure
from ...core.service.leased_sending import not_leased, require_leasable
from ...core.service.subscriptions import checked
from ...core.state.due import delay_ms
from ...core.state.leases import CLAIMED, LEASED, REJECTED, ROLLED_BACK, unknown_lease
from ...core.store_types import (
    Change,
    Counts,
    Done,
    Pending,
    Prepared,
    Progress,
    Settlement,
    StoreStats,
    Subscription,
    SubscriptionKey,
)
from ...system.background import Job, shared
from ...system.conditions import Event
from ...system.files import FILE_MODE, disk_errors, read_file, write_file
from ..database.columns import escaped, unescaped
from ..database.connections import open_engine, open_single
from ..database.errors import Database
from ..directory import NODE, StoreDirectory
from . import tables
from .branches import Branch, Branches, packed
from .database import Ask, SharedDatabase, configure
from .leases import Abandoned, Leases, Place, SharedLease, milliseconds
from .listening import SharedListener
from .queues import Queues, destination_of
from .sending import Sending, Stored, moved
from .statements import Statements
from .topics import PAGE, Topics
from .usage import Sent, Usage
from .waiting import Waiter, Waiting

log: logging.Logger = logging.getLogger(__name__)

ALL_DELIVERIES: Final = (1 << 31) - 1
NOBODY: Final = -1
"""The number of no router."""
DOUBTS: Final = 3
"""Sweeps that look for a lease whose caller was interrupted: the database may be at it still."""


def _by(part: str, name: str) -> Any:
    """Return a method that calls this function of a part of the store, which must be open."""

    def call(self: SharedStore, *given: Any, **named: Any) -> Any:
        self._require_open()
        return getattr(getattr(self, part), name)(*given, **named)

    return call


def _always(answer: object) -> Any:
    """Return a method that returns this, whatever it is asked; the store must be open."""

    def call(self: SharedStore, *given: Any, **named: Any) -> Any:
        self._require_open()
        return answer

    return call


class SharedStore:
    """A store that other routers use at the same time. Threads: all. Forks: a child's calls raise ClosedError."""

    options_model: ClassVar[type[SqlOptions]] = SqlOptions
    volatile = limited = is_prompt = False
    shared = True

    def __init__(self, name: str, directory: Path, options: SqlOptions, index_directory: Path | None = None) -> None:
        self.name = name
        self.directory = directory
        self.options = options
        self.store_id: bytes = b""
        self.descriptors: Final = 4 + max(2, options.pool_min)
        self.settings: Final = Settings.of(options)
        self.owner: object = None
        self._usage: Usage | None = None
        self.on_destinations: Callable[[list[Destination]], None] = lambda destinations: None
        """Called with destinations that other routers may have made."""
        self._counts_first = options.count_deliveries == "on_receive" or options.max_deliveries == 1
        self._most_deliveries = options.max_deliveries or ALL_DELIVERIES
        self._directory = StoreDirectory(name, directory, options.file_mode, self._lose)
        self._opened, self._retired, self._pid = False, False, 0
        self.failed: BaseException | None = None
        self._on_failed: Callable[[BaseException], object] = lambda error: None
        self._acks = self._redelivered = 0
        self._doubtful: deque[tuple[tuple[Any, ...], int, int]] = deque()
        """Questions for leases that may have begun, though nobody was told of them; by how much the number of their
        deliveries rises when they are freed; and how often to ask."""
        self._expired: dict[tuple[Destination, SubscriptionKey | None], int] = {}

    # Made and recognised

    @staticmethod
    def check_options(options: SqlOptions) -> None:
        """Raise ConfigError and MissingExtraError for what `create` would refuse before it connects."""
        open_single(options, Path()).dispose()

    @classmethod
    def create(cls, name: str, directory: Path, options: SqlOptions) -> bytes:
        """Make the directory, and the tables unless another router has, as Store.create."""

        def fill(path: Path, store_id: bytes) -> bytes:
            write_file(path / NODE, f"{os.urandom(16).hex()}\n".encode(), options.file_mode or FILE_MODE)
            engine = open_single(options, path)
            try:
                return tables.prepare(Database(name, engine), options.schema_prefix, store_id)
            finally:
                engine.dispose()

        with disk_errors(f"store {name!r} cannot be created"):
            return StoreDirectory(name, directory, options.file_mode).create(fill)

    @classmethod
    def peek(cls, directory: Path, options: SqlOptions, store_id: bytes, transaction: bytes) -> bool | None:
        """Return whether the store has committed a transaction, without opening it, as Store.peek."""
        engine = open_single(options, directory)
        configure(engine)
        statements = Statements(options.schema_prefix, False)
        database = SharedDatabase(directory.name, engine, statements, 0.0)
        try:
            tables.require(database, options.schema_prefix, store_id)
            if database.look("has_committed", transaction.hex()):
                return True
            # In this order: with the commit it goes from the one to the other.
            is_prepared = any(xid == transaction.hex() for xid, _, _ in database.look("branches", 0))
            return True if database.look("has_committed", transaction.hex()) else None if is_prepared else False
        finally:
            engine.dispose()

    # Opening and closing

    def open(self, progress: Progress | None = None) -> None:
        """Be ready. Raises StoreLockedError, ConfigError, StoreFailedError."""
        if self._opened:
            raise StoreLockedError(f"store {self.name!r} is open already, in this process")
        self.failed = None
        with disk_errors(f"store {self.name!r} cannot be opened"):
            self.store_id = self._directory.lock()
            try:
                if not (self.directory / NODE).exists():
                    raise PlacementError(
                        f"store {self.name!r} in {self.directory} was made without `shared`, and its tables are one "
                        "router's; give the shared store another name, and run `anabranch repartition`"
                    )
                self._open(read_file(self.directory / NODE).decode().strip())
            except BaseException:
                self._directory.unlock()
                raise

    def _open(self, node: str) -> None:
        options = self.options
        self._engine = engine = open_engine(options, self.directory)
        configure(engine)
        try:
            single = open_single(options, self.directory)
            # Before it is configured: what that prepares a pooler would mix up.
            ids = tables.require(Database(self.name, single), options.schema_prefix, self.store_id)
            configure(single)
            statements = Statements(options.schema_prefix, self._counts_first, ids)
            self._database = database = SharedDatabase(self.name, engine, statements, options.outcome_timeout)
            self.waiting: Waiting = Waiting(
                self.name, database, single, statements, f"anabranch_{self.store_id.hex()}", node,
                options.router_timeout, self._most_deliveries, options.response_timeout,
            )  # fmt: skip
            self.leases: Leases = Leases(
                self, database, options, lambda: self.waiting.router, self.waiting.tell, self._is_open,
                self._counts_first,
            )  # fmt: skip
            self.leases.on_acked = partial(self._took_effect, ())
            self.abandoned: Abandoned = self.leases.abandoned
            self._queues = Queues(self.name, database)
            self._usage = usage = Usage(self._queues)
            self._sending = Sending(self.name, self.store_id, database, self._queues, options, self.waiting, usage)
            self._topics = Topics(database, self._queues, self.leases, self.waiting, usage)
            self._branches = Branches(database, self.leases, self._sending, self._topics)
            self._topics.prepared = self._branches.claimed
            self.waiting.on_queues, self.waiting.on_deleted = self._found, self._topics.forget
            self.waiting.on_listening, database.on_failover = self._queues.forget_declared, self._forget_all
            self._forget_all()
            self.listeners: dict[SharedListener, None] = {}
            self._pid, self._opened = os.getpid(), True
            self.waiting.start()
        except BaseException:
            self._opened = False
            engine.pool.dispose()
            raise

    def close(self) -> None:
        """Give back what this router holds, and leave. Idempotent."""
        if not self._opened:
            return
        self._opened = self._retired = False
        if self._pid != os.getpid():
            return
        for listener in list(self.listeners):
            listener.end()
        held = [lease for lease in list(self.leases.held.values()) if lease.hold == LEASED]
        with suppress(AnabranchError):  # else its row in ROUTERS, which goes, says it
            if held:
                self.leases.free(held, 0)
        self.leases.ended(list(self.leases.held.values()), "its store was closed")
        self._end(leave=True)
        self._usage = None

    def _end(self, leave: bool) -> None:
        self.waiting.stop(leave)
        self._engine.pool.dispose()
        self._directory.unlock()

    def on_failed(self, call: Callable[[BaseException], object]) -> None:
        """Call this, once, if the store fails before it is closed."""
        self._on_failed = call

    def _lose(self, error: StoreFailedError) -> None:
        self.failed = error
        self._on_failed(error)
        self.waiting.wake_all()

    def _is_open(self) -> bool:
        return self._opened and not self._retired and self.failed is None and self._pid == os.getpid()

    def closed_error(self) -> Exception:
        """Return the error of calls that the store does not take any more."""
        if self.failed is not None:
            return StoreFailedError(f"store {self.name!r} has stopped: {self.failed}")
        return ClosedError(f"store {self.name!r} is closed")

    def _require_open(self) -> None:
        if not self._is_open():
            raise self.closed_error()

    @property
    def last_seq(self) -> int:
        """Return the highest seq of what is held now."""
        return int(self._database.look("highest")[0][0])

    highest_seq = last_seq

    # Destinations

    def _found(self, queues: Sequence[tuple[int, str]]) -> None:
        """Note queues and topics that have come, and tell of them."""
        came = self._queues.found(queues)
        shared().lead(lambda: self.on_destinations(came))  # it may wait for who closes this store

    def _forget_all(self) -> None:
        """Ask the database anew which queue has which number."""
        self._queues.forget_all()
        self.waiting.look_at_queues()

    def declare(self, destination: Destination, moves: bool = False) -> None:
        """Declare a queue or a topic, as Store.declare."""
        self._require_open()
        self._queues.declare(destination)

    destinations: Any = _by("_queues", "all")

    # Sending

    def send(self, destination: Destination, body: Any, *given: Any, **named: Any) -> Receipt:
        """Store one message, as Store.send. One that is not persistent is stored as any other."""
        self._require_open()
        return self._sending.send(destination, _outgoing(body, *given, **named))

    def send_nowait(self, destination: Destination, body: Any, *given: Any, **named: Any) -> Future[Receipt]:
        """Send, as Store.send_nowait: before this returns."""
        self._require_open()
        sent: Future[Receipt] = Future()
        message = _outgoing(body, *given, **named)
        numbered = self._sending.numbered(destination, message)  # which raises at once what is wrong with it
        try:
            sent.set_result(self._sending.send_numbered(destination, *numbered))
        except Exception as error:  # the caller of result() is told
            sent.set_exception(error)
        return sent

    def send_leased(
        self, destination: Destination, message: Outgoing, lease: float | None = None, sync: bool | None = None
    ) -> Message | Receipt:
        """Store one message of a queue, leased from its first moment on, as Store.send_leased: the row is made so."""
        self._require_open()
        require_leasable(destination, message)
        if lease is not None:
            require_seconds(lease, "lease")
        seconds, take = self.options.lease_timeout if lease is None else lease, random.getrandbits(62)
        number, plain = self._sending.numbered(destination, message)
        is_stored = False
        try:
            asked = milliseconds(seconds), self.waiting.router, take
            receipt, is_stored = self._sending.send_leased(destination, number, plain, asked)
            if not is_stored:
                return receipt
            rows = self._database.look("taken_by_router", number, receipt.seq, take)
            if not rows:
                raise StoreFailedError(f"store {self.name!r}: somebody else has it by now, for its lease is over")
            leased = self._message(rows[0], seconds)
            note_received(leased)
            return leased
        except BaseException as error:
            known = isinstance(error, AnabranchError)
            if is_stored or not known or isinstance(error, OutcomeUnknownError):
                self._doubt("taken", number, 0, take, 1)
            if is_stored and known:
                raise not_leased(destination, error) from error
            raise

    def send_many(
        self,
        destination: Destination,
        messages: Iterable[Outgoing | bytes],
        sync: bool | None = None,
        done: list[Receipt] | None = None,
    ) -> list[Receipt]:
        """Store many in one transaction, as Store.send_many."""
        self._require_open()
        receipts = [] if done is None else done
        sends = [(destination, one if isinstance(one, Outgoing) else Outgoing(one)) for one in messages]
        receipts += self._sending.send_all(sends)
        return receipts

    def begin_sends(
        self, sends: Sequence[tuple[Destination, Outgoing]], sync: bool = False
    ) -> Pending[list[tuple[int, bool] | Exception]]:
        """Store messages of many callers, as Store.begin_sends: before this returns."""
        self._require_open()
        results: list[tuple[int, bool] | Exception] = []
        for destination, message in sends:
            try:
                _, seq, duplicate = self._sending.send(destination, message)
                results.append((seq, duplicate))
            except Exception as error:
                results.append(error)
        return Done(results)

    def send_within(
        self, connection: Any, destination: Destination, messages: Iterable[Outgoing | bytes]
    ) -> list[Receipt]:
        """Refuse a caller's transaction."""
        raise self._refused_connection()

    def ack_within(self, connection: Any, messages: Sequence[Message[Any]]) -> None:
        """Refuse a caller's transaction."""
        raise self._refused_connection()

    def _refused_connection(self) -> TransactionError:
        return TransactionError(
            f"store {self.name!r} is shared by many routers, and takes part in no transaction of its callers' "
            "connections; use a transaction of the router, or a store that is not `shared`"
        )

    is_enlisted: Any = _always(False)

    def keep(self, body: object, persistent: bool = True) -> Any:
        """Return a body as bytes: a file is read, up to `message_bytes_max`."""
        self._require_open()
        return self._sending.keep(body)

    # Receiving

    def take(
        self,
        destination: Destination,
        most: int,
        lease: float | None = None,
        subscription: SubscriptionKey | None = None,
        newest: bool = False,
    ) -> list[Message]:
        """Lease up to so many messages of a queue or a subscription, the first or the last ones."""
        self._require_open()
        number = self._queues.receiving(destination, subscription)
        if not number:
            return []
        seconds = self.options.lease_timeout if lease is None else lease
        ms = milliseconds(seconds)
        heads, take, look = self.waiting.heads, random.getrandbits(62), self._database.look
        began = time.monotonic()
        first, is_grouped = heads.begin(number, self._has_groups)
        given = number, first, self._most_deliveries, ms, self.waiting.router, take, most
        which = "_newest" if newest else ""
        name, is_taken = f"take{'_grouped' if is_grouped else ''}{which}", False

        def lost(_: list[int]) -> list[Any]:
            nonlocal is_taken
            is_taken = True
            return look(f"taken{which}", number, first, take, most)

        try:
            rows = self._database.once(name, *given, lost=lost)
            is_taken = bool(rows)
            messages = [self._message(row[:-1], seconds) for row in sorted(rows)]
            for message in messages:
                note_received(message)
        except BaseException as error:
            if is_taken or isinstance(error, OutcomeUnknownError) or not isinstance(error, AnabranchError):
                self._doubt("taken", number, first, take, most)
            raise
        # By the server's clock: where the machine is busy, all that one waits for is slow. It is not told how long the
        # server has looked for more than there is.
        seconds_taken = rows[-1][-1] / 1e6 if len(rows) == most else time.monotonic() - began
        heads.note(number, first, seconds_taken, self._first_live)
        if not rows and subscription is not None and not self._database.look("members", number):
            self._queues.forget(number)  # it has ended, perhaps in another router
            return self.take(destination, most, lease, subscription, newest)
        return messages

    def _has_groups(self, queue: int) -> bool:
        return bool(self._database.look("has_groups", queue)[0][0])

    def _first_live(self, queue: int, first: int) -> int:
        return int(self._database.look("first_live", queue, first)[0][0])

    def _message(self, row: Sequence[Any], seconds: float | None, leased: bool = True) -> Message:
        """Return the message of a row, with FIELDS."""
        seq, number, take, deliveries, sent, expires, priority, name, headers, content = row
        source = self._queues.of(number)
        if source is None:
            raise UnknownMessageError(f"message {seq} is gone: its subscription has ended")
        ahead = self.waiting.ahead_ms
        note: Any = None
        if leased:
            place = Place(number, seq, take)
            note = self.leases.held[place] = SharedLease(place, deliveries, seconds)
            deliveries += not self._counts_first
        return Message(
            self, source.destination, seq, bytes(content), {} if headers is None else unpack_headers(headers),
            None if name is None else shown_id(unescaped(name).encode()), sent - ahead, leased, note, priority,
            moved(expires, -ahead) if ahead else expires, deliveries, source.subscription,
        )  # fmt: skip

    def receive(
        self,
        destination: Destination,
        timeout: float | None = 0,
        subscription: SubscriptionKey | None = None,
        lease: float | None = None,
        newest: bool = False,
    ) -> Message | None:
        """Lease one message, as Store.receive. The newest is none that another of its group comes before (Q14)."""
        messages = self.receive_many(destination, 1, timeout, subscription, lease, newest)
        return messages[0] if messages else None

    def receive_many(
        self,
        destination: Destination,
        most: int,
        timeout: float | None = 0,
        subscription: SubscriptionKey | None = None,
        lease: float | None = None,
        newest: bool = False,
    ) -> list[Message]:
        """Lease many messages, as Store.receive_many, or the newest ones."""
        if lease is not None:
            require_seconds(lease, "lease")
        if most <= 0:
            return []
        asked = destination, most, lease, subscription, newest
        messages = self.take(*asked) if timeout == 0 else self._waited(timeout, *asked)
        for message in messages:
            self.note_handed(message)
        return messages

    def _waited(self, timeout: float | None, *asked: Any) -> list[Message]:
        self._require_open()
        deadline = None if timeout is None else time.monotonic() + timeout
        waiter = _Waiter()
        try:
            while True:
                waiter.clear()
                messages = self.look(waiter, *asked)
                left = None if deadline is None else deadline - time.monotonic()
                if messages or (left is not None and left <= 0):
                    return messages
                waiter.wait(left)
                self._require_open()
        finally:
            self.waiting.leave(waiter)

    def look(
        self, waiter: Waiter, destination: Destination, most: int, lease: float | None = None,
        subscription: SubscriptionKey | None = None, newest: bool = False,
    ) -> list[Message]:  # fmt: skip
        """Take messages; if there are none, look once more with `waiter` in line, where it then is."""
        asked = destination, most, lease, subscription, newest
        messages = self.take(*asked)
        if not messages:
            self.waiting.enter(self.receiving(destination, subscription), waiter)
            messages = self.take(*asked)
        return messages

    def receive_or_watch(
        self, destination: Destination, on_wake: Callable[[bool], object], watch: Any = None, lease: float | None = None
    ) -> Any:
        """Lease the first message of a queue, or return a watch, as Store.receive_or_watch."""
        self._require_open()
        if not isinstance(watch, _Watch) or not watch.is_in_line:
            watch = _Watch(self, on_wake)
        messages = self.look(watch, destination, 1, lease)
        if not messages:
            return watch
        watch.leave()
        self.note_handed(messages[0])
        return messages[0]

    def note_handed(self, message: Message) -> None:
        """Count a message that is handed to its consumer, if it was before."""
        self._redelivered += message.redelivered

    def listen(
        self,
        destination: Destination,
        on_message: Callable[[Message], object],
        credit: int = 1,
        subscription: SubscriptionKey | None = None,
        on_end: Callable[[Exception], object] | None = None,
        lease: float | None = None,
        run_by: Callable[[Job], object] | None = None,
    ) -> SharedListener:
        """Call with messages, as Store.listen."""
        if lease is not None:
            require_seconds(lease, "lease")
        self.receiving(destination, subscription)
        listener = SharedListener(self, destination, subscription, on_message, credit, on_end, lease, run_by)
        self.listeners[listener] = None
        listener.wake()
        return listener

    def receiving(self, destination: Destination, subscription: SubscriptionKey | None) -> int:
        """Return the number of the queue, or the subscription, that somebody waits for."""
        self._require_open()
        return self._queues.receiving(destination, subscription, make=True)

    def take_undelivered(self, limit: int = 100) -> Sequence[Undelivered]:
        """Lease messages that are not delivered any more, as Store.take_undelivered."""
        self._require_open()
        self._free_doubtful()
        self.abandoned.give_back()
        self.leases.forget_late()
        self._sending.forget_ids()
        self._end_left()
        if not self._database.look("has_undelivered", self._most_deliveries, self._most_deliveries)[0][0]:
            return []

        number = random.getrandbits(62)

        def take(ask: Ask) -> list[tuple[str, Any]]:
            given = self.waiting.router, number
            found = [(EXPIRED, row) for row in ask("take_expired", limit, *given)]
            found += [(EXPIRED, row) for row in ask("take_expired_of_topics", limit - len(found), *given)]
            if self.options.max_deliveries is not None and len(found) < limit:
                rows = ask("take_undeliverable", self._most_deliveries, limit - len(found), *given)
                found += [(DELIVERY_LIMIT, row) for row in rows]
            return found

        undelivered = []
        try:
            for why, row in self._database.change(take):
                with suppress(UnknownMessageError):  # its subscription has ended meanwhile
                    undelivered.append(Undelivered(self._message(row, None), why))
        except BaseException:
            self._doubt("taken_undelivered", number, self._most_deliveries, number)
            raise
        return undelivered

    def _end_left(self) -> None:
        """Roll back what routers have prepared that are gone, and this store's own commit was to decide (rule T6); and
        remove some of what ended subscriptions have left. Raises StoreFailedError; then it is tried again."""
        if self.waiting.has_orphans:
            self.waiting.has_orphans = False  # first: another router may go meanwhile
            try:
                for prepared, is_left in self._branches.all(NOBODY):
                    if is_left and prepared.note and msgspec.msgpack.decode(prepared.note) == [None, self.store_id]:
                        self.rollback_prepared(prepared.transaction)
                if self._topics.remove_left():
                    self.waiting.has_orphans = True
            except BaseException:
                self.waiting.has_orphans = True
                raise

    def _doubt(self, *asked: Any, counted: int | None = None) -> None:
        self._doubtful.append((asked, self.leases.counted(False) if counted is None else counted, DOUBTS))

    def _free_doubtful(self) -> None:
        """Free what was leased to a caller that was interrupted, or cut off for long. Raises StoreFailedError; then it
        is tried again."""
        with suppress(IndexError):  # another thread is at it too
            for _ in range(len(self._doubtful)):
                doubt = asked, counted, left = self._doubtful.popleft()
                try:
                    rows = self._database.look(*asked)
                    if rows:
                        leases = [SharedLease(Place(row[1], row[0], row[2]), row[3], None) for row in rows]
                        self.leases.free(leases, counted)
                except BaseException:
                    self._doubtful.append(doubt)
                    raise
                if left and not rows:
                    self._doubtful.append((asked, counted, left - 1))

    def count_expired(self, messages: Iterable[Message]) -> None:
        """Count messages that are gone, for their time was over."""
        for message in messages:
            source = message.destination, message.subscription
            self._expired[source] = self._expired.get(source, 0) + 1

    def give_back(self, lease: SharedLease) -> None:
        """Give back what is leased so, which its holder has never seen."""
        shared().lead(partial(self.free_unseen, [lease]))

    def free_unseen(self, leases: Sequence[SharedLease]) -> None:
        """Free what nobody has seen; later, if it cannot be now."""
        try:
            self.leases.free(leases, self.leases.counted(False))
        except AnabranchError:
            self._free_later(leases, self.leases.counted(False))

    def _free_later(self, leases: Sequence[SharedLease], counted: int) -> None:
        """Let a sweep free what nobody has any more, if the database still holds it."""
        for lease in leases:
            self._doubt("taken", *lease.place, 1, counted=counted)
        self.leases.ended(leases, ROLLED_BACK)

    def open_body(self, message: Message[Any]) -> BinaryIO:
        """Open a message's body, which is in memory."""
        return io.BytesIO(message.raw_body)

    def large_body(self, reference: bytes) -> Any:
        """Refuse: no body is kept apart."""
        raise AssertionError("a shared store keeps no body apart")

    bring_body = large_body

    def browse(
        self,
        destination: Destination,
        limit: int | None = None,
        after: int | Message = 0,
        subscription: SubscriptionKey | None = None,
        leased: bool = True,
    ) -> Iterator[Message]:
        """Look at the messages in order, as Store.browse."""
        free = not leased and (subscription is not None or destination.kind is not Kind.TOPIC)
        ids, find = ("free_ids_after", "find_free") if free else ("ids_after", "find")
        behind = after.seq if isinstance(after, Message) else after
        left = sys.maxsize if limit is None else limit
        while left > 0:
            page = [one for (one,) in self._look(ids, destination, subscription, behind, min(left, PAGE))]
            for seq in page[:left]:
                behind = seq
                self._require_open()
                for row in self._look(find, destination, subscription, seq):
                    yield self._looked_at(row, subscription)
                    left -= 1
            if not page:
                return

    def find(self, destination: Destination, message_id: str) -> Message | None:
        """Look at the message of an id, as Store.find."""
        pack_id(message_id)
        self._require_open()
        number = self._queues.number(destination, make=False)
        for (seq,) in self._database.look("id_of", number, escaped(message_id)) if number else ():
            for row in self._look("find", destination, None, seq):
                return self._looked_at(row, None)
        return None

    def _look(
        self, name: str, destination: Destination, subscription: SubscriptionKey | None, *given: Any
    ) -> list[Any]:
        """Return what a question finds in a queue, a subscription or a topic for all of its own; nothing if that is not
        there."""
        self._require_open()
        if subscription is not None:
            return self._database.look(name, self._queues.subscription(destination, subscription, False), *given)
        number = self._queues.number(destination, make=False)
        if number and destination.kind is Kind.TOPIC:
            return self._database.look(f"{name}_of_topic", number, number, *given)
        return self._database.look(name, number, *given) if number else []

    def _looked_at(self, row: Sequence[Any], subscription: SubscriptionKey | None) -> Message:
        message = self._message(row, None, leased=False)
        message.subscription = subscription
        return message

    # Settling

    def ack(self, messages: Sequence[Message[Any]]) -> None:
        """Remove leased messages, all or none of them, as Store.ack."""
        self._require_open()
        self.leases.ack(messages, self.leases.taken(messages, LEASED))

    def ack_nowait(self, messages: Sequence[Message[Any]]) -> Future[None]:
        """Ack, as Store.ack_nowait."""
        self._require_open()
        return shared().call(partial(self.leases.ack, list(messages), self.leases.taken(messages, LEASED)))

    def release(
        self, messages: Sequence[Message[Any]], delivered: bool = True, delay: float | None = None,
        reason: Reason | None = None,
    ) -> None:  # fmt: skip
        """Give messages back, as Store.release."""
        self._releasing(messages, LEASED, delivered, delay, reason)()

    def release_nowait(
        self, messages: Sequence[Message[Any]], delivered: bool = True, delay: float | None = None,
        reason: Reason | None = None,
    ) -> Future[None]:  # fmt: skip
        """Give messages back, as Store.release_nowait."""
        return shared().call(self._releasing(list(messages), LEASED, delivered, delay, reason))

    def _releasing(
        self, messages: Sequence[Message[Any]], hold: int, delivered: bool, delay: float | None, reason: Reason | None
    ) -> Callable[[], None]:
        """Take the leases of messages out, and return what gives them back."""
        if reason is not None:
            self.leases.note_failure(messages, reason)
        ms = self.delay_ms(delay)
        self._require_open()
        leases = self.leases.taken(messages, hold)

        def give_back() -> None:
            self.leases.release(messages, leases, hold, delivered, ms)
            self._tell_spent(messages, delivered)

        return give_back

    extend: Any = _by("leases", "extend")
    claim: Any = _by("leases", "claim")

    def unclaim(self, messages: Sequence[Message[Any]], delivered: bool = True, delay: float | None = None) -> None:
        """Give back what a transaction held; later, if it cannot be now."""
        self._require_open()
        try:
            self._releasing(messages, CLAIMED, delivered, delay, None)()
        except UnknownMessageError:
            raise
        except AnabranchError:
            self._free_later([message._note for message in messages], self.leases.counted(delivered))
            raise

    def note_failure(self, messages: Sequence[Message[Any]], reason: Reason) -> None:
        """Note why messages are about to be given back."""
        self.leases.note_failure(messages, reason)

    def failure_of(self, message: Message[Any]) -> Failure | None:
        """Return why a message was given back last, if that was here."""
        return self.leases.failure_of(message)

    def tell_spent(self, messages: Sequence[Message[Any]]) -> None:
        """Tell the owner of messages that were given back for the last time."""
        self._tell_spent(messages, True)

    def _tell_spent(self, messages: Sequence[Message[Any]], delivered: bool) -> None:
        spent = [one for one in messages if one._note.deliveries + delivered >= self._most_deliveries]
        if spent and isinstance(self.owner, Rejecting):
            self.owner._spent(self)

    @staticmethod
    def delay_ms(delay: float | None) -> int | None:
        """Return a delay in milliseconds. Raises TypeError, ValueError."""
        return None if delay is None else delay_ms(delay)

    def note_rejected(self, message: Message[Any]) -> None:
        """Note that a message was acked since it was rejected."""
        message._note.end = REJECTED

    token: Any = _by("leases", "token")

    def token_of(self, lease: SharedLease) -> str:
        """Return the token of a lease."""
        return self.leases.token_of(lease)

    def leased(self, token: str) -> Message:
        """Return the message of a token, as Store.leased."""
        self._require_open()
        place = self.leases.place_of(token)
        rows = self._database.look("held", *place) if place is not None else []
        if not rows:
            raise unknown_lease(token)
        return self._message(rows[0], None)

    def lease_again(
        self,
        destination: Destination,
        seq: int,
        subscription: SubscriptionKey | None = None,
        lease: float | None = None,
    ) -> str | None:
        """Lease the message of that seq once more, as Store.lease_again."""
        self._require_open()
        number = self._queues.receiving(destination, subscription)
        if not number or not self._database.look("find", number, seq):
            return None
        seconds = self.options.lease_timeout if lease is None else lease
        place = Place(number, seq, random.getrandbits(62))
        given = milliseconds(seconds), self.waiting.router, place.take, number, seq, self._most_deliveries
        try:
            rows = self._database.change(lambda ask: ask("take_again", *given))
            message = self._message(rows[0], seconds) if rows else None
        except BaseException:
            self._doubt("taken", *place, 1, counted=0)  # it was, when it was leased before
            raise
        if message is None:
            raise UnknownMessageError(f"message {seq} of {destination}, or another of its group, is leased to another")
        return self.leases.token(message)

    settle: Any = _by("leases", "settle")

    def settle_nowait(
        self, tokens: Sequence[str], how: Settlement, delivered: bool = True, delay: float | None = None
    ) -> Future[list[Any]]:
        """Settle, as Store.settle_nowait."""
        self._require_open()
        return shared().call(partial(self.settle, list(tokens), how, delivered, delay))

    def require_leased(self, tokens: Iterable[str]) -> None:
        """Raise UnknownMessageError if one of these messages cannot be settled now."""
        self._require_open()
        for token in tokens:
            place = self.leases.place_of(token)
            if place is None or not self._database.look("held", *place):
                raise unknown_lease(token)

    def begin_ack(self, tokens: Sequence[str]) -> Pending[list[Any]]:
        """Ack by tokens, as Store.begin_ack: before this returns."""
        return Done(self.settle(tokens, Settlement.ACK))

    @property
    def usage(self) -> Recorder | None:
        """Return the recorder of all that this router does here, until the store is closed. Set by the usage log."""
        return None if self._usage is None else self._usage.recorder

    @usage.setter
    def usage(self, recorder: Recorder | None) -> None:
        if self._usage is not None:
            self._usage.recorder = recorder

    # Durable subscriptions

    subscribe: Any = _by("_topics", "subscribe")
    unsubscribe: Any = _by("_topics", "unsubscribe")

    def subscriptions(self) -> Sequence[Subscription]:
        """Return all subscriptions, whoever has made them."""
        self._require_open()
        return list(self._topics.subscriptions().values())

    # Transactions

    def commit(
        self,
        sends: Sequence[tuple[Destination, Outgoing]],
        acks: Sequence[Message],
        sync: bool | None = None,
        changes: Sequence[Change] = (),
        mark: str | None = None,
    ) -> list[Receipt]:
        """Apply sends and claimed acks as one, as Store.commit."""
        self._require_open()
        self._refuse_mark(mark)
        numbered = self._sending.all_numbered(sends)
        changes = [one._replace(subscription=checked(one.subscription)) for one in changes]
        stored, ended, told = Stored(), list[int](), set[int]()

        def commit(ask: Ask, places: list[Place]) -> set[Place]:
            nonlocal stored
            ended[:] = self._topics.change(ask, changes)
            stored = self._sending.stored(ask, numbered)
            return self.leases.acked(ask, places, told) if places else set()

        leases = self.leases.taken(acks, CLAIMED)
        try:
            self.leases.settling(acks, leases, CLAIMED, "it was acked", commit)
        except OutcomeUnknownError:
            self._free_later(leases, self.leases.counted(True))  # unless it has taken effect
            raise
        self._took_effect(stored.sent, [message._note.place for message in acks])
        self._topics.ended(ended)
        self.waiting.tell(told | stored.queues)
        return self._sending.receipts([to for to, _ in sends], stored)

    def _took_effect(self, sent: Sequence[Sent], acks: Sequence[Place], transaction: bytes | None = None) -> None:
        self._acks += len(acks)
        if self._usage is not None:
            self._usage.tell(sent, acks, transaction)

    def commit_nowait(
        self, sends: Sequence[tuple[Destination, Outgoing]], acks: Sequence[Message], sync: bool | None = None,
        changes: Sequence[Change] = (),
    ) -> Future[list[Receipt]]:  # fmt: skip
        """Commit, as Store.commit_nowait."""
        return shared().call(partial(self.commit, sends, acks, sync, changes))

    marked: Any = _always(None)
    """It keeps no names of commits."""

    def _refuse_mark(self, mark: str | None) -> None:
        if mark is not None:
            raise TransactionError(refused_to_clients(self.name))

    reserve: Any = _always(None)
    """There are no limits."""

    def prepare(
        self,
        transaction: bytes,
        participants: Sequence[bytes],
        sends: Sequence[tuple[Destination, Outgoing]],
        acks: Sequence[Message],
        sync: bool,
        room: Any = None,
        changes: Sequence[Change] = (),
        mark: str | None = None,
        note: bytes = b"",
    ) -> Pending[None]:
        """Make a branch durable, as Store.prepare: before this returns."""
        self._require_open()
        self._refuse_mark(mark)
        numbered = self._sending.all_numbered(sends, declared=False)
        for change in changes:
            checked(change.subscription)

        def prepare(ask: Ask, places: list[Place]) -> set[Place]:
            branch = Branch(tuple(participants), numbered, places, note, packed(changes))
            return self._branches.prepare(ask, transaction, branch, self.waiting.router)

        self.leases.settling(acks, self.leases.taken(acks, CLAIMED), CLAIMED, ROLLED_BACK, prepare)
        return Done(None)

    def commit_prepared(self, transaction: bytes) -> Pending[list[Receipt]]:
        """Let a branch take effect, as Store.commit_prepared: before this returns."""
        self._require_open()
        found = self._branches.commit(transaction)
        if found is None:
            return Done([])
        branch, stored, ended = found
        self._took_effect(stored.sent, branch.acks, transaction)
        self._topics.ended(ended)
        self.waiting.tell(stored.queues.union(place.queue for place in branch.acks))
        sources = [self._queues.of(number) for number, _ in branch.sends]
        return Done(self._sending.receipts([source.destination for source in sources if source is not None], stored))

    def rollback_prepared(self, transaction: bytes) -> Pending[bool]:
        """Forget a branch, as Store.rollback_prepared: before this returns."""
        self._require_open()
        branch = self._branches.roll_back(transaction)
        if branch is not None:
            self.waiting.tell(place.queue for place in branch.acks)
        return Done(branch is not None)

    def recover_prepared(self) -> Sequence[Prepared]:
        """Return what waits for its outcome: what was prepared from here, or by a router that is gone, or for a manager
        who may come to any."""
        self._require_open()
        return [prepared for prepared, ours in self._branches.all(self.waiting.router) if ours or _is_held(prepared)]

    committed: Any = _by("_branches", "committed")
    has_committed: Any = _by("_branches", "has_committed")
    forget: Any = _by("_branches", "forget")
    sync: Any = _always(None)
    """All that has returned is durable."""

    # Upkeep

    def purge(self, destination: Destination, subscription: SubscriptionKey | None = None) -> int:
        """Remove what nobody holds of what is there now, a page at a time, as Store.purge."""
        self._require_open()
        if subscription is not None:
            return sum(self._topics.removed("purge", [self._queues.subscription(destination, subscription, False)]))
        number = self._queues.number(destination, make=False)
        members = self._database.look("members", number)[0][0] if number else []  # of a queue there are none
        return sum(self._topics.removed("purge", [*members, number] if number else []))

    delete: Any = _by("_topics", "delete")
    idle_mark: Any = _always(None)
    """Other routers may use a queue."""
    delete_if_idle: Any = _always(False)
    forget_gate: Any = _always(None)
    """Destinations have no gates here."""

    def retire(self, to_remove: bool = False) -> bool:
        """Refuse all further calls and return True, if nobody waits and nobody holds a message, as Store.retire."""
        self._require_open()
        if to_remove or self.listeners or self.waiting.count() or self.leases.held or self.abandoned:
            return False
        if any(ours for _, ours in self._branches.all(self.waiting.router)):
            return False
        self._retired = True
        return True

    reclaim: Any = _always(0)
    compact: Any = _always(0)
    checkpoint: Any = _always(None)
    """The server sees to that, and gives back space by itself."""

    # Asking

    def depth(self, destination: Destination, subscription: SubscriptionKey | None = None) -> int:
        """Return how many messages are held, leased ones included."""
        return sum(count for (count,) in self._look("depth", destination, subscription))

    def amount(self, destination: Destination) -> Amount:
        """Return what is held of a queue or a topic, as `copying.amount`."""
        found = self._look("amount", destination, None)
        (messages, size, known), *_ = found or [(0, 0, False)]
        subscriptions = tuple(one for one in self.subscriptions() if one.topic == destination)
        return Amount(messages, int(size), subscriptions, known)

    def counts(self, destination: Destination, subscription: SubscriptionKey | None = None) -> Counts:
        """Return how many messages are ready, leased, delayed; `expired`: those that this router has found."""
        found = self._look("counts", destination, subscription)
        (ready, leased, delayed, oldest), *_ = found or [(0, 0, 0, None)]
        counts = Counts(ready, leased, delayed, self._expired.get((destination, subscription), 0))
        counts.oldest_ready_seconds = None if oldest is None else max(0.0, oldest / 1000)
        return counts

    def stats(self) -> StoreStats:
        """Return statistics. What counts since open counts what this router did."""
        self._require_open()
        rows = self._database.look("stats")
        depths = {number: count for number, _, count, _, _ in rows}
        queues = {destination_of(name): (count, delayed) for _, name, count, _, delayed in rows if name is not None}
        for name, count, delayed in self._database.look("stats_of_topics"):
            topic = destination_of(name)
            queues[topic] = count + queues.get(topic, (0, 0))[0], delayed
        return StoreStats(
            name=self.name, kind="sql", messages=sum(count for count, _ in queues.values()),
            destinations={destination: count for destination, (count, _) in queues.items()},
            leased=sum(leased for *_, leased, _ in rows), sends=self._sending.sends, acks=self._acks,
            syncs=self._database.commits, batches=self._database.commits, redelivered=self._redelivered,
            sync_seconds=self._database.took.mean, sync_durations=self._database.took.durations,
            failed=None if self.failed is None else str(self.failed), waiting=self.waiting.count(),
            delayed=sum(delayed for _, delayed in queues.values()), dropped=self._sending.dropped,
            subscriptions={one: depths.get(number, 0) for number, one in self._topics.subscriptions().items()},
        )  # fmt: skip

    def check(self) -> Iterator[str]:
        """Yield what is wrong in the tables that the database does not keep by itself, as Store.check."""
        self._require_open()
        for (name,) in self._database.look("wrong_topics"):
            yield f"{destination_of(name)} names other subscriptions than it has"

    def undisturbed(self, question: Callable[[], Any]) -> Any:
        """Return the answer to a question."""
        self._require_open()
        return question()


class _Waiter(Event):
    """A thread that waits for a message."""

    queue = 0
    wake = Event.set


class _Watch:
    """A watch on one queue, woken once."""

    queue, is_in_line = 0, True

    def __init__(self, store: SharedStore, on_wake: Callable[[bool], object]) -> None:
        self._store, self._on_wake = store, on_wake

    def wake(self) -> None:
        """Leave the line, and tell."""
        tells = self.is_in_line
        self.leave()
        if tells:
            self._on_wake(not self._store._opened)

    def leave(self) -> None:
        """Leave the line; nobody is told. Idempotent."""
        self.is_in_line = False
        self._store.waiting.leave(self)


def _outgoing(
    body: Any, headers: Headers | None = None, message_id: str | None = None, sync: bool | None = None,
    priority: int = DEFAULT_PRIORITY, expires_at_ms: int = 0, persistent: bool = True, deliver_at_ms: int = 0,
) -> Outgoing:  # fmt: skip
    """Return a message that was given by its parts, as to Store.send."""
    return Outgoing(body, headers, message_id, priority, expires_at_ms, persistent, deliver_at_ms=deliver_at_ms)


def _is_held(prepared: Prepared) -> bool:
    """Return whether a transaction manager is to say the outcome, as the note begins."""
    return bool(prepared.note) and msgspec.msgpack.decode(prepared.note)[0] is not None
