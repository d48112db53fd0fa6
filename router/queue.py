"""A queue as its user holds it: a name, and the store that its messages live in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from ..adapters.base import Counts, Listener, Message, encoded_id
from ..policies.destination import Destination
from .consumer import Consumer
from .endpoint import Endpoint

if TYPE_CHECKING:
    from .store_registry import StoreRegistry


class Queue(Endpoint):
    """Each message goes to one receiver."""

    __slots__ = ("_consumer",)

    def __init__(self, registry: StoreRegistry, destination: Destination) -> None:
        super().__init__(registry, destination)
        self._consumer = Consumer(registry, destination, None)

    def receive(self, timeout: float | None = 0) -> Message | None:
        """Lease the first message that nobody holds, waiting up to `timeout` seconds for one (None: for ever).

        It is this process's until `message.ack()` or `message.release()`; when the process ends, all its leases do.
        Raises TypeError and ValueError for what is no number of seconds.
        """
        return self._consumer.receive(timeout)

    def listen(
        self,
        on_message: Callable[[Message], object],
        credit: int = 1,
        *,
        on_end: Callable[[Exception], object] | None = None,
    ) -> Listener:
        """Call `on_message` with each message, leased, up to `credit` of them; more with `Listener.add_credit`.

        Listeners and those who wait in `receive` stand in one line: what becomes free goes to who came first. The
        callback runs on a background thread of the library, one message at a time, in order; never inside a sender's
        `send`, never in this call, and one that takes long holds up nobody but its own listener. It settles the message
        then or later, from any thread; if it raises, the message is released.

        The queue's store is opened, and stays open until the listener is closed. If it closes all the same or fails
        (`router.close()`, `router.reopen()`), or its disk does not give a message, the listener ends, and `on_end` is
        called with the error, on such a thread. Raises TypeError and ValueError for what is no credit.
        """
        return self._consumer.listen(on_message, credit, on_end)

    def browse(self, limit: int | None = None, after: int | Message = 0) -> Iterator[Message]:
        """Look at the messages in order without taking them, at most `limit` from the one after `after`: a message, or
        the seq of one where the store has no `priorities`."""
        return self._consumer.browse(limit, after)

    def purge(self) -> int:
        """Remove all messages that nobody holds; returns how many."""
        return self._consumer.purge()

    def counts(self) -> Counts:
        """How many messages are ready, and how many leased or claimed by a transaction; takes the same time however
        many there are."""
        return self._consumer.counts()

    def find(self, message_id: str) -> Message | None:
        """Look at the message of that id without taking it, and without a scan; None if it is not there, or its id not
        in the duplicate window of its store any more. Raises TypeError and ValueError for what is no id."""
        if self._registry.store_of(self.destination) is None:
            encoded_id(message_id)
            return None
        return self._for_store(lambda store: store.find(self.destination, message_id))

    def depth(self) -> int:
        """Messages held, leased ones included."""
        return self._consumer.depth()
