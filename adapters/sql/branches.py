"""A store's part in transactions over several stores: what a row of XALOG holds (rule T6).

The sends get their places only when the branch commits, so that their order is that of the commits. Until then they are
in the row itself, or out of sight among the messages (native.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from ...policies.destination import Destination, Kind
from ...policies.errors import CorruptionError
from ..base import Change, Prepared, Subscription
from ..delivery import Note, feeds_of
from .messages import STAGE_BITS, Sending, Staged

Ack = tuple[Note, int]
"""Whose message, and its seq."""


class Branch:
    """A branch that is prepared, or about to be."""

    __slots__ = (
        "acks", "changes", "id", "messages", "participants", "payload", "reservation", "sends", "stage", "transaction",
    )  # fmt: skip

    def __init__(
        self,
        transaction: bytes,
        participants: Sequence[bytes],
        sends: Sequence[Sending] | Sequence[Staged],
        acks: Sequence[Ack],
        changes: Sequence[Change],
    ) -> None:
        self.transaction = transaction
        self.participants = tuple(participants)
        self.sends, self.acks, self.changes = sends, acks, changes
        self.id = 0
        """Of its row."""
        self.stage = 0
        """Its number, if what it sends is staged; else 0."""
        self.payload = b""
        """The row's content until it is written."""
        self.messages: Sequence[Any] = ()
        """Those that it acks, as their receivers hold them."""
        self.reservation: object = None

    @property
    def staged_rows(self) -> dict[str, int]:
        """Between which IDs what it has staged is."""
        first = self.stage << STAGE_BITS
        return {"first": -(first + (1 << STAGE_BITS) - 1), "last": -first}

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
    stage: int = 0
    staged: list[tuple[int, str | None, int, int, int, int]] = []
    """Instead of `sends`: destination, message id, priority, expiry, size, parts."""
    requeued: list[int] = []
    """The places among what is sent of what is requeued."""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Payload).decode


def payload_of(branch: Branch) -> bytes:
    places: dict[Destination, int] = {}

    def place(destination: Destination) -> int:
        return places.setdefault(destination, len(places))

    sends, staged = [], []
    for send in branch.sends:
        if isinstance(send, Staged):
            staged.append((place(send.destination), *send[1:6]))
        else:
            sends.append((place(send.destination), *send[1:7]))
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
    all_sends: Sequence[Sending | Staged] = branch.sends
    requeued = [at for at, send in enumerate(all_sends) if send.requeued]
    return _encode(_Payload(list(branch.participants), named, sends, acks, changes, branch.stage, staged, requeued))


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
    requeued = set(said.requeued)
    sends: list[Sending] | list[Staged] = [
        Sending(named[send[0]], *send[1:], at in requeued) for at, send in enumerate(said.sends)
    ]
    if said.stage:
        sends = [Staged(named[one[0]], *one[1:], said.stage, at, at in requeued) for at, one in enumerate(said.staged)]
    acks = []
    for place, numbers, whole, seq in said.acks:
        note = note_of(named[place], numbers, whole)
        if note is not None:
            acks.append((note, seq))
    changes = [
        Change(Subscription(named[place], name, client, selector, no_local), subscribe, retroactive)
        for place, client, name, selector, no_local, subscribe, retroactive in said.changes
    ]
    branch = Branch(transaction, said.participants, sends, acks, changes)
    branch.stage = said.stage
    return branch
