"""Ids: never used twice, wherever the highest is written down, until all are given out (rules I2, T6)."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from anabranch.adapters.core.messages import Outgoing
from anabranch.adapters.core.store_types import Subscription
from anabranch.adapters.sql import SqlStore
from anabranch.policies.errors import StoreFullError

from ..contract.disk import A, B, Parallel, T, assert_whole, bodies, drain, take
from .disk import SqliteDisk, directory_of

LAST = 2**63 - 1


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SqliteDisk]:
    with SqliteDisk(tmp_path) as disk:
        yield disk


def changed(disk: SqliteDisk, store: SqlStore, statement: str) -> SqlStore:
    """The store after somebody has changed its tables."""
    store.close()
    connection = sqlite3.connect(directory_of(store) / "store.db")
    with connection:
        connection.execute(statement)
    connection.close()
    return disk.reopen(store)


def test_an_emptied_table_does_not_start_again_at_1(disk: SqliteDisk) -> None:
    store = disk.create()
    last = store.send_many(A, [b"x"] * 5)[-1].seq
    drain(store)
    store = disk.crash(store)
    assert store.send(A, b"x").seq > last


def test_ids_go_on_behind_what_others_have_put_there(disk: SqliteDisk) -> None:
    """Behind the highest of MESSAGES, should the mark be of an older backup."""
    store = disk.create()
    store.send_many(A, [b"x"] * 5)
    store.prepare(b"t" * 32, [store.store_id], [(B, Outgoing(b"b"))], [], True).wait()
    highest = store.last_seq
    store = changed(disk, store, "UPDATE store SET lastid = 0")
    assert store.last_seq == highest
    assert store.send(A, b"x").seq == highest + 1
    assert_whole(store)


def test_when_all_ids_are_given_out_sends_are_refused_and_all_else_goes_on(disk: SqliteDisk) -> None:
    """Clearly, whole, and after a reopening too; acks that come at the same time are not refused with them."""
    store = disk.create(sync_period=0.02)
    store.send_many(A, [b"1", b"2", b"3"])
    store.subscribe(Subscription(T, "desk"))
    store = changed(disk, store, f"UPDATE store SET lastid = {LAST - 2}")
    assert [store.send(A, body).seq for body in (b"4", b"5")] == [LAST - 1, LAST]
    for view in (store, disk.crash(store)):
        assert view.last_seq == LAST
        message = take(view)
        with Parallel(message.ack), pytest.raises(StoreFullError, match=r"all its ids.*new store"):
            view.send(A, b"x")
        with pytest.raises(StoreFullError, match="Nothing was sent"):
            view.commit([(B, Outgoing(b"x")), (T, Outgoing(b"x"))], [])
        assert (bodies(view), bodies(view, B), view.depth(T)) == ([b"2", b"3", b"4", b"5"], [], 0)
        assert view.stats().failed is None
        assert_whole(view)
    assert drain(store) == [b"2", b"3", b"4", b"5"]


def test_a_commit_that_needs_more_ids_than_there_are_does_nothing(disk: SqliteDisk) -> None:
    store = disk.create()
    store.send(A, b"1")
    store = changed(disk, store, f"UPDATE store SET lastid = {LAST - 2}")
    message = take(store)
    store.claim(message)
    with pytest.raises(StoreFullError):
        store.commit([(B, Outgoing(b"x"))] * 3, [message])
    store.commit([(B, Outgoing(b"x"))] * 2, [message])
    for view in (store, disk.crash(store)):
        assert (bodies(view), bodies(view, B)) == ([], [b"x", b"x"])
        assert_whole(view)
