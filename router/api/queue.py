"""A queue as its user holds it: a name, and the store that its messages live in."""

from __future__ import annotations

from ...adapters.core.messages import Message, T, encoded_id
from .codecs import wrap_any
from .consumer import Consumer
from .endpoint import Endpoint


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
