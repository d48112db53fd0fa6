"""Messages with all that a store knows of them, out of one store and into another of any kind: how destinations move,
and the one way to bring in messages that were sent elsewhere.

    items = read(source, destination)                  # Stored and Seen, by seq
    bring(target, destination, items, subscriptions)   # in bounded transactions

K5  What is brought takes the next places of its destination in the order in which it comes. No duplicate window turns
    it away, and its id is in the window from then on. An id whose message is gone (Seen) comes into the window alone.
K6  Messages are written, and what has happened to them (who has acked them, how often they came back) is written behind
    that: a backend never meets an ack in the write of its message. After a crash the target therefore holds a prefix of
    what came, whose last page may lack what has happened to it. `common` tells whether that is so: if it is whole one
    may go on behind it, else the destination is deleted in the target, and begun anew.
K7  A subscription begins just before the first message that it has yet to ack, or behind all: so none gets what was not
    for it, but where it has acked one between two others.

A large body is copied under the same name, and read back, before the message that names it is written: so records are
the same in both stores, and to compare them is enough.

Nobody else uses the destination in the target meanwhile, nor in the source, but for live_copy.py. Messages that are not
persistent are not among what is read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final, cast

from ....policies.errors import CorruptionError, MessageTooLargeError
from ....policies.names.destination import Destination
from .. import store_types
from ..operations.branches import send_of
from ..operations.changes import VAGUE_MARK, Ack, Change, Mark, Postponed, Returned, Send, vague_mark
from ..record.encoding import HEAD, as_carried, is_large, reference_in
from ..record.place import DELIVERIES, SEQ, Place
from ..state.leases import DestinationState, SubscriptionState
from ..state.sweep import wall_ms
from ..store_types import Subscription, SubscriptionKey

if TYPE_CHECKING:
    from ..engine.engine import Engine
    from ..operations.plan import Plan
    from ..record.large import StoredBody
    from ..store import Store

PAGE: Final = 512
"""Messages that are written together."""
PAGE_BYTES: Final = 1 << 20
"""At most so many bytes of them are written together, but for a message that is larger itself."""
READ: Final = 64
"""Messages that are looked up together."""
_NOBODY: Final[Mapping[SubscriptionKey, int]] = {}
_AT_ONCE: Final[tuple[int, Mapping[SubscriptionKey, int]]] = (0, _NOBODY)


@dataclass(frozen=True, slots=True)
class Stored:
    """A message as it lies in a store."""

    record: bytes
    """The record as record/encoding.py makes it, and as another store is given it (`as_carried`)."""
    deliveries: int = 0
    """The number of times that a queue's message was given back."""
    waiting: Mapping[SubscriptionKey, int] = field(default_factory=dict)
    """The subscriptions that have yet to ack a topic's message, and how often each gave it back."""
    until: int = 0
    """Until when it waits (ms), of a topic's for all; 0: it does not."""
    untils: Mapping[SubscriptionKey, int] = field(default_factory=dict)
    """Times (ms) until which a topic's message waits for single subscriptions."""
    seq: int = field(default=0, compare=False)
    """The place where the message lies."""
    large: StoredBody | None = field(default=None, compare=False)
    """Its body, if that is kept apart."""

    @property
    def bytes(self) -> int:
        """Return how many bytes the message takes in all, its body too."""
        return len(self.record) + (self.large.size if self.large is not None else 0)


@dataclass(frozen=True, slots=True)
class Seen:
    """The id of a message that is gone, in the duplicate window still."""

    name: bytes


Item = Stored | Seen


# Reading


def read(
    store: Store,
    destination: Destination,
    after: int = 0,
    wanted: Callable[[int], bool] | None = lambda seq: True,
    looked: Callable[[int], None] = lambda seq: None,
) -> Iterator[Item]:
    """Yield all that a store holds of a destination behind a seq, and the ids that it remembers. Messages and ids come
    in the order in which they were sent. Holds a page of places and one message at a time, and the ids whose messages
    are gone, of those with a seq that is `wanted` (None: of none). Others may send and ack meanwhile: then it is as of
    some moment for each page, and `looked` is told how far it has looked ahead. Raises CorruptionError."""
    engine = store._engine
    state = engine.catalog.destinations.get(destination)
    if state is None:
        return
    number = state.number
    ids = [] if wanted is None else engine.asked(lambda: _ids(engine, number))
    ids = sorted(one for one in ids if wanted is not None and wanted(one[0]))
    at = 0
    for page, waiting, untils in _pages(store, state, after):
        looked(page[-1][SEQ])
        for place, record in zip(page, engine.rows.bodies(state, page), strict=True):
            while at < len(ids) and ids[at][0] <= place[SEQ]:
                if ids[at][0] < place[SEQ]:
                    yield Seen(ids[at][1])
                at += 1
            held = waiting.get(place[SEQ], _NOBODY)
            if record is not None and (held or not state.is_topic):  # else it was left by a subscription that ended
                until, each = untils.get(place[SEQ], _AT_ONCE)
                record = as_carried(record)
                large = store.large_body(reference_in(record)) if is_large(record) else None
                if large is not None and engine.asked(partial(engine.rows.row, state, None, place[SEQ])) is None:
                    continue  # it died before its body was held here, which may be gone
                yield Stored(record, 0 if state.is_topic else place[DELIVERIES], held, until, each, place[SEQ], large)
    for _, name in ids[at:]:
        yield Seen(name)


def seqs(store: Store, destination: Destination) -> Iterator[int]:
    """Yield the seqs of the messages that `read` tells of, in the same order."""
    state = store._engine.catalog.destinations.get(destination)
    if state is not None:
        for page, waiting, _ in _pages(store, state):
            yield from (place[SEQ] for place in page if not state.is_topic or waiting.get(place[SEQ]))


def _ids(engine: Engine, number: int) -> list[tuple[int, bytes]]:
    """Return ids in the duplicate window, with the seqs of their messages. The window is the writer's, who may be
    adding to it. Marks are vague from here on: what is brought has other seqs."""
    while True:
        try:
            window = engine.sequencer.window.items()
            return [(seq, vague_mark(key[1])) for key, seq in window if key[0] == number]
        except RuntimeError:
            continue


def names(store: Store, destination: Destination) -> set[bytes]:
    """Return the message ids of a destination that a store remembers."""
    engine = store._engine
    state = engine.catalog.destinations.get(destination)
    if state is None or state.is_map:
        return set()  # a value takes the place of the one before
    return {name for _, name in engine.asked(lambda: _ids(engine, state.number))}


def messages(items: Iterable[Item]) -> Iterator[Stored]:
    """Return those items that are messages."""
    return (item for item in items if isinstance(item, Stored))


Waiting = Mapping[int, Mapping[SubscriptionKey, int]]
"""By a message's seq: who has yet to ack it, and how often each gave it back."""

Untils = Mapping[int, tuple[int, Mapping[SubscriptionKey, int]]]
"""By a message's seq, of those that wait: until when, for all and for single subscriptions."""


def _pages(store: Store, state: DestinationState, after: int = 0) -> Iterator[tuple[Sequence[Place], Waiting, Untils]]:
    """Yield where the messages behind a seq are, by seq, for whom, and until when they wait."""
    engine = store._engine
    while True:
        start = after
        page = engine.asked(lambda: engine.rows.rows(state, None, None, start, READ))  # noqa: B023
        if not page:
            return
        after = page[-1][SEQ]
        waiting: dict[int, dict[SubscriptionKey, int]] = {}
        for key, subscriber in state.subscriptions.items():
            for place in _yet_to_ack(store, state, subscriber, start, after):
                waiting.setdefault(place[SEQ], {})[key] = place[DELIVERIES]
        untils = engine.asked(lambda: _untils(engine, state, page)) if engine.delivery.next_due else {}  # noqa: B023
        yield page, waiting, untils


def _untils(engine: Engine, state: DestinationState, page: Sequence[Place]) -> Untils:
    untils: dict[int, tuple[int, dict[SubscriptionKey, int]]] = {}
    several = [(key, one) for key, one in state.subscriptions.items() if one.delayed]
    if not state.delayed and not several:
        return {}
    for place in page:
        seq = place[SEQ]
        until = engine.delivery.until(state, None, seq) if state.delayed else 0
        each = {key: engine.delivery.until(state, one, seq) for key, one in several} if not until else {}
        each = {key: at for key, at in each.items() if at}
        if until or each:
            untils[seq] = until, each
    return untils


def _yet_to_ack(
    store: Store, state: DestinationState, subscriber: SubscriptionState, after: int, last: int
) -> Iterator[Place]:
    engine = store._engine
    while after < last:
        start = after
        page = engine.asked(lambda: engine.rows.rows(state, subscriber, None, start, READ))  # noqa: B023
        if not page:
            return
        yield from (place for place in page if place[SEQ] <= last)
        after = page[-1][SEQ]


@dataclass(frozen=True, slots=True)
class Amount:
    """The amount that a store holds of a destination."""

    messages: int = 0
    bytes: int = 0
    """Bytes of the messages' records."""
    subscriptions: tuple[Subscription, ...] = ()
    known: bool = False
    """True if the destination has been sent or subscribed to, and was not deleted since."""


def is_shared(store: Store) -> bool:
    """Return whether other routers use a store at the same time: nothing of it can be copied, then."""
    return shares(store.options)


def shares(options: object) -> bool:
    """Return whether a store with these options `is_shared`."""
    return bool(getattr(options, "shared", False))


def amount(store: Store, destination: Destination) -> Amount:
    """Return what a store holds of a destination: in constant time but for the subscriptions, and for a shared store,
    which counts."""
    if is_shared(store):
        return cast("Amount", store.amount(destination))  # type: ignore[attr-defined]
    engine = store._engine

    def asked() -> Amount:
        state = engine.catalog.destinations.get(destination)
        if state is None:
            return Amount()
        subscriptions = tuple(one.subscription for one in state.subscriptions.values())
        return Amount(state.count, state.bytes, subscriptions, state.declared)

    return engine.asked(asked)


def remove(store: Store, destination: Destination) -> None:
    """Remove a destination, whatever gate there is (gates.py). Durable on return. Idempotent."""
    store._removal.delete(destination, moves=True)
    store.sync()


# Comparing


class Digest:
    """The digest of a series of messages: their records, in order, and what has happened to them. Until when they wait
    does not count: of two stores one may bring back first what is due."""

    def __init__(self) -> None:
        self.count: int = 0
        self._hash = hashlib.sha256()

    def add(self, message: Stored) -> None:
        """Add one more message."""
        self.count += 1
        happened = repr((len(message.record), message.deliveries, sorted(message.waiting.items())))
        self._hash.update(happened.encode())
        self._hash.update(message.record)

    def hex(self) -> str:
        """Return the digest of all messages so far."""
        return self._hash.hexdigest()


def digest(stored: Iterable[Stored]) -> Digest:
    """Return the digest of these messages."""
    of_all = Digest()
    for message in stored:
        of_all.add(message)
    return of_all


def common(source: Store, target: Store, destination: Destination) -> int | None:
    """Return how many messages the target holds, if these are the first of the source's and as they are there; else
    None."""
    count, rest = 0, messages(read(source, destination))
    for there in messages(read(target, destination)):
        ours = next(rest, None)
        if ours is None or ours.record != there.record or not _alike(ours, there):
            return None
        count += 1
    return count


def _alike(ours: Stored, there: Stored) -> bool:
    """Return whether the same has happened to both (rule K6). A message that is due by now may have been brought back
    in one of them."""
    now = wall_ms()
    happened, waits = [], []
    for one in (ours, there):
        happened.append((one.deliveries, dict(one.waiting)))
        waits.append((max(one.until, now), {key: until for key, until in one.untils.items() if until > now}))
    return happened[0] == happened[1] and waits[0] == waits[1]


@dataclass(frozen=True, slots=True)
class Prefix:
    """The messages that the target of an interrupted `bring` holds."""

    messages: int
    whole: bool
    """True if what has happened to them is there too (rule K6): one may go on behind them."""


def prefix(items: Iterable[Item], target: Store, destination: Destination) -> Prefix | None:
    """Return how far bringing these messages, and no ids beside them, has come; None if the target holds anything that
    is not theirs, or remembers an id whose message is gone: then somebody has used the destination."""
    rest, count, whole = messages(items), 0, True
    for there in read(target, destination):
        ours = next(rest, None)
        if isinstance(there, Seen) or ours is None or ours.record != there.record:
            return None
        count += 1
        whole = whole and _alike(ours, there)
    return Prefix(count, whole)


# Writing


class Migrated(Change):
    """A message that was sent elsewhere before, at the end of its destination: stored whatever the duplicate window
    says of its id."""

    __slots__ = ("name", "send", "size")

    def __init__(self, send: Send) -> None:
        self.send: Send = send
        self.name: Final = send.name
        self.size: int = send.size

    def plan(self, plan: Plan) -> tuple[int, bool]:
        """Plan the send, as Send.plan."""
        send = self.send
        if send.state.is_map:
            return send.plan(plan)
        try:
            send.name = None
            outcome = send.plan(plan)
        finally:
            send.name = self.name
        if self.name is not None:
            plan.remember((send.state.number, self.name), outcome[0])
        return outcome


class Bringing:
    """One destination of a store, while messages are brought there."""

    def __init__(
        self,
        store: Store,
        destination: Destination,
        subscriptions: Sequence[Subscription] = (),
        placed: Callable[[Item, int], None] = lambda item, seq: None,
    ) -> None:
        """`subscriptions`: all that its topic is to have in the end. `placed` is called with each item that was
        written, and its new seq."""
        self._store, self._destination = store, destination
        self._placed = placed
        self._settings = store.backend.settings
        there = {one.key for one in amount(store, destination).subscriptions}
        self._to_come = {one.key: one for one in subscriptions if one.key not in there}

    def page(self, items: Sequence[Item]) -> None:
        """Write these, in order. Visible on return; as durable as can be once `end` has returned. Raises StoreFullError
        and MessageTooLargeError before anything of the page is written."""
        self._require_small(items)
        for some in self._between_subscriptions(items):
            if some:
                self._write(some)

    def end(self) -> None:
        """End the bringing: subscriptions that nothing waits for begin, the destination is there though it is empty.
        All of it is durable on return."""
        self._subscribe(list(self._to_come))
        self._store.declare(self._destination, moves=True)

    def _require_small(self, items: Sequence[Item]) -> None:
        limit = self._settings.message_bytes_max
        for item in items:
            size = len(item.record) - HEAD.size if isinstance(item, Stored) else 0
            if size > limit:
                raise MessageTooLargeError(
                    f"a message of {size} bytes of {self._destination} is larger than message_bytes_max, {limit}, of "
                    f"store {self._store.name!r}; raise the limit, or receive the message first"
                )

    def _between_subscriptions(self, items: Sequence[Item]) -> Iterator[Sequence[Item]]:
        """Yield the items in parts; the subscriptions of each part have begun when it comes (rule K7)."""
        first = 0
        for position, item in enumerate(items):
            if isinstance(item, Stored) and (new := [key for key in item.waiting if key in self._to_come]):
                yield items[first:position]
                self._subscribe(new)
                first = position
        yield items[first:]

    def _subscribe(self, keys: Iterable[SubscriptionKey]) -> None:
        sending = self._store._sending
        for key in keys:
            sending.write([sending.change(store_types.Change(self._to_come[key], True, False))], moves=True)
            self._store._engine.asked(lambda: None)
            del self._to_come[key]

    def _write(self, items: Sequence[Item]) -> None:
        store = self._store
        sending = store._sending
        state = store._engine.catalog.state(self._destination)
        changes = [self._change(state, item) for item in items]
        room = None
        if store._engine.quotas is not None:
            records = [item.bytes for item in items if isinstance(item, Stored)]
            room = store._engine.quotas.reserve_moved(state, (len(records), sum(records)))
        outcomes = sending.write(changes, unsynced=True, reservation=room, moves=True)
        state = store._engine.catalog.destinations[self._destination]
        happened: list[Change] = []
        for item, (seq, duplicate) in zip(items, outcomes, strict=True):
            if not duplicate:
                self._placed(item, seq)
                happened += _happened(state, seq, item)
        if happened:
            sending.write(happened, unsynced=True)

    def _change(self, state: DestinationState, item: Item) -> Change:
        priorities = self._settings.priorities
        if isinstance(item, Stored):
            send = send_of(state, item.record, priorities)
            if item.large is not None:
                try:
                    send.large = self._store.bring_body(item.large)
                except CorruptionError as error:
                    error._say(f"the body of message {item.seq} of {self._destination}: {error.reason}")
                    raise
            return Migrated(send)
        if item.name.startswith(VAGUE_MARK):
            return Mark(state, item.name, declares=True)
        record = HEAD.pack(0, 0, len(item.name), 0, 0, 0) + item.name
        return send_of(state, record, priorities)


def _happened(state: DestinationState, seq: int, item: Item) -> Iterator[Change]:
    """Yield the changes that repeat the history of a message that was just written."""
    if isinstance(item, Seen):
        yield Ack(state, seq, 0)
    elif not state.is_topic:
        if item.deliveries:
            yield Returned(state, seq, 0, item.deliveries)
        if item.until:
            yield Postponed(state, seq, 0, item.until)
    else:
        if item.until:
            yield Postponed(state, seq, 0, item.until)
        for key, subscriber in state.subscriptions.items():
            count = item.waiting.get(key)
            if count is None:
                if subscriber.start < seq:
                    yield Ack(state, seq, subscriber.number)
            else:
                if count:
                    yield Returned(state, seq, subscriber.number, count)
                if key in item.untils:
                    yield Postponed(state, seq, subscriber.number, item.untils[key])


def pages(items: Iterable[Item]) -> Iterator[list[Item]]:
    """Yield items in parts as `Bringing.page` takes them."""
    page: list[Item] = []
    size = 0
    for item in items:
        more = len(item.record) if isinstance(item, Stored) else len(item.name)
        if page and (len(page) >= PAGE or size + more > PAGE_BYTES):
            yield page
            page, size = [], 0
        page.append(item)
        size += more
    if page:
        yield page


def bring(
    store: Store, destination: Destination, items: Iterable[Item], subscriptions: Sequence[Subscription] = ()
) -> Digest:
    """Write all of them, durably; returns what the messages among them come to. Raises StoreFullError and Message-
    TooLargeError: what came before stays."""
    bringing, copied = Bringing(store, destination, subscriptions), Digest()
    for page in pages(items):
        bringing.page(page)
        for message in messages(page):
            copied.add(message)
    bringing.end()
    return copied
