"""What is measured: each scenario drives a peer through the calls that it needs and says how long they took."""

from __future__ import annotations

import os
import random
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from . import toymaker

DURABLE_BYTES = 1024
PLAIN_BYTES = 100
BATCH = 1000
TRANSACTION = 10


@dataclass(frozen=True, slots=True)
class Run:
    """What one run of one peer is to do: n operations on an empty directory."""

    peer: type[Any]
    directory: Path
    n: int
    threads: int


@dataclass(slots=True)
class Result:
    """One line of output. `latencies` are nanoseconds of single calls; empty where taking them would distort."""

    seconds: float
    operations: int
    payload_bytes: int
    latencies: Sequence[int] = ()
    disk: toymaker.Disk | None = None

    def line(self, peer: str, scenario: str, threads: int) -> dict[str, Any]:
        """The JSON object of a run. The percentiles are null where latencies were not taken."""
        ordered = sorted(self.latencies)
        line: dict[str, Any] = {
            "peer": peer,
            "scenario": scenario,
            "n": self.operations,
            "payload_bytes": self.payload_bytes,
            "threads": threads,
            "seconds": round(self.seconds, 6),
            "per_second": round(self.operations / self.seconds, 1),
            "p50_us": round(ordered[len(ordered) // 2] / 1000, 1) if ordered else None,
            "p99_us": round(ordered[len(ordered) * 99 // 100] / 1000, 1) if ordered else None,
        }
        return line | (asdict(self.disk) if self.disk else {})


@dataclass(frozen=True, slots=True)
class Scenario:
    """A name, the calls that a peer must have for it, a count that takes seconds, and what to do."""

    needs: tuple[str, ...]
    n: int
    run: Callable[[Run], Result]
    threads: bool = field(default=False)
    """Whether more than one thread means anything."""

    def lacking(self, peer: type[Any]) -> list[str]:
        """The calls that a peer does not have."""
        return [need for need in self.needs if not hasattr(peer, need)]


def body(size: int) -> bytes:
    """The same bytes each time, such as no file system would compress."""
    return random.Random(size).randbytes(size)


def opened(run: Run, *, durable: bool, messages: int = 0, payload_bytes: int = 0) -> Any:
    """A peer that has sent one message: its files are made, which is not what is measured."""
    peer = run.peer(run.directory, durable=durable)
    if hasattr(peer, "reserve"):
        peer.reserve(messages + 1, payload_bytes)
    peer.sender()(body(payload_bytes))
    os.sync()  # what earlier runs left in the page cache is not this one's to write
    return peer


def in_threads(threads: int, work: Callable[[int], None]) -> float:
    """Runs `work(i)` in that many threads at once; seconds from the start of the first to the end of the last."""
    if threads == 1:
        started = time.perf_counter()
        work(0)
        return time.perf_counter() - started
    errors: list[BaseException] = []
    gate = threading.Barrier(threads + 1)

    def guarded(number: int) -> None:
        gate.wait()
        try:
            work(number)
        except BaseException as error:
            errors.append(error)

    workers = [threading.Thread(target=guarded, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    gate.wait()
    started = time.perf_counter()
    for worker in workers:
        worker.join()
    seconds = time.perf_counter() - started
    if errors:
        raise errors[0]
    return seconds


def timed_calls(call: Callable[[Any], object], argument: Any, count: int) -> array[int]:
    """Nanoseconds of each of `count` calls."""
    clock = time.perf_counter_ns
    latencies = array("q", bytes(8 * count))
    for index in range(count):
        started = clock()
        call(argument)
        latencies[index] = clock() - started
    return latencies


def timed_in_threads(run: Run, peer: Any, calls: Sequence[Callable[[Any], object]], argument: Any) -> Result:
    """A thread for each of the calls, and the time of each; the peer is closed."""
    each = run.n // run.threads
    taken: list[array[int]] = [array("q")] * run.threads

    def work(number: int) -> None:
        taken[number] = timed_calls(calls[number], argument, each)

    seconds = in_threads(run.threads, work)
    peer.close()
    return Result(seconds, each * run.threads, DURABLE_BYTES, [ns for part in taken for ns in part])


def send_sync(run: Run) -> Result:
    peer = opened(run, durable=True, messages=run.n, payload_bytes=DURABLE_BYTES)
    return timed_in_threads(run, peer, [peer.sender() for _ in range(run.threads)], body(DURABLE_BYTES))


def send_sync_apart(run: Run) -> Result:
    """Each thread sends to a store of its own."""
    peer = run.peer(run.directory, durable=True)
    senders = peer.senders_apart(run.threads, run.n // run.threads + 1, DURABLE_BYTES)
    for send in senders:
        send(body(DURABLE_BYTES))  # as in `opened`
    os.sync()
    return timed_in_threads(run, peer, senders, body(DURABLE_BYTES))


def sql_send(run: Run) -> Result:
    peer = run.peer.sql(run.directory)
    senders = [peer.sender() for _ in range(run.threads)]
    for send in senders:
        send(body(DURABLE_BYTES))  # connections are made, which is not what is measured
    return timed_in_threads(run, peer, senders, body(DURABLE_BYTES))


def send_nosync(run: Run) -> Result:
    peer = opened(run, durable=False, messages=run.n, payload_bytes=PLAIN_BYTES)
    message, each = body(PLAIN_BYTES), run.n // run.threads
    senders = [peer.sender() for _ in range(run.threads)]

    def work(number: int) -> None:
        send = senders[number]
        for _ in range(each):
            send(message)

    seconds = in_threads(run.threads, work)
    peer.close()
    return Result(seconds, each * run.threads, PLAIN_BYTES)


def send_many(run: Run) -> Result:
    batch = min(BATCH, run.n)
    calls = run.n // batch
    peer = opened(run, durable=False, messages=run.n, payload_bytes=PLAIN_BYTES)
    bodies, send = [body(PLAIN_BYTES)] * batch, peer.batch_sender()
    started = time.perf_counter()
    for _ in range(calls):
        send(bodies)
    seconds = time.perf_counter() - started
    peer.close()
    return Result(seconds, calls * batch, PLAIN_BYTES)


def send_ack_nosync(run: Run) -> Result:
    peer = opened(run, durable=False, messages=run.n, payload_bytes=PLAIN_BYTES)
    message, each = body(PLAIN_BYTES), run.n // run.threads
    calls = [(peer.sender(), peer.receiver()) for _ in range(run.threads)]

    def work(number: int) -> None:
        send, take = calls[number]
        for _ in range(each):
            send(message)
            take()

    seconds = in_threads(run.threads, work)
    peer.close()
    return Result(seconds, each * run.threads, PLAIN_BYTES)


def tx_single_store(run: Run) -> Result:
    peer = opened(run, durable=True, messages=run.n * TRANSACTION, payload_bytes=DURABLE_BYTES)
    bodies = [body(DURABLE_BYTES)] * TRANSACTION
    return timed_in_threads(run, peer, [peer.transaction() for _ in range(run.threads)], bodies)


def tx_cross_store(stores: int) -> Callable[[Run], Result]:
    """Ten sends, spread over so many stores."""

    def cross(run: Run) -> Result:
        peer = opened(run, durable=True, messages=run.n * TRANSACTION, payload_bytes=DURABLE_BYTES)
        commits = [peer.cross_transaction(stores) for _ in range(run.threads)]
        bodies = [body(DURABLE_BYTES)] * TRANSACTION
        commits[0](bodies)  # makes the stores
        return timed_in_threads(run, peer, commits, bodies)

    return cross


def filled(run: Run) -> None:
    """Leaves the directory with n pending messages of 1 KiB, closed and on disk."""
    peer = opened(run, durable=False, messages=run.n, payload_bytes=DURABLE_BYTES)
    message, rest = body(DURABLE_BYTES), run.n - 1
    if hasattr(peer, "batch_sender"):
        send_batch = peer.batch_sender()
        for start in range(0, rest, BATCH):
            send_batch([message] * min(BATCH, rest - start))
    else:
        send = peer.sender()
        for _ in range(rest):
            send(message)
    peer.close()
    os.sync()


def recover_clean(run: Run) -> Result:
    filled(run)
    return first_message(run)


def recover_rebuild_index(run: Run) -> Result:
    filled(run)
    run.peer.drop_index(run.directory)
    return first_message(run)


def first_message(run: Run) -> Result:
    """From open to the first message in hand: a store that opens on first use is not let off."""
    started = time.perf_counter()
    peer = run.peer(run.directory, durable=False)
    first = peer.receiver()()
    seconds = time.perf_counter() - started
    assert first == body(DURABLE_BYTES)
    peer.close()
    return Result(seconds, run.n, DURABLE_BYTES)


def drain(run: Run) -> Result:
    filled(run)
    peer = run.peer(run.directory, durable=False)
    read = peer.reader()
    started = time.perf_counter()
    count = read()
    seconds = time.perf_counter() - started
    peer.close()
    assert count == run.n, f"{run.peer.name} read {count} of {run.n}"
    return Result(seconds, run.n, DURABLE_BYTES)


def toy_maker_disk(run: Run) -> Result:
    operations = toymaker.operations(run.n)
    day = run.peer.day(run.directory)
    started = time.perf_counter()
    disk = toymaker.replay(operations, day)
    seconds = time.perf_counter() - started
    day.close()
    return Result(seconds, len(operations), 0, disk=disk)


def route(run: Run) -> Result:
    routes = run.peer.routes(run.directory)
    find, destinations = routes.find, routes.destinations
    for destination in destinations:
        find(destination)
    rounds = max(1, run.n // len(destinations))
    started = time.perf_counter()
    for _ in range(rounds):
        for destination in destinations:
            find(destination)
    seconds = time.perf_counter() - started
    routes.close()
    return Result(seconds, rounds * len(destinations), 0)


def stores_in_turn(run: Run) -> Result:
    """A send to each of n / 10 stores, ten times over; the stores are made before."""
    many = run.peer.many(run.directory, max(1, run.n // 10))
    message, senders = body(PLAIN_BYTES), many.senders
    for send in senders:
        send(message)
    started = time.perf_counter()
    for _ in range(10):
        for send in senders:
            send(message)
    seconds = time.perf_counter() - started
    many.close()
    return Result(seconds, 10 * len(senders), PLAIN_BYTES)


SCENARIOS = {
    "send-sync": Scenario(("sender",), 20_000, send_sync, threads=True),
    "send-sync-apart": Scenario(("senders_apart",), 20_000, send_sync_apart, threads=True),
    "send-nosync": Scenario(("sender",), 100_000, send_nosync, threads=True),
    "sql-send": Scenario(("sql",), 5_000, sql_send, threads=True),
    "send-many": Scenario(("batch_sender",), 500_000, send_many),
    "send+ack-nosync": Scenario(("sender", "receiver"), 50_000, send_ack_nosync, threads=True),
    "tx-single-store": Scenario(("transaction",), 5_000, tx_single_store, threads=True),
    "tx-cross-store-2": Scenario(("cross_transaction",), 5_000, tx_cross_store(2), threads=True),
    "tx-cross-store-4": Scenario(("cross_transaction",), 5_000, tx_cross_store(4), threads=True),
    "recover-clean": Scenario(("sender", "receiver"), 200_000, recover_clean),
    "recover-rebuild-index": Scenario(("sender", "receiver", "drop_index"), 200_000, recover_rebuild_index),
    "drain": Scenario(("sender", "reader"), 200_000, drain),
    "toy-maker-disk": Scenario(("day",), 100_000, toy_maker_disk),
    "stores-in-turn": Scenario(("many",), 20_000, stores_in_turn),
    "route": Scenario(("routes",), 1_000_000, route),
}
