"""What is done with a message before its receiver sees it (adapters/core/engine/handing_out.py)."""

from __future__ import annotations

import pytest

from ..contract.disk import A, take
from ..contract.leasing import LONG, Lasting, timed
from .made import onefile


def test_nothing_where_nothing_is_asked_for() -> None:
    with onefile() as disk:
        assert not disk.create()._receiving.hand_out.needed
        assert disk.create(lease_timeout=LONG)._receiving.hand_out.needed


def test_a_time_of_its_own_comes_before_that_of_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    lasting = Lasting(monkeypatch)
    with onefile() as disk:
        store = disk.create(lease_timeout=LONG)
        store.send_many(A, [b"1", b"2"])
        messages = [timed(store, 3 * LONG), take(store)]
        lasting.go_on(store)
        assert take(store).body == b"2"
        messages[0].ack()
