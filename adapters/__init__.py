"""The stores: each keeps the messages of some destinations, with one durability policy. Imports policies alone.

    from anabranch.adapters.journal import JournalStore      # what the router opens by the configuration's `journal:`
    from anabranch.adapters import kahadb                    # ActiveMQ's journals, read only

`core` is every store: the contract (`core.Store`), who holds which message, what is a duplicate, how much more may
come; it stands over a backend that keeps the bytes. `journal` is the default backend, `sql` keeps messages in tables,
`memory` nowhere else. `wal` is a log of batches, which the journal and the router's decision log stand on. `system` is
what all of these stand on: files, locks, threads. `kahadb` reads ActiveMQ's own journals.

Third parties register stores in the entry-point group `anabranch.adapters` and prove them with tests/contract. Each
package says for itself what is on disk and what survives a crash.
"""
