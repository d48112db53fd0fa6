"""Events, Futures and locks that may be taken, under Ctrl-C (rule G6): nobody hangs afterwards."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import pytest

from anabranch.adapters.system.background import shared
from anabranch.adapters.system.conditions import Event, Promise, RLock, unless_busy

from ..contract.disk import Parallel
from ..crash.interrupts import LIBRARY, OURS, everywhere

PATIENCE = 60.0


def test_a_lock_that_may_be_taken() -> None:
    lock = threading.Lock()
    assert unless_busy(lock, lambda: lock.locked()) is True
    with lock:
        assert unless_busy(lock, lambda: True) is None
        assert unless_busy(lock, lambda: True, 0.01) is None
    with pytest.raises(ZeroDivisionError):
        unless_busy(lock, lambda: 1 // 0)
    assert not lock.locked()
    again = RLock()
    with again:
        assert unless_busy(again, lambda: 1) == 1
        with Parallel(lambda: unless_busy(again, lambda: True)) as parallel:
            assert parallel.result() is None
    assert not again._is_owned()  # type: ignore[attr-defined]


def test_one_thread_at_a_time_has_the_lock() -> None:
    lock, count = RLock(), 0

    def add() -> None:
        nonlocal count
        for _ in range(2000):
            with lock, lock:
                before = count
                if before % 16 == 0:
                    time.sleep(0)  # others run, and wait
                count = before + 1

    threads = [threading.Thread(target=add) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert count == 8 * 2000
    with pytest.raises(RuntimeError):
        lock.release()


def test_who_waits_for_the_lock_is_not_passed_for_ever() -> None:
    """Whoever takes it again and again lets others run only while it holds it."""
    lock, begun, taken, often = RLock(), threading.Event(), 0, 20_000
    over = False

    def take_again() -> None:
        nonlocal taken
        while taken < often and not over:
            with lock:
                taken += 1
                begun.set()
                time.sleep(0.0001)

    with Parallel(take_again):
        assert begun.wait(PATIENCE)
        for patience in (-1, PATIENCE):
            assert lock.acquire(timeout=patience)
            assert lock._is_owned()  # type: ignore[attr-defined]
            taken_before = taken
            time.sleep(0.001)
            assert taken == taken_before  # it is ours alone
            lock.release()
            time.sleep(0.001)
        over = True
    assert taken < often


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_does_not_hand_the_lock_to_a_thread_of_its_parent() -> None:
    lock, begun = RLock(), threading.Semaphore(0)

    def take() -> None:
        begun.release()
        with lock:
            pass

    with lock:
        waiting = threading.Thread(target=take)
        waiting.start()
        assert begun.acquire(timeout=PATIENCE)
    children = list[int]()
    for _ in range(10):
        with lock:
            time.sleep(0.01)  # the other one finds it taken once more
            children.append(os.fork())
        if not children[-1]:
            os._exit(0 if lock.acquire(timeout=0) else 1)
    assert not any(os.waitpid(child, 0)[1] for child in children)
    waiting.join(PATIENCE)
    assert not waiting.is_alive()


def test_who_waits_for_the_lock_for_a_time() -> None:
    lock = RLock()
    with lock, Parallel(lambda: unless_busy(lock, lambda: True, 0.01)) as parallel:
        assert parallel.result() is None
    with lock, Parallel(lambda: unless_busy(lock, lambda: True, PATIENCE)) as parallel:
        lock.release()
        assert parallel.result() is True
        lock.acquire()


def test_a_signal_handler_may_wait_for_a_thread_that_waits_for_the_lock() -> None:
    lock, queued = RLock(), threading.Semaphore(0)
    after: list[str] = []

    def take() -> None:
        queued.release()
        with lock:
            after.append("other")

    def handle(number: int, frame: object) -> None:
        other.join(PATIENCE)
        after.append("handler")

    def hold() -> None:
        with lock:
            queued.release()
            time.sleep(0.1)  # the main thread waits, and then the other one behind it
            other.start()
            assert queued.acquire(timeout=PATIENCE)
            time.sleep(0.1)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
            time.sleep(0.1)

    other = threading.Thread(target=take)
    before = signal.signal(signal.SIGUSR1, handle)
    try:
        with Parallel(hold):
            assert queued.acquire(timeout=PATIENCE)
            with lock:
                after.append("main")
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert after == ["other", "handler", "main"]


def test_an_interrupted_wait_for_the_lock_is_over_and_others_go_on() -> None:
    lock, waiting = RLock(), threading.Event()

    def hold(seconds: float) -> None:
        with lock:
            waiting.set()
            time.sleep(seconds)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            time.sleep(seconds)

    def wait() -> bool:
        with lock:
            return True

    for seconds in (0.0, 0.001, 0.01, 0.1):
        waiting.clear()
        with pytest.raises(KeyboardInterrupt), Parallel(lambda seconds=seconds: hold(seconds)):  # type: ignore[misc]
            waiting.wait(PATIENCE)
            with lock:
                pass
            time.sleep(PATIENCE)
        with Parallel(wait) as parallel:
            assert parallel.result() is True
    assert not lock._is_owned()  # type: ignore[attr-defined]


@pytest.mark.parametrize("seconds", [0.0, 1.0])
def test_it_is_free_after_an_interruption_anywhere(seconds: float) -> None:
    lock = threading.Lock()

    def check(at: int, where: str) -> None:
        assert not lock.locked(), where

    def works() -> None:
        len("")

    assert everywhere(lambda at: lambda: unless_busy(lock, works, seconds), check, folders=(*OURS, __file__)) > 3


def test_who_sets_an_event_does_not_hang_after_an_interruption_anywhere() -> None:
    state: list[Event] = []

    def prepare(at: int) -> Callable[[], object]:
        state[:] = [Event()]
        return lambda: state[0].wait(0.001)

    def check(at: int, where: str) -> None:
        with Parallel(state[0].set) as setting:
            setting.result()
        assert state[0].wait(PATIENCE), where

    assert everywhere(prepare, check, folders=(*OURS, *LIBRARY)) > 5


def test_futures_resolve_after_an_interruption_anywhere() -> None:
    """One thread resolves all of the process."""
    waited_for: list[Promise[int]] = []

    def prepare(at: int) -> Callable[[], object]:
        future: Promise[int] = Promise()
        waited_for[:] = [future]

        def wait() -> None:
            with suppress(TimeoutError):
                future.result(0.001)

        return wait

    def check(at: int, where: str) -> None:
        other: Promise[int] = Promise()
        shared().resolve([(waited_for[0], 1, None), (other, 2, None)])
        assert other.result(PATIENCE) == 2, where
        assert waited_for[0].result(PATIENCE) == 1, where

    assert everywhere(prepare, check, folders=(*OURS, *LIBRARY)) > 10
