"""Operations are what a transaction does, in order, before any store hears of it.

Each is added in one step: a caller that catches Ctrl-C has all of an operation, or nothing. Only the end of the
transaction sorts them by their stores: into participants, which the coordinator takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from sys import maxsize
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol, cast

from ...adapters.core import Store
from ...adapters.core.engine.forwarding import follow
from ...adapters.core.messages import LargeBody, Message, Outgoing, Reason, Receipt
from ...adapters.core.store_types import Change
from ...policies.errors import TransactionError
from ...policies.names.destination import Destination
from ..placement.gates import Gates
from .participant import Participant, unclaim

if TYPE_CHECKING:
    from ...policies.config import TransactionOptions

_new = tuple.__new__


class Send(NamedTuple):
    """A send, or a change of a map."""

    store: Store
    """The store that the destination was in, or was to be in, when it was sent to."""
    sent: tuple[Destination, Outgoing]


class Ack(NamedTuple):
    """An ack of a message, which is claimed until then."""

    message: Message[Any]


class Release(NamedTuple):
    """A message that is given back when the transaction ends, and how."""

    message: Message[Any]
    delivered: bool
    delay: float | None
    reason: Reason | None

    def free(self) -> None:
        """Give the message back. May be done again."""
        message, store = self.message, self.message._store
        if self.reason is not None:
            store.note_failure([message], self.reason)
        unclaim(store, [message], self.delivered, self.delay)
        if self.reason is not None and self.delivered:
            message._store.tell_spent([message])


class ChangeSubscription(NamedTuple):
    """The begin or the end of a durable subscription."""

    store: Store
    change: Change


class Places(Protocol):
    """Finds the stores that destinations are in now."""

    gates: Gates

    def store_for(self, destination: Destination) -> Store:
        """Return the open store of a destination, made if need be."""

    def require_own(self, message: Message[Any]) -> None:
        """Raise UnknownMessageError for a message of another router."""

    def store_to_be(self, destination: Destination) -> Store:
        """Return the open store that a destination is in, or will be once it is recorded."""


class Operations:
    """The operations of one transaction. Threads: the one that has its lock."""

    _place: tuple[Destination | None, Any] = (None, None)
    """Where the last send went: the next one to there does not look again."""
    _ended_with = 0
    """The number of operations at the end, when they are dropped."""
    _sent: Sequence[Participant] = ()
    """For each send its participant, from `participants` to the end."""

    def __init__(self, options: TransactionOptions, limited: bool) -> None:
        """Begin without any. `limited`: by max_operations and max_bytes."""
        self._most = options.max_operations if limited else maxsize
        self._most_bytes = options.max_bytes if limited else maxsize
        self._all: list[Send | Ack | Release | ChangeSubscription] = []
        self.bytes = 0
        """The bytes of all bodies that are sent."""
        self._acked: dict[bytes, Message[Any]] = {}
        """The message that was acked last, by its store's id; perhaps undone since."""
        self.has_acks = self._gives_back = False
        """Whether anything was acked, and given back; perhaps undone since."""

    def __len__(self) -> int:
        return len(self._all) or self._ended_with

    def _refuse(self, operations: int, size: int) -> NoReturn:
        """Raise TransactionError: so many operations more, or bytes of bodies, are too many."""
        what, used, option, limit = "operations", len(self._all) + operations, "max_operations", self._most
        if used <= limit:
            what, used, option, limit = "bytes of messages", self.bytes + size, "max_bytes", self._most_bytes
        raise TransactionError(
            f"this transaction would hold {used} {what}; transactions.{option} is {limit}: commit it and go on in "
            "another, or raise the limit"
        )

    def send(self, destinations: Sequence[Destination], message: Outgoing, places: Places) -> None:
        """Add a send to each of these, of a body that is bytes, or kept. Raises what `store_to_be` raises, and
        TransactionError at a limit."""
        sends, size, place = [], len(message.body) * len(destinations), self._place  # type: ignore[arg-type]
        for destination in destinations:
            if destination is not place[0]:
                place = self._place = (destination, places.store_to_be(destination))
            sends.append(_new(Send, (place[1], (destination, message))))  # as its own, less a call
        if len(self._all) + len(sends) > self._most or self.bytes + size > self._most_bytes:
            self._refuse(len(sends), size)
        self._all.extend(sends)
        self.bytes += size

    def change(self, one: ChangeSubscription) -> None:
        """Add the begin or the end of a subscription. Raises TransactionError at a limit."""
        if len(self._all) >= self._most:
            self._refuse(1, 0)
        self._all.append(one)

    def claim(self, one: Ack | Release, places: Places) -> None:
        """Claim the message of an operation, and add it. Raises UnknownMessageError, and TransactionError at a limit,
        or if its store was reopened since another message of it was acked."""
        message, store = one.message, one.message._store
        if len(self._all) >= self._most:
            self._refuse(1, 0)
        places.require_own(message)
        if isinstance(one, Release):
            self._gives_back = True  # first: Ctrl-C may come behind any step
        else:
            self.has_acks = True
            if self._acked.get(store.store_id, message)._store is not store:
                self._require_same(message)
        try:
            message._store.claim(message)
            self._all.append(one)
            if isinstance(one, Ack):
                self._acked[message._store.store_id] = message
        except KeyboardInterrupt:
            if not self._all or self._all[-1] is not one:
                unclaim(message._store, [message])
            raise

    def _require_same(self, message: Message[Any]) -> None:
        store = message._store
        for other in self.acked:
            if other._store.store_id == store.store_id and other._store is not store:
                raise TransactionError(
                    f"store {store.name!r} was reopened since this transaction acked {other!r}, whose lease is gone "
                    "with that; roll back and receive again"
                )

    @property
    def acked(self) -> list[Message[Any]]:
        """The messages that are acked, in order."""
        return [one.message for one in self._all if isinstance(one, Ack)]

    def undo(self, count: int) -> None:
        """Undo all operations but the first so many. If that is interrupted some are half undone."""
        undone = self._all[count:]
        claimed = [one.message for one in undone if isinstance(one, Ack | Release)]
        if claimed:
            unclaim(claimed[0]._store, claimed)
        del self._all[count:]
        self.bytes -= sum(len(cast("bytes | LargeBody", one.sent[1].body)) for one in undone if isinstance(one, Send))

    def participants(self, places: Places | None = None) -> dict[bytes, Participant]:
        """Return the participants, by their store's id, each with its part of the operations. With `places` each
        operation is brought to the store that its destination is in now; raises what that raises."""
        found: dict[bytes, Participant] = {}
        participant: Participant | None = None
        sent: list[Participant] = []
        for one in self._all:
            if isinstance(one, Send):
                store, (destination, _) = one
                if places is not None:
                    store = places.store_to_be(destination)
            elif isinstance(one, Ack):
                destination = one.message.destination
                if places is not None:
                    places.gates.wait(destination)  # its lease says so a little later
                    follow(one.message)
                store = cast(Store, one.message._store)
            elif isinstance(one, ChangeSubscription):
                destination = one.change.subscription.topic
                store = one.store if places is None else places.store_for(destination)
            else:
                continue
            if participant is None or participant.store is not store:
                participant = found.get(store.store_id)
                if participant is None:
                    participant = found[store.store_id] = Participant(store.store_id, store, destination)
                elif participant.store is not store and not participant.acks:
                    participant.store = store  # opened again since
            if isinstance(one, Send):
                participant.sends.append(one.sent)
                sent.append(participant)
            elif isinstance(one, Ack):
                participant.acks.append(one.message)
            else:
                participant.changes.append(one.change)
        self._sent = sent
        for participant in found.values():
            if not participant.changes:
                for _, message in participant.sends:
                    if message.persistent:
                        break
                else:
                    participant.volatile |= not any(acked.persistent for acked in participant.acks)
        return found

    def receipts(self) -> list[Receipt]:
        """Return a receipt for each send, in order, once the participants have committed. Its seq is 0 where a store
        carries it out later."""
        receipts: list[Receipt] = []
        given: dict[Participant, Iterator[Receipt]] = {}
        for participant in self._sent:  # no comprehension, which is a call
            if participant not in given:
                made = participant.receipts or [Receipt(destination, 0) for destination, _ in participant.sends]
                given[participant] = iter(made)
            receipts.append(next(given[participant]))
        return receipts

    def end(self) -> None:
        """Free the messages that are given back, and drop all operations. May be done again."""
        self._ended_with = self._ended_with or len(self._all)
        self._acked.clear()
        self._sent = ()
        while self._gives_back and self._all:
            last = self._all[-1]
            if isinstance(last, Release):
                last.free()
            self._all.pop()
        self._all.clear()
