"""The router of a shared directory as its clients have it: Router's own methods, over parts that ask the owner."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from ...adapters.core.messages import Message, Reason
from ...adapters.core.state.leases import ROLLED_BACK
from ...adapters.core.store_types import StoreStats, Subscription
from ...adapters.system.acceleration import log_parts
from ...policies.errors import AnabranchError, ClosedError, TransactionError, UnknownMessageError, router_closed
from ...policies.names.destination import Destination
from ..api.addresses import Address, queue_of
from ..api.codecs import Codec, codec_of, wrap_any
from ..api.consumer import require_timeout
from ..api.endpoint import Endpoint
from ..api.pattern_consumers import parsed_queues
from ..api.queue import Queue
from ..api.settling import Way
from ..migration.repartition import Repartitioned
from ..placement.attempt import Attempt
from ..placement.routing import Routing
from ..router import Router, RouterStats
from ..transactions.coordinator import Coordinator
from ..transactions.global_transaction import GlobalTransaction
from ..transactions.outcomes import Heuristic, InDoubt, Outcomes
from ..transactions.states import DONE, IN_DOUBT, PREPARED, PREPARING, Outcome
from ..transactions.table import TransactionTable
from ..transactions.xid import Xid
from ..upkeep.dead_letters import require_message
from ..upkeep.requeue import requeue_given
from ..usage import UsageStats
from . import owner
from .calls import mark_of, subscription_of
from .connection import PATIENCE, Connection
from .inspecting import RemoteInspection
from .protocol import Op
from .remote_events import RemoteEvents
from .remote_store import RemoteLease, RemoteStore
from .session import destination_of

if TYPE_CHECKING:
    from ...policies.config import Config, TransactionOptions, UsageOptions

log = logging.getLogger(__name__)

T = TypeVar("T")


class _Gates:
    """No destination moves as far as clients see: the owner follows it."""

    removals = moves = 0

    def __contains__(self, destination: Destination) -> bool:
        return False

    def wait(self, destination: Destination) -> None:
        """Return at once."""


class _Destinations:
    """The destinations that the owner has recorded."""

    def __init__(self, store: RemoteStore) -> None:
        self._store = store

    def __contains__(self, destination: Destination) -> bool:
        return bool(self._store._call("exists", destination))

    def __iter__(self) -> Iterator[Destination]:
        return iter([destination_of(text) for text in self._store.ask(Op.CALL, "destinations", "")])

    def __len__(self) -> int:
        return 0  # hints at slips, which are made for those that are known here, are the owner's


class _Table:
    def __init__(self, store: RemoteStore) -> None:
        self.destinations = _Destinations(store)
        self.stores = {store.store_id: None}


class _Removal:
    def __init__(self, store: RemoteStore) -> None:
        self._store = store

    def delete(self, destination: Destination) -> int:
        """Remove a destination; returns how many messages it had."""
        return self._store.delete(destination)


class _Found:
    """Finds the one store, whatever is looked for."""

    def __init__(self, store: RemoteStore) -> None:
        self.get = lambda destination, otherwise=None: store


class RemoteRegistry:
    """The places of destinations, as clients see them: all are the owner's."""

    records_late = False

    def __init__(self, config: Config, store: RemoteStore) -> None:
        self.config, self._store = config, store
        self.table = _Table(store)
        self.routing = Routing(config, self.table)  # type: ignore[arg-type]
        self.route = self.routing.route
        self.gates = _Gates()
        self.removal = _Removal(store)
        self.by_destination = _Found(store)
        self.opened = False

    @property
    def forked(self) -> bool:
        """False: a child connects anew."""
        return False

    def require_open(self) -> None:
        """Raise ClosedError if the router is closed."""
        if not self.opened:
            raise router_closed()

    def store_of(self, destination: Destination) -> RemoteStore:
        """Return the store."""
        self.require_open()
        self.route(destination)
        return self._store

    store_for = store_to_be = store_of

    def for_store(self, destination: Destination, call: Callable[[Any], T]) -> T:
        """Call with the store."""
        return call(self.store_of(destination))

    def for_held(self, destination: Destination, call: Callable[[Any], T], otherwise: T) -> T:
        """Call with the store: the owner knows whether it has the destination."""
        return call(self.store_of(destination))

    def attempt(self, destination: Destination, find: Callable[[Destination], Any]) -> Attempt[Any]:
        """Return an attempt that is not repeated."""
        return Attempt(partial(find, destination), lambda store, error: False)

    def subscriptions_of(self, topic: Destination) -> list[Subscription]:
        """Return the subscriptions of a topic."""
        return self._store.subscriptions_of(topic)

    def subscriptions(self) -> set[Subscription]:
        """Return all subscriptions."""
        return {subscription_of(one) for one in self._store.ask(Op.CALL, "subscriptions")}

    def option_for(self, destination: Destination, name: str) -> Any:
        """Return an option of the store that the configuration routes a destination to."""
        return getattr(self.route(destination).target.options, name, None)

    def require_own(self, message: Message[Any]) -> None:
        """Raise UnknownMessageError for a message of another router."""
        if message._store is not self._store:
            raise UnknownMessageError(f"{message!r} was received from another router; ack it there")

    def reopen(self, name: str) -> None:
        """Close a store and open it again."""
        self._store.ask(Op.CALL, "reopen", name)


class _NoDecisions:
    """Decisions are the owner's."""

    externals: Final[Mapping[bytes, Any]] = {}
    decisions: Final[Mapping[bytes, Any]] = {}


class _TransactionTable(TransactionTable):
    """The transactions of a client. The xids of those that are prepared are the owner's to know."""

    def __init__(self, options: TransactionOptions, store: RemoteStore) -> None:
        super().__init__(options, _NoDecisions())  # type: ignore[arg-type]
        self._store = store

    def _require_free(self, xid: Xid) -> None:
        super()._require_free(xid)
        if list(xid) in self._store.ask(Op.CALL, "recover"):
            raise TransactionError(
                f"xid {xid} is in use: commit or roll back that transaction first; each transaction "
                "needs one of its own"
            )


class RemoteCoordinator(Coordinator):
    """Transactions of a client: all of it goes to the owner at once, as to a single store that decides alone."""

    def __init__(self, config: Config, store: RemoteStore) -> None:
        self._store = store
        self.table = _TransactionTable(config.transactions, store)
        self.table.closed = False
        self._votes: dict[GlobalTransaction, int] = {}
        self._prepared: dict[Xid, list[RemoteLease]] = {}
        """What transactions of this client have acked that wait for their manager."""

    _registry: Any = None

    def open_with(self, registry: RemoteRegistry) -> None:
        """Know the registry."""
        self._registry = registry

    def prepare(self, transaction: GlobalTransaction) -> None:
        """Let the owner prepare it, and wait for the outcome."""
        transaction.move(PREPARING)
        (number,) = self._sent(transaction, None, "vote")
        self._votes[transaction] = number
        transaction.move(PREPARED)

    def hold(self, transaction: GlobalTransaction, xid: Xid) -> None:
        """Let the owner prepare it under its xid, and hold it."""
        transaction.move(PREPARING)
        self._sent(transaction, list(xid), "prepare")
        acks = [message for one in transaction.participants.values() for message in one.acks]
        self._prepared[xid] = self._store.prepared(acks)
        transaction.external = True
        transaction.move(PREPARED)
        transaction.running = False

    def _sent(self, transaction: GlobalTransaction, xid: list[Any] | None, mode: str) -> Any:
        sends, acks, changes = [], [], []
        for one in transaction.participants.values():
            sends += one.sends
            acks += one.acks
            changes += one.changes
        try:
            return self._store.commit_as(sends, acks, changes, xid, mode)
        except Exception:
            self.roll_back(transaction)
            raise

    def _commit_prepared(self, transaction: GlobalTransaction) -> None:
        self._end_vote(transaction, commit=True)

    def roll_back(self, transaction: GlobalTransaction) -> None:
        """Roll back. Never raises but for a signal."""
        if transaction in self._votes:
            self._end_vote(transaction, commit=False)
            return
        if transaction.state is DONE:
            return
        transaction.decide(False)
        for participant in transaction.participants.values():
            participant.unclaim()
            participant.carried_out = True
        transaction.move(DONE)

    def _end_vote(self, transaction: GlobalTransaction, commit: bool) -> None:
        number = self._votes.pop(transaction)
        participants = list(transaction.participants.values())
        acks = [message for one in participants for message in one.acks]
        if commit:
            transaction.move(IN_DOUBT)
        try:
            receipts = self._store.end_vote(number, commit, acks, [s for one in participants for s in one.sends])
        except AnabranchError:
            transaction.decide(False)
            if commit:
                raise
            receipts = []
        else:
            transaction.decide(commit)
        for one in participants:
            one.receipts, receipts = receipts[: len(one.sends)], receipts[len(one.sends) :]
            one.carried_out = True
        transaction.move(DONE)

    def note_end(self, xid: Xid, commit: bool) -> None:
        """Note that a transaction was ended which had waited for its manager."""
        for lease in self._prepared.pop(xid, ()):
            lease.end = "" if commit else ROLLED_BACK

    def reopen(self) -> None:
        """Let the owner read its decisions again."""
        self._store.ask(Op.CALL, "reopen_decisions")

    def close(self) -> None:
        """Do nothing: what is open is rolled back with the connection."""


class _Outcomes(Outcomes):
    def __init__(self, coordinator: RemoteCoordinator, store: RemoteStore) -> None:
        self._ended, self._table = coordinator.note_end, coordinator.table
        self._ask = partial(store.ask, Op.CALL)

    def end(self, xid: Xid, commit: bool) -> None:
        if commit:
            self._ask("commit_xid", list(xid), False)
        else:
            self._ask("rollback_xid", list(xid))
        self._ended(xid, commit)

    def held(self) -> list[Xid]:
        return [Xid(*one) for one in self._ask("recover")]

    def in_doubt(self) -> list[InDoubt]:
        return msgspec.convert(self._ask("in_doubt"), list[InDoubt])

    def resolve(self, transaction: str, outcome: Outcome) -> None:
        self._ask("resolve", transaction, outcome)

    def heuristics(self) -> list[Heuristic]:
        return msgspec.convert(self._ask("heuristics"), list[Heuristic])

    def forget(self, transaction: str) -> None:
        self._ask("forget", transaction)


class _Sweeper:
    def __init__(self, store: RemoteStore) -> None:
        self._store = store

    def run(self) -> int:
        return int(self._store.ask(Op.CALL, "sweep"))

    def reject(self, message: Message[Any], reason: Reason) -> None:
        require_message(message)
        self._store.reject(message, reason)

    def spent(self, store: object) -> None:
        """Do nothing: the owner sees it."""


class _Tokens:
    def __init__(self, store: RemoteStore) -> None:
        self._store = store

    def settle(self, given: Any, way: Way) -> Any:
        tokens = [given] if isinstance(given, str) else list(given)
        results = self._store.settle(tokens, way.how, way.delivered, way.delay, way.reason)
        if not isinstance(given, str):
            return results
        if results[0] is not None:
            raise results[0]
        return None

    def settle_nowait(self, given: Any, way: Way) -> Future[Any]:
        tokens = [given] if isinstance(given, str) else list(given)
        return self._store.settle_nowait(tokens, way.how, way.delivered, way.delay, way.reason)


class _Patterns:
    def __init__(self, registry: RemoteRegistry, store: RemoteStore) -> None:
        self._registry, self._store = registry, store

    def receiver(
        self, pattern: Address, timeout: float | None, lease: float | None, codec: str | Codec[Any] | None
    ) -> Callable[[], Message[Any] | None]:
        self._registry.require_open()
        require_timeout(timeout)
        decoder = codec_of(codec)
        many = parsed_queues(pattern) if isinstance(pattern, str) else None
        if many is not None:
            return lambda: wrap_any(decoder, self._store.receive_pattern(str(pattern), timeout, lease))
        destination = queue_of(pattern)
        self._registry.route(destination)
        if decoder is None and isinstance(pattern, Endpoint):
            decoder = pattern._codec
        return partial(Queue(self._registry, destination, decoder).receive, timeout, lease=lease)  # type: ignore[arg-type]


class _IdleQueues:
    def __init__(self, store: RemoteStore) -> None:
        self._store = store

    def add(self, queue: Queue[Any], seconds: float) -> None:
        self._store.stand((Op.CALL, "expires_when_idle", str(queue.destination), seconds))


class _Moves:
    def __init__(self, store: RemoteStore) -> None:
        self._store = store

    def run(
        self, config: Any, progress: Callable[[int, int], None] | None, restart: bool, prepared_seconds: float
    ) -> Repartitioned:
        if not isinstance(config, str | Path):
            raise TypeError(
                f"a shared directory is repartitioned by its owner, another process: give the path of a file, not "
                f"{type(config).__name__}"
            )
        path = str(Path(config).absolute())
        done = msgspec.convert(self._store.ask(Op.CALL, "repartition", path, restart, prepared_seconds), Repartitioned)
        if progress is not None:
            count = sum(move.messages for move in done.moves)
            progress(count, count)
        return done


LOOKING_PATIENCE: Final = 10.0
"""Seconds for which who only looks in waits for an answer."""


class NoOwnerError(ClosedError):
    """No process serves the directory any more, and none was to be started."""


def _refuse(config: Config) -> None:
    raise NoOwnerError(f"the process that had {config.directory} open has closed it, or has ended; try again")


class SharedRouter(Router):
    """A Router over the directory's owner, which is another process."""

    def __init__(self, config: Config, starts: bool = True) -> None:
        """Make a router that is not connected yet. `starts`: an owner is started where there is none."""
        self._configuration = config
        self._starts = starts
        self._store = store = RemoteStore(config.directory, self)
        self._registry = registry = RemoteRegistry(config, store)  # type: ignore[assignment]
        self._coordinator = RemoteCoordinator(config, store)
        self._coordinator.open_with(registry)
        self._outcomes = _Outcomes(self._coordinator, store)
        self._sweeper = _Sweeper(store)  # type: ignore[assignment]
        self._tokens = _Tokens(store)  # type: ignore[assignment]
        self._patterns = _Patterns(registry, store)  # type: ignore[assignment]
        self._events = RemoteEvents(store)
        self._idle_queues = _IdleQueues(store)  # type: ignore[assignment]
        self._moves = _Moves(store)  # type: ignore[assignment]
        self._inspection = RemoteInspection(store)  # type: ignore[assignment]

    def open(self, progress: Any = None) -> Router:
        """Connect to the owner; one is started if there is none, where this is for that. Raises NoOwnerError."""
        log_parts()
        directory = self.config.directory
        start = partial(owner.start if self._starts else _refuse, self._configuration)
        self._store.connect(
            Connection(directory, start, self._store.held, PATIENCE if self._starts else LOOKING_PATIENCE)
        )
        self._registry.opened = True
        if self._starts and self._store.ask(Op.CALL, "configuration") != mark_of(self.config):
            log.warning(
                "%s is used as its owner, process %d, was told when it started, and not as the configuration says that "
                "this process gives: end the owner, and the next one goes by it",
                directory, self._store.connection.owner_pid,
            )  # fmt: skip
        return self

    def close(self) -> None:
        """Close the connection. What this client holds is given back. Idempotent."""
        self._registry.opened = False
        self._store.close()

    def __repr__(self) -> str:
        return f"<Router of {self.config.directory}, shared>"

    def stats(self) -> RouterStats:
        """Return statistics of every store, as Router.stats."""
        self._begin("stats")
        stores, syncs, dead_lettered, dropped, unresponsive = self._store.ask(Op.CALL, "stats")
        stats = {name: _stats_of(fields) for name, fields in stores.items()}
        return RouterStats(stats, syncs, dead_lettered, dropped, tuple(unresponsive))

    def reclaim(self) -> int:
        """Free what can be freed, as Router.reclaim."""
        self._begin("reclaim")
        return int(self._store.ask(Op.CALL, "reclaim"))

    def compact(self, store: str | None = None) -> int:
        """Free more, as Router.compact."""
        self._begin("compact")
        return int(self._store.ask(Op.CALL, "compact", store))

    def requeue(self, letters: Any, limit: int | None = None) -> int:
        """Put dead letters back, as Router.requeue."""
        self._registry.require_open()
        if isinstance(letters, str | Destination | Endpoint):
            return int(self._store._call("requeue", self.queue(letters).destination, limit))
        return requeue_given(self._registry, self._unlimited, letters, limit)

    def start_usage_log(self, options: UsageOptions | Mapping[str, Any] | None = None) -> None:
        """Let the owner record usage, as Router.start_usage_log."""
        self._begin("start_usage_log")
        self._store.ask(Op.CALL, "start_usage_log", None if options is None else msgspec.to_builtins(options))

    def stop_usage_log(self) -> None:
        """Let the owner stop recording."""
        self._begin("stop_usage_log")
        self._store.ask(Op.CALL, "stop_usage_log")

    def usage_stats(self) -> UsageStats | None:
        """Return the statistics of the owner's usage log."""
        self._registry.require_open()
        return msgspec.convert(self._store.ask(Op.CALL, "usage_stats"), UsageStats | None)


def _stats_of(fields: dict[str, Any]) -> StoreStats:
    fields["destinations"] = {destination_of(text): count for text, count in fields["destinations"]}
    fields["subscriptions"] = {subscription_of(one): count for one, count in fields["subscriptions"]}
    return StoreStats(**fields)
