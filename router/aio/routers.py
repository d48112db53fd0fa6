"""The router, as an event loop has it, and how it is opened."""

from __future__ import annotations

from collections.abc import Generator
from functools import partial
from os import PathLike
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from ...policies.errors import ClosedError, ConfigError
from ..api.addresses import Address
from ..placement.on_disk.in_force import configuration_of
from ..router import Router
from ..sharing.client.router import SharedRouter
from .awaiting import Awaited, awaited, awaited_with
from .endpoints import AsyncMap, AsyncMessage, AsyncQueue, AsyncTopic, AsyncTransaction
from .looped import LoopConnection
from .together import give_back
from .workers import run

if TYPE_CHECKING:
    from ...policies.config import Config
    from ..transactions.xid import Xid

FINISH_SECONDS: Final = 5.0
"""For so long a router that is closed waits for the answers to what was begun."""


class _LoopRouter(SharedRouter):
    """A SharedRouter whose calls are made in workers of a loop."""

    _connection_type = LoopConnection


class AsyncRouter(Awaited[SharedRouter]):
    """A router of a shared directory, as Router. It belongs to the event loop that it was opened on."""

    __slots__ = ("_is_open", "_source")

    def __init__(self, source: str | PathLike[str] | Config | None) -> None:
        self._source, self._is_open = source, False

    async def _opened(self) -> Self:
        def begin() -> SharedRouter:
            router = _LoopRouter(configuration_of(self._source))
            router.open()
            return router

        opened = await run(begin, lambda late: late.close())
        connection = opened._store.connection
        assert isinstance(connection, LoopConnection)
        connection.together.ack_all = lambda messages: opened.ack(messages)
        super().__init__(connection, opened)
        self._is_open = True
        return self

    def __await__(self) -> Generator[Any, None, Self]:
        """Open it."""
        return self._opened().__await__()

    async def __aenter__(self) -> Self:
        return self if self._is_open else await self._opened()

    def __getattr__(self, name: str) -> Any:
        """Raise ClosedError for what an open router has, and this one is not open yet; else AttributeError."""
        if name in ("_connection", "_of"):
            raise ClosedError(f"{self!r}: use it with `async with anabranch.aio.open(...)`, or await that first")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection, once what was begun is answered; what waits for a message raises ClosedError, and what
        is held is given back. Idempotent."""
        if not self._connection.loop.is_closed():
            self._require_loop()
        try:
            await self._connection.finish(FINISH_SECONDS)
        finally:
            self._of.close()

    def __repr__(self) -> str:
        return f"<AsyncRouter of {self._of.config.directory}>" if self._is_open else "<AsyncRouter, not open>"

    def queue(self, name: Address, *, codec: Any = None) -> AsyncQueue[Any]:
        """Return a queue, as Router.queue."""
        return AsyncQueue(self._connection, self._of.queue(name, codec=codec))

    def topic(self, name: Address, *, codec: Any = None) -> AsyncTopic[Any]:
        """Return a topic, as Router.topic."""
        return AsyncTopic(self._connection, self._of.topic(name, codec=codec))

    def map(self, name: Address, *, codec: Any = None) -> AsyncMap[Any]:
        """Return a map, as Router.map."""
        return AsyncMap(self._connection, self._of.map(name, codec=codec))

    def transaction(self, xid: Xid | None = None) -> AsyncTransaction:
        """Return a transaction to be begun, as Router.transaction."""
        return AsyncTransaction(self._connection, self._of, xid)

    async def receive(
        self, pattern: Address, timeout: float | None = 0, *, lease: float | None = None, codec: Any = None
    ) -> AsyncMessage[Any] | None:
        """Lease a message of one of many queues, as Router.receive. Cancelled, it has leased nothing."""
        found = await self._run(partial(self._of.receive, pattern, timeout, lease=lease, codec=codec), give_back)
        return None if found is None else AsyncMessage(self._connection, found)

    ack: Final = awaited_with(Router.ack)
    release: Final = awaited_with(Router.release)
    reject: Final = awaited_with(Router.reject)
    settle: Final = awaited_with(Router.settle)
    subscriptions: Final = awaited(Router.subscriptions)
    destinations: Final = awaited(Router.destinations)
    exists: Final = awaited_with(Router.exists)
    delete: Final = awaited_with(Router.delete)
    requeue: Final = awaited_with(Router.requeue)
    sweep: Final = awaited(Router.sweep)
    commit: Final = awaited(Router.commit)
    rollback: Final = awaited(Router.rollback)
    recover: Final = awaited(Router.recover)
    in_doubt: Final = awaited(Router.in_doubt)
    stats: Final = awaited(SharedRouter.stats)


def open(source: str | PathLike[str] | Config | None = None, *, shared: bool = True) -> AsyncRouter:
    """Return a router of a shared directory, to be opened with `async with`, or by awaiting it. What it is given is as
    for `anabranch.open`. Raises ConfigError where the directory is not to be shared: a router that is its process's
    own waits on the thread that calls it."""
    if not shared:
        raise ConfigError(
            ["anabranch.aio takes shared directories alone: leave `shared` out, or use anabranch.open on threads"]
        )
    return AsyncRouter(source)
