"""Ids: never used twice, wherever the highest is written down, until they wrap (rules I2, T6)."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from anabranch.adapters.base import Change, Outgoing, Subscription
from anabranch.adapters.sql import SqlStore

from ..contract.disk import A, B, T, assert_whole, bodies, drain, take
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
    """Behind the highest of MESSAGES and of XALOG, should the mark be of an older backup."""
    store = disk.create()
    store.send_many(A, [b"x"] * 5)
    store.prepare(b"t" * 32, [store.store_id], [(B, Outgoing(b"b"))], [], True).wait()
    highest = store.last_seq
    store = changed(disk, store, "UPDATE store SET lastid = 0")
    assert store.last_seq == highest
    assert store.send(A, b"x").seq == highest + 1
    assert_whole(store)


def test_ids_wrap_at_the_highest_to_the_lowest_that_are_free(disk: SqliteDisk) -> None:
    store = disk.create()
    old = [store.send(A, b"old %d" % n).seq for n in range(4)]
    take(store).ack()
    kept = take(store)
    store = changed(disk, store, f"UPDATE store SET lastid = {LAST - 2}")
    seqs = [store.send(B, b"%d" % n).seq for n in range(3)]
    assert seqs[:2] == [LAST - 1, LAST]
    assert seqs[2] == old[0]  # free again
    more = [store.send(B, b"%d" % n).seq for n in range(3, 6)]
    assert set(more).isdisjoint({*old[1:], *seqs})
    assert kept.seq in old[1:]
    assert drain(store, A) == [b"old 1", b"old 2", b"old 3"]
    assert sorted(drain(store, B)) == [b"%d" % n for n in range(6)]
    assert_whole(store)
    store = disk.crash(store)
    again = [store.send(B, b"x").seq for _ in range(3)]
    assert len(set(again)) == 3
    assert len(drain(store, B)) == 3
    assert_whole(store)


def test_one_commit_over_the_end(disk: SqliteDisk) -> None:
    store = disk.create()
    store = changed(disk, store, f"UPDATE store SET lastid = {LAST - 2}")
    receipts = store.commit([(A, Outgoing(b"%d" % n)) for n in range(5)], [])
    assert [receipt.seq for receipt in receipts] == [LAST - 1, LAST, 1, 2, 3]
    assert sorted(drain(disk.crash(store))) == sorted(drain(store)) == [b"%d" % n for n in range(5)]


def test_a_receiver_sees_what_comes_after_the_end(disk: SqliteDisk) -> None:
    store = disk.create()
    store = changed(disk, store, f"UPDATE store SET lastid = {LAST - 1}")
    for n in range(5):
        store.send(A, b"%d" % n)
        assert take(store).body == b"%d" % n
    assert store.receive(A) is None


def test_subscriptions_over_the_end(disk: SqliteDisk) -> None:
    """Each still gets what was sent since it began, and nothing else, although the ids begin again below."""
    early, late, later = (Subscription(T, name) for name in ("early", "late", "later"))
    store = disk.create()
    store.subscribe(early)
    store.send(T, b"1")
    store.subscribe(late)
    store.send(T, b"2")
    store = changed(disk, store, f"UPDATE store SET lastid = {LAST - 1}")
    for body in (b"3", b"4", b"5"):
        store.send(T, body)
    store.subscribe(later)
    store.send(T, b"6")
    for view in (disk.crash(store), store):
        assert set(bodies(view, T, early.key)) == {b"1", b"2", b"3", b"4", b"5", b"6"}
        assert set(bodies(view, T, late.key)) == {b"2", b"3", b"4", b"5", b"6"}
        assert bodies(view, T, later.key) == [b"6"]
        assert_whole(view)
        for some in (early, late, later):
            drain(view, T, some.key)
        assert view.depth(T) == 0
        assert_whole(view)


def test_what_is_acked_where_ids_wrap_hides_no_message(disk: SqliteDisk) -> None:
    """Neither one that another subscription has yet to ack, nor a later one that gets the id of one that was not for
    everybody."""
    first, second, late = (Subscription(T, name) for name in ("first", "second", "late"))
    store = disk.create()
    store.subscribe(first)
    ids = [store.send(T, b"old").seq]
    store.subscribe(second)
    ids.append(store.send(T, b"both").seq)
    store.subscribe(late)
    store = changed(disk, store, f"UPDATE store SET lastid = {LAST - 1}")
    messages = [message for _ in ids if (message := store.receive(T, subscription=first.key)) is not None]
    for message in messages:
        store.claim(message)
    store.commit([(T, Outgoing(b"1")), (T, Outgoing(b"2"))], messages, changes=[Change(Subscription(T, "new"), True)])
    assert_whole(store)
    assert set(bodies(store, T, second.key)) == {b"both", b"1", b"2"}
    assert set(bodies(store, T, late.key)) == {b"1", b"2"}
    assert store.depth(T, late.key) == 2
    store = changed(disk, store, f"UPDATE store SET lastid = {LAST}")
    assert store.send(T, b"3").seq == ids[0]
    assert set(bodies(store, T, late.key)) == {b"1", b"2", b"3"}
    assert_whole(store)
