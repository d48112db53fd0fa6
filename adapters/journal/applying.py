"""From the log into the index: what is durable but not applied yet, checkpoints, and what reclaiming needs (rule X2).

Senders leave their batches here without taking the index lock; whoever reads applies them first, so that what has
returned is seen. A change of the index that was interrupted or failed half way is undone by going back to the
checkpoint and replaying the journal (rule X4).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import lmdb

from ...policies.config import JournalOptions
from ...policies.errors import AnabranchError, StoreFailedError, StoreFullError
from ..background import shared
from ..delivery import Delivery
from ..files import disk_errors, is_for_room, refused
from ..wal.log import Log
from ..wal.segment import Segment, SegmentTable
from ..wal.ticket import Tail
from . import format as f
from . import rebuild, snapshot
from .batch import Entry
from .encoder import Encoder, JournalBatch
from .holds import settle
from .index import VERSION, Checkpoint, Index, remove_file
from .replay import Replayer

log = logging.getLogger(__name__)

APPLY_AT: Final = 1024
"""A sender that leaves so many operations pending applies them, if nobody else is at it."""
PENDING_MAX: Final = 20_000
"""Operations; beyond it a sender waits until the index has caught up (invariant 10)."""

_WAKING: Final = frozenset((f.SEND, f.SUBSCRIBE, f.UNSUBSCRIBE, f.DESTINATION_GONE))
"""What those who wait for a destination's messages want to know of."""
FULL_PAUSE: Final = 5.0
"""Seconds until the next try to write the index out after the disk was full."""


class Applier:
    """The index and its lock.

    `lock` guards the index, `applied`, and the destinations' states; under it only the log's sync lock is taken. A
    signal handler that interrupted its own thread inside is refused instead of deadlocking (rule G3).
    """

    def __init__(self, name: str, index: Index, options: JournalOptions, delivery: Delivery) -> None:
        self.index = index
        self.pending_operations = 0
        self.on_empty: Callable[[], None] = lambda: None
        """Called when a sealed segment has lost its last live message."""
        self.before_checkpoint: Callable[[], None] = lambda: None
        """Called before the index is written out, and so before a segment is released: raises AnabranchError where the
        directory may be another's."""
        self._name, self._options, self._delivery = name, options, delivery
        self.lock = threading.RLock()
        """Taken by `with` itself, never inside a function that returns with it: only so can Ctrl-C not leak it."""
        self._checkpointing = False
        self._pending: deque[JournalBatch] = deque()
        self._changed_lsn = 0
        """Of the latest batch that came here with changes of subscriptions."""
        self._interrupted = False
        self._checkpoint_due = self._checkpoint_soon = False
        self._full_until = 0.0

    def attach(self, the_log: Log, encoder: Encoder) -> None:
        """The log whose batches come here."""
        self._log, self._encoder = the_log, encoder

    def start(self) -> None:
        """Take over from recovery, which has filled the index up to the log's tail."""
        self.applied: Tail = self._log.tail
        self.index.rows.on_damage = self._damaged
        self.index.dropped = (0, self.applied.counter)
        self._write_checkpoint(clean=False)

    def close(self, clean: bool) -> None:
        """Apply all and, if `clean`, write the last checkpoint. The log is closed."""
        with self.lock:
            if clean and self.index.is_open:
                self.drain()
                try:
                    self._write_checkpoint(clean=True)
                except StoreFullError as error:
                    log.warning("%s; the next open replays the journal", error)

    def let_go(self) -> None:
        """Close the index as it is. Idempotent."""
        with self.lock:
            self.index.close()

    # Taking batches in

    def take(self, batch: JournalBatch) -> None:
        """A batch has become as durable as the policy asks. Called by the log's leader, who holds no index lock."""
        self.pending_operations += len(batch.entries)
        self._pending.append(batch)
        if batch.subscribed:
            self._changed_lsn = batch.tail.lsn
        if self._delivery.waiting:
            for entry in batch.entries:
                if entry[0] in _WAKING:
                    entry[1].wake()
                elif entry[0] == f.ROLLBACK:
                    for state, _, _ in entry[2].acks:
                        state.wake()

    @property
    def unsubscribing(self) -> bool:
        """Whether a change of subscriptions is pending: what was fetched for one may not be its own any more."""
        return self._changed_lsn > self.applied.lsn

    @property
    def behind(self) -> bool:
        """Whether anything is pending."""
        return bool(self._pending)

    def help(self) -> None:
        """Apply what is pending, but do not wait for a checkpoint unless too much is."""
        if self.pending_operations > PENDING_MAX or not self._checkpointing:
            try:
                self.check()
                with self.lock:
                    self.current()
            except (AnabranchError, RuntimeError) as error:  # what the caller did has taken effect all the same
                log.debug("store %s: nothing applied: %s", self._name, error)

    def check(self) -> None:
        """Before taking the lock: raise what `Log.ensure_usable` raises, since in a forked child another thread's hold
        on the lock would last for ever; and RuntimeError in a signal handler that interrupted its own thread."""
        self._log.ensure_usable()
        if self.lock._is_owned():  # type: ignore[attr-defined]
            raise RuntimeError(
                f"store {self._name!r} was called from a signal handler that interrupted it in the same thread"
            )

    def current(self, drained: bool = True) -> Index:
        """With the lock held: the index; `drained`, with all that has returned applied."""
        self._log.ensure_usable()
        if drained or self._interrupted:
            self.drain()
        return self.index

    def as_applied(self) -> Index:
        """With the lock held: the index, as it was last if the store has failed."""
        return self.index if self._log.failed is not None else self.current()

    def drain(self) -> None:
        """With the lock held: apply what is pending."""
        try:
            if self._interrupted:
                self._restore()
            pending = self._pending
            while pending:
                for _ in range(self._apply_some()):
                    pending.popleft()
            self.pending_operations = sum(len(batch.entries) for batch in list(pending))
        except lmdb.Error as error:
            self._fail(error)
            self._log.ensure_usable()
        operations = self.index.operations
        if operations >= self._options.checkpoint_operations and time.monotonic() >= self._full_until:
            if operations >= 4 * self._options.checkpoint_operations:
                self._checkpoint_late()
            elif not self._checkpoint_soon:
                self._checkpoint_soon = True
                shared().schedule(0, self._background_checkpoint)
        elif operations and not self._checkpoint_due:
            self._checkpoint_due = True
            shared().schedule_while_alive(self._options.checkpoint_interval, self._background_checkpoint)
        if self.index.emptied:
            self.index.emptied = False
            self.on_empty()

    def _checkpoint_late(self) -> None:
        """The background has not come to it: the transaction stays bounded, if the disk has room."""
        try:
            self._write_checkpoint(clean=False)
        except StoreFullError as error:
            log.warning("%s", error)
            self._restore()

    def _fail(self, error: lmdb.Error | OSError) -> None:
        """The store stops. After damage or a failed sync the index's file must not be believed again: the next open
        rebuilds it."""
        self._log.fail(error)
        if not isinstance(error, lmdb.DiskError):
            with suppress(OSError):
                remove_file(self.index.path)

    def _damaged(self, error: lmdb.Error) -> None:
        """Stop, and raise StoreFailedError."""
        self._fail(error)
        self._log.ensure_usable()

    def _apply_some(self) -> int:
        """Apply the first pending batches, all of one segment; returns how many.

        An interrupted leader may have delivered a batch twice, and an interrupted caller may not have removed what it
        had applied: LSNs tell.
        """
        pending, applied = self._pending, self.applied
        entries: list[Entry] = []
        segment, count = pending[0].segment, 0
        for position in range(min(len(pending), APPLY_AT)):
            batch = pending[position]
            if batch.segment is not segment:
                break
            count += 1
            if batch.tail.lsn > applied.lsn:
                entries += batch.entries
            if batch.tail.offset > applied.offset or segment is not applied.segment:
                applied = batch.tail
        if self.applied.segment is not segment and not self.applied.segment.live:
            self.index.emptied = True
        # Holds end first: the other way round a dead message would stay held. Interrupted between, nobody may receive
        # before all of it is done again: what a prepared branch had claimed would be free, and then freed once more.
        self._interrupted = True
        settle(self._delivery, entries, self.index.rows)
        self.index.apply(entries, segment, self._log.table)
        self.applied = applied
        self._interrupted = False
        return count

    def _restore(self) -> None:
        """Undo a change that was interrupted half way: go back to the checkpoint and replay."""
        self.index.abort()
        checkpoint = self.index.checkpointed
        assert checkpoint is not None
        self.index.load(self._log.table.segments)
        replayer = Replayer(self.index, str(self._log.files.directory), live=True)
        try:
            rebuild.replay_between(self._log.table, self.index, checkpoint, self.applied, replayer)
        except OSError as error:
            with disk_errors(f"store {self._name!r}: the journal cannot be read to bring the index up to it"):
                raise error
        self._interrupted = False

    # Checkpoints

    def _background_checkpoint(self) -> None:
        self._checkpoint_due = self._checkpoint_soon = False
        try:
            self.checkpoint()
        except AnabranchError as error:
            log.debug("store %s: no checkpoint: %s", self._name, error)

    def checkpoint(self) -> None:
        """Write the index out. Happens by itself; durability never depends on it."""
        self.check()
        with self.lock:
            index = self.current()
            if index.operations:
                self._write_checkpoint(clean=False)

    def _write_checkpoint(
        self, clean: bool, table: SegmentTable | None = None, dropped: frozenset[int] = frozenset()
    ) -> None:
        """With the lock held and nothing pending. `dropped` segments leave the index; `table` is without them."""
        self.before_checkpoint()
        self._log.sync()
        applied, index = self.applied, self.index
        try:
            files = index.checksum_files()
        except OSError as error:
            self._full_until = time.monotonic() + FULL_PAUSE
            raise refused(f"store {self._name!r}: the index cannot be written out: {error}", error) from error
        self._interrupted = True
        try:
            self._checkpointing = True
            index.drop_segments(dropped)
            index.checkpoint(
                Checkpoint(
                    version=VERSION, store_id=self._log.log_id, lsn=applied.lsn, segment=applied.segment.number,
                    nonce=applied.segment.nonce, offset=applied.offset, seq=applied.counter,
                    last_number=self._log.last_number, next_destination=index.next_destination,
                    snapshot=self._encoder.snapshot_at, clean=clean, next_subscription=index.next_subscription,
                    priorities=index.priorities,
                ),
                (table or self._log.table).segments, files,
            )  # fmt: skip
        except (lmdb.Error, OSError) as error:
            # The index goes back to its last checkpoint, the journal has all of it. Not so after an OSError, which
            # comes once LMDB has committed.
            if isinstance(error, lmdb.Error) and is_for_room(error, index.path):
                self._full_until = time.monotonic() + FULL_PAUSE
                raise StoreFullError(
                    f"store {self._name!r}: there is no room to write the index out: {error}; free some space"
                ) from error
            self._fail(error)
            raise StoreFailedError(f"store {self._name!r}: the index cannot be written: {error}") from error
        finally:
            self._checkpointing = False
        self._interrupted = False

    # Reclaiming

    def snapshot(self) -> tuple[list[Segment], bytes]:
        """The segments that hold no live message any more, and the snapshot that lets them go (rule J6); nothing if
        the snapshot would be large beside what it frees."""
        self.check()
        with self.lock:
            index = self.current()
            applied = self.applied
            sealed = [s for s in self._log.table.segments if s.number < applied.segment.number]
            empty = [s for s in sealed if not s.live]
            kept = [s for s in sealed if s.live]
            rows = len(self._encoder.window) + index.transactions + len(index.subscribers) + index.rows.counted
            expected = snapshot.size_expected(kept, len(index.states), rows)
            if expected * snapshot.WORTH > sum(s.capacity for s in empty):
                return [], b""  # wait until it frees more; also where nothing is empty
            taken = snapshot.take(
                applied.lsn, self._log.tail.counter, applied.segment, kept, index, self._encoder.window
            )  # fmt: skip
        return empty, taken.encode()

    def forget(self, numbers: set[int]) -> None:
        """Take released segments out of the index and the table, with a checkpoint (rule J6).

        The table loses them last: until the checkpoint is on disk a restored index is replayed over them.
        """
        self.check()
        with self.lock:
            self.current()
            self._write_checkpoint(False, self._log.table.without(numbers), frozenset(numbers))
            self._log.forget_segments(numbers)
