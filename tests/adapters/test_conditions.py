"""Events, Futures and locks that may be taken, under Ctrl-C (rule G6): nobody hangs afterwards."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import pytest

from anabranch.adapters.system.background import shared
from anabranch.adapters.system.conditions import Event, Promise, RLock, unless_busy

from ..contract.disk import Parallel, eventually
from ..crash.interrupts import LIBRARY, OURS, everywhere

PATIENCE = 60.0


def with_lock(lock: threading.RLock, call: Callable[[], object] = lambda: None) -> None:
    with lock:
        call()


def waits(thread: threading.Thread) -> bool:
    """Whether a thread waits in `with_lock`, for a lock that is held meanwhile by who asks: it is at the first line,
    where it lets others run only within the lock."""
    frame, code = sys._current_frames().get(thread.ident or 0), with_lock.__code__
    return frame is not None and (frame.f_code, frame.f_lineno) == (code, code.co_firstlineno + 1)


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
        with lock:
            before = count
            if before % 16 == 0:
                eventually(lambda: any(map(waits, threads)) or sum(one.is_alive() for one in threads) == 1)
            count = before + 1

    def add_all() -> None:
        for _ in range(2000):
            with_lock(lock, add)

    threads = [threading.Thread(target=add_all) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert count == 8 * 2000
    with pytest.raises(RuntimeError):
        lock.release()


def test_who_waits_for_the_lock_is_not_passed_for_ever() -> None:
    """Whoever takes it again and again lets others run only while it holds it."""
    lock, taken, over = RLock(), 0, False
    deadline = time.monotonic() + PATIENCE

    def take() -> None:
        nonlocal taken
        taken += 1
        time.sleep(0.0001)  # as for a disk: others run

    def take_again() -> None:
        while not over and time.monotonic() < deadline:
            with_lock(lock, take)

    with Parallel(take_again) as parallel:
        for patience in (-1, PATIENCE):
            before = taken
            eventually(lambda before=before: taken > before)  # type: ignore[misc]
            assert lock.acquire(timeout=patience)
            assert lock._is_owned()  # type: ignore[attr-defined]
            before = taken
            eventually(lambda: waits(parallel.thread))
            assert taken == before  # it is ours alone
            lock.release()
        over = True
    assert time.monotonic() < deadline


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_does_not_hand_the_lock_to_a_thread_of_its_parent() -> None:
    """It finds the lock taken again and again, and is handed it in the end."""
    lock = RLock()

    def passed() -> int:
        waiting = threading.Thread(target=with_lock, args=(lock,))
        with lock:
            waiting.start()
            eventually(lambda: waits(waiting))
        children = list[int]()
        while waiting.is_alive():
            with lock:
                waiting.join(0.01)  # it runs, and waits for the lock
                children.append(os.fork())
            if not children[-1]:
                os._exit(0 if lock.acquire(timeout=0) else 1)
        assert not any(os.waitpid(child, 0)[1] for child in children)
        return len(children)

    eventually(lambda: passed() > 2 or RLock is threading.RLock)  # which hands it to nobody


def test_who_waits_for_the_lock_for_a_time() -> None:
    lock = RLock()
    with lock, Parallel(lambda: unless_busy(lock, lambda: True, 0.01)) as parallel:
        assert parallel.result() is None
    with lock, Parallel(lambda: unless_busy(lock, lambda: True, PATIENCE)) as parallel:
        lock.release()
        assert parallel.result() is True
        lock.acquire()


def test_a_signal_handler_may_wait_for_a_thread_that_waits_for_the_lock() -> None:
    lock, held, handled = RLock(), threading.Event(), threading.Event()
    after: list[str] = []

    def handle(number: int, frame: object) -> None:
        handled.set()
        other.join(PATIENCE)
        after.append("handler")

    def hold() -> None:
        with lock:
            held.set()
            eventually(lambda: waits(threading.main_thread()))
            other.start()
            eventually(lambda: waits(other))  # behind the main thread
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
            assert handled.wait(PATIENCE)

    other = threading.Thread(target=with_lock, args=(lock, lambda: after.append("other")))
    before = signal.signal(signal.SIGUSR1, handle)
    try:
        with Parallel(hold):
            assert held.wait(PATIENCE)
            with_lock(lock, lambda: after.append("main"))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert after == ["other", "handler", "main"]


def test_an_interrupted_wait_for_the_lock_is_over_and_others_go_on() -> None:
    lock, waiting = RLock(), threading.Event()

    def hold(until_it_waits: bool) -> None:
        with lock:
            waiting.set()
            if until_it_waits:
                eventually(lambda: waits(threading.main_thread()))
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def wait() -> bool:
        with lock:
            return True

    for until in (False, True, False, True):
        waiting.clear()
        with pytest.raises(KeyboardInterrupt), Parallel(lambda until=until: hold(until)):  # type: ignore[misc]
            waiting.wait(PATIENCE)
            with_lock(lock)
            threading.Event().wait(PATIENCE)  # it is on its way
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
