"""The memory store: all that a store does, and nothing of it survives.

    from anabranch.adapters.memory import MemoryStore

    MemoryStore.create("scratch", directory, options)      # once: the directory and its id
    store = MemoryStore("scratch", directory, options)
    store.open()
    store.send(Destination.parse("scratch.orders"), b"...")

On disk: `store.id`, by which the router knows it again. While it is open also `store.lock`, and `swap/*.swap` with what
does not fit into `max_bytes` of memory: read by address, removed as soon as nothing in a file is needed, and at close;
what a killed process left goes at the next open. Everything is gone when the store is closed or its process ends: it
takes part in transactions for what others see, not for what survives (rule T7).

`companion` opens one that is not in any configuration: the router keeps a store's non-persistent messages in it.

Where things are:

- the contract: `store`, with `receiving` (what comes out; `browsing` page by page), `settling` (what is acked, given
  back or decided; `branches` of transactions over several stores); who holds what is in ../delivery.py
- `core`: what all of these work on, and its lock
- what there is: `contents` (destinations and subscriptions), `chunks` (messages that are swapped together), `records`
  (a message's bytes)
- what changes, so that Ctrl-C leaves it whole: `changes`, with `drafts`; `removal` (purge, delete)
- memory and disk: `residence` (what is in memory), `swap` (the files), `directory`
- `check` (invariants)
"""

from .store import MemoryStore, companion, position_of

__all__ = ["MemoryStore", "companion", "position_of"]
