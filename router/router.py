"""The router, which users open and hold: destinations in front, stores behind.

with anabranch.open("stores.yaml") as router:
    router.queue("orders.custom").send(b"...")
"""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Protocol, Unpack, overload

from ..adapters.core import Store
from ..adapters.core.engine.lease_times import require_seconds as require_lease
from ..adapters.core.messages import REJECTED, Headers, LargeBody, Message, Readable, Reason, Receipt, T
from ..adapters.core.store_types import Listener, Progress, Settlement, StoreStats, Subscription
from ..adapters.system.acceleration import log_parts
from ..adapters.system.files import disk_errors
from ..adapters.system.locking import DirectoryLock
from ..policies import config as configs
from ..policies.errors import AnabranchError, StoreFailedError
from ..policies.names.destination import Destination
from ..policies.text import count_of
from .api.addresses import Address, map_of, queue_of, resolve, topic_of
from .api.background import in_background
from .api.codecs import Codec, codec_of
from .api.consumer import Consumer, require_callbacks
from .api.endpoint import Endpoint, SendOptions
from .api.map import Map
from .api.pattern_consumers import PatternConsumers
from .api.pattern_listener import PatternListener
from .api.patterns import Patterns, decoded
from .api.queue import Queue
from .api.reentry import refuse_in_handler
from .api.settling import TokenSettler, settle_nowait, way_of
from .api.topic import Topic
from .api.transaction import Transaction
from .events import Event, EventListener, Events
from .hosts.dbapi import Connection
from .hosts.joining import join
from .inspection import Inspection
from .migration.live import LiveRuns
from .migration.repartition import Repartitioned
from .placement import bindings
from .placement.bindings import DECISIONS
from .placement.on_disk.directories import take_directory
from .placement.on_disk.in_force import write_in_force
from .placement.registry import StoreRegistry
from .transactions.coordinator import Coordinator
from .transactions.outcomes import Heuristic, InDoubt, Outcomes
from .transactions.participant import by_store
from .transactions.states import Outcome
from .transactions.xid import Xid, as_xid
from .upkeep import space
from .upkeep.dead_letters import DeadLetterSweeper
from .upkeep.health import Health, health
from .upkeep.idle_queues import IdleQueues, require_seconds
from .upkeep.requeue import requeue_given
from .usage import UsageStats
from .usage.recording import UsageRecording

if TYPE_CHECKING:
    from ..policies.config import Config, UsageOptions
    from .hosts.data_manager import DataManager

log: logging.Logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RouterStats:
    """Statistics of a router."""

    stores: Mapping[str, StoreStats]
    """Statistics by the store's name; a store of one destination is `name:destination`."""
    decision_syncs: int = 0
    """How often the decision log, which transactions over several stores need, waited for the disk since open."""
    dead_lettered: int = 0
    """Messages that were put into dead-letter queues since open."""
    dropped: int = 0
    """Messages that were dropped since open: expired ones without a dead-letter queue, and those sent to a topic
    without any durable subscription. The `dropped` of each store counts the latter since that store was opened."""
    unresponsive: tuple[str, ...] = ()
    """Names of stores that did not answer within a second, since their disk hangs, say. Their latest figures stand for
    them, if they ever gave any."""


class Serving(Protocol):
    """A server of other processes (sharing/owner/server.py)."""

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it serves no more; return whether that is so, also where the time, in seconds, is over before."""

    @property
    def failure(self) -> BaseException | None:
        """The defect that has ended it, if one has."""

    def stop(self) -> None:
        """Finish what is in hand, and serve no more. Idempotent."""


class Others(Protocol):
    """The way in for other processes (sharing/owner/control.py)."""

    def serve(self, linger: float | None) -> Serving:
        """Let them in until that is stopped; as Router.serve."""

    def sessions(self) -> list[dict[str, Any]]:
        """Return who is connected, and what each holds."""

    def close(self) -> None:
        """Let in nobody any more. Idempotent."""


class Router:
    """Threads: all may use it. Forks: a child must open its own (rule D4).

    The router is open until `close`, or until nothing is held any more that can reach one of its stores. Whatever it
    gives out (a queue, a subscription, a message, a transaction) keeps it, and so its directory's lock, alive
    (invariant 8).

    `_lock` is held while the router is opened and closed; registry.py says which locks are taken while a store opens. A
    call that goes over all stores, or closes some, is refused to a signal handler that interrupted a call of its own
    thread (rule G3, reentry.py).
    """

    _held: Callable[[], None] | None = None
    """Closes a router that several parts of the process hold, once the last one has let go of it (held_routers.py)."""

    @staticmethod
    def _let_in(router: Router, registry: StoreRegistry) -> Others | None:
        """Make the way in for other processes. Replaced by the room of those, which stands on this one (opening.py)."""

    def __init__(self, config: Config) -> None:
        if not isinstance(config, configs.Config):
            raise TypeError(
                f"a Router takes an anabranch.Config, not {type(config).__name__}: {config!r}; anabranch.open takes "
                "the path of a file, too"
            )
        self._lock = threading.RLock()
        self._directory_lock = DirectoryLock(
            config.directory / "router.lock", "the router", config.file_mode, self._lose, self._described,
            "open it with shared=True to use it together",
        )  # fmt: skip
        self._registry = StoreRegistry(config, self, self._directory_lock.require)
        """The places of destinations."""
        self._coordinator = Coordinator(
            config.bindings / DECISIONS, config.transactions, self._registry, config.file_mode
        )
        """The coordinator of transactions over several stores."""
        self._usage = UsageRecording(
            lambda: self._registry.config, self._registry.open_stores, self._registry.directories.require_own
        )
        self._registry.on_open(self._opened)
        self._outcomes = Outcomes(self._coordinator, self._registry)
        self._events = Events()
        self._sweeper = DeadLetterSweeper(self._registry, self._unlimited, self._events)
        """The sweeper of messages that are not delivered any more."""
        self._moves = LiveRuns(self._registry, self._coordinator)
        self._tokens = TokenSettler(self._registry, self._sweeper.reject)
        self._patterns = PatternConsumers(self._registry)
        self._idle_queues = IdleQueues(self._registry, self._coordinator.table)
        self._inspection = Inspection(self._registry, self._coordinator.log, self._unlimited, self._sessions)
        self._others: Others | None = None

    # Opening and closing

    def open(self, progress: Progress | None = None) -> Router:
        """Take the data directory, which is made if it is not there, and compare it with the configuration.

        Stores open on first use. Raises StoreLockedError, PlacementError (see invariant 6), CorruptionError,
        ConfigError for a directory that cannot be used, and StoreFullError for one that has no room now.
        """
        log_parts()
        with self._lock:
            if self._directory_lock.held:
                self._directory_lock.acquire()  # which says that this very router is open
            try:
                take_directory(self.config, self._directory_lock.acquire)
                with disk_errors(f"the stores of {self.config.directory} cannot be looked at"):
                    for place in (self.config.directory / "stores", self.config.bindings / bindings.DECISIONS):
                        self._registry.directories.require_own(place)
                    bindings.take(self.config)
                    self._coordinator.open()  # first: if router.lock was deleted, the decisions' own lock tells
                    self._registry.open(progress)
                    self._coordinator.require_participants(self._registry.table.stores)
                self._directory_lock.require()
                self._registry.opened = True
                if not self._registry.moving:  # then it is in force once all has moved
                    write_in_force(self.config)
                in_use = not self._registry.moving and not self._registry.importing
                if in_use:
                    self._usage.start_configured()
                self._coordinator.resolver.resolve_all()
                if in_use:
                    self._sweeper.open()
                    self._others = self._let_in(self, self._registry)
            except BaseException:
                self._close()
                raise
        return self

    @property
    def config(self) -> Config:
        """The configuration in force."""
        return self._registry.config

    def __repr__(self) -> str:
        return f"<Router of {self.config.directory}>"

    def _described(self) -> str:
        """Describe this router, and what keeps it open, for a caller that opens the same directory."""
        handles = [
            one
            for one in gc.get_objects()
            if (issubclass(type(one), Endpoint | Consumer | Map) and one._registry is self._registry)
            or (issubclass(type(one), Message) and one._store.owner is self)
        ]
        if not handles:
            return repr(self)
        more = f" and {count_of(len(handles) - 1, 'other')}" if len(handles) > 1 else ""
        return f"{self!r}, which {handles[0]!r}{more} can reach"

    def _opened(self, store: Store) -> None:
        """Prepare a store that was opened, before anybody else has it."""
        self._usage.attach(store)  # first: what it commits now is recorded
        self._coordinator.resolver.recover(store)
        self._patterns.opened(store)
        self._events.watch(store)

    def _lose(self, error: StoreFailedError) -> None:
        """Stop, since the directory's lock was lost: nothing more goes through this router. Its stores have locks of
        their own."""
        log.error("the router has stopped: %s", error)
        self._sweeper.closed = True
        self._registry.stop(error)
        self._patterns.close()

    def close(self) -> None:
        """Close all stores and free the directory. Idempotent. Raises the first error of a store after closing all, and
        RuntimeError, having done nothing, in a signal handler that interrupted a call of its own thread (rule G3)."""
        if not self._registry.forked:
            refuse_in_handler("close")
        (self._held or self._close)()

    def _close(self) -> None:
        if self._registry.forked:
            self._registry.opened = False  # all of it belongs to the parent
            return
        if self._others is not None:
            self._others.close()
        self._patterns.close()
        self._idle_queues.close()
        self._moves.stop()
        with self._lock:
            self._sweeper.close()
            self._coordinator.close()
            try:
                self._registry.close_stores(self._sweeper.finish)
                self._usage.stop()
                self._coordinator.log.close()
            except (AnabranchError, OSError):
                self._let_go()
                raise
            self._let_go()  # not after Ctrl-C: then close() may be called again

    def _let_go(self) -> None:
        try:
            self._usage.stop()
            self._coordinator.log.close()
        finally:
            self._registry.let_go()
            self._directory_lock.release()

    def __enter__(self) -> Router:
        return self if self._registry.opened else self.open()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _begin(self, name: str) -> None:
        """Raise ClosedError if the router is closed, and RuntimeError in a signal handler that may not call this."""
        self._registry.require_open()
        refuse_in_handler(name)

    # Sending, receiving

    @overload
    def queue(self, name: Address, *, codec: None = None, expires_when_idle: float | None = None) -> Queue: ...

    @overload
    def queue(self, name: Address, *, codec: str, expires_when_idle: float | None = None) -> Queue[Any]: ...

    @overload
    def queue(self, name: Address, *, codec: Codec[T], expires_when_idle: float | None = None) -> Queue[T]: ...

    def queue(
        self, name: Address, *, codec: str | Codec[Any] | None = None, expires_when_idle: float | None = None
    ) -> Queue[Any]:
        """Return the queue of that name (`orders.custom` or `queue://orders.custom`). Nothing is created before the
        first send, or before `declare`.

        With a `codec` (`json`, `msgpack`, `pickle`, or an object; codecs.py) bodies are values: a sent value is encoded
        and labelled with the header `content_type`, and `message.body` is decoded. Without one they are bytes.

        With `expires_when_idle` the queue is deleted by itself once it has been empty for so many seconds, with nobody
        waiting there and nothing passing through. With messages in it it stays. The option is not recorded: it holds
        until the router is closed (idle_queues.py).

        Raises DestinationError, NoRouteError, TypeError for what names no destination or is no codec or no time, and
        ValueError for a codec that is not known.
        """
        self._registry.require_open()
        destination = queue_of(name)
        self._registry.route(destination)
        if expires_when_idle is not None:
            require_seconds(expires_when_idle)
        queue: Queue[Any] = Queue(self._registry, destination, codec_of(codec))
        if expires_when_idle is not None:
            self._idle_queues.add(queue, expires_when_idle)
        return queue

    @overload
    def topic(self, name: Address, *, codec: None = None) -> Topic: ...

    @overload
    def topic(self, name: Address, *, codec: str) -> Topic[Any]: ...

    @overload
    def topic(self, name: Address, *, codec: Codec[T]) -> Topic[T]: ...

    def topic(self, name: Address, *, codec: str | Codec[Any] | None = None) -> Topic[Any]:
        """Return the topic of that name (`prices.eu` or `topic://prices.eu`). A `codec` and errors are as for `queue`;
        the codec is its subscriptions' too."""
        self._registry.require_open()
        destination = topic_of(name)
        self._registry.route(destination)
        return Topic(self._registry, destination, codec_of(codec))

    @overload
    def map(self, name: Address, *, codec: None = None) -> Map: ...

    @overload
    def map(self, name: Address, *, codec: str) -> Map[Any]: ...

    @overload
    def map(self, name: Address, *, codec: Codec[T]) -> Map[T]: ...

    def map(self, name: Address, *, codec: str | Codec[Any] | None = None) -> Map[Any]:
        """Return the map of that name (`results` or `map://results`), of keyed values. A `codec` and errors are as for
        `queue`. Nothing is created before the first value."""
        self._registry.require_open()
        destination = map_of(name)
        self._registry.route(destination)
        return Map(self._registry, destination, codec_of(codec))

    @overload
    def send(
        self,
        destination: Endpoint[T],
        body: T | Readable | LargeBody,
        headers: Headers | None = ...,
        message_id: str | None = ...,
        **options: Unpack[SendOptions],
    ) -> list[Receipt]: ...

    @overload
    def send(
        self,
        destination: str | Destination,
        body: bytes | Readable | LargeBody,
        headers: Headers | None = ...,
        message_id: str | None = ...,
        **options: Unpack[SendOptions],
    ) -> list[Receipt]: ...

    def send(
        self,
        destination: Address,
        body: Any,
        headers: Headers | None = None,
        message_id: str | None = None,
        **options: Unpack[SendOptions],
    ) -> list[Receipt]:
        """Send to one destination, or to all parts of a composite (`queue://a,topic://b`) as one transaction: to all of
        them or to none, whichever stores they live in. The rest is as in Transaction.send."""
        with self.transaction() as transaction:
            transaction.send(destination, body, headers, message_id, **options)
            return transaction.commit()

    @overload
    def receive(
        self, pattern: Endpoint[T], timeout: float | None = 0, *, lease: float | None = None, codec: None = None
    ) -> Message[T] | None: ...

    @overload
    def receive(
        self, pattern: str | Destination, timeout: float | None = 0, *, lease: float | None = None, codec: None = None
    ) -> Message | None: ...

    @overload
    def receive(
        self, pattern: Address, timeout: float | None = 0, *, lease: float | None = None, codec: str
    ) -> Message[Any] | None: ...

    @overload
    def receive(
        self, pattern: Address, timeout: float | None = 0, *, lease: float | None = None, codec: Codec[T]
    ) -> Message[T] | None: ...

    def receive(
        self,
        pattern: Address,
        timeout: float | None = 0,
        *,
        lease: float | None = None,
        codec: str | Codec[Any] | None = None,
    ) -> Message[Any] | None:
        """Lease a message of one of the queues that a pattern names (`orders.>`, `queue://*.eu`), waiting up to
        `timeout` seconds for one (None: for ever). `lease` is as in Queue.receive. With a `codec` the body is decoded,
        as for a queue.

        Each queue that has messages has its turn, in its own order, and is one of many: a receive costs the same
        however many there are. Queues that are sent to for the first time meanwhile belong to the pattern. A consumer
        of one queue alone comes first there. A store that fails, or cannot be opened, is skipped, and logged; so is,
        for as long, a queue that moves. A pattern may match dead letters: `>` does. A name without wildcards is that
        queue.

        Raises DestinationError for a text that is no pattern of queues, NoRouteError for one that no queue can match
        since no store takes any, and as Queue.receive. Where none matches yet, and the timeout is None, a warning in
        the log says so once, with a pattern that may have been meant.
        """
        return self._patterns.receiver(pattern, timeout, lease, codec)()

    @overload
    def consume(
        self, pattern: Endpoint[T], timeout: float | None = None, *, lease: float | None = None, codec: None = None
    ) -> Iterator[Message[T]]: ...

    @overload
    def consume(
        self,
        pattern: str | Destination,
        timeout: float | None = None,
        *,
        lease: float | None = None,
        codec: None = None,
    ) -> Iterator[Message]: ...

    @overload
    def consume(
        self, pattern: Address, timeout: float | None = None, *, lease: float | None = None, codec: str
    ) -> Iterator[Message[Any]]: ...

    @overload
    def consume(
        self, pattern: Address, timeout: float | None = None, *, lease: float | None = None, codec: Codec[T]
    ) -> Iterator[Message[T]]: ...

    def consume(
        self,
        pattern: Address,
        timeout: float | None = None,
        *,
        lease: float | None = None,
        codec: str | Codec[Any] | None = None,
    ) -> Iterator[Message[Any]]:
        """Yield each message of these queues, leased, one after the other, until none has come for `timeout` seconds
        (None: for ever). Otherwise as `receive`."""
        return iter(self._patterns.receiver(pattern, timeout, lease, codec), None)

    def listen(
        self,
        queues: Address | Iterable[Address],
        on_message: Callable[[Message[Any]], object],
        credit: int = 1,
        *,
        on_end: Callable[[Exception], object] | None = None,
        lease: float | None = None,
        codec: str | Codec[Any] | None = None,
    ) -> Listener:
        """Call `on_message` with each message of these queues, leased, up to `credit` of them in all. `queues` is a
        pattern or a queue, or several of them; those that are sent to for the first time later belong to it too.

        Each queue that has messages has its turn, as in `receive`; what else is promised is as in Queue.listen. The
        stores are opened, and may be closed for being idle meanwhile. One that fails is skipped, and logged: the
        listener ends when the router is closed. With a `codec` bodies are decoded; without one, those of a queue that
        is given as an object are, by its own.

        Raises as `receive` and Queue.listen, and ValueError if no queue is named.
        """
        self._registry.require_open()
        require_callbacks(on_message, on_end)
        if lease is not None:
            require_lease(lease, "lease")
        patterns, heard = Patterns.of(queues), decoded(queues, on_message, codec)
        for pattern in patterns.all:
            self._registry.routing.require_queues(pattern)
        return self._listen(patterns, heard, credit, on_end, lease)

    listen_nowait: Final = in_background(listen)

    def _listen(self, patterns: Patterns, *how: Any) -> Listener:
        return PatternListener(self._registry, self._patterns, patterns, *how)

    def subscriptions(self) -> list[Subscription]:
        """Return all durable subscriptions, in order of topic, client and name."""
        self._begin("subscriptions")
        return sorted(self._registry.subscriptions(), key=lambda s: (s.topic.name, *s.key))

    def sweep(self) -> int:
        """Move messages that are not delivered any more (expired, or at the delivery limit) to their dead-letter queue,
        or drop them, now; returns how many. Happens by itself each second."""
        self._begin("sweep")
        return self._sweeper.run()

    def requeue(self, letters: Message[Any] | Iterable[Message[Any]] | Address, limit: int | None = None) -> int:
        """Put dead letters back where they came from; returns how many.

        Received messages go back all in one transaction. A queue is emptied in order, at most `limit` of it, in many
        transactions of some 100 messages and 4 MiB. Each has its `message_id`, its headers without those that begin
        with `dead_letter_`, and its priority again; its count of deliveries and its time begin anew. The duplicate
        window drops none of them. A message that comes from a subscription goes to its topic, so to all its
        subscriptions.

        Raises DeadLetterError for a message that is no dead letter or has nowhere to go, which stays leased, or in the
        queue with all behind it. Other errors are those of Transaction.commit; the messages are then free again. A note
        of the error says how many of a queue had been put back.
        """
        self._registry.require_open()
        if isinstance(letters, str | Destination | Endpoint):
            letters = self.queue(letters)
        return requeue_given(self._registry, self._unlimited, letters, limit)

    # Transactions

    def transaction(self, xid: Xid | None = None) -> Transaction:
        """Begin a transaction over any stores; see transactions/. With an `xid` it is an external one, which can be
        prepared. Raises TransactionError for an xid that is in use, and at the limit of open transactions."""
        self._registry.require_open()
        return Transaction(self._coordinator, self._registry, xid if xid is None else as_xid(xid))

    def _unlimited(self, xid: Xid | None = None) -> Transaction:
        """Begin a transaction of our own, or one that a client has gathered, which holds what it must."""
        self._registry.require_open()
        return Transaction(self._coordinator, self._registry, xid, limited=False)

    def join(self, manager: Any = None, xid: Xid | None = None) -> DataManager:
        """Take part in the current transaction of the `transaction` package, of its thread's manager or of the one
        given; see data_manager.py. A router that is joined already returns the same data manager again.

        With an `xid` the transaction outlives a process that ends in the middle of the commit. Raises MissingExtraError
        without the extra `transaction`, and what `transaction` raises.
        """
        self._registry.require_open()
        return join(self, manager, xid)

    def connection(self) -> Connection:
        """Return a connection, which runs transactions under the names of Python's DB-API (PEP 249); see dbapi.py."""
        self._registry.require_open()
        return Connection(self)

    def commit(self, xid: Xid, one_phase: bool = False) -> None:
        """Commit a prepared external transaction, or with `one_phase` one that is open and not prepared.

        The commit stands on return, whatever becomes of a store meanwhile (in_doubt shows that). Said again it changes
        nothing. Raises TransactionError for a transaction that is not prepared here, or was rolled back, and
        TransactionInDoubt. A transaction that has ended is not prepared any more once all its stores have it on disk.
        """
        self._registry.require_open()
        self._outcomes.commit(as_xid(xid), one_phase)

    def rollback(self, xid: Xid) -> None:
        """Roll back an external transaction, prepared or open. Otherwise as `commit`."""
        self._registry.require_open()
        self._outcomes.rollback(as_xid(xid))

    def recover(self) -> list[Xid]:
        """Return the external transactions that are prepared and wait for commit or rollback, oldest first. Raises
        StoreFailedError if the decision log cannot be read, or an SQL store with a lease cannot tell, and
        StoreLockedError if another node has such a store now: ask there."""
        self._registry.require_open()
        return self._outcomes.held()

    def in_doubt(self) -> list[InDoubt]:
        """Return the transactions that are prepared in some store and wait: for their manager, for a store that has
        failed, for an outcome from you. Opens all stores."""
        self._registry.require_open()
        return self._outcomes.in_doubt()

    def resolve(self, transaction: str, outcome: Outcome) -> None:
        """Decide by hand, `commit` or `rollback`, a transaction of in_doubt() that has no outcome and gets none
        otherwise. The decision is recorded, and kept until forget(). Raises TransactionError."""
        self._registry.require_open()
        self._outcomes.resolve(transaction, outcome)

    def heuristics(self) -> list[Heuristic]:
        """Return the outcomes that were decided by hand and not forgotten since, oldest first."""
        self._registry.require_open()
        return self._outcomes.heuristics()

    def forget(self, transaction: str) -> None:
        """Drop the record of an outcome that was decided by hand. Raises TransactionError."""
        self._registry.require_open()
        self._outcomes.forget(transaction)

    def reopen_decisions(self) -> None:
        """Read the decision log again after it has failed or was moved away (invariant 7). Raises CorruptionError."""
        self._begin("reopen_decisions")
        self._coordinator.reopen()

    def ack(self, messages: Message[Any] | Iterable[Message[Any]]) -> None:
        """Ack leased messages; those of one store as one, with one wait for the disk.

        If a store raises, messages of other stores may have been acked before.
        """
        for store, of_store in by_store(messages):
            store.ack(of_store)

    def ack_nowait(self, messages: Message[Any] | Iterable[Message[Any]]) -> Future[None]:
        """Ack without waiting: the future resolves, on a thread of ours, once all are acked, or with the first error of
        a store."""
        return settle_nowait(messages, lambda store, of_store: store.ack_nowait(of_store))

    def release(
        self,
        messages: Message[Any] | Iterable[Message[Any]],
        delivered: bool = True,
        delay: float | None = None,
        reason: Reason | None = None,
    ) -> None:
        """Give leased messages back, as Message.release; otherwise as `ack`."""
        for store, of_store in by_store(messages):
            store.release(of_store, delivered, delay, reason)

    def release_nowait(
        self,
        messages: Message[Any] | Iterable[Message[Any]],
        delivered: bool = True,
        delay: float | None = None,
        reason: Reason | None = None,
    ) -> Future[None]:
        """Give leased messages back without waiting, as `ack_nowait`."""
        return settle_nowait(messages, lambda store, of_store: store.release_nowait(of_store, delivered, delay, reason))

    def reject(self, message: Message[Any], reason: Reason = REJECTED) -> None:
        """Put a leased message into its store's dead-letter queue, as Message.reject."""
        self._registry.require_open()
        self._sweeper.reject(message, reason)

    def _reject_within(self, transaction: Transaction, message: Message[Any], reason: Reason) -> None:
        """Reject a message when a transaction commits. For that."""
        self._sweeper.reject_within(transaction, message, reason)

    def _spent(self, store: Store) -> None:
        """Dead-letter messages of a store soon, as Rejecting._spent. For stores."""
        self._sweeper.spent(store)

    def _is_elsewhere(self, destination: Destination, store_id: bytes) -> bool:
        """Return whether a destination is recorded in another store than that. For stores."""
        row = self._registry.table.destinations.get(destination)
        return row is not None and row.store_id != store_id

    @overload
    def settle(  # type: ignore[overload-overlap]
        self,
        tokens: str,
        how: Settlement,
        reason: Reason | None = ...,
        *,
        delivered: bool = ...,
        delay: float | None = ...,
    ) -> None: ...

    @overload
    def settle(
        self,
        tokens: Iterable[str],
        how: Settlement,
        reason: Reason | None = ...,
        *,
        delivered: bool = ...,
        delay: float | None = ...,
    ) -> list[AnabranchError | None]: ...

    def settle(
        self,
        tokens: str | Iterable[str],
        how: Settlement,
        reason: Reason | None = None,
        *,
        delivered: bool = True,
        delay: float | None = None,
    ) -> list[AnabranchError | None] | None:
        """Ack, release or reject leased messages by their tokens (Message.token), from any thread. The `reason` is as
        in Message.reject and Message.release; `delivered` and `delay` are as in Message.release.

        For many tokens this returns the error of each, None where there was none, and settles the others. Tokens of one
        store are settled together, with one wait for the disk, but each rejected one on its own. For one token the
        error is raised. UnknownMessageError names a text that is no token, a token whose store this router has not or
        has closed since, and one whose message is not leased any more. Raises TypeError for what is no text or no
        Settlement, and TypeError and ValueError for what is no time to wait.
        """
        self._registry.require_open()
        return self._tokens.settle(tokens, way_of(how, reason, delivered, delay))

    def settle_nowait(
        self,
        tokens: str | Iterable[str],
        how: Settlement,
        reason: Reason | None = None,
        *,
        delivered: bool = True,
        delay: float | None = None,
    ) -> Future[list[AnabranchError | None]]:
        """Settle without waiting: the future resolves on a thread of ours, with a list for one token too."""
        self._registry.require_open()
        return self._tokens.settle_nowait(tokens, way_of(how, reason, delivered, delay))

    def destinations(self, prefix: str = "") -> list[Destination]:
        """Return all destinations that have been declared, sent to or subscribed to and not deleted, in order of their
        text. With a prefix, those whose text begins with it (`queue://orders.`). No store is asked: after a crash a
        destination may be named that had just been deleted, until its store is opened."""
        self._registry.require_open()
        if not isinstance(prefix, str):
            raise TypeError(f"a prefix of destinations is a str, not {type(prefix).__name__}: {prefix!r}")
        return sorted((d for d in list(self._registry.table.destinations) if str(d).startswith(prefix)), key=str)

    def exists(self, destination: Address) -> bool:
        """Return whether a destination has been declared, sent to or subscribed to and not deleted. No store is asked,
        as by `destinations`."""
        self._registry.require_open()
        return resolve(destination) in self._registry.table.destinations

    def delete(self, destination: Address) -> int:
        """Remove a destination and its messages; returns how many."""
        self._registry.require_open()
        return Endpoint(self._registry, resolve(destination)).delete()

    def stats(self) -> RouterStats:
        """Return statistics of every store that exists; those that are not open are opened for it. An open store that
        does not answer within a second is named in `unresponsive`; its latest answer stands for it, if there is one. So
        it does for a store that cannot be used, with the reason in its `failed`; without one its figures are 0."""
        self._begin("stats")
        stores, unresponsive = self._registry.stats()
        dropped = self._sweeper.dropped + sum(store.dropped for store in stores.values())
        return RouterStats(stores, self._coordinator.log.syncs, self._sweeper.dead_lettered, dropped, unresponsive)

    def health(self) -> Health:
        """Return whether all stores can be used, and what those wait for that cannot. All are opened for it, and put on
        disk what they have written. One that has not done so after five seconds is `stalled`."""
        self._begin("health")
        return health(self._registry, self._outcomes.in_doubt, self._coordinator.log.unusable)

    def reclaim(self) -> int:
        """Free what can be freed now in all open stores; returns bytes. This happens by itself in the background.

        Raises the first error of a store after trying all.
        """
        self._begin("reclaim")
        return space.reclaim(self._registry)

    def compact(self, store: str | None = None) -> int:
        """Free also the space for which live records have to be copied, now, in all open stores or in those of one
        name; returns bytes. Mostly dead segments of a journal are compacted by themselves in the background if that
        pays (`compact_live_percent`). Here less is enough, and a journal's index and SQLite's file become as small as
        their content. Others send and receive meanwhile; while such a file is written anew, which takes seconds for
        each GiB, they wait.

        Raises the first error of a store after trying all, ConfigError if no open store has this name.
        """
        self._begin("compact")
        return space.compact(self._registry, store)

    def on_event(self, on_event: Callable[[Event], object]) -> EventListener:
        """Call a function with events from now on that no call returns: MessageExpired, MessageDeadLettered,
        MessageDropped, StoreFailed, StoreOpened.

        The calls are made on background threads of the library, one event after the other, until the listener that is
        returned is closed. Nothing waits for them: 1,000 events wait for a slow function, further ones are counted
        (`listener.dropped`). An error that the function raises is logged. Raises TypeError for what cannot be called.
        """
        self._registry.require_open()
        return self._events.listen(on_event)

    # Recording usage

    def start_usage_log(self, options: UsageOptions | Mapping[str, Any] | None = None) -> None:
        """Record from now on who is sent what and when it is acked, for the advisor (usage/). `options` may be a
        mapping, as in stores.yaml; without them the configuration's count, or the defaults. A recording that is under
        way ends first.

        A later failure disturbs no send and no ack: `usage_stats` tells of it, and it is logged. Raises
        StoreLockedError, ConfigError, StoreFullError, CorruptionError; then nothing is recorded. For wrong options it
        raises ConfigError, or TypeError, and has done nothing.
        """
        self._begin("start_usage_log")
        self._usage.start(options)

    def stop_usage_log(self) -> None:
        """Stop recording. All that was recorded is on disk on return, unless the disk has not answered for 10 seconds,
        which is logged. Does nothing if nothing is recorded."""
        self._begin("stop_usage_log")
        self._usage.stop()

    def usage_stats(self) -> UsageStats | None:
        """Return the statistics of the usage log, or why it could not be started; None if there is none."""
        self._registry.require_open()
        return self._usage.stats()

    # Moving

    def repartition(
        self,
        config: str | Path | Config,
        progress: Callable[[int, int], None] | None = None,
        *,
        restart: bool = False,
        prepared_seconds: float = 30.0,
    ) -> Repartitioned:
        """Move all destinations to where another configuration of this data directory routes them, while they are used;
        returns what was moved, and the names of stores that were removed. Afterwards the router goes by that
        configuration: stores that are open keep their options, and `transactions` and `usage` theirs, until they are
        opened again.

        Senders and receivers do not notice, but for those of the destination that moves just then: they wait while its
        last few messages are copied. A leased message of it is acked, released or rejected as before, open transactions
        and listeners go on; messages have other seqs. A new destination goes where the new configuration routes it from
        the beginning on. A browse of the moving destination raises ClosedError.

        `progress` is called with how many messages have moved, and how many there are to move, on the thread that moves
        them. It must not wait for a destination that may be on its way. A destination that a prepared transaction would
        change waits for its outcome up to `prepared_seconds`. `restart`: an interrupted call for another configuration
        is not gone on with.

        Raises PlacementError before anything is changed, as `anabranch repartition` does. Raises it at the end, with
        their names, for destinations that a prepared transaction would change, or that have transient messages: these
        could not be moved. Any other error (StoreFullError, StoreFailedError, CorruptionError) ends it. Whatever is
        raised, each destination is in one store, in use. A note of the error says which have moved, and the next call
        goes on from there; so it does after Ctrl-C, and after `close`, which stops it. Until then no router opens the
        directory, unless `anabranch repartition` finishes it. Raises TransactionError if it is under way already.
        """
        self._begin("repartition")
        return self._moves.run(config, progress, restart, prepared_seconds)

    def serve(self, linger: float | None = None) -> Serving:
        """Let other processes of this user use the directory through this router: `anabranch.open(DIR, shared=True)`
        connects to it, and so do the commands. Until the server that is returned is stopped, or the router closed; with
        `linger` it ends so many seconds after its last client has gone.

        Every open router lets others in by itself, unless its configuration says `control: false`: a server comes with
        the first of them and goes with the last one. This is for who has said so, or wants to know when all have gone.

        Serving takes a part of what this process can do: where that is busy, `anabranch serve` is a process for it
        alone. Raises ConfigError for a directory in which no socket can be, and StoreFullError for one that has no
        room now.
        """
        self._begin("serve")
        assert self._others is not None
        return self._others.serve(linger)

    def _sessions(self) -> list[dict[str, Any]]:
        """Return who is connected, and what each holds."""
        return self._others.sessions() if self._others is not None else []

    def reopen(self, name: str) -> None:
        """Close a store that has failed and open it again, which recovers it (invariant 7)."""
        self._begin("reopen")
        self._registry.reopen(name)


def inspection_of(router: Router) -> Inspection:
    """Return what the commands ask of a router. Not for users: it may change."""
    return router._inspection
