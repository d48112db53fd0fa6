"""The shared store, of many routers on one PostgreSQL, beside pgmq and Procrastinate on the same server.

    python -m tests.bench.shared --work send,take --processes 1,4,16 --rounds 3 --dir /var/tmp
    python -m tests.bench.shared --work pending,held --pending 10 --held-seconds 3600

    send, send50         200 B each, one at a time or 50 in one call; each on disk before the call returns
    take, take50         received and acked, from a queue that was filled before
    routers, routers50   as take, by --routers processes
    wake                 a receiver waits; from the beginning of the call that sends to the end of that which receives
    pending              send, take and take50 with so many million messages in the queue, beside a fresh queue
    held                 one sent, one received and acked, while a transaction is open that began before a load of
                         1,000 messages a second, beside a fresh queue

Each run is `--seconds` long, in processes that begin at once, each with a router or a connection of its own. Peers take
turns in each round. pgmq: its own functions (peers/pgmq.sql), called in prepared statements in autocommit.
Procrastinate: its own functions, called likewise; it fetches one job at a time, so it has no take50. River's client is
in Go: left out. One JSON line for each run; the medians, and ratios, go to stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any, Final

import psycopg

import anabranch

from ..sql.server import SETTINGS, PostgresServer
from .working import worked

BODY: Final = b"x" * 200
BATCH: Final = 50
FILL: Final = {1: 8_000, BATCH: 60_000}
"""Messages in a fresh queue for each second of a run, by how many are taken at a time."""
LEASE_SECONDS: Final = 60
LOAD_A_SECOND: Final = 1000
SERVER: Final = {"shared_buffers": "1GB", "max_wal_size": "4GB", "max_connections": "400"}
"""Settings of the server that differ from those of the tests."""
ROWS: Final = {
    "send": [("send", 1)],
    "send50": [("send", BATCH)],
    "take": [("take", 1)],
    "take50": [("take", BATCH)],
    "routers": [("take", 1)],
    "routers50": [("take", BATCH)],
    "wake": [("wake", 1)],
    "pending": [("send", 1), ("take", 1), ("take", BATCH)],
    "held": [("work", 1)],
}


class Anabranch:
    """A router over the shared tables."""

    TABLE: Final = "shared_messages"
    FILLING: Final = (
        "INSERT INTO shared_messages (due, expires, sent, queue, priority, content) SELECT 0, 0, "
        "extract(epoch FROM now()) * 1000, number, 4, %s FROM shared_queues, generate_series(1, %s)"
    )

    def __init__(self, url: str, directory: str) -> None:
        stores = [{"name": "all", "match": ["queue://>"], "sql": {"url": url, "shared": True, "pool_min": 2}}]
        (Path(directory) / "stores.yaml").write_text(json.dumps({"directory": ".", "stores": stores}))
        self._router = anabranch.open(directory)
        self._queue = self._router.queue("q")

    def begin(self) -> None:
        self._queue.declare()

    def close(self) -> None:
        self._router.close()

    def send(self, count: int, body: bytes = BODY) -> None:
        if count == 1:
            self._queue.send(body)
        else:
            self._queue.send_many([body] * count)

    def take(self, count: int) -> int:
        if count == 1:
            return self.wait(0) is not None
        messages = self._queue.receive_many(count)
        self._router.ack(messages)
        return len(messages)

    def wait(self, seconds: int) -> bytes | None:
        message = self._queue.receive(timeout=seconds)
        if message is None:
            return None
        message.ack()
        return message.body


class _Connection:
    """A connection to the server, whose bodies are JSON strings."""

    TABLE = FILLING = SCHEMA = ""

    def __init__(self, url: str, directory: str) -> None:
        self._db = psycopg.connect(url.replace("+psycopg", ""), autocommit=True, prepare_threshold=0)

    def begin(self) -> None:
        self._db.execute(self.SCHEMA.encode(), prepare=False)

    def close(self) -> None:
        self._db.close()

    def _ask(self, statement: str, *given: Any) -> list[Any]:
        return self._db.execute(statement.encode(), given, binary=True).fetchall()


class Pgmq(_Connection):
    """pgmq's functions."""

    TABLE = "pgmq.q_q"
    FILLING = (
        "INSERT INTO pgmq.q_q (vt, message) SELECT now(), to_jsonb(convert_from(%s, 'UTF8')) "
        "FROM generate_series(1, %s)"
    )
    SCHEMA = (Path(__file__).parent / "peers/pgmq.sql").read_text() + "SELECT pgmq.create('q');"

    def send(self, count: int, body: bytes = BODY) -> None:
        text = f'"{body.decode()}"'
        if count == 1:
            self._ask("SELECT * FROM pgmq.send('q', %s::jsonb)", text)
        else:
            self._ask("SELECT * FROM pgmq.send_batch('q', %s::jsonb[])", [text] * count)

    def take(self, count: int) -> int:
        found = self._ask("SELECT msg_id, message FROM pgmq.read('q', %s::integer, %s::integer)", LEASE_SECONDS, count)
        self._delete(found)
        return len(found)

    def wait(self, seconds: int) -> bytes | None:
        found = self._ask(
            "SELECT msg_id, message FROM pgmq.read_with_poll('q', %s::integer, 1, %s::integer)", LEASE_SECONDS, seconds
        )
        self._delete(found)
        return found[0][1].encode() if found else None

    def _delete(self, found: list[Any]) -> None:
        if len(found) == 1:
            self._ask("SELECT pgmq.delete('q', %s::bigint)", found[0][0])
        elif found:
            self._ask("SELECT * FROM pgmq.delete('q', %s::bigint[])", [number for number, _ in found])


class Procrastinate(_Connection):
    """Procrastinate's functions."""

    TABLE = "procrastinate_jobs"
    FILLING = (
        "INSERT INTO procrastinate_jobs (queue_name, task_name, args) SELECT 'q', 't', "
        "to_jsonb(convert_from(%s, 'UTF8')) FROM generate_series(1, %s)"
    )

    def __init__(self, url: str, directory: str) -> None:
        super().__init__(url, directory)
        self._worker: int | None = None

    def begin(self) -> None:
        self._db.execute((resources.files("procrastinate") / "sql/schema.sql").read_text().encode(), prepare=False)

    def send(self, count: int, body: bytes = BODY) -> None:
        self._ask(
            "SELECT unnest(procrastinate_defer_jobs_v1((SELECT array_agg(ROW('q', 't', 0, NULL, NULL, args, NULL)"
            "::procrastinate_job_to_defer_v1) FROM unnest(%s::jsonb[]) AS args)))", [f'"{body.decode()}"'] * count
        )  # fmt: skip

    def take(self, count: int) -> int:
        return sum(self._fetch() is not None for _ in range(count))

    def _fetch(self) -> bytes | None:
        if self._worker is None:
            ((self._worker,),) = self._ask("SELECT procrastinate_register_worker_v1()")
        ((number, args),) = self._ask(
            "SELECT id, args FROM procrastinate_fetch_job_v2(ARRAY['q']::varchar[], %s::bigint)", self._worker
        )
        if number is None:
            return None
        self._ask("SELECT procrastinate_finish_job_v1(%s::bigint, 'succeeded', true)", number)
        return str(args).encode()

    def wait(self, seconds: int) -> bytes | None:
        self._db.execute('LISTEN "procrastinate_queue_v1#q"')
        end = time.monotonic() + seconds
        while (body := self._fetch()) is None and time.monotonic() < end:
            for _ in self._db.notifies(timeout=end - time.monotonic(), stop_after=1):
                pass
        return body


PEERS: Final[dict[str, Any]] = {"anabranch": Anabranch, "pgmq": Pgmq, "procrastinate": Procrastinate}


def run_worker(peer: str, url: str, work: str, batch: int, seconds: float) -> None:
    """Do it for so long once a line comes; print how many and in what time, or the seconds that each took."""
    with tempfile.TemporaryDirectory() as directory:
        client = PEERS[peer](url, directory)
        client.send(1)
        client.take(1)
        print("ready", flush=True)
        sys.stdin.readline()
        begun = now = time.monotonic()
        count, times = 0, list[float]()
        while now < begun + seconds:
            if work == "send":
                client.send(batch)
                count += batch
            elif work == "wake":
                body = client.wait(5)
                if body is not None:
                    times.append(time.monotonic() - float(body))
            elif work == "ring":
                client.send(1, f"{time.monotonic():<200.9f}".encode())
                time.sleep(random.uniform(0.02, 0.12))
            else:
                if work in {"work", "load"}:
                    client.send(batch)
                done = client.take(batch)
                if not done and work == "take":
                    break
                count += done
            now = time.monotonic()
            if work == "load" and (ahead := count / LOAD_A_SECOND - (now - begun)) > 0:
                time.sleep(ahead)
        print(json.dumps([count, now - begun, times]), flush=True)
        client.close()


def run(peer: str, url: str, works: list[tuple[str, int]], seconds: float) -> list[list[Any]]:
    """Do each of these in a process; return what each has printed."""
    told = worked(__spec__.name, [[peer, url, work, str(batch), str(seconds)] for work, batch in works])
    return [json.loads(line) for line in told]


class Database:
    """A database with the tables of one peer, empty or with messages in them."""

    def __init__(self, server: PostgresServer, peer: str) -> None:
        self._server, self.peer, self.url = server, peer, server.new_database()
        self.connection = server.connect(self.url.rsplit("/", 1)[1])
        with tempfile.TemporaryDirectory() as directory:
            client = PEERS[peer](self.url, directory)
            client.begin()
            client.close()

    def fill(self, count: int) -> None:
        if count:
            self.connection.execute(PEERS[self.peer].FILLING, (BODY, count))
        self.connection.execute(f"VACUUM ANALYZE {PEERS[self.peer].TABLE}")
        self.connection.execute("CHECKPOINT")

    def hold(self, seconds: float) -> psycopg.Connection:
        """Return a connection with an open transaction, since which there was a load for so long."""
        holder: psycopg.Connection = self._server.connect(self.url.rsplit("/", 1)[1])
        holder.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        holder.execute("SELECT count(*) FROM pg_class")
        run(self.peer, self.url, [("load", 20)], seconds)
        return holder

    def close(self) -> None:
        self.connection.close()
        self._server.drop_database(self.url)


@contextlib.contextmanager
def database(server: PostgresServer, peer: str) -> Iterator[Database]:
    """Make one, and remove it."""
    made = Database(server, peer)
    try:
        yield made
    finally:
        made.close()


def measure(where: Database, work: str, batch: int, processes: int, seconds: float, state: str) -> dict[str, Any]:
    """Return what a run has come to."""
    line = {"peer": where.peer, "work": work, "batch": batch, "processes": processes, "state": state}
    if work == "wake":
        found = run(where.peer, where.url, [("wake", 1), ("ring", 1)], seconds)
        times = sorted(1000 * one for one in found[0][2])
        return line | {"p50_ms": times[len(times) // 2], "p99_ms": times[int(len(times) * 0.99)], "n": len(times)}
    found = run(where.peer, where.url, [(work, batch)] * processes, seconds)
    return line | {"per_second": sum(count / took for count, took, _ in found)}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog=f"python -m {__spec__.name}", description=__doc__)
    parser.add_argument("--work", default=",".join(ROWS))
    parser.add_argument("--processes", default="1,4,16")
    parser.add_argument("--routers", default="16,64")
    parser.add_argument("--peers", default="anabranch,pgmq,procrastinate")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--pending", type=float, default=1.0, help="millions of messages (default: %(default)s)")
    parser.add_argument("--held-seconds", type=float, default=60.0, help="of load before (default: %(default)s)")
    parser.add_argument("--dir", type=Path, default=Path("/var/tmp"))
    options = parser.parse_args(arguments)
    peers = options.peers.split(",")
    with PostgresServer(options.dir, settings=SETTINGS | SERVER) as server:
        for name in options.work.split(","):
            kind = name.removesuffix(str(BATCH))
            counts = {"routers": options.routers, "wake": "1", "pending": "4", "held": "4"}.get(kind, options.processes)
            with contextlib.ExitStack() as stack:
                old = {}
                for peer in peers if kind in {"pending", "held"} else []:
                    old[peer] = stack.enter_context(database(server, peer))
                    if kind == "pending":
                        old[peer].fill(round(options.pending * 1e6))
                    else:
                        stack.callback(old[peer].hold(options.held_seconds).close)
                for work, batch in ROWS[name]:
                    for processes in map(int, counts.split(",")):
                        compare(server, name, work, batch, processes, peers, old, options)


def compare(
    server: PostgresServer, name: str, work: str, batch: int, processes: int, peers: list[str],
    old: dict[str, Database], options: argparse.Namespace,
) -> None:  # fmt: skip
    """Measure all peers in turn, on fresh databases and those that are `old`; print all, and the medians."""
    found = defaultdict[tuple[str, str], list[dict[str, Any]]](list)
    for number in range(options.rounds):
        for peer in peers if number % 2 == 0 else reversed(peers):
            if peer == "procrastinate" and work == "take" and batch > 1:
                continue
            with database(server, peer) as fresh:
                fresh.fill(round(FILL[batch] * options.seconds) if work == "take" else 0)
                found[peer, "fresh"].append(measure(fresh, work, batch, processes, options.seconds, "fresh"))
            if peer in old:
                old[peer].connection.execute("CHECKPOINT")
                found[peer, name].append(measure(old[peer], work, batch, processes, options.seconds, name))
            for (one, _), lines in found.items():
                if one == peer:
                    print(json.dumps(lines[-1]), flush=True)
    unit = "p50_ms" if work == "wake" else "per_second"
    medians = {key: statistics.median(line[unit] for line in lines) for key, lines in found.items()}
    label = f"{name:<10} {work if name in {'pending', 'held'} else '':<5}{batch:>3} x {processes:<3}"
    for (peer, state), median in medians.items():
        text = f"{label} {peer:<13} {state:<8} {median:>10,.1f} {unit}"
        if work == "wake":
            text += f", p99 {statistics.median(line['p99_ms'] for line in found[peer, state]):,.1f} ms"
        text += f"   {peers[0]} {medians[peers[0], state] / median:.2f} of it"
        if state != "fresh":
            text += f"   {median / medians[peer, 'fresh']:.2f} of fresh"
        print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        peer, url, work, batch, seconds = sys.argv[2:7]
        run_worker(peer, url, work, int(batch), float(seconds))
    else:
        main()
