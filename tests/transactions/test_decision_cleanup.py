"""Decisions are forgotten once they are durable in all their stores, and not before (rule T5)."""

from __future__ import annotations

from pathlib import Path

import pytest

import anabranch

from ..router.disk import OPTIONS, Faults, bodies, config, keep_background_out


def test_what_is_carried_out_is_synced_then_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with anabranch.open(config(tmp_path)) as router:
        coordinator = router._coordinator
        keep_background_out(router, monkeypatch)
        for _ in range(3):
            router.send("a.x,b.x", b"1")
        assert len(coordinator.log.decisions) == 3
        stores = [store for store in router._registry.open_stores() if store.name in "ab"]
        assert [len(list(store.committed())) for store in stores] == [3, 3]
        before = [store.stats().syncs for store in stores]
        coordinator.cleanup.run()
        assert all(store.stats().syncs > syncs for store, syncs in zip(stores, before, strict=True))
        assert (len(coordinator.log.decisions), coordinator.table.all()) == (0, [])
        assert [list(store.committed()) for store in stores] == [[], []]


def test_a_store_that_cannot_be_synced_keeps_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of others go."""
    faults = Faults(monkeypatch)
    with anabranch.open(config(tmp_path, OPTIONS)) as router:
        coordinator = router._coordinator
        keep_background_out(router, monkeypatch)
        router.send("a.x,b.x", b"1")
        router.send("a.x,c.x", b"2")
        kept, _ = coordinator.table.all()
        faults.fail("fdatasync", "/stores/b/")
        coordinator.cleanup.run()
        assert coordinator.table.all() == [kept]
        assert list(coordinator.log.decisions) == [kept.id]
        faults.mend()
        router.reopen("b")
        coordinator.resolver.resolve_all()
        coordinator.cleanup.run()
        assert (coordinator.table.all(), list(coordinator.log.decisions)) == ([], [])
        assert bodies(router, "a.x", "b.x", "c.x") == [[b"1", b"2"], [b"1"], [b"2"]]


def test_what_was_decided_by_hand_stays(tmp_path: Path) -> None:
    xid = anabranch.Xid(1, "global", "branch")
    with anabranch.open(config(tmp_path)) as router:
        coordinator = router._coordinator
        tx = router.transaction(xid)
        tx.send("a.x,b.x", b"1")
        tx.prepare()
        (waiting,) = router.in_doubt()
        router.resolve(waiting.transaction, "commit")
        coordinator.cleanup.run()
        (known,) = coordinator.table.all()
        assert (known.by_hand, known.outcome) == (True, "commit")
        assert known.id in coordinator.log.decisions


def test_what_is_done_keeps_no_message_until_it_is_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand large transactions may wait to be forgotten together."""
    with anabranch.open(config(tmp_path)) as router:
        coordinator = router._coordinator
        keep_background_out(router, monkeypatch)
        router.queue("a.x").send(b"1")
        message = router.queue("a.x").receive()
        assert message is not None
        with router.transaction() as tx:
            tx.ack(message)
            tx.send("b.x", b"2")
        assert [(receipt.destination.name, receipt.seq > 0) for receipt in tx.receipts] == [("b.x", True)]
        (done,) = coordinator.table.all()
        assert [(p.sends, p.acks) for p in done.participants.values()] == [([], []), ([], [])]
        assert bodies(router, "a.x", "b.x") == [[], [b"2"]]
