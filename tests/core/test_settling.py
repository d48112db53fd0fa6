"""An ack that the disk refuses. How else messages leave those who hold them, the contract asks."""

from __future__ import annotations

import pytest

from anabranch.policies.errors import StoreFullError

from ..contract.disk import A, drain, take
from .made import onefile


def test_an_ack_that_cannot_be_written_leaves_them_leased(monkeypatch: pytest.MonkeyPatch) -> None:
    with onefile() as disk:
        store = disk.create()
        store.send(A, b"1")
        message = take(store)

        def full(plan: object) -> None:
            raise StoreFullError("the disk is full")

        with monkeypatch.context() as patches:
            patches.setattr(store.backend, "write", full)
            with pytest.raises(StoreFullError):
                message.ack()
        assert store.receive(A) is None
        message.ack()
        assert drain(store) == []
