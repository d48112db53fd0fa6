"""The contract of adapters/base.py, once for every kind of store.

engine      what is written becomes seen                       (engine.py)
writer      tickets become writes                              (writers.py)
receiving   what comes out                                     (receiving.py)
backend     where the bytes live: the kind of the store        (backend.py)
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import msgspec
from pydantic import BaseModel

from ...policies.destination import Destination
from ...policies.errors import (
    AnabranchError,
    CorruptionError,
    OutcomeUnknownError,
    StoreFailedError,
    StoreLockedError,
    UnknownMessageError,
)
from .. import base
from ..base import (
    DEFAULT_PRIORITY,
    Counts,
    Done,
    Headers,
    Listener,
    Message,
    Outgoing,
    Pending,
    Prepared,
    Progress,
    Receipt,
    Settlement,
    StoreStats,
    Subscription,
    SubscriptionKey,
    Undelivered,
    require_leased,
)
from ..files import disk_errors
from ..headers import pack_id
from ..room import Amount, Reservation, Room
from ..subscriptions import checked, require_same, require_unclaimed, shown, unknown
from .backend import Backend, Found
from .branches import branch_of, payload_of
from .changes import (
    Branch,
    Change,
    Commit,
    Forget,
    Prepare,
    Remove,
    Rollback,
    Send,
    Subscribe,
    Unsubscribe,
    acks_of,
    returned_of,
)
from .delivery import CLAIMED, LEASED, Feed, Lease, claimed, order_of
from .engine import Engine
from .purging import purge
from .receiving import Receiving
from .records import decode, encode, encode_outgoing, order_and_expiry
from .settling import Settling
from .states import DestinationState
from .tickets import Ticket
from .writers import Direct, Threaded, Writer

log = logging.getLogger(__name__)

T = TypeVar("T")


class CoreStore:
    """One store over a backend. A kind of store is a subclass that names its backend and its options' model. Threads:
    all. Forks: a child's calls raise ClosedError (rule D4). A signal handler that interrupted a call of its own thread
    gets RuntimeError (rule G3)."""

    backend_type: ClassVar[type[Backend]]
    options_model: ClassVar[type[BaseModel]]

    def __init__(self, name: str, directory: Path, options: Any, index_directory: Path | None = None) -> None:
        self.name = name
        self.directory = directory
        self.options = options
        self.backend: Backend = self.backend_type(name, directory, options, index_directory)
        self.volatile = self.backend.volatile
        self.shared = self.backend.shared
        self.descriptors = self.backend.descriptors
        self.store_id = b""
        self.owner: object = None
        self._settings = self.backend.settings
        self._opened = False
        self._begin()

    def _begin(self) -> None:
        """The state of a store that is not open yet."""
        settings = self._settings
        self._engine = engine = Engine(self.name, self.backend)
        own = self.backend.writer(engine)
        self._writer: Writer = own or (Threaded(engine) if self.backend.threaded else Direct(engine))
        self._receiving = Receiving(self, engine)
        self._settling = Settling(self, engine, self._writer, self._write)
        self._room = Room(
            self.name, settings.max_messages, settings.max_bytes, self._count_held, settings.max_bytes_option
        )

    @classmethod
    def create(cls, name: str, directory: Path, options: Any) -> bytes:
        """Make an empty store, whole or not at all (rule D2); returns its id. The directory must not exist."""
        with disk_errors(f"store {name!r} cannot be created"):
            return cls.backend_type.create(name, directory, options)  # type: ignore[attr-defined,no-any-return]

    @classmethod
    def identify(cls, directory: Path) -> bytes | None:
        """The id of the store in a directory, None if there is none."""
        return cls.backend_type.identify(directory)  # type: ignore[attr-defined,no-any-return]

    # Opening and closing

    def open(self, progress: Progress | None = None) -> None:
        if self._opened:
            raise StoreLockedError(f"store {self.name!r} is open already, in this process")
        started = time.monotonic()
        self._begin()
        engine = self._engine
        with disk_errors(f"store {self.name!r} cannot be opened"):
            self.store_id, found = self.backend.open(engine.host(), progress)
            try:
                self._load(found)
                self.backend.require_owned()
            except BaseException:
                self.backend.close(clean=False)
                raise
        engine.start()
        self._opened = True
        if engine.catalog.messages:
            log.info(
                "store %s: opened with %d messages in %.2f s", self.name, engine.catalog.messages,
                time.monotonic() - started,
            )  # fmt: skip

    def _load(self, found: Found) -> None:
        engine = self._engine
        sequencer = engine.sequencer
        sequencer.last_seq = found.last_seq
        ids: dict[tuple[int, bytes], int] = {}
        for key, seq in found.ids:
            ids.pop(key, None)  # requeued: it is among the latest
            ids[key] = seq
        sequencer.window.add(ids)
        for state in engine.catalog.destinations.values():
            if state.subscriptions:
                sequencer.subscribed[state.number] = state.subscriptions
        engine.committed = dict.fromkeys(found.committed)
        for transaction, payload in found.prepared:
            try:
                branch = branch_of(transaction, payload, engine.catalog, self._settings.priorities)
            except msgspec.DecodeError as error:
                reason = f"the prepared transaction {transaction.hex()} does not read: {error}"
                raise CorruptionError(f"store {self.name!r}", 0, reason, "restore it from a backup") from None
            self._claim_again(branch)
            if self._room.limited:
                branch.reservation = self._room.hold(sequencer.amount(branch.sends))
            branch.promise = self._promise(branch)
            sequencer.prepared[transaction] = branch

    def _claim_again(self, branch: Branch) -> None:
        """What it acks is claimed before anybody can receive (rule X6)."""
        leases = []
        for ack in branch.acks:
            feeds = [
                feed for feed in ack.state.feeds(ack.number)
                if self.backend.row(ack.state, feed.subscription, ack.seq) is not None
            ]  # fmt: skip
            if feeds:  # else its subscription or destination was removed in spite of it
                place = self.backend.row(ack.state, feeds[0].subscription, ack.seq)
                assert place is not None
                whole = ack.state.is_topic and not ack.number
                ack.place = place
                leases.append(self._engine.delivery.claim_again(feeds, place, whole))
        branch.leases = leases

    @property
    def last_seq(self) -> int:
        if self._engine.failed is not None:
            self._engine.ensure_usable()
        return self._engine.sequencer.last_seq

    def close(self) -> None:
        if not self._opened:
            return
        engine = self._engine
        if engine.forked:
            self._opened = False
            return
        self._look_after_owner()
        self._writer.close()
        engine.closed = True
        try:
            with engine.lock:
                self._close_backend()
        except Exception:
            self._opened = False
            raise
        finally:
            engine.wake_all()
        self._opened = False  # not after Ctrl-C: then close() may be called again
        for feed in engine.catalog.feeds():
            feed.held.clear()  # leases end with it, also where the same object is opened again

    def _close_backend(self) -> None:
        engine = self._engine
        try:
            if engine.failed is None:
                engine.drain()
        except Exception:
            self.backend.close(clean=False)
            raise
        self.backend.close(clean=engine.failed is None)

    def _look_after_owner(self) -> None:
        """A store that has lost its directory writes nothing more."""
        try:
            self.backend.require_owned()
        except StoreFailedError as error:
            self._engine.fail(error)

    # Sending

    def send(
        self,
        destination: Destination,
        body: bytes,
        headers: Headers | None = None,
        message_id: str | None = None,
        sync: bool | None = None,
        priority: int = DEFAULT_PRIORITY,
        expires_at_ms: int = 0,
    ) -> Receipt:
        ticket = self._send_ticket(destination, body, headers, message_id, sync, priority, expires_at_ms)
        self._writer.submit(ticket)
        seq, duplicate = self._wait(ticket)[0]
        return Receipt(destination, seq, duplicate)

    def _send_ticket(
        self,
        destination: Destination,
        body: bytes,
        headers: Headers | None,
        message_id: str | None,
        sync: bool | None,
        priority: int,
        expires_at_ms: int,
    ) -> Ticket:
        settings = self._settings
        record, name = encode(
            destination, body, headers, message_id, settings.message_bytes_max, priority, expires_at_ms
        )
        send = self._send(destination, record, name, priority, expires_at_ms)
        ticket = Ticket([send], send.size, bool(sync))
        if self._room.limited:
            ticket.held = self._reserve([send])
        self._engine.sends += 1
        return ticket

    def _send(
        self, destination: Destination, record: bytes, name: bytes | None, priority: int, expires_at_ms: int
    ) -> Send:
        state = self._engine.catalog.destinations.get(destination) or self._state(destination)
        return Send(state, record, name, order_of(priority, self._settings.priorities), expires_at_ms)

    def _state(self, destination: Destination) -> DestinationState:
        self._engine.ensure_usable()
        return self._engine.catalog.state(destination)

    def _outgoing(self, destination: Destination, message: Outgoing | bytes) -> Send:
        limit = self._settings.message_bytes_max
        if isinstance(message, Outgoing):
            record, name = encode_outgoing(destination, message, limit)
        else:
            record, name = encode(destination, message, None, None, limit)
        return self._send(destination, record, name, *order_and_expiry(record))

    def _wait(self, ticket: Ticket) -> list[Any]:
        """Until it is done; then help to apply it if too much waits for that."""
        outcomes = self._writer.wait(ticket)
        self._engine.help()
        return outcomes

    def send_nowait(
        self,
        destination: Destination,
        body: bytes,
        headers: Headers | None = None,
        message_id: str | None = None,
        sync: bool | None = None,
        priority: int = DEFAULT_PRIORITY,
        expires_at_ms: int = 0,
    ) -> Future[Receipt]:
        ticket = self._send_ticket(destination, body, headers, message_id, sync, priority, expires_at_ms)
        future: Future[Receipt] = Future()
        future.set_running_or_notify_cancel()  # it may be on its way to the disk: no cancel() can call it back
        ticket.future = (future, lambda done: Receipt(destination, *done.outcomes[0]))
        self._writer.submit_all([ticket])
        self._writer.proceed()
        self._engine.help()
        return future

    def send_many(
        self, destination: Destination, messages: Iterable[Outgoing | bytes], sync: bool | None = None
    ) -> list[Receipt]:
        engine, size_max = self._engine, self._settings.ticket_bytes_max
        tickets: list[list[Send]] = []
        size = 0
        for message in messages:  # all of them before any is queued: what is wrong with one refuses all
            send = self._outgoing(destination, message)
            if not tickets or size + send.size > size_max:
                tickets.append([])
                size = 0
            tickets[-1].append(send)
            size += send.size
        engine.ensure_usable()
        reservation = self._reserve([send for part in tickets for send in part]) if self._room.limited else None
        queued = [Ticket(part, sum(send.size for send in part), bool(sync)) for part in tickets]
        for ticket in queued:
            ticket.held = reservation
        del reservation
        self._writer.submit_all(queued)
        engine.sends += sum(len(part) for part in tickets)
        return [Receipt(destination, *done) for ticket in queued for done in self._wait(ticket)]

    def _sends(self, sends: Sequence[tuple[Destination, Outgoing]]) -> list[Send]:
        return [self._outgoing(destination, message) for destination, message in sends]

    def _reserve(self, sends: Sequence[Send]) -> Reservation:
        """Room for these. Raises StoreFullError, and then nothing is reserved."""
        return self._room.reserve(self._engine.sequencer.amount(sends))

    def _count_held(self) -> Amount:
        catalog = self._engine.catalog
        return self._engine.asked(lambda: (catalog.messages, catalog.bytes))

    # Receiving

    def receive(
        self, destination: Destination, timeout: float | None = 0, subscription: SubscriptionKey | None = None
    ) -> Message | None:
        return self._receiving.receive(destination, timeout, subscription)

    def watch(
        self, destination: Destination, subscription: SubscriptionKey | None, wake: Callable[[], None]
    ) -> Callable[[], None]:
        return self._receiving.watch(destination, subscription, wake)

    def listen(
        self,
        destination: Destination,
        on_message: Callable[[Message], object],
        credit: int = 1,
        subscription: SubscriptionKey | None = None,
    ) -> Listener:
        return self._receiving.listen(destination, on_message, credit, subscription)

    def take_undelivered(self, limit: int = 100) -> Sequence[Undelivered]:
        return self._receiving.take_undelivered(limit)

    def browse(
        self,
        destination: Destination,
        limit: int | None = None,
        after: int | Message = 0,
        subscription: SubscriptionKey | None = None,
    ) -> Iterator[Message]:
        return self._receiving.browse(destination, limit, after, subscription)

    # Settling

    def ack(self, messages: Sequence[Message]) -> None:
        self._engine.ensure_usable()
        self._settling.ack(messages, LEASED)

    def ack_nowait(self, messages: Sequence[Message]) -> Future[None]:
        self._engine.ensure_usable()
        return self._settling.ack_nowait(messages, LEASED)

    def release(self, messages: Sequence[Message], delivered: bool = True) -> None:
        self._engine.ensure_usable()
        self._settling.give_back(messages, LEASED, delivered)

    def release_nowait(self, messages: Sequence[Message], delivered: bool = True) -> Future[None]:
        self._engine.ensure_usable()
        return self._settling.give_back_nowait(messages, LEASED, delivered)

    def claim(self, message: Message) -> None:
        self._engine.ensure_usable()
        self._settling.claim(message)

    def unclaim(self, messages: Sequence[Message]) -> None:
        self._engine.ensure_usable()
        self._settling.give_back(messages, CLAIMED, delivered=True)

    def token(self, message: Message) -> str:
        if not isinstance(message.note, Lease):
            require_leased(message)
            raise UnknownMessageError(f"{message!r} is not leased here any more")
        return self._settling.token(message.note)

    def leased(self, token: str) -> Message:
        self._engine.ensure_usable()
        message = self._receiving.read(self._settling.lease(token))
        if message is None:
            raise UnknownMessageError(f"the message of token {token} is not there any more")
        return message

    def settle(self, tokens: Sequence[str], how: Settlement) -> list[AnabranchError | None]:
        self._engine.ensure_usable()
        return self._settling.settle(tokens, how)

    def _write(self, changes: Sequence[Change], sync: bool = False, unsynced: bool = False) -> list[Any]:
        ticket = Ticket(changes, sum(change.size for change in changes), sync, unsynced)
        self._writer.submit(ticket)
        return self._wait(ticket)

    # Durable subscriptions

    def subscribe(self, subscription: Subscription, retroactive: bool = False) -> bool:
        engine = self._engine
        engine.ensure_usable()
        change = self._change(base.Change(subscription, True, bool(retroactive)))
        ((known, there),) = self._write([change])
        engine.asked(lambda: None)  # at once, so that who receives need not look for it
        if there:
            require_same(known.subscription, subscription)
        return not there

    def _change(self, change: base.Change) -> Subscribe | Unsubscribe:
        """Raises DestinationError, TypeError, SubscriptionError."""
        subscription = checked(change.subscription)
        state = self._state(subscription.topic)
        if not change.subscribe:
            return Unsubscribe(state, subscription.key)
        plain = subscription._replace(no_local=bool(subscription.no_local))
        return Subscribe(state, self._engine.catalog.next_number(), plain, change.retroactive)

    def unsubscribe(self, topic: Destination, subscription: SubscriptionKey) -> int:
        engine = self._engine
        known = self._receiving.subscription(topic, subscription)
        held, count = engine.asked(lambda: (claimed(known.feed), known.count))
        require_unclaimed(f"the {shown(topic, subscription)}", "removed", held)
        ((ended, _),) = self._write([Unsubscribe(known.topic, subscription)])
        engine.asked(lambda: None)
        if ended is None:
            raise unknown(topic, subscription)
        return count

    def subscriptions(self) -> Sequence[Subscription]:
        catalog = self._engine.catalog
        return self._engine.asked(
            lambda: [
                known.subscription for state in catalog.destinations.values() for known in state.subscriptions.values()
            ]
        )

    # Transactions

    def commit(
        self,
        sends: Sequence[tuple[Destination, Outgoing]],
        acks: Sequence[Message],
        sync: bool | None = None,
        changes: Sequence[base.Change] = (),
    ) -> list[Receipt]:
        first, reservation = self._commit(sends, changes)
        outcomes = self._settling.ack(acks, CLAIMED, first, bool(sync), reservation)
        self._engine.sends += len(sends)
        return _receipts(sends, outcomes[len(changes) :])

    def commit_nowait(
        self,
        sends: Sequence[tuple[Destination, Outgoing]],
        acks: Sequence[Message],
        sync: bool | None = None,
        changes: Sequence[base.Change] = (),
    ) -> Future[list[Receipt]]:
        first, reservation = self._commit(sends, changes)
        self._engine.sends += len(sends)
        return self._settling.ack_nowait(
            acks, CLAIMED, first, bool(sync), reservation, lambda outcomes: _receipts(sends, outcomes[len(changes) :])
        )

    def _commit(
        self, sends: Sequence[tuple[Destination, Outgoing]], changes: Sequence[base.Change]
    ) -> tuple[list[Change], object]:
        """What comes before the acks, and the room that it needs."""
        self._engine.ensure_usable()
        first: list[Change] = [self._change(change) for change in changes]
        sending = self._sends(sends)
        return [*first, *sending], self._reserve(sending) if self._room.limited else None

    def reserve(self, sends: Sequence[tuple[Destination, Outgoing]]) -> object:
        self._engine.ensure_usable()
        sending = self._sends(sends)
        return self._reserve(sending) if self._room.limited else None

    def prepare(
        self,
        transaction: bytes,
        participants: Sequence[bytes],
        sends: Sequence[tuple[Destination, Outgoing]],
        acks: Sequence[Message],
        sync: bool,
        room: object = None,
        changes: Sequence[base.Change] = (),
    ) -> Pending[None]:
        engine = self._engine
        engine.ensure_usable()
        self.backend.require_owned()
        first: list[Change] = [self._change(change) for change in changes]
        first += self._sends(sends)
        leases = engine.delivery.take(self, acks, CLAIMED, CLAIMED)
        branch = Branch(transaction, tuple(participants), [*first, *acks_of(leases)])
        branch.reservation, branch.leases = room, leases
        self.backend.stage(branch)
        branch.payload = payload_of(participants, branch.changes)
        branch.promise = self._promise(branch)
        try:
            step = self._step(Prepare(branch), lambda outcome: None, sync)
        except (AnabranchError, RuntimeError):  # not so if Ctrl-C strikes: it may be queued
            self.backend.unstage(transaction)
            raise

        def refused() -> None:
            branch.reservation = None  # the error's traceback may hold the branch for long
            self.backend.unstage(transaction)

        step.refused = refused
        return step

    def _promise(self, branch: Branch) -> int:
        """Bytes to keep free for its outcome, which takes at most so many. None where that is more than can be kept: on
        a full disk such a one waits for room."""
        size = branch.outcome_size
        return size if size <= self._settings.promise_max else 0

    def _step(
        self,
        change: Prepare | Commit | Rollback,
        result: Callable[[Any], T],
        sync: bool = False,
        unsynced: bool = False,
    ) -> Step[T]:
        ticket = Ticket([change], change.size, sync, unsynced)
        if type(change) is Prepare:
            ticket.promise = change.branch.promise
        else:
            # The branch lets go of its room once it is settled, the ticket once its messages are counted as held:
            # between the two nobody else gets it, and a commit that finds the disk full leaves the branch its room.
            ticket.held = change.branch.reservation
        self._writer.submit(ticket)
        return Step(self._writer, self._wait, ticket, result)

    def commit_prepared(self, transaction: bytes) -> Pending[list[Receipt]]:
        branch = self._prepared(transaction)
        if branch is None:
            return Done([])
        self.backend.before_outcome(branch, True)
        engine, sends = self._engine, branch.sends
        first = len(branch.changes) - len(sends) - len(branch.acks)

        def receipts(outcomes: list[Any] | None) -> list[Receipt]:
            if outcomes is None:  # another thread had committed it before
                return []
            engine.sends += len(sends)
            engine.acks += len(branch.acks)
            done = outcomes[first : first + len(sends)]
            return [Receipt(send.state.destination, *one) for send, one in zip(sends, done, strict=True)]

        return self._step(Commit(branch), receipts, unsynced=True)

    def rollback_prepared(self, transaction: bytes) -> Pending[bool]:
        branch = self._prepared(transaction)
        if branch is None:
            self.backend.unstage(transaction)
            return Done(False)
        self.backend.before_outcome(branch, False)
        branch.returned = returned_of(branch.leases)

        def rolled_back(outcome: bool) -> bool:
            self._engine.asked(lambda: None)  # what it frees is free once it is applied
            return outcome

        return self._step(Rollback(branch), rolled_back, unsynced=True)

    def _prepared(self, transaction: bytes) -> Branch | None:
        """The branch, if it is prepared once all that is queued is written: its prepare may have been queued by a
        thread that was interrupted before it could wait."""
        self._engine.ensure_usable()
        prepared = self._engine.sequencer.prepared
        if transaction not in prepared:
            self._writer.flush()
        return prepared.get(transaction)

    def recover_prepared(self) -> Sequence[Prepared]:
        self._engine.ensure_usable()
        branches = list(self._engine.sequencer.prepared.values())
        return [branch.summary for branch in sorted(branches, key=lambda branch: branch.transaction)]

    def committed(self) -> Sequence[bytes]:
        return self._engine.asked(lambda: sorted(self._engine.committed))

    def forget(self, transactions: Sequence[bytes]) -> None:
        known = self._engine.asked(lambda: [one for one in transactions if one in self._engine.committed])
        if known:
            self._write([Forget(known)], unsynced=True)

    def sync(self) -> None:
        self._engine.ensure_usable()
        self.backend.sync()

    # Upkeep

    def purge(self, destination: Destination, subscription: SubscriptionKey | None = None) -> int:
        engine = self._engine
        if subscription is not None:
            known = self._receiving.subscription(destination, subscription)
            return purge(engine, known.topic, (known.feed,), self._write)[0]
        state = engine.catalog.destinations.get(destination)
        if state is None:
            engine.ensure_usable()
            return 0
        free, gone = purge(engine, state, state.feeds(), self._write)
        return gone if state.is_topic else free

    def delete(self, destination: Destination) -> int:
        engine = self._engine
        state = engine.catalog.destinations.get(destination)
        if state is None:
            engine.ensure_usable()
            return 0
        held, count = engine.asked(lambda: (sum(claimed(feed) for feed in state.feeds()), state.count))
        require_unclaimed(str(destination), "deleted", held)
        self._write([Remove(state)])
        engine.asked(lambda: None)  # at once, so that nothing fetched ahead is received, nothing leased acked
        return count

    def retire(self) -> bool:
        engine = self._engine
        try:
            self._writer.flush()
        except StoreFailedError as error:  # its database is away: not now
            if engine.failed is not None:
                raise
            log.debug("store %s does not retire: %s", self.name, error)
            return False
        engine.check()
        with engine.lock:
            engine.current()
            if any(feed.is_used for feed in engine.catalog.feeds()) or engine.sequencer.prepared:
                return False
            if self.volatile and self._holds_anything():
                return False
            engine.closed = True
            self._writer.refuse_more()
            return True

    def _holds_anything(self) -> bool:
        """Whether closing it would lose something."""
        engine = self._engine
        return bool(
            engine.catalog.messages or len(engine.sequencer.window) or engine.committed or engine.catalog.subscriptions
        )

    def reclaim(self) -> int:
        self._engine.ensure_usable()
        with disk_errors(f"store {self.name!r} cannot give back space"):
            return self.backend.reclaim()

    def checkpoint(self) -> None:
        """Write out what shortens the next opening. Happens by itself; durability never depends on it."""
        self._engine.ensure_usable()
        self.backend.checkpoint()

    # Asking

    def destinations(self) -> Sequence[Destination]:
        catalog = self._engine.catalog
        return self._engine.asked(lambda: [state.destination for state in catalog.declared()])

    def depth(self, destination: Destination, subscription: SubscriptionKey | None = None) -> int:
        if subscription is not None:
            known = self._receiving.subscription(destination, subscription)
            return self._engine.asked(lambda: known.count)
        state = self._engine.catalog.destinations.get(destination)
        return self._engine.asked(lambda: state.count if state is not None else 0)

    def counts(self, destination: Destination, subscription: SubscriptionKey | None = None) -> Counts:
        if subscription is not None:
            known = self._receiving.subscription(destination, subscription)
            return self._engine.asked(lambda: _counts(known.count, (known.feed,)))
        state = self._engine.catalog.destinations.get(destination)
        return self._engine.asked(lambda: _counts(state.count, state.feeds()) if state is not None else Counts(0, 0))

    def find(self, destination: Destination, message_id: str) -> Message | None:
        engine, state = self._engine, self._engine.catalog.destinations.get(destination)
        name = pack_id(message_id)
        if state is None:
            engine.ensure_usable()
            return None
        seq = engine.sequencer.window.get((state.number, name))
        place = engine.asked(lambda: self.backend.row(state, None, seq)) if seq is not None else None
        for record in self.backend.bodies(state, [place]) if place is not None else ():
            if record is not None:
                return decode(self, destination, place, record, None)  # type: ignore[arg-type]
        return None

    def stats(self) -> StoreStats:
        engine = self._engine
        if engine.failed is None:
            return engine.asked(self._stats)
        with engine.lock:
            return self._stats()

    def _stats(self) -> StoreStats:
        engine = self._engine
        states = list(engine.catalog.declared())
        backend = self.backend.stats()
        return StoreStats(
            name=self.name,
            kind=self.backend.kind,
            messages=sum(state.count for state in states),
            destinations={state.destination: state.count for state in states},
            leased=sum(len(feed.held) for feed in engine.catalog.feeds()),
            sends=engine.sends,
            acks=engine.acks,
            syncs=backend.syncs,
            batches=engine.batches,
            journal_bytes=backend.journal_bytes,
            capacity_bytes=backend.capacity_bytes,
            pool_bytes=backend.pool_bytes,
            segments=backend.segments,
            live_percent=backend.live_percent,
            failed=str(engine.failed) if engine.failed is not None else None,
            subscriptions={
                known.subscription: known.count for state in states for known in state.subscriptions.values()
            },
            memory_bytes=backend.memory_bytes,
            swap_bytes=backend.swap_bytes,
            dropped=engine.sequencer.dropped,
            waiting=sum(len(feed.takers) + len(feed.watches) for feed in engine.catalog.feeds()),
        )

    def check(self) -> Iterator[str]:
        with disk_errors(f"store {self.name!r} cannot be checked"):
            yield from self._writer.undisturbed(lambda: self._engine.asked(lambda: list(self.backend.check())))


def _counts(held: int, feeds: Sequence[Feed]) -> Counts:
    leased = sum(len(feed.held) for feed in feeds)
    return Counts(max(held - leased, 0), leased)


def _receipts(sends: Sequence[tuple[Destination, Outgoing]], outcomes: Sequence[Any]) -> list[Receipt]:
    """Of sends; acks come behind them."""
    return [Receipt(destination, *done) for (destination, _), done in zip(sends, outcomes, strict=False)]


class Step(Generic[T]):
    """A Pending: a change that is queued."""

    def __init__(
        self, writer: Writer, wait: Callable[[Ticket], list[Any]], ticket: Ticket, result: Callable[[Any], T]
    ) -> None:
        self._writer, self._wait, self._ticket, self._result = writer, wait, ticket, result
        self.refused: Callable[[], None] | None = None
        """Called if it certainly has no effect."""

    def proceed(self) -> None:
        self._writer.proceed()

    def wait(self) -> T:
        try:
            outcomes = self._wait(self._ticket)
        except OutcomeUnknownError:
            raise
        except AnabranchError:
            if self.refused is not None:
                self.refused()
            raise
        return self._result(outcomes[0])
