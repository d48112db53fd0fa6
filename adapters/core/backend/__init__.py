"""The contract of a kind of store: a backend is a store's place for its bytes, all else is the core's.

    class NotesBackend(WrittenBackend):       # rows, and a `write` that makes a plan durable
        ...

    rows        which messages there are, asked under the store's lock       (state/rows.py)
    writing     tickets become writes, and writes rows                       (contract.py, writers.py)
    upkeep      opening, closing, space                                      (contract.py)

What a backend has written survives what the store's policy says. It is given its store as a Host (host.py), every kind
the same. tests/contract is the suite that every kind must pass. This room stands on operations, state and record.
"""

from .contract import Backend, BackendStats, Found, Upkeep, Writing, WrittenBackend
from .host import Host, NotTakenError, ReadError, Writes
from .settings import Settings
from .writers import Direct, Threaded, Writer

__all__ = [
    "Backend",
    "BackendStats",
    "Direct",
    "Found",
    "Host",
    "NotTakenError",
    "ReadError",
    "Settings",
    "Threaded",
    "Upkeep",
    "Writer",
    "Writes",
    "Writing",
    "WrittenBackend",
]
