"""Disk queues for Scrapy, and for whoever else uses queuelib: no kill leaves one that cannot be read.

    JOBDIR = "crawls/shop"  # in settings.py
    SCHEDULER_DISK_QUEUE = "anabranch.hosts.scrapy.LifoRequestQueue"
    SCHEDULER_START_DISK_QUEUE = "anabranch.hosts.scrapy.FifoRequestQueue"

The requests of a job are in `JOBDIR/anabranch`, one router for all priorities. Those that were pushed and not popped
yet are there after `kill -9`; after a power failure all but those of the last second. As with Scrapy's own queues a
request is gone once it is popped, answered or not.

`FifoDiskQueue(path)` and `LifoDiskQueue(path)` stand for queuelib's: queues of bytes, each in a directory of its own.
"""

from __future__ import annotations

import atexit
import pickle
import shutil
from os.path import relpath
from pathlib import Path
from typing import Any

import anabranch

_jobs: dict[Path, anabranch.Router] = {}
"""The routers of this process's jobs, by their directory. They are open until it ends: Scrapy closes a queue each time
that it is empty."""


def _opened(directory: str | Path) -> anabranch.Router:
    journal = anabranch.JournalOptions(sync=anabranch.Sync.PERIODIC)
    return anabranch.open(anabranch.Config(directory, [anabranch.StoreConfig("all", [">"], journal=journal)]))


class FifoQueue:
    """A queue of bytes, first in, first out, in an open router. Threads: one at a time, in one process: it counts for
    itself what is in it."""

    _newest = False

    def __init__(self, router: anabranch.Router, name: str) -> None:
        self._queue = router.queue(anabranch.Destination.queue(name))
        self._size = self._queue.counts().ready

    def push(self, item: Any) -> None:
        """Add an item. Raises TypeError for what is not bytes."""
        if not isinstance(item, bytes):
            raise TypeError(f"Unsupported type: {type(item).__name__}")
        self._queue.send(item)
        self._size += 1

    def pop(self) -> Any:
        """Remove the next item, and return it; None if there is none."""
        message = self._queue.receive(newest=self._newest) if self._size else None
        if message is None:
            return None
        message.ack()
        self._size -= 1
        return message.body

    def peek(self) -> Any:
        """Return the next item; None if there is none."""
        return self._peek() if self._size else None

    def clear(self) -> None:
        """Remove all items."""
        self._queue.purge()
        self._size = 0

    def close(self) -> None:
        """Do nothing: the queue is on disk."""

    def __len__(self) -> int:
        return self._size

    def _peek(self) -> bytes | None:
        return next((message.body for message in self._queue.browse(1)), None)


class LifoQueue(FifoQueue):
    """A queue of bytes, last in, first out."""

    _newest = True

    def _peek(self) -> bytes | None:
        message = self._queue.receive(newest=True)
        if message is None:
            return None
        message.release(delivered=False)
        return message.body


class _InDirectory(FifoQueue):
    def __init__(self, path: str | Path) -> None:
        self._path = path
        self._router = _opened(path)
        super().__init__(self._router, "all")

    def close(self) -> None:
        """Close the queue's router, and remove its directory if it is empty."""
        self._router.close()
        if not self._size:
            shutil.rmtree(self._path, ignore_errors=True)


class FifoDiskQueue(_InDirectory, FifoQueue):
    """queuelib's queue of that name, in a directory of its own."""


class LifoDiskQueue(_InDirectory, LifoQueue):
    """queuelib's queue of that name, in a directory of its own."""


class _OfCrawler(FifoQueue):
    def __init__(self, crawler: Any, key: str) -> None:
        self._spider = crawler.spider
        job = crawler.settings["JOBDIR"] or Path(key).parent  # without one, a scheduler has no disk queues
        directory = Path(job, "anabranch").absolute()
        if directory not in _jobs:
            _jobs[directory] = router = _opened(directory)
            atexit.register(router.close)
        super().__init__(_jobs[directory], relpath(key, job))

    @classmethod
    def from_crawler(cls, crawler: Any, key: str) -> _OfCrawler:
        """Make the queue that the scheduler calls `key`, a path below its JOBDIR."""
        return cls(crawler, key)

    def push(self, request: Any) -> None:
        """Add a request. Raises ValueError for one that cannot be pickled, which Scrapy then keeps in memory."""
        try:
            item = pickle.dumps(request.to_dict(spider=self._spider), protocol=4)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ValueError(str(error)) from error
        super().push(item)

    def pop(self) -> Any:
        """Remove the next request, and return it; None if there is none."""
        return self._request(super().pop())

    def peek(self) -> Any:
        """Return the next request; None if there is none."""
        return self._request(super().peek())

    def _request(self, item: bytes | None) -> Any:
        from scrapy.utils.request import request_from_dict  # queuelib alone has no requests

        return None if item is None else request_from_dict(pickle.loads(item), spider=self._spider)


class FifoRequestQueue(_OfCrawler, FifoQueue):
    """The requests of a job, first in, first out, for SCHEDULER_DISK_QUEUE."""


class LifoRequestQueue(_OfCrawler, LifoQueue):
    """The requests of a job, last in, first out, for SCHEDULER_DISK_QUEUE."""
