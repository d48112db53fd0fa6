"""A lease has one holder at a time, by the clock of the database (adapters/sql/database/lease.py, L1 to L3)."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event, insert, select, update
from sqlalchemy.engine import Engine

from anabranch.adapters.sql.database import dialects, lease
from anabranch.adapters.sql.database.connections import open_single
from anabranch.adapters.sql.database.lease import Lease
from anabranch.adapters.sql.database.schema import Schema, schema
from anabranch.adapters.sql.database.statements import Statements
from anabranch.policies.config.options import SqlOptions
from anabranch.policies.errors import StoreFailedError, StoreLockedError

from ..contract.disk import PATIENCE, Parallel, eventually

ID = bytes(range(16))
SPAN = 1.0
LONG: dict[str, Any] = {"lease_expiration": 60}
"""For a lease that does not end while the test runs."""
RENEWED: dict[str, Any] = {"lease_expiration": 60, "lease_renewal": 0.05}
"""The same, renewed all the while."""


class Node:
    """One who wants the lease, and what he was told when he lost it."""

    def __init__(self, shared: Shared, **options: Any) -> None:
        self.options = SqlOptions(**{**shared.options, **options})
        self.engine = open_single(self.options, shared.directory)
        directory = shared.directory / str(len(shared.nodes))
        statements = Statements(shared.schema)
        self.lease = Lease(self.engine, statements, ID, self.options, "store 's'", directory, self.end)
        self.lost: list[str] = []

    def end(self, reason: str) -> None:
        self.lost.append(reason)


class Shared:
    """A database with the tables of one store, and those who want it."""

    def __init__(self, directory: Path, url: str | None) -> None:
        self.directory = directory
        self.options: dict[str, Any] = {"url": url, "lease_expiration": SPAN}
        self.schema: Schema = schema()
        self.nodes: list[Node] = []
        self.engine: Engine = open_single(SqlOptions(**self.options), directory)
        self.schema.metadata.create_all(self.engine)
        with self.engine.begin() as connection:
            values = {"storeid": ID.hex(), "version": 1, "batch": 7, "lastid": 0, "lastnumber": 0}
            connection.execute(insert(self.schema.store).values(values))

    def node(self, **options: Any) -> Node:
        self.nodes.append(Node(self, **options))
        return self.nodes[-1]

    def batch(self) -> int:
        with self.engine.connect() as connection:
            found: int = connection.execute(select(self.schema.store.c.batch)).scalar_one()
            return found

    def close(self) -> None:
        for node in self.nodes:
            node.lease.release()


@pytest.fixture(params=["sqlite", "postgresql"])
def shared(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Shared]:
    url = request.getfixturevalue("postgres_url") if request.param == "postgresql" else None
    shared = Shared(tmp_path, url)
    yield shared
    shared.close()
    shared.engine.dispose()


def silent(node: Node) -> None:
    """From now on it hears nothing of the database."""

    def fails(*_: Any) -> None:
        raise ConnectionError("the network is gone")

    event.listen(node.engine, "before_cursor_execute", fails)


def test_one_at_a_time(shared: Shared) -> None:
    first, second = shared.node(**LONG), shared.node(**LONG)
    first.lease.acquire()
    assert first.lease.held and shared.batch() == 8
    with pytest.raises(
        StoreLockedError, match=rf"store 's' belongs to process {os.getpid()} on .* for ([1-5]\d|60)\.\d s more"
    ):
        second.lease.acquire()
    assert not second.lease.held
    with pytest.raises(StoreFailedError, match="no longer ours"):
        second.lease.require()
    first.lease.require()


def test_given_back_it_is_the_next_ones_at_once(shared: Shared) -> None:
    first, second = shared.node(**LONG), shared.node(**LONG)
    first.lease.acquire()
    first.lease.release()
    assert not first.lease.held
    second.lease.acquire()
    assert second.lease.held and first.lost == [] and shared.batch() == 9


def test_it_is_renewed_for_as_long_as_its_holder_lives(shared: Shared) -> None:
    """Also when the time that it was first given for is over: three seconds, of which a busy machine may miss many."""
    first = shared.node(lease_expiration=3 * SPAN, lease_renewal=0.05)
    first.lease.acquire()
    until = first.lease._until
    with Parallel(shared.node(lease_wait=2 * SPAN).lease.acquire) as second, pytest.raises(StoreLockedError):
        second.result()
    eventually(lambda: first.lease._until > until + 3 * SPAN)
    with pytest.raises(StoreLockedError):
        shared.node().lease.acquire()
    assert first.lease.held and first.lost == []


def test_a_second_node_waits_until_it_is_given_back(shared: Shared) -> None:
    first, second = shared.node(**LONG), shared.node(**LONG, lease_wait=PATIENCE)
    first.lease.acquire()
    with Parallel(second.lease.acquire) as waiting:
        assert waiting.outlives(0.05)
        first.lease.release()
        waiting.result()
    assert second.lease.held


def test_who_cannot_renew_stops_before_anyone_else_can_have_it(shared: Shared) -> None:
    """L3, seen from outside: never two at a time, and it takes no longer than the lease, and what a busy machine
    adds to that."""
    first, second = shared.node(), shared.node(lease_wait=PATIENCE)
    first.lease.acquire()
    silent(first)
    began = ended = lease.clock()

    def taken() -> float:
        second.lease.acquire()
        return lease.clock()

    def over() -> bool:
        nonlocal ended
        ended = max(ended, first.lease._until)  # not `held` any more from then on
        return bool(first.lost)

    with Parallel(taken) as waiting:
        eventually(over)
        assert not first.lease.held
        assert ended < waiting.result(), "two held it at one time"
    assert waiting.result() - began < SPAN + PATIENCE / 4
    assert len(first.lost) == 1 and "could not be renewed in time" in first.lost[0]


def test_a_hiccup_of_the_network_is_nothing(shared: Shared) -> None:
    node = shared.node(**RENEWED)
    node.lease.acquire()
    failing = threading.Event()
    failing.set()

    def hiccup(*_: Any) -> None:
        if failing.is_set():
            failing.clear()
            raise ConnectionError("for this once")

    event.listen(node.engine, "before_cursor_execute", hiccup)
    eventually(lambda: not failing.is_set())
    until = node.lease._until
    eventually(lambda: node.lease._until > until)
    assert node.lease.held and node.lost == []


def test_who_slept_through_its_end_is_told_and_cannot_write(shared: Shared) -> None:
    """L2: to the sleeper it is ours still, and its batch follows the one that it knows; that one is not the last."""
    first, second = shared.node(**LONG), shared.node(**LONG)
    first.lease.acquire()
    mine = shared.batch()
    with shared.engine.connect().execution_options(**{dialects.WRITES: True}) as connection:
        connection.execute(update(shared.schema.lease).values(expires=1))
        connection.commit()
    second.lease.acquire()
    assert first.lease.held, "by what it knows"
    with shared.engine.connect().execution_options(**{dialects.WRITES: True}) as connection:
        store = shared.schema.store
        assert connection.execute(update(store).where(store.c.batch == mine).values(batch=mine + 1)).rowcount == 0
    first.lease._renew()
    assert not first.lease.held
    assert len(first.lost) == 1 and f"belongs to {second.lease.node} now" in first.lost[0]
    assert second.lease.held and second.lost == []


def test_a_stranger_who_took_it_is_noticed_at_the_next_renewal(shared: Shared) -> None:
    """Someone's hand, or a database whose clock leapt ahead."""
    node = shared.node(**RENEWED)
    node.lease.acquire()
    with shared.engine.connect().execution_options(**{dialects.WRITES: True}) as connection:
        connection.execute(update(shared.schema.lease).values(holder="a stranger"))
        connection.commit()
    eventually(lambda: bool(node.lost))
    assert "belongs to a stranger now" in node.lost[0]


def test_a_lease_that_nobody_knows_any_more_ends(shared: Shared) -> None:
    """Its threads hold it only while they work for it."""
    node = shared.node()
    node.lease.acquire()
    shared.nodes[0] = shared.node()
    del shared.nodes[1], node
    eventually(lambda: not any(thread.name.startswith("anabranch-lease") for thread in threading.enumerate()))
    shared.node(lease_wait=PATIENCE).lease.acquire()


def test_an_owner_whose_transaction_stands_still_holds_nobody_up(postgres_url: str, tmp_path: Path) -> None:
    """The database ends it; who comes next waits for its locks no longer than for the lease."""
    shared = Shared(tmp_path, postgres_url)
    first, second = shared.node(), shared.node(lease_wait=PATIENCE)
    first.lease.acquire()
    silent(first)
    with shared.engine.connect() as connection:
        connection.execute(update(shared.schema.store).values(lastid=1))
        began = time.monotonic()
        second.lease.acquire()
        assert time.monotonic() - began < PATIENCE / 4
        connection.invalidate()
    shared.close()
