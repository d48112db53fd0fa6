"""A server that is stopped and started again under a router that works on: nothing acknowledged lost, nothing doubled,
nothing in one store and not in the other, and a journal store beside it that never notices.

    python -m tests.sql.outages --rounds 20 --round-seconds 3 [--seconds 60] [--seed 1]

Each round is a fresh router over a fresh schema, eight threads, and a server that goes down at random, in each of the
ways in STOPS; then everything is counted. The last line says how many outages were survived.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

import anabranch
from anabranch import AnabranchError

from ..contract.disk import eventually
from ..shares import add_options, of_options
from .server import PostgresServer

THREADS: Final = 8
STOPS: Final[dict[str, tuple[Callable[[PostgresServer], None], Callable[[PostgresServer], None]]]] = {
    "immediate": (lambda server: server.stop("immediate"), PostgresServer.start),
    "fast": (lambda server: server.stop("fast"), PostgresServer.start),
    "kill": (PostgresServer.kill, PostgresServer.start),
    "freeze": (PostgresServer.freeze, PostgresServer.thaw),
}
"""How it goes, and how it comes back. One that stood still goes on with what it had been told before."""
Answer = TypeVar("Answer")
RESPONSE: Final = 1.0
"""Seconds after which a server that stands still is given up."""
SETTLED: Final = 120.0
"""Seconds after which what is in doubt has to be settled once the server is back, and all are at work again."""


def configuration(directory: Path, url: str, **options: Any) -> anabranch.Config:
    """Stores `sql` for s.>, `journal` for j.>, and `beside`, which has nothing to do with any of it."""
    sql: dict[str, Any] = {"url": url, "outcome_timeout": 10.0, "pool_min": 1, **options}
    journal = anabranch.JournalOptions(segment_size=1 << 20)
    return anabranch.Config(
        directory,
        [
            anabranch.StoreConfig("sql", ["queue://s.>"], sql=anabranch.SqlOptions(**sql)),
            anabranch.StoreConfig("journal", ["queue://j.>"], journal=journal),
            anabranch.StoreConfig("beside", ["queue://beside"], journal=journal),
        ],
    )


@dataclass
class Ledger:
    """What was promised. Names are `thread.number`."""

    sent: set[str] = field(default_factory=set)
    """A send of it returned."""
    acked: set[str] = field(default_factory=set)
    """An ack of it returned."""
    maybe_acked: set[str] = field(default_factory=set)
    """An ack of it raised, and nobody knows."""
    committed: set[str] = field(default_factory=set)
    rolled_back: set[str] = field(default_factory=set)
    in_doubt: set[str] = field(default_factory=set)
    errors: Counter[str] = field(default_factory=Counter)
    unclear: list[str] = field(default_factory=list)
    """What was raised that no caller could make sense of."""
    slowest_beside: float = 0.0


class Workload:
    """Eight threads until told: senders, who repeat until they are told; transactions over two stores; receivers."""

    def __init__(self, router: anabranch.Router, secret: str) -> None:
        self.router, self.ledger, self._secret = router, Ledger(), secret
        self.stop = threading.Event()
        self._works = [self._send, self._send, self._send_many, self._transact, self._transact, self._receive]
        self._works += [self._receive, self._move]
        assert len(self._works) == THREADS
        self._threads = [
            threading.Thread(target=self._guarded, args=(work, number), daemon=True)
            for number, work in enumerate([*self._works, self._beside])
        ]

    def run(self) -> None:
        for thread in self._threads:
            thread.start()

    def advance(self) -> None:
        """Wait until transactions are committed and messages acked that were not before. Raises AssertionError."""
        ledger, deadline = self.ledger, time.monotonic() + SETTLED
        committed, acked = len(ledger.committed), len(ledger.acked)
        while len(ledger.committed) == committed or len(ledger.acked) == acked:
            assert not ledger.unclear, ledger.unclear
            assert time.monotonic() < deadline, f"no work is done any more; raised so far: {dict(ledger.errors)}"
            time.sleep(0.005)

    def finish(self) -> None:
        """Raises AssertionError if somebody hangs."""
        self.stop.set()
        deadline = time.monotonic() + SETTLED
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            assert not thread.is_alive(), f"{thread.name} hangs"

    def _guarded(self, work: Callable[[int], None], number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            self.ledger.unclear.append(f"{work.__name__}: {type(error).__name__}: {error}")

    def _failed(self, error: AnabranchError) -> None:
        """Each has to be one of ours, to say what is wrong, and to keep the secret."""
        self.ledger.errors[type(error).__name__] += 1
        if not isinstance(error, anabranch.StoreFailedError | anabranch.TransactionError):
            self.ledger.unclear.append(f"{type(error).__name__}: {error}")
        if self._secret in str(error) or self._secret in repr(error.__cause__):
            self.ledger.unclear.append(f"shows the password: {error}")

    def _persist(self, call: Callable[[], object]) -> None:
        """As one who has a message_id does: again, until it has returned."""
        while True:
            try:
                call()
                return
            except AnabranchError as error:
                self._failed(error)
                time.sleep(0.01)

    def _send(self, me: int) -> None:
        queue, number = self.router.queue("s.q"), 0
        while not self.stop.is_set():
            name = f"{me}.{number}"
            self._persist(lambda name=name: queue.send(name.encode(), message_id=name))  # type: ignore[misc]
            self.ledger.sent.add(name)
            number += 1

    def _send_many(self, me: int) -> None:
        queue, number = self.router.queue("s.q"), 0
        while not self.stop.is_set():
            names = [f"{me}.{number + n}" for n in range(20)]
            sends = [anabranch.Outgoing(name.encode(), message_id=name) for name in names]
            self._persist(lambda sends=sends: queue.send_many(sends))  # type: ignore[misc]
            self.ledger.sent.update(names)
            number += len(names)

    def _transact(self, me: int) -> None:
        number = 0
        while not self.stop.is_set():
            name = f"{me}.{number}"
            number += 1
            self._in_transaction(name, lambda tx, name=name: self._two_sends(tx, name))  # type: ignore[misc]

    def _two_sends(self, tx: anabranch.Transaction, name: str) -> None:
        tx.send("queue://s.tx", name.encode())
        tx.send("queue://j.tx", name.encode())

    def _in_transaction(self, name: str, work: Callable[[anabranch.Transaction], object]) -> bool:
        """Whether it is committed, as far as the caller is told; unknown is no."""
        try:
            with self.router.transaction() as tx:
                work(tx)
        except anabranch.TransactionInDoubt as error:
            self._failed(error)
            self.ledger.in_doubt.add(name)
            self.ledger.rolled_back.discard(name)
        except anabranch.OutcomeUnknownError as error:
            self._failed(error)
            self.ledger.in_doubt.add(name)
            self.ledger.rolled_back.discard(name)
        except AnabranchError as error:
            self._failed(error)
            self.ledger.rolled_back.add(name)
            time.sleep(0.01)
        else:
            self.ledger.committed.add(name)
            self.ledger.rolled_back.discard(name)  # a move that is tried again
            return True
        return False

    def _receive(self, _: int) -> None:
        queue, number = self.router.queue("s.q"), 0
        while not self.stop.is_set():
            number += 1
            try:
                message = queue.receive(timeout=0.05)
            except AnabranchError as error:
                self._failed(error)
                time.sleep(0.01)
                continue
            if message is None:
                continue
            name = message.body.decode()
            if message.deliveries == 1 and number % 4 == 0:
                self._persist(message.release)
                continue
            while True:
                try:
                    message.ack()
                    self.ledger.acked.add(name)
                    break
                except anabranch.OutcomeUnknownError as error:
                    self._failed(error)
                    self.ledger.maybe_acked.add(name)
                    break
                except anabranch.StoreFailedError as error:  # nothing was done: it is leased still
                    self._failed(error)
                    time.sleep(0.01)

    def _move(self, me: int) -> None:
        """From one store to the other: acked here and sent there, or neither."""
        queue, number = self.router.queue("s.move"), 0
        while not self.stop.is_set():
            name = f"{me}.{number}"
            number += 1
            self._persist(lambda name=name: queue.send(name.encode(), message_id=name))  # type: ignore[misc]
            self.ledger.sent.add(f"move {name}")
            message = None
            while message is None and not self.stop.is_set():
                try:
                    message = queue.receive(timeout=0.05)
                except AnabranchError as error:
                    self._failed(error)
            if message is not None:
                moving = f"move {message.body.decode()}"
                self._in_transaction(moving, lambda tx, m=message: (tx.send("queue://j.moved", m.body), tx.ack(m)))  # type: ignore[misc]

    def _beside(self, _: int) -> None:
        queue = self.router.queue("beside")
        while not self.stop.is_set():
            began = time.monotonic()
            queue.send(b"x")
            message = queue.receive()
            assert message is not None
            message.ack()
            self.ledger.slowest_beside = max(self.ledger.slowest_beside, time.monotonic() - began)
            time.sleep(0.002)


def bodies(router: anabranch.Router, name: str) -> list[str]:
    return [message.body.decode() for message in router.queue(name).browse()]


def settled(router: anabranch.Router) -> None:
    """Wait until nothing is in doubt any more. Raises AssertionError."""
    eventually(lambda: not router.in_doubt(), router.in_doubt)


def violations(router: anabranch.Router, ledger: Ledger) -> list[str]:
    """What is there and should not be, and the other way round. Nobody is at work any more."""
    found = list(ledger.unclear)

    def expect(what: str, names: set[str]) -> None:
        if names:
            found.append(f"{what}: {sorted(names)[:5]}{' ...' if len(names) > 5 else ''} ({len(names)})")

    queue = bodies(router, "s.q")
    there = set(queue)
    moves = {name for name in ledger.sent if name.startswith("move ")}
    expect("sent, not acked, lost", ledger.sent - moves - ledger.acked - ledger.maybe_acked - there)
    expect("acked, and there again", ledger.acked & there)
    expect("doubled", {name for name, count in Counter(queue).items() if count > 1})
    for me in {name.split(".")[0] for name in queue}:
        numbers = [int(name.split(".")[1]) for name in queue if name.split(".")[0] == me]
        if numbers != sorted(numbers):
            found.append(f"out of order: those of thread {me}")

    ours, theirs = bodies(router, "s.tx"), bodies(router, "j.tx")
    expect("in one store and not in the other", set(ours) ^ set(theirs))
    transactions = {name for name in ledger.committed if not name.startswith("move ")}
    expect("committed, lost", transactions - set(ours))
    expect("rolled back, there", ledger.rolled_back & set(ours))
    for name, stored in (("s.tx", ours), ("j.tx", theirs)):
        expect(f"doubled in {name}", {name for name, count in Counter(stored).items() if count > 1})

    left, moved = Counter(f"move {name}" for name in bodies(router, "s.move")), Counter(
        f"move {name}" for name in bodies(router, "j.moved")
    )  # fmt: skip
    expect("neither here nor there, or both", {name for name in moves if left[name] + moved[name] != 1})
    expect("moved, lost", (ledger.committed & moves) - set(moved))
    expect("not moved, there", ledger.rolled_back & set(moved))
    return found


def insist(call: Callable[[], Answer]) -> Answer:
    """What it returns, once it is not cut off any more: with RESPONSE, a server that is merely busy can be."""
    deadline = time.monotonic() + SETTLED
    while True:
        try:
            return call()
        except anabranch.StoreFailedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def outage(server: PostgresServer, how: str, seconds: float) -> None:
    """It goes down, stays down for so long, and comes back."""
    down, up = STOPS[how]
    down(server)
    time.sleep(seconds)
    up(server)


def a_round(
    server: PostgresServer, directory: Path, seconds: float, chance: random.Random, hows: Sequence[str]
) -> tuple[Ledger, int, list[str]]:
    """What was promised, how many outages there were, and what is wrong."""
    url = server.new_schema()
    outages = 0
    more: dict[str, Any] = {}
    with anabranch.open(configuration(directory, url)) as router:
        router.queue("s.q").send(b"9.0", message_id="9.0")
    if "freeze" in hows:  # all others are noticed at once
        more["response_timeout"] = RESPONSE
    patience = chance.choice([0.05, 10.0])  # whether an outcome is waited for
    with insist(lambda: anabranch.open(configuration(directory, url, outcome_timeout=patience, **more))) as router:
        work = Workload(router, server.password)
        work.run()
        ends = time.monotonic() + seconds
        try:
            while outages < len(hows) or time.monotonic() < ends:
                work.advance()
                time.sleep(chance.uniform(0.05, 0.5))  # in the midst of something
                outage(server, hows[outages % len(hows)], chance.choice([0.05, chance.uniform(0, 1), 2 * RESPONSE]))
                outages += 1
            work.advance()
        finally:
            if server.pid is None:
                server.start()
            server.thaw()
            work.finish()
        work.ledger.sent.add("9.0")
        settled(router)
        found = insist(lambda: violations(router, work.ledger))
    with anabranch.open(configuration(directory, url)) as router:
        found += [f"opened again: {problem}" for problem in violations(router, work.ledger) if problem not in found]
    server.drop_schema(url)
    return work.ledger, outages, found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sql.outages", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--round-seconds", type=float, default=3.0)
    parser.add_argument("--seed", type=int, default=1)
    add_options(parser)
    options = parser.parse_args(arguments)
    total, rounds, errors, done = 0, 0, Counter[str](), Counter[str]()
    with PostgresServer() as server:
        for seed in of_options(options)[0].of(range(options.seed, options.seed + options.rounds)):
            rounds += 1
            directory = Path(tempfile.mkdtemp(prefix="anabranch-outages-"))
            try:
                hows = random.Random(seed).sample(sorted(STOPS), len(STOPS))
                ledger, outages, found = a_round(
                    server, directory / "data", options.round_seconds, random.Random(seed), hows
                )
            finally:
                shutil.rmtree(directory, ignore_errors=True)
            total += outages
            errors += ledger.errors
            done += Counter(
                sent=len(ledger.sent), acked=len(ledger.acked), committed=len(ledger.committed),
                rolled_back=len(ledger.rolled_back), in_doubt=len(ledger.in_doubt), maybe_acked=len(ledger.maybe_acked),
            )  # fmt: skip
            print(f"seed {seed}: {outages} outages, beside {ledger.slowest_beside * 1000:.0f} ms at most", flush=True)
            for problem in found:
                print(f"seed {seed}: {problem}", flush=True)
            if found:
                print(server.log()[-2000:], file=sys.stderr)
                return 1
    print(f"survived {total} outages in {rounds} rounds: {dict(done)}; raised {dict(errors)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
