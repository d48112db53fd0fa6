"""Going on with a damaged journal: all that can be read of it counts, and what is lost is told.

    loss-<time>.json       in the store's directory: what was lost, when, and where the damaged files are now
    damaged-<time>/        these

The report is written, durably, before the first file is replaced, under a name that ends in `.unfinished`; it gets its
own name once the index has forgotten what is lost. A crash in between is made up for by the next opening. Nothing is
written to the journal for that: to who reads it again, a LOST record says as much (wal/mending.py).
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import lmdb
import msgspec

from ....policies.errors import CorruptionError
from ....policies.text import count_of
from ...core.messages import MADE, shown_id
from ...core.operations.changes import Ack
from ...core.record.encoding import HEAD
from ...core.record.place import OWN, SEQ
from ...core.state.states import Catalog
from ...system.files import FILE_MODE, replace_file
from ...wal import format as w
from ...wal.files.segment_files import SEGMENT_SUFFIX, read_header
from ...wal.files.watermark import Watermark
from ...wal.reader import Record
from ...wal.recovery.mending import MISSING, Copies, Hints, Mender
from ...wal.recovery.stretch import Loss
from ...wal.recovery.survey import Needed
from .. import snapshot
from ..encoding import (
    ACK,
    ACK_PAYLOAD,
    ACK_RANGE,
    COMPACTED,
    COMPACTED_PAYLOAD,
    DECLARE,
    PREPARE,
    RANGE_PAYLOAD,
    SEND,
    SEND_START,
    SNAPSHOT,
)
from ..index.checksums import IndexBrokenError
from ..index.index import Index, is_of_index

log: logging.Logger = logging.getLogger(__name__)

UNFINISHED: Final = ".unfinished"
_KINDS: Final = {
    SEND: "message",
    ACK: "ack",
    ACK_RANGE: "acks",
    DECLARE: "destination",
    PREPARE: "transaction",
    SNAPSHOT: "snapshot",
}


class LostMessage(msgspec.Struct, frozen=True):
    """A message that the index knows, and the journal has no more."""

    destination: str
    seq: int
    message_id: str | None = None


class LostRecords(msgspec.Struct):
    """A stretch of a file that does not read back."""

    file: str
    offset: int
    size: int
    records: int
    """How many were in it; 0: a header alone, which was made anew, and nothing is lost."""
    first_record: int
    last_record: int
    reason: str
    reads_as: str | None = None
    """The look of its damaged bytes, where one record was in it: nothing vouches for that."""
    destination: int | str | None = None
    """The destination of that record, likewise."""
    seq: int | None = None
    message_id: str | None = None

    def is_newer(self, record: int) -> bool:
        """Return whether the loss may have been anything, since nothing but the journal knew of records from this one
        on. In a file of copies there are only messages, and the index knows of each that counts."""
        return bool(self.records) and self.last_record >= record and (record == 1 or self.last_record < w.COPIES)


class LossReport(msgspec.Struct):
    """The losses of a store."""

    store: str
    at: str
    """When, in UTC."""
    damaged_files: str | None
    """The directory in which they are."""
    lost: list[LostRecords]
    messages: list[LostMessage] = []
    """Messages that are lost for sure."""
    transactions: list[str] = []
    """Prepared ones that are lost with what they would have done here."""
    since_record: int = 1
    """The first record that the index did not know: what is lost of the records from it on may also have been acks,
    whose messages are delivered again."""
    version: int = 1

    @property
    def is_empty(self) -> bool:
        """Return whether nothing was lost but what could be made anew."""
        return (
            not self.messages
            and not self.transactions
            and not any(lost.is_newer(self.since_record) or lost.reason == MISSING for lost in self.lost)
        )


def find_losses(
    name: str, directory: Path, journal: Path, index_path: Path, store_id: bytes
) -> tuple[Mender, LossReport]:
    """Read all of the journal of a store that nobody has open, and tell what is lost. Nothing is written but what LMDB
    does to a file that it opens. Raises CorruptionError for what is not damage, OSError."""
    hints = _hints(index_path, store_id)
    mender = Mender(journal, store_id, hints)
    lost = [_of_loss(loss, directory) for loss in mender.look()]
    at = time.strftime("%Y-%m-%dT%H%M%SZ", time.gmtime())
    return mender, LossReport(name, at, None, lost, since_record=hints.boundary[2] + 1)


def made_for_priorities(index_path: Path, store_id: bytes) -> bool:
    """Return the store's option `priorities` when its index was made; False where that cannot be read."""
    index = Index(index_path, store_id, Catalog(), 0, None)
    try:
        return index.open().priorities
    except (IndexBrokenError, lmdb.Error, OSError):
        return False
    finally:
        index.close()


def store_id_of(journal: Path) -> bytes | None:
    """Return the id of the store whose segments these are, as most of their headers say; None where none of them
    reads."""
    found: Counter[bytes] = Counter()
    for path in journal.glob(f"*{SEGMENT_SUFFIX}"):
        with suppress(CorruptionError):
            found[read_header(path).log_id] += 1
    return found.most_common(1)[0][0] if found else None


def salvage(
    name: str,
    directory: Path,
    journal: Path,
    index_path: Path,
    store_id: bytes,
    file_mode: int = FILE_MODE,
    keep: bool = True,
) -> LossReport | None:
    """Mend the journal of a store that nobody has open; None where there is nothing to mend. `finish` follows at its
    next opening. `keep` the damaged files. Raises CorruptionError where that cannot be done, OSError."""  # fmt: skip
    mender, report = find_losses(name, directory, journal, index_path, store_id)
    if not report.lost:
        return None
    aside = directory / f"damaged-{report.at}" if keep else None
    report.damaged_files = aside.name if aside is not None else None
    write_report(directory / f"loss-{report.at}.json{UNFINISHED}", report, file_mode)
    mender.write(aside)
    return report


def finish(
    directory: Path, index: Index, is_rebuilt: bool, lost_transactions: Sequence[bytes], file_mode: int = FILE_MODE
) -> LossReport | None:
    """Let the index forget what the journal has no more, and complete the report of that; None if there is none. Called
    when a store is opened and its index is up to the journal, before anybody sees what is in it."""
    path = _unfinished(directory)
    if path is None:
        return None
    report = msgspec.json.decode(path.read_bytes(), type=LossReport)
    rows = lost_in(index, report.lost)
    report.messages += [message for _, _, message in rows]
    report.transactions += [transaction.hex() for transaction in lost_transactions]
    if is_rebuilt:
        report.since_record = 1
    for lost in report.lost:
        if isinstance(lost.destination, int) and lost.destination in index.states:
            lost.destination = str(index.states[lost.destination].destination)
    write_report(path, report, file_mode)  # once the index has forgotten them nobody can name them
    index.ack([Ack(index.states[number], message.seq, 0) for number, _, message in rows])
    return report


def lost_in(index: Index, lost: Sequence[LostRecords]) -> list[tuple[int, int, LostMessage]]:
    """Return the messages in an index whose records are lost, each behind its destination's number and its LSN."""
    ranges = sorted((one.first_record, one.last_record) for one in lost if one.records)
    rows = [
        (number, place[OWN][0], place[SEQ]) for number, place, _ in index.rows.all() if _is_in(ranges, place[OWN][0])
    ]
    wanted = {seq for _, _, seq in rows}
    ids = {seq: shown_id(message_id) for (_, message_id), seq in index.duplicates() if seq in wanted}
    ids |= {seq: key.decode() for _, key, seq in index.rows.all_keys() if seq in wanted}
    return [
        (number, lsn, LostMessage(str(index.states[number].destination), seq, ids.get(seq)))
        for number, lsn, seq in rows
    ]


def _unfinished(directory: Path) -> Path | None:
    return min(directory.glob(f"loss-*{UNFINISHED}"), default=None)


def is_unfinished(directory: Path) -> bool:
    """Return whether the store has been mended, and was not opened since."""
    return _unfinished(directory) is not None


def complete(directory: Path, report: LossReport, file_mode: int = FILE_MODE) -> Path:
    """Give the report its name. The losses that it tells are forgotten durably."""
    path = directory / f"loss-{report.at}.json"
    write_report(path, report, file_mode)
    path.with_name(path.name + UNFINISHED).unlink(missing_ok=True)
    return path


def reports(directory: Path) -> Iterator[tuple[Path, LossReport]]:
    """Yield the reports in a store's directory, oldest first."""
    for path in sorted(directory.glob("loss-*.json")):
        with suppress(msgspec.MsgspecError):
            yield path, msgspec.json.decode(path.read_bytes(), type=LossReport)


def summary(report: LossReport) -> str:
    """Return the report in a line."""
    parts = [count_of(len(report.messages), "message")] if report.messages else []
    if report.transactions:
        parts.append(count_of(len(report.transactions), "prepared transaction"))
    others = sum(
        lost.last_record - max(lost.first_record, report.since_record) + 1
        for lost in report.lost
        if lost.is_newer(report.since_record)
    )
    if others:
        parts.append(f"{count_of(others, 'record')} that may have been messages, or acks of messages that come again")
    if report.since_record == 1 and any(lost.reads_as == _KINDS[SNAPSHOT] for lost in report.lost):
        parts.append(
            "a snapshot, so that messages acked long ago may come again, and durable subscriptions and names of "
            "destinations may be missing"
        )
    if any(lost.reason == MISSING for lost in report.lost):
        parts.append("a file, of whose end nothing is known")
    return f"lost: {', '.join(parts)}" if parts else "nothing is lost but what could be made anew"


def write_report(path: Path, report: LossReport, file_mode: int) -> None:
    """Write the report. Durable on return. Raises OSError."""
    replace_file(path, msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n", file_mode)


def _hints(path: Path, store_id: bytes) -> Hints:
    """Return what the index says, if it can be used."""
    index = Index(path, store_id, Catalog(), 0, None)
    try:
        checkpoint = index.open()
        known = index.log_checkpoint(checkpoint)
        bases = {number: base for number, (base, *_) in index.segment_rows().items()}
    except (IndexBrokenError, lmdb.Error, OSError) as error:
        log.debug("the index %s says nothing: %s", path, error)
        return Hints(needed_by=snapshot.needed_by, copies_in=_copies_in)
    except Exception as error:
        if not is_of_index(error):
            raise
        return Hints(needed_by=snapshot.needed_by, copies_in=_copies_in)
    finally:
        index.close()
    mark = Watermark(checkpoint.segment, checkpoint.lsn, checkpoint.nonce)
    boundary = (checkpoint.segment, checkpoint.offset, checkpoint.lsn)
    needed = Needed(checkpoint.segment, known.kept, checkpoint.lsn)
    return Hints(needed, snapshot.needed_by, _copies_in, mark, boundary, bases)


def _copies_in(record: Record) -> Copies | None:
    return Copies(*COMPACTED_PAYLOAD.unpack(record.payload)) if record.kind == COMPACTED else None


def _is_in(ranges: Sequence[tuple[int, int]], lsn: int) -> bool:
    at = bisect_right(ranges, (lsn, 1 << 64)) - 1
    return at >= 0 and ranges[at][0] <= lsn <= ranges[at][1]


def _of_loss(loss: Loss, directory: Path) -> LostRecords:
    records = loss.last_lsn - loss.first_lsn + 1
    with suppress(ValueError):
        loss_path = str(Path(loss.path).relative_to(directory))
        lost = LostRecords(
            loss_path, loss.offset, loss.size, records, loss.first_lsn if records else 0,
            loss.last_lsn if records else 0, loss.reason,
        )  # fmt: skip
        if records == 1 and len(loss.remnant) >= w.RECORD_HEADER.size:
            _guess(lost, loss.remnant)
        return lost
    raise AssertionError(f"{loss.path} is not in {directory}")


def _guess(lost: LostRecords, remnant: bytes) -> None:
    """Guess what a damaged record was from what it looks like."""
    kind = w.RECORD_HEADER.unpack_from(remnant)[3]
    payload = remnant[w.RECORD_HEADER.size :]
    lost.reads_as = _KINDS.get(kind, f"record of kind {kind}")
    fields: tuple[Any, ...] = ()
    if kind == SEND and len(payload) >= SEND_START.size + HEAD.size:
        lost.destination, lost.seq = SEND_START.unpack_from(payload)
        id_bytes = HEAD.unpack_from(payload, SEND_START.size)[2]
        name = payload[SEND_START.size + HEAD.size :][:id_bytes]
        if name[:1] != MADE.encode() and len(name) == id_bytes > 0:
            lost.message_id = name.decode(errors="replace")
    elif kind == ACK and len(payload) == ACK_PAYLOAD.size:
        fields = ACK_PAYLOAD.unpack(payload)
        lost.destination, lost.seq = fields[0], fields[2]
    elif kind == ACK_RANGE and len(payload) == RANGE_PAYLOAD.size:
        lost.destination = RANGE_PAYLOAD.unpack(payload)[0]
