"""Anabranch: embedded message persistence in partitioned durable stores.

    import anabranch

    with anabranch.open("stores.yaml") as router:
        orders = router.queue("orders.custom")
        orders.send(b"...", headers={"sku": "T-1"})      # returns once it is as durable as its store's policy says
        message = orders.receive(timeout=1.0)            # leased to this process until ack() or release()
        message.ack()

A router maps destination patterns to independent stores, each with its own journal, index and durability. Where to
read on: docs/configuration.md, docs/transactions.md, docs/invariants.md, docs/format.md.
"""

from typing import TYPE_CHECKING, Any

from .policies import platform_files as _platform_files  # noqa: F401  first: it refuses a platform that will not do

# isort: split
from .adapters.core.messages import Headers, HeaderValue, LargeBody, Message, Outgoing, Readable, Reason, Receipt
from .adapters.core.store_types import Counts, Listener, Progress, Settlement, StoreStats, Subscription, SubscriptionKey
from .adapters.system.acceleration import accelerated
from .adapters.system.durations import Durations
from .policies import config as _configs
from .policies.config.durability import OnCorruption, Sync
from .policies.config.when_full import WhenFull
from .policies.errors import (
    AnabranchError,
    ClockError,
    ClosedError,
    ConfigError,
    CorruptionError,
    DeadLetterError,
    DecodeError,
    DestinationError,
    LargeMessageError,
    MessageTooLargeError,
    MissingExtraError,
    NoRouteError,
    OutcomeUnknownError,
    OutOfDescriptorsError,
    PlacementError,
    Problem,
    SparkError,
    StoreFailedError,
    StoreFullError,
    StoreLockedError,
    SubscriptionError,
    TraceError,
    TransactionError,
    TransactionInDoubt,
    UnknownMessageError,
    UnknownSubscriptionError,
)
from .policies.names.destination import Destination, Kind
from .policies.names.pattern import Pattern
from .policies.names.routes import Match, RouteTable
from .router.api.addresses import Address
from .router.api.codecs import Codec
from .router.api.dead_letter import DeadLetter
from .router.api.endpoint import SendOptions
from .router.api.map import Map
from .router.api.queue import Queue
from .router.api.topic import Subscriber, Topic
from .router.api.transaction import Savepoint, Transaction
from .router.events import (
    Event,
    EventListener,
    MessageDeadLettered,
    MessageDropped,
    MessageEvent,
    MessageExpired,
    StoreFailed,
    StoreOpened,
)
from .router.held_routers import shared
from .router.hosts.dbapi import Connection, ProgrammingError
from .router.migration.plan import Move
from .router.migration.repartition import Repartitioned
from .router.opening import open as open
from .router.router import Router, RouterStats, Serving
from .router.transactions.outcomes import Heuristic, InDoubt
from .router.transactions.states import Outcome, TransactionState
from .router.transactions.xid import Xid
from .router.upkeep.health import Health, StoreHealth
from .router.usage import UsageStats

if TYPE_CHECKING:
    from .policies.config import (
        Config,
        JournalOptions,
        KindOptions,
        LimitOptions,
        MemoryOptions,
        Redelivery,
        SqlOptions,
        StoreConfig,
        TransactionOptions,
        UsageOptions,
    )
    from .router.hosts.data_manager import DataManager as DataManager

    __version__: str

__all__ = [
    "Address",
    "AnabranchError",
    "ClockError",
    "ClosedError",
    "Codec",
    "Config",
    "ConfigError",
    "Connection",
    "CorruptionError",
    "Counts",
    "DeadLetter",
    "DeadLetterError",
    "DecodeError",
    "Destination",
    "DestinationError",
    "Durations",
    "Event",
    "EventListener",
    "HeaderValue",
    "Headers",
    "Health",
    "Heuristic",
    "InDoubt",
    "JournalOptions",
    "Kind",
    "KindOptions",
    "LargeBody",
    "LargeMessageError",
    "LimitOptions",
    "Listener",
    "Map",
    "Match",
    "MemoryOptions",
    "Message",
    "MessageDeadLettered",
    "MessageDropped",
    "MessageEvent",
    "MessageExpired",
    "MessageTooLargeError",
    "MissingExtraError",
    "Move",
    "NoRouteError",
    "OnCorruption",
    "OutOfDescriptorsError",
    "Outcome",
    "OutcomeUnknownError",
    "Outgoing",
    "Pattern",
    "PlacementError",
    "Problem",
    "ProgrammingError",
    "Progress",
    "Queue",
    "Readable",
    "Reason",
    "Receipt",
    "Redelivery",
    "Repartitioned",
    "RouteTable",
    "Router",
    "RouterStats",
    "Savepoint",
    "SendOptions",
    "Serving",
    "Settlement",
    "SparkError",
    "SqlOptions",
    "StoreConfig",
    "StoreFailed",
    "StoreFailedError",
    "StoreFullError",
    "StoreHealth",
    "StoreLockedError",
    "StoreOpened",
    "StoreStats",
    "Subscriber",
    "Subscription",
    "SubscriptionError",
    "SubscriptionKey",
    "Sync",
    "Topic",
    "TraceError",
    "Transaction",
    "TransactionError",
    "TransactionInDoubt",
    "TransactionOptions",
    "TransactionState",
    "UnknownMessageError",
    "UnknownSubscriptionError",
    "UsageOptions",
    "UsageStats",
    "WhenFull",
    "Xid",
    "accelerated",
    "shared",
]
"""The names that `from anabranch import *` brings: all that is public but `open`, which would hide Python's own."""


def __dir__() -> list[str]:
    return sorted({"__version__", "open", *__all__, *(name for name in globals() if name.startswith("__"))})


if not TYPE_CHECKING:  # which would take any name for one of ours

    def __getattr__(name: str) -> Any:
        """Import what is asked for: the configuration, which takes long; DataManager, which needs the extra
        `transaction`; the version."""
        if name in __all__:
            return getattr(_configs, name)
        if name == "DataManager":
            from .router.hosts.data_manager import DataManager

            return DataManager
        if name == "__version__":
            from importlib.metadata import version

            return version(__name__)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
