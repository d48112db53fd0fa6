"""The contract of a store that is volatile: nothing of it survives its process, nor that it is closed."""

from __future__ import annotations

import pytest

from anabranch.adapters.core import Store
from anabranch.adapters.core.messages import Outgoing
from anabranch.adapters.core.store_types import Subscription
from anabranch.policies.errors import UnknownMessageError, UnknownSubscriptionError

from .disk import A, B, Disk, T, assert_whole, bodies, drain, take
from .preparing import claim, prepare, transaction

DESK = Subscription(T, "desk", "c1")


class VolatileContract:
    def test_it_says_so(self, store: Store) -> None:
        assert store.volatile
        assert not store.shared

    @pytest.mark.parametrize("end", ["closed", "crashed"])
    def test_nothing_survives(self, disk: Disk, store: Store, end: str) -> None:
        """Neither messages, destinations, leases, message ids, subscriptions nor branches."""
        store.send_many(A, [Outgoing(b"1", {"h": 1}, "id"), b"2" * 100_000, b"3", b"4"])
        store.subscribe(DESK)
        store.send(T, b"t")
        leased = take(store)
        prepare(store, 1, [(B, Outgoing(b"b"))], [claim(store)])
        store.commit_prepared(prepare(store, 2, [(B, Outgoing(b"b"))])).wait()
        store.sync()
        again = disk.crash(store) if end == "crashed" else disk.reopen(store)
        stats = again.stats()
        assert (stats.messages, stats.destinations, stats.leased, stats.subscriptions) == (0, {}, 0, {})
        assert (list(again.destinations()), list(again.subscriptions())) == ([], [])
        assert (bodies(again), bodies(again, B), again.receive(A)) == ([], [], None)
        assert (list(again.recover_prepared()), list(again.committed())) == ([], [])
        assert again.commit_prepared(transaction(1)).wait() == []
        assert again.rollback_prepared(transaction(1)).wait() is False
        with pytest.raises(UnknownMessageError):
            again.ack([leased])
        with pytest.raises(UnknownSubscriptionError):
            again.receive(T, subscription=DESK.key)
        assert not again.send(A, b"new", None, "id").duplicate
        assert drain(again) == [b"new"]
        assert_whole(again)

    def test_limits_begin_anew(self, disk: Disk) -> None:
        store = disk.create(max_messages=1, max_leases=1)
        store.send(A, b"x")
        take(store)
        store = disk.reopen(store)
        store.send(A, b"y")
        assert take(store).body == b"y"

    def test_it_waits_for_no_disk(self, store: Store) -> None:
        """Whatever is asked of it."""
        store.send(A, b"x", sync=True)
        store.send_many(A, [b"x"] * 10, sync=True)
        store.commit([(A, Outgoing(b"x"))], [claim(store)], sync=True)
        prepare(store, 1, [(A, Outgoing(b"x"))])
        store.sync()
        assert store.stats().syncs == 0
