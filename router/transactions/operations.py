"""Operations are what a transaction does, in order, before any store hears of it.

Each is added in one step, a send with the participant that it is for: a caller that catches Ctrl-C has all of an
operation, or nothing. Only the end of the transaction gives the participants, which the coordinator takes, their parts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from sys import maxsize
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, cast

from ...adapters.core import Store
from ...adapters.core.engine.forwarding import follow
from ...adapters.core.messages import LargeBody, Message, Outgoing, Reason, Receipt
from ...adapters.core.record.encoding import REMOVAL
from ...adapters.core.record.keys import KeyRange, removal_of
from ...adapters.core.store_types import Change
from ...policies.errors import TransactionError
from ...policies.names.destination import Destination
from ..placement.registry import StoreRegistry
from .participant import Participant, unclaim

if TYPE_CHECKING:
    from ...policies.config import TransactionOptions

_new = tuple.__new__


class Send(NamedTuple):
    """A send, or a change of a map."""

    participant: Participant
    """The store that the destination was in, or was to be in, when it was sent to."""
    sent: tuple[Destination, Outgoing]


class Ack(NamedTuple):
    """An ack of a message, which is claimed until then, in the store that holds it by then."""

    message: Message[Any]


class Letter(Send):
    """A send of the dead letter that a rejected message becomes: no receipt tells of it."""

    __slots__ = ()


class Reject(Ack):
    """An ack of a message that is rejected."""

    told: Callable[[], object]
    """Called once it is committed."""


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
        unclaim([message], self.delivered, self.delay)
        if self.reason is not None and self.delivered:
            message._store.tell_spent([message])


class ChangeSubscription(NamedTuple):
    """The begin or the end of a durable subscription."""

    participant: Participant
    change: Change


class Operations:
    """The operations of one transaction. Threads: the one that has its lock."""

    has_acks: bool = False
    _gives_back = _has_transient = _rejects = False
    """Whether anything was acked, given back, sent or acked that is transient, and rejected; perhaps undone since."""
    _handed_over = False
    """Participants have their parts, or some of them."""
    _ended_with = 0
    """The number of operations at the end, when they are dropped."""

    def __init__(self, options: TransactionOptions, limited: bool) -> None:
        """Begin without any. `limited`: by max_operations and max_bytes."""
        self._most = options.max_operations if limited else maxsize
        self._most_bytes = options.max_bytes if limited else maxsize
        self._all: list[Send | Ack | Release | ChangeSubscription] = []
        self._participants: dict[bytes, Participant] = {}
        """By their stores' ids; some may have nothing to do any more."""
        self._found: dict[int, tuple[Destination, Participant]] = {}
        """By the identity of a destination that was sent to, so that the next send there does not look again."""
        self.bytes: int = 0
        """The bytes of all bodies that are sent."""

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

    def send(self, destinations: Sequence[Destination], message: Outgoing, registry: StoreRegistry) -> None:
        """Add a send to each of these, of a body that is bytes, or kept. Raises what `store_to_be` raises, and
        TransactionError at a limit."""
        sends, size, found = [], len(message.body) * len(destinations), self._found  # type: ignore[arg-type]
        for destination in destinations:
            one = found.get(id(destination))
            if one is None:
                participant = self._participant(registry.store_to_be(destination), destination)
                one = found[id(destination)] = (destination, participant)
            sends.append(_new(Send, (one[1], (destination, message))))  # as its own, less a call
        if len(self._all) + len(sends) > self._most or self.bytes + size > self._most_bytes:
            self._refuse(len(sends), size)
        if not message.persistent:
            self._has_transient = True
        self._all.extend(sends)
        self.bytes += size

    def _participant(self, store: Store, first: Destination) -> Participant:
        """Return the participant of a store, in which this destination is."""
        participant = self._participants.get(store.store_id)
        if participant is None:
            self._participants[store.store_id] = participant = Participant(store.store_id, store, first)
        elif participant.store is not store and not self.has_acks:
            participant.store = store  # opened again since
        return participant

    def remove_range(self, map: Destination, there: Iterable[str], within: KeyRange, registry: StoreRegistry) -> int:
        """Add the removals of the keys of a map that are `there`, and of those of a range that are put here before;
        less those that are removed here already. Returns how many these are. Raises as `send`."""
        sent = [one.sent[1] for one in self._all if type(one) is Send and one.sent[0] == map]
        put = {str(message.message_id): message.expires_at_ms != REMOVAL for message in sent}
        keys = [key for key in there if put.get(key, True)]
        keys += [key for key in put.keys() - set(keys) if put[key] and within.holds(key.encode())]
        if keys:
            participant = self._participant(registry.store_to_be(map), map)
            if len(self._all) + len(keys) > self._most:
                self._refuse(len(keys), 0)
            self._all.extend([Send(participant, (map, removal_of(key))) for key in keys])
        return len(keys)

    def change(self, change: Change, registry: StoreRegistry) -> None:
        """Add the begin or the end of a subscription. Raises what `store_for` raises, and TransactionError at a
        limit."""
        topic = change.subscription.topic
        participant = self._participant(registry.store_for(topic), topic)
        if len(self._all) >= self._most:
            self._refuse(1, 0)
        self._all.append(ChangeSubscription(participant, change))

    def claim(self, message: Message[Any], registry: StoreRegistry, release: Release | None = None) -> None:
        """Claim a message, and add its ack, or its `release`. Raises UnknownMessageError, and TransactionError at a
        limit, or if its store was reopened since another message of it was acked."""
        if len(self._all) >= self._most:
            self._refuse(1, 0)
        registry.require_own(message)
        one: Ack | Release
        if release is not None:
            one, self._gives_back = release, True  # first: Ctrl-C may come behind any step
        else:
            self.has_acks, self._has_transient = True, self._has_transient or not message.persistent
            self._require_same(message)
            one = _new(Ack, (message,))  # as its own, less a call
        try:
            message._store.claim(message)
            self._all.append(one)
        except KeyboardInterrupt:
            if not self._all or self._all[-1] is not one:
                unclaim([message])
            raise

    def reject(
        self, message: Message[Any], letter: tuple[Destination, Outgoing] | None, told: Callable[[], object],
        registry: StoreRegistry,
    ) -> None:  # fmt: skip
        """Claim a message, and add its ack and its dead letter, whose body is kept, or neither. Raises as `send` and
        `claim`."""
        count = len(self._all)
        try:
            if letter is not None:
                self.send((letter[0],), letter[1], registry)
                self._all[-1] = Letter(*self._all[-1])
            self._rejects = True
            self.claim(message, registry)
            self._all[-1] = one = Reject(message)
            one.told = told
        except BaseException:
            self.undo(count)
            raise

    def tell_rejected(self) -> None:
        """Tell of the messages that were rejected, once all is committed."""
        for one in self._all if self._rejects else ():
            if isinstance(one, Reject):
                one.told()

    def _require_same(self, message: Message[Any]) -> None:
        """Raise TransactionError if a message's store was reopened since another message of it was acked."""
        store: Store = message._store  # type: ignore[assignment]
        participant = self._participant(store, message.destination)
        if participant.store is not store:
            for other in self.acked:
                if other._store.store_id == store.store_id and other._store is not store:
                    raise TransactionError(
                        f"store {store.name!r} was reopened since this transaction acked {other!r}, whose lease is "
                        "gone with that; roll back and receive again"
                    )
            participant.store = store

    @property
    def acked(self) -> list[Message[Any]]:
        """The messages that are acked, in order."""
        return [one.message for one in self._all if isinstance(one, Ack)]

    def undo(self, count: int) -> None:
        """Undo all operations but the first so many. If that is interrupted some are half undone."""
        undone = self._all[count:]
        unclaim([one.message for one in undone if isinstance(one, Ack | Release)])
        del self._all[count:]
        self.bytes -= sum(len(cast("bytes | LargeBody", one.sent[1].body)) for one in undone if isinstance(one, Send))

    def participants(self, registry: StoreRegistry | None = None) -> dict[bytes, Participant]:
        """Return the participants, by their store's id, each with its part of the operations. With `registry` each
        operation is brought to the store that its destination is in now; raises what that raises."""
        if registry is not None or self._handed_over:
            self._participants = {}
            self._all = [one if isinstance(one, Release) else self._anew(one, registry) for one in self._all]
        self._handed_over = True
        found: dict[bytes, Participant] = {}
        for one in self._all:
            if type(one) is Send:
                participant = one.participant
                participant.sends.append(one.sent)
            elif isinstance(one, Ack):
                store = cast("Store", one.message._store)  # it may have been moved since it was acked
                participant = self._participant(store, one.message.destination)
                if not participant.acks:
                    participant.store = store
                participant.acks.append(one.message)
            elif isinstance(one, ChangeSubscription):
                participant = one.participant
                participant.changes.append(one.change)
            elif isinstance(one, Send):
                participant = one.participant
                participant.sends.append(one.sent)
            else:
                continue
            found[participant.store_id] = participant
        for participant in found.values() if self._has_transient else ():
            lasts = any(message.persistent for _, message in participant.sends)
            lasts = lasts or any(acked.persistent for acked in participant.acks)
            participant.volatile |= not (participant.changes or lasts)
        return found

    def _anew(self, one: Send | Ack | ChangeSubscription, registry: StoreRegistry | None) -> Any:
        """Return an operation for a participant that has nothing yet: the store that `registry` tells, if given."""
        if isinstance(one, Ack):
            if registry is not None:
                registry.gates.wait(one.message.destination)  # its lease says so a little later
                follow(one.message)
            return one
        store = cast("Store", one.participant.store)
        if isinstance(one, Send):
            destination = one.sent[0]
            store = store if registry is None else registry.store_to_be(destination)
        else:
            destination = one.change.subscription.topic
            store = store if registry is None else registry.store_for(destination)
        return one._replace(participant=self._participant(store, destination))

    def receipts(self, participants: Collection[Participant]) -> list[Receipt]:
        """Return a receipt for each send, in order, once the participants have committed. Its seq is 0 where a store
        carries it out later, or was opened again since it had prepared: it knows no more which send was which."""
        given: dict[Participant, Iterator[Receipt]] = {}
        for one in participants:
            known = len(one.receipts) == len(one.sends)
            given[one] = iter(one.receipts if known else [Receipt(destination, 0) for destination, _ in one.sends])
        if len(given) == 1 and not self._rejects:
            return list(given[one])
        sends = [(type(one), next(given[one.participant])) for one in self._all if isinstance(one, Send)]
        return [receipt for kind, receipt in sends if kind is Send]

    def end(self) -> None:
        """Free the messages that are given back, and drop all operations. May be done again."""
        self._ended_with = self._ended_with or len(self._all)
        while self._gives_back and self._all:
            last = self._all[-1]
            if isinstance(last, Release):
                last.free()
            self._all.pop()
        self._all.clear()
