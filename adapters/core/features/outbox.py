"""Sends and acks in a transaction of the caller's own, in the database that the store keeps its messages in.

    outbox.send(connection, destination, messages)     # rows of OUTBOX, which commit with the caller's own, or do not
    outbox.ack(connection, messages)                   # likewise; the messages are claimed until then
    outbox.settle()                                    # what this thread has committed is seen

What such a transaction asks for is written down beside the store's messages, by the caller, and nothing else of the
store is touched. Once it is committed a thread of ours *drains* it: it does what is written there as anybody else
would, and removes it, in one write. So seqs are given out where they always are, in the order in which messages are
seen (I2, T6), and duplicates fall away there.

Q4  What is committed stays written down until the write that does it, which removes it: it is done once, after any
    crash. A write that finds it gone is refused whole.
Q5  What one transaction asks for becomes visible together, in its order, unless it is more than GROUP_MAX or
    GROUP_BYTES: that takes several writes.
Q6  A message whose ack is written down is claimed (X6) until that ack is drained, or until its transaction is over and
    there is no ack: then it is free again, as after a rollback of a transaction of ours. The end of a transaction is
    told by its connection; only what the database itself says decides what became of it.
Q7  Who commits in this process has it drained at once. For what is committed elsewhere, or without a word, it is looked
    now and then, and at open.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, Final, Protocol, cast, runtime_checkable

from ....policies.errors import AnabranchError, TransactionError
from ....policies.names.destination import Destination
from ...system.background import CoalescedJob, shared
from ...system.conditions import Event
from ..backend.outbox_rows import Caller, Entry, OutboxRows, OutboxTable, SharesDatabase, Written
from ..engine.engine import Engine
from ..engine.hooks import Feature
from ..engine.lease_times import LeaseTimes
from ..messages import LargeBody, Message, MessageStore, Outgoing, Readable, Receipt, require_leased
from ..operations.branches import send_of
from ..operations.changes import Ack, Change, Send, acks_of
from ..operations.table import Table
from ..operations.tickets import Ticket
from ..record.place import is_volatile
from ..service.sending import Sending
from ..service.settling import Settling
from ..state.gates import MovedError
from ..state.leases import CLAIMED, LEASED, LEAVING, MOVING, Lease
from ..state.limits import Grant, release
from .parts import Parts

log: logging.Logger = logging.getLogger(__name__)

GROUP_MAX: Final = 10_000
GROUP_BYTES: Final = 16 << 20
"""Bytes of one transaction that are done by one write."""
PAUSE_FIRST: Final = 0.0005
PAUSE_MAX: Final = 0.05
"""Seconds between two looks at a transaction that is about to end."""
WATCH_SECONDS: Final = 1.0
"""While transactions of callers are open, it is looked so often whether one has ended without a word."""
LOOK_MAX: Final = 60.0
"""Seconds between two looks for what was committed elsewhere, once there was nothing for long."""
WARNED_MAX: Final = 1000
SETTLE_SECONDS: Final = 5.0
"""Seconds that a thread which has committed waits at most to see what it did."""

_numbers = itertools.count(time.time_ns())


@runtime_checkable
class Placing(Protocol):
    """A store's owner, which knows where destinations are."""

    def _is_elsewhere(self, destination: Destination, store_id: bytes) -> bool:
        """Return whether a destination is recorded in another store than this."""


class EntriesDone(Change):
    """The change by which entries are done. In the ticket of what they ask for."""

    __slots__ = ("numbers", "rows")

    def __init__(self, entries: Sequence[Entry]) -> None:
        self.numbers: Final = [entry.number for entry in entries]
        self.rows: Final = sum(entry.rows for entry in entries)

    def apply(self, table: Table) -> None:
        cast(OutboxTable, table).entries_done(self.numbers, self.rows)


class _Open:
    """A transaction of a caller's, from its first entry until it is known what became of all of them."""

    __slots__ = ("acks", "caller", "destinations", "done", "ending", "left", "room", "sure", "thread")

    def __init__(self, caller: Caller) -> None:
        self.caller = caller
        self.left: set[int] = set()
        """Numbers of entries that are not drained."""
        self.acks: dict[int, Lease] = {}
        """Leases that the acks claim, by number."""
        self.destinations: set[Destination] = set()
        self.room: list[Grant] = []
        self.thread = threading.get_ident()
        """The last that used it."""
        self.ending = False
        """True once the end of the transaction was told."""
        self.sure = False
        """True if the commit was looked for once since, and not all of it was there."""
        self.done = Event()


class OutboxFeature(Feature):
    """The outbox of one store, which is there if its backend shares a database with callers."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._outbox: Outbox | None = None

    def start(self) -> None:
        parts, engine = self._parts, self._parts.engine
        rows = engine.backend.outbox if isinstance(engine.backend, SharesDatabase) else None
        if rows is not None:
            self._outbox = made = Outbox(parts.store, engine, parts.sending, parts.settling, parts.lease_times, rows)
            engine.outbox = made
            engine.hooks.settling = (*engine.hooks.settling, made.settle)
            try:
                made.opened()
            except AnabranchError as error:
                log.debug("store %s: %s", engine.name, error)

    def close(self) -> None:
        if self._outbox is not None:
            self._outbox.close()

    @property
    def is_busy(self) -> bool:
        return self._outbox is not None and self._outbox.is_used


class Outbox:
    """The outbox of one open store. Threads: all."""

    def __init__(
        self,
        store: MessageStore,
        engine: Engine,
        sending: Sending,
        settling: Settling,
        lease_times: LeaseTimes,
        rows: OutboxRows,
    ) -> None:
        self._store, self._engine = store, engine
        self._sending, self._settling, self._lease_times, self._rows = sending, settling, lease_times, rows
        self._lock = threading.RLock()
        """Guards `_open` and what is in it; never held over a call of the backend. A signal handler may come back."""
        self._open: dict[str, _Open] = {}
        self._draining = threading.Lock()
        """Held by the one who drains."""
        self._job = CoalescedJob(self._drain_soon)
        self._watch_job = CoalescedJob(self._watch)
        self._pause = PAUSE_FIRST
        self._look_pause = WATCH_SECONDS
        self._closed = False
        self._warned: set[str] = set()
        """Transactions of which a warning said that they wait."""

    # By callers

    def send(self, connection: Any, destination: Destination, messages: Iterable[Outgoing | bytes]) -> list[Receipt]:
        """Send them once the transaction on this connection commits. The receipts have seq 0. Raises what Store.send
        raises before anything is stored, TransactionError, and what the connection raises."""
        outgoing = [one if isinstance(one, Outgoing) else Outgoing(one) for one in messages]
        if not all(one.persistent for one in outgoing):
            raise ValueError(
                f"a message for {destination} with persistent=False cannot be sent in a transaction of the database, "
                "which would keep it; leave one of the two out"
            )
        for message in outgoing:
            if isinstance(message.body, LargeBody | Readable):
                raise TypeError(
                    f"in a transaction of the database the body of a message for {destination} is bytes, not "
                    f"{type(message.body).__name__}: one that is kept apart would be written by another transaction"
                )
        sends = [cast(Send, one) for one in self._sending.sends([(destination, one) for one in outgoing])]
        if not sends:
            return []
        entries = [Entry(next(_numbers), str(destination), 0, send.deliver_at_ms, send.record) for send in sends]
        caller = self._rows.enlist(connection, self)
        quotas = self._engine.quotas
        room = quotas.reserve_at_once(sends) if quotas is not None else None
        numbers = [entry.number for entry in entries]
        with self._lock:
            one = self._of(caller)
            is_new = destination not in one.destinations
            one.destinations.add(destination)  # first: who closes a gate then looks here
            if room is not None:
                one.room.append(room)
            one.left.update(numbers)
        try:
            if destination in self._engine.sequencer.gates:
                self._engine.require_here(destination)
            self._rows.put(connection, caller, entries)
        except Exception:  # after Ctrl-C they may be written
            with self._lock:
                one.left.difference_update(numbers)
                if is_new:
                    one.destinations.discard(destination)
            release(room)
            raise
        return [Receipt(destination, 0) for _ in entries]

    def ack(self, connection: Any, messages: Sequence[Message]) -> None:
        """Ack them once the transaction on this connection commits; until it is over they are claimed, as by a
        transaction of ours. Acked again in the same one they are acked once. Raises UnknownMessageError,
        TransactionError, and what the connection raises; then they are held as before."""
        for message in messages:
            require_leased(message)
            if type(message._note) is Lease and is_volatile(message._note.place):
                raise ValueError(
                    f"{message!r} was sent with persistent=False, so it is not in the database; ack it without "
                    "connection, once you have committed"
                )
        if not messages:
            return
        caller = self._rows.enlist(connection, self)
        entries: list[Entry] = []
        claimed: list[Lease] = []
        with self._lock:
            one = self._of(caller)
        try:
            for message in messages:
                entry = self._claimed(one, message, claimed)
                entries.append(entry)
            self._rows.put(connection, caller, entries)
        except Exception:  # after Ctrl-C they may be written, and are claimed until that shows
            with self._lock:
                for entry in entries:
                    one.left.discard(entry.number)
                    one.acks.pop(entry.number, None)
                for lease in claimed:
                    if self._engine.delivery.move(lease, CLAIMED, LEASED):
                        self._lease_times.unclaimed(lease)
                    else:  # it is about to move to another store: free once the transaction is over
                        one.acks[next(_numbers)] = lease
            raise

    def _claimed(self, one: _Open, message: Message, claimed: list[Lease]) -> Entry:
        """Claim a message for the transaction; return the entry of its ack."""
        lease, delivery = message._note, self._engine.delivery
        number = next(_numbers)
        with self._lock:
            if not any(other is lease for other in one.acks.values()):
                if lease.hold == LEASED:
                    one.acks[number] = lease  # first: who is interrupted leaves no claim that nobody knows of
                try:
                    delivery.take(self._store, [message], LEASED, CLAIMED)
                except AnabranchError:
                    one.acks.pop(number, None)
                    raise
                claimed.append(lease)
            one.acks[number] = lease
            one.left.add(number)
            one.destinations.add(message.destination)
        (ack,) = acks_of([lease])
        assert type(ack) is Ack
        return Entry(number, str(message.destination), ack.seq, ack.number, b"")

    def _of(self, caller: Caller) -> _Open:
        """Return the open transaction of a caller, entered if need be. With the lock held."""
        if self._closed:
            self._engine.ensure_usable()
        one = self._open.get(caller.key)
        if one is None:
            one = self._open[caller.key] = _Open(caller)
            self._watch_job.schedule(WATCH_SECONDS)
        one.thread = threading.get_ident()
        return one

    def ending(self, caller: Caller) -> None:
        """Note the end of a transaction, as EndListener: called by whoever commits or rolls back, just before that."""
        one = self._open.get(caller.key)
        if one is not None and not self._closed:
            one.thread = threading.get_ident()
            one.done.clear()
            one.sure = False
            one.ending = True
            self._pause = PAUSE_FIRST
            self._job.schedule(PAUSE_FIRST)

    # Asking

    @property
    def is_used(self) -> bool:
        """Return whether a transaction of a caller's is open, or not drained."""
        return bool(self._open)

    def concerns(self, destination: Destination) -> bool:
        """Return whether a caller's transaction sends to the destination, or has claimed a message of it."""
        with self._lock:
            return any(destination in one.destinations for one in self._open.values())

    def settle(self) -> None:
        """Wait until what this thread has committed, or rolled back, is seen, at most SETTLE_SECONDS. Returns at once
        while the thread has another such transaction open, which the database may have waiting for that."""
        if not self._open:
            return
        me = threading.get_ident()
        with self._lock:
            mine = [one for one in self._open.values() if one.thread == me]
        for one in mine:
            if not one.ending and not one.caller.is_open():  # its connection does not tell
                self.ending(one.caller)
        if not all(one.ending for one in mine):
            return
        deadline = time.monotonic() + SETTLE_SECONDS
        for one in mine:
            one.done.wait(max(deadline - time.monotonic(), 0))

    # Draining

    def opened(self) -> None:
        """Do what was committed before. Raises AnabranchError; then the outbox tries again later."""
        try:
            with self._draining:
                self._drain()
        finally:
            self._look_again()

    def close(self) -> None:
        """Close the outbox: nothing is drained any more, and what is written down is for the next opening.
        Idempotent."""
        self._closed = True
        with self._draining, self._lock:
            for one in self._open.values():
                for room in one.room:
                    release(room)
                one.done.set()
            self._open.clear()

    def _look_again(self) -> None:
        if not self._closed:
            shared().schedule_while_alive(self._look_pause, self._look)

    def _look(self) -> None:
        """Look at the outbox now and then (rule Q7)."""
        if not self._works():
            return
        try:
            self._drain_now(everything=True)
        finally:
            self._look_pause = min(2 * self._look_pause, LOOK_MAX)
            self._look_again()

    def _watch(self) -> None:
        """Watch while transactions are open: one may end without a word, or with one that Ctrl-C cut off."""
        if not self._works():
            return
        try:
            self._drain_now(everything=True)
        finally:
            if self._open:
                self._watch_job.schedule(WATCH_SECONDS)

    def _works(self) -> bool:
        """Return whether this process has the store open, and the store has not failed."""
        engine = self._engine
        return not (self._closed or engine.closed or engine.failed is not None or engine.forked)

    def _drain_soon(self) -> None:
        """Drain the outbox, once somebody has committed."""
        if self._works() and self._drain_now(everything=False):
            self._pause = min(2 * self._pause, PAUSE_MAX)
            self._job.schedule(self._pause)

    def _drain_now(self, everything: bool) -> bool:
        """Drain the outbox; return whether it has to be looked at again soon."""
        try:
            with self._draining:
                return self._drain(everything)
        except AnabranchError as error:
            log.debug("store %s: the outbox is not drained now: %s", self._engine.name, error)
            return any(one.ending for one in list(self._open.values()))

    def _drain(self, everything: bool = False) -> bool:
        """Drain the outbox, with `_draining` held; return whether some transaction that was to end has not. Raises
        AnabranchError."""
        if self._closed:
            return False
        with self._lock:
            watched = [one for one in self._open.values() if one.sure or everything]
            waited = [one for one in self._open.values() if one.ending]
        over = [one for one in watched if self._rows.is_over(one.caller)]  # before it is looked for what they did
        kept = self._drain_written()
        for one in over:
            if one.caller.key not in kept:
                self._end(one)
        soon = False
        for one in waited:
            if one.ending and self._open.get(one.caller.key) is one:
                if one.left or one.caller.key in kept:
                    one.sure = soon = True
                else:
                    self._end(one)
        return soon

    def _drain_written(self) -> set[str]:
        """Do what is committed; returns the transactions of which some could not be done. Raises AnabranchError."""
        kept: set[str] = set()
        after = 0
        while page := self._rows.written(after, GROUP_MAX):
            callers = dict.fromkeys(one.caller for one in page if one.caller not in kept)
            if len(page) < GROUP_MAX and sum(one.size for one in page) <= GROUP_BYTES:
                groups = {caller: [one for one in page if one.caller == caller] for caller in callers}
                kept |= self._drain_groups(groups)
                break
            caller = next(iter(callers), None)  # Q5: whole, though others' lie between
            if caller is None:
                after = page[-1].number
                continue
            kept |= self._drain_groups({caller: list(_fitting(self._rows.written(0, GROUP_MAX, caller)))})
        return kept

    def _drain_groups(self, groups: dict[str, list[Written]]) -> set[str]:
        """Drain groups of entries: each is done by one write, and as many as may be by the same. Returns those that
        could not be done. Raises AnabranchError if the database cannot be read."""
        tickets: list[tuple[str, Ticket, list[Entry]]] = []
        kept: set[str] = set()
        for caller, written in groups.items():
            entries = list(self._rows.entries(caller, written[0].number, written[-1].number))
            try:
                changes = self._changes(caller, entries)
                ticket = Ticket(changes, sum([change.size for change in changes]))
                ticket.transaction = True
                self._engine.submit(ticket)
                tickets.append((caller, ticket, entries))
            except AnabranchError as error:
                kept.add(caller)
                self._tell(caller, entries, error)
        for caller, ticket, entries in tickets:
            try:
                self._sending.wait(ticket)
                self._drained(caller, entries)
            except AnabranchError as error:
                kept.add(caller)
                self._tell(caller, entries, error)
        return kept

    def _tell(self, caller: str, entries: Sequence[Entry], error: AnabranchError) -> None:
        """Log that entries cannot be done. If the reason does not pass by itself, they are looked at now and then, like
        what comes from elsewhere. Their messages stay claimed."""
        stays = isinstance(error, MovedError | TransactionError)
        if stays:
            one = self._open.get(caller)
            if one is not None:
                one.ending, one.thread = False, 0  # who has committed it does not look for it with each call
                one.done.set()
        level = logging.WARNING if stays and caller not in self._warned else logging.DEBUG
        if stays and len(self._warned) < WARNED_MAX:
            self._warned.add(caller)
        log.log(
            level, "store %s: what transaction %s has committed waits in OUTBOX (%d sends and acks): %s",
            self._engine.name, caller, len(entries), error,
        )  # fmt: skip

    def _changes(self, caller: str, entries: Sequence[Entry]) -> list[Change]:
        """Return the changes that entries ask for, and the change that removes the entries."""
        catalog, priorities = self._engine.catalog, self._engine.backend.settings.priorities
        leases = dict(self._open[caller].acks) if caller in self._open else {}
        changes: list[Change] = []
        acked: set[Hashable] = set()
        for entry in entries:
            destination = Destination.restored(entry.destination)
            if not entry.seq:
                self._require_place(destination)
                send = send_of(catalog.state(destination), entry.record, priorities)
                send.wait_until(entry.subscription)
                changes.append(send)
                continue
            state = catalog.destinations.get(destination)
            key = (entry.seq, entry.subscription)
            if state is None or key in acked:
                continue
            acked.add(key)
            lease = leases.get(entry.number)
            changes.append(Ack(state, entry.seq, entry.subscription, lease.place if lease is not None else None))
        return [*changes, EntriesDone(entries)]

    def _require_place(self, destination: Destination) -> None:
        """Raise TransactionError for a destination that is in another store by now."""
        state = self._engine.catalog.destinations.get(destination)
        if state is not None and state.declared:
            return
        owner = self._engine.owner
        if isinstance(owner, Placing) and owner._is_elsewhere(destination, self._store.store_id):
            raise TransactionError(
                f"{destination} has moved to another store since these messages were sent there; move it back to store "
                f"{self._engine.name!r}, and they are in it"
            )

    def _drained(self, caller: str, entries: Sequence[Entry]) -> None:
        sends = sum(not entry.seq for entry in entries)
        self._engine.sends += sends
        self._engine.acks += len(entries) - sends
        self._look_pause = WATCH_SECONDS
        with self._lock:
            one = self._open.get(caller)
            if one is not None:
                for entry in entries:
                    one.left.discard(entry.number)
                    one.acks.pop(entry.number, None)

    def _end(self, one: _Open) -> None:
        """End a transaction: all that it has committed is drained; what it has not is as if it had never been asked
        for. One that has claimed what is about to move to another store ends once that move has given way to it."""
        move = self._engine.delivery.move
        with self._lock:
            leases = list({id(lease): lease for lease in one.acks.values()}.values())
        try:
            free = [lease for lease in leases if move(lease, CLAIMED, LEAVING)]
            if free:
                self._settling.give_back_taken(free)
        except AnabranchError as error:  # the store has stopped, say: nobody holds anything
            log.debug("store %s: what was claimed is not given back: %s", self._engine.name, error)
        finally:
            stays = any(lease.hold in (CLAIMED, MOVING) and lease.is_held for lease in leases)
            if not (stays and self._works()):
                with self._lock:
                    self._open.pop(one.caller.key, None)
                for room in one.room:
                    release(room)
            one.done.set()


def _fitting(written: Sequence[Written]) -> Iterator[Written]:
    """Yield the first entries that one write takes; one may be larger."""
    size = 0
    for place, one in enumerate(written):
        size += one.size
        if place and size > GROUP_BYTES:
            return
        yield one
