"""The threads that all stores of a process share (rules G4, D5): workers, leaders, a clock and a notifier.

Workers do what may take long (checkpoints, reclaiming) or come later; leaders write and deliver what nobody waits for,
for several stores at once, so that the stores' waits for the disk overlap. A job that takes long, since its store's
disk hangs, holds up nobody else: the clock, which runs no job itself, then starts more threads for the jobs that wait
behind it, and they end once they have had nothing to do for a while. At most one job of one method of an object runs at
a time, so that a store that hangs holds no more threads than it has parts.

Correctness never depends on these threads: what they do, a store also does on its own at the next call or at the next
open. They are daemons, hold a store only while they work for it, and do not exist in a forked child.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any, Final, Generic, NamedTuple, TypeVar

from .conditions import Promise, Thread

log: logging.Logger = logging.getLogger(__name__)

WORKERS: Final = 2
LEADERS: Final = 8
THREADS_MAX: Final = 512
"""Workers, and leaders, while so many jobs take long at once."""
SLOW_SECONDS: Final = 0.1
"""A job that has run for so long holds up nobody else from then on."""
IDLE_SECONDS: Final = 10.0
"""A thread beyond the usual number that has had nothing to do for so long ends."""
WAIT_MAX: Final = 1.0
"""Seconds; a notification that an interrupted thread failed to give is made up for after it."""

Job = Callable[[], None]
T = TypeVar("T")
R = TypeVar("R")


class Outcome(NamedTuple, Generic[T, R]):
    """The outcome of one call of `for_each`: its value, or the error that it raised."""

    item: T
    value: R | None
    error: BaseException | None


class Background:
    """Runs small jobs, now or after a delay. Safe for all threads; no method but `for_each` blocks for long."""

    def __init__(self) -> None:
        # Guards all fields; re-entrant for signal handlers. Callers take the lock itself: Condition's own `with` is
        # Python code, in which Ctrl-C could strike the main thread just after it had taken the lock.
        self._lock = threading.RLock()
        self._condition = threading.Condition(self._lock)
        self._jobs: list[tuple[float, int, Job]] = []
        """Jobs that are scheduled, as a heap by their time (monotonic). Only the clock takes jobs out."""
        self._numbers = itertools.count()
        self._running: dict[int, deque[Job]] = {}
        """By the id of the object whose job runs: its next ones, which wait for that. Never the main thread's to
        change, which Ctrl-C could strike between two steps."""
        self._walks: list[_Walk[Any, Any]] = []
        self._watching = False
        """The clock looks in SLOW_SECONDS whether jobs get on."""
        self._threads: list[threading.Thread] = []
        self._workers = _Pool("worker", WORKERS)
        self._leaders = _Pool("leader", LEADERS)
        self._outcomes: SimpleQueue[list[tuple[Future[Any], Any, BaseException | None]]] = SimpleQueue()

    def schedule(self, delay: float, job: Job) -> None:
        """Run `job` on a worker once `delay` seconds have passed. If it is a method, then not while another job that is
        a method of the same object runs."""
        with self._lock:
            heapq.heappush(self._jobs, (monotonic() + delay, next(self._numbers), job))
            self._start()
            if self._jobs[0][2] is job:
                self._condition.notify()

    def schedule_while_alive(self, delay: float, method: Job) -> None:
        """Schedule a bound method, as `schedule`; it is skipped if nobody holds its object any more by then. For what
        an object does for its holders alone. A timer must not keep alive, and locked, what they have let go of."""
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

    def lead(self, job: Job) -> None:
        """Run `job` now on a leader. Cheaper than `schedule`, and no checkpoint is in the way."""
        self._leaders.put(job)
        if not self._watching and self._leaders.is_behind():
            self._watch()

    def call(self, call: Callable[[], R]) -> Future[R]:
        """Run it on a leader. The future resolves on the notifier thread, with what it returns or raises."""
        future: Future[R] = Promise()
        future.set_running_or_notify_cancel()

        def run() -> None:
            value, error = None, None
            try:
                value = call()
            except BaseException as raised:
                error = raised
            self.resolve([(future, value, error)])

        self.lead(run)
        return future

    def for_each(self, items: Iterable[T], call: Callable[[T], R], timeout: float | None = None) -> list[Outcome[T, R]]:
        """Call with each, one after the other, in this thread; returns what became of each, in the order in which they
        ended. Behind one that takes long the others are called on workers.

        Without a `timeout` it waits for all. With one, in seconds, all are called on workers, and those that have not
        ended by then are missing from what is returned. Ctrl-C ends it after the calls that are under way.
        """
        walk = _Walk(items, call)
        count = len(walk.items)
        deadline = None if timeout is None else monotonic() + timeout
        try:
            if timeout is not None or count > 1:
                self._watch(walk)
            if deadline is None:
                walk.run()
            else:
                self._workers.put(walk.run)
            return walk.outcomes_of(count, deadline)
        finally:
            walk.items.clear()  # first: if Ctrl-C comes now, the clock forgets a walk that has nothing left
            with self._lock:
                self._walks = [other for other in self._walks if other is not walk]

    def _start(self) -> None:
        """Start the threads, unless they run. With the lock held."""
        if self._threads:
            return
        try:
            # Assigned last: if one could not be started, or Ctrl-C came, the next call tries again.
            self._threads = [_started("clock", self._run_clock), _started("notifier", self._notify)]
        except RuntimeError as error:  # the interpreter is about to end
            log.debug("no thread can be started: %s", error)

    def _watch(self, walk: _Walk[Any, Any] | None = None) -> None:
        """Let the clock look whether jobs get on, and this walk."""
        with self._lock:
            if walk is not None:
                self._walks.append(walk)
            self._start()
            self._condition.notify()

    # On the clock's thread

    def _run_clock(self) -> None:
        while True:
            with self._lock:
                self._hand_out(monotonic())
                self._walks = [walk for walk in self._walks if walk.items]
                slow = [walk for walk in self._walks if monotonic() - walk.since > SLOW_SECONDS]
            for walk in slow:
                walk.since = monotonic()
                self._workers.put(walk.run)
                del walk
            del slow
            self._workers.grow()
            self._leaders.grow()
            with self._condition:
                self._watching = False  # first: who queues a job after we have looked then says so
                self._watching = bool(self._walks) or self._workers.is_behind() or self._leaders.is_behind()
                pause = SLOW_SECONDS if self._watching else WAIT_MAX
                if self._jobs:
                    pause = min(pause, self._jobs[0][0] - monotonic())
                if pause > 0:
                    self._condition.wait(pause)

    def _hand_out(self, now: float) -> None:
        """Give what is due to the workers, but for an object whose job runs already."""
        while self._jobs and self._jobs[0][0] <= now:
            job = heapq.heappop(self._jobs)[2]
            key = id(getattr(job, "__self__", job))
            waiting = self._running.get(key)
            if waiting is not None:
                waiting.append(job)
            else:
                self._running[key] = deque()
                self._workers.put(partial(self._run, key, job))

    # On a worker's thread, on the notifier's

    def _run(self, key: int, job: Job) -> None:
        try:
            _run(job)
        finally:
            with self._lock:
                waiting = self._running[key]
                if waiting:
                    self._workers.put(partial(self._run, key, waiting.popleft()))
                else:
                    del self._running[key]

    def _notify(self) -> None:
        while True:
            for future, result, error in self._outcomes.get():
                if future.done():
                    continue  # a leader that made up for an interrupted one says it again
                try:
                    if error is None:
                        future.set_result(result)
                    else:
                        future.set_exception(error)
                except BaseException:  # of a callback; one that is an Exception the future has logged
                    log.exception("a callback of a future failed: %r", future)
            del future, result, error  # waiting, the thread must not keep alive what the callbacks hold


class _Pool:
    """Threads that run jobs in the order in which they come. Only the clock starts some; each ends by itself."""

    def __init__(self, name: str, size: int) -> None:
        self._name, self._size = name, size
        self._queue: SimpleQueue[Job] = SimpleQueue()
        self._lock = threading.Lock()
        """Guards `_count`: how many threads there are. Never taken by a thread that is not the clock or one of ours."""
        self._count = 0
        self._numbers = itertools.count()
        self._since: dict[int, float] = {}
        """When each thread that is at work began its job (monotonic), by the thread's id."""

    def put(self, job: Job) -> None:
        self._queue.put(job)

    def is_behind(self) -> bool:
        """Return whether jobs wait and no thread is free."""
        return len(self._since) >= self._count and not self._queue.empty()

    def _wanted(self) -> int:
        """Return how many threads to have: the usual number, and two more for each that has been at one job for long.
        So their number doubles while the next ones are held up too."""
        now = monotonic()
        slow = sum(now - since > SLOW_SECONDS for since in list(self._since.values()))
        return min(self._size + 2 * slow, THREADS_MAX)

    def grow(self) -> None:
        """Start the threads that are wanted, if there is a job for them."""
        if self._queue.empty():
            return
        try:
            for _ in range(self._wanted() - self._count):
                with self._lock:
                    self._count += 1
                try:
                    _started(f"{self._name}-{next(self._numbers)}", self._serve)
                except BaseException:
                    self._leave()
                    raise
        except RuntimeError as error:  # the interpreter is about to end, or the machine has no room for a thread
            log.debug("no thread can be started: %s", error)

    def _leave(self) -> None:
        with self._lock:
            self._count -= 1

    def _may_leave(self) -> bool:
        """Return whether this thread, which had nothing to do, is one too many; it is not counted any more then."""
        with self._lock:
            if self._count <= self._size:
                return False
            self._count -= 1
            return True

    def _serve(self) -> None:
        me = threading.get_ident()
        while True:
            try:
                job = self._queue.get(timeout=IDLE_SECONDS)
            except Empty:
                if self._may_leave():
                    return
                continue
            self._since[me] = monotonic()
            try:
                _run(job)
            finally:
                del self._since[me]
            del job  # a waiting thread must not keep a closed store alive


class _Walk(Generic[T, R]):
    """The calls of one `for_each`. Any number of threads may be at it, each at another item."""

    def __init__(self, items: Iterable[T], call: Callable[[T], R]) -> None:
        self.items = deque(items)
        self.since = monotonic()
        """When the last call began."""
        self._call = call
        self._outcomes: SimpleQueue[Outcome[T, R]] = SimpleQueue()

    def run(self) -> None:
        """Call with what is left."""
        while True:
            try:
                item = self.items.popleft()
            except IndexError:
                return
            self.since = monotonic()
            try:
                outcome: Outcome[T, R] = Outcome(item, self._call(item), None)
            except Exception as error:
                outcome = Outcome(item, None, error)
            except BaseException as error:
                self._outcomes.put(Outcome(item, None, error))
                raise
            self._outcomes.put(outcome)
            del item, outcome

    def outcomes_of(self, count: int, deadline: float | None) -> list[Outcome[T, R]]:
        """Return so many outcomes, or as many as there are by the deadline (monotonic)."""
        outcomes: list[Outcome[T, R]] = []
        with suppress(Empty):
            while len(outcomes) < count:
                left = None if deadline is None else max(deadline - monotonic(), 0)
                outcomes.append(self._outcomes.get(timeout=left))
        return outcomes


class _Run:
    """One run of a `CoalescedJob`. `__self__`, as that of a bound method, is what no other run is at work for."""

    __slots__ = ("__self__", "begun")

    def __init__(self, method: weakref.WeakMethod[Job], begun: bool) -> None:
        self.__self__: Final = method
        self.begun: bool = begun

    def __call__(self) -> None:
        if not self.begun:  # else it was scheduled twice
            self.begun = True  # first: who asks from now on may be too late for this run
            method = self.__self__()
            if method is not None:
                method()


class CoalescedJob:
    """A method that runs once, however often it was scheduled before it begins; scheduled while it runs, it runs again
    after that. It is skipped if nobody holds its object any more by then, as in `schedule_while_alive`. Threads: all.

    A run says itself that it has begun, and is `last` only once it is scheduled. So an error or Ctrl-C, wherever it
    strikes, leaves none due that never comes; at worst one comes twice.
    """

    __slots__ = ("_method", "last")

    def __init__(self, method: Job, never: bool = False) -> None:
        """Make a job of a method; with `never` as if it were always scheduled already."""
        self._method = weakref.WeakMethod(method)
        self.last: _Run = _Run(self._method, begun=not never)
        """The last run. Where it has not begun there is no need to schedule another: for who asks often."""

    def schedule(self, delay: float) -> None:
        """Run it once `delay` seconds have passed; if it is scheduled already, when it was to run then."""
        if self.last.begun:
            run = _Run(self._method, begun=False)
            try:
                shared().schedule(delay, run)
            except BaseException:  # what was asked for happens all the same
                shared().schedule(delay, run)
                raise
            self.last = run


def _started(name: str, target: Callable[[], None]) -> threading.Thread:
    thread = Thread(target, name)
    thread.start()
    return thread


def _run(job: Job) -> None:
    """Run a job, and go on whatever it raises: a SystemExit, say, or the CancelledError of a future's callback. A
    thread that ended would be counted still, and never be replaced."""
    try:
        job()
    except BaseException:
        log.exception("a background job failed: %r", job)


_shared = Background()


def shared() -> Background:
    """Return the process's one Background."""
    return _shared


def unstruck(call: Callable[[], R]) -> R:
    """Return or raise what `call` does, on a thread that no signal strikes: it goes on where one strikes this thread.
    For foreign code with a lock that a signal can leave locked, and for what has to be whole. `call` needs nothing that
    this thread may hold."""
    if threading.get_ident() != threading.main_thread().ident:
        return call()
    return shared().call(call).result()


def _after_fork_in_child() -> None:
    global _shared
    _shared = Background()


os.register_at_fork(after_in_child=_after_fork_in_child)
