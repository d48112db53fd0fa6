"""What happens before the power fails: small programs over the public interface, one for each part that could break.

python -m tests.crash.power.workloads NAME DIR
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import anabranch
from anabranch.adapters.core.service import purging
from anabranch.adapters.journal import JournalStore
from anabranch.adapters.journal.index import index

from ..ledger import Marks
from . import declared
from .cross import CROSS, killed_across, opened
from .kinds import KINDS, killed_at_work
from .kinds import config as kinds_config
from .moved import MOVED
from .waiting import BACKOFF, waiting
from .worker import Worker, Workload, config


def threads(directory: Path, workload: Workload) -> None:
    """Two threads send and ack, each its own queue and a common one."""
    marks = Marks()
    with anabranch.open(config(directory, workload.options)) as router:

        def work(name: str) -> None:
            worker = Worker(router, marks, name)
            for turn in range(14):
                worker.send("common", 300)
                worker.send(f"of.{name}", 900)
                if turn % 2:
                    worker.ack(f"of.{name}")
                if turn % 3 == 2:
                    worker.ack("common", 2)

        running = [threading.Thread(target=work, args=(name,)) for name in ("a", "b")]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()


def transactions(directory: Path, workload: Workload) -> None:
    """Sends and acks that belong together, some across segments' ends."""
    with anabranch.open(config(directory, workload.options)) as router:
        worker = Worker(router, Marks(), "t")
        for turn in range(22):
            worker.transaction({"in": 2, "audit": 1}, {"in": 1} if turn % 2 else {}, 200 + 397 * (turn % 9))
            if turn % 5 == 4:
                worker.transaction({}, {"audit": 3}, 0)


def many(directory: Path, workload: Workload) -> None:
    """Sends by the dozen, each call over several batches."""
    with anabranch.open(config(directory, workload.options)) as router:
        worker = Worker(router, Marks(), "m")
        for turn in range(8):
            worker.send("bulk", 700 + 200 * turn, count=24)
            worker.ack("bulk", 7)


def roll_over(directory: Path, workload: Workload) -> None:
    """Big messages, acked soon: segments are filled, released, pooled and used again."""
    with anabranch.open(config(directory, workload.options)) as router:
        worker = Worker(router, Marks(), "r")
        for turn in range(40):
            worker.send("big", 9000 + 700 * (turn % 7))
            if turn % 20 == 1:
                worker.send("slow", 50)
            if turn > 3:
                worker.ack("big")
            if turn % 6 == 5:
                router.reclaim()


def checkpoints(directory: Path, workload: Workload) -> None:
    """The index is written out every three operations."""
    with anabranch.open(config(directory, workload.options)) as router:
        worker = Worker(router, Marks(), "c")
        for turn in range(16):
            worker.send(f"q.{turn % 3}", 400)
            worker.send("q.all", 300)
            worker.ack(f"q.{turn % 3}" if turn % 2 else "q.all")


def reclaiming(directory: Path, workload: Workload) -> None:
    """Snapshots, with live messages left behind in old segments, and segments going at the front and amid."""
    with anabranch.open(config(directory, workload.options)) as router:
        worker, chance = Worker(router, Marks(), "s"), random.Random(4)
        for turn in range(9):
            worker.send("fast", 5000, count=12)
            worker.send("slow", 100, named=True)
            worker.ack("fast", 12 if turn != 4 else 11)
            if chance.random() < 0.3:
                worker.ack("slow")
            router.reclaim()


def compacting(directory: Path, workload: Workload) -> None:
    """What lives in old segments moves together, again and again, while more is sent and acked, some of it just then;
    topics, messages that came back and checkpoints amid."""
    with anabranch.open(config(directory, workload.options)) as router:
        worker, chance, topic = (
            Worker(router, Marks(), "s", vouched=not workload.prefix),
            random.Random(4),
            router.topic("t"),
        )
        for name in ("quick", "slow"):
            topic.subscribe(name)
        for turn in range(10):
            worker.send("fast", 4500, count=12)
            worker.send("slow", 100 + 900 * (turn % 3), count=2, named=True)
            worker.publish("t", 300, expires_in=1e9)
            for message in worker.receive("slow", 1):
                message.release()
            worker.ack("fast", 12 if turn != 4 else 11)
            worker.ack("t/quick")
            if turn % 3 == 1:
                router.compact()
            if chance.random() < 0.5:
                worker.ack("slow", 2)
                worker.ack("t/slow")
            if turn % 4 == 3:
                running = threading.Thread(target=router.compact)
                running.start()
                worker.send("fast", 300, count=2)
                worker.ack("slow")
                worker.ack("fast", 2)
                running.join()
            router.reclaim()


def values(directory: Path, workload: Workload) -> None:
    """Keyed values: put, replaced, removed, alone and with the messages that they are the results of, in one store and
    over two; segments go, move together and are snapshot amid, and the store is opened again."""
    marks = Marks()
    worker: Worker | None = None
    for life in range(2):
        with anabranch.open(config(directory, workload.options)) as router:
            before = worker
            worker = Worker(router, marks, "v", vouched=not workload.prefix)
            if before is not None:
                worker.sent, worker.values = before.sent, before.values
            for turn in range(10):
                worker.send("jobs", 2500, count=3)
                worker.put("results", f"hot {turn % 2}", 4000, ttl=1e6 if turn % 3 else None)
                worker.put("results", f"slow {life} {turn}", 60)
                worker.finish("jobs", "results", f"job {turn}", 300, gone=f"job {turn - 3}")
                worker.finish("jobs", "results", f"hot {turn % 2}", 2000)
                if turn % 3 == 1:
                    worker.pop("results", f"job {turn}")
                    worker.pop("results", f"hot {turn % 2}")
                if not workload.prefix:
                    worker.send("own.jobs", 500)
                    worker.finish("own.jobs", "results", "far", 700, gone=f"job {turn - 1}")
                if turn % 4 == 3:
                    router.compact()
                router.reclaim()
        marks.write("CLOSED", {})


def large(directory: Path, workload: Workload) -> None:
    """Bodies that are kept apart, in transactions over stores of all policies, beside others, and acked soon."""
    other = "r" if workload.prefix else "own.q"  # of several stores each would keep a prefix of its own
    with anabranch.open(config(directory, workload.options)) as router:
        worker = Worker(router, Marks(), "l", vouched=not workload.prefix, of_file=BytesIO)
        for turn in range(10):
            worker.send("q", 1500 + 700 * (turn % 3), named=turn % 2 == 1)
            worker.send(other, 300 if turn % 2 else 2500)
            worker.transaction({"q": 1, other: 1}, {"q": 1} if turn % 3 else {}, 2000)
            if not workload.prefix:
                worker.transaction({"always.q": 1, "never.q": 1}, {"never.q": 1} if turn % 2 else {}, 1800)
            if turn % 2:
                worker.ack(other, 2)
            if turn % 4 == 3:
                router.reclaim()


RING = 6
RINGS = [{"match": [">"], "max_messages": RING, "when_full": "drop_old"}]


def ring(directory: Path, workload: Workload) -> None:
    """Two rings, in which each send drops what is oldest: alone, many at once, in transactions, over two stores, beside
    what a receiver holds. A send and what it drops are one."""
    with anabranch.open(config(directory, workload.options)) as router:
        worker = Worker(router, Marks(), "r", vouched=not workload.prefix)
        held: list[anabranch.Message] = []
        for turn in range(24):
            worker.ring({"ring.a": 1 + turn % 3}, 900 + 700 * (turn % 5), held, RING)
            worker.ring({"ring.a": 1, "ring.b": 1 + turn % 2}, 300, held, RING)
            if not workload.prefix:
                worker.ring({"ring.a": 1, "own.ring.c": 1}, 500, held, RING)
            if turn % 6 == 1:
                held += worker.receive("ring.a", 2)
            if turn % 6 == 4:
                for message in held:
                    message.release()
                held.clear()
            if turn % 4 == 3:
                worker.ack("ring.b")
            if turn % 7 == 6:
                router.reclaim()


def duplicates(directory: Path, workload: Workload) -> None:
    """Messages with ids, sent again: before and after a segment's end, a checkpoint, a snapshot, their ack."""
    with anabranch.open(config(directory, workload.options)) as router:
        worker = Worker(router, Marks(), "d")
        for turn in range(12):
            (identity,) = worker.send("named", 6000, named=True)
            worker.again("named", identity, 6000)
            if turn % 3 == 1:
                worker.ack("named", 2)
            worker.again("named", f"d.{turn // 2}", 6000)
            if turn % 4 == 3:
                router.reclaim()


def reopening(directory: Path, workload: Workload) -> None:
    """Closed and opened again: the log goes on in the segment where it ended."""
    marks, sent = Marks(), 0
    for _ in range(5):
        with anabranch.open(config(directory, workload.options)) as router:
            worker = Worker(router, marks, "o")
            worker.sent = sent
            for _ in range(4):
                worker.send("q", 2500)
            worker.ack("q", 2)
            sent = worker.sent


def removing(directory: Path, workload: Workload) -> None:
    """Queues are purged, deleted in pages of one message each, and used again."""
    with anabranch.open(config(directory, workload.options)) as router, patch.object(index, "AT_ONCE", 1):
        worker = Worker(router, Marks(), "x")
        for turn in range(8):
            worker.send("gone", 3000, count=3)
            worker.send("stays", 3000)
            if turn % 2 == 0:
                with patch.object(purging, "PAGE", 1), patch.object(purging, "PAGES", 1):
                    worker.empty("gone", delete=True)
            else:
                worker.empty("gone", delete=False)
            if turn == 5:
                worker.empty("stays", delete=False)
            if turn % 3 == 2:
                router.reclaim()


def topics(directory: Path, workload: Workload) -> None:
    """A quick subscription, a slow one, one that comes and goes; messages come back; snapshots and checkpoints amid."""
    with anabranch.open(config(directory, workload.options)) as router:
        worker, topic = Worker(router, Marks(), "p"), router.topic("t")
        for name in ("quick", "slow"):
            topic.subscribe(name)
        for turn in range(18):
            if turn % 6 == 2:
                topic.subscribe("guest", "client", "x > 1", retroactive=False)
            worker.publish("t", 4000, expires_in=1e9 if turn % 3 else None)
            worker.publish("t", 300)
            for message in worker.receive("t/slow", 2):
                message.release()
            worker.ack("t/quick", 2)
            if turn % 3 == 1:
                worker.ack("t/slow")
            if turn % 6 == 4:
                worker.ack("t/guest", 20)
                topic.subscriptions()[-1].unsubscribe()
            if turn % 5 == 4:
                router.reclaim()


def priorities(directory: Path, workload: Workload) -> None:
    """Urgent ones and others, each sort by a worker of its own, so that within one the order is that of the sends."""
    with anabranch.open(config(directory, workload.options)) as router:
        workers = [(Worker(router, Marks(), f"p{priority}"), priority) for priority in (65_535, 256, 4)]
        for turn in range(12):
            for worker, priority in workers:
                worker.send("q", 900 * (turn % 3), priority=priority)
            for message in workers[0][0].receive("q", 2):
                message.release()
            if turn % 2:
                workers[0][0].ack("q", 3)
            if turn % 5 == 4:
                router.reclaim()


def stores(directory: Path, workload: Workload) -> None:
    """Several stores, destinations that are new all the time, a store for each of some."""
    with anabranch.open(config(directory, workload.options)) as router:
        worker = Worker(router, Marks(), "n")
        for turn in range(6):
            worker.send(f"own.{turn}", 500)
            worker.send(f"each.{turn % 3}", 500)
            worker.send("else", 500)
            worker.ack(f"own.{turn // 2}")
            worker.transaction({"own.0": 1, "own.tx": 1}, {}, 100)


def kills(directory: Path, workload: Workload) -> None:
    """Processes that are killed at work or in recovery, each taking over from the one before."""
    name = next(name for name, known in WORKLOADS.items() if known is workload)
    for turn in range(6):
        command = [sys.executable, "-m", __spec__.name, name, str(directory), str(turn)]
        with subprocess.Popen(command) as child:
            if child.wait() not in (0, -signal.SIGKILL):
                raise SystemExit(child.returncode)
    marks = Marks()
    if workload.setup is not config:
        return
    with anabranch.open(config(directory, workload.options)) as router:
        if workload.prefix:
            Worker(router, marks, "k6", vouched=False).send("q", 100)
        else:
            Worker(router, marks, "k6").send("q", 100)
    marks.write("CLOSED", {})


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed_by_time(router: Callable[[], anabranch.Router], turn: int) -> None:
    """A timer, not the end of an operation, says when it dies."""
    fuse = threading.Timer((0.0, 0.2, 0.05, 0.3, 0.1, 0.2)[turn], die)
    fuse.daemon = True
    if turn % 2:  # at work, however late a busy machine comes to it; else from the start
        _work_for_ever(router(), turn, fuse.start)
    fuse.start()
    _work_for_ever(router(), turn)


def killed_before_sync(router: Callable[[], anabranch.Router], turn: int) -> None:
    """It dies instead of its n-th sync of a journal: what it had written is in the page cache only."""
    left, real = (9, 1, 25, 2, 14, 40)[turn], os.fdatasync

    def fdatasync(fd: int) -> None:
        nonlocal left
        left -= 1
        real(fd) if left else die()

    setattr(os, "fdatasync", fdatasync)  # noqa: B010
    _work_for_ever(router(), turn)


def _work_for_ever(router: anabranch.Router, turn: int, begun: Callable[[], object] = lambda: None) -> None:
    worker, step = Worker(router, Marks(), f"k{turn}"), 0
    while True:
        step += 1
        if step == 5:
            begun()
        worker.send("q", 1800)
        if step % 3:
            worker.ack("q")
        if step % 4 == 3:
            worker.transaction({"q": 1, "r": 1}, {"q": 1}, 500)


def killed_lazily(router: Callable[[], anabranch.Router], turn: int) -> None:
    """Under a policy that syncs nothing it dies after a whole operation. What recovery has shown is durable (J5)."""
    worker, marks = Worker(router(), Marks(), f"k{turn}", vouched=False), Marks()
    worker.router.stats()  # stores open late
    marks.write("OPENED", {})
    for step in range((11, 3, 40, 1, 25, 17)[turn]):
        worker.send("q", 2300)
        if step % 3:
            worker.ack("q")
    die()


KILLED: dict[str, Callable[[Callable[[], anabranch.Router], int], None]] = {
    "kills": killed_by_time,
    "kills-before-sync": killed_before_sync,
    "kills-lazily": killed_lazily,
    "kills-across": partial(killed_across, die=die),
}


def lazily(directory: Path, workload: Workload) -> None:
    """One thread under a lazy policy; now and then one operation is promised, and close promises all."""
    marks, sent = Marks(), 0
    for _ in range(2):
        with anabranch.open(config(directory, workload.options)) as router:
            worker = Worker(router, marks, "l", vouched=False)
            worker.sent = sent
            for turn in range(24):
                worker.send("q", 2000, sync=turn % 9 == 8 or None)
                if turn % 3:
                    worker.ack("q")
                if turn % 7 == 6:
                    worker.transaction({"q": 1, "r": 2}, {"q": 1}, 900)
                if turn % 10 == 9:
                    router.reclaim()
            sent = worker.sent
        marks.write("CLOSED", {})


def idling(directory: Path, workload: Workload) -> None:
    """Under a lazy policy, with pauses long enough for a mark: then all that was done is promised (rule J4)."""
    marks = Marks()
    with anabranch.open(config(directory, workload.options)) as router:
        worker = Worker(router, marks, "i", vouched=False)
        for turn in range(3):
            for number in range(8):
                worker.send("q", 6000)
                if number % 3 == turn:
                    worker.ack("q")
            (store,) = router._registry.open_stores()
            assert isinstance(store, JournalStore)
            log = store.backend._log
            while log._marked < log._accepted.filled:
                time.sleep(0.01)
            marks.write("CLOSED", {})
        worker.send("q", 300)


IN_SQLITE: Sequence[tuple[str, Callable[[Path, Workload], None], dict[str, Any]]] = (
    ("transactions", transactions, {}),
    ("many", many, {"batch_operations_max": 5}),
    ("values", values, {"pool_files": 1}),
    ("large", large, {"large_message_size": 1024, "chunk_size": 1024}),
    ("ring", ring, {"limits": RINGS}),
    ("duplicates", duplicates, {}),
    ("removing", removing, {}),
    ("topics", topics, {}),
)
"""What is done in a store of SQLite as well, and in transactions over it and a journal."""

WORKLOADS = {
    "threads": Workload(threads, {}),
    "transactions": Workload(transactions, {}),
    "many": Workload(many, {"batch_bytes_max": 8192}),
    "roll-over": Workload(roll_over, {}),
    "checkpoints": Workload(checkpoints, {"checkpoint_operations": 3}),
    "reclaiming": Workload(reclaiming, {"pool_files": 1}),
    "compacting": Workload(compacting, {"pool_files": 1, "checkpoint_operations": 30}),
    "compacting-never": Workload(
        compacting,
        {"sync": "never", "pool_files": 0, "checkpoint_operations": 11, "compact_min_segments": 2},
        prefix=True,
    ),
    "values": Workload(values, {"pool_files": 1, "checkpoint_operations": 13}),
    "values-never": Workload(values, {"sync": "never", "pool_files": 0, "checkpoint_operations": 7}, prefix=True),
    "large": Workload(large, {"large_message_size": 1024, "checkpoint_operations": 15}),
    "large-never": Workload(
        large, {"sync": "never", "large_message_size": 1024, "checkpoint_operations": 9}, prefix=True
    ),
    "ring": Workload(ring, {"limits": RINGS, "pool_files": 1, "checkpoint_operations": 13}),
    "ring-never": Workload(ring, {"limits": RINGS, "sync": "never", "checkpoint_operations": 7}, prefix=True),
    "waiting": Workload(
        waiting, {"redelivery": BACKOFF, "pool_files": 1, "checkpoint_operations": 13}, prefix=True, waits=True
    ),
    "waiting-counted": Workload(
        waiting,
        {"redelivery": BACKOFF, "count_deliveries": "on_receive", "checkpoint_operations": 9},
        prefix=True,
        waits=True,
    ),
    "waiting-never": Workload(
        waiting,
        {"redelivery": BACKOFF, "sync": "never", "pool_files": 0, "checkpoint_operations": 7},
        prefix=True,
        waits=True,
    ),
    **{f"{name}-sqlite": Workload(run, {"sqlite": True} | options) for name, run, options in IN_SQLITE},
    "waiting-sqlite": Workload(waiting, {"sqlite": True, "redelivery": BACKOFF}, prefix=True, waits=True),
    "waiting-counted-sqlite": Workload(
        waiting, {"sqlite": True, "redelivery": BACKOFF, "count_deliveries": "on_receive"}, prefix=True, waits=True
    ),
    "duplicates": Workload(duplicates, {"checkpoint_operations": 10}),
    "reopening": Workload(reopening, {}),
    "removing": Workload(removing, {"checkpoint_operations": 7}),
    "topics": Workload(topics, {"checkpoint_operations": 25, "pool_files": 1}),
    "priorities": Workload(priorities, {"checkpoint_operations": 11, "priorities": True}),
    "stores": Workload(stores, {}),
    "declared": Workload(declared.run, {"sync": "never", "checkpoint_operations": 9}, check=declared.check),
    "declared-sqlite": Workload(declared.run, {"sqlite": True, "sync": "never"}, check=declared.check),
    "kills": Workload(kills, {"checkpoint_operations": 20}),
    "kills-before-sync": Workload(kills, {"checkpoint_operations": 9}),
    "kills-lazily": Workload(kills, {"sync": "never", "checkpoint_operations": 16}, prefix=True),
    "never": Workload(lazily, {"sync": "never", "checkpoint_operations": 6}, prefix=True),
    "periodic": Workload(lazily, {"sync": "periodic", "sync_interval": 0.05, "checkpoint_operations": 15}, prefix=True),
    **CROSS,
    "idle-never": Workload(idling, {"sync": "never", "checkpoint_interval": 3600.0}, prefix=True),
    "idle-periodic": Workload(
        idling, {"sync": "periodic", "sync_interval": 0.05, "checkpoint_interval": 3600.0}, prefix=True
    ),
    "kills-across": Workload(kills, {"checkpoint_operations": 40}),
    **KINDS,
    **MOVED,
    "kills-kinds": Workload(kills, {"stores": "js", "checkpoint_operations": 40}, setup=kinds_config),
}


def main(arguments: list[str]) -> None:
    name, directory, *turn = arguments
    workload = WORKLOADS[name]
    if turn and workload.setup is not config:
        killed_at_work(Path(directory), workload, int(turn[0]), die)
    elif turn:
        KILLED[name](lambda: opened(config(Path(directory), workload.options)), int(turn[0]))
    else:
        workload.run(Path(directory), workload)


if __name__ == "__main__":
    main(sys.argv[1:])
