"""A store's part in transactions over several stores: what a row of XALOG holds (rule T6).

The sends are stored as messages only when the branch commits, so that their order is that of the commits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from ...policies.destination import Destination, Kind
from ...policies.errors import CorruptionError
from ..base import Change, Prepared, Subscription
from ..delivery import Note, feeds_of
from .messages import Sending

Ack = tuple[Note, int]
"""Whose message, and its seq."""


class Branch:
    """A branch that is prepared, or about to be."""

    __slots__ = ("acks", "changes", "id", "messages", "participants", "payload", "reservation", "sends", "transaction")

    def __init__(
        self,
        transaction: bytes,
        participants: Sequence[bytes],
        sends: Sequence[Sending],
        acks: Sequence[Ack],
        changes: Sequence[Change],
    ) -> None:
        self.transaction = transaction
        self.participants = tuple(participants)
        self.sends, self.acks, self.changes = sends, acks, changes
        self.id = 0
        """Of its row."""
        self.payload = b""
        """The row's content until it is written."""
        self.messages: Sequence[Any] = ()
        """Those that it acks, as their receivers hold them."""
        self.reservation: object = None

    def summary(self) -> Prepared:
        return Prepared(self.transaction, self.participants, len(self.sends), len(self.acks))


class _Payload(msgspec.Struct, frozen=True, array_like=True):
    participants: list[bytes]
    destinations: list[tuple[int, str]]
    """Kind and name; below, a destination is its place here."""
    sends: list[tuple[int, bytes, bytes | None, str | None, int, int, int]]
    acks: list[tuple[int, list[int], bool, int]]
    """Destination, numbers of the subscriptions (none: a queue), whether it is acked for all of them, seq."""
    changes: list[tuple[int, str, str, str | None, bool, bool, bool]]
    """Topic, client, name, selector, no_local, subscribe, retroactive."""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Payload).decode


def payload_of(branch: Branch) -> bytes:
    places: dict[Destination, int] = {}

    def place(destination: Destination) -> int:
        return places.setdefault(destination, len(places))

    sends = [(place(send.destination), *send[1:]) for send in branch.sends]
    acks = []
    for note, seq in branch.acks:
        feeds = feeds_of(note)
        numbers = [feed.number for feed in feeds if feed.number]
        acks.append((place(feeds[0].owner.destination), numbers, isinstance(note, tuple), seq))
    changes = [
        (
            place(change.subscription.topic),
            change.subscription.client_id,
            change.subscription.name,
            change.subscription.selector,
            bool(change.subscription.no_local),
            change.subscribe,
            change.retroactive,
        )
        for change in branch.changes
    ]
    named = [(destination.kind.value, destination.name) for destination in places]
    return _encode(_Payload(list(branch.participants), named, sends, acks, changes))


def branch_of(
    transaction: bytes, payload: bytes, note_of: Callable[[Destination, Iterable[int], bool], Note | None]
) -> Branch:
    """The branch that a row of XALOG tells; `note_of` gives what receives from a destination, by the numbers of its
    subscriptions, None if there is none any more."""
    try:
        said = _decode(payload)
    except msgspec.DecodeError as error:
        raise CorruptionError(
            "XALOG", 0, f"the prepared transaction {transaction.hex()} does not read: {error}"
        ) from None
    named = [Destination(Kind(kind), name) for kind, name in said.destinations]
    sends = [Sending(named[send[0]], *send[1:]) for send in said.sends]
    acks = []
    for place, numbers, whole, seq in said.acks:
        note = note_of(named[place], numbers, whole)
        if note is not None:
            acks.append((note, seq))
    changes = [
        Change(Subscription(named[place], name, client, selector, no_local), subscribe, retroactive)
        for place, client, name, selector, no_local, subscribe, retroactive in said.changes
    ]
    return Branch(transaction, said.participants, sends, acks, changes)
