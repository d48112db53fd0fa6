"""Messages that are not persistent, also while the disk is at work on others, and between those that are."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from anabranch.adapters.core import Store
from anabranch.adapters.core.engine.engine import Engine
from anabranch.adapters.core.engine.hooks import Hooks
from anabranch.adapters.core.features.transient.messages import TransientMessages
from anabranch.adapters.core.features.transient.rows import MixedRows
from anabranch.adapters.core.messages import Outgoing
from anabranch.adapters.core.operations.table import AT_ONCE
from anabranch.adapters.core.record.place import SEQ
from anabranch.adapters.core.store_types import Change, Subscription
from anabranch.policies.errors import StoreFullError

from ..contract.disk import PATIENCE, A, B, Disk, Parallel, T, assert_whole, bodies, drain, eventually, take
from ..contract.nonpersistent import passing
from ..journal.disk import JournalDisk
from ..model import FAST
from .made import onefile

# Messages that are not persistent while the disk is at work on others: they wait for it in no way, and whatever
# comes in which order, none is passed over


DESK = Subscription(T, "desk")


class Stall:
    """What makes the next write, and those after it, wait for `go_on`."""

    def __init__(self) -> None:
        self.hanging = threading.Event()
        self._works = threading.Event()
        self._works.set()

    def hang(self) -> None:
        self._works.clear()

    def go_on(self) -> None:
        self._works.set()

    def __call__(self) -> None:
        if not self._works.is_set():
            self.hanging.set()
            assert self._works.wait(PATIENCE)


@pytest.fixture(params=["journal", "onefile"])
def disk(request: pytest.FixtureRequest) -> Iterator[Disk]:
    if request.param == "onefile":
        with onefile() as disk:
            yield disk
    else:
        with (
            tempfile.TemporaryDirectory(prefix="anabranch-core-", dir=FAST) as path,
            JournalDisk(Path(path)) as disk,
        ):
            yield disk


@pytest.fixture
def stall(monkeypatch: pytest.MonkeyPatch) -> Stall:
    """Of whatever syncs a file, but for what a journal makes ready in the background."""
    stall = Stall()
    for name in ("fsync", "fdatasync"):
        real = getattr(os, name)

        def sync(fd: int, real: Any = real) -> None:
            if Path(f"/proc/self/fd/{fd}").readlink().suffix not in (".tmp", ".free", ".spare"):
                stall()
            real(fd)

        monkeypatch.setattr(os, name, sync)
    return stall


@pytest.fixture
def store(disk: Disk) -> Store:
    store = disk.create()
    store.send(A, b"0")
    return store


@pytest.mark.parametrize("first", [True, False], ids=["the first one", "others before"])
def test_what_comes_late_is_not_passed_over(store: Store, stall: Stall, first: bool) -> None:
    if not first:
        store.send(B, b"before", persistent=False)
    stall.hang()
    with Parallel(lambda: store.send(A, b"late")) as sending:
        assert stall.hanging.wait(PATIENCE)
        receipts = [store.send(A, b"%d" % n, persistent=False) for n in range(1, 4)]
        assert [take(store).body, take(store).body] == [b"0", b"1"]
        stall.go_on()
        late = sending.result()
    assert late.seq < receipts[0].seq < receipts[1].seq
    assert bodies(store) == [b"0", b"late", b"1", b"2", b"3"]
    assert drain(store) == [b"late", b"2", b"3"]
    assert_whole(store)


def test_nor_is_it_of_a_topic(store: Store, stall: Stall) -> None:
    store.subscribe(DESK)
    stall.hang()
    with Parallel(lambda: store.send_many(T, [b"late", b"later"])) as sending:
        assert stall.hanging.wait(PATIENCE)
        store.send_many(T, [passing(b"1"), passing(b"2")])
        first = take(store, T, subscription=DESK.key)
        stall.go_on()
        sending.result()
    first.release()
    assert drain(store, T, DESK.key) == [b"late", b"later", b"1", b"2"]
    assert_whole(store)


def test_a_commit_of_both_that_comes_late(store: Store, stall: Stall) -> None:
    """Nothing of it is seen before all of it is."""
    stall.hang()
    with Parallel(lambda: store.commit([(A, passing(b"1")), (A, Outgoing(b"2")), (A, passing(b"3"))], [])) as sending:
        assert stall.hanging.wait(PATIENCE)
        store.send(A, b"4", persistent=False)
        store.send(A, b"5", persistent=False)
        assert bodies(store) == [b"0", b"4", b"5"]
        assert [take(store).body, take(store).body] == [b"0", b"4"]
        stall.go_on()
        receipts = sending.result()
    store.send(A, b"6", persistent=False)
    assert bodies(store) == [b"0", b"1", b"2", b"3", b"4", b"5", b"6"]
    assert [message.seq for message in store.browse(A)][1:4] == [receipt.seq for receipt in receipts]
    assert drain(store) == [b"1", b"2", b"3", b"5", b"6"]
    assert_whole(store)


def test_a_purge_leaves_what_comes_late(store: Store, stall: Stall) -> None:
    take(store).ack()
    store.send(A, b"1", persistent=False)
    stall.hang()
    with Parallel(lambda: store.send(A, b"late")) as sending:
        assert stall.hanging.wait(PATIENCE)
        store.send(A, b"2", persistent=False)
        assert store.purge(A) == 2
        stall.go_on()
        sending.result()
    assert drain(store) == [b"late"]


def test_who_waits_is_given_them_meanwhile(store: Store, stall: Stall) -> None:
    take(store).ack()
    stall.hang()
    with Parallel(lambda: store.send(A, b"late")) as sending:
        assert stall.hanging.wait(PATIENCE)
        with Parallel(lambda: take(store, timeout=PATIENCE)) as receiving:
            store.send(A, b"1", persistent=False)
            message = receiving.result()
        message.ack()
        stall.go_on()
        sending.result()
    assert drain(store) == [b"late"]


def test_a_refused_commit_leaves_nothing_of_either(monkeypatch: pytest.MonkeyPatch) -> None:
    with onefile() as disk:
        store = disk.create()
        store.send(A, b"0", persistent=False)
        before = store.stats().memory_bytes

        def refuse(plan: object) -> None:
            raise StoreFullError("no room")

        message = take(store)
        store.claim(message)
        with monkeypatch.context() as patched:
            patched.setattr(store.backend, "write", refuse)
            with pytest.raises(StoreFullError):
                store.commit([(A, passing(b"1" * 1000)), (A, Outgoing(b"2"))], [message])
        assert bodies(store) == [b"0"]
        assert store.stats().memory_bytes == before
        store.commit([(A, passing(b"1")), (A, Outgoing(b"2"))], [message])
        assert drain(store) == [b"1", b"2"]
        assert_whole(store)


def test_what_a_subscription_leaves_goes_in_the_background(disk: Disk) -> None:
    """More than goes at once: nobody else asks for it."""
    store = disk.create()
    store.subscribe(DESK)
    store.send_many(T, [passing(b"x")] * (AT_ONCE + 10))
    store.commit([], [], changes=[Change(DESK, False)])
    transient = store._engine.transient
    assert transient is not None
    eventually(lambda: store._engine.asked(lambda: not transient.mirrors.messages and not store._engine.leaving))
    assert_whole(store)


@pytest.mark.parametrize("strike", range(1, 6))
def test_the_first_one_is_interrupted(disk: Disk, strike: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the store makes itself ready for such messages: the next one makes it whole."""
    store, calls = disk.create(), 0

    def struck(real: Any) -> Any:
        def call(*arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == strike:
                raise KeyboardInterrupt
            return real(*arguments)

        return call

    with monkeypatch.context() as patch:
        for owner, name in ((Engine, "mix"), (Hooks, "follow"), (TransientMessages, "submit"), (MixedRows, "__init__")):
            patch.setattr(owner, name, struck(getattr(owner, name)))
        with suppress(KeyboardInterrupt):
            store.send_many(A, [passing(b"0")])
    store.send_many(A, [passing(b"1"), Outgoing(b"2")])
    assert bodies(store)[-2:] == [b"1", b"2"]
    store.delete(A)
    transient = store._engine.transient
    assert transient is not None and len(store._engine.hooks.draining) == 1
    assert store._engine.asked(lambda: transient.mirrors.messages) == 0
    assert_whole(store)


# Messages of both kinds are one queue to who looks at it


DESK, BOOK = Subscription(T, "desk"), Subscription(T, "book")


def test_pages_and_orders_of_both_kinds() -> None:
    """However they lie between each other, in any priority."""
    with onefile() as disk:
        store = disk.create(priorities=True)
        sent = []
        for number in range(60):
            body, priority = b"%d" % number, number // 3 % 2
            store.send(A, body, priority=priority, persistent=bool(number % 3))
            sent.append((-priority, number, body))
        store.send_many(A, [Outgoing(b"60", priority=1), passing(b"61")._replace(priority=1)])
        sent += [(-1, 60, b"60"), (-1, 61, b"61")]
        expected = [body for _, _, body in sorted(sent)]
        rows, state = store._engine.rows, store._engine.catalog.state(A)
        with store._engine.lock:
            orders = [rows.next_order(state, None, order) for order in (0, 65_535 - 1, 65_535)]
            assert orders == [65_534, 65_534, 65_535]
            page = rows.rows(state, None, 65_535, 0, 7)
            assert [place[SEQ] for place in page] == sorted(place[SEQ] for place in page)
            for place in page:
                assert rows.row(state, None, place[SEQ]) == rows.row(state, None, place[SEQ], 65_535) == place
            assert rows.rows(state, None, 65_535, page[-1][SEQ], 1)[0] not in page
        assert bodies(store) == expected
        assert drain(store) == expected
        assert_whole(store)


def test_each_subscription_sees_what_is_for_it(store: Store) -> None:
    store.subscribe(DESK)
    store.send_many(T, [b"1", passing(b"2")])
    store.subscribe(BOOK)
    store.send_many(T, [passing(b"3"), b"4"])
    assert bodies(store, T) == [b"1", b"2", b"3", b"4"]
    assert [bodies(store, T, one.key) for one in (DESK, BOOK)] == [[b"1", b"2", b"3", b"4"], [b"3", b"4"]]
    store.unsubscribe(T, DESK.key)
    assert bodies(store, T) == [b"3", b"4"]
    assert_whole(store)
