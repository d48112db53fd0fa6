"""What the workloads are made of: how the stores are set up, and a worker that marks what it does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anabranch

from ..ledger import Marks, Operation, body_of, identity_of

SEGMENT = 64 * 1024


@dataclass(frozen=True)
class Workload:
    """A program, and how the store that it uses is set up."""

    run: Callable[[Path, Workload], None]
    options: dict[str, Any]
    prefix: bool = False
    """A power failure may lose the latest operations, but not those promised with sync=True or by close()."""


def config(directory: Path, options: dict[str, Any]) -> anabranch.Config:
    """One store for all, but for what is named `own.*` and `each.*`, and one of each policy for transactions over
    several stores: `always.*`, `periodic.*`, `never.*`."""
    journal = anabranch.JournalOptions(**{"segment_size": SEGMENT} | options)
    of_policy = [
        anabranch.StoreConfig(
            sync.value, [f"queue://{sync.value}.>"], journal=journal.model_copy(update={"sync": sync})
        )
        for sync in anabranch.Sync
    ]
    return anabranch.Config(
        directory,
        [
            anabranch.StoreConfig("all", [">"], journal=journal),
            anabranch.StoreConfig("own", ["queue://own.>"], journal=journal),
            anabranch.StoreConfig("each", ["queue://each.>"], per_destination=True, journal=journal),
            *of_policy,
        ],
    )


class Worker:
    """One thread's doings, each with its marks."""

    def __init__(self, router: anabranch.Router, marks: Marks, name: str, vouched: bool = True) -> None:
        self.router, self.marks, self.name = router, marks, name
        self.vouched = vouched
        """Its operations are promised when they return; else only when asked to be."""
        self.sent = 0

    def _did(self, operation: Operation, promised: bool) -> None:
        if self.vouched or promised:
            self.marks.promised(operation)

    def send(self, queue: str, size: int, count: int = 1, sync: bool | None = None, named: bool = False) -> list[str]:
        ids = [f"{self.name}.{self.sent + n}" for n in range(count)]
        self.sent += count
        self.perform({"op": "send", "q": queue, "ids": ids, "size": size, "named": named}, sync)
        return ids

    def perform(self, operation: Operation, sync: bool | None = None) -> None:
        """A send as its mark says; once more, if need be."""
        self.marks.trying(operation)
        queue, size, named = self.router.queue(operation["q"]), operation["size"], operation["named"]
        messages = [anabranch.Outgoing(body_of(i, size), None, i if named else None) for i in operation["ids"]]
        if len(messages) == 1:
            queue.send(messages[0].body, message_id=messages[0].message_id, sync=sync)
        else:
            queue.send_many(messages, sync)
        self._did(operation, bool(sync))

    def again(self, queue: str, identity: str, size: int) -> None:
        operation = {"op": "send", "q": queue, "ids": [identity]}
        self.marks.trying(operation)
        receipt = self.router.queue(queue).send(body_of(identity, size), message_id=identity)
        assert receipt.duplicate, identity
        self._did(operation, False)

    def receive(self, queue: str, count: int = 1) -> list[anabranch.Message]:
        found = (self.router.queue(queue).receive() for _ in range(count))
        return [message for message in found if message is not None]

    def ack(self, queue: str, count: int = 1) -> None:
        messages = self.receive(queue, count)
        if messages:
            operation = {"op": "ack", "q": queue, "ids": [identity_of(message.body) for message in messages]}
            self.marks.trying(operation)
            self.router.ack(messages)
            self._did(operation, False)

    def transaction(self, sends: dict[str, int], acks: dict[str, int], size: int) -> None:
        operation: Operation = {"op": "tx", "send": [], "ack": []}
        with self.router.transaction() as tx:
            for queue, count in sends.items():
                for _ in range(count):
                    identity = f"{self.name}.{self.sent}"
                    self.sent += 1
                    tx.send(queue, body_of(identity, size))
                    operation["send"].append([queue, identity])
            for queue, count in acks.items():
                for message in self.receive(queue, count):
                    tx.ack(message)
                    operation["ack"].append([queue, identity_of(message.body)])
            self.marks.trying(operation)
        self._did(operation, False)

    def empty(self, queue: str, delete: bool) -> None:
        target = self.router.queue(queue)
        operation = {"op": "ack", "q": queue, "ids": [identity_of(message.body) for message in target.browse()]}
        self.marks.trying(operation)
        target.delete() if delete else target.purge()
        self._did(operation, False)
