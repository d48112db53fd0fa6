"""The data manager for the transaction package: commits with a real database, votes, failures, crashes between."""

from __future__ import annotations

import signal
import textwrap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy
import transaction
import zope.sqlalchemy
from sqlalchemy.orm import Session, sessionmaker
from transaction.interfaces import IDataManagerSavepoint, ISavepointDataManager
from zope.interface.verify import verifyObject

import anabranch
from anabranch import StoreFailedError, StoreFullError, TransactionError, TransactionInDoubt, Xid

from ..children import run_program
from ..contract.disk import eventually
from ..router.disk import Faults, contents, in_time, take, with_time_enough

NEVER = anabranch.JournalOptions(segment_size=64 * 1024, sync=anabranch.Sync.NEVER)
SMALL = NEVER.model_copy(update={"max_messages": 2})


def config(directory: Path) -> anabranch.Config:
    return anabranch.Config(
        directory,
        [
            anabranch.StoreConfig("orders", ["queue://orders"], journal=NEVER),
            anabranch.StoreConfig("audit", ["queue://audit"], journal=SMALL),
            anabranch.StoreConfig("done", ["queue://done"], journal=NEVER),
            anabranch.StoreConfig("copy", ["queue://copy"], journal=NEVER),
        ],
    )


@pytest.fixture(autouse=True)
def _no_transaction_is_left() -> Iterator[None]:
    yield
    transaction.abort()


@pytest.fixture
def router(tmp_path: Path) -> Iterator[anabranch.Router]:
    with anabranch.open(config(tmp_path / "data")) as router:
        yield router


class Other:
    """Another resource, which says when it was asked, and at one step does something, then fails if it should."""

    def __init__(self, key: str, at: str = "", during: Any = None, fails: bool = True) -> None:
        self.key, self.at, self.during, self.fails = key, at, during, fails
        self.seen: list[str] = []
        self.transaction_manager = transaction.manager

    def _step(self, name: str) -> None:
        self.seen.append(name)
        if name == self.at:
            if self.during is not None:
                self.during()
            if self.fails:
                raise RuntimeError(f"no {name}")

    def sortKey(self) -> str:  # noqa: N802
        return self.key

    def __getattr__(self, name: str) -> Any:
        if name in ("abort", "tpc_begin", "commit", "tpc_vote", "tpc_finish", "tpc_abort"):
            return lambda transaction: self._step(name)
        raise AttributeError(name)


BEFORE, AFTER = "a", "~"


def test_it_is_what_the_package_calls_a_data_manager(router: anabranch.Router) -> None:
    ours = router.join()
    assert verifyObject(ISavepointDataManager, ours)
    assert verifyObject(IDataManagerSavepoint, ours.savepoint())
    assert isinstance(ours.sortKey(), str) and ours.sortKey() < "~sqlalchemy"
    assert ours.transaction_manager is transaction.manager


class TestCommit:
    def test_over_two_stores_it_is_seen_as_one(self, router: anabranch.Router) -> None:
        router.queue("orders").send(b"old")
        with transaction.manager:
            ours = router.join()
            ours.ack(take(router, "orders"))
            ours.send("queue://orders,queue://audit", b"new")
            assert contents(router, "audit") == []
        assert (contents(router, "orders"), contents(router, "audit")) == ([b"new"], [b"new"])

    def test_an_abort_frees_what_was_acked_in_order(self, router: anabranch.Router) -> None:
        router.queue("orders").send_many([b"1", b"2", b"3"])
        with pytest.raises(ValueError, match="changed my mind"), transaction.manager:
            ours = router.join()
            ours.ack(take(router, "orders"))
            ours.ack(take(router, "orders"))
            ours.send("audit", b"never")
            raise ValueError("changed my mind")
        assert contents(router, "audit") == []
        assert [take(router, "orders").body for _ in range(3)] == [b"1", b"2", b"3"]

    def test_a_doomed_one_is_not_committed(self, router: anabranch.Router) -> None:
        router.join().send("audit", b"never")
        transaction.doom()
        with pytest.raises(transaction.interfaces.DoomedTransaction):
            transaction.commit()
        transaction.abort()
        assert contents(router, "audit") == []

    def test_one_that_does_nothing_writes_nothing(self, router: anabranch.Router, tmp_path: Path) -> None:
        with transaction.manager:
            router.join()
        with transaction.manager:
            router.join(xid=Xid(1, "nothing"))
        assert not (tmp_path / "data" / "decisions").exists()
        assert router.recover() == []

    def test_joined_twice_it_is_the_same_until_the_transaction_ends(self, router: anabranch.Router) -> None:
        first = router.join()
        assert router.join() is first
        first.send("audit", b"1")
        transaction.commit()
        second = router.join()
        assert second is not first
        assert first.state == "committed"
        with pytest.raises(TransactionError, match="committed; begin another"):
            first.send("audit", b"too late")

    def test_an_xid_in_place_of_the_manager(self, router: anabranch.Router) -> None:
        with pytest.raises(TypeError, match=r"an xid is given by name: join\(xid="):
            router.join(Xid(17, "1"))

    def test_another_xid_than_it_has(self, router: anabranch.Router) -> None:
        router.join(xid=Xid(1, "a"))
        assert router.join(xid=Xid(1, "a")) is router.join()
        with pytest.raises(TransactionError, match="joined already"):
            router.join(xid=Xid(1, "b"))

    def test_of_a_manager_of_ones_own(self, router: anabranch.Router) -> None:
        manager = transaction.TransactionManager(explicit=True)
        with pytest.raises(transaction.interfaces.NoTransaction):
            router.join(manager)
        with manager:
            router.join(manager).send("audit", b"1")
            assert not transaction.get()._resources  # the thread's own has nothing to do with it
        assert contents(router, "audit") == [b"1"]

    def test_a_failed_transaction_is_not_joined(self, router: anabranch.Router) -> None:
        transaction.get().join(Other(AFTER, "tpc_vote"))
        with pytest.raises(RuntimeError):
            transaction.commit()
        with pytest.raises(transaction.interfaces.TransactionFailedError):
            router.join(xid=Xid(1, "x"))
        transaction.abort()
        router.join(xid=Xid(1, "x"))  # its name is free: nothing was left open

    def test_two_routers_in_one(self, router: anabranch.Router, tmp_path: Path) -> None:
        with anabranch.open(config(tmp_path / "other")) as other:
            with transaction.manager:
                router.join().send("audit", b"1")
                other.join().send("orders", b"2")
            assert (contents(router, "audit"), contents(other, "orders")) == ([b"1"], [b"2"])

    def test_each_thread_has_its_own(self, router: anabranch.Router) -> None:
        """A third of them is aborted; what each took and sent is there once, or as it was."""
        router.queue("orders").send_many([b"order"] * 24)

        def work(number: int) -> None:
            for step in range(6):
                with suppress(ValueError), transaction.manager:
                    ours = router.join()
                    ours.ack(take(router, "orders"))
                    ours.send("queue://done,queue://copy", b"%d %d" % (number, step))
                    if step % 3 == 0:
                        raise ValueError("not this one")

        with ThreadPoolExecutor(4) as threads:
            list(threads.map(work, range(4)))
        done = sorted(b"%d %d" % (number, step) for number in range(4) for step in range(6) if step % 3)
        assert sorted(contents(router, "done")) == sorted(contents(router, "copy")) == done
        assert len(contents(router, "orders")) == 24 - len(done)

    def test_one_takes_part_in_one_transaction(self, router: anabranch.Router) -> None:
        ours = router.join()
        with pytest.raises(TransactionError, match="another transaction"):
            ours.tpc_begin(transaction.TransactionManager().begin())


class TestVote:
    def test_a_full_store_votes_no_and_nobody_commits(self, router: anabranch.Router) -> None:
        router.queue("audit").send_many([b"1", b"2"])
        router.queue("orders").send(b"old")
        other = Other(AFTER)
        with pytest.raises(StoreFullError), transaction.manager:
            transaction.get().join(other)
            ours = router.join()
            ours.ack(take(router, "orders"))
            ours.send("audit", b"3")
        assert "tpc_vote" not in other.seen and "tpc_finish" not in other.seen
        assert take(router, "orders").body == b"old"

    @pytest.mark.parametrize("step", ["tpc_begin", "commit", "tpc_vote"])
    @pytest.mark.parametrize("key", [BEFORE, AFTER])
    @pytest.mark.parametrize("xid", [None, Xid(1, "x")], ids=["ours", "external"])
    def test_another_says_no_and_ours_is_rolled_back(
        self, router: anabranch.Router, step: str, key: str, xid: Xid | None
    ) -> None:
        router.queue("orders").send(b"old")
        with pytest.raises(RuntimeError, match=step), transaction.manager:
            transaction.get().join(Other(key, step))
            ours = router.join(xid=xid)
            ours.ack(take(router, "orders"))
            ours.send("audit", b"never")
        assert contents(router, "audit") == []
        assert take(router, "orders").body == b"old"
        assert (router.in_doubt(), router.recover()) == ([], [])

    def test_what_has_voted_is_seen_by_nobody(self, router: anabranch.Router) -> None:
        router.queue("orders").send(b"old")
        seen: list[Any] = []

        def look() -> None:
            seen.extend([contents(router, "audit"), router.queue("orders").receive(), router.in_doubt()])

        with pytest.raises(RuntimeError), transaction.manager:
            transaction.get().join(Other(AFTER, "tpc_vote", look))
            ours = router.join()
            ours.ack(take(router, "orders"))
            ours.send("audit", b"never")
        assert seen == [[], None, []]

    def test_timed_out_it_votes_no(self, tmp_path: Path) -> None:
        def test(seconds: float, path: Path) -> None:
            transaction.abort()
            options = anabranch.TransactionOptions(timeout=seconds)
            with anabranch.open(anabranch.Config(path, [anabranch.StoreConfig("a", [">"])], options)) as router:
                ours = router.join()
                with in_time():
                    ours.send("q", b"1")
                eventually(lambda: ours.state != "open")
                with pytest.raises(TransactionError, match="timed out"):
                    transaction.commit()
                transaction.abort()
                assert contents(router, "q") == []

        with_time_enough(test, 0.05, tmp_path)


class TestFinish:
    def test_another_fails_before_ours(self, router: anabranch.Router) -> None:
        with pytest.raises(RuntimeError), transaction.manager:
            transaction.get().join(Other(BEFORE, "tpc_finish"))
            router.join().send("audit", b"never")
        assert contents(router, "audit") == []

    @pytest.mark.parametrize("xid", [None, Xid(1, "x")], ids=["ours", "external"])
    def test_another_fails_after_ours_which_stands(self, router: anabranch.Router, xid: Xid | None) -> None:
        with pytest.raises(RuntimeError), transaction.manager:
            transaction.get().join(Other(AFTER, "tpc_finish"))
            router.join(xid=xid).send("audit", b"it stands")
        assert contents(router, "audit") == [b"it stands"]

    def test_the_router_was_closed_since_the_vote(self, tmp_path: Path) -> None:
        router = anabranch.open(config(tmp_path / "data"))
        other = Other(BEFORE, "tpc_finish", router.close)
        with pytest.raises(RuntimeError), transaction.manager:
            transaction.get().join(other)
            router.join().send("audit", b"never")
        with anabranch.open(config(tmp_path / "data")) as router:
            assert (contents(router, "audit"), router.in_doubt()) == ([], [])

    def test_a_store_was_reopened_since_the_vote(self, router: anabranch.Router) -> None:
        """Nobody rolls back what has voted: its outcome is on its way."""
        ours = router.join()
        ours.send("queue://orders,queue://audit", b"1")
        this = transaction.get()
        ours.tpc_begin(this)
        ours.commit(this)
        ours.tpc_vote(this)
        router.reopen("audit")
        assert contents(router, "audit") == []
        ours.tpc_finish(this)
        assert (contents(router, "orders"), contents(router, "audit")) == ([b"1"], [b"1"])


class TestDisk:
    """The disk fails between our vote and our finish."""

    @pytest.fixture(autouse=True)
    def _synced(self, router: anabranch.Router) -> None:
        router.queue("orders").send(b"old")

    def commit(self, router: anabranch.Router, meanwhile: Any, xid: Xid | None = None) -> None:
        with transaction.manager:
            transaction.get().join(Other(BEFORE, "tpc_finish", meanwhile, fails=False))
            ours = router.join(xid=xid)
            ours.ack(take(router, "orders"))
            ours.send("queue://orders,queue://audit", b"new")

    def fail(self, router: anabranch.Router, faults: Faults) -> None:
        """Another transaction finds that the decision log's disk is broken."""
        faults.fail("fdatasync", "/decisions/")
        with pytest.raises(TransactionInDoubt):
            router.send("queue://orders,queue://audit", b"in doubt")

    @pytest.mark.parametrize("xid", [None, Xid(1, "x")], ids=["ours", "external"])
    @pytest.mark.parametrize("call", ["pwrite", "fdatasync"])
    def test_of_the_decision_log(self, router: anabranch.Router, xid: Xid | None, call: str, faults: Faults) -> None:
        """Nobody knows whether it is decided; the log tells when it can be read, and nothing is undone before (T2)."""
        with pytest.raises(TransactionInDoubt):
            self.commit(router, lambda: faults.fail(call, "/decisions/"), xid)
        (waiting,) = router.in_doubt()
        assert sorted(waiting.stores) == ["audit", "orders"]
        assert (contents(router, "audit"), router.queue("orders").receive()) == ([], None)
        faults.mend()
        router.reopen_decisions()
        written = call == "fdatasync"
        assert router.recover() == ([xid] if xid is not None and not written else [])
        for name in router.recover():
            router.commit(name)
        committed = written or xid is not None
        assert contents(router, "audit") == ([b"new"] if committed else [])
        assert contents(router, "orders") == ([b"new"] if committed else [b"old"])
        assert router.in_doubt() == []

    def test_of_the_decision_log_that_had_failed_before(self, router: anabranch.Router, faults: Faults) -> None:
        """What is not handed to the log is rolled back; with an xid it is held, since others may have committed."""

        with pytest.raises(StoreFailedError, match="decision log"):
            self.commit(router, lambda: self.fail(router, faults))
        assert take(router, "orders").body == b"old"
        faults.mend()
        router.reopen_decisions()
        assert contents(router, "orders") == [b"old", b"in doubt"]

    def test_of_the_decision_log_that_had_failed_before_an_external_one(
        self, router: anabranch.Router, faults: Faults
    ) -> None:

        with pytest.raises(StoreFailedError, match="decision log"):
            self.commit(router, lambda: self.fail(router, faults), Xid(1, "x"))
        faults.mend()
        router.reopen_decisions()
        assert router.recover() == [Xid(1, "x")]
        router.commit(Xid(1, "x"))
        assert sorted(contents(router, "audit")) == [b"in doubt", b"new"]

    def test_of_a_store_whose_commit_is_carried_out_later(self, router: anabranch.Router, faults: Faults) -> None:
        """The vote was its word: the commit returns, and stands (T2)."""
        self.commit(router, lambda: faults.fail("pwrite", "/stores/audit/"))
        assert contents(router, "orders") == [b"new"]
        (waiting,) = router.in_doubt()
        assert (waiting.outcome, waiting.stores) == ("commit", ("audit",))
        faults.mend()
        router.reopen("audit")
        assert (contents(router, "audit"), router.in_doubt()) == ([b"new"], [])


def test_savepoints(router: anabranch.Router) -> None:
    router.queue("orders").send_many([b"1", b"2"])
    with transaction.manager:
        ours = router.join()
        ours.ack(take(router, "orders"))
        ours.send("orders", b"3")
        point = transaction.savepoint()
        ours.ack(take(router, "orders"))
        ours.send("audit", b"never")
        point.rollback()
        assert take(router, "orders").body == b"2"  # free again at once
    assert (contents(router, "orders"), contents(router, "audit")) == ([b"2", b"3"], [])


# A real database ------------------------------------------------------------------------------------------------------

TABLES = sqlalchemy.MetaData()
SOLD = sqlalchemy.Table("sold", TABLES, sqlalchemy.Column("name", sqlalchemy.String, primary_key=True))


def sessions(directory: Path) -> sessionmaker[Session]:
    url, options = f"sqlite:///{directory}/sold.sqlite", {"timeout": 0.01}
    engine = sqlalchemy.create_engine(url, poolclass=sqlalchemy.NullPool, connect_args=options)
    TABLES.create_all(engine)
    made = sessionmaker(engine)
    zope.sqlalchemy.register(made)
    return made


def sell(router: anabranch.Router, session: Session, name: str, xid: Xid | None = None) -> None:
    session.execute(SOLD.insert().values(name=name))
    zope.sqlalchemy.mark_changed(session)
    router.join(xid=xid).send("queue://orders,queue://audit", name.encode())


def sold(directory: Path) -> list[str]:
    with sqlalchemy.create_engine(f"sqlite:///{directory}/sold.sqlite").connect() as connection:
        return list(connection.execute(sqlalchemy.select(SOLD.c.name)).scalars())


class TestDatabase:
    def test_both_commit(self, router: anabranch.Router, tmp_path: Path) -> None:
        made = sessions(tmp_path)
        with transaction.manager:
            sell(router, made(), "train")
            assert (sold(tmp_path), contents(router, "audit")) == ([], [])
        assert (sold(tmp_path), contents(router, "audit")) == (["train"], [b"train"])

    def test_the_database_refuses(self, router: anabranch.Router, tmp_path: Path) -> None:
        made = sessions(tmp_path)
        with transaction.manager:
            sell(router, made(), "train")
        with pytest.raises(sqlalchemy.exc.IntegrityError), transaction.manager:
            router.join().send("orders", b"again")
            sell(router, made(), "train")
        assert (sold(tmp_path), contents(router, "orders")) == (["train"], [b"train"])

    def test_the_database_fails_in_its_vote_after_ours(self, router: anabranch.Router, tmp_path: Path) -> None:
        """SQLite commits in its vote; here it cannot, since another connection reads."""
        made = sessions(tmp_path)
        engine = sqlalchemy.create_engine(f"sqlite:///{tmp_path}/sold.sqlite")
        with engine.connect() as reader:
            reader.exec_driver_sql("BEGIN")
            reader.execute(sqlalchemy.select(SOLD.c.name)).all()
            with pytest.raises(sqlalchemy.exc.OperationalError, match="locked"), transaction.manager:
                sell(router, made(), "train")
        assert (sold(tmp_path), contents(router, "orders"), contents(router, "audit")) == ([], [], [])

    def test_a_store_refuses_and_the_database_has_nothing(self, router: anabranch.Router, tmp_path: Path) -> None:
        made = sessions(tmp_path)
        router.queue("audit").send_many([b"1", b"2"])
        with pytest.raises(StoreFullError), transaction.manager:
            sell(router, made(), "train")
        assert (sold(tmp_path), contents(router, "orders")) == ([], [])


KILLED = textwrap.dedent(
    """
    import os, pathlib, signal, sys
    import transaction
    import anabranch
    from tests.transactions import test_data_manager as t

    directory, step, key, xid = sys.argv[1:]
    directory = pathlib.Path(directory)
    with anabranch.open(t.config(directory / "data")) as router:
        router.queue("orders").send(b"old")
        with transaction.manager:
            transaction.get().join(t.Other(key, step, lambda: os.kill(os.getpid(), signal.SIGKILL)))
            ours = router.join(xid=anabranch.Xid(1, xid) if xid else None)
            ours.ack(t.take(router, "orders"))
            t.sell(router, t.sessions(directory)(), "train", ours.xid)
    """
)


def killed(directory: Path, step: str, key: str, xid: str = "") -> None:
    code, told = run_program(KILLED, str(directory), step, key, xid)
    assert code == -signal.SIGKILL, told


class TestKilled:
    """The other's key decides where in the commit the process ends: ours votes first, then the database commits in its
    vote, then ours finishes."""

    def test_after_our_vote_it_is_rolled_back(self, tmp_path: Path) -> None:
        killed(tmp_path, "tpc_vote", "b")
        with anabranch.open(config(tmp_path / "data")) as router:
            assert (sold(tmp_path), contents(router, "audit"), router.in_doubt()) == ([], [], [])
            assert take(router, "orders").body == b"old"

    @pytest.mark.parametrize(
        ("key", "committed"), [("b", False), ("~~", True)], ids=["before-the-database", "after-the-database"]
    )
    def test_with_an_xid_it_is_held_and_the_database_tells(self, tmp_path: Path, key: str, committed: bool) -> None:
        """How to be exact with a database of one phase: name the transaction by what it inserts, look that up."""
        killed(tmp_path, "tpc_vote", key, "train")
        with anabranch.open(config(tmp_path / "data")) as router:
            assert router.recover() == [Xid(1, "train")]
            assert router.queue("orders").receive() is None  # claimed still
            for xid in router.recover():
                (router.commit if xid.global_id in sold(tmp_path) else router.rollback)(xid)
            assert sold(tmp_path) == (["train"] if committed else [])
            assert contents(router, "audit") == ([b"train"] if committed else [])
            assert contents(router, "orders") == ([b"train"] if committed else [b"old"])

    def test_after_our_finish_it_stands(self, tmp_path: Path) -> None:
        killed(tmp_path, "tpc_finish", "~~")
        with anabranch.open(config(tmp_path / "data")) as router:
            assert (sold(tmp_path), contents(router, "audit"), contents(router, "orders")) == (
                ["train"],
                [b"train"],
                [b"train"],
            )
