"""A write-ahead log: records in, LSNs out. It knows nothing of what the records mean.

Many threads hand in tickets. Each ticket becomes a batch behind the last one; what is queued is written with one call,
and synced once for all who wait. On one thread:

    from anabranch.adapters.wal import Log, LogOptions, RecordEncoder, SegmentFiles, create_log
    from anabranch.adapters.wal import record_ticket, records, settle, survey, take_over

    NOTE = 1                                              # kinds of records are the owner's, but for SNAPSHOT
    SEGMENT_BYTES = 1 << 20

    create_log(path, log_id, SEGMENT_BYTES)               # once; log_id: 16 random bytes

    files = SegmentFiles(path, SEGMENT_BYTES)
    encoder = RecordEncoder(deliver=lambda batch: print("on disk:", batch.records))
    log = Log("the notes", log_id, files, LogOptions(SEGMENT_BYTES), encoder)

    surveyed = survey(files, log_id)                      # what the log says; writes nothing
    settle(surveyed, files)                               # what may not be on disk is put there, then
    for record in records(surveyed):                      # it may be shown
        print(record.lsn, record.kind, record.payload)
    take_over(surveyed, log)                              # from here on it can be written to

    log.wait(log.submit(record_ticket([(NOTE, b"hello", None)])))
    log.close()
    log.let_go()

An owner with more to say writes an Encoder of its own (`ticket`): it is given the tickets and the log's end, and
returns bytes; it hears of each batch that counts, in order. One that keeps what it has read elsewhere passes a
Checkpoint to `survey`, and reading begins there. A directory has one owner at a time, who locks it.

On disk, in the log's directory (formats: docs/format.md):

    000000000001.seg      segments, each a page with its header and then batches of records; all integers little-endian
    000000001234.copies   what still counts of earlier segments, where an owner has copied it (`copies`)
    pool-1.free           files for the next segments: used ones, and one that is zero-filled ahead of need
    1.spare               the reserve: allocated files that only what makes room may take
    *.tmp                 unfinished; removed when the log is opened

This survives a crash. After the process is killed: all that was acknowledged, and perhaps what was on its way. After a
power failure: under Sync.ALWAYS, and for tickets with `sync`, the same; under PERIODIC and NEVER a prefix of what was
written, PERIODIC losing at most its interval and one sync. A batch counts whole or not at all. Damage above the highest
watermark was never acknowledged: it is cut. Damage or a gap below it raises CorruptionError: it is never silently
skipped. After a failed write or sync the log has failed: it is opened again, and nothing is acknowledged before that.

Room to finish. On a full disk a ticket gets StoreFullError before any byte of it is written; space is allocated ahead,
so that a batch which has begun is never cut short by a full disk. Tickets after which less is needed (`shrinks`, or
what an Encoder says by `leaves`) are not refused: they may use the reserve, and a Reclaimer gives it back. A ticket may
be promised room for what must follow it (`promise`).

Releasing. A Reclaimer writes a record of kind SNAPSHOT, which says what its owner needs of earlier segments, and lets
those go in which nothing is needed; later surveys find the snapshot by the segments' headers, and require the segments
that it names.

Errors: StoreFullError (nothing was written: make room, try again), OutcomeUnknownError (the log failed while it wrote),
StoreFailedError (it had failed before: open it again), ClosedError, CorruptionError with the path and the offset.

Where things are: `format` the bytes; `segment`, `files` what lies where; `ticket` what goes in, `records` the simplest
encoder; `log` in which order it is written, `segment_writer` where it finds room, `appending` how it gets to the disk,
`syncing` earlier segments that wait for it; `reader` batches in order; `recovery` at open; `reclaim`; `skimming` finds
what still counts of old segments.
"""

from .copying import LogCopier
from .files.segment_files import SegmentFiles, create_log
from .format import SNAPSHOT
from .log import Log
from .reclaim import Reclaimer
from .records import RecordBatch, RecordEncoder, record_ticket
from .recovery.opening import records, settle, take_over
from .recovery.survey import Checkpoint, CheckpointMismatchError, Kept, Needed, Survey, survey
from .ticket import Encoder, LogOptions, Tail, Ticket, WriteBatch

__all__ = [
    "SNAPSHOT", "Checkpoint", "CheckpointMismatchError", "Encoder", "Kept", "Log", "LogCopier", "LogOptions", "Needed",
    "Reclaimer", "RecordBatch", "RecordEncoder", "SegmentFiles", "Survey", "Tail", "Ticket", "WriteBatch",
    "create_log", "record_ticket", "records", "settle", "survey", "take_over",
]  # fmt: skip
