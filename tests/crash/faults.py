"""One system call of a scripted workload fails, or is the last one: for every call, one after the other (rules I1, J3).

    python -m tests.crash.faults [--kind eio] [--only 17] [--share 1/10] [--seconds 60]

Kinds: `eio`, `enospc`; `short`, a write that writes half, then ENOSPC; `crash`, the process is gone before the call
(every later call fails too, and the directory is looked at as it is then). calls.py says what counts as a call.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import anabranch
from anabranch.adapters.journal import JournalStore
from anabranch.policies.config.limits import LimitOptions
from anabranch.policies.config.when_full import WhenFull

from .calls import Faults, Jobs
from .ledger import Contents, body_of, compare, contents, identity_of, source, violations
from .power.waiting import HOUR, states_of
from .scripted import LIVES, Scripted, campaign

RING = 3
"""So many messages are kept in the queue of that name; a send drops the oldest."""


class Script(Scripted):
    """The workload."""

    def __init__(self, directory: Path, jobs: Jobs, full: bool) -> None:
        options = anabranch.JournalOptions(
            segment_size=64 * 1024, batch_bytes_max=16 * 1024, checkpoint_interval=3600.0, pool_files=1
        )
        rings = (LimitOptions(match=("ring",), max_messages=RING, when_full=WhenFull.DROP_OLD),)
        stores = [
            anabranch.StoreConfig("all", [">"], journal=options.model_copy(update={"limits": rings})),
            anabranch.StoreConfig("own", ["queue://own.>"], journal=options),
        ]
        super().__init__(anabranch.Config(directory, stores), jobs, full)
        self.subscribed: list[str] = []
        """The durable subscriptions of `t` that are known to be there."""
        self.released: Counter[str] = Counter()
        """How often a message has been given back, for certain."""
        self.untils: dict[tuple[str, str], set[int]] = {}
        """Until when (ms) each message may wait; others are free, as with 0."""

    def live(self, life: int, router: anabranch.Router) -> None:
        for name in ("quick", "slow"):
            self.subscribe(name)
        for step in range(3):
            self.publish(300)
            if len(self.subscribed) == 2:
                self.release("t/slow", 1)
                self.ack("t/quick", 1)
            self.release("q", 1)
            self.send("q", 300)
            self.send("own.q", 300)
            self.many("q", 9000, 4)
            self.ack("q", 4 if step else 2)
            self.transaction("q", "audit")
            self.put("job", 300)
            self.finish("q", "job", "own")
            if step == 1:
                self.pop("job")
            self.ack("own.q", 1)
            self.send("later", 300, after=HOUR)
            self.send("later", 900, after=HOUR if step else 9 * HOUR)
            self.delay("q", HOUR)
            self.ring(300 + 2000 * step)
            if step == 1:
                self.pass_time(2 * HOUR)
                self.ack("later", 1)
                self.attempt("checkpoint", self._checkpoint)
            self.attempt("background", self.jobs.run)
        self.attempt("reclaim", router.reclaim)
        self.attempt("compact", router.compact)
        self.send("q", 300)
        self.send("own.q", 300)
        self.attempt("background", self.jobs.run)
        if life < LIVES - 1:
            self.close()

    def _checkpoint(self) -> None:
        for store in stores_of(self.router):
            store.checkpoint()

    def send(self, queue: str, size: int, after: int = 0) -> None:
        """To be delivered so many ms from now."""
        (identity,) = ids = self.new()
        target = self.router.queue(queue)  # type: ignore[union-attr]
        act = partial(target.send, body_of(identity, size), deliver_in=after / 1000 if after else None)
        self.untils[queue, identity] = {self.clock.ms + after if after else 0}
        self.attempt("send", act, {"op": "send", "q": queue, "ids": ids})

    def ring(self, size: int) -> None:
        """A send, and what it drops, are one."""
        queue = self.router.queue("ring")  # type: ignore[union-attr]
        there = self.attempt("browse", lambda: [identity_of(message.body) for message in queue.browse()])
        if isinstance(there, list):
            (identity,) = self.new()
            acks = [["ring", one] for one in there[: max(0, len(there) + 1 - RING)]]
            operation = {"op": "tx", "send": [["ring", identity]], "ack": acks}
            self.attempt("send to the ring", lambda: queue.send(body_of(identity, size)), operation)

    def delay(self, queue: str, after: int) -> None:
        """Give one back, to be delivered so many ms from now."""
        for message in self.receive(queue, 1):
            before = len(self.errors)
            untils = self.untils[queue, identity_of(message.body)] = {0, self.clock.ms + after}
            self.attempt("delay", partial(message.release, delay=after / 1000))
            if len(self.errors) == before and not self.full:
                untils.remove(0)
                self.released[f"{queue} {identity_of(message.body)}"] += 1

    def pass_time(self, ms: int) -> None:
        """What is received from then on stays free."""
        self.clock.ms += ms
        for untils in self.untils.values():
            untils |= {0 for until in untils if until <= self.clock.ms}

    def many(self, queue: str, size: int, count: int) -> None:
        ids = self.new(count)
        target = self.router.queue(queue)  # type: ignore[union-attr]
        self.attempt(
            "send_many",
            lambda: target.send_many([body_of(i, size) for i in ids]),
            {"op": "send", "q": queue, "ids": ids},
        )

    def subscribe(self, name: str) -> None:
        topic = self.router.topic("t")  # type: ignore[union-attr]
        if self.attempt("subscribe", lambda: topic.subscribe(name)) is not None and name not in self.subscribed:
            self.subscribed.append(name)

    def publish(self, size: int) -> None:
        """To all subscriptions, or to none; while it is not known which there are, nothing is said."""
        if len(self.subscribed) == 2:
            (identity,) = self.new()
            topic = self.router.topic("t")  # type: ignore[union-attr]
            sends = [[f"t/{name}", identity] for name in self.subscribed]
            act = partial(topic.send, body_of(identity, size), expires_in=1e9)
            self.attempt("publish", act, {"op": "tx", "send": sends, "ack": []})

    def release(self, queue: str, count: int) -> None:
        for message in self.receive(queue, count):
            before = len(self.errors)
            self.attempt("release", message.release)
            if len(self.errors) == before:
                self.released[f"{queue} {identity_of(message.body)}"] += 1

    def receive(self, queue: str, count: int) -> list[anabranch.Message]:
        target = self.attempt("find", lambda: source(self.router, queue))  # type: ignore[arg-type]
        if not isinstance(target, (anabranch.Queue, anabranch.Subscriber)):
            return []
        found = [self.attempt("receive", target.receive) for _ in range(count)]
        messages = [message for message in found if isinstance(message, anabranch.Message)]
        for message in messages:
            untils = self.untils.setdefault((queue, identity_of(message.body)), {0})
            if 0 not in untils:
                self.wrong.append(f"{message!r} of {queue} was received, and waits until {untils}")
            untils &= {0}
        return messages

    def ack(self, queue: str, count: int) -> None:
        messages = self.receive(queue, count)
        ids = [identity_of(message.body) for message in messages]
        if ids:
            router = self.router
            assert router is not None
            self.attempt("ack", lambda: router.ack(messages), {"op": "ack", "q": queue, "ids": ids})

    def transaction(self, taken: str, given: str) -> None:
        (identity,) = self.new()
        messages = self.receive(taken, 1)

        def act() -> None:
            with self.router.transaction() as tx:  # type: ignore[union-attr]
                tx.send(given, body_of(identity))
                for message in messages:
                    tx.ack(message)

        acks = [[taken, identity_of(message.body)] for message in messages]
        self.attempt("transaction", act, {"op": "tx", "send": [[given, identity]], "ack": acks})

    def _values(self, *keys: str) -> list[str] | None:
        """What these keys have; None if that cannot be told."""
        values, found = self.router.map("results"), []  # type: ignore[union-attr]
        for key in keys:
            body = self.attempt("get", lambda: values.get(key, b""))  # noqa: B023
            if not isinstance(body, bytes):
                return None
            found += [identity_of(body)] if body else []
        return found

    def put(self, key: str, size: int) -> None:
        before = self._values(key)
        if before is not None:
            (identity,) = self.new()
            values = self.router.map("results")  # type: ignore[union-attr]
            operation = {
                "op": "tx",
                "send": [["=results", identity]],
                "ack": [["=results", one] for one in before],
            }
            self.attempt("put", lambda: values.put(key, body_of(identity, size)), operation)

    def pop(self, key: str) -> None:
        before = self._values(key)
        if before:
            values = self.router.map("results")  # type: ignore[union-attr]
            self.attempt("pop", lambda: values.pop(key), {"op": "ack", "q": "=results", "ids": before})

    def finish(self, taken: str, key: str, gone: str) -> None:
        """A message is acked, its result put and another removed, together."""
        before, messages = self._values(key, gone), self.receive(taken, 1)
        if before is None:
            return
        (identity,) = self.new()

        def act() -> None:
            with self.router.transaction() as tx:  # type: ignore[union-attr]
                tx.put("results", key, body_of(identity, 700))
                tx.remove("results", gone)
                for message in messages:
                    tx.ack(message)

        acks = [[taken, identity_of(message.body)] for message in messages] + [["=results", one] for one in before]
        self.attempt("finish", act, {"op": "tx", "send": [["=results", identity]], "ack": acks})

    def behaviour(self, router: anabranch.Router, faults: Faults) -> list[str]:
        """A failed store stays failed, the others work, everything closes and opens again."""
        wrong = [f"sync of {target} was tried again after it had failed" for target in faults.retried]
        stores = stores_of(router)
        failed = [store for store in stores if store.stats().failed]
        if len(failed) > 1:
            wrong.append(f"{len(failed)} stores failed")
        for queue in ("q", "own.q"):
            before = len(self.errors)
            self.send(queue, 10)
            store = next((s for s in stores if s.name == ("own" if queue == "own.q" else "all")), None)
            if store in failed and (len(self.errors) == before or "StoreFailed" not in self.errors[-1]):
                wrong.append(f"failed store {store.name} took a send: {self.errors[before:]}")
            if store not in failed and len(self.errors) > before:
                wrong.append(f"store {queue} has not failed and refuses a send: {self.errors[before:]}")
        for store in failed:
            self.reopen(store.name)
            before = len(self.errors)
            self.send("own.q" if store.name == "own" else "q", 10)
            if len(self.errors) > before:
                wrong.append(f"reopened, store {store.name} refuses a send: {self.errors[before:]}")
        wrong += violations(router)
        return wrong + [line for line in compare(contents(router), self.promised, self.maybe) if line not in wrong]

    def left(self, directory: Path) -> list[str]:
        """With and without the indexes."""
        wrong: list[str] = []
        gone = {(o["q"], i) for o in self.refused if o["op"] == "send" for i in o["ids"]}
        config = anabranch.Config(directory, self.config.stores)
        found: dict[str, list[str]] = {}
        for _ in range(2):
            with anabranch.open(config) as router:
                again = contents(router)
                wrong += compare(again, self.promised, self.maybe) + violations(router)
                wrong += _waits(router, self.untils)
                if not self.full:
                    wrong += _uncounted(router, again, self.released)
                wrong += [f"refused, but there: {i} of {q}" for q, ids in again.items() for i in ids if (q, i) in gone]
            if found and again != found:
                wrong.append("without its indexes it holds something else")
            found = again
            for index in directory.rglob("index.mdb"):
                index.unlink()
        return wrong


def stores_of(router: anabranch.Router | None) -> list[JournalStore]:
    assert router is not None
    return [store for store in router._registry.open_stores() if isinstance(store, JournalStore)]


def _waits(router: anabranch.Router, untils: Mapping[tuple[str, str], set[int]]) -> list[str]:
    """Each message waits as long as it was told to, no longer and no shorter."""
    wrong = []
    for pair, (until, _) in states_of(router).items():
        if until not in untils.get(pair, {0}):
            wrong.append(f"{pair} waits until {until}, not {untils.get(pair, 0)}")
    return wrong


def _uncounted(router: anabranch.Router, found: Contents, released: Counter[str]) -> list[str]:
    """A kill forgets no delivery that was counted."""
    wrong = []
    for queue in found:
        for message in source(router, queue).browse():
            identity = identity_of(message.body)
            if message.deliveries < released[f"{queue} {identity}"]:
                wrong.append(f"{identity} of {queue} came back oftener than {message.deliveries} times")
    return wrong


if __name__ == "__main__":
    sys.exit(campaign(Script, "faults"))
