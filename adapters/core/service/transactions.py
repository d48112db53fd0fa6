"""A store's part in transactions: its own commit, and what the router's coordinator asks of a participant (rules T1,
T2, X6)."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from ....policies.errors import AnabranchError, CorruptionError, DestinationError, OutcomeUnknownError
from ....policies.names.destination import Destination, Kind
from ...system.background import shared
from .. import store_types
from ..backend.writers import Queued, Writer
from ..engine.engine import APPLY_AT, Engine
from ..engine.hooks import Transient
from ..messages import DROPPED, Message, Outgoing, Receipt, encoded_text
from ..operations.branches import Branch, Commit, Forget, Prepare, Rollback, branch_of, payload_of
from ..operations.changes import (
    MARK,
    Change,
    Dropped,
    Mark,
    Send,
    acks_of,
    give_back_room,
    returned_of,
    sent,
    vague_mark,
)
from ..operations.tickets import Ticket
from ..record.headers import pack_id
from ..record.large import body_size
from ..record.place import DELIVERIES, OWN
from ..state.leases import CLAIMED, LEAVING, Lease
from ..state.limits import Grant, NoRoomYetError, cancel
from ..store_types import Done, Pending, Prepared
from .sending import Sending
from .settling import Settling

if TYPE_CHECKING:
    from ..messages import MessageStore

T = TypeVar("T")

Sends = Sequence[tuple[Destination, Outgoing]]

_new = tuple.__new__


class Transactions:
    """One open store's part in transactions. Threads: all."""

    def __init__(
        self,
        store: MessageStore,
        engine: Engine,
        writer: Writer,
        sending: Sending,
        settling: Settling,
        sync: Callable[[], object],
    ) -> None:
        self._sync = sync
        self._store, self._engine, self._writer, self._sending, self._settling = (
            store, engine, writer, sending, settling,
        )  # fmt: skip
        self._backend = engine.backend

    # Its own commit

    def commit(
        self, sends: Sends, acks: Sequence[Message], sync: bool | None, changes: Sequence[store_types.Change],
        mark: str | None = None,
    ) -> list[Receipt]:  # fmt: skip
        first, grant = self._first(sends, acks, changes)
        marks = self._marks(mark, sends, acks, changes, grant) if mark is not None else ()
        if marks:
            first[:0] = marks
        try:
            outcomes = self._settling.ack(acks, CLAIMED, first, bool(sync), grant)
        except BaseException as error:
            self._sending.let_go(grant, error)
            raise
        return self._receipts(sends, outcomes, len(marks) + len(changes), grant)

    def commit_nowait(
        self, sends: Sends, acks: Sequence[Message], sync: bool | None, changes: Sequence[store_types.Change]
    ) -> Future[list[Receipt]]:
        try:
            first, grant = self._first(sends, acks, changes, wait=False)
        except NoRoomYetError:
            return shared().call(lambda: self.commit(sends, acks, sync, changes))
        try:
            return self._settling.ack_nowait(
                acks, CLAIMED, first, bool(sync), grant,
                lambda outcomes: self._receipts(sends, outcomes, len(changes), grant),
            )  # fmt: skip
        except BaseException as error:
            self._sending.let_go(grant, error)
            raise

    def _receipts(self, sends: Sends, outcomes: Sequence[Any], first: int, grant: Grant | None) -> list[Receipt]:
        """Return the receipts of sends, whose outcomes begin at `first`, before those of acks."""
        made: list[Receipt] = []
        for (destination, _), done in zip(sends, outcomes[first:] if first else outcomes, strict=False):
            made.append(_new(Receipt, (destination, *done)))  # no comprehension, nor its own: a call less each
        self._engine.sends += len(made)
        if grant is not None and grant.dropped:
            self._engine.sends -= len(grant.dropped)
            self._sending.quotas.tell_new(sends[at][0] for at in grant.dropped)
        return made

    def _first(
        self, sends: Sends, acks: Sequence[Message], changes: Sequence[store_types.Change], wait: bool = True
    ) -> tuple[list[Change], Grant | None]:
        """Return the changes that come before the acks, and the room that they need."""
        self._engine.ensure_usable()
        first: list[Change] = [*map(self._sending.change, changes)] if changes else []
        sending = self._sending.sends(sends)
        grant = self._reserve(sending, sends, acks, None, wait) if self._engine.quotas is not None else None
        if grant is not None:
            for at in grant.dropped:
                sending[at] = Dropped()
            sending += acks_of(grant.evicted)
        return first + sending if first else sending, grant

    def _marks(
        self, mark: str, sends: Sends, acks: Sequence[Message], changes: Sequence[store_types.Change],
        grant: Grant | None,
    ) -> list[Mark]:  # fmt: skip
        """Return what remembers a transaction by its name: a mark in each of its destinations, since one may be removed
        before somebody asks. Those that it sends to come last, in the order in which it does (`marked`)."""
        if not self._backend.settings.duplicate_window:
            return []
        name = MARK + encoded_text(mark, "mark")
        if grant is not None and grant.dropped:
            name = vague_mark(name)
        sent = dict.fromkeys(destination for destination, _ in sends)
        others = dict.fromkeys([message.destination for message in acks], False)
        others |= {change.subscription.topic: change.subscribe for change in changes}
        marked = [(one, declares) for one, declares in others.items() if one not in sent]
        marked += [(one, True) for one in sent]
        there = self._engine.catalog.destinations
        return [Mark(self._sending.state(one), name, declares) for one, declares in marked if declares or one in there]

    def marked(self, mark: str, sends: Sends, others: Iterable[Destination]) -> list[Receipt] | None:
        """Return the receipts of a transaction's sends, as Store.marked."""
        self._engine.ensure_usable()  # a store that has failed may know a mark that it could not write
        name = MARK + encoded_text(mark, "mark")
        sent = list(dict.fromkeys(destination for destination, _ in sends))
        seqs = [self._seq_of(destination, name) for destination in sent]
        known = any(seqs) or any(
            self._seq_of(one, name) or self._seq_of(one, vague_mark(name)) for one in (*sent, *others)
        )
        if not known:
            return None
        following = (seqs[0] or 0) + len(sent) if sent and all(seqs) else 0
        receipts = []
        for destination, message in sends:
            seq, named = following, message.message_id
            if named is not None and destination.kind is not Kind.MAP and not message.requeued:
                seq = self._seq_of(destination, pack_id(named)) or 0
            duplicate = seq < following
            if not following or seq > following or not seq:
                return [Receipt(destination, 0) for destination, _ in sends]
            following += not duplicate
            receipts.append(Receipt(destination, seq, duplicate))
        return receipts

    def _seq_of(self, destination: Destination, name: bytes) -> int | None:
        """Return the seq of the message with this id, persistent or not."""
        engine = self._engine
        state = engine.catalog.destinations.get(destination)
        if state is None:
            engine.require_here(destination)
            return None
        key = (state.number, name)
        seq = engine.sequencer.window.get(key)
        return engine.transient.sent_with(key) if seq is None and engine.transient is not None else seq

    def reserve(self, sends: Sends, acks: Sequence[Message], since: float | None, wait: bool) -> Grant | None:
        """Reserve room for a transaction, as Store.reserve."""
        self._engine.ensure_usable()
        if self._engine.quotas is None:
            return None
        return self._reserve(self._sending.sends(sends, self._sending.staging), sends, acks, since, wait)

    def _reserve(
        self, sending: Sequence[Change], sends: Sends, acks: Sequence[Message], since: float | None, wait: bool
    ) -> Grant | None:
        """Reserve room for what the store holds more once these are sent and those acked."""
        if self._engine.quotas is None or not sending:
            return None
        freed = self._freed(acks) if acks else []
        bodies = [body_size(message.body) for _, message in sends] if freed else ()
        return self._engine.quotas.reserve(sending, freed, bodies, since, wait)

    def _freed(self, acks: Sequence[Message]) -> list[Message]:
        """Return the messages of which nothing is left once they are acked; of a topic's, those that nobody else has
        yet to ack."""
        freed, topics = [], []
        for message in dict.fromkeys(acks):
            lease = message._note
            if type(lease) is Lease and (lease.whole or not lease.channels[0].state.is_topic):
                freed.append(message)
            elif type(lease) is Lease:
                topics.append((message, lease))
        if topics:
            engine = self._engine
            freed += engine.asked(lambda: [
                message for message, lease in topics
                if len(engine.rows.unacked(lease.channels[0].state, lease.seq)) == 1
            ])  # fmt: skip
        return freed

    # Over several stores

    def load(self, prepared: Sequence[tuple[bytes, bytes]]) -> None:
        """Load, at open, branches that wait for their outcome, by transaction and payload. Messages that they ack are
        claimed before anybody can receive. Raises CorruptionError."""
        for transaction, payload in prepared:
            try:
                branch = self._restored(transaction, payload)
            except (ValueError, IndexError, struct.error, DestinationError) as error:  # DecodeError is a ValueError
                reason = f"the prepared transaction {transaction.hex()} does not read: {error}"
                where = f"store {self._engine.name!r}"
                raise CorruptionError(where, 0, reason, "restore it from a backup") from None
            self._engine.sequencer.prepared[transaction] = branch

    def put(self, transaction: bytes, payload: bytes) -> None:
        """Replace what is prepared under this transaction; without a payload, by nothing. Durable on return. Between
        the two steps there is neither: as copying.py has it, nobody else uses the store. Idempotent."""
        branch = self._engine.sequencer.prepared.get(transaction)
        if branch is not None:
            # Made anew, since a backend may have let go of its bytes.
            if payload_of(branch.participants, branch.changes, branch.note) == payload:
                return
            Step(self._engine, self._writer, Rollback(branch), _told).wait()  # `returned` is empty: none counts
        if payload:
            branch = self._engine.asked(lambda: self._restored(transaction, payload))
            prepare: Step[None] = Step(self._engine, self._writer, Prepare(branch))
            prepare.wait()
        self._sync()

    def _restored(self, transaction: bytes, payload: bytes) -> Branch:
        """Return the branch of a payload. Raises what decoding raises."""
        branch = branch_of(transaction, payload, self._engine.catalog, self._backend.settings.priorities)
        for feature in self._engine.features:
            feature.attach(branch)
        self._claim_again(branch)
        if self._engine.quotas is not None:
            whole = [ack for ack in branch.acks if not ack.state.is_topic or not ack.number]
            branch.reservation = self._engine.quotas.hold(branch.sends, whole)
            branch.reservation.evicted = [*branch.evicted]  # counted as dropped once they go
        branch.keep_free(self._backend.settings.promise_max)
        return branch

    def _claim_again(self, branch: Branch) -> None:
        """Claim the messages that a branch acks, before anybody can receive (rule T10)."""
        leases: list[Lease] = []
        evicted: list[Lease] = []
        for ack in branch.acks:
            channels = [
                channel for channel in ack.state.channels(ack.number)
                if self._backend.row(ack.state, channel.subscription, ack.seq) is not None
            ]  # fmt: skip
            if channels:  # else its subscription or destination was removed in spite of it
                place = self._backend.row(ack.state, channels[0].subscription, ack.seq)
                assert place is not None
                ack.place = place
                whole = ack.state.is_topic and not ack.number
                if self._backend.settings.count_on_receive and place[DELIVERIES] and not whole and not ack.drops:
                    place = (*place[:DELIVERIES], place[DELIVERIES] - 1, place[OWN])  # this delivery is counted
                lease = self._engine.delivery.claim_again(channels, place, whole)
                (evicted if ack.drops else leases).append(lease)
        branch.leases, branch.evicted = leases, evicted

    def prepare(
        self,
        transaction: bytes,
        participants: Sequence[bytes],
        sends: Sends,
        acks: Sequence[Message],
        sync: bool,
        room: Grant | None,
        changes: Sequence[store_types.Change],
        mark: str | None,
        note: bytes,
    ) -> Pending[None]:
        engine, sending, backend = self._engine, self._sending, self._backend
        try:
            engine.ensure_usable()
            backend.require_owned()
            dropped = room.dropped if room is not None else ()
            kept = [send for at, send in enumerate(sends) if at not in dropped] if dropped else sends
            first = sending.sends(kept)
            if changes:
                first[:0] = map(sending.change, changes)
            if mark is not None:
                first[:0] = self._marks(mark, sends, acks, changes, room)
            branch = Branch(transaction, participants, first)
            branch.note = note
            if acks:
                branch.leases = engine.delivery.take(self._store, acks, CLAIMED, CLAIMED)
                first += acks_of(branch.leases)
            if room is not None:
                first += self._give(branch, room, sends)
            if engine.transient is not None and engine.transient.takes(first):
                engine.asked(partial(engine.transient.prepare, branch))
                return Done(None)
            if not backend.volatile:  # else nobody ever reads it back
                branch.payload = payload_of(participants, first, note)
            branch.keep_free(backend.settings.promise_max)
            return Step(engine, self._writer, Prepare(branch), None, sync)
        except AnabranchError:
            cancel(room)  # the error's traceback may hold it for long
            raise

    def _give(self, branch: Branch, room: Grant, sends: Sends) -> list[Change]:
        """Give a branch the room for its sends; return the acks of what has to go for that."""
        branch.reservation, branch.evicted = room, [*room.evicted]
        for lease in branch.evicted:
            self._engine.delivery.move(lease, LEAVING, CLAIMED)
        branch.dropped = [(at, sends[at][0]) for at in sorted(room.dropped)]
        return acks_of(branch.evicted, drops=True)

    def commit_prepared(self, transaction: bytes) -> Pending[list[Receipt]]:
        branch = self._engine.sequencer.prepared.get(transaction)
        if branch is None:
            branch, volatile = self._prepared(transaction)
            if branch is None:
                return Done([])
            if volatile is not None:
                return Done(self._committed(branch, self._engine.asked(partial(volatile.commit_prepared, branch))))
        return Step(self._engine, self._writer, Commit(branch), self._committed)

    def _committed(self, branch: Branch, outcomes: list[Any] | None) -> list[Receipt]:
        """Return the receipts of a branch's sends; none if another thread had committed it before."""
        made: list[Receipt] = []
        if outcomes is None:
            return made
        for change, done in zip(branch.changes, outcomes, strict=True):
            send = change if type(change) is Send else sent(change)
            if send is not None:
                made.append(_new(Receipt, (send.state.destination, *done)))  # as its own, less a call
        engine = self._engine
        engine.sends += len(made)
        if branch.leases:
            engine.acks += len(branch.leases)
        if branch.dropped:
            for at, destination in branch.dropped:
                made.insert(at, Receipt(destination, DROPPED))
            self._sending.quotas.tell_new(destination for _, destination in branch.dropped)
        return made

    def rollback_prepared(self, transaction: bytes) -> Pending[bool]:
        branch, volatile = self._prepared(transaction)
        if branch is None:
            return Done(False)
        engine = self._engine
        branch.returned = returned = returned_of(branch.leases)
        if engine.schedule is not None:
            returned += engine.schedule.postponements(branch.leases, delivered=True)
        if engine.transient is not None:
            engine.transient.takes(returned)
        if branch.reservation is not None:
            branch.reservation.evicted = []  # they stay
        if volatile is not None:
            return Done(engine.asked(partial(volatile.rollback_prepared, branch)))
        return Step(engine, self._writer, Rollback(branch), self._rolled_back)

    def _rolled_back(self, branch: Branch, outcome: bool) -> bool:
        self._engine.look_soon()  # what it frees is free once it is applied
        return outcome

    def _prepared(self, transaction: bytes) -> tuple[Branch | None, Transient | None]:
        """Return the branch, if it is prepared once all that is queued is written: its prepare may have been queued by
        a thread that was interrupted before it could wait. And what it is prepared in, if not in the backend."""
        self._engine.ensure_usable()
        volatile = self._engine.transient
        if volatile is not None and transaction in volatile.prepared:
            return volatile.prepared.get(transaction), volatile
        prepared = self._engine.sequencer.prepared
        if transaction not in prepared:
            self._writer.flush()
        return prepared.get(transaction), None

    def recover_prepared(self) -> Sequence[Prepared]:
        self._engine.ensure_usable()
        branches = list(self._engine.sequencer.prepared.values())
        if self._engine.transient is not None:
            branches += self._engine.transient.prepared.values()
        return [branch.summary for branch in sorted(branches, key=lambda branch: branch.transaction)]

    def forget(self, transactions: Sequence[bytes]) -> None:
        remembered = self._engine.asked(lambda: [one for one in transactions if one in self._engine.committed])
        if remembered:
            self._sending.write([Forget(remembered)], unsynced=True)


def _told(_: Branch, outcome: T) -> T:
    return outcome


class Step(Queued, Generic[T]):
    """A Pending whose change is queued."""

    __slots__ = ("_branch", "_engine", "_result", "_ticket")

    def __init__(
        self,
        engine: Engine,
        writer: Writer,
        change: Prepare | Commit | Rollback,
        result: Callable[[Branch, Any], T] | None = None,
        sync: bool = False,
    ) -> None:
        """Queue a change of a branch. `result` makes what `wait` returns of the change's outcome; None: it returns
        None, and a branch that is not prepared after all gives back its room."""
        self._engine, self._writer, self._result = engine, writer, result
        self._branch = branch = change.branch
        # An outcome is unsynced: a durable decision stands behind it (rule T9).
        self._ticket = ticket = Ticket((change,), change.size, sync, result is not None)
        if result is None:
            ticket.promise = branch.promise
        elif branch.reservation is not None:
            # The branch lets go of its room once it is settled, the ticket once its messages are counted as held:
            # between the two nobody else gets it, and a commit that finds the disk full leaves the branch its room.
            ticket.held = branch.reservation
        if engine.failed is not None:
            engine.ensure_usable()
        writer.submit(ticket)

    def wait(self) -> T:
        branch, result = self._branch, self._result
        try:
            outcomes = self._writer.wait(self._ticket)
        except OutcomeUnknownError:
            raise
        except AnabranchError:
            if result is None:
                cancel(branch.reservation)
                branch.reservation = None  # the error's traceback may hold the branch for long
                give_back_room(branch.changes)
            raise
        if self._engine.pending_changes >= APPLY_AT:
            self._engine.help()
        return cast(T, None) if result is None else result(branch, outcomes[0])
