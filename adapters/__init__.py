"""The stores: each keeps the messages of some destinations, with one durability policy. Imports policies alone.

    from anabranch.adapters.journal import JournalStore      # what the router opens by the configuration's `journal:`
    from anabranch.adapters import kahadb                    # ActiveMQ's journals, read only

`base` is the contract: the Store protocol, messages, receipts, statistics. `journal` is the default store, `sql` keeps
messages in tables, `memory` nowhere else. What these share: `delivery` says who holds which message, `duplicates` which
message ids were seen lately, `room` how much more may come, `subscriptions` what is refused of these; `headers` turns
headers and message ids into bytes, `background` has the threads. `directory`, `files` and `locking` are what each part
that keeps files needs: a directory that is there whole or not at all, changes of names made durable, one owner.
`kahadb` reads ActiveMQ's own journals.

Third parties register stores in the entry-point group `anabranch.adapters` and prove them with tests/contract. What is
on disk and what survives a crash, each package says for itself.
"""
