"""Workloads of transactions over several stores, each store with a sync policy of its own (invariant 4, T1 to T5).

What such a transaction promises survives a power failure whatever the stores' policies; what a store does alone, only
under `always`. External transactions are prepared, told their outcome, left to themselves; whatever process comes next
asks the router which of them wait and looks in the marks for what they are.
"""

from __future__ import annotations

import dataclasses
import os
import random
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import anabranch
from anabranch.router.router import Router
from anabranch.router.transactions import decision_cleanup, decision_log

from ...contract.disk import eventually
from ..ledger import Held, Marks, Operation, acks_of, sends_of, whole_lines
from .worker import Worker, Workload, config

DECISIONS_BYTES = 8192


class Partner(Worker):
    """A worker whose operations are promised when they return if they are of several stores or of one that syncs."""

    def __init__(self, router: anabranch.Router, marks: Marks, name: str) -> None:
        super().__init__(router, marks, name, vouched=False)

    def _did(self, operation: Operation, promised: bool) -> None:
        pairs = sends_of(operation) + acks_of(operation)
        stores = {queue.partition(".")[0] for queue, _ in pairs} or {operation.get("q", "").partition(".")[0]}
        super()._did(operation, promised or len(stores) > 1 or stores <= {"always"} or "xid" in operation)


def opened(setup: anabranch.Config) -> anabranch.Router:
    """A router that forgets decisions soon, and whose decision log has small segments."""
    vars(decision_cleanup)["FORGET_SECONDS"] = 0.05
    vars(decision_log)["SEGMENT_BYTES"] = 64 * 1024
    router = Router(setup)
    vars(decision_log)["SEGMENT_BYTES"] = DECISIONS_BYTES  # less than options may say
    the_log = router._coordinator.log
    the_log._options = dataclasses.replace(the_log._options, segment_bytes=DECISIONS_BYTES)
    return router.open()


def held() -> Held:
    """What the marks so far say of external transactions."""
    return Held.of(whole_lines(Path(os.environ["CRASHSIM_MARKS"])))


def in_threads(router: anabranch.Router, names: Sequence[str], work: Callable[[Partner], None]) -> None:
    """Each of these threads does `work`."""
    marks = Marks()
    failed: list[BaseException] = []

    def run(name: str) -> None:
        try:
            work(Partner(router, marks, name))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


def across(*stores: str) -> Callable[[Path, Workload], None]:
    """Four threads move messages between these stores, send to all of them at once, use each of them alone."""

    def run(directory: Path, workload: Workload) -> None:
        def work(worker: Partner) -> None:
            chance = random.Random(worker.name)
            common = [f"{store}.common" for store in stores]
            own = [f"{store}.{worker.name}" for store in stores]
            for turn in range(9):
                worker.transaction(dict.fromkeys(own, 1), {}, chance.choice((60, 700, 2500)))
                worker.send(chance.choice(own + common), 200)
                source, target = chance.sample(common, 2)
                worker.transaction({target: 1, chance.choice(own): 1}, {source: 1}, 300)
                if turn % 3 == 1:
                    worker.transaction({}, dict.fromkeys(own, 1), 0)
                if turn % 4 == 2:
                    worker.ack(chance.choice(own))
                if turn % 5 == 4:
                    worker.router.reclaim()

        with opened(config(directory, workload.options)) as router:
            in_threads(router, ("a", "b", "c", "d"), work)

    return run


def forgetting(directory: Path, workload: Workload) -> None:
    """Decisions are forgotten, durably, while the store that does not sync has nothing more to do: what holds there
    must hold by then."""
    with opened(config(directory, workload.options)) as router:
        worker = Partner(router, Marks(), "f")
        for turn in range(7):
            worker.transaction({"always.q": 1, "never.q": 1}, {"never.q": turn % 2}, 200)
            worker.end(worker.prepare(f"x{turn}", ["never.r", "always.r"], ["never.q"]), turn % 3 > 0)
            forgotten(router)
            for _ in range(3):
                worker.send("always.last", 100)


def forgotten(router: anabranch.Router) -> None:
    """Wait until no decision is in force any more, and make that durable (rule T5)."""
    the_log = router._coordinator.log
    eventually(lambda: not the_log.decisions, lambda: the_log.decisions)
    assert the_log._log is not None
    the_log._log.sync()


def external(directory: Path, workload: Workload) -> None:
    """Two threads prepare transactions, end most of them, and leave some over three openings; another works beside."""
    for opening in range(3):
        with opened(config(directory, workload.options)) as router:
            worker = Partner(router, Marks(), f"o{opening}")
            worker.end_left(held(), 0.3, random.Random(opening))

            def work(worker: Partner, opening: int = opening) -> None:
                chance = random.Random(worker.name)
                waiting: list[Operation] = []
                for turn in range(5):
                    worker.transaction({"always.in": 1, "never.in": 1, "periodic.in": 1}, {}, 150)
                    xid = f"x{opening}{worker.name}{turn}"
                    stores = chance.sample(("always", "never", "periodic"), chance.choice((1, 2, 3)))
                    waiting.append(
                        worker.prepare(xid, [f"{store}.out" for store in stores], [f"{s}.in" for s in stores])
                    )
                    if chance.random() < 0.7:
                        worker.end(waiting.pop(chance.randrange(len(waiting))), chance.random() < 0.6)

            in_threads(router, (f"a{opening}", f"b{opening}"), work)
            if opening == 1:
                router.reclaim()


def decisions(directory: Path, workload: Workload) -> None:
    """The decision log rolls over and is reclaimed, with an external transaction held all the while."""
    kept: Operation = {}
    sent = 0
    for opening in range(2):
        with opened(config(directory, workload.options)) as router:
            worker = Partner(router, Marks(), "d")
            worker.sent = sent
            if not opening:
                worker.send("always.held", 10)
                kept = worker.prepare("held", ["always.q", "never.q"], ["always.held"])
            for turn in range(40):
                worker.transaction({"always.q": 1, "never.q": 1}, {"always.q": 1} if turn % 2 else {}, 30)
                if turn % 9 == 8:
                    worker.end(
                        worker.prepare(f"x{opening}{turn}" + "y" * 40, ["always.r", "never.r"], []), turn % 2 > 0
                    )
                if turn % 4 == 3:
                    worker.transaction({}, {"always.q": 2, "never.q": 3}, 0)
            if opening:
                worker.end(kept, True)
            sent = worker.sent


def reopened(directory: Path, workload: Workload) -> None:
    """Closed and opened often, each time with something prepared and with decisions that are not forgotten."""
    sent = 0
    for opening in range(6):
        with opened(config(directory, workload.options)) as router:
            worker = Partner(router, Marks(), "o")
            worker.sent = sent
            worker.end_left(held(), 0.5, random.Random(opening))
            for turn in range(4):
                worker.transaction({"periodic.q": 1, "never.q": 1}, {"periodic.q": turn % 2}, 800)
                worker.prepare(f"x{opening}{turn}", ["never.r", "always.r"], ["never.q"])
            sent = worker.sent


def killed_across(router: Callable[[], anabranch.Router], turn: int, die: Callable[[], None]) -> None:
    """Four threads at work when a timer ends it all; every other time while it opens, most likely."""
    fuse = threading.Timer((0.2, 0.02, 0.4, 0.12, 0.15, 0.06)[turn], die)
    fuse.daemon = True
    if turn % 2:
        fuse.start()
    here = router()
    Partner(here, Marks(), f"k{turn}").end_left(held(), 0.3, random.Random(turn))

    def work(worker: Partner) -> None:
        chance, step = random.Random(worker.name), 0
        while True:
            step += 1
            if step == 2 and turn % 2 == 0 and worker.name.endswith("a"):  # a busy machine may come to it late
                fuse.start()
            worker.transaction({"always.q": 1, "never.q": 1, f"periodic.{worker.name}": 1}, {}, 400)
            worker.transaction({"never.r": 1}, {"always.q": 1, "never.q": 1}, 100)
            worker.send(chance.choice(("always.q", "never.q", f"never.{worker.name}")), 100)
            if step % 3 == 1:
                prepared = worker.prepare(f"x{worker.name}{step}", ["always.r", "never.r"], ["never.q", "always.q"])
                if chance.random() < 0.6:
                    worker.end(prepared, chance.random() < 0.6)
            elif step % 3 == 2:
                worker.ack("never.r")

    in_threads(here, [f"k{turn}{name}" for name in "abcd"], work)


CROSS = {
    "across-2": Workload(across("always", "never"), {}),
    "across-2-lazy": Workload(across("periodic", "never"), {"sync_interval": 0.05, "checkpoint_operations": 7}),
    "across-3": Workload(across("always", "periodic", "never"), {"checkpoint_operations": 25}),
    "external": Workload(external, {"checkpoint_operations": 12}),
    "decisions": Workload(decisions, {}),
    "forgetting": Workload(forgetting, {}),
    "prepared-reopening": Workload(reopened, {"checkpoint_operations": 9}),
}
"""Beside them, in workloads.py, the one that is killed."""
