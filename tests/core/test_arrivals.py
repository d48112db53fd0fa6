"""What is sent where receivers have had all there was comes to them in order, once, and without being looked up."""

from __future__ import annotations

import itertools
import tempfile
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from anabranch.adapters.core import Store
from anabranch.adapters.core.messages import Message, Outgoing
from anabranch.adapters.core.record.place import SEQ
from anabranch.adapters.core.state.priorities import FETCH
from anabranch.adapters.core.store_types import Settlement

from ..contract.disk import A, B, assert_whole, drain, eventually
from ..crash.interrupts import everywhere
from ..journal.disk import JournalDisk
from ..model import FAST


@pytest.fixture
def store() -> Iterator[Store]:
    with (
        tempfile.TemporaryDirectory(prefix="anabranch-core-", dir=FAST) as path,
        JournalDisk(Path(path)) as disk,
    ):
        store = disk.create()
        assert store.receive(A) is None  # all there was
        yield store


def send(store: Store, first: int, last: int) -> list[bytes]:
    """One after the other."""
    bodies = [b"%d" % number for number in range(first, last)]
    for body in bodies:
        store.send(A, body)
    return bodies


def lookups(store: Store, monkeypatch: pytest.MonkeyPatch, *names: str) -> list[object]:
    """What the backend is asked for from now on."""
    asked: list[object] = []
    backend: Any = store._engine.backend

    def ask(real: Callable[..., object], *arguments: object) -> object:
        asked.append(arguments)
        return real(*arguments)

    for name in names:
        monkeypatch.setattr(backend, name, partial(ask, getattr(backend, name)))
    return asked


def test_nothing_is_looked_up_while_receivers_keep_up(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = send(store, 0, 1)
    assert drain(store) == sent
    asked = lookups(store, monkeypatch, "rows")
    for number in range(1, 100, 3):
        sent = send(store, number, number + 3)
        for body in sent:
            message = store.receive(A)
            assert message is not None
            assert message.body == body
            message.ack()
    assert asked == []


def test_what_is_received_soon_is_not_read(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = send(store, 0, 1)
    assert drain(store) == sent
    asked = lookups(store, monkeypatch, "rows", "bodies", "apply")
    for number in range(20):
        store.send(A, b"%d" % number, {"n": number})
        message = store.receive(A)
        assert message is not None
        assert (message.body, message.headers) == (b"%d" % number, {"n": number})
        message.ack()
    assert asked == []


def test_who_waits_is_handed_what_comes_and_it_is_not_read(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.send(A, b"first")
    assert drain(store) == [b"first"]
    asked = lookups(store, monkeypatch, "bodies")
    came: SimpleQueue[bytes] = SimpleQueue()

    def receive() -> None:
        message = store.receive(A, timeout=30.0)
        assert message is not None
        message.ack()
        came.put(message.body)

    channel = store._engine.catalog.destinations[A].channel

    def until_one_waits() -> None:
        eventually(lambda: channel.waiting)
        with store._engine.lock:  # it has looked, too
            pass

    for number in range(10):
        thread = threading.Thread(target=receive)
        thread.start()
        until_one_waits()
        store.send(A, b"%d" % number)
        assert came.get(timeout=30.0) == b"%d" % number
        thread.join()
        assert store.receive(A) is None

    def on_message(message: Message) -> None:
        message.ack()
        came.put(message.body)

    listener = store.listen(A, on_message, credit=100)
    for number in range(10):
        until_one_waits()
        store.send(A, b"%d" % number)
        assert came.get(timeout=30.0) == b"%d" % number
    listener.close()
    assert len(asked) < 10  # a checkpoint may come between


@pytest.mark.parametrize("kind", ["receive", "listen"])
def test_many_who_wait_are_handed_each_message_once(store: Store, kind: str) -> None:
    """While some of them are given back, and others come together."""
    count, waiters = 2000, 6
    came: SimpleQueue[bytes] = SimpleQueue()
    again = itertools.count()

    def take(message: Message) -> None:
        if next(again) % 5 == 0:
            message.release()
        else:
            message.ack()
            came.put(message.body)

    def receive() -> None:
        while (message := store.receive(A, timeout=30.0)) is not None and message.body != b"over":
            take(message)
        if message is not None:
            message.release()

    def send_some(first: int) -> None:
        for number in range(first, count, 4):
            if number % 7:
                store.send(A, b"%d" % number)
            else:
                store.send_many(A, [b"%d" % number])

    if kind == "listen":
        listeners = [store.listen(A, take, credit=2 * count) for _ in range(waiters)]
    receivers = [threading.Thread(target=receive) for _ in range(waiters)] if kind == "receive" else []
    senders = [threading.Thread(target=send_some, args=(first,)) for first in range(4)]
    for thread in (*receivers, *senders):
        thread.start()
    got = sorted(int(came.get(timeout=60.0)) for _ in range(count))
    assert got == list(range(count))
    if kind == "receive":
        store.send(A, b"over")
    else:
        for listener in listeners:
            listener.close()
    for thread in (*receivers, *senders):
        thread.join()
    assert came.empty()
    assert_whole(store)


def test_what_is_acked_soon_leaves_no_row_and_its_id(store: Store) -> None:
    """It comes and goes between two times that changes are applied; a longer-lived one among it stays."""
    kept = store.send(A, b"kept", message_id="kept").seq
    first = store.receive(A)
    assert first is not None
    for number in range(200):
        store.send(A, b"%d" % number, message_id=f"id-{number}")
        message = store.receive(A)
        assert message is not None
        message.ack()
    assert store.depth(A) == 1
    backend: Any = store.backend
    rows = backend._index.rows
    assert [place[SEQ] for _, place, _ in rows.all()] == [kept]
    assert store.send(A, b"again", message_id="id-7").duplicate
    assert_whole(store)
    store.close()
    store.open()
    assert store.send(A, b"again", message_id="id-8").duplicate
    assert drain(store) == [b"kept"]
    assert_whole(store)


def test_large_ones_that_are_acked_soon_do_not_gather_in_memory(store: Store) -> None:
    for _ in range(40):
        store.send(A, bytes(1 << 20))
        message = store.receive(A)
        assert message is not None
        message.ack()
        engine = store._engine
        held = [change for plan in (*engine._new, *engine._pending) for change in plan.changes]
        assert sum(change.size for change in held) <= 4 << 20
    assert store.depth(A) == 0


@pytest.mark.parametrize("together", [1, FETCH - 1, FETCH, FETCH + 1, 3 * FETCH])
def test_many_at_once_come_in_order(store: Store, together: int) -> None:
    for _ in range(2):
        sent = send(store, 0, together)
        assert drain(store) == sent
    assert_whole(store)


def test_more_than_is_kept_ready_comes_in_order(store: Store) -> None:
    sent: list[bytes] = []
    for number in range(0, 3 * FETCH, 20):
        sent += send(store, number, number + 20)
        store.send(B, b"other")
        assert store.depth(A) == len(sent)  # so that they are applied
    assert drain(store) == sent
    sent = send(store, 1000, 1005)
    assert drain(store) == sent


def test_what_is_purged_does_not_come(store: Store) -> None:
    send(store, 0, 5)
    assert store.depth(A) == 5
    assert store.purge(A) == 5
    sent = send(store, 5, 8)
    assert drain(store) == sent


def test_what_is_deleted_does_not_come(store: Store) -> None:
    send(store, 0, 5)
    store.delete(A)
    assert store.receive(A) is None
    sent = send(store, 5, 8)
    assert drain(store) == sent


def test_what_was_given_back_comes_before(store: Store) -> None:
    sent = send(store, 0, 2)
    first = store.receive(A)
    assert first is not None
    sent += send(store, 2, 4)
    assert store.depth(A) == 4
    first.release()
    assert drain(store) == sent


def test_a_commit_between_comes_in_its_place(store: Store) -> None:
    sent = send(store, 0, 2)
    store.commit([(A, Outgoing(b"in between"))], [])
    sent += [b"in between", *send(store, 3, 5)]
    assert drain(store) == sent


def test_ctrl_c_leaves_nothing_out_of_sight(store: Store) -> None:
    """Wherever it strikes while messages are applied, passed on, received and acked."""

    def receive() -> None:
        message = store.receive(A)
        if message is not None:
            message.ack()
        store.depth(A)

    def prepare(at: int) -> Callable[[], object]:
        assert drain(store) == []
        send(store, 0, 3)
        return receive

    def check(at: int, where: str) -> None:
        channel = store._engine.catalog.destinations[A].channel
        for lease in list(channel.held.values()):  # of a message that was in the caller's hands
            store.settle([store._settling.token(lease)], Settlement.RELEASE)
        assert drain(store) in ([b"0", b"1", b"2"], [b"1", b"2"]), where
        assert_whole(store)

    assert everywhere(prepare, check) > 100


def test_ctrl_c_leaves_nothing_out_of_sight_that_comes_to_who_waits(store: Store) -> None:
    """Wherever it strikes while one waits, and is handed a message that has come."""
    send(store, 0, 1)
    assert drain(store) == [b"0"]
    channel = store._engine.catalog.destinations[A].channel
    over = threading.Event()

    def send_to_who_waits() -> None:
        while not (channel.waiting or over.wait(0.0001)):
            pass
        store.send(A, b"0")

    def receive() -> None:
        try:
            message = store.receive(A, timeout=30.0)
            if message is not None:
                message.ack()
        finally:
            over.set()

    def prepare(at: int) -> Callable[[], object]:
        assert drain(store) == []
        over.clear()
        senders.append(threading.Thread(target=send_to_who_waits))
        senders[-1].start()
        return receive

    def check(at: int, where: str) -> None:
        over.set()
        senders.pop().join()
        for lease in list(channel.held.values()):  # of a message that was in the caller's hands
            store.settle([store._settling.token(lease)], Settlement.RELEASE)
        assert channel.waiting == 0, where
        assert drain(store) in ([b"0"], []), where
        assert_whole(store)

    senders: list[threading.Thread] = []
    assert everywhere(prepare, check) > 50
