"""The contract of a backend, in three protocols: its rows, writing them, and the upkeep of what they lie in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from ....policies.errors import CorruptionError
from ...system.durations import Durations
from ..operations.changes import Change
from ..operations.plan import Plan
from ..record.place import Place
from ..state.leases import DestinationState
from ..state.rows import Rows
from ..store_types import Progress
from .host import Host, Writes
from .settings import Settings
from .writers import Threaded, Writer

Lose = Callable[[DestinationState, Place, CorruptionError, str | None], None]
"""Writes down that a message is lost (`Backend.lose`)."""


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
    then: Callable[[], None] | None = None
    """Called once the store is open, before anybody uses it. An AnabranchError that it raises is logged."""


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
    live_bytes: int = 0
    """Without bodies that are kept apart."""
    compactions: int = 0
    memory_bytes: int = 0
    swap_bytes: int = 0
    sync_seconds: float = 0.0
    sync_durations: Durations = field(default_factory=Durations)


class Writing(Protocol):
    """The way of a backend's changes to its disk, and into its rows."""

    def writer(self, host: Host) -> Writer:
        """Return the writer of one opening, before `open`: one of ours (writers.py), or the backend's own. What is
        written is handed to `Sequencer.accept` and `Host.take`, in order."""

    def apply(self, changes: Sequence[Change], last: Plan) -> None:
        """Bring changes that are written into what the rows read, by `apply_all` to a Table (table.py), unless the
        write has seen to that. `last` is the last of the plans that they are of. Under the store's lock."""

    def recover(self) -> int:
        """Make whole again, after `apply` or a write was interrupted, what is read; returns the number of the last plan
        that is applied whole: those behind it are applied once more."""

    def sync(self) -> None:
        """Make all that is written survive a power failure: nothing to do where the write has seen to that. Raises
        StoreFailedError. Any thread."""
        return


class Copier(Protocol):
    """A copy of a backend in use, as it is at one moment. The contexts are entered in this order, each once."""

    def kept(self) -> AbstractContextManager[None]:
        """Return a context in which nothing goes that `copy` reads."""

    def still(self) -> AbstractContextManager[None]:
        """Return a context in which whoever writes waits. That is the moment."""

    def copy(self, directory: Path) -> int:
        """Put what the backend was then into a directory that is there. Returns bytes; durable on return, but for the
        directory. Raises AnabranchError, OSError."""


class Upkeep(Protocol):
    """The place of a backend's bytes. `create` and `identify`, class methods, are those of a Store (store.py)."""

    def open(self, host: Host, progress: Progress | None) -> tuple[bytes, Found]:
        """Lock the directory, recover what is there, fill the catalog. Returns the store's id and what else there is.
        Raises StoreLockedError, CorruptionError, ConfigError, PlacementError. `close` follows whatever it raises."""

    def close(self, clean: bool) -> None:
        """Leave all durable, if `clean`, and let go of the directory; also after an opening that failed or was
        interrupted anywhere. Idempotent. Nothing is written meanwhile."""

    def require_owned(self) -> None:
        """Raise StoreFailedError if the directory's lock, or the store's lease, was lost."""

    def checkpoint(self) -> None:
        """Write out what shortens the next opening. Any thread."""
        return

    def reclaim(self, copying: bool = False) -> int:
        """Free the space that can be freed, with `copying` also what takes copying what is there; returns bytes. Any
        thread."""
        return 0

    def stats(self) -> BackendStats:
        """Return statistics, cheap enough to take every second."""
        return BackendStats()

    def copier(self) -> Copier | None:
        """Return what copies the backend while it is used; None if that cannot be done."""
        return None

    def check(self) -> Iterator[str]:
        """Walk everything and yield each violation found. Nothing is pending."""
        return iter(())


class Backend(Rows, Writing, Upkeep, Protocol):
    """The backend of one store. The constructor touches nothing; it is given the same as the store's.

    What a kind of store may have beside it belongs to the feature that asks for it: ScheduledRows, KeyedRows,
    LargeStorage, OutboxRows. A kind that has none refuses such messages.
    """

    kind: str
    """The kind, as `StoreStats.kind` says it."""
    settings: Settings
    volatile: bool
    shared: bool
    descriptors: int
    tells_places: bool = False
    """True: `own` of a Send, once that is written, is what `rows` tells as OWN of the message's place, and `rows` gives
    fewer than it was asked for only where there are no more."""
    takes_many: bool = False
    """True: messages that are sent together to a queue and are bodies alone come as one SendMany (changes.py), in a
    store that has no priorities."""
    lose: Lose | None = None
    """Writes down, durably, that a message whose bytes are damaged is lost; an ack follows. None: the store does not go
    on without it. Given the message's id, if it is known. From any thread, without the lock. Raises AnabranchError."""
    guard: Callable[[], None] | None = None
    """Called before each operation, and quick: raises StoreFailedError if the store may be another process's by now."""

    def __init__(self, name: str, directory: Path, options: Any, index_directory: Path | None = None) -> None: ...

    @classmethod
    def is_contained(cls, options: Any) -> bool:
        """Return whether all of a store lies in its directory: then a store of one destination goes with that
        destination."""
        return False

    @classmethod
    def is_shared(cls, options: Any) -> bool:
        """Return whether another process may own the same data next, as `Store.shared`."""
        return False

    @classmethod
    def peek(cls, directory: Path, options: Any, store_id: bytes, transaction: bytes) -> bool | None:
        """Return what became of a transaction, as `Store.peek`; also None where only an open store can tell."""
        return None


class WrittenBackend(Backend, Writes, Protocol):
    """A backend that a thread of ours calls to write, where no Ctrl-C strikes: `write` is all that a small kind of
    store brings beside its rows."""

    def writer(self, host: Host) -> Writer:
        """Return a writer with a thread of its own."""
        return Threaded(host, self)

    def took_effect(self, plan: Plan) -> bool:
        raise AssertionError("after an unknown outcome the store has failed")

    def recover(self) -> int:
        raise AssertionError("what runs on a thread of its own is not interrupted")
