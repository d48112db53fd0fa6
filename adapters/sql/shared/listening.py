"""Listeners of a shared store, which look into the database when they are woken."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ....policies.names.destination import Destination
from ...core.messages import Message
from ...core.service.looking import LookingListener
from ...core.store_types import SubscriptionKey
from ...system.background import Job


class SharedListener(LookingListener):
    """One listener. Threads: all; `close` may be called from the callback."""

    def __init__(
        self, store: Any, destination: Destination, subscription: SubscriptionKey | None,
        on_message: Callable[[Message], object], credit: int, on_end: Callable[[Exception], object] | None,
        seconds: float | None, run_by: Callable[[Job], object] | None,
    ) -> None:  # fmt: skip
        super().__init__(destination, on_message, credit, on_end, run_by)
        self._store, self._asked = store, (seconds, subscription)
        self._destination = destination
        self.queue: int = 0

    def _take(self, most: int) -> Sequence[Message]:
        messages: list[Message[Any]] = self._store.look(self, self._destination, most, *self._asked)
        if messages:
            self._rest()
        return messages

    def _call(self, message: Message) -> None:
        self._store.note_handed(message)
        super()._call(message)

    def _rest(self) -> None:
        self._store.waiting.leave(self)

    def _leave(self) -> None:
        self._rest()
        self._store.listeners.pop(self, None)

    def _free(self, messages: Sequence[Message]) -> None:
        self._store.free_unseen([one._note for one in messages])

    def end(self) -> None:
        """End it: the store is being closed."""
        self._run_by(lambda: self._end(self._store.closed_error()))
