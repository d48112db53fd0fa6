"""Changes of a store, as values. Each knows its place in the order (`plan`), what a backend is told (`apply`), and what
it means to holders of messages (`settle`). Here are the changes of messages. Those of destinations and subscriptions
are in destination_changes.py, those of transactions in branches.py.

A caller puts changes into a ticket. The one thread that writes plans them: duplicates fall away, seqs are given out,
what depends on what was before is decided. What comes out goes to the backend in one write, and once that has counted
it is applied and settled under the store's lock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple, NoReturn, Protocol

from ...wal.ticket import GROWS, OWED, SHRINKS
from ..messages import DROPPED
from ..record.encoding import HEAD, REMOVAL, is_requeued
from ..record.place import DELIVERIES, SEQ, Place
from ..state.leases import LEAVING, DestinationState, Lease, SubscriptionState

if TYPE_CHECKING:
    from ....policies.errors import AnabranchError
    from ..record.large import StoredBody
    from ..state.delivery import Delivery
    from ..state.duplicates import Key
    from ..state.rows import Rows
    from ..store_types import SubscriptionKey
    from .pending_counts import PendingCounts

SMALL_BYTES: Final = 64
"""At most so many bytes a change takes when it is written, beside the record of a message and the texts of names."""


class Change:
    """A change: one of those below, or in the other modules."""

    __slots__ = ()

    size: int = SMALL_BYTES
    """At most so many bytes it takes when it is written."""
    settles: ClassVar[bool] = False
    """True if the change concerns a message that somebody holds, and nothing else."""
    brings: ClassVar[bool] = False
    """True if the change brings something to its destination; if that was removed, to the one that has its name by
    then."""
    leaves: ClassVar[int] = GROWS
    """The room that it has to leave in a log on a full disk (wal/ticket.py)."""

    def plan(self, plan: Any) -> Any:
        """Take its place behind what is in the plan (plan.py). Returns what its caller is told. May be done again."""
        plan.changes.append(self)

    def apply(self, table: Any) -> None:
        """Tell the backend, by its table (table.py)."""
        raise AssertionError(f"no backend is told of {self}")

    def settle(self, delivery: Delivery) -> None:
        """Settle what becomes of holders of messages: the change takes effect now. May be done again."""

    def states(self) -> Iterable[DestinationState]:
        """Return the destinations where a message may have become free by the change."""
        return ()

    def add_to(self, counts: PendingCounts) -> None:
        """Count what there will be more, or less, once the change is applied."""

    def undo(self, delivery: Delivery, rows: Rows) -> None:
        """Give back what the change would have taken from its holders, since it has not taken effect. May be done
        again."""

    def give_back_room(self) -> None:
        """Give back what was reserved for the change, since it has not taken effect."""

    @property
    def inner(self) -> Change:
        """Return the change that a backend would be told of: itself, unless it stands for another."""
        return self


class MessagePlan(Protocol):
    """A plan (plan.py), as changes of messages look at it and add to it."""

    changes: list[Change]
    last_seq: int
    more: int
    removed: Sequence[DestinationState]

    def current(self, state: DestinationState) -> DestinationState: ...

    def is_declared(self, state: DestinationState) -> bool: ...

    def declare(self, state: DestinationState) -> None: ...

    def subscriptions(self, state: DestinationState) -> Mapping[SubscriptionKey, SubscriptionState]: ...

    def naming(self, state: DestinationState) -> Naming: ...

    def remember(self, key: Key, seq: int) -> None: ...

    def drop(self) -> None: ...

    def expire(self) -> None: ...

    def group(self, send: Send) -> None: ...


class MessageTable(Protocol):
    """The steps of a backend for changes of messages (table.py)."""

    def put(self, sends: Sequence[Send]) -> None:
        """Put new messages, all of one destination. A topic's message is for those whom `recipients` names; without any
        it is not kept. Their destination and those subscriptions count them. A map's message takes the place of the
        message of the same id, which is dead from then on. A REMOVAL (encoding.py) is dead itself. So is one that comes
        after another of a higher seq."""

    def ack(self, acks: Sequence[Ack]) -> None:
        """Ack messages: each is dead for the subscription of its ack's number, and for good when all have acked it;
        number 0: for all. The `place` of an ack: where its message was when it was leased, if that is known."""

    def ack_range(self, state: DestinationState, first: int, last: int, number: int) -> None:
        """Ack all messages between two seqs; also for a subscription that has ended, and in a destination that was
        removed."""

    def returned(self, state: DestinationState, seq: int, number: int, count: int, place: Place | None) -> None:
        """Set how often a message was given back by now. `place`: where it was when it was leased, if that is known."""

    def postpone(self, state: DestinationState, seq: int, number: int, due: int, place: Place | None) -> None:
        """Let a message wait until this time (ms), or, at 0, no longer: Rows tells what that means. For the
        subscription of this number; 0: a queue's, or a topic's for all. Nothing happens to one that is dead, or acked.
        The destination, and subscriptions, count what waits. A backend that `postpones` has it."""


class Naming:
    """The meaning of message ids in a destination: a message of the same id is a duplicate. Told by changes, with their
    plan (plan.py)."""

    def first(self, plan: Any, send: Send) -> int | None:
        """Return the seq of the message that `send` is a duplicate of; None: it is none."""
        assert send.name is not None
        first = plan.seq_of((send.state.number, send.name))
        return None if first is None or is_requeued(send.record) else first

    def given(self, plan: Any, send: Send) -> None:
        """Note a message that has its seq."""
        assert send.name is not None
        plan.remember((send.state.number, send.name), send.seq)

    def acked_many(self, plan: Any) -> None:
        """Note that any messages of such a destination may go."""


class _Extras(NamedTuple):
    """The fields that few messages have, so that the others pay for one question."""

    deliver_at_ms: int
    large: StoredBody | None
    grouped: bool

    def plan(self, plan: MessagePlan, send: Send) -> None:
        """Plan what goes with a message that has its seq."""
        if self.large is not None:
            self.large.bodies.planned(plan, send)
        if self.grouped:
            plan.group(send)
        if self.deliver_at_ms:
            plan.changes.append(Postponed(send.state, send.seq, 0, self.deliver_at_ms))


class Send(Change):
    """A message at the end of its destination."""

    __slots__ = ("expires_at_ms", "extras", "name", "order", "own", "recipients", "record", "seq", "size", "state")

    brings = True

    def __init__(
        self, state: DestinationState, record: bytes, name: bytes | None, order: int = 0, expires_at_ms: int = 0
    ) -> None:
        self.state: DestinationState = state
        self.record: Final = record
        """As encoding.py makes it."""
        size = len(record)
        self.size: int = size + SMALL_BYTES if state.declared else size + SMALL_BYTES + declaration_bytes(state)
        self.name: bytes | None = name
        """The message id."""
        self.order: int = order
        self.expires_at_ms: Final = expires_at_ms
        self.seq: int = 0
        """Set by the plan."""
        self.recipients: Sequence[SubscriptionState] = ()
        """The subscriptions that a topic's message is for. Set by the plan."""
        self.own: Any = None
        """The backend's: where it has written it."""
        self.extras: _Extras | None = None
        """Fields that few messages have, so that the others pay for one question: `deliver_at_ms`, `large`,
        `is_grouped`."""

    @property
    def deliver_at_ms(self) -> int:
        """Return until when the message waits; 0: it does not. Set by `wait_until`."""
        return 0 if self.extras is None else self.extras.deliver_at_ms

    @property
    def large(self) -> StoredBody | None:
        """Return the body, if that is kept apart."""
        return None if self.extras is None else self.extras.large

    @large.setter
    def large(self, body: StoredBody | None) -> None:
        self._set_extras(self.deliver_at_ms, body, self.is_grouped)

    @property
    def is_grouped(self) -> bool:
        """Return whether the message has a group."""
        return self.extras is not None and self.extras.grouped

    @is_grouped.setter
    def is_grouped(self, grouped: bool) -> None:
        self._set_extras(self.deliver_at_ms, self.large, grouped)

    def wait_until(self, due: int) -> None:
        """Do not deliver the message before this time (ms; 0: at once). Called before the send is in a ticket."""
        self._set_extras(due, self.large, self.is_grouped)
        if due:
            self.size += SMALL_BYTES

    def _set_extras(self, due: int, body: StoredBody | None, grouped: bool) -> None:
        self.extras = _Extras(due, body, grouped) if due or body is not None or grouped else None

    def plan(self, plan: MessagePlan) -> tuple[int, bool]:
        """Give the message its seq; return the seq, and whether the message is a duplicate by an id of its sender's."""
        state = self.state
        unsure = plan.removed or not state.declared
        if unsure:  # it may be there anew since its sender looked it up
            self.state = state = plan.current(state)
        naming = None
        if self.name is not None:
            naming = plan.naming(state)
            first = naming.first(plan, self)
            if first is not None:
                return first, bool(self.name[0])  # who gave no id has sent none twice
        if unsure:
            plan.declare(state)
        self.seq = plan.last_seq = seq = plan.last_seq + 1
        if naming is not None:
            naming.given(plan, self)
        if state.is_topic:
            self.recipients = list(plan.subscriptions(state).values())
            if not self.recipients:
                plan.drop()
        if self.expires_at_ms:
            plan.expire()
        plan.changes.append(self)
        if self.extras is not None:
            self.extras.plan(plan, self)
        return seq, False

    def apply(self, table: MessageTable) -> None:
        table.put([self])

    def states(self) -> Iterable[DestinationState]:
        return (self.state,)

    def add_to(self, counts: PendingCounts) -> None:
        counts.add_send(self.state, self.recipients)


class Refused(Change):
    """A change in place of what is refused, since what its caller had asked for just before it was."""

    __slots__ = ("error",)

    size: int = 0

    def __init__(self, error: AnabranchError) -> None:
        self.error: AnabranchError = error

    def plan(self, plan: MessagePlan) -> NoReturn:
        raise self.error


class Dropped(Change):
    """Stands for a message that is not stored, in the ticket of a transaction."""

    __slots__ = ()

    size: int = 0
    leaves = OWED

    def plan(self, plan: MessagePlan) -> tuple[int, bool]:
        """Return the outcome that the message's receipt tells."""
        return DROPPED, False


class SendMany(Change, Sequence[Send]):
    """Messages at the end of a queue that are bodies alone: no ids, no headers, no expiry, in a store that does not
    order by priority. Only for a backend that `takes_many`."""

    __slots__ = ("bodies", "head", "own", "record_bytes", "seq", "size", "state")

    brings = True
    order: int = 0

    def __init__(self, state: DestinationState, head: bytes, bodies: tuple[bytes, ...], record_bytes: int) -> None:
        self.state: DestinationState = state
        self.head: Final = head
        """The bytes before the body in the record of each."""
        self.bodies: tuple[bytes, ...] = bodies
        self.record_bytes: Final = record_bytes
        """Bytes of all records together."""
        self.size: int = record_bytes + SMALL_BYTES * len(bodies)
        if not state.declared:
            self.size += declaration_bytes(state)
        self.seq: int = 0
        """The seq of the first; the others follow. Set by the plan."""
        self.own: Any = None
        """The backend's: where it has written them."""

    def __len__(self) -> int:
        return len(self.bodies)

    def __getitem__(self, at: Any) -> Any:
        send = Send(self.state, self.head + self.bodies[at], None)
        send.seq = self.seq + at
        return send

    def plan(self, plan: MessagePlan) -> int:
        """Give the messages their seqs; return the first."""
        if plan.removed or not self.state.declared:  # as Send.plan
            self.state = plan.current(self.state)
            plan.declare(self.state)
        self.seq = plan.last_seq + 1
        plan.last_seq += len(self.bodies)
        plan.more += len(self.bodies) - 1
        plan.changes.append(self)
        return self.seq

    def apply(self, table: MessageTable) -> None:
        table.put(self)

    def states(self) -> Iterable[DestinationState]:
        return (self.state,)

    def add_to(self, counts: PendingCounts) -> None:
        counts.add(self.state, len(self))


MARK: Final = b"\0\0"
"""The names of transactions that are remembered begin so, among message ids."""
VAGUE_MARK: Final = b"\0\1"
"""So do those whose seq tells nothing of the seqs of what the transaction has sent."""


def vague_mark(name: bytes) -> bytes:
    """Return a name, a transaction's perhaps, as that of one of whose sends the seqs are not known."""
    return VAGUE_MARK + name[len(MARK) :] if name.startswith(MARK) else name


class Mark(Change):
    """The change by which a store remembers the name of a transaction, written with it: an id of the duplicate window
    without a message. What is written of it is a message and its ack, so that any version reads it; of a map, a
    REMOVAL. It takes a seq of its own, before those of the transaction's sends."""

    __slots__ = ("declares", "name", "own", "record", "seq", "size", "state")

    brings = True
    leaves = SHRINKS  # beside sends they say what their ticket leaves

    def __init__(self, state: DestinationState, name: bytes, declares: bool) -> None:
        """Take a name. `declares`: its destination is there by then, as the transaction sends or subscribes there."""
        self.state: DestinationState = state
        self.name: bytes = name
        self.declares: Final = declares
        self.record: Final = HEAD.pack(0, 0, len(name), 0, 0, REMOVAL if state.is_map else 0) + name
        self.size: int = len(self.record) + 2 * SMALL_BYTES + (0 if state.declared else declaration_bytes(state))
        self.seq: int = 0
        """Set by the plan."""
        self.own: Any = None
        """The backend's: where it has written it."""

    def plan(self, plan: MessagePlan) -> tuple[int, bool]:
        """Remember the name, unless its destination is gone: then its ids would be gone too. Returns what no caller is
        told."""
        if plan.removed or not self.state.declared:
            self.state = plan.current(self.state)
            if not (self.declares or plan.is_declared(self.state)):
                return 0, True
            plan.declare(self.state)
        self.seq = plan.last_seq = plan.last_seq + 1
        plan.remember((self.state.number, self.name), self.seq)
        plan.changes += (self, Ack(self.state, self.seq, 0))
        return self.seq, True

    def apply(self, table: MessageTable) -> None:
        """Do nothing: there is no message. A journal takes note of the record (short_lived)."""

    def add_to(self, counts: PendingCounts) -> None:
        if not self.state.is_topic:
            counts.add(self.state, 1)  # which its ack takes off


class Ack(Change):
    """The change by which a message is done with."""

    __slots__ = ("drops", "number", "place", "seq", "state")

    settles = True
    leaves = SHRINKS

    def __init__(
        self, state: DestinationState, seq: int, number: int, place: Place | None = None, drops: bool = False
    ) -> None:
        self.state: DestinationState = state
        self.seq: int = seq
        self.place: Place | None = place
        self.number: int = number
        """The subscription's; 0: for all."""
        self.drops: Final = drops
        """True if the ack makes room, and nobody has received the message: a branch that is rolled back gives it back
        as it was."""

    def apply(self, table: MessageTable) -> None:
        table.ack([self])

    def settle(self, delivery: Delivery) -> None:
        state = self.state
        if not state.is_topic:
            state.channel.held.pop(self.seq, None)
            return
        for channel in state.channels(self.number):
            delivery.end(channel, self.seq)
            if not self.number:
                channel.remove_fetched(self.seq, self.seq)  # of who has come since it was leased for all

    def add_to(self, counts: PendingCounts) -> None:
        counts.add_ack(self.state, self.number)

    def undo(self, delivery: Delivery, rows: Rows) -> None:
        for channel in self.state.channels(self.number):
            lease = channel.held.get(self.seq)
            if lease is not None and lease.hold == LEAVING:
                delivery.unlease(lease, rows)


class AckRange(Change):
    """The change by which all messages between two seqs are done with."""

    __slots__ = ("first", "last", "number", "state")

    leaves = SHRINKS

    def __init__(self, state: DestinationState, first: int, last: int, number: int) -> None:
        self.state: DestinationState = state
        self.first: int = first
        self.last: int = last
        self.number: int = number

    def plan(self, plan: MessagePlan) -> None:
        plan.naming(self.state).acked_many(plan)
        plan.changes.append(self)

    def apply(self, table: MessageTable) -> None:
        table.ack_range(self.state, self.first, self.last, self.number)

    def settle(self, delivery: Delivery) -> None:
        for channel in self.state.channels(self.number):
            delivery.purged(channel, self.first, self.last)

    def add_to(self, counts: PendingCounts) -> None:
        counts.unknown |= {self.state, *self.state.subscriptions.values()}


class Returned(Change):
    """The change of how often a message has been given back."""

    __slots__ = ("count", "number", "place", "seq", "state")

    settles = True
    leaves = SHRINKS

    def __init__(self, state: DestinationState, seq: int, number: int, count: int, place: Place | None = None) -> None:
        self.state: DestinationState = state
        self.seq: int = seq
        self.number: int = number
        self.count: int = count
        self.place: Place | None = place

    def apply(self, table: MessageTable) -> None:
        table.returned(self.state, self.seq, self.number, self.count, self.place)


class Postponed(Change):
    """The change by which a message waits until a time, or waits no longer: then it is free, at its old place. A
    message that is not there any more, or acked, stays as it is."""

    __slots__ = ("due", "number", "place", "seq", "state")

    settles = True
    leaves = SHRINKS

    def __init__(self, state: DestinationState, seq: int, number: int, due: int, place: Place | None = None) -> None:
        self.state: DestinationState = state
        self.seq: int = seq
        self.place: Place | None = place
        self.number: int = number
        """The subscription's that it waits for; 0: a queue, or all of a topic's."""
        self.due: int = due
        """Milliseconds since the epoch; 0: it waits no longer."""

    def apply(self, table: MessageTable) -> None:
        table.postpone(self.state, self.seq, self.number, self.due, self.place)

    def states(self) -> Iterable[DestinationState]:
        return () if self.due else (self.state,)


def sent(change: Change) -> Send | None:
    """Return the message that a change sends, persistent or not."""
    inner = change.inner
    return inner if type(inner) is Send else None


def give_back_room(changes: Iterable[Change]) -> None:
    """Give back what was reserved for changes that have not taken effect."""
    for change in changes:
        change.give_back_room()


def acks_of(leases: Iterable[Lease], drops: bool = False) -> list[Change]:
    """Return acks of leases. A message that was leased for a topic as a whole is dead for all. `drops`: as
    Ack.drops."""
    return [
        Ack(lease.channels[0].state, lease.seq, 0 if lease.whole else lease.channels[0].number, lease.place, drops)
        for lease in leases
    ]


def returned_of(leases: Iterable[Lease]) -> list[Change]:
    """Return the changes that say how often these have been given back, this time too. A message that was leased for a
    topic as a whole was not delivered to anybody."""
    changes: list[Change] = []
    for lease in leases:
        if not lease.whole:
            channel, place = lease.channels[0], lease.place
            changes.append(Returned(channel.state, place[SEQ], channel.number, place[DELIVERIES] + 1, place))
    return changes


def uncounted_of(leases: Iterable[Lease]) -> list[Change]:
    """Return the changes that take back the deliveries of leases, of those that were counted when they were handed
    out."""
    changes: list[Change] = []
    for lease in leases:
        if lease.is_counted:
            channel, place = lease.channels[0], lease.place
            changes.append(Returned(channel.state, place[SEQ], channel.number, place[DELIVERIES], place))
    return changes


def declaration_bytes(state: DestinationState) -> int:
    """Return how many bytes a destination's name takes in its declaration."""
    return len(state.destination.name.encode()) + SMALL_BYTES
