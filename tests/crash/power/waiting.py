"""A workload of messages that wait for their time, and what must be left of it.

One thread uses one store, so that whatever a crash leaves is what some prefix of its operations left, none of the
promised ones missing: which messages there are, until when each of them waits, and how often each was delivered. An
operation says this of those it is about: `then`, of [queue, id, until, deliveries] each. That a message was given
back, handed out or became due is written without a sync, and is promised by the next operation that is.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import anabranch
from anabranch.adapters.core.engine import lease_times
from anabranch.adapters.core.state.rows import ScheduledRows

from ...contract.disk import eventually
from ..ledger import Contents, Marks, Operation, Prefix, body_of, contents, identity_of, source
from .worker import FORMAT, Workload, config

BEGIN_MS: Final = 2_000_000_000_000
END_MS: Final = 3_000_000_000_000
"""Everything is due by then."""
HOUR: Final = 3_600_000
FAR: Final = 1000 * HOUR
BACKOFF: Final = {"delay": 600.0, "multiplier": 3.0, "max_delay": 10_000.0, "jitter": 0.0}
LEASE: Final = 0.01
"""Seconds. How long it lasts is up to the clock; soon after them somebody looks for the first time."""
EMPTY: Final = "empty"
"""A queue that is known and has nothing for who receives, but brings back what is due."""
State = tuple[int, int]
"""Until when it waits (ms; 0: it is free), and how often it was delivered."""


class Clock:
    """The clocks of one process, which stand still between the steps: the wall clock, and that of leases."""

    def __init__(self) -> None:
        self.ms = BEGIN_MS
        self.lease_seconds = 0.0

    @contextmanager
    def stopped(self) -> Iterator[None]:
        leases = patch.object(lease_times, "monotonic", lambda: self.lease_seconds)
        with patch.object(time, "time_ns", lambda: self.ms * 1_000_000), leases:
            yield


class Waiter:
    """One thread's doings, and what they must have led to."""

    def __init__(self, marks: Marks, clock: Clock, workload: Workload) -> None:
        self.marks, self.clock = marks, clock
        self.vouched = workload.options.get("sync") is None
        self.on_receive = workload.options.get("count_deliveries") == "on_receive"
        self.sent = 0
        self.states: dict[tuple[str, str], State] = {}
        """Of all that is there, in order."""
        self.prepared: list[Operation] = []
        self.router: anabranch.Router

    def _try(self, operation: Operation) -> Operation:
        self.marks.trying(operation)
        apply(self.states, operation)
        return operation

    def _did(self, operation: Operation) -> None:
        if self.vouched:
            self.marks.promised(operation)

    def _new(self) -> str:
        self.sent += 1
        return f"w.{self.sent - 1}"

    def send(self, queue: str, size: int, after: int) -> None:
        """To be delivered so many ms from now, which may have passed."""
        identity, due = self._new(), self.clock.ms + after
        until = due if after > 0 else 0
        then = [[queue, identity, until, 0]]
        operation = self._try({"op": "send", "q": queue, "ids": [identity], "then": then})
        self.router.queue(queue).send(body_of(identity, size), deliver_at=due / 1000)
        self._did(operation)

    def publish(self, topic: str, size: int, after: int) -> None:
        identity, known = self._new(), self.router.topic(topic).subscriptions()
        names = [f"{topic}/{subscriber.subscription.name}" for subscriber in known]
        then = [[name, identity, self.clock.ms + after if after else 0, 0] for name in names]
        operation = {"op": "tx", "send": [[name, identity] for name in names], "ack": [], "then": then}
        self._try(operation)
        self.router.topic(topic).send(body_of(identity, size), deliver_in=after / 1000 if after else None)
        self._did(operation)

    def receive(self, queue: str, lease: float | None = None) -> anabranch.Message | None:
        """The first that is free: it is known which."""
        first = next((i for (q, i), (until, _) in self.states.items() if q == queue and not until), None)
        if first is not None and self.on_receive:
            self._try({"op": "out", "then": [[queue, first, 0, self.states[queue, first][1] + 1]]})
        message = source(self.router, queue).receive(lease=lease)
        found = identity_of(message.body) if message is not None else None
        assert found == first, f"{queue} hands out {found}, not {first}: {self.states}"
        return message

    def back(self, queue: str, delay: float | None, delivered: bool = True, by_rollback: bool = False) -> None:
        """Give one back."""
        if (message := self.receive(queue)) is None:
            return
        self._try_back(queue, message, delay, delivered)
        if by_rollback:
            tx = self.router.transaction()
            tx.ack(message)
            tx.rollback()
        else:
            message.release(delivered=delivered, delay=delay)

    def _try_back(self, queue: str, message: anabranch.Message, delay: float | None, delivered: bool) -> None:
        identity = identity_of(message.body)
        deliveries = self.states[queue, identity][1]
        deliveries += (delivered and not self.on_receive) - (self.on_receive and not delivered)
        wait = delay
        if delay is None and delivered:
            wait = min(BACKOFF["delay"] * BACKOFF["multiplier"] ** (deliveries - 1), BACKOFF["max_delay"])
        until = self.clock.ms + int(wait * 1000) if wait else 0
        self._try({"op": "back", "then": [[queue, identity, until, deliveries]]})

    def run_out(self, queue: str) -> None:
        """One is leased, and neither settled nor extended."""
        if (message := self.receive(queue, LEASE)) is not None:
            self._try_back(queue, message, None, True)
            self.clock.lease_seconds += LEASE
            target = source(self.router, queue)
            eventually(lambda: target.counts().leased == 0, target.counts)

    def ack(self, queue: str) -> None:
        if (message := self.receive(queue)) is not None:
            operation = self._try({"op": "ack", "q": queue, "ids": [identity_of(message.body)]})
            message.ack()
            self._did(operation)

    def transaction(self, queue: str, size: int, after: int) -> None:
        """One is acked, one is sent to wait."""
        message, identity = self.receive(queue), self._new()
        acks = [[queue, identity_of(message.body)]] if message is not None else []
        then = [[queue, identity, self.clock.ms + after, 0]]
        operation = self._try({"op": "tx", "send": [[queue, identity]], "ack": acks, "then": then})
        with self.router.transaction() as tx:
            tx.send(queue, body_of(identity, size), deliver_in=after / 1000)
            if message is not None:
                tx.ack(message)
        self._did(operation)

    def prepare(self, queue: str, size: int, after: int) -> None:
        xid = f"x{self.sent}"
        identity = self._new()
        then = [[queue, identity, self.clock.ms + after, 0]]
        operation = {"op": "prepare", "xid": xid, "send": [[queue, identity]], "ack": [], "later": then}
        tx = self.router.transaction(xid=anabranch.Xid(FORMAT, xid))
        tx.send(queue, body_of(identity, size), deliver_in=after / 1000)
        self._try(operation)
        tx.prepare()
        self.marks.promised(operation)
        self.prepared.append(operation)

    def end(self, commit: bool) -> None:
        """Of what was prepared first."""
        prepared = self.prepared.pop(0)
        xid = prepared["xid"]
        done = {**prepared, "op": "tx", "then": prepared["later"]}
        operation = self._try(done if commit else {"op": "rollback", "xid": xid})
        (self.router.commit if commit else self.router.rollback)(anabranch.Xid(FORMAT, xid))
        self.marks.promised(operation)
        self.pass_time(0)

    def pass_time(self, ms: int) -> None:
        """What is due then is from the next receive on free for ever."""
        now = self.clock.ms + ms
        due = [[*pair, 0, times] for pair, (until, times) in self.states.items() if 0 < until <= now]
        self._try({"op": "due", "clock": now, "then": due})
        self.clock.ms = now
        assert self.router.queue(EMPTY).receive() is None


def apply(states: dict[tuple[str, str], State], operation: Operation) -> None:
    """What an operation does to them."""
    if operation["op"] == "ack":
        for identity in operation["ids"]:
            del states[operation["q"], identity]
    elif operation["op"] == "tx":
        for queue, identity in operation["ack"]:
            del states[queue, identity]
    for queue, identity, until, deliveries in operation.get("then", ()):
        states[queue, identity] = until, deliveries


def waiting(directory: Path, workload: Workload) -> None:
    """Sends for times that have passed, are near or far, alone, in transactions and in prepared branches; delays, the
    backoff, a rollback, a lease that runs out; for subscriptions, too. Time passes, segments go and move together, the
    index is made anew."""
    clock, marks = Clock(), Marks()
    worker = Waiter(marks, clock, workload)
    with clock.stopped():
        for life in range(3):
            with anabranch.open(config(directory, workload.options)) as worker.router:
                for name in ("quick", "slow"):
                    worker.router.topic("t").subscribe(name)
                if life == 0:
                    worker.send(EMPTY, 10, END_MS - BEGIN_MS)
                for turn in range(7):
                    _turn(worker, turn)
            marks.write("CLOSED", {})
            if life == 1:
                for index in directory.rglob("index.mdb"):
                    index.unlink()
                    _sync(index.parent)


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def _turn(worker: Waiter, turn: int) -> None:
    for after in (-HOUR, HOUR, 3 * HOUR, FAR):
        worker.send("q", 700 + 2900 * (turn % 3), after)
    worker.publish("t", 300, (0, 2 * HOUR, FAR)[turn % 3])
    worker.send("q", 9000, 0)
    worker.back("q", None)
    worker.back("q", 7200.0, delivered=turn % 2 == 0)
    worker.back("t/slow", (None, 600.0, 0.0)[turn % 3])
    worker.back("q", None, by_rollback=True)
    if turn % 3 == 1:
        worker.run_out(("q", "t/slow")[turn % 2])
    worker.transaction("q", 400, HOUR if turn % 2 else FAR)
    worker.prepare("p", 500, 2 * HOUR if turn % 2 else FAR)
    if turn % 3:  # what was written before is synced by now: the decision itself syncs nothing of the store
        worker.end(commit=turn % 4 != 1)
    worker.ack("t/quick")
    worker.pass_time((HOUR // 2, 2 * HOUR, 4 * HOUR)[turn % 3])
    for queue in ("q", "q", "q", "p", "t/slow"):
        worker.ack(queue)
    if turn % 2:
        worker.router.reclaim()
    if turn == 4:
        worker.router.compact()


def states_of(router: anabranch.Router) -> dict[tuple[str, str], State]:
    """Of all that is there."""
    found: dict[tuple[str, str], State] = {}
    for name in contents(router):
        if not name.startswith("="):
            for message in source(router, name).browse():
                found[name, identity_of(message.read())] = until_of(router, message), message.deliveries
    return found


def until_of(router: anabranch.Router, message: anabranch.Message) -> int:
    """Until when it waits (ms); 0: it is free."""
    engine = router._registry.store_for(message.destination)._engine
    state, key = engine.catalog.destinations[message.destination], message.subscription
    subscriber = state.subscriptions[key] if key is not None else None

    def until() -> int:
        assert isinstance(engine.rows, ScheduledRows)
        return engine.rows.until(state, subscriber, message.seq)

    return engine.asked(until)


def compare(router: anabranch.Router, found: Contents, marks: Sequence[Sequence[Any]]) -> list[str]:
    """Why this cannot be what some prefix of the operations has left."""
    operations: list[Operation] = []
    floor = 0
    for line, _ in marks:
        word, _, text = line.partition(" ")
        if word == "TRY":
            operations.append(json.loads(text))
        else:
            floor = len(operations)
    there, states, now = states_of(router), dict[tuple[str, str], State](), BEGIN_MS
    prefix, nearest = Prefix(operations, floor), f"it holds {dict(found)}"
    for done in range(len(operations) + 1):
        if done:
            prefix._apply(operations[done - 1])
            apply(states, operations[done - 1])
            now = operations[done - 1].get("clock", now)
        if done >= floor and {queue: ids for queue, ids in prefix.state.items() if ids} == found:
            wrong = [pair for pair, wanted in states.items() if not _fits(there[pair], wanted, now)]
            if not wrong:
                return []
            nearest = ", ".join(f"{pair} is {there[pair]}, not {states[pair]}" for pair in wrong[:3])
    return [f"no prefix of at least {floor} of {len(operations)} operations leaves this: {nearest}"]


def _fits(there: State, wanted: State, now: int) -> bool:
    """What is due may have been brought back before anybody asked."""
    return there == wanted or (there == (0, wanted[1]) and wanted[0] <= now)
