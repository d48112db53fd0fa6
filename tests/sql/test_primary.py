"""Transactions over a store that other processes may take over, and others: its own commit is the decision
(router/transactions/primary.py, rule T6)."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import MetaData, create_engine, text

import anabranch
from anabranch.adapters.core.operations.branches import Commit
from anabranch.adapters.core.store import Store
from anabranch.adapters.sql.backend import SqlBackend
from anabranch.adapters.sql.shared import SharedStore
from anabranch.policies.errors import OutcomeUnknownError, StoreFailedError, TransactionError, TransactionInDoubt
from anabranch.router.transactions import primary, resolver
from anabranch.router.transactions.decision_log import DecisionLog
from anabranch.router.transactions.participant import Participant

from ..contract.children import forked, reaped
from ..contract.disk import Parallel, eventually
from ..crash.steps import Steps
from .leased import Shared, bodies, databases, ready, replace

Router = anabranch.Router
shared = pytest.fixture(databases, params=["sqlite", "postgresql", "shared"])


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits is tried again soon."""
    monkeypatch.setattr(resolver, "RETRY_SECONDS", 0.02)


def filled(router: Router) -> None:
    """Let there be a message in the primary and in a journal."""
    router.queue("q").send(b"1")
    router.queue("a.q").send(b"2")
    for name in ("p", "a.p", "b.p"):
        router.queue(name).declare()


def move(router: Router, finish: Callable[[anabranch.Transaction], object] = anabranch.Transaction.commit) -> Any:
    """Ack the two, and send one to the primary and to each journal, in one transaction."""
    tx = router.transaction()
    for name in ("q", "a.q"):
        message = router.queue(name).receive(timeout=10)
        assert message is not None
        tx.ack(message)
    for name in ("p", "a.p", "b.p"):
        tx.send(name, b"3")
    finish(tx)
    return tx


def has_moved(router: Router, names: tuple[str, ...] = ("q", "a.q", "p", "a.p", "b.p")) -> bool:
    """Return whether the transaction is committed: in all of its stores, or in none."""
    found = {name: ready(router, name) for name in names}
    moved = {"q": [], "a.q": [], "p": [b"3"], "a.p": [b"3"], "b.p": [b"3"]}
    before: dict[str, list[bytes]] = {"q": [b"1"], "a.q": [b"2"], "p": [], "a.p": [], "b.p": []}
    assert found in ({name: moved[name] for name in names}, {name: before[name] for name in names})
    return found == {name: moved[name] for name in names}


def wait_settled(router: Router) -> None:
    eventually(lambda: router.in_doubt() == [])
    eventually(lambda: not any(store.recover_prepared() for store in router._registry.open_stores()))


def committed_rows(shared: Shared) -> int:
    engine = create_engine(shared.url)
    with engine.connect() as connection:
        count: int = connection.execute(text(f"SELECT count(*) FROM {shared.prefix}committed")).scalar_one()
    engine.dispose()
    return count


def test_it_is_one_transaction(shared: Shared) -> None:
    router = shared.router("first")
    filled(router)
    tx = move(router)
    assert tx.state == "committed"
    assert has_moved(router)
    assert router.in_doubt() == []
    router.close()
    assert committed_rows(shared) == 0, "the primary forgets what all have carried out"
    second = shared.router("second")
    assert bodies(second, "p") == [b"3"]


def test_a_rollback_and_a_vote(shared: Shared) -> None:
    router = shared.router("first")
    filled(router)
    move(router, anabranch.Transaction.rollback)
    assert not has_moved(router)

    def voted(tx: anabranch.Transaction) -> None:
        tx.vote()
        assert tx.state == "voted" and ready(router, "q") == [] and bodies(router, "p") == []

    tx = move(router, voted)
    tx.rollback()
    assert not has_moved(router)
    tx = move(router, voted)
    tx.commit()
    assert has_moved(router)


def test_what_has_voted_in_the_primary_alone_goes_with_its_process(shared: Shared) -> None:
    router = shared.router("first")
    router.queue("q").send(b"1")
    for commit in (False, True):
        tx = router.transaction()
        tx.send("p", b"3")
        tx.vote()
        assert bodies(router, "p") == []
        if commit:
            tx.commit()
            assert bodies(router, "p") == [b"3"]
        else:
            router.close()
            second = shared.router("second")
            assert bodies(second, "p") == [] and second.in_doubt() == []
            second.close()
            router.open()


def test_a_memory_store_takes_part_too(shared: Shared) -> None:
    router = shared.router("first")
    filled(router)
    tx = move(router, lambda tx: (tx.send("memory.q", b"4"), tx.commit()))
    assert tx.state == "committed" and has_moved(router) and bodies(router, "memory.q") == [b"4"]


def test_dead_letters_go_from_it_to_another_store(shared: Shared) -> None:
    with anabranch.open(shared.config("first", max_deliveries=1, dead_letter="a.dead")) as router:
        router.queue("q").send(b"1")
        message = router.queue("q").receive()
        assert message is not None
        message.reject("no")
        assert bodies(router, "a.dead") == [b"1"] and bodies(router, "q") == []


@pytest.mark.parametrize("error", [StoreFailedError, OutcomeUnknownError])
@pytest.mark.parametrize("is_done", [False, True])
def test_a_primary_that_fails_is_asked_before_anything_is_decided(
    shared: Shared, monkeypatch: pytest.MonkeyPatch, error: type[Exception], is_done: bool
) -> None:
    router = shared.router("first")
    filled(router)

    def fails(commit: Any, self: Store, transaction: bytes) -> Any:
        if self.name != "primary":
            return commit(self, transaction)
        if is_done:
            commit(self, transaction).wait()
        raise error("the network is gone")

    replace(monkeypatch, "commit_prepared", fails)
    if is_done:
        assert move(router).state == "committed"
    else:
        with pytest.raises(StoreFailedError, match="the network is gone"):
            move(router)
    monkeypatch.undo()
    assert has_moved(router) == is_done
    assert router.in_doubt() == []


@pytest.mark.parametrize("is_done", [False, True])
def test_while_the_primary_cannot_be_asked_it_is_in_doubt(
    shared: Shared, monkeypatch: pytest.MonkeyPatch, is_done: bool
) -> None:
    router = shared.router("first")
    filled(router)
    gone = [True]

    def fails(commit: Any, self: Store, transaction: bytes) -> Any:
        if not gone or self.name != "primary":
            return commit(self, transaction)
        if is_done:
            commit(self, transaction).wait()
        raise StoreFailedError("the network is gone")

    def asked(ask: Any, self: Store, transaction: bytes) -> bool:
        if gone and self.name == "primary":
            raise StoreFailedError("the network is gone")
        answer: bool = ask(self, transaction)
        return answer

    def peeked(*given: Any, _peek: Any) -> bool | None:
        if gone:
            raise StoreFailedError("the network is gone")
        answer: bool | None = _peek(*given)
        return answer

    replace(monkeypatch, "commit_prepared", fails)
    replace(monkeypatch, "has_committed", asked)
    for kind in (SqlBackend, SharedStore):
        monkeypatch.setattr(kind, "peek", partial(peeked, _peek=kind.peek))
    with pytest.raises(TransactionInDoubt, match="until store 'primary' can be asked"):
        move(router)
    (one,) = router.in_doubt()
    assert "store 'primary', whose own commit decides, cannot be asked now: the network is gone" in one.reason
    assert "primary" in one.stores, "it waits for that"
    assert ready(router, "a.q") == [] and bodies(router, "a.p") == []
    gone.clear()
    wait_settled(router)
    assert has_moved(router) == is_done


@pytest.mark.parametrize("shared", ["sqlite", "postgresql"], indirect=True)
def test_a_commit_whose_outcome_nobody_knows_yet_decides_once_it_is_known(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection is lost in the COMMIT of the primary, which takes effect; the others wait."""
    gone: list[int] = []
    write, took_effect, peek = SqlBackend._write, SqlBackend.took_effect, SqlBackend.peek

    def require() -> None:
        if gone:
            raise StoreFailedError("the database is away")

    def cut_off(self: Any, plan: Any) -> Any:
        require()
        if any(type(change) is Commit for change in plan.changes) and not gone:
            gone.append(1)
            monkeypatch.setattr(self, "_took", lambda effects: setattr(self, "_unknown", effects))
            write(self, plan)
            monkeypatch.delattr(self, "_took")
            raise OutcomeUnknownError("cut off in COMMIT")
        return write(self, plan)

    def taken(self: Any, plan: Any) -> Any:
        require()
        return took_effect(self, plan)

    def peeked(*given: Any) -> bool | None:
        require()
        return peek(*given)

    router = shared.router("first", outcome_timeout=0.2)
    filled(router)
    for name, call in (("_write", cut_off), ("took_effect", taken), ("peek", peeked)):
        monkeypatch.setattr(SqlBackend, name, call)
    with pytest.raises(TransactionInDoubt):
        move(router)
    for _ in range(3):  # it is asked in the background meanwhile
        router._coordinator.resolver._retry()
        assert ready(router, "a.q") == [] and bodies(router, "a.p") == []
    gone.clear()
    monkeypatch.setattr(SqlBackend, "_write", write)
    wait_settled(router)
    assert has_moved(router)


@pytest.mark.parametrize("xid", [None, anabranch.Xid(1, "x")])
def test_a_router_that_is_opened_again_amid_prepares_knows_nothing_of_them(
    shared: Shared, monkeypatch: pytest.MonkeyPatch, xid: anabranch.Xid | None
) -> None:
    router = shared.router("first")
    filled(router)
    prepare, done = Participant.prepare, list[int]()

    def reopened(self: Participant, store: Store, *given: Any) -> Any:
        if store.name == "primary" and not done:
            done.append(1)
            with Parallel(router.close) as other:
                other.result()
            router.open()
            assert bodies(router, "a.p") == bodies(router, "b.p") == []  # which opens these stores
            eventually(lambda: not any(one.recover_prepared() for one in router._registry.open_stores()))
        return prepare(self, store, *given)

    monkeypatch.setattr(Participant, "prepare", reopened)
    tx = router.transaction(xid)
    for name in ("p",) if xid else ("p", "a.p", "b.p"):
        tx.send(name, b"3")
    with pytest.raises(StoreFailedError, match="being read again"):
        tx.prepare() if xid else tx.commit()
    assert tx.state == "rolled back" and router.recover() == []
    assert not has_moved(router)


def test_what_the_primary_has_forgotten_is_not_taken_for_rolled_back(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It forgets what the decision log has; then that is lost. What another participant has done tells."""
    router = shared.router("first")

    def fails(commit: Any, self: Store, transaction: bytes) -> Any:
        if self.name == "b":
            raise StoreFailedError("its disk is gone")
        return commit(self, transaction)

    replace(monkeypatch, "commit_prepared", fails)
    filled(router)
    assert move(router).state == "committed"
    router.reopen("primary")
    router.close()
    monkeypatch.undo()
    decisions = shared.directory / "first" / "decisions"
    decisions.rename(shared.directory / "lost")
    router.open()
    for name in ("a.q", "b.p", "q"):
        router.queue(name).depth()
    wait_settled(router)
    assert has_moved(router)


def test_a_rollback_by_hand_of_what_the_primary_has_committed_is_refused(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process dies as the primary has committed; the next one is asked at once."""
    router = shared.router("first")
    filled(router)

    def unwritten(*_: Any) -> Any:
        raise StoreFailedError("the process was killed")

    monkeypatch.setattr(DecisionLog, "decide", unwritten)
    for name in ("resolve", "retry_later"):
        monkeypatch.setattr(resolver.Resolver, name, lambda *_: "")
    tx = move(router)
    router.close()
    monkeypatch.undo()
    monkeypatch.setattr(resolver, "RETRY_SECONDS", 3600)  # else it may be settled before that is asked
    router.open()
    with pytest.raises(TransactionError, match=r"cannot be rolled back: it is committed|decided already: commit"):
        router.resolve(tx._global.id.hex(), "rollback")
    router._coordinator.resolver._retry()
    wait_settled(router)
    assert has_moved(router)


@pytest.mark.parametrize("is_asked", [False, True])
def test_what_ctrl_c_strikes_while_the_primary_does_not_answer_is_settled_later(
    shared: Shared, monkeypatch: pytest.MonkeyPatch, is_asked: bool
) -> None:
    """It strikes as the primary commits, or as it is asked."""
    router, ask = shared.router("first"), primary.outcome_in
    filled(router)
    gone, main = [1], threading.current_thread()

    def struck() -> None:
        if gone and threading.current_thread() is main:
            signal.raise_signal(signal.SIGINT)

    def fails(commit: Any, self: Store, transaction: bytes) -> Any:
        if self.name == "primary" and gone:
            if not is_asked:
                struck()
            raise StoreFailedError("the network is gone")
        return commit(self, transaction)

    def asked(*given: Any) -> bool:
        struck()
        if gone:
            raise StoreFailedError("the network is gone")
        return ask(*given)

    replace(monkeypatch, "commit_prepared", fails)
    monkeypatch.setattr(resolver, "outcome_in", asked)
    with pytest.raises(KeyboardInterrupt):
        move(router)
    gone.clear()
    wait_settled(router)
    eventually(lambda: ready(router, "q") == [b"1"])
    assert not has_moved(router)


def test_a_store_that_is_looked_at_amid_a_prepare_does_not_lose_it(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    router = shared.router("first")
    router.queue("q").send(b"1")
    tx = router.transaction(anabranch.Xid(1, "x"))
    tx.send("p", b"3")
    once = [1]

    def looked(recover: Any, self: Store) -> Any:
        found = recover(self)
        if self.name == "primary" and once:
            once.clear()
            with Parallel(tx.prepare) as preparing:
                preparing.result()
        return found

    replace(monkeypatch, "recover_prepared", looked)
    router._coordinator.resolver.recover_open()
    assert router.recover() == [anabranch.Xid(1, "x")]
    router.commit(anabranch.Xid(1, "x"))
    assert bodies(router, "p") == [b"3"]


def test_a_vote_outlives_the_opening_of_its_stores(shared: Shared) -> None:
    router = shared.router("first")
    filled(router)
    tx = router.transaction()
    for name in ("p", "a.p", "b.p"):
        tx.send(name, b"3")
    tx.vote()
    router.reopen("primary")
    tx.commit()
    assert [bodies(router, name) for name in ("p", "a.p", "b.p")] == [[b"3"]] * 3


def test_two_leased_stores_and_an_xid_over_several_are_refused(shared: Shared, tmp_path: Path) -> None:
    leased = {"lease_expiration": 60.0}
    stores = [
        anabranch.StoreConfig("a", ["a.>"], kind="journal"),
        anabranch.StoreConfig("other", ["other.>"], kind="sql", options=leased),
        anabranch.StoreConfig("primary", [">"], kind="sql", options={"url": shared.url, **leased}),
    ]
    with anabranch.open(anabranch.Config(tmp_path / "two", stores)) as router:
        for names, xid, why in (
            (("q", "other.q"), None, "'primary', 'other' may be taken over by other processes, cannot be made atomic"),
            (("q", "a.q"), anabranch.Xid(1, "x"), "cannot be prepared under an xid"),
        ):
            tx = router.transaction(xid)
            for name in names:
                tx.send(name, b"1")
            with pytest.raises(TransactionError, match=why):
                tx.prepare() if xid else tx.commit()
            assert tx.state == "rolled back" and router.recover() == []
            assert all(bodies(router, name) == [] for name in names)


def _child(shared: Shared, steps: Steps, done: Path) -> None:
    with anabranch.open(shared.config("first")) as router:
        filled(router)
        steps.wrap_all()
        move(router)
        done.write_text("\n".join(steps.log) or "nothing")
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.weight(3)
@pytest.mark.parametrize("kind", ["killed", pytest.param("killed-after", marks=pytest.mark.campaign)])
@pytest.mark.parametrize("is_taken", [True, pytest.param(False, marks=pytest.mark.campaign)])
def test_a_node_may_die_at_each_step(tmp_path: Path, shared: Shared, kind: str, is_taken: bool) -> None:
    """All of its stores have it or none, whichever node has the primary next, and what was acknowledged is there. The
    other node settles what it finds; the first one asks, without the primary if the other has that by then."""
    done, at, counts = tmp_path / "done", 0, {True: 0, False: 0}
    while True:
        at += 1
        if done.exists():
            break
        for name in ("first", "second"):
            shutil.rmtree(shared.directory / name, ignore_errors=True)
        _empty(shared)
        reaped(forked(lambda: _child(shared, Steps(kind, at), done)))  # noqa: B023
        shared.expire()
        with ExitStack() as stack:
            second = stack.enter_context(anabranch.open(shared.config("second"))) if is_taken else None
            found = None
            if second is not None:
                wait_settled(second)
                found = has_moved(second, ("q", "p"))
            first = stack.enter_context(anabranch.open(shared.config("first")))
            for name in ("a.q", "b.p"):
                first.queue(name).depth()  # which opens the stores
            wait_settled(first)
            moved = has_moved(first, ("a.q", "a.p", "b.p"))
            if second is not None:
                assert moved == found
                second.close()
            assert has_moved(first) == moved
            counts[moved] += 1
            if done.exists():
                assert moved
    assert at > 12 and all(counts.values()), (at, counts)


def _empty(shared: Shared) -> None:
    """Let there be no tables."""
    engine = create_engine(shared.url)
    with engine.begin() as connection:
        tables = MetaData()
        tables.reflect(connection)
        tables.drop_all(connection)
    engine.dispose()
