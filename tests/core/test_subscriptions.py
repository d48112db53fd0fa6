"""What is refused of subscriptions, and how it is said."""

from __future__ import annotations

from typing import Any

import pytest

from anabranch.adapters.core.service.subscriptions import checked, require_same, require_unclaimed, shown, unknown
from anabranch.adapters.core.store_types import Subscription
from anabranch.policies.errors import DestinationError, SubscriptionError, TransactionError

from ..contract.disk import A, T


def test_a_queue_has_none() -> None:
    with pytest.raises(DestinationError, match="only topics have subscriptions"):
        checked(Subscription(A, "desk"))


@pytest.mark.parametrize(("field", "value"), [("name", 5), ("client_id", b"c"), ("selector", 7.0)])
def test_its_texts_are_texts(field: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"a subscription's {field} is a str, not {type(value).__name__}"):
        checked(Subscription(T, "desk")._replace(**{field: value}))


def test_its_texts_are_unicode() -> None:
    with pytest.raises(SubscriptionError, match="not valid unicode"):
        checked(Subscription(T, "\ud800"))
    one = Subscription(T, "ü", "\0", "a = 'b'")
    assert checked(one) is one


def test_another_of_the_same_name_is_refused() -> None:
    there = Subscription(T, "desk", "c", "a = 1")
    require_same(there, Subscription(T, "desk", "c", "a = 1", False))
    for asked in (there._replace(selector=None), there._replace(no_local=True)):
        with pytest.raises(SubscriptionError, match="unsubscribe it first"):
            require_same(there, asked)


def test_how_one_is_named() -> None:
    assert shown(T, ("", "desk")) == "durable subscription 'desk' to topic://t"
    assert "there is no durable subscription 'desk' of client 'c' to topic://t" in str(unknown(T, ("c", "desk")))


def test_what_a_transaction_has_claimed_does_not_go() -> None:
    require_unclaimed("topic://t", "deleted", 0)
    with pytest.raises(TransactionError, match="a transaction has claimed 2 of its messages"):
        require_unclaimed("topic://t", "deleted", 2)
