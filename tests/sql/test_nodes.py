"""Two nodes over one database: one at a time has the store, what the one has acknowledged the other finds, and two that
both believe they have it cannot both write (adapters/sql/database/lease.py)."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, text

from anabranch.adapters.core.messages import Outgoing
from anabranch.adapters.sql import SqlStore
from anabranch.policies.errors import PlacementError, StoreFailedError, StoreLockedError

from ..contract.disk import PATIENCE, A, Parallel, bodies, eventually, take
from .disk import backend_of
from .node import QUEUE, Node, options
from .server import PostgresServer

SPAN = 3.0
"""Seconds of a lease that is to end: a busy machine renews it in time all the same."""
LONG = 60.0


class Nodes:
    """Stores of several nodes, in this process, and nodes that are processes."""

    def __init__(self, path: Path, url: str) -> None:
        self.path, self.url = path, url
        self.stack = ExitStack()

    def store(self, name: str, expiration: float = LONG, wait: float = 0, **more: Any) -> SqlStore:
        """Made, not opened."""
        settings = options(self.url, expiration, wait, **more)
        if not (self.path / name).exists():
            SqlStore.create(name, self.path / name, settings)
        store = SqlStore(name, self.path / name, settings)
        self.stack.callback(store.close)
        return store

    def opened(self, name: str, expiration: float = LONG, wait: float = 0, **more: Any) -> SqlStore:
        store = self.store(name, expiration, wait, **more)
        store.open()
        return store

    def process(self, name: str, wait: float = PATIENCE) -> Node:
        node = Node(self.path / name, self.url, SPAN, wait)
        self.stack.callback(node.close)
        return node

    def expire(self) -> None:
        """Whoever has the lease has it no more, and does not know."""
        engine = create_engine(self.url)
        with engine.begin() as connection:
            connection.execute(text("UPDATE lease SET expires = 1"))
        engine.dispose()


@pytest.fixture
def nodes(tmp_path: Path, postgres_url: str) -> Iterator[Nodes]:
    nodes = Nodes(tmp_path, postgres_url)
    with nodes.stack:
        yield nodes


def test_they_are_one_store(nodes: Nodes) -> None:
    first = nodes.opened("first")
    first.send(A, b"1")
    with pytest.raises(StoreLockedError, match=r"store 'second' belongs to process .* lease_wait"):
        nodes.opened("second")
    first.close()
    second = nodes.opened("second")
    assert second.store_id == first.store_id and second.shared
    assert bodies(second) == [b"1"]
    second.send(A, b"2")
    second.close()
    first.open()
    assert bodies(first) == [b"1", b"2"]


def test_both_made_at_the_same_time_they_are_one_store(nodes: Nodes) -> None:
    with Parallel(lambda: nodes.store("first")) as one, Parallel(lambda: nodes.store("second")) as other:
        one.result()
        other.result()
    assert SqlStore.identify(nodes.path / "first") == SqlStore.identify(nodes.path / "second")
    nodes.opened("first").send(A, b"1")


def test_without_a_lease_the_tables_of_another_are_refused(nodes: Nodes, postgres_url: str) -> None:
    nodes.opened("first").send(A, b"1")
    plain = options(postgres_url, LONG, 0).model_copy(update={"lease_expiration": None})
    with pytest.raises(PlacementError, match="belong to the store with the id"):
        SqlStore.create("other", nodes.path / "other", plain)


def test_two_that_both_believe_they_have_it_cannot_both_write(nodes: Nodes) -> None:
    """Rule L2. To the first everything looks well; its next batch is not the next one."""
    first = nodes.opened("first")
    first.send(A, b"1")
    first.send(A, b"2")
    leased = take(first)
    nodes.expire()
    second = nodes.opened("second")
    lease = backend_of(first)._lease
    assert lease is not None and lease.held
    assert take(second).body == b"1", "leases end with their node"
    for call in (
        lambda: first.send(A, b"x"),
        lambda: first.ack([leased]),
        lambda: first.commit([(A, Outgoing(b"x"))], []),
        lambda: first.prepare(bytes(32), [first.store_id], [(A, Outgoing(b"x"))], [], True).wait(),
    ):
        with pytest.raises(StoreFailedError, match="somebody else has written to the tables"):
            call()
    second.send(A, b"3")
    assert bodies(second) == [b"1", b"2", b"3"]
    assert list(second.check()) == []
    first.close()
    with pytest.raises(StoreLockedError):
        first.open()
    second.close()
    first.open()
    assert bodies(first) == [b"1", b"2", b"3"]


def test_who_waits_is_told_when_the_lease_is_lost(nodes: Nodes) -> None:
    first = nodes.opened("first", lease_renewal=0.05)
    with Parallel(lambda: first.receive(A, None)) as waiting:
        assert waiting.outlives(0.05)
        nodes.expire()
        with pytest.raises(StoreFailedError, match=r"its lease is lost: it expired|no longer ours"):
            waiting.result()
    assert "lease is lost" in str(first.stats().failed)


def test_a_node_that_is_killed_is_replaced_and_nothing_is_lost(nodes: Nodes) -> None:
    first = nodes.process("first")
    first.until("sent")
    second = nodes.process("second")
    second.until("waits")
    while len(first.sent) < 50:
        first.hear()
    killed = time.time()
    first.signal(signal.SIGKILL)
    list(first.rest())
    opened = second.until("opened")["at"] - killed
    assert opened < SPAN + PATIENCE / 4
    second.until("sent")
    second.finish()
    list(second.rest())
    assert first.sent[-1] not in second.sent
    found = [body.decode() for body in bodies(nodes.opened("third"), QUEUE)]
    theirs = [name for name in found if name.startswith("first")]
    assert theirs[: len(first.sent)] == first.sent and len(theirs) <= len(first.sent) + 1, "the last may be unread"
    assert found == [*theirs, *second.sent]


def test_a_node_that_stood_still_finds_that_it_is_not_the_owner(nodes: Nodes) -> None:
    """Stopped in the middle of its sends, it goes on after another node has taken over."""
    first = nodes.process("first")
    while len(first.sent) < 20:
        first.until("sent")
    first.signal(signal.SIGSTOP)
    second = nodes.process("second")
    for _ in range(20):
        second.until("sent")
    first.signal(signal.SIGCONT)
    last = list(first.rest())[-1]
    assert last["error"] == "StoreFailedError" and first.close() == 3
    assert any(word in last["text"] for word in ("lease is lost", "no longer ours", "somebody else has written"))
    second.until("sent")
    second.finish()
    list(second.rest())
    found = [body.decode() for body in bodies(nodes.opened("third"), QUEUE)]
    theirs = [name for name in found if name.startswith("first")]
    assert theirs[: len(first.sent)] == first.sent and len(theirs) <= len(first.sent) + 1
    assert found == [*theirs, *second.sent], "nothing of the first came after the second had begun"


def test_an_owner_whose_server_is_gone_stops_in_time(nodes: Nodes, postgres: PostgresServer) -> None:
    """Rule L3, and it hangs nobody: not even who waits for an answer."""
    store = nodes.opened("first", SPAN)
    store.send(A, b"1")
    postgres.freeze()
    try:
        began = time.monotonic()
        with pytest.raises(StoreFailedError):
            store.send(A, b"2")
        assert time.monotonic() - began < SPAN + PATIENCE / 4
        eventually(lambda: store.stats().failed is not None)
    finally:
        postgres.thaw()
    store.close()
    store.open()  # at once, though the lease may have been renewed when the server went on: it is its own
    assert bodies(store)[0] == b"1"
