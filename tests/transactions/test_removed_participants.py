"""A store that is removed soon after a transaction over it: no crash leaves a decision that names what is gone."""

from __future__ import annotations

from pathlib import Path

import pytest

import anabranch
from anabranch.router.transactions import decision_cleanup

from ..router.disk import crashed


def config(directory: Path) -> anabranch.Config:
    journal = anabranch.JournalOptions(segment_size=64 * 1024)
    return anabranch.Config(
        directory,
        [
            anabranch.StoreConfig("each", ["each.>"], per_destination=True, journal=journal),
            anabranch.StoreConfig("rest", [">"], journal=journal),
        ],
    )


@pytest.mark.parametrize("busy", [False, True], ids=["forgotten", "kept"])
def test_a_queue_with_a_store_of_its_own_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, busy: bool
) -> None:
    """Its decision is forgotten first, durably; where it cannot be just now, the store stays."""
    monkeypatch.setattr(decision_cleanup, "FORGET_SECONDS", 3600.0)
    if busy:
        monkeypatch.setattr(decision_cleanup, "SYNC_SECONDS", 0.01)
    with anabranch.open(config(tmp_path / "data")) as router:
        with router.transaction() as tx:
            tx.send("each.a", b"1")
            tx.send("b", b"2")
        message = router.queue("each.a").receive()
        assert message is not None
        message.ack()
        log = router._coordinator.log
        assert len(log.decisions) == 1
        cleanup = router._coordinator.cleanup
        if busy:
            cleanup.busy.acquire()
        router.queue("each.a").delete()
        if busy:
            cleanup.busy.release()
        assert len(log.decisions) == busy
        assert log._log is not None
        assert busy or log._log.durable_lsn == log._log.tail.lsn
        assert any((tmp_path / "data" / "stores" / "each").iterdir()) == busy
        crashed(router, tmp_path / "copy")
    for directory in ("copy", "data"):
        with anabranch.open(config(tmp_path / directory)) as router:
            assert [message.body for message in router.queue("b").browse()] == [b"2"]
            assert not router.queue("each.a").depth()
            assert router.in_doubt() == []
