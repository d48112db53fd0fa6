"""Connections are kept, closed when nobody needs them, waited for, asked whether they live; and secrets stay secret."""

from __future__ import annotations

import gc
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import event, text
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import DBAPIError, TimeoutError

from anabranch.adapters.sql.database import pool as pool_module
from anabranch.adapters.sql.database.connections import (
    database_url,
    on_connection,
    on_driver,
    open_engine,
    scrubbed,
    shown_url,
)
from anabranch.adapters.sql.database.pool import KeptPool
from anabranch.policies.config.options import SqlOptions
from anabranch.policies.errors import ConfigError, MissingExtraError

from ..contract.children import reaped
from ..contract.disk import PATIENCE, Parallel, eventually
from .server import PostgresServer

Open = Callable[..., Engine]


@pytest.fixture
def opened(postgres_url: str, tmp_path: Path) -> Iterator[Open]:
    """Opens engines over the test's own schema, and closes them."""
    engines: list[Engine] = []

    def open_it(**options: Any) -> Engine:
        engines.append(open_engine(SqlOptions(**{"url": postgres_url, **options}), tmp_path))
        return engines[-1]

    yield open_it
    for engine in engines:
        engine.dispose()


def given(**options: Any) -> SqlOptions:
    """As a file gives them."""
    return SqlOptions(**options)


def pool(engine: Engine) -> KeptPool:
    assert isinstance(engine.pool, KeptPool)
    return engine.pool


def one(connection: Connection) -> Any:
    return connection.execute(text("SELECT 1")).scalar()


def answered(engine: Engine) -> Connection:
    """A connection over which the server has just answered in time. One that is merely busy may need several tries."""
    deadline = time.monotonic() + PATIENCE
    while True:
        connection = engine.connect()
        try:
            one(connection)
            return connection
        except DBAPIError:
            connection.close()
            if time.monotonic() > deadline:
                raise


def pids(engine: Engine, count: int) -> set[int]:
    """The server's processes of so many connections at one time."""
    connections = [engine.connect() for _ in range(count)]
    found = {connection.execute(text("SELECT pg_backend_pid()")).scalar_one() for connection in connections}
    for connection in connections:
        connection.close()
    return found


def test_the_minimum_is_opened_and_kept(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0

    def is_due(self: KeptPool, real: Callable[[KeptPool], bool] = KeptPool._is_due) -> bool:
        nonlocal looks
        looks += 1
        return real(self)

    monkeypatch.setattr(KeptPool, "_is_due", is_due)
    engine = opened(pool_min=3, pool_idle_timeout=0.05)
    assert pool(engine).counts() == (0, 0), "it connects to nothing before it is asked"
    with engine.connect() as connection:
        one(connection)
    eventually(lambda: pool(engine).counts() == (3, 3))
    kept, looks = pids(engine, 3), 0
    eventually(lambda: looks > 16)  # one that is too many would be closed at the fifth
    assert pids(engine, 3) == kept


def test_more_are_opened_without_limit_and_closed_when_they_idle(opened: Open) -> None:
    engine = opened(pool_min=2, pool_idle_timeout=0.3)
    assert len(pids(engine, 12)) == 12
    eventually(lambda: pool(engine).counts() == (2, 2))


def test_one_that_is_used_is_not_closed(opened: Open) -> None:
    """The one that was used last is used next, so that the others get to idle."""
    engine = opened(pool_min=1, pool_idle_timeout=0.2)
    pids(engine, 5)
    last = pids(engine, 1)

    def alone() -> bool:
        assert pids(engine, 1) == last
        return pool(engine).counts() == (1, 1)

    eventually(alone)


def test_who_needs_one_more_than_the_maximum_waits(opened: Open) -> None:
    engine = opened(pool_min=0, pool_max=2)
    first, second = engine.connect(), engine.connect()
    with Parallel(engine.connect) as third, Parallel(engine.connect) as fourth:
        assert third.outlives(0.05) and fourth.outlives(0.05)
        first.close()
        second.close()
        assert one(third.result()) == one(fourth.result()) == 1
        assert pool(engine).counts() == (2, 0)
        third.result().close()
        fourth.result().close()


def test_who_waits_too_long_is_told_of_the_limit(opened: Open) -> None:
    engine = opened(pool_min=0, pool_max=2, pool_timeout=0.1)
    told = pytest.raises(TimeoutError, match=r"all 2 connections were in use for 0\.1 seconds; .*pool_max")
    with engine.connect(), engine.connect(), told:
        engine.connect()
    with engine.connect() as connection:
        assert one(connection) == 1


def test_many_threads_share_few_connections(opened: Open) -> None:
    engine = opened(pool_min=1, pool_max=3)
    most = 0
    done = []

    def work() -> None:
        nonlocal most
        for _ in range(50):
            with engine.connect() as connection:
                done.append(one(connection))
                most = max(most, pool(engine).counts()[0])

    threads = [threading.Thread(target=work) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(done) == 600 and most <= 3


def test_a_lost_connection_frees_its_place(opened: Open) -> None:
    """One whose user was interrupted and never gave it back."""
    engine = opened(pool_min=0, pool_max=2)
    kept = [engine.connect(), engine.connect()]
    del kept[0]
    with engine.connect() as connection:
        assert one(connection) == 1
    kept[0].close()


def test_the_keepalive_statement_is_run_on_each_idle_connection(opened: Open) -> None:
    engine = opened(pool_min=3, keepalive_interval=0.1, keepalive_statement="SELECT 'are you there'")
    pids(engine, 3)
    with engine.connect() as watcher:
        asked = text(
            "SELECT count(*) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND datname = current_database()"
            " AND application_name = 'anabranch' AND query IN ('SELECT ''are you there''', 'ROLLBACK')"
            " AND query_start > :since"
        )
        since = watcher.execute(text("SELECT clock_timestamp()")).scalar_one()
        watcher.rollback()

        def two_asked() -> bool:
            watcher.rollback()
            return bool(watcher.execute(asked, {"since": since}).scalar_one() >= 2)

        eventually(two_asked)


def test_a_keepalive_statement_that_becomes_wrong_is_told_once_and_drops_nothing(
    opened: Open, postgres: PostgresServer, caplog: pytest.LogCaptureFixture
) -> None:
    engine = opened(pool_min=2, keepalive_interval=0.05, keepalive_statement="SELECT 1 FROM ${schema-prefix}nowhere")
    asked = "SELECT count(*) FROM pg_stat_activity WHERE pid = ANY(%s) AND query_start > %s"
    with caplog.at_level(logging.INFO), postgres.connect() as admin:
        before = list(pids(engine, 2))
        for _ in range(3):
            since = admin.execute("SELECT clock_timestamp()").fetchone()[0]
            eventually(lambda since=since: admin.execute(asked, [before, since]).fetchone() == (2,))  # type: ignore[misc]
    (told,) = [record for record in caplog.records if "keepalive" in record.getMessage()]
    assert told.levelno == logging.ERROR
    assert "'SELECT 1 FROM nowhere' is wrong" in told.getMessage() and "does not exist" in told.getMessage()
    assert "does not answer" not in caplog.text


def test_idle_ones_that_died_are_dropped_and_made_up_for(opened: Open, postgres: PostgresServer) -> None:
    engine = opened(pool_min=3, keepalive_interval=0.1)
    before = pids(engine, 3)
    with postgres.connect() as admin:
        for pid in before:
            admin.execute("SELECT pg_terminate_backend(%s)", [pid])
        others = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'anabranch' AND pid <> ALL(%s)"
        eventually(lambda: admin.execute(others, [list(before)]).fetchone() == (3,))
    eventually(lambda: pool(engine).counts() == (3, 3))
    assert not pids(engine, 3) & before


def test_after_a_restart_of_the_server_the_next_use_succeeds(opened: Open, postgres: PostgresServer) -> None:
    """Whoever comes does not meet yesterday's connections."""
    engine = opened(pool_min=2)
    pids(engine, 1)
    eventually(lambda: pool(engine).counts() == (2, 2))  # or else it opens a fifth beside the next four
    pids(engine, 4)
    postgres.kill()
    with pytest.raises(DBAPIError), engine.connect() as connection:
        one(connection)
    with pytest.raises(DBAPIError), engine.connect() as connection:
        one(connection)
    postgres.start()
    for _ in range(4):
        with engine.connect() as connection:
            assert one(connection) == 1
    eventually(lambda: pool(engine).counts() == (2, 2))


def test_one_that_has_idled_is_asked_before_it_is_given_out(opened: Open, postgres: PostgresServer) -> None:
    engine = opened(pool_min=0)
    pids(engine, 3)
    postgres.stop("fast")
    postgres.start()
    for record in pool(engine)._idle:
        assert record.record_info is not None
        record.record_info["slot"].used -= 10
    assert len(pids(engine, 3)) == 3


def test_a_server_that_has_gone_dumb_hangs_nobody(opened: Open, postgres: PostgresServer) -> None:
    """Invariant 7. A connection is cut off when its user has waited for too long."""
    engine = opened(pool_min=1, response_timeout=0.3)
    with answered(engine) as connection:
        postgres.freeze()
        try:
            with Parallel(lambda: one(connection)) as waiting, pytest.raises(DBAPIError):
                waiting.result()
        finally:
            postgres.thaw()
    answered(engine).close()


def test_all_can_be_cut_off_at_once(opened: Open) -> None:
    engine = opened(pool_min=0)
    connections = [engine.connect() for _ in range(3)]
    sleeps = [Parallel(lambda c=c: c.execute(text("SELECT pg_sleep(60)"))) for c in connections]  # type: ignore[misc]
    for sleep in sleeps:
        sleep.__enter__()
    assert all(sleep.outlives(0.02) for sleep in sleeps)
    pool(engine).cut_off_all()
    for sleep in sleeps:
        with pytest.raises(DBAPIError):
            sleep.result()
    for connection in connections:
        connection.close()


def test_disposing_closes_all_also_those_in_use_when_they_come_back(opened: Open, postgres: PostgresServer) -> None:
    engine = opened(pool_min=0)
    event.listen(engine, "connect", lambda connection, _: connection.execute("SET application_name = 'disposed'"))
    count = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'disposed'"
    held = engine.connect()
    pids(engine, 2)
    with postgres.connect() as admin:
        engine.dispose()
        eventually(lambda: admin.execute(count).fetchone() == (1,))
        held.close()
        eventually(lambda: admin.execute(count).fetchone() == (0,))


def test_a_forked_child_leaves_its_parents_connections_alone(opened: Open) -> None:
    """Rule D4."""
    engine = opened(pool_min=1)
    before = pids(engine, 2)
    child = os.fork()
    if child == 0:  # pragma: no cover
        status = 1
        try:
            engine.dispose()
            status = 0 if pool(engine).counts() == (0, 0) else 2
        finally:
            os._exit(status)
    assert reaped(child) == 0
    assert pids(engine, 2) == before


def test_sqlite_needs_no_options(tmp_path: Path) -> None:
    engine = open_engine(SqlOptions(), tmp_path)
    with engine.connect() as first, engine.connect() as second:
        assert one(first) == one(second) == 1
        assert first.execute(text("PRAGMA journal_mode")).scalar() == "wal"
        assert first.execute(text("PRAGMA synchronous")).scalar() == 2, "FULL"
    engine.dispose()
    assert (tmp_path / "store.db").exists()


# What is wrong with options -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"pool_max": 1, "pool_min": 0}, "pool_max 1 is too few"),
        ({"pool_max": 4}, "not less than pool_min, which is 5"),
        ({"pool_max": -2}, "pool_max"),
        ({"keepalive_interval": 0}, "at least 10ms"),
        ({"lease_renewal": 1.0}, "lease_renewal means nothing without lease_expiration"),
        ({"lease_renewal": 6.0, "lease_expiration": 10.0}, "lease_renewal is more than half of lease_expiration"),
    ],
)
def test_limits_that_do_not_fit(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        SqlOptions(**options)


SECRET = "s3cret/@:word"
ESCAPED = "s3cret%2F%40%3Aword"


@pytest.mark.parametrize(
    ("url", "error", "says"),
    [
        (f"this is no url {SECRET}", ConfigError, "is not one"),
        (f"oracle+nonsense://me:{ESCAPED}@host/db", ConfigError, "knows no databases of the kind 'oracle.nonsense'"),
        (f"mysql+pymysql://me:{ESCAPED}@host/db", MissingExtraError, "pymysql"),
        (f"postgres://me:{ESCAPED}@host/db", ConfigError, r"write postgresql\+psycopg://"),
        (f"postgresql+psycopg://me:{ESCAPED}@host:port/db", ConfigError, "is not one"),
        ("sqlite://", ConfigError, "in memory loses everything"),
        ("sqlite:///:memory:", ConfigError, "in memory loses everything"),
    ],
)
def test_urls_that_are_none(url: str, error: type[Exception], says: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=says) as raised:
        open_engine(given(url=url, untested_database=True), tmp_path)
    assert not leaks(raised.value)


def test_sqlite_needs_no_driver_of_postgresql(tmp_path: Path) -> None:
    """And a shared store names the extra that it needs."""
    program = """
import sys
sys.modules["psycopg"] = None
import anabranch

def send(name, **options):
    config = anabranch.Config(f"{sys.argv[1]}/{name}", [anabranch.StoreConfig("all", ["queue://>"], sql=options)])
    with anabranch.open(config) as router:
        router.queue("q").send(b"x")

send("own")
try:
    send("shared", url="postgresql+psycopg://me@host/db", shared=True)
except anabranch.MissingExtraError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program, tmp_path], capture_output=True, text=True, check=False)
    assert "psycopg" in done.stdout and "anabranch[postgres]" in done.stdout, done


@pytest.mark.parametrize(
    ("scheme", "says"),
    [
        ("mysql", "nobody has tested mysql://; .*`untested_database: true`"),
        ("mariadb+pymysql", "nobody has tested mariadb.pymysql://"),
        ("oracle+oracledb", "nobody has tested oracle.oracledb://"),
        ("mssql+pyodbc", "nobody has tested mssql.pyodbc://"),
        ("sqlite+aiosqlite", "nobody has tested sqlite.aiosqlite://"),
        ("postgres", "write postgresql.psycopg:// in place of postgres://, and the rest of the url as it is"),
        ("postgresql", "write postgresql.psycopg:// in place of postgresql://.*`untested_database: true`"),
        ("postgresql+psycopg2", "write postgresql.psycopg:// in place of postgresql.psycopg2://"),
        ("PostgreSQL+psycopg", "write postgresql.psycopg:// in place of PostgreSQL.psycopg://"),
    ],
)
def test_databases_that_nobody_has_tested_are_refused(scheme: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as raised:
        given(url=f"{scheme}://me:{ESCAPED}@host/db")
    assert not leaks(raised.value)
    if scheme != "postgres":
        assert given(url=f"{scheme}://me:{ESCAPED}@host/db", untested_database=True).url is not None


@pytest.mark.parametrize("scheme", ["postgresql+psycopg", "sqlite", "sqlite+pysqlite"])
def test_databases_that_are_tested(scheme: str) -> None:
    assert given(url=f"{scheme}:///db").url is not None


def leaks(error: BaseException | None) -> bool:
    """Whether the error, or one that it came from, shows the password."""
    while error is not None:
        if any(secret in shown for secret in (SECRET, ESCAPED) for shown in (str(error), repr(error))):
            return True
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False


def test_a_wrong_password_is_never_shown(
    postgres: PostgresServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    for options in (
        given(url=postgres.url().replace(postgres.password, ESCAPED)),
        given(url=postgres.url(password=False), password=SECRET),
        given(url=f"{postgres.url(password=False)}?sslpassword={ESCAPED}", password=SECRET),
    ):
        engine = open_engine(options, tmp_path)
        with pytest.raises(DBAPIError, match="password authentication failed") as raised, engine.connect():
            pass
        assert not leaks(raised.value)
        shown = f"{options!r} {engine!r} {engine.url} {engine.pool.status()} {shown_url(engine.url)}"
        assert SECRET not in shown and ESCAPED not in shown
        engine.dispose()
    assert SECRET not in caplog.text and ESCAPED not in caplog.text


def test_what_a_driver_echoes_is_scrubbed(tmp_path: Path) -> None:
    options = given(url=f"postgresql+psycopg://me:{ESCAPED}@host/db?sslpassword=other&application_name=me")
    url = database_url(options, tmp_path)
    assert scrubbed(f'missing "=" after "{SECRET}" or other in me', url) == 'missing "=" after "***" or *** in me'
    assert shown_url(url) == "postgresql+psycopg://me:***@host/db"


def test_a_connection_that_is_collected_while_the_pool_is_busy_comes_back(tmp_path: Path) -> None:
    """The collector runs anywhere, also in a thread that is in the pool: it must not wait there for itself."""
    engine = open_engine(given(), tmp_path)
    forgotten = [engine.connect()]

    def collect() -> None:
        with pool(engine)._lock:
            forgotten.clear()
            gc.collect()

    with Parallel(collect) as parallel:
        parallel.result()
    assert pool(engine).counts() == (1, 1)
    engine.dispose()


def test_one_that_comes_back_as_another_is_taken_is_not_taken_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is in one user's hands, wherever the collector or a signal handler gives one back."""
    engine = open_engine(given(), tmp_path)
    forgotten, idle = engine.connect(), engine.connect()
    idle.close()

    def collecting(record: Any, real: Callable[[Any], Any] = pool_module._slot_of) -> Any:
        monkeypatch.undo()
        forgotten.close()
        return real(record)

    monkeypatch.setattr(pool_module, "_slot_of", collecting)
    first, second = engine.raw_connection(), engine.raw_connection()
    assert first.driver_connection is not second.driver_connection
    for connection in (first, second):
        connection.close()
    assert pool(engine).counts() == (2, 2)
    engine.dispose()


def test_one_that_was_not_made_to_the_end_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who takes it next would find it without what is done with each."""
    engine = open_engine(given(), tmp_path)

    @event.listens_for(engine, "connect")
    def connected(_connection: Any, entry: Any) -> None:
        entry.info["whole"] = True

    def struck(text: str, *_: Any) -> None:
        if text.startswith("Created"):
            raise KeyboardInterrupt

    on_driver(engine, lambda _: None)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(pool_module, "TRUST", 0.0)
        patch.setattr(KeptPool, "_answers", lambda *_: False)
        patch.setattr(pool(engine), "logger", SimpleNamespace(debug=struck, info=struck))
        on_driver(engine, lambda _: None)
    assert on_driver(engine, lambda entry: entry.info["whole"])
    assert pool(engine).counts() == (1, 1)
    engine.dispose()


def test_many_threads_whose_connections_cannot_be_made_hear_of_that_alone(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Each looks through what all have begun to make, while others give up theirs."""
    request.addfinalizer(partial(sys.setswitchinterval, sys.getswitchinterval()))
    sys.setswitchinterval(1e-6)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # nobody listens
        engine = open_engine(given(url=f"postgresql+psycopg://me@127.0.0.1:{unused.getsockname()[1]}/x"), tmp_path)

        def ask() -> None:
            for _ in range(40):
                with pytest.raises(DBAPIError):
                    on_connection(engine, one)

        with ThreadPoolExecutor(16) as threads:
            for asking in [threads.submit(ask) for _ in range(16)]:
                asking.result(PATIENCE)
        engine.dispose()
