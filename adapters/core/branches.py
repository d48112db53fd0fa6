"""A store's part of a transaction over several, in bytes: what is kept from its prepare to its outcome.

Names instead of numbers, since a destination may be gone by the time of the commit.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ...policies.destination import Destination, Kind
from ..store_types import Subscription
from .changes import Ack, Branch, Change, Send, Subscribe, Unsubscribe, VolatileChange
from .place import order_of
from .records import name_of, order_and_expiry
from .states import Catalog, DestinationState


class _Payload(msgspec.Struct, frozen=True, array_like=True):
    """In msgpack."""

    participants: list[bytes]
    """Store ids."""
    destinations: list[tuple[int, str]]
    """Kind and name."""
    sends: list[tuple[int, bytes, int]]
    """Which of `destinations`, the message's record, and its length when it is whole."""
    acks: list[tuple[int, int, int]]
    """Which of `destinations`, the message's seq, and the number of the subscription that it is for (0: all)."""
    changes: list[tuple[int, bool, str, str, str | None, bool, bool]]
    """Which of `destinations`, subscribe or unsubscribe, client, name, selector, no_local, retroactive."""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Payload).decode


def payload_of(participants: Sequence[bytes], changes: Sequence[Change]) -> bytes:
    """A branch's changes of subscriptions, sends and acks."""
    numbers: dict[int, int] = {}
    destinations: list[tuple[int, str]] = []
    sends: list[tuple[int, bytes, int]] = []
    acks: list[tuple[int, int, int]] = []
    others: list[tuple[int, bool, str, str, str | None, bool, bool]] = []

    def number_of(state: DestinationState) -> int:
        number = numbers.setdefault(state.number, len(destinations))
        if number == len(destinations):
            destinations.append((state.destination.kind.value, state.destination.name))
        return number

    for change in changes:
        if isinstance(change, Send):
            sends.append((number_of(change.state), change.record, change.record_bytes))
        elif isinstance(change, Ack):
            acks.append((number_of(change.state), change.seq, change.number))
        elif isinstance(change, Subscribe):
            _, name, client, selector, no_local = change.subscription
            others.append((number_of(change.state), True, client, name, selector, no_local, change.retroactive))
        elif isinstance(change, Unsubscribe):
            others.append((number_of(change.state), False, *change.key, None, False, False))
        elif not isinstance(change, VolatileChange):  # that is gone after a crash
            raise AssertionError(f"a branch cannot do {change}")
    return _encode(_Payload(list(participants), destinations, sends, acks, others))


def branch_of(transaction: bytes, payload: bytes, catalog: Catalog, priorities: bool) -> Branch:
    """The branch that a payload tells. Raises msgspec.DecodeError."""
    found = _decode(payload)
    states = [catalog.state(Destination(Kind(kind), name)) for kind, name in found.destinations]
    changes: list[Change] = []
    for number, subscribe, client, name, selector, no_local, retroactive in found.changes:
        state = states[number]
        if subscribe:
            subscription = Subscription(state.destination, name, client, selector, no_local)
            changes.append(Subscribe(state, catalog.next_number(), subscription, retroactive))
        else:
            changes.append(Unsubscribe(state, (client, name)))
    for number, record, length in found.sends:
        send = send_of(states[number], record, priorities)
        send.record_bytes = length
        changes.append(send)
    changes += [Ack(states[number], seq, subscription) for number, seq, subscription in found.acks]
    branch = Branch(transaction, tuple(found.participants), changes)
    branch.payload = payload
    return branch


def send_of(state: DestinationState, record: bytes, priorities: bool) -> Send:
    """The send of a record that is read back."""
    priority, expires_at_ms = order_and_expiry(record)
    return Send(state, record, name_of(record), order_of(priority, priorities), expires_at_ms)
