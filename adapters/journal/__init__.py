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
- the index: `applying` (what is written goes into it, and it is written out now and then), `index` (its tables), `rows`
  (its messages: order, expiry, who has yet to ack), `transaction_rows`, `indexed` (what it keeps of destinations and
  subscriptions), `index_file` (LMDB's file), `checksums` (of its pages, which `lmdb_format` takes apart: what is
  damaged is not opened)
- `bodies` reads messages back
- at open: `opening` (recovery in order), `replay` (the index is brought up to the log); `check` (invariants)
- space: `compaction` (what lives in mostly dead segments moves together), `copied` (the change that makes it count),
  `snapshot` (what must be said before segments go), `pending_before` (as it was when one began)
- files: `directory`
"""

from .store import JournalStore

__all__ = ["JournalStore"]
