"""A worker for functions of your own: `run` in threads, `run_async` in an event loop.

    def bill(message):
        print(message.body)

    with anabranch.open("data", shared=True) as router:
        anabranch.worker.run(router.queue("orders"), bill, threads=8)

A message is acked once the function has returned. If it raises, the message is given back with the error, and comes
again as its store says: `redelivery`, `max_deliveries`, `dead_letter`. SIGTERM and Ctrl-C finish what is in hand; a
second one gives that back, not counted as a delivery, and does not wait for the functions. Run any number of such
processes over one directory (docs/processes.md), or over one database (docs/many-machines.md).
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final, TypeVar

from . import AnabranchError, Message, Queue, Subscriber

if TYPE_CHECKING:
    from .aio import AsyncMessage, AsyncQueue, AsyncSubscriber

__all__ = ["run", "run_async"]

T = TypeVar("T")
log: logging.Logger = logging.getLogger(__name__)

_ENDING: Final = "what is in hand is finished; a second signal gives it back"
SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
_CANCELLED_SECONDS: Final = 1.0
"""So long a function that is cancelled may take to end before its message is given back."""
_ENDED, _DONE = b"e", b"d"
"""What the thread that waits reads: the end of the listener, the end of a thread; or the number of a signal."""
_TOLD = {bytes([number]) for number in SIGNALS}


def run(
    source: Queue[T] | Subscriber[T],
    function: Callable[[Message[T]], object],
    threads: int = 1,
    *,
    lease: float | None = None,
) -> None:
    """Call `function` with each message of a queue or a subscription, up to so many at once, until the process is told
    to end. In the main thread, which alone hears signals; in another one use `listen`. `lease` is as for `receive`.

    Raises what has ended the listener: StoreFailedError if the store fails, UnknownSubscriptionError if the
    subscription ends; what is in hand is finished before. ValueError if there is to be no thread, or in another thread.
    """
    _require(threads, "threads")
    reader, writer = os.pipe()
    messages: SimpleQueue[Message[T] | None] = SimpleQueue()
    in_hand: set[Message[T]] = set()
    ends: list[Exception] = []
    listens, is_ending = threading.Event(), False

    def take(message: Message[T]) -> None:
        in_hand.add(message)
        messages.put(message)

    def end(error: Exception) -> None:
        ends.append(error)
        os.write(writer, _ENDED)

    def work() -> None:
        listens.wait()
        while (message := messages.get()) is not None:
            _work(message, function)
            in_hand.discard(message)
            if not is_ending:
                with suppress(AnabranchError):  # it has just ended
                    listener.add_credit(1)
        os.write(writer, _DONE)

    try:
        listener = source.listen(take, threads, on_end=end, lease=lease)
    except BaseException:
        os.close(reader)
        os.close(writer)
        raise
    with _heard(writer):
        try:
            listens.set()
            for number in range(threads):
                threading.Thread(target=work, name=f"worker-{number}", daemon=True).start()
            while (heard := os.read(reader, 1)) not in {_ENDED, *_TOLD}:
                pass  # a signal that somebody else hears
        finally:
            is_ending = True
            listener.close()
            log.info(_ENDING)
        for _ in range(threads):
            messages.put(None)
        left, is_second = threads, heard in _TOLD
        while left:
            heard = os.read(reader, 1)
            left -= heard == _DONE
            if heard in _TOLD and not is_second:
                is_second = True
            elif heard in _TOLD:
                for message in list(in_hand):
                    with suppress(AnabranchError):  # it was just settled
                        message.release(delivered=False)
                return  # the pipe stays, for threads that come to an end yet
    os.close(reader)
    os.close(writer)
    if ends:
        raise ends[0]


def _work(message: Message[T], function: Callable[[Message[T]], object]) -> None:
    try:
        with message:
            function(message)
    except BaseException:
        _tell_of(message)


def _tell_of(message: Any) -> None:
    """Log the error for which a message was given back: with its traceback the first time, later in one line."""
    named = f", message_id {message.message_id!r}," if message.message_id is not None else ""
    log.error(
        "%r%s was given back after delivery %d, since the function raised %r",
        message, named, message.deliveries, sys.exception(), exc_info=message.deliveries == 1,
    )  # fmt: skip


async def run_async(
    source: AsyncQueue[T] | AsyncSubscriber[T],
    function: Callable[[AsyncMessage[T]], Awaitable[object]],
    tasks: int = 1,
    *,
    lease: float | None = None,
) -> None:
    """Await `function` with each message, up to so many at once, as `run` does. In the main thread's event loop, where
    several may run: a signal is for all of them. A second signal cancels the functions. Cancelled itself it does so,
    too. What a function has in hand that goes on nevertheless is given back a second later."""
    _require(tasks, "tasks")
    told, ending, again = 0, asyncio.Event(), asyncio.Event()
    in_hand: set[AsyncMessage[T]] = set()

    def hear() -> None:
        nonlocal told
        told += 1
        if told == 1:
            log.info(_ENDING)
        (ending if told == 1 else again).set()

    async def work() -> None:
        until = asyncio.ensure_future(ending.wait())
        try:
            while not ending.is_set():
                message = await _received(source.receive(None, lease=lease), until)
                if message is not None:
                    in_hand.add(message)
                    await _work_async(message, function)
                    in_hand.discard(message)
        finally:
            ending.set()  # the others finish too, if it raises
            until.cancel()

    async def finish() -> list[BaseException | None]:
        """End the functions that go on still, and return the errors of all others."""
        ending.set()  # for those that take no notice of being cancelled
        for worker in workers:
            worker.cancel()
        try:
            ended, _ = await asyncio.wait(workers, timeout=_CANCELLED_SECONDS)
        finally:  # also where it is cancelled once more; an error is that of one that was just settled
            going_back = [message.release(delivered=False) for message in in_hand]
            await asyncio.gather(*going_back, return_exceptions=True)
        return [worker.exception() for worker in ended if not worker.cancelled()]

    with _heard_in_loop(hear):
        workers = [asyncio.ensure_future(work()) for _ in range(tasks)]
        stopped = asyncio.ensure_future(again.wait())
        try:
            running: set[asyncio.Future[Any]] = set(workers)
            while running and not again.is_set():
                _, running = await asyncio.wait({*running, stopped}, return_when=asyncio.FIRST_COMPLETED)
                running.discard(stopped)
        finally:
            stopped.cancel()
            ends = await finish()
    for end in ends:
        if end is not None:
            raise end


async def _received(receiving: Coroutine[Any, Any, T | None], until: asyncio.Future[Any]) -> T | None:
    """Return what is received until then. Cancelled it has leased nothing."""
    task = asyncio.ensure_future(receiving)
    try:
        await asyncio.wait({task, until}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.wait({task})
        message: Any = None if task.cancelled() or task.exception() is not None else task.result()
        if message is not None:
            await message.release(delivered=False)
        raise
    return None if task.cancelled() else task.result()


async def _work_async(message: AsyncMessage[T], function: Callable[[AsyncMessage[T]], Awaitable[object]]) -> None:
    task: Any = asyncio.current_task()
    before = task.cancelling()  # by a function that did not take it back
    try:
        async with message:
            try:
                await function(message)
            except asyncio.CancelledError:
                if task.cancelling() > before:
                    await message.release(delivered=False)
                raise
    except Exception:
        _tell_of(message)
    except asyncio.CancelledError:  # of the worker, or of what its function has waited for
        if task.cancelling() > before:
            raise
        _tell_of(message)


def _require(count: int, name: str) -> None:
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ValueError(f"{name}: expected a whole number from 1 on; found {count!r}")
    if threading.current_thread() is not threading.main_thread():
        raise ValueError("a worker runs in the main thread, which alone hears signals; elsewhere use listen()")


@contextmanager
def _heard(writer: int) -> Iterator[None]:
    """Let a pipe have the numbers of signals. The interpreter writes them as they come: a handler would not be called
    before who reads has read something, if the signal comes when that is just about to wait."""
    os.set_blocking(writer, False)
    before: dict[int, Any] = {number: signal.getsignal(number) for number in SIGNALS}
    wakes = signal.set_wakeup_fd(writer)
    try:
        for which in SIGNALS:
            signal.signal(which, lambda *_: None)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(wakes)


_hearing: Final[list[Callable[[], None]]] = []
"""Who is told of signals by the main thread's event loop."""


@contextmanager
def _heard_in_loop(hear: Callable[[], None]) -> Iterator[None]:
    """Let an event loop call this at each signal, and what others have asked for."""
    loop = asyncio.get_running_loop()

    def tell() -> None:
        for one in _hearing:
            one()

    for which in () if _hearing else SIGNALS:
        loop.add_signal_handler(which, tell)
    _hearing.append(hear)
    try:
        yield
    finally:
        _hearing.remove(hear)
        for which in () if _hearing else SIGNALS:
            loop.remove_signal_handler(which)
