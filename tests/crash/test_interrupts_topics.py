"""Ctrl-C at every bytecode of what concerns subscriptions and messages that come back (rules G2, G3, X6): each is whole
or has not been, and can be done again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from anabranch.adapters.core.messages import Message
from anabranch.adapters.core.store_types import Subscription
from anabranch.adapters.journal import JournalStore
from anabranch.policies.errors import UnknownMessageError, UnknownSubscriptionError
from anabranch.policies.names.destination import Destination

from ..contract.disk import A, T, assert_whole, take
from ..journal.disk import JournalDisk
from ..shares import Share
from .interrupts import everywhere

DESK, LATE = Subscription(T, "desk"), Subscription(T, "late", "client")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[JournalDisk]:
    with JournalDisk(tmp_path, sync="never", checkpoint_interval=3600.0) as disk:
        yield disk


@pytest.fixture
def store(disk: JournalDisk) -> JournalStore:
    return disk.create()


def settled(store: JournalStore) -> None:
    """What an interrupted thread has left is done, else a worker may do it between two looks."""
    store.backend._log._finish()


def two_sent(disk: JournalDisk) -> JournalStore:
    """A store with two messages for one subscription."""
    store = disk.create()
    store.subscribe(DESK)
    store.send_many(T, [b"1", b"2"])
    return store


def both(disk: JournalDisk, store: JournalStore) -> None:
    """The store is whole, and what a new process would find is the same."""
    assert_whole(store)
    again = disk.crash(store)
    assert_whole(again)
    assert set(again.subscriptions()) == set(store.subscriptions())
    for topic, key in [(A, None), *((s.topic, s.key) for s in store.subscriptions())]:
        found = [[(m.seq, m.deliveries) for m in one.browse(topic, None, 0, key)] for one in (store, again)]
        assert found[0] == found[1]


@pytest.mark.parametrize("topic", [False, True], ids=["queue", "topic"])
def test_a_release_interrupted_anywhere(disk: JournalDisk, store: JournalStore, topic: bool) -> None:
    """Both are held, or both are free; a delivery is counted once, however often the release is tried."""
    store.subscribe(DESK)
    source, key = (T, DESK.key) if topic else (A, None)
    store.send_many(source, [b"1", b"2"])
    before: dict[int, int] = {}
    given: list[Message] = []

    def prepare(at: int) -> Callable[[], object]:
        given[:] = [take(store, source, 0, key), take(store, source, 0, key)]
        before.update({message.seq: message.deliveries for message in given})
        return lambda: store.release(given)

    def check(at: int, where: str) -> None:
        settled(store)
        leased = store.stats().leased
        assert leased in (0, 2), where
        if leased:
            store.release(given)
        with pytest.raises(UnknownMessageError):
            store.release(given)
        assert [m.seq for m in store.browse(source, None, 0, key)] == sorted(before), where
        assert {m.seq: m.deliveries for m in store.browse(source, None, 0, key)} == before, where

    assert everywhere(prepare, check) > 20
    both(disk, store)


@pytest.mark.parametrize("retroactive", [False, True], ids=["from now on", "retroactive"])
def test_a_subscription_begun_and_ended_under_interruption(disk: JournalDisk, retroactive: bool, share: Share) -> None:
    store = two_sent(disk)

    def anew(at: int) -> None:
        """A check reads all of the journal, which would become longer with each place."""
        nonlocal store
        if at % 50 == 0:
            both(disk, store)
            store.close()
            store = two_sent(disk)

    def prepare(at: int) -> Callable[[], object]:
        anew(at)
        return lambda: store.subscribe(LATE, retroactive)

    def check(at: int, where: str) -> None:
        settled(store)
        begun = LATE in store.subscriptions()
        assert store.subscribe(LATE, retroactive) is not begun, where
        assert store.depth(T, LATE.key) == (2 if retroactive else 0), where
        assert_whole(store)
        assert store.unsubscribe(T, LATE.key) == (2 if retroactive else 0), where

    assert everywhere(prepare, check, 5, share) > 20

    def prepare_end(at: int) -> Callable[[], object]:
        anew(at)
        store.subscribe(LATE, retroactive)
        return lambda: store.unsubscribe(T, LATE.key)

    def check_end(at: int, where: str) -> None:
        settled(store)
        if LATE in store.subscriptions():
            store.unsubscribe(T, LATE.key)
        with pytest.raises(UnknownSubscriptionError):
            store.depth(T, LATE.key)
        assert_whole(store)
        assert (store.depth(T), store.depth(T, DESK.key)) == (2, 2), where

    assert everywhere(prepare_end, check_end, 5, share) > 20
    both(disk, store)


def test_an_ack_of_one_subscription_interrupted_anywhere(disk: JournalDisk, store: JournalStore) -> None:
    store.subscribe(DESK)
    store.subscribe(LATE)
    given: list[Message] = []

    def prepare(at: int) -> Callable[[], object]:
        store.send(T, b"%d" % at)
        given[:] = [take(store, T, 0, DESK.key)]
        return lambda: store.ack(given)

    def check(at: int, where: str) -> None:
        settled(store)
        if store.depth(T, DESK.key):
            store.ack(given)
        with pytest.raises(UnknownMessageError):
            store.ack(given)
        assert (store.depth(T, DESK.key), store.depth(T, LATE.key)) == (0, 1), where
        take(store, T, 0, LATE.key).ack()
        assert (store.depth(T), store.stats().leased) == (0, 0), where

    assert everywhere(prepare, check) > 10
    both(disk, store)


def test_what_is_spent_or_over_taken_under_interruption(disk: JournalDisk) -> None:
    """None is skipped for good, none is taken twice."""
    store = disk.create(max_deliveries=1, dead_letter="dlq")
    store.subscribe(DESK)
    store.subscribe(LATE)
    past = 1
    store.send(A, b"over", expires_at_ms=past)
    store.send(T, b"over", expires_at_ms=past)
    store.send(Destination.parse("spent"), b"spent")
    take(store, Destination.parse("spent")).release()
    taken: list[Message] = []

    def prepare(at: int) -> Callable[[], object]:
        taken.clear()
        return lambda: taken.extend(lost.message for lost in store.take_undelivered())

    lost_sight_of: list[str] = []

    def check(at: int, where: str) -> None:
        settled(store)
        if store.stats().leased and not taken:
            lost_sight_of.append(where)  # between the store's last bytecode and this test's note of it
            with store._engine.lock:
                store._engine.current()
                for channel in store._engine.catalog.channels():
                    for lease in list(channel.held.values()):
                        store._engine.delivery.unlease(lease, store.backend)
        store.release(taken, delivered=False)
        found = [lost.message for lost in store.take_undelivered()]
        assert sorted(message.body for message in found) == [b"over", b"over", b"spent"], where
        store.release(found, delivered=False)

    assert everywhere(prepare, check) > 20
    assert len(lost_sight_of) < 6, lost_sight_of
    both(disk, store)
