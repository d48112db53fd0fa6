"""Dead letters, whose headers tell where they come from.

`labelled` is what upkeep/dead_letters.py sends. The duplicate window of the source still knows the message's id. So a
transaction that acks a dead letter and sends to its source under that id marks the send `requeued` (`mark_requeued`),
and it is stored. Otherwise the letter would be gone from both queues.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final, Generic

from ...adapters.core.messages import Message, T
from ...adapters.core.service.failures import Failure
from ...adapters.core.store_types import SubscriptionKey
from ...policies.errors import AnabranchError
from ...policies.names.destination import Destination, dead_letter_name
from ..transactions.participant import Participant

PREFIX: Final = "dead_letter_"
REASON: Final = "dead_letter_reason"
SOURCE: Final = "dead_letter_source"
DELIVERIES: Final = "dead_letter_deliveries"
MESSAGE_ID: Final = "dead_letter_message_id"
CLIENT: Final = "dead_letter_client"
SUBSCRIPTION: Final = "dead_letter_subscription"
ERROR_TYPE: Final = "dead_letter_error_type"
ERROR_TEXT: Final = "dead_letter_error_text"
_OPTIONAL: Final = frozenset((MESSAGE_ID, CLIENT, SUBSCRIPTION, ERROR_TYPE, ERROR_TEXT))
"""A false one, of a dead letter that somebody has sent on, would say where the letter goes back."""

REQUEUED_REASON: Final = "requeued_reason"
REQUEUED_COUNT: Final = "requeued_count"
REQUEUED_DELIVERIES: Final = "requeued_deliveries"
REQUEUED_ERROR_TYPE: Final = "requeued_error_type"
REQUEUED_ERROR_TEXT: Final = "requeued_error_text"
"""Headers of a message that was put back, about the dead letter that it was."""


@dataclass(frozen=True, slots=True)
class DeadLetter(Generic[T]):
    """A message in a dead-letter queue, and the facts in its headers."""

    message: Message[T]
    """Browsed: receive it from its queue to put it back, or to ack it."""
    reason: str
    """Why it is there: `delivery_limit`, `expired`, `rejected`, or what its receiver said."""
    source: Destination
    """The destination that it comes from."""
    deliveries: int
    """How often it had been handed out there."""
    message_id: str | None
    """Its `message_id` there."""
    subscription: SubscriptionKey | None
    """The subscription that has given it up, if one has."""
    requeued: int
    """How often it had been put back before."""
    error_type: str | None = None
    """The type of the exception for which it was given back, or rejected, last, with its module; None: there is none,
    or a reason in words."""
    error_text: str | None = None
    """The text of that exception, or that reason; None: neither is known."""


def dead_letter_of(message: Message[T]) -> DeadLetter[T] | None:
    """Return the dead letter that a message is; None if it is none."""
    headers = message.headers
    source, message_id = headers.get(SOURCE), headers.get(MESSAGE_ID)
    try:
        destination = Destination.restored(source) if isinstance(source, str) else None
    except AnabranchError:  # a sender may put anything there
        return None
    if destination is None:
        return None
    return DeadLetter(
        message,
        str(headers.get(REASON, "")),
        destination,
        number(headers, DELIVERIES),
        message_id if isinstance(message_id, str) else None,
        subscription_of(message),
        number(headers, REQUEUED_COUNT),
        *(value if isinstance(value := headers.get(name), str) else None for name in (ERROR_TYPE, ERROR_TEXT)),
    )


def dead_letter_queue(pattern: str, source: Destination) -> Destination:
    """Return the queue of a destination's dead letters, by its store's option. The name comes in after the pattern is
    parsed: a name may hold characters that have a meaning there."""
    parsed = Destination.restored(pattern)
    return Destination(parsed.kind, dead_letter_name(parsed.name, source.name))


def number(headers: Mapping[str, Any], name: str) -> int:
    """Return the number in a header; 0 where a sender has put anything else."""
    value = headers.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def delivered(message: Message, rejected: bool) -> int:
    """Return how often a leased message that is to be dead-lettered had been handed out. `rejected`: its receiver
    rejects it, so that its lease counts."""
    return message.deliveries if rejected else message.deliveries - 1


def labelled(
    message: Message, reason: str, known: bool, rejected: bool = False, failure: Failure | None = None
) -> dict[str, Any]:
    """Return the headers of the dead letter that a message becomes: its own, and where it comes from. Its message id is
    among them, not used again: the copies of several subscriptions are not duplicates of each other. `known`: the
    message is a dead letter already, and says where it came from first. `failure`: its last."""
    deliveries = delivered(message, rejected)
    errors: dict[str, Any] = {}
    if failure is not None:
        errors = {ERROR_TEXT: failure.text} | ({ERROR_TYPE: failure.type} if failure.type is not None else {})
    if known:
        before = message.headers
        if errors:
            before = {name: value for name, value in before.items() if name not in (ERROR_TYPE, ERROR_TEXT)}
        return {**before, REASON: reason, DELIVERIES: deliveries, **errors}
    own = {name: value for name, value in message.headers.items() if name not in _OPTIONAL}
    labels: dict[str, Any] = {
        REASON: reason,
        SOURCE: str(message.destination),
        DELIVERIES: deliveries,
    }
    if message.subscription is not None:
        labels[CLIENT], labels[SUBSCRIPTION] = message.subscription
    if message.message_id is not None:
        labels[MESSAGE_ID] = message.message_id
    return {**own, **labels, **errors}


def mark_requeued(participants: Collection[Participant]) -> None:
    """Mark sends of a transaction that is about to be committed or prepared. A send that puts back a dead letter which
    the transaction acks is no duplicate. May be done again."""
    labels = []
    for participant in participants:
        for acked in participant.acks:
            if MESSAGE_ID in acked.headers:
                labels.append(acked.headers)  # noqa: PERF401  each commit comes this way: a frame less
    if not labels:
        return
    letters: Counter[tuple[str, str | None]] = Counter(
        (str(headers.get(SOURCE)), message_id)
        for headers in labels
        if isinstance(message_id := headers[MESSAGE_ID], str)  # a sender may put anything there
    )
    for participant in participants:
        for place, (destination, message) in enumerate(participant.sends):
            key = (str(destination), message.message_id)
            if letters[key] > 0:
                letters[key] -= 1
                participant.sends[place] = (destination, message._replace(requeued=True))


def require_message(message: object) -> None:
    """Raise TypeError for what cannot be rejected."""
    if not isinstance(message, Message):
        raise TypeError(f"a message that was received can be rejected, not {type(message).__name__}: {message!r}")


def subscription_of(letter: Message[Any]) -> SubscriptionKey | None:
    """Return the subscription that has given up a dead letter. None: the topic's message became one as a whole, since
    it expired."""
    name = letter.headers.get(SUBSCRIPTION)
    return None if name is None else (str(letter.headers.get(CLIENT, "")), str(name))
