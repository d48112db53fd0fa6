"""Queues, topics and subscriptions with a codec: what is sent is encoded, and `message.body` decoded (codecs.py).

What goes through them are the same messages: who holds a queue without the codec sees bytes, and the header
`content_type`. A body is decoded when it is asked for, not when its message is received: one that does not decode holds
up no other, and is in hand, to be released or rejected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Unpack, cast

from ..adapters.messages import CodedMessage, Headers, Message, Outgoing, Receipt
from ..adapters.store_types import Listener, Subscription
from ..policies.destination import Destination
from .codecs import Codec, Coder
from .consumer import Backlog, Consumer, require_callbacks
from .endpoint import Endpoint, SendOptions
from .queue import Queue
from .requeue import DeadLetter
from .topic import Subscriber, Topic

if TYPE_CHECKING:
    from .store_registry import StoreRegistry


class CodedEndpoint(Endpoint):
    """What values are sent to. The rest as Endpoint."""

    __slots__ = ()

    _coder: Coder

    def send(  # the same, for any value
        self,
        body: Any,
        headers: Headers | None = None,
        message_id: str | None = None,
        sync: bool | None = None,
        *,
        connection: Any = None,
        **options: Unpack[SendOptions],
    ) -> Receipt:
        """As Endpoint.send, of a value that the codec takes. Raises TypeError and ValueError for one that it does not
        take, and for headers with another `content_type`: nothing was sent."""
        body, headers = self._coder.encode(body, headers)
        return super().send(body, headers, message_id, sync, connection=connection, **options)

    def send_many(self, messages: Iterable[Any], sync: bool | None = None, *, connection: Any = None) -> list[Receipt]:
        """As Endpoint.send_many, of values, or of Outgoing with values as bodies. If one cannot be encoded none is
        sent."""
        return super().send_many([self._encoded(message) for message in messages], sync, connection=connection)

    def send_nowait(
        self,
        body: Any,
        headers: Headers | None = None,
        message_id: str | None = None,
        sync: bool | None = None,
        **options: Unpack[SendOptions],
    ) -> Future[Receipt]:
        """As Endpoint.send_nowait, of a value; what cannot be encoded is refused at once."""
        body, headers = self._coder.encode(body, headers)
        return super().send_nowait(body, headers, message_id, sync, **options)

    def _encoded(self, message: Any) -> Outgoing:
        if not isinstance(message, Outgoing):
            return Outgoing(*self._coder.encode(message, None))
        body, headers = self._coder.encode(message.body, message.headers)
        return message._replace(body=body, headers=headers)


class CodedBacklog(Backlog):
    """What values can be looked at."""

    __slots__ = ()

    _coder: Coder

    def browse(self, limit: int | None = None, after: int | Message = 0) -> Iterator[CodedMessage]:
        """As Backlog.browse."""
        return map(self._coder.wrap, super().browse(limit, after))

    def dead_letters(self) -> Iterator[DeadLetter]:
        """As Backlog.dead_letters; the body of each `message` is decoded."""
        for letter in super().dead_letters():
            self._coder.wrap(letter.message)
            yield letter


class CodedConsumer(CodedBacklog, Consumer):
    """What values are received from."""

    __slots__ = ()

    def receive(self, timeout: float | None = 0, *, lease: float | None = None) -> CodedMessage | None:
        """As Consumer.receive. That its body does not decode shows when `message.body` is asked for."""
        message = super().receive(timeout, lease=lease)
        return self._coder.wrap(message) if message is not None else None

    def receive_many(  # type: ignore[override]
        self, n: int, timeout: float | None = 0, *, lease: float | None = None
    ) -> list[CodedMessage]:
        """As Consumer.receive_many."""
        return [self._coder.wrap(message) for message in super().receive_many(n, timeout, lease=lease)]

    def consume(self, timeout: float | None = None, *, lease: float | None = None) -> Iterator[CodedMessage]:
        """As Consumer.consume."""
        return cast("Iterator[CodedMessage]", super().consume(timeout, lease=lease))

    def listen(
        self,
        on_message: Callable[[CodedMessage], object],
        credit: int = 1,
        *,
        on_end: Callable[[Exception], object] | None = None,
        lease: float | None = None,
    ) -> Listener:
        """As Consumer.listen."""
        wrap = self._coder.wrap
        require_callbacks(on_message, on_end)
        return super().listen(lambda message: on_message(wrap(message)), credit, on_end=on_end, lease=lease)


class CodedQueue(CodedEndpoint, CodedConsumer, Queue):
    """A queue of values."""

    __slots__ = ("_coder",)

    def __init__(self, registry: StoreRegistry, destination: Destination, codec: Codec) -> None:
        super().__init__(registry, destination)
        self._coder = Coder(codec, destination)

    def find(self, message_id: str) -> CodedMessage | None:
        """As Queue.find."""
        message = super().find(message_id)
        return self._coder.wrap(message) if message is not None else None


class CodedSubscriber(CodedConsumer, Subscriber):
    """A durable subscription that receives values."""

    __slots__ = ("_coder",)

    def __init__(self, registry: StoreRegistry, subscription: Subscription, coder: Coder) -> None:
        super().__init__(registry, subscription)
        self._coder = coder


class CodedTopic(CodedEndpoint, CodedBacklog, Topic):
    """A topic of values, which its subscriptions receive."""

    __slots__ = ("_coder",)

    def __init__(self, registry: StoreRegistry, destination: Destination, codec: Codec) -> None:
        super().__init__(registry, destination)
        self._coder = Coder(codec, destination)

    def _subscriber(self, subscription: Subscription) -> CodedSubscriber:
        return CodedSubscriber(self._registry, subscription, self._coder)
