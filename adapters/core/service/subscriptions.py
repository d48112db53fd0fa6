"""Durable subscriptions, as every kind of store asks for them and refuses them."""

from __future__ import annotations

from ....policies.errors import DestinationError, SubscriptionError, TransactionError, UnknownSubscriptionError
from ....policies.names.destination import Destination, Kind
from ..store_types import Subscription, SubscriptionKey


def require_topic(destination: Destination) -> None:
    """Raise DestinationError for what has no subscriptions."""
    if destination.kind is not Kind.TOPIC:
        raise DestinationError(f"{destination} is a queue: only topics have subscriptions")


def checked(subscription: Subscription) -> Subscription:
    """Return a subscription that is fit to be stored. Raises DestinationError if it is of a queue, TypeError and
    SubscriptionError for what is no text."""
    require_topic(subscription.topic)
    for what, text in (
        ("name", subscription.name), ("client_id", subscription.client_id), ("selector", subscription.selector or ""),
    ):  # fmt: skip
        if not isinstance(text, str):
            raise TypeError(f"a subscription's {what} is a str, not {type(text).__name__}: {text!r}")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise SubscriptionError(
                f"the {what} {text[:40]!r} of a subscription is not valid unicode: {error.reason}"
            ) from None
    return subscription


def shown(topic: Destination, key: SubscriptionKey) -> str:
    """Return the words for a subscription in error texts."""
    client = f" of client {key[0]!r}" if key[0] else ""
    return f"durable subscription {key[1]!r}{client} to {topic}"


def unknown(topic: Destination, key: SubscriptionKey) -> UnknownSubscriptionError:
    """Return the error that there is no subscription of that client and name."""
    return UnknownSubscriptionError(f"there is no {shown(topic, key)}; subscribe first")


def require_same(there: Subscription, asked: Subscription) -> None:
    """Raise SubscriptionError if one that is there differs from what is asked for by the same name."""
    if there.selector != asked.selector or bool(there.no_local) != bool(asked.no_local):
        raise SubscriptionError(
            f"the {shown(there.topic, there.key)} has selector {there.selector!r} and no_local {there.no_local}, not "
            f"{asked.selector!r} and {asked.no_local}; unsubscribe it first (its backlog goes with it), or choose "
            "another name"
        )


def require_unclaimed(what: str, done: str, claimed: int) -> None:
    """Raise TransactionError if a transaction has claimed messages that would go."""
    if claimed:
        raise TransactionError(
            f"{what} cannot be {done}: a transaction has claimed {claimed} of its messages; commit it or roll it back "
            "first"
        )
