"""The writing end of the usage log: once a second the operations that stores have told go into a log of its own.

U7  No store's thread ever waits for it, nor hears of its errors: whatever fails here ends the recording, not a call.
U8  One thread at a time empties the buffer and writes, under `_lock`; which guards opening and closing too.
U9  `close` waits for the disk for CLOSE_SECONDS. Operations that a hanging disk has not taken by then are written by
    the thread that waits for it, if it comes back. That thread alone frees the directory: nobody else can open it
    before.
"""

from __future__ import annotations

import itertools
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ...adapters import wal
from ...adapters.core import Store
from ...adapters.core.engine.usage import ROW, WHOLE, Buffer, Recorder
from ...adapters.system import locking
from ...adapters.system.background import CoalescedJob, shared
from ...adapters.system.clock import now_us
from ...adapters.system.conditions import Event
from ...adapters.system.directory import StoreDirectory, is_empty
from ...adapters.system.files import FILE_MODE, disk_errors, read_file, sweep_unfinished, sync_directory, write_file
from ...adapters.wal.segment import Segment
from ...policies.config.durability import Sync
from ...policies.errors import AnabranchError, ConfigError, StoreFailedError, StoreLockedError
from ...policies.names.pattern import Pattern
from .blocks import BLOCK, VERSION_FILE, encode_block
from .configuration import remember

if TYPE_CHECKING:
    from ...policies.config import Config, UsageOptions

log: logging.Logger = logging.getLogger(__name__)

SHARES: Final = 16
"""Parts of `max_bytes`, one of which is a segment's size, at most SEGMENT_BYTES_MAX."""
SPARE_SHARES: Final = 7
"""Parts that the segments with rows leave to those made ahead, the reserve, and the one that is about to go."""
SEGMENT_BYTES_MAX: Final = 16 << 20
SYNC_SECONDS: Final = 5.0
BLOCK_BYTES_MAX: Final = 1 << 20
"""Bytes of rows, before they are deflated; less in a log of small segments."""
VERSION: Final = b"1\n"
BUFFER_BYTES: Final = 32 << 20
"""Bytes of rows that wait to be written, for all stores together: some 900,000 operations. Operations that do not fit
are lost."""
CLOSE_SECONDS: Final = 10.0
"""Seconds that a router that closes waits for the disk at most."""
NAMES_REPEATED: Final = 10_000
"""The number of names that stand in each block that one flush writes, at most; more stand only in the first."""


@dataclass(frozen=True, slots=True)
class UsageStats:
    """Statistics of a usage log."""

    recorded: int
    """The number of operations that were written since it was started."""
    lost: int
    """The number of operations that were not, about: the disk did not keep up, or the log had failed."""
    failed: str | None
    """The reason why it has stopped by itself, or could not be started; None where neither is so."""


class _Directory(StoreDirectory):
    """The directory usage/: its id, its lock, and the log in journal/."""

    advice = "Move that directory away: the usage log is made anew"


def _empty_log(path: Path, log_id: bytes, segment_bytes: int, file_mode: int) -> bytes:
    wal.create_log(path / "journal", log_id, segment_bytes, file_mode)
    write_file(path / VERSION_FILE, VERSION, file_mode)
    return log_id


class UsageLog:
    """One recording, from `open` to `close`. Threads: all. A forked child may do nothing with it."""

    def __init__(
        self,
        path: Path,
        options: UsageOptions,
        stores: Callable[[], Iterable[Store]],
        configuration: Callable[[], Config],
        file_mode: int = FILE_MODE,
    ) -> None:
        """Make a recording that is not open. `path`: its directory. `stores` returns the open ones. `configuration`
        returns the one in force."""
        self.path = path
        self.options = options
        self._stores, self._configuration = stores, configuration
        self._remembered: Config | None = None
        """The configuration that is written in its directory."""
        self._directory = _Directory("usage", path, file_mode, self._lost_directory)
        self._segment_bytes = min(options.max_bytes // SHARES, SEGMENT_BYTES_MAX)
        self._block_bytes = min(BLOCK_BYTES_MAX, self._segment_bytes // 4) // ROW.size * ROW.size
        patterns = [Pattern.parse(text) for text in options.destinations]
        threshold = max(1, round(options.sample * WHOLE))
        self._buffer = Buffer(BUFFER_BYTES, threshold, lambda name: any(one.matches(name) for one in patterns))
        self._lock = threading.RLock()
        self._job = CoalescedJob(self._flush_in_background)
        self._log: wal.Log | None = None
        self._reclaimer: wal.Reclaimer | None = None
        self._generation = locking.generation
        self._session = self._recorded = self._unwritten = self._rows_bytes_max = 0
        self._incarnations = itertools.count(1)
        self.active: bool = False
        """True while stores are told to record."""
        self.failed: str | None = None
        """The reason why nothing is recorded any more, or never was; None where that has not failed."""

    # Opening and closing

    def open(self) -> None:
        """Make the directory if need be, go on behind what is there, and let the stores record. Raises what a store's
        opening raises; then nothing is recorded, and `stats` says why."""
        try:
            self._open()
        except BaseException as error:
            self.failed = _reason(error)
            raise
        self._session = now_us()
        self.active = True
        for store in self._stores():
            self.attach(store)
        self._job.schedule(self.options.flush_interval)

    def _open(self) -> None:
        with self._lock, disk_errors(f"the usage log in {self.path} cannot be opened"):
            if self.path.parent.exists():
                sweep_unfinished(self.path.parent, self.path.name)
            if not self.path.exists() or is_empty(self.path):
                file_mode = self._directory.file_mode
                self._directory.create(partial(_empty_log, segment_bytes=self._segment_bytes, file_mode=file_mode))
            with suppress(PermissionError):  # of a directory that another user made
                for path in self.path.parents[:2]:
                    sync_directory(path)  # who made ours may have been killed before that (D2)
            self._require_version()  # before anything is written: it may be a store's
            try:
                log_id = self._directory.lock()
            except StoreLockedError as error:
                raise StoreLockedError(
                    f"{error}. A log that was closed while its disk did not answer is free once the disk does"
                ) from None
            try:
                self._remember()
                self._start(log_id)
            except BaseException:
                self._directory.unlock()
                raise

    def _require_version(self) -> None:
        path = self.path / VERSION_FILE
        found = read_file(path) if path.exists() else b""
        if found != VERSION:
            what = f"a usage log of another version ({found[:20]!r})" if found else "something else than a usage log"
            raise ConfigError([f"{self.path} holds {what}, and was left as it is; choose another directory"])

    def _start(self, log_id: bytes) -> None:
        files = wal.SegmentFiles(self.path / "journal", self._segment_bytes, file_mode=self._directory.file_mode)
        encoder = wal.RecordEncoder(lambda batch: None, snapshot_bytes=lambda: 16)
        options = wal.LogOptions(self._segment_bytes, sync=Sync.PERIODIC, sync_interval=SYNC_SECONDS, pool_files=1)
        opened = wal.Log("the usage log", log_id, files, options, encoder)
        found = wal.survey(files, log_id, None, _needed_by)
        wal.settle(found, files)
        encoder.snapshot_at = found.snapshot_at
        wal.take_over(found, opened)
        self._log = opened
        self._reclaimer = wal.Reclaimer(opened, self._oldest, _snapshot_record, opened.forget_segments)

    def _remember(self) -> None:
        """Write the configuration in force, if it has changed since the last call."""
        config = self._configuration()
        if config is not self._remembered:
            taken = remember(self.path, config, now_us(), self._directory.file_mode)
            self._rows_bytes_max = self.options.max_bytes - SPARE_SHARES * self._segment_bytes - taken
            self._remembered = config

    def attach(self, store: Store) -> None:
        """Let a store that is open record, if it does not yet."""
        if self.active and store.usage is None:
            token = store.store_id.hex()[:12]
            if store.volatile:  # its seqs begin again with each opening
                token = f"{token}.{self._session:x}.{next(self._incarnations):x}"
            store.usage = Recorder(self._buffer, store.name, token, store.volatile)
            if not self.active:
                store.usage = None

    def _detach(self) -> None:
        self.active = False  # first: who attaches one meanwhile takes that back
        for store in self._stores():
            store.usage = None

    def close(self) -> None:
        """Write what waits, and let go of the directory; within CLOSE_SECONDS, or else later and elsewhere (rule U9).
        Idempotent. Errors of the disk are logged, and not raised."""
        if self._generation != locking.generation:
            self.active = False  # all of it belongs to the parent
            return
        self._detach()
        config = self._configuration()
        self._stores, self._configuration = tuple, lambda: config  # who waits for a disk keeps no store alive
        if sys.is_finalizing():  # no other thread runs any more
            self._close()
            return
        closed, last = Event(), self._last_file()

        def close() -> None:
            try:
                self._close()
            finally:
                closed.set()

        shared().lead(close)
        if not closed.wait(CLOSE_SECONDS):
            log.warning(
                "the usage log in %s is not closed: for %g s the disk has not answered at %s. The directory stays "
                "locked until it does; waiting records are written first, unless the process ends before",
                self.path, CLOSE_SECONDS, last,
            )  # fmt: skip

    def _close(self) -> None:
        with self._lock:
            self.flush()
            self._let_go()

    def _last_file(self) -> Path:
        """Return the file that it writes, or its directory."""
        opened = self._log
        segments = () if opened is None else opened.table.segments
        return segments[-1].path if segments else self.path

    def _let_go(self) -> None:
        opened, self._log = self._log, None
        reclaimer, self._reclaimer = self._reclaimer, None
        try:
            if opened is not None and reclaimer is not None:
                try:
                    opened.close()
                finally:
                    reclaimer.finish()
                    opened.let_go()
        except (AnabranchError, OSError) as error:
            log.warning("the usage log in %s was not closed in order: %s", self.path, error)
        self._directory.unlock()

    def _lost_directory(self, error: StoreFailedError) -> None:
        if (opened := self._log) is not None:
            opened.fail(error)
        self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Record no more (rule U7)."""
        if self.failed is None:
            self.failed = _reason(error)
            log.warning(
                "the usage log in %s has stopped: %s. Messages go on and are not recorded; start_usage_log() begins "
                "again", self.path, error,
            )  # fmt: skip
        self._detach()

    # Writing

    def _flush_in_background(self) -> None:
        if self._generation == locking.generation and self.active:
            self.flush()
            if self.active:
                self._job.schedule(self.options.flush_interval)

    def flush(self) -> None:
        """Write all that took effect before, or fail the log. Raises nothing."""
        with self._lock:
            opened = self._log
            if opened is None or self._generation != locking.generation:
                return
            if self.active:
                for store in self._stores():  # also one that was opened just when the recording was started
                    self.attach(store)
            rows, declared = self._buffer.empty()
            try:
                if self.failed is None:
                    self._remember()
                if self.failed is not None:
                    self._unwritten += len(rows) // ROW.size
                elif rows:
                    self._write(opened, rows, declared)
                if self._buffer.rows.broken:
                    self._fail(RuntimeError("an operation could not be recorded, as was logged"))
            except (AnabranchError, OSError) as error:
                self._fail(error)
                self._let_go()

    def _write(self, opened: wal.Log, rows: bytes, declared: list[tuple[int, Any]]) -> None:
        self._unwritten += len(rows) // ROW.size
        wall_us = (time.time_ns() - time.monotonic_ns()) // 1000
        for start in range(0, len(rows), self._block_bytes):
            part = rows[start : start + self._block_bytes]
            names = declared if start == 0 or len(declared) <= NAMES_REPEATED else []
            payload = encode_block(self._session, wall_us, self._buffer.threshold, self.lost(), names, part)
            ticket = wal.record_ticket([(BLOCK, payload, None)])
            opened.submit(ticket)
            opened.wait(ticket)
            self._recorded += len(part) // ROW.size
            self._unwritten -= len(part) // ROW.size
            if self._reclaimer is not None and self._surplus(opened):
                self._reclaimer.run()

    def _oldest(self) -> tuple[list[Segment], bytes]:
        """Return the segments that are too many, and the number of the first that stays."""
        opened = self._log
        surplus = self._surplus(opened) if opened is not None else 0
        if opened is None or not surplus:
            return [], b""
        segments = opened.table.segments
        return list(segments[:surplus]), segments[surplus].number.to_bytes(8, "little")

    def _surplus(self, opened: wal.Log) -> int:
        """Return how many segments, the oldest, are too many. Segments may be of other sizes than now."""
        segments = opened.table.segments
        size, kept = 0, 0
        for segment in reversed(segments):
            size += segment.capacity
            if kept and size > self._rows_bytes_max:
                break
            kept += 1
        return len(segments) - kept

    # Asking

    def lost(self) -> int:
        """Return how many operations were not recorded since it was started, about."""
        return self._buffer.rows.lost

    def stats(self) -> UsageStats:
        """Return the statistics. Operations that wait to be written are in neither count."""
        unwritten = 0 if self.failed is None else self._unwritten
        return UsageStats(self._recorded, self.lost() + unwritten, self.failed)


def _reason(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _snapshot_record(payload: bytes) -> object:
    return [(wal.SNAPSHOT, payload, None)]


def _needed_by(payload: bytes) -> wal.Needed:
    return wal.Needed(int.from_bytes(payload, "little"), {})
