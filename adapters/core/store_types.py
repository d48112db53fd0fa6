"""The types that a store and its callers exchange beside messages: subscriptions, outcomes, counts, and the steps of
transactions over several stores. `Store` (core/store.py) uses them."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

from ...policies.names.destination import Destination
from ..system.durations import Durations


class Subscription(NamedTuple):
    """A durable subscription: a topic's messages are kept for it until it has acked them, whether or not anybody
    receives. Known by topic, client and name; a client may be one of many that use the same names."""

    topic: Destination
    name: str
    client_id: str = ""
    selector: str | None = None
    """Kept and handed back for who evaluates it; a store does not."""
    no_local: bool = False
    """True if the subscriber does not want what its own connection has sent. Kept and handed back likewise."""

    @property
    def key(self) -> SubscriptionKey:
        return self.client_id, self.name


SubscriptionKey = tuple[str, str]
"""Client and name: one subscription among those of a topic."""


class Change(NamedTuple):
    """The change of a subscription in a transaction."""

    subscription: Subscription
    subscribe: bool
    """False: unsubscribe."""
    retroactive: bool = False


class Settlement(enum.Enum):
    """The end of a lease."""

    ACK = "ack"
    RELEASE = "release"
    REJECT = "reject"
    """To the dead letters: the router's to do, since they may lie in another store."""


class _Counts(NamedTuple):
    """The numbers of messages of a queue, or of a subscription, by where they are. All but `expired` are there now."""

    ready: int
    """Neither leased nor delayed. Some of these may have expired, for a moment, or have reached the delivery limit."""
    leased: int
    """By receivers, or claimed by transactions."""
    delayed: int = 0
    """Messages that wait for their time."""
    expired: int = 0
    """Gone since the store was opened, dead-lettered or dropped, for their time was over."""


class Counts(_Counts):
    """The counts, and how old the next one is, which is no part of the tuple: two that say the same numbers are
    equal."""

    oldest_ready_seconds: float | None = None
    """How long ago the message was sent that is received next: the oldest of the ready ones, in a store with priorities
    of the most urgent ones. One that was given back, or has waited for its time, counts from when it was sent, and not
    while it is leased or waits. None: none is ready, or a disk that hangs does not tell."""

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, oldest_ready_seconds={self.oldest_ready_seconds!r})"


@dataclass(frozen=True, slots=True)
class StoreStats:
    """The statistics of a store. Counts are since open where not said otherwise."""

    name: str
    """The name, as the configuration calls the store; of a store of one destination `name:destination`."""
    kind: str
    """`journal`, `sql`, `memory`, or as a third party's adapter is registered."""
    messages: int
    """Held now, leased ones included."""
    destinations: Mapping[Destination, int]
    """Messages held now, by destination."""
    leased: int
    """Messages of `messages` that are held by consumers or claimed by transactions; of a topic for each
    subscription."""
    sends: int
    """Messages that were stored."""
    acks: int
    """Messages that were acked, of a topic by each subscription."""
    syncs: int
    """How often the store waited for the disk (fdatasync, fsync)."""
    batches: int
    """Writes in which sends, acks and all else were gathered."""
    journal_bytes: int = 0
    """Bytes of the files that hold records; pooled files are in `pool_bytes`."""
    index_bytes: int = 0
    """Bytes of the index's files, which are made anew from the journal if they are lost. 0 for stores that have
    none."""
    capacity_bytes: int = 0
    """Bytes of the same files at their full size, which they grow to as they fill."""
    pool_bytes: int = 0
    """Bytes of files that were released and are kept to be used again."""
    segments: Mapping[str, int] = field(default_factory=dict)
    """Files by state: `active`, `retained`, `copies` (of what lives, made by compaction), `pooled`."""
    live_percent: float = 100.0
    """Bytes of live messages in the journal's records, of all its records' bytes; all of a file in which no message has
    died yet are live."""
    compactions: int = 0
    """Files of copies that were made since the store was opened."""
    live_bytes: int = 0
    """Bytes of live messages in the journal's records, as `live_percent` counts them, and of bodies kept apart.
    0 for stores that have no journal."""
    failed: str | None = None
    """Why the store cannot be used, if it cannot: it has stopped itself, could not be opened, or its database is away.
    Counts are then the latest that are known, and 0 where none are."""
    subscriptions: Mapping[Subscription, int] = field(default_factory=dict)
    """Messages that each durable subscription has yet to ack."""
    memory_bytes: int = 0
    """Bytes of messages that are kept in memory, as the store counts them."""
    swap_bytes: int = 0
    """Bytes of the swap files."""
    dropped: int = 0
    """Messages that were sent to a topic without any durable subscription, and so were gone at once; and those that
    were dropped since the store was full (`when_full`)."""
    waiting: int = 0
    """Receivers and listeners that wait for a message."""
    large_messages: int = 0
    """Messages of `messages` whose bodies are kept apart."""
    large_bytes: int = 0
    """Bytes of these bodies; one that several messages share counts for each."""
    delayed: int = 0
    """Messages of `messages` that wait for their time, of a topic those that do so for all its subscriptions."""
    sync_seconds: float = 0.0
    """How long the store waits for the disk each time: a mean in which the latest times count most, and one that takes
    far longer than the others counts as twice as long. 0 before the first."""
    redelivered: int = 0
    """How often a message was handed out that had been handed out before: `Message.redelivered` is true."""
    sync_durations: Durations = field(default_factory=Durations)
    """How long the store waited for the disk each time to make messages durable; waits for new files are not among
    them. A store in a database counts its commits, one that nodes share its transactions."""

    @property
    def held_bytes(self) -> int:
        """Return how many bytes of the journal's files hold no live message: those of dead messages, which live ones
        beside them keep, and the room at the end of the file that is written."""
        return self.journal_bytes - (self.live_bytes - self.large_bytes)


Progress = Callable[[str, int, int], None]
"""Called now and then by long work: what is being done, how much is done, of how much (bytes)."""


class Listener(Protocol):
    """The result of `listen`. Threads: all; its methods may be called from the callback. None waits for the disk."""

    def add_credit(self, more: int) -> None:
        """Ask for so many more messages than were asked for so far. Raises TypeError, ValueError."""

    def withdraw_credit(self, most: int) -> int:
        """Take back up to so much credit for which no message was leased yet; returns how much it was. A message that
        is on its way to the callback still comes. 0 once the listener has ended. Raises TypeError, ValueError."""

    def close(self) -> bool:
        """End it: no callback begins once this has returned. Returns whether one runs, in whatever thread, with a
        message that is still that callback's to settle; False: whatever was given to this listener it has been called
        with before, and what it has not been called with is free again, as if nobody had held it. Idempotent."""


# Transactions over several stores

TRANSACTION_BYTES: Final = 32
"""Bytes of a transaction's id: the coordinator's id (16), its epoch (8) and a number (8), so that they sort by age."""


class Prepared(NamedTuple):
    """A transaction that is prepared in a store and waits for its outcome."""

    transaction: bytes
    participants: tuple[bytes, ...]
    """The ids of all the stores that take part, this one too."""
    sends: int
    acks: int
    note: bytes = b""
    """As `Store.prepare` was given it."""


T_co = TypeVar("T_co", covariant=True)


class Pending(Protocol[T_co]):
    """A step of a transaction that is under way."""

    def proceed(self) -> None:
        """Go on with it in the background. `wait` comes later, perhaps never."""

    def wait(self) -> T_co:
        """Wait until the step is done. Raises what went wrong. May be called by one thread, once."""


class Done(Generic[T_co]):
    """The result of an adapter that had done it all before it returned."""

    def __init__(self, result: T_co) -> None:
        self._result = result

    def proceed(self) -> None:
        """Do nothing: the step is done."""

    def wait(self) -> T_co:
        """Return the outcome."""
        return self._result
