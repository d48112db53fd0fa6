"""A store whose disk hangs delays no other store's expiry, dead letters, statistics, reclaiming, futures or close
(invariant 7). What waits, waits for an event, never for a time."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import anabranch
from anabranch.adapters.system.background import LEADERS, WORKERS
from anabranch.adapters.system.locking import DirectoryLock
from anabranch.adapters.system.locking import _watch as lock_watch
from anabranch.router.placement import open_stores as stores_module
from anabranch.router.placement import store_statistics
from anabranch.router.transactions import decision_cleanup as cleanup_module

from ..contract.disk import Parallel, eventually
from ..taking import take
from .disk import keep_background_out

SOON = 60.0
HUNG = WORKERS + LEADERS + 2
"""Stores that hang: more than there are threads at first."""


class Disk:
    """The disk below the directories `bad<n>`: while it hangs, who syncs a file there waits."""

    def __init__(self) -> None:
        self.works = threading.Event()
        self.works.set()
        self._name = ""
        self.waiting: set[str] = set()
        """The stores that wait for it."""

    def sync(self, real: Callable[[int], None], fd: int) -> None:
        path = str(Path(f"/proc/self/fd/{fd}").readlink())
        if "/bad" in path and path.endswith(self._name) and not self.works.is_set():
            name = path.partition("/bad")[2].partition("/")[0]
            self.waiting.add(name)
            worked = self.works.wait(SOON)
            self.waiting.discard(name)
            assert worked
        real(fd)

    def hang(self, name: str = "") -> None:
        """`name`: only for files that are called so."""
        self._name = name
        self.works.clear()


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    disk = Disk()
    for name in ("fsync", "fdatasync"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda fd, real=real: disk.sync(real, fd))
    yield disk
    disk.works.set()


@pytest.fixture
def router(disk: Disk, tmp_path: Path) -> Iterator[anabranch.Router]:
    options: dict[str, Any] = {"segment_size": 64 * 1024, "pool_files": 0}
    dead = anabranch.JournalOptions(sync=anabranch.Sync.NEVER, dead_letter="dead", **options)
    stores = [
        anabranch.StoreConfig(f"bad{n}", [f"bad{n}.>"], journal=anabranch.JournalOptions(**options))
        for n in range(HUNG)
    ]
    stores += [
        anabranch.StoreConfig("each", ["each.>"], per_destination=True, journal=dead),
        anabranch.StoreConfig("good", ["good.>"], journal=dead),
        anabranch.StoreConfig("dead", ["dead"], journal=anabranch.JournalOptions(sync=anabranch.Sync.NEVER)),
    ]
    with anabranch.open(anabranch.Config(tmp_path / "data", stores)) as router:
        for n in range(HUNG):
            router.queue(f"bad{n}.q").send(b"x")
        router.queue("good.q").send(b"first")
        yield router
        disk.works.set()


@pytest.fixture
def hung(disk: Disk, router: anabranch.Router) -> Iterator[list[anabranch.Queue]]:
    """Queues of stores that hang, in futures that leaders are to write and in jobs of the background."""
    queues = [router.queue(f"bad{n}.q") for n in range(HUNG)]
    disk.hang()
    futures = [queue.send_nowait(b"y") for queue in queues]
    eventually(lambda: len(disk.waiting) == HUNG)
    yield queues
    shown = disk.works.is_set() or not any(future.done() for future in futures)
    assert shown, "the stores hang no more: the test has shown nothing"
    disk.works.set()
    for future in futures:
        future.result(SOON)


def test_expired_messages_become_dead_letters(router: anabranch.Router, hung: list[anabranch.Queue]) -> None:
    for _ in range(2):
        router.queue("good.q").send(b"late", expires_in=0.001)
        message = take(router.queue("dead"), SOON)
        assert message.body == b"late"
        message.ack()


def test_dead_letters_while_the_hung_stores_are_asked_for_theirs(
    router: anabranch.Router, hung: list[anabranch.Queue], monkeypatch: pytest.MonkeyPatch, disk: Disk
) -> None:
    """A store may hang under the very lock that the background wants from it: each look finds it so."""
    asked: set[str] = set()
    for store in router._registry.open_stores():
        if store.name.startswith("bad"):

            def hangs(limit: int = 100, name: str = store.name) -> list[Any]:
                asked.add(name)
                assert disk.works.wait(SOON)
                return []

            monkeypatch.setattr(store, "take_undelivered", hangs)
    eventually(lambda: len(asked) == HUNG)
    for _ in range(2):
        router.queue("good.q").send(b"late", expires_in=0.001)
        message = take(router.queue("dead"), SOON)
        message.ack()


def test_futures_resolve(router: anabranch.Router, hung: list[anabranch.Queue]) -> None:
    for _ in range(2):
        assert not router.queue("good.q").send_nowait(b"z").result(SOON).duplicate


def test_a_store_whose_mark_hangs_takes_messages(router: anabranch.Router, disk: Disk) -> None:
    """The mark that an idle log leaves is written beside what is sent."""
    disk.hang("watermark")
    router.queue("bad0.q").send(b"y")
    eventually(lambda: "0" in disk.waiting)
    for _ in range(2):
        assert not router.queue("bad0.q").send_nowait(b"z").result(SOON).duplicate
    assert "0" in disk.waiting


def test_segments_are_freed_in_the_background(router: anabranch.Router, hung: list[anabranch.Queue]) -> None:
    queue = router.queue("good.q")
    for _ in range(10):
        queue.send(bytes(20_000))
    while (message := queue.receive()) is not None:
        message.ack()
    store = next(store for store in router._registry.open_stores() if store.name == "good")
    eventually(lambda: store.stats().segments["retained"] == 0)


def test_statistics_are_told_of_those_that_answer(
    router: anabranch.Router, hung: list[anabranch.Queue], monkeypatch: pytest.MonkeyPatch, disk: Disk
) -> None:
    before = router.stats()
    assert before.unresponsive == ()
    monkeypatch.setattr(store_statistics, "ANSWER_SECONDS", 1.0)
    calls: list[str] = []
    for store in router._registry.open_stores():
        if store.name in ("bad0", "bad1"):

            def hangs(name: str = store.name) -> anabranch.StoreStats:
                calls.append(name)
                assert disk.works.wait(SOON)
                raise AssertionError("nobody waits for this any more")

            monkeypatch.setattr(store, "stats", hangs)
    router.queue("good.q").send(b"second")
    for _ in range(2):
        stats = router.stats()
        assert set(stats.unresponsive) >= {"bad0", "bad1"}
        assert list(stats.stores) == list(before.stores)
        assert stats.stores["bad0"] == before.stores["bad0"], "what it said last"
        if "good" not in stats.unresponsive:  # on a machine that is busy
            assert stats.stores["good"].messages == before.stores["good"].messages + 1
    asked = len(calls)
    for _ in range(3):
        assert set(router.stats().unresponsive) >= {"bad0", "bad1"}
    assert len(calls) == asked, "who does not answer is not asked again, with a thread each time"


def test_destinations_are_told_from_memory(router: anabranch.Router, hung: list[anabranch.Queue]) -> None:
    with Parallel(router.destinations) as found:
        assert len(found.result()) == HUNG + 1


def test_reclaiming_all_frees_what_it_can(
    router: anabranch.Router, hung: list[anabranch.Queue], monkeypatch: pytest.MonkeyPatch, disk: Disk
) -> None:
    reclaimed = threading.Event()
    for store in router._registry.open_stores():
        monkeypatch.setattr(
            store, "reclaim", reclaimed.set if store.name == "good" else lambda: int(disk.works.wait(SOON))
        )
    with Parallel(router.reclaim) as reclaiming:
        assert reclaimed.wait(SOON)
        disk.works.set()
        assert reclaiming.result() >= HUNG


def test_decisions_of_the_others_are_forgotten(
    router: anabranch.Router, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a store that hangs are, once it works again; neither those nor it hold up the end of the others."""
    cleanup, decisions = router._coordinator.cleanup, router._coordinator.log.decisions
    keep_background_out(router, monkeypatch)
    monkeypatch.setattr(cleanup_module, "SYNC_SECONDS", 0.01)
    router.send("bad0.q,good.q", b"1")
    router.send("good.q,dead", b"2")
    first, _ = decisions
    disk.hang()
    store = next(store for store in router._registry.open_stores() if store.name == "bad0")
    sync = store.sync

    def hangs() -> None:  # whether or not the disk has it already
        assert disk.works.wait(SOON)
        sync()

    monkeypatch.setattr(store, "sync", hangs)

    def left() -> list[bytes]:
        cleanup.run()
        return list(decisions)

    with Parallel(lambda: eventually(lambda: left() == [first])) as running:
        running.result()
    disk.works.set()
    eventually(lambda: left() == [])


def test_the_others_are_closed(
    router: anabranch.Router, disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And free: another may lock them."""
    store_path = tmp_path / "data" / "stores" / "good"
    disk.hang()
    futures = [router.queue(f"bad{n}.q").send_nowait(b"y") for n in range(HUNG)]
    eventually(lambda: len(disk.waiting) == HUNG)
    with Parallel(router.close) as closing:
        eventually(lambda: "good" not in {store.name for store in router._registry.open_stores()})
        lock = DirectoryLock(store_path / "store.lock", "the store")
        lock.acquire()
        lock.release()
        assert not any(future.done() for future in futures)
        disk.works.set()
        closing.result()
    for future in futures:
        future.result(SOON)


def test_other_stores_are_opened(
    router: anabranch.Router, hung: list[anabranch.Queue], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though as many are open as may be, and those that would have to be closed hang."""
    monkeypatch.setattr(stores_module, "OPEN_STORES_MAX", len(router._registry.open_stores()))
    for n in range(3):
        assert not router.queue(f"each.{n}").send(b"x").duplicate
        assert router.queue(f"each.{n}").depth() == 1


def test_a_lost_lock_is_noticed(router: anabranch.Router, disk: Disk, tmp_path: Path) -> None:
    """While it cannot be looked whether others are there, each of which is looked after all the same only once."""
    good = next(store for store in router._registry.open_stores() if store.name == "good")
    directory = good.backend._directory  # type: ignore[attr-defined]
    looked: list[DirectoryLock] = []
    disk.hang()
    for store in router._registry.open_stores():
        if store.name.startswith("bad"):
            lock = store.backend._directory._lock  # type: ignore[attr-defined]

            def hangs(lock: DirectoryLock = lock) -> None:
                looked.append(lock)
                assert disk.works.wait(SOON)

            lock.lost = hangs
    eventually(lambda: len(looked) == HUNG)
    (directory.path / "store.lock").unlink()
    eventually(lambda: good.stats().failed is not None)
    assert len(looked) == HUNG
    assert len(lock_watch._held) >= HUNG


def test_statistics_say_how_long_a_store_waits_for_the_disk(tmp_path: Path) -> None:
    kinds = ("journal", "sql", "memory")
    stores = [anabranch.StoreConfig(kind, [f"{kind}.>"], kind=kind) for kind in kinds]
    with anabranch.open(anabranch.Config(tmp_path / "data", stores)) as router:
        for kind in kinds:
            for _ in range(9):
                router.queue(f"{kind}.q").send(b"x")
        stats = [router.stats().stores[kind] for kind in kinds]
        took = [one.sync_seconds for one in stats]
        assert 0 < took[0] < 10 and 0 < took[1] < 10 and took[2] == 0
        for one in stats[:2]:
            most = one.sync_durations.quantile(1)
            assert 9 <= sum(one.sync_durations.counts) <= one.syncs
            assert most is not None and 0 < one.sync_durations.seconds / one.syncs <= most
        assert stats[2].sync_durations == anabranch.Durations()
