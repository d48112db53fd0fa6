"""A web node: each order is in the shared queue, durably, before it is answered.

SHOP_DATABASE=postgresql+psycopg://... python web.py stores.yaml 3
"""

from __future__ import annotations

import os
import socket
import sys

import anabranch


def main(config: str, count: int) -> None:
    node = os.environ.get("NODE", socket.gethostname())
    with anabranch.open(config) as router:
        orders = router.queue("orders.new")
        for number in range(1, count + 1):
            name = f"{node}-{number}"  # repeated after an error, it is stored once
            orders.send(f"order {number} of {node}".encode(), message_id=name)
    print(f"{node}: {count} orders taken")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
