"""Durable subscriptions, as operations of the log: what may be asked, and what a change takes."""

from __future__ import annotations

from collections.abc import Callable

from ...policies.errors import SubscriptionError
from ..base import Change, Subscription
from ..subscriptions import checked
from ..wal import format as w
from . import format as f
from .batch import Operation
from .destinations import DestinationState


def fitting(subscription: Subscription) -> Subscription:
    """Raises what `checked` does, and SubscriptionError for what has no place in the format."""
    checked(subscription)
    for what, text, most in (
        ("name", subscription.name, f.CLIENT_BYTES_MAX),
        ("client_id", subscription.client_id, f.CLIENT_BYTES_MAX),
        ("selector", subscription.selector or "", f.SELECTOR_BYTES_MAX),
    ):
        size = len(text.encode())
        if size > most:
            raise SubscriptionError(f"the {what} of a subscription takes {size} bytes; at most {most} are allowed")
    return subscription


def change_of(change: Change, state: DestinationState, next_subscription: Callable[[], int]) -> Operation:
    """What a transaction does to a subscription."""
    if change.subscribe:
        return (f.SUBSCRIBE, state, next_subscription(), change.subscription, change.retroactive)
    return (f.UNSUBSCRIBE, state, change.subscription.key)


def change_bytes(subscription: Subscription) -> int:
    """At most so many bytes the record of a change takes in the journal, with the topic's name if need be."""
    texts = (subscription.client_id, subscription.name, subscription.selector or "")
    size = w.RECORD_HEADER.size + f.SUBSCRIBE_PAYLOAD.size + f.DECLARATION_BYTES_MAX
    return size + sum(len(text.encode()) for text in texts)
