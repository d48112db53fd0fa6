"""Many messages go a page at a time."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from anabranch.adapters.core import Store
from anabranch.adapters.core.messages import Outgoing
from anabranch.adapters.core.service import purging
from anabranch.adapters.core.service.purging import PAGE, PAGES, purge
from anabranch.adapters.core.store_types import Change, Subscription
from anabranch.policies.errors import OutcomeUnknownError

from ..contract.disk import A, B, C, Parallel, T, assert_whole, bodies, eventually, take
from ..journal.disk import JournalDisk
from ..memory.disk import MemoryDisk
from ..sql.disk import SqliteDisk

Disk = JournalDisk | SqliteDisk | MemoryDisk


def test_others_get_their_turn_in_between(store: Store) -> None:
    """Between two writes nothing is locked: another queue's messages come and go."""
    count = 2 * PAGE * PAGES + 5
    store.send_many(A, [b"x"] * count)
    engine = store._engine
    state = engine.catalog.state(A)
    writes: list[int] = []

    def write(changes: Sequence[Any]) -> object:
        assert not engine.lock._is_owned()  # type: ignore[attr-defined]
        writes.append(sum(change.last - change.first + 1 for change in changes))
        store.send(B, b"y")
        message = take(store, B)
        message.ack()
        return store._sending.write(changes)

    assert purge(engine, state, state.channels(), write) == (count, count)
    assert writes == [PAGE * PAGES, PAGE * PAGES, 5]
    assert store.depth(A) == 0


@pytest.mark.parametrize("pages", [1, 2])
def test_what_is_purged_stands_though_the_store_fails_just_after(
    pages: int, monkeypatch: pytest.MonkeyPatch, store: Store
) -> None:
    """An error that says that nothing was done would be a lie."""
    count = (pages - 1) * PAGE * PAGES + 5
    store.send_many(A, [b"x"] * count)
    real = store._sending.write

    def write(changes: Sequence[Any]) -> object:
        outcomes = real(changes)
        store._engine.stop(OSError(errno.EIO, os.strerror(errno.EIO)))
        return outcomes

    monkeypatch.setattr(store._sending, "write", write)
    if pages == 1:
        assert store.purge(A) == count
    else:
        with pytest.raises(OutcomeUnknownError, match=f"{PAGE * PAGES} messages of queue://a are purged: store"):
            store.purge(A)


def test_what_is_purged_stands_though_the_store_is_closed_just_after(
    monkeypatch: pytest.MonkeyPatch, store: Store
) -> None:
    """Its transient messages are gone with it."""
    store.send_many(A, [b"x"] * 5)
    store.send(A, b"transient", persistent=False)
    real = store._sending.write

    def write(changes: Sequence[Any]) -> object:
        outcomes = real(changes)
        store.close()
        return outcomes

    monkeypatch.setattr(store._sending, "write", write)
    assert store.purge(A) == 5


def test_what_is_removed_stands_though_the_store_fails_just_after(
    monkeypatch: pytest.MonkeyPatch, store: Store
) -> None:
    store.subscribe(Subscription(T, "s"))
    store.send(T, b"x")
    real = store._sending.write

    def write(changes: Sequence[Any], **options: Any) -> object:
        outcomes = real(changes, **options)
        store._engine.stop(OSError(errno.EIO, os.strerror(errno.EIO)))
        return outcomes

    monkeypatch.setattr(store._sending, "write", write)
    assert store.unsubscribe(T, ("", "s")) == 1


class StruckError(BaseException):
    """Stands for Ctrl-C."""


MANY = 3 * PAGE * PAGES + 5
DESK, BOOK = Subscription(T, "desk"), Subscription(T, "book")


@pytest.fixture(params=[JournalDisk, SqliteDisk, MemoryDisk])
def disk(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    """Of each kind that removes in pages."""
    monkeypatch.setattr("anabranch.adapters.core.service.purging.DROP_SECONDS", 3600.0)
    with request.param(tmp_path) as disk:
        yield disk


def between_pages(monkeypatch: pytest.MonkeyPatch, call: Callable[[], object]) -> list[object]:
    """Called after each page; returns what it did."""
    done: list[object] = []
    monkeypatch.setattr(purging, "sleep", lambda seconds: done.append(call()))
    return done


def test_while_a_queue_is_deleted_others_go_on(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the deleted one nothing is seen any more, and a new one of its name is there at once."""
    store = disk.create()
    store.send_many(A, [b"x"] * MANY)

    def others() -> int:
        assert not store._engine.lock._is_owned()  # type: ignore[attr-defined]
        assert B not in store.destinations() or store.depth(B) == 0
        store.send(B, b"y")
        take(store, B).ack()
        new = [message.body for message in store.browse(A)]
        assert new == [b"new"] * store.depth(A) == [b"new"] * len(new)
        store.send(A, b"new")
        return store.stats().messages

    done = between_pages(monkeypatch, others)
    assert store.delete(A) == MANY
    assert done == [1, 2, 3]
    assert (bodies(store), store.depth(A)) == ([b"new"] * 3, 3)
    for view in disk.views(store):
        assert bodies(view) == [b"new"] * 3
        assert_whole(view)


def test_while_a_subscription_ends_others_go_on(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    store = disk.create()
    for subscription in (DESK, BOOK):
        store.subscribe(subscription)
    store.send_many(T, [b"x"] * MANY)

    def others() -> object:
        assert list(store.subscriptions()) in ([BOOK], [BOOK, DESK], [DESK, BOOK])
        take(store, T, 0, BOOK.key).ack()
        if store.subscribe(DESK):
            store.send(T, b"new")
        return len(list(store.browse(T, None, 0, DESK.key)))

    done = between_pages(monkeypatch, others)
    assert store.unsubscribe(T, DESK.key) == MANY
    assert done == [1, 1, 1]
    for view in disk.views(store):
        assert (bodies(view, T, DESK.key), view.depth(T, BOOK.key)) == ([b"new"], MANY - 2)
        assert view.depth(T) == MANY - 2
        assert_whole(view)


@pytest.mark.parametrize("what", ["delete", "unsubscribe", "delete a topic"])
@pytest.mark.parametrize("page", range(3))
def test_what_is_interrupted_is_removed_all_the_same(
    disk: Disk, monkeypatch: pytest.MonkeyPatch, what: str, page: int
) -> None:
    """Nothing comes back, whether the process goes on, is closed or dies."""
    store = disk.create()
    destination = A if what == "delete" else T
    if destination is T:
        store.subscribe(DESK)
    store.send_many(destination, [b"x"] * MANY)
    store.send(B, b"stays")
    pages = iter(range(3))

    def strike() -> None:
        if next(pages) == page:
            raise StruckError

    between_pages(monkeypatch, strike)
    with pytest.raises(StruckError):
        store.unsubscribe(T, DESK.key) if what == "unsubscribe" else store.delete(destination)
    assert store._engine.catalog.leaving
    for view in [*([] if disk.volatile else [disk.crash(store)]), store]:
        assert bodies(view, B) == [b"stays"]
        assert list(view.subscriptions()) == []
        if destination is T:
            assert view.subscribe(DESK)
        view.send(destination, b"new")
        assert_whole(view)
        assert not view._engine.catalog.leaving
        assert (bodies(view, destination), view.depth(destination), view.stats().messages) == ([b"new"], 1, 2)
    if not disk.volatile:
        again = disk.reopen(store)
        assert (bodies(again, destination), again.stats().messages) == ([b"new"], 2)
        assert_whole(again)


def test_the_background_goes_on_where_nobody_else_does(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anabranch.adapters.core.service.purging.DROP_SECONDS", 0.001)
    store = disk.create()
    store.subscribe(DESK)
    store.send_many(T, [b"x"] * MANY)
    store.commit([], [], None, [Change(DESK, False)])
    eventually(lambda: store.depth(T) == 0)
    eventually(lambda: not store._engine.catalog.leaving)
    assert_whole(store)


def test_a_topic_goes_while_a_subscription_of_it_does(disk: Disk) -> None:
    """Nothing is left of either, persistent or not."""
    store = disk.create()
    for subscription in (DESK, BOOK):
        store.subscribe(subscription)
    for persistent in (True, False):
        store.send_many(T, [Outgoing(b"x", persistent=persistent)] * MANY)
    store.commit([], [], None, [Change(DESK, False)])
    assert store.delete(T) == 2 * MANY
    assert_whole(store)
    assert not store._engine.leaving
    assert (store.destinations(), store.stats().messages) == ([], 0)


def test_what_is_not_persistent_goes_in_pages(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of a subscription which ends; what others have yet to ack stays."""
    if disk.volatile:
        return
    store = disk.create()
    for subscription in (DESK, BOOK):
        store.subscribe(subscription)
    store.send_many(T, [Outgoing(b"x", persistent=False)] * MANY)
    for _ in range(5):
        take(store, T, 0, BOOK.key).ack()
    left = between_pages(monkeypatch, lambda: store.depth(T, BOOK.key))
    assert store.unsubscribe(T, DESK.key) == MANY
    assert left == [MANY - 5] * 3
    assert store.depth(T) == MANY - 5
    assert_whole(store)


def test_one_removal_does_not_wait_for_another(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Be it another thread's, or in a signal handler that has interrupted it (rule G3)."""
    store = disk.create()
    for destination in (A, B, C):
        store.send_many(destination, [b"x"] * MANY)
    done: list[object] = []

    def meanwhile(seconds: float) -> None:
        monkeypatch.setattr(purging, "sleep", lambda seconds: None)
        with Parallel(lambda: store.delete(B)) as elsewhere:
            done.append(elsewhere.result())
        done.append(store.delete(C))
        done.append(list(store.check()))

    monkeypatch.setattr(purging, "sleep", meanwhile)
    assert store.delete(A) == MANY
    assert done == [MANY, MANY, []]
    assert_whole(store)
    assert (store.destinations(), store.stats().messages) == ([], 0)
