"""queuelib's own tests and Scrapy's, over our queues; and that a kill loses nothing of them."""

from __future__ import annotations

import importlib.util
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import queuelib.queue
from queuelib.tests import QueuelibTestCase
from queuelib.tests.test_queue import FifoTestMixin, LifoTestMixin, PersistentTestMixin, QueueTestMixin

from anabranch.hosts.scrapy import FifoDiskQueue, FifoRequestQueue, LifoDiskQueue, LifoRequestQueue

from .. import SDISTS


class ChunkedQueue(FifoDiskQueue):
    """As queuelib's, which takes how many items it keeps in one file."""

    def __init__(self, path: Path, chunksize: int = 0) -> None:
        super().__init__(path)


queuelib.queue.FifoDiskQueue = ChunkedQueue  # of which scrapy.squeues makes its own
queuelib.queue.LifoDiskQueue = LifoDiskQueue

import scrapy.squeues  # noqa: E402
from scrapy import Request, Spider  # noqa: E402
from scrapy.core.scheduler import Scheduler  # noqa: E402
from scrapy.utils.test import get_crawler  # noqa: E402

scrapy.squeues.PickleFifoDiskQueue = FifoRequestQueue
scrapy.squeues.PickleLifoDiskQueue = LifoRequestQueue


def of_scrapy(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, next(SDISTS.glob("scrapy-*/tests")) / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # as pickle looks for its classes
    spec.loader.exec_module(module)
    return module


DEVIATIONS = {
    "test_chunks": "looks for files of queuelib's, of a given number of items",
    "test_clear_removes_chunks": "as test_chunks",
    "test_not_szhdr": "writes into a file of queuelib's",
}
"""Tests of theirs that fail, and why they may. One that passes fails here."""

LIKE_OURS = {f"{how}{order}DiskQueueTest" for how in ("Marshal", "Pickle") for order in ("Fifo", "Lifo")}
BASES: list[Any] = [
    *(one for name, one in vars(of_scrapy("test_squeues")).items() if name in LIKE_OURS),
    *(one for name, one in vars(of_scrapy("test_squeues_request")).items() if name.endswith("DiskQueueRequest")),
]
for base in BASES:
    for name, reason in DEVIATIONS.items():
        if hasattr(base, name):
            setattr(base, name, pytest.mark.xfail(strict=True, reason=reason)(getattr(base, name)))
    globals()[base.__name__] = base
crawler = of_scrapy("test_squeues_request").crawler


class TestFifo(FifoTestMixin, PersistentTestMixin, QueueTestMixin, QueuelibTestCase):
    def queue(self) -> FifoDiskQueue:
        return FifoDiskQueue(self.qpath)


class TestLifo(LifoTestMixin, PersistentTestMixin, QueueTestMixin, QueuelibTestCase):
    def queue(self) -> LifoDiskQueue:
        return LifoDiskQueue(self.qpath)


def test_there_are_tests_of_scrapy() -> None:
    assert len(BASES) == 8


@pytest.mark.parametrize("queue", ["FifoRequestQueue", "LifoRequestQueue"])
def test_a_scheduler_goes_on_where_another_has_ended(queue: str, tmp_path: Path) -> None:
    settings = {
        "JOBDIR": str(tmp_path),
        "SCHEDULER_DISK_QUEUE": f"anabranch.hosts.scrapy.{queue}",
        "SCHEDULER_PRIORITY_QUEUE": "scrapy.pqueues.ScrapyPriorityQueue",  # the default one asks a downloader
    }

    def opened() -> Scheduler:
        crawler = get_crawler(Spider, settings)
        crawler.spider = crawler._create_spider("shop")
        scheduler = Scheduler.from_crawler(crawler)
        scheduler.open(crawler.spider)
        return scheduler

    first = opened()
    for number in range(4):
        assert first.enqueue_request(Request(f"http://shop/{number}", priority=number // 2))
    order = [2, 3, 0, 1] if queue == "FifoRequestQueue" else [3, 2, 1, 0]
    request = first.next_request()
    assert request is not None and request.url == f"http://shop/{order[0]}"
    first.close("finished")
    second = opened()
    assert [request.url for request in iter(second.next_request, None)] == [f"http://shop/{n}" for n in order[1:]]
    second.close("finished")


CHILD = """
import itertools, sys
from anabranch.hosts import scrapy
queue = getattr(scrapy, sys.argv[1])(sys.argv[2])
for number in itertools.count(int(sys.argv[3])):
    queue.push(b"%d" % number)
    print("push", number, flush=True)
    if number % 3 == 0:
        print("pop", queue.pop().decode(), flush=True)
"""


@pytest.mark.parametrize("kind", [FifoDiskQueue, LifoDiskQueue])
def test_what_is_pushed_and_not_popped_is_there_after_a_kill(kind: type[FifoDiskQueue], tmp_path: Path) -> None:
    """The step that the kill strikes may have been taken, or not."""
    expected: list[int] = []
    number = 0
    for seen in (50, 200, 350):
        command = [sys.executable, "-c", CHILD, kind.__name__, str(tmp_path / "queue"), str(number)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            for _ in range(seen):
                number = applied(expected, child.stdout.readline(), number)
            child.send_signal(signal.SIGKILL)
            for line in child.stdout:
                number = applied(expected, line, number)
        queue = kind(tmp_path / "queue")
        last = number - 1
        pushed = [*expected, number]
        popped = [one for one in expected if one != (expected[0] if kind is FifoDiskQueue else expected[-1])]
        there = contents(queue, kind)
        assert there in ([expected, pushed] if last % 3 else [expected, pushed, popped])
        number += there == pushed
        expected = there
        for one in expected:
            queue.push(b"%d" % one)
        queue.close()


def applied(expected: list[int], line: str, number: int) -> int:
    if not line.endswith("\n"):
        return number
    what, which = line.split()
    if what == "pop":
        expected.remove(int(which))
        return number
    expected.append(int(which))
    return int(which) + 1


def contents(queue: FifoDiskQueue, kind: type[FifoDiskQueue]) -> list[int]:
    taken = [int(queue.pop()) for _ in range(len(queue))]
    return taken if kind is FifoDiskQueue else taken[::-1]
