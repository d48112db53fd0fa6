"""One listener of many queues, with one credit: `router.listen("orders.>", on_message)`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from ...adapters.core.messages import Message
from ...adapters.core.service.damaged import is_damage
from ...adapters.core.service.looking import LookingListener
from ...adapters.system.background import shared
from ...policies.errors import AnabranchError
from .pattern_consumers import PatternConsumer, PatternConsumers
from .patterns import Patterns

if TYPE_CHECKING:
    from ..placement.registry import StoreRegistry

log: logging.Logger = logging.getLogger(__name__)


class PatternListener(LookingListener):
    """Looks at the queues whose turn it is, as who receives by a pattern does (pattern_consumers.py), one message at a
    time: none is leased ahead of its callback."""

    def __init__(
        self, registry: StoreRegistry, consumers: PatternConsumers, patterns: Patterns,
        on_message: Callable[[Message], object], credit: int, on_end: Callable[[Exception], object] | None,
        lease: float | None,
    ) -> None:  # fmt: skip
        super().__init__(patterns, on_message, credit, on_end)
        self._lease, self._consumers = lease, consumers
        self._due: float | None = None
        """When it is woken to look again at what could not be used (monotonic)."""
        self._consumer = PatternConsumer(registry, patterns, self.wake)
        consumers.enter(self._consumer, self._closed)
        self.wake()

    def _take(self, most: int) -> Sequence[Message]:
        try:
            message = self._consumer.look(0, self._lease)
        except AnabranchError as error:
            if not is_damage(error):
                raise
            log.error("a message is damaged, and stays leased: %s", error)
            self.wake()
            return ()
        if message is not None:
            return (message,)
        due = self._consumer.due()
        if due is not None and due != self._due:
            self._due = due
            shared().schedule_while_alive(max(due - time.monotonic(), 0), self.wake)
        return ()

    def _rest(self) -> None:
        pass  # who watches a queue stands in nobody's way

    def _leave(self) -> None:
        self._consumers.leave(self._consumer)

    def _free(self, messages: Sequence[Message]) -> None:
        for message in messages:
            with suppress(AnabranchError):  # else it is free since its store is closed
                message._store.release([message], delivered=False)

    def _closed(self, error: Exception) -> None:
        self._run_by(lambda: self._end(error))
