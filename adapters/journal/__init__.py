"""The journal store: an append-only journal in segments, with an index in LMDB. The default kind of store.

    from anabranch.adapters.journal import JournalStore

    JournalStore.create("orders", directory, options)      # once
    store = JournalStore("orders", directory, options)
    store.open()
    store.send(Destination.parse("orders.custom"), b"...")

On disk: `journal/*.seg` hold everything; `index.mdb` says where the messages are and can be rebuilt from them;
`store.lock` and `store.id`. What survives a crash is what the sync policy says (invariant 1): under `always`, all that
has returned; after a mere kill of the process, under every policy, all that has returned. Formats: docs/format.md.
"""

from .store import JournalStore

__all__ = ["JournalStore"]
