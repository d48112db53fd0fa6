"""Every store, written once: the contract (`store`), over a backend that only keeps bytes (`backend`).

How a message goes through it: `sending` makes a *change* of it (`changes`, `destination_changes`, `branches`), a
ticket holds the changes that take effect together (`tickets`), `writers` hands tickets to the backend, `plan` gives
each its place. `engine` keeps what is written until somebody reads, and has it applied to the backend's rows;
`arrivals` passes it on to receivers that keep up. `delivery` knows who holds which message, `priorities` what comes
next, `place` in which order. `receiving` and `listening` are who waits, `settling` what becomes of what they were
given, `sweep` of what expired or came too often.

`states` are the destinations and subscriptions, `duplicates` the ids that were seen, `limits` how much more may come,
`purging` what goes page by page, `transactions` those of one store and a store's part of larger ones. `nonpersistent`
and `mixed_rows` are for messages that no backend sees. `records` and `headers` turn a message into bytes. `statistics`
tells how many there are, with those that are not applied yet (`pending_counts`).
"""

from __future__ import annotations

from .backend import Backend, BackendStats, Found, Host, NotTakenError, ReadError, Settings
from .store import Store

__all__ = ["Backend", "BackendStats", "Found", "Host", "NotTakenError", "ReadError", "Settings", "Store"]
