"""What a store finds where its tables should be: what is its own it uses, what is free it takes,
all else it refuses."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import SecretStr

from anabranch.adapters.core.store_types import Subscription
from anabranch.adapters.sql import SqlStore
from anabranch.adapters.sql.database.schema import VERSION
from anabranch.policies.config.options import SqlOptions
from anabranch.policies.errors import ConfigError, CorruptionError, PlacementError, StoreFailedError

from ..contract.disk import A, B, T, assert_whole, bodies, drain, take
from ..contract.keyed import M
from .disk import SqliteDisk, directory_of


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SqliteDisk]:
    with SqliteDisk(tmp_path) as disk:
        yield disk


def execute(path: Path, *statements: str) -> list[tuple[object, ...]]:
    connection = sqlite3.connect(path)
    found: list[tuple[object, ...]] = []
    with connection:
        for statement in statements:
            found = connection.execute(statement).fetchall()
    connection.close()
    return found


def at(path: Path) -> SqlOptions:
    """Tables in a database that is not in the store's directory."""
    return SqlOptions(url=SecretStr(f"sqlite:///{path}"))


def test_a_store_leaves_its_directory_and_nothing_else(tmp_path: Path) -> None:
    SqlStore.create("s", tmp_path / "s", SqlOptions())
    assert sorted(path.name for path in (tmp_path / "s").iterdir()) == ["store.db", "store.id"]
    assert [path.name for path in tmp_path.iterdir()] == ["s"]
    assert SqlStore.identify(tmp_path / "s") is not None
    assert SqlStore.identify(tmp_path) is None


def test_two_stores_under_two_prefixes_share_a_database(tmp_path: Path) -> None:
    stores = []
    for name in ("a", "b"):
        options = SqlOptions(url=SecretStr(f"sqlite:///{tmp_path / 'db'}"), schema_prefix=f"{name}_")
        SqlStore.create(name, tmp_path / name, options)
        stores.append(SqlStore(name, tmp_path / name, options))
    for store in stores:
        store.open()
        store.send(A, store.name.encode())
    assert [drain(store) for store in stores] == [[b"a"], [b"b"]]
    for store in stores:
        store.close()


def test_tables_of_another_store_are_refused(tmp_path: Path) -> None:
    options = at(tmp_path / "db")
    store_id = SqlStore.create("a", tmp_path / "a", options)
    store = SqlStore("a", tmp_path / "a", options)
    store.open()
    store.send(A, b"x")
    with pytest.raises(PlacementError, match=store_id.hex()):
        SqlStore.create("b", tmp_path / "b", options)
    assert not (tmp_path / "b").exists()
    assert bodies(store) == [b"x"]
    store.close()


def test_tables_that_nobody_owns_are_taken_with_what_they_hold(tmp_path: Path) -> None:
    """After a restore without the row, say; the ids go on."""
    options = at(tmp_path / "db")
    SqlStore.create("a", tmp_path / "a", options)
    store = SqlStore("a", tmp_path / "a", options)
    store.open()
    store.subscribe(Subscription(T, "desk"))
    seq = store.send(A, b"x").seq
    store.close()
    execute(tmp_path / "db", "DELETE FROM store")
    SqlStore.create("b", tmp_path / "b", options)
    store = SqlStore("b", tmp_path / "b", options)
    store.open()
    assert bodies(store) == [b"x"]
    assert store.send(B, b"y").seq > seq
    assert_whole(store)
    store.close()


def test_missing_tables_are_refused(disk: SqliteDisk, tmp_path: Path) -> None:
    options = SqlOptions(url=SecretStr(f"sqlite:///{tmp_path / 'db'}"), create_tables=False)
    with pytest.raises(ConfigError, match=r"messages.*schema create"):
        SqlStore.create("s", tmp_path / "s", options)
    assert not (tmp_path / "s").exists()
    store = disk.create()
    store.close()
    execute(directory_of(store) / "store.db", "DROP TABLE acks")
    with pytest.raises(PlacementError, match="has no acks"):
        disk.reopen(store)


def test_a_missing_column_is_refused(disk: SqliteDisk) -> None:
    store = disk.create()
    store.close()
    execute(directory_of(store) / "store.db", "ALTER TABLE messages DROP COLUMN headers")
    with pytest.raises(ConfigError, match=r"messages.*headers"):
        disk.reopen(store)


@pytest.mark.parametrize("version", [0, 1, VERSION + 1])
def test_another_version_is_refused(disk: SqliteDisk, version: int) -> None:
    store = disk.create()
    store.send(A, b"x")
    store.close()
    execute(directory_of(store) / "store.db", f"UPDATE store SET version = {version}")
    with pytest.raises(ConfigError, match=f"version {version}"):
        disk.reopen(store)


def test_another_writer_is_noticed_before_anything_is_lost(disk: SqliteDisk) -> None:
    """Two processes on the same tables, without a lease: the second one's writes stop the first (invariant 8)."""
    store = disk.create()
    store.send(A, b"1")
    message = take(store)
    execute(directory_of(store) / "store.db", "UPDATE store SET batch = batch + 1")
    for call in (message.ack, lambda: store.send(A, b"2"), lambda: store.receive(A)):
        with pytest.raises(StoreFailedError):
            call()
    assert "somebody else" in str(store.stats().failed)
    again = disk.reopen(store)
    assert drain(again) == [b"1"]
    assert_whole(again)


def test_long_bodies_lie_in_rows_that_go_with_them(disk: SqliteDisk) -> None:
    store = disk.create(chunk_size=1024)
    path = directory_of(store) / "store.db"
    body = bytes(range(256)) * 40
    store.send(A, body)
    store.send(A, body[:1024])
    store.subscribe(Subscription(T, "one"))
    store.subscribe(Subscription(T, "two"))
    store.send(T, body)
    assert execute(path, "SELECT COUNT(*) FROM chunks") == [(20,)]
    assert bodies(disk.crash(store)) == [body, body[:1024]]
    assert drain(store) == [body, body[:1024]]
    assert drain(store, T, ("", "one")) == [body]
    store.unsubscribe(T, ("", "two"))
    assert execute(path, "SELECT COUNT(*) FROM chunks") == [(0,)]
    for purge in (store.purge, store.delete):
        store.send(A, body)
        assert purge(A) == 1
        assert execute(path, "SELECT COUNT(*) FROM chunks") == [(0,)]
    assert_whole(store)


def test_a_topics_message_is_stored_once(disk: SqliteDisk) -> None:
    """Whatever the number of its subscriptions; ACKS and REDELIVERIES are empty again when it is gone."""
    store = disk.create()
    path = directory_of(store) / "store.db"
    keys = [("c", str(n)) for n in range(5)]
    for client, name in keys:
        store.subscribe(Subscription(T, name, client))
    store.send_many(T, [b"x"] * 10)
    assert execute(path, "SELECT COUNT(*) FROM messages") == [(10,)]
    for key in keys:
        take(store, T, 0, key).release()
        assert len(drain(store, T, key)) == 10
    for table in ("messages", "acks", "redeliveries"):
        assert execute(path, f"SELECT COUNT(*) FROM {table}") == [(0,)], table


def test_acks_of_what_was_sent_before_a_subscription_began_go_with_the_message(disk: SqliteDisk) -> None:
    """Earlier versions wrote such rows when a subscription was purged, and left them behind; check() names them."""
    store = disk.create()
    path = directory_of(store) / "store.db"
    early, late = Subscription(T, "early"), Subscription(T, "late")
    store.subscribe(early)
    store.send_many(T, [b"x"] * 3)
    store.subscribe(late)
    store.close()
    number = execute(path, "SELECT number FROM durables WHERE durablename = 'late'")[0][0]
    execute(path, f"INSERT INTO acks SELECT {number}, id FROM messages")
    store = disk.open(directory_of(store))
    assert [violation for violation in store.check() if "ACKS" in violation]
    take(store, T, 0, early.key).ack()
    assert execute(path, "SELECT COUNT(*) FROM acks") == [(2,)]
    assert len(drain(store, T, early.key)) == 2
    assert execute(path, "SELECT COUNT(*) FROM acks") == [(0,)]
    assert_whole(store)


@pytest.mark.parametrize("remove", ["purge", "unsubscribe", "delete"])
def test_acks_of_messages_that_are_gone_are_cleared_away(disk: SqliteDisk, remove: str) -> None:
    store = disk.create()
    path = directory_of(store) / "store.db"
    subscription = Subscription(T, "s")
    store.subscribe(subscription)
    gone = store.send_many(T, [b"x"] * 3)[1].seq
    store.close()
    execute(path, f"INSERT INTO acks SELECT number, {gone} FROM durables", f"DELETE FROM messages WHERE id = {gone}")
    store = disk.open(directory_of(store))
    assert "ACKS" in "".join(store.check())
    if remove == "purge":
        store.purge(T, subscription.key)
    elif remove == "unsubscribe":
        store.unsubscribe(T, subscription.key)
    else:
        store.delete(T)
    assert execute(path, "SELECT COUNT(*) FROM acks") == [(0,)]
    assert_whole(store)


def test_the_index_by_priority_is_made_for_no_other_store(disk: SqliteDisk) -> None:
    for priorities in (True, False):
        store = disk.create(priorities=priorities)
        with sqlite3.connect(directory_of(store) / "store.db") as database:
            indexes = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'index'")}
        database.close()
        assert ("messages_order" in indexes) == priorities


def test_the_public_columns(disk: SqliteDisk) -> None:
    """What a program that knows SwiftMQ's tables reads there."""
    store = disk.create(priorities=True)
    path = directory_of(store) / "store.db"
    seq = store.send(A, b"x", priority=65_535, expires_at_ms=9_999_999_999_999).seq
    take(store).release()
    store.subscribe(Subscription(T, "desk", "c1", "a = 1", True))
    columns = "QUEUENAME, ID, PRIORITY, DELIVERYCOUNT, EXPIRATIONTIME, CONTENT"
    assert execute(path, f"SELECT {columns} FROM MESSAGES") == [("queue://a", seq, 65_535, 1, 9_999_999_999_999, b"x")]
    columns = "CLIENTID, DURABLENAME, TOPICNAME, SELECTOR, NOLOCAL"
    assert execute(path, f"SELECT {columns} FROM DURABLES") == [("c1", "desk", "t", "a = 1", 1)]


def test_damaged_tables_are_said_to_be(disk: SqliteDisk) -> None:
    """Invariant 9: nothing is skipped silently."""
    store = disk.create()
    store.send(A, b"x")
    for _ in range(3):
        store.send(B, b"x")
    store.close()
    execute(directory_of(store) / "store.db", "DELETE FROM destinations WHERE NAME = 'a'")
    with pytest.raises(CorruptionError, match="messages in these tables: 3 of queue://b; restore the tables"):
        disk.reopen(store)


def test_a_file_that_is_no_database(disk: SqliteDisk) -> None:
    store = disk.create()
    store.close()
    (directory_of(store) / "store.db").write_bytes(b"not a database, surely" * 100)
    with pytest.raises(StoreFailedError, match="not a database"):
        disk.reopen(store)


def test_a_database_that_vanished_is_not_made_anew(disk: SqliteDisk) -> None:
    """Rule D1: it looks just like a disk that is not mounted."""
    store = disk.create()
    store.send(A, b"x")
    store.close()
    (directory_of(store) / "store.db").unlink()
    with pytest.raises(PlacementError, match="nothing was created"):
        disk.reopen(store)


def test_a_key_with_two_values_is_found(disk: SqliteDisk) -> None:
    """By check() (S5)."""
    store = disk.create()
    store.maps.put(M, "a", b"1")
    store.maps.put(M, "b", b"2")
    assert_whole(store)
    execute(directory_of(store) / "store.db", "UPDATE messages SET mapkey = CAST('a' AS BLOB)")
    (violation,) = store.check()
    assert violation == "MESSAGES has two values of key b'a' of destination 1"
