"""Ctrl-C at every bytecode of what concerns messages that are not persistent, beside others that are (rules G2, G3):
each operation is whole or has not been, and can be done again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from anabranch.adapters.core.messages import Message, Outgoing
from anabranch.adapters.core.store_types import Subscription
from anabranch.adapters.journal import JournalStore
from anabranch.policies.errors import UnknownMessageError

from ..contract.disk import A, B, T, assert_whole, bodies, drain, take
from ..contract.nonpersistent import passing
from ..contract.preparing import transaction
from ..journal.disk import JournalDisk
from ..shares import Share
from .interrupts import everywhere
from .test_interrupts_topics import settled

DESK, BOOK = Subscription(T, "desk"), Subscription(T, "book")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[JournalDisk]:
    with JournalDisk(tmp_path, sync="never", checkpoint_interval=3600.0) as disk:
        yield disk


@pytest.fixture
def store(disk: JournalDisk) -> JournalStore:
    return disk.create()


def whole(disk: JournalDisk, store: JournalStore) -> None:
    """And what a new process would find is what is persistent of it."""
    assert_whole(store)
    again = disk.crash(store)
    assert_whole(again)
    assert bodies(again) == [message.body for message in store.browse(A) if message.persistent]


def test_a_send(disk: JournalDisk, store: JournalStore, share: Share) -> None:
    """The first one too, which makes what keeps it."""
    stores = [store]

    def prepare(at: int) -> Callable[[], object]:
        if at % 2:
            stores[0] = disk.create()
        store = stores[0]
        store.send(A, b"before %d" % at)
        return lambda: store.send(A, b"%d" % at, message_id=str(at), persistent=False)

    def check(at: int, where: str) -> None:
        store = stores[0]
        store.send(A, b"%d" % at, message_id=str(at), persistent=False)
        store.send(A, b"after %d" % at)
        assert drain(store)[-3:] == [b"before %d" % at, b"%d" % at, b"after %d" % at], where
        assert store.stats().leased == 0, where
        assert_whole(store)

    assert everywhere(prepare, check, 3, share) > 20


def test_an_ack(disk: JournalDisk, store: JournalStore) -> None:
    """Of one, or of two of which one is persistent: all or none."""
    given: list[Message] = []

    def prepare(at: int) -> Callable[[], object]:
        store.send(A, b"%d" % at, persistent=False)
        given[:] = [take(store)]
        if at % 2:
            store.send(A, b"%d and" % at)
            given.append(take(store))
        return lambda: store.ack(given)

    def check(at: int, where: str) -> None:
        settled(store)
        depth = store.depth(A)
        assert depth in (0, len(given)), where
        if depth:
            store.ack(given)  # it can be tried again until it has taken effect
        with pytest.raises(UnknownMessageError):
            store.ack(given)
        assert (store.depth(A), store.stats().leased) == (0, 0), where

    assert everywhere(prepare, check) > 20
    whole(disk, store)


def test_a_release(disk: JournalDisk, store: JournalStore, share: Share) -> None:
    store.send_many(A, [b"1", passing(b"2"), passing(b"3")])
    before: dict[int, int] = {}
    given: list[Message] = []

    def prepare(at: int) -> Callable[[], object]:
        given[:] = [take(store) for _ in range(3)]
        before.update({message.seq: message.deliveries for message in given})
        return lambda: store.release(given)

    def check(at: int, where: str) -> None:
        settled(store)
        leased = store.stats().leased
        assert leased in (0, len(given)), where
        if leased:
            store.release(given)
        assert {m.seq: m.deliveries for m in store.browse(A)} == before, where

    assert everywhere(prepare, check, 7, share) > 20
    whole(disk, store)


def test_receiving_passes_nothing_over(disk: JournalDisk, store: JournalStore, share: Share) -> None:
    def prepare(at: int) -> Callable[[], object]:
        store.send_many(A, [passing(b"1"), b"2", passing(b"3")])
        return lambda: taken.append(take(store))

    def check(at: int, where: str) -> None:
        while (message := store.receive(A)) is not None:
            taken.append(message)
        assert store.stats().leased == 3, where
        assert len(taken) >= 2, where
        assert [m.seq for m in taken] == sorted(m.seq for m in taken), where
        assert store.delete(A) == 3
        taken.clear()

    taken: list[Message] = []
    assert everywhere(prepare, check, 11, share) > 20
    assert_whole(store)


@pytest.mark.parametrize("alone", [False, True], ids=["of both", "of them alone"])
def test_a_commit(disk: JournalDisk, store: JournalStore, alone: bool, share: Share) -> None:
    acked: list[Message] = []

    def prepare(at: int) -> Callable[[], object]:
        store.send_many(A, [Outgoing(b"1", persistent=not alone), passing(b"2")])
        acked[:] = [take(store), take(store)]
        for message in acked:
            store.claim(message)
        sends = [(B, passing(b"3")), (B, Outgoing(b"4", persistent=not alone)), (B, passing(b"5"))]
        return lambda: store.commit(sends, acked)

    def check(at: int, where: str) -> None:
        settled(store)
        left, sent = store.depth(A), drain(store, B)
        assert (left, sent) in ((2, []), (0, [b"3", b"4", b"5"])), where
        if left:
            store.unclaim(acked)
            assert drain(store) == [b"1", b"2"], where
        assert store.stats().leased == 0, where

    assert everywhere(prepare, check, 5, share) > 20
    whole(disk, store)


@pytest.mark.parametrize("commit", [False, True], ids=["rollback", "commit"])
@pytest.mark.parametrize("alone", [False, True], ids=["of both", "of them alone"])
def test_a_branch(disk: JournalDisk, store: JournalStore, alone: bool, commit: bool, share: Share) -> None:
    def prepare(at: int) -> Callable[[], object]:
        store.send_many(A, [Outgoing(b"1", persistent=not alone), passing(b"2")])
        acked = [take(store), take(store)]
        for message in acked:
            store.claim(message)
        sends = [(B, passing(b"3")), (B, Outgoing(b"4", persistent=not alone))]
        name = transaction(at)

        def run() -> None:
            store.prepare(name, [store.store_id], sends, acked, True, store.reserve(sends)).wait()
            (store.commit_prepared if commit else store.rollback_prepared)(name).wait()

        claimed[:] = acked
        return run

    def check(at: int, where: str) -> None:
        settled(store)
        name = transaction(at)
        prepared = bool(store.recover_prepared())
        (store.commit_prepared if commit else store.rollback_prepared)(name).wait()
        left, sent = store.depth(A), drain(store, B)
        if commit and sent:
            assert (left, sent) == (0, [b"3", b"4"]), where
        else:
            assert (left, sent, commit and prepared) == (2, [], False), where
            for message in claimed:
                try:
                    store.unclaim([message])  # as a coordinator does that was interrupted before
                except UnknownMessageError:
                    pass
            assert drain(store) == [b"1", b"2"], where
        assert (store.stats().leased, store.recover_prepared()) == (0, []), where

    claimed: list[Message] = []
    assert everywhere(prepare, check, 11, share) > 20
    whole(disk, store)


@pytest.mark.parametrize("what", ["subscribe", "unsubscribe", "delete", "purge"])
def test_upkeep(disk: JournalDisk, store: JournalStore, what: str, share: Share) -> None:
    calls = {
        "subscribe": lambda: store.subscribe(BOOK, True), "unsubscribe": lambda: store.unsubscribe(T, BOOK.key),
        "delete": lambda: store.delete(T), "purge": lambda: store.purge(T, BOOK.key),
    }  # fmt: skip
    places = 0

    def prepare(at: int) -> Callable[[], object]:
        nonlocal store, places
        places += 1
        if places % 50 == 0:  # a check reads all of the journal, which would become longer with each place
            store.close()
            store = disk.create()
        store.subscribe(DESK)
        if what != "subscribe":
            store.subscribe(BOOK)
        store.send_many(T, [passing(b"1"), b"2", passing(b"3")])
        return calls[what]

    def check(at: int, where: str) -> None:
        settled(store)
        assert_whole(store)
        there = set(store.subscriptions())
        if DESK in there:
            assert drain(store, T, DESK.key) == [b"1", b"2", b"3"], where
        if BOOK in there:
            found = drain(store, T, BOOK.key)
            assert found == [b"1", b"2", b"3"] or what == "purge", where
        assert (store.depth(T), store.stats().leased) == (0, 0), where
        store.delete(T)
        assert store.stats().messages == 0, where

    assert everywhere(prepare, check, 11, share) > 20
    assert_whole(store)
