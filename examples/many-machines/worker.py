"""A worker: takes orders that any web node has sent, and notes on its own disk what it has packed.

    SHOP_DATABASE=postgresql+psycopg://... python worker.py stores.yaml [COUNT]

It ends after so many orders; without COUNT it goes on for ever.
"""

from __future__ import annotations

import os
import socket
import sys

import anabranch


def main(config: str, count: int | None) -> None:
    node = os.environ.get("NODE", socket.gethostname())
    with anabranch.open(config) as router:
        for number, order in enumerate(router.queue("orders.new").consume(timeout=None), 1):
            with router.transaction() as tx:  # out of the shared queue and into this machine's, or neither
                tx.ack(order)
                tx.send("packed", order.body)
            print(f"{node}: packed {order.body.decode()}", flush=True)
            if number == count:
                return


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else None)
