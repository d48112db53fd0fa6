"""The peers: one small module each, loaded only when asked for.

A peer is a class with `open(directory, durable)` semantics in its constructor, `close()`, and as many of these as its
library has. Each returns a callable to be used by one thread:

    sender()       one message in, alone                       Callable[[bytes], object]
    batch_sender() many messages in, one call                  Callable[[list[bytes]], object]
    transaction()  many messages in, all or none, durable      Callable[[list[bytes]], object]
    taker()        one message out, received and acked         Callable[[], bytes]
    reader()       all messages, in order, left in place       Callable[[], int], how many they were
    router()       the store of a destination                  Callable[[str], object]
    replay(ops, observe)  a day of many destinations; `observe` is called now and then to look at the disk
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, ClassVar, Protocol

MODULES = {
    "anabranch": "anabranch",
    "anabranch-split": "anabranch",
    "sqlite3": "sqlite",
    "persist-queue": "persist_queue",
    "huey": "huey",
    "lmdb": "lmdb",
    "raw": "raw",
}


class Peer(Protocol):
    """What every peer has; the rest is found by name."""

    name: ClassVar[str]

    def __init__(self, directory: Path, *, durable: bool) -> None: ...

    def close(self) -> None: ...


def load(name: str) -> type[Any]:
    """The class of a peer."""
    module = importlib.import_module(f".{MODULES[name]}", __name__)
    peers: dict[str, type[Any]] = {peer.name: peer for peer in module.PEERS}
    return peers[name]
