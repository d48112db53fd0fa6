"""Sends and acks in a transaction of the caller's own: there once it commits, never if it does not, in its order."""

from __future__ import annotations

import gc
import io
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import psycopg
import psycopg.rows
import pytest
import sqlalchemy as sa
import sqlalchemy.orm
from pydantic import SecretStr
from sqlalchemy import event
from sqlalchemy.engine import Connection, Engine

import anabranch
from anabranch.adapters.core import Store
from anabranch.adapters.core.features import outbox as core_outbox
from anabranch.adapters.core.messages import Outgoing
from anabranch.adapters.core.store_types import Subscription
from anabranch.adapters.sql import SqlStore
from anabranch.adapters.sql.database import drivers
from anabranch.adapters.sql.outbox import Outbox
from anabranch.policies.config.options import SqlOptions
from anabranch.policies.errors import (
    MessageTooLargeError,
    StoreFailedError,
    StoreFullError,
    TransactionError,
    UnknownMessageError,
)
from anabranch.policies.names.destination import Destination

from ..contract.disk import PATIENCE, A, B, Parallel, T, assert_whole, bodies, drain, eventually, take
from . import caller
from .server import PostgresServer

SALES = sa.Table("sales", sa.MetaData(), sa.Column("name", sa.String, primary_key=True))


class Shared:
    """A database with a store in it, and somebody's own table."""

    def __init__(self, path: Path, url: str, **options: Any) -> None:
        self.path, self.url = path, url
        self.options: dict[str, Any] = {"url": url, "chunk_size": 4096, **options}
        if url.startswith("postgresql"):
            self.options.setdefault("pool_min", 0)
        self.engine = caller_engine(url)
        SALES.metadata.create_all(self.engine)
        SqlStore.create("s", path, SqlOptions(**self.options))
        self.store = self.open()

    def open(self, **options: Any) -> SqlStore:
        self.store = SqlStore("s", self.path, SqlOptions(**{**self.options, **options}))
        self.store.open()
        return self.store

    def sales(self) -> list[str]:
        with self.engine.connect() as connection:
            return list(connection.execute(sa.select(SALES.c.name).order_by(SALES.c.name)).scalars())

    def waiting(self) -> int:
        """Rows of OUTBOX."""
        with self.engine.connect() as connection:
            return int(connection.exec_driver_sql("SELECT count(*) FROM outbox").scalar_one())

    def close(self) -> None:
        self.store.close()
        self.engine.dispose()


def caller_engine(url: str, **more: Any) -> Engine:
    """As somebody makes it who knows nothing of us; on SQLite by SQLAlchemy's own recipe, without which savepoints do
    not work there."""
    engine = sa.create_engine(url, **more)
    if engine.dialect.name == "sqlite":

        @event.listens_for(engine, "connect")
        def _connected(connection: Any, _record: Any) -> None:
            connection.isolation_level = None

        @event.listens_for(engine, "begin")
        def _begun(connection: Connection) -> None:
            connection.exec_driver_sql("BEGIN IMMEDIATE")

    return engine


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "postgresql":
        return str(request.getfixturevalue("postgres_url"))
    return f"sqlite:///{tmp_path / 'app.db'}"


@pytest.fixture
def shared(url: str, tmp_path: Path) -> Iterator[Shared]:
    shared = Shared(tmp_path / "s", url)
    yield shared
    shared.close()


@pytest.fixture
def store(shared: Shared) -> Store:
    return shared.store


def sell(connection: Connection, name: str) -> None:
    connection.execute(SALES.insert(), {"name": name})


# Sending


def test_it_is_there_once_the_caller_commits_and_not_before(shared: Shared, store: Store) -> None:
    with shared.engine.begin() as connection:
        sell(connection, "hat")
        (receipt,) = store.send_within(connection, A, [Outgoing(b"hat", {"n": 1}, "id-1", priority=7)])
        assert (receipt.destination, receipt.seq, receipt.duplicate) == (A, 0, False)
        assert bodies(store) == []
    message = take(store)
    assert (message.body, message.headers, message.message_id, message.priority) == (b"hat", {"n": 1}, "id-1", 7)
    assert message.persistent
    assert shared.sales() == ["hat"]
    assert shared.waiting() == 0
    assert_whole(store)


def test_after_a_rollback_it_never_was(shared: Shared, store: Store) -> None:
    with pytest.raises(ZeroDivisionError), shared.engine.begin() as connection:
        sell(connection, "hat")
        store.send_within(connection, A, [b"hat"])
        raise ZeroDivisionError
    assert bodies(store) == [] and store.receive(A) is None
    assert shared.sales() == [] and shared.waiting() == 0
    assert store.send(A, b"next").seq == 1


def test_the_order_of_one_transaction_is_kept(shared: Shared, store: Store) -> None:
    store.send(A, b"before")
    with shared.engine.begin() as connection:
        store.send_within(connection, A, [b"1", b"2"])
        store.send_within(connection, B, [b"b"])
        store.send_within(connection, A, [b"3"])
    with shared.engine.begin() as connection:
        store.send_within(connection, A, [b"4"])
    assert bodies(store) == [b"before", b"1", b"2", b"3", b"4"]
    store.send(A, b"after")
    assert drain(store) == [b"before", b"1", b"2", b"3", b"4", b"after"]
    assert drain(store, B) == [b"b"]


def test_any_name_will_do(shared: Shared, store: Store) -> None:
    names = [Destination.queue("Smith, J."), Destination.queue("a://b"), Destination.queue("ü.x y")]
    with shared.engine.begin() as connection:
        for name in names:
            store.send_within(connection, name, [b"1"])
    assert [bodies(store, name) for name in names] == [[b"1"]] * 3


def test_who_waits_gets_it(shared: Shared, store: Store) -> None:
    with Parallel(lambda: store.receive(A, PATIENCE)) as parallel:
        eventually(lambda: store.stats().waiting)
        with shared.engine.begin() as connection:
            store.send_within(connection, A, [b"hat"])
        assert parallel.result().body == b"hat"


def test_large_bodies_and_empty_ones(shared: Shared, store: Store) -> None:
    large = bytes(range(256)) * 100
    with shared.engine.begin() as connection:
        store.send_within(connection, A, [b"", large, b"x"])
    assert drain(store) == [b"", large, b"x"]
    assert shared.waiting() == 0
    assert_whole(store)


def test_a_transaction_larger_than_a_write_is_there_whole_in_the_end(
    shared: Shared, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core_outbox, "GROUP_MAX", 10)
    monkeypatch.setattr(core_outbox, "GROUP_BYTES", 5000)
    names = [str(number).encode() for number in range(35)]
    with shared.engine.begin() as connection:
        store.send_within(connection, A, names)
    with shared.engine.begin() as connection:
        store.send_within(connection, A, [bytes(6000), bytes(7000)])
    assert drain(store) == [*names, bytes(6000), bytes(7000)]


def test_a_topics_message_is_for_who_subscribes_by_then(shared: Shared, store: Store) -> None:
    subscription = Subscription(T, "name")
    with shared.engine.begin() as connection:
        store.send_within(connection, T, [b"nobody's"])
    eventually(lambda: shared.waiting() == 0)
    store.subscribe(subscription)
    with shared.engine.begin() as connection:
        store.send_within(connection, T, [b"1"])
    message = take(store, T, PATIENCE, subscription.key)
    with shared.engine.begin() as connection:
        store.ack_within(connection, [message])
    assert store.depth(T) == 0
    assert_whole(store)


def test_a_duplicate_falls_away(shared: Shared, store: Store) -> None:
    for _ in range(2):
        with shared.engine.begin() as connection:
            store.send_within(connection, A, [Outgoing(b"1", message_id="one"), Outgoing(b"1", message_id="one")])
    assert bodies(store) == [b"1"]
    assert store.send(A, b"1", message_id="one").duplicate


def test_limits_are_kept_when_it_is_sent(url: str, tmp_path: Path) -> None:
    shared = Shared(tmp_path / "s", url, max_messages=2, message_bytes_max=100)
    try:
        store = shared.store
        with pytest.raises(StoreFullError, match="max_messages"), shared.engine.begin() as connection:
            store.send_within(connection, A, [b"1", b"2"])
            store.send_within(connection, A, [b"3"])
        assert bodies(store) == []
        with shared.engine.begin() as connection:
            store.send_within(connection, A, [b"1", b"2"])
        with pytest.raises(StoreFullError):
            store.send(A, b"3")
        assert drain(store) == [b"1", b"2"]
        with pytest.raises(MessageTooLargeError), shared.engine.begin() as connection:
            store.send_within(connection, A, [bytes(101)])
    finally:
        shared.close()


def test_many_threads_commit_at_once(shared: Shared, store: Store) -> None:
    def work(thread: int) -> None:
        for number in range(10):
            with shared.engine.connect() as connection, connection.begin() as transaction:
                sell(connection, f"{thread}.{number}")
                store.send_within(connection, A, [f"{thread}.{number}".encode()])
                transaction.rollback() if number % 3 == 2 else transaction.commit()

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    eventually(lambda: store.depth(A) == 28)
    received = drain(store)
    assert sorted(received) == sorted(name.encode() for name in shared.sales())
    for number in range(4):
        mine = [int(name.split(b".")[1]) for name in received if name.startswith(b"%d." % number)]
        assert mine == sorted(mine)
    assert_whole(store)


# Acking


def test_an_ack_counts_once_the_caller_commits(shared: Shared, store: Store) -> None:
    store.send_many(A, [b"1", b"2"])
    with shared.engine.begin() as connection:
        message = take(store)
        sell(connection, "hat")
        store.ack_within(connection, [message])
        store.send_within(connection, B, [b"done"])
        assert store.depth(A) == 2
        with pytest.raises(UnknownMessageError):
            message.release()
    assert bodies(store) == [b"2"] and bodies(store, B) == [b"done"]
    with pytest.raises(UnknownMessageError):
        message.ack()
    assert shared.sales() == ["hat"] and shared.waiting() == 0
    assert store.stats().leased == 0
    assert_whole(store)


def test_after_a_rollback_the_message_is_free_again(shared: Shared, store: Store) -> None:
    store.send_many(A, [b"1", b"2"])
    message = take(store)
    with shared.engine.connect() as connection:
        message.ack(connection=connection)
        assert take(store).body == b"2"
        connection.rollback()
    again = take(store, timeout=PATIENCE)
    assert (again.body, again.deliveries) == (b"1", 2)
    with pytest.raises(UnknownMessageError):
        message.ack()
    assert_whole(store)


def test_all_acks_or_none(shared: Shared, store: Store) -> None:
    store.send_many(A, [b"1", b"2"])
    one, two = take(store), take(store)
    two.ack()
    with shared.engine.begin() as connection, pytest.raises(UnknownMessageError):
        store.ack_within(connection, [one, two])
    one.release()
    assert bodies(store) == [b"1"]
    (browsed,) = store.browse(A)
    with shared.engine.begin() as connection, pytest.raises(UnknownMessageError, match="browsed"):
        store.ack_within(connection, [browsed])


def test_what_is_not_persistent_takes_no_part(shared: Shared, store: Store) -> None:
    store.send(A, b"1", persistent=False)
    message = take(store)
    with shared.engine.begin() as connection:
        with pytest.raises(ValueError, match="persistent=False"):
            store.ack_within(connection, [message])
        with pytest.raises(ValueError, match="persistent=False"):
            store.send_within(connection, A, [Outgoing(b"2", persistent=False)])
    message.ack()
    assert bodies(store) == []


def test_who_has_it_in_a_transaction_keeps_it(shared: Shared, store: Store) -> None:
    store.send(A, b"1")
    message = take(store)
    with shared.engine.begin() as connection:
        store.ack_within(connection, [message])
        assert store.purge(A) == 0
        with pytest.raises(TransactionError):
            store.delete(A)
        assert not store.retire()
    assert store.depth(A) == 0


def test_savepoints(shared: Shared, store: Store) -> None:
    store.send_many(A, [b"1", b"2"])
    one, two = take(store), take(store)
    with shared.engine.begin() as connection:
        store.send_within(connection, B, [b"first"])
        savepoint = connection.begin_nested()
        store.send_within(connection, B, [b"no"])
        store.ack_within(connection, [one, two])
        savepoint.rollback()
        store.ack_within(connection, [two])  # once more: it is still this transaction's
        with connection.begin_nested():
            store.send_within(connection, B, [b"last"])
    assert bodies(store, B) == [b"first", b"last"]
    again = take(store, timeout=PATIENCE)
    assert again.body == b"1" and bodies(store) == [b"1"]
    assert_whole(store)


# How transactions end


def test_commits_one_after_the_other_on_one_connection(shared: Shared, store: Store) -> None:
    with shared.engine.connect() as connection:
        for number in range(4):
            store.send_within(connection, A, [b"%d" % number])
            connection.rollback() if number % 2 else connection.commit()
        assert bodies(store) == [b"0", b"2"]
        store.send_within(connection, A, [b"closed"])
    assert bodies(store) == [b"0", b"2"]


def test_one_that_ends_without_a_word(shared: Shared, store: Store) -> None:
    """By its driver, say."""
    store.send(B, b"b")
    with shared.engine.connect() as connection:
        store.send_within(connection, A, [b"1"])
        connection.exec_driver_sql("COMMIT")
        assert take(store, timeout=PATIENCE).body == b"1"
    message = take(store, B)
    connection = shared.engine.connect()
    store.ack_within(connection, [message])
    del connection  # nobody has closed it
    gc.collect()
    assert take(store, B, PATIENCE).body == b"b"


@pytest.mark.parametrize("url", ["postgresql"], indirect=True)  # SQLAlchemy does not roll back SQLite's
def test_one_whose_commit_fails(shared: Shared, store: Store) -> None:
    store.send(A, b"1")
    message = take(store)
    with shared.engine.begin() as connection:
        connection.exec_driver_sql(
            "CREATE TABLE parts (name VARCHAR REFERENCES sales (name) DEFERRABLE INITIALLY DEFERRED)"
        )
    with pytest.raises(sa.exc.IntegrityError), shared.engine.connect() as connection:
        store.ack_within(connection, [message])
        store.send_within(connection, B, [b"never"])
        connection.exec_driver_sql("INSERT INTO parts VALUES ('no such sale')")
        connection.commit()
    assert take(store, timeout=PATIENCE).body == b"1"
    assert bodies(store, B) == []


def test_the_store_is_closed_before_they_end(shared: Shared, store: Store) -> None:
    store.send(A, b"1")
    message = take(store)
    with shared.engine.begin() as connection:
        store.ack_within(connection, [message])
        store.send_within(connection, B, [b"2"])
        store.close()
    assert shared.waiting() == 2
    again = shared.open()
    assert (bodies(again, A), bodies(again, B)) == ([], [b"2"])
    assert shared.waiting() == 0
    assert_whole(again)


def test_what_somebody_else_commits_is_found(shared: Shared, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A transaction that another process prepares, and commits: here, rows that come without a word."""
    with shared.engine.begin() as connection:
        store.send_within(connection, A, [b"1"])
    take(store).ack()
    told = core_outbox.Outbox.ending
    monkeypatch.setattr(core_outbox.Outbox, "ending", lambda *_: None)
    with shared.engine.begin() as connection:
        store.send_within(connection, A, [b"2"])
    monkeypatch.setattr(core_outbox.Outbox, "ending", told)
    assert take(store, timeout=PATIENCE).body == b"2"


# What is refused


def test_other_stores_refuse_it(url: str, tmp_path: Path) -> None:
    shared = Shared(tmp_path / "s", url)
    stores = [
        anabranch.StoreConfig("journal", ["queue://j"], journal=anabranch.JournalOptions()),
        anabranch.StoreConfig("memory", ["queue://m"], memory=anabranch.MemoryOptions()),
    ]
    router = anabranch.open(anabranch.Config(tmp_path / "data", stores))
    try:
        for name, kind in ("j", "journal"), ("m", "memory"):
            queue = router.queue(name)
            queue.send(b"x")
            message = queue.receive()
            assert message is not None
            with shared.engine.connect() as connection:
                for call in (
                    lambda: queue.send(b"y", connection=connection),  # noqa: B023
                    lambda: queue.send_many([b"y"], connection=connection),  # noqa: B023
                    lambda: message.ack(connection=connection),  # noqa: B023
                ):
                    with pytest.raises(TransactionError, match=f"of kind {kind}"):
                        call()
            message.ack()
            assert queue.depth() == 0
    finally:
        router.close()
        shared.close()


def test_a_store_that_is_not_made_yet(tmp_path: Path) -> None:
    """SQLite does not let it make its tables while the caller has written: the error says what to do before."""
    engine = caller_engine(f"sqlite:///{tmp_path / 'db'}")
    SALES.metadata.create_all(engine)
    options = SqlOptions(url=SecretStr(f"sqlite:///{tmp_path / 'db'}"))
    config = anabranch.Config(tmp_path / "data", [anabranch.StoreConfig("all", [">"], sql=options)])
    with anabranch.open(config) as router:
        queue = router.queue("q")

        def sell(name: str) -> None:
            with engine.begin() as connection:
                connection.execute(SALES.insert(), {"name": name})
                queue.send(name.encode(), connection=connection)

        with pytest.raises(StoreFailedError) as caught:
            sell("hat")
        assert any("call declare() once" in note for note in caught.value.__notes__)
        queue.declare()
        sell("coat")
        assert [message.body for message in queue.browse()] == [b"coat"]
    engine.dispose()


def test_another_database_is_refused(shared: Shared, store: Store, tmp_path: Path, request: Any) -> None:
    elsewhere = [sa.create_engine("sqlite://"), sa.create_engine(f"sqlite:///{tmp_path / 'copy.db'}")]
    if shared.engine.dialect.name == "sqlite":
        (tmp_path / "copy.db").write_bytes((tmp_path / "app.db").read_bytes())
    else:
        server: PostgresServer = request.getfixturevalue("postgres")
        elsewhere.append(sa.create_engine(server.new_schema()))  # of the same database, without tables
        other = server.new_database()
        SqlStore.create("other", tmp_path / "other", SqlOptions(url=other, pool_min=0))
        elsewhere.append(sa.create_engine(other))
    store.send(A, b"1")
    message = take(store)
    for engine in elsewhere:
        with engine.connect() as connection:
            with pytest.raises(TransactionError, match=r"store 's' is in .* Nothing was done"):
                store.send_within(connection, A, [b"2"])
            with pytest.raises(TransactionError, match=r"store 's' is in .* Nothing was done"):
                store.ack_within(connection, [message])
        engine.dispose()
    message.ack()
    assert bodies(store) == []


def test_autocommit_is_refused(shared: Shared, store: Store) -> None:
    autocommit = shared.engine.execution_options(isolation_level="AUTOCOMMIT")
    with autocommit.connect() as connection, pytest.raises(TransactionError, match="autocommit"):
        store.send_within(connection, A, [b"1"])
    if shared.engine.dialect.name == "sqlite":  # by the driver, as whoever forgets the half of the recipe has it
        engine = sa.create_engine(shared.url)
        with engine.connect() as connection:
            connection.connection.dbapi_connection.isolation_level = None  # type: ignore[union-attr]
            with pytest.raises(TransactionError, match="autocommit"):
                store.send_within(connection, A, [b"1"])
        engine.dispose()
        engine = sa.create_engine(shared.url)  # and without any of it
        with engine.begin() as connection:
            store.send_within(connection, A, [b"plain"])
        with pytest.raises(ZeroDivisionError), engine.begin() as connection:
            store.send_within(connection, A, [b"not"])
            raise ZeroDivisionError
        engine.dispose()
        assert bodies(store) == [b"plain"]
    else:
        assert bodies(store) == []


def test_what_is_no_connection_is_refused(shared: Shared, store: Store) -> None:
    with pytest.raises(TypeError, match=r"Engine; engine.begin\(\)"):
        store.send_within(shared.engine, A, [b"1"])
    with sqlalchemy.orm.Session(shared.engine) as session, pytest.raises(TypeError, match=r"session.connection\(\)"):
        store.send_within(session, A, [b"1"])
    with pytest.raises(TypeError, match="Connection, not str"):
        store.send_within("x", A, [b"1"])
    with shared.engine.connect() as connection:
        pass
    with pytest.raises(TransactionError, match="closed"):
        store.send_within(connection, A, [b"1"])


def test_a_session_of_the_orm(shared: Shared, store: Store) -> None:
    with sqlalchemy.orm.Session(shared.engine) as session, session.begin():
        store.send_within(session.connection(), A, [b"1"])
    assert bodies(store) == [b"1"]


def connected(url: str, **more: Any) -> Any:
    """A connection of the driver's own."""
    if url.startswith("sqlite"):
        return sqlite3.connect(url.removeprefix("sqlite:///"), check_same_thread=False, **more)
    return psycopg.connect(url.replace("+psycopg", ""), **more)


def test_a_connection_of_the_driver(shared: Shared, store: Store) -> None:
    """Whatever its rows are; the thread that has committed sees it at once, and who waits within a moment."""
    store.send_many(A, [b"1", b"2", b"3"])
    one, two, three = (take(store) for _ in range(3))
    connection = connected(shared.url)
    connection.row_factory = sqlite3.Row if shared.url.startswith("sqlite") else psycopg.rows.dict_row
    connection.execute("INSERT INTO sales VALUES ('hat')")
    assert store.send_within(connection, B, [b"hat"])[0].seq == 0
    one.ack(connection=connection)
    store.send_within(connection, B, [bytes(9000), b""])
    assert (bodies(store, B), store.counts(A).leased) == ([], 3)
    connection.commit()
    assert (bodies(store, B), shared.sales()) == ([b"hat", bytes(9000), b""], ["hat"])
    assert drain(store, B) and shared.waiting() == 0
    two.ack(connection=connection)
    store.send_within(connection, B, [b"not"])
    connection.rollback()
    again = take(store, timeout=PATIENCE)
    assert (again.body, again.deliveries, bodies(store, B)) == (b"2", 2, [])
    with Parallel(lambda: take(store, B, PATIENCE)) as receiver:
        three.ack(connection=connection)
        again.ack(connection=connection)
        store.send_within(connection, B, [b"last"])
        connection.commit()
        assert receiver.result().body == b"last"
    assert bodies(store) == [] and store.stats().leased == 1
    connection.close()
    assert_whole(store)


def test_transactions_of_a_driver_one_after_the_other(shared: Shared, store: Store) -> None:
    """Also where nobody was asked in between, and the next one was begun by its owner."""
    store.send_many(A, [b"1", b"2"])
    one, two = take(store), take(store)
    connection = connected(shared.url)
    one.ack(connection=connection)
    store.send_within(connection, B, [b"not"])
    connection.rollback()
    connection.execute("INSERT INTO sales VALUES ('hat')")
    two.ack(connection=connection)
    store.send_within(connection, B, [b"1"])
    connection.commit()
    connection.execute("INSERT INTO sales VALUES ('scarf')")
    store.send_within(connection, B, [b"2"])
    connection.commit()
    assert bodies(store, B) == [b"1", b"2"]
    assert (take(store, timeout=PATIENCE).body, bodies(store)) == (b"1", [b"1"])
    store.send_within(connection, B, [b"open"])
    connection.close()
    assert bodies(store, B) == [b"1", b"2"]
    eventually(lambda: not store.is_enlisted(B))
    with pytest.raises(Exception, match="closed"):
        store.send_within(connection, B, [b"3"])
    assert_whole(store)


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_a_commit_of_the_driver_that_takes_its_time(
    shared: Shared, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sqlite3's `in_transaction` is false from its beginning on: nobody takes it for rolled back."""
    store.send(A, b"1")
    message, outbox = take(store), cast(core_outbox.Outbox, store._outbox())
    connection = connected(shared.url)
    message.ack(connection=connection)
    store.send_within(connection, B, [b"2"])
    written, looked = outbox._drain_written, threading.Event()

    def look() -> set[str]:
        kept = written()
        looked.set()
        return kept

    with monkeypatch.context() as patch:
        patch.setattr(drivers, "is_in_transaction", lambda driver: False)
        patch.setattr(outbox, "_drain_written", look)
        with Parallel(lambda: outbox._drain_now(everything=True)) as looking:
            looked.wait(0.5)  # it does not look before the commit is done
            connection.commit()
        looking.result()
    assert (bodies(store, B), drain(store), message.deliveries) == ([b"2"], [], 1)
    connection.close()
    assert_whole(store)


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_a_connection_that_is_always_in_a_transaction_is_refused(shared: Shared, store: Store) -> None:
    class Always(sqlite3.Connection):
        autocommit = False  # as Python 3.12 has it

    connection = connected(shared.url, factory=Always)
    with pytest.raises(TransactionError, match="autocommit=False begins the next"):
        store.send_within(connection, A, [b"1"])
    connection.close()


def test_what_a_connection_of_the_driver_has_no_transaction_for(
    shared: Shared, store: Store, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    is_sqlite = shared.url.startswith("sqlite")
    own = connected(shared.url, **({"isolation_level": None} if is_sqlite else {"autocommit": True}))
    with pytest.raises(TransactionError, match="autocommit"):
        store.send_within(own, A, [b"1"])
    own.execute("BEGIN")
    store.send_within(own, A, [b"2"])
    own.execute("COMMIT")
    assert bodies(store) == [b"2"]
    own.close()
    elsewhere = connected(f"sqlite:///{tmp_path / 'other.db'}")
    with pytest.raises(TransactionError, match="to another database" if is_sqlite else "is sqlite"):
        store.send_within(elsewhere, A, [b"3"])
    with pytest.raises(TypeError, match=r"one of psycopg, sqlite3 or Django, or a .*, not Cursor"):
        store.send_within(elsewhere.cursor(), A, [b"4"])
    elsewhere.close()
    assert bodies(store) == [b"2"]


@pytest.mark.parametrize("url", ["postgresql"], indirect=True)
def test_an_error_is_the_drivers_own(shared: Shared, store: Store) -> None:
    with connected(shared.url) as connection, pytest.raises(psycopg.errors.InFailedSqlTransaction):
        with pytest.raises(psycopg.errors.DivisionByZero):
            connection.execute("SELECT 1 / 0")
        store.send_within(connection, A, [b"1"])
    assert bodies(store) == []


def test_by_a_router(url: str, tmp_path: Path) -> None:
    sql = anabranch.SqlOptions(url=url, **({"pool_min": 0} if "postgresql" in url else {}))  # type: ignore[arg-type]
    config = anabranch.Config(tmp_path / "data", [anabranch.StoreConfig("s", [">"], sql=sql)])
    engine = caller_engine(url)
    with anabranch.open(config) as router:
        orders, done = router.queue("orders"), router.queue("done")
        orders.send(b"1")
        message = orders.receive()
        assert message is not None
        with engine.begin() as connection:
            message.ack(connection=connection)
            assert done.send(b"1", connection=connection).seq == 0
            done.send_many([b"2", b"3"], connection=connection)
        assert (orders.depth(), done.depth()) == (0, 3)
    engine.dispose()


@pytest.mark.parametrize("url", ["postgresql"], indirect=True)
def test_the_database_loses_a_caller(shared: Shared, store: Store) -> None:
    """Its connection is cut off in the middle: what it had acked is free again."""
    store.send(A, b"1")
    message = take(store)
    with shared.engine.connect() as connection:
        store.ack_within(connection, [message])
        pid = connection.exec_driver_sql("SELECT pg_backend_pid()").scalar_one()
        with shared.engine.begin() as other:
            other.exec_driver_sql(f"SELECT pg_terminate_backend({pid})")
        with pytest.raises(sa.exc.OperationalError):
            connection.exec_driver_sql("SELECT 1")
    assert take(store, timeout=PATIENCE).body == b"1"


def test_it_is_refused_while_the_rows_are_gone(shared: Shared, store: Store) -> None:
    """Somebody has emptied OUTBOX between reading and doing: nothing is sent twice."""
    rows: Any = getattr(store.backend, "outbox", None)
    assert isinstance(rows, Outbox)
    entries = rows.entries

    def emptied(caller: str, first: int, last: int) -> Any:
        found = entries(caller, first, last)
        with shared.engine.begin() as connection:
            connection.exec_driver_sql("DELETE FROM outbox")
        return found

    rows.entries = emptied  # type: ignore[method-assign]
    with shared.engine.begin() as connection:
        store.send_within(connection, A, [b"1"])
    assert bodies(store) == []
    del rows.entries
    with shared.engine.begin() as connection:
        store.send_within(connection, A, [b"2"])
    assert bodies(store) == [b"2"]
    assert_whole(store)


def test_a_failed_store_takes_nothing(shared: Shared, store: Store) -> None:
    store._engine.fail(StoreFailedError("its disk"))
    with shared.engine.begin() as connection, pytest.raises(StoreFailedError):
        store.send_within(connection, A, [b"1"])


def test_settle_does_not_wait_for_a_transaction_that_is_open(shared: Shared, store: Store) -> None:
    """One thread has committed one transaction and has begun the next, which on SQLite keeps the store from writing."""
    with shared.engine.begin() as connection:
        store.send_within(connection, A, [b"1"])
    with shared.engine.begin() as connection:
        store.send_within(connection, A, [b"2"])
        assert store.depth(A) <= 1
    assert bodies(store) == [b"1", b"2"]


# Deaths and outages


@pytest.mark.parametrize(
    "point",
    [
        pytest.param(point, marks=[pytest.mark.campaign] if point in ("committing", "drained") else [])
        for point in caller.POINTS
    ],
)
def test_a_caller_is_killed(url: str, tmp_path: Path, point: str) -> None:
    """What is sold is sent and acked, and nothing else."""
    process, tells = caller.begun(tmp_path / "data", url, point)
    with tells:
        told = [tells.readline() for _ in range(20)] if point == "at work" else []
        process.kill()
        process.join()
        told += tells.readlines()
    engine = caller.connected(url)
    with anabranch.open(caller.config(tmp_path / "data", url)) as router:
        orders, done = router.queue("orders"), router.queue("done")
        total = 2000 if point == "at work" else 1
        with engine.begin() as connection:  # on PostgreSQL its session may be at the COMMIT still; here it is over
            connection.exec_driver_sql("DELETE FROM sales WHERE name = 'nobody'")
            if connection.dialect.name == "postgresql":
                connection.exec_driver_sql("LOCK TABLE sales IN ACCESS EXCLUSIVE MODE")
            sold = sorted(connection.exec_driver_sql("SELECT name FROM sales").scalars())
        eventually(lambda: done.depth() == len(sold), lambda: f"{done.depth()} of {len(sold)}")
        assert sorted(message.body.decode() for message in done.browse()) == sold
        assert orders.depth() == total - len(sold)
        assert {line.strip() for line in told if line.strip() and not line.startswith("at ")} <= set(sold)
        if point in ("committed", "drained"):
            assert sold == ["hat"]
        if point == "written":
            assert sold == []
    engine.dispose()


@pytest.mark.parametrize("url", ["postgresql"], indirect=True)
def test_an_outage_between_commit_and_drain(
    shared: Shared, store: Store, postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.send(A, b"1")
    message = take(store)
    drained = core_outbox.Outbox._drain_written
    monkeypatch.setattr(core_outbox.Outbox, "_drain_written", lambda *_: set())
    with shared.engine.begin() as connection:
        store.ack_within(connection, [message])
        store.send_within(connection, B, [b"2"])
    postgres.stop("immediate")
    monkeypatch.setattr(core_outbox.Outbox, "_drain_written", drained)
    with pytest.raises(StoreFailedError):
        store.send(A, b"3")
    postgres.start()
    assert take(store, B, PATIENCE).body == b"2"
    assert bodies(store) == []
    assert_whole(store)


@pytest.mark.parametrize("url", ["postgresql"], indirect=True)
def test_an_outage_before_the_commit(shared: Shared, store: Store, postgres: PostgresServer) -> None:
    store.send(A, b"1")
    message = take(store)
    with shared.engine.connect() as connection:
        store.ack_within(connection, [message])
        postgres.kill()
        with pytest.raises(sa.exc.OperationalError):
            connection.commit()
        postgres.start()
    assert take(store, timeout=PATIENCE).body == b"1"


@pytest.mark.parametrize("url", ["postgresql"], indirect=True)
def test_another_node_takes_over(url: str, tmp_path: Path) -> None:
    """What the first owner's callers commit afterwards is the second one's to do."""
    lease = {"lease_expiration": 30.0, "lease_wait": 0.0}
    first = Shared(tmp_path / "first", url, **lease)
    options = SqlOptions(**{**first.options, **lease})
    SqlStore.create("s", tmp_path / "second", options)
    second = SqlStore("s", tmp_path / "second", options)
    try:
        first.store.send(A, b"1")
        message = take(first.store)
        with first.engine.begin() as connection:
            first.store.ack_within(connection, [message])
            first.store.send_within(connection, B, [b"2"])
            first.store.close()
            second.open()
            assert (bodies(second), bodies(second, B)) == ([b"1"], [])
        assert take(second, B, PATIENCE).body == b"2"
        assert second.receive(A) is None
        assert_whole(second)
    finally:
        second.close()
        first.close()


def test_a_body_that_is_a_file_is_refused(shared: Shared, store: Store) -> None:
    with shared.engine.begin() as connection, pytest.raises(TypeError, match="is bytes, not BytesIO"):
        store.send_within(connection, A, [Outgoing(io.BytesIO(b"1"))])
    assert bodies(store) == []


def test_a_message_that_waits_for_its_time(shared: Shared, store: Store) -> None:
    later = (1 << 42) + 5  # in the year 2109
    with shared.engine.begin() as connection:
        store.send_within(connection, A, [Outgoing(b"later", deliver_at_ms=later), b"now"])
    assert take(store, timeout=PATIENCE).body == b"now"
    assert store.depth(A) == 2 and store.receive(A) is None
    store.close()
    again = shared.open()
    assert take(again).body == b"now" and again.receive(A) is None
    assert_whole(again)


def test_a_large_body_is_acked(shared: Shared, store: Store) -> None:
    store.send_many(A, [Outgoing(store.keep(io.BytesIO(bytes(3_000_000)), True))])
    message = take(store)
    with shared.engine.begin() as connection:
        store.ack_within(connection, [message])
    assert store.depth(A) == 0
    assert_whole(store)
