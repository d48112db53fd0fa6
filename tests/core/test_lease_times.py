"""How long a lease lasts (adapters/core/engine/lease_times.py)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from anabranch.adapters.core import Store
from anabranch.adapters.core.engine import lease_times
from anabranch.adapters.core.messages import Message
from anabranch.policies.errors import ClosedError, StoreFailedError, UnknownMessageError

from ..contract.disk import A, take
from ..contract.leasing import LONG, Lasting, timed
from ..crash.interrupts import everywhere
from . import test_interrupts
from .made import onefile
from .test_interrupts import emptied

a_store = test_interrupts.store


def entries(store: Store) -> int:
    return len(store._lease_times._heap)


def test_what_has_ended_is_forgotten_in_time(store: Store) -> None:
    """Leases that end before their time cost an entry each; not for ever."""
    store.send(A, b"kept")
    kept = timed(store, LONG)
    for _ in range(5):
        store.send_many(A, [b"x"] * 1000)
        for _ in range(1000):
            timed(store, LONG).ack()
        store._lease_times.run()
        assert entries(store) <= 1 + 2 * lease_times.FORGET_AT
    store._lease_times.run()
    kept.ack()


def test_to_extend_it_takes_no_more_entries(store: Store) -> None:
    store.send(A, b"1")
    message = timed(store, LONG)
    for _ in range(1000):
        message.extend(2 * LONG)
    assert entries(store) == 1
    for _ in range(10):  # earlier, and later again
        message.extend(LONG / 2)
        message.extend(LONG)
    assert entries(store) <= 11


def test_extended_again_and_again_it_comes_back_once(monkeypatch: pytest.MonkeyPatch) -> None:
    lasting = Lasting(monkeypatch)
    with onefile() as disk:
        store = disk.create()
        store.send(A, b"1")
        message = timed(store, LONG)
        for seconds in (LONG / 4, 5 * LONG, LONG / 2, 7 * LONG, LONG):
            message.extend(seconds)
            lasting.go_on(store, LONG / 5)
            assert store.receive(A) is None
        lasting.go_on(store)
        assert take(store).deliveries == 2
        lasting.go_on(store, 10 * LONG)
        assert (store.receive(A), entries(store)) == (None, 0)


def test_what_cannot_be_counted_now_comes_back_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store's database is away; who holds it is too late all the same."""
    lasting = Lasting(monkeypatch)
    with onefile() as disk:
        store = disk.create()
        store.send(A, b"1")
        message = timed(store, LONG)

        def away(leases: object) -> None:
            raise StoreFailedError("away")

        with monkeypatch.context() as patches:
            patches.setattr(store._lease_times, "_give_back", away)
            lasting.go_on(store)
        assert store.receive(A) is None
        with pytest.raises(UnknownMessageError, match="ran out"):
            message.ack()
        lasting.go_on(store, 1)
        assert take(store).deliveries == 2


def test_one_that_is_just_being_acked_is_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ack was in time, and does not come about."""
    lasting = Lasting(monkeypatch)
    with onefile() as disk:
        store = disk.create()
        store.send(A, b"1")
        message = timed(store, LONG)

        def hangs(plan: object) -> None:
            lasting.go_on(store)
            raise StoreFailedError("away")

        with monkeypatch.context() as patches:
            patches.setattr(store.backend, "write", hangs)
            with pytest.raises(StoreFailedError):
                message.ack()
        lasting.go_on(store, 1)
        assert take(store).deliveries == 2


def test_a_closed_store_has_none(store: Store) -> None:
    store.send(A, b"1")
    message = timed(store, LONG)
    times = store._lease_times
    store.close()
    times.run()
    assert len(times._heap) == 0
    with pytest.raises(ClosedError):
        message.extend()


@pytest.mark.parametrize("how", ["receive", "extend", "shorten"])
def test_ctrl_c_leaves_none_that_does_not_end(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Nobody holds it, or its time runs out."""
    store: Store = request.getfixturevalue("a_store")
    lasting = Lasting(monkeypatch)
    held: list[Message | None] = []

    def prepare(at: int) -> Callable[[], object]:
        held.clear()
        store.send(A, b"1")
        if how == "receive":
            return lambda: held.append(store.receive(A, 0, None, LONG))
        message = timed(store, LONG)
        held.append(message)
        return lambda: message.extend(2 * LONG if how == "extend" else LONG / 2)

    def check(at: int, where: str) -> None:
        if not where.startswith("Store.receive:"):  # there it is on its way into the caller's hands
            assert store.stats().leased == len(held), where
        lasting.go_on(store, 4 * LONG)
        assert emptied(store, where) == [b"1"], where

    assert everywhere(prepare, check) >= 30
