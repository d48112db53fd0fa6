"""The peers: one small module each, loaded only when asked for.

A peer is a class that opens what is in a directory, `Peer(directory, durable=...)`, with `close()` and as many of these
as its library has. Each returns a callable to be used by one thread:

    sender()       one message in, alone                       Callable[[bytes], object]
    batch_sender() many messages in, one call                  Callable[[list[bytes]], object]
    transaction()  many messages in, all or none, durable      Callable[[list[bytes]], object]
    receiver()        one message out, received and acked         Callable[[], bytes]
    reader()       all messages, in order, left in place       Callable[[], int], how many they were

and, without an instance:

    drop_index(directory)  deletes what can be rebuilt
    day(directory)         the toy maker's queues: toymaker.Day
    routes(directory)      a router of many stores: `find(destination)`, `destinations` and `close()`
    sql(directory)         messages in tables of a database: `sender()`, as above and durable, and `close()`
"""

from __future__ import annotations

import importlib
from typing import Any

MODULES = {
    "anabranch": "anabranch",
    "anabranch-split": "anabranch",
    "anabranch-compacted": "anabranch",
    "sqlite3": "sqlite",
    "persist-queue": "persist_queue",
    "huey": "huey",
    "lmdb": "lmdb",
    "raw": "raw",
    "anabranch-alone": "sql",
    "anabranch-postgresql": "sql",
    "anabranch-postgresql-alone": "sql",
    "psycopg": "sql",
    "redis": "brokers",
    "rabbitmq": "brokers",
}


def load(name: str) -> type[Any]:
    """Return the class of a peer; one without any of the calls where its server is not installed."""
    module = importlib.import_module(f".{MODULES[name]}", __name__)
    peers: dict[str, type[Any]] = {peer.name: peer for peer in module.PEERS}
    return peers.get(name, type(name, (), {"name": name}))
