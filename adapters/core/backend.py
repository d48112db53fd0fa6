"""The contract of a backend: a backend is a store's place for its bytes, all else is the core's.

A write ends in one of three ways. It is done: then its changes are applied under the store's lock, and seen. It is
refused: `write` raised an AnabranchError, and nothing of it happened. Or it is unknown, a COMMIT or a sync that was cut
off: `write` raised OutcomeUnknownError, whose cause is what to raise should nothing of it have happened, and nothing
more is shown before `took_effect` has told.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ...policies.config.limits import LimitOptions, WhenFull
from ...policies.config.options import StoreOptions
from ...policies.config.redelivery import Redelivery
from ...policies.errors import CorruptionError, StoreFailedError
from .operations.changes import Change
from .operations.plan import Plan
from .record.large import LargeStorage
from .record.place import Place
from .state.delivery import Rows
from .state.states import Catalog, DestinationState
from .store_types import Progress

if TYPE_CHECKING:
    from .engine.engine import Engine
    from .engine.writers import Writer
    from .features.outbox import OutboxRows


class ReadError(CorruptionError):
    """The disk did not give a message's bytes, which may be whole: the same may be tried again."""


class NotTakenError(StoreFailedError):
    """One of the changes of a write is something that the backend does not take; the others may well do without it."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The options of a store that the core has to know."""

    priorities: bool = False
    duplicate_window: int = 100_000
    max_leases: int = 100_000
    max_deliveries: int | None = None
    count_on_receive: bool = False
    """A delivery is counted before a message is handed out, instead of when it comes back."""
    lease_timeout: float | None = None
    """Seconds for which a message is leased where its receiver says nothing else; None: without an end."""
    redelivery: Redelivery | None = None
    max_messages: int | None = None
    max_bytes: int | None = None
    max_bytes_option: str = "max_bytes"
    """The name by which users know `max_bytes`."""
    min_free_disk: int | None = None
    when_full: WhenFull = WhenFull.FAIL
    block_timeout: float = 30.0
    limits: Sequence[LimitOptions] = ()
    nonpersistent_max_messages: int | None = None
    nonpersistent_max_bytes: int | None = None
    nonpersistent_memory: int = 64 << 20
    roll_over_size: int = 16 << 20
    """Bytes of a swap file of theirs."""
    message_bytes_max: int = 1 << 30
    large_message_size: int = 1 << 20
    """A body that is read from a file and is longer (bytes) is kept apart from its message."""
    ticket_bytes_max: int = 1 << 20
    """Bytes that are written together of a send of many."""
    batch_changes_max: int = 1000
    """The most changes that share one write of a thread of the store's own."""
    gather_seconds: float = 0.0
    """How long such a write waits for more changes."""
    promise_max: int = 0
    """The most bytes that are kept free for the outcome of one prepared branch."""
    outcome_timeout: float = 0.0
    """Seconds for which a caller waits to be told whether a write took effect whose outcome was unknown at first."""

    @classmethod
    def of(cls, options: StoreOptions, **others: Any) -> Settings:
        """Make the settings from what every kind's options have; `others` are fields of this class."""
        return cls(
            priorities=options.priorities,
            duplicate_window=options.duplicate_window,
            max_leases=options.max_leases,
            max_deliveries=options.max_deliveries,
            count_on_receive=options.count_deliveries == "on_receive",
            lease_timeout=options.lease_timeout,
            redelivery=options.redelivery,
            max_messages=options.max_messages,
            min_free_disk=options.min_free_disk,
            when_full=options.when_full,
            block_timeout=options.block_timeout,
            limits=options.limits,
            nonpersistent_max_messages=options.nonpersistent_max_messages,
            nonpersistent_max_bytes=options.nonpersistent_max_bytes,
            nonpersistent_memory=options.nonpersistent_memory,
            roll_over_size=options.roll_over_size,
            message_bytes_max=options.message_bytes_max,
            large_message_size=options.large_message_size,
            **others,
        )


@dataclass(slots=True)
class Found:
    """The state that a backend finds when it is opened. Destinations and subscriptions it puts into the catalog
    itself."""

    last_seq: int = 0
    """The highest that was ever given out."""
    ids: Iterable[tuple[tuple[int, bytes], int]] = ()
    """The duplicate window: (destination's number, message id) and seq, oldest first."""
    prepared: Sequence[tuple[bytes, bytes]] = ()
    """Branches that wait for their outcome: transaction and payload."""
    committed: Sequence[bytes] = ()
    """Transactions that are committed and not forgotten, oldest first."""


@dataclass(frozen=True, slots=True)
class BackendStats:
    """The backend's share of StoreStats; the fields are explained there."""

    syncs: int = 0
    journal_bytes: int = 0
    index_bytes: int = 0
    capacity_bytes: int = 0
    pool_bytes: int = 0
    segments: dict[str, int] = field(default_factory=dict)
    live_percent: float = 100.0
    compactions: int = 0
    memory_bytes: int = 0
    swap_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Host:
    """The parts of its store that a backend is given when it is opened."""

    catalog: Catalog
    lock: threading.RLock
    """The store's, under which all but `write`, `bodies` and `sync` are called."""
    fail: Callable[[BaseException], None]
    """Stop the store for good: a disk has failed, say (invariant 7)."""


class Backend(Rows, Protocol):
    """The backend of one store. The constructor touches nothing; it is given the same as the store's."""

    kind: str
    """The kind, as `StoreStats.kind` says it."""
    settings: Settings
    volatile: bool
    shared: bool
    descriptors: int
    threaded: bool
    """True: the core calls `write` and `apply` on a thread of the store's own, where no Ctrl-C strikes. False: on the
    thread of whoever changes something, under the store's lock; an interruption may strike at any place."""
    tells_places: bool = False
    """True: `own` of a Send, once that is written, is what `rows` tells as OWN of the message's place, and `rows` gives
    fewer than it was asked for only where there are no more."""
    postpones: bool = False
    """True: messages may wait for their time: `Table.postpone`, and what of Rows is for that."""
    takes_many: bool = False
    """True: messages that are sent together to a queue and are bodies alone come as one SendMany (changes.py), in a
    store that has no priorities."""
    keeps_maps: bool = False
    """True: it has `keyed` and `keys`, and what is put into a map takes the place of what its key had before
    (Table.put). False: maps are refused."""
    salvages: bool = False
    """True: a message whose bytes are damaged is lost: it is told to `lose`, and is acked."""
    outbox: OutboxRows | None = None
    """Set by `open`, by a backend that callers can write to in database transactions of their own (outbox.py)."""
    guard: Callable[[], None] | None = None
    """Called before each operation, and quick: raises StoreFailedError if the store may be another process's by now."""

    def __init__(self, name: str, directory: Path, options: Any, index_directory: Path | None = None) -> None: ...

    @classmethod
    def is_contained(cls, options: Any) -> bool:
        """Return whether all of a store lies in its directory: then a store of one destination goes with that
        destination."""
        return False

    # `create` and `identify`, class methods, are those of a Store (store.py).

    def open(self, host: Host, progress: Progress | None) -> tuple[bytes, Found]:
        """Lock the directory, recover what is there, fill the catalog. Returns the store's id and what else there is.
        Raises StoreLockedError, CorruptionError, ConfigError, PlacementError. `close` follows whatever it raises."""

    def close(self, clean: bool) -> None:
        """Leave all durable, if `clean`, and let go of the directory; also after an opening that failed or was
        interrupted anywhere. Idempotent. Nothing is written meanwhile."""

    def writer(self, engine: Engine) -> Writer | None:
        """Return the writer, if the backend brings it itself: then `write` and `took_effect` are never called, and what
        is written is handed to `Sequencer.accept` and `Engine.take`. None: the core's."""
        return None

    def require_owned(self) -> None:
        """Raise StoreFailedError if the directory's lock, or the store's lease, was lost."""

    def write(self, plan: Plan) -> None:
        """Make all changes of a plan durable, as the store's policy says, all or none. On a thread of the store's own,
        or under its lock."""

    def took_effect(self, plan: Plan) -> bool:
        """Return whether a write that ended in OutcomeUnknownError has taken effect. Raises AnabranchError if that
        cannot be told yet. Not asked of a store that has failed with it."""
        raise AssertionError("after an unknown outcome the store has failed")

    def apply(self, changes: Sequence[Change], last: Plan) -> None:
        """Bring changes that are written into what `rows` reads, by `apply_all` to a Table (table.py), unless
        `write` has seen to that. `last` is the last of the plans that they are of."""

    def recover(self) -> int:
        """Make whole again, after `apply` or a write was interrupted, what is read; returns the number of the last plan
        that is applied whole: those behind it are applied once more. Not asked of one that is `threaded`."""
        raise AssertionError("what runs on a thread of its own is not interrupted")

    def bodies(self, state: DestinationState, places: Sequence[Place]) -> Iterator[bytes | None]:
        """Return the records of these messages; None for one that has died meanwhile. Raises CorruptionError where one
        is damaged, and ReadError where the disk does not give it now. Any thread."""

    def lose(
        self, state: DestinationState, place: Place, error: CorruptionError, message_id: str | None = None
    ) -> None:
        """Write down, durably, that this message is lost; an ack follows. Only called for a backend that `salvages`,
        from any thread, without the lock. `message_id` is given if the caller knows it, else the backend finds what it
        can. Raises AnabranchError."""
        raise AssertionError(f"{self.kind} does not salvage")

    def keyed(self, state: DestinationState, name: bytes) -> Place | None:
        """Return where the value of a map's key is, expired or not; None if there is none."""
        raise AssertionError(f"{self.kind} keeps no maps")

    def keys(self, state: DestinationState, start: bytes, limit: int) -> Sequence[tuple[bytes, Place]]:
        """Return the first `limit` keys of a map from `start` on, with their values' places. Keys come in the order of
        their bytes."""
        raise AssertionError(f"{self.kind} keeps no maps")

    def large_storage(self) -> LargeStorage | None:
        """Return, once the backend is open, where it keeps bodies apart from their messages; None: in files in the
        store's directory."""
        return None

    def sync(self) -> None:
        """Make all that is written survive a power failure: nothing to do where `write` has seen to that. Raises
        StoreFailedError. Any thread."""
        return

    def opened(self) -> None:
        """Do what the backend does once the store is open, before anybody uses it. Raises AnabranchError, which is
        logged."""
        return

    def checkpoint(self) -> None:
        """Write out what shortens the next opening. Any thread."""
        return

    def reclaim(self) -> int:
        """Free the space that can be freed; returns bytes. Any thread."""
        return 0

    def compact(self) -> int:
        """Free also what takes copying what is there; returns bytes. Any thread."""
        return self.reclaim()

    def stats(self) -> BackendStats:
        """Return statistics, cheap enough to take every second."""

    def check(self) -> Iterator[str]:
        """Walk everything and yield each violation found. Nothing is pending."""
