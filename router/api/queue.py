"""A queue as its user holds it: a name, and the store that its messages live in."""

from __future__ import annotations

from typing import Any

from ...adapters.core.engine.lease_times import require_seconds
from ...adapters.core.messages import (
    DEFAULT_PRIORITY,
    Headers,
    LargeBody,
    Message,
    Outgoing,
    Readable,
    Receipt,
    T,
    checked,
    encoded_id,
)
from .codecs import encode, wrap_any
from .consumer import Consumer
from .endpoint import Endpoint, expiry, kept


class Queue(Endpoint[T], Consumer[T]):
    """A queue, each of whose messages goes to one receiver. `Queue` alone is one of bytes, `Queue[Mail]` one whose
    codec takes and gives Mail."""

    __slots__ = ("__weakref__",)

    def find(self, message_id: str) -> Message[T] | None:
        """Look at the message of that id without taking it, and without a scan; None if it is not there, or its id not
        in the duplicate window of its store any more. Raises TypeError and ValueError for what is no id."""
        encoded_id(message_id)
        found = self._registry.for_held(self.destination, lambda store: store.find(self.destination, message_id), None)
        return wrap_any(self._codec, found)

    def send_leased(
        self,
        body: T | Readable | LargeBody,
        headers: Headers | None = None,
        message_id: str | None = None,
        sync: bool | None = None,
        *,
        lease: float | None = None,
        priority: int = DEFAULT_PRIORITY,
        expires_in: float | None = None,
        size: int | None = None,
    ) -> Message[T] | None:
        """Store one message, and hold it from its first moment on: for who takes in work, and begins with it at once.
        Nobody else can receive it before; if this process dies, or the lease ends, it is delivered again as any other.

        Returns the message, leased as by `receive`, `lease` seconds included; it is stored by then as by `send`, which
        has the same options. None: nothing was stored, since the `message_id` was seen lately, and whoever has received
        that message has it; or for want of room, where `when_full: drop_new` says so. A message that has a group, waits
        for its time or is not persistent cannot be leased at once.

        Raises what `send` raises, and StoreFullError (nothing was stored) where as many messages of the queue are
        leased as its store allows. OutcomeUnknownError: it may be stored, and nobody holds it; send it again with the
        same `message_id`. A client whose owner dies meanwhile is given what it has stored of that `message_id`, if that
        is free, though somebody else may have sent it.
        """
        if lease is not None:
            require_seconds(lease, "lease")
        expires_at_ms = 0 if expires_in is None else expiry(expires_in)
        registry, destination = self._registry, self.destination
        content: Any = body
        if self._codec is not None:
            content, headers = encode(self._codec, content, headers, destination)
        message: Outgoing[Any] = checked(content, headers, message_id, priority, expires_at_ms)
        if type(content) is not bytes or size is not None:
            message = message._replace(body=kept(registry, destination, content, size, True))
        found = registry.for_store(destination, lambda store: store.send_leased(destination, message, lease, sync))
        return None if isinstance(found, Receipt) else wrap_any(self._codec, found)
