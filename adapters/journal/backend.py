"""The journal as a backend of the core: a log for all that happens, an index in LMDB for what is there now.

log        what has been written, in order                      (../wal)
writing    changes become its bytes                             (writing.py, encoding.py)
applying   what is written goes into the index                  (applying.py)
index      which messages there are and where                   (index.py, rows.py)
bodies     messages read back from the log's files              (bodies.py)
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

from ...policies.config import JournalOptions
from ...policies.config.durability import OnCorruption
from ...policies.errors import CorruptionError, StoreFailedError
from ..core.backend import Backend, BackendStats, Found, Host, Settings, Writer
from ..core.backend.contract import Lose
from ..core.messages import shown_id
from ..core.operations.changes import Change
from ..core.operations.plan import Plan
from ..core.record.place import SEQ, Place
from ..core.state.leases import Channel, DestinationState, SubscriptionState
from ..core.state.states import Catalog
from ..core.store_types import Progress
from ..system.descriptors import STORE
from ..system.files import MAKE_ROOM, disk_errors
from ..wal import format as w
from ..wal.copying import LogCopier
from ..wal.files.archive import Archive
from ..wal.files.segment_files import SegmentFiles
from ..wal.log import Log
from ..wal.reclaim import Reclaimer
from ..wal.recovery.opening import take_over
from ..wal.ticket import LogOptions
from .applying import Applier
from .bodies import Bodies
from .changes import WriteSnapshot
from .check import violations
from .compaction import Compactor
from .directory import StoreDirectory, first_segment
from .explanation import StoreExplanation, explain_open
from .index.file import remove_file
from .index.index import Index, is_of_index
from .index.row_format import expiry_key
from .index.rows import FIRST_KEY
from .recovery import salvage
from .recovery.lost_messages import LostMessages
from .recovery.opening import bring_up, log_recovered
from .writing import JournalEncoder, JournalWriter

log: logging.Logger = logging.getLogger(__name__)


class JournalBackend(Backend):
    """The backend of one journal store."""

    kind = "journal"
    volatile = False
    shared = False
    descriptors = STORE
    tells_places = True
    takes_many = True

    def __init__(
        self, name: str, directory: Path, options: JournalOptions, index_directory: Path | None = None
    ) -> None:
        self.name = name
        self.options = options
        room = options.segment_size - w.HEADER_BYTES
        self.settings: Settings = Settings.of(
            options, max_bytes=options.max_bytes, ticket_bytes_max=min(options.batch_bytes_max, room), promise_max=room
        )
        self._directory = StoreDirectory(name, directory, index_directory, options.file_mode, self._lose)
        if options.on_corruption is OnCorruption.SALVAGE:
            self.lose: Lose | None = self._lose_message
        self._lost: LostMessages
        self._report: salvage.LossReport | None = None
        """The report of what is lost, until it is complete."""
        self._is_made = False
        """There are the parts that follow."""
        self._host: Host
        self._encoder: JournalEncoder
        self._writer: JournalWriter
        self._log: Log
        self._index: Index
        self._applier: Applier
        self._bodies: Bodies
        self._reclaimer: Reclaimer
        self._compactor: Compactor

    @classmethod
    def create(cls, name: str, directory: Path, options: JournalOptions) -> bytes:
        made = StoreDirectory(name, directory, None, options.file_mode)
        return made.create(first_segment(options.segment_size, options.file_mode))

    @classmethod
    def identify(cls, directory: Path) -> bytes | None:
        return StoreDirectory("", directory, None).identify()

    @classmethod
    def is_contained(cls, options: JournalOptions) -> bool:
        """Return whether the index lies in the store's directory, too."""
        return True

    # Opening and closing

    def writer(self, host: Host) -> Writer:
        """Return the writer, the log once it is open."""
        self._host = host
        self._encoder = JournalEncoder(host)
        self._writer = JournalWriter(host)
        return self._writer

    def open(self, host: Host, progress: Progress | None) -> tuple[bytes, Found]:
        store_id = self._directory.lock()
        try:
            return store_id, self._open(store_id, host.catalog, progress)
        except CorruptionError as error:
            if self.options.on_corruption is OnCorruption.REFUSE or not self._salvage(store_id, error):
                raise
            return store_id, self._open(store_id, host.catalog, progress)
        except Exception as error:
            if not is_of_index(error):
                raise
            log.warning("store %s: its index is damaged, %r; it is rebuilt from the journal", self.name, error)
            remove_file(self._directory.index)
            return store_id, self._open(store_id, host.catalog, progress)

    def _open(self, store_id: bytes, catalog: Catalog, progress: Progress | None) -> Found:
        started = time.monotonic()
        self._make(store_id)
        index = self._index
        opened = bring_up(
            self.name,
            store_id,
            self._log.files,
            index,
            progress,
            is_salvaging=salvage.is_unfinished(self._directory.path),
        )
        try:
            self._report = salvage.finish(
                self._directory.path, index, opened.rebuilt, opened.lost, self._directory.file_mode
            )
            index.complete_removals()
            self._encoder.start(self._log, opened.survey.snapshot_at, self._applier)
            take_over(opened.survey, self._log, opened.seq)
            self._applier.start(lambda: self._encoder.snapshot_at)
        except BaseException:
            self._log.let_go()
            index.close()
            raise
        self._fill(catalog)
        self._writer.start(self._log, self._finish)
        log_recovered(self.name, opened, index, self._log, started)
        return Found(opened.seq, opened.ids.items(), opened.prepared, opened.committed, self._opened)

    def _salvage(self, store_id: bytes, error: CorruptionError) -> bool:
        """Mend what is damaged; return whether there was anything to mend. Raises CorruptionError, OSError."""
        directory = self._directory
        said = str(error).removesuffix(f"; {error.step}")  # what is done about it is this
        log.warning("store %s: all that can be read of it is salvaged (`on_corruption`): %s", self.name, said)
        report = salvage.salvage(
            self.name, directory.path, directory.journal, directory.index, store_id, directory.file_mode
        )
        return report is not None

    def _make(self, store_id: bytes) -> None:
        """Make the parts of a store that is open."""
        options, host, file_mode = self.options, self._host, self._directory.file_mode
        files = SegmentFiles(self._directory.journal, options.segment_size, lambda: self._log.count_sync(), file_mode)
        log_options = LogOptions(
            options.segment_size, options.sync, options.sync_interval, options.pool_files,
            "a send can be retried with the same message_id", MAKE_ROOM, options.min_files,
        )  # fmt: skip
        self._log = Log(f"store {self.name!r}", store_id, files, log_options, self._encoder)
        self._index = Index(
            self._directory.index, store_id, host.catalog, options.duplicate_window, options.priorities, file_mode
        )
        self._applier = applier = Applier(host, self._log, self._index, options, self._directory.require_lock)
        self._bodies = Bodies(host, self._log, self)
        self._lost = LostMessages(self.name, self._directory.path, self._directory.file_mode)
        archive = None
        if options.archive_directory is not None:  # stores may share it
            place = options.archive_directory / f"{self._directory.path.name}-{store_id.hex()[:8]}"
            archive = Archive(place, options.archive_max_bytes, options.archive_max_age, file_mode)
            archive.trim()
        self._reclaimer = Reclaimer(
            self._log, applier.snapshot, lambda payload: [WriteSnapshot(payload)], applier.forget, archive
        )
        applier.on_empty = self._reclaimer.notice
        self._compactor = Compactor(host, self._log, self._index, options, lambda: applier.tail, self._reclaimer.run)
        applier.on_compactable = self._compactor.notice
        self._is_made = True

    def _finish(self) -> None:
        """Wait, once the log is closed, for what may still make or remove files."""
        self._compactor.finish()
        self._reclaimer.finish()

    def _fill(self, catalog: Catalog) -> None:
        """Fill the catalog from the index."""
        for state in self._index.states.values():
            if state.own.named:
                state.declared = True
                catalog.add(state)
                for subscriber in state.own.subscriptions.values():
                    state.join(subscriber)
                    catalog.subscriptions[subscriber.number] = subscriber
        catalog.last_number = self._index.last_number
        catalog.recount()

    def close(self, clean: bool) -> None:
        try:
            if clean and self._is_made and self._index.is_open:
                self._applier.finish()
        except Exception:
            self._let_go()
            raise
        self._let_go()  # not after Ctrl-C: then it is called again

    def _let_go(self) -> None:
        if self._is_made:
            self._log.let_go()
            self._index.close()
        self._directory.unlock()

    def require_owned(self) -> None:
        self._directory.require_lock()

    def _lose(self, error: StoreFailedError) -> None:
        """Stop, since the lock's file is gone, or is another's: so may the directory be."""
        self._log.fail(error)

    # Writing

    def apply(self, changes: Sequence[Change], last: Plan) -> None:
        self._applier.apply(changes, last)

    def recover(self) -> int:
        return self._applier.recover()

    # Reading

    def next_order(self, state: DestinationState, subscription: SubscriptionState | None, order: int) -> int | None:
        return self._index.rows.next_order(state, subscription, order)

    def rows(
        self, state: DestinationState, subscription: SubscriptionState | None, order: int | None, after: int, limit: int
    ) -> Sequence[Place]:
        return self._index.rows.rows(state, subscription, order, after, limit)

    def row(
        self, state: DestinationState, subscription: SubscriptionState | None, seq: int, order: int | None = None
    ) -> Place | None:
        return self._index.rows.row(state, subscription, seq)

    def keyed(self, state: DestinationState, names: Sequence[bytes]) -> Mapping[bytes, Place]:
        return self._index.rows.keyed(state, names)

    def keys(self, state: DestinationState, start: bytes, limit: int) -> Sequence[tuple[bytes, Place]]:
        return self._index.rows.keys(state, start, limit)

    def unacked(self, state: DestinationState, seq: int) -> Sequence[Channel]:
        return self._index.rows.unacked(state, seq)

    def expired(self, since: int, now: int) -> Iterator[tuple[DestinationState, Place]]:
        start: bytes | None = expiry_key(since)
        while start is not None:  # the index's file may be another one from page to page
            found, start = self._index.rows.expired(start, now)
            yield from found

    def limited(self, least: int) -> Iterator[tuple[Channel, Place]]:
        start: bytes | None = FIRST_KEY
        while start is not None:
            found, start = self._index.rows.limited(start, least)
            yield from found

    def next_due(self) -> int:
        return self._index.rows.next_due()

    def due(self, now: int, limit: int) -> Sequence[tuple[DestinationState, int, Place]]:
        return self._index.rows.due(now, limit)

    def until(self, state: DestinationState, subscription: SubscriptionState | None, seq: int) -> int:
        return self._index.rows.until(state, subscription, seq)

    def bodies(self, state: DestinationState, places: Sequence[Place]) -> Iterator[bytes | None]:
        if len(places) == 1:
            return iter((self._bodies.one(state, places[0]),))
        return chain.from_iterable(self._bodies.page(state, places))

    def _lose_message(
        self, state: DestinationState, place: Place, error: CorruptionError, message_id: str | None
    ) -> None:
        what = f"message {place[SEQ]} of {state.destination} is damaged, and that cannot be written down"
        with disk_errors(f"store {self.name!r}: {what}"):
            message_id = message_id or self._id_of(state.number, place[SEQ])
            self._lost.add(str(state.destination), place, message_id, error)

    def _id_of(self, number: int, seq: int) -> str | None:
        """Return a message's id, if it is in the duplicate window."""
        key = self._host.asked(
            lambda: next((key for key, one in self._index.duplicates() if one == seq and key[0] == number), None)
        )
        return shown_id(key[1]) if key is not None else None

    # Upkeep

    def sync(self) -> None:
        self._log.sync()

    def checkpoint(self) -> None:
        self._applier.checkpoint()

    def _opened(self) -> None:
        """Complete a salvage, and get spare files back. On a full disk each opening after a kill takes a spare file.
        Files that earlier openings took come back first, so that a process may be killed whenever it has done
        something, time and again."""
        if self._report is not None:
            self._applier.needs_snapshot = True  # it says what lost records said that the index still knew
            self._reclaimer.run()
            self._applier.checkpoint()
            path = salvage.complete(self._directory.path, self._report, self._directory.file_mode)
            log.warning("store %s: %s: %s", self.name, salvage.summary(self._report), path)
            self._report = None
        if self._log.files.reserve.is_short:
            self._reclaimer.run()

    def reclaim(self, copying: bool = False) -> int:
        if not copying:
            return self._reclaimer.run()
        freed = self._reclaimer.run()
        while self._compactor.run(1):
            freed += self._reclaimer.run()
        return freed + self._reclaimer.meanwhile(self._applier.compact)

    def stats(self) -> BackendStats:
        table, tail, files = self._log.table, self._log.tail, self._log.files
        segments = table.all
        used = [(s.end or tail.offset) - w.HEADER_BYTES for s in segments]
        # Where no message has died all is live, what belongs to no message too: a new store has nothing to reclaim.
        live = sum(
            size if s.dead is None and (s.live or s is tail.segment) else s.live_bytes
            for s, size in zip(segments, used, strict=True)
        )
        return BackendStats(
            syncs=self._log.syncs,
            sync_seconds=self._log.sync_seconds,
            sync_durations=self._log.sync_durations,
            journal_bytes=sum(max(s.allocated, s.end or 0) for s in segments),
            index_bytes=self._index.file.size,
            capacity_bytes=sum(s.capacity for s in segments),
            pool_bytes=files.pool_bytes,
            segments={
                "active": 1,
                "retained": len(table.segments) - 1,
                "copies": len(table.copies),
                "pooled": len(files.pool),
            },
            compactions=self._compactor.compactions,
            live_percent=100.0 * live / sum(used) if sum(used) else 100.0,
            live_bytes=live,
        )

    def explained(self, now_ms: int) -> StoreExplanation:
        """Return why each segment is kept. Called under the store's lock, with nothing pending."""
        return explain_open(self._directory, self._index, self._log, now_ms, self.options.archive_directory)

    def copier(self) -> LogCopier:
        return LogCopier(self._log, self._reclaimer, self._directory.file_mode)

    def check(self) -> Iterator[str]:
        tail = self._log.written()
        return violations(self._index, self._log.table, tail)
