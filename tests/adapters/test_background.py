"""The threads that all stores share: what takes long holds up nobody else. Whatever waits, waits for an event."""

from __future__ import annotations

import threading
import weakref
from asyncio import CancelledError
from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from anabranch.adapters.system import background
from anabranch.adapters.system.background import LEADERS, WORKERS, Background, CoalescedJob, Job

from ..contract.disk import Parallel, eventually

SOON = 60.0
"""Seconds until a test fails instead of hanging."""


class Hung:
    """Jobs that hang, as those of a store whose disk does, until the test is over."""

    def __init__(self) -> None:
        self.let_go = threading.Event()
        self.began: list[int] = []
        self.lock = threading.Lock()
        self.at_once = self.most = 0

    def job(self, number: int = 0) -> None:
        with self.lock:
            self.began.append(number)
            self.at_once += 1
            self.most = max(self.most, self.at_once)
        assert self.let_go.wait(SOON)
        with self.lock:
            self.at_once -= 1

    def method(self) -> None:
        self.job()


@pytest.fixture
def hung() -> Iterator[Hung]:
    hung = Hung()
    yield hung
    hung.let_go.set()


@pytest.fixture
def shared() -> Background:
    return Background()


def threads(name: str) -> int:
    return sum(thread.name.startswith(f"anabranch-{name}-") for thread in threading.enumerate())


@pytest.mark.parametrize("how", ["schedule", "lead"])
def test_jobs_that_hang_hold_up_no_other(shared: Background, hung: Hung, how: str) -> None:
    """Many more than there are threads at first."""
    call = shared.lead if how == "lead" else lambda job: shared.schedule(0, job)
    for number in range(30):
        call(lambda number=number: hung.job(number))  # type: ignore[misc]
    done = threading.Event()
    call(done.set)
    assert done.wait(SOON)
    eventually(lambda: hung.at_once == 30)
    assert sorted(hung.began) == list(range(30))


def test_an_object_has_one_job_at_a_time(shared: Background, hung: Hung) -> None:
    """So that a store that hangs does not take all threads there may be."""
    for _ in range(10):
        shared.schedule(0, hung.method)
    others = [threading.Event() for _ in range(10)]
    for other in others:
        shared.schedule(0, lambda other=other: other.set())  # type: ignore[misc]
    for other in others:
        assert other.wait(SOON)
    assert hung.most == 1
    hung.let_go.set()
    eventually(lambda: len(hung.began) == 10)
    eventually(lambda: not shared._running)
    assert hung.most == 1


def test_threads_that_are_not_needed_any_more_end(
    shared: Background, hung: Hung, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "IDLE_SECONDS", 0.05)
    workers, leaders = threads("worker"), threads("leader")
    for _ in range(10):
        shared.schedule(0, lambda: hung.job())
        shared.lead(hung.job)
    eventually(lambda: hung.at_once == 20)
    assert threads("worker") - workers >= 10
    hung.let_go.set()
    eventually(lambda: shared._workers._count == WORKERS)
    eventually(lambda: shared._leaders._count == LEADERS)
    eventually(lambda: (threads("worker"), threads("leader")) <= (workers + WORKERS, leaders + LEADERS))
    done = threading.Event()
    shared.schedule(0, done.set)
    assert done.wait(SOON)


@pytest.mark.parametrize("error", [ZeroDivisionError, SystemExit])
@pytest.mark.parametrize("how", ["schedule", "lead"])
def test_a_job_that_raises_ends_nothing(shared: Background, how: str, error: type[BaseException]) -> None:
    """Not its thread, which nothing would replace: each would leave one less, and at last nothing would run."""

    def fail() -> None:
        raise error

    call = shared.lead if how == "lead" else lambda job: shared.schedule(0, job)
    done = threading.Event()
    for _ in range(max(WORKERS, LEADERS) + 1):
        call(fail)
    call(done.set)
    assert done.wait(SOON)
    eventually(lambda: not shared._running)


@pytest.mark.parametrize("error", [ZeroDivisionError, SystemExit, CancelledError])
def test_a_callback_that_raises_keeps_no_future_from_its_result(shared: Background, error: type[BaseException]) -> None:
    def fail(_: Future[int]) -> None:
        raise error

    first: Future[int] = Future()
    first.add_done_callback(fail)
    shared.resolve([(first, 1, None)])
    assert shared.call(lambda: 2).result(SOON) == 2
    assert first.result(0) == 1


class Counter:
    """Counts how often it ran, and waits each time until it may go on."""

    def __init__(self) -> None:
        self.began, self.may_end = threading.Semaphore(0), threading.Semaphore(0)
        self.runs = self.at_once = self.most = 0

    def run(self) -> None:
        self.runs += 1
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        self.began.release()
        assert self.may_end.acquire(timeout=SOON)
        self.at_once -= 1


class Struck(Background):
    """What is scheduled is struck, by Ctrl-C or for want of memory, just before it counts or just after."""

    def __init__(self, strikes: list[str]) -> None:
        super().__init__()
        self.strikes = strikes

    def schedule(self, delay: float, job: Job) -> None:
        strike = self.strikes.pop(0) if self.strikes else ""
        if strike != "before":
            super().schedule(delay, job)
        if strike:
            raise KeyboardInterrupt


class TestCoalescedJob:
    @pytest.fixture(autouse=True)
    def _alone(self, shared: Background, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(background, "_shared", shared)

    @staticmethod
    def after_all(shared: Background) -> None:
        """What was scheduled at once has begun."""
        eventually(lambda: not shared._jobs)
        eventually(lambda: not shared._running)

    def test_it_runs_once_for_all_who_asked_before(self, shared: Background) -> None:
        counter = Counter()
        counter.may_end.release(9)
        job = CoalescedJob(counter.run)
        with shared._lock:  # so that nothing begins
            for _ in range(5):
                job.schedule(0)
        assert counter.began.acquire(timeout=SOON)
        self.after_all(shared)
        assert counter.runs == 1

    def test_scheduled_while_it_runs_it_runs_again_after_that(self, shared: Background) -> None:
        counter = Counter()
        job = CoalescedJob(counter.run)
        job.schedule(0)
        assert counter.began.acquire(timeout=SOON)
        for _ in range(5):
            job.schedule(0)
        eventually(lambda: not shared._jobs)
        assert (counter.runs, counter.at_once) == (1, 1)
        counter.may_end.release(9)
        assert counter.began.acquire(timeout=SOON)
        self.after_all(shared)
        assert (counter.runs, counter.most) == (2, 1)

    @pytest.mark.parametrize("strikes", [["before"], ["after"], ["before", "before"], ["before", "after"]])
    def test_struck_it_comes_and_can_be_scheduled_again(
        self, strikes: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It comes unless Ctrl-C strikes twice; it is never thought due when it is not."""
        shared = Struck(list(strikes))
        monkeypatch.setattr(background, "_shared", shared)
        counter = Counter()
        counter.may_end.release(9)
        job = CoalescedJob(counter.run)
        with pytest.raises(KeyboardInterrupt):
            job.schedule(0)
        if strikes != ["before", "before"]:
            assert counter.began.acquire(timeout=SOON)
        self.after_all(shared)
        assert job.last.begun
        job.schedule(0)
        assert counter.began.acquire(timeout=SOON)
        self.after_all(shared)
        assert counter.runs == 1 + (strikes != ["before", "before"])

    def test_it_may_end_before_it_is_known_to_be_scheduled(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Who schedules it may be held up just then."""
        monkeypatch.setattr(Background, "schedule", lambda self, delay, job: job())
        counter = Counter()
        counter.may_end.release(9)
        job = CoalescedJob(counter.run)
        for runs in (1, 2):
            job.schedule(0)
            assert counter.runs == runs

    def test_one_that_raises_can_be_scheduled_again(self) -> None:
        done = threading.Semaphore(0)

        class Failing:
            def run(self) -> None:
                done.release()
                raise ZeroDivisionError

        failing = Failing()
        job = CoalescedJob(failing.run)
        for _ in range(3):
            job.schedule(0)
            assert done.acquire(timeout=SOON)

    def test_it_keeps_nothing_alive(self, shared: Background) -> None:
        counter = Counter()
        gone = threading.Event()
        weakref.finalize(counter, gone.set)
        job = CoalescedJob(counter.run)
        with shared._lock:
            job.schedule(0)
            del counter
            assert gone.is_set()
        self.after_all(shared)
        assert job.last.begun

    def test_it_may_never_run(self, shared: Background) -> None:
        counter = Counter()
        CoalescedJob(counter.run, never=True).schedule(0)
        assert not shared._jobs


class TestForEach:
    def test_the_calls_are_made_in_order_here(self, shared: Background) -> None:
        here = threading.get_ident()
        found = shared.for_each(range(5), lambda item: (item * 2, threading.get_ident()))
        assert found == [(item, (item * 2, here), None) for item in range(5)]
        assert shared.for_each([], lambda item: item) == []

    def test_one_that_hangs_holds_up_no_other(self, shared: Background, hung: Hung) -> None:
        """Nor do many, each of which is behind another."""
        called: list[int] = []
        both = threading.Event()

        def call(item: int) -> int:
            if item % 2 == 0:
                hung.job(item)
            called.append(item)
            if len(called) == 5:
                both.set()
            return item

        with Parallel(lambda: shared.for_each(range(10), call)) as walk:
            assert both.wait(SOON)
            assert sorted(called) == [1, 3, 5, 7, 9], "the others are held up"
            eventually(lambda: hung.at_once == 5)
            hung.let_go.set()
            found = walk.result()
        assert sorted(found) == [(item, item, None) for item in range(10)]

    def test_an_error_is_told_of_its_item_alone(self, shared: Background) -> None:
        found = shared.for_each([2, 0, 1], lambda item: 2 // item)
        assert [(item, value) for item, value, _ in found] == [(2, 1), (0, None), (1, 2)]
        assert [type(error) for _, _, error in found] == [type(None), ZeroDivisionError, type(None)]

    def test_with_a_timeout_it_does_not_wait_for_what_hangs(self, shared: Background, hung: Hung) -> None:
        """The one that hangs is called first: the others have ended by the time that the caller gives up on it."""

        def call(item: int) -> int:
            if item == 0:
                hung.job()
            return item

        found: list[object] = []
        timeout = 0.5
        while len(found) < 4:  # on a machine that is busy others may not have come to it
            found = [outcome.item for outcome in shared.for_each(range(5), call, timeout)]
            timeout *= 2
        assert found == [1, 2, 3, 4]

    def test_ctrl_c_ends_it_after_what_is_under_way(self, shared: Background, hung: Hung) -> None:
        called: list[int] = []

        def call(item: int) -> None:
            called.append(item)
            if item == 2:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            shared.for_each(range(10), call)
        assert called == [0, 1, 2]
        assert shared._walks == []

    def test_it_keeps_nothing_alive(self, shared: Background) -> None:
        class Item:
            pass

        gone = threading.Event()
        item = Item()
        weakref.finalize(item, gone.set)
        shared.for_each([item, Item()], lambda one: None)
        del item
        assert gone.is_set()
