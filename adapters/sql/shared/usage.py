"""What a shared store tells the usage log: the sends and the acks of this router. Those of others their logs have."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ....policies.names.destination import Destination
from ...core.engine.usage import ACKED, ACROSS, AMOUNT_MAX, NEEDED_MAX, ROW, SENT, Recorder, hash_of
from ...core.record.encoding import HEAD
from ...core.state.leases import DestinationState, SubscriptionState
from ...core.store_types import Subscription
from .leases import Place
from .queues import Queues

log: logging.Logger = logging.getLogger(__name__)


class Sent(NamedTuple):
    """A message that was stored."""

    number: int
    """That of its queue or topic."""
    seq: int
    size: int
    """The bytes of its body and of its headers."""
    queues: Sequence[int]
    """Those in which it lies: the queue, or subscriptions."""


class Usage:
    """The rows of one open store. Threads: all."""

    def __init__(self, queues: Queues) -> None:
        self._queues = queues
        self._states: dict[Destination, DestinationState] = {}
        """What a Recorder asks of a destination. Another object is another declaration."""
        self._subscribers: dict[int, SubscriptionState] = {}
        self.recorder: Recorder | None = None
        """None: nothing is told."""

    def tell(self, sent: Sequence[Sent], acks: Sequence[Place], transaction: bytes | None = None) -> None:
        """Tell of what has taken effect, in one transaction: `transaction` is that over several stores. Raises
        nothing."""
        recorder = self.recorder
        if recorder is None:
            return
        try:
            number, flags = 0, 0
            if transaction is not None:
                number, flags = int.from_bytes(transaction[-4:], "big"), ACROSS
            elif len(sent) + len(acks) > 1:
                number = recorder.rows.next_transaction()
            recorder.rows.append(b"".join(self._rows(recorder, sent, acks, number, flags)))
        except Exception:  # a fault of ours: the messages are safe, and who sent them shall not hear of it
            recorder.rows.broken = True
            log.exception("the usage log stops: store %r cannot be recorded", recorder.store)

    def _rows(
        self, recorder: Recorder, sent: Sequence[Sent], acks: Sequence[Place], transaction: int, flags: int
    ) -> Iterator[bytes]:
        now, threshold = time.monotonic_ns() // 1000, recorder.buffer.threshold
        for message in sent:
            if hash_of(message.seq) >= threshold or (state := self._of(message.number)) is None:
                continue
            number, who = recorder.number(state), 0
            if number and state.is_topic:
                subscribers = [self._subscriber(state, one) for one in message.queues]
                who = recorder.set_number(subscribers) or 0
                number = number if who else None
            needed = min(len(message.queues), NEEDED_MAX)
            if number:
                amount = min(HEAD.size + message.size, AMOUNT_MAX)
                yield ROW.pack(now, message.seq, number, amount, transaction, who, needed, SENT, flags)
            recorder.rows.lost += number is None
        for place in acks:
            if hash_of(place.id) >= threshold or (state := self._of(place.queue)) is None:
                continue
            number = recorder.number(state)
            if number:
                who = place.queue if state.is_topic else 0
                yield ROW.pack(now, place.id, number, 0, transaction, who, 0, ACKED, flags)
            recorder.rows.lost += number is None

    def _of(self, number: int) -> DestinationState | None:
        """Return the state of what has a number, whose subscription it names; None if that has ended."""
        source = self._queues.of(number)
        if source is None:
            return None
        state = self._states.get(source.destination)
        if state is None or (source.subscription is not None and number not in self._subscribers):
            before, state = state, DestinationState(number, source.destination)
            if before is not None:
                state.subscriptions = before.subscriptions
            if source.subscription is not None:
                self._subscriber(state, number)
            self._states[source.destination] = state
        return state

    def _subscriber(self, topic: DestinationState, number: int) -> SubscriptionState:
        found = self._subscribers.get(number)
        if found is None:
            source = self._queues.of(number)
            client, name = source.subscription if source is not None and source.subscription else ("", str(number))
            found = SubscriptionState(number, topic, Subscription(topic.destination, name, client), 0)
            topic.join(found)
            self._subscribers[number] = found
        return found
