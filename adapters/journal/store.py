"""JournalStore: the contract of adapters/base.py over the log and the index.

    log        what has been written, in order                      (log.py, its own lock)
    pending    batches that are durable but not yet in the index    (a queue: senders put, readers take)
    index      which messages there are and where                   (index.py, under `_index_lock`)

A send goes through the log and leaves its batch in `pending`; whoever reads drains that first, so that what has
returned is seen (rule X2).
"""

from __future__ import annotations

import heapq
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar, Final

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
    TransactionError,
    UnknownMessageError,
)
from ..base import Headers, Message, Outgoing, Progress, Receipt, StoreStats, require_leased
from ..files import create_lmdb
from . import format as f
from . import messages, recovery, snapshot
from .background import shared
from .batch import Flight, Operation, Tail, Ticket
from .check import violations
from .destinations import CLAIMED, LEASED, LEAVING, DestinationState, Place
from .directory import StoreDirectory
from .duplicates import DuplicateWindow
from .files import File, SegmentFiles
from .index import MAP_BYTES, Checkpoint, Index, IndexBrokenError, remove_file
from .index import VERSION as INDEX_VERSION
from .limits import Room
from .log import Log
from .reader import Replayer
from .reclaim import Reclaimer
from .segment import Segment

log = logging.getLogger(__name__)

APPLY_AT: Final = 1024
"""A sender that leaves so many operations pending applies them, if nobody else is at it."""
PENDING_MAX: Final = 20_000
"""Operations; beyond it a sender waits until the index has caught up (invariant 10)."""
PAGE: Final = 512
"""Messages that browse looks up at once."""
OPEN_FILES_MAX: Final = 32
"""Sealed segments that are kept open for reading, a store."""


class JournalStore:
    """A store in a directory of its own. Threads: all. Forks: a child's calls raise ClosedError (rule D4).

    `_index_lock` guards the index, `_applied`, and the destinations' states; nothing else is locked while it is held
    but the log's sync lock. `_held_lock` guards changes of who holds a message; it is the innermost.
    """

    options_model: ClassVar[type[BaseModel]] = JournalOptions

    def __init__(
        self, name: str, directory: Path, options: JournalOptions, index_directory: Path | None = None
    ) -> None:
        self.name = name
        self.options = options
        self._directory = StoreDirectory(name, directory, index_directory)
        self._opened = False
        self._index_lock = threading.Lock()
        self._held_lock = threading.Lock()
        self._declare_lock = threading.Lock()
        self._begin(b"", directory / "index.mdb")

    def _begin(self, store_id: bytes, index: Path) -> None:
        """The state of a store that is not open yet."""
        self.store_id = store_id
        files = SegmentFiles(self._directory.journal, self._count_sync)
        window = DuplicateWindow(self.options.duplicate_window)
        self._log = Log(self.name, store_id, files, self.options, window, self._deliver, self._wake_all)
        self._index = Index(index, store_id, self.options.duplicate_window)
        self._reclaimer = Reclaimer(self._log, self._snapshot, self._forget_segments)
        self._checkpoint_due = self._checkpoint_soon = self._interrupted = False
        self._pending: deque[Flight] = deque()
        self._pending_operations = 0
        self._waiting = 0
        self._sends = self._acks = 0
        limited = self.options.max_messages is not None or self.options.max_bytes is not None
        self._room = Room(self.name, self.options, window, self._count_held) if limited else None

    @classmethod
    def create(cls, name: str, directory: Path, options: JournalOptions) -> bytes:
        """Make an empty store, whole or not at all (rule D2); returns its id. The directory must not exist."""
        return StoreDirectory(name, directory, None).create(options.segment_size)

    # Opening and closing

    def open(self, progress: Progress | None = None) -> None:
        self._directory.lock()
        try:
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
        self._log.window.add(dict(index.duplicates()))
        last = found.chain[-1]
        last.end = None
        tail = Tail(last, found.end.offset, found.end.lsn, replayer.seq)
        self._log.snapshot_at = max(replayer.snapshot or (0, 0), found.snapshot)
        self._log.start(found.table(), tail, found.end.lsn, found.highest_number)
        if recovery.resume_in(found):
            last.file = File(last.path, os.O_RDWR)
            last.allocated = os.fstat(last.file.fd).st_size
        else:
            self._log.begin_segment(found.highest_lsn + 1)
        if found.void:
            for path in found.void:
                path.unlink(missing_ok=True)
            self._log.files.sync_names()
        self._applied = self._log.tail
        self._write_checkpoint(clean=False)

    def close(self) -> None:
        if not self._opened:
            return
        try:
            self._log.close()
            if not self._log.forked:
                with self._index_lock:
                    if self._log.failed is None and self._index.is_open:
                        self._drain()
                        self._write_checkpoint(clean=True)
        except Exception:
            self._let_go()
            raise
        self._let_go()  # not after Ctrl-C: then close() may be called again

    def _let_go(self) -> None:
        if not self._log.forked:
            self._log.let_go()
            self._reclaimer.finish()
            with self._index_lock:
                self._index.close()
                for state in self._index.states.values():
                    state.held.clear()  # should this object be opened again, no lease of before counts
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
        the_log = self._log
        the_log.submit(ticket)
        seq, duplicate = the_log.wait(ticket)[0]
        if self._pending_operations >= APPLY_AT:
            self._help_apply()
        return Receipt(destination, seq, duplicate)

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
        if self._pending_operations >= APPLY_AT:
            self._help_apply()
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
        for ticket in tickets:
            self._log.submit(ticket)
            self._sends += len(ticket.operations)
        receipts = [Receipt(destination, *done) for ticket in tickets for done in self._log.wait(ticket)]
        if self._pending_operations >= APPLY_AT:
            self._help_apply()
        return receipts

    def _send_ticket(
        self,
        destination: Destination,
        body: bytes,
        headers: Headers | None,
        message_id: str | None,
        sync: bool | None,
    ) -> Ticket:
        state = self._index.by_destination.get(destination) or self._state(destination)
        rest, key = messages.encode(state, body, headers, message_id, self.options.message_bytes_max)
        ticket = Ticket([(f.SEND, state, rest, key)], len(rest) + state.send_overhead, bool(sync))
        if self._room is not None:
            ticket.reservation = self._room.reserve(ticket.operations)
        self._sends += 1
        return ticket

    def _send_operation(self, state: DestinationState, message: Outgoing | bytes) -> tuple[Operation, int]:
        body, headers, message_id = message if isinstance(message, Outgoing) else (message, None, None)
        rest, key = messages.encode(state, body, headers, message_id, self.options.message_bytes_max)
        return (f.SEND, state, rest, key), len(rest) + state.send_overhead

    def _count_held(self) -> tuple[int, int]:
        """Messages and their bytes."""
        with self._reading() as index:
            states = list(index.states.values())
            return sum(state.count for state in states), sum(state.bytes for state in states)

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

    # From the log into the index

    def _deliver(self, flight: Flight) -> None:
        """A batch has become as durable as the policy asks. Called by the log's leader, who holds no index lock."""
        self._pending_operations += len(flight.entries)
        self._pending.append(flight)
        if self._waiting:
            for entry in flight.entries:
                if entry[0] == f.SEND and entry[1].waiters:
                    entry[1].wake()

    def _help_apply(self) -> None:
        if self._pending_operations > PENDING_MAX or not self._index_lock.locked():
            try:
                with self._reading():
                    pass
            except AnabranchError as error:  # what the caller did has taken effect; the next call will hear of it
                log.debug("store %s: nothing applied: %s", self.name, error)

    @contextmanager
    def _reading(self) -> Iterator[Index]:
        """The index, locked, with all that has returned applied. In a forked child another thread's hold on the lock
        would last for ever: it is refused before."""
        self._log.ensure_usable()
        with self._index_lock:
            self._log.ensure_usable()
            self._drain()
            yield self._index

    def _drain(self) -> None:
        """Apply what is pending. With the index lock held. Raises StoreFailedError."""
        try:
            if self._interrupted:
                self._restore_index()
            pending = self._pending
            while pending:
                for _ in range(self._apply_some()):
                    pending.popleft()
            self._pending_operations = sum(len(flight.entries) for flight in list(pending))
        except lmdb.Error as error:
            self._log.fail(error)
            self._log.ensure_usable()
        operations = self._index.operations
        if operations >= self.options.checkpoint_operations:
            if not self._checkpoint_soon:
                self._checkpoint_soon = True
                shared().schedule(0, self._background_checkpoint)
        elif operations and not self._checkpoint_due:
            self._checkpoint_due = True
            shared().schedule(self.options.checkpoint_interval, self._background_checkpoint)
        if self._index.emptied:
            self._index.emptied = False
            self._reclaimer.notice()

    def _apply_some(self) -> int:
        """Apply the first pending batches, all of one segment; returns how many.

        An interrupted leader may have delivered a batch twice, and an interrupted caller may not have removed what it
        had applied: LSNs tell.
        """
        pending, applied, entries = self._pending, self._applied, []
        segment, count = pending[0].segment, 0
        for position in range(min(len(pending), APPLY_AT)):
            flight = pending[position]
            if flight.segment is not segment:
                break
            count += 1
            if flight.tail.lsn > applied.lsn:
                entries += flight.entries
            if flight.tail.offset > applied.offset or segment is not applied.segment:
                applied = flight.tail
        if self._applied.segment is not segment and not self._applied.segment.live:
            self._index.emptied = True
        self._interrupted = True
        self._index.apply(entries, segment, self._log.table)
        self._applied = applied
        self._interrupted = False
        return count

    def _restore_index(self) -> None:
        """An interruption or an error came half way through a change: go back to the checkpoint and replay (X4)."""
        index, applied = self._index, self._applied
        index.abort()
        checkpoint = index.checkpointed
        assert checkpoint is not None
        index.load(self._log.table.segments)
        replayer = Replayer(index, str(self._directory.journal), live=True)
        recovery.replay_between(self._log.table, index, checkpoint, applied, replayer)
        self._interrupted = False

    def _background_checkpoint(self) -> None:
        self._checkpoint_due = self._checkpoint_soon = False
        try:
            if self._opened and not self._log.forked:
                self.checkpoint()
        except AnabranchError as error:
            log.debug("store %s: no checkpoint: %s", self.name, error)

    def checkpoint(self) -> None:
        """Write the index out. Happens by itself; durability never depends on it."""
        with self._reading() as index:
            if index.operations:
                self._write_checkpoint(clean=False)

    def _write_checkpoint(self, clean: bool) -> None:
        """With the index lock held, all that is pending applied."""
        self._log.sync()
        applied, index = self._applied, self._index
        self._interrupted = True
        try:
            index.checkpoint(
                Checkpoint(
                    version=INDEX_VERSION, store_id=self.store_id, lsn=applied.lsn, segment=applied.segment.number,
                    nonce=applied.segment.nonce, offset=applied.offset, seq=applied.seq,
                    last_number=self._log.last_number, next_destination=index.next_destination,
                    snapshot=self._log.snapshot_at, clean=clean,
                ),
                self._log.table.segments,
            )  # fmt: skip
        except lmdb.Error as error:
            self._log.fail(error)
            raise StoreFailedError(f"store {self.name!r}: the index cannot be written: {error}") from error
        self._interrupted = False

    # Receiving

    def receive(self, destination: Destination, timeout: float | None = 0) -> Message | None:
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            state = self._index.by_destination.get(destination)
            if state is None:
                state = self._state(destination)
            place = self._lease(state)
            if place is not None:
                message = self._read(state, place, leased=True)
                if message is not None:
                    return message
                continue
            if timeout == 0 or not self._wait_for_message(state, deadline):
                return None

    def _lease(self, state: DestinationState) -> Place | None:
        self._log.ensure_usable()
        with self._index_lock:
            self._log.ensure_usable()
            index = self._index
            if not state.ready or index.leased >= self.options.max_leases:
                self._drain()  # else what was fetched before comes before all that is pending
                if index.leased >= self.options.max_leases:
                    raise StoreFullError(
                        f"{index.leased} messages of store {self.name!r} are leased; max_leases is "
                        f"{self.options.max_leases}: ack or release some"
                    )
            place = state.next_ready(index.fetch)
            while place is not None and place[0] in state.held:
                place = state.next_ready(index.fetch)
            if place is not None:
                state.held[place[0]] = LEASED
                index.leased += 1
            return place

    def _wait_for_message(self, state: DestinationState, deadline: float | None) -> bool:
        """False when the time is over. A new message, a release, a failure and close wake it."""
        waiter = threading.Lock()
        waiter.acquire()
        with self._held_lock:
            self._waiting += 1
        try:
            state.waiters.append(waiter)
            with self._reading() as index:  # whoever sends from now on sees the waiter; who sent before is seen here
                if state.returned or index.fetch(state, state.cursor, 1):
                    return True
            if deadline is None:
                waiter.acquire()
                return True
            left = deadline - time.monotonic()
            return left > 0 and waiter.acquire(timeout=left)
        finally:
            with self._held_lock:
                self._waiting -= 1
            try:
                state.waiters.remove(waiter)
            except ValueError:
                pass  # who woke it took it out

    def _wake_all(self) -> None:
        for state in list(self._index.states.values()):
            state.wake()

    def _read(self, state: DestinationState, place: Place, leased: bool) -> Message | None:
        """The message at a place; None if it has died meanwhile. Raises CorruptionError."""
        segment = self._log.table.find(place[1])
        if segment is not None:
            try:
                record = messages.read_record(segment, place)
            except FileNotFoundError:
                record = b""
            except OSError as error:
                raise CorruptionError(str(segment.path), place[2], f"the disk cannot read it: {error}") from error
            message = messages.decode(self, state, segment.seed, place, record, leased)
            if message is not None:
                self._limit_open_files(segment)
                return message
        with self._reading() as index:
            alive = index.place(state, place[0])
        if alive != place:
            return None
        where = str(segment.path) if segment is not None else str(self._directory.journal)
        raise CorruptionError(
            where, place[2], f"message {place[0]} of {state.destination} does not read back: its bytes are damaged"
        )

    def _limit_open_files(self, segment: Segment) -> None:
        recent = self._log.open_files
        if segment.end is not None and segment not in recent:
            recent.append(segment)
            if len(recent) > OPEN_FILES_MAX:
                recent.pop(0).file = None

    def browse(self, destination: Destination, limit: int | None = None, after: int = 0) -> Iterator[Message]:
        state = self._index.by_destination.get(destination)
        self._log.ensure_usable()
        left = limit if limit is not None else -1
        while state is not None and left != 0:
            with self._reading() as index:
                places = index.fetch(state, after, PAGE if left < 0 else min(PAGE, left))
            if not places:
                return
            for segment, run in self._segments_of(places):
                start, data = self._read_ahead(segment, run)
                for place in run:
                    if self._pending:
                        with self._reading():
                            pass
                    if segment is not None and segment.is_dead(place[1]):
                        continue  # settled since the page was looked up
                    message = None
                    if segment is not None:
                        offset = place[2] - start
                        record = data[offset : offset + place[3]]
                        message = messages.decode(self, state, segment.seed, place, record, False)
                    if message is None:
                        message = self._read(state, place, leased=False)
                    if message is not None:
                        yield message
                        left -= 1
            after = places[-1][0]

    def _segments_of(self, places: list[Place]) -> Iterator[tuple[Segment | None, list[Place]]]:
        """A page cut where the segment changes."""
        table = self._log.table
        while places:
            segment = table.find(places[0][1])
            if segment is table.find(places[-1][1]):
                yield segment, places
                return
            same = next(n for n, place in enumerate(places) if table.find(place[1]) is not segment)
            yield segment, places[:same]
            places = places[same:]

    def _read_ahead(self, segment: Segment | None, places: list[Place]) -> tuple[int, bytes]:
        """The bytes of all these places; nothing if that would read too much or cannot be done: each is then read
        on its own, and errors are told there."""
        if segment is not None and messages.is_span(places):
            try:
                self._limit_open_files(segment)
                return messages.read_span(segment, places)
            except OSError as error:
                log.debug("store %s: %s cannot be read ahead: %s", self.name, segment.path, error)
        return 0, b""

    # Settling

    def ack(self, messages_: Sequence[Message]) -> None:
        self._log.ensure_usable()
        try:
            operations = self._take_held(messages_, LEASED, LEAVING)
            self._commit(Ticket(operations, f.ACK_BYTES * len(operations), False))
        except UnknownMessageError:
            raise
        except AnabranchError as error:
            if not isinstance(error, OutcomeUnknownError):
                self._give_held(messages_, LEASED)
            raise
        except KeyboardInterrupt:
            with self._index_lock:  # what the ack has reached is not held any more; the rest may be acked again
                self._give_held([m for m in messages_ if m.note.held.get(m.seq) == LEAVING], LEASED)
            raise
        self._acks += len(operations)

    def _take_held(self, messages_: Sequence[Message], before: int, after: int) -> list[Operation]:
        """Move all from one hold to another, or none. Returns their acks."""
        operations: list[Operation] = []
        with self._held_lock:
            for message in messages_:
                state = message.note
                if message.store is not self or not message.leased or state.held.get(message.seq) != before:
                    for _, undo, seq in operations:
                        undo.held[seq] = before
                    require_leased(message)
                    raise UnknownMessageError(
                        f"{message!r} is not {'leased' if before == LEASED else 'claimed'} here any more: it was "
                        "acked, released or claimed by a transaction"
                    )
                state.held[message.seq] = after
                operations.append((f.ACK, state, message.seq))
        return operations

    def _give_held(self, messages_: Sequence[Message], hold: int) -> None:
        with self._held_lock:
            for message in messages_:
                message.note.held[message.seq] = hold

    def release(self, messages_: Sequence[Message]) -> None:
        self._log.ensure_usable()
        self._take_held(messages_, LEASED, LEAVING)
        self._return(messages_)

    def claim(self, message: Message) -> None:
        self._log.ensure_usable()
        self._take_held([message], LEASED, CLAIMED)

    def unclaim(self, messages_: Sequence[Message]) -> None:
        self._log.ensure_usable()
        self._take_held(messages_, CLAIMED, LEAVING)
        self._return(messages_)

    def _return(self, messages_: Sequence[Message]) -> None:
        with self._reading() as index:
            for message in messages_:
                state = message.note
                place = index.place(state, message.seq)
                if state.held.pop(message.seq, None) is not None:
                    index.leased -= 1
                if place is not None:
                    heapq.heappush(state.returned, place)
                state.wake()

    def commit(
        self, sends: Sequence[tuple[Destination, Outgoing]], acks: Sequence[Message], sync: bool | None = None
    ) -> list[Receipt]:
        self._log.ensure_usable()
        size = f.ACK_BYTES * len(acks)
        operations: list[Operation] = []
        for destination, message in sends:
            operation, more = self._send_operation(self._state(destination), message)
            operations.append(operation)
            size += more
        reservation = self._room.reserve(operations) if self._room is not None else None
        operations += self._take_held(acks, CLAIMED, LEAVING)
        ticket = Ticket(operations, size, bool(sync))
        ticket.reservation = reservation
        del reservation
        try:
            done = self._commit(ticket)
        except AnabranchError as error:
            if not isinstance(error, OutcomeUnknownError):
                self._give_held(acks, CLAIMED)
            raise
        self._sends += len(sends)
        self._acks += len(acks)
        return [Receipt(destination, *result) for (destination, _), result in zip(sends, done, strict=True)]

    def _commit(self, ticket: Ticket) -> list[tuple[int, bool]]:
        if not ticket.operations:
            return []
        self._log.submit(ticket)
        done = self._log.wait(ticket)
        if self._pending_operations >= APPLY_AT:
            self._help_apply()
        return done

    def purge(self, destination: Destination) -> int:
        state = self._state(destination)
        with self._reading():
            ranges, count = self._free_ranges(state)
            if not ranges:
                return 0
            state.skip_to(max(state.cursor, ranges[-1][1]))  # nobody shall receive what is about to go
        operations: list[Operation] = [(f.ACK_RANGE, state, first, last) for first, last in ranges]
        try:
            size = len(ranges) * (f.RECORD_HEADER.size + f.RANGE_PAYLOAD.size)
            self._commit(Ticket(operations, size, False))
        except StoreFullError:
            with self._index_lock:
                state.skip_to(ranges[0][0] - 1)
            raise
        return count

    def _free_ranges(self, state: DestinationState) -> tuple[list[tuple[int, int]], int]:
        """The seqs of a destination that nobody holds, as ranges between those that somebody holds."""
        ranges: list[tuple[int, int]] = []
        count, after, start, last = 0, 0, 0, 0
        while places := self._index.fetch(state, after, PAGE):
            for seq, *_ in places:
                if seq in state.held:
                    if start:
                        ranges.append((start, last))
                    start = 0
                else:
                    start, last, count = start or seq, seq, count + 1
            after = places[-1][0]
        if start:
            ranges.append((start, last))
        return ranges, count

    def delete(self, destination: Destination) -> int:
        state = self._index.by_destination.get(destination)
        if state is None:
            self._log.ensure_usable()
            return 0
        with self._reading():
            claimed = sum(hold == CLAIMED for hold in state.held.values())
            if claimed:
                raise TransactionError(
                    f"{destination} cannot be deleted: a transaction has claimed {claimed} of its messages; "
                    "commit it or roll it back first"
                )
            count = state.count
        if state.declared:
            gone: Operation = (f.DESTINATION_GONE, state)
            self._commit(Ticket([gone], f.RECORD_HEADER.size + f.GONE_PAYLOAD.size, False))
            with self._reading():
                pass  # applied at once: receive no longer finds what it had fetched ahead, nor ack what was leased
        return count

    # Asking

    def retire(self) -> bool:
        with self._reading():
            if self._waiting or any(state.held for state in self._index.states.values()):
                return False
            self._log.refuse_more()
            return True

    def destinations(self) -> Sequence[Destination]:
        with self._reading() as index:
            return [s.destination for s in list(index.states.values()) if s.declared]

    def depth(self, destination: Destination) -> int:
        with self._reading() as index:
            state = index.by_destination.get(destination)
            return state.count if state is not None else 0

    # Reclaiming

    def reclaim(self) -> int:
        self._log.ensure_usable()
        return self._reclaimer.run()

    def _snapshot(self) -> tuple[list[Segment], bytes]:
        """The segments that hold no live message any more, and the snapshot that lets them go (rule J6)."""
        with self._reading() as index:
            applied = self._applied
            sealed = [s for s in self._log.table.segments if s.number < applied.segment.number]
            empty = [s for s in sealed if not s.live]
            if not empty:
                return [], b""
            taken = snapshot.take(
                applied.lsn, self._log.tail.seq, applied.segment.number, index.next_destination,
                [s for s in sealed if s.live], index.states.values(), self._log.window,
            )  # fmt: skip
            return empty, taken.encode()

    def _forget_segments(self, numbers: set[int]) -> None:
        """Take released segments out of the index and the table, with a checkpoint (rule J6)."""
        with self._reading() as index:
            index.drop_segments(numbers)
            self._log.forget_segments(numbers)
            self._write_checkpoint(clean=False)

    def stats(self) -> StoreStats:
        with self._index_lock:
            failed = self._log.failed
            if failed is None:
                self._log.ensure_usable()
                self._drain()
            states = [s for s in self._index.states.values() if s.declared or s.count]
            segments = self._log.table.segments
            used = [(s.end or self._log.tail.offset) - f.HEADER_BYTES for s in segments]
            live = sum(s.live_bytes for s in segments)
            return StoreStats(
                name=self.name,
                kind="journal",
                messages=sum(s.count for s in states),
                destinations={s.destination: s.count for s in states},
                leased=sum(len(s.held) for s in states),
                sends=self._sends,
                acks=self._acks,
                syncs=self._log.syncs,
                batches=self._log.batches,
                journal_bytes=sum(s.capacity for s in segments),
                pool_bytes=self._log.files.pool_bytes,
                segments={"active": 1, "retained": len(segments) - 1, "pooled": len(self._log.files.pool)},
                live_percent=100.0 * live / sum(used) if sum(used) else 100.0,
                failed=str(failed) if failed is not None else None,
            )

    def check(self) -> Iterator[str]:
        with self._reading() as index:
            found = list(violations(index, self._log.table, self._applied))
        yield from found
