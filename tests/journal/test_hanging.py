"""A disk that hangs while the index is written out: who asks how much there is gets an answer."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

import anabranch
from anabranch.adapters.core import Store
from anabranch.adapters.core.engine import engine
from anabranch.adapters.core.operations.changes import AckRange
from anabranch.adapters.core.operations.pending_counts import PendingCounts
from anabranch.adapters.core.store_types import Counts, Subscription
from anabranch.adapters.journal import JournalStore

from ..contract.disk import PATIENCE, A, B, Parallel, T, assert_whole, take
from .disk import JournalDisk

DESK, BOOK = Subscription(T, "desk"), Subscription(T, "book")


class Hang:
    """A call that hangs until it is told to go on."""

    def __init__(self) -> None:
        self.begun, self.over = threading.Event(), threading.Event()

    def around(self, real: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object) -> object:
            self.begun.set()
            assert self.over.wait(PATIENCE)
            return real(*arguments)

        return call


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[JournalDisk]:
    with JournalDisk(tmp_path, sync="never", **JournalDisk.idle) as disk:
        yield disk


@pytest.mark.parametrize("where", ["journal", "index"])
def test_counts_and_statistics_are_told_while_a_checkpoint_hangs(
    disk: JournalDisk, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """With all that has returned, before the checkpoint or since."""
    monkeypatch.setattr(engine, "COUNT_SECONDS", 0.0)  # of a topic it is not known who else has yet to ack
    store = disk.create()
    for subscription in (DESK, BOOK):
        store.subscribe(subscription)
    store.send_many(A, [b"x"] * 10)
    store.send_many(T, [b"x"] * 3)
    leased, held = [take(store) for _ in range(4)], take(store, T, 0, DESK.key)
    hang = Hang()
    if where == "journal":
        monkeypatch.setattr(os, "fdatasync", hang.around(os.fdatasync))
    else:
        index = store.backend._index
        monkeypatch.setattr(index, "commit_partial", hang.around(index.commit_partial))
    with Parallel(store.checkpoint) as checkpoint:
        assert hang.begun.wait(PATIENCE)
        store.send_many(A, [b"y"] * 5)
        store.send(B, b"new")
        store.send(T, b"y")
        store.ack(leased[:2])
        held.ack()
        assert (store.depth(A), store.depth(B), store.depth(T)) == (13, 1, 4)
        assert (store.depth(T, DESK.key), store.depth(T, BOOK.key)) == (3, 4)
        ready = store.counts(A)
        assert ready.ready + ready.leased == 13
        stats = store.stats()
        assert (stats.messages, stats.destinations) == (18, {A: 13, T: 4, B: 1})
        assert stats.subscriptions == {DESK: 3, BOOK: 4}
        assert set(store.destinations()) == {A, B, T}
        if where == "journal":
            assert_whole(store)
        hang.over.set()
        checkpoint.result()
    assert (store.depth(A), store.depth(T), store.counts(A)) == (13, 4, Counts(11, 2))
    assert store.stats().messages == 18
    assert_whole(store)


def test_what_is_just_being_applied_is_counted_once(disk: JournalDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint that is late is written amid applying: who asks then waits, or is told the truth."""
    store = disk.create(checkpoint_operations=1)
    index = store.backend._index
    told: list[int] = []

    def commit(*arguments: object, real: Callable[..., object] = index.commit_partial) -> object:
        with suppress(RuntimeError):  # it would wait for this very thread
            told.append(store.depth(A))
        return real(*arguments)

    monkeypatch.setattr(index, "commit_partial", commit)
    for total in (9, 18):
        store.send_many(A, [b"x"] * 9)
        assert store.depth(A) == total
        assert set(told) <= {9, 18}
        assert not told or max(told) <= total


def test_a_router_is_answered_by_a_store_whose_checkpoint_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if it waits a while for a count that is not known: of a topic of which something is acked."""
    monkeypatch.setattr(engine, "COUNT_SECONDS", 0.25)
    config = anabranch.Config(tmp_path / "data", [anabranch.StoreConfig("all", [">"])])
    with anabranch.open(config) as router:
        topic = router.topic("t")
        desk = topic.subscribe("desk")
        topic.send(b"x")
        message = desk.receive()
        assert message is not None
        (store,) = router._registry.open_stores()
        assert isinstance(store, JournalStore)
        hang, index = Hang(), store.backend._index
        monkeypatch.setattr(index, "commit_partial", hang.around(index.commit_partial))
        with Parallel(store.checkpoint) as checkpoint:
            assert hang.begun.wait(PATIENCE)
            message.ack()
            stats, subscriptions = router.stats(), router.subscriptions()
            hang.over.set()
            checkpoint.result()
    assert (stats.unresponsive, list(stats.stores)) == ((), ["all"])
    assert [subscription.name for subscription in subscriptions] == ["desk"]


@pytest.mark.parametrize("patience", [0.0, PATIENCE])
@pytest.mark.parametrize("ask", [lambda store: store.depth(A), lambda store: store.stats().destinations[A]])
def test_who_counts_what_many_acks_at_once_leave_waits_for_it(
    disk: JournalDisk, monkeypatch: pytest.MonkeyPatch, patience: float, ask: Callable[[Store], int]
) -> None:
    """For a while: then it is told what was so before them."""
    monkeypatch.setattr(engine, "COUNT_SECONDS", patience)
    store = disk.create()
    store.send_many(A, [b"x"] * 10)
    state = store._engine.catalog.destinations[A]
    hang = Hang()
    index = store.backend._index
    monkeypatch.setattr(index, "commit_partial", hang.around(index.commit_partial))

    def counts(real: Callable[[], PendingCounts] = store._engine.pending_counts) -> PendingCounts:
        if patience:
            hang.over.set()
        return real()

    with Parallel(store.checkpoint) as checkpoint:
        assert hang.begun.wait(PATIENCE)
        store._sending.write([AckRange(state, 0, 100, 0)])
        monkeypatch.setattr(store._engine, "pending_counts", counts)
        assert ask(store) == (0 if patience else 10)
        hang.over.set()
        checkpoint.result()
    assert store.depth(A) == 0
    assert_whole(store)
