"""One system call fails, or is the last one, while large messages are sent, committed over two stores, received, acked,
dead-lettered and opened: for every call, one after the other (rule J9, B3 to B7).

    python -m tests.crash.large [--kind eio] [--only 17] [--share 1/10] [--seconds 60]

Kinds: those of faults.py. What has to hold, beside what ledger.py compares: each body is whole and none is left that no
message names, once the store was opened; no record is written while a body, or its name, is not synced; no body is
unlinked while something in the store's journal is not synced.
"""

from __future__ import annotations

import gc
import io
import sys
from functools import partial
from pathlib import Path
from typing import Any

import anabranch
from anabranch.adapters.core.record.large import NAMED_AT

from ..contract.features import bodies_of
from .calls import Faults, Jobs
from .ledger import Operation, body_of, compare, contents, identity_of, source, violations
from .power.waiting import states_of
from .scripted import Scripted, campaign

SIZE = 2000


class Rules:
    """What is seen of each call that was made."""

    def __init__(self) -> None:
        self.wrong: list[str] = []
        self._bodies: dict[str, str] = {}
        """Files of bodies that are not synced, or whose name is not, and why."""
        self._segments: set[str] = set()
        """Those with something that is not synced, by path."""

    def __call__(self, name: str, target: str, arguments: tuple[Any, ...], result: Any) -> None:
        store = target.partition("/large")[0].partition("/journal/")[0]
        if name == "pwrite" and target.endswith(".part"):
            self._bodies[target] = "is not synced"
        elif name == "pwrite" and target.endswith(".body"):
            if arguments[2] != NAMED_AT:
                self.wrong.append(f"{target} was changed at offset {arguments[2]}")
        elif name == "fsync" and target.endswith(".part"):
            self._bodies.pop(target, None)
        elif name == "rename" and str(arguments[1]).endswith(".body"):
            if target in self._bodies:
                self.wrong.append(f"{target} was renamed before it was synced")
            self._bodies[store + "/large/" + Path(arguments[1]).name] = "has a name that is not synced"
        elif name == "fsync" and target.endswith("/large"):
            self._bodies = {path: why for path, why in self._bodies.items() if not path.startswith(store + "/large/")}
        elif name == "unlink" and "/large/" in target:
            dirty = [path for path in self._segments if path.startswith(store + "/journal/")]
            if dirty and target.endswith(".body") and target not in self._bodies:
                self.wrong.append(f"{target} was unlinked while {dirty} was not synced")
            self._bodies.pop(target, None)
        elif name == "pwrite" and target.endswith(".seg") and any(arguments[1]):
            self._segments.add(target)
            waiting = [path for path in self._bodies if path.startswith(store + "/large/")]
            if waiting and b"LARGE" in bytes(arguments[1]):
                self.wrong.append(f"a record was written while {waiting[0]} {self._bodies[waiting[0]]}")
        elif name == "rename" and str(arguments[1]).endswith(".seg"):
            # What the one before holds that counts is synced by then, and the rest is void (rule J1): a mark, say.
            self._segments = {path for path in self._segments if not path.startswith(store + "/journal/")}
        elif name in ("fsync", "fdatasync") and target.endswith(".seg"):
            self._segments.discard(target)


class Script(Scripted):
    """The workload."""

    def __init__(self, directory: Path, jobs: Jobs, full: bool) -> None:
        options = anabranch.JournalOptions(
            segment_size=64 * 1024, batch_bytes_max=16 * 1024, checkpoint_interval=3600.0, pool_files=1,
            large_message_size=1024, dead_letter="dead",
        )  # fmt: skip
        lazy = options.model_copy(update={"sync": anabranch.Sync.NEVER})
        stores = [
            anabranch.StoreConfig("all", [">"], journal=options),
            anabranch.StoreConfig("own", ["queue://own.>"], journal=lazy),
        ]
        super().__init__(anabranch.Config(directory, stores), jobs, full)
        self.rules = Rules()
        self.watch = self.rules
        self.back: set[str] = set()
        """Dead letters that were put back, for certain or perhaps: `put back into` a queue is not what was in it."""
        self.waits: set[tuple[str, str]] = set()
        """Those that wait for their time, for certain, if they are there."""
        self.may_wait: set[tuple[str, str]] = set()
        self.late: set[str] = set()
        """Sent in transactions that were left in doubt: they come when that is over, others may have passed (T2)."""

    def live(self, life: int, router: anabranch.Router) -> None:
        for _ in range(2):
            self.send("q")
            self.send("own.q")
            self.transaction({"q": ["own.q", "q"]})
            self.attempt("background", self.jobs.run)
            self.ack("q")
            self.rolled_back("q", "own.q")
            self.attempt("background", self.jobs.run)
        self.send("q", 3600.0)
        self.delay("q")
        self.reject("q")
        self.requeue()
        self.attempt("background", self.jobs.run)
        self.ack("q")
        self.reject("q")
        self.transaction({"dead": ["own.q"]})
        self.transaction({"own.q": ["moved"]}, same=True)
        self.attempt("background", self.jobs.run)
        self.close()

    def send(self, queue: str, deliver_in: float | None = None) -> None:
        (identity,) = self.new()
        target = self.router.queue(queue)  # type: ignore[union-attr]
        act = partial(target.send, io.BytesIO(body_of(identity, SIZE)), {"is": "LARGE"}, identity)
        if deliver_in:
            act = partial(act, deliver_in=deliver_in)
            self.waits.add((queue, identity))
            self.may_wait.add((queue, identity))
        self.attempt("send", act, {"op": "send", "q": queue, "ids": [identity]})

    def receive(self, queue: str) -> tuple[anabranch.Message, str] | None:
        message = self.attempt("receive", source(self.router, queue).receive)  # type: ignore[arg-type]
        if not isinstance(message, anabranch.Message):
            return None
        content = self.attempt("read", message.read)
        if not isinstance(content, bytes):
            self.attempt("release", message.release)
            return None
        return message, identity_of(content)

    def ack(self, queue: str) -> None:
        found = self.receive(queue)
        if found is not None:
            self.attempt("ack", found[0].ack, {"op": "ack", "q": self.where(queue, found[1]), "ids": [found[1]]})

    def transaction(self, what: dict[str, list[str]], same: bool = False) -> None:
        """From each queue a message, to others new ones, or the same body."""
        ((taken, given),) = what.items()
        found = self.receive(taken)
        if same and found is None:
            return
        operation: Operation = {"op": "tx", "send": [], "ack": []}

        def act() -> None:
            with self.router.transaction() as tx:  # type: ignore[union-attr]
                for queue in given:
                    identity = found[1] if same and found is not None else self.new()[0]
                    body = found[0].content if same and found is not None else io.BytesIO(body_of(identity, SIZE))
                    operation["send"].append([queue, identity])
                    tx.send(queue, body, {"is": "LARGE"})
                if found is not None:
                    operation["ack"].append([self.where(taken, found[1]), found[1]])
                    tx.ack(found[0])

        self.attempt("transaction", act, operation)
        if operation in self.maybe:
            self.late.update(identity for _, identity in operation["send"])

    def rolled_back(self, *queues: str) -> None:
        def act() -> None:
            tx = self.router.transaction()  # type: ignore[union-attr]
            try:
                for queue in queues:
                    tx.send(queue, io.BytesIO(body_of(self.new()[0], SIZE)))
            finally:
                tx.rollback()

        self.attempt("rollback", act)

    def reject(self, queue: str) -> None:
        found = self.receive(queue)
        if found is not None:
            acks = [[self.where(queue, found[1]), found[1]]]
            self.attempt("reject", found[0].reject, {"op": "tx", "send": [["dead", found[1]]], "ack": acks})

    def requeue(self) -> None:
        """Put a dead letter back that has not been put back before."""
        found = self.receive("dead")
        if found is None or found[1] in self.back:
            return
        message, identity = found
        self.back.add(identity)
        operation = {"op": "tx", "send": [["put back into q", identity]], "ack": [["dead", identity]]}
        self.attempt("requeue", lambda: self.router.requeue(message), operation)  # type: ignore[union-attr]

    def delay(self, queue: str) -> None:
        found = self.receive(queue)
        if found is not None:
            before = len(self.errors)
            self.may_wait.add((self.where(queue, found[1]), found[1]))
            self.attempt("delay", partial(found[0].release, delay=3600.0))
            if len(self.errors) == before and not self.full:  # on a full disk it is free at once
                self.waits.add((self.where(queue, found[1]), found[1]))

    def where(self, queue: str, identity: str) -> str:
        """What the ledger calls its queue."""
        return "put back into q" if queue == "q" and identity in self.back else queue

    def compare(self, router: anabranch.Router) -> list[str]:
        """Why this cannot be what is there."""
        found: dict[str, list[str]] = {}
        for queue, ids in contents(router).items():
            for identity in ids:
                found.setdefault(self.where(queue, identity), []).append(identity)
        states = {(self.where(*pair), pair[1]): until for pair, (until, _) in states_of(router).items()}
        wrong = [f"{pair} does not wait" for pair in self.waits if states.get(pair) == 0]
        wrong += [f"{pair} waits" for pair, until in states.items() if until and pair not in self.may_wait]
        compared = compare(found, self.promised, self.maybe)
        return wrong + [line for line in compared if "out of order" not in line or not self.late & {*line.split()}]

    def behaviour(self, router: anabranch.Router, faults: Faults) -> list[str]:
        """What has not failed works on, and has what was promised."""
        for store in router._registry.open_stores():
            if store.stats().failed:
                self.reopen(store.name)
        before = len(self.errors)
        self.send("q")
        self.send("own.q")
        if len(self.errors) > before:
            return [f"a send is refused once the fault is over: {self.errors[before:]}"]
        return violations(router) + self.compare(router)

    def left(self, directory: Path) -> list[str]:
        """And no more than that."""
        with anabranch.open(anabranch.Config(directory, self.config.stores)) as router:
            wrong = self.rules.wrong + self.compare(router) + violations(router)
            gc.collect()
            for store in router._registry.open_stores():
                bodies_of(store).tidy()
                names = {body.name.hex() for those in bodies_of(store)._live.values() for body in those.values()}
                there = {path.stem for path in (store.directory / "large").glob("*.*")}
                if names != there:
                    wrong.append(f"{store.name} has bodies {sorted(there)}, its messages name {sorted(names)}")
            return wrong


if __name__ == "__main__":
    sys.exit(campaign(Script, "large"))
