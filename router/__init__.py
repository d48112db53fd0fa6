"""The front door: what users hold in their hands. Imports adapters and policies.

    import anabranch

    with anabranch.open("stores.yaml") as router:
        router.queue("orders.custom").send(b"...")
        with router.transaction() as tx:                    # over any stores, all or nothing
            tx.send("queue://orders.custom,queue://audit", b"...")

`router` is opened; `queue`, `topic` and `transaction` are what it hands out. `endpoint` is the end of a destination
where messages go in, `consumer` where they come out. `dead_letters` moves what expired or reached the delivery limit
into the dead-letter queues, `requeue` moves it back, `copies` of a message once. `reentry` is about signal handlers.
`store_registry` routes, and finds or makes the store of a destination; `open_stores` keeps open stores and closes idle
ones; `destinations_table` is the durable record of which store holds which destination (`placement.records`);
`reconcile` compares it with configuration and disk, so that nothing is lost sight of (invariant 6); `store_directories`
says where directories lie; `near_names` is for who names a queue that is not there. `repartition` moves destinations to
other stores, `repartition_plan` says which, `repartition_progress` is how far it has come. `addresses` reads what users
call a destination. `cli` is the command line.

`transactions` makes what goes into several stores one: its `__init__` is the guide. What is decided lies in
`decision_log`; `xid` names those that a transaction manager decides. `data_manager` is for managers of the
`transaction` package, `dbapi` for Python's DB-API.

On disk, in the configuration's directory: `router.lock`, `placement.records`, `stores/<name>/`, `decisions/` once a
transaction has needed it, `repartition.records` while stores are being moved. What survives a crash is each store's
affair, and for a transaction over several the decision log's (docs/transactions.md); the placement record is synced
before a store's first use.
"""
