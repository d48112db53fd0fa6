"""A store's part in transactions over several stores: what is prepared, in bytes and in memory (rules T1, T2, X6).

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
from ..base import TRANSACTION_BYTES, Prepared
from . import format as f
from .batch import Branch, Operation, Outcome, Ticket
from .destinations import DestinationState
from .log import Log
from .messages import key_of, read_record_at
from .segment import SegmentTable

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


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Payload).decode


def new_branch(transaction: bytes, participants: Sequence[bytes], operations: list[Operation], size: int) -> Branch:
    """A branch that is about to be prepared; `size` is that of its operations' records, at most."""
    numbers: dict[int, int] = {}
    destinations: list[tuple[int, str]] = []
    sends: list[tuple[int, bytes]] = []
    acks: list[tuple[int, int]] = []
    for operation in operations:
        state: DestinationState = operation[1]
        number = numbers.setdefault(state.id, len(destinations))
        if number == len(destinations):
            destinations.append((state.destination.kind.value, state.destination.name))
        if operation[0] == f.SEND:
            sends.append((number, operation[2][_ID_BYTES:]))
        else:
            acks.append((number, operation[2]))
    payload = transaction + _encode(_Payload(list(participants), destinations, sends, acks))
    return Branch(transaction, tuple(participants), operations, size, payload)


def read_payload(transaction: bytes, place: tuple[int, int, int], table: SegmentTable) -> bytes:
    """The payload of a PREPARE record at a place (LSN, offset, length). Raises CorruptionError."""
    lsn, offset, length = place
    segment = table.find(lsn)
    if segment is None:
        raise AssertionError(f"the record {lsn} of transaction {transaction.hex()} lies in no segment")
    payload = read_record_at(segment, f.PREPARE, lsn, offset, length)
    if payload is None:
        raise CorruptionError(
            str(segment.path), offset, f"the prepared transaction {transaction.hex()} does not read back; restore the "
            "file from a backup",
        )  # fmt: skip
    return payload


def branch_of(payload: bytes, state_of: Callable[[Destination], DestinationState]) -> Branch:
    """The branch that a PREPARE record's payload tells."""
    transaction = payload[:TRANSACTION_BYTES]
    said = _decode(payload[TRANSACTION_BYTES:])
    states = [state_of(Destination(Kind(kind), name)) for kind, name in said.destinations]
    operations: list[Operation] = []
    size = 0
    for number, rest in said.sends:
        state = states[number]
        rest = f.GONE_PAYLOAD.pack(state.id) + rest
        operations.append((f.SEND, state, rest, key_of(state, rest)))
        size += len(rest) + state.send_overhead
    for number, seq in said.acks:
        operations.append((f.ACK, states[number], seq))
        size += f.ACK_BYTES
    return Branch(transaction, tuple(said.participants), operations, size, payload)


def outcome_ticket(kind: int, branch: Branch) -> Ticket:
    """The ticket that commits or rolls back a branch. Not synced: a decision, or the lack of one, stands behind it."""
    size = f.OUTCOME_BYTES + (branch.size if kind == f.COMMIT else 0)
    ticket = Ticket([(kind, branch)], size, sync=False)
    ticket.lazy = True
    # The branch lets go of its room once it is settled, the ticket once its messages are counted as held: between the
    # two nobody else gets it, and a commit that finds the disk full leaves the branch its room.
    ticket.reservation = branch.reservation
    return ticket


def summary(branch: Branch) -> Prepared:
    """What recover_prepared says of it."""
    acks = len(branch.acks)
    return Prepared(branch.transaction, branch.participants, len(branch.operations) - acks, acks)


class Step(Generic[T]):
    """A Pending of this store: a ticket in its log."""

    def __init__(self, log: Log, wait: Callable[[Ticket], list[Outcome]], ticket: Ticket, result: Callable[..., T]):
        self._log, self._wait, self._ticket, self._result = log, wait, ticket, result

    def proceed(self) -> None:
        self._log.proceed()

    def wait(self) -> T:
        return self._result(self._wait(self._ticket))
