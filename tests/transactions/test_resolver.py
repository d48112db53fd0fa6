"""The resolver: the same end, wherever a transaction was left and however often it is asked."""

from __future__ import annotations

from pathlib import Path

import pytest

import anabranch
from anabranch.adapters.core.messages import Outgoing
from anabranch.router.transactions.global_transaction import GlobalTransaction
from anabranch.router.transactions.states import DECIDED, DONE, IN_DOUBT, PREPARED

from ..router.disk import Faults, bodies, config, keep_background_out

XID = anabranch.Xid(1, "global", "branch")


def prepared(router: anabranch.Router) -> GlobalTransaction:
    tx = router.transaction(XID)
    tx.send("a.out,b.out", b"1")
    tx.prepare()
    (known,) = router._coordinator.table.all()
    return known


def test_what_is_held_waits_for_its_manager(tmp_path: Path) -> None:
    with anabranch.open(config(tmp_path)) as router:
        known = prepared(router)
        for _ in range(2):
            assert "its transaction manager has not said the outcome" in router._coordinator.resolver.resolve(known)
        assert (known.state, bodies(router, "a.out", "b.out")) == (PREPARED, [[], []])
        router.commit(XID)


@pytest.mark.parametrize("commit", [True, False])
def test_what_is_decided_is_carried_out_once(tmp_path: Path, commit: bool) -> None:
    with anabranch.open(config(tmp_path)) as router:
        known = prepared(router)
        (router.commit if commit else router.rollback)(XID)
        for _ in range(3):
            assert router._coordinator.resolver.resolve(known) == ""
        assert known.state is DONE
        expected = [b"1"] if commit else []
        assert bodies(router, "a.out", "b.out") == [expected, expected]


def test_a_store_that_cannot_be_told_is_told_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faults = Faults(monkeypatch)
    with anabranch.open(config(tmp_path)) as router:
        resolver = router._coordinator.resolver
        known = prepared(router)
        keep_background_out(router, monkeypatch)
        faults.fail("pwrite", "/stores/b/")
        router.commit(XID)
        (b,) = (store.store_id for store in router._registry.open_stores() if store.name == "b")
        assert (known.state, known.waiting) == (DECIDED, [b])
        assert bodies(router, "a.out") == [[b"1"]]
        faults.mend()
        router.reopen("b")
        resolver.resolve(known)
        assert (known.state, known.waiting) == (DONE, [])
        assert bodies(router, "a.out", "b.out") == [[b"1"], [b"1"]]


@pytest.mark.parametrize(
    ("transaction", "why"),
    [
        (b"another router's" + bytes(16), "was prepared under another decision log"),
        (None, "the decision log does not know of its time"),
    ],
    ids=["another log", "another time"],
)
def test_what_nobody_can_say_is_said(tmp_path: Path, transaction: bytes | None, why: str) -> None:
    """It stays prepared, and neither committed nor rolled back (rule T3)."""
    with anabranch.open(config(tmp_path)) as router:
        router.send("a.x,b.x", b"0")
        resolver, name = router._coordinator.resolver, transaction or router._coordinator.log.id + b"\xff" * 16
        (store,) = (store for store in router._registry.open_stores() if store.name == "a")
        destination = anabranch.Destination.parse("a.out")
        store.prepare(name, [store.store_id], [(destination, Outgoing(b"1"))], [], False).wait()
        resolver.recover(store)
        (known,) = (one for one in router._coordinator.table.all() if one.id == name)
        assert known.state is IN_DOUBT
        assert why in resolver.resolve(known)
        assert [branch.transaction for branch in store.recover_prepared()] == [name]
        (told,) = router.in_doubt()
        assert why in str(told)
        store.rollback_prepared(name).wait()
