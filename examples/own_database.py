"""Messages in the application's own database, sent and acked in its own transactions: the transactional outbox, without
two-phase commit.

python examples/own_database.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import sqlalchemy as sa
from pydantic import SecretStr

import anabranch
from anabranch import Config, SqlOptions, StoreConfig

tables = sa.MetaData()
orders = sa.Table("orders", tables, sa.Column("toy", sa.Text))
parcels = sa.Table("parcels", tables, sa.Column("toy", sa.Text))


def take_order(engine: sa.Engine, queue: anabranch.Queue, toy: str) -> None:
    """The row and the message, both or neither."""
    try:
        with engine.begin() as connection:
            connection.execute(orders.insert(), {"toy": toy})
            queue.send(toy.encode(), connection=connection)
            if not toy:
                raise ValueError("an order without a toy")
    except ValueError as error:
        print(f"rolled back: {error}")


def pack(engine: sa.Engine, queue: anabranch.Queue) -> None:
    """The ack and the row that says that it is done, both or neither."""
    message = queue.receive(timeout=10)
    assert message is not None
    with engine.begin() as connection:
        connection.execute(parcels.insert(), {"toy": message.body.decode()})
        message.ack(connection=connection)


def main(directory: Path) -> None:
    url = f"sqlite:///{directory / 'shop.db'}"  # PostgreSQL likewise: postgresql+psycopg://...
    engine = sa.create_engine(url)
    tables.create_all(engine)
    store = StoreConfig("shop", ["queue://shop.>"], sql=SqlOptions(url=SecretStr(url), schema_prefix="mq_"))
    with anabranch.open(Config(directory / "data", [store])) as router:
        queue = router.queue("shop.orders")
        queue.declare()  # the store's tables are made, from which SQLite keeps it in a transaction of ours
        for toy in ("a train", "", "a doll"):
            take_order(engine, queue, toy)
        pack(engine, queue)
        with engine.connect() as connection:
            print(f"orders: {list(connection.scalars(sa.select(orders.c.toy)))}")
            print(f"parcels: {list(connection.scalars(sa.select(parcels.c.toy)))}")
        print(f"to pack: {[message.body.decode() for message in queue.browse()]}")
    engine.dispose()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        main(Path(scratch))
