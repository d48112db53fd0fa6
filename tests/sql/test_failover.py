"""A primary and its standby on loopback, under load from two routers: the primary is killed, the standby promoted, and
the routers, whose url names both, go on by themselves. What an acknowledged call has done is there, once: all of it
where the standby is synchronous, else all but the tail that was not streamed."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pytest
from sqlalchemy.engine import make_url

import anabranch
from anabranch.policies.config.options import SqlOptions
from anabranch.policies.errors import OutcomeUnknownError, StoreFailedError, UnknownMessageError

from ..contract.disk import PATIENCE
from .server import PostgresServer

LOAD: Final = 60
"""Calls of each kind that are waited for in each part of a test."""


class Pair:
    """A primary, and its standby."""

    def __init__(self, primary: PostgresServer, standby: PostgresServer) -> None:
        self.primary, self.standby = primary, standby

    def url(self) -> str:
        """The database, on whichever of the two takes writes."""
        hosts = tuple(f"127.0.0.1:{server.port}" for server in (self.primary, self.standby))
        url = make_url(self.primary.url()).set(host=None, port=None, query={"host": hosts})
        return url.render_as_string(hide_password=False)

    def synchronous(self) -> None:
        """From now on a commit waits for the standby."""
        with self.primary.connect() as connection:
            connection.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
            connection.execute("SELECT pg_reload_conf()")
        self.wait("SELECT sync_state = 'sync' FROM pg_stat_replication")

    def caught_up(self) -> None:
        """Wait until the standby has all that was committed before this was called."""
        with self.primary.connect() as connection:
            at = connection.execute("SELECT pg_current_wal_flush_lsn()::text").fetchone()[0]
        self.wait(f"SELECT flush_lsn >= '{at}' FROM pg_stat_replication")

    def wait(self, question: str) -> None:
        """Wait until the primary answers so."""
        deadline = time.monotonic() + PATIENCE
        with self.primary.connect() as connection:
            while connection.execute(question).fetchone() != (True,):
                assert time.monotonic() < deadline, question
                time.sleep(0.01)

    def cut(self) -> None:
        """Let the standby get nothing any more; the primary goes on."""
        with self.primary.connect() as connection:
            (sender,) = connection.execute("SELECT pid FROM pg_stat_replication").fetchone()
        os.kill(sender, signal.SIGSTOP)


@pytest.fixture
def pair() -> Iterator[Pair]:
    with PostgresServer() as primary, PostgresServer(primary=primary) as standby:
        pair = Pair(primary, standby)
        pair.wait("SELECT bool_or(state = 'streaming') FROM pg_stat_replication")
        yield pair


class Load:
    """One router that sends, receives and acks, each in a thread; and what it was told."""

    def __init__(self, name: str, directory: Path, url: str) -> None:
        sql = SqlOptions(url=url, shared=True, pool_min=2, response_timeout=5.0)
        store = anabranch.StoreConfig("shop", ["queue://shop.>"], kind="sql", options=sql)
        self.name, self.router = name, anabranch.open(anabranch.Config(directory / name, [store]))
        self.sent: list[bytes] = []
        """Sends that have returned: half of them are received, half are kept."""
        self.acked: list[bytes] = []
        """Acks that have returned."""
        self.unknown: set[bytes] = set()
        """Bodies whose ack may have taken effect, or not."""
        self.failures: Counter[str] = Counter()
        """Calls that have failed, of each thread."""
        self.errors: list[BaseException] = []
        self._stopped = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(work,)) for work in (self._send, self._receive)]
        for thread in self._threads:
            thread.start()

    def _run(self, work: Callable[[], None]) -> None:
        try:
            while not self._stopped.is_set():
                work()
        except BaseException as error:
            self.errors.append(error)

    def _send(self) -> None:
        number = len(self.sent)
        name = f"{self.name}-{number}"
        queue = self.router.queue("shop.kept" if number % 2 else "shop.work")
        if self._told(lambda: queue.send(name.encode(), message_id=name)):
            self.sent.append(name.encode())

    def _receive(self) -> None:
        message = None
        try:
            message = self.router.queue("shop.work").receive(timeout=0.2)
        except StoreFailedError:
            self.failures["receive"] += 1
        if message is None:
            return
        body, told = message.body, False
        while not told and not self._stopped.is_set():
            try:
                message.ack()
                self.acked.append(body)
                return
            except OutcomeUnknownError:
                self.unknown.add(body)
            except StoreFailedError:
                self.failures["receive"] += 1
            except UnknownMessageError:
                told = True

    def _told(self, call: Callable[[], object]) -> bool:
        """Make a call until its outcome is known."""
        while not self._stopped.is_set():
            try:
                call()
                return True
            except (StoreFailedError, OutcomeUnknownError):
                self.failures["send"] += 1
        return False

    def goes_on(self) -> None:
        """Wait until it has done so much more."""
        sent, acked, deadline = len(self.sent), len(self.acked), time.monotonic() + PATIENCE
        while len(self.sent) < sent + LOAD or len(self.acked) < acked + LOAD // 3:
            assert not self.errors, self.errors
            assert time.monotonic() < deadline, (self.name, len(self.sent), len(self.acked), self.failures)
            time.sleep(0.01)

    def fails(self) -> None:
        """Wait until each thread was told of a failure: all that has succeeded before is noted then."""
        before, deadline = self.failures.copy(), time.monotonic() + PATIENCE
        while any(self.failures[one] == before[one] for one in ("send", "receive")):
            assert not self.errors, self.errors
            assert time.monotonic() < deadline, (self.name, self.failures)
            time.sleep(0.01)

    def stop(self) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join()


class Loads:
    """Two of them on one database, and all that they were told together."""

    def __init__(self, directory: Path, url: str) -> None:
        self.both = [Load(name, directory, url) for name in ("a", "b")]

    def go_on(self) -> None:
        for load in self.both:
            load.goes_on()

    def fail(self) -> None:
        for load in self.both:
            load.fails()

    def told(self) -> tuple[list[bytes], list[bytes]]:
        """The sends and the acks that have returned so far."""
        return [one for load in self.both for one in load.sent], [one for load in self.both for one in load.acked]

    def end(self) -> tuple[Counter[bytes], Counter[bytes]]:
        """Stop, and return what is left to be received, and what was kept."""
        for load in self.both:
            load.stop()
            assert not load.errors, load.errors
        router = self.both[0].router
        left, kept = (Counter(one.body for one in router.queue(name).browse()) for name in ("shop.work", "shop.kept"))
        return left, kept

    @property
    def unknown(self) -> set[bytes]:
        return self.both[0].unknown | self.both[1].unknown

    def close(self) -> None:
        for load in self.both:
            load.stop()
            load.router.close()


@pytest.fixture
def loads(tmp_path: Path, pair: Pair) -> Iterator[Loads]:
    loads = Loads(tmp_path, pair.url())
    try:
        loads.go_on()
        yield loads
    finally:
        loads.close()


def test_a_synchronous_standby_has_all(pair: Pair, loads: Loads) -> None:
    pair.synchronous()
    held = loads.both[0].router.queue("shop.kept").receive(timeout=PATIENCE)
    assert held is not None
    loads.go_on()
    pair.primary.kill()
    loads.fail()
    pair.standby.promote()
    loads.go_on()
    held.ack()
    left, kept = loads.end()
    sent, acked = loads.told()
    assert max(Counter(acked).values()) == 1, "an acked message came back"
    assert not set(acked) & set(left), "an acked message is there again"
    there = left + kept
    assert max(there.values()) == 1, "a message is there twice"
    assert set(sent) <= set(there) | set(acked) | {held.body} | loads.unknown, "an acknowledged send is lost"


def test_another_standby_lacks_the_tail_and_nothing_else(pair: Pair, loads: Loads) -> None:
    sent_before, acked_before = loads.told()
    pair.caught_up()
    pair.cut()
    one, other = (load.router.queue("shop.new") for load in loads.both)
    one.send(b"of a queue that the standby does not know")
    loads.go_on()
    pair.primary.kill()
    loads.fail()
    sent_killed, acked_killed = loads.told()
    pair.standby.promote()
    loads.go_on()
    one.send(b"and now it does")
    message = other.receive(timeout=PATIENCE)
    assert message is not None
    assert message.body == b"and now it does"
    left, kept = loads.end()
    sent, acked = loads.told()
    sent_tail, acked_tail = set(sent_killed) - set(sent_before), set(acked_killed) - set(acked_before)
    there = left + kept
    assert max(there.values()) == 1, "a message is there twice"
    lost = set(sent) - set(there) - set(acked) - loads.unknown
    assert lost <= sent_tail
    assert {body for body in sent_tail - lost if body in kept} < {body for body in sent_tail if _is_kept(body)}
    came_back = {body for body, count in Counter(acked).items() if count > 1} | (set(acked) & set(left))
    assert came_back <= acked_tail
    assert max(Counter(acked).values()) <= 2


def _is_kept(body: bytes) -> bool:
    return int(body.split(b"-")[1]) % 2 == 1


def test_after_an_outage_each_router_has_what_it_held(tmp_path: Path) -> None:
    """However long it was: nobody takes the others for dead before they could come back."""
    with PostgresServer() as server, ExitStack() as routers:
        store = anabranch.StoreConfig(
            "shop", ["queue://shop.>"], kind="sql", options=SqlOptions(url=server.url(), shared=True)
        )
        held = []
        for name in ("a", "b", "c"):
            queue = routers.enter_context(anabranch.open(anabranch.Config(tmp_path / name, [store]))).queue("shop.work")
            queue.send(name.encode())
            held.append(queue.receive())
            queue.send(b"next")  # with which the lease is on the disk, too
        server.stop("immediate")
        port, server.port = server.port, 0
        server.start()  # where nobody finds it
        with server.connect() as connection:
            connection.execute("UPDATE shared_routers SET seen = seen - 3600000 WHERE number > 0")
        server.stop()
        server.port = port
        server.start()
        with server.connect() as connection:
            old = "SELECT 1 FROM shared_routers WHERE number > 0 AND seen < (extract(epoch FROM now()) - 60) * 1000"
            while connection.execute(old).fetchone():
                time.sleep(0.01)
        for message in held:
            assert message is not None
            message.ack()
