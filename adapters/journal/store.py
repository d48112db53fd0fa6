"""JournalStore: the contract of adapters/base.py over the log and the index.

    log        what has been written, in order                      (../wal, its own locks)
    pending    batches that are durable but not yet in the index    (a queue: senders put, readers take)
    index      which messages there are and where                   (index.py, under `_index_lock`)

A send goes through the log and leaves its batch in `pending`; whoever reads drains that first, so that what has
returned is seen (rule X2).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import ClassVar, TypeVar

import lmdb
from pydantic import BaseModel

from ...policies.config import JournalOptions
from ...policies.destination import Destination
from ...policies.errors import (
    AnabranchError,
    CorruptionError,
    OutcomeUnknownError,
    StoreFailedError,
    StoreFullError,
    UnknownMessageError,
)
from ..base import (
    DEFAULT_PRIORITY,
    Change,
    Done,
    Headers,
    Message,
    Outgoing,
    Pending,
    Prepared,
    Progress,
    Receipt,
    StoreStats,
    Subscription,
    SubscriptionKey,
    Undelivered,
)
from ..delivery import CLAIMED, LEASED, LEAVING, Delivery, Feed, order_of
from ..descriptors import STORE
from ..duplicates import DuplicateWindow
from ..files import disk_errors
from ..room import Amount, Reservation, Room
from ..subscriptions import require_same, require_unclaimed, shown, unknown
from ..wal import format as w
from ..wal import recovery
from ..wal.files import SegmentFiles
from ..wal.log import Log
from ..wal.reclaim import Reclaimer
from ..wal.survey import Checkpoint as LogCheckpoint
from ..wal.survey import CheckpointMismatchError, Survey, survey
from ..wal.ticket import LogOptions, Ticket
from . import format as f
from . import messages as codec
from . import rebuild, snapshot
from .applying import APPLY_AT, Applier
from .batch import Branch, Operation, Outcome, room_for
from .bodies import Bodies
from .check import violations
from .checksums import IndexBrokenError
from .destinations import DestinationState
from .directory import StoreDirectory, first_segment
from .encoder import Encoder
from .holds import acks_of, come_back, delivered_of, free_ranges
from .index import Checkpoint, Index, is_of_index, remove_file
from .receiving import PAGE, Receiving
from .replay import Replayer
from .subscriptions import change_bytes, change_of, fitting
from .transactions import PrepareTicket, Step, branch_of, new_branch, outcome_ticket, read_payload, summary

log = logging.getLogger(__name__)

T = TypeVar("T")


class JournalStore:
    """A store in a directory of its own. Threads: all. Forks: a child's calls raise ClosedError (rule D4).

    What is put together here: the log writes (../wal), the applier brings what is written into the index
    (applying.py), the delivery knows who holds what (delivery.py), the bodies are read back (bodies.py).
    """

    options_model: ClassVar[type[BaseModel]] = JournalOptions
    volatile = False
    shared = False
    descriptors = STORE

    def __init__(
        self, name: str, directory: Path, options: JournalOptions, index_directory: Path | None = None
    ) -> None:
        self.name = name
        self.options = options
        self._directory = StoreDirectory(name, directory, index_directory, options.file_mode, self._lose)
        self.owner: object = None
        self._opened = False
        self._declare_lock = threading.RLock()
        self._begin(b"", directory / "index.mdb")

    def _begin(self, store_id: bytes, index: Path) -> None:
        """The state of a store that is not open yet."""
        options = self.options
        self.store_id = store_id
        file_mode = self._directory.file_mode
        self._index = Index(index, store_id, options.duplicate_window, options.priorities, file_mode)
        self._delivery = Delivery(self.name, options.max_leases, options.max_deliveries)
        self._applier = Applier(self.name, self._index, options, self._delivery)
        files = SegmentFiles(self._directory.journal, options.segment_size, self._count_sync, file_mode)
        window = DuplicateWindow(options.duplicate_window)
        promise_max = options.segment_size - w.HEADER_BYTES
        self._encoder = Encoder(window, self._applier.take, self._wake_all, promise_max)
        log_options = LogOptions(
            options.segment_size, options.batch_bytes_max, options.sync, options.sync_interval, options.pool_files,
            "a send can be retried with the same message_id",
        )  # fmt: skip
        self._log = Log(f"store {self.name!r}", store_id, files, log_options, self._encoder)
        self._applier.attach(self._log, self._encoder)
        self._bodies = Bodies(self, self._log, self._applier)
        self._receiving = Receiving(self._log, self._applier, self._delivery, self._bodies, self._state)
        archive = options.archive_directory
        if archive is not None:  # stores may share it
            archive /= f"{self._directory.path.name}-{store_id.hex()[:8]}"
        self._reclaimer = Reclaimer(
            self._log, self._applier.snapshot, lambda payload: [(f.SNAPSHOT, payload)], self._applier.forget, archive
        )
        self._applier.on_empty = self._reclaimer.notice
        self._applier.before_checkpoint = self._directory.require_lock
        self._sends = self._acks = 0
        self._priorities = options.priorities
        self._room = Room(self.name, options.max_messages, options.max_bytes, self._count_held)

    @classmethod
    def create(cls, name: str, directory: Path, options: JournalOptions) -> bytes:
        """Make an empty store, whole or not at all (rule D2); returns its id. The directory must not exist."""
        with disk_errors(f"store {name!r} cannot be created"):
            made = StoreDirectory(name, directory, None, options.file_mode)
            return made.create(first_segment(options.segment_size, options.file_mode))

    @classmethod
    def is_contained(cls, options: JournalOptions) -> bool:
        """Whether all of a store lies in its directory, if its index does."""
        return True

    @classmethod
    def identify(cls, directory: Path) -> bytes | None:
        """The id of the store in a directory, None if there is none."""
        return StoreDirectory("", directory, None).identify()

    # Opening and closing

    def open(self, progress: Progress | None = None) -> None:
        with disk_errors(f"store {self.name!r} cannot be opened"):
            self._directory.lock()
            try:
                try:
                    self._open(progress)
                except Exception as error:
                    if not is_of_index(error):
                        raise
                    log.warning("store %s: its index is damaged, %r; it is rebuilt from the journal", self.name, error)
                    remove_file(self._directory.index)
                    self._open(progress)
                self._directory.require_lock()
            except BaseException:
                self._directory.unlock()
                raise
        self._opened = True

    def _open(self, progress: Progress | None) -> None:
        started = time.monotonic()
        store_id = self._directory.read_id()
        self._begin(store_id, self._directory.index)
        index, files = self._index, self._log.files
        try:
            checkpoint, found = self._survey(files, index)
            recovery.settle(found, files)
            replayer = Replayer(index, str(self._directory.journal))
            replayer.seq = found.highest_counter
            if checkpoint is None:
                rebuild.rebuild(found, index, replayer, progress)
            else:
                replayer.seq = max(replayer.seq, checkpoint.seq)
                index.load(found.table().segments)
                rebuild.replay(found, index, checkpoint, replayer)
            self._take_over(found, index, replayer)
        except CorruptionError as error:
            _name_held(error, index)
            index.close()
            raise
        except BaseException:
            index.close()
            raise
        if not found.clean and found.highest_lsn:  # else nothing was ever written
            log.info(
                "store %s: recovered %d messages in %d segments in %.2f s%s", self.name,
                sum(s.count for s in index.states.values()), len(self._log.table.segments),
                time.monotonic() - started, "" if checkpoint else ", index rebuilt",
            )  # fmt: skip

    def _survey(self, files: SegmentFiles, index: Index) -> tuple[Checkpoint | None, Survey]:
        """The index if it can be used, else an empty one (None), and what the journal says."""
        try:
            checkpoint = index.open()
            try:
                return checkpoint, self._surveyed(files, index.log_checkpoint(checkpoint) if checkpoint else None)
            except CorruptionError as error:
                if not index.is_undone:
                    raise
                raise IndexBrokenError(f"its last checkpoint is undone, and {error}") from error
        except (IndexBrokenError, CheckpointMismatchError) as error:
            index.close()
            found = self._surveyed(files, None)
            if found.end.offset > w.HEADER_BYTES or len(found.chain) > 1:
                log.warning("store %s: the index is rebuilt from the journal: %s", self.name, error)
            index.create()
            return None, found

    def _surveyed(self, files: SegmentFiles, checkpoint: LogCheckpoint | None) -> Survey:
        return survey(files, self.store_id, checkpoint, snapshot.needed_by)

    def _take_over(self, found: Survey, index: Index, replayer: Replayer) -> None:
        """From reading to writing: the one durable step of recovery (rule J5), then a checkpoint."""
        prepared = [read_payload(*known, found.table()) for known in index.prepared()]
        ids: dict[tuple[int, bytes], int] = {}
        for key, seq in index.duplicates():
            ids.pop(key, None)  # requeued: it is among the latest
            ids[key] = seq
        self._encoder.window.add(ids)
        self._encoder.snapshot_at = max(replayer.snapshot or (0, 0), found.snapshot_at)
        recovery.take_over(found, self._log, replayer.seq)
        self._encoder.subscribed.update(
            ((known.state.id, known.subscription.key), known.number) for known in index.subscribers.values()
        )
        self._applier.start()
        for payload in prepared:
            branch = branch_of(payload, self._state, self.options.priorities, self._next_subscription)
            for state, seq, number in branch.acks:
                feeds = state.feeds(number) if number else index.rows.waiting_for(state, seq)
                self._delivery.claim_again([(feeds, seq)])
            if self._room.limited:
                sends = [operation for operation in branch.operations if operation[0] == f.SEND]
                branch.reservation = self._room.hold(room_for(sends, self._encoder.window))
            self._encoder.restore(branch)

    @property
    def last_seq(self) -> int:
        if self._log.failed is not None:
            self._log.ensure_usable()
        return self._log.tail.counter

    def close(self) -> None:
        if not self._opened:
            return
        try:
            self._directory.look_after_lock()  # a store that has failed writes nothing more
            self._log.close()
            if not self._log.forked:
                self._applier.close(clean=self._log.failed is None)
        except Exception:
            self._let_go()
            raise
        self._let_go()  # not after Ctrl-C: then close() may be called again

    def _let_go(self) -> None:
        if not self._log.forked:
            self._log.let_go()
            self._reclaimer.finish()
            self._applier.let_go()
            self._directory.unlock()
        self._opened = False
        self._wake_all()

    def _lose(self, error: StoreFailedError) -> None:
        """The lock's file is gone, or is another's: so may the directory be."""
        self._log.fail(error)

    def _count_sync(self) -> None:
        self._log.count_sync()

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
        self._log.submit(ticket)
        seq, duplicate = self._wait(ticket)[0]
        return Receipt(destination, seq, duplicate)

    def _wait(self, ticket: Ticket) -> list[Outcome]:
        """Until it is done; then help to bring it into the index if too much waits for that."""
        outcomes = self._log.wait(ticket)
        if self._applier.pending_operations >= APPLY_AT:
            self._applier.help()
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
        self._log.submit_nowait(ticket)
        if self._applier.pending_operations >= APPLY_AT:
            self._applier.help()
        return future

    def send_many(
        self, destination: Destination, messages: Iterable[Outgoing | bytes], sync: bool | None = None
    ) -> list[Receipt]:
        state = self._state(destination)
        tickets: list[Ticket] = []
        size_max = self._log.batch_bytes_max
        for message in messages:  # all of them before any is queued: what is wrong with one refuses all
            operation, more = self._send_operation(state, message)
            if not tickets or tickets[-1].size + more > size_max:
                tickets.append(Ticket([], 0, bool(sync)))
            tickets[-1].content.append(operation)
            tickets[-1].size += more
        if self._room.limited:
            reservation = self._reserve(operation for ticket in tickets for operation in ticket.content)
            for ticket in tickets:
                ticket.held = reservation
            del reservation
        self._log.submit_all(tickets)
        self._sends += sum(len(ticket.content) for ticket in tickets)
        return [Receipt(destination, *done) for ticket in tickets for done in self._wait(ticket)]

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
        state = self._index.by_destination.get(destination) or self._state(destination)
        rest, key = codec.encode(
            state, body, headers, message_id, self.options.message_bytes_max, priority, expires_at_ms
        )
        extra = None
        if expires_at_ms or self._priorities:
            extra = (order_of(priority, self._priorities), expires_at_ms)
        ticket = Ticket([(f.SEND, state, rest, key, extra)], len(rest) + state.send_overhead, bool(sync))
        if self._room.limited:
            ticket.held = self._reserve(ticket.content)
        self._sends += 1
        return ticket

    def _send_operation(self, state: DestinationState, message: Outgoing | bytes) -> tuple[Operation, int]:
        limit, extra = self.options.message_bytes_max, None
        if isinstance(message, Outgoing):
            body, headers, message_id, priority, expires_at_ms, _, requeued = message
            flags = f.REQUEUED if requeued else 0
            rest, key = codec.encode(state, body, headers, message_id, limit, priority, expires_at_ms, flags)
            if expires_at_ms or self._priorities:
                extra = (order_of(priority, self._priorities), expires_at_ms)
        else:
            rest, key = codec.encode(state, message, None, None, limit)
            if self._priorities:
                extra = (order_of(DEFAULT_PRIORITY, True), 0)
        return (f.SEND, state, rest, key, extra), len(rest) + state.send_overhead

    def _send_operations(self, sends: Sequence[tuple[Destination, Outgoing]]) -> tuple[list[Operation], int]:
        operations: list[Operation] = []
        size = 0
        for destination, message in sends:
            operation, more = self._send_operation(self._state(destination), message)
            operations.append(operation)
            size += more
        return operations, size

    def _reserve(self, operations: Iterable[Operation]) -> Reservation:
        """Room for these sends. Raises StoreFullError, and then nothing is reserved."""
        return self._room.reserve(room_for(operations, self._encoder.window))

    def _count_held(self) -> Amount:
        self._applier.check()
        with self._applier.lock:
            index = self._applier.current()
            return index.rows.messages, index.rows.bytes

    def _state(self, destination: Destination) -> DestinationState:
        """The state of a destination, made if it is new here. Its name is journaled with its first message."""
        index = self._index
        state = index.by_destination.get(destination)
        if state is None:
            self._log.ensure_usable()
            with self._declare_lock:
                state = index.by_destination.get(destination)
                if state is None:
                    state = DestinationState(index.next_destination, destination, declared=False)
                    index.next_destination += 1
                    index.states[state.id] = state
                    index.by_destination[destination] = state
        return state

    def _next_subscription(self) -> int:
        """A number that no subscription of this store ever had."""
        with self._declare_lock:
            number = self._index.next_subscription
            self._index.next_subscription = number + 1
        return number

    def checkpoint(self) -> None:
        """Write the index out. Happens by itself; durability never depends on it."""
        self._applier.checkpoint()

    # Receiving

    def receive(
        self, destination: Destination, timeout: float | None = 0, subscription: SubscriptionKey | None = None
    ) -> Message | None:
        return self._receiving.receive(destination, timeout, subscription)

    def watch(
        self, destination: Destination, subscription: SubscriptionKey | None, wake: Callable[[], None]
    ) -> Callable[[], None]:
        return self._receiving.watch(destination, subscription, wake)

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

    def _wake_all(self) -> None:
        for state in list(self._index.states.values()):
            state.wake()

    # Settling

    def ack(self, messages: Sequence[Message]) -> None:
        self._log.ensure_usable()
        try:
            operations = acks_of(self._delivery.take(self, messages, LEASED, LEAVING))
            self._commit(Ticket(operations, f.ACK_BYTES * len(operations), False))
        except (UnknownMessageError, OutcomeUnknownError):
            raise
        except (AnabranchError, KeyboardInterrupt, RuntimeError):  # the last in a signal handler (rule G3)
            self._delivery.put_back(messages, LEASED)  # what the ack has reached is not held any more
            raise
        self._acks += len(operations)

    def release(self, messages: Sequence[Message], delivered: bool = True) -> None:
        self._give_back(messages, LEASED, delivered)

    def claim(self, message: Message) -> None:
        self._log.ensure_usable()
        self._delivery.take(self, [message], LEASED, CLAIMED)

    def unclaim(self, messages: Sequence[Message]) -> None:
        self._give_back(messages, CLAIMED, delivered=True)

    def _give_back(self, messages: Sequence[Message], hold: int, delivered: bool) -> None:
        """All or none of them, wherever Ctrl-C strikes."""
        self._log.ensure_usable()
        try:
            self._delivery.take(self, messages, hold, LEAVING)
            if delivered:
                self._count_deliveries(messages)
            self._applier.check()
            with self._applier.lock:
                rows = self._applier.current().rows
                try:
                    self._delivery.give_back(messages, rows)
                except KeyboardInterrupt:
                    self._delivery.give_back(messages, rows)  # the rest; nobody can have leased any of them yet
                    raise
        except UnknownMessageError:  # another thread may be settling them
            raise
        except (AnabranchError, KeyboardInterrupt, RuntimeError):
            self._delivery.put_back(messages, hold)  # unless they are all given back
            raise

    def _count_deliveries(self, messages: Sequence[Message]) -> None:
        """Write how often they have come back; nobody waits for the disk. Who is interrupted here and tries again
        writes the same. On a full disk they are free all the same."""
        operations = delivered_of(messages)
        at_once = max(1, self._log.batch_bytes_max // f.DELIVERED_BYTES - 1)
        try:
            for start in range(0, len(operations), at_once):
                part = operations[start : start + at_once]
                ticket = Ticket(part, f.DELIVERED_BYTES * len(part), False)
                ticket.unsynced = True
                self._log.submit(ticket)
                self._log.wait(ticket)
        except StoreFullError as error:
            log.warning("store %s: %d deliveries are not counted: %s", self.name, len(operations), error)

    # Durable subscriptions

    def subscribe(self, subscription: Subscription, retroactive: bool = False) -> bool:
        self._log.ensure_usable()
        state = self._state(fitting(subscription).topic)
        number = self._next_subscription()
        operation: Operation = (f.SUBSCRIBE, state, number, subscription, bool(retroactive))
        ((found, known),) = self._commit(Ticket([operation], change_bytes(subscription), False))
        self._applier.check()
        with self._applier.lock:
            self._applier.current()  # at once, so that who receives need not look for it
            there = state.subscribers.get(found)
        if known and there is not None:
            require_same(there.subscription, subscription)
        return not known

    def unsubscribe(self, topic: Destination, subscription: SubscriptionKey) -> int:
        known = self._receiving.subscriber(topic, subscription)
        with self._applier.lock:
            claimed, count = self._delivery.claimed(known.feed), known.count
        require_unclaimed(f"the {shown(topic, subscription)}", "removed", claimed)
        operation: Operation = (f.UNSUBSCRIBE, known.state, subscription)
        ((found, _),) = self._commit(Ticket([operation], f.UNSUBSCRIBE_BYTES, False))
        self._applier.check()
        with self._applier.lock:
            self._applier.current()
        if not found:
            raise unknown(topic, subscription)
        return count

    def subscriptions(self) -> Sequence[Subscription]:
        self._applier.check()
        with self._applier.lock:
            index = self._applier.current()
            return [known.subscription for state in index.states.values() for known in state.subscribers.values()]

    def _changes(self, changes: Sequence[Change]) -> tuple[list[Operation], int]:
        operations: list[Operation] = []
        size = 0
        for change in changes:
            state = self._state(fitting(change.subscription).topic)
            operations.append(change_of(change, state, self._next_subscription))
            size += change_bytes(change.subscription)
        return operations, size

    # Committing

    def commit(
        self,
        sends: Sequence[tuple[Destination, Outgoing]],
        acks: Sequence[Message],
        sync: bool | None = None,
        changes: Sequence[Change] = (),
    ) -> list[Receipt]:
        self._log.ensure_usable()
        operations, size = self._changes(changes) if changes else ([], 0)
        sending, more = self._send_operations(sends)
        operations += sending
        size += more + f.ACK_BYTES * len(acks)
        reservation = self._reserve(sending) if self._room.limited else None
        try:
            operations += acks_of(self._delivery.take(self, acks, CLAIMED, LEAVING))
            ticket = Ticket(operations, size, bool(sync))
            ticket.held = reservation
            del reservation
            done = self._commit(ticket)
        except (UnknownMessageError, OutcomeUnknownError):
            raise
        except (AnabranchError, KeyboardInterrupt, RuntimeError):  # the last in a signal handler (rule G3)
            self._delivery.put_back(acks, CLAIMED)  # what it has reached is not held any more
            raise
        self._sends += len(sends)
        self._acks += len(acks)
        done = done[len(changes) :]
        return [Receipt(destination, *result) for (destination, _), result in zip(sends, done, strict=True)]

    def _commit(self, ticket: Ticket) -> list[Outcome]:
        if not ticket.content:
            return []
        self._log.submit(ticket)
        return self._wait(ticket)

    # Transactions over several stores

    def reserve(self, sends: Sequence[tuple[Destination, Outgoing]]) -> object:
        self._log.ensure_usable()
        return self._reserve(self._send_operations(sends)[0]) if self._room.limited else None

    def prepare(
        self,
        transaction: bytes,
        participants: Sequence[bytes],
        sends: Sequence[tuple[Destination, Outgoing]],
        acks: Sequence[Message],
        sync: bool,
        room: object = None,
        changes: Sequence[Change] = (),
    ) -> Pending[None]:
        self._log.ensure_usable()
        self._directory.require_lock()
        operations, size = self._changes(changes)
        sending, more = self._send_operations(sends)
        operations += sending
        operations += acks_of(self._delivery.take(self, acks, CLAIMED, CLAIMED))
        branch = new_branch(transaction, participants, operations, size + more + f.BRANCH_ACK_BYTES * len(acks))
        branch.reservation, branch.messages = room, acks
        ticket = PrepareTicket(branch, self._encoder.promise(branch), sync)
        self._log.submit(ticket)
        return Step(self._log, self._wait, ticket, lambda outcomes: None)

    def commit_prepared(self, transaction: bytes) -> Pending[list[Receipt]]:
        branch = self._prepared(transaction)
        if branch is None:
            return Done([])
        self._sends += len(branch.operations) - len(branch.acks) - branch.changes
        self._acks += len(branch.acks)
        destinations = [operation[1].destination for operation in branch.operations if operation[0] == f.SEND]
        return self._outcome(
            f.COMMIT,
            branch,
            # No outcomes where another thread had committed it before.
            lambda outcomes: [
                Receipt(d, *done) for d, done in zip(destinations, outcomes[branch.changes :], strict=False)
            ],
        )

    def rollback_prepared(self, transaction: bytes) -> Pending[bool]:
        branch = self._prepared(transaction)
        if branch is None:
            return Done(False)
        self._applier.check()
        with self._applier.lock:
            branch.delivered = come_back(branch, self._applier.current().rows)
        return self._outcome(f.ROLLBACK, branch, self._applied)

    def _applied(self, _outcomes: list[Outcome]) -> bool:
        """What a rollback frees is free once it is in the index."""
        self._applier.check()
        with self._applier.lock:
            self._applier.current()
        return True

    def _prepared(self, transaction: bytes) -> Branch | None:
        """The branch, if it is prepared once all that is queued is written: its PREPARE may have been queued by a
        thread that was interrupted before it could wait."""
        self._log.ensure_usable()
        if transaction not in self._encoder.prepared:
            self._log.flush()
        return self._encoder.prepared.get(transaction)

    def _outcome(self, kind: int, branch: Branch, result: Callable[[list[Outcome]], T]) -> Pending[T]:
        ticket = outcome_ticket(kind, branch)
        self._log.submit(ticket)
        return Step(self._log, self._wait, ticket, result)

    def recover_prepared(self) -> Sequence[Prepared]:
        self._log.ensure_usable()
        return [summary(branch) for branch in sorted(self._encoder.prepared.values(), key=lambda b: b.transaction)]

    def committed(self) -> Sequence[bytes]:
        self._applier.check()
        with self._applier.lock:
            return self._applier.current().committed()

    def forget(self, transactions: Sequence[bytes]) -> None:
        self._applier.check()
        with self._applier.lock:
            self._applier.current().forget(transactions)

    def sync(self) -> None:
        self._log.ensure_usable()
        self._log.sync()

    def purge(self, destination: Destination, subscription: SubscriptionKey | None = None) -> int:
        if subscription is not None:
            known = self._receiving.subscriber(destination, subscription)
            return self._purge(known.state, (known.feed,))[0]
        state = self._index.by_destination.get(destination)
        if state is None:
            self._log.ensure_usable()
            return 0
        counts, gone = self._purge(state, None)
        return gone if state.is_topic else counts

    def _purge(self, state: DestinationState, feeds: tuple[Feed, ...] | None) -> tuple[int, int]:
        """Of these feeds, or of all. Returns how many were purged, of all feeds together, and by how many messages the
        destination is less."""
        self._applier.check()
        with self._applier.lock:
            rows = self._applier.current().rows
            feeds = state.feeds() if feeds is None else feeds
            ranges = [(feed, *free_ranges(self._delivery, feed, rows, PAGE)) for feed in feeds]
            if not any(count for _, _, count in ranges):
                return 0, 0
            before = state.count
            for feed in feeds:
                feed.purging += 1  # nobody shall receive what is about to go
        gone = 0
        try:
            operations: list[Operation] = [
                (f.ACK_RANGE, state, first, last, feed.number) for feed, found, _ in ranges for first, last in found
            ]
            self._commit(Ticket(operations, f.RANGE_BYTES * len(operations), False))
            self._applier.check()
            with self._applier.lock:
                rows = self._applier.current().rows
                for feed in feeds:
                    self._delivery.purged(feed, rows)
                gone = before - state.count
        finally:
            for feed in feeds:
                feed.purging -= 1
                feed.wake()
        return sum(count for _, _, count in ranges), max(gone, 0)

    def delete(self, destination: Destination) -> int:
        state = self._index.by_destination.get(destination)
        if state is None:
            self._log.ensure_usable()
            return 0
        self._applier.check()
        with self._applier.lock:
            self._applier.current()
            claimed = sum(self._delivery.claimed(feed) for feed in state.feeds())
            require_unclaimed(str(destination), "deleted", claimed)
            count = state.count
        if state.declared:
            self._commit(Ticket([(f.DESTINATION_GONE, state)], f.GONE_BYTES, False))
            self._applier.check()
            with self._applier.lock:
                self._applier.current()  # at once, so that nothing fetched ahead is received, nothing leased acked
        return count

    # Asking

    def retire(self) -> bool:
        self._applier.check()
        with self._applier.lock:
            self._applier.current()
            if self._delivery.waiting or self._delivery.held or self._encoder.prepared:
                return False
            self._log.refuse_more()
            return True

    def destinations(self) -> Sequence[Destination]:
        self._applier.check()
        with self._applier.lock:
            index = self._applier.current()
            return [s.destination for s in list(index.states.values()) if s.declared]

    def depth(self, destination: Destination, subscription: SubscriptionKey | None = None) -> int:
        if subscription is not None:
            return self._receiving.subscriber(destination, subscription).count
        self._applier.check()
        with self._applier.lock:
            index = self._applier.current()
            state = index.by_destination.get(destination)
            return state.count if state is not None else 0

    def reclaim(self) -> int:
        self._log.ensure_usable()
        return self._reclaimer.run()

    def stats(self) -> StoreStats:
        if self._log.failed is None:
            self._applier.check()
        with self._applier.lock:
            index = self._applier.as_applied()
            failed = self._log.failed
            states = [s for s in list(index.states.values()) if s.declared or s.count]
            segments = self._log.table.segments
            tail = self._log.tail
            used = [(s.end or tail.offset) - w.HEADER_BYTES for s in segments]
            # Where no message has died all is live, what belongs to no message too: a new store has nothing to reclaim.
            live = sum(
                size if s.dead is None and (s.live or s is tail.segment) else s.live_bytes
                for s, size in zip(segments, used, strict=True)
            )
            return StoreStats(
                name=self.name,
                kind="journal",
                messages=sum(s.count for s in states),
                destinations={s.destination: s.count for s in states},
                leased=len(self._delivery.held),
                sends=self._sends,
                acks=self._acks,
                syncs=self._log.syncs,
                batches=self._log.batches,
                journal_bytes=sum(max(s.allocated, s.end or 0) for s in segments),
                capacity_bytes=sum(s.capacity for s in segments),
                pool_bytes=self._log.files.pool_bytes,
                segments={"active": 1, "retained": len(segments) - 1, "pooled": len(self._log.files.pool)},
                live_percent=100.0 * live / sum(used) if sum(used) else 100.0,
                failed=str(failed) if failed is not None else None,
                subscriptions={known.subscription: known.count for s in states for known in s.subscribers.values()},
                dropped=index.dropped[0],
            )

    def check(self) -> Iterator[str]:
        self._applier.check()
        with self._applier.lock, disk_errors(f"store {self.name!r} cannot be checked"):
            index = self._applier.current()
            found = list(violations(index, self._log.table, self._applier.applied))
        yield from found


def _name_held(error: CorruptionError, index: Index) -> None:
    """Let the error of a segment, or of all of them, say what lies there, if there is an index that can tell."""
    if index.is_open and index.checkpointed is not None:
        number = Path(error.path).stem
        with suppress(lmdb.Error):  # what is damaged counts more than what lay there
            error.name_held(*index.held(int(number) if number.isdigit() else None))
