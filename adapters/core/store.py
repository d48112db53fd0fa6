"""The contract that every kind of store keeps, and the face of the one implementation of it.

A *store* holds the messages of some destinations, with one durability policy. The router decides which destination
lives in which store; a store never sees another. Ours are in the packages beside this one; third parties register
theirs in the entry-point group `anabranch.adapters`, and `tests/contract` is the suite that every store must pass.

The words used below: an operation is *durable* when it survives what the store's policy says it survives
(invariant 1); it is *visible* when receive, browse and depth know of it. No operation becomes visible before it is as
durable as the policy asks.

backend       where the bytes live: the kind of the store        (backend.py)
engine        what is written becomes seen                       (engine.py)
writer        tickets become writes                              (writers.py)
sending, receiving, settling, transactions, purging, statistics: what callers ask for, in the module of that name
"""

from __future__ import annotations

import io
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar, TypeVar

from ...policies.errors import (
    AnabranchError,
    ClosedError,
    DestinationError,
    StoreFailedError,
    StoreLockedError,
    TransactionError,
    UnknownMessageError,
)
from ...policies.names.destination import Destination
from ..system.background import Job, shared
from ..system.files import disk_errors
from .backend import Backend, Found, Settings, Threaded, Writer
from .engine.abandoned import Abandoned
from .engine.engine import APPLY_AT, Engine
from .engine.forwarding import after_move, follow, is_moving
from .engine.handing_out import HandingOut
from .engine.hooks import Bodies, KeyedValues, Outbox
from .engine.lease_times import LeaseTimes
from .engine.usage import Recorder
from .features import FEATURES
from .features.parts import Parts
from .messages import (
    DEFAULT_PRIORITY,
    Headers,
    LargeBody,
    Message,
    MessageStore,
    Outgoing,
    Readable,
    Reason,
    Receipt,
    Rejecting,
    Undelivered,
    require_leased,
)
from .operations.destination_changes import Declare
from .record.headers import pack_id
from .record.large import StoredBody
from .service.damaged import readable
from .service.failures import Failure, Failures, failure_of, key_of, keys_of
from .service.leased_sending import send_leased
from .service.listening import listen
from .service.purging import Removal
from .service.receiving import Receiving
from .service.sending import Sending, require_schedule
from .service.settling import Settling
from .service.statistics import Statistics
from .service.subscriptions import require_same
from .service.transactions import Transactions
from .service.watching import OnWake, Watch, receive_or_watch
from .state.decoding import decode
from .state.due import delay_ms
from .state.gates import Gate, LeaseMovedError
from .state.leases import CLAIMED, LEASED, REJECTED, Lease
from .state.limits import Grant
from .store_types import (
    Change,
    Counts,
    Listener,
    Pending,
    Prepared,
    Progress,
    Settlement,
    StoreStats,
    Subscription,
    SubscriptionKey,
)

T = TypeVar("T")

if TYPE_CHECKING:
    from pydantic import BaseModel

log: logging.Logger = logging.getLogger(__name__)


class Store:
    """One store over a backend. A kind of store is a subclass that names its backend and its options' model, a pydantic
    model; it is registered in the entry-point group `anabranch.adapters`.

    Every method may be called by any thread at any time between open and close. All raise StoreFailedError once the
    store has failed, and ClosedError when it is closed or in a forked child (rule D4). A signal handler that
    interrupted a call of its own thread gets RuntimeError (rule G3). Constructors touch nothing; `create` and `open`
    touch the disk.
    """

    backend_type: ClassVar[type[Backend]]
    options_model: ClassVar[type[BaseModel]]

    name: str
    store_id: bytes
    """16 random bytes, for life (rule I4)."""
    volatile: bool
    """True: nothing survives a restart. In a transaction it takes part in visibility only (rule T7)."""
    shared: bool
    """True: another process may own the same data next (a leased store of a shared database), so that a transaction
    whose outcome this process's decision log alone knows is refused (rule T6)."""
    limited: bool
    """True: a transaction reserves room here before it prepares."""
    is_prompt: bool
    """True if who waits for a write does it: nothing but the disk, or nothing, is waited for."""
    descriptors: int
    """How many files and sockets it keeps open."""

    # `check_options(options)`, a class method, may be there: it raises ConfigError for what is wrong with options and
    # their model cannot know. It touches nothing; `anabranch check` calls it.

    def __init__(self, name: str, directory: Path, options: Any, index_directory: Path | None = None) -> None:
        self.name = name
        self.directory = directory
        self.options = options
        self._index_directory = index_directory
        self.backend: Backend = self.backend_type(name, directory, options, index_directory)
        self.volatile = self.backend.volatile
        self.shared = self.backend.shared
        self.descriptors = self.backend.descriptors
        self.store_id = b""
        self._opened = False
        self._begin()

    def _begin(self) -> None:
        """Set the state of a store that is not open yet."""
        owner: object = self._engine.owner if hasattr(self, "_engine") else None
        self._engine: Engine = Engine(self.name, self.backend)
        engine = self._engine
        engine.owner = owner
        self._usage: Recorder | None = None
        self._writer: Writer = self.backend.writer(engine)
        self.is_prompt = not isinstance(self._writer, Threaded)
        self._sending = Sending(engine, self._writer)
        self._settling = Settling(self, engine, self._writer, self._sending.write)
        self._failures = Failures()
        self._lease_times = LeaseTimes(engine, self._settling.give_back_delivered)
        self.abandoned: Abandoned = Abandoned(engine, self._settling.give_back_delivered)
        self._receiving = Receiving(
            self,
            engine,
            HandingOut(self.backend.settings, self._lease_times, self._settling.count_handed_out),
            self._sending.write,
        )
        self._transactions = Transactions(self, engine, self._writer, self._sending, self._settling, self.sync)
        self._removal = Removal(engine, self._sending, self._receiving)
        self._statistics = Statistics(engine, self._receiving)
        parts = Parts(
            engine, self._writer, self, self.directory, self._index_directory,
            getattr(self.options, "file_mode", None), self.sync, self._sending, self._settling,
            self._lease_times,
        )  # fmt: skip
        engine.features = [feature(parts) for feature in FEATURES]
        self.limited = engine.quotas is not None
        self._sending.know_features()

    @classmethod
    def create(cls, name: str, directory: Path, options: Any) -> bytes:
        """Make an empty store, whole or not at all whatever crash comes; returns its id (rule D2).

        The directory must not exist; its parents are made. What a crash leaves is called as `adapters.files.unfinished`
        says, and the router removes it.
        """
        with disk_errors(f"store {name!r} cannot be created"):
            return cls.backend_type.create(name, directory, options)  # type: ignore[attr-defined,no-any-return]

    @classmethod
    def identify(cls, directory: Path) -> bytes | None:
        """Return the id of the store in a directory. None if the directory holds none of this kind, or the id does not
        read. Changes nothing, takes no lock. Raises OSError if the directory cannot be read."""
        return cls.backend_type.identify(directory)  # type: ignore[attr-defined,no-any-return]

    @classmethod
    def is_contained(cls, options: Any) -> bool:
        """Return whether all of a store lies in its directory. Then a store of one destination goes with that
        destination."""
        return cls.backend_type.is_contained(options)

    @classmethod
    def is_shared(cls, options: Any) -> bool:
        """Return what `shared` says of a store with these options."""
        return cls.backend_type.is_shared(options)

    @classmethod
    def peek(cls, directory: Path, options: Any, store_id: bytes, transaction: bytes) -> bool | None:
        """Return whether a store that `is_shared` has committed a transaction, without opening it: another process may
        have it open. None: it is prepared there still, or that cannot be told so. Raises StoreFailedError, also where
        the store is another."""
        with disk_errors(f"the store in {directory} cannot be asked for a transaction"):
            return cls.backend_type.peek(directory, options, store_id, transaction)

    @property
    def settings(self) -> Settings:
        """Return the options that each kind of store has, as the core knows them."""
        return self.backend.settings

    @property
    def owner(self) -> object:
        """Set by the router that opens it, which the store keeps alive and never looks at: while anything can reach the
        store, a message say, the router's directory is locked (invariant 8). Message.reject asks it. Background work
        for a store that nobody holds any more reaches it too."""
        return self._engine.owner

    @owner.setter
    def owner(self, owner: object) -> None:
        self._engine.owner = owner

    @property
    def usage(self) -> Recorder | None:
        """Return the recorder of all that takes effect here, until the store is closed (usage.py). Set by the usage
        log."""
        return self._usage

    @usage.setter
    def usage(self, usage: Recorder | None) -> None:
        before, self._usage = self._usage, usage
        self._engine.hooks.watch(usage, instead=before)

    @property
    def maps(self) -> KeyedValues:
        """Return the values of the store's maps."""
        if self._engine.maps is None:
            raise DestinationError(f"store {self.name!r} keeps no maps; route map://... to another kind of store")
        return self._engine.maps

    @property
    def failed(self) -> BaseException | None:
        """Return why the store has stopped itself, if it has. Never waits."""
        return self._engine.failed

    def on_failed(self, call: Callable[[BaseException], object]) -> None:
        """Call this, once, if the store fails before it is closed: in whatever thread finds it, perhaps with locks
        held, so that it must not wait."""
        self._engine.on_failed = call

    # Opening and closing

    def open(self, progress: Progress | None = None) -> None:
        """Recover what is on disk and be ready. Raises StoreLockedError, CorruptionError, ConfigError."""
        if self._opened:
            raise StoreLockedError(f"store {self.name!r} is open already, in this process")
        started = time.monotonic()
        self._begin()
        engine = self._engine
        with disk_errors(f"store {self.name!r} cannot be opened"):
            try:
                self.store_id, found = self.backend.open(engine, progress)
                for feature in engine.features:
                    feature.open()
                self._load(found)
                self.backend.require_owned()
                engine.start(self._writer.submit)
                self._opened = True
                for feature in engine.features:
                    feature.start()
                try:
                    if found.then is not None:
                        found.then()
                except AnabranchError as error:
                    log.debug("store %s: %s", self.name, error)
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
        engine.sequencer.load(max([found.last_seq, *(feature.highest_seq for feature in engine.features)]), found.ids)
        engine.committed = dict.fromkeys(found.committed)
        self._transactions.load(found.prepared)

    @property
    def last_seq(self) -> int:
        """Return the highest seq given out to a persistent message: what is sent from now on comes behind it. Known
        still when the store is closed."""
        if self._engine.failed is not None:
            self._engine.ensure_usable()
        return self._engine.sequencer.last_seq

    @property
    def highest_seq(self) -> int:
        """Return a seq above which none was given out yet: also none of a transient message."""
        return self._engine.sequencer.highest_seq

    def close(self) -> None:
        """Finish what is queued, leave all of it durable, free the directory. Idempotent."""
        if not self._opened:
            return
        engine = self._engine
        if engine.forked:
            self._opened = False
            return
        self._look_after_owner()
        self.abandoned.close()
        try:
            for feature in engine.features:
                feature.close()
            self._writer.close()
            engine.closed = True
            with engine.lock:
                clean = engine.failed is None
                if clean:
                    engine.drain()
                for feature in engine.features:
                    feature.end(clean)
                self.backend.close(clean)
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
        for channel in self._engine.catalog.channels():
            channel.held.clear()  # leases end with it, also where the same object is opened again

    def _look_after_owner(self) -> None:
        """Look after the directory: a store that has lost it writes nothing more."""
        try:
            self.backend.require_owned()
        except StoreFailedError as error:
            self._engine.fail(error)

    # Sending

    def send(
        self,
        destination: Destination,
        body: bytes | Readable | LargeBody,
        headers: Headers | None = None,
        message_id: str | None = None,
        sync: bool | None = None,
        priority: int = DEFAULT_PRIORITY,
        expires_at_ms: int = 0,
        persistent: bool = True,
        deliver_at_ms: int = 0,
    ) -> Receipt:
        """Store one message at the end of its destination (of its priority, if the store's option `priorities` is set).
        On return it is durable and visible.

        A topic's message is stored once, whatever the number of its durable subscriptions; without any it is gone at
        once, and the receipt is as always. `sync=True` asks for power-failure durability of this one whatever the
        policy. A `message_id` within the store's duplicate window is stored once: the receipt then says `duplicate`.
        With `persistent=False` it is kept in memory, swapped to disk if there is much, waits for no disk, and is gone
        when the store is closed; it keeps its place among the others. Before `deliver_at_ms`, milliseconds since the
        epoch, nobody receives it, while others pass it; then it is at its place, by its seq.
        A body that is read from a file is kept apart from its message, if it is longer than the store's option
        `large_message_size`: written, and synced, before the message is queued, and gone if that raises.
        Raises ConfigError for a `deliver_at_ms` in a store of a kind that does not know such messages.
        Raises StoreFullError, MessageTooLargeError and ClockError (no effect), OutcomeUnknownError.
        """
        engine = self._engine
        message: Outgoing | bytes
        if (
            type(body) is bytes and headers is None and message_id is None and priority is DEFAULT_PRIORITY
            and persistent and expires_at_ms == deliver_at_ms == 0
        ):  # fmt: skip
            message = body
        else:
            fields = (body, headers, message_id, priority, expires_at_ms, persistent, False, deliver_at_ms, None)
            message = tuple.__new__(Outgoing, fields)  # as its own, less a call
        if engine.quotas is not None:
            return self._sending.send_limited(destination, message, bool(sync))
        ticket = self._sending.ticket(destination, message, sync)
        engine.submit(ticket)
        seq, duplicate = self._writer.wait(ticket)[0]
        if engine.pending_changes >= APPLY_AT:  # as Sending.wait, less a call
            engine.help()
        return tuple.__new__(Receipt, (destination, seq, duplicate))  # as its own, less a call

    def send_nowait(
        self,
        destination: Destination,
        body: bytes | Readable | LargeBody,
        headers: Headers | None = None,
        message_id: str | None = None,
        sync: bool | None = None,
        priority: int = DEFAULT_PRIORITY,
        expires_at_ms: int = 0,
        persistent: bool = True,
        deliver_at_ms: int = 0,
    ) -> Future[Receipt]:
        """Do `send` without waiting: the future resolves when send would have returned, on a thread of ours.

        Sends of one thread to one destination keep their order. What send would raise, the future raises.
        """
        sending = self._sending
        message = Outgoing(body, headers, message_id, priority, expires_at_ms, persistent, deliver_at_ms=deliver_at_ms)
        if self._engine.quotas is not None:
            return sending.send_limited_nowait(destination, message, bool(sync))
        if not persistent:
            return sending.send_transient_nowait(destination, message)
        return sending.send_nowait(destination, sending.ticket(destination, message, sync))

    def begin_sends(
        self, sends: Sequence[tuple[Destination, Outgoing]], sync: bool = False
    ) -> Pending[list[tuple[int, bool] | Exception]]:
        """Queue messages of many callers together. Whoever begins such sends, and acks beside them, and waits for them
        then, on one thread, writes them with one wait for the disk. Not where the store is `limited`, nor for a
        transient message: these may have to wait for room. `wait` returns for each the seq, and whether it is a
        duplicate, or the error of one that is not stored. An error of several may be one alone's: where there is no
        room, say."""
        return self._sending.begin_each(sends, sync)

    def send_many(
        self,
        destination: Destination,
        messages: Iterable[Outgoing | bytes],
        sync: bool | None = None,
        done: list[Receipt] | None = None,
    ) -> list[Receipt]:
        """Store many, in order, with as few waits for the disk as may be. Not atomic: a crash keeps a prefix. One that
        is `requeued` is no duplicate, here as in `commit` and in a branch. `done` is returned, with the receipts added
        to it: where it raises, they say which are stored, the first ones, and the others can be sent elsewhere."""
        return self._sending.send_many(destination, messages, sync, done)

    def declare(self, destination: Destination, moves: bool = False) -> None:
        """Declare a destination: it is there from now on, if it is empty, too. On return that survives a power failure,
        whatever the policy. Idempotent. `moves`: no gate keeps it out. Raises as `send`."""
        # Also where it is there: what brings it may be on its way to the disk still, and this comes behind it.
        self._sending.write([Declare(self._sending.state(destination))], moves=moves)
        self.sync()

    def send_within(
        self, connection: Any, destination: Destination, messages: Iterable[Outgoing | bytes]
    ) -> list[Receipt]:
        """Send in the transaction that the caller has open on this connection to the database that the store is in, or
        that is begun there now: seen once that has committed, at the end of their destination then, and never if it is
        rolled back. The receipts have seq 0. The connection is one of SQLAlchemy's, psycopg's, sqlite3's or Django's.

        The connection's commit is what makes them durable. Raises TransactionError for a store that shares no database
        with its callers, for a connection to another database and for one in autocommit, what `send` raises before
        anything is stored, and what the connection raises.
        """
        return self._outbox().send(connection, destination, messages)

    def send_leased(
        self, destination: Destination, message: Outgoing, lease: float | None = None, sync: bool | None = None
    ) -> Message | Receipt:
        """Store one message of a queue, leased to the caller from its first moment on: nobody else can have it before,
        nor see it free. On return it is as durable as after `send`, and leased as by `receive`, also with regard to
        `lease`. Where nothing was stored (a duplicate, or `when_full: drop_new`) the receipt is returned instead.

        Raises what `send` raises and, before anything is stored, DestinationError for what is no queue, ValueError for
        a message that has a group, waits for its time or is not persistent, and StoreFullError where as many are leased
        as may be. OutcomeUnknownError also says that the message is stored, and could not be leased.
        """
        parts = self, self._engine, self._sending, self._receiving
        return send_leased(*parts, destination, message, lease, bool(sync))

    # Receiving

    def receive(
        self,
        destination: Destination,
        timeout: float | None = 0,
        subscription: SubscriptionKey | None = None,
        lease: float | None = None,
        newest: bool = False,
    ) -> Message | None:
        """Lease the first message that nobody holds; None if there is none in `timeout` seconds (None: wait).

        First is the oldest, or the `newest`, with `priorities` that of the highest priority. If there is none, a caller
        that waits for the newest gets what comes first, as any other. One whose time is over or that has come
        back `max_deliveries` times is skipped. From a topic one receives for a `subscription`: UnknownSubscription-
        Error if the topic has none of that key, DestinationError without one. Subscriptions lease independently.

        If it is not acked, released or extended in `lease` seconds (None: the store's `lease_timeout`), it is free
        again, at its old place, delivered once more, within a second; its holder then gets UnknownMessageError. The
        time of one that a transaction has claimed does not run out. By a monotonic clock. Raises TypeError and
        ValueError for what is no time.
        """
        return self._receiving.receive(destination, timeout, subscription, lease, newest)

    def receive_many(
        self,
        destination: Destination,
        most: int,
        timeout: float | None = 0,
        subscription: SubscriptionKey | None = None,
        lease: float | None = None,
    ) -> list[Message]:
        """Lease up to so many, in order: as soon as there is one, all that are there then; none if there is none in
        `timeout` seconds. An error of a later one (damage, too many leases) is raised by the call that finds it first;
        a damaged one stays leased, and is logged. All else is as in `receive`."""
        return self._receiving.receive_many(destination, most, timeout, subscription, lease)

    def receive_or_watch(
        self, destination: Destination, on_wake: OnWake, watch: Watch | None = None, lease: float | None = None
    ) -> Message | Watch:
        """Lease the first message of a queue that nobody holds; if there is none, `on_wake` is called once there may be
        one, or the store closes or fails: then what is returned stands in line for it, or this `watch`, if that does
        still. Never waits for a message, also not where as many are leased as may be; does not keep the store from
        retiring. All else is as in `receive`."""
        return receive_or_watch(self._receiving, destination, on_wake, watch, lease)

    def listen(
        self,
        destination: Destination,
        on_message: Callable[[Message], object],
        credit: int = 1,
        subscription: SubscriptionKey | None = None,
        on_end: Callable[[Exception], object] | None = None,
        lease: float | None = None,
        run_by: Callable[[Job], object] | None = None,
    ) -> Listener:
        """Lease messages for who is called with each, up to `credit` of them; more with `Listener.add_credit`.

        A listener stands in one line with those who wait in `receive`: what becomes free goes to who came first. It is
        called on a thread of ours, with one message at a time, in order, never inside a sender's `send`; the message
        is leased as a received one is, its time (`lease`) from the call on. If it raises, its message is released. As
        long as it is not closed, `retire` refuses. Given `run_by`, that is called instead with what is to be run on
        such a thread, itself perhaps inside a `send`, so that it must not wait.

        It ends by itself when the store closes or fails, its subscription is removed, or the disk does not give a
        message (a damaged one stays leased, and is skipped): `on_end` is then called with the error, likewise.
        Raises as `receive`, and TypeError and ValueError for what is no credit.
        """
        return listen(self._receiving, destination, on_message, credit, subscription, on_end, lease, run_by)

    def take_undelivered(self, limit: int = 100) -> Sequence[Undelivered]:
        """Lease up to so many of the messages that receive skips, of any destination. One of a topic whose time is over
        is leased for all subscriptions at once (its `subscription` is None), if none of them has leased or claimed it:
        its ack removes it everywhere. Cheap when there are none. A message that was received, and let go of without
        being settled, is free from here on (abandoned.py)."""
        if self.abandoned:
            self._engine.ensure_usable()
            self.abandoned.give_back()
        for feature in self._engine.features:
            feature.tidy(soon=True)
        return self._receiving.take_undelivered(limit)

    def count_expired(self, messages: Iterable[Message]) -> None:
        """Count messages of `take_undelivered` that are gone, for their time was over: `counts` tells how many."""
        self._statistics.count_expired(message._note for message in messages)

    def keep(self, body: object, persistent: bool = True) -> bytes | LargeBody:
        """Read a body for a message that is sent here later, perhaps in a transaction; what was kept and is not sent
        goes by itself. Raises as LargeBodies.kept."""
        return self._bodies().kept(body, persistent)

    def give_back(self, lease: Lease) -> None:
        """Give back what is leased so, which its holder has never seen."""
        self._receiving.give_back(lease)

    def large_body(self, reference: bytes) -> StoredBody:
        """Return the body that a record refers to."""
        return self._bodies().body_of(reference)

    def bring_body(self, body: StoredBody) -> StoredBody:
        """Return a copy of a body in another store, for a message that comes from there. Raises as `keep`."""
        return self._bodies().migrated(body)

    def _bodies(self) -> Bodies:
        if self._engine.bodies is None:
            raise TypeError(f"store {self.name!r} keeps no body apart from its message; send bytes")
        return self._engine.bodies

    def open_body(self, message: Message[Any]) -> BinaryIO:
        """Open a message's body, as Message.open."""
        content: Any = message.content
        if not isinstance(content, StoredBody):
            return io.BytesIO(content)
        try:
            return content.open()
        except ClosedError:
            if not follow(message):
                raise
            body: StoredBody = message._store.large_body(content.reference)
            return body.open()

    def browse(
        self,
        destination: Destination,
        limit: int | None = None,
        after: int | Message = 0,
        subscription: SubscriptionKey | None = None,
        leased: bool = True,
    ) -> Iterator[Message]:
        """Look at the messages in order, without `leased` none that somebody has leased or claimed when it is its turn
        (of a queue or a subscription), from the one after `after`: a seq, or a message; with `priorities` a message
        only (ValueError). Holds no lock between two; a message acked meanwhile is left out, one
        sent meanwhile may be seen. Of a topic: what a subscription has yet to ack, or without one all that is held."""
        return self._receiving.browse(destination, limit, after, subscription, leased)

    # Settling

    def ack(self, messages: Sequence[Message[Any]]) -> None:
        """Remove leased messages, all or none of them; a topic's for its subscription alone, and for good when the last
        one has acked. Raises UnknownMessageError (and removes none). Those whose destination has moved to another store
        since they were received are acked there, apart from the others; likewise below."""
        try:
            self._engine.ensure_usable()
            self._settling.ack(messages, LEASED)
        except ClosedError as error:
            after_move(error, messages, lambda store, some: store.ack(some))

    def ack_within(self, connection: Any, messages: Sequence[Message[Any]]) -> None:
        """Ack in the transaction of such a connection, all or none of them: they are claimed until it is over, gone if
        it has committed, and free again, delivered once more, if it was rolled back. Raises as `ack` and
        `send_within`."""
        try:
            self._outbox().ack(connection, messages)
        except ClosedError as error:
            after_move(error, messages, lambda store, some: store.ack_within(connection, some))

    def is_enlisted(self, destination: Destination) -> bool:
        """Return whether callers' transactions are open that send to a destination or ack there."""
        outbox = self._engine.outbox
        return outbox is not None and outbox.concerns(destination)

    def _outbox(self) -> Outbox:
        self._engine.ensure_usable()
        if self._engine.outbox is None:
            raise TransactionError(
                f"store {self.name!r}, of kind {self.backend.kind}, is in no database that takes part in the "
                "transaction of a connection; use a transaction of the router's (router.transaction()), or move the "
                "destination to an sql store in that database"
            )
        return self._engine.outbox

    def ack_nowait(self, messages: Sequence[Message[Any]]) -> Future[None]:
        """Do `ack` without waiting: what is not leased is refused at once; the future resolves when `ack` would have
        returned, on a thread of ours. Until then nobody else can settle these messages."""
        try:
            self._engine.ensure_usable()
            return self._settling.ack_nowait(messages, LEASED)
        except ClosedError as error:
            return self._after_move(error, messages, lambda store, some: store.ack(some))

    def release(
        self,
        messages: Sequence[Message[Any]],
        delivered: bool = True,
        delay: float | None = None,
        reason: Reason | None = None,
    ) -> None:
        """Give leased messages back, each to its old place. Leases end with the process.

        For `delay` seconds they wait first, over a restart too, while others pass them; 0: not at all; None: as the
        store's option `redelivery` says, if it counts as a delivery. What has reached `max_deliveries` does not wait.
        Raises TypeError and ValueError for what is no time to wait, and ConfigError where none can.

        `delivered`: it counts as a delivery. The count is written, but not waited for: a power failure may forget the
        last ones, a kill does not. If it cannot be written the messages are free all the same.

        The `reason` is known until the store is closed (`failure_of`), as the last of the message. Raises TypeError for
        what is no reason.
        """
        try:
            self._engine.ensure_usable()
            if reason is not None:
                self.note_failure(messages, reason)
            self._settling.give_back(messages, LEASED, delivered, self.delay_ms(delay))
        except ClosedError as error:
            after_move(error, messages, lambda store, some: store.release(some, delivered, delay, reason))
            return
        if reason is not None and delivered:
            self.tell_spent(messages)

    def note_failure(self, messages: Sequence[Message[Any]], reason: Reason) -> None:
        """Note the reason why these are about to be given back, which are held. Raises TypeError."""
        self._failures.note(keys_of(messages), failure_of(reason))

    def failure_of(self, message: Message[Any]) -> Failure | None:
        """Return the last reason why a message that is leased was given back, as far as it is known."""
        return self._failures.of(key_of(message))

    def tell_spent(self, messages: Sequence[Message[Any]]) -> None:
        """Tell the owner of messages that were given back for the last time, if some were. Their failures were noted
        before."""
        most, owner = self.backend.settings.max_deliveries, self._engine.owner
        if most is not None and isinstance(owner, Rejecting) and any(one.deliveries >= most for one in messages):
            owner._spent(self)

    def delay_ms(self, delay: float | None) -> int | None:
        """Return the delay of a release in milliseconds. Raises as `release`."""
        if not delay:
            return None if delay is None else delay_ms(delay)
        require_schedule(self._engine).require()
        return delay_ms(delay)

    def release_nowait(
        self,
        messages: Sequence[Message[Any]],
        delivered: bool = True,
        delay: float | None = None,
        reason: Reason | None = None,
    ) -> Future[None]:
        """Do `release` without waiting, as `ack_nowait`."""
        try:
            self._engine.ensure_usable()
            if reason is not None:
                self.note_failure(messages, reason)
            future = self._settling.give_back_nowait(messages, LEASED, delivered, self.delay_ms(delay))
        except ClosedError as error:
            return self._after_move(error, messages, lambda store, some: store.release(some, delivered, delay, reason))
        if reason is not None and delivered and messages:
            one = [max(messages, key=lambda message: message.deliveries)]  # for the future may be kept for long
            future.add_done_callback(lambda done: self.tell_spent(one))
        return future

    def extend(self, message: Message[Any], seconds: float | None = None) -> None:
        """End the lease of a message so many seconds from now, be that earlier or later than before; with None as many
        as it was leased for, and nothing happens to one that has no end. Raises UnknownMessageError if it is not
        leased, or its time is over; TypeError and ValueError for what is no time."""
        try:
            self._engine.ensure_usable()
            self._lease_times.extend(self, message, seconds)
        except ClosedError as error:
            after_move(error, [message], lambda store, some: store.extend(some[0], seconds))

    @staticmethod
    def _after_move(
        error: ClosedError, messages: Sequence[Message], call: Callable[[MessageStore, list[Message]], object]
    ) -> Future[None]:
        """Repeat a call as `after_move`, on a thread of ours. A message that is not moving is refused at once."""
        if not is_moving(messages) and not isinstance(error, LeaseMovedError):
            raise error
        return shared().call(lambda: after_move(error, messages, call))

    def claim(self, message: Message[Any]) -> None:
        """Claim a leased message for a transaction: from now on nobody else may ack or release it (rule X6)."""
        try:
            self._engine.ensure_usable()
            self._settling.claim(message)
        except ClosedError as error:
            after_move(error, [message], lambda store, some: store.claim(some[0]))

    def unclaim(self, messages: Sequence[Message[Any]], delivered: bool = True, delay: float | None = None) -> None:
        """Free the messages of a transaction that is rolled back, or gives them back: each at its old place, as by
        release."""
        try:
            self._engine.ensure_usable()
            self._settling.give_back(messages, CLAIMED, delivered, self.delay_ms(delay))
        except ClosedError as error:
            after_move(error, messages, lambda store, some: store.unclaim(some, delivered, delay))

    def token(self, message: Message[Any]) -> str:
        """Return the token by which a leased message can be settled from any thread, without the Message. A token
        begins with the store's id and holds no secret. Raises UnknownMessageError."""
        if not isinstance(message._note, Lease):
            require_leased(message)
            raise UnknownMessageError(f"{message!r} is not leased here any more")
        message._note.kept = True  # first: it is not given back because its Message is gone
        return self._settling.token(message._note)

    def token_of(self, lease: Lease) -> str:
        """Return the token of a lease."""
        return self._settling.token(lease)

    def lease_again(
        self,
        destination: Destination,
        seq: int,
        subscription: SubscriptionKey | None = None,
        lease: float | None = None,
    ) -> str | None:
        """Lease the message of that seq, wherever it stands, for a caller that had leased it before the store was
        opened; returns its token. None if it is not there any more. It is no further delivery. Raises as `receive`, and
        UnknownMessageError if somebody else holds it."""
        again = self._receiving.lease_again(destination, seq, subscription, lease)
        if again is None:
            return None
        again.kept = True
        return self._settling.token(again)

    def leased(self, token: str) -> Message:
        """Return the message of a token. Raises TypeError, UnknownMessageError."""
        self._engine.ensure_usable()
        message = self._receiving.read(self._settling.lease(token))
        if message is None:
            raise UnknownMessageError(f"the message of token {token} is not there any more")
        return message

    def note_rejected(self, message: Message[Any]) -> None:
        """Note that a message was acked since it was rejected: a caller that comes with it once more hears that."""
        lease = message._note
        lease.end = REJECTED
        self._settling.note_ends([lease] if lease.is_kept else ())

    def settle(
        self, tokens: Sequence[str], how: Settlement, delivered: bool = True, delay: float | None = None
    ) -> list[AnabranchError | None]:
        """Ack or release many by their tokens; returns what was wrong with each, None where nothing was:
        UnknownMessageError, which names the token, for what is no token or is not leased any more. Those with which
        nothing was wrong are settled together. `delivered` and `delay` are those of `release`. REJECT is the router's.
        Raises TypeError, and as `release` for the delay."""
        self._engine.ensure_usable()
        return self._settling.settle(tokens, how, delivered, self.delay_ms(delay))

    def require_leased(self, tokens: Iterable[str]) -> None:
        """Raise UnknownMessageError if one of the messages of these tokens cannot be settled now."""
        self._engine.ensure_usable()
        self._settling.require(tokens)

    def begin_ack(self, tokens: Sequence[str]) -> Pending[list[AnabranchError | None]]:
        """Queue the acks of leased messages by their tokens, as `begin_sends`. `wait` returns what `settle` does."""
        self._engine.ensure_usable()
        return self._settling.begin_ack(tokens)

    def settle_nowait(
        self, tokens: Sequence[str], how: Settlement, delivered: bool = True, delay: float | None = None
    ) -> Future[list[AnabranchError | None]]:
        """Do `settle` without waiting, as `ack_nowait`."""
        self._engine.ensure_usable()
        return self._settling.settle_nowait(tokens, how, delivered, self.delay_ms(delay))

    # Durable subscriptions

    def subscribe(self, subscription: Subscription, retroactive: bool = False) -> bool:
        """Keep messages for this subscription, from those on that take effect after it (`retroactive`: with all that
        the topic still holds). Durable on return. False if it was there already; SubscriptionError if it was there with
        another selector or no_local (unsubscribe first: its backlog would be lost)."""
        engine = self._engine
        engine.ensure_usable()
        change = self._sending.change(Change(subscription, True, bool(retroactive)))
        ((subscriber, there),) = self._sending.write([change])
        engine.look_soon()
        if there:
            require_same(subscriber.subscription, subscription)
        return not there

    def unsubscribe(self, topic: Destination, subscription: SubscriptionKey) -> int:
        """Remove it; returns how many messages it had yet to ack, leased ones too. Durable on return. Raises
        UnknownSubscriptionError, and TransactionError while a transaction has claimed one of them."""
        return self._removal.unsubscribe(topic, subscription)

    def subscriptions(self) -> Sequence[Subscription]:
        """Return all subscriptions, in no order."""
        catalog = self._engine.catalog
        return self._engine.counted(
            lambda pending: [
                subscriber.subscription
                for state in list(catalog.destinations.values())
                for subscriber in list(state.subscriptions.values())
            ]
        )

    # Transactions

    def commit(
        self,
        sends: Sequence[tuple[Destination, Outgoing]],
        acks: Sequence[Message],
        sync: bool | None = None,
        changes: Sequence[Change] = (),
        mark: str | None = None,
    ) -> list[Receipt]:
        """Apply changes of subscriptions, sends and claimed acks, in this order, as one: after any crash, all of them
        or none. A change that is no longer one (the subscription is there, or gone) is skipped. If it raises
        anything but OutcomeUnknownError nothing took effect and the acks are still claimed.

        `mark` is the caller's name for the whole, by which `marked` knows it from then on, as long as the duplicate
        window remembers ids of as many messages."""
        return self._transactions.commit(sends, acks, sync, changes, mark)

    def marked(
        self, mark: str, sends: Sequence[tuple[Destination, Outgoing]], others: Iterable[Destination] = ()
    ) -> list[Receipt] | None:
        """Return the receipts that a commit under this name had; None if there was none, or it is not known any more.
        `sends` are what it sent here, `others` the other destinations that it changed. The seq of all receipts is 0
        where one of them cannot be told: a limit has dropped a message, a destination was removed or has moved to
        another store since, or an id of a message is known no more, or was requeued."""
        return self._transactions.marked(mark, sends, others)

    def commit_nowait(
        self,
        sends: Sequence[tuple[Destination, Outgoing]],
        acks: Sequence[Message],
        sync: bool | None = None,
        changes: Sequence[Change] = (),
    ) -> Future[list[Receipt]]:
        """Do `commit` without waiting, as `ack_nowait`."""
        return self._transactions.commit_nowait(sends, acks, sync, changes)

    def reserve(
        self,
        sends: Sequence[tuple[Destination, Outgoing]],
        acks: Sequence[Message] = (),
        since: float | None = None,
        wait: bool = True,
    ) -> Grant | None:
        """Reserve room for these sends, less what these acks free, for a `prepare` that gets what is returned; the room
        is free again when that is let go of. None where nothing is needed. Waits for it where the store's limits say
        so, since `since` (monotonic) if that is given; without `wait` it raises NoRoomYetError instead. Raises
        StoreFullError and MessageTooLargeError (nothing is reserved)."""
        return self._transactions.reserve(sends, acks, since, wait)

    def prepare(
        self,
        transaction: bytes,
        participants: Sequence[bytes],
        sends: Sequence[tuple[Destination, Outgoing]],
        acks: Sequence[Message],
        sync: bool,
        room: Grant | None = None,
        changes: Sequence[Change] = (),
        mark: str | None = None,
        note: bytes = b"",
    ) -> Pending[None]:
        """Make a branch durable without letting anything of it be seen.

        Once `wait` has returned, the branch survives whatever the process survives, with `sync` a power failure too
        whatever the store's policy, until commit_prepared or rollback_prepared: after any crash recover_prepared tells
        of it, and its acks are claimed again before anybody can receive. Neither depends on anything outside the store
        afterwards: a commit of what is prepared can fail for want of a working disk, not for a limit or a conflict.
        Raises, itself or in `wait`, what `commit` raises; the acks are then still claimed. If it was
        OutcomeUnknownError, the branch may be prepared. Branches of different transactions may be prepared at once, in
        this store and in others; calls come in any order from any threads. `mark`: as of `commit`, once the branch is
        committed. `note`: kept with it for whoever asks `recover_prepared`, in another process perhaps.
        """
        return self._transactions.prepare(transaction, participants, sends, acks, sync, room, changes, mark, note)

    def commit_prepared(self, transaction: bytes) -> Pending[list[Receipt]]:
        """Let the branch take effect: its changes, its sends at the ends of their destinations, in order, its acks; all
        or none. Once `wait` has returned it is visible. It need not be durable: the coordinator keeps its decision
        until `sync` has returned, and after a crash finds the branch prepared or committed, nothing between.

        A transaction that is not prepared here is skipped: `wait` returns no receipts. Raises nothing but
        StoreFailedError, StoreFullError and ClosedError; unless the store has failed the branch is prepared still.
        """
        return self._transactions.commit_prepared(transaction)

    def rollback_prepared(self, transaction: bytes) -> Pending[bool]:
        """Forget the branch, and its acks are free again, each message at its old place, delivered once more: who had
        acked them can do nothing more with their Message. Once `wait` has returned that is visible; after a crash the
        branch may be prepared again. `wait` returns whether it was prepared here; if it was not, claims are as they
        were. All else is as in commit_prepared."""
        return self._transactions.rollback_prepared(transaction)

    def recover_prepared(self) -> Sequence[Prepared]:
        """Return all that is prepared and waits for its outcome, oldest first."""
        return self._transactions.recover_prepared()

    def committed(self) -> Sequence[bytes]:
        """Return the transactions that commit_prepared has committed, not yet forgotten, oldest first; if they are very
        many, the latest. They survive restarts: when the coordinator's decisions are lost, they tell the outcome."""
        return self._engine.asked(lambda: sorted(self._engine.committed))

    def has_committed(self, transaction: bytes) -> bool:
        """Return whether `committed` has a transaction."""
        return self._engine.asked(lambda: transaction in self._engine.committed)

    def forget(self, transactions: Sequence[bytes]) -> None:
        """Forget that these are committed: all their participants are, durably."""
        self._transactions.forget(transactions)

    def sync(self) -> None:
        """Make all that is visible survive a power failure, whatever the policy. Raises StoreFailedError."""
        self._engine.ensure_usable()
        if isinstance(self._writer, Threaded):
            self._writer.flush()  # who was interrupted does not wait for what it had queued
        self.backend.sync()

    # Upkeep

    def purge(self, destination: Destination, subscription: SubscriptionKey | None = None) -> int:
        """Remove what nobody holds; returns how many. A topic's messages go for one subscription, or for all."""
        return self._removal.purge(destination, subscription)

    def delete(self, destination: Destination) -> int:
        """Remove the destination with all its messages, leased ones too, and its subscriptions; returns how many
        messages. Claimed ones refuse it (TransactionError)."""
        return self._removal.delete(destination)

    def idle_mark(self, queue: Destination) -> object:
        """Return None while a queue has a message, somebody waits or listens there, or a prepared transaction may send
        there. Otherwise return what stays the same as long as no message passes through it."""
        return self._removal.idle_mark(queue)

    def delete_if_idle(self, queue: Destination, gate: Gate) -> bool:
        """Remove a queue if that is not None, and say whether it is gone. Whoever comes to it meanwhile is sent to the
        gate (gates.py), which the caller opens afterwards: nothing is lost that is sent at the same moment."""
        return self._removal.delete_if_idle(queue, gate)

    def forget_gate(self, gate: Gate) -> None:
        """Forget a gate that stayed behind (rule K12), so that it keeps nobody out: its destination is here anew."""
        gates = self._engine.sequencer.gates
        if gates.get(gate.destination) is gate:
            gates.pop(gate.destination, None)

    def retire(self, to_remove: bool = False) -> bool:
        """Refuse all further calls and return True, if nobody waits and nobody holds a message: the store can then be
        closed, and opened again later, without anyone noticing. A volatile store refuses as long as it holds anything;
        one that is `to_remove`, as long as it has a destination: who had found it before may have sent."""
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
            if any(channel.is_needed for channel in engine.catalog.channels()) or engine.sequencer.prepared:
                return False
            if self.abandoned.has_moving or any(feature.is_busy for feature in engine.features):
                return False
            if self.volatile and self._holds_anything():
                return False
            if to_remove and any(engine.catalog.declared()):
                return False
            if engine.delivery.next_due and any(channel.receivers for channel in engine.catalog.channels()):
                return False  # who watches would not hear that something is due
            engine.closed = True
            self._writer.refuse_more()
            return True

    def _holds_anything(self) -> bool:
        """Return whether closing the store would lose something."""
        engine = self._engine
        return bool(
            engine.catalog.messages or len(engine.sequencer.window) or engine.committed or engine.catalog.subscriptions
        )

    def reclaim(self) -> int:
        """Free now the space that can be freed, which otherwise happens in the background; returns bytes."""
        self._engine.ensure_usable()
        with disk_errors(f"store {self.name!r} cannot give back space"):
            for feature in self._engine.features:
                feature.tidy()
            return self.backend.reclaim()

    def compact(self) -> int:
        """Free now also the space for which what is there has to be copied; returns bytes. Compaction that pays happens
        in the background by itself; here less is enough. Others send and receive meanwhile. A disk without room for the
        copies is no error."""
        self._engine.ensure_usable()
        with disk_errors(f"store {self.name!r} cannot give back space"):
            return self.backend.reclaim(copying=True)

    def checkpoint(self) -> None:
        """Write out what shortens the next opening. Happens by itself; durability never depends on it."""
        self._engine.ensure_usable()
        self.backend.checkpoint()

    # Asking

    def destinations(self) -> Sequence[Destination]:
        """Return the destinations known to the store, also empty ones."""
        catalog = self._engine.catalog
        return self._engine.counted(lambda pending: [state.destination for state in catalog.declared()])

    def depth(self, destination: Destination, subscription: SubscriptionKey | None = None) -> int:
        """Return how many messages are held, leased ones included; those that a subscription has yet to ack."""
        return self._statistics.depth(destination, subscription)

    def counts(self, destination: Destination, subscription: SubscriptionKey | None = None) -> Counts:
        """Return how many messages are ready, are leased, wait for their time, and have expired since the store was
        opened. Tells also how old the next ready one is, in constant time. For a topic without a subscription the
        leases of all its subscriptions are counted, what waits for all of them, what expired before one of them had
        acked it, and the age is that of the oldest which one of them receives next."""
        return self._statistics.counts(destination, subscription)

    def find(self, destination: Destination, message_id: str) -> Message | None:
        """Look at the message of that id, without a scan; None if it is not there or its id not in the duplicate window
        any more."""
        self._engine.settle()
        engine, state = self._engine, self._engine.catalog.destinations.get(destination)
        name = pack_id(message_id)
        if state is None:
            engine.require_here(destination)
            return None
        key, sequencer = (state.number, name), engine.sequencer
        seq = sequencer.window.get(key)
        if seq is None and engine.transient is not None:
            seq = engine.transient.sent_with(key)
        place = engine.asked(lambda: engine.rows.row(state, None, seq)) if seq is not None else None
        for record in readable(engine, state, [place], [message_id]) if place is not None else ():
            if record is not None:
                return decode(self, destination, place, record, None)  # type: ignore[arg-type]
        return None

    def stats(self) -> StoreStats:
        """Return a consistent picture, cheap enough to take every second."""
        return self._statistics.of_store()

    def check(self) -> Iterator[str]:
        """Walk everything and yield each violation found. Slow; for tests and for `anabranch check`."""
        with disk_errors(f"store {self.name!r} cannot be checked"):
            yield from self.undisturbed(self._violations)

    def undisturbed(self, question: Callable[[], T]) -> T:
        """Return the answer to a question about the backend, which is asked while nothing is written and nothing is
        being removed. All others wait meanwhile."""
        while True:
            self._removal.drop_all()
            found = self._writer.undisturbed(
                lambda: self._engine.asked(lambda: None if self._engine.leaving else [question()])
            )
            if found is not None:
                return found[0]

    def _violations(self) -> list[str]:
        violations = list(self.backend.check())
        for feature in self._engine.features:
            violations += feature.violations()
        return violations
