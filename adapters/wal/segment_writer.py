"""Room for what is written next: space allocated ahead, the next segment, the file after that, the reserve (rules J1,
J10, D5)."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

from ...policies.errors import CorruptionError
from ..system.background import shared
from ..system.files import FULL, allocate, zero_fill
from . import format as f
from .appending import Appender
from .files.file import FILL_MAX, FILL_MIN
from .files.segment_files import SegmentFiles
from .files.watermark import Watermark, WatermarkFile
from .segment import Segment, SegmentTable
from .syncing import Syncer
from .ticket import GROWS, OWED, SHRINKS, Encoder, LogOptions, Tail

log: logging.Logger = logging.getLogger(__name__)

GRANT_MIN: Final = 8 * 1024
GRANT_MAX: Final = 256 * 1024
"""Bytes that are written before it is looked again whether the reserve is whole: a part of what the segment holds,
within these."""
PROMISED_MIN: Final = 8 * 1024
"""Bytes; once anything was promised so many are kept on for what is promised next."""


class SegmentWriter:
    """The segment that is being written, and the table of all. One thread at a time makes room, and looks at what there
    is; any may prepare files, forget segments and add copies.

    `_table_lock` guards changes of `table`; `_prepare_lock` guards making files for the pool.
    """

    __slots__ = ("__dict__", "limit", "must_roll", "prepared_ahead", "promised", "tail")  # the rest is found by name

    def __init__(
        self,
        name: str,
        log_id: bytes,
        files: SegmentFiles,
        options: LogOptions,
        encoder: Encoder,
        appender: Appender,
        syncer: Syncer,
        drain: Callable[[], None],
    ) -> None:
        """`drain` has all that is queued written, or synced if that is due. Raises StoreFailedError."""
        self.table: SegmentTable = SegmentTable(())
        self.tail: Tail
        """The place where the next batch goes; there is none before `start`."""
        self.last_number: int = 0
        """The highest segment number ever seen (rule I1)."""
        self.limit: int = 0
        """Up to this offset of the tail's segment anything may be written: there is room, and the reserve is whole."""
        self.promised: int = 0
        """Bytes that the reserve keeps for what was promised."""
        self.must_roll: bool = False
        """Nothing more may be written to the tail's segment: the header of the next one may be seen already."""
        self._name, self._log_id = name, log_id
        self._files, self._options, self._encoder = files, options, encoder
        self._appender, self._syncer, self._drain = appender, syncer, drain
        self._appends_to: Segment | None = None
        self._watermark = WatermarkFile(files.directory, log_id, files.count_sync, files.file_mode)
        self._table_lock = threading.Lock()
        self._prepare_lock = threading.Lock()
        self.prepared_ahead: bool = False
        """The file for the next segment is there, or being made, or cannot be."""
        self._sealed_bytes = 0
        self._stopped = True

    def start(self, table: SegmentTable, tail: Tail, last_number: int) -> None:
        """Take over from recovery."""
        self.table, self.tail, self.last_number = table, tail, last_number
        self._sealed_bytes = self._sealed()
        self._stopped = False
        self._watermark.read()
        if self._lacks_files():
            shared().schedule(0, self._prepare)

    def let_go(self) -> None:
        """Wait until nothing makes files any more, and keep none open."""
        self.stop_preparing()
        with self._prepare_lock:
            pass
        for segment in self.table.all:
            segment.close()

    def stop_preparing(self) -> None:
        """Make no more files ahead of need."""
        self._stopped = True

    def forget(self, numbers: set[int]) -> None:
        """Take released segments out of the table."""
        with self._table_lock:
            gone = [segment for segment in self.table.all if segment.number in numbers]
            self.table = self.table.without(numbers)
            self._sealed_bytes = self._sealed()
        for segment in gone:
            segment.close()  # an open file keeps its space on the disk

    def add_copies(self, copies: Segment) -> None:
        """Add a file of copies to the table. Any thread."""
        with self._table_lock:
            self.table = self.table.with_copies(copies)
            self._sealed_bytes = self._sealed()

    def _sealed(self) -> int:
        return sum(segment.end or 0 for segment in self.table.all)

    # Room

    def make_room(self, size: int, promised: int, leaves: int) -> None:
        """Find allocated room for a batch of `size` bytes, in this segment or the next one, with as many spare files
        left as `leaves` says (ticket.py), one more while anything is `promised`. The reserve is made whole if the disk
        allows. Raises OSError, CorruptionError; what is written is as it was."""
        try:
            self._grow(size, promised)
            return
        except OSError as error:
            if error.errno not in FULL:
                raise
        with self._prepare_lock:
            pass  # a file that was being prepared ahead had the last of the disk: it is in the pool, or gone
        if leaves == GROWS and not self.must_roll:
            self._grow(size, promised)
        else:  # also after a roll that was interrupted, whose segment takes nothing more
            self._use_reserve(size, leaves + (leaves != OWED and promised > 0))

    def _grow(self, size: int, promised: int) -> None:
        """Make room for tickets that make a log hold more."""
        if self.must_roll or self.tail.offset + size > self.tail.segment.capacity:
            self.roll(size)
        self._append_here()
        end = self.tail.offset + size
        self._allocate(self.tail.segment, end)
        self.promised = max(promised, PROMISED_MIN if self.promised else 0)
        grant = max(GRANT_MIN, min(end // 4, GRANT_MAX))
        try:
            self._files.reserve.keep(self._sealed_bytes + end, self._encoder.spare_bytes, self.promised)
            self._encoder.reserve(size + grant)
        except OSError:
            self.limit = self.promised = 0
            raise
        self.limit = min(self.tail.segment.allocated, end + grant)

    def _use_reserve(self, size: int, leaves: int) -> None:
        """Make room from the reserve where the disk is full, for tickets that make room."""
        reserve = self._files.reserve
        self.limit = 0
        if self.must_roll or self.tail.offset + size > self.tail.segment.allocated:
            spare = reserve.find(f.HEADER_BYTES + size)
            if spare is None:
                raise self._full()
            self.roll(size, spare=spare)
        self._append_here()
        if len(reserve.files) < leaves:
            raise self._full()

    def _append_here(self) -> None:
        """Have the appender go on in the tail's segment. Nothing is queued where it is another."""
        segment = self.tail.segment
        if self._appends_to is not segment:
            self._appender.segment((segment.file or segment.open()).fd, self.tail.offset)
            self._appends_to = segment

    def _full(self) -> OSError:
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._files.directory))

    def _allocate(self, segment: Segment, end: int) -> None:
        """Zero-fill ahead of the appends, in chunks that grow (rule D5)."""
        if end <= segment.allocated or segment.file is None:
            return
        if segment.allocated < self.tail.offset:
            reason = f"the file ends before its records do, at {self.tail.offset}: zeros would overwrite some"
            raise CorruptionError(str(segment.path), segment.allocated, reason)
        chunk = min(max(segment.allocated, FILL_MIN), FILL_MAX)
        target = min(segment.capacity, max(end, segment.allocated + chunk))
        try:
            if end - segment.allocated > FILL_MAX:
                target = end
                allocate(segment.file.fd, segment.allocated, end)
            else:
                zero_fill(segment.file.fd, segment.allocated, target)
        except OSError as error:
            target = min(target, os.fstat(segment.file.fd).st_size)  # the disk had room for less than a chunk
            if error.errno not in FULL or target < end:
                raise
        segment.allocated = target

    def sealing_pays(self, needed: int) -> bool:
        """Return whether half of the segment that is being written, or more, can be released by going on in a spare
        file. Acks might begin such a file, too. So many bytes of the segment are needed still."""
        reserve, dead = self._files.reserve, self.tail.offset - f.HEADER_BYTES - needed
        files = reserve.files
        return len(files) > SHRINKS + (self.promised > 0) and dead >= max(needed, files[0][1] // 2)

    def seal(self) -> None:
        """Go on in a spare file. Raises OSError."""
        self.roll(0, spare=self._files.reserve.files[0])

    # The next segment

    def begin(self, base_lsn: int) -> None:
        """Go on, after a crash, in a new segment with LSNs never seen before (rules I1, J5). Raises OSError."""
        try:
            self.roll(0, base_lsn)
        except OSError as error:
            spare = self._files.reserve.find(f.HEADER_BYTES)
            if error.errno not in FULL or self.must_roll or spare is None:
                raise
            self.roll(0, base_lsn, spare)

    def roll(self, size: int, base_lsn: int | None = None, spare: tuple[Path, int] | None = None) -> None:
        """Go on in a new segment, or in a spare file, whose header says where the old one ended (rule J1).

        From just before the new header may be seen, the old segment takes no more: the header voids what would follow.
        """
        tail, standard = self.tail, self._options.segment_bytes
        if base_lsn is None:
            base_lsn = tail.lsn + 1
        self._drain()
        snapshot_at = self._encoder.snapshot_at
        self.last_number += 1
        header = f.SegmentHeader(
            log_id=self._log_id, number=self.last_number, nonce=int.from_bytes(os.urandom(8), "little"),
            base_lsn=base_lsn, durable_lsn=self._syncer.durable_lsn, prev_number=tail.segment.number,
            prev_end=tail.offset, prev_lsn=tail.lsn, counter=tail.counter, snapshot_number=snapshot_at[0],
            snapshot_offset=snapshot_at[1], capacity=spare[1] if spare else max(standard, f.HEADER_BYTES + size),
        )  # fmt: skip
        file, allocated = self._files.publish(header, self._seal, size, spare[0] if spare else None)
        segment = Segment(header, self._files.path(header.number), file)
        segment.allocated = allocated
        old = tail.segment
        if old.file is not None and self._syncer.durable_lsn < tail.lsn:
            self._syncer.seal(old.file)
        old.file = None  # whoever reads it opens it again, and is counted
        old.end, old.last_lsn = tail.offset, tail.lsn
        old.changed = True
        # An interrupted roll may have left a void segment of the same base.
        with self._table_lock:
            kept = (s for s in self.table.segments if s is old or s.base_lsn != header.base_lsn)
            self.table = SegmentTable((*kept, segment), self.table.copies)
        self.tail = Tail(segment, f.HEADER_BYTES, base_lsn - 1, tail.counter)
        self.vouch()  # before anything is written to it: who is interrupted here begins another
        self.limit, self._sealed_bytes = 0, self._sealed_bytes + old.end
        self.must_roll, self.prepared_ahead = False, spare is not None

    def vouch(self) -> None:
        """Say in a second place that the segment being written is there, and what is durable (rule J7)."""
        segment = self.tail.segment
        self._watermark.write(Watermark(segment.number, self._syncer.durable_lsn, segment.nonce))

    def _seal(self) -> None:
        self.must_roll = True

    # The file after this one

    def look_ahead(self) -> None:
        """Have a file ready for the next segment. Called once half of this one is written."""
        self.prepared_ahead = True
        if (self._options.pool_files and not self._files.pool) or self._lacks_files():
            shared().schedule(0, self._prepare)

    def _lacks_files(self) -> bool:
        return len(self.table.segments) + len(self._files.pool) < self._options.min_files

    def _prepare(self) -> None:
        try:
            with self._prepare_lock:
                while not self._stopped and (not self._files.pool or self._lacks_files()):
                    self._files.prepare()
        except OSError as error:  # one try a segment: on a full disk it would take the last space, again and again
            log.warning("%s: no segment could be prepared ahead: %s", self._name, error)
