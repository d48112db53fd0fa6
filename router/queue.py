"""A queue as its user holds it: a name, and the store that its messages live in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..adapters.base import Message
from ..policies.destination import Destination
from .consumer import Consumer
from .endpoint import Endpoint

if TYPE_CHECKING:
    from .store_registry import StoreRegistry


class Queue(Endpoint):
    """Each message goes to one receiver."""

    __slots__ = ("_consumer",)

    def __init__(self, places: StoreRegistry, destination: Destination) -> None:
        super().__init__(places, destination)
        self._consumer = Consumer(places, destination, None)

    def receive(self, timeout: float | None = 0) -> Message | None:
        """Lease the first message that nobody holds, waiting up to `timeout` seconds for one (None: for ever).

        It is this process's until `message.ack()` or `message.release()`; when the process ends, all its leases do.
        Raises TypeError and ValueError for what is no number of seconds.
        """
        return self._consumer.receive(timeout)

    def browse(self, limit: int | None = None, after: int | Message = 0) -> Iterator[Message]:
        """Look at the messages in order without taking them, at most `limit` from the one after `after`: a message, or
        the seq of one where the store has no `priorities`."""
        return self._consumer.browse(limit, after)

    def purge(self) -> int:
        """Remove all messages that nobody holds; returns how many."""
        return self._consumer.purge()

    def __len__(self) -> int:
        """Messages held, leased ones included."""
        return self._consumer.depth()
