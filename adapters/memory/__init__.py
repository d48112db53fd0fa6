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

The messages that other stores hold without their being persistent lie in the same `MemoryRows`
(core/features/transient).

The contract is adapters/core's; here is where the bytes are:

- `backend`; `rows`: sees that there is room, and reads; `applying`: what each change does, and that Ctrl-C leaves it
  whole
- `messages`: those of one destination; `message_chunks`: some hundred that are swapped together; `packed_numbers`
- `memory_limit`: what is in memory; `swap_files`: what is not; `directory`
- `check`: invariants
"""

from .store import MemoryStore

__all__ = ["MemoryStore"]
