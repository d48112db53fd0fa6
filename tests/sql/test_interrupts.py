"""Ctrl-C at every bytecode of a call: nothing lost, doubled or stuck, and nothing counted wrong (rules G2, G3). What is
written is written by a thread that Ctrl-C does not reach; what is struck is who waits for it, and who reads."""

from __future__ import annotations

import io
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pydantic import SecretStr
from sqlalchemy import NullPool, create_engine, text

import anabranch
from anabranch.adapters.core.features.outbox import OutboxFeature
from anabranch.adapters.core.messages import Message
from anabranch.adapters.core.state.leases import LEASED
from anabranch.adapters.core.store_types import Subscription
from anabranch.adapters.sql import SqlStore
from anabranch.policies.errors import UnknownMessageError

from ..contract.disk import A, B, T, assert_whole, bodies, eventually, take
from ..contract.features import feature_of
from ..contract.preparing import OTHER, to, transaction
from ..crash.interrupts import LIBRARY, OURS, everywhere
from ..shares import Share
from .disk import SqliteDisk, directory_of

FOLDERS = (*OURS, *LIBRARY, "/sqlalchemy/")
DESK, BOOK = Subscription(T, "desk"), Subscription(T, "book")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SqliteDisk]:
    with SqliteDisk(tmp_path) as disk:
        yield disk


@pytest.fixture
def store(disk: SqliteDisk) -> SqlStore:
    return disk.create()


def numbered(at: int) -> bytes:
    return str(at).encode()


def test_a_send_interrupted_anywhere_and_sent_again_is_stored_once(
    disk: SqliteDisk, store: SqlStore, share: Share
) -> None:
    sent: list[bytes] = []

    def prepare(at: int) -> Callable[[], object]:
        return lambda: store.send(A, numbered(at), {"h": at}, f"id {at}", expires_at_ms=1 << 60)

    def check(at: int, where: str) -> None:
        store.send(A, numbered(at), {"h": at}, f"id {at}", expires_at_ms=1 << 60)
        sent.append(numbered(at))
        assert store.depth(A) == len(sent), where

    assert everywhere(prepare, check, 17, share) > 30
    assert bodies(store) == bodies(disk.crash(store)) == sent
    assert_whole(store)


def test_a_receive_interrupted_anywhere(store: SqlStore, share: Share) -> None:
    """With what was read ahead, and with what has to be read: another one gets the message, or nobody but who holds
    it."""
    store.send_many(A, [b"x" * 10_000] * 3)
    got: list[Message] = []

    def prepare(at: int) -> Callable[[], object]:
        got.clear()

        def call() -> None:
            message = store.receive(A)
            assert message is not None
            got.append(message)

        return call

    def check(at: int, where: str) -> None:
        store.release(got, delivered=False)
        if store.stats().leased:  # struck after it was leased, before anybody could know: it is free at reopening
            lost.append(where)
            store.close()
            store.open()
        assert [take(store).seq for _ in range(3)] == seqs, where
        assert store.receive(A) is None
        store.close()
        store.open()

    lost: list[str] = []
    seqs = [message.seq for message in store.browse(A)]
    everywhere(prepare, check, 17, share)
    assert len(lost) <= 12, lost
    assert_whole(store)


@pytest.mark.parametrize("topic", [False, True])
def test_an_ack_interrupted_anywhere(disk: SqliteDisk, store: SqlStore, topic: bool, share: Share) -> None:
    place, key = (T, DESK.key) if topic else (A, None)
    store.subscribe(DESK)
    store.subscribe(BOOK)
    message: list[Message] = []

    def prepare(at: int) -> Callable[[], object]:
        store.send(place, numbered(at))
        message[:] = [take(store, place, 0, key)]
        return message[0].ack

    def check(at: int, where: str) -> None:
        try:
            message[0].ack()
        except UnknownMessageError:
            pass  # it was
        with pytest.raises(UnknownMessageError):
            message[0].ack()
        assert store.depth(place, key) == 0, where
        assert store.stats().leased == 0, where

    assert everywhere(prepare, check, 17, share) > 20
    assert bodies(disk.crash(store), place, key) == []
    assert_whole(store)


@pytest.mark.parametrize("claimed", [False, True])
def test_a_release_interrupted_anywhere(store: SqlStore, claimed: bool, share: Share) -> None:
    """All are given back or none."""
    store.send_many(A, [b"1", b"2", b"3"])
    held: list[Message] = []

    def prepare(at: int) -> Callable[[], object]:
        held[:] = [take(store) for _ in range(3)]
        if claimed:
            for message in held:
                store.claim(message)
        return lambda: (store.unclaim if claimed else store.release)(held)

    def check(at: int, where: str) -> None:
        left = store.stats().leased
        assert left in (0, 3), where
        if left:
            (store.unclaim if claimed else store.release)(held)
        again = [take(store) for _ in range(3)]
        assert [message.body for message in again] == [b"1", b"2", b"3"], where
        store.release(again)

    assert everywhere(prepare, check, 17, share) > 30
    assert_whole(store)


def test_a_commit_interrupted_anywhere(disk: SqliteDisk, store: SqlStore, share: Share) -> None:
    """It takes effect whole, or not at all and can be done again."""
    message: list[Message] = []
    count = 0

    def prepare(at: int) -> Callable[[], object]:
        store.send(A, numbered(at))
        message[:] = [take(store)]
        store.claim(message[0])
        return lambda: store.commit(to(B, numbered(at)), message)

    def check(at: int, where: str) -> None:
        nonlocal count
        store.sync()  # what was queued is written
        if store.depth(A):
            store.commit(to(B, numbered(at)), message)
        count += 1
        assert (store.depth(A), store.depth(B), store.stats().leased) == (0, count, 0), where

    assert everywhere(prepare, check, 17, share) > 30
    assert len(bodies(disk.crash(store), B)) == count
    assert_whole(store)


@pytest.mark.parametrize("commit", [True, False])
def test_an_outcome_interrupted_anywhere(store: SqlStore, commit: bool, share: Share) -> None:
    count = 0

    def prepare(at: int) -> Callable[[], object]:
        store.send(A, numbered(at))
        message = take(store)
        store.claim(message)
        sends = to(B, numbered(at))
        store.prepare(transaction(at), [store.store_id, OTHER], sends, [message], True).wait()
        return lambda: (store.commit_prepared if commit else store.rollback_prepared)(transaction(at)).wait()

    def check(at: int, where: str) -> None:
        nonlocal count
        count += commit
        (store.commit_prepared if commit else store.rollback_prepared)(transaction(at)).wait()
        assert store.recover_prepared() == [], where
        assert store.depth(B) == count, where
        if not commit:
            take(store).ack()
        assert (store.depth(A), store.stats().leased) == (0, 0), where

    assert everywhere(prepare, check, 17, share) > 20
    assert_whole(store)


def test_subscribing_and_unsubscribing_interrupted_anywhere(store: SqlStore, share: Share) -> None:
    def prepare(at: int) -> Callable[[], object]:
        store.sync()
        for known in store.subscriptions():
            store.unsubscribe(known.topic, known.key)
        return lambda: (store.subscribe(DESK), store.send(T, b"x"), store.unsubscribe(T, DESK.key))

    def check(at: int, where: str) -> None:
        store.sync()
        assert list(store.subscriptions()) in ([], [DESK]), where
        store.subscribe(DESK)
        assert store.depth(T) == store.depth(T, DESK.key), where

    assert everywhere(prepare, check, 17, share) > 60
    assert_whole(store)


def test_a_purge_interrupted_anywhere(store: SqlStore, share: Share) -> None:
    """Who was struck does not keep others from receiving."""

    def prepare(at: int) -> Callable[[], object]:
        store.send_many(A, [b"1", b"2"])
        return lambda: store.purge(A)

    def check(at: int, where: str) -> None:
        store.sync()
        store.send(A, b"3")
        found = take(store)
        assert found.body in (b"1", b"3"), where
        found.release()
        store.purge(A)
        assert store.depth(A) == 0, where

    assert everywhere(prepare, check, 17, share) > 20
    assert_whole(store)


def test_a_browse_interrupted_anywhere(store: SqlStore, share: Share) -> None:
    store.send_many(A, [b"1", b"x" * 10_000])

    def check(at: int, where: str) -> None:
        assert len(list(store.browse(A))) == 2, where

    assert everywhere(lambda at: lambda: list(store.browse(A)), check, 17, share) > 30


READS: dict[str, Callable[[anabranch.Router], object]] = {
    "browse": lambda router: list(router.queue("q").browse()),
    "receive": lambda router: released(router.queue("q").receive()),
    "get": lambda router: router.map("m").get("key"),
    "items": lambda router: list(router.map("m").items()),
    "large": lambda router: next(iter(router.queue("large").browse())).read(),
    "send large": lambda router: router.queue("large").send(io.BytesIO(b"x" * 10_000), size=10_000),
    "reclaim": lambda router: router.reclaim(),
    "open": lambda router: router.reopen("all"),
}


@pytest.mark.parametrize("call", READS)
def test_nothing_is_open_in_a_file_after_an_interruption_anywhere(call: str, tmp_path: Path, share: Share) -> None:
    """While its traceback is kept, too: nobody waits for the transaction of who was struck, neither who writes nor who
    makes the log shorter. Struck in SQLAlchemy's own code as well."""
    kept: list[BaseException] = []
    with opened(tmp_path / "data", anabranch.SqlOptions(large_message_size=5000)) as router:
        other = sqlite3.connect(tmp_path / "data/stores/all/store.db", timeout=0, isolation_level=None)
        pool = router._registry.open_stores()[0].backend._engine.pool  # type: ignore[attr-defined]
        if call == "open":
            router.reopen("all")

        def check(at: int, where: str) -> None:
            # The background may be at it for a moment. Who began to read before anything was in the log keeps nobody
            # from making it shorter.
            eventually(lambda: can_write(other), lambda: where)
            eventually(lambda: not other.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0], lambda: where)
            if call != "open":
                eventually(lambda: len(set(pool.counts())) == 1, lambda: where)
            if len(kept) > 20:
                kept.clear()

        folders = (*OURS, *LIBRARY) if call == "open" else FOLDERS  # of SQLAlchemy there are too many places
        places = everywhere(lambda at: keeping(kept, lambda: READS[call](router)), check, 71, share, folders)
        assert places > (20 if call == "reclaim" else 200)
        other.close()


@pytest.mark.parametrize("call", ["browse", "get", "large", "send large"])
def test_nothing_is_open_at_a_server_after_an_interruption_anywhere(
    call: str, tmp_path: Path, postgres_url: str, share: Share
) -> None:
    """Nor is a place in the pool lost."""
    kept: list[BaseException] = []
    options = anabranch.SqlOptions(url=SecretStr(postgres_url), large_message_size=5000, pool_min=1, pool_max=3)
    # A transaction of PostgreSQL sees pg_stat_activity as it was when it first looked, so each look is one of its own.
    engine = create_engine(postgres_url, poolclass=NullPool, isolation_level="AUTOCOMMIT")
    with opened(tmp_path / "data", options) as router, engine.connect() as other:
        pool = router._registry.open_stores()[0].backend._engine.pool  # type: ignore[attr-defined]
        asked = text(
            "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'anabranch' AND datname = "
            "current_database() AND state <> 'idle'"
        )

        def check(at: int, where: str) -> None:
            eventually(lambda: other.execute(asked).scalar_one() == 0, lambda: where)
            eventually(lambda: len(set(pool.counts())) == 1, lambda: where)  # the background may be at it
            if len(kept) > 20:
                kept.clear()

        places = everywhere(lambda at: keeping(kept, lambda: READS[call](router)), check, 71, share, FOLDERS)
        assert places > 200


def can_write(database: sqlite3.Connection) -> bool:
    try:
        database.execute("PRAGMA user_version = 1").fetchall()
    except sqlite3.OperationalError:
        return False
    return True


def released(message: Message | None) -> None:
    if message is not None:
        message.release()


def opened(directory: Path, options: anabranch.SqlOptions) -> anabranch.Router:
    """With something to read."""
    router = anabranch.open(anabranch.Config(directory, [anabranch.StoreConfig("all", [">"], sql=options)]))
    for number in range(3):
        router.map("m").put(f"key{number or ''}", b"value")
        router.queue("q").send(b"x" * 4500)
    router.queue("large").send(b"x" * 10_000)
    return router


def keeping(kept: list[BaseException], call: Callable[[], object]) -> Callable[[], object]:
    """As an interactive session keeps what was raised last."""

    def run() -> None:
        try:
            call()
        except KeyboardInterrupt as error:
            kept.append(error)
            raise

    return run


def test_a_transaction_of_the_users_own_interrupted_anywhere(store: SqlStore, share: Share) -> None:
    """Committed or not, its send and its ack go together, and nothing stays claimed (rules Q4, Q6)."""
    engine = create_engine(f"sqlite:///{directory_of(store) / 'store.db'}", poolclass=NullPool)
    done = 0
    held: list[Message] = []

    def prepare(at: int) -> Callable[[], object]:
        store.send(A, numbered(at))
        held[:] = [message] = [take(store)]
        connection = engine.connect()

        def call() -> None:
            with connection:
                store.ack_within(connection, [message])
                store.send_within(connection, B, [numbered(at)])
                connection.commit()

        return call

    def check(at: int, where: str) -> None:
        nonlocal done
        lease, outbox = held[0]._note, feature_of(store, OutboxFeature)
        eventually(
            lambda: not outbox.is_busy and (lease.hold == LEASED or not store.stats().leased),
            lambda: where,
        )
        if store.stats().leased:  # its ack had not begun
            store.release(held)
        assert store.stats().leased == 0, where
        sent, left = store.depth(B), bodies(store)
        assert (sent, left) in ((done, [numbered(at)]), (done + 1, [])), where
        done = sent
        for _ in left:
            take(store).ack()

    assert everywhere(prepare, check, 71, share) > 100
    assert_whole(store)
    engine.dispose()
