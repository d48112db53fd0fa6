"""A queue as its user holds it: a name, and the store that its messages live in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

from ..adapters.base import Headers, Message, Outgoing, Receipt, Store
from ..policies.destination import Destination
from ..policies.errors import ClosedError

if TYPE_CHECKING:
    from .places import Places


T = TypeVar("T")


class Queue:
    """Cheap to make, cheap to keep; any thread may use it. What each call promises: adapters/base.py, Store."""

    __slots__ = ("_places", "destination")

    def __init__(self, places: Places, destination: Destination) -> None:
        self._places = places
        self.destination = destination

    def __repr__(self) -> str:
        return f"<Queue {self.destination.name}>"

    def send(
        self,
        body: bytes,
        headers: Headers | None = None,
        message_id: str | None = None,
        sync: bool | None = None,
    ) -> Receipt:
        """Store one message; returns once it is as durable as its store's policy says (invariant 1).

        `sync=True` asks for more than the policy: durable against power loss on return. A `message_id` that the store
        has seen lately is stored once, and the receipt says `duplicate`: so an unsure sender simply sends again.
        Raises StoreFullError and MessageTooLargeError (nothing was stored) and OutcomeUnknownError (send again with
        the same `message_id`).
        """
        while True:
            store = self._places.store_for(self.destination)
            try:
                return store.send(self.destination, body, headers, message_id, sync)
            except ClosedError:
                self._places.forget_closed(self.destination, store)

    def send_many(self, messages: Iterable[Outgoing | bytes], sync: bool | None = None) -> list[Receipt]:
        """Store many, in order, with one wait for the disk for each batch of them. Not atomic: a crash half way keeps
        a prefix; a transaction keeps all or none."""
        outgoing = list(messages)
        return self._for_store(lambda store: store.send_many(self.destination, outgoing, sync))

    def send_nowait(
        self,
        body: bytes,
        headers: Headers | None = None,
        message_id: str | None = None,
        sync: bool | None = None,
    ) -> Future[Receipt]:
        """Send without waiting: the future resolves when `send` would have returned."""
        return self._for_store(lambda store: store.send_nowait(self.destination, body, headers, message_id, sync))

    def receive(self, timeout: float | None = 0) -> Message | None:
        """Lease the first message that nobody holds, waiting up to `timeout` seconds for one (None: for ever).

        It is this process's until `message.ack()` or `message.release()`; when the process ends, all its leases do.
        """
        if timeout == 0 and self._places.store_of(self.destination) is None:
            return None
        return self._for_store(lambda store: store.receive(self.destination, timeout))

    def browse(self, limit: int | None = None, after: int = 0) -> Iterator[Message]:
        """Look at the messages in order without taking them, at most `limit` from the one after seq `after`. It may
        take its time: a store that is closed for being idle meanwhile is opened again."""
        if limit is not None and limit < 0:
            raise ValueError(f"browse takes a limit of 0 or more, or None for all; not {limit}")
        if self._places.store_of(self.destination) is None:
            return iter(())
        return self._browse(limit, after)

    def _browse(self, left: int | None, after: int) -> Iterator[Message]:
        while left is None or left > 0:
            store = self._places.store_for(self.destination)
            try:
                for message in store.browse(self.destination, left, after):
                    after = message.seq
                    left = left if left is None else left - 1
                    yield message
                return
            except ClosedError:
                self._places.forget_closed(self.destination, store)

    def purge(self) -> int:
        """Remove all messages that nobody holds; returns how many."""
        if self._places.store_of(self.destination) is None:
            return 0
        return self._for_store(lambda store: store.purge(self.destination))

    def delete(self) -> int:
        """Remove the queue with all its messages, leased ones too; returns how many there were."""
        if self._places.store_of(self.destination) is None:
            return 0
        return self._for_store(lambda store: store.delete(self.destination))  # its place stays: others may be sending

    def __len__(self) -> int:
        """Messages held, leased ones included."""
        if self._places.store_of(self.destination) is None:
            return 0
        return self._for_store(lambda store: store.depth(self.destination))

    def _for_store(self, call: Callable[[Store], T]) -> T:
        """Call with the store; once more if it had just been closed for being idle."""
        while True:
            store = self._places.store_for(self.destination)
            try:
                return call(store)
            except ClosedError:
                self._places.forget_closed(self.destination, store)

    def __bool__(self) -> bool:
        return True
