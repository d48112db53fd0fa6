"""The writing end of a log, compiled and in Python: what both promise."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from anabranch import Durations
from anabranch.adapters.wal.appending import Appender
from anabranch.adapters.wal.appending.python_appender import PythonAppender
from anabranch.adapters.wal.ticket import Tail, WriteBatch

from ..contract.disk import Parallel, eventually


class Log:
    """A file, what was queued for it, and how long the disk takes."""

    def __init__(self, path: Path, appender: PythonAppender) -> None:
        self.path, self.appender = path, appender
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT)
        self.last = self._batch(b"", 0)
        appender.restart(self.last)
        appender.segment(self.fd, 0)
        self._lock = threading.Lock()

    def _batch(self, data: bytes, offset: int) -> WriteBatch:
        start = Tail(None, offset, 0, 0)  # type: ignore[arg-type]
        return WriteBatch(start, start._replace(offset=offset + len(data)), None, data)

    def put(self, data: bytes, sync: bool = True) -> int:
        with self._lock:
            last = self.last
            batch = self._batch(data, last.tail.offset)
            batch.number = number = last.number + 1
            batch.tail = batch.tail._replace(lsn=10 * number)
            self.appender.put(data, batch.tail.lsn, sync, last, batch)
            assert last.next is batch
            self.last = batch
            return number

    def write(self, data: bytes) -> None:
        number = self.put(data)
        self.appender.settle(number, number)


@pytest.fixture(params=[Appender, PythonAppender], ids=["as it is installed", "in Python"])
def one(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Log]:
    log = Log(tmp_path / "file", request.param())
    yield log
    log.appender.segment(-1, 0)
    os.close(log.fd)


def no(*_: object) -> Any:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def all_of(work: Callable[[int], object], count: int) -> None:
    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def test_how_long_syncs_take_is_known(one: Log) -> None:
    """The latest count most."""
    assert one.appender.sync_seconds == 0
    lately = []
    for seconds in (0.02, 0.0):
        with patch.object(os, "fdatasync", lambda fd, seconds=seconds: time.sleep(seconds)):
            for _ in range(25):
                one.write(b"x")
        lately.append(one.appender.sync_seconds)
    assert lately[0] > 0.02 * 0.7 and lately[1] < lately[0]
    durations = one.appender.sync_durations
    assert sum(durations.counts) == one.appender.syncs == 50
    slow = sum(durations.counts[bisect_left(durations.BOUNDS, 0.02) :])
    assert slow >= 25 and durations.seconds > 25 * 0.02


def test_what_is_written_alone_takes_no_sync(one: Log) -> None:
    one.appender.settle(one.put(b"x"), 0)
    assert one.appender.sync_durations == Durations()


def test_what_is_queued_is_written_together_and_synced_once(one: Log) -> None:
    numbers = [one.put(b"%d" % number) for number in range(20)]
    assert (one.appender.written, one.path.read_bytes()) == (0, b"")
    one.appender.settle(numbers[4], 0)
    assert (one.appender.written, one.appender.durable, one.appender.syncs) == (20, 0, 0)
    one.appender.settle(numbers[9], numbers[9])
    assert (one.appender.durable, one.appender.durable_lsn, one.appender.syncs) == (20, 200, 1)
    one.appender.settle(numbers[-1], numbers[-1])
    assert one.appender.syncs == 1
    assert one.path.read_bytes() == b"".join(b"%d" % number for number in range(20))


def test_one_without_bytes_is_durable_with_those_before_it(one: Log) -> None:
    one.put(b"x")
    nothing = one.put(b"")
    one.appender.settle(nothing, nothing)
    assert (one.appender.durable, one.appender.syncs, one.path.read_bytes()) == (2, 1, b"x")


def test_many_threads_each_find_theirs_on_disk_in_order(one: Log) -> None:
    def work(number: int) -> None:
        for count in range(100):
            if number % 4:
                one.write(b"%d " % (100 * number + count))
            else:
                one.appender.settle(one.put(b"%d " % (100 * number + count), sync=False), 0)

    all_of(work, 16)
    found = [int(text) for text in one.path.read_bytes().split()]
    assert sorted(found) == list(range(1600))
    for number in range(16):
        assert [text for text in found if text // 100 == number] == list(range(100 * number, 100 * number + 100))
    assert one.appender.syncs <= 1200


def test_one_alone_waits_for_nobody(one: Log) -> None:
    """Once those are gone that shared its last syncs."""

    def work(_: int) -> None:
        for _ in range(20):
            one.write(b"x")

    all_of(work, 4)
    before = one.appender.syncs
    for _ in range(20):
        one.write(b"y")
    assert one.appender.syncs == before + 20


@pytest.mark.parametrize("call", ["pwrite", "fdatasync"])
def test_an_error_is_for_all_who_wait_and_is_the_last(one: Log, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    one.write(b"kept")
    told: list[OSError] = []
    numbers = [one.put(b"lost") for _ in range(8)]

    def work(number: int) -> None:
        try:
            one.appender.settle(numbers[number], numbers[number])
        except OSError as error:
            told.append(error)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, no)
        all_of(work, 8)
    assert len(told) == 8
    assert {error.errno for error in told} == {errno.EIO}
    assert (one.appender.durable, one.appender.attempted) == (1, 9)
    assert one.appender.written == (1 if call == "pwrite" else 9)
    with pytest.raises(OSError):
        one.put(b"more")
    assert one.path.read_bytes().startswith(b"kept")


def test_a_short_write_goes_on(one: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: real(fd, bytes(data)[:3], offset))
    one.write(b"0123456789")
    assert one.path.read_bytes() == b"0123456789"


def test_a_full_disk_half_way_is_an_error(one: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite

    def full(fd: int, data: bytes, offset: int) -> int:
        if offset:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, bytes(data)[:3], offset)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space"):
        one.write(b"0123456789")
    assert one.appender.written == 0


def test_who_waits_for_a_disk_that_hangs_can_be_interrupted(one: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    real, hangs, goes_on = os.fdatasync, threading.Event(), threading.Event()

    def fdatasync(fd: int) -> None:
        hangs.set()
        goes_on.wait(60)
        real(fd)

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    first = threading.Thread(target=one.write, args=(b"first",))
    first.start()
    hangs.wait(60)
    number = one.put(b"second")

    def interrupt() -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    with pytest.raises(KeyboardInterrupt), Parallel(interrupt):
        one.appender.settle(number, number)
    assert one.appender.durable == 0
    goes_on.set()
    first.join()
    one.appender.settle(number, number)
    assert one.path.read_bytes() == b"firstsecond"


def test_what_a_signal_handler_raises_amid_a_write_ends_the_wait_and_nothing_else(
    one: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwrite
    struck: list[int] = []

    def pwrite(fd: int, data: bytes, offset: int) -> int:
        if not struck:
            struck.append(1)
            raise KeyboardInterrupt
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    number = one.put(b"whole")
    with pytest.raises(KeyboardInterrupt):
        one.appender.settle(number, number)
    one.appender.settle(number, number)
    assert (one.path.read_bytes(), one.appender.durable) == (b"whole", 1)


def test_the_next_segment_begins_once_nobody_uses_the_one_before(one: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    one.appender.settle(one.put(b"old", sync=False), 0)
    real, hangs, goes_on = os.fdatasync, threading.Event(), threading.Event()
    synced: list[Path] = []

    def fdatasync(fd: int) -> None:
        hangs.set()
        goes_on.wait(60)
        synced.append(Path(f"/proc/self/fd/{fd}").readlink())
        real(fd)

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    syncing = threading.Thread(target=one.appender.settle, args=(1, 1))
    syncing.start()
    hangs.wait(60)
    path = one.path.with_name("next")
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    moving = threading.Thread(target=one.appender.segment, args=(fd, 0))
    moving.start()
    goes_on.set()
    moving.join()
    syncing.join()
    one.last.tail = one.last.tail._replace(offset=0)
    one.write(b"new")
    assert (one.path.read_bytes(), path.read_bytes()) == (b"old", b"new")
    assert [file.name for file in synced] == ["file", "next"]
    one.appender.segment(-1, 0)
    os.close(fd)


def test_what_is_kicked_is_synced_though_nobody_waits(one: Log) -> None:
    one.put(b"x")
    one.appender.kick()
    if isinstance(one.appender, PythonAppender):
        one.appender.settle(1, 1)
    eventually(lambda: one.appender.durable == 1)


def test_once_stopped_it_writes_nothing_more(one: Log) -> None:
    one.write(b"kept")
    number = one.put(b"not this")
    one.appender.stop()
    with pytest.raises(OSError):
        one.appender.settle(number, 0)
    with pytest.raises(OSError):
        one.put(b"nor this")
    assert (one.appender.attempted, one.path.read_bytes()) == (1, b"kept")


def test_it_writes_to_its_own_file_alone(one: Log) -> None:
    """Whoever owns the file may close it, and its number be another's."""
    one.write(b"1")
    os.close(one.fd)
    other = os.open(one.path.with_name("other"), os.O_RDWR | os.O_CREAT)
    assert other == one.fd
    one.write(b"2")
    assert (one.path.read_bytes(), os.pread(other, 9, 0)) == (b"12", b"")


def descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_it_lets_go_of_its_descriptor(one: Log) -> None:
    one.write(b"1")
    before = descriptors()
    one.appender = type(one.appender)()
    one.appender.segment(one.fd, 0)
    assert descriptors() == before
    one.appender.segment(-1, 0)
    assert descriptors() == before - 1


def test_a_forked_child_is_refused_and_leaves_the_file_alone(one: Log) -> None:
    if isinstance(one.appender, PythonAppender):
        return  # the log asks first
    one.write(b"parent")
    child = os.fork()
    if not child:
        try:
            one.put(b"child")
        except Exception:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    one.write(b" goes on")
    assert one.path.read_bytes() == b"parent goes on"
