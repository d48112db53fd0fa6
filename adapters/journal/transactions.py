"""A store's part in transactions over several stores: what is prepared, in bytes and in memory (T1, T2, T8 to T10, X6).

A PREPARE record holds the branch whole: names instead of destination ids, since an id may be gone by the time of the
commit. The commit writes the sends and acks once more, as if they were done then, in one batch with the COMMIT record:
so a message's record, its seq and its place in the order come from the commit, and recovery, snapshots and reading know
nothing of transactions but that a PREPARE without outcome retains its segment as a live message does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import msgspec

from ...policies.destination import Destination, Kind
from ...policies.errors import CorruptionError
from ..base import TRANSACTION_BYTES, Change, Prepared, Subscription
from ..wal import format as w
from ..wal.log import Log
from ..wal.reader import read_record
from ..wal.segment import SegmentTable
from ..wal.ticket import Ticket
from . import format as f
from .batch import Branch, Operation, Outcome
from .destinations import DestinationState
from .messages import key_of, order_of
from .subscriptions import change_bytes, change_of

T = TypeVar("T")

_ID_BYTES = 4
"""What a SEND's payload begins with behind the seq: the destination's id."""


class _Payload(msgspec.Struct, frozen=True, array_like=True):
    """What follows the transaction's id in a PREPARE record, in msgpack."""

    participants: list[bytes]
    """Store ids."""
    destinations: list[tuple[int, str]]
    """Kind and name."""
    sends: list[tuple[int, bytes]]
    """Which of `destinations`, and a SEND's payload behind its destination id."""
    acks: list[tuple[int, int]]
    """Which of `destinations`, and the message's seq."""
    subscriptions: list[int] = []
    """For each ack the number of the subscription that it is for. Empty: all are of queues."""
    changes: list[tuple[int, bool, str, str, str | None, bool, bool]] = []
    """Which of `destinations`, subscribe or unsubscribe, client, name, selector, no_local, retroactive."""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Payload).decode


def new_branch(transaction: bytes, participants: Sequence[bytes], operations: list[Operation], size: int) -> Branch:
    """A branch that is about to be prepared; `size` is that of its operations' records, at most."""
    numbers: dict[int, int] = {}
    destinations: list[tuple[int, str]] = []
    sends: list[tuple[int, bytes]] = []
    acks: list[tuple[int, int]] = []
    subscriptions: list[int] = []
    changes: list[tuple[int, bool, str, str, str | None, bool, bool]] = []
    for operation in operations:
        state: DestinationState = operation[1]
        number = numbers.setdefault(state.id, len(destinations))
        if number == len(destinations):
            destinations.append((state.destination.kind.value, state.destination.name))
        if operation[0] == f.SEND:
            sends.append((number, operation[2][_ID_BYTES:]))
        elif operation[0] == f.ACK:
            acks.append((number, operation[2]))
            subscriptions.append(operation[3])
        elif operation[0] == f.SUBSCRIBE:
            _, name, client, selector, no_local = operation[3]
            changes.append((number, True, client, name, selector, no_local, operation[4]))
        else:
            changes.append((number, False, *operation[2], None, False, False))
    said = _Payload(list(participants), destinations, sends, acks, subscriptions if any(subscriptions) else [], changes)
    payload = transaction + _encode(said)
    return Branch(transaction, tuple(participants), operations, size, payload)


def read_payload(transaction: bytes, place: tuple[int, int, int], table: SegmentTable) -> bytes:
    """The payload of a PREPARE record at a place (LSN, offset, length). Raises CorruptionError."""
    lsn, offset, length = place
    segment = table.find(lsn)
    if segment is None:
        raise AssertionError(f"the record {lsn} of transaction {transaction.hex()} lies in no segment")
    payload = read_record(segment, f.PREPARE, lsn, offset, length)
    if payload is None:
        raise CorruptionError(
            str(segment.path), offset, f"the prepared transaction {transaction.hex()} does not read back; restore the "
            "file from a backup",
        )  # fmt: skip
    return payload


def branch_of(
    payload: bytes,
    state_of: Callable[[Destination], DestinationState],
    priorities: bool = False,
    next_subscription: Callable[[], int] = lambda: 0,
) -> Branch:
    """The branch that a PREPARE record's payload tells. `next_subscription` gives a new one its number."""
    transaction = payload[:TRANSACTION_BYTES]
    said = _decode(payload[TRANSACTION_BYTES:])
    states = [state_of(Destination(Kind(kind), name)) for kind, name in said.destinations]
    operations: list[Operation] = []
    size = 0
    for number, subscribe, client, name, selector, no_local, retroactive in said.changes:
        state = states[number]
        subscription = Subscription(state.destination, name, client, selector, no_local)
        operations.append(change_of(Change(subscription, subscribe, retroactive), state, next_subscription))
        size += change_bytes(subscription)
    for number, rest in said.sends:
        state = states[number]
        rest = f.GONE_PAYLOAD.pack(state.id) + rest
        operations.append((f.SEND, state, rest, key_of(state, rest), order_of(rest, priorities)))
        size += len(rest) + state.send_overhead
    for position, (number, seq) in enumerate(said.acks):
        subscription_number = said.subscriptions[position] if said.subscriptions else 0
        operations.append((f.ACK, states[number], seq, subscription_number))
        size += f.BRANCH_ACK_BYTES
    return Branch(transaction, tuple(said.participants), operations, size, payload)


class PrepareTicket(Ticket):
    """The ticket that prepares a branch; `size` is that of the branch's own record."""

    def __init__(self, branch: Branch, promise: int, sync: bool) -> None:
        super().__init__([(f.PREPARE, branch)], w.RECORD_HEADER.size + len(branch.payload), sync)
        self.promise = branch.promise = promise

    def finish(self, error: BaseException | None) -> None:
        if error is not None:
            self.content[0][1].reservation = None  # the error's traceback may hold the branch for long
        super().finish(error)


def outcome_ticket(kind: int, branch: Branch) -> Ticket:
    """The ticket that commits or rolls back a branch. Not synced: a decision, or the lack of one, stands behind it."""
    more = branch.size if kind == f.COMMIT else f.DELIVERED_BYTES * len(branch.delivered)
    size = f.OUTCOME_BYTES + more
    ticket = Ticket([(kind, branch)], size, sync=False)
    ticket.unsynced = True
    # The branch lets go of its room once it is settled, the ticket once its messages are counted as held: between the
    # two nobody else gets it, and a commit that finds the disk full leaves the branch its room.
    ticket.held = branch.reservation
    return ticket


def summary(branch: Branch) -> Prepared:
    """What recover_prepared says of it."""
    acks = len(branch.acks)
    sends = len(branch.operations) - acks - branch.changes
    return Prepared(branch.transaction, branch.participants, sends, acks)


class Step(Generic[T]):
    """A Pending of this store: a ticket in its log."""

    def __init__(self, log: Log, wait: Callable[[Ticket], list[Outcome]], ticket: Ticket, result: Callable[..., T]):
        self._log, self._wait, self._ticket, self._result = log, wait, ticket, result

    def proceed(self) -> None:
        self._log.proceed()

    def wait(self) -> T:
        return self._result(self._wait(self._ticket))
