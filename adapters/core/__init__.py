"""Every store, written once: the contract (`store`), over a backend that only keeps bytes (`backend`).

How a message goes through it: `service` makes a change of it (`operations`), a ticket holds the changes that take
effect together, `engine` hands tickets to the backend and has what is written applied to the backend's rows. `state`
knows who holds which message and what comes next; `record` turns a message into bytes. `features` hold what a message
need not use, `migration` takes messages from store to store. `messages` and `store_types` are the values that users
see.
"""

from __future__ import annotations

from .backend import Backend, BackendStats, Found, Host, NotTakenError, ReadError, Settings, WrittenBackend
from .store import Store

__all__ = [
    "Backend",
    "BackendStats",
    "Found",
    "Host",
    "NotTakenError",
    "ReadError",
    "Settings",
    "Store",
    "WrittenBackend",
]
