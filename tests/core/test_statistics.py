"""What a store says of itself."""

from __future__ import annotations

import pytest

from anabranch.adapters.core.messages import Outgoing
from anabranch.adapters.core.store_types import Counts, Subscription
from anabranch.policies.errors import StoreFailedError

from ..contract.disk import A, B, T, take
from .made import onefile

DESK, BOOK = Subscription(T, "desk"), Subscription(T, "book")


def test_both_kinds_of_messages_are_counted() -> None:
    with onefile() as disk:
        store = disk.create()
        store.subscribe(DESK)
        store.subscribe(BOOK)
        for destination in (A, T):
            store.send_many(destination, [b"1", Outgoing(b"2", persistent=False)])
        take(store)
        assert (store.depth(A), store.counts(A)) == (2, Counts(1, 1))
        assert (store.depth(T), store.depth(T, DESK.key), store.counts(T, BOOK.key)) == (2, 2, Counts(2, 0))
        assert (store.depth(B), store.counts(B)) == (0, Counts(0, 0))
        stats = store.stats()
        assert (stats.messages, stats.destinations, stats.subscriptions) == (4, {A: 2, T: 2}, {DESK: 2, BOOK: 2})
        assert (stats.leased, stats.sends, stats.kind, stats.failed) == (1, 4, "onefile", None)


def test_a_store_that_has_failed_says_so() -> None:
    """And its last figures; counts are refused."""
    with onefile() as disk:
        store = disk.create()
        store.send(A, b"1")
        store._engine.fail(StoreFailedError("the disk is gone"))
        stats = store.stats()
        assert stats.messages == 1
        assert stats.failed is not None and "the disk is gone" in stats.failed
        with pytest.raises(StoreFailedError, match="the disk is gone"):
            store.depth(A)
