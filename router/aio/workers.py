"""Calls of blocking code on an event loop's thread: where one waits for its owner the loop goes on with others.

So the store, its endpoints and its transactions are the same code for threads and for an event loop. Each call has a
stack of its own, a greenlet, and no thread.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Callable
from functools import partial
from typing import Any, Final, TypeVar

from ...policies.errors import MissingExtraError

try:
    from greenlet import GreenletExit, getcurrent, greenlet
except ImportError:
    raise MissingExtraError("anabranch.aio needs greenlet: pip install 'anabranch[aio]'") from None

__all__ = ["GreenletExit", "Worker", "begin", "current", "pause", "result_of", "run", "start"]
log: logging.Logger = logging.getLogger(__name__)

R = TypeVar("R")


class Worker(greenlet):  # type: ignore[misc]
    """One call, which waits by `pause` until somebody lets it go on."""

    def __init__(self, run: Callable[[], object]) -> None:
        super().__init__(run)
        self.gr_context: Final = contextvars.copy_context()

    def resume(self) -> None:
        """Let it go on."""
        if not self.dead:
            self.parent = getcurrent()
            self.switch()

    def cancel(self) -> None:
        """Let it go on with CancelledError."""
        if not self.dead:
            self.parent = getcurrent()
            self.throw(asyncio.CancelledError())


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
    Worker(partial(_work, call, future, None)).switch()
    return future


async def run(call: Callable[[], R], on_late: Callable[[R], object] | None = None, goes_on: bool = False) -> R:
    """Return what a call returns. Cancelled, the call goes on all the same, and takes effect. With `on_late` it is
    cancelled too, unless it `goes_on`, and this is called with what it has returned nevertheless."""
    future: asyncio.Future[R] = asyncio.get_running_loop().create_future()
    worker = Worker(partial(_work, call, future, on_late))
    worker.switch()
    try:
        return await future
    except asyncio.CancelledError:
        if on_late is not None:
            if future.cancelled():
                if not goes_on:
                    worker.cancel()
            elif future.exception() is None:
                on_late(future.result())
        raise


def _work(call: Callable[[], R], future: asyncio.Future[R], on_late: Callable[[R], object] | None) -> None:
    try:
        result = call()
    except asyncio.CancelledError:
        future.cancel()
    except BaseException as error:
        if future.done():
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


def start(call: Callable[[], Any]) -> None:
    """Begin a call whose end nobody waits for. On the loop's thread."""
    Worker(partial(_run, call)).switch()


def _run(call: Callable[[], Any]) -> None:
    try:
        call()
    except Exception:
        log.exception("a call on an event loop has failed")
