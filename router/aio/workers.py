"""Calls of blocking code on an event loop's thread: where one waits for its owner the loop goes on with others.

So the store, its endpoints and its transactions are the same code for threads and for an event loop. Each call has a
stack of its own, a greenlet, and no thread.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Final, TypeVar

from ...policies.errors import MissingExtraError

try:
    from greenlet import GreenletExit, getcurrent, greenlet
except ImportError:
    raise MissingExtraError("anabranch.aio needs greenlet: pip install 'anabranch[aio]'") from None

__all__ = ["GreenletExit", "Worker", "begin", "current", "is_awaited", "pause", "result_of", "run", "start"]
log: logging.Logger = logging.getLogger(__name__)

R = TypeVar("R")

IDLE_MAX: Final = 1000
"""Workers that are kept for the next calls of their thread: each has a stack of some 20 KiB."""


class Worker(greenlet):  # type: ignore[misc]
    """A stack of its own for one call at a time, which waits by `pause` until somebody lets it go on."""

    gr_context: contextvars.Context | None

    def __init__(self) -> None:
        super().__init__(_work_on)
        self.call: Callable[[], object] | None = None
        """What it is at."""

    def begin(self, call: Callable[[], object]) -> None:
        """Begin a call, and come back when it waits, or has ended."""
        self.call, self.gr_context = call, contextvars.copy_context()
        self.resume()

    def resume(self) -> None:
        """Let it go on. Once more, or after its call has ended, does no harm: who waits looks what for."""
        if not self.dead:
            self._let_go_on(self.switch)

    def cancel(self, call: Callable[[], object]) -> None:
        """Let a call go on with CancelledError, unless it has ended."""
        if self.call is call and not self.dead:
            self._let_go_on(partial(self.throw, asyncio.CancelledError()))

    def _let_go_on(self, switch: Callable[[], object]) -> None:
        self.parent, call = getcurrent(), self.call
        switch()
        if self.call is None:
            self.gr_context = None  # what is in there is not kept until the next call
            if call is not None:  # here: one that an interrupt has struck behind its call is dead
                _idle.workers.append(self)


def _work_on() -> None:
    """Make one call after the other. No frame that pauses here holds its worker, which would then never end."""
    while True:
        _make_call()
        pause()


def _make_call() -> None:
    worker = getcurrent()
    if worker.call is not None:
        worker.call()
        worker.call = None


class _Idle(threading.local):
    """The workers of a thread that have nothing to do: making one costs as much as a call."""

    def __init__(self) -> None:
        self.workers: deque[Worker] = deque(maxlen=IDLE_MAX)


_idle: Final = _Idle()


def _begun(call: Callable[[], object]) -> Worker:
    """Begin a call in a worker, and return that."""
    worker = _idle.workers.pop() if _idle.workers else Worker()
    worker.begin(call)
    return worker


def current() -> Worker | None:
    """Return the call that this is part of; None if it is none."""
    worker = getcurrent()
    return worker if type(worker) is Worker else None


def pause() -> None:
    """Let the loop go on until the worker is resumed."""
    getcurrent().parent.switch()


def result_of(future: asyncio.Future[R]) -> R:
    """Return what a future of the loop returns, in a worker."""
    worker = current()
    assert worker is not None
    future.add_done_callback(lambda done: worker.resume())
    while not future.done():
        pause()
    return future.result()


def begin(call: Callable[[], R]) -> asyncio.Future[R]:
    """Begin a call, and return what will have its result."""
    future: asyncio.Future[R] = asyncio.get_running_loop().create_future()
    _begun(partial(_work, call, future, None))
    return future


async def run(call: Callable[[], R], on_late: Callable[[R], object] | None = None, goes_on: bool = False) -> R:
    """Return what a call returns. Cancelled, the call goes on all the same, and takes effect. With `on_late` it is
    cancelled too, unless it `goes_on`, and this is called with what it has returned nevertheless."""
    future: asyncio.Future[R] = asyncio.get_running_loop().create_future()
    work = partial(_work, call, future, on_late)
    worker = _begun(work)
    try:
        return await future
    except asyncio.CancelledError:
        if on_late is not None:
            if future.cancelled():
                if not goes_on:
                    worker.cancel(work)
            elif future.exception() is None:
                on_late(future.result())
        raise


def _work(call: Callable[[], R], future: asyncio.Future[R], on_late: Callable[[R], object] | None) -> None:
    try:
        result = call()
    except asyncio.CancelledError:
        future.cancel()
    except BaseException as error:
        if not is_awaited(future):
            log.debug("a call whose caller was cancelled has failed: %s", error)
        else:
            future.set_exception(error)
        if not isinstance(error, Exception):
            raise
    else:
        if not future.done():
            future.set_result(result)
        elif on_late is not None:
            on_late(result)


def is_awaited(future: asyncio.Future[Any]) -> bool:
    """Return whether somebody can be told what has come of a call."""
    return not (future.done() or future.get_loop().is_closed())


def start(call: Callable[[], Any]) -> None:
    """Begin a call whose end nobody waits for. On the loop's thread."""
    _begun(partial(_run, call))


def _run(call: Callable[[], Any]) -> None:
    try:
        call()
    except Exception:
        log.exception("a call on an event loop has failed")
