"""Messages in memory, and in swap files what does not fit: the rows of a memory store, and of transient messages.

`MemoryRows.require_room` sees that there is room, `apply_changes` puts messages into their chunks, `rows` finds them.
All run under the lock of whoever owns the rows. Nothing here survives a crash. This room stands on the contract of a
backend.
"""
