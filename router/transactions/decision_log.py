"""The decision log: which transactions over several stores are committed (rules I3, T2 to T5).

A log of its own (adapters/wal), in decisions/, read whole when it is opened, since what is still in force is little and
is kept in memory. The log is made when it is first needed. Its id is the router's id, which every transaction's id
begins with: this one knows nothing about transactions of another log.

Records, all of them msgpack but the last: EPOCH, before an opened log is first used; XA_PREPARED, an external
transaction that is held until somebody says its outcome; DECISION; FORGOTTEN, ids one after another. Records in force
are carried on in a SNAPSHOT when segments are released.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from ...adapters import wal
from ...adapters.core.store_types import TRANSACTION_BYTES
from ...adapters.system.clock import now_us
from ...adapters.system.directory import StoreDirectory
from ...adapters.system.files import FILE_MODE, disk_errors, sweep_unfinished, sync_directory
from ...adapters.wal import format as w
from ...adapters.wal.segment import Segment
from ...policies.config.durability import Sync
from ...policies.errors import ClosedError, CorruptionError, StoreFailedError
from .xid import Xid

EPOCH: Final = 16
XA_PREPARED: Final = 17
DECISION: Final = 18
FORGOTTEN: Final = 19
"""Kinds of records, beside wal's SNAPSHOT."""

SEGMENT_BYTES: Final = 1 << 20
READ_AGAIN: Final = "the decision log is being read again; nothing was written"
WAY_OUT: Final = "put decisions/ back as it was, never an older copy, or move it away (docs/transactions.md)"

CARRIED_BYTES: Final = 512
EPOCH_BYTES: Final = 16
"""Sizes of a record that is in force, in a snapshot."""
EPOCHS_MAX: Final = 1000
"""The number of openings that are remembered. A transaction still prepared from an earlier one waits for an operator's
resolution."""


class Decision(msgspec.Struct, frozen=True, array_like=True):
    """A decided outcome. A commit that is not by hand is forgotten once it is durable in all participants."""

    transaction: bytes
    commit: bool
    participants: list[bytes]
    """Store ids."""
    xid: Xid | None = None
    by_hand: bool = False
    """Heuristic: an operator's resolution, kept until it is told to be forgotten."""


class External(msgspec.Struct, frozen=True, array_like=True):
    """A prepared external transaction, held until its manager says the outcome (rule T4)."""

    transaction: bytes
    participants: list[bytes]
    xid: Xid


class _Snapshot(msgspec.Struct, frozen=True, array_like=True):
    """The records that were in force when earlier segments were released."""

    lsn: int
    """The snapshot reflects all up to this one."""
    first_needed: int
    """The segment that was being written: it and all after it are needed whole."""
    carried: list[tuple[int, bytes]]
    """Kind and payload of each record that was in force."""


class _Directory(StoreDirectory):
    """The directory decisions/: its id, its lock, and the log in journal/."""

    advice = "Only its store.id is lost: restore that (the segments' headers hold the same id)"


def _empty_log(path: Path, log_id: bytes, file_mode: int) -> bytes:
    wal.create_log(path / "journal", log_id, SEGMENT_BYTES, file_mode)
    return log_id


_encode = msgspec.msgpack.Encoder().encode
_decode_decision = msgspec.msgpack.Decoder(Decision).decode
_decode_external = msgspec.msgpack.Decoder(External).decode
_decode_epoch = msgspec.msgpack.Decoder(int).decode
_decode_snapshot = msgspec.msgpack.Decoder(_Snapshot).decode


class DecisionLog:
    """The log of decisions. Threads: all, once open. `decisions` and `externals` change in the order of the log, only
    after their records are as durable as `sync` says; reading them takes no lock."""

    def __init__(self, path: Path, sync: Sync, file_mode: int = FILE_MODE, is_mended: bool = False) -> None:
        """Make the log's object. `is_mended`: lost records are passed over. The log is then read, and must decide
        nothing (salvaged_logs.py)."""
        self._is_mended = is_mended
        self._directory = _Directory("decisions", path, file_mode, self._lose)
        self._options = wal.LogOptions(SEGMENT_BYTES, sync=sync)
        self._lock = threading.RLock()  # guards opening, making and closing it, and beginning an epoch
        self._opened = False
        """Between open and close, whether or not there is a log yet. Guarded by `_lock`."""
        self.openings: int = 0
        """Counts what makes `decisions` and `externals` others than they were."""
        self.damage: BaseException | None = None
        """Why it could not be read."""
        self._clear()

    def _clear(self) -> None:
        self._log: wal.Log | None = None
        self._reclaimer: wal.Reclaimer | None = None
        self.id: bytes = b""
        """16 bytes; empty while there is no log."""
        self.epochs: set[int] = set()
        """All epochs of this log, one for each opening in which it was used: the decision of a transaction of another
        epoch may be lost. Microseconds since 1970, so that of two copies of a log, one put back and one that went on,
        neither takes the other's for its own."""
        self.decisions: dict[bytes, Decision] = {}
        self.externals: dict[bytes, External] = {}
        self._ids: tuple[bytes, Iterator[int]] | None = None
        """The beginning of the ids of this opening's transactions, and their numbers; None until it is first used."""

    # Opening and closing

    def open(self) -> None:
        """Read the log, if there is one. Raises CorruptionError, PlacementError for a directory without an id; `damage`
        holds the error too then."""
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
        try:
            self.id = self._directory.lock()
            opened = self._new_log()
            self._read(*opened)
        except CorruptionError as error:
            self._directory.unlock()
            step = WAY_OUT if error.step in ("", w.RESTORE) else error.step  # a backup would be an older copy
            raise CorruptionError(error.path, error.offset, error.reason, step) from error
        except BaseException:
            self._directory.unlock()
            raise
        log = opened[0]
        self._reclaimer = wal.Reclaimer(log, self._snapshot, _snapshot_record, log.forget_segments)
        self._log = log  # last: who has been waiting to decide must not write to one that is half read

    def _new_log(self) -> tuple[wal.Log, wal.RecordEncoder]:
        journal = self._directory.path / "journal"
        files = wal.SegmentFiles(journal, self._options.segment_bytes, self._count_sync, self._directory.file_mode)
        encoder = wal.RecordEncoder(self._deliver, snapshot_bytes=self._snapshot_bytes)
        return wal.Log("the decision log", self.id, files, self._options, encoder), encoder

    def _read(self, log: wal.Log, encoder: wal.RecordEncoder) -> None:
        found = wal.survey(log.files, self.id, None, needed_by)
        wal.settle(found, log.files)
        since = 0
        if found.snapshot is not None:
            snapshot = _decode_snapshot(found.snapshot)
            since = snapshot.lsn
            for kind, payload in snapshot.carried:
                self._read_note(kind, payload, str(log.files.path(found.snapshot_at[0])), found.snapshot_at[1])
        for record in wal.records(found):
            if record.lsn > since:
                self._read_note(record.kind, record.payload, str(record.segment.path), record.offset)
        encoder.snapshot_at = found.snapshot_at
        wal.take_over(found, log)
        self._applied = log.tail

    def close(self) -> None:
        """Leave all of the log durable. Idempotent. Nobody makes or opens it any more, whoever was about to: the
        directory may soon be another's."""
        self._directory.look_after_lock()  # a log that has failed writes nothing more
        with self._lock:
            self.damage = self.damage or StoreFailedError("it is closed")  # first: it may have failed
            self._opened, self._ids = False, None
            log, self._log = self._log, None
            reclaimer, self._reclaimer = self._reclaimer, None
        if log is not None and reclaimer is not None:
            try:
                try:
                    log.close()
                finally:
                    reclaimer.finish()  # nothing of ours changes the directory any more
                    log.let_go()
            except Exception:
                self._directory.unlock()
                raise
        self._directory.unlock()  # not after Ctrl-C: then close() may be called again

    def _lose(self, error: StoreFailedError) -> None:
        """Fail the log: the lock's file is gone, or is another's, so the directory may be too."""
        if (log := self._log) is not None:
            log.fail(error)

    def _count_sync(self) -> None:
        if (log := self._log) is not None:
            log.count_sync()

    # The calls of the coordinator

    @property
    def failed(self) -> BaseException | None:
        """The error that has stopped the log, if one has."""
        log = self._log
        return log.failed if log is not None else None

    @property
    def unusable(self) -> BaseException | None:
        """The error for which nothing can be asked of the log now: it is damaged, or has failed. None if all is
        well."""
        return self.failed or self.damage  # in this order: `close` drops one that has failed once `damage` is set

    def require_usable(self) -> None:
        """Raise StoreFailedError, which says what to do, if the log is damaged or has failed."""
        if self.failed is not None:
            raise StoreFailedError(
                f"transactions over several stores are stopped: the decision log has failed: {self.failed}; see to the "
                "disk and call reopen_decisions()"
            ) from self.failed
        if self.damage is not None:
            raise StoreFailedError(
                f"transactions over several stores are stopped: the decision log cannot be read: {self.damage}. Once "
                "that is put right, or the directory moved away, call reopen_decisions(); without the log all that "
                "is prepared waits for you to resolve it (in_doubt, resolve)"
            ) from self.damage

    @property
    def syncs(self) -> int:
        """How often the log has waited for the disk since it was opened."""
        return self._log.syncs if self._log is not None else 0

    def new_transaction(self) -> bytes:
        """Return an id never given out before (rule I3). Makes the log, or begins the epoch, if need be."""
        ids = self._ids
        if ids is None:
            if self._lock._is_owned():  # type: ignore[attr-defined]
                raise RuntimeError("the decision log was called from a signal handler that interrupted its opening")
            with self._lock:
                ids = self._ids or self._begin_epoch()
        elif self._log is None or self._log.failed is not None:
            self.ensure_usable()
        return ids[0] + next(ids[1]).to_bytes(8, "big")

    def _begin_epoch(self) -> tuple[bytes, Iterator[int]]:
        if not self._opened:
            raise StoreFailedError("the decision log was closed meanwhile; nothing was written")
        self.require_usable()  # it may have been damaged when it was read meanwhile
        with disk_errors("the decision log, which transactions over several stores need, cannot be made"):
            if self._log is None:
                if not self._directory.path.exists():  # it may: made by a call that could not go on
                    self._directory.create(partial(_empty_log, file_mode=self._directory.file_mode))
                self._open()
        epoch = max(now_us(), max(self.epochs, default=0) + 1)
        self._write(EPOCH, _encode(epoch), sync=True)
        self._ids = ids = (self.id + epoch.to_bytes(8, "big"), itertools.count(1))
        return ids

    def ensure_usable(self) -> None:
        """Raise StoreFailedError if the log cannot be written."""
        if (log := self._log) is not None:
            try:
                log.ensure_usable()
            except ClosedError as error:
                raise StoreFailedError(READ_AGAIN) from error

    def current(self, look_at_lock: bool = True) -> wal.Log:
        """Return the log as it is open now, for `decide` and `hold`. Between the two a caller may look whether its
        record is wanted: transactions prepared when the router was opened before have been rolled back since. Raises
        StoreFailedError."""
        if look_at_lock:
            self._directory.require_lock()
        if (log := self._log) is None:
            raise StoreFailedError(READ_AGAIN)
        return log

    def decide(self, decision: Decision, log: wal.Log | None = None) -> Decision:
        """Record a decision, the commit point: once this returns, the outcome stands. Returns the decision that counts:
        if two are said of one transaction, the first in the log. OutcomeUnknownError says that the decision may or may
        not be found again (rule T2), any other error that nothing was written. It is written to that `log` and no later
        one, or to the current one."""
        self._write(DECISION, _encode(decision), decision, log=log)
        return self.decisions.get(decision.transaction, decision)

    def hold(self, external: External, log: wal.Log | None = None, sync: bool = False) -> None:
        """Record that an external transaction is prepared in all its participants. `log` and errors are as those of
        `decide`. `sync`: durable on return, whatever the policy."""
        self._write(XA_PREPARED, _encode(external), sync=sync, log=log)

    def copier(self) -> wal.LogCopier | None:
        """Return what copies the log while it is used; None while there is none. Raises StoreFailedError."""
        self.require_usable()
        log, reclaimer = self._log, self._reclaimer
        return wal.LogCopier(log, reclaimer, self._directory.file_mode) if log and reclaimer else None

    def flush(self) -> None:
        """Wait until all that was handed over before is written and counts, whoever handed it over."""
        if self._log is not None:
            self._log.flush()

    def forget(self, transactions: list[bytes]) -> None:
        """Forget decisions whose outcomes are durable in all participants. Not synced: a decision that comes back after
        a crash is carried out once more."""
        self._write(FORGOTTEN, b"".join(transactions), unsynced=True)

    def sync(self) -> None:
        """Make sure that forgotten decisions stay so. Raises StoreFailedError."""
        log = self._log
        if log is not None:
            log.sync()

    def _write(
        self,
        kind: int,
        payload: bytes,
        decision: Decision | None = None,
        sync: bool = False,
        unsynced: bool = False,
        log: wal.Log | None = None,
    ) -> None:
        log = log or self.current(look_at_lock=not unsynced)
        # A decision for which a prepared transaction waits is not refused by a full disk.
        waited_for = decision is not None and (decision.by_hand or decision.transaction in self.externals)
        ticket = wal.record_ticket([(kind, payload, decision)], sync, shrinks=waited_for or kind == FORGOTTEN)
        ticket.unsynced = unsynced
        try:
            log.submit(ticket)
        except ClosedError as error:  # since we looked
            raise StoreFailedError(READ_AGAIN) from error
        log.wait(ticket)

    # In the order of the log

    def _deliver(self, batch: wal.RecordBatch) -> None:
        for kind, payload, decision in batch.records:
            if decision is not None:
                self._decided(decision)
            else:
                self._note(kind, payload)
        self._applied = batch.tail
        reclaimer = self._reclaimer
        if reclaimer is not None and self._log is not None and len(self._log.table.segments) > 1:
            reclaimer.notice()

    def _decided(self, decision: Decision) -> None:
        self.decisions.setdefault(decision.transaction, decision)
        self.externals.pop(decision.transaction, None)

    def _read_note(self, kind: int, payload: bytes, path: str, offset: int) -> None:
        """Note a record that is read, as `_note`. Raises CorruptionError for bytes that do not parse, though their
        checksum is right."""
        try:
            self._note(kind, payload, path, offset)
        except ValueError as error:
            raise CorruptionError(path, offset, f"record of kind {kind} does not parse: {error}", WAY_OUT) from error

    def _note(self, kind: int, payload: bytes, path: str = "", offset: int = 0) -> None:
        if kind == DECISION:
            self._decided(_decode_decision(payload))
        elif kind == XA_PREPARED:
            external = _decode_external(payload)
            self.externals[external.transaction] = external
        elif kind == EPOCH:
            self.epochs.add(_decode_epoch(payload))
            if len(self.epochs) > EPOCHS_MAX:
                self.epochs.remove(min(self.epochs))
        elif kind == FORGOTTEN:
            for start in range(0, len(payload), TRANSACTION_BYTES):
                transaction = payload[start : start + TRANSACTION_BYTES]
                self.decisions.pop(transaction, None)
                self.externals.pop(transaction, None)
        elif kind != w.SNAPSHOT and not (kind == w.LOST and self._is_mended):
            raise CorruptionError(path, offset, f"record of unknown type {kind}", "use the version that wrote it")

    # Releasing segments

    def _snapshot(self) -> tuple[list[Segment], bytes]:
        """Return all segments but the last, and the records in force."""
        log = self._log
        if log is None:
            return [], b""
        tail, applied = log.tail, self._applied  # before what is in force: later records are read from the segments
        if tail.lsn == applied.lsn:
            applied = tail  # it may be in a new segment
        old = [segment for segment in log.table.segments if segment.number < applied.segment.number]
        if old:
            self._directory.require_lock()
        carried = [(EPOCH, _encode(epoch)) for epoch in sorted(self.epochs)]
        carried += [(XA_PREPARED, _encode(external)) for external in list(self.externals.values())]
        carried += [(DECISION, _encode(decision)) for decision in list(self.decisions.values())]
        return old, _encode(_Snapshot(applied.lsn, applied.segment.number, carried))

    def _snapshot_bytes(self) -> int:
        """Return the size that a snapshot takes at most, about."""
        return CARRIED_BYTES * (len(self.decisions) + len(self.externals)) + EPOCH_BYTES * len(self.epochs)


def _snapshot_record(payload: bytes) -> object:
    """Return the record of a ticket that writes a snapshot."""
    return [(w.SNAPSHOT, payload, None)]


def needed_by(payload: bytes) -> wal.Needed:
    """Return the segments that a snapshot says must be there. Raises ValueError for bytes that are no snapshot."""
    return wal.Needed(_decode_snapshot(payload).first_needed, {})
