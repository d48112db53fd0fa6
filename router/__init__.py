"""The front door: what users hold in their hands. Imports adapters and policies.

    import anabranch

    with anabranch.open("stores.yaml") as router:
        router.queue("orders.custom").send(b"...")
        with router.transaction() as tx:
            tx.send("orders.custom", b"...")

`router` opens the stores that a configuration names and routes to them, `queue` and `transaction` are what it hands
out. `stores` keeps open stores and closes idle ones; `placement` is the durable record of which store holds which
destination (`placement.mdb`), `reconcile` compares it with configuration and disk, so that nothing is lost sight of
(invariant 6), `layout` and `names` say where directories lie. `addresses` reads what users call a destination.
`replay` does a usage trace again, `cli` is the command line.

On disk, in the configuration's directory: `router.lock`, `placement.mdb` and `stores/<name>/`. What survives a crash is
each store's affair; the placement record is synced before a store's first use.
"""
