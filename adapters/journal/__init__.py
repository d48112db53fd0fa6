"""The journal store: an append-only journal in segments, with an index in LMDB. The default kind of store.

    from anabranch.adapters.journal import JournalStore

    JournalStore.create("orders", directory, options)      # once
    store = JournalStore("orders", directory, options)
    store.open()
    store.send(Destination.parse("orders.custom"), b"...")

On disk: `journal/*.seg` hold everything; `index.mdb` says where the messages are and can be rebuilt from them, which
happens by itself where the checksums of its pages, `index.sums`, say that it is damaged; `store.lock` and `store.id`.
What survives a crash is what the sync policy says (invariant 1): under `always`, all that has returned; after a mere
kill of the process, under every policy, all that has returned. Formats: docs/format.md.

Where things are:

- the contract: `store`, with `receiving` (what comes out), `bodies` (reading messages back), `holds` (who holds what,
  over ../delivery.py), `subscriptions`, `transactions` (branches of those over several stores)
- writing: ../wal is the log; `batch` (what its tickets hold), `encoder` (their bytes), `messages` (a message's bytes),
  `applying` (what is durable goes into the index)
- the index: `index` (LMDB), `rows` (its messages: order, expiry, who has yet to ack), `destinations` (counts, durable
  subscriptions), `checksums` (of its pages: what is damaged is not opened)
- at open: `rebuild` (the index is brought up to the log), `replay` (what records mean), `check` (invariants)
- space: `snapshot` (what must be said before segments go)
- bytes and files: `format` (what records hold), `directory`
"""

from .store import JournalStore

__all__ = ["JournalStore"]
