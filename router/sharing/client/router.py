"""The router of a shared directory as its clients have it: Router's own methods, over parts that ask the owner."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

import msgspec

from ....adapters.core.messages import Message
from ....adapters.core.store_types import Listener, StoreStats, Subscription
from ....adapters.system.acceleration import log_parts
from ....adapters.system.durations import Durations
from ....adapters.system.locking import owner_of
from ....policies.config.options import is_shared, refused_to_clients
from ....policies.errors import ClosedError, StoreLockedError
from ....policies.names.destination import Destination
from ... import events as kinds
from ...api.addresses import Address, queue_of
from ...api.codecs import Codec, codec_of, wrap_any
from ...api.consumer import require_timeout
from ...api.endpoint import Endpoint
from ...api.patterns import Patterns, parsed_queues
from ...api.queue import Queue
from ...api.settling import Results, TokenSettler, Way, listed
from ...events import Event, EventListener, Events
from ...migration.repartition import Repartitioned
from ...placement.on_disk.directories import require_directories
from ...router import Router, RouterStats, Serving
from ...upkeep.health import Health
from ...upkeep.requeue import requeue_given
from ...usage import UsageStats
from .. import starting
from .connection import Connection
from .exchange import Exchange
from .greeting import PATIENCE, Greeter
from .inspecting import RemoteInspection
from .registry import RemoteRegistry
from .store import RemoteStore
from .transactions import RemoteCoordinator, RemoteOutcomes

if TYPE_CHECKING:
    from ....policies.config import Config, UsageOptions

log: logging.Logger = logging.getLogger(__name__)

_KINDS: Final[dict[str, type[Event]]] = {
    name: one for name, one in vars(kinds).items() if isinstance(one, type) and issubclass(one, Event)
}


class RemoteEvents(Events):
    """The listeners of one client. The owner is asked for its events once there is one."""

    def __init__(self, store: RemoteStore) -> None:
        super().__init__()
        self._store = store
        store.on_event = self._heard

    def listen(self, on_event: Callable[[Event], object]) -> EventListener:
        """Add a listener. Raises TypeError for what cannot be called."""
        listener = super().listen(on_event)
        self._store.stand("events")
        return listener

    def _heard(self, packed: list[Any]) -> None:
        name, fields = packed
        if name in _KINDS:  # else a newer owner has told of it
            self.tell(msgspec.convert(fields, _KINDS[name]))


class _Tokens(TokenSettler):
    def __init__(self, store: RemoteStore) -> None:
        self._remote = store

    def _settled(self, tokens: Sequence[str], way: Way) -> Results:
        return self._remote.settle(tokens, way.how, way.delivered, way.delay, way.reason)

    def settle_nowait(self, given: str | Iterable[str], way: Way) -> Future[Results]:
        return self._remote.settle_nowait(listed(given), way.how, way.delivered, way.delay, way.reason)


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


def _repartitioned(
    store: RemoteStore, config: Any, progress: Callable[[int, int], None] | None, restart: bool, prepared_seconds: float
) -> Repartitioned:
    if not isinstance(config, str | Path):
        raise TypeError(
            f"a shared directory is repartitioned by its owner, another process: give the path of a file, not "
            f"{type(config).__name__}"
        )
    path = str(Path(config).absolute())
    done = msgspec.convert(store.call("repartition", path, restart, prepared_seconds), Repartitioned)
    if progress is not None:
        count = sum(move.messages for move in done.moves)
        progress(count, count)
    return done


LOOKING_PATIENCE: Final = 10.0
"""Seconds for which who only looks in waits for an answer."""


class NoOwnerError(ClosedError):
    """No process serves the directory any more, and none was to be started."""


def _start(config: Config) -> None:
    """Start an owner, as starting.start. Raises StoreLockedError where a process has the directory for itself."""
    try:
        starting.start(config)
    except StoreLockedError as error:
        lock = config.directory / "router.lock"
        if error.path != str(lock):  # that of a log in another directory
            raise
        holder = owner_of(lock)
        raise StoreLockedError(
            f"{config.directory} is open already, by {holder}. That process serves nobody: its configuration says "
            "`control: false`, or it is not ready yet. Close the directory there, or open it there without "
            "`control: false` or with shared=True"
        ) from None


def _refuse(config: Config) -> None:
    raise NoOwnerError(f"the process that had {config.directory} open has closed it, or has ended; try again")


class SharedRouter(Router):
    """A Router over the directory's owner, which is another process."""

    _connection_type: Callable[..., Exchange] = Connection

    def __init__(self, config: Config, starts: bool = True) -> None:
        """Make a router that is not connected yet. `starts`: an owner is started where there is none."""
        self._starts = starts
        self._store = store = RemoteStore(config.directory, self)
        self._registry = registry = RemoteRegistry(config, store)  # type: ignore[assignment]
        self._coordinator = RemoteCoordinator(config, store, registry)
        self._outcomes = RemoteOutcomes(self._coordinator, store)
        self._sweeper = SimpleNamespace(  # type: ignore[assignment]
            run=partial(store.call, "sweep"), reject=store.reject, reject_within=store.reject_within
        )
        self._tokens = _Tokens(store)
        self._patterns = _Patterns(registry, store)  # type: ignore[assignment]
        self._events = RemoteEvents(store)
        self._idle_queues = SimpleNamespace(  # type: ignore[assignment]
            add=lambda queue, seconds: store.stand("expires_when_idle", str(queue.destination), seconds)
        )
        self._moves = SimpleNamespace(run=partial(_repartitioned, store))  # type: ignore[assignment]
        self._inspection = RemoteInspection(store)  # type: ignore[assignment]

    def open(self, progress: Any = None) -> Router:
        """Connect to the owner; one is started if there is none, where this is for that. Raises NoOwnerError."""
        log_parts()
        require_directories(self.config)
        directory = self.config.directory
        start, patience = (_start, PATIENCE) if self._starts else (_refuse, LOOKING_PATIENCE)
        greeter = Greeter(partial(start, self.config), patience)
        self._store.connect(self._connection_type(directory, greeter, self._store.held))
        self._registry.opened = True
        if self._starts:
            for store in self.config.stores:
                if is_shared(store.options):
                    log.warning("%s: %s", directory, refused_to_clients(store.name))
        if self._starts and self._store.call("configuration") != starting.mark_of(self.config):
            log.warning(
                "%s is used as its owner, process %d, was told when it started, and not as the configuration says that "
                "this process gives: end the owner, and the next one goes by it",
                directory, self._store.connection.owner_pid,
            )  # fmt: skip
        return self

    def _close(self) -> None:
        """Close the connection. What this client holds is given back."""
        self._registry.opened = False
        self._store.close()

    def _listen(self, patterns: Patterns, *how: Any) -> Listener:
        return self._store.listen_to_all(list(map(str, patterns.all)), *how)

    def __repr__(self) -> str:
        return f"<Router of {self.config.directory}, shared>"

    def serve(self, linger: float | None = None) -> Serving:
        """Refuse: the owner serves. Raises StoreLockedError, which names it."""
        self._begin("serve")
        raise StoreLockedError(
            f"{self.config.directory} is served by process {self._store.connection.owner_pid} already; this router is "
            "a client of it"
        )

    def stats(self) -> RouterStats:
        """Return statistics of every store, as Router.stats."""
        self._begin("stats")
        fields = self._store.call("stats")
        stores = {name: _stats_of(one) for name, one in fields["stores"].items()}
        return RouterStats(**{**fields, "stores": stores, "unresponsive": tuple(fields["unresponsive"])})

    def health(self) -> Health:
        """Return whether all stores can be used, as Router.health."""
        self._begin("health")
        return msgspec.convert(self._store.call("health"), Health)

    def reclaim(self) -> int:
        """Free what can be freed, as Router.reclaim."""
        self._begin("reclaim")
        return int(self._store.call("reclaim"))

    def compact(self, store: str | None = None) -> int:
        """Free more, as Router.compact."""
        self._begin("compact")
        return int(self._store.call("compact", store))

    def requeue(self, letters: Any, limit: int | None = None) -> int:
        """Put dead letters back, as Router.requeue."""
        self._registry.require_open()
        if isinstance(letters, str | Destination | Endpoint):
            return int(self._store.of("requeue", self.queue(letters).destination, limit))
        return requeue_given(self._registry, self._unlimited, letters, limit)

    def start_usage_log(self, options: UsageOptions | Mapping[str, Any] | None = None) -> None:
        """Let the owner record usage, as Router.start_usage_log."""
        self._begin("start_usage_log")
        self._store.call("start_usage_log", None if options is None else msgspec.to_builtins(options))

    def stop_usage_log(self) -> None:
        """Let the owner stop recording."""
        self._begin("stop_usage_log")
        self._store.call("stop_usage_log")

    def usage_stats(self) -> UsageStats | None:
        """Return the statistics of the owner's usage log."""
        self._registry.require_open()
        return msgspec.convert(self._store.call("usage_stats"), UsageStats | None)


def _stats_of(fields: dict[str, Any]) -> StoreStats:
    fields["destinations"] = dict(msgspec.convert(fields["destinations"], list[tuple[Destination, int]]))
    fields["subscriptions"] = dict(msgspec.convert(fields["subscriptions"], list[tuple[Subscription, int]]))
    fields["sync_durations"] = msgspec.convert(fields["sync_durations"], Durations)
    return StoreStats(**fields)
