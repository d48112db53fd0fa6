"""What the journal's tickets hold: operations, and branches of transactions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ..base import Message, SubscriptionKey
from ..duplicates import DuplicateWindow
from ..room import Amount
from . import format as f
from .destinations import DestinationState

Operation = tuple[Any, ...]
"""(SEND, state, rest of the payload, duplicate key or None, (order, expires) or None where nobody needs either), (ACK,
state, seq, subscription), (ACK_RANGE, state, first, last, subscription), (DELIVERED, state, seq, subscription, count),
(SUBSCRIBE, state, subscription's number, Subscription, retroactive), (UNSUBSCRIBE, state, key), (DESTINATION_GONE,
state), (PREPARE, branch), (COMMIT, branch), (ROLLBACK, branch); (SNAPSHOT, document). `subscription`: its number, 0
for a queue or for all of a topic's."""
Entry = tuple[Any, ...]
"""An operation as the index wants it: (SEND, state, seq, lsn, offset, length, duplicate key or None, (order, expires)
or None), (SUBSCRIBE, state, its state), (UNSUBSCRIBE, state, number), (DESTINATION, state), (PREPARE, transaction, lsn,
offset, length), (COMMIT, transaction), (ROLLBACK, transaction, branch), else the same as the operation; a snapshot has
none."""
Outcome = tuple[int, bool]
"""Of a SEND: its seq, and whether it was a duplicate. Of a SUBSCRIBE: the subscription's number, and whether it was
there already; of an UNSUBSCRIBE the same, number 0 if it was not."""
Subscribed = tuple[int, SubscriptionKey]
"""Destination id and key: what the leader knows a subscription by."""


def room_for(operations: Iterable[Operation], window: DuplicateWindow) -> Amount:
    """What these sends take of a store's room; those that are stored already, nothing."""
    sizes = [
        len(operation[2]) + f.SEND_OVERHEAD - f.MESSAGE.size
        for operation in operations
        if operation[3] is None or window.get(operation[3]) is None or is_requeued(operation)
    ]
    return len(sizes), sum(sizes)


def is_requeued(send: Operation) -> bool:
    """Whether it is stored whatever the duplicate window says."""
    return bool(send[2][f.FLAGS_AT] & f.REQUEUED)


class Branch:
    """A store's part of a transaction that is prepared: what its commit will do."""

    __slots__ = (
        "acks",
        "changes",
        "delivered",
        "messages",
        "operations",
        "participants",
        "payload",
        "promise",
        "reservation",
        "size",
        "transaction",
    )

    def __init__(
        self,
        transaction: bytes,
        participants: tuple[bytes, ...],
        operations: list[Operation],
        size: int,
        payload: bytes,
    ) -> None:
        self.transaction = transaction
        self.participants = participants
        """Ids of all stores that take part."""
        self.operations = operations
        """Changes of subscriptions, sends, then acks."""
        self.delivered: list[Operation] = []
        """What a rollback writes of the messages that come back."""
        self.size = size
        """At most so many bytes the operations' records take."""
        self.payload = payload
        """Of the PREPARE record."""
        self.acks: list[tuple[DestinationState, int, int]] = [op[1:] for op in operations if op[0] == f.ACK]
        """State, seq, subscription."""
        self.changes = sum(op[0] in (f.SUBSCRIBE, f.UNSUBSCRIBE) for op in operations)
        self.promise = 0
        """Bytes kept free for its outcome (Encoder.promise)."""
        self.messages: Sequence[Message] = ()
        """Those that it acks, where this process received them."""
        self.reservation: object = None
        """Room in the store until the outcome (adapters/room.py)."""
