"""Opening a journal store: what the log says, the index brought up to it, then from reading to writing (rules J3 to J7,
X3). Whatever is wrong with the index alone is mended here; what is wrong with the log is told."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import lmdb

from ....policies.errors import CorruptionError
from ...core.store_types import Progress
from ...wal import format as w
from ...wal.files.copies import base_of
from ...wal.files.segment_files import COPIES_SUFFIX, SegmentFiles
from ...wal.log import Log
from ...wal.reader import BatchReader, read_record, records_of
from ...wal.recovery.opening import settle as settle_log
from ...wal.recovery.survey import CheckpointMismatchError, Survey, adopt_copies, open_copies, survey
from ...wal.segment import Segment, SegmentTable
from ...wal.ticket import Tail
from .. import snapshot
from ..encoding import PREPARE, Own
from ..index.checksums import IndexBrokenError
from ..index.index import Checkpoint, Index
from .replay import Replay

log: logging.Logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Opened:
    """The parts that there are once the index is up to the log."""

    survey: Survey
    seq: int
    """The highest that was ever given out."""
    ids: dict[tuple[int, bytes], int]
    """The duplicate window, oldest first."""
    prepared: list[tuple[bytes, bytes]]
    """Transaction and payload of each branch that waits for its outcome."""
    committed: list[bytes]
    rebuilt: bool
    """The index was made anew."""
    lost: list[bytes]
    """Prepared transactions whose record was lost when the journal was mended (salvage.py)."""


def bring_up(
    name: str,
    store_id: bytes,
    files: SegmentFiles,
    index: Index,
    progress: Progress | None,
    settle: Callable[[Survey, SegmentFiles], None] = settle_log,
    is_salvaging: bool = False,
) -> Opened:
    """Fill the index. Records above the last watermark are on disk before anybody sees them: `settle` sees to that, and
    is another where the journal is read alone, and the index is a copy. Raises CorruptionError, OSError, and whatever a
    damaged index makes of it (index.is_of_index); then the index is closed."""
    try:
        checkpoint, surveyed = _survey(name, store_id, files, index, is_salvaging)
        settle(surveyed, files)
        replay = Replay(index, surveyed.table(), partial(_open_copies, surveyed, files, store_id))
        replay.seq = surveyed.highest_counter
        replay.is_mended = is_salvaging
        if checkpoint is None:
            replay.everything(surveyed, progress)
        else:
            replay.seq = max(replay.seq, checkpoint.seq)
            index.load(surveyed.table().all)
            last = surveyed.chain[surveyed.end.link]
            replay.from_checkpoint(checkpoint, Tail(last, surveyed.end.offset, surveyed.end.lsn, 0))
        ids: dict[tuple[int, bytes], int] = {}
        for key, seq in index.duplicates():
            ids.pop(key, None)  # requeued: it is among the latest
            ids[key] = seq
        table = surveyed.table()
        prepared, lost = [], []
        for transaction, own in index.transactions.prepared():
            payload = payload_of(transaction, own, table)
            if payload is not None:
                prepared.append((transaction, payload))
            else:
                lost.append(transaction)
                index.transactions.settle(transaction, committed=False)
        return Opened(surveyed, replay.seq, ids, prepared, index.committed(), checkpoint is None, lost)
    except CorruptionError as error:
        _name_held(error, index)
        index.close()
        raise
    except BaseException:
        index.close()
        raise


def _survey(
    name: str, store_id: bytes, files: SegmentFiles, index: Index, is_salvaging: bool
) -> tuple[Checkpoint | None, Survey]:
    """Return the index if it can be used, else an empty one (None), and what the journal says."""
    try:
        checkpoint = index.open()
        try:
            return checkpoint, survey(files, store_id, index.log_checkpoint(checkpoint), snapshot.needed_by)
        except CorruptionError as error:
            if not index.is_undone:
                raise
            raise IndexBrokenError(f"its last checkpoint is undone, and {error}") from error
    except (IndexBrokenError, CheckpointMismatchError) as error:
        index.close()
        surveyed = survey(files, store_id, None, snapshot.needed_by)
        if surveyed.end.offset > w.HEADER_BYTES or len(surveyed.chain) > 1:
            log.warning("store %s: the index is rebuilt from the journal: %s", name, error)
        if is_salvaging and surveyed.snapshot is None:
            adopt_copies(surveyed, files, store_id)
        index.create()
        return None, surveyed


def _open_copies(
    surveyed: Survey, files: SegmentFiles, store_id: bytes, number: int, nonce: int, end: int, count: int
) -> Segment:
    """Open a file of copies that a record behind what the survey had looked at speaks of. Raises CorruptionError."""
    copies = open_copies(files, number, end, base_of(number) + count - 1, store_id, nonce)
    surveyed.add_copies(copies)
    return copies


def payload_of(transaction: bytes, own: Own, table: SegmentTable) -> bytes | None:
    """Return what is behind the transaction's id in the PREPARE record at a place; None where that is lost. Raises
    CorruptionError."""
    lsn, offset, length = own
    segment = table.find(lsn)
    if segment is None:
        raise AssertionError(f"the record {lsn} of transaction {transaction.hex()} lies in no segment")
    payload = read_record(segment, PREPARE, lsn, offset, length)
    if payload is None:
        if _is_lost(segment, lsn):
            return None
        reason = f"the prepared transaction {transaction.hex()} does not read back"
        raise CorruptionError(str(segment.path), offset, reason, w.RESTORE)
    return payload[len(transaction) :]


def _is_lost(segment: Segment, lsn: int) -> bool:
    """Return whether the record in this place is lost."""
    for batch in BatchReader(segment, w.HEADER_BYTES, segment.base_lsn - 1, segment.end):
        if batch.last_lsn >= lsn:
            return any(record.lsn == lsn and record.kind == w.LOST for record in records_of(batch))
    return False


def _name_held(error: CorruptionError, index: Index) -> None:
    """Let the error of a segment, or of all of them, say what lies there, if there is an index that can tell."""
    if index.is_open and index.checkpointed is not None:
        number = Path(error.path).stem
        with suppress(lmdb.Error):  # what is damaged counts more than what lay there
            copies = w.COPIES if error.path.endswith(COPIES_SUFFIX) else 0
        error._name_held(*index.held(copies + int(number) if number.isdigit() else None))


def log_recovered(name: str, opened: Opened, index: Index, wal: Log, started: float) -> None:
    """Say so, if the store was not closed in order; `started`: when (monotonic)."""
    if not opened.survey.clean and opened.survey.highest_lsn:  # else nothing was ever written
        log.info(
            "store %s: recovered %d messages in %d segments in %.2f s%s", name,
            sum(state.count for state in index.states.values()), len(wal.table.segments),
            time.monotonic() - started, ", index rebuilt" if opened.rebuilt else "",
        )  # fmt: skip
