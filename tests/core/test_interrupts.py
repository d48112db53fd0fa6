"""Ctrl-C at every bytecode of a store's calls, in the core: nothing lost, nothing doubled, no lease left behind."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from anabranch.adapters.core import Store
from anabranch.adapters.core.messages import Message, Outgoing
from anabranch.adapters.core.store_types import Settlement, Subscription
from anabranch.policies.errors import UnknownMessageError

from ..contract.disk import A, B, T, assert_whole, bodies, drain
from ..crash.interrupts import everywhere
from ..model import FAST
from ..thirdparty.disk import OneFileDisk

DESK = Subscription(T, "desk")


@pytest.fixture
def store() -> Iterator[Store]:
    with (
        tempfile.TemporaryDirectory(prefix="anabranch-core-", dir=FAST) as path,
        OneFileDisk(Path(path)) as disk,
    ):
        yield disk.create()


def emptied(store: Store, where: str = "") -> list[bytes]:
    """All of the queue, and then nothing is leased."""
    found = drain(store)
    assert store.stats().leased == 0, where
    assert_whole(store)
    return found


def test_receive_leaves_no_lease(store: Store) -> None:
    """But once its message is in the caller's hands."""
    taken: list[Message | None] = []

    def prepare(at: int) -> Callable[[], object]:
        taken.clear()
        store.send_many(A, [b"1", b"2"])
        return lambda: taken.append(store.receive(A))

    def check(at: int, where: str) -> None:
        store._writer.flush()  # what was queued is written
        if where and not where.startswith("Store.receive:"):  # there it is on its way into the caller's hands
            assert store.stats().leased == 0, where
        for lease in [lease for channel in store._engine.catalog.channels() for lease in channel.held.values()]:
            store.settle([store._settling.token(lease)], Settlement.RELEASE)
        assert emptied(store, where) == [b"1", b"2"], where

    assert everywhere(prepare, check) > 30


def test_a_receive_that_waits_leaves_nobody_in_line(store: Store) -> None:
    def prepare(at: int) -> Callable[[], object]:
        return lambda: store.receive(A, timeout=0.0001)

    def check(at: int, where: str) -> None:
        store._writer.flush()  # what was queued is written
        assert store.stats().waiting == 0, where
        store.send(A, b"1")
        assert emptied(store, where) == [b"1"], where

    assert everywhere(prepare, check) > 30


@pytest.mark.parametrize("how", ["ack", "release", "token", "give_back"])
def test_settling(store: Store, how: str) -> None:
    """Interrupted, a message is acked, or free, or as before; then the same can be done again."""
    messages: list[Message] = []

    def prepare(at: int) -> Callable[[], object]:
        store.send_many(A, [b"1", b"2"])
        messages[:] = [m for m in (store.receive(A), store.receive(A)) if m is not None]
        token = store.token(messages[0])
        calls: dict[str, Callable[[], object]] = {
            "ack": lambda: store.ack(messages),
            "release": lambda: store.release(messages),
            "token": lambda: store.settle([token], Settlement.ACK),
            "give_back": lambda: store.settle([token], Settlement.RELEASE),
        }
        return calls[how]

    def check(at: int, where: str) -> None:
        store._writer.flush()  # what was queued is written
        for message in messages:
            try:
                message.release()
            except UnknownMessageError:
                pass  # it is settled
        left = emptied(store, where)
        if how in ("ack", "token"):
            gone = 2 if how == "ack" else 1
            assert left in ([b"1", b"2"], [b"1", b"2"][gone:]), where
            if not where:
                assert left == [b"1", b"2"][gone:]
        else:
            assert left == [b"1", b"2"], where

    assert everywhere(prepare, check) > 30


def test_a_commit_is_whole_or_not_at_all(store: Store) -> None:
    messages: list[Message] = []

    def prepare(at: int) -> Callable[[], object]:
        store.send(A, b"1")
        messages[:] = [m for m in (store.receive(A),) if m is not None]
        store.claim(messages[0])
        return lambda: store.commit([(B, Outgoing(b"2"))], messages)

    def check(at: int, where: str) -> None:
        store._writer.flush()  # what was queued is written
        try:
            store.unclaim(messages)
        except UnknownMessageError:
            pass  # it is committed
        state = (emptied(store, where), drain(store, B))
        assert state in (([b"1"], []), ([], [b"2"])), where
        if not where:
            assert state == ([], [b"2"])

    assert everywhere(prepare, check) > 30


def test_subscriptions(store: Store) -> None:
    def prepare(at: int) -> Callable[[], object]:
        def both() -> None:
            store.subscribe(DESK)
            store.send(T, b"1")
            store.unsubscribe(T, DESK.key)

        return both

    def check(at: int, where: str) -> None:
        store._writer.flush()  # what was queued is written
        assert_whole(store)
        if list(store.subscriptions()):
            assert bodies(store, T, DESK.key) in ([], [b"1"]), where
            store.unsubscribe(T, DESK.key)
        assert store.depth(T) == 0, where

    assert everywhere(prepare, check) > 60


@pytest.mark.parametrize("how", ["purge", "delete"])
def test_removing(store: Store, how: str) -> None:
    def prepare(at: int) -> Callable[[], object]:
        store.send_many(A, [b"1", b"2"])
        return lambda: getattr(store, how)(A)

    def check(at: int, where: str) -> None:
        store._writer.flush()  # what was queued is written
        assert emptied(store, where) in ([], [b"1", b"2"]), where
        store.send(A, b"3")
        assert emptied(store, where) == [b"3"], where

    assert everywhere(prepare, check) > 30
