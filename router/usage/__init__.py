"""The usage log records, while a router runs, who was sent what, and when that was acked for the last time.

`usage: {}` in stores.yaml switches it on, or a running router does:

    router.start_usage_log(anabranch.UsageOptions(max_bytes="1GiB"))
    ...
    router.stop_usage_log()

and the advisor reads it, also while it is written:

    anabranch recommend --usage data/usage --out advice
    anabranch trace --usage data/usage --out trace.parquet

The log holds no bodies, headers or message ids: a message is known by its store and its number there.

On disk, in usage/ in the data directory (docs/format.md):

    store.id, store.lock      as in a store's directory
    usage.version             the version of its format: by it one knows that this is a usage log
    journal/                  a log (adapters/wal): records of kind BLOCK, each the operations of about a second

All files together never take more than `max_bytes`: the oldest go.

After the process is killed, all but the last `flush_interval` survives. After a power failure, a prefix of that
survives: the log is synced every few seconds. A torn tail is cut.

The log is an observation, and harms nobody. Whoever sends or acks appends a row in memory (core/engine/usage.py) and
never waits. If the disk does not keep up, operations that do not fit into the memory set aside are lost, and counted.
If the disk is full or fails the log stops with a warning, and messages go on.

`recording` starts and stops it. `blocks` are the bytes, `log` writes them, `reading` finds logs and makes of them the
events of a usage trace.
"""

from .log import UsageLog, UsageStats

__all__ = ["UsageLog", "UsageStats"]
