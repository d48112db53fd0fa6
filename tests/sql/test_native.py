"""`native_two_phase`: branches that PostgreSQL itself has prepared. They keep what branches keep (tests/contract),
whatever is cut off or killed between the steps, and nothing of theirs is left at the server (invariants 3, 4; rules T2,
T6)."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from pydantic import SecretStr
from sqlalchemy.engine.default import DefaultDialect

from anabranch.adapters.core.messages import Outgoing
from anabranch.adapters.sql import SqlStore, create_tables, native_two_phase
from anabranch.policies.config.options import SqlOptions
from anabranch.policies.errors import ConfigError, StoreFailedError

from ..contract.children import forked, reaped
from ..contract.disk import PATIENCE, A, B, assert_whole, bodies, eventually, take
from ..crash.steps import Steps
from ..shares import Share
from . import outages
from .disk import NativeDisk, PostgresDisk, TableSets
from .server import PostgresServer, running
from .wire import Wire

TRANSACTION: Final = bytes(32)
OTHER: Final = b"\1" * 32
BIG: Final = random.Random(1).randbytes(100_000)
"""More than a chunk of 64 KiB."""


class Place:
    """The one store of a test, reached by a wire, and the server as its administrator sees it."""

    def __init__(self, server: PostgresServer, url: str, directory: Path) -> None:
        self.server, self.wire = server, Wire(server.port)
        self._url, self._directory = url, directory / "s"
        self._stores: list[SqlStore] = []

    def options(self, **options: Any) -> SqlOptions:
        given: dict[str, Any] = {"url": self.wire.url(self._url), "pool_min": 0, "chunk_size": 65536}
        return SqlOptions(**{**given, "native_two_phase": True, **options})

    def open(self, **options: Any) -> SqlStore:
        """Open it, again if it was open."""
        made = self.options(**options)
        if self._stores:
            self._stores[-1].close()
        else:
            SqlStore.create("s", self._directory, made)
        self._stores.append(SqlStore("s", self._directory, made))
        self._stores[-1].open()
        return self._stores[-1]

    def ask(self, query: str) -> list[Any]:
        with self.server.connect(self._url.rsplit("/", 1)[1].split("?")[0]) as connection:
            return [row[0] for row in connection.execute(query).fetchall()]

    def prepared(self) -> list[str]:
        """What is prepared at the server, of this store: the names of the transactions."""
        mine = f"anabranch:{self._stores[-1].store_id.hex()}:"
        found = self.ask("SELECT gid FROM pg_prepared_xacts")
        return [name.rsplit(":", 1)[1] for name in found if name.startswith(mine)]

    def end(self, how: str, transaction: bytes) -> None:
        """By hand."""
        (name,) = [name for name in self.ask("SELECT gid FROM pg_prepared_xacts") if name.endswith(transaction.hex())]
        with self.server.connect(self._url.rsplit("/", 1)[1].split("?")[0]) as connection:
            connection.execute(f"{how} PREPARED '{name}'")

    def close(self) -> None:
        self.wire.close()
        for store in self._stores:
            store.close()
        if self.server.pid is None:
            self.server.start()
        for name in self.prepared() if self._stores else ():
            self.end("ROLLBACK", bytes.fromhex(name))  # or the test's schema could not be dropped


@pytest.fixture
def place(postgres: PostgresServer, postgres_url: str, tmp_path: Path) -> Iterator[Place]:
    place = Place(postgres, postgres_url, tmp_path)
    yield place
    place.close()


@pytest.fixture(scope="module")
def small(postgres: PostgresServer) -> Iterator[PostgresServer]:
    """Another server, that prepares one transaction at a time."""
    yield from running(max_prepared_transactions="1")


def prepare(store: SqlStore, transaction: bytes = TRANSACTION, *more: bytes, ack: bool = True) -> None:
    """A branch with messages for A and B, a big one, and one ack of A."""
    sends = [(B, Outgoing(b"sent", {"k": 1}, None, 7)), (A, Outgoing(BIG)), *((A, Outgoing(body)) for body in more)]
    acks = []
    if ack:
        acks.append(take(store))
        store.claim(acks[0])
    store.prepare(transaction, [store.store_id], sends, acks, True).wait()


# The option ----------------------------------------------------------------------------------------------------------


def test_it_is_refused_where_there_is_no_such_thing(tmp_path: Path, small: PostgresServer) -> None:
    """By an error that says which option, what the server is set to, and what to do; before anything is made."""
    for url in (None, SecretStr("sqlite:////x/db")):
        with pytest.raises(ConfigError, match=r"native_two_phase: SQLite is not PostgreSQL.*leave the option out"):
            SqlOptions(url=url, native_two_phase=True)
    with pytest.raises(ConfigError, match=r"native_two_phase.*lease_expiration"):
        SqlOptions(url=SecretStr("postgresql+psycopg://h/d"), native_two_phase=True, lease_expiration=2)

    given: dict[str, Any] = {"url": small.new_schema(), "pool_min": 0}
    plain, asked = SqlOptions(**given), SqlOptions(**given, native_two_phase=True)
    SqlStore.create("s", tmp_path / "s", plain)
    small.stop()
    settings = small._settings
    settings["max_prepared_transactions"] = "0"
    small.start()
    try:
        for refused in (
            lambda: SqlStore.create("t", tmp_path / "t", asked),
            lambda: SqlStore("s", tmp_path / "s", asked).open(),
        ):
            with pytest.raises(ConfigError, match=r"native_two_phase: .*max_prepared_transactions = 0.*restart it, or"):
                refused()
        assert not (tmp_path / "t").exists()
        store = SqlStore("s", tmp_path / "s", plain)
        store.open()
        store.close()
    finally:
        small.stop()
        settings["max_prepared_transactions"] = "1"
        small.start()


def test_beyond_what_the_server_allows_xalog_serves(
    small: PostgresServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No transaction is refused for it."""
    place = Place(small, small.new_schema(), tmp_path)
    store = place.open()
    prepare(store, ack=False)
    prepare(store, OTHER, b"other", ack=False)
    assert place.prepared() == [TRANSACTION.hex()]
    assert "max_prepared_transactions" in caplog.text
    store = place.open()
    assert [len(store.commit_prepared(name).wait()) for name in (OTHER, TRANSACTION)] == [3, 2]
    assert bodies(store) == [BIG, b"other", BIG]
    assert_whole(store)
    place.close()


def test_without_the_option_what_it_has_prepared_is_settled(place: Place) -> None:
    store = place.open()
    store.send_many(A, [b"1", b"2"])
    prepare(store)
    prepare(store, OTHER)
    assert sorted(place.prepared()) == [TRANSACTION.hex(), OTHER.hex()]
    store = place.open(native_two_phase=False)
    assert [branch.transaction for branch in store.recover_prepared()] == [TRANSACTION, OTHER]
    store.commit_prepared(TRANSACTION).wait()
    store.rollback_prepared(OTHER).wait()
    assert (bodies(store), bodies(store, B), place.prepared()) == ([b"2", BIG], [b"sent"], [])
    assert_whole(store)


# What it is for ------------------------------------------------------------------------------------------------------


def test_bodies_are_written_once(place: Place) -> None:
    """At prepare; the commit is small however large they are."""
    store = place.open(chunk_size="1MiB")
    store.send(A, b"x")

    def written() -> int:
        return int(place.ask("SELECT pg_current_wal_lsn() - '0/0'")[0])

    body = random.Random(2).randbytes(4 << 20)
    before = written()
    store.prepare(TRANSACTION, [store.store_id], [(A, Outgoing(body)), (A, Outgoing(body[:900_000]))], [], True).wait()
    prepared = written()
    store.commit_prepared(TRANSACTION).wait()
    committed = written()
    assert prepared - before > 4 << 20
    assert committed - prepared < 1 << 20
    assert bodies(store) == [b"x", body, body[:900_000]]


def test_nobody_waits_for_what_is_prepared(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is done with the same queues meanwhile, also by the next process, which asks for another order."""
    monkeypatch.setattr(create_tables, "LOCKED_SECONDS", 0.1)
    store = place.open(response_timeout=PATIENCE)
    store.send_many(A, [b"1", b"2", b"3"])
    prepare(store)
    store.send(B, b"b")
    take(store).ack()
    take(store, B).ack()
    assert (store.purge(A), store.delete(B), store.depth(A)) == (1, 0, 1)
    store = place.open(priorities=True, response_timeout=PATIENCE)  # for the index that is to be made, it does wait
    store.send(B, b"b")
    store.commit_prepared(TRANSACTION).wait()
    assert (bodies(store), bodies(store, B)) == ([BIG], [b"sent", b"b"])
    assert [message.headers for message in store.browse(B)] == [{"k": 1}, {}]
    assert_whole(place.open(priorities=True))


# Cut off -------------------------------------------------------------------------------------------------------------

WORDS: Final = (
    b"INSERT INTO messages", b"PREPARE TRANSACTION", b"INSERT INTO xalog", b"COMMIT PREPARED", b"UPDATE messages",
    b"DELETE FROM xalog", b"ROLLBACK PREPARED",
)  # fmt: skip


def settle(store: SqlStore) -> None:
    """One branch to its commit and one to its rollback."""
    prepare(store)
    assert len(store.commit_prepared(TRANSACTION).wait()) == 2
    prepare(store, OTHER)
    assert store.rollback_prepared(OTHER).wait() is True


@pytest.mark.parametrize("acted_on", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("word", WORDS, ids=bytes.decode)
def test_nobody_notices_that_a_step_is_cut_off(place: Place, word: bytes, acted_on: bool) -> None:
    store = place.open()
    store.send_many(A, [b"1", b"2"])
    place.wire.cut_at(word, acted_on=acted_on)
    settle(store)
    assert place.wire.cut.is_set()
    for again in (False, True):
        view = place.open() if again else store
        assert (bodies(view), bodies(view, B), place.prepared()) == ([b"2", BIG], [b"sent"], [])
        assert list(view.recover_prepared()) == []
        assert_whole(view)


@pytest.mark.parametrize(
    ("word", "acted_on"),
    [(b"PREPARE TRANSACTION", True), (b"COMMIT PREPARED", False), (b"COMMIT PREPARED", True), (b"ROLLBACK PRE", True)],
)
def test_the_server_is_killed_in_the_middle_of_a_step(place: Place, word: bytes, acted_on: bool) -> None:
    """All of its processes, with SIGKILL, and started again; what a step was told did not happen is done again."""
    store = place.open(outcome_timeout=PATIENCE)
    store.send(A, b"0")
    acked = take(store)
    store.claim(acked)
    sends = [(A, Outgoing(BIG)), (A, Outgoing(b"1"))]
    back = threading.Event()

    def kill() -> None:
        place.server.kill()
        place.server.start()
        back.set()

    place.wire.cut_at(word, acted_on=acted_on, then=kill)
    steps: list[Callable[[], object]] = [
        lambda: store.prepare(OTHER, [store.store_id], sends, [], True).wait(),
        lambda: store.rollback_prepared(OTHER).wait(),
        lambda: store.prepare(TRANSACTION, [store.store_id], sends, [acked], True).wait(),
        lambda: store.commit_prepared(TRANSACTION).wait(),
    ]
    for step in steps:
        try:
            step()
        except StoreFailedError as error:
            assert place.wire.cut.is_set(), error
            assert back.wait(PATIENCE)
            step()
    assert back.wait(PATIENCE)
    for again in (False, True):
        view = place.open() if again else store
        assert (bodies(view), list(view.committed()), place.prepared()) == ([BIG, b"1"], [TRANSACTION], [])
        assert_whole(view)


@pytest.mark.parametrize("acted_on", [False, True], ids=["before", "after"])
def test_what_a_failed_prepare_has_left_is_removed_when_the_server_is_back(
    place: Place, acted_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By itself: nobody has to ask."""
    monkeypatch.setattr(native_two_phase, "RETRY", 0.05)
    store = place.open()
    store.send(A, b"1")
    place.wire.cut_at(b"PREPARE TRANSACTION", acted_on=acted_on, stay=True)
    with pytest.raises(StoreFailedError):
        prepare(store)
    assert place.wire.cut.is_set()
    assert len(place.prepared()) == acted_on
    place.wire.join()
    eventually(lambda: not place.prepared())
    assert list(store.recover_prepared()) == []
    prepare(store, OTHER, ack=False)
    assert len(store.commit_prepared(OTHER).wait()) == 2
    assert bodies(store) == [b"1", BIG]
    assert_whole(store)


def test_a_commit_that_is_cut_off_for_good_is_prepared_still(place: Place) -> None:
    store = place.open()
    store.send(A, b"1")
    prepare(store)
    place.wire.cut_at(b"COMMIT PREPARED", acted_on=True, stay=True)
    with pytest.raises(StoreFailedError, match="cannot be used now"):
        store.commit_prepared(TRANSACTION).wait()
    assert place.prepared() == []
    assert store.stats().messages == 1  # the database has committed it, the store has not: nothing is seen yet
    place.wire.join()
    store = place.open()
    assert (bodies(store), bodies(store, B), store.receive(A), store.depth(B)) == ([b"1"], [], None, 0)
    assert [branch.transaction for branch in store.recover_prepared()] == [TRANSACTION]
    assert_whole(store)
    assert len(store.commit_prepared(TRANSACTION).wait()) == 2
    assert (bodies(store), bodies(store, B)) == ([BIG], [b"sent"])


# By hand -------------------------------------------------------------------------------------------------------------


def test_one_that_was_rolled_back_by_hand_is_never_lost_silently(place: Place) -> None:
    """Its commit fails, naming it, as often as it is asked for; the rest of the store is well; a rollback succeeds."""
    store = place.open()
    store.send_many(A, [b"1", b"2"])
    prepare(store)
    place.end("ROLLBACK", TRANSACTION)
    for again in (False, True):
        view = place.open() if again else store
        with pytest.raises(StoreFailedError, match=f"{TRANSACTION.hex()} sends 2 messages, of which 0 are in MESSAGES"):
            view.commit_prepared(TRANSACTION).wait()
        assert (bodies(view), len(view.recover_prepared()), view.stats().failed) == ([b"1", b"2"], 1, None)
    assert view.rollback_prepared(TRANSACTION).wait()
    assert [take(view).body, take(view).body] == [b"1", b"2"]
    assert_whole(view)


def test_a_copy_of_the_tables_leaves_the_originals_alone(postgres: PostgresServer, tmp_path: Path) -> None:
    """In the same database, under another prefix, with the same store's id."""
    if postgres.pid is None:
        postgres.start()
    sets = TableSets(postgres.new_schema())
    with NativeDisk(tmp_path, sets) as disk:
        store = disk.create()
        store.send(A, b"1")
        prepare(store)
        copy = PostgresDisk.crash(disk, store)
        assert copy.rollback_prepared(TRANSACTION).wait()
        assert (bodies(copy), len(disk.prepared())) == ([b"1"], 1)
        assert len(store.commit_prepared(TRANSACTION).wait()) == 2
        assert bodies(store) == [BIG]
    sets.close()


def test_one_that_was_committed_by_hand_can_still_be_rolled_back(place: Place) -> None:
    store = place.open()
    store.send(A, b"1")
    prepare(store)
    place.end("COMMIT", TRANSACTION)
    store = place.open()
    assert store.rollback_prepared(TRANSACTION).wait()
    assert (bodies(store), bodies(store, B)) == ([b"1"], [])
    assert place.ask("SELECT count(*) FROM pg_prepared_xacts") == [0]
    assert_whole(store)


# A kill of the process -----------------------------------------------------------------------------------------------


def test_the_process_is_killed_before_each_step(postgres: PostgresServer, tmp_path: Path, share: Share) -> None:
    """What was prepared can be committed, what was not is gone, and the server keeps nothing of it."""
    if postgres.pid is None:
        postgres.start()
    sets = TableSets(postgres.new_schema())
    step, ended = 1 - share.every(4), False
    while not ended:
        step += share.every(4)
        with NativeDisk(tmp_path / str(step), sets) as disk:
            store = disk.create()
            store.send_many(A, [b"1", b"2"])
            store.close()
            marks = tmp_path / f"marks-{step}"
            marks.touch()
            code = reaped(forked(lambda step=step, disk=disk, marks=marks: killed_at(step, disk, marks)), PATIENCE)  # type: ignore[misc]
            assert code in (0, -9), f"step {step}: {code}"
            ended = code == 0
            _verify(disk, store, marks.read_text().split(), step)
    assert step > 25
    share.counts.append(f"killed at {step} places at most")
    sets.close()


def killed_at(step: int, disk: NativeDisk, marks: Path) -> None:
    with marks.open("a") as file:
        path = next(iter(disk._given))
        store = disk.open(path)
        steps = Steps("killed", step)
        for method in ("do_execute", "do_execute_no_params", "do_executemany", "do_commit"):
            steps.wrap(DefaultDialect, method)

        def mark(text: str) -> None:
            print(text, file=file, flush=True)

        prepare(store)
        mark("prepared")
        store.commit_prepared(TRANSACTION).wait()
        mark("committed")
        prepare(store, OTHER)
        mark("other")
        store.rollback_prepared(OTHER).wait()
        mark("rolled")
        store.close()
        mark("closed")


def _verify(disk: NativeDisk, store: SqlStore, marks: list[str], step: int) -> None:
    store = disk.reopen(store)
    found = {branch.transaction for branch in store.recover_prepared()}
    where = f"step {step}, {marks}"
    assert {name.rsplit(":")[-1] for name in disk.prepared()} <= {name.hex() for name in found}, where
    committed = TRANSACTION in store.committed()
    assert not (committed and TRANSACTION in found), where
    if "prepared" in marks:
        assert committed or TRANSACTION in found, where
    assert committed or "committed" not in marks, where
    assert OTHER not in found or "rolled" not in marks, where
    assert OTHER in found or "other" not in marks or "rolled" in marks or marks[-1] == "other", where
    if "prepared" in marks and not committed:
        assert len(store.commit_prepared(TRANSACTION).wait()) == 2, where
    for name in found - ({TRANSACTION} if "prepared" in marks else set()):
        assert store.rollback_prepared(name).wait(), where
    done = "prepared" in marks or committed
    assert (bodies(store), bodies(store, B)) == (([b"2", BIG], [b"sent"]) if done else ([b"1", b"2"], [])), where
    assert (disk.prepared(), list(store.recover_prepared())) == ([], []), where
    assert list(store.check()) == [], where


# Under a router ------------------------------------------------------------------------------------------------------


def test_outages_under_a_router(postgres: PostgresServer, tmp_path: Path) -> None:
    """Eight threads over this store and a journal while the server dies: all or nothing, and nothing is left."""
    if postgres.pid is None:
        postgres.start()
    chance = random.Random(os.urandom(8))
    ledger, count, found = outages.a_round(
        postgres, tmp_path / "data", 0.3, chance, [chance.choice(["kill", "immediate"])], native_two_phase=True
    )
    assert not found, found
    assert count == 1 and ledger.committed
    with postgres.connect() as connection:
        assert connection.execute("SELECT gid FROM pg_prepared_xacts").fetchall() == []
