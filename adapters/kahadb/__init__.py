"""Reads the journals of ActiveMQ's KahaDB and mKahaDB: as a usage trace, and to explain why files are kept.

    from anabranch.adapters.kahadb import explain, render_text, usage_trace

    print(render_text(explain("/var/lib/activemq/kahadb")))

    trace = usage_trace("/var/lib/activemq/kahadb")
    for event in trace:                  # UsageEvent, in the order of the journal
        ...
    print(trace.findings.warnings())

**Input.** `db-<number>.log` in the directory that it is given; archived files in its `archive/` or `data-archive/`, or
beside it under a common parent; or, for an mKahaDB, a directory of such directories with their `txStore`. Where a
number is in the live directory and in the archive, the live file counts. The index (`db.data`) is not read. Nothing is
ever written: point it at a copy, or at a broker that is running (files which the broker removes meanwhile are named as
damage).

**Damage.** Each batch is checked by its Adler-32. Unreadable parts are named by a `Damage` with path, offset and
reason: a torn end, damaged bytes, a missing file. All whole batches around it are read. A directory that is not a
KahaDB at all raises `TraceError`.

**Limits.** Acks carry no time. Messages that were consumed before they were written, and messages that are not
persistent, leave no record. History that the broker removed is gone: set `archiveDataLogs="true"` to keep it. How each
event's bytes, order and clock are found is in `trace`; the rules by which files are kept are in `retention`.

The parts, from the bytes up: `files`, `journal` (batches and records), `commands` (protobuf), `openwire` and `ackmap`
(what is inside commands), `entries` (transactions), `replay` (the state of a store), then `trace`, `retention`,
`explanation` and `render`; and, for `anabranch import`, `pending` (what is not acked, by location) and `content` (a
message of theirs as one of ours).
"""

from .explanation import (
    Explanation,
    FileExplanation,
    PendingDestination,
    StoreExplanation,
    SubscriptionPosition,
    UnfinishedTransaction,
    explain,
)
from .files import Damage, file_bytes
from .render import render_text
from .retention import Reason
from .trace import Findings, KahaTrace, usage_trace

__all__ = [
    "Damage",
    "Explanation",
    "FileExplanation",
    "Findings",
    "KahaTrace",
    "PendingDestination",
    "Reason",
    "StoreExplanation",
    "SubscriptionPosition",
    "UnfinishedTransaction",
    "explain",
    "file_bytes",
    "render_text",
    "usage_trace",
]
