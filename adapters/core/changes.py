"""What can happen to a store, as values: each knows how it takes its place in the order (`plan`), what a backend is
told of it (`apply`), and what it means to those who hold messages (`settle`).

A caller puts changes into a ticket. The one thread that writes plans them: duplicates fall away, seqs are given out,
what depends on what was before is decided. What comes out goes to the backend in one write, and once that has counted
it is applied and settled under the store's lock.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

from ..store_types import Prepared, Subscription, SubscriptionKey
from .delivery import Lease
from .place import DELIVERIES, SEQ, Place, is_volatile
from .records import is_requeued
from .states import DestinationState, SubscriptionState

if TYPE_CHECKING:
    from .delivery import Delivery
    from .plan import Plan

SEQ_MAX: Final = (1 << 64) - 1

AT_ONCE: Final = 4096
"""A destination with no more messages is removed, and its subscriptions end, in one go."""

SMALL_BYTES: Final = 64
"""At most so many bytes a change takes when it is written, beside the record of a message and the texts of names."""


class Table(Protocol):
    """What a backend does for each change, in their order. Whatever of it is done already must change nothing: who was
    interrupted does it again."""

    def put(self, sends: Sequence[Send]) -> None:
        """New messages, all of one destination. Of a topic each is for those whom `entitled` names; without any it is
        not kept. Their destination and those subscriptions count them."""

    def ack(self, state: DestinationState, seq: int, number: int, place: Place | None) -> None:
        """A message is dead for the subscription of this number, and for good when all have acked it; number 0: for
        all. `place`: where it was when it was leased, if that is known."""

    def ack_range(self, state: DestinationState, first: int, last: int, number: int) -> None:
        """The same of all messages between two seqs; also for a subscription that has ended, and in a destination
        that was removed."""

    def returned(self, state: DestinationState, seq: int, number: int, count: int, place: Place | None) -> None:
        """A message was given back so often by now. `place`: where it was when it was leased, if that is known."""

    def declare(self, state: DestinationState) -> None:
        """A destination is there from now on."""

    def remove(self, state: DestinationState) -> None:
        """A destination goes with all that belongs to it: nothing of it is seen any more, and its number is never used
        again. Its messages, if there are more than AT_ONCE, may stay: then it is put into `Catalog.leaving`, and is
        told by `ack_range` which of them go, until one reaches to SEQ_MAX; or the next opening removes them."""

    def subscribe(self, subscriber: SubscriptionState) -> None:
        """A subscription begins: all that its topic holds behind `subscriber.start` is for it as well."""

    def unsubscribe(self, subscriber: SubscriptionState) -> None:
        """A subscription ends: it has acked all, so to speak. If its topic holds more than AT_ONCE messages, it may do
        so by pages, likewise."""

    def prepare(self, branch: Branch) -> None:
        """A branch waits for its outcome: `branch.payload` is to be kept until then."""

    def settled(self, branch: Branch, committed: bool) -> None:
        """A branch has its outcome; that it is committed is remembered until `forget`."""

    def forget(self, transactions: Sequence[bytes]) -> None:
        """These need no longer be remembered."""


class Change(Protocol):
    """One of the classes below."""

    @property
    def size(self) -> int:
        """At most so many bytes it takes when it is written."""

    def plan(self, plan: Plan) -> Any:
        """Take its place behind what is in the plan. Returns what its caller is told. May be done again."""

    def apply(self, table: Table) -> None:
        """Tell the backend."""

    def settle(self, delivery: Delivery) -> None:
        """It takes effect now: what becomes of who holds what. May be done again."""

    def states(self) -> Iterable[DestinationState]:
        """Where a message may have become free by it."""


def apply_all(changes: Iterable[Change], table: Table) -> None:
    """In order, messages that follow each other to one destination with one call. Of a list also those that have only
    acks between them, which come behind them: nobody acks what is not applied yet. Of anything else the next change is
    asked for once the one before it is applied, unless both are messages."""
    if type(changes) is list:
        _apply_list(changes, table)
        return
    sends: list[Send] = []
    for change in changes:
        if type(change) is Send:
            if sends and sends[0].state is not change.state:
                table.put(sends)
                sends = []
            sends.append(change)
            continue
        if sends:
            table.put(sends)
            sends = []
        change.apply(table)
    if sends:
        table.put(sends)


def _apply_list(changes: list[Change], table: Table) -> None:
    if len(changes) == 1:
        changes[0].apply(table)
        return
    sends: dict[DestinationState, list[Send]] = {}
    acks: list[Ack] = []
    for change in changes:
        if type(change) is Ack:
            acks.append(change)
        elif type(change) is Send:
            those = sends.get(change.state)
            if those is None:
                those = sends[change.state] = []
            those.append(change)
        else:
            _apply_both(sends, acks, table)
            change.apply(table)
    _apply_both(sends, acks, table)


def _apply_both(sends: dict[DestinationState, list[Send]], acks: list[Ack], table: Table) -> None:
    for those in sends.values():
        table.put(those)
    for ack in acks:
        table.ack(ack.state, ack.seq, ack.number, ack.place)
    sends.clear()
    acks.clear()


class Send:
    """A message at the end of its destination."""

    __slots__ = ("entitled", "expires_at_ms", "name", "order", "own", "record", "record_bytes", "seq", "size",
                 "state")  # fmt: skip

    def __init__(
        self, state: DestinationState, record: bytes, name: bytes | None, order: int = 0, expires_at_ms: int = 0
    ) -> None:
        self.state = state
        self.record = record
        """As records.py makes it; headers and body may be missing where the backend holds them already
        (Backend.stage)."""
        self.record_bytes = size = len(record)
        """How long it is when it is whole."""
        self.size = size + SMALL_BYTES if state.declared else size + SMALL_BYTES + declaration_bytes(state)
        self.name = name
        """The message id."""
        self.order = order
        self.expires_at_ms = expires_at_ms
        self.seq = 0
        """Set by the plan."""
        self.entitled: Sequence[SubscriptionState] = ()
        """Of a topic's: whom it is for. Set by the plan."""
        self.own: Any = None
        """The backend's: where it has written it."""

    def plan(self, plan: Plan) -> tuple[int, bool]:
        """Its seq, and whether it is a duplicate."""
        if plan.removed or not self.state.declared:  # it may be there anew since its sender looked it up
            self.state = plan.current(self.state)
        key = None
        if self.name is not None:
            key = (self.state.number, self.name)
            first = plan.seq_of(key)
            if first is not None and not is_requeued(self.record):
                return first, True
        if plan.removed or not self.state.declared:
            plan.declare(self.state)
        self.seq = plan.last_seq = seq = plan.last_seq + 1
        if key is not None:
            plan.remember(key, seq)
        if self.state.is_topic:
            self.entitled = list(plan.subscriptions(self.state).values())
            if not self.entitled:
                plan.drop()
        if self.expires_at_ms:
            plan.expire()
        plan.changes.append(self)
        return seq, False

    def apply(self, table: Table) -> None:
        table.put([self])

    def settle(self, delivery: Delivery) -> None:
        """Nobody holds it yet."""

    def states(self) -> Iterable[DestinationState]:
        return (self.state,)


class Ack:
    """A message is done with."""

    __slots__ = ("number", "place", "seq", "state")

    size: int = SMALL_BYTES

    def __init__(self, state: DestinationState, seq: int, number: int, place: Place | None = None) -> None:
        self.state, self.seq, self.place = state, seq, place
        self.number = number
        """The subscription's; 0: for all."""

    def plan(self, plan: Plan) -> None:
        plan.changes.append(self)

    def apply(self, table: Table) -> None:
        table.ack(self.state, self.seq, self.number, self.place)

    def settle(self, delivery: Delivery) -> None:
        state = self.state
        if not state.is_topic:
            state.feed.held.pop(self.seq, None)
            return
        for feed in state.feeds(self.number):
            delivery.end(feed, self.seq)

    def states(self) -> Iterable[DestinationState]:
        return ()


class AckRange:
    """All messages between two seqs are done with."""

    __slots__ = ("first", "last", "number", "state")

    size: int = SMALL_BYTES

    def __init__(self, state: DestinationState, first: int, last: int, number: int) -> None:
        self.state, self.first, self.last, self.number = state, first, last, number

    def plan(self, plan: Plan) -> None:
        plan.changes.append(self)

    def apply(self, table: Table) -> None:
        table.ack_range(self.state, self.first, self.last, self.number)

    def settle(self, delivery: Delivery) -> None:
        for feed in self.state.feeds(self.number):
            delivery.purged(feed, self.first, self.last)

    def states(self) -> Iterable[DestinationState]:
        return ()


class Returned:
    """How often a message has been given back."""

    __slots__ = ("count", "number", "place", "seq", "state")

    size: int = SMALL_BYTES

    def __init__(self, state: DestinationState, seq: int, number: int, count: int, place: Place | None = None) -> None:
        self.state, self.seq, self.number, self.count, self.place = state, seq, number, count, place

    def plan(self, plan: Plan) -> None:
        plan.changes.append(self)

    def apply(self, table: Table) -> None:
        table.returned(self.state, self.seq, self.number, self.count, self.place)

    def settle(self, delivery: Delivery) -> None:
        """It is free once its holder has given it back."""

    def states(self) -> Iterable[DestinationState]:
        return ()


class Declare:
    """A destination gets its number. Made by the plan."""

    __slots__ = ("state",)

    def __init__(self, state: DestinationState) -> None:
        self.state = state

    @property
    def size(self) -> int:
        return SMALL_BYTES + declaration_bytes(self.state)

    def plan(self, plan: Plan) -> None:
        plan.declare(self.state)

    def apply(self, table: Table) -> None:
        table.declare(self.state)

    def settle(self, delivery: Delivery) -> None:
        """Nobody holds anything of it."""

    def states(self) -> Iterable[DestinationState]:
        return ()


class Remove:
    """A destination goes, with its messages, leased ones too, and its subscriptions."""

    __slots__ = ("state",)

    size: int = SMALL_BYTES

    def __init__(self, state: DestinationState) -> None:
        self.state = state

    def plan(self, plan: Plan) -> None:
        self.state = plan.find(self.state)
        if plan.is_declared(self.state):
            plan.remove(self.state)
            plan.changes.append(self)

    def apply(self, table: Table) -> None:
        table.remove(self.state)

    def settle(self, delivery: Delivery) -> None:
        for feed in (*self.state.feeds(), self.state.feed):
            delivery.gone(feed)
        self.state.subscriptions = {}

    def states(self) -> Iterable[DestinationState]:
        return (self.state,)


class Subscribe:
    """A durable subscription begins, unless it is there."""

    __slots__ = ("number", "retroactive", "state", "subscriber", "subscription")

    def __init__(self, state: DestinationState, number: int, subscription: Subscription, retroactive: bool) -> None:
        self.state, self.number, self.subscription, self.retroactive = state, number, subscription, retroactive
        self.subscriber: SubscriptionState | None = None
        """Set by the plan: that which begins."""

    @property
    def size(self) -> int:
        return SMALL_BYTES + subscription_bytes(self.subscription) + declaration_bytes(self.state)

    def plan(self, plan: Plan) -> tuple[SubscriptionState, bool]:
        """The subscription, and whether it was there already."""
        if plan.removed or not self.state.declared:
            self.state = plan.current(self.state)
        subscriber = plan.subscriptions(self.state).get(self.subscription.key)
        if subscriber is not None:
            return subscriber, True
        plan.declare(self.state)
        start = 0 if self.retroactive else plan.last_seq
        self.subscriber = subscriber = SubscriptionState(self.number, self.state, self.subscription, start)
        plan.subscribe(subscriber)
        plan.changes.append(self)
        return subscriber, False

    def apply(self, table: Table) -> None:
        assert self.subscriber is not None
        table.subscribe(self.subscriber)

    def settle(self, delivery: Delivery) -> None:
        assert self.subscriber is not None
        self.state.join(self.subscriber)

    def states(self) -> Iterable[DestinationState]:
        return (self.state,)


class Unsubscribe:
    """A durable subscription ends, if it is there."""

    __slots__ = ("key", "state", "subscriber")

    size: int = SMALL_BYTES

    def __init__(self, state: DestinationState, key: SubscriptionKey) -> None:
        self.state, self.key = state, key
        self.subscriber: SubscriptionState | None = None
        """Set by the plan: that which ends."""

    def plan(self, plan: Plan) -> tuple[SubscriptionState | None, bool]:
        """The subscription, if it was there."""
        self.state = plan.find(self.state)
        self.subscriber = subscriber = plan.subscriptions(self.state).get(self.key)
        if subscriber is None:
            return None, False
        plan.unsubscribe(subscriber)
        plan.changes.append(self)
        return subscriber, True

    def apply(self, table: Table) -> None:
        assert self.subscriber is not None
        table.unsubscribe(self.subscriber)

    def settle(self, delivery: Delivery) -> None:
        assert self.subscriber is not None
        self.state.leave(self.subscriber)
        delivery.gone(self.subscriber.feed)

    def states(self) -> Iterable[DestinationState]:
        return (self.state,)


class Branch:
    """A store's part of a transaction over several: what its commit will do."""

    __slots__ = ("changes", "leases", "own", "participants", "payload", "promise", "reservation",
                 "returned", "transaction")  # fmt: skip

    def __init__(self, transaction: bytes, participants: tuple[bytes, ...], changes: Sequence[Change]) -> None:
        self.transaction = transaction
        self.participants = participants
        """Ids of all stores that take part."""
        self.changes = changes
        """Changes of subscriptions, sends, then acks."""
        self.leases: Sequence[Lease] = ()
        """Of what it acks."""
        self.payload = b""
        """All of it in bytes (branches.py)."""
        self.returned: list[Change] = []
        """What a rollback writes of the messages that are given back."""
        self.promise = 0
        """Bytes that are kept free for its outcome."""
        self.reservation: object = None
        """Room in the store until the outcome (limits.py)."""
        self.own: Any = None
        """The backend's."""

    @property
    def sends(self) -> list[Send]:
        return [change for change in self.changes if type(change) is Send]

    @property
    def acks(self) -> list[Ack]:
        return [change for change in self.changes if type(change) is Ack]

    @property
    def summary(self) -> Prepared:
        """What the coordinator is told."""
        changes = [change.change if type(change) is VolatileChange else change for change in self.changes]
        sends, acks = (sum(type(change) is kind for change in changes) for kind in (Send, Ack))
        return Prepared(self.transaction, self.participants, sends, acks)

    @property
    def outcome_size(self) -> int:
        """At most so many bytes its outcome takes when it is written."""
        return sum([change.size for change in self.changes]) + SMALL_BYTES


class Prepare:
    """A branch waits for its outcome from now on."""

    __slots__ = ("branch",)

    def __init__(self, branch: Branch) -> None:
        self.branch = branch

    @property
    def size(self) -> int:
        return SMALL_BYTES + len(self.branch.payload)

    def plan(self, plan: Plan) -> None:
        plan.prepare(self.branch)
        plan.changes.append(self)

    def apply(self, table: Table) -> None:
        table.prepare(self.branch)

    def settle(self, delivery: Delivery) -> None:
        """What it acks is claimed already."""

    def states(self) -> Iterable[DestinationState]:
        return ()


class Commit:
    """A prepared branch takes effect, as if it were done now (rule T8). Told twice, the second time says nothing."""

    __slots__ = ("branch",)

    def __init__(self, branch: Branch) -> None:
        self.branch = branch

    @property
    def size(self) -> int:
        return self.branch.outcome_size

    def plan(self, plan: Plan) -> list[Any] | None:
        """What comes of its changes; None if it was committed or rolled back before."""
        if not plan.is_prepared(self.branch):
            return None
        outcomes = [change.plan(plan) for change in self.branch.changes]
        plan.settle(self.branch)
        plan.changes.append(self)
        return outcomes

    def apply(self, table: Table) -> None:
        table.settled(self.branch, True)

    def settle(self, delivery: Delivery) -> None:
        """Its changes are in the plan before it."""

    def states(self) -> Iterable[DestinationState]:
        return ()


class Rollback:
    """A prepared branch is forgotten. Likewise."""

    __slots__ = ("branch",)

    def __init__(self, branch: Branch) -> None:
        self.branch = branch

    @property
    def size(self) -> int:
        return SMALL_BYTES * (2 + len(self.branch.leases))

    def plan(self, plan: Plan) -> bool:
        """Whether it was prepared."""
        if not plan.is_prepared(self.branch):
            return False
        for change in self.branch.returned:
            change.plan(plan)
        plan.settle(self.branch)
        plan.changes.append(self)
        return True

    def apply(self, table: Table) -> None:
        table.settled(self.branch, False)

    def settle(self, delivery: Delivery) -> None:
        """What it acked is free again; the store does that once it is applied (store.py)."""

    def states(self) -> Iterable[DestinationState]:
        return (feed.state for lease in self.branch.leases for feed in lease.feeds)


class Forget:
    """Committed transactions need no longer be remembered."""

    __slots__ = ("transactions",)

    def __init__(self, transactions: Sequence[bytes]) -> None:
        self.transactions = transactions

    @property
    def size(self) -> int:
        return SMALL_BYTES * (1 + len(self.transactions))

    def plan(self, plan: Plan) -> None:
        plan.changes.append(self)

    def apply(self, table: Table) -> None:
        table.forget(self.transactions)

    def settle(self, delivery: Delivery) -> None:
        """It concerns no message."""

    def states(self) -> Iterable[DestinationState]:
        return ()


class VolatileChange:
    """A change that concerns a message that is not persistent (nonpersistent.py), in a ticket: no backend is told of
    it."""

    __slots__ = ("change", "room")

    size: int = 0

    def __init__(self, change: Send | Ack | Returned) -> None:
        self.change = change
        self.room: Any = None
        """Memory that is reserved for it."""

    def plan(self, plan: Plan) -> tuple[int, bool] | None:
        """Of a message as Send.plan."""
        change, outcome = self.change, None
        if type(change) is Send:
            if plan.removed or not change.state.declared:  # as Send.plan
                change.state = plan.current(change.state)
            first = plan.volatile_seq_of(change)
            if first is not None:
                return first, True
            change.seq = plan.last_seq = seq = plan.last_seq + 1
            outcome = seq, False
        plan.keep_apart(self)
        return outcome

    def apply(self, table: Table) -> None:
        raise AssertionError("no backend is told of what is not persistent")

    def settle(self, delivery: Delivery) -> None:
        raise AssertionError("it is not among the changes of a plan")

    def states(self) -> Iterable[DestinationState]:
        return (self.change.state,)


def sent(change: Change) -> Send | None:
    """The message that it sends, persistent or not."""
    inner = change.change if type(change) is VolatileChange else change
    return inner if type(inner) is Send else None


def acks_of(leases: Iterable[Lease]) -> list[Change]:
    """What is held, as acks. What was leased for a topic as a whole is dead for all. Nonpersistent.takes finds those of
    messages that are not persistent."""
    acks: list[Change] = []
    for lease in leases:
        feed, place = lease.feeds[0], lease.place
        number = 0 if lease.whole or feed.subscription is None else feed.subscription.number
        acks.append(Ack(feed.state, place[SEQ], number, place))
    return acks


def returned_of(leases: Iterable[Lease]) -> list[Change]:
    """How often these have been given back, this time too. What was leased for a topic as a whole was not
    delivered to anybody."""
    return list(_returned(leases))


def _returned(leases: Iterable[Lease]) -> Iterator[Change]:
    for lease in leases:
        if not lease.whole:
            feed = lease.feeds[0]
            returned = Returned(feed.state, lease.seq, feed.number, lease.place[DELIVERIES] + 1, lease.place)
            yield VolatileChange(returned) if is_volatile(lease.place) else returned


def declaration_bytes(state: DestinationState) -> int:
    """Of a destination's name."""
    return len(state.destination.name.encode()) + SMALL_BYTES


def subscription_bytes(subscription: Subscription) -> int:
    """Of a subscription's texts."""
    texts = (subscription.client_id, subscription.name, subscription.selector or "")
    return sum(len(text.encode()) for text in texts)
