"""A step of work as one transaction: the order is taken and its two results are sent, or nothing has happened.

python examples/transactions.py
"""

from __future__ import annotations

import tempfile

import anabranch
from anabranch import Config, StoreConfig


def pack(router: anabranch.Router) -> None:
    """Takes one order. All of it lives in one store here, `shop`; orders_and_audit.py has two."""
    order = router.queue("shop.orders").receive()
    assert order is not None
    try:
        with router.transaction() as tx:
            tx.ack(order)
            tx.send("shop.parcels", b"parcel for " + order.body)
            tx.send("shop.audit", b"packed " + order.body)
            if order.body == b"nothing":
                raise ValueError("there is nothing to pack")
    except ValueError as error:
        print(f"rolled back, the order is in its queue again: {error}")


def main(directory: str) -> None:
    config = Config(directory, [StoreConfig("shop", ["queue://shop.>"]), StoreConfig("rest", [">"])])
    with anabranch.open(config) as router:
        router.queue("shop.orders").send_many([b"a train", b"nothing"])
        pack(router)
        pack(router)
    with anabranch.open(config) as router:  # what was committed is still there, what was not never was
        for name in ("shop.orders", "shop.parcels", "shop.audit"):
            print(f"{name}: {[message.body.decode() for message in router.queue(name).browse()]}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        main(scratch)
