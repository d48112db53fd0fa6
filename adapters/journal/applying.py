"""From the log into the index: what is written is applied, the index is written out now and then, and brought back to
its last checkpoint where a change of it was interrupted or failed half way (rule X4)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

import lmdb

from ...policies.config import JournalOptions
from ...policies.errors import AnabranchError, StoreFailedError, StoreFullError
from ..core.backend import Host
from ..core.operations.changes import Change
from ..core.operations.plan import Plan
from ..core.operations.table import apply_all
from ..system.background import CoalescedJob
from ..system.files import disk_errors, refused
from ..wal.files.file import FILL_MAX
from ..wal.log import Log
from ..wal.segment import Segment, SegmentTable
from ..wal.ticket import Tail
from . import snapshot
from .index.checksums import Files, IndexBrokenError
from .index.file import is_for_room, remove_file
from .index.index import VERSION, Checkpoint, Index
from .index.rows import short_lived
from .recovery.replay import Replay
from .snapshot import Start

log: logging.Logger = logging.getLogger(__name__)

COUNTED_MAX: Final = 500
"""Rows of messages that were given back which are in the index's margin."""
FULL_PAUSE: Final = 5.0
"""Seconds until the next try to write the index out after the disk was full."""
STEP_PAGES: Final = 8
"""Spare pages of the index's file for each operation of a step: an operation takes one or two, those that two steps
free are not free for them yet, and each of them takes some for the trees' upper pages. A first step that left no page
to the second could not be followed."""


class Applied(NamedTuple):
    """The state up to which the index is."""

    number: int
    """The number of the last plan that is in the index."""
    tail: Tail
    """The end of the log after that plan."""


class Applier:
    """The applier of one open store's log. All is called under the store's lock, if not said otherwise."""

    def __init__(
        self,
        host: Host,
        wal: Log,
        index: Index,
        options: JournalOptions,
        require_owned: Callable[[], None],
    ) -> None:
        """`require_owned` raises AnabranchError where the directory may be another's: before the index is written out,
        and so before a segment is released."""
        self._host, self._log, self._index, self._options = host, wal, index, options
        self._require_owned = require_owned
        self.on_empty: Callable[[], None] = lambda: None
        """Called when a sealed segment has lost its last live message."""
        self.on_compactable: Callable[[], None] = lambda: None
        """Called when another segment is sealed, and once enough has died: it is time to look what is mostly dead."""
        self._applied: Applied
        self._snapshot_at: Callable[[], tuple[int, int]]
        self._checkpoint_in_time = CoalescedJob(self._background_checkpoint)
        self._checkpoint_soon = CoalescedJob(self._background_checkpoint)
        self._full_until = 0.0
        self.needs_snapshot: bool = False
        """The next snapshot is taken even if it frees nothing."""
        self._measured: SegmentTable | None = None
        self._dead_bytes = 0
        self._counted = self._index.rows.counted + self._index.rows.waits

    def start(self, snapshot_at: Callable[[], tuple[int, int]]) -> None:
        """Take over from recovery, which has filled the index up to the log's tail. `snapshot_at` says where the latest
        snapshot is."""
        self._snapshot_at = snapshot_at
        self._applied = Applied(0, self._log.tail)
        self._index.rows.on_damage = self._damaged
        self._write_checkpoint(clean=False)
        self.on_compactable()

    def finish(self) -> None:
        """Write the last checkpoint. All is applied and the log is closed."""
        self._applied = self._applied._replace(tail=self._log.tail)  # there may be a mark behind what was applied
        try:
            self._write_checkpoint(clean=True)
        except StoreFullError as error:
            log.warning("%s; the next open replays the journal", error)

    # Applying

    def apply(self, changes: Sequence[Change], last: Plan) -> None:
        """Apply changes of the plans that follow what is applied, up to this one. Its `own` is the end of the log after
        it (JournalEncoder.deliver). Raises StoreFailedError."""
        index, before, tail = self._index, self._applied.tail, last.own
        index.table = self._log.table
        left, dead, marks = short_lived(changes)
        try:
            if dead and index.rows.put_dead(dead, index.table):
                index.emptied = True
            if marks and index.rows.put_marks(marks, index.table):
                index.emptied = True
            apply_all(left, index)
            if dead:
                index.rows.replaced_by(dead)
        except lmdb.Error as error:
            self._damaged(error)
        index.operations += tail.lsn - before.lsn
        self._applied = Applied(last.number, tail)
        if tail.segment is not before.segment:
            if not before.segment.live:
                index.emptied = True
            index.until_look = 0
        self._look_after()

    def _look_after(self) -> None:
        """Write the index out in time, and have free segments released."""
        index, operations = self._index, self._index.operations
        if operations >= self._options.checkpoint_operations and time.monotonic() >= self._full_until:
            if operations >= 4 * self._options.checkpoint_operations:
                self._checkpoint_late()
            else:
                self._checkpoint_soon.schedule(0)
        elif operations and self._checkpoint_in_time.last.begun:
            self._checkpoint_in_time.schedule(self._options.checkpoint_interval)
        if index.until_look <= 0:
            self.on_compactable()
        if index.emptied:
            self.on_empty()
            index.emptied = False  # last: Ctrl-C may strike before it has been told

    def recover(self) -> int:
        """Undo a change that was interrupted half way: go back to the checkpoint and replay. Returns the number of the
        last plan that is in the index then. Raises StoreFailedError."""
        index = self._index
        try:
            index.abort()
            if index.checkpointed is None:
                raise AssertionError("an index without a checkpoint has been open")
            index.load(self._log.table.all)
            with disk_errors(f"{self._log.name}: the journal cannot be read to bring the index up to it"):
                Replay(index, self._log.table).from_checkpoint(index.checkpointed, self._applied.tail)
            self._host.catalog.recount()
        except lmdb.Error as error:
            self._damaged(error)
        index.until_look = 0  # what was interrupted may not have come to it
        return self._applied.number

    def _fail(self, error: lmdb.Error | OSError) -> None:
        """Stop the store. After damage or a failed sync the index's file must not be believed again: the next open
        rebuilds it."""
        self._log.fail(error)
        if not isinstance(error, lmdb.DiskError):
            with suppress(OSError):
                remove_file(self._index.file.path)

    def _damaged(self, error: lmdb.Error) -> None:
        """Stop, and raise StoreFailedError."""
        self._fail(error)
        raise self._host.failure() from error

    # Checkpoints

    def _background_checkpoint(self) -> None:
        try:
            self.checkpoint()
        except AnabranchError as error:
            log.debug("%s: no checkpoint: %s", self._log.name, error)

    def checkpoint(self) -> None:
        """Write the index out, if there is anything new in it. Any thread, without the lock: what waits for the log's
        disk does so before it takes it."""
        if self._index.operations:
            self._log.sync()
        self._host.asked(lambda: self._write_checkpoint(clean=False) if self._index.operations else None)

    def _checkpoint_late(self) -> None:
        """Write a checkpoint to which the background has not come: the transaction stays bounded, if the disk has
        room."""
        try:
            self._write_checkpoint(clean=False)
        except StoreFullError as error:
            log.warning("%s", error)
            self.recover()

    def _write_checkpoint(
        self, clean: bool, table: SegmentTable | None = None, dropped: frozenset[int] = frozenset()
    ) -> None:
        """Write a checkpoint; `dropped` segments leave the index, and `table` is without them."""
        self._require_owned()
        host, index, (_, tail) = self._host, self._index, self._applied
        amid = host.interrupted
        """Called amid applying, which goes on after it: the engine says when that is over."""
        try:
            host.writing_out = True
            host.counts_stand = not amid  # amid applying the engine does not know yet what is counted
            self._log.sync()
            files = self._checksum_files()
            host.interrupted = True

            def write(files: Files | None) -> None:
                index.drop_segments(dropped)
                index.checkpoint(self._checkpoint_at(tail, clean), (table or self._log.table).all, files)

            try:
                write(files)
            except lmdb.Error as error:
                if not is_for_room(error, index.file.path) or index.checkpointed is None:
                    raise
                log.debug("%s: the index is written out step by step: %s", self._log.name, error)
                host.counts_stand = False
                self._write_in_steps(write)
            host.interrupted = amid
        except (lmdb.Error, OSError) as error:
            host.counts_stand = False
            # The index goes back to its last checkpoint, the journal has all of it. Not so after an OSError, which
            # comes once LMDB has committed.
            if isinstance(error, lmdb.Error) and is_for_room(error, index.file.path):
                self._full_until = time.monotonic() + FULL_PAUSE
                raise StoreFullError(
                    f"{self._log.name}: there is no room to write the index out: {error}; free some space"
                ) from error
            self._fail(error)
            raise StoreFailedError(f"{self._log.name}: the index cannot be written: {error}") from error
        finally:
            host.writing_out = host.counts_stand = False

    def _checksum_files(self) -> Files | None:
        try:
            return self._index.file.open_checksums()
        except OSError as error:
            self._full_until = time.monotonic() + FULL_PAUSE
            raise refused(f"{self._log.name}: the index cannot be written out: {error}", error) from error

    def _checkpoint_at(self, tail: Tail, clean: bool) -> Checkpoint:
        """Return the checkpoint of an index in which all up to `tail` is applied."""
        index = self._index
        return Checkpoint(
            version=VERSION, store_id=self._log.log_id, priorities=index.priorities, lsn=tail.lsn,
            segment=tail.segment.number, nonce=tail.segment.nonce, offset=tail.offset, seq=tail.counter,
            last_segment=self._log.last_number, last_number=index.last_number,
            snapshot=self._snapshot_at(), clean=clean,
        )  # fmt: skip

    def _write_in_steps(self, write_last: Callable[[Files | None], None]) -> None:
        """Write the index out in steps, on a full disk: what was applied since the last checkpoint needs more pages
        than the file has. Apply it again and write it out in pieces as small as it takes, `write_last` the last one:
        what one of them lets go of is free for the next but one (rule J10). Raises lmdb.Error if even a single batch
        needs more."""
        index = self._index
        step = index.file.spare_pages // STEP_PAGES
        while True:
            try:
                self._go_back()
                self._replay_in_steps(step)
                self._host.catalog.recount()
                write_last(self._checksum_files())
                return
            except lmdb.Error as error:
                if not is_for_room(error, index.file.path) or step == 0:
                    raise
                step //= 2

    def _replay_in_steps(self, step: int) -> None:
        index, checkpointed = self._index, self._index.checkpointed
        assert checkpointed is not None

        def after(tail: Tail) -> None:
            if index.operations > step:
                seq = max(tail.counter, checkpointed.seq)
                position = self._checkpoint_at(tail._replace(counter=seq), False)
                index.checkpoint(position, self._log.table.all, self._checksum_files(), is_last=False)

        Replay(index, self._log.table).from_checkpoint(checkpointed, self._applied.tail, after)

    def _go_back(self) -> None:
        """Go back to the last checkpoint."""
        index = self._index
        index.abort()
        index.load(self._log.table.all)

    def compact(self) -> int:
        """Make the index's file as small as what is in it; returns by how many bytes. Any thread, without the lock."""
        self._log.sync()
        return self._host.asked(self._compact)

    def _compact(self) -> int:
        host, index = self._host, self._index
        self._write_checkpoint(clean=False)
        host.writing_out = True
        host.interrupted = True  # until it is over: whoever comes after Ctrl-C goes back to the checkpoint
        try:
            freed = index.compact()
        except (lmdb.Error, OSError, IndexBrokenError) as error:
            log.debug("%s: the index is not compacted: %s", self._log.name, error)
            freed = 0
            try:
                self.recover()
            except OSError as lost:
                self._fail(lost)
                raise host.failure() from lost
        finally:
            host.writing_out = False
        host.interrupted = False
        return freed

    # Reclaiming: without the lock

    @property
    def tail(self) -> Tail:
        """Return how far the index is in the log."""
        return self._applied.tail

    def snapshot(self) -> tuple[list[Segment], bytes]:
        """Return the segments that hold no live message any more, and the snapshot that lets them go (rule J6); nothing
        if the snapshot would be large beside what it frees."""
        host, index = self._host, self._index
        try:
            empty, begun = host.asked(self._begin_snapshot)
            if begun is None:
                return [], b""
            taken = snapshot.take(begun, index, host.sequencer, host.asked)
            if not host.asked(lambda: index.rows.before is begun.before and begun.before.is_whole):
                return [], b""  # Ctrl-C has struck a replay in another thread, or too much has changed
            self.needs_snapshot = False
            return empty, taken.encode()
        finally:
            snapshot.end(index)

    def _begin_snapshot(self) -> tuple[list[Segment], Start | None]:
        index, host, out_of_room = self._index, self._host, self._log.out_of_room
        tail = self._log.tail
        if not out_of_room or tail.lsn != self._applied.tail.lsn:
            tail = self._applied.tail
        else:  # all is applied: the segment before a new one that is still empty may go
            if tail.segment is not self._applied.tail.segment:
                index.until_look = 0
            self._applied = self._applied._replace(tail=tail)
        sealed = self._log.table.sealed(tail.segment.number)
        empty = [s for s in sealed if not s.live]
        kept = [s for s in sealed if s.live]
        rows = len(host.sequencer.window) + index.transactions.count + len(index.subscriptions) + index.rows.counted
        expected = snapshot.size_expected(kept, len(index.states), rows) + snapshot.WAIT_BYTES * index.rows.waits
        worth = 1 if out_of_room else snapshot.WORTH
        pays = empty and expected * worth <= sum(s.capacity for s in empty)
        if not pays and not self.needs_snapshot:
            return [], None  # wait until it frees more; also where nothing is empty
        return empty, snapshot.start(tail, kept, index, host.catalog)

    @property
    def snapshot_bytes(self) -> int:
        """Return at most how many bytes a snapshot takes, about. Who submits to the log asks, without the lock."""
        table, host, index = self._log.table, self._host, self._index
        if table is not self._measured:
            last = table.segments[-1]
            self._dead_bytes, self._measured = snapshot.size_most(table.all, max(last.allocated, FILL_MAX)), table
        rows = len(host.sequencer.window) + index.transactions.count + len(index.subscriptions) + index.rows.counted
        waits = snapshot.WAIT_BYTES * index.rows.waits
        return self._dead_bytes + snapshot.ID_BYTES * (rows + len(host.catalog.by_number)) + waits

    def reserve(self, size: int) -> None:
        """Keep room for what the index will need once so many bytes more are in the log. Who submits to the log
        calls it, without the lock. Raises OSError."""
        index = self._index
        applied = index.checkpointed.seq if index.checkpointed is not None else 0
        sends = self._host.sequencer.last_seq - applied + size // snapshot.RECORD_MIN
        index.file.reserve(sends, len(self._log.table.all), self._dead_bytes)
        self._counted = index.rows.counted + index.rows.waits

    @property
    def may_count(self) -> bool:
        """Return whether the index has room for more rows of messages that were given back, on a full disk too."""
        return self._index.rows.counted + self._index.rows.waits - self._counted < COUNTED_MAX

    def forget(self, numbers: set[int]) -> None:
        """Take released segments out of the index and the table, with a checkpoint (rule J6).

        The table loses them last: until the checkpoint is on disk a restored index is replayed over them.
        """
        self._log.sync()
        self._host.asked(lambda: self._forget(numbers))

    def _forget(self, numbers: set[int]) -> None:
        self._write_checkpoint(False, self._log.table.without(numbers), frozenset(numbers))
        self._log.forget_segments(numbers)
