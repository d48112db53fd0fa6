"""Durable subscriptions, as operations of the log: what may be asked, and what a change takes."""

from __future__ import annotations

from collections.abc import Callable

from ...policies.destination import Destination, Kind
from ...policies.errors import DestinationError, SubscriptionError, UnknownSubscriptionError
from ..base import Change, Subscription, SubscriptionKey
from . import format as f
from .batch import Operation
from .destinations import DestinationState


def checked(subscription: Subscription) -> Subscription:
    """Raises DestinationError for what is no topic, TypeError, and SubscriptionError for what has no place in the
    format."""
    require_topic(subscription.topic)
    for what, text, most in (
        ("name", subscription.name, f.CLIENT_BYTES_MAX),
        ("client_id", subscription.client_id, f.CLIENT_BYTES_MAX),
        ("selector", subscription.selector or "", f.SELECTOR_BYTES_MAX),
    ):
        if not isinstance(text, str):
            raise TypeError(f"a subscription's {what} is a str, not {type(text).__name__}: {text!r}")
        try:
            size = len(text.encode())
        except UnicodeEncodeError as error:
            raise SubscriptionError(
                f"the {what} {text[:40]!r} of a subscription is not valid unicode: {error.reason}"
            ) from None
        if size > most:
            raise SubscriptionError(f"the {what} of a subscription takes {size} bytes; at most {most} are allowed")
    return subscription


def require_topic(destination: Destination) -> None:
    if destination.kind is not Kind.TOPIC:
        raise DestinationError(f"{destination} has no subscriptions; topics have")


def unknown(topic: Destination, key: SubscriptionKey) -> UnknownSubscriptionError:
    client = f" of client {key[0]!r}" if key[0] else ""
    return UnknownSubscriptionError(f"{topic} has no durable subscription {key[1]!r}{client}; subscribe first")


def change_of(change: Change, state: DestinationState, next_subscription: Callable[[], int]) -> Operation:
    """What a transaction does to a subscription."""
    if change.subscribe:
        return (f.SUBSCRIBE, state, next_subscription(), change.subscription, change.retroactive)
    return (f.UNSUBSCRIBE, state, change.subscription.key)


def change_bytes(subscription: Subscription) -> int:
    """At most so many bytes the record of a change takes in the journal, with the topic's name if need be."""
    texts = (subscription.client_id, subscription.name, subscription.selector or "")
    size = f.RECORD_HEADER.size + f.SUBSCRIBE_PAYLOAD.size + f.DECLARATION_BYTES_MAX
    return size + sum(len(text.encode()) for text in texts)
