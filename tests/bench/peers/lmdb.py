"""LMDB alone, as a queue: a counter for a key, one write transaction a call.

Durable: LMDB's default, an fdatasync of the pages and a synced write of the meta page a commit. Not durable:
`sync=False`; a crash of the machine may then leave a file that cannot be opened, which is less than any other peer
promises. A message in hand is not leased: read, then deleted.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import lmdb

MAP_BYTES = 64 * 2**30


class Lmdb:
    name = "lmdb"

    def __init__(self, directory: Path, *, durable: bool) -> None:
        self._env = lmdb.open(str(directory / "data"), map_size=MAP_BYTES, sync=durable, lib_version=0)
        with self._env.begin() as txn, txn.cursor() as cursor:
            self._next = int.from_bytes(cursor.key(), "big") + 1 if cursor.last() else 0

    def sender(self) -> Callable[[bytes], None]:
        begin = self._env.begin

        def send(body: bytes) -> None:
            with begin(write=True) as txn:
                txn.put(self._next.to_bytes(8, "big"), body, append=True)
                self._next += 1

        return send

    def batch_sender(self) -> Callable[[list[bytes]], None]:
        def send(bodies: list[bytes]) -> None:
            with self._env.begin(write=True) as txn, txn.cursor() as cursor:
                rows = [(number.to_bytes(8, "big"), body) for number, body in enumerate(bodies, self._next)]
                cursor.putmulti(rows, append=True)
                self._next += len(bodies)

        return send

    transaction = batch_sender

    def receiver(self) -> Callable[[], bytes]:
        begin = self._env.begin

        def take() -> bytes:
            with begin() as txn, txn.cursor() as cursor:
                cursor.first()
                key, body = cursor.item()
            with begin(write=True) as txn:
                txn.delete(key)
            return body

        return take

    def reader(self) -> Callable[[], int]:
        def read() -> int:
            with self._env.begin() as txn, txn.cursor() as cursor:
                return sum(1 for _ in cursor.iternext(keys=False, values=True))

        return read

    def close(self) -> None:
        self._env.close()


PEERS = [Lmdb]
