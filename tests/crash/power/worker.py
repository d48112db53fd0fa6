"""What the workloads are made of: how the stores are set up, and a worker that marks what it does."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anabranch
from anabranch.adapters.core.messages import DEFAULT_PRIORITY
from anabranch.policies.config.options import StoreOptions

from ..ledger import Held, Marks, Operation, body_of, identity_of, source

SEGMENT = 64 * 1024
FORMAT = 7
"""Of the workloads' xids."""


def config(directory: Path, options: dict[str, Any]) -> anabranch.Config:
    """One store for all, but for what is named `own.*` and `each.*`, and one of each policy for transactions over
    several stores: `always.*`, `periodic.*`, `never.*`. They are journals, but `all` with the option `sqlite`; other
    options are those of the stores that know them."""
    options = {"segment_size": SEGMENT} | options
    in_sqlite = options.pop("sqlite", False)
    journal = anabranch.JournalOptions(**_known(anabranch.JournalOptions, options))
    of_all: dict[str, Any] = {"journal": journal}
    if in_sqlite:
        of_all = {"sql": anabranch.SqlOptions(**_known(anabranch.SqlOptions, options))}
    of_policy = [
        anabranch.StoreConfig(
            sync.value, [f"queue://{sync.value}.>"], journal=journal.model_copy(update={"sync": sync})
        )
        for sync in anabranch.Sync
    ]
    return anabranch.Config(
        directory,
        [
            anabranch.StoreConfig("all", [">"], **of_all),
            anabranch.StoreConfig("own", ["queue://own.>"], journal=journal),
            anabranch.StoreConfig("each", ["queue://each.>"], per_destination=True, journal=journal),
            *of_policy,
        ],
    )


def _known(kind: type[StoreOptions], options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name in kind.model_fields}


@dataclass(frozen=True)
class Workload:
    """A program, and how the store that it uses is set up."""

    run: Callable[[Path, Workload], None]
    options: dict[str, Any]
    prefix: bool = False
    """A power failure may lose the latest operations, but not those promised with sync=True or by close()."""
    setup: Callable[[Path, dict[str, Any]], anabranch.Config] = config
    waits: bool = False
    """Its marks say until when messages wait (waiting.py)."""
    check: Callable[[Path, Workload, dict[str, Any]], list[str]] | None = None
    """What is wrong in a directory of which these are the marks, if the checker's own ways do not tell."""


class Worker:
    """One thread's doings, each with its marks."""

    def __init__(
        self,
        router: anabranch.Router,
        marks: Marks,
        name: str,
        vouched: bool = True,
        of_file: Callable[[bytes], Any] = lambda body: body,
    ) -> None:
        """`of_file` makes of a body what is sent."""
        self.router, self.marks, self.name = router, marks, name
        self.vouched = vouched
        """Its operations are promised when they return; else only when asked to be."""
        self.of_file = of_file
        self.sent = 0
        self.values: dict[tuple[str, str], str] = {}
        """By map and key."""

    def _did(self, operation: Operation, promised: bool) -> None:
        if self.vouched or promised:
            self.marks.promised(operation)

    def send(
        self,
        queue: str,
        size: int,
        count: int = 1,
        sync: bool | None = None,
        named: bool = False,
        priority: int = DEFAULT_PRIORITY,
    ) -> list[str]:
        ids = [f"{self.name}.{self.sent + n}" for n in range(count)]
        self.sent += count
        self.perform({"op": "send", "q": queue, "ids": ids, "size": size, "named": named}, sync, priority)
        return ids

    def perform(self, operation: Operation, sync: bool | None = None, priority: int = DEFAULT_PRIORITY) -> None:
        """A send as its mark says; once more, if need be."""
        self.marks.trying(operation)
        queue, size, named = self.router.queue(operation["q"]), operation["size"], operation["named"]
        messages = [
            anabranch.Outgoing(self.of_file(body_of(i, size)), None, i if named else None, priority)
            for i in operation["ids"]
        ]
        if len(messages) == 1:
            queue.send(messages[0].body, message_id=messages[0].message_id, sync=sync, priority=priority)
        else:
            queue.send_many(messages, sync)
        self._did(operation, bool(sync))

    def again(self, queue: str, identity: str, size: int) -> None:
        operation = {"op": "send", "q": queue, "ids": [identity]}
        self.marks.trying(operation)
        receipt = self.router.queue(queue).send(body_of(identity, size), message_id=identity)
        assert receipt.duplicate, identity
        self._did(operation, False)

    def publish(self, topic: str, size: int, **given: Any) -> None:
        """To a topic; each of its durable subscriptions gets it."""
        identity = f"{self.name}.{self.sent}"
        self.sent += 1
        known = self.router.topic(topic).subscriptions()
        names = [f"{topic}/{subscriber.subscription.name}" for subscriber in known]
        operation = {"op": "tx", "send": [[name, identity] for name in names], "ack": []}
        self.marks.trying(operation)
        self.router.topic(topic).send(body_of(identity, size), **given)
        self._did(operation, False)

    def receive(self, queue: str, count: int = 1) -> list[anabranch.Message]:
        target = source(self.router, queue)
        found = (target.receive() for _ in range(count))
        return [message for message in found if message is not None]

    def ack(self, queue: str, count: int = 1) -> None:
        messages = self.receive(queue, count)
        if messages:
            operation = {"op": "ack", "q": queue, "ids": [identity_of(message.read()) for message in messages]}
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
                    tx.send(queue, self.of_file(body_of(identity, size)))
                    operation["send"].append([queue, identity])
            for queue, count in acks.items():
                for message in self.receive(queue, count):
                    tx.ack(message)
                    operation["ack"].append([queue, identity_of(message.read())])
            self.marks.trying(operation)
        self._did(operation, False)

    def ring(self, sends: dict[str, int], size: int, held: Sequence[anabranch.Message], most: int) -> None:
        """Send to queues of which each keeps so many messages, in a transaction where there are several."""
        operation: Operation = {"op": "tx", "send": [], "ack": []}
        kept = {message.seq for message in held}
        messages: list[tuple[str, bytes]] = []
        for name, count in sends.items():
            there = list(self.router.queue(name).browse())
            free = [message for message in there if message.seq not in kept]
            going = free[: max(0, len(there) + count - most)]
            operation["ack"] += [[name, identity_of(message.body)] for message in going]
            for _ in range(count):
                identity = f"{self.name}.{self.sent}"
                self.sent += 1
                messages.append((name, body_of(identity, size)))
                operation["send"].append([name, identity])
        self.marks.trying(operation)
        if len(messages) == 1:
            self.router.queue(messages[0][0]).send(messages[0][1])
        else:
            with self.router.transaction() as tx:
                for name, body in messages:
                    tx.send(name, body)
        self._did(operation, False)

    def put(self, name: str, key: str, size: int, ttl: float | None = None) -> None:
        """A value, whatever is there; every other time only if it is what is expected."""
        operation = self._put(name, key)
        self.marks.trying(operation)
        values, before = self.router.map(name), self.values.get((name, key))
        body = body_of(operation["send"][0][1], size)
        if self.sent % 2 or before is None:
            values.put(key, body, ttl=ttl)
        else:
            assert values.compare_and_set(key, values.get(key), body, ttl=ttl)
        self.values[name, key] = operation["send"][0][1]
        self._did(operation, False)

    def _put(self, name: str, key: str) -> Operation:
        identity = f"{self.name}.{self.sent}"
        self.sent += 1
        before = self.values.get((name, key))
        acks = [[f"={name}", before]] if before is not None else []
        return {"op": "tx", "send": [[f"={name}", identity]], "ack": acks}

    def pop(self, name: str, key: str) -> None:
        identity = self.values.pop((name, key), None)
        operation = {"op": "ack", "q": f"={name}", "ids": [identity] if identity is not None else []}
        self.marks.trying(operation)
        body = self.router.map(name).pop(key)
        assert (identity_of(body) if body is not None else None) == identity
        self._did(operation, False)

    def finish(self, queue: str, name: str, key: str, size: int, gone: str = "") -> None:
        """A message is acked and its result put, and another key removed, together."""
        operation = self._put(name, key)
        with self.router.transaction() as tx:
            tx.put(name, key, body_of(operation["send"][0][1], size))
            for message in self.receive(queue):
                tx.ack(message)
                operation["ack"].append([queue, identity_of(message.body)])
            if gone:
                tx.remove(name, gone)
                if (identity := self.values.get((name, gone))) is not None:
                    operation["ack"].append([f"={name}", identity])
            self.marks.trying(operation)
        self.values[name, key] = operation["send"][0][1]
        self.values.pop((name, gone), None)
        self._did(operation, False)

    def empty(self, queue: str, delete: bool) -> None:
        target = self.router.queue(queue)
        operation = {"op": "ack", "q": queue, "ids": [identity_of(message.read()) for message in target.browse()]}
        self.marks.trying(operation)
        target.delete() if delete else target.purge()
        self._did(operation, False)

    def prepare(self, xid: str, sends: Sequence[str], acks: Sequence[str], size: int = 200) -> Operation:
        """An external transaction of a message to each of `sends` and from each of `acks`, prepared."""
        operation: Operation = {"op": "prepare", "xid": xid, "send": [], "ack": []}
        tx = self.router.transaction(xid=anabranch.Xid(FORMAT, xid))
        for queue in sends:
            identity = f"{xid}.{len(operation['send'])}"  # its own producer: others' sends may overtake it
            tx.send(queue, body_of(identity, size))
            operation["send"].append([queue, identity])
        for queue in acks:
            for message in self.receive(queue):
                tx.ack(message)
                operation["ack"].append([queue, identity_of(message.read())])
        self.marks.trying(operation)
        tx.prepare()
        self.marks.promised(operation)
        return operation

    def end(self, prepared: Operation, commit: bool) -> None:
        """Its outcome."""
        xid = prepared["xid"]
        operation = {**prepared, "op": "tx"} if commit else {"op": "rollback", "xid": xid}
        self.marks.trying(operation)
        (self.router.commit if commit else self.router.rollback)(anabranch.Xid(FORMAT, xid))
        self.marks.promised(operation)

    def end_left(self, held: Held, left: float, chance: random.Random) -> None:
        """Say the outcomes of what an earlier process left prepared; the one that it had begun to say, if it had. So
        many of the others are left again."""
        for xid in self.router.recover():
            said = held.outcomes.get(xid.global_id)
            if said is not None or chance.random() >= left:
                commit = said["op"] == "tx" if said is not None else chance.random() < 0.5
                self.end(held.prepares[xid.global_id], commit)
