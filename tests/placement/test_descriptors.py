"""File descriptors that run out: what is refused, what goes on, and that stores never have so many open (rule D5)."""

from __future__ import annotations

import errno
import logging
import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import count, islice
from pathlib import Path
from typing import Any

import pytest

import anabranch
from anabranch.adapters.journal import JournalStore
from anabranch.adapters.system.descriptors import LIMIT_MAX, read_files, shares, unsynced_files

from ..contract.disk import Parallel
from ..router.disk import said_in_a_child

BODY = 50_000
OPTIONS: dict[str, Any] = {
    "journal": anabranch.JournalOptions(segment_size=64 * 1024, pool_files=0, sync=anabranch.Sync.NEVER),
    "sql": anabranch.SqlOptions(),
    "memory": anabranch.MemoryOptions(max_bytes=128 * 1024),
}
Left = Callable[[int], AbstractContextManager[None]]


def config(directory: Path, kind: str = "journal", options: Any = None) -> anabranch.Config:
    """A store for all queues, one for each of each.>, and ten for those of s0.> to s9.>"""
    given: dict[str, Any] = {kind: OPTIONS[kind] if options is None else options}
    return anabranch.Config(
        directory,
        [
            anabranch.StoreConfig("all", [">"], **given),
            anabranch.StoreConfig("each", ["queue://each.>"], per_destination=True, **given),
            *(anabranch.StoreConfig(f"s{n}", [f"queue://s{n}.>"], **given) for n in range(10)),
        ],
    )


def opened() -> list[str]:
    """What this process has open."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            found.append(str(link.readlink()))
        except FileNotFoundError:
            pass  # the listing's own
    return found


def body(number: int) -> bytes:
    return str(number).encode().ljust(BODY)


@pytest.fixture
def limit() -> Iterator[int]:
    """80 more can be opened than there are; returns the number that the operating system wants to hear."""
    before, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    there = {int(path.name) for path in Path("/proc/self/fd").iterdir()}
    low = next(islice((number for number in count() if number not in there), 80, None))
    resource.setrlimit(resource.RLIMIT_NOFILE, (low, most))
    yield low
    resource.setrlimit(resource.RLIMIT_NOFILE, (before, most))


@pytest.fixture
def left(limit: int) -> Left:
    """`with left(n)`: the application has all open but so many."""

    @contextmanager
    def left(free: int) -> Iterator[None]:
        held: list[int] = []
        try:
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        except OSError as error:
            assert error.errno == errno.EMFILE
        for _ in range(free):
            os.close(held.pop())
        try:
            yield
        finally:
            for fd in held:
                os.close(fd)

    return left


@pytest.mark.parametrize("number", [16, 64, 100, 256, 1024, 4096, LIMIT_MAX])
def test_what_is_shared_out_is_no_more_than_there_is(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (number, resource.RLIM_INFINITY))
    of = shares()
    assert of.application == number // 4
    assert of.stores >= 4
    assert of.reading >= 1
    assert sum(of) <= number


@pytest.mark.parametrize("kind", ["journal", "sql", "memory"])
def test_what_finds_no_descriptor_is_refused_and_is_well_later(
    kind: str, tmp_path: Path, left: Left, caplog: pytest.LogCaptureFixture
) -> None:
    """However many are left, and whatever is asked for: one error, which says what to do, and takes no effect. No store
    fails, nothing is held, no index is thrown away."""
    caplog.set_level(logging.WARNING)
    setup = config(tmp_path, kind)
    sent = []
    if kind != "memory":
        with anabranch.open(setup) as router:
            for number in range(5):
                router.queue("q").send(body(number))
                sent.append(body(number))

    def refused(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except anabranch.OutOfDescriptorsError as error:
            assert "`ulimit -n` (it is" in str(error)
            assert "try again" in str(error)
            return None

    refusals = []
    for free in range(14) if kind != "sql" else (0, 4, 5, 8, 13):
        with left(free):
            router = refused(lambda: anabranch.open(setup))
            if router is None:
                refusals.append(free)
                continue
            try:
                queue = router.queue("q")
                message = refused(queue.receive)
                if message is not None:
                    message.release()
                if refused(lambda queue=queue, free=free: queue.send(body(100 + free))):  # type: ignore[misc]
                    sent.append(body(100 + free))
                refused(lambda queue=queue: list(queue.browse()))  # type: ignore[misc]
                refused(lambda router=router: router.queue("each.1").send(b"1"))  # type: ignore[misc]
                refused(lambda router=router: router.send("queue://q2,queue://each.1", b"2"))  # type: ignore[misc]
                refused(router.reclaim)
                stats = refused(router.stats)
                for store in stats.stores.values() if stats else ():
                    assert (store.failed, store.leased) == (None, 0)
            finally:
                router.close()
    assert refusals
    assert max(refusals) < 13
    assert "rebuilt" not in caplog.text
    with anabranch.open(setup) as router:
        if kind != "memory":
            assert [message.body for message in router.queue("q").browse()] == sent
        assert [found for store in router._registry.open_stores() for found in store.check()] == []
        assert router.in_doubt() == []


@pytest.mark.parametrize("kind", ["journal", "memory"])
def test_a_message_that_could_not_be_read_is_received_later(kind: str, tmp_path: Path, left: Left) -> None:
    """Its lease is given back, and it comes at its place."""
    with anabranch.open(config(tmp_path, kind)) as router:
        queue = router.queue("q")
        for number in range(20):
            queue.send(body(number))
        received = []
        with left(0), pytest.raises(anabranch.OutOfDescriptorsError):
            while (message := queue.receive()) is not None:
                received.append(message)
        assert router.stats().stores["all"].leased == len(received) < 20
        while (message := queue.receive()) is not None:
            received.append(message)
        assert [message.body for message in received] == [body(number) for number in range(20)]


def test_a_message_that_the_disk_does_not_give_is_received_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be whole: unlike bytes that are damaged it holds nobody up only while the disk does not."""
    with anabranch.open(config(tmp_path)) as router:
        queue = router.queue("q")
        queue.send(b"x")

        def unread(*_: Any) -> bytes:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        with monkeypatch.context() as patch:
            patch.setattr(os, "pread", unread)
            for _ in range(2):
                with pytest.raises(anabranch.CorruptionError, match="the disk cannot read it"):
                    queue.receive()
        message = queue.receive()
        assert message is not None
        assert message.body == b"x"


@pytest.mark.parametrize("sync", ["never", "always"])
def test_a_store_that_cannot_roll_over_goes_on_later(sync: str, tmp_path: Path, left: Left) -> None:
    options = anabranch.JournalOptions(segment_size=64 * 1024, pool_files=0, sync=anabranch.Sync(sync))
    with anabranch.open(config(tmp_path, options=options)) as router:
        queue = router.queue("q")
        queue.send(body(0))
        sent = 1
        for free in (0, 1):  # the file, the directory
            with left(free), pytest.raises(anabranch.OutOfDescriptorsError, match="Nothing was written"):
                for number in range(sent, 100):
                    queue.send(body(number))
                    sent += 1
            queue.send(body(sent))
            sent += 1
        assert router.stats().stores["all"].failed is None
    with anabranch.open(config(tmp_path, options=options)) as router:
        assert [message.body for message in router.queue("q").browse()] == [body(number) for number in range(sent)]


def test_all_stores_share_what_is_open_for_reading_and_for_syncing(tmp_path: Path, limit: int) -> None:
    """Backlogs of many segments each, browsed one after the other: a store that only sends rolls over all the while."""
    with anabranch.open(config(tmp_path)) as router:
        healthy, number = router.queue("q"), 0
        queues = [router.queue(f"s{n}.q") for n in range(10)]
        before = len(opened())
        for queue in queues:
            queue.send_many([body(n) for n in range(15)])
            assert len(unsynced_files) <= shares().unsynced + 1
        for queue in queues:
            for n, message in enumerate(queue.browse()):
                assert message.body == body(n)
                assert len(read_files) <= shares().reading
                assert len(opened()) - before <= limit - shares().application
            healthy.send(body(number))
            number += 1
        assert healthy.depth() == number
        assert [store.failed for store in router.stats().stores.values()] == [None] * 11


def test_many_stores_in_turn_at_few_descriptors(tmp_path: Path, limit: int) -> None:
    """One for each of sixty destinations, sent to and browsed; no more are open than fit."""
    with anabranch.open(config(tmp_path)) as router:
        before = len(opened())
        for n in range(60):
            router.queue(f"each.{n}").send(str(n).encode())
            assert len(opened()) - before <= limit - shares().application
        for n in range(60):
            (message,) = router.queue(f"each.{n}").browse()
            assert message.body == str(n).encode()
        assert len(router._registry.open_stores()) <= shares().stores // 4
    assert len(read_files) == 0


def test_two_routers_share_one_limit(tmp_path: Path, limit: int) -> None:
    with anabranch.open(config(tmp_path / "1")) as one, anabranch.open(config(tmp_path / "2")) as two:
        for n in range(40):
            for router in (one, two):
                router.queue(f"each.{n}").send(b"x")
        assert len(one._registry.open_stores()) + len(two._registry.open_stores()) <= shares().stores // 4


def test_idle_stores_make_way_where_the_application_takes_more_than_its_share(tmp_path: Path, left: Left) -> None:
    with anabranch.open(config(tmp_path)) as router:
        for n in range(5):
            router.queue(f"each.{n}").send(b"x")
        with left(1):
            for n in range(5, 10):
                router.queue(f"each.{n}").send(b"x")
        assert [router.queue(f"each.{n}").depth() for n in range(10)] == [1] * 10


def test_a_file_that_is_being_read_is_not_closed(tmp_path: Path, limit: int) -> None:
    """Rule J8: four threads that read four stores, each of which lets go of the others' files."""
    with anabranch.open(config(tmp_path)) as router:
        queues = [router.queue(f"s{n}.q") for n in range(4)]
        for queue in queues:
            queue.send_many([body(n) for n in range(12)])
        store = next(store for store in router._registry.open_stores() if store.name == "s0")
        assert isinstance(store, JournalStore)
        segment = store.backend._log.table.segments[0]
        file = segment.open()
        assert read_files.let_go()
        assert segment.file is None
        assert os.pread(file.fd, 8, 0) == b"ANBRSEG\n"

        def browse(queue: anabranch.Queue) -> None:
            for _ in range(10):
                assert [message.body for message in queue.browse()] == [body(n) for n in range(12)]
                read_files.let_go()

        threads = [Parallel(lambda queue=queue: browse(queue)) for queue in queues]  # type: ignore[misc]
        with threads[0], threads[1], threads[2], threads[3]:
            pass
        for thread in threads:
            thread.result()


def test_a_forked_child_reads_though_another_thread_was_opening_a_file(tmp_path: Path) -> None:
    def in_the_child() -> None:
        signal.alarm(10)  # instead of hanging for ever
        with anabranch.open(config(tmp_path / "child")) as router:
            router.queue("q").send_many([body(n) for n in range(5)])
            assert len(list(router.queue("q").browse())) == 5

    with read_files._lock, Parallel(lambda: said_in_a_child(in_the_child)) as forking:
        assert forking.result() == ["returned"]


def test_a_forked_child_opens_a_router_whatever_the_parents_other_threads_were_at(tmp_path: Path) -> None:
    router = anabranch.open(config(tmp_path / "parents"))
    router.queue("q").send(b"1")

    def in_the_child() -> None:
        signal.alarm(30)  # instead of hanging
        with anabranch.open(config(tmp_path / "childs")) as mine:
            mine.queue("q").send(b"1")

    with router._registry._stores._lock, Parallel(lambda: said_in_a_child(in_the_child)) as forking:
        assert forking.result() == ["returned"]
    router.close()
