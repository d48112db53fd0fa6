"""How a method of the blocking API is awaited: in a worker of the loop that its router belongs to."""

from __future__ import annotations

import asyncio
import functools
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from functools import partial
from typing import Any, Concatenate, Final, Generic, ParamSpec, TypeVar

from .looped import LoopConnection
from .together import give_back
from .workers import begin, run

P = ParamSpec("P")
R = TypeVar("R")
O = TypeVar("O")  # noqa: E741
_END: Final = object()


class Awaited(Generic[O]):
    """Something of the blocking API, whose methods are awaited here."""

    __slots__ = ("_connection", "_of")

    def __init__(self, connection: LoopConnection, of: O) -> None:
        self._connection, self._of = connection, of

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._of!r}>"

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self._of == other._of

    def __hash__(self) -> int:
        return hash(self._of)

    def _run(
        self, call: Callable[[], R], on_late: Callable[[R], object] | None = None, goes_on: bool = False
    ) -> Coroutine[Any, Any, R]:
        """Return what a call returns, as `run`. Raises RuntimeError on another loop than the router's."""
        self._require_loop()
        return run(call, on_late, goes_on)

    def _require_loop(self) -> None:
        if asyncio.get_running_loop() is not self._connection.loop:
            raise RuntimeError(
                f"{self!r} belongs to the event loop that its router was opened on; open another router on this loop"
            )


def awaited(
    method: Callable[Concatenate[Any, P], R],
) -> Callable[Concatenate[Awaited[Any], P], Coroutine[Any, Any, R]]:
    """Return a method that is called as this one, and awaited. Cancelled, it takes effect all the same."""
    name = method.__name__  # looked up in each call: a subclass may have its own, or somebody may have replaced it

    @functools.wraps(method)
    async def call(self: Awaited[Any], /, *given: P.args, **options: P.kwargs) -> R:
        return await self._run(partial(getattr(self._of, name), *given, **options))

    return call


def awaited_with(method: Callable[..., R]) -> Callable[..., Coroutine[Any, Any, R]]:
    """Return a method as `awaited` does, of one that takes messages, queues, topics or maps: here those of asyncio."""
    name = method.__name__

    @functools.wraps(method)
    async def call(self: Awaited[Any], /, *given: Any, **options: Any) -> R:
        return await self._run(partial(getattr(self._of, name), *map(_plain, given), **options))

    return call


def _plain(given: Any) -> Any:
    """Return what the blocking API takes for this: what is inside."""
    if isinstance(given, list | tuple):
        return type(given)(map(_plain, given)) if type(given) in (list, tuple) else given
    return given._of if isinstance(given, Awaited) else given


class Received(AsyncIterator[R]):
    """Iterates over what a call returns, until that is None."""

    def __init__(self, receive: Callable[[], Awaitable[R | None]]) -> None:
        self._receive = receive

    async def __anext__(self) -> R:
        found = await self._receive()
        if found is None:
            raise StopAsyncIteration
        return found


class Each(Generic[R], AsyncIterator[R]):
    """Iterates over what a call returns, whose steps ask the owner now and then. A step that is cancelled goes on, and
    the next one gives what it has found."""

    def __init__(self, of: Awaited[Any], begin: Callable[[], Iterator[Any]], convert: Callable[[Any], R]) -> None:
        self._of, self._begin, self._convert = of, begin, convert
        self._iterator: Iterator[Any] | None = None
        self._step: asyncio.Future[Any] | None = None

    def _next(self) -> Any:
        if self._iterator is None:
            self._iterator = self._begin()
        return next(self._iterator, _END)

    async def __anext__(self) -> R:
        self._of._require_loop()
        step, self._step = self._step or begin(self._next), None
        try:
            found = await asyncio.shield(step)
        except asyncio.CancelledError:
            if not step.cancelled():
                self._step = step
            raise
        if found is _END:
            raise StopAsyncIteration
        return self._convert(found)


class Ahead(Generic[R], AsyncIterator[R]):
    """Iterates over messages of which some are leased ahead. They go back where they were, not counted as deliveries,
    once it is let go of."""

    def __init__(self, of: Awaited[Any], receive: Callable[[], list[Any]], convert: Callable[[Any], R]) -> None:
        """`receive` returns the next messages; none: it ends."""
        self._ahead: deque[Any] = deque()
        self._of, self._receive, self._convert = of, receive, convert

    async def __anext__(self) -> R:
        if not self._ahead:
            self._ahead.extend(await self._of._run(self._receive, give_back))
        if not self._ahead:
            raise StopAsyncIteration
        return self._convert(self._ahead.popleft())

    def __del__(self) -> None:
        give_back(list(self._ahead))
