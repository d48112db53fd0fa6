"""Storms of Ctrl-C: the main thread works and is interrupted thousands of times, others work beside it (G1, G2).

    python -m tests.crash.sigint --threads 8 --signals 3000 [--seconds 60]

Only the main thread is struck by signals, wherever it is: writing for all others, in an fsync, in the index.
It catches KeyboardInterrupt and goes on; an interrupted send it sends again with its message_id. At the end nobody
hangs, each queue holds what was sent and not acked, once and in order, here and after reopening. With --across all that
they do is transactions over two stores, which took effect in both or in none. --stores says of which kinds the stores
are: `sql`, or `journal,memory`.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import anabranch
from anabranch.policies.config.options import StoreOptions

from ..contract.disk import eventually
from ..shares import add_options
from .ledger import Contents, Operation, body_of, compare, contents, identity_of, violations

HANGS_AFTER = 120.0


class Lightning:
    """The handler of SIGINT: raises KeyboardInterrupt once, and not again before it is armed, so that no `except` of
    this program is struck itself."""

    def __init__(self) -> None:
        self.armed = False

    def arm(self) -> None:
        self.armed = True

    def __call__(self, *_: object) -> None:
        if self.armed:
            self.armed = False
            raise KeyboardInterrupt


class Worker:
    """A thread of a storm, and what must be there at its end."""

    def __init__(self, router: anabranch.Router, name: str, arm: Callable[[], None]) -> None:
        self.router, self.name, self.arm = router, name, arm
        self.sent: list[str] = []
        self.interrupted = 0
        self.beat = time.monotonic()

    def step(self) -> None:
        """A little work, until it is done."""
        raise NotImplementedError

    def expected(self, found: Contents) -> list[str]:
        """What is wrong with what is found."""
        raise NotImplementedError

    @property
    def unknown(self) -> int:
        """Operations whose outcome was not noted."""
        raise NotImplementedError

    def _until_done(self, act: Callable[[], object]) -> None:
        while True:
            try:
                self.arm()
                self.beat = time.monotonic()
                act()
                return
            except KeyboardInterrupt:
                self.interrupted += 1


class Party(Worker):
    """One thread's sends and acks on a queue of its own, and what must be in it."""

    def __init__(self, router: anabranch.Router, name: str, arm: Callable[[], None]) -> None:
        super().__init__(router, name, arm)
        self.queue = router.queue(f"a.{name}")
        self.acking: set[str] = set()
        """Perhaps acked: an interruption may fall between an ack and the note of it."""
        self.acked: set[str] = set()

    @property
    def unknown(self) -> int:
        return len(self.acking - self.acked)

    def step(self) -> None:
        identity = f"{self.name}.{len(self.sent)}"
        self._until_done(lambda: self.queue.send(body_of(identity, 100), message_id=identity))
        self.sent.append(identity)
        if len(self.sent) % 3:
            self._until_done(self._ack_one)

    def _ack_one(self) -> None:
        message = self.queue.receive()
        while message is not None:
            try:
                self.arm()
                self.acking.add(identity_of(message.body))
                message.ack()
                self.acked.add(identity_of(message.body))
                return
            except KeyboardInterrupt:
                self.interrupted += 1
            except anabranch.UnknownMessageError:  # the interrupted ack had taken effect
                self.acked.add(identity_of(message.body))
                return

    def expected(self, found: Contents) -> list[str]:
        """What is wrong with the queue: a message missing, doubled, out of order, or back from its ack."""
        left = list(found.get(self.queue.destination.name, ()))
        numbers = [int(identity.rpartition(".")[2]) for identity in left]
        wrong = [] if numbers == sorted(set(numbers)) else [f"{self.name}: out of order or twice"]
        missing = set(self.sent) - self.acking - set(left)
        if missing:
            wrong.append(f"{self.name}: lost {sorted(missing)[:5]}")
        if back := self.acked & set(left):
            wrong.append(f"{self.name}: acked and back {sorted(back)[:5]}")
        return wrong


class Mover(Worker):
    """One thread's transactions over the stores `a` and `b`, on queues of its own."""

    def __init__(self, router: anabranch.Router, name: str, arm: Callable[[], None]) -> None:
        super().__init__(router, name, arm)
        self.queues = [f"a.{name}", f"b.{name}"]
        self.tried: list[Operation] = []
        self.done: list[Operation] = []

    @property
    def unknown(self) -> int:
        return len(self.tried) - len(self.done)

    def step(self) -> None:
        identity = f"{self.name}.{len(self.sent)}"
        operation: Operation = {"op": "tx", "send": [[queue, identity] for queue in self.queues], "ack": []}
        self.tried.append(operation)
        self._until_done(lambda: self._send(identity))
        self.sent.append(identity)
        self.done.append(operation)
        if len(self.sent) % 3:
            messages: list[anabranch.Message] = []
            try:
                self.arm()
                self._ack(messages)
            except KeyboardInterrupt:
                self.interrupted += 1
                self._until_done(lambda: self._release(messages))

    def _send(self, identity: str) -> None:
        with self.router.transaction() as tx:
            for queue in self.queues:
                tx.send(queue, body_of(identity, 100), message_id=identity)

    def _ack(self, messages: list[anabranch.Message]) -> None:
        for queue in self.queues:
            message = self.router.queue(queue).receive()
            if message is not None:
                messages.append(message)
        acks = [[message.destination.name, identity_of(message.body)] for message in messages]
        operation: Operation = {"op": "tx", "send": [], "ack": acks}
        with self.router.transaction() as tx:
            for message in messages:
                tx.ack(message)
            self.tried.append(operation)
        self.done.append(operation)

    def _release(self, messages: list[anabranch.Message]) -> None:
        """What the transaction had not come to."""
        for message in messages:
            try:
                message.release()
            except anabranch.UnknownMessageError:
                pass

    def expected(self, found: Contents) -> list[str]:
        noted = {id(operation) for operation in self.done}
        mine = {queue: found.get(queue, ()) for queue in self.queues}
        wrong = compare(mine, self.done, [operation for operation in self.tried if id(operation) not in noted])
        return [line for line in wrong if not self._only_in_memory_undone(line)]

    def _only_in_memory_undone(self, line: str) -> bool:
        """A commit that was struck while the one store that remembers was at it is undone in memory, so that at worst a
        message comes twice, never the other way round (rule T7)."""
        half = re.match(r"half done: \S+ of (\w)\.\S+ took effect, \S+ of (\w)\.", line)
        if half is None:
            return False
        done, undone = ({s.name: s.kind for s in self.router.config.stores}[name] for name in half.groups())
        return done != "memory" and undone == "memory"


def configured(directory: Path, sync: anabranch.Sync, kinds: Sequence[str]) -> anabranch.Config:
    """Stores `a` and `b` of these kinds."""
    window = 100_000
    journal = anabranch.JournalOptions(
        sync=sync, segment_size=64 * 1024, checkpoint_operations=500, sync_interval=0.02, duplicate_window=window
    )
    options: dict[str, StoreOptions] = {
        "journal": journal,
        "sql": anabranch.SqlOptions(duplicate_window=window),
        "memory": anabranch.MemoryOptions(max_bytes=1024 * 1024, roll_over_size=64 * 1024, duplicate_window=window),
    }
    stores = [
        anabranch.StoreConfig(name, [f"{name}.>"], **{kind: options[kind]})  # type: ignore[arg-type]
        for name, kind in zip("ab", kinds, strict=False)
    ]
    return anabranch.Config(directory, stores)


def storm(
    directory: Path,
    threads: int,
    signals: int,
    sync: anabranch.Sync,
    seed: int = 0,
    across: bool = False,
    kinds: Sequence[str] = ("journal", "journal"),
    seconds: float = math.inf,
) -> tuple[list[str], str]:
    """What is wrong (nothing), and a line about what happened. In the main thread of a process of its own."""
    config = configured(directory, sync, kinds)
    router = anabranch.open(config)
    lightning = Lightning()
    signal.signal(signal.SIGINT, lightning)
    arms = [lightning.arm] + [lambda: None] * (threads - 1)
    kind = Mover if across else Party
    parties: list[Worker] = [kind(router, f"t{number}", arm) for number, arm in enumerate(arms)]
    for party in parties:
        party.step()  # the store is open now; opened anew after each signal, it would never be
    stop, failures = threading.Event(), []

    def beside(party: Worker) -> None:
        try:
            while not stop.is_set():
                party.step()
        except BaseException as error:
            failures.append(f"{party.name} died of {error!r}")

    def watch() -> None:
        while not stop.wait(1.0):
            for party in parties:
                if time.monotonic() - party.beat > HANGS_AFTER:
                    os.write(2, f"{party.name} hangs\n".encode())
                    os._exit(9)

    others = [threading.Thread(target=beside, args=(party,), daemon=True) for party in parties[1:]]
    for thread in [*others, threading.Thread(target=watch, daemon=True)]:
        thread.start()
    thunder = f"""if True:
        import os, random, signal, time
        chance = random.Random({seed})
        os.read(0, 1)  # who starts this must be out of Popen
        ends = time.monotonic() + float("{seconds}")
        for _ in range({signals}):
            if time.monotonic() > ends:
                break
            time.sleep(chance.random() * 0.002)
            os.kill({os.getpid()}, signal.SIGINT)
    """
    started, me = time.monotonic(), parties[0]
    source = subprocess.Popen([sys.executable, "-S", "-c", thunder], stdin=subprocess.PIPE, start_new_session=True)
    assert source.stdin is not None
    gate = source.stdin.fileno()
    over = threading.Event()  # not poll(), which Ctrl-C can leave with its own lock held: it then says None for ever

    def await_end() -> None:
        source.wait()
        over.set()

    threading.Thread(target=await_end, daemon=True).start()
    begun = False
    while True:
        try:
            if not begun:
                begun = True
                os.write(gate, b"x")
            while not over.is_set():
                me.step()
            break
        except KeyboardInterrupt:
            me.interrupted += 1
    while True:
        try:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            break
        except KeyboardInterrupt:  # the last one
            me.interrupted += 1
    stop.set()
    for thread in others:
        thread.join(HANGS_AFTER)
    took, total = time.monotonic() - started, sum(len(party.sent) for party in parties)
    wrong = failures + [f"{thread.name} hangs" for thread in others if thread.is_alive()]
    # What was interrupted, another thread brings to its end.
    eventually(lambda: not router._coordinator.table.running() and not router.in_doubt(), router.in_doubt)
    found = contents(router)
    wrong += [line for party in parties for line in party.expected(found)] + violations(router)
    leased = sum(store.leased for store in router.stats().stores.values())
    router.close()
    with anabranch.open(config) as again:
        volatile = {name for name, kind in zip("ab", kinds, strict=False) if kind == "memory"}
        if contents(again) != {queue: ids for queue, ids in found.items() if queue[0] not in volatile}:
            wrong.append("reopened, it holds something else")
        wrong += violations(again)
    line = (
        f"{' and '.join(kinds)}, {threads} threads, {sync.value}: {me.interrupted} of {signals} interrupts seen, "
        f"{total} sends in {took:.1f} s ({len(me.sent)} by the thread that was struck), {leased} leases left, "
        f"{sum(party.unknown for party in parties)} outcomes not noted"
    )
    return wrong, line


def main() -> int:
    parser = argparse.ArgumentParser(description="Interrupt a sender thousands of times.")
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--signals", type=int, default=3000)
    parser.add_argument("--sync", type=anabranch.Sync, default=anabranch.Sync.ALWAYS)
    parser.add_argument("--across", action="store_true", help="transactions over two stores")
    parser.add_argument("--stores", default="journal,journal", help="their kinds: journal, sql, memory")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    add_options(parser)
    arguments = parser.parse_args()
    kinds = arguments.stores.split(",")
    with tempfile.TemporaryDirectory(prefix="sigint-") as directory:
        place = Path(directory) / "data"
        wrong, line = storm(
            place, arguments.threads, arguments.signals, arguments.sync, arguments.seed, arguments.across, kinds,
            arguments.seconds,
        )  # fmt: skip
    print(line)
    print(*wrong, sep="\n", end="\n" if wrong else "")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
