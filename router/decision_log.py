"""The decision log: which transactions over several stores are committed (rules I3, T2 to T5).

A journal of its own, in decisions/: the same segments, batches and group commit as a store's, without messages and
without an index, since what is still in force is little and is kept in memory. It is made when it is first needed. Its
store id is the router's id, which every transaction's id begins with: prepared by another log is nothing that this one
can speak about.

Records, all of them msgpack but the last: EPOCH, before an opened log is first used; XA_PREPARED, an external
transaction that is held until somebody says its outcome; DECISION; FORGOTTEN, ids one after another. What is in force
is carried on in a SNAPSHOT when segments are released.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from ..adapters.background import shared
from ..adapters.base import TRANSACTION_BYTES
from ..adapters.clock import now_us
from ..adapters.files import FILE_MODE, disk_errors, sweep_unfinished, sync_directory
from ..adapters.journal import format as f
from ..adapters.journal import recovery
from ..adapters.journal.directory import StoreDirectory, first_segment
from ..adapters.journal.files import SegmentFiles
from ..adapters.journal.log import Log
from ..adapters.journal.reader import BatchReader, records_of
from ..adapters.journal.records import encode_records
from ..adapters.journal.snapshot import Snapshot
from ..adapters.journal.ticket import LogOptions, Tail, Ticket, WriteBatch
from ..policies.durability import Sync
from ..policies.errors import AnabranchError, CorruptionError, StoreFailedError
from .xid import Xid

log = logging.getLogger(__name__)

COMMIT: Final = "commit"
ROLLBACK: Final = "rollback"

SEGMENT_BYTES: Final = 1 << 20
WAY_OUT: Final = "put decisions/ back as it was, never an older copy, or move it aside (docs/transactions.md)"

EPOCHS_MAX: Final = 1000
"""So many openings are remembered. What is still prepared from an earlier one waits for a word."""


class Decision(msgspec.Struct, frozen=True, array_like=True):
    """An outcome. A commit that is not by hand is forgotten once it is durable in all participants."""

    transaction: bytes
    commit: bool
    participants: list[bytes]
    """Store ids."""
    xid: Xid | None = None
    by_hand: bool = False
    """Heuristic: an operator's word, kept until it is told to be forgotten."""


def word(decision: Decision) -> str:
    """What a decision says: COMMIT or ROLLBACK."""
    return COMMIT if decision.commit else ROLLBACK


class External(msgspec.Struct, frozen=True, array_like=True):
    """A prepared external transaction, held until its manager says the outcome (rule T4)."""

    transaction: bytes
    participants: list[bytes]
    xid: Xid


_encode = msgspec.msgpack.Encoder().encode
_decode_decision = msgspec.msgpack.Decoder(Decision).decode
_decode_external = msgspec.msgpack.Decoder(External).decode
_decode_epoch = msgspec.msgpack.Decoder(int).decode


class _Batch(WriteBatch):
    """Records that are written together, each with what it says, if that is known."""

    records: Sequence[tuple[int, bytes, object]] = ()


class _Encoder:
    """The log's encoder (ticket.Encoder): tickets hold records."""

    promised = 0

    def __init__(self, deliver: Callable[[_Batch], None]) -> None:
        self.deliver = deliver
        self.snapshot_at = (0, 0)

    def encode(self, tail: Tail, tickets: list[Ticket], watermark: int) -> _Batch:
        records = [record for ticket in tickets for record in ticket.content]
        data, end = b"", tail
        if records or not tickets:
            data, end = encode_records(tail, [(kind, payload) for kind, payload, _ in records], watermark)
        batch = _Batch(tail, end, tickets, data, not tickets or any(ticket.sync for ticket in tickets))
        batch.records = records
        batch.unsynced = bool(tickets) and all(ticket.unsynced for ticket in tickets)
        batch.changes = any(kind == f.SNAPSHOT for kind, _, _ in records)
        return batch

    def written(self, batch: _Batch) -> None:
        self.snapshot_at = (batch.segment.number, batch.offset)

    def stopped(self) -> None:
        pass


class DecisionLog:
    """Threads: all, once open. `decisions` and `externals` change in the order of the log, only after their records
    are as durable as `sync` says; reading them takes no lock."""

    def __init__(self, path: Path, sync: Sync, file_mode: int = FILE_MODE) -> None:
        self._directory = StoreDirectory("decisions", path, None, file_mode, self._lose)
        self._options = LogOptions(SEGMENT_BYTES, sync=sync, file_mode=file_mode)
        self._lock = threading.RLock()  # guards opening, making and closing it, and beginning an epoch
        self._opened = False
        """Between open and close, whether or not there is a log yet. Guarded by `_lock`."""
        self.openings = 0
        """Counts what makes `decisions` and `externals` others than they were."""
        self.damage: BaseException | None = None
        """Why it could not be read."""
        self._reclaiming = threading.Lock()
        self._clear()

    def _clear(self) -> None:
        self._log: Log | None = None
        self.id = b""
        """16 bytes; empty while there is no log."""
        self.epochs: set[int] = set()
        """All that this log has had, one for each opening in which it was used: of a transaction of another it may have
        lost the decision. Microseconds since 1970, so that of two copies of a log, one put back and one that went on,
        neither takes the other's for its own."""
        self.decisions: dict[bytes, Decision] = {}
        self.externals: dict[bytes, External] = {}
        self._ids: tuple[bytes, Iterator[int]] | None = None
        """What the ids of this opening's transactions begin with, and their numbers; None until it is first used."""
        self._reclaim_due = False

    # Opening and closing

    def open(self) -> None:
        """Read it, if there is one. Raises CorruptionError, PlacementError for a directory without an id; `damage` says
        so too then."""
        with self._lock:
            self.damage = StoreFailedError("it is being read")  # half read it would deny what it has decided
            self.openings += 1
            self._clear()
            self._opened = True
            try:
                sweep_unfinished(self._directory.path.parent, self._directory.path.name)
                if self._directory.path.exists():
                    self._open()
            except Exception as error:
                self.damage = error
                raise
            self.damage = None

    def _open(self) -> None:
        sync_directory(self._directory.path.parent)  # who made it may have been killed, or failed, before that (D2)
        self.id = self._directory.lock()
        try:
            the_log = self._new_log()
            self._read(the_log)
        except CorruptionError as error:
            self._directory.unlock()
            step = WAY_OUT if error.step in ("", recovery.RESTORE) else error.step  # a backup would be an older copy
            raise CorruptionError(error.path, error.offset, error.reason, step) from error
        except BaseException:
            self._directory.unlock()
            raise
        self._log = the_log  # last: who has been waiting to decide must not write to one that is half read

    def _read(self, the_log: Log) -> None:
        found = recovery.survey(the_log.files, self.id, None, None)
        recovery.settle(found, the_log.files)
        since = self._load_snapshot(found, the_log.files)
        for link, segment in enumerate(found.chain):
            end = found.end.offset if link == found.end.link else segment.end
            reader = BatchReader(segment.reading(), segment.seed, f.HEADER_BYTES, segment.base_lsn - 1, end)
            for batch in reader:
                for record in records_of(batch):
                    if record.lsn > since:
                        self._note(record.kind, record.payload, str(segment.path), record.offset)
            if reader.offset != end:
                raise CorruptionError(str(segment.path), reader.offset, "decisions behind it do not read back")
        self._encoder.snapshot_at = found.snapshot
        recovery.take_over(found, the_log, 0)
        self._applied = the_log.tail

    def _new_log(self) -> Log:
        files = SegmentFiles(self._directory.journal, SEGMENT_BYTES, self._count_sync, self._directory.file_mode)
        self._encoder = _Encoder(self._deliver)
        return Log("the decision log", self.id, files, self._options, self._encoder)

    def _load_snapshot(self, found: recovery.Survey, files: SegmentFiles) -> int:
        """What was in force when the latest snapshot was taken; up to which LSN that says all."""
        if not found.snapshot[0]:
            return 0
        headers = {header.number: header for header in files.headers()}
        taken = recovery.read_snapshot(files, headers, found.snapshot)
        for kind, payload in taken.carried:
            self._note(kind, payload, str(files.path(found.snapshot[0])), found.snapshot[1])
        return taken.lsn

    def close(self) -> None:
        """Leave all of it durable. Idempotent. Nobody makes or opens it any more, whoever was about to: the directory
        may soon be another's."""
        self._directory.look_after_lock()  # a log that has failed writes nothing more
        with self._lock:
            self.damage = self.damage or StoreFailedError("it is closed")  # first: it may have failed
            self._opened, self._ids = False, None
            the_log, self._log = self._log, None
        if the_log is not None:
            try:
                try:
                    the_log.close()
                finally:
                    with self._reclaiming:  # nothing of ours changes the directory any more
                        the_log.let_go()
            except Exception:
                self._directory.unlock()
                raise
        self._directory.unlock()  # not after Ctrl-C: then close() may be called again

    def _lose(self, error: StoreFailedError) -> None:
        """The lock's file is gone, or is another's: so may the directory be."""
        the_log = self._log
        if the_log is not None:
            the_log.fail(error)

    def _count_sync(self) -> None:
        if self._log is not None:
            self._log.syncs += 1

    # What the coordinator asks

    @property
    def failed(self) -> BaseException | None:
        """Why it has stopped, if it has."""
        the_log = self._log
        return the_log.failed if the_log is not None else None

    @property
    def unusable(self) -> BaseException | None:
        """Why nothing can be asked of it now: it is damaged, or has failed. None if all is well."""
        return self.failed or self.damage  # in this order: `close` drops one that has failed once `damage` is set

    def require_usable(self) -> None:
        """Raise StoreFailedError, which says what to do, if it is damaged or has failed."""
        if self.failed is not None:
            raise StoreFailedError(
                f"transactions over several stores are stopped: the decision log has failed: {self.failed}; see to the "
                "disk and call reopen_decisions()"
            ) from self.failed
        if self.damage is not None:
            raise StoreFailedError(
                f"transactions over several stores are stopped: the decision log cannot be read: {self.damage}. Once "
                "that is put right, or the directory moved aside, call reopen_decisions(); without it what is prepared "
                "waits for your word (in_doubt, resolve)"
            ) from self.damage

    @property
    def syncs(self) -> int:
        """How often it waited for the disk since it was opened."""
        return self._log.syncs if self._log is not None else 0

    def new_transaction(self) -> bytes:
        """An id never given out before (rule I3). Makes the log, or begins the epoch, if need be."""
        ids = self._ids
        if ids is None:
            if self._lock._is_owned():  # type: ignore[attr-defined]
                raise RuntimeError("the decision log was called from a signal handler that interrupted its opening")
            with self._lock:
                ids = self._ids or self._begin_epoch()
        else:
            self.ensure_usable()
        return ids[0] + next(ids[1]).to_bytes(8, "big")

    def _begin_epoch(self) -> tuple[bytes, Iterator[int]]:
        if not self._opened:
            raise StoreFailedError("the decision log was closed meanwhile; nothing was written")
        self.require_usable()  # it may have been damaged when it was read meanwhile
        with disk_errors("the decision log, which transactions over several stores need, cannot be made"):
            if self._log is None:
                if not self._directory.path.exists():  # it may: made by a call that could not go on
                    self._directory.create(first_segment(SEGMENT_BYTES, self._directory.file_mode))
                self._open()
        epoch = max(now_us(), max(self.epochs, default=0) + 1)
        self._write(f.EPOCH, _encode(epoch), sync=True)
        self._ids = ids = (self.id + epoch.to_bytes(8, "big"), itertools.count(1))
        return ids

    def ensure_usable(self) -> None:
        """Raises StoreFailedError, ClosedError."""
        if self._log is not None:
            self._log.ensure_usable()

    def decide(self, decision: Decision, still: Callable[[], bool] = lambda: True) -> Decision:
        """The commit point: once it returns, the outcome stands. That is what it returns: of two that are said of one
        transaction the first in the log. OutcomeUnknownError says that it is not known whether the decision will be
        found again (rule T2), any other error that nothing was written.

        It is written if it is `still` wanted in the log as it is open now: what was prepared when the router was opened
        before has been rolled back since."""
        self._write(f.DECISION, _encode(decision), said=decision, still=still)
        return self.decisions.get(decision.transaction, decision)

    def hold(self, external: External, still: Callable[[], bool]) -> None:
        """An external transaction is prepared in all its participants. `still` and errors are as those of `decide`."""
        self._write(f.XA_PREPARED, _encode(external), said=external, still=still)

    def flush(self) -> None:
        """On return all that was handed over before is written and counts, whoever handed it over."""
        if self._log is not None:
            self._log.flush()

    def forget(self, transactions: list[bytes]) -> None:
        """Their outcomes are durable in all participants. Not synced: what is not forgotten is settled once more."""
        self._write(f.FORGOTTEN, b"".join(transactions), lazy=True)

    def _write(
        self,
        kind: int,
        payload: bytes,
        sync: bool = False,
        said: object = None,
        lazy: bool = False,
        still: Callable[[], bool] = lambda: True,
    ) -> None:
        if not lazy:
            self._directory.require_lock()
        the_log = self._log
        if the_log is None or not still():  # in this order: asked of the log that is written to, or of a later one
            raise StoreFailedError("the decision log is being read again; nothing was written")
        ticket = Ticket([(kind, payload, said)], f.RECORD_HEADER.size + len(payload), sync)
        ticket.unsynced = lazy
        the_log.submit(ticket)
        the_log.wait(ticket)

    # In the order of the log

    def _deliver(self, batch: _Batch) -> None:
        for kind, payload, said in batch.records:
            if isinstance(said, Decision):
                self._decided(said)
            else:
                self._note(kind, payload)
        self._applied = batch.tail
        if not self._reclaim_due and self._log is not None and len(self._log.table.segments) > 1:
            self._reclaim_due = True
            shared().schedule(0, self._reclaim)

    def _decided(self, decision: Decision) -> None:
        self.decisions.setdefault(decision.transaction, decision)
        self.externals.pop(decision.transaction, None)

    def _note(self, kind: int, payload: bytes, path: str = "", offset: int = 0) -> None:
        if kind == f.DECISION:
            self._decided(_decode_decision(payload))
        elif kind == f.XA_PREPARED:
            external = _decode_external(payload)
            self.externals[external.transaction] = external
        elif kind == f.EPOCH:
            self.epochs.add(_decode_epoch(payload))
            if len(self.epochs) > EPOCHS_MAX:
                self.epochs.remove(min(self.epochs))
        elif kind == f.FORGOTTEN:
            for start in range(0, len(payload), TRANSACTION_BYTES):
                transaction = payload[start : start + TRANSACTION_BYTES]
                self.decisions.pop(transaction, None)
                self.externals.pop(transaction, None)
        elif kind != f.SNAPSHOT:
            raise CorruptionError(path, offset, f"record of unknown type {kind}", "use the version that wrote it")

    # Releasing segments

    def _reclaim(self) -> None:
        self._reclaim_due = False
        try:
            self.reclaim()
        except (AnabranchError, OSError) as error:
            log.warning("decision log: no segment released: %s", error)

    def reclaim(self) -> None:
        """Carry what is in force to the tail and release the segments before it (rule T5)."""
        with self._reclaiming:
            the_log = self._log
            if the_log is None:
                return
            applied = self._applied  # before what is in force is read: later records are read again from the segments
            old = [s for s in the_log.table.segments if s.number < applied.segment.number]
            if not old:
                return
            with disk_errors("its directory cannot be opened"):
                names = the_log.files.names()
            self._directory.require_lock()
            carried = [(f.EPOCH, _encode(epoch)) for epoch in sorted(self.epochs)]
            carried += [(f.XA_PREPARED, _encode(external)) for external in list(self.externals.values())]
            carried += [(f.DECISION, _encode(decision)) for decision in list(self.decisions.values())]
            document = Snapshot(applied.lsn, 0, applied.segment.number, 0, [], [], [], [], carried).encode()
            ticket = Ticket([(f.SNAPSHOT, document, None)], f.RECORD_HEADER.size + len(document), sync=True)
            the_log.submit(ticket)
            the_log.wait(ticket)
            the_log.forget_segments({segment.number for segment in old})
            the_log.files.release([(s.number, s.capacity) for s in old], self._options.pool_files, None, names)
