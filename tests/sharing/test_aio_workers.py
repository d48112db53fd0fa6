"""The workers of anabranch.aio, each of which makes one call after the other."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import gc
import weakref
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec

import pytest

from anabranch.router.aio import workers
from anabranch.router.aio.workers import result_of, run

from .loops import LOOPS, each

loop = pytest.fixture(each, params=LOOPS, autouse=True)
P = ParamSpec("P")


def on_a_loop(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    @functools.wraps(test)
    def call(*given: P.args, **options: P.kwargs) -> None:
        asyncio.run(test(*given, **options))

    return call


@on_a_loop
async def test_a_cancel_that_comes_late_strikes_no_other_call() -> None:
    """The call of a cancelled task ends before its task has heard of that, and its worker is at another one by then."""
    loop = asyncio.get_running_loop()
    first, second = loop.create_future(), loop.create_future()
    used: list[object] = []

    def call(waits_for: asyncio.Future[str]) -> str:
        used.append(workers.current())
        return result_of(waits_for)

    cancelled = asyncio.create_task(run(lambda: call(first), lambda late: None))
    await asyncio.sleep(0)

    def end_and_begin() -> None:
        other.append(asyncio.ensure_future(workers.begin(lambda: call(second))))

    other: list[asyncio.Future[str]] = []
    first.set_result("late")  # its worker ends in the next turn,
    loop.call_soon(end_and_begin)  # then this begins,
    cancelled.cancel()  # and then the task hears of it
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    second.set_result("told")
    assert await other[0] == "told"
    assert used[0] is used[1]


@on_a_loop
async def test_a_worker_keeps_nothing_of_its_last_call() -> None:
    class Kept:
        pass

    variable: contextvars.ContextVar[Kept] = contextvars.ContextVar("variable")

    async def task() -> weakref.ref[Kept]:
        kept = Kept()
        variable.set(kept)
        assert await run(lambda: variable.get() is kept)
        waits = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(waits.set_result, kept)
        assert await run(lambda: result_of(waits)) is kept
        return weakref.ref(kept)

    kept = await asyncio.create_task(task())
    await asyncio.sleep(0)  # the loop has let go of the task by then
    gc.collect()
    assert kept() is None


@on_a_loop
async def test_so_many_workers_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "IDLE_MAX", 3)
    monkeypatch.setattr(workers, "_idle", workers._Idle())
    waits = asyncio.get_running_loop().create_future()
    found: list[weakref.ref[workers.Worker]] = []

    def call() -> None:
        worker = workers.current()
        assert worker is not None
        found.append(weakref.ref(worker))
        result_of(waits)

    calls = [asyncio.create_task(run(call)) for _ in range(8)]
    await asyncio.sleep(0)
    waits.set_result(None)
    await asyncio.gather(*calls)
    del calls
    gc.collect()
    assert len(found) == 8
    assert sum(one() is not None for one in found) == 3


@on_a_loop
async def test_a_worker_that_an_interrupt_has_struck_makes_no_call_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it strikes behind the call."""
    monkeypatch.setattr(workers, "_idle", workers._Idle())
    pause = workers.pause

    def strike() -> None:
        monkeypatch.setattr(workers, "pause", pause)
        raise KeyboardInterrupt

    monkeypatch.setattr(workers, "pause", strike)
    with pytest.raises(KeyboardInterrupt):
        await run(lambda: None)
    assert await asyncio.wait_for(run(lambda: "made"), 60.0) == "made"
