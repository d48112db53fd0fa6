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
- writing: `log` (group commit, syncs), `batch` (what goes in together), `messages` (a message's bytes), `applying`
  (what is durable goes into the index)
- the index: `index` (LMDB), `rows` (its messages: order, expiry, who has yet to ack), `destinations` (counts, durable
  subscriptions), `checksums` (of its pages: what is damaged is not opened)
- at open: `recovery` (torn, corrupt, replayed), `reader` (the journal in order), `check` (invariants)
- space: `reclaim` (which segments go), `snapshot` (what must be said first), `segment` (the table of them)
- bytes and files: `format` (the one place that knows the bytes), `files` (segment files and their pool), `directory`
"""

from .store import JournalStore

__all__ = ["JournalStore"]
