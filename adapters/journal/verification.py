"""Every byte of a journal store that has a checksum, compared with it, while nobody has the store open.

    for damage in verify_store("orders", directory, scratch): ...

Nothing is written to the store. Its index is copied into a scratch directory, as for an explanation (explanation.py).
The journal is read whole, as salvage reads it, so that all of its damage is told and not the first alone. Where the
journal is whole, what the index says of it is walked by the rules of check.py.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from google_crc32c import extend as crc32c

from ...policies.errors import CorruptionError
from ...policies.text import count_of
from ..core.operations.branches import branch_of
from ..core.record.encoding import is_large, reference_in
from ..core.record.large import BODY, CRC, DIRECTORY, NAME_BYTES, NAMED, NAMED_AT, START_BYTES, StoredBody, read_start
from ..core.record.place import OWN, SEQ
from ..core.state.states import Catalog
from ..core.store_types import Progress
from ..wal.files import watermark
from ..wal.files.segment_files import SegmentFiles
from ..wal.segment import SegmentTable
from ..wal.ticket import Tail
from .bodies import body_of
from .check import violations
from .directory import StoreDirectory
from .explanation import copy_and_bring_up, copy_index
from .index.checksums import damages as index_damages
from .index.index import Index
from .recovery.opening import Opened
from .recovery.salvage import LossReport, LostMessage, LostRecords, find_losses, lost_in, store_id_of

NOTHING: Final = "nothing: it can be made anew"
SHOWN: Final = 20
"""Lost messages that are named of each damage."""


class Damage(NamedTuple):
    """A place that is not as it was written."""

    path: str
    offset: int
    reason: str
    lost: str
    """What is lost by it."""


def log_id_of(directory: Path) -> bytes | None:
    """Return the id of the log in a directory: that of its segments, or where none of their headers reads the one that
    is written beside them; None where that does not read either."""
    return store_id_of(directory / "journal") or StoreDirectory("", directory, None).identify()


def verify_log(directory: Path, log_id: bytes) -> Iterator[Damage]:
    """Yield the damage of what a log's directory has beside its segments: the id in store.id, and the watermark. Raises
    OSError."""
    if StoreDirectory("", directory, None).identify() != log_id:
        yield Damage(str(directory / "store.id"), 0, "it is not the id that the segments have", NOTHING)
    for offset in watermark.damaged_pages(directory / "journal", log_id):
        reason = "a page of the watermark is damaged"
        yield Damage(str(directory / "journal" / watermark.NAME), offset, reason, NOTHING)


def verify_store(
    name: str, directory: Path, scratch: Path, index_directory: Path | None = None, progress: Progress | None = None
) -> Iterator[Damage]:
    """Yield all damage of the journal store in a directory. Nobody has it open meanwhile.

    `scratch` is a directory of the caller's, with room for a copy of the index. Raises CorruptionError for stores of
    another version, and OSError.
    """
    where = StoreDirectory(name, directory, index_directory)
    store_id = log_id_of(directory)
    if store_id is None:
        yield Damage(str(where.journal), 0, "no segment of the journal reads", "all messages of the store")
        return
    yield from verify_log(directory, store_id)
    index = where.path / "index.mdb" if index_directory is None else index_directory / f"{store_id.hex()}.mdb"
    for path, offset, reason in index_damages(index):
        yield Damage(str(path), offset, reason, "nothing: the index is rebuilt from the journal at the next open")
    copy = scratch / "index.mdb"
    copy_index(index, copy)
    _, report = find_losses(name, directory, where.journal, copy, store_id)
    files = SegmentFiles(where.journal, 0)
    try:
        brought, opened = copy_and_bring_up(name, store_id, files, index, copy, progress)
    except CorruptionError as error:
        yield from (_damage(directory, lost, report.since_record) for lost in report.lost)
        if not any(directory / lost.file == Path(error.path) for lost in report.lost):
            yield Damage(error.path, error.offset, error.reason, str(error))
        return
    try:
        yield from _losses(directory, brought, report)
        table = opened.survey.table()
        if not report.lost:
            brought.complete_removals()
            tail = Tail(table.segments[-1], opened.survey.end.offset, opened.survey.end.lsn, 0)
            for violation in violations(brought, table, tail):
                yield Damage(str(where.journal), 0, violation, "see the rule of that number in docs/invariants.md")
        yield from _bodies(where, brought, opened, table)
    finally:
        brought.close()


def _losses(directory: Path, index: Index, report: LossReport) -> Iterator[Damage]:
    """Yield the damage of the journal, with the messages that the index has there."""
    rows = lost_in(index, report.lost)
    for lost in report.lost:
        named = [_text(message) for _, lsn, message in rows if lost.first_record <= lsn <= lost.last_record]
        yield _damage(directory, lost, report.since_record, named)


def _text(message: LostMessage) -> str:
    named = f", id {message.message_id}" if message.message_id is not None else ""
    return f"message {message.seq} of {message.destination}{named}"


def _damage(directory: Path, lost: LostRecords, since_record: int, messages: Sequence[str] = ()) -> Damage:
    if not lost.records:
        what = NOTHING
    elif messages:
        more = f" and {len(messages) - SHOWN} more" if len(messages) > SHOWN else ""
        what = f"{', '.join(messages[:SHOWN])}{more}"
    elif lost.is_newer(since_record):
        looks = f"; it looks like: {lost.reads_as}" if lost.reads_as is not None else ""
        what = f"{count_of(lost.records, 'record')}: messages, or acks of messages that come again{looks}"
    else:
        what = "nothing that still counts"
    return Damage(str(directory / lost.file), lost.offset, lost.reason, what)


# Large bodies


class _Closed:
    """The bodies of a store that is not open: a BodyHost."""

    def __init__(self, storage: Any) -> None:
        self.storage = storage
        self.streams: weakref.WeakSet[Any] = weakref.WeakSet()

    def require_open(self) -> None:
        """Do nothing: the files stay as they are."""

    def planned(self, plan: Any, send: Any) -> None:
        """Do nothing: nothing is sent."""


def _bodies(where: StoreDirectory, index: Index, opened: Opened, table: SegmentTable) -> Iterator[Damage]:
    """Yield the damage of large bodies, of those that a message names or a prepared transaction."""
    if not (where.path / DIRECTORY).is_dir():
        return
    from ..core.features.large.files import LargeFiles  # a feature, which is there if it was used

    host = _Closed(LargeFiles(where.name, where.path))
    for reference, message in _named(index, opened, table):
        body = StoredBody(host, reference[:NAME_BYTES])
        body.describe(reference)
        crc = 0
        try:
            for number in range(body.chunks):
                crc = crc32c(crc, body.chunk(number))
        except CorruptionError as error:
            yield Damage(error.path, error.offset, error.reason, f"the body of {message}")
            continue
        if crc != body.crc:
            reason = "the checksum of the body is not what its message says"
            yield Damage(str(where.path / DIRECTORY / f"{body.name.hex()}{BODY}"), START_BYTES, reason, message)
    for path in sorted((where.path / DIRECTORY).glob(f"*{BODY}")):
        with path.open("rb") as file:
            start = file.read(START_BYTES)
        name = b""
        with suppress(ValueError):
            name = bytes.fromhex(path.stem)
        if read_start(name, start) is None:
            yield Damage(str(path), 0, "the start of a large body is damaged", NOTHING)
            continue
        note, said = start[NAMED_AT : NAMED_AT + NAMED.size], CRC.unpack_from(start, NAMED_AT + NAMED.size)[0]
        if (any(note) or said) and crc32c(0, note) != said:
            yield Damage(str(path), NAMED_AT, "the note of whose body it is is damaged", "nothing: it is looked up")


def _named(index: Index, opened: Opened, table: SegmentTable) -> Iterator[tuple[bytes, str]]:
    """Yield the reference of each large body, and whose it is."""
    for number, place, _ in index.rows.all():
        lsn, offset, length = place[OWN]
        segment = table.find(lsn)
        record = None
        if segment is not None:
            file = segment.reading()
            record = body_of(os.pread(file.fd, length, offset), offset, segment.seed, number, place)
        if record is not None and is_large(record):
            yield reference_in(record), f"message {place[SEQ]} of {index.states[number].destination}"
    for transaction, payload in opened.prepared:
        for send in branch_of(transaction, payload, Catalog(), index.priorities).sends:
            if is_large(send.record):
                yield reference_in(send.record), f"a message that the transaction {transaction.hex()} sends"
