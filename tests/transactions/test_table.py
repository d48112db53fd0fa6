"""The table of a router's transactions: which are known, from their begin until nothing is left to be done."""

from __future__ import annotations

from pathlib import Path

import pytest

import anabranch
from anabranch.policies.errors import TransactionError
from anabranch.router.transactions.states import DONE, PREPARED

from ..router.disk import config, keep_background_out, take

XID, OTHER = anabranch.Xid(1, "global", "one"), anabranch.Xid(1, "global", "two")


def prepared(router: anabranch.Router, xid: anabranch.Xid) -> anabranch.Transaction:
    tx = router.transaction(xid)
    tx.send("a.out,b.out", b"x")
    tx.prepare()
    return tx


def test_those_that_are_open_are_limited_in_number(tmp_path: Path) -> None:
    with anabranch.open(config(tmp_path, max_open=3)) as router:
        table = router._coordinator.table
        first, second = router.transaction(), router.transaction()
        prepared(router, XID)
        with pytest.raises(
            TransactionError, match=r"2 transactions are open and 1 prepared; transactions\.max_open is 3"
        ):
            router.transaction()
        assert len(table.begun) == 2
        first.commit()
        second.rollback()
        assert (len(table.begun), len(table.all())) == (0, 1)
        router.commit(XID)


def test_one_whose_time_is_over_is_rolled_back(tmp_path: Path) -> None:
    with anabranch.open(config(tmp_path, timeout=3600)) as router:
        router.queue("a.in").send(b"1")
        tx = router.transaction()
        tx.ack(take(router, "a.in"))
        table = router._coordinator.table
        table.expire()
        assert tx.state == "open"
        (known,) = table.begun
        known.begun -= 3600
        table.expire()
        assert (tx.state, table.begun) == ("timed out", {})
        with pytest.raises(TransactionError, match="timed out"):
            tx.commit()
        assert take(router, "a.in").body == b"1"


def test_an_xid_is_in_use_until_it_has_ended(tmp_path: Path) -> None:
    with anabranch.open(config(tmp_path)) as router:
        table = router._coordinator.table
        opened = router.transaction(XID)
        assert table.user_of(XID) == opened
        with pytest.raises(TransactionError, match="is in use"):
            router.transaction(XID)
        opened.rollback()
        prepared(router, XID)
        assert table.user_of(XID) is None
        known = table.by_xid(XID)
        assert known is not None
        assert (known.state, known.held) == (PREPARED, True)
        with pytest.raises(TransactionError, match="is in use"):
            router.transaction(XID)
        assert table.by_xid(OTHER) is None
        router.rollback(XID)
        router._coordinator.cleanup.run()
        assert table.by_xid(XID) is None
        prepared(router, XID)
        router.commit(XID)


def test_what_is_done_is_known_until_its_decision_is_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with anabranch.open(config(tmp_path)) as router:
        table = router._coordinator.table
        keep_background_out(router, monkeypatch)
        router.send("a.x,b.x", b"1")
        (known,) = table.all()
        assert (known.state, known.outcome, table.has(known), table.running()) == (DONE, "commit", True, [])
        router._coordinator.cleanup.run()
        assert (table.all(), table.has(known)) == ([], False)


def test_it_is_read_from_the_decision_log(tmp_path: Path) -> None:
    """What the stores alone know of is in doubt; what the log knows of waits for its manager."""
    with anabranch.open(config(tmp_path)) as router:
        prepared(router, XID)
        (before,) = router._coordinator.table.all()
    with anabranch.open(config(tmp_path)) as router:
        (after,) = router._coordinator.table.all()
        assert after is not before
        assert (after.id, after.xid, after.state, after.held) == (before.id, XID, PREPARED, True)
        assert after.participants.keys() == before.participants.keys()
        router.rollback(XID)
