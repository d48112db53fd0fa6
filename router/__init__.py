"""The front door: what users hold in their hands. Imports adapters and policies.

    import anabranch

    with anabranch.open("stores.yaml") as router:
        router.queue("orders.custom").send(b"...")
        with router.transaction() as tx:                    # over any stores, all or nothing
            tx.send("queue://orders.custom,queue://audit", b"...")

`router` is opened; `queue`, `topic` and `transaction` are what it hands out. `endpoint` is the end of a destination
where messages go in, `consumer` where they come out: of a store, and of its companion for messages that are not
persistent (`nonpersistent`). `dead_letters` moves what expired or was redelivered too often, `requeue` puts it back.
`store_registry` routes, and finds or makes the store of a destination; `open_stores` keeps open stores, closes idle
ones; `store_statistics` asks them how they are; `destinations_table` is the durable record of which store holds which
destination (`placement.mdb`), `reconcile` compares it with configuration and disk, so that nothing is lost sight of
(invariant 6), `store_directories` and `directory_names` say where directories lie. `addresses` reads what users call a
destination. `replay` does a usage trace again, `cli` is the command line.

Transactions: `transaction` gathers sends and acks, `open_transactions` counts and times those that are open; `parts` is
what they do in each store. `coordinator` makes one over several stores one, in two phases around a record in
`decision_log`; `settling` carries out what is decided where that could not be done at once, `forgetting` lets go of
what is done everywhere. `xid` names those that a transaction manager decides, `external` holds them until it does;
`doubt` says what waits, and takes outcomes by hand. `datamanager` is for managers of the `transaction` package, `tpc`
for the DB-API's.

On disk, in the configuration's directory: `router.lock`, `placement.mdb`, `stores/<name>/`, `decisions/` once a
transaction has needed it, and `transient/` while a companion swaps. What survives a crash is each store's affair, and
for a transaction over several the decision log's (docs/transactions.md); the placement record is synced before a
store's first use.
"""
