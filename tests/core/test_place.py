"""The order of delivery."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from anabranch.adapters.core.messages import PRIORITY_MAX
from anabranch.adapters.core.record.place import ORDER_MAX, order_of, priority_of

priorities = st.integers(0, PRIORITY_MAX)


@given(priorities, priorities)
def test_a_higher_priority_comes_first(one: int, other: int) -> None:
    assert (order_of(one, True) < order_of(other, True)) == (one > other)
    assert 0 <= order_of(one, True) <= ORDER_MAX
    assert priority_of(order_of(one, True)) == one


@given(priorities)
def test_without_priorities_there_is_one_order(priority: int) -> None:
    assert order_of(priority, False) == 0
