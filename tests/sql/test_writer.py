"""Callers share database transactions, and fare each on his own."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest

from anabranch.adapters.core.messages import Outgoing
from anabranch.adapters.core.operations.changes import acks_of
from anabranch.adapters.core.operations.tickets import Ticket
from anabranch.adapters.core.service import purging
from anabranch.adapters.core.state.leases import LEASED, LEAVING
from anabranch.adapters.core.store_types import Change, Subscription
from anabranch.policies.errors import AnabranchError, OutcomeUnknownError, StoreFullError, UnknownMessageError

from ..contract.disk import PATIENCE, A, B, T, assert_whole, bodies, drain, take
from .disk import SqliteDisk, backend_of, directory_of


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SqliteDisk]:
    with SqliteDisk(tmp_path) as disk:
        yield disk


def test_callers_of_one_time_share_a_transaction(disk: SqliteDisk) -> None:
    store = disk.create()
    with ThreadPoolExecutor(16) as pool:
        wait([pool.submit(store.send, A, b"x") for _ in range(800)], PATIENCE)
    stats = store.stats()
    assert stats.sends == store.depth(A) == 800
    assert stats.batches < 400


def test_sync_period_gathers_what_comes_in_it(disk: SqliteDisk) -> None:
    store = disk.create(sync_period=0.05)
    before = store.stats().batches
    futures = [store.send_nowait(A, b"x") for _ in range(200)]
    wait(futures, PATIENCE)
    assert store.stats().batches - before < 20
    assert store.depth(A) == 200


def test_a_batch_has_a_limit(disk: SqliteDisk) -> None:
    store = disk.create(batch_operations_max=10)
    wait([store.send_nowait(A, b"x") for _ in range(200)], PATIENCE)
    assert store.stats().batches >= 20
    assert bodies(store) == [b"x"] * 200


def test_what_the_database_does_not_take_fails_alone(disk: SqliteDisk) -> None:
    """The others in its batch go on."""
    store = disk.create(sync_period=0.05)
    connection = sqlite3.connect(directory_of(store) / "store.db")
    with connection:
        connection.execute(
            "CREATE TRIGGER refuse BEFORE INSERT ON messages WHEN NEW.messageid = 'bad' "
            "BEGIN SELECT RAISE(ABORT, 'not this one'); END"
        )
    connection.close()
    futures = [store.send_nowait(A, b"%d" % n, None, "bad" if n == 3 else f"id {n}") for n in range(8)]
    wait(futures, PATIENCE)
    failed = [n for n, future in enumerate(futures) if future.exception() is not None]
    assert failed == [3]
    error = futures[3].exception()
    assert isinstance(error, AnabranchError)
    assert not isinstance(error, OutcomeUnknownError)
    assert "not this one" in str(error)
    assert bodies(store) == [b"%d" % n for n in range(8) if n != 3]
    take(store).ack()
    assert_whole(store)


def test_a_full_database_takes_again_what_fits(disk: SqliteDisk) -> None:
    """Invariant 7: full is not failed; what was refused has taken no effect."""
    store = disk.create()
    before = store.send(A, b"x").seq
    engine = backend_of(store)._engine
    assert engine is not None
    with engine.connect() as connection:  # the pool's one connection, which is used again and again
        pages = connection.exec_driver_sql("PRAGMA page_count").scalar_one()
        connection.exec_driver_sql(f"PRAGMA max_page_count = {pages + 20}")
    with pytest.raises(StoreFullError, match="full"):
        for _ in range(100):
            store.send(A, b"x" * 4000)
    held = store.depth(A)
    with pytest.raises(StoreFullError):
        store.commit([(B, Outgoing(b"x" * 200_000))], [])
    assert store.depth(B) == 0
    assert store.stats().failed is None
    assert_whole(store)
    assert len(drain(store)) == held
    assert store.send(A, b"fits").seq > before
    assert bodies(disk.crash(store)) == [b"fits"]


@pytest.mark.parametrize("subscribers", [0, 1, 2])
@pytest.mark.parametrize("together", [False, True])
def test_an_ack_that_is_written_twice_counts_once(disk: SqliteDisk, subscribers: int, together: bool) -> None:
    """As by one who was interrupted and acked again: in two database transactions, or in one with others."""
    store = disk.create(sync_period=0.05 if together else 0.0)
    keys = [("", f"s{n}") for n in range(subscribers)]
    place = T if subscribers else A
    for _, name in keys:
        store.subscribe(Subscription(T, name))
    store.send_many(place, [b"1", b"2", b"3"])
    key = keys[0] if keys else None
    messages = [take(store, place, 0, key) for _ in range(2)]
    for message in messages:  # they count as deliveries too, in the tables of a topic's
        message.release()
    messages = [take(store, place, 0, key) for _ in range(2)]
    leases = store._engine.delivery.take(store, messages, LEASED, LEAVING)
    tickets = [Ticket(acks_of(leases), 0), Ticket(acks_of(leases[:1]), 0), Ticket(acks_of(leases), 0)]
    if together:
        store._writer.submit_all(tickets)
    for ticket in tickets:
        if not together:
            store._writer.submit(ticket)
        store._writer.wait(ticket)
    for view in (store, disk.crash(store)):
        assert bodies(view, place, key) == [b"3"]
        assert view.depth(place) == (3 if subscribers == 2 else 1)
        assert_whole(view)
    drain(store, place, key)
    for known in keys[1:]:
        drain(store, place, known)
    assert store.depth(place) == 0
    assert_whole(store)


def test_changes_of_all_kinds_at_one_time_take_effect_in_their_order(disk: SqliteDisk) -> None:
    """They share database transactions."""
    store = disk.create(sync_period=0.05)
    desk = Subscription(T, "desk")
    store.subscribe(desk)
    store.send_many(T, [b"1", b"2"])
    with ThreadPoolExecutor(8) as pool:
        waiting: list[Future[Any]] = [
            pool.submit(store.commit, [(T, Outgoing(b"3"))], [], None, [Change(Subscription(T, f"s{n}"), True)])
            for n in range(4)
        ]
        waiting += [pool.submit(store.send, T, b"4"), pool.submit(store.purge, T, desk.key)]
        wait(waiting, PATIENCE)
    assert all(done.exception() is None for done in waiting)
    with ThreadPoolExecutor(8) as pool:
        waiting = [pool.submit(store.delete, T), *[pool.submit(store.send, T, b"5", None, str(n)) for n in range(4)]]
        waiting += [pool.submit(store.subscribe, Subscription(T, "late"))]
        wait(waiting, PATIENCE)
    assert all(done.exception() is None for done in waiting)
    for view in (store, disk.crash(store)):
        assert set(view.subscriptions()) <= {Subscription(T, "late")}
        assert view.depth(T) == sum(len(bodies(view, T, known.key)) for known in view.subscriptions())
        assert_whole(view)


def test_a_purge_of_many_pages_counts_right(disk: SqliteDisk) -> None:
    """It goes in pages, each a database transaction; what somebody holds stays, also of a topic that two have."""
    store = disk.create(chunk_size=1024)
    for name in ("s0", "s1"):
        store.subscribe(Subscription(T, name))
    sends = [
        Outgoing(b"x" * (2000 if n % 100 == 0 else 10), message_id=str(n))
        for n in range(purging.PAGE * purging.PAGES + 400)
    ]
    for place, key in ((A, None), (T, ("", "s0"))):
        store.send_many(place, sends)
        held = [take(store, place, 0, key) for _ in range(3)]
        held[1].ack()
        assert store.purge(place, key) == len(sends) - 3
        assert store.depth(place, key) == 2
        assert_whole(store)
        for message in (held[0], held[2]):
            message.ack()
        assert store.depth(place, key) == 0
    assert store.depth(T) == store.depth(T, ("", "s1")) == len(sends)
    assert store.purge(T) == len(sends)
    for view in (store, disk.crash(store)):
        assert view.stats().messages == 0
        assert_whole(view)


def test_who_releases_what_another_thread_is_just_acking_disturbs_nothing(disk: SqliteDisk) -> None:
    store = disk.create()
    store.send(A, b"1")
    message = take(store)
    store._engine.delivery.take(store, [message], LEASED, LEAVING)
    for _ in range(2):
        with pytest.raises(UnknownMessageError):
            message.release()
    assert store.receive(A) is None
