"""JournalStore: the contract of adapters/base.py over the log and the index.

    log        what has been written, in order                      (log.py, its own lock)
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
from pathlib import Path
from typing import ClassVar, Final, TypeVar

from pydantic import BaseModel

from ...policies.config import JournalOptions
from ...policies.destination import Destination
from ...policies.errors import AnabranchError, OutcomeUnknownError, TransactionError, UnknownMessageError
from ..base import Done, Headers, Message, Outgoing, Pending, Prepared, Progress, Receipt, StoreStats
from ..delivery import CLAIMED, LEASED, LEAVING, Delivery, Feed, Note
from ..files import create_lmdb, disk_errors
from . import format as f
from . import messages as codec
from . import recovery
from .applying import APPLY_AT, Applier
from .batch import Branch, Operation, Outcome, Ticket
from .bodies import Bodies
from .check import violations
from .destinations import SEQ, DestinationState, Place
from .directory import StoreDirectory
from .duplicates import DuplicateWindow
from .files import SegmentFiles
from .holds import free_ranges
from .index import MAP_BYTES, Checkpoint, Index, IndexBrokenError, is_of_index, remove_file
from .limits import Room
from .log import Log
from .reader import Replayer
from .reclaim import Reclaimer
from .transactions import Step, branch_of, new_branch, outcome_ticket, read_payload, summary

log = logging.getLogger(__name__)

T = TypeVar("T")

PAGE: Final = 512
"""Messages that browse looks up at once."""


class JournalStore:
    """A store in a directory of its own. Threads: all. Forks: a child's calls raise ClosedError (rule D4).

    What is put together here: the log writes (log.py), the applier brings what is written into the index
    (applying.py), the delivery knows who holds what (delivery.py), the bodies are read back (bodies.py).
    """

    options_model: ClassVar[type[BaseModel]] = JournalOptions

    def __init__(
        self, name: str, directory: Path, options: JournalOptions, index_directory: Path | None = None
    ) -> None:
        self.name = name
        self.options = options
        self._directory = StoreDirectory(name, directory, index_directory)
        self._opened = False
        self._declare_lock = threading.RLock()
        self._begin(b"", directory / "index.mdb")

    def _begin(self, store_id: bytes, index: Path) -> None:
        """The state of a store that is not open yet."""
        options = self.options
        self.store_id = store_id
        self._index = Index(index, store_id, options.duplicate_window)
        self._delivery = Delivery(self.name, options.max_leases, options.max_deliveries)
        self._applier = Applier(self.name, self._index, options, self._delivery)
        files = SegmentFiles(self._directory.journal, self._count_sync)
        window = DuplicateWindow(options.duplicate_window)
        self._log = Log(self.name, store_id, files, options, window, self._applier.take, self._wake_all)
        self._applier.attach(self._log)
        self._bodies = Bodies(self, self._log, self._applier)
        self._reclaimer = Reclaimer(self._log, self._applier.snapshot, self._applier.forget)
        self._applier.on_empty = self._reclaimer.notice
        self._sends = self._acks = 0
        limited = options.max_messages is not None or options.max_bytes is not None
        self._room = Room(self.name, options, window, self._count_held) if limited else None

    @classmethod
    def create(cls, name: str, directory: Path, options: JournalOptions) -> bytes:
        """Make an empty store, whole or not at all (rule D2); returns its id. The directory must not exist."""
        with disk_errors(f"store {name!r} cannot be created"):
            return StoreDirectory(name, directory, None).create(options.segment_size)

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
            replayer.seq = found.highest_seq
            if checkpoint is None:
                recovery.rebuild(found, files, index, replayer, progress)
            else:
                replayer.seq = max(replayer.seq, checkpoint.seq)
                index.load(found.table().segments)
                recovery.replay(found, index, checkpoint, replayer)
            self._take_over(found, index, replayer)
        except BaseException:
            index.close()
            raise
        if not found.clean:
            log.info(
                "store %s: recovered %d messages in %d segments in %.2f s%s", self.name,
                sum(s.count for s in index.states.values()), len(self._log.table.segments),
                time.monotonic() - started, "" if checkpoint else ", index rebuilt",
            )  # fmt: skip

    def _survey(self, files: SegmentFiles, index: Index) -> tuple[Checkpoint | None, recovery.Survey]:
        """The index if it can be used, else an empty one (None), and what the journal says."""
        try:
            checkpoint = index.open()
            if checkpoint is None:
                raise IndexBrokenError("it has no checkpoint")
            return checkpoint, recovery.survey(files, self.store_id, checkpoint, index)
        except (IndexBrokenError, recovery.IndexMismatchError) as error:
            index.close()
            found = recovery.survey(files, self.store_id, None, None)
            if found.end.offset > f.HEADER_BYTES or len(found.chain) > 1:
                log.warning("store %s: the index is rebuilt from the journal: %s", self.name, error)
            remove_file(self._directory.index)
            create_lmdb(self._directory.index, MAP_BYTES)
            index.checkpointed = None
            index.open()
            return None, found

    def _take_over(self, found: recovery.Survey, index: Index, replayer: Replayer) -> None:
        """From reading to writing: the one durable step of recovery (rule J5), then a checkpoint."""
        prepared = [read_payload(*known, found.table()) for known in index.prepared()]
        self._log.window.add(dict(index.duplicates()))
        recovery.take_over(found, self._log, replayer.seq, max(replayer.snapshot or (0, 0), found.snapshot))
        self._applier.start()
        for payload in prepared:
            branch = branch_of(payload, self._state)
            self._delivery.claim_again((state.feed, seq) for state, seq in branch.acks)
            if self._room is not None:
                branch.reservation = self._room.hold(branch.operations)
            self._log.restore(branch)

    def close(self) -> None:
        if not self._opened:
            return
        try:
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

    def _count_sync(self) -> None:
        self._log.syncs += 1

    # Sending

    def send(
        self,
        destination: Destination,
        body: bytes,
        headers: Headers | None = None,
        message_id: str | None = None,
        sync: bool | None = None,
    ) -> Receipt:
        ticket = self._send_ticket(destination, body, headers, message_id, sync)
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
    ) -> Future[Receipt]:
        ticket = self._send_ticket(destination, body, headers, message_id, sync)
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
            tickets[-1].operations.append(operation)
            tickets[-1].size += more
        if self._room is not None:
            reservation = self._room.reserve(operation for ticket in tickets for operation in ticket.operations)
            for ticket in tickets:
                ticket.reservation = reservation
            del reservation
        self._log.submit_all(tickets)
        self._sends += sum(len(ticket.operations) for ticket in tickets)
        return [Receipt(destination, *done) for ticket in tickets for done in self._wait(ticket)]

    def _send_ticket(
        self,
        destination: Destination,
        body: bytes,
        headers: Headers | None,
        message_id: str | None,
        sync: bool | None,
    ) -> Ticket:
        state = self._index.by_destination.get(destination) or self._state(destination)
        rest, key = codec.encode(state, body, headers, message_id, self.options.message_bytes_max)
        ticket = Ticket([(f.SEND, state, rest, key)], len(rest) + state.send_overhead, bool(sync))
        if self._room is not None:
            ticket.reservation = self._room.reserve(ticket.operations)
        self._sends += 1
        return ticket

    def _send_operation(self, state: DestinationState, message: Outgoing | bytes) -> tuple[Operation, int]:
        body, headers, message_id = message[:3] if isinstance(message, Outgoing) else (message, None, None)
        rest, key = codec.encode(state, body, headers, message_id, self.options.message_bytes_max)
        return (f.SEND, state, rest, key), len(rest) + state.send_overhead

    def _send_operations(self, sends: Sequence[tuple[Destination, Outgoing]]) -> tuple[list[Operation], int]:
        operations: list[Operation] = []
        size = 0
        for destination, message in sends:
            operation, more = self._send_operation(self._state(destination), message)
            operations.append(operation)
            size += more
        return operations, size

    def _count_held(self) -> tuple[int, int]:
        """Messages and their bytes."""
        self._applier.check()
        with self._applier.lock:
            index = self._applier.current()
            return index.messages, index.bytes

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

    def checkpoint(self) -> None:
        """Write the index out. Happens by itself; durability never depends on it."""
        self._applier.checkpoint()

    # Receiving

    def receive(self, destination: Destination, timeout: float | None = 0) -> Message | None:
        deadline = None if timeout is None else time.monotonic() + timeout
        state = self._index.by_destination.get(destination)
        if state is None:
            self._log.ensure_usable()
            if timeout == 0:
                return None
            state = self._state(destination)
        feed = state.feed
        while True:
            place = self._lease(feed)
            if place is not None:
                try:
                    message = self._bodies.one(state, place, feed)
                except KeyboardInterrupt:
                    with self._applier.lock:
                        self._delivery.unlease((feed,), place[SEQ], self._applier.current())
                    raise
                if message is not None:
                    return message
                self._delivery.acked(feed, place[SEQ])  # it was purged after it had been fetched
            elif timeout == 0 or not self._delivery.wait(feed, deadline, lambda: self._has_ready(feed)):
                return None

    def _lease(self, feed: Feed) -> Place | None:
        self._applier.check()
        with self._applier.lock:
            index, delivery = self._applier.current(drained=False), self._delivery
            if feed.has_ready and not delivery.at_limit():
                place = delivery.lease(feed, index)  # what was fetched before comes before all that is pending
                if place is not None:
                    return place
            self._applier.drain()
            delivery.require_room()
            return delivery.lease(feed, index)

    def _has_ready(self, feed: Feed) -> bool:
        self._applier.check()
        with self._applier.lock:
            return self._delivery.anything(feed, self._applier.current())

    def _wake_all(self) -> None:
        for state in list(self._index.states.values()):
            state.wake()

    def browse(self, destination: Destination, limit: int | None = None, after: int = 0) -> Iterator[Message]:
        state = self._index.by_destination.get(destination)
        self._log.ensure_usable()
        left = limit if limit is not None else -1
        while state is not None and left != 0:
            self._applier.check()
            with self._applier.lock:
                index = self._applier.current()
                places = index.scan(state, after, PAGE if left < 0 else min(PAGE, left))
            if not places:
                return
            for message in self._bodies.page(state, places):
                yield message
                left -= 1
            after = places[-1][SEQ]

    # Settling

    def ack(self, messages: Sequence[Message]) -> None:
        self._log.ensure_usable()
        try:
            operations = _acks(self._delivery.take(self, messages, LEASED, LEAVING))
            self._commit(Ticket(operations, f.ACK_BYTES * len(operations), False))
        except (UnknownMessageError, OutcomeUnknownError):
            raise
        except (AnabranchError, KeyboardInterrupt):
            self._delivery.put_back(messages, LEASED)  # what the ack has reached is not held any more
            raise
        self._acks += len(operations)

    def release(self, messages: Sequence[Message]) -> None:
        self._give_back(messages, LEASED)

    def claim(self, message: Message) -> None:
        self._log.ensure_usable()
        self._delivery.take(self, [message], LEASED, CLAIMED)

    def unclaim(self, messages: Sequence[Message]) -> None:
        self._give_back(messages, CLAIMED)

    def _give_back(self, messages: Sequence[Message], hold: int) -> None:
        """All or none of them, wherever Ctrl-C strikes."""
        self._log.ensure_usable()
        try:
            self._delivery.take(self, messages, hold, LEAVING)
            self._applier.check()
            with self._applier.lock:
                index = self._applier.current()
                try:
                    self._delivery.give_back(messages, index)
                except KeyboardInterrupt:
                    self._delivery.give_back(messages, index)  # the rest; nobody can have leased any of them yet
                    raise
        except KeyboardInterrupt:
            self._delivery.put_back(messages, hold)  # unless they are all given back
            raise

    def commit(
        self, sends: Sequence[tuple[Destination, Outgoing]], acks: Sequence[Message], sync: bool | None = None
    ) -> list[Receipt]:
        self._log.ensure_usable()
        operations, size = self._send_operations(sends)
        size += f.ACK_BYTES * len(acks)
        reservation = self._room.reserve(operations) if self._room is not None else None
        try:
            operations += _acks(self._delivery.take(self, acks, CLAIMED, LEAVING))
            ticket = Ticket(operations, size, bool(sync))
            ticket.reservation = reservation
            del reservation
            done = self._commit(ticket)
        except (UnknownMessageError, OutcomeUnknownError):
            raise
        except (AnabranchError, KeyboardInterrupt):
            self._delivery.put_back(acks, CLAIMED)  # what it has reached is not held any more
            raise
        self._sends += len(sends)
        self._acks += len(acks)
        return [Receipt(destination, *result) for (destination, _), result in zip(sends, done, strict=True)]

    def _commit(self, ticket: Ticket) -> list[Outcome]:
        if not ticket.operations:
            return []
        self._log.submit(ticket)
        return self._wait(ticket)

    # Transactions over several stores

    def reserve(self, sends: Sequence[tuple[Destination, Outgoing]]) -> object:
        self._log.ensure_usable()
        if self._room is None:
            return None
        return self._room.reserve(self._send_operations(sends)[0])

    def prepare(
        self,
        transaction: bytes,
        participants: Sequence[bytes],
        sends: Sequence[tuple[Destination, Outgoing]],
        acks: Sequence[Message],
        sync: bool,
        room: object = None,
    ) -> Pending[None]:
        self._log.ensure_usable()
        operations, size = self._send_operations(sends)
        operations += _acks(self._delivery.take(self, acks, CLAIMED, CLAIMED))
        branch = new_branch(transaction, participants, operations, size + f.ACK_BYTES * len(acks))
        branch.reservation, branch.messages = room, acks
        ticket = Ticket([(f.PREPARE, branch)], f.RECORD_HEADER.size + len(branch.payload), sync)
        ticket.promise = branch.promise = self._log.promise(branch)
        self._log.submit(ticket)
        return Step(self._log, self._wait, ticket, lambda outcomes: None)

    def commit_prepared(self, transaction: bytes) -> Pending[list[Receipt]]:
        branch = self._prepared(transaction)
        if branch is None:
            return Done([])
        self._sends += len(branch.operations) - len(branch.acks)
        self._acks += len(branch.acks)
        destinations = [operation[1].destination for operation in branch.operations if operation[0] == f.SEND]
        return self._outcome(
            f.COMMIT,
            branch,
            # No outcomes where another thread had committed it before.
            lambda outcomes: [Receipt(d, *done) for d, done in zip(destinations, outcomes, strict=False)],
        )

    def rollback_prepared(self, transaction: bytes) -> Pending[bool]:
        branch = self._prepared(transaction)
        return Done(False) if branch is None else self._outcome(f.ROLLBACK, branch, self._applied)

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
        if transaction not in self._log.prepared:
            self._log.flush()
        return self._log.prepared.get(transaction)

    def _outcome(self, kind: int, branch: Branch, result: Callable[[list[Outcome]], T]) -> Pending[T]:
        ticket = outcome_ticket(kind, branch)
        self._log.submit(ticket)
        return Step(self._log, self._wait, ticket, result)

    def recover_prepared(self) -> Sequence[Prepared]:
        self._log.ensure_usable()
        return [summary(branch) for branch in sorted(self._log.prepared.values(), key=lambda b: b.transaction)]

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

    def purge(self, destination: Destination) -> int:
        state = self._index.by_destination.get(destination)
        if state is None:
            self._log.ensure_usable()
            return 0
        self._applier.check()
        with self._applier.lock:
            index = self._applier.current()
            ranges, count = free_ranges(self._delivery, state, index, PAGE)
            if not ranges:
                return 0
            state.feed.purging += 1  # nobody shall receive what is about to go
        try:
            operations: list[Operation] = [(f.ACK_RANGE, state, first, last) for first, last in ranges]
            self._commit(Ticket(operations, f.RANGE_BYTES * len(ranges), False))
            self._applier.check()
            with self._applier.lock:
                index = self._applier.current()
                self._delivery.purged(state.feed, index)
        finally:
            state.feed.purging -= 1
            state.wake()
        return count

    def delete(self, destination: Destination) -> int:
        state = self._index.by_destination.get(destination)
        if state is None:
            self._log.ensure_usable()
            return 0
        self._applier.check()
        with self._applier.lock:
            self._applier.current()
            claimed = self._delivery.claimed(state.feed)
            if claimed:
                raise TransactionError(
                    f"{destination} cannot be deleted: a transaction has claimed {claimed} of its messages; "
                    "commit it or roll it back first"
                )
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
            if self._delivery.waiting or self._delivery.held or self._log.prepared:
                return False
            self._log.refuse_more()
            return True

    def destinations(self) -> Sequence[Destination]:
        self._applier.check()
        with self._applier.lock:
            index = self._applier.current()
            return [s.destination for s in list(index.states.values()) if s.declared]

    def depth(self, destination: Destination) -> int:
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
            used = [(s.end or self._log.tail.offset) - f.HEADER_BYTES for s in segments]
            live = sum(s.live_bytes for s in segments)
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
            )

    def check(self) -> Iterator[str]:
        self._applier.check()
        with self._applier.lock:
            index = self._applier.current()
            found = list(violations(index, self._log.table, self._applier.applied))
        yield from found


def _acks(taken: list[tuple[Note, int]]) -> list[Operation]:
    """What was taken, as acks."""
    return [(f.ACK, feed.owner, seq) for feed, seq in taken]
