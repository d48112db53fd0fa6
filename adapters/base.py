"""The contract that every store keeps, and the values that cross it.

A *store* holds the messages of some destinations, with one durability policy. The router decides which destination
lives in which store; a store never sees another. Ours are in the packages beside this module; third parties register
theirs in the entry-point group `anabranch.adapters`, and `tests/contract` is the suite that every store must pass.

The words used below: an operation is *durable* when it survives what the store's policy says it survives
(invariant 1); it is *visible* when receive, browse and depth know of it. No operation becomes visible before it is as
durable as the policy asks.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

from ..policies.destination import Destination
from ..policies.errors import AnabranchError, DeadLetterError, UnknownMessageError

HeaderValue = str | int | float | bool | bytes | None | Sequence["HeaderValue"] | Mapping[str, "HeaderValue"]
"""Plain, or lists and maps of such, as JSON nests them; a tuple comes back as a list."""
Headers = Mapping[str, HeaderValue]
"""What a sender may attach to a message: names to values."""
NESTED_MAX: Final = 64
"""How deep lists and maps may nest in a header."""


PRIORITY_MAX: Final = (1 << 16) - 1
DEFAULT_PRIORITY: Final = 4
EXPIRES_MAX_MS: Final = (1 << 63) - 1


class Outgoing(NamedTuple):
    """A message to be sent."""

    body: bytes
    headers: Headers | None = None
    message_id: str | None = None
    priority: int = DEFAULT_PRIORITY
    """0 to 65,535, the highest first where its store orders by priority; elsewhere it is kept and handed back."""
    expires_at_ms: int = 0
    """When it is no longer to be delivered, in milliseconds since the epoch by the wall clock; 0: never."""
    persistent: bool = True
    """False: memory alone, gone when its store is closed."""
    requeued: bool = False
    """True: a dead letter that goes back where it came from. It is stored even if its `message_id` is in the duplicate
    window, which from then on knows the id as this message's."""


_PLAIN: Final = frozenset((str, int, float, bool, bytes, type(None)))


def plain_body(body: object) -> bytes:
    """The body as bytes of its own. Raises TypeError."""
    if isinstance(body, bytes):
        return body
    if isinstance(body, (bytearray, memoryview)):
        return bytes(body)
    raise TypeError(f"a message body is bytes, not {type(body).__name__}; encode it first")


def plain_headers(headers: Headers) -> dict[str, Any]:
    """The headers as a dict of their own. Raises TypeError for what is not plain, ValueError for what nests too
    deep."""
    if not isinstance(headers, Mapping):
        raise TypeError(f"headers map names to plain values; found {type(headers).__name__}")
    plain = {}
    for name, value in headers.items():
        if type(name) is not str or type(value) not in _PLAIN:
            name, value = _plain_name(name, value), _plain_value(name, value, 1)
        plain[name] = value
    return plain


def _plain_name(name: object, value: object) -> str:
    if isinstance(name, str):
        return str.__str__(name)
    raise _not_plain(name, value)


def _plain_value(name: object, value: object, depth: int) -> Any:
    """A value of derived types (an IntEnum, say) as the plain one that it comes back as; nested ones copied."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, bytes):
        return bytes(value)
    if depth > NESTED_MAX:
        raise ValueError(f"header {str(name)[:40]!r} nests deeper than {NESTED_MAX} lists and maps")
    if isinstance(value, Mapping):
        return {_plain_name(key, one): _plain_value(name, one, depth + 1) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain_value(name, one, depth + 1) for one in value]
    raise _not_plain(name, value)


def _not_plain(name: object, value: object) -> TypeError:
    return TypeError(
        f"header {name!r}: {value!r} is not plain: names are str, values str, int, float, bool, bytes, None, or lists "
        "and maps of these"
    )


def encoded_id(message_id: object) -> bytes:
    """A message id as it is stored. Raises TypeError, and ValueError for what is not valid unicode."""
    if not isinstance(message_id, str):
        raise TypeError(f"a message_id is a str, not {type(message_id).__name__}: {message_id!r}")
    try:
        return message_id.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"message_id {message_id[:40]!r} is not valid unicode: {error.reason}") from None


def checked(
    body: object,
    headers: Headers | None,
    message_id: str | None,
    priority: int = DEFAULT_PRIORITY,
    expires_at_ms: int = 0,
    persistent: bool = True,
    requeued: bool = False,
) -> Outgoing:
    """A message that is sent later: copied, and refused now if its types are wrong. Raises TypeError, ValueError."""
    if message_id is not None:
        encoded_id(message_id)
    require_order(priority, expires_at_ms)
    plain = plain_headers(headers) if headers else None
    return Outgoing(plain_body(body), plain, message_id, priority, expires_at_ms, bool(persistent), requeued)


def require_order(priority: object, expires_at_ms: object) -> None:
    """Raise TypeError or ValueError for what is no priority or no time."""
    for what, value, most in (
        ("priority", priority, PRIORITY_MAX),
        ("expires_at_ms", expires_at_ms, EXPIRES_MAX_MS),
    ):
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{what} is an int, not {type(value).__name__}: {value!r}")
        if not 0 <= value <= most:
            raise ValueError(f"{what} {value} is not between 0 and {most}")


class Receipt(NamedTuple):
    """What a send returns."""

    destination: Destination
    seq: int
    """The message's place in its store's order, and its name there for life (rule I2)."""
    duplicate: bool = False
    """Its `message_id` was in the duplicate window: `seq` is that of the message already stored."""


class Subscription(NamedTuple):
    """A durable subscription: a topic's messages are kept for it until it has acked them, whether or not anybody
    receives. Known by topic, client and name; a client may be one of many that use the same names."""

    topic: Destination
    name: str
    client_id: str = ""
    selector: str | None = None
    """Kept and handed back for who evaluates it; a store does not."""
    no_local: bool = False
    """Likewise: the subscriber does not want what its own connection has sent."""

    @property
    def key(self) -> SubscriptionKey:
        return self.client_id, self.name


SubscriptionKey = tuple[str, str]
"""Client and name: one subscription among those of a topic."""


class Change(NamedTuple):
    """What a transaction does to a subscription."""

    subscription: Subscription
    subscribe: bool
    """False: unsubscribe."""
    retroactive: bool = False


EXPIRED: Final = "expired"
"""Its time is over."""
DELIVERY_LIMIT: Final = "delivery_limit"
"""It was given back as often as `max_deliveries` says."""
REJECTED: Final = "rejected"
"""Its receiver has rejected it, and said no reason of its own."""


@runtime_checkable
class Rejecting(Protocol):
    """A store's owner, which knows where its dead letters go."""

    def reject(self, message: Message, reason: str) -> None:
        """As Message.reject."""


class Message:
    """A message read from a store. Read-only by convention; compares by identity.

    One that `receive` gave is leased to this process until `ack()`, `release()` or `reject()`, or until the process
    ends. One that `browse` gave is a look only. Safe to hand to another thread.
    """

    __slots__ = (
        "_note", "_store", "body", "deliveries", "destination", "expires_at_ms", "headers", "leased", "message_id",
        "persistent", "priority", "seq", "subscription", "timestamp_ms",
    )  # fmt: skip

    def __init__(
        self,
        store: Store,
        destination: Destination,
        seq: int,
        body: bytes,
        headers: dict[str, Any],
        message_id: str | None,
        timestamp_ms: int,
        leased: bool,
        note: Any = None,
        priority: int = DEFAULT_PRIORITY,
        expires_at_ms: int = 0,
        deliveries: int = 1,
        subscription: SubscriptionKey | None = None,
        persistent: bool = True,
    ) -> None:
        self._store = store
        self.destination = destination
        self.seq = seq
        self.body = body
        self.headers = headers
        self.message_id = message_id
        self.timestamp_ms = timestamp_ms
        self.leased = leased
        self._note = note
        """The store's own; nobody else looks at it."""
        self.priority = priority
        self.expires_at_ms = expires_at_ms
        self.deliveries = deliveries
        """How often it has been handed out, this time too: 1 the first time. Of a browsed one: how often it came
        back."""
        self.subscription = subscription
        """Of a topic's message: whose it is; None if it was browsed or leased for the topic as a whole."""
        self.persistent = persistent
        """As its sender said; whatever that was, nothing of a memory store survives."""

    def ack(self) -> None:
        """Done with it: removed for good, durable as its store's policy says. Raises UnknownMessageError if it is not
        leased, or not any more."""
        self._store.ack([self])

    def ack_nowait(self) -> Future[None]:
        """`ack` without waiting: refused at once if it is not leased, else the future resolves when `ack` would have
        returned, on a thread of ours."""
        return self._store.ack_nowait([self])

    def release(self, delivered: bool = True) -> None:
        """Give it back: the next receive finds it at its old place in the order, delivered once more; not so unless
        `delivered`. Raises UnknownMessageError."""
        self._store.release([self], delivered)

    def release_nowait(self, delivered: bool = True) -> Future[None]:
        """`release` without waiting, as `ack_nowait`."""
        return self._store.release_nowait([self], delivered)

    def reject(self, reason: str = REJECTED) -> None:
        """Put it into its store's dead-letter queue, with the `reason`, in one step: after any crash it is in one of
        the two. Dropped, and counted, if its store has none. Raises UnknownMessageError, and what a transaction's
        commit raises; the message is then free again, as after a release."""
        owner = self._store.owner
        if not isinstance(owner, Rejecting):
            raise DeadLetterError(
                f"{self!r} cannot be rejected: store {self._store.name!r} was opened without a router, which knows the "
                "dead-letter queues; ack it, or release it"
            )
        owner.reject(self, reason)

    @property
    def token(self) -> str:
        """What it can be settled by, with `Router.settle`, by who does not hold this object. It holds while the message
        is leased, and tells no secret. Raises UnknownMessageError for a message that is not leased."""
        return self._store.token(self)

    @property
    def redelivered(self) -> bool:
        """Whether it was handed out before."""
        return self.deliveries > 1

    def __repr__(self) -> str:
        return f"<Message {self.seq} of {self.destination}, {len(self.body)} bytes>"


TRANSACTION_BYTES: Final = 32
"""Of a transaction's id: the coordinator's id (16), its epoch (8) and a number (8), so that they sort by age."""


class Undelivered(NamedTuple):
    """A message that receive skips, leased: for the router to dead-letter."""

    message: Message
    reason: str
    """EXPIRED or DELIVERY_LIMIT."""


class Prepared(NamedTuple):
    """A transaction that is prepared in a store and waits for its outcome."""

    transaction: bytes
    participants: tuple[bytes, ...]
    """The ids of all the stores that take part, this one too."""
    sends: int
    acks: int


T_co = TypeVar("T_co", covariant=True)


class Settlement(enum.Enum):
    """What becomes of a leased message."""

    ACK = "ack"
    RELEASE = "release"
    REJECT = "reject"
    """To the dead letters: the router's to do, since they may lie in another store."""


class Counts(NamedTuple):
    """How many messages of a queue, or of a subscription, are where."""

    ready: int
    """Not leased. Of these some may have expired, for a moment, or have reached the delivery limit."""
    leased: int
    """By receivers, or claimed by transactions."""


class Pending(Protocol[T_co]):
    """A step of a transaction that is under way."""

    def proceed(self) -> None:
        """Go on with it in the background. `wait` comes later, perhaps never."""

    def wait(self) -> T_co:
        """Until it is done. Raises what went wrong. May be called by one thread, once."""


class Done(Generic[T_co]):
    """What an adapter returns that had done it all before it returned."""

    def __init__(self, result: T_co) -> None:
        self._result = result

    def proceed(self) -> None:
        """It is done."""

    def wait(self) -> T_co:
        """What came of it."""
        return self._result


def require_leased(message: Message) -> None:
    """Refuse a message that was only looked at."""
    if not message.leased:
        raise UnknownMessageError(
            f"{message!r} was browsed, not received; receive it before you ack, release or claim it"
        )


@dataclass(frozen=True, slots=True)
class StoreStats:
    """What a store says about itself. Counts are since open where not said otherwise."""

    name: str
    kind: str
    messages: int
    """Held now, leased ones included."""
    destinations: Mapping[Destination, int]
    """Messages held now, by destination."""
    leased: int
    sends: int
    acks: int
    syncs: int
    """How often the store waited for the disk (fdatasync, fsync)."""
    batches: int
    journal_bytes: int = 0
    """Bytes of the files that hold records; pooled files are in `pool_bytes`."""
    capacity_bytes: int = 0
    """The same files at their full size, which they grow to as they fill."""
    pool_bytes: int = 0
    segments: Mapping[str, int] = field(default_factory=dict)
    """Files by state: `active`, `retained`, `pooled`."""
    live_percent: float = 100.0
    """Bytes of live messages in the journal's records, of all its records' bytes; all of a file in which no message has
    died yet are live."""
    failed: str | None = None
    """Why the store has stopped itself, if it has."""
    subscriptions: Mapping[Subscription, int] = field(default_factory=dict)
    """Messages that each durable subscription has yet to ack."""
    memory_bytes: int = 0
    """Of messages that are kept in memory, as the store counts them."""
    swap_bytes: int = 0
    """Of the swap files."""
    dropped: int = 0
    """Messages that were sent to a topic without any durable subscription, and so were gone at once."""
    waiting: int = 0
    """Receivers and listeners that wait for a message."""


Progress = Callable[[str, int, int], None]
"""Called now and then by long work: what is being done, how much is done, of how much (bytes)."""


class Adapter(Protocol):
    """A kind of store: the class that is registered in the entry-point group. What the router calls of it, beside
    the methods of its instances (Store). Its options are a pydantic model, named by a class attribute
    `options_model`; without one it has none (policies/config.py)."""

    def __call__(self, name: str, directory: Path, options: Any, index_directory: Path | None = None) -> Store:
        """The constructor, which touches nothing."""

    def create(self, name: str, directory: Path, options: Any) -> bytes:
        """A class method: make an empty store, whole or not at all whatever crash comes; returns its id (rule D2).

        The directory must not exist; its parents are made. What a crash leaves is called as `adapters.files.unfinished`
        says, and the router removes it.
        """

    def identify(self, directory: Path) -> bytes | None:
        """A class method: the id of the store in a directory, None if it holds none of this kind or the id does not
        read. Changes nothing, takes no lock. Raises OSError if the directory cannot be read."""

    # `is_contained(options)`, a class method, may be there: whether all of a store lies in its directory. Then a store
    # of one destination goes with that destination.

    # `check_options(options)`, a class method, may be there: it raises ConfigError for what is wrong with options and
    # their model cannot know. It touches nothing; `anabranch check` calls it.


class Listener(Protocol):
    """What `listen` returns. Threads: all; both may be called from the callback. Neither waits for the disk."""

    def add_credit(self, more: int) -> None:
        """So many more messages than were asked for so far are wanted. Raises TypeError, ValueError."""

    def close(self) -> bool:
        """End it: no callback begins once this has returned. Returns whether one runs, in whatever thread, with a
        message that is still that callback's to settle; False: whatever was given to this listener it has been called
        with before, and what it has not been called with is free again, as if nobody had held it. Idempotent."""


class Store(Protocol):
    """One store. Every method may be called by any thread at any time between open and close.

    All raise StoreFailedError once the store has failed, and ClosedError when it is closed or in a forked child.
    Constructors touch nothing; `create` and `open` touch the disk.
    """

    name: str
    store_id: bytes
    """16 random bytes, for life (rule I4)."""
    volatile: bool
    """True: nothing survives a restart. In a transaction it takes part in visibility only (rule T7)."""
    shared: bool
    """True: another process may own the same data next (a leased store of a shared database), so that a transaction
    whose outcome this process's decision log alone knows is refused (rule T6)."""
    owner: object
    """Set by the router that opens it, which the store keeps alive and never looks at: while anything can reach the
    store, a message say, the router's directory is locked (invariant 8). What Message.reject asks."""

    # `descriptors`, an int, may be there: how many files and sockets a store keeps open. 4 where it does not say.

    @property
    def last_seq(self) -> int:
        """The highest seq given out to a persistent message: what is sent from now on comes behind it. Known still when
        the store is closed."""

    def open(self, progress: Progress | None = None) -> None:
        """Recover what is on disk and be ready. Raises StoreLockedError, CorruptionError, ConfigError."""

    def close(self) -> None:
        """Finish what is queued, leave all of it durable, free the directory. Idempotent."""

    def send(
        self,
        destination: Destination,
        body: bytes,
        headers: Headers | None = None,
        message_id: str | None = None,
        sync: bool | None = None,
        priority: int = DEFAULT_PRIORITY,
        expires_at_ms: int = 0,
        persistent: bool = True,
    ) -> Receipt:
        """Store one message at the end of its destination (of its priority, if the store's option `priorities` is set).
        On return it is durable and visible.

        A topic's message is stored once, whatever the number of its durable subscriptions; without any it is gone at
        once, and the receipt is as always. `sync=True` asks for power-failure durability of this one whatever the
        policy. A `message_id` within the store's duplicate window is stored once: the receipt then says `duplicate`.
        With `persistent=False` it is kept in memory, swapped to disk if there is much, waits for no disk, and is gone
        when the store is closed; it keeps its place among the others.
        Raises StoreFullError, MessageTooLargeError and ClockError (no effect), OutcomeUnknownError.
        """

    def send_nowait(
        self,
        destination: Destination,
        body: bytes,
        headers: Headers | None = None,
        message_id: str | None = None,
        sync: bool | None = None,
        priority: int = DEFAULT_PRIORITY,
        expires_at_ms: int = 0,
        persistent: bool = True,
    ) -> Future[Receipt]:
        """The same, without waiting: the future resolves when send would have returned, on a thread of ours.

        Sends of one thread to one destination keep their order. What send would raise, the future raises.
        """

    def send_many(
        self, destination: Destination, messages: Iterable[Outgoing | bytes], sync: bool | None = None
    ) -> list[Receipt]:
        """Store many, in order, with as few waits for the disk as may be. Not atomic: a crash keeps a prefix. One that
        is `requeued` is no duplicate, here as in `commit` and in a branch."""

    def receive(
        self, destination: Destination, timeout: float | None = 0, subscription: SubscriptionKey | None = None
    ) -> Message | None:
        """Lease the first message that nobody holds; None if there is none in `timeout` seconds (None: wait).

        First is the oldest, with `priorities` that of the highest priority. One whose time is over or that has come
        back `max_deliveries` times is skipped. From a topic one receives for a `subscription`: UnknownSubscription-
        Error if the topic has none of that key, DestinationError without one. Subscriptions lease independently.
        """

    def listen(
        self,
        destination: Destination,
        on_message: Callable[[Message], object],
        credit: int = 1,
        subscription: SubscriptionKey | None = None,
        on_end: Callable[[Exception], object] | None = None,
    ) -> Listener:
        """Lease messages for who is called with each, up to `credit` of them; more with `Listener.add_credit`.

        A listener stands in one line with those who wait in `receive`: what becomes free goes to who came first. It is
        called on a thread of ours, with one message at a time, in order, never inside a sender's `send`; the message
        is leased as a received one is. If it raises, its message is released. As long as it is not closed, `retire`
        refuses.

        It ends by itself when the store closes or fails, its subscription is removed, or the disk does not give a
        message (a damaged one stays leased, and is skipped): `on_end` is then called with the error, likewise.
        Raises as `receive`, and TypeError and ValueError for what is no credit.
        """

    def browse(
        self,
        destination: Destination,
        limit: int | None = None,
        after: int | Message = 0,
        subscription: SubscriptionKey | None = None,
    ) -> Iterator[Message]:
        """Look at the messages in order, leased ones too, from the one after `after`: a seq, or a message; with
        `priorities` a message only (ValueError). Holds no lock between two; a message acked meanwhile is left out, one
        sent meanwhile may be seen. Of a topic: what a subscription has yet to ack, or without one all that is held."""

    def ack(self, messages: Sequence[Message]) -> None:
        """Remove leased messages, all or none of them; a topic's for its subscription alone, and for good when the last
        one has acked. Raises UnknownMessageError (and removes none)."""

    def release(self, messages: Sequence[Message], delivered: bool = True) -> None:
        """Give leased messages back, each to its old place. Leases end with the process.

        `delivered`: it counts as a delivery. The count is written, but not waited for: a power failure may forget the
        last ones, a kill does not. If it cannot be written the messages are free all the same.
        """

    def ack_nowait(self, messages: Sequence[Message]) -> Future[None]:
        """`ack` without waiting: what is not leased is refused at once; the future resolves when `ack` would have
        returned, on a thread of ours. Until then nobody else can settle these messages."""

    def release_nowait(self, messages: Sequence[Message], delivered: bool = True) -> Future[None]:
        """`release`, likewise."""

    def token(self, message: Message) -> str:
        """What a leased message can be settled by, from any thread, without the Message. It begins with the store's id
        and holds no secret. Raises UnknownMessageError."""

    def settle(self, tokens: Sequence[str], how: Settlement) -> list[AnabranchError | None]:
        """Ack or release many by their tokens; returns what was wrong with each, None where nothing was:
        UnknownMessageError, which names the token, for what is no token or is not leased any more. Those with which
        nothing was wrong are settled together. REJECT is the router's. Raises TypeError."""

    def settle_nowait(self, tokens: Sequence[str], how: Settlement) -> Future[list[AnabranchError | None]]:
        """`settle` without waiting, as `ack_nowait`."""

    def leased(self, token: str) -> Message:
        """The message of a token. Raises TypeError, UnknownMessageError."""

    def claim(self, message: Message) -> None:
        """A transaction takes a leased message: from now on nobody else may ack or release it (rule X6)."""

    def unclaim(self, messages: Sequence[Message]) -> None:
        """The transaction is rolled back: its messages are free again, each at its old place, delivered once more, as
        by release."""

    def take_undelivered(self, limit: int = 100) -> Sequence[Undelivered]:
        """Lease up to so many of the messages that receive skips, of any destination. One of a topic whose time
        is over is leased for all subscriptions at once (its `subscription` is None), if none of them has leased or
        claimed it: its ack removes it everywhere. Cheap when there are none."""

    # Durable subscriptions

    def subscribe(self, subscription: Subscription, retroactive: bool = False) -> bool:
        """From the messages on that take effect after it (`retroactive`: with all that the topic still holds), keep
        them for this subscription. Durable on return. False if it was there already; SubscriptionError if it was there
        with another selector or no_local (unsubscribe first: its backlog would be lost)."""

    def unsubscribe(self, topic: Destination, subscription: SubscriptionKey) -> int:
        """Remove it; returns how many messages it had yet to ack, leased ones too. Durable on return. Raises
        UnknownSubscriptionError, and TransactionError while a transaction has claimed one of them."""

    def subscriptions(self) -> Sequence[Subscription]:
        """All, in no order."""

    def commit(
        self,
        sends: Sequence[tuple[Destination, Outgoing]],
        acks: Sequence[Message],
        sync: bool | None = None,
        changes: Sequence[Change] = (),
    ) -> list[Receipt]:
        """Apply changes of subscriptions, sends and claimed acks, in this order, as one: after any crash, all of them
        or none. A change that is no longer one (the subscription is there, or gone) is skipped. If it raises
        anything but OutcomeUnknownError nothing took effect and the acks are still claimed."""

    def commit_nowait(
        self,
        sends: Sequence[tuple[Destination, Outgoing]],
        acks: Sequence[Message],
        sync: bool | None = None,
        changes: Sequence[Change] = (),
    ) -> Future[list[Receipt]]:
        """`commit` without waiting, as `ack_nowait`."""

    # A transaction over several stores, driven by the router (router/transactions). In the store it is one *branch*:
    # claimed acks and sends that are prepared, then committed or rolled back, by the transaction's id of 32 bytes.

    def reserve(self, sends: Sequence[tuple[Destination, Outgoing]]) -> object:
        """Room for these sends, for a `prepare` that gets what is returned; the room is free again when that is let go
        of. None where the store has no limits. Raises StoreFullError and MessageTooLargeError (nothing is reserved)."""

    def prepare(
        self,
        transaction: bytes,
        participants: Sequence[bytes],
        sends: Sequence[tuple[Destination, Outgoing]],
        acks: Sequence[Message],
        sync: bool,
        room: object = None,
        changes: Sequence[Change] = (),
    ) -> Pending[None]:
        """Make a branch durable without letting anything of it be seen.

        Once `wait` has returned, the branch survives whatever the process survives, with `sync` a power failure too
        whatever the store's policy, until commit_prepared or rollback_prepared: after any crash recover_prepared tells
        of it, and its acks are claimed again before anybody can receive. Neither depends on anything outside the store
        afterwards: a commit of what is prepared can fail for want of a working disk, not for a limit or a conflict.
        Raises, itself or in `wait`, what `commit` raises; the acks are then still claimed. If it was
        OutcomeUnknownError, the branch may be prepared. Branches of different transactions may be prepared at once, in
        this store and in others; calls come in any order from any threads.
        """

    def commit_prepared(self, transaction: bytes) -> Pending[list[Receipt]]:
        """The branch takes effect: its changes, its sends at the ends of their destinations, in order, its acks; all or
        none. Once
        `wait` has returned it is visible. It need not be durable: the coordinator keeps its decision until `sync` has
        returned, and after a crash finds the branch prepared or committed, nothing between.

        A transaction that is not prepared here is skipped: `wait` returns no receipts. Raises nothing but
        StoreFailedError, StoreFullError and ClosedError; unless the store has failed the branch is prepared still.
        """

    def rollback_prepared(self, transaction: bytes) -> Pending[bool]:
        """The branch is forgotten, and its acks are free again, each message at its old place, delivered once more:
        who had acked them can do nothing more with their Message. Once `wait` has returned that is visible; after a
        crash the branch may be prepared again. `wait` returns whether it was prepared here; if it was not, claims are
        as they were. Else as commit_prepared."""

    def recover_prepared(self) -> Sequence[Prepared]:
        """All that is prepared and waits for its outcome, oldest first."""

    def committed(self) -> Sequence[bytes]:
        """The transactions that commit_prepared has committed, not yet forgotten, oldest first; if they are very many,
        the latest. They survive restarts: when the coordinator's decisions are lost, they tell the outcome."""

    def forget(self, transactions: Sequence[bytes]) -> None:
        """No longer say of these that they are committed: all their participants are, durably."""

    def sync(self) -> None:
        """On return all that is visible survives a power failure, whatever the policy. Raises StoreFailedError."""

    def purge(self, destination: Destination, subscription: SubscriptionKey | None = None) -> int:
        """Remove what nobody holds; returns how many. Of a topic: for one subscription, or for all."""

    def delete(self, destination: Destination) -> int:
        """Remove the destination with all its messages, leased ones too, and its subscriptions; returns how many
        messages. Claimed ones refuse it (TransactionError)."""

    def retire(self) -> bool:
        """If nobody waits and nobody holds a message, refuse all further calls and return True: the store can then
        be closed, and opened again later, without anyone noticing. A volatile store refuses as long as it holds
        anything."""

    def destinations(self) -> Sequence[Destination]:
        """Those known to the store, also empty ones."""

    def depth(self, destination: Destination, subscription: SubscriptionKey | None = None) -> int:
        """Messages held, leased ones included; those that a subscription has yet to ack."""

    def counts(self, destination: Destination, subscription: SubscriptionKey | None = None) -> Counts:
        """How many messages are ready and how many leased, in constant time. Of a topic without a subscription the
        leases of all its subscriptions are counted."""

    def find(self, destination: Destination, message_id: str) -> Message | None:
        """Look at the message of that id, without a scan; None if it is not there or its id not in the duplicate window
        any more."""

    def reclaim(self) -> int:
        """Free now the space that can be freed, which otherwise happens in the background; returns bytes."""

    def stats(self) -> StoreStats:
        """A consistent picture, cheap enough to take every second."""

    def check(self) -> Iterator[str]:
        """Walk everything and yield each violation found. Slow; for tests and for `anabranch check`."""
