"""Callers share database transactions, and fare each on his own."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest

from anabranch.adapters.base import Outgoing
from anabranch.adapters.core.delivery import LEASED, LEAVING
from anabranch.policies.errors import AnabranchError, OutcomeUnknownError, StoreFullError, UnknownMessageError

from ..contract.disk import PATIENCE, A, B, assert_whole, bodies, drain, take
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
    """B1: the others in its batch go on."""
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


def test_who_releases_what_another_thread_is_just_acking_disturbs_nothing(disk: SqliteDisk) -> None:
    store = disk.create()
    store.send(A, b"1")
    message = take(store)
    store._engine.delivery.take(store, [message], LEASED, LEAVING)
    for _ in range(2):
        with pytest.raises(UnknownMessageError):
            message.release()
    assert store.receive(A) is None
