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

import logging

from .adapters.acceleration import accelerated
from .adapters.base import (
    Counts,
    Headers,
    HeaderValue,
    Listener,
    Message,
    Outgoing,
    Progress,
    Receipt,
    Settlement,
    StoreStats,
    Subscription,
    SubscriptionKey,
)
from .policies.config import Config, JournalOptions, MemoryOptions, SqlOptions, StoreConfig, TransactionOptions
from .policies.destination import Destination
from .policies.durability import Sync
from .policies.errors import (
    AnabranchError,
    ClockError,
    ClosedError,
    ConfigError,
    CorruptionError,
    DeadLetterError,
    DestinationError,
    MessageTooLargeError,
    NoRouteError,
    OutcomeUnknownError,
    OutOfDescriptorsError,
    PlacementError,
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
from .router.dbapi import Connection, ProgrammingError
from .router.queue import Queue
from .router.router import Router, RouterStats, open
from .router.topic import Subscriber, Topic
from .router.transactions.outcomes import Heuristic, InDoubt
from .router.transactions.states import Outcome, TransactionState
from .router.transactions.transaction import Savepoint, Transaction
from .router.xid import Xid

logging.getLogger(__name__).addHandler(logging.NullHandler())

__all__ = [
    "AnabranchError",
    "ClockError",
    "ClosedError",
    "Config",
    "ConfigError",
    "Connection",
    "CorruptionError",
    "Counts",
    "DeadLetterError",
    "Destination",
    "DestinationError",
    "HeaderValue",
    "Headers",
    "Heuristic",
    "InDoubt",
    "JournalOptions",
    "Listener",
    "MemoryOptions",
    "Message",
    "MessageTooLargeError",
    "NoRouteError",
    "OutOfDescriptorsError",
    "Outcome",
    "OutcomeUnknownError",
    "Outgoing",
    "PlacementError",
    "ProgrammingError",
    "Progress",
    "Queue",
    "Receipt",
    "Router",
    "RouterStats",
    "Savepoint",
    "Settlement",
    "SparkError",
    "SqlOptions",
    "StoreConfig",
    "StoreFailedError",
    "StoreFullError",
    "StoreLockedError",
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
    "Xid",
    "accelerated",
    "open",
]
