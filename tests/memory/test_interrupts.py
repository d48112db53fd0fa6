"""Ctrl-C at every bytecode of an operation: nothing lost, doubled or stuck, and nothing counted wrong (rule G2)."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from anabranch.adapters.core.messages import Message
from anabranch.adapters.core.store_types import Subscription
from anabranch.adapters.memory import MemoryStore
from anabranch.policies.errors import UnknownMessageError

from ..contract.disk import A, B, T, assert_whole, bodies, take
from ..contract.preparing import OTHER, to, transaction
from ..crash.interrupts import everywhere
from ..shares import Share
from .disk import MemoryDisk

# A file that is opened when Ctrl-C comes is let go of, which closes it.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed file <_io.FileIO:ResourceWarning")

DESK, BOOK = Subscription(T, "desk"), Subscription(T, "book")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[MemoryDisk]:
    with MemoryDisk(tmp_path) as disk:
        yield disk


@pytest.fixture
def store(disk: MemoryDisk) -> MemoryStore:
    return disk.create()


def numbered(at: int) -> bytes:
    return str(at).encode()


def test_a_send_interrupted_anywhere_and_sent_again_is_stored_once(store: MemoryStore) -> None:
    def prepare(at: int) -> Callable[[], object]:
        return lambda: store.send(A, numbered(at), {"h": at}, f"id {at}", expires_at_ms=1 << 60)

    def check(at: int, where: str) -> None:
        store.send(A, numbered(at), {"h": at}, f"id {at}", expires_at_ms=1 << 60)
        assert store.depth(A) == at, where
        assert_whole(store)

    places = everywhere(prepare, check)
    assert places > 50
    assert bodies(store) == [numbered(at) for at in range(1, places + 2)]


def test_a_send_that_swaps_interrupted_anywhere(disk: MemoryDisk) -> None:
    """Wherever it was: writing the file, taking a chunk out of memory, beginning a new one."""
    store = disk.reopen(disk.create(), max_bytes=1024 * 1024, roll_over_size=64 * 1024)

    for _ in range(50):
        store.send(B, bytes(20_000))

    def prepare(at: int) -> Callable[[], object]:
        return lambda: store.send(A, numbered(at).ljust(20_000), None, f"id {at}")

    def check(at: int, where: str) -> None:
        store.send(A, numbered(at).ljust(20_000), None, f"id {at}")
        assert store.depth(A) == at, where
        assert_whole(store)

    places = everywhere(prepare, check)
    assert places > 100
    assert store.stats().swap_bytes > 1_000_000
    assert [body.strip() for body in bodies(store)] == [numbered(at) for at in range(1, places + 2)]


def test_a_receive_from_the_swap_interrupted_anywhere(disk: MemoryDisk, share: Share) -> None:
    store = disk.reopen(disk.create(), max_bytes=256 * 1024)
    sent = [numbered(n).ljust(1000) for n in range(1200)]
    store.send_many(A, sent)
    assert store.stats().swap_bytes > 500_000
    taken: list[Message] = []

    def prepare(at: int) -> Callable[[], object]:
        while (message := store.receive(A)) is not None and len(taken) % 40 < 39:
            taken.append(message)  # until the next one is in the swap, or about
        if message is not None:
            message.release()
        return lambda: taken.append(take(store))

    def check(at: int, where: str) -> None:
        assert_whole(store)
        assert [message.body for message in taken] == sent[: len(taken)], where
        assert len(taken) <= store.stats().leased <= len(taken) + 1, where
        if store.stats().leased > len(taken):  # leased, and its receiver never heard of it
            lost = sent[len(taken)]
            taken.append(next(message for message in store.browse(A) if message.body == lost))

    everywhere(prepare, check, 3, share)


def test_an_ack_interrupted_anywhere(store: MemoryStore) -> None:
    state: dict[str, Message] = {}

    def prepare(at: int) -> Callable[[], object]:
        store.send(A, numbered(at))
        state["message"] = take(store)
        return state["message"].ack

    def check(at: int, where: str) -> None:
        if store.depth(A):
            state["message"].ack()  # it can be tried again until it has taken effect
        with pytest.raises(UnknownMessageError):
            state["message"].ack()
        assert (store.depth(A), store.stats().leased) == (0, 0), where
        assert_whole(store)

    assert everywhere(prepare, check) > 30


def test_a_release_interrupted_anywhere(store: MemoryStore, share: Share) -> None:
    """All of them are free, and counted once more, or none is."""
    store.send_many(A, [b"1", b"2", b"3"])
    state: dict[str, list[Message]] = {}
    count = 0

    def prepare(at: int) -> Callable[[], object]:
        state["messages"] = [take(store) for _ in range(3)]
        return lambda: store.release(state["messages"])

    def check(at: int, where: str) -> None:
        nonlocal count
        if store.stats().leased:
            store.release(state["messages"])
        count += 1
        assert [message.deliveries for message in store.browse(A)] == [count] * 3, where
        assert store.stats().leased == 0, where
        assert_whole(store)

    assert everywhere(prepare, check, 5, share) > 30


@pytest.mark.parametrize("prepared", [False, True])
def test_a_transaction_interrupted_anywhere_is_whole(store: MemoryStore, prepared: bool, share: Share) -> None:
    """Changes of subscriptions, sends and acks of queues and topics."""
    store.subscribe(BOOK)
    state: dict[str, list[Message]] = {}

    def prepare(at: int) -> Callable[[], object]:
        store.send(A, numbered(at))
        store.send(T, numbered(at))
        messages = [take(store), take(store, T, 0, BOOK.key)]
        for message in messages:
            store.claim(message)
        state["messages"] = messages
        if not prepared:
            return lambda: store.commit([*to(B, numbered(at)), *to(T, b"t")], messages)
        sends = [*to(B, numbered(at)), *to(T, b"t")]
        store.prepare(transaction(at), [store.store_id, OTHER], sends, messages, True, None).wait()
        return lambda: store.commit_prepared(transaction(at)).wait()

    def check(at: int, where: str) -> None:
        acked = (store.depth(A) == 0, numbered(at) not in bodies(store, T, BOOK.key))
        sent = (numbered(at) in bodies(store, B), b"t" in bodies(store, T, BOOK.key))
        assert acked == sent, where
        assert len({*acked, *sent}) == 1, where
        assert_whole(store)
        if not acked[0]:
            if prepared:
                assert len(store.commit_prepared(transaction(at)).wait()) == 2, where
            else:
                store.commit([], state["messages"])
        take(store, T, 0, BOOK.key).ack() if store.depth(T, BOOK.key) else None
        assert store.stats().leased == 0, where

    assert everywhere(prepare, check, 5, share) > 50


def test_a_transaction_larger_than_memory_interrupted_anywhere(disk: MemoryDisk, share: Share) -> None:
    """It goes into the swap before it takes effect."""
    store = disk.reopen(disk.create(), max_bytes=64 * 1024, roll_over_size=64 * 1024)

    def prepare(at: int) -> Callable[[], object]:
        store.purge(A)
        store.purge(B)
        sends = [*to(A, numbered(at)), *to(B, *[bytes(9000)] * 8), *to(A, b"last")]
        return lambda: store.commit(sends, [])

    def check(at: int, where: str) -> None:
        assert_whole(store)
        assert bodies(store) in ([], [numbered(at), b"last"]), where
        assert store.depth(B) == 4 * store.depth(A), where
        assert store.stats().memory_bytes <= 64 * 1024, where

    assert everywhere(prepare, check, 13, share) > 50
    store.delete(A)
    store.delete(B)
    assert (store.stats().swap_bytes, store.stats().memory_bytes) == (0, 0)


def test_a_rollback_interrupted_anywhere(store: MemoryStore) -> None:
    """What it acked is free, and counted once more, or it is prepared still."""
    store.send(A, b"x")
    count = 0

    def prepare(at: int) -> Callable[[], object]:
        message = take(store)
        store.claim(message)
        store.prepare(transaction(at), [store.store_id, OTHER], to(B, b"y"), [message], True, None).wait()
        return lambda: store.rollback_prepared(transaction(at)).wait()

    def check(at: int, where: str) -> None:
        nonlocal count
        store.rollback_prepared(transaction(at)).wait()
        count += 1
        assert (list(store.recover_prepared()), store.depth(B), store.stats().leased) == ([], 0, 0), where
        assert [message.deliveries for message in store.browse(A)] == [count], where
        assert_whole(store)

    assert everywhere(prepare, check) > 50


@pytest.mark.parametrize("what", ["purge", "delete", "unsubscribe", "subscribe"])
def test_upkeep_interrupted_anywhere(store: MemoryStore, what: str, share: Share) -> None:
    def prepare(at: int) -> Callable[[], object]:
        if what != "subscribe" and DESK not in store.subscriptions():
            store.subscribe(DESK)
        if BOOK not in store.subscriptions():
            store.subscribe(BOOK)
        store.send_many(T, [b"1", b"2", b"3"])
        for key in (DESK.key, BOOK.key) if what != "subscribe" else (BOOK.key,):
            take(store, T, 0, key).ack()
        return {
            "purge": lambda: store.purge(T, DESK.key),
            "delete": lambda: store.delete(T),
            "unsubscribe": lambda: store.unsubscribe(T, DESK.key),
            "subscribe": lambda: store.subscribe(DESK, retroactive=True),
        }[what]

    def check(at: int, where: str) -> None:
        assert_whole(store)
        if T in store.destinations():
            assert bodies(store, T, BOOK.key)[:2] == [b"2", b"3"], where
            if DESK in store.subscriptions():
                assert bodies(store, T, DESK.key) in ([b"2", b"3"], []), where
        store.delete(T)
        assert store.stats().messages == 0, where

    assert everywhere(prepare, check, 7, share) > 20


def test_close_and_open_interrupted_anywhere(disk: MemoryDisk, share: Share) -> None:
    store = disk.create()

    def prepare(at: int) -> Callable[[], object]:
        store.send(A, b"x")

        def again() -> None:
            store.close()
            store.open()

        return again

    def check(at: int, where: str) -> None:
        store.close()
        gc.collect()  # a lock that nobody got hold of is held until then
        store.open()
        assert (bodies(store), store.stats().messages) == ([], 0), where
        assert_whole(store)

    assert everywhere(prepare, check, 5, share) > 100
