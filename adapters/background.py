"""The threads that all stores of a process share (rules G4, D5): two workers, some leaders and one notifier.

Workers do what may take long (checkpoints, reclaiming) or come later; leaders write what is queued for several stores
at once, so that the stores' waits for the disk overlap.

Correctness never depends on them: what they do, a store also does on its own at the next call or at the next open.
They are daemons, hold a store only while they work for it, and do not exist in a forked child.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

log = logging.getLogger(__name__)

WORKERS = 2
LEADERS = 8
WAIT_MAX = 1.0
"""Seconds; a notification that an interrupted thread failed to give is made up for after it."""


class Background:
    """Runs small jobs, now or after a delay. Safe for all threads; `schedule` never blocks for long."""

    def __init__(self) -> None:
        # Guards _jobs, _threads and _leaders; re-entrant for signal handlers. Callers take the lock itself: Condition's
        # own `with` is Python code, in which Ctrl-C could strike the main thread just after it had taken the lock.
        self._lock = threading.RLock()
        self._condition = threading.Condition(self._lock)
        self._jobs: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._threads: list[threading.Thread] = []
        self._leaders: list[threading.Thread] = []
        self._leads: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._outcomes: SimpleQueue[list[tuple[Future[Any], Any, BaseException | None]]] = SimpleQueue()

    def schedule(self, delay: float, job: Callable[[], None]) -> None:
        """Run `job` on a worker once `delay` seconds have passed."""
        with self._lock:
            heapq.heappush(self._jobs, (time.monotonic() + delay, next(self._numbers), job))
            self._start()
            if self._jobs[0][2] is job:
                self._condition.notify()

    def schedule_while_alive(self, delay: float, method: Callable[[], None]) -> None:
        """As `schedule`, for a bound method; skipped if nobody holds its object any more by then. For what an
        object does for its holders alone: a timer must not keep alive, and locked, what they have let go of."""
        alive = weakref.WeakMethod(method)

        def run() -> None:
            method = alive()
            if method is not None:
                method()

        self.schedule(delay, run)

    def resolve(self, outcomes: list[tuple[Future[Any], Any, BaseException | None]]) -> None:
        """Resolve futures on the notifier thread, where their callbacks may do what they like (rule G4)."""
        self._outcomes.put(outcomes)
        if not self._threads:
            with self._lock:
                self._start()

    def lead(self, job: Callable[[], None]) -> None:
        """Run `job` now on a leader. Cheaper than `schedule`, and no checkpoint is in the way."""
        self._leads.put(job)
        if not self._leaders:
            with self._lock:
                if not self._leaders:
                    self._leaders = _started(LEADERS, self._lead, "leader")

    def _lead(self) -> None:
        while True:
            job = self._leads.get()
            _run(job)
            del job

    def _start(self) -> None:
        if self._threads:
            return
        # Assigned last: if one could not be started, or Ctrl-C came, the next call tries again.
        self._threads = [*_started(WORKERS, self._work, "worker"), *_started(1, self._notify, "notifier")]

    def _work(self) -> None:
        while True:
            with self._condition:
                while not self._jobs or self._jobs[0][0] > time.monotonic():
                    pause = self._jobs[0][0] - time.monotonic() if self._jobs else WAIT_MAX
                    self._condition.wait(min(pause, WAIT_MAX))
                job = heapq.heappop(self._jobs)[2]
                if self._jobs:
                    self._condition.notify()
            _run(job)
            del job  # a waiting worker must not keep a closed store alive

    def _notify(self) -> None:
        while True:
            for future, result, error in self._outcomes.get():
                if future.done():
                    continue  # a leader that made up for an interrupted one says it again
                if error is None:
                    future.set_result(result)
                else:
                    future.set_exception(error)


def _started(count: int, target: Callable[[], None], what: str) -> list[threading.Thread]:
    threads = [threading.Thread(target=target, name=f"anabranch-{what}-{i}", daemon=True) for i in range(count)]
    for thread in threads:
        thread.start()
    return threads


def _run(job: Callable[[], None]) -> None:
    try:
        job()
    except Exception:
        log.exception("a background job failed: %r", job)


_shared = Background()


def shared() -> Background:
    """The process's one."""
    return _shared


def _after_fork_in_child() -> None:
    global _shared
    _shared = Background()


os.register_at_fork(after_in_child=_after_fork_in_child)
