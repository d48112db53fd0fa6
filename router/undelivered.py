"""What is not delivered any more is put aside: expired messages, and those that have come back too often.

Stores pass them over and lease them to this module, which looks once a second. One transaction acks the message and
sends it to its dead-letter queue, in whatever store that lives: it is in one of the two, after any crash (invariant 4).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

from ..adapters.background import shared
from ..adapters.base import EXPIRED, Store, Undelivered
from ..policies.destination import Destination
from ..policies.errors import AnabranchError
from ..policies.options import dead_letter_name
from .places import Places
from .transaction import Transaction

log = logging.getLogger(__name__)

SWEEP_SECONDS: Final = 1.0
SWEEP_MAX: Final = 100
"""Messages that are put aside in one transaction."""


class Sweeper:
    """Threads: all; one at a time sweeps."""

    def __init__(self, places: Places, begin: Callable[[], Transaction]) -> None:
        self._places, self._begin = places, begin
        self._lock = threading.Lock()
        self.closed = True
        self.dead_lettered = self.dropped = 0
        """Messages since open."""

    def open(self) -> None:
        """Look now and then, until `close`."""
        self.closed = False
        shared().schedule(SWEEP_SECONDS, self._run_in_background)

    def close(self) -> None:
        """No more. Waits for a sweep that is under way. Idempotent."""
        self.closed = True
        with self._lock:
            pass

    def _run_in_background(self) -> None:
        if not self.closed:
            self.run()
            shared().schedule(SWEEP_SECONDS, self._run_in_background)

    def run(self) -> int:
        """Put aside all that waits for it in open stores; returns how many messages. A store that fails holds up no
        other (invariant 7)."""
        count = 0
        for store in self._places.open_stores():
            try:
                count += self._sweep(store)
            except AnabranchError as error:
                log.debug("store %s: nothing is put aside: %s", store.name, error)
        return count

    def _sweep(self, store: Store) -> int:
        count = 0
        pattern = self._places.dead_letter_of(store)
        while True:
            with self._lock:
                if self.closed:
                    return count
                found = store.take_undelivered(SWEEP_MAX)
                if not found:
                    return count
                if not self._put_aside(store, pattern, found):
                    return count
                count += len(found)

    def _put_aside(self, store: Store, pattern: str | None, found: Sequence[Undelivered]) -> bool:
        """In one transaction; whether that could be done."""
        kept = 0
        transaction = None
        try:
            transaction = self._begin()
            for message, reason in found:
                transaction.ack(message)
                source = message.destination
                target = Destination.parse(dead_letter_name(pattern, source.name)) if pattern is not None else None
                if target is None or (target == source and reason == EXPIRED):
                    continue
                transaction.send(
                    target, message.body, _labelled(message, reason), priority=message.priority,
                    persistent=not store.volatile,
                )  # fmt: skip
                kept += 1
            transaction.commit()
        except AnabranchError as error:
            log.warning("store %s: %d messages cannot be put aside, and wait: %s", store.name, len(found), error)
            self._let_go(store, transaction, found)
            return False
        self.dead_lettered += kept
        self.dropped += len(found) - kept
        return True

    def _let_go(self, store: Store, transaction: Transaction | None, found: Sequence[Undelivered]) -> None:
        """Those that are leased or claimed still are free; nobody receives them, and the next sweep finds them."""
        try:
            if transaction is not None and transaction.state == "open":
                transaction.rollback()
        except AnabranchError as error:
            log.debug("store %s: %s", store.name, error)
        for message, _ in found:
            try:
                store.release([message], delivered=False)
            except AnabranchError:
                pass  # the transaction has freed it


def _labelled(message: Any, reason: str) -> dict[str, Any]:
    """The message's headers, and where it comes from. Its message id is among them, not used again: the copies of
    several subscriptions are not duplicates of each other."""
    labels: dict[str, Any] = {
        "dead_letter_reason": reason,
        "dead_letter_source": str(message.destination),
        "dead_letter_deliveries": message.deliveries - 1,
    }
    if message.subscription is not None:
        labels["dead_letter_client"], labels["dead_letter_subscription"] = message.subscription
    if message.message_id is not None:
        labels["dead_letter_message_id"] = message.message_id
    return {**message.headers, **labels}
