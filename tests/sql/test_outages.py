"""The database goes away: every call returns or says clearly what is wrong, nothing acknowledged is lost, nothing is
doubled, transactions over several stores end as they were decided, and all goes on by itself (invariants 3, 4, 7)."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

import anabranch
from anabranch.adapters.core.messages import Outgoing, Receipt
from anabranch.adapters.sql import SqlStore
from anabranch.adapters.sql.database import create_tables, lease
from anabranch.adapters.sql.database.schema import VERSION
from anabranch.adapters.sql.shared.waiting import Waiting
from anabranch.policies.config.options import SqlOptions
from anabranch.policies.errors import ConfigError, OutcomeUnknownError, PlacementError, StoreFailedError
from anabranch.router.router import inspection_of

from ..contract.disk import PATIENCE, A, B, Parallel, bodies, eventually, take
from ..shares import Share
from . import outages
from .outages import STOPS, configuration
from .server import PostgresServer
from .wire import Wire

TRANSACTION = bytes(32)


@pytest.fixture
def wire(postgres: PostgresServer) -> Iterator[Wire]:
    if postgres.pid is None:
        postgres.start()
    wire = Wire(postgres.port)
    yield wire
    wire.close()


Open = Callable[..., SqlStore]


@pytest.fixture
def opened(postgres_url: str, wire: Wire, tmp_path: Path) -> Iterator[Open]:
    """Opens the one store of a test, reached by the wire; the next call opens it again."""
    stores: list[SqlStore] = []

    def open_it(**options: Any) -> SqlStore:
        given: dict[str, Any] = {"url": wire.url(postgres_url), "pool_min": 0, "outcome_timeout": 5.0, **options}
        made = SqlOptions(**given)
        if stores:
            stores[-1].close()
        else:
            SqlStore.create("s", tmp_path / "s", made)
        stores.append(SqlStore("s", tmp_path / "s", made))
        stores[-1].open()
        return stores[-1]

    yield open_it
    wire.close()
    for store in stores:
        store.close()


# A store, cut off at one point ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("acted_on", [False, True], ids=["before", "after"])
def test_a_send_whose_commit_is_cut_off_is_stored_once(opened: Open, wire: Wire, acted_on: bool) -> None:
    """Rule T6: a connection that is lost in COMMIT is an unknown outcome, resolved by looking. Nobody notices."""
    store = opened()
    store.send(A, b"before")
    wire.cut_at(b"COMMIT", acted_on=acted_on)
    receipt = store.send(A, b"cut")  # without a message_id: it is not sent twice all the same
    assert wire.cut.is_set() and not receipt.duplicate
    store.send(A, b"after")
    assert bodies(store) == bodies(opened()) == [b"before", b"cut", b"after"]


@pytest.mark.parametrize("acted_on", [False, True], ids=["before", "after"])
def test_while_the_outcome_cannot_be_told_the_caller_is_told_so(opened: Open, wire: Wire, acted_on: bool) -> None:
    """And once it can be, a repeated send with the same message_id is stored once."""
    store = opened(outcome_timeout=0.2)
    store.send(A, b"before")
    wire.cut_at(b"COMMIT", acted_on=acted_on, stay=True)
    with pytest.raises(OutcomeUnknownError, match="with the same message_id"):
        store.send(A, b"cut", message_id="cut")
    with pytest.raises(StoreFailedError) as raised:
        store.send(A, b"refused")
    assert not isinstance(raised.value, OutcomeUnknownError), "this one was certainly not stored"
    wire.join()
    assert store.send(A, b"cut", message_id="cut").duplicate is acted_on
    assert bodies(store) == bodies(opened()) == [b"before", b"cut"]


def test_what_became_of_a_commit_is_not_known_where_somebody_else_has_written(
    opened: Open, wire: Wire, postgres_url: str
) -> None:
    """It took effect here; that it did not is nothing to be told."""
    store = opened(outcome_timeout=PATIENCE)
    wire.cut_at(b"COMMIT", acted_on=True, stay=True)
    with Parallel(lambda: store.send(A, b"cut")) as sending:
        assert wire.cut.wait(PATIENCE)
        engine = sa.create_engine(postgres_url)
        with engine.begin() as connection:
            connection.execute(sa.text("UPDATE store SET batch = batch + 1"))
        engine.dispose()
        wire.join()
        with pytest.raises(OutcomeUnknownError):
            sending.result()
    assert bodies(opened()) == [b"cut"]


@pytest.mark.parametrize("acted_on", [False, True], ids=["before", "after"])
def test_who_has_slept_through_its_lease_does_not_know_what_became_of_its_commit(
    opened: Open, wire: Wire, postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, acted_on: bool
) -> None:
    """Rule L2: the next owner has raised BATCH, as the commit would have."""
    store = opened(lease_expiration=60.0, outcome_timeout=PATIENCE)
    store.send(A, b"before")
    wire.cut_at(b"COMMIT", acted_on=acted_on, stay=True)
    with Parallel(lambda: store.send(A, b"cut")) as sending:
        assert wire.cut.wait(PATIENCE)
        engine = sa.create_engine(postgres_url)
        with engine.begin() as connection:
            connection.execute(sa.text("UPDATE lease SET expires = 1"))
        engine.dispose()
        now = lease.clock
        monkeypatch.setattr(lease, "clock", lambda: now() + 60)
        options = SqlOptions(url=postgres_url, pool_min=0, lease_expiration=60.0, lease_wait=PATIENCE)
        SqlStore.create("s", tmp_path / "second", options)
        second = SqlStore("s", tmp_path / "second", options)
        second.open()
        wire.join()
        with pytest.raises(OutcomeUnknownError):
            sending.result()
    assert bodies(second) == ([b"before", b"cut"] if acted_on else [b"before"])
    second.close()


@pytest.mark.parametrize("acted_on", [False, True], ids=["before", "after"])
def test_an_ack_whose_commit_is_cut_off_happens_once(opened: Open, wire: Wire, acted_on: bool) -> None:
    store = opened()
    store.send_many(A, [b"1", b"2"])
    message = take(store)
    wire.cut_at(b"COMMIT", acted_on=acted_on)
    message.ack()
    assert wire.cut.is_set()
    assert bodies(store) == bodies(opened()) == [b"2"]


def test_an_ack_of_unknown_outcome_leaves_the_message_leased_or_gone(opened: Open, wire: Wire) -> None:
    for acted_on in (False, True):
        store = opened(outcome_timeout=0.1)
        store.send(A, b"x")
        message = take(store)
        wire.cut_at(b"COMMIT", acted_on=acted_on, stay=True)
        with pytest.raises(OutcomeUnknownError):
            message.ack()
        wire.join()
        store.send(B, b"the outcome is looked up before this")
        assert bodies(store) == ([] if acted_on else [b"x"])
        if not acted_on:
            again = take(store)
            assert again.body == b"x"
            again.ack()


@pytest.mark.parametrize("acted_on", [False, True], ids=["before", "after"])
def test_what_a_leased_send_of_unknown_outcome_has_stored_is_nobodys(opened: Open, wire: Wire, acted_on: bool) -> None:
    store = opened(outcome_timeout=0.1)
    wire.cut_at(b"COMMIT", acted_on=acted_on, stay=True)
    with pytest.raises(OutcomeUnknownError):
        store.send_leased(A, Outgoing(b"x", message_id="x"))
    wire.join()
    again = store.send_leased(A, Outgoing(b"x", message_id="x"))
    assert isinstance(again, Receipt) is acted_on
    assert (take(store) if isinstance(again, Receipt) else again).body == b"x"
    assert bodies(store) == [b"x"]


@pytest.mark.parametrize("acted_on", [False, True], ids=["before", "after"])
def test_what_a_prepare_of_unknown_outcome_had_claimed_comes_back(opened: Open, wire: Wire, acted_on: bool) -> None:
    """Rule X6: nobody could roll it back while the server was away, and then nothing was there to be rolled back."""
    store = opened(outcome_timeout=0.1)
    store.send(A, b"x")
    message = take(store)
    store.claim(message)
    wire.cut_at(b"COMMIT", acted_on=acted_on, stay=True)
    with pytest.raises(OutcomeUnknownError):
        store.prepare(TRANSACTION, [store.store_id], [(B, Outgoing(b"y"))], [message], True).wait()
    with pytest.raises(StoreFailedError):
        store.rollback_prepared(TRANSACTION).wait()
    wire.join()
    assert store.rollback_prepared(TRANSACTION).wait() is acted_on
    take(store).ack()
    assert store.depth(A) == store.depth(B) == store.stats().leased == 0


@pytest.mark.parametrize("word", [b"BEGIN", b"INSERT INTO", b"store SET"])
def test_cut_off_in_the_middle_of_a_batch_it_is_written_again(opened: Open, wire: Wire, word: bytes) -> None:
    """Nothing has taken effect before COMMIT, so that the batch goes on over another connection."""
    store = opened()
    wire.cut_at(word, acted_on=False)
    receipts = store.send_many(A, [Outgoing(b"%d" % n, message_id=str(n)) for n in range(100)])
    assert wire.cut.is_set()
    assert [receipt.duplicate for receipt in receipts] == [False] * 100
    assert bodies(store) == [b"%d" % n for n in range(100)]


@pytest.mark.parametrize("acted_on", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("step", ["prepare", "commit_prepared", "rollback_prepared"])
def test_a_branch_whose_step_is_cut_off(opened: Open, wire: Wire, step: str, acted_on: bool) -> None:
    """Each step happens once: XALOG's row is there or is gone (rule T6)."""
    store = opened()
    store.send(A, b"acked")
    message = take(store)
    store.claim(message)

    def cut(name: str) -> None:
        if name == step:
            wire.cut_at(b"COMMIT", acted_on=acted_on)

    cut("prepare")
    store.prepare(TRANSACTION, [store.store_id], [(B, Outgoing(b"sent"))], [message], True).wait()
    assert [prepared.transaction for prepared in store.recover_prepared()] == [TRANSACTION]
    assert bodies(store, B) == []
    if step == "rollback_prepared":
        cut(step)
        assert store.rollback_prepared(TRANSACTION).wait() is True
        expected: tuple[list[bytes], list[bytes]] = ([b"acked"], [])
    else:
        cut(step)
        assert len(store.commit_prepared(TRANSACTION).wait()) == 1
        expected = ([], [b"sent"])
    assert wire.cut.is_set()
    for again in (False, True):
        view = opened() if again else store
        assert (bodies(view), bodies(view, B)) == expected
        assert list(view.recover_prepared()) == []


@pytest.mark.parametrize(
    ("word", "acted_on"),
    [(b"INSERT INTO messages", False), (b"INSERT INTO xalog", True), (b"DELETE FROM xalog", True), (b"COMMIT", True)],
)
def test_the_server_is_killed_in_the_middle_of_a_step(
    opened: Open, wire: Wire, postgres: PostgresServer, word: bytes, acted_on: bool
) -> None:
    """All of its processes, with SIGKILL, and started again: what it has committed is there, and nothing else is."""
    store = opened(outcome_timeout=PATIENCE)
    store.send(A, b"0")
    acked = take(store)
    store.claim(acked)

    back = threading.Event()

    def kill() -> None:
        postgres.kill()
        postgres.start()
        back.set()

    wire.cut_at(word, acted_on=acted_on, then=kill)
    steps: list[Callable[[], object]] = [
        lambda: store.send(A, b"1"),
        lambda: store.send_many(A, [b"2", b"3"]),
        lambda: store.prepare(TRANSACTION, [store.store_id], [(A, Outgoing(b"4"))], [acked], True).wait(),
        lambda: store.commit_prepared(TRANSACTION).wait(),
    ]
    for step in steps:
        try:
            step()
        except StoreFailedError as error:  # the server is not back yet
            assert wire.cut.is_set() and not isinstance(error, OutcomeUnknownError), error
            assert back.wait(PATIENCE)
            step()  # for it did not happen
    assert back.wait(PATIENCE)
    for again in (False, True):
        view = opened() if again else store
        assert bodies(view) == [b"1", b"2", b"3", b"4"]
        assert list(view.recover_prepared()) == []
        assert list(view.committed()) == [TRANSACTION]
        assert list(view.check()) == []


def test_while_it_is_down_calls_fail_clearly_and_then_go_on(opened: Open, wire: Wire, postgres: PostgresServer) -> None:
    store = opened()
    store.send(A, b"1")
    held = take(store)
    wire.sever()
    calls: list[Callable[[], object]] = [
        lambda: store.send(A, b"x"),
        lambda: store.send_many(A, [b"x", b"y"]),
        lambda: store.commit([(A, Outgoing(b"x"))], []),
        lambda: store.prepare(TRANSACTION, [store.store_id], [(A, Outgoing(b"x"))], [], True).wait(),
        lambda: store.subscribe(anabranch.Subscription(anabranch.Destination.parse("topic://t"), "s")),
        lambda: store.purge(A),
        lambda: store.send_nowait(A, b"x").result(PATIENCE),
        lambda: held.ack(),
    ]
    for call in calls:
        with pytest.raises(
            StoreFailedError, match=r"database postgresql\+psycopg://anabranch:\*\*\*@.* cannot be used"
        ):
            call()
    assert store.stats().failed is None, "the store has not failed: its database is away"
    wire.join()
    held.ack()  # nothing was done before: it was held still
    assert store.send(A, b"2").seq > held.seq
    assert bodies(store) == [b"2"]
    assert list(store.check()) == []


def test_one_who_waits_for_messages_waits_on_or_is_told(opened: Open, wire: Wire) -> None:
    store = opened()
    with Parallel(lambda: store.receive(A, PATIENCE)) as waiting:
        assert waiting.outlives(0.05)
        wire.sever()
        wire.join()
        store.send(A, b"x")
        message = waiting.result()
    assert message is not None and message.body == b"x"


def test_released_while_it_is_down_a_message_is_free_all_the_same(opened: Open, wire: Wire) -> None:
    store = opened()
    store.send(A, b"x")
    message = take(store)
    wire.sever()
    message.release()
    wire.join()
    again = take(store)
    assert (again.body, again.deliveries) == (b"x", 2)


def test_a_dead_server_at_open_is_told_and_the_next_open_succeeds(opened: Open, wire: Wire) -> None:
    store = opened()
    store.send(A, b"x")
    store.close()
    wire.sever()
    with pytest.raises(StoreFailedError, match="cannot be used now"):
        store.open()
    wire.join()
    assert bodies(opened()) == [b"x"]


def test_who_keeps_messages_locked_keeps_no_store_from_opening(
    opened: Open, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An open that cannot make the index by priority leaves it to a later one."""
    monkeypatch.setattr(create_tables, "LOCKED_SECONDS", 0.1)
    opened().send(A, b"x")
    engine = sa.create_engine(postgres_url)

    def is_made() -> bool:
        return "messages_order" in {index["name"] for index in sa.inspect(engine).get_indexes("messages")}

    with engine.begin() as other:
        other.execute(sa.text("UPDATE messages SET deliverycount = deliverycount"))
        store = opened(priorities=True)
        assert (bodies(store), is_made()) == ([b"x"], False)
    assert bodies(opened(priorities=True)) == [b"x"]
    assert is_made()
    engine.dispose()


# A router, cut off or killed -----------------------------------------------------------------------------------------


@pytest.fixture
def routed(postgres_url: str, wire: Wire, tmp_path: Path) -> Iterator[anabranch.Router]:
    with anabranch.open(configuration(tmp_path / "data", wire.url(postgres_url), outcome_timeout=0.5)) as router:
        yield router
        wire.close()


def both(tx: anabranch.Transaction) -> None:
    tx.send("queue://s.a", b"x")
    tx.send("queue://j.a", b"x")


@pytest.mark.parametrize("acted_on", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("word", [b"INSERT INTO xalog", b"DELETE FROM xalog"], ids=["prepare", "commit"])
def test_a_transaction_over_two_stores_that_is_cut_off_for_good(
    routed: anabranch.Router, wire: Wire, word: bytes, acted_on: bool
) -> None:
    """Rule T2: cut off in prepare it is rolled back, or in doubt and settles; cut off in commit it is committed, and
    what is missing is made up for."""
    routed.queue("s.a").send(b"0")
    wire.cut_at(word, acted_on=acted_on, stay=True)
    outcome = "committed"
    try:
        with routed.transaction() as tx:
            both(tx)
    except anabranch.TransactionInDoubt:
        outcome = "in doubt"
    except anabranch.AnabranchError as error:
        assert "***" in str(error) or "s" in str(error)
        outcome = "rolled back"
    assert wire.cut.is_set()
    assert outcome == ("committed" if b"DELETE" in word else "rolled back")
    wire.join()
    outages.settled(routed)
    eventually(lambda: outages.bodies(routed, "s.a")[1:] == outages.bodies(routed, "j.a"))
    assert outages.bodies(routed, "j.a") == (["x"] if outcome == "committed" else [])
    both_again = routed.transaction()
    both(both_again)
    both_again.commit()
    assert len(outages.bodies(routed, "s.a")) == 1 + len(outages.bodies(routed, "j.a"))


def test_other_stores_never_notice(routed: anabranch.Router, wire: Wire) -> None:
    """Invariant 7, with everybody waiting for the database."""
    routed.queue("s.a").send(b"0")
    wire.sever()
    stop = threading.Event()

    def insist() -> None:
        while not stop.is_set():
            try:
                routed.queue("s.a").send(b"x")
            except StoreFailedError:
                pass

    threads = [threading.Thread(target=insist) for _ in range(4)]
    for thread in threads:
        thread.start()
    queue = routed.queue("beside")
    for n in range(50):
        queue.send(b"%d" % n)
        message = queue.receive()
        assert message is not None
        message.ack()
    stop.set()
    for thread in threads:
        thread.join()
    wire.join()
    routed.queue("s.a").send(b"1")


@pytest.fixture
def shop(postgres_url: str, wire: Wire, tmp_path: Path) -> Iterator[anabranch.Router]:
    """A router over a shared store, which the wire leads to, and a journal."""
    options = anabranch.SqlOptions(url=wire.url(postgres_url), shared=True, outcome_timeout=0.5)
    stores = [anabranch.StoreConfig("shop", ["queue://s.>"], sql=options), anabranch.StoreConfig("journal", [">"])]
    with anabranch.open(anabranch.Config(tmp_path / "data", stores)) as router:
        yield router
        wire.close()


def test_a_shared_store_that_is_away_hides_no_figures_of_others(shop: anabranch.Router, wire: Wire) -> None:
    shop.queue("s.a").send(b"x")
    shop.queue("j.a").send(b"x")
    shop.stats()
    wire.sever()
    for _ in range(2):
        stores = shop.stats().stores
        assert "cannot be used now" in str(stores["shop"].failed) and stores["shop"].messages == 1, "what it said last"
        assert (stores["journal"].failed, stores["journal"].messages) == (None, 1)
        rows = {row["store"]: row for row in inspection_of(shop).stores()}
        assert rows["shop"]["failed"] and rows["journal"]["oldest_ready_seconds"] is not None
    assert {one.name: one.state for one in shop.health().stores} == {"shop": "failed", "journal": "ok"}
    wire.join()
    eventually(lambda: shop.stats().stores["shop"].failed is None)


@pytest.mark.parametrize("cut", [b"", b"COMMIT"], ids=["before", "commit"])
def test_what_waits_for_a_database_waits_for_no_operator(shop: anabranch.Router, wire: Wire, cut: bytes) -> None:
    shop.queue("s.a").send(b"x")
    message = shop.queue("s.a").receive()
    assert message is not None
    if cut:
        wire.cut_at(cut, acted_on=True, stay=True)
    else:
        wire.sever()
    with pytest.raises(anabranch.AnabranchError), shop.transaction() as tx:
        tx.ack(message)
        tx.send("j.a", b"x")
    health = shop.health()
    assert health.in_doubt == 1, shop.in_doubt()
    assert (health.ok, health.for_operator) == (False, 0), shop.in_doubt()
    wire.join()
    eventually(lambda: shop.health().in_doubt == 0)
    assert shop.health().ok


def test_the_log_says_once_an_outage_why(
    shop: anabranch.Router, wire: Wire, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.DEBUG)
    hears, lost_none = threading.Event(), Waiting._lost_none

    def connected(waiting: Waiting) -> None:
        lost_none(waiting)
        hears.set()

    monkeypatch.setattr(Waiting, "_lost_none", connected)

    def told(level: int = logging.NOTSET) -> list[str]:
        return [one.getMessage() for one in caplog.records if "hears of messages" in one.msg and one.levelno >= level]

    shop.queue("s.a").send(b"x")
    for outage in (1, 2):
        assert hears.wait(PATIENCE)
        hears.clear()
        caplog.clear()
        wire.sever()
        eventually(lambda: len(told()) >= 3)
        assert len(told(logging.WARNING)) == 1, (outage, told())
        assert "store shop: " in told()[-1] and "refused" in told()[-1]
        wire.join()


def test_the_log_names_the_database_that_takes_no_connections(
    opened: Open, wire: Wire, caplog: pytest.LogCaptureFixture
) -> None:
    opened(pool_min=1, pool_idle_timeout=0.1, keepalive_interval=0.1)
    wire.sever()
    eventually(lambda: "takes no connections" in caplog.text)
    (told,) = [one.getMessage() for one in caplog.records if "takes no connections" in one.msg]
    assert "the database postgresql+psycopg://anabranch:***@127.0.0.1" in told and "refused" in told


@pytest.mark.parametrize("how", STOPS)
def test_eight_threads_while_the_server_goes_down_and_comes_back(
    postgres: PostgresServer, tmp_path: Path, how: str
) -> None:
    ledger, count, found = outages.a_round(postgres, tmp_path / "data", 0.5, random.Random(how), [how])
    assert found == []
    assert count >= 1 and ledger.sent


@pytest.mark.campaign
@pytest.mark.weight(3)
def test_outages_in_all_ways_for_long(postgres: PostgresServer, budget: Share) -> None:
    """`postgres` only says whether there is a server to be had: this one is the campaign's own."""
    budget.run("tests.sql.outages", "--rounds", "20")


# What is wrong from the beginning ------------------------------------------------------------------------------------


def options(url: str, **more: Any) -> SqlOptions:
    given: dict[str, Any] = {"url": url, "pool_min": 0, **more}
    return SqlOptions(**given)


def test_a_server_that_is_not_there(tmp_path: Path, wire: Wire, postgres_url: str) -> None:
    wire.sever()
    with pytest.raises(StoreFailedError, match=r"anabranch:\*\*\*@127\.0\.0\.1:\d+/.* cannot be used now: .*refused"):
        SqlStore.create("s", tmp_path / "s", options(wire.url(postgres_url)))
    assert list(tmp_path.iterdir()) == [], "whole or not at all"


def test_a_wrong_password(tmp_path: Path, postgres: PostgresServer) -> None:
    with pytest.raises(StoreFailedError, match="password authentication failed") as raised:
        SqlStore.create("s", tmp_path / "s", options(postgres.url(password=False), password="s3cret-word"))
    assert "s3cret-word" not in str(raised.value) and raised.value.__cause__ is None
    assert list(tmp_path.iterdir()) == []


def test_a_database_that_is_not_there(tmp_path: Path, postgres: PostgresServer) -> None:
    with pytest.raises(StoreFailedError, match='"nowhere" does not exist'):
        SqlStore.create("s", tmp_path / "s", options(postgres.url("nowhere")))


def test_tables_that_are_missing(tmp_path: Path, postgres: PostgresServer, postgres_url: str) -> None:
    with pytest.raises(ConfigError, match=r"has no messages, chunks, .*anabranch schema create"):
        SqlStore.create("s", tmp_path / "s", options(postgres_url, create_tables=False))
    SqlStore.create("s", tmp_path / "s", options(postgres_url))
    with postgres.connect(postgres_url.rsplit("/", 1)[1].partition("?")[0]) as admin:
        admin.execute(f"SET search_path = {postgres_url.rpartition('%3D')[2]}")
        admin.execute("DROP TABLE xalog")
    with pytest.raises(PlacementError, match=r"has no xalog; .*nothing was created"):
        SqlStore("s", tmp_path / "s", options(postgres_url)).open()


@pytest.mark.parametrize(
    ("statement", "says"),
    [
        ("UPDATE store SET version = 99", f"version 99, this is version {VERSION}"),
        ("ALTER TABLE messages DROP COLUMN headers", "messages .*lacks headers"),
        ("UPDATE store SET storeid = repeat('0', 32)", "belong to the store with the id 0000"),
    ],
)
def test_tables_of_another_version_or_owner(
    tmp_path: Path, postgres: PostgresServer, postgres_url: str, statement: str, says: str
) -> None:
    SqlStore.create("s", tmp_path / "s", options(postgres_url))
    with postgres.connect(postgres_url.rsplit("/", 1)[1].partition("?")[0]) as admin:
        admin.execute(f"SET search_path = {postgres_url.rpartition('%3D')[2]}")
        admin.execute(statement)
    with pytest.raises((ConfigError, PlacementError), match=says):
        SqlStore("s", tmp_path / "s", options(postgres_url)).open()


@pytest.mark.parametrize(
    "prefix", ["x; DROP TABLE messages; --", 'x"', "x'", "x y", "a.b.c", "ünï", "x\0", "1.", "${x}"]
)
def test_a_prefix_that_is_an_injection_attempt(prefix: str) -> None:
    with pytest.raises(ConfigError, match="schema_prefix"):
        options("postgresql+psycopg://h/d", schema_prefix=prefix)
