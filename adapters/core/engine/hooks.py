"""The hooks of an open store, on which its features hang (../features), and the services that features give in turn.

`Hooks` are called by the engine; most are empty tuples as long as no feature in use needs them, so that a message pays
for what it uses. `Feature` is what a feature does at the turns of its store's life. The protocols below say what the
core, and other features, ask of one; the engine holds None in its place where it is not in use, or not there at all.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableSequence, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from ....policies.names.destination import Destination
from ..messages import LargeBody, Message, Outgoing, Receipt
from ..operations.branches import Branch
from ..operations.changes import Change, Send
from ..operations.plan import Plan
from ..record.large import StoredBody
from ..record.place import Place
from ..state.duplicates import Key
from ..state.leases import DestinationState, Lease, SubscriptionState
from ..state.limits import Amount, Grant
from ..state.states import Catalog

Follower = Callable[[Any], object]


class Hooks:
    """The hooks of one open store. A hook is replaced, never changed."""

    __slots__ = ("__dict__", "freed", "taken", "taking")

    def __init__(self) -> None:
        self.taking: tuple[Callable[[Plan], object], ...] = ()
        """A plan is about to count as taken in. Called again for the same after an interruption."""
        self.taken: tuple[Callable[[Plan], object], ...] = ()
        """A plan has taken effect. In order, once. Raises nothing."""
        self.freed: tuple[Callable[[], object], ...] = ()
        """Some room may have become free."""
        self.stopped: tuple[Callable[[], object], ...] = ()
        """The store stops: all who wait are to look."""
        self.draining: tuple[Callable[[], object], ...] = ()
        """What is pending is about to be applied. Under the store's lock."""
        self.applied: tuple[Callable[[Plan], object], ...] = ()
        """A plan is applied, and about to leave what is pending. Under the lock; called again after an interruption."""
        self.followers: dict[type[Change], tuple[Follower, ...]] = {}
        """By kind of change: one is in the rows. Under the lock; called again after an interruption."""
        self.settling: tuple[Callable[[], object], ...] = ()
        """A thread wants to see what it has done elsewhere. Without the lock."""
        self._lock = threading.RLock()

    def follow(self, kinds: Iterable[type[Change]], call: Follower) -> None:
        """Call it from now on with each change of these kinds that is in the rows. Idempotent."""
        with self._lock:
            for kind in kinds:
                while call not in (before := self.followers).get(kind, ()):
                    followers = {**before, kind: (*before.get(kind, ()), call)}
                    if self.followers is before:  # no call between these: a signal handler may have come before
                        self.followers = followers

    def watch(self, call: Callable[[Plan], object] | None, instead: object = None) -> None:
        """Call it from now on with each plan that has taken effect, and no more what it comes `instead` of. Idempotent.
        None: nothing comes instead."""
        with self._lock:
            kept = tuple(other for other in self.taken if other not in (call, instead))
            self.taken = kept if call is None else (*kept, call)


class Feature:
    """A feature of one open store, at the turns of the store's life. Each does nothing here."""

    @property
    def highest_seq(self) -> int:
        """Return the highest seq that it knows of something durable, once it is open (rule A5)."""
        return 0

    def open(self) -> None:
        """Open what the feature keeps. The backend is open; nothing is prepared yet. Raises OSError, AnabranchError."""

    def attach(self, branch: Branch) -> None:
        """Attach what a branch needs that is read back."""

    def start(self) -> None:
        """Start: the store is usable, and nobody has used it yet. Raises AnabranchError."""

    def close(self) -> None:
        """Finish while the store can still write. Idempotent."""

    def end(self, clean: bool) -> None:
        """Let go of all that the feature keeps. All is written and applied, if `clean`; under the store's lock."""

    @property
    def is_busy(self) -> bool:
        """Return whether the store must stay open, since somebody uses the feature, or would lose something."""
        return False

    def tidy(self, soon: bool = False) -> None:
        """Free what is of no more use: now, or in the background, and then only if there is something. Any thread."""

    def violations(self) -> Iterable[str]:
        """Yield what is wrong, as Backend.check. Nothing is pending."""
        return ()

    def statistics(self) -> Mapping[str, int]:
        """Return what the feature adds to these fields of StoreStats."""
        return {}


class Quotas(Protocol):
    """The room that a store has for what is sent. Raises StoreFullError, NoRoomYetError."""

    yields: bool
    """Something else happens at a quota than an error."""

    def reserve(
        self,
        sends: Sequence[Change],
        freed: Iterable[Message] = (),
        bodies: Sequence[int] = (),
        since: float | None = None,
        wait: bool = True,
    ) -> Grant:
        """Return the room for these sends, less what `freed` gives back."""

    def reserve_all(self, parts: Sequence[Sequence[Change]]) -> list[Grant]:
        """Return the room for parts that are written one after the other: for all, or none."""

    def reserve_nowait(self, send: Change, submit: Callable[[Grant, Any], None]) -> None:
        """Call `submit` with the room for a send, or with an error, now or later."""

    def reserve_moved(self, state: DestinationState, amount: Amount) -> Grant:
        """Return the room for messages that come from another store."""

    def reserve_at_once(self, sends: Sequence[Change]) -> Grant:
        """Return the room for sends that wait for the outcome of their transaction."""

    def hold(self, sends: Sequence[Change], acks: Sequence[Any]) -> Grant:
        """Hold room for a prepared branch that was found, whether or not there is any."""

    def require_disk(self, size: int) -> None:
        """Raise StoreFullError unless the disks have room for so many bytes."""

    def tell_new(self, destinations: Iterable[Destination]) -> None:
        """Tell of messages sent there that were not stored."""

    def tell_old(self, leases: Iterable[Lease]) -> None:
        """Tell of messages that were dropped to make room."""


class Bodies(Protocol):
    """The bodies that are kept apart from their messages."""

    total_bytes: int
    transient_bytes: int

    def kept(self, body: object, persistent: bool = True) -> bytes | LargeBody:
        """Return a body as it goes into a message of this store."""

    def outgoing(self, message: Outgoing) -> Outgoing:
        """Return a message that is about to be queued, with its body as `kept`."""

    def looked_at(self, message: Outgoing) -> Outgoing:
        """Return a message that is queued later, with its body as `kept`."""

    def body_of(self, reference: bytes) -> StoredBody:
        """Return the body that a message's record refers to."""

    def migrated(self, body: StoredBody) -> StoredBody:
        """Return a copy of a body in another store, for a message that comes from there."""

    def held(self) -> AbstractContextManager[None]:
        """Return a context in which the files of bodies stay that are there, and the store is open."""

    def size_of(self, state: DestinationState) -> int:
        """Return how many bytes the bodies of a destination have."""

    def size_at(self, state: DestinationState, seq: int) -> int:
        """Return how many bytes the body of one message has; 0 if it is not kept apart."""

    def forget_dead(self) -> None:
        """Stop counting the bodies of messages that are dead. Under the store's lock, with all applied."""

    def may_be_dead(self, state: DestinationState) -> None:
        """Note that all messages of a destination may be dead by now."""

    def named(self, send: Send, apart: bool = False) -> None:
        """Note that a message which names a body takes effect."""

    def look(self, change: Change) -> None:
        """Note the messages that may be dead by a change."""


class Transient(Protocol):
    """The messages that no backend sees."""

    mirrors: Catalog
    """Their destinations, by the numbers of the catalog's."""
    mirror_rows: Callable[..., Any]
    """Rows.rows of these."""
    prepared: dict[bytes, Branch]
    """Branches that concern them alone, by transaction."""

    def rows_alone(
        self, state: DestinationState, subscription: SubscriptionState | None, order: int | None, after: int, limit: int
    ) -> Sequence[Place]:
        """Return the rows of transient messages alone, as Rows.rows."""

    def takes(self, changes: MutableSequence[Change]) -> bool:
        """Return whether all changes of a ticket concern transient messages; mark them if only some do."""

    def mark(self, send: Send) -> Change:
        """Return the send of a transient message, as it goes into a ticket."""

    def write(self, changes: Sequence[Change], reservation: Grant | None = None) -> list[Any]:
        """Do changes that concern transient messages alone."""

    def write_mirrors(self, changes: Sequence[Change]) -> None:
        """Do to their destinations what only frees memory."""

    def remove(self, state: DestinationState) -> None:
        """Remove a destination that goes."""

    def sent_with(self, key: Key) -> int | None:
        """Return the seq of the transient message of this id, if there is one."""

    def prepare(self, branch: Branch) -> None:
        """Prepare a branch that concerns transient messages alone."""

    def commit_prepared(self, branch: Branch) -> list[Any] | None:
        """Commit such a branch; return the outcomes of its changes."""

    def rollback_prepared(self, branch: Branch) -> bool:
        """Roll such a branch back; return whether it was prepared."""


class Schedule(Protocol):
    """The messages that wait for their time."""

    def require(self) -> None:
        """Raise ConfigError in a store in which no message can wait."""

    def bring(self) -> None:
        """Bring back what is due."""

    def postponements(self, leases: Iterable[Lease], delivered: bool, delay: int | None = None) -> list[Change]:
        """Return the changes by which leases that are given back wait."""


class Outbox(Protocol):
    """The sends and acks in transactions of callers' own."""

    def send(self, connection: Any, destination: Destination, messages: Iterable[Outgoing | bytes]) -> list[Receipt]:
        """Send once the transaction on this connection commits."""

    def ack(self, connection: Any, messages: Sequence[Message]) -> None:
        """Ack once the transaction on this connection commits."""

    def concerns(self, destination: Destination) -> bool:
        """Return whether a caller's transaction concerns a destination."""


class KeyedValues(Protocol):
    """The values of maps, by key. A map is given as its destination."""

    def get(self, destination: Destination, key: str) -> bytes | None:
        """Return the value of a key; None if it has none."""

    def count(self, destination: Destination) -> int:
        """Return how many keys have a value."""

    def get_many(self, destination: Destination, keys: Iterable[str]) -> Iterator[bytes | None]:
        """Yield the value of each of these keys, None for one that has none."""

    def items(
        self, destination: Destination, prefix: str = "", after: str | None = None, before: str | None = None
    ) -> Iterator[tuple[str, bytes]]:
        """Yield the keys that begin with a prefix, behind `after` and before `before`, and their values."""

    def keys(
        self, destination: Destination, prefix: str = "", after: str | None = None, before: str | None = None
    ) -> Iterator[str]:
        """Yield keys as `items` does, without looking at their values."""

    def wait(
        self, destination: Destination, key: str, timeout: float | None, unless: bytes | None = None
    ) -> bytes | None:
        """Return the value of a key once it has one, and another than `unless`; None if it has none in `timeout`
        seconds."""

    def put(
        self, destination: Destination, key: str, value: bytes, expires_at_ms: int = 0, sync: bool | None = None
    ) -> None:
        """Give a key a value, whatever it has."""

    def put_if_absent(
        self, destination: Destination, key: str, value: bytes, expires_at_ms: int = 0, sync: bool = False
    ) -> bytes | None:
        """Put a value unless the key has one; return that which it has."""

    def compare_and_set(
        self, destination: Destination, key: str, expected: bytes | None, value: bytes | None,
        expires_at_ms: int = 0, sync: bool = False,
    ) -> bool:  # fmt: skip
        """Put a value if the key has the `expected` one; return whether it had."""

    def pop(self, destination: Destination, key: str, sync: bool = False) -> bytes | None:
        """Remove a key; return the value that it had."""

    def increment(
        self, destination: Destination, key: str, by: int = 1, expires_at_ms: int = 0, sync: bool = False
    ) -> int:
        """Add to the decimal number that a key has; return the sum."""

    def touch(self, destination: Destination, key: str, expires_at_ms: int = 0, sync: bool = False) -> bool:
        """Give the value of a key another time; return whether there is one."""
