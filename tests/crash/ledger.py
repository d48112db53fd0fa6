"""The ledger: what a workload tried and what it was promised, and whether a directory can be right by it.

An operation is a dict, so that it can be a mark (a line of JSON):

    {"op": "send", "q": queue, "ids": [...]}             each of them on its own, in order: a crash keeps a prefix
    {"op": "ack", "q": queue, "ids": [...]}              all or none
    {"op": "tx", "send": [[queue, id]...], "ack": [...]} all or none, in whichever stores; with an "xid", it was
                                                         prepared before, and this is its commit
    {"op": "prepare", "xid": ..., "send", "ack"}         held until its outcome, a tx or:
    {"op": "rollback", "xid": ...}

A queue is a queue's name, or `topic/name` for a durable subscription: what is sent to a topic is a tx of sends to all.
Or it is `=map`: a value that is put is a send, and an ack of the one before; a key that is removed is an ack.
An id is `producer.number`; a producer's numbers rise within a queue. The message's body follows from its id.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anabranch
from anabranch.policies.names.destination import Kind

Operation = dict[str, Any]
Contents = Mapping[str, Sequence[str]]
"""Queue name -> the ids in it, in order."""


def body_of(identity: str, size: int = 0) -> bytes:
    """A body that says which message it is, and can be checked to the last byte."""
    pattern = hashlib.sha256(identity.encode()).digest()
    start = f"{identity}|{size}|".encode()
    return start + (pattern * (size // len(pattern) + 1))[:size]


def identity_of(body: bytes) -> str:
    """Raises AssertionError if the body is not one that `body_of` made."""
    identity, size, _ = body.split(b"|", 2)
    if body != body_of(identity.decode(), int(size)):
        raise AssertionError(f"the body of {identity!r} is not the one that was sent")
    return identity.decode()


def contents(router: anabranch.Router) -> dict[str, list[str]]:
    """What a router's queues and subscriptions hold, without the empty ones."""
    found: dict[str, list[str]] = {}
    for destination in router.destinations():
        names = [destination.name]
        if destination.kind is Kind.MAP:
            if values := values_of(router, destination):
                found[f"={destination.name}"] = values
            continue
        if destination.kind is Kind.TOPIC:
            known = router.topic(destination.name).subscriptions()
            names = [f"{destination.name}/{subscriber.subscription.name}" for subscriber in known]
        for name in names:
            queue = source(router, name)
            messages = [identity_of(message.read()) for message in queue.browse()]
            if len(messages) != queue.depth():
                raise AssertionError(f"{name}: depth says {queue.depth()}, browse shows {len(messages)}")
            if messages:
                found[name] = messages
    return found


def values_of(router: anabranch.Router, destination: anabranch.Destination) -> list[str]:
    """The values of a map, by their numbers. Each is found by its key, too."""
    values = router.map(destination)
    items = list(values.items())
    wrong = [key for key, value in items if values.get(key) != value]
    if wrong or len(items) != values.count() or items != sorted(items, key=lambda item: item[0].encode()):
        raise AssertionError(f"{destination}: count says {values.count()}, {len(items)} are there; wrong: {wrong}")
    return sorted((identity_of(value) for _, value in items), key=_by_number)


def _by_number(identity: str) -> tuple[str, int]:
    producer, _, number = identity.rpartition(".")
    return producer, int(number)


def source(router: anabranch.Router, name: str) -> anabranch.Queue | anabranch.Subscriber:
    """What the ledger calls a queue."""
    topic, _, subscription = name.partition("/")
    if not subscription:
        return router.queue(name)
    return next(s for s in router.topic(topic).subscriptions() if s.subscription.name == subscription)


def violations(router: anabranch.Router) -> list[str]:
    """What check() finds in all of the router's stores."""
    router.stats()  # opens them all
    return [line for store in router._registry.open_stores() for line in store.check()]


def nothing_else_waits(router: anabranch.Router) -> list[str]:
    """A crash leaves nothing in doubt but what a transaction manager has to end (rule T3)."""
    waiting = router.recover()
    return [f"in doubt: {known}" for known in router.in_doubt() if known.xid not in waiting]


class Marks:
    """Where a workload says what it does. Threads: all. Each mark is one write."""

    def __init__(self, path: str | Path | None = None) -> None:
        self.path = Path(path or os.environ["CRASHSIM_MARKS"])
        self._fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._lock = threading.Lock()

    def write(self, word: str, operation: Operation) -> None:
        with self._lock:
            os.write(self._fd, f"{word} {json.dumps(operation)}\n".encode())

    def trying(self, operation: Operation) -> None:
        self.write("TRY", operation)

    def promised(self, operation: Operation) -> None:
        self.write("ACK", operation)


def whole_lines(path: Path) -> list[str]:
    """Of a file of marks, but a torn last one."""
    return [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def read_marks(path: Path) -> tuple[list[Operation], list[Operation]]:
    """(promised, maybe) of a file of marks."""
    tried: dict[str, int] = {}
    promised: list[Operation] = []
    for line in whole_lines(path):
        word, _, text = line.partition(" ")
        if word == "TRY":
            tried[text] = tried.get(text, 0) + 1
        elif word == "ACK":
            tried[text] -= 1
            promised.append(json.loads(text))
        elif word == "NOT":
            tried[text] -= 1
    return promised, [json.loads(text) for text, left in tried.items() if left]


def sends_of(operation: Operation) -> list[tuple[str, str]]:
    if operation["op"] == "tx":
        return [(queue, identity) for queue, identity in operation["send"]]
    return [(operation["q"], identity) for identity in operation["ids"]] if operation["op"] == "send" else []


def acks_of(operation: Operation) -> list[tuple[str, str]]:
    if operation["op"] == "tx":
        return [(queue, identity) for queue, identity in operation["ack"]]
    return [(operation["q"], identity) for identity in operation["ids"]] if operation["op"] == "ack" else []


def compare(
    found: Contents,
    promised: Iterable[Operation],
    maybe: Iterable[Operation],
    elsewhere: Iterable[tuple[str, str]] = (),
) -> list[str]:
    """Why the contents cannot be right (invariants 1 to 4); empty if they can. What is `elsewhere`, in a dead-letter
    queue, counts as being in its queue, in no order."""
    promised, maybe = list(promised), list(maybe)
    present = {(queue, identity) for queue, ids in found.items() for identity in ids} | set(elsewhere)
    sent = {pair for operation in promised for pair in sends_of(operation)}
    known = sent | {pair for operation in maybe for pair in sends_of(operation)}
    acked = {pair for operation in promised for pair in acks_of(operation)}
    touched = acked | {pair for operation in maybe for pair in acks_of(operation)}
    wrong = [f"lost: {name(pair)} was promised and is gone" for pair in sorted(sent - touched - present)]
    wrong += [f"came back: {name(pair)} was acked" for pair in sorted(acked & present)]
    wrong += [f"never sent: {name(pair)}" for pair in sorted(present - known)]
    sends = Counter(pair for operation in (*promised, *maybe) for pair in sends_of(operation))
    acks = Counter(pair for operation in (*promised, *maybe) for pair in acks_of(operation))
    for operation in maybe:
        wrong += _half_done(operation, present, sent, sends, acks)
    for queue, ids in found.items():
        wrong += _disorder(queue, ids)
    return wrong


def name(pair: tuple[str, str]) -> str:
    return f"{pair[1]} of {pair[0]}"


def _half_done(
    operation: Operation,
    present: set[tuple[str, str]],
    sent: set[tuple[str, str]],
    sends: Counter[tuple[str, str]],
    acks: Counter[tuple[str, str]],
) -> Iterator[str]:
    """An operation of unknown outcome took effect as a whole or not at all; a send of many in a prefix.

    `sends` and `acks` say how many operations tried each: what another one tried too tells nothing about this one. Nor
    does it tell anything that a message is gone whose send was not promised.
    """
    signs = [  # of each part whose fate tells: did it take effect?
        (pair, pair in present or acks[pair] > 0) for pair in sends_of(operation) if sends[pair] == 1
    ]
    if operation["op"] == "send":
        flags = [done for _, done in signs]
        if flags != sorted(flags, reverse=True):
            yield f"a send of many kept no prefix: {operation}"
        return
    signs += [
        (pair, pair not in present)
        for pair in acks_of(operation)
        if acks[pair] == 1 and (pair in present or pair in sent)
    ]
    if len({done for _, done in signs}) > 1:
        done, undone = (next(name(pair) for pair, flag in signs if flag is wanted) for wanted in (True, False))
        yield f"half done: {done} took effect, {undone} did not: {operation}"


def _disorder(queue: str, ids: Sequence[str]) -> Iterator[str]:
    last: dict[str, int] = {}
    for identity in ids:
        producer, number = re.fullmatch(r"(.+)\.(\d+)", identity).groups()  # type: ignore[union-attr]
        if int(number) == last.get(producer):
            yield f"twice: {identity} of {queue}"
        elif int(number) < last.get(producer, -1):
            yield f"out of order: {identity} of {queue} comes after {producer}.{last[producer]}"
        last[producer] = int(number)


@dataclass
class Prefix:
    """For policies under which a power failure keeps a prefix of one thread's operations (invariant 1)."""

    operations: list[Operation]
    floor: int
    """So many of them are promised."""
    state: dict[str, list[str]] = field(default_factory=dict)

    def compare(self, found: Contents) -> list[str]:
        """Whether the contents are what some prefix of at least `floor` operations leaves."""
        wanted = {queue: list(ids) for queue, ids in found.items()}
        for done in range(len(self.operations) + 1):
            if done >= self.floor and {queue: ids for queue, ids in self.state.items() if ids} == wanted:
                return []
            if done < len(self.operations):
                self._apply(self.operations[done])
        counts = {queue: (len(ids), ids[-1]) for queue, ids in wanted.items()}
        return [f"no prefix of at least {self.floor} of {len(self.operations)} operations leaves {counts}"]

    def _apply(self, operation: Operation) -> None:
        for queue, identity in sends_of(operation):
            self.state.setdefault(queue, []).append(identity)
        for queue, identity in acks_of(operation):
            self.state[queue].remove(identity)


@dataclass
class Held:
    """What is known of the external transactions, by xid: what they do, if that was promised, and their outcomes."""

    prepares: dict[str, Operation] = field(default_factory=dict)
    prepared: set[str] = field(default_factory=set)
    outcomes: dict[str, Operation] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, lines: Iterable[str]) -> Held:
        """From lines of marks, in order."""
        held = cls()
        for line in lines:
            word, _, text = line.partition(" ")
            operation = json.loads(text)
            xid = operation.get("xid")
            if xid is None:
                continue
            if operation["op"] == "prepare":
                held.prepares[xid] = operation
                held.prepared |= {xid} if word == "ACK" else set()
            else:
                held.outcomes[xid] = operation
                held.ended |= {xid} if word == "ACK" else set()
        return held

    def compare(self, waiting: Iterable[str], found: Contents) -> list[str]:
        """Why these cannot be the ones that wait for their outcome, the queues holding this; empty if they can."""
        waiting = set(waiting)
        present = {(queue, identity) for queue, ids in found.items() for identity in ids}
        wrong = [f"never prepared: {xid}" for xid in waiting - set(self.prepares)]
        wrong += [f"ended, and waits: {xid}" for xid in waiting & self.ended]
        wrong += [f"prepared, and forgotten: {xid}" for xid in self.prepared - set(self.outcomes) - waiting]
        for xid in waiting & set(self.prepares):
            tx = {**self.prepares[xid], "op": "tx"}
            wrong += [f"waits, and {name(pair)} is seen: {xid}" for pair in sends_of(tx) if pair in present]
            wrong += [f"waits, and {name(pair)} is gone: {xid}" for pair in acks_of(tx) if pair not in present]
        return wrong

    def claimed(self, waiting: Iterable[str]) -> set[tuple[str, str]]:
        """What nobody may receive while these wait."""
        return {pair for xid in waiting for pair in acks_of({**self.prepares[xid], "op": "tx"})}
