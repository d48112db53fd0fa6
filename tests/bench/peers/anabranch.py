"""Anabranch through its public API.

Durable: `sync: always`. Not durable: `sync: never`; what returned then survives the process, not a power loss.
`receive` leases, `ack` is a record of its own in the journal. `anabranch-split` replays the toy maker's day with
`orders.custom` and `dlq` in stores of their own, `anabranch-compacted` in one store of the smallest segments that
compacts as much as pays there: pending are 675 messages at most, 20 such segments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import anabranch
from anabranch import Destination

from .. import toymaker

TOGETHER = {f"store-{number}": [f"queue://apart-{number}"] for number in range(4)} | {"all": [">"]}
SPLIT = {"custom": ["queue://orders.custom"], "dlq": ["queue://dlq"], "rest": [">"]}
STORES = 100


def opened(
    directory: Path, stores: dict[str, list[str]], *, durable: bool, segment_bytes: int = 32 * 2**20, **options: Any
) -> anabranch.Router:
    journal = anabranch.JournalOptions(
        sync=anabranch.Sync.ALWAYS if durable else anabranch.Sync.NEVER, segment_size=segment_bytes, **options
    )
    return anabranch.open(
        anabranch.Config(
            directory=directory,
            stores=[anabranch.StoreConfig(name=name, match=match, journal=journal) for name, match in stores.items()],
        )
    )


class Anabranch:
    name = "anabranch"

    def __init__(self, directory: Path, *, durable: bool) -> None:
        self._router = opened(directory, TOGETHER, durable=durable)
        self._queue = self._router.queue("bench")

    def sender(self) -> Callable[[bytes], object]:
        return self._queue.send

    def senders_apart(self, count: int, messages: int, payload_bytes: int) -> list[Callable[[bytes], object]]:
        """At most four: so many stores there are."""
        return [self._router.queue(f"apart-{number}").send for number in range(count)]

    def batch_sender(self) -> Callable[[list[bytes]], object]:
        return self._queue.send_many

    def transaction(self) -> Callable[[list[bytes]], None]:
        def commit(bodies: list[bytes]) -> None:
            with self._router.transaction() as tx:
                for body in bodies:
                    tx.send("queue://bench", body)

        return commit

    def cross_transaction(self, stores: int) -> Callable[[list[bytes]], None]:
        def commit(bodies: list[bytes]) -> None:
            with self._router.transaction() as tx:
                for number, body in enumerate(bodies):
                    tx.send(f"queue://apart-{number % stores}", body)

        return commit

    def receiver(self) -> Callable[[], bytes]:
        def take() -> bytes:
            message = self._queue.receive(timeout=0)
            assert message is not None
            message.ack()
            return message.body

        return take

    def reader(self) -> Callable[[], int]:
        self._queue.depth()  # opens the store, which recover-clean measures
        return lambda: sum(1 for message in self._queue.browse(limit=None) if message.body)

    @staticmethod
    def routes(directory: Path) -> Routes:
        return Routes(directory)

    @staticmethod
    def many(directory: Path, stores: int) -> ManyStores:
        return ManyStores(directory, stores)

    @staticmethod
    def sql(directory: Path) -> Any:
        from .sql import SqlStore

        return SqlStore(directory, None)

    @staticmethod
    def drop_index(directory: Path) -> None:
        (directory / "stores" / "all" / "index.mdb").unlink()

    @staticmethod
    def day(directory: Path) -> Day:
        return Day(directory, TOGETHER)

    def close(self) -> None:
        self._router.close()


class ManyStores:
    """So many destinations, each with a journal store of its own."""

    def __init__(self, directory: Path, stores: int) -> None:
        journal = anabranch.JournalOptions(sync=anabranch.Sync.NEVER, segment_size=64 * 1024)
        each = anabranch.StoreConfig("each", [">"], per_destination=True, journal=journal)
        self._router = anabranch.open(anabranch.Config(directory, [each]))
        self.senders = [self._router.queue(f"q.{number}").send for number in range(stores)]
        self.close = self._router.close


class Routes:
    """A hundred stores to choose from, none of them open."""

    def __init__(self, directory: Path) -> None:
        stores = {f"store-{number}": [f"queue://area-{number}.>"] for number in range(STORES)}
        self._router = opened(directory, stores, durable=False)
        self.find = self._router._registry.route
        self.destinations = [Destination.parse(f"queue://area-{number}.line.press") for number in range(STORES)]
        self.close = self._router.close


class Day:
    """The toy maker's queues in these stores. A message's id is in the first bytes of its body.

    What counts as disk is the files that hold records, as they are when looked at, with reclaiming in the background at
    its own pace. Files in the pool, at most two a store, hold none.
    """

    def __init__(
        self, directory: Path, stores: dict[str, list[str]], segment_bytes: int = toymaker.SEGMENT_BYTES, **options: Any
    ) -> None:
        self._router = opened(directory, stores, durable=False, segment_bytes=segment_bytes, **options)
        self._in_hand: dict[tuple[str, int], anabranch.Message] = {}

    def send(self, messages: Sequence[tuple[str, int, bytes]]) -> None:
        if len(messages) == 1:
            destination, _, body = messages[0]
            self._router.queue(destination).send(body)
            return
        with self._router.transaction() as tx:
            for destination, _, body in messages:
                tx.send(f"queue://{destination}", body)

    def ack(self, destination: str, id: int) -> None:
        queue = self._router.queue(destination)
        while (message := self._in_hand.pop((destination, id), None)) is None:
            received = queue.receive(timeout=0)
            assert received is not None, f"{destination} has no message {id}"
            self._in_hand[destination, int.from_bytes(received.body[:8], "big")] = received
        message.ack()

    def disk(self) -> tuple[int, int]:
        stores = self._router.stats().stores.values()
        files = sum(count for store in stores for state, count in store.segments.items() if state != "pooled")
        return files, sum(store.capacity_bytes for store in stores)

    def close(self) -> None:
        self._router.close()


def _of_a_day(name: str, *stores: Any, **options: Any) -> type[Any]:
    """A peer that has the toy maker's day alone."""
    return type(name, (), {"name": name, "day": staticmethod(lambda directory: Day(directory, *stores, **options))})


PEERS = [
    Anabranch,
    _of_a_day("anabranch-split", SPLIT),
    _of_a_day("anabranch-compacted", {"all": [">"]}, 64 * 1024, compact_live_percent=80, compact_min_segments=1),
]
