"""A transaction over two stores, each with a journal and a durability of its own; then one whose outcome somebody else
decides, over a restart.

python examples/orders_and_audit.py
"""

from __future__ import annotations

import tempfile

import anabranch
from anabranch import Config, JournalOptions, StoreConfig, Sync, Xid


def accept(router: anabranch.Router, order: bytes) -> None:
    """The order and its line in the audit: both or neither, whatever happens in between."""
    with router.transaction() as tx:
        tx.send("orders.accepted", order)
        tx.send("audit.orders", b"accepted " + order)
        if not order:
            raise ValueError("an empty order")


def pack(router: anabranch.Router) -> None:
    """Taking the order is part of it: rolled back, it is in its queue again, at its old place."""
    order = router.queue("orders.accepted").receive()
    assert order is not None
    with router.transaction() as tx:
        tx.ack(order)
        tx.send("orders.packed", order.body)
        tx.send("audit.orders", b"packed " + order.body)


def show(router: anabranch.Router) -> None:
    for name in ("orders.accepted", "orders.packed", "audit.orders"):
        print(f"  {name}: {[message.body.decode() for message in router.queue(name).browse()]}")


def main(directory: str) -> None:
    orders = StoreConfig("orders", ["queue://orders.>"])  # on disk when a send returns
    audit = StoreConfig("audit", ["queue://audit.>"], journal=JournalOptions(sync=Sync.PERIODIC))  # within a second
    config = Config(directory, [orders, audit])
    with anabranch.open(config) as router:
        accept(router, b"a train")
        try:
            accept(router, b"")
        except ValueError as error:
            print(f"rolled back: {error}")
        pack(router)
        print("in two stores:")
        show(router)

        # Both phases apart, for a transaction manager. Prepared, it waits, through restarts too.
        tx = router.transaction(Xid(1, "order-2"))
        tx.send("orders.accepted,audit.orders", b"a doll")
        tx.prepare()
    with anabranch.open(config) as router:
        for xid in router.recover():
            print(f"prepared: {xid.global_id}")
            router.commit(xid)
        print("after its commit:")
        show(router)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        main(scratch)
