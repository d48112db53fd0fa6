"""Transactions that are prepared under an xid in a store which other processes may take over: the store keeps the xid,
and whoever opens it next lists them and gives the outcome (rules T4, T6)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import anabranch
from anabranch import Xid
from anabranch.adapters.core.store import Store
from anabranch.policies.errors import StoreFailedError, StoreLockedError, TransactionError
from anabranch.router.transactions.resolver import Resolver

from .leased import Shared, bodies, databases, ready

XID = Xid(1, "order", "7")
shared = pytest.fixture(databases, params=["sqlite", "postgresql"])


def prepared(router: anabranch.Router, xid: Xid = XID) -> None:
    """Prepare a transaction that acks the first message of `q` and sends two."""
    tx = router.transaction(xid)
    message = router.queue("q").receive()
    assert message is not None
    tx.ack(message)
    tx.send("q", b"2")
    tx.send("p", b"3")
    tx.prepare()


def begun(shared: Shared, name: str = "first") -> anabranch.Router:
    router = shared.router(name)
    router.queue("q").send(b"1")
    prepared(router)
    return router


@pytest.mark.parametrize("end", ["closed", "killed", "here", "opened again"])
@pytest.mark.parametrize("commit", [True, False])
def test_whoever_has_the_store_next_gives_the_outcome(shared: Shared, end: str, commit: bool) -> None:
    router = begun(shared)
    if end == "killed":
        shared.killed(router)
    elif end != "here":
        router.close()
    if end != "here":
        router = shared.router("first" if end == "opened again" else "second")
    assert router.recover() == [XID]
    assert ready(router) == [] and bodies(router, "p") == []
    (router.commit if commit else router.rollback)(XID)
    assert router.recover() == []
    assert ready(router) == ([b"2"] if commit else [b"1"])
    assert bodies(router, "p") == ([b"3"] if commit else [])
    router.close()
    last = shared.router("third")
    assert last.recover() == [] and last.in_doubt() == []
    assert ready(last) == ([b"2"] if commit else [b"1"])
    with pytest.raises(TransactionError, match="no transaction 1:order:7 is prepared here"):
        last.commit(XID)


def test_the_outcome_may_be_said_before_anything_else(shared: Shared) -> None:
    """No store is open yet."""
    begun(shared).close()
    router = shared.router("second")
    router.commit(XID)
    assert bodies(router) == [b"2"]


def test_the_xid_of_one_that_is_prepared_there_is_in_use(shared: Shared) -> None:
    begun(shared).close()
    router = shared.router("second")
    tx = router.transaction(XID)  # the store is not open yet
    tx.send("q", b"9")
    with pytest.raises(TransactionError, match="xid 1:order:7 is in use"):
        tx.prepare()
    assert tx.state == "rolled back"
    with pytest.raises(TransactionError, match="xid 1:order:7 is in use"):
        router.transaction(XID)
    assert router.recover() == [XID]
    router.rollback(XID)
    assert ready(router) == [b"1"]


def test_who_has_lost_the_store_cannot_tell_and_forgets_what_its_next_owner_has_ended(shared: Shared) -> None:
    first = begun(shared)
    first._registry._stores.close_at(first._registry.rows_by_name()["primary"].path)
    second = shared.router("second")
    assert second.recover() == [XID]
    for call in (first.recover, lambda: first.commit(Xid(1, "other"))):
        with pytest.raises(StoreLockedError, match="store 'primary' belongs to process"):
            call()
    with pytest.raises(StoreFailedError, match=r"cannot carry out the commit now; say it again"):
        first.commit(XID)
    second.rollback(XID)
    second.close()
    assert first.recover() == []
    assert ready(first) == [b"1"]


@pytest.fixture
def pair(postgres_url: str, tmp_path: Path) -> Iterator[tuple[anabranch.Router, anabranch.Router]]:
    """Two that have the store at the same time; the first has prepared the transaction, over a memory store too."""
    many = Shared(tmp_path, postgres_url, many=True)
    with many.stack:
        first, second = many.router("first"), many.router("second")
        first.queue("q").send(b"1")
        first.queue("memory.q").send(b"5")
        tx = first.transaction(XID)
        for name in ("q", "memory.q"):
            message = first.queue(name).receive()
            assert message is not None
            tx.ack(message)
        tx.send("q", b"2")
        tx.prepare()
        yield first, second


@pytest.mark.parametrize("commit", [True, False])
@pytest.mark.parametrize("by", ["manager", "operator"])
def test_the_other_outcome_is_refused_where_another_router_has_said_one(
    pair: tuple[anabranch.Router, anabranch.Router], by: str, commit: bool
) -> None:
    first, second = pair
    (one,) = second.in_doubt()
    if by == "operator":
        second.resolve(one.transaction, "commit" if commit else "rollback")
    else:
        (second.commit if commit else second.rollback)(XID)
    with pytest.raises(TransactionError, match="no transaction 1:order:7 is prepared here"):
        (first.rollback if commit else first.commit)(XID)
    assert first.recover() == [] and first.in_doubt() == []
    assert ready(first) == ([b"2"] if commit else [b"1"])
    assert ready(first, "memory.q") == [b"5"], "nobody has told it the outcome"


@pytest.mark.parametrize("look", ["recover", "in_doubt"])
def test_what_another_router_has_ended_is_listed_no_more(
    pair: tuple[anabranch.Router, anabranch.Router], look: str
) -> None:
    first, second = pair
    assert second.recover() == [XID]
    first.commit(XID)
    assert getattr(second, look)() == []


@pytest.mark.parametrize("commit", [True, False])
def test_an_outcome_that_is_said_in_two_routers_at_once(
    pair: tuple[anabranch.Router, anabranch.Router], monkeypatch: pytest.MonkeyPatch, commit: bool
) -> None:
    """The other one comes between the look and the word."""
    first, second = pair
    look_into = Resolver.look_into

    def looked(self: Resolver, store: Any) -> Any:
        found = look_into(self, store)
        monkeypatch.setattr(Resolver, "look_into", look_into)
        (second.rollback if commit else second.commit)(XID)
        return found

    monkeypatch.setattr(Resolver, "look_into", looked)
    with pytest.raises(TransactionError, match="1:order:7 is prepared no more in store 'primary'"):
        (first.commit if commit else first.rollback)(XID)
    assert ready(first) == ([b"1"] if commit else [b"2"])


def test_it_is_in_doubt_and_may_be_ended_by_hand(shared: Shared) -> None:
    begun(shared).close()
    router = shared.router("second")
    (one,) = router.in_doubt()
    assert (one.xid, one.outcome, one.stores, one.sends, one.acks) == (XID, None, ("primary",), 2, 1)
    assert "its transaction manager has not said the outcome" in one.reason
    router.resolve(one.transaction, "commit")
    assert router.in_doubt() == [] and router.recover() == [] and bodies(router) == [b"2"]


def test_a_memory_store_may_take_part(shared: Shared) -> None:
    router = shared.router("first")
    tx = router.transaction(XID)
    tx.send("q", b"1")
    tx.send("memory.q", b"2")
    tx.prepare()
    assert router.recover() == [XID]
    router.commit(XID)
    assert bodies(router) == [b"1"] and bodies(router, "memory.q") == [b"2"]


def test_xids_of_other_stores_are_listed_beside(shared: Shared) -> None:
    router = shared.router("first")
    for number, name in enumerate(("a.q", "q", "a.q", "q")):
        tx = router.transaction(Xid(number, "x"))
        tx.send(name, b"%d" % number)
        tx.prepare()
    assert sorted(router.recover()) == [Xid(number, "x") for number in range(4)]
    for number in range(4):
        router.commit(Xid(number, "x"))
    assert bodies(router) == [b"1", b"3"] and bodies(router, "a.q") == [b"0", b"2"]


@pytest.mark.parametrize("step", ["prepare", "commit_prepared", "rollback_prepared"])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_node_may_die_at_each_step(shared: Shared, monkeypatch: pytest.MonkeyPatch, step: str, moment: str) -> None:
    """The next one finds the transaction prepared, or its outcome."""
    router = shared.router("first")
    router.queue("q").send(b"1")
    original = getattr(Store, step)

    def dies(self: Any, *given: Any) -> Any:
        if moment == "after":
            original(self, *given).wait()
        raise StoreFailedError("the process was killed")

    commit = step != "rollback_prepared"
    if step == "prepare":
        monkeypatch.setattr(Store, step, dies)
        monkeypatch.setattr(Store, "rollback_prepared", dies if moment == "before" else _dead)
        with pytest.raises(StoreFailedError):
            prepared(router)
    else:
        prepared(router)
        monkeypatch.setattr(Store, step, dies)
        with pytest.raises(StoreFailedError, match="say it again"):
            (router.commit if commit else router.rollback)(XID)
    shared.killed(router)
    monkeypatch.undo()
    second = shared.router("second")
    is_there = moment == ("after" if step == "prepare" else "before")
    assert second.recover() == ([XID] if is_there else [])
    if is_there:
        assert ready(second) == []
        (second.commit if commit else second.rollback)(XID)
    is_committed = commit and (is_there or step == "commit_prepared")
    assert ready(second) == ([b"2"] if is_committed else [b"1"])
    assert bodies(second, "p") == ([b"3"] if is_committed else [])


def _dead(*_: Any) -> Any:
    raise StoreFailedError("the process was killed")
