"""The journal store: an append-only journal in segments, with an index in LMDB. The default kind of store.

    from anabranch.adapters.journal import JournalStore

    JournalStore.create("orders", directory, options)      # once
    store = JournalStore("orders", directory, options)
    store.open()
    store.send(Destination.parse("orders.custom"), b"...")

On disk: `journal/*.seg` hold everything; `index.mdb` says where the messages are and can be rebuilt from them, which
happens by itself where the checksums of its pages, `index.sums`, say that it is damaged; `store.lock` and `store.id`.
The sync policy says what survives a crash (invariant 1): under `always`, all that has returned; after a mere kill of
the process, under every policy, all that has returned. Formats: docs/format.md.

Where things are:

- `store` names the kind; the contract is the core's (../core), and `backend` is what it asks of a journal
- writing: ../wal is the log; `writing` makes its bytes of changes, by `encoding`, the one place that knows them
- `index` says which messages there are and where; `applying` puts into it what is written, and writes it out in time
- `bodies` reads messages back
- `recovery` is what happens at open: in order, replay, salvage; `check` has the invariants
- space: `compaction` (what lives in mostly dead segments moves together), `changes` (the change that makes it count),
  `snapshot` (what must be said before segments go), `pending_before` (as it was when one began)
- files: `directory`
"""

from .store import JournalStore

__all__ = ["JournalStore"]
