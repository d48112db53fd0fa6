"""A watch is told once there may be something for it, keeps nobody from anything, and misses nothing (rules Y3, Y4)."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from anabranch.adapters.core import Store
from anabranch.adapters.core.messages import Message, Outgoing
from anabranch.adapters.core.service.watching import Watch
from anabranch.policies.errors import ClosedError, StoreFailedError

from ..contract.disk import PATIENCE, A, B, Disk, Parallel, assert_whole, eventually, take
from ..contract.preparing import claim, prepare, to
from ..crash.interrupts import everywhere
from ..journal.disk import JournalDisk
from ..memory.disk import MemoryDisk
from ..model import FAST
from ..sql.disk import SqliteDisk


@pytest.fixture(params=[JournalDisk, SqliteDisk, MemoryDisk])
def disk(request: pytest.FixtureRequest) -> Iterator[Disk]:
    with tempfile.TemporaryDirectory(prefix="anabranch-core-", dir=FAST) as path, request.param(Path(path)) as disk:
        yield disk


@pytest.fixture
def store(disk: Disk) -> Store:
    return disk.create()


class Owner:
    """Of watches: what it was told, each time whether the store was closing."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.told: list[bool] = []

    def look(self, watch: Watch | None = None) -> Message | Watch:
        return self._store.receive_or_watch(A, self.told.append, watch)

    def watch(self) -> Watch:
        found = self.look()
        assert isinstance(found, Watch)
        assert self.told == []
        return found


def test_a_message_that_is_there(store: Store) -> None:
    store.send_many(A, [b"1", b"2"])
    owner = Owner(store)
    found = owner.look()
    assert isinstance(found, Message)
    assert (found.body, found.leased, found.deliveries) == (b"1", True, 1)
    found.ack()
    assert [take(store).body, owner.told] == [b"2", []]


@pytest.mark.parametrize(
    "how", ["send", "many", "nowait", "apart", "release", "unclaim", "commit", "prepared", "rollback", "purge"]
)
def test_whatever_frees_a_message_a_watch_is_told(store: Store, how: str) -> None:
    store.send_many(A, [b"x"] * 2)
    message, claimed = take(store), claim(store)
    name, back = prepare(store, 1, to(A, b"x")), prepare(store, 2, (), [claimed])
    owner = Owner(store)
    owner.watch()
    store.send(B, b"another's")
    assert owner.told == []
    calls: dict[str, Callable[[], object]] = {
        "send": lambda: store.send(A, b"x"),
        "many": lambda: store.send_many(A, [b"x"] * 5),
        "nowait": lambda: store.send_nowait(A, b"x").result(PATIENCE),
        "apart": lambda: store.send(A, b"x", persistent=False),
        "release": message.release,
        "unclaim": lambda: store.claim(message) or store.unclaim([message]),  # type: ignore[func-returns-value]
        "commit": lambda: store.commit([(A, Outgoing(b"x"))], []),
        "prepared": lambda: store.commit_prepared(name).wait(),
        "rollback": lambda: store.rollback_prepared(back).wait(),
        "purge": lambda: (store.purge(A), store.send(A, b"x")),
    }
    calls[how]()
    eventually(lambda: owner.told)
    assert not any(owner.told)
    found = owner.look()
    assert isinstance(found, Message)
    assert found.body == b"x"


def test_it_is_told_once(store: Store) -> None:
    owner = Owner(store)
    owner.watch()
    store.send(A, b"1")
    store.send(A, b"2")
    assert owner.told == [False]


def test_one_that_is_in_line_stays_the_one(store: Store) -> None:
    owner = Owner(store)
    watch = owner.watch()
    assert owner.look(watch) is watch
    store.send(A, b"1")
    assert owner.told == [False]
    take(store).ack()
    assert owner.look(watch) is not watch


def test_who_has_left_is_not_told(store: Store) -> None:
    owner = Owner(store)
    watch = owner.watch()
    watch.leave()
    watch.leave()
    store.send(A, b"1")
    assert owner.told == []


def test_who_waits_comes_first(store: Store) -> None:
    """Two watches before and behind a receiver in the line take nothing from it, and both hear of what it leaves."""
    one, other = Owner(store), Owner(store)
    one.watch()
    with Parallel(lambda: store.receive(A, None)) as receiver:
        eventually(lambda: store.stats().waiting == 1)
        other.watch()
        store.send_many(A, [b"1", b"2"])
        assert receiver.result().body == b"1"
    assert (one.told, other.told) == ([False], [False])
    found = one.look()
    assert isinstance(found, Message)
    assert found.body == b"2"


def test_receivers_beside_a_watch(store: Store) -> None:
    """One that does not wait, one that waits in vain, a listener."""
    owner = Owner(store)
    owner.watch()
    assert store.receive(A) is None
    assert owner.told == []
    assert store.receive(A, 0.01) is None
    heard: list[Message] = []
    store.listen(A, heard.append)
    store.send(A, b"1")
    eventually(lambda: heard)
    assert heard[0].body == b"1"


def test_at_the_limit_of_leases_it_hears_of_room(disk: Disk) -> None:
    store = disk.create(max_leases=1)
    store.send_many(A, [b"1", b"2"])
    message = take(store)
    owner = Owner(store)
    owner.watch()
    message.ack()
    assert owner.told == [False]
    found = owner.look()
    assert isinstance(found, Message)
    assert found.body == b"2"


def test_it_does_not_keep_the_store_open(disk: Disk) -> None:
    """It hears that the store closes; what is sent later is seen once it is open again."""
    store = disk.create()
    owner = Owner(store)
    owner.watch()
    assert store.stats().waiting == 0
    assert store.retire()
    with pytest.raises(ClosedError):
        owner.look()
    store.close()
    assert owner.told == [True]


def test_it_hears_that_the_store_has_failed(store: Store) -> None:
    owner = Owner(store)
    owner.watch()
    store._engine.fail(StoreFailedError("its disk is gone"))
    assert owner.told == [False]
    with pytest.raises(StoreFailedError):
        owner.look()


def test_of_a_queue_that_is_deleted(store: Store) -> None:
    owner = Owner(store)
    store.send(A, b"1")
    take(store).ack()
    owner.watch()
    store.delete(A)
    eventually(lambda: owner.told)
    assert store.destinations() == []
    owner.told.clear()
    owner.watch()
    store.send(A, b"2")
    assert owner.told == [False]
    assert_whole(store)


def test_nothing_is_missed_while_others_send_and_receive(store: Store) -> None:
    """A look that finds nothing while something comes (rule Y3)."""
    count = 300

    def send() -> None:
        for number in range(count):
            store.send(A, b"%d" % number, persistent=number % 3 > 0)

    got: list[bytes] = []
    event = threading.Event()

    def receive() -> None:
        watch: Watch | None = None
        while len(got) < count:
            event.clear()
            found = store.receive_or_watch(A, lambda closing: event.set(), watch)
            if isinstance(found, Message):
                got.append(found.body)
                found.ack()
            else:
                watch = found
                assert event.wait(PATIENCE), f"it was not told of what came after {len(got)}"

    with Parallel(receive) as receiver, Parallel(send) as sender:
        sender.result()
        receiver.result()
    assert sorted(map(int, got)) == list(range(count))


@pytest.mark.parametrize("what", ["look", "send"])
def test_ctrl_c_anywhere_leaves_no_watch_untold(what: str) -> None:
    with tempfile.TemporaryDirectory(prefix="anabranch-core-", dir=FAST) as path, JournalDisk(Path(path)) as disk:
        store = disk.create()
        owner = Owner(store)
        found: list[Any] = []

        def prepare(at: int) -> Callable[[], object]:
            owner.told.clear()
            found.clear()
            if what == "look":
                return lambda: found.append(owner.look())
            found.append(owner.watch())
            return lambda: store.send(A, b"1", message_id=str(at))

        def check(at: int, where: str) -> None:
            if what == "look" and not found:
                assert store.counts(A).leased == 0, where
                return  # who is interrupted looks again
            store.send(A, b"1", message_id=str(at))
            assert owner.told, where
            assert not any(owner.told)
            message = owner.look()
            assert isinstance(message, Message), where
            message.ack()
            assert not isinstance(owner.look(), Message), where

        assert everywhere(prepare, check, every=3) > 20
        assert_whole(store)
