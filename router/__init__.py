"""The front door: what users hold in their hands. Imports adapters and policies.

    import anabranch

    with anabranch.open("stores.yaml") as router:
        router.queue("orders.custom").send(b"...")
        with router.transaction() as tx:                    # over any stores, all or nothing
            tx.send("queue://orders.custom,queue://audit", b"...")

`api` holds all that users hold: the router, queues, topics, maps, codecs, events. `placement` says which store a
destination lives in, keeps the record of that, and opens stores. `transactions` makes changes of several stores one.
`migration` moves destinations to other stores, and imports a broker's. `upkeep` is dead letters, idle queues, salvage
and explanations. `usage` records what the advisor reads. `cli` is the command line.

On disk, in the configuration's directory: `router.lock`, `placement.records`, `stores/<name>/`, `decisions/` once a
transaction has needed it, `repartition.records` while stores are being moved. Each store says what survives a crash,
and for a transaction over several the decision log does (docs/transactions.md); the placement record is synced before a
store's first use.
"""
