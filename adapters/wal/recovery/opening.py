"""From reading to writing: what `survey` decided is made durable, and the log goes on (rules J3, J5). A crash anywhere
leaves a directory in which the next recovery finds the same."""

from __future__ import annotations

import os
from collections.abc import Iterator

from ....policies.errors import CorruptionError
from ...system.files import sync_data, write_all
from .. import format as f
from ..files.file import File
from ..files.segment_files import SegmentFiles
from ..log import Log
from ..reader import BatchReader, Record, read_at, records_of
from ..segment import Segment
from ..ticket import Tail
from .survey import Survey


def records(survey: Survey) -> Iterator[Record]:
    """Yield all records of the segments that are needed whole, in order. Raises CorruptionError, OSError."""
    for link, segment in enumerate(survey.chain):
        end = survey.end.offset if link == survey.end.link else segment.end
        reader = BatchReader(segment, f.HEADER_BYTES, segment.base_lsn - 1, end)
        for batch in reader:
            yield from records_of(batch)
        require_end(reader, segment, end)


def require_end(reader: BatchReader, segment: Segment, end: int | None) -> None:
    """Raise CorruptionError if not all up to `end` was read."""
    if reader.offset != end:
        reason = f"records after {reader.lsn} do not read back"
        raise CorruptionError(str(segment.path), reader.offset, reason, f.RESTORE)


def settle(survey: Survey, files: SegmentFiles) -> None:
    """Put on disk what is read above the watermark, before anybody sees it (rules J3, J5).

    Equal bytes are written again in place: after a SIGKILL the page cache may hold what the disk does not, and after a
    failed fsync its pages may be clean all the same. Writing makes them dirty, whichever it was. So may the names of
    files be: that of the newest segment, in which the log goes on if it is empty, and those in the pool, into which the
    next header is written.
    """
    for segment, position, end in survey.unsynced:
        if position < end:
            file = File(segment.path, os.O_RDWR)
            while position < end:
                data = read_at(file, position, min(1 << 20, end - position))
                write_all(file.fd, data, position)
                position += len(data)
            sync_data(file.fd)
    files.clean()
    files.sync_names(files.names())


def resume_in(survey: Survey) -> bool:
    """Return whether the log may go on in its last segment: after a clean close, or if that segment is still empty
    (J5)."""
    return survey.clean or (survey.end.offset == f.HEADER_BYTES and survey.highest_lsn == survey.end.lsn)


def take_over(survey: Survey, wal: Log, counter: int = 0) -> None:
    """Take over, from reading to writing: the one durable step of recovery (rule J5). `counter`: what Tail.counter is
    to be. Raises OSError."""
    last = survey.chain[-1]
    last.end = None
    tail = Tail(last, survey.end.offset, survey.end.lsn, counter)
    wal.start(survey.table(), tail, survey.highest_number)
    if resume_in(survey):
        last.file = File(last.path, os.O_RDWR)
        last.allocated = max(os.fstat(last.file.fd).st_size, survey.end.offset)  # an empty one may have been cut short
        wal.resume()
    else:
        wal.begin_segment(survey.highest_lsn + 1)
    if survey.void:
        names = wal.files.names()
        for path in survey.void:
            path.unlink(missing_ok=True)
        wal.files.sync_names(names)
