"""A store's part of a transaction over several: what can happen to it (changes.py), and in bytes what is kept from its
prepare to its outcome: names instead of numbers, since a destination may be gone by the time of the commit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec

from ....policies.names.destination import Destination, Kind
from ...wal.ticket import OWED, SHRINKS
from ..record.encoding import group_of, name_of, order_and_expiry
from ..record.place import order_of
from ..state.leases import CLAIMED, DestinationState, Lease
from ..state.limits import Grant
from ..state.states import Catalog
from ..store_types import Prepared, Subscription
from .changes import SMALL_BYTES, Ack, Change, Mark, Send
from .destination_changes import Subscribe, Unsubscribe

if TYPE_CHECKING:
    from ..state.delivery import Delivery
    from ..state.rows import Rows


_size = attrgetter("size")


class Branch:
    """A store's part of a transaction over several: what its commit will do."""

    # Values that most branches leave as they are stand here, not in each. They are replaced, never changed.
    leases: Sequence[Lease] = ()
    """Leases of the messages that the branch acks."""
    evicted: Sequence[Lease] = ()
    """Leases of messages that go to make room for what the branch sends. The branch acks them too (`Ack.drops`,
    reserving.py)."""
    dropped: Sequence[tuple[int, Destination]] = ()
    """Places among its sends, and destinations, of messages that are not stored for want of room."""
    payload = b""
    """All of it in bytes."""
    note = b""
    """The coordinator's, as `Store.prepare` was given it."""
    returned: Sequence[Change] = ()
    """Changes that a rollback writes of the messages that are given back."""
    promise: int = 0
    """Bytes that are kept free for its outcome."""
    reservation: Grant | None = None
    """Room in the store until the outcome (limits.py)."""
    own: Any = None
    """The backend's."""

    def __init__(self, transaction: bytes, participants: Sequence[bytes], changes: Sequence[Change]) -> None:
        self.transaction = transaction
        self.participants = participants
        """Ids of all stores that take part."""
        self.changes = changes
        """Marks, changes of subscriptions, sends, then acks."""

    @property
    def sends(self) -> list[Send]:
        return [change for change in self.changes if type(change) is Send]

    @property
    def acks(self) -> list[Ack]:
        return [change for change in self.changes if type(change) is Ack]

    @property
    def summary(self) -> Prepared:
        """Return what the coordinator is told."""
        changes = [change.inner for change in self.changes]
        sends, acks = (sum(type(change) is kind for change in changes) for kind in (Send, Ack))
        return Prepared(self.transaction, tuple(self.participants), sends, acks, self.note)

    @property
    def outcome_size(self) -> int:
        """Return at most how many bytes the outcome takes when it is written."""
        size: int = sum(map(_size, self.changes), SMALL_BYTES)
        return size

    def keep_free(self, most: int) -> None:
        """Promise the room for the outcome; none where it takes more than can be kept: on a full disk such a branch
        waits for room."""
        size = sum(map(_size, self.changes), SMALL_BYTES)  # as `outcome_size`, less a call
        if size <= most:
            self.promise = size


class BranchPlan(Protocol):
    """A plan (plan.py), as the changes of branches look at it and add to it."""

    changes: list[Change]
    prepared: Sequence[Branch]
    is_more: bool

    def settle(self, outcome: Commit | Rollback, brings: Iterable[Change]) -> list[Any] | None: ...


class BranchTable(Protocol):
    """The steps of a backend for the changes of branches (table.py)."""

    def prepare(self, branch: Branch) -> None:
        """Prepare a branch, which waits for its outcome: `branch.payload` is to be kept until then."""

    def settled(self, branch: Branch, committed: bool) -> None:
        """Settle a branch that has its outcome; that it is committed is remembered until `forget`."""

    def forget(self, transactions: Sequence[bytes]) -> None:
        """Forget these transactions, which need no longer be remembered."""


class Prepare(Change):
    """The change by which a branch waits for its outcome from now on."""

    __slots__ = ("branch", "size")

    def __init__(self, branch: Branch) -> None:
        self.branch: Branch = branch
        self.size: int = SMALL_BYTES + len(branch.payload)

    def plan(self, plan: BranchPlan) -> None:
        plan.prepared = (*plan.prepared, self.branch)
        plan.is_more = True
        plan.changes.append(self)

    def apply(self, table: BranchTable) -> None:
        table.prepare(self.branch)

    def undo(self, delivery: Delivery, rows: Rows) -> None:
        for lease in [*self.branch.leases, *self.branch.evicted]:
            if lease.hold == CLAIMED:
                delivery.unlease(lease, rows)
        self.branch.reservation = None


class Commit(Change):
    """The change by which a prepared branch takes effect, as if it were done now (rule T8). Told twice, the second time
    says nothing."""

    __slots__ = ("branch", "size")

    leaves = OWED

    def __init__(self, branch: Branch) -> None:
        self.branch: Branch = branch
        self.size: int = branch.promise or branch.outcome_size

    def plan(self, plan: BranchPlan) -> list[Any] | None:
        """Commit the branch; return the outcomes of its changes, None if it was committed or rolled back before."""
        return plan.settle(self, self.branch.changes)

    def apply(self, table: BranchTable) -> None:
        table.settled(self.branch, True)


class Rollback(Change):
    """The change by which a prepared branch is forgotten. Told twice, the second time says nothing."""

    __slots__ = ("branch", "size")

    leaves = OWED

    def __init__(self, branch: Branch) -> None:
        self.branch: Branch = branch
        self.size: int = SMALL_BYTES * (2 + max(len(branch.leases), len(branch.returned)))

    def plan(self, plan: BranchPlan) -> bool:
        """Roll the branch back; return whether it was prepared."""
        return plan.settle(self, self.branch.returned) is not None

    def apply(self, table: BranchTable) -> None:
        table.settled(self.branch, False)

    def states(self) -> Iterable[DestinationState]:
        return (channel.state for lease in (*self.branch.leases, *self.branch.evicted) for channel in lease.channels)


class Forget(Change):
    """The change by which committed transactions need no longer be remembered."""

    __slots__ = ("size", "transactions")

    leaves = SHRINKS

    def __init__(self, transactions: Sequence[bytes]) -> None:
        self.transactions: Sequence[bytes] = transactions
        self.size: int = SMALL_BYTES * (1 + len(transactions))

    def apply(self, table: BranchTable) -> None:
        table.forget(self.transactions)


class _Payload(msgspec.Struct, frozen=True, array_like=True):
    """The payload of a branch, in msgpack. `payload_of` writes the same fields; the last four only where they say
    something."""

    participants: list[bytes]
    """Store ids."""
    destinations: list[tuple[int, str]]
    """Kind and name."""
    sends: list[tuple[int, bytes, int]]
    """Place in `destinations`, the message's record, and its length."""
    acks: list[tuple[int, int, int]]
    """Place in `destinations`, the message's seq, and the number of the subscription that it is for (0: all)."""
    changes: list[tuple[int, bool, str, str, str | None, bool, bool]]
    """Place in `destinations`, subscribe or unsubscribe, client, name, selector, no_local, retroactive."""
    delays: list[tuple[int, int]] = []
    """Of messages that wait for their time: place in `sends`, and until when (ms)."""
    drops: list[int] = []
    """Of messages that are dropped to make room: places in `acks`."""
    marks: list[tuple[int, bytes, bool]] = []
    """Names under which the transaction is remembered: place in `destinations`, name, and whether it sends there. A
    version before these takes no note of them."""
    note: bytes = b""
    """The coordinator's; likewise."""


_KEPT: Final = (Send, Ack, Subscribe, Unsubscribe, Mark)
_KINDS = {kind: kind.value for kind in Kind}
"""`Kind.value` takes its time."""
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Payload).decode


def payload_of(participants: Sequence[bytes], changes: Sequence[Change], note: bytes = b"") -> bytes:
    """Return a branch's changes: marks, those of subscriptions, sends and acks."""
    numbers: dict[DestinationState, int] = {}
    destinations: list[tuple[int, str]] = []
    sends: list[tuple[int, bytes, int]] = []
    acks: list[tuple[int, int, int]] = []
    others: list[tuple[int, bool, str, str, str | None, bool, bool]] = []
    delays: list[tuple[int, int]] = []
    drops: list[int] = []
    marks: list[tuple[int, bytes, bool]] = []
    for change in changes:
        if not isinstance(change, _KEPT):
            if change.inner is change:
                raise AssertionError(f"a branch cannot do {change}")
            continue  # it is gone after a crash
        state = change.state
        number = numbers.setdefault(state, len(destinations))
        if number == len(destinations):
            destinations.append((_KINDS[state.destination.kind], state.destination.name))
        if isinstance(change, Send):
            if change.extras is not None and change.deliver_at_ms:
                delays.append((len(sends), change.deliver_at_ms))
            sends.append((number, change.record, len(change.record)))
        elif isinstance(change, Ack):
            if change.drops:
                drops.append(len(acks))
            acks.append((number, change.seq, change.number))
        elif isinstance(change, Mark):
            marks.append((number, change.name, change.declares))
        elif isinstance(change, Subscribe):
            _, name, client, selector, no_local = change.subscription
            others.append((number, True, client, name, selector, no_local, change.retroactive))
        else:
            others.append((number, False, *change.key, None, False, False))
    fields: list[object] = [participants, destinations, sends, acks, others]
    if note:
        fields += (delays, drops, marks, note)
    elif delays or drops or marks:
        fields += (delays, drops, marks) if marks else (delays, drops) if drops else (delays,)
    return _encode(fields)


def branch_of(transaction: bytes, payload: bytes, catalog: Catalog, priorities: bool) -> Branch:
    """Return the branch that a payload tells. Raises ValueError, IndexError, struct.error or DestinationError for one
    that tells none."""
    content = _decode(payload)
    states = [catalog.state(Destination(Kind(kind), name)) for kind, name in content.destinations]
    changes: list[Change] = [Mark(states[number], name, declares) for number, name, declares in content.marks]
    for number, subscribe, client, name, selector, no_local, retroactive in content.changes:
        state = states[number]
        if subscribe:
            subscription = Subscription(state.destination, name, client, selector, no_local)
            changes.append(Subscribe(state, catalog.next_number(), subscription, retroactive))
        else:
            changes.append(Unsubscribe(state, (client, name)))
    delays = dict(content.delays)
    for at, (number, record, length) in enumerate(content.sends):
        if length != len(record):
            raise ValueError(f"it holds {len(record)} bytes of a message of {length}")
        send = send_of(states[number], record, priorities)
        send.wait_until(delays.get(at, 0))
        changes.append(send)
    drops = set(content.drops)
    changes += [
        Ack(states[number], seq, subscriber, drops=at in drops)
        for at, (number, seq, subscriber) in enumerate(content.acks)
    ]
    branch = Branch(transaction, tuple(content.participants), changes)
    branch.payload, branch.note = payload, content.note
    return branch


def destinations_of(payload: bytes) -> list[Destination]:
    """Return the destinations that a branch concerns."""
    return [Destination(Kind(kind), name) for kind, name in _decode(payload).destinations]


def send_of(state: DestinationState, record: bytes, priorities: bool) -> Send:
    """Return the send of a record that is read back."""
    priority, expires_at_ms = order_and_expiry(record)
    send = Send(state, record, name_of(record), order_of(priority, priorities), expires_at_ms)
    if group_of(record) is not None:
        send.is_grouped = True
    return send
