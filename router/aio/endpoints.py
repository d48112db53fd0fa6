"""Messages, queues, topics, maps and transactions, as an event loop has them."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import AsyncIterator, Callable, Coroutine, Generator
from functools import partial
from types import NoneType, TracebackType
from typing import TYPE_CHECKING, Any, Final, Generic, Self

from ...adapters.core.messages import DEFAULT_PRIORITY, Headers, LargeBody, Message, Readable, T
from ...adapters.core.store_types import Subscription
from ...policies.errors import TransactionError
from ..api.codecs import V
from ..api.consumer import Backlog, Consumer, countdown, pauses_of, require_count
from ..api.dead_letter import DeadLetter
from ..api.endpoint import Endpoint
from ..api.map import Map
from ..api.topic import Subscriber
from ..api.transaction import Transaction
from .awaiting import Ahead, Awaited, Each, R, Received, awaited, awaited_with
from .looped import LoopConnection
from .together import give_back

if TYPE_CHECKING:
    from ..router import Router
    from ..transactions.xid import Xid


class AsyncMessage(Awaited[Message[T]], Generic[T]):
    """A message, with all that a Message has; what settles it is awaited. `async with message:` acks it at the end, or
    releases it if an error is raised."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        if name.endswith("_nowait"):
            raise AttributeError(f"an AsyncMessage has no {name}: let a task await {name.removesuffix('_nowait')}()")
        return getattr(self._of, name)

    def _is_together(self) -> bool:
        """Return whether a call goes with others of this turn of the loop, and not in its own context."""
        return self._connection.is_asked

    async def ack(self, *, connection: Any = None) -> None:
        """Ack the message, as Message.ack. Cancelled, it takes effect all the same."""
        if connection is None and self._is_together():
            self._require_loop()
            await self._connection.together.ack(self._of)
        else:
            await self._run(partial(self._of.ack, connection=connection))

    release: Final = awaited(Message.release)
    reject: Final = awaited(Message.reject)
    extend: Final = awaited(Message.extend)
    read: Final = awaited(Message.read)
    open: Final = awaited(Message.open)

    @property
    def body(self) -> T:
        """Return the body, as Message.body."""
        return self._of.body

    async def __aenter__(self) -> Self:
        self._of.__enter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._run(partial(self._of.__exit__, kind, error, trace))


class _Backlog(Awaited[Any], Generic[T]):
    __slots__ = ()

    depth: Final = awaited(Backlog.depth)

    def _message(self, message: Message[T]) -> AsyncMessage[T]:
        return AsyncMessage(self._connection, message)

    def browse(self, limit: int | None = None, after: int | AsyncMessage[Any] = 0) -> AsyncIterator[AsyncMessage[T]]:
        """Look at the messages in order, as Backlog.browse."""
        behind = after._of if isinstance(after, AsyncMessage) else after
        return Each(self, lambda: self._of.browse(limit, behind), self._message)

    def dead_letters(self) -> AsyncIterator[DeadLetter[T]]:
        """Look at the dead letters that come from here, as Backlog.dead_letters."""
        return Each(self, self._of.dead_letters, lambda letter: letter)


class _Consumer(_Backlog[T]):
    __slots__ = ()

    def browse(
        self, limit: int | None = None, after: int | AsyncMessage[Any] = 0, *, leased: bool = True
    ) -> AsyncIterator[AsyncMessage[T]]:
        """Look at the messages in order, as Consumer.browse."""
        behind = after._of if isinstance(after, AsyncMessage) else after
        return Each(self, lambda: self._of.browse(limit, behind, leased=leased), self._message)

    def _is_together(self) -> bool:
        return self._connection.is_asked or self._of.destination in self._connection.together.receiving

    purge: Final = awaited(Consumer.purge)
    counts: Final = awaited(Consumer.counts)

    async def wait_empty(self, timeout: float | None = None) -> bool:
        """Wait until nothing is held here any more, as Consumer.wait_empty."""
        pauses = pauses_of(timeout)
        while await self.depth():
            pause = next(pauses, None)
            if pause is None:
                return False
            await asyncio.sleep(pause)
        return True

    async def receive(
        self, timeout: float | None = 0, *, lease: float | None = None, newest: bool = False
    ) -> AsyncMessage[T] | None:
        """Lease the first message that nobody holds, or the newest, as Consumer.receive. Cancelled, it has leased
        nothing."""
        if not newest and type(lease) in (int, float, NoneType) and self._is_together():
            self._require_loop()
            left = countdown(timeout)
            together, is_known = await self._connection.together.receive(self._of, lease)
            if together is not None:
                return self._message(together)
            if is_known and timeout == 0:
                return None
            timeout = left()
        found = await self._run(partial(self._of.receive, timeout, lease=lease, newest=newest), give_back)
        return None if found is None else self._message(found)

    async def receive_many(
        self, n: int, timeout: float | None = 0, *, lease: float | None = None
    ) -> list[AsyncMessage[T]]:
        """Lease up to `n` messages, as Consumer.receive_many. Cancelled, it has leased nothing."""
        found = await self._run(partial(self._of.receive_many, n, timeout, lease=lease), give_back)
        return [self._message(one) for one in found]

    def consume(
        self, timeout: float | None = None, *, lease: float | None = None, prefetch: int = 0
    ) -> AsyncIterator[AsyncMessage[T]]:
        """Iterate over the messages, each leased when it is asked for, as Consumer.consume. `prefetch`: with it up to
        so many more are leased, in one step, and wait in this process; they go back, not counted as deliveries, when
        the iterator is let go of. Raises also TypeError and ValueError for what is no such number."""
        if not prefetch:
            return Received(partial(self.receive, timeout, lease=lease))
        require_count(prefetch)
        return Ahead(self, partial(self._of.receive_many, 1 + prefetch, timeout, lease=lease), self._message)

    def __aiter__(self) -> AsyncIterator[AsyncMessage[T]]:
        """Iterate over the messages for ever, none of them leased ahead."""
        return self.consume()


class _Endpoint(Awaited[Any], Generic[T]):
    __slots__ = ()

    send: Final = awaited(Endpoint[T].send)
    send_many: Final = awaited(Endpoint[T].send_many)
    declare: Final = awaited(Endpoint.declare)
    delete: Final = awaited(Endpoint.delete)

    @property
    def destination(self) -> Any:
        """Return its destination."""
        return self._of.destination


class AsyncQueue(_Endpoint[T], _Consumer[T]):
    """A queue, as Queue."""

    __slots__ = ()

    async def find(self, message_id: str) -> AsyncMessage[T] | None:
        """Look at the message of that id, as Queue.find."""
        found = await self._run(partial(self._of.find, message_id))
        return None if found is None else self._message(found)

    async def send_leased(
        self, body: T | Readable | LargeBody, headers: Headers | None = None, message_id: str | None = None,
        sync: bool | None = None, *, lease: float | None = None, priority: int = DEFAULT_PRIORITY,
        expires_in: float | None = None, size: int | None = None,
    ) -> AsyncMessage[T] | None:  # fmt: skip
        """Store one message, and hold it from its first moment on, as Queue.send_leased. Cancelled, it is sent all the
        same, and nobody holds it."""
        send = partial(
            self._of.send_leased, body, headers, message_id, sync, lease=lease, priority=priority,
            expires_in=expires_in, size=size,
        )  # fmt: skip
        found = await self._run(send, give_back, goes_on=True)
        return None if found is None else self._message(found)


class AsyncSubscriber(_Consumer[T]):
    """A durable subscription, as Subscriber."""

    __slots__ = ()

    unsubscribe: Final = awaited(Subscriber.unsubscribe)

    @property
    def subscription(self) -> Subscription:
        """Return the subscription."""
        found: Subscription = self._of.subscription
        return found


class AsyncTopic(_Endpoint[T], _Backlog[T]):
    """A topic, as Topic."""

    __slots__ = ()

    async def subscribe(
        self, name: str, client_id: str = "", selector: str | None = None, no_local: bool = False,
        retroactive: bool = False,
    ) -> AsyncSubscriber[T]:  # fmt: skip
        """Begin a durable subscription, or take it up again, as Topic.subscribe."""
        begin = partial(self._of.subscribe, name, client_id, selector, no_local, retroactive)
        return AsyncSubscriber(self._connection, await self._run(begin))

    async def subscriptions(self) -> list[AsyncSubscriber[T]]:
        """Return the topic's durable subscriptions, as Topic.subscriptions."""
        return [AsyncSubscriber(self._connection, one) for one in await self._run(self._of.subscriptions)]


class AsyncMap(Awaited[Map[V]], Generic[V]):
    """A map, as Map."""

    __slots__ = ()

    get: Final = awaited(Map[V].get)
    get_many: Final = awaited(Map[V].get_many)
    count: Final = awaited(Map[V].count)
    put: Final = awaited(Map[V].put)
    put_if_absent: Final = awaited(Map[V].put_if_absent)
    compare_and_set: Final = awaited(Map[V].compare_and_set)
    pop: Final = awaited(Map[V].pop)
    increment: Final = awaited(Map[V].increment)
    touch: Final = awaited(Map[V].touch)
    declare: Final = awaited(Map[V].declare)
    delete: Final = awaited(Map[V].delete)

    async def wait(
        self, key: str, timeout: float | None = None, default: Any = None, *, unless: V | None = None
    ) -> Any:
        """Return the value of a key once it has one, and another than `unless`, as Map.wait."""
        return await self._run(partial(self._of.wait, key, timeout, default, unless=unless), lambda value: None)

    def items(
        self, prefix: str = "", after: str | None = None, before: str | None = None
    ) -> AsyncIterator[tuple[str, V]]:
        """Iterate over keys and values, as Map.items."""
        return Each(self, lambda: self._of.items(prefix, after, before), lambda item: item)


def _gathered(method: Callable[..., R]) -> Callable[..., Coroutine[Any, Any, R]]:
    """Return a method as `awaited_with` does, of a transaction, which notes the call."""
    begin: Final = awaited_with(method)

    @functools.wraps(method)
    def call(self: AsyncTransaction, /, *given: Any, **options: Any) -> Coroutine[Any, Any, R]:
        made = begin(self, *given, **options)
        self._calls.append((method.__qualname__, made))
        return made

    return call


def _ending(method: Callable[[Transaction], R]) -> Callable[[AsyncTransaction], Coroutine[Any, Any, R]]:
    """Return a method as `awaited` does, of a transaction whose calls were all awaited by then."""

    @functools.wraps(method)
    async def call(self: AsyncTransaction, /) -> R:
        self._require_awaited()
        return await self._run(partial(method, self._of))

    return call


class AsyncTransaction(Awaited[Transaction]):
    """A transaction, as Transaction: begun by `async with`, or by awaiting it. A commit that is cancelled takes effect
    all the same."""

    __slots__ = ("_begin", "_calls", "_is_begun")

    def __init__(self, connection: LoopConnection, router: Router, xid: Xid | None = None) -> None:
        self._connection, self._begin, self._is_begun = connection, partial(router.transaction, xid), False
        self._calls: list[tuple[str, Coroutine[Any, Any, Any]]] = []
        """What it has been asked to do, which takes part only if it was awaited."""

    async def _begun(self) -> Self:
        self._of, self._is_begun = await self._run(self._begin), True
        return self

    def __await__(self) -> Generator[Any, None, Self]:
        """Begin it."""
        return self._begun().__await__()

    async def __aenter__(self) -> Self:
        if not self._is_begun:
            await self._begun()
        await self._run(self._of.__enter__)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and self._of.state == "open":
            try:
                self._require_awaited()
            except TransactionError as forgotten:
                await self._run(partial(self._of.__exit__, TransactionError, forgotten, None))
                raise
        await self._run(partial(self._of.__exit__, kind, error, trace))

    def _require_awaited(self) -> None:
        """Raise TransactionError if a call was made without `await`, which has done nothing."""
        for name, call in self._calls:
            if inspect.getcoroutinestate(call) == inspect.CORO_CREATED:
                raise TransactionError(f"{name} was called without `await`; nothing of it is committed")

    send: Final = _gathered(Transaction.send)
    ack: Final = _gathered(Transaction.ack)
    release: Final = _gathered(Transaction.release)
    reject: Final = _gathered(Transaction.reject)
    put: Final = _gathered(Transaction.put)
    remove: Final = _gathered(Transaction.remove)
    remove_range: Final = _gathered(Transaction.remove_range)
    subscribe: Final = _gathered(Transaction.subscribe)
    unsubscribe: Final = _gathered(Transaction.unsubscribe)
    commit: Final = _ending(Transaction.commit)
    rollback: Final = awaited(Transaction.rollback)
    prepare: Final = _ending(Transaction.prepare)
    vote: Final = _ending(Transaction.vote)

    def __getattr__(self, name: str) -> Any:
        if name in ("state", "receipts", "xid", "is_empty"):
            return getattr(self._of, name)
        if name == "_of":
            raise TransactionError(
                "this transaction is not begun: use `async with router.transaction() as tx`, or await that first"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
