"""Orders in a journal, invoices in a database, prices in memory; one transaction over all three, a poison message put
aside, and a subscription that was away.

    python examples/kinds_of_stores.py [DIRECTORY]

With a server: PGPASSWORD=... python examples/kinds_of_stores.py DIRECTORY postgresql+psycopg://user@host/name
"""

from __future__ import annotations

import sys
import tempfile

from pydantic import SecretStr

import anabranch
from anabranch import Config, JournalOptions, MemoryOptions, SqlOptions, StoreConfig


def configuration(directory: str, url: str | None) -> Config:
    return Config(
        directory,
        [
            StoreConfig("orders", ["orders.>"], journal=JournalOptions(max_deliveries=2, dead_letter="dead")),
            StoreConfig("invoices", ["invoices.>"], sql=SqlOptions(url=SecretStr(url) if url else None)),  # SQLite
            StoreConfig("prices", ["prices.>"], memory=MemoryOptions()),
            StoreConfig("rest", [">"], journal=JournalOptions()),
        ],
    )


def main(directory: str, url: str | None = None) -> None:
    config = configuration(directory, url)
    with anabranch.open(config) as router:
        audit = router.topic("orders.done").subscribe("audit")
        router.queue("orders.new").send_many([b"a train", b"a curse"])
        router.topic("prices.toys").subscribe("board")
        order = router.queue("orders.new").receive()
        assert order is not None
        with router.transaction() as tx:  # in three kinds of stores, or in none
            tx.ack(order)
            tx.send("queue://invoices.open,topic://orders.done,topic://prices.toys", order.body)
        for _ in range(2):  # nobody can handle this one
            curse = router.queue("orders.new").receive()
            assert curse is not None
            curse.release()
        router.sweep()  # happens by itself each second
        print("dead:", [(m.body.decode(), m.headers["dead_letter_reason"]) for m in router.queue("dead").browse()])
    with anabranch.open(config) as router:  # a journal and a database remember, memory does not
        audit = router.topic("orders.done").subscribe("audit")
        print("audit:", [m.body.decode() for m in audit.browse()])
        print("invoices:", [m.body.decode() for m in router.queue("invoices.open").browse()])
        print("prices:", [m.body.decode() for m in router.topic("prices.toys").browse()])


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(*sys.argv[1:])
    else:
        with tempfile.TemporaryDirectory() as scratch:
            main(scratch)
