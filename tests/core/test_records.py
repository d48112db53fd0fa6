"""A message as bytes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.adapters.core.messages import DEFAULT_PRIORITY, PRIORITY_MAX
from anabranch.adapters.core.record.encoding import HEAD, REQUEUED, encode, is_requeued, name_of, order_and_expiry
from anabranch.adapters.core.record.headers import MESSAGE_ID_BYTES_MAX, pack_headers, pack_id, unpack_headers
from anabranch.adapters.core.record.place import ORDER_MAX, order_of, priority_of
from anabranch.adapters.core.state.decoding import decode
from anabranch.policies.errors import MessageTooLargeError
from anabranch.policies.names.destination import Destination

from ..contract.disk import A

# A message as bytes


PLAIN = st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.text() | st.binary()
NESTED = st.recursive(PLAIN, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3))


@given(
    body=st.binary(max_size=100),
    headers=st.dictionaries(st.text(), NESTED, max_size=4),
    message_id=st.none() | st.text(min_size=1, max_size=20),
    priority=st.integers(0, 65_535),
    expires=st.integers(0, (1 << 63) - 1),
    requeued=st.booleans(),
)
def test_it_comes_back_as_it_was(
    body: bytes, headers: dict[str, object], message_id: str | None, priority: int, expires: int, requeued: bool
) -> None:
    flags = REQUEUED if requeued else 0
    record, name = encode(A, body, headers, message_id, 1 << 20, priority, expires, flags)  # type: ignore[arg-type]
    assert name_of(record) == name == (message_id.encode() if message_id is not None else None)
    assert order_and_expiry(record) == (priority, expires)
    assert is_requeued(record) == requeued
    message = decode(None, A, (0, 7, expires, 2, None), record, None)  # type: ignore[arg-type]
    assert (message.body, message.headers, message.message_id) == (body, headers, message_id)
    assert (message.priority, message.expires_at_ms, message.seq) == (priority, expires, 7)
    assert (message.deliveries, message.leased) == (2, False)


def test_the_limit_counts_all_that_is_the_users_own() -> None:
    record, _ = encode(A, b"x" * 10, {"h": 1}, "id", 1 << 20)
    size = len(record) - HEAD.size
    encode(A, b"x" * 10, {"h": 1}, "id", size)
    with pytest.raises(MessageTooLargeError, match="message_bytes_max"):
        encode(A, b"x" * 10, {"h": 1}, "id", size - 1)


def test_a_body_of_another_type_is_copied() -> None:
    body = bytearray(b"abc")
    record, _ = encode(Destination.parse("a"), body, None, None, 100)
    body[0] = 0
    assert decode(None, A, (0, 1, 0, 0, None), record, None).body == b"abc"  # type: ignore[arg-type]
    assert order_and_expiry(record) == (DEFAULT_PRIORITY, 0)


# The order of delivery


priorities = st.integers(0, PRIORITY_MAX)


@given(priorities, priorities)
def test_a_higher_priority_comes_first(one: int, other: int) -> None:
    assert (order_of(one, True) < order_of(other, True)) == (one > other)
    assert 0 <= order_of(one, True) <= ORDER_MAX
    assert priority_of(order_of(one, True)) == one


@given(priorities)
def test_without_priorities_there_is_one_order(priority: int) -> None:
    assert order_of(priority, False) == 0


# Headers and ids as bytes


plain = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(allow_nan=False), st.text(), st.binary()
)


@given(st.dictionaries(st.text(), plain))
def test_headers_come_back(headers: dict[str, Any]) -> None:
    assert unpack_headers(pack_headers(headers)) == headers


@pytest.mark.parametrize(
    ("value", "says"), [(1 << 64, "beyond 64 bits"), (-(1 << 63) - 1, "beyond 64 bits"), ("\ud800", "unicode")]
)
def test_what_has_no_place_in_the_format_is_refused(value: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        pack_headers({"h": value})


def test_what_is_not_plain_is_refused() -> None:
    with pytest.raises(TypeError, match="h"):
        pack_headers({"h": object()})  # type: ignore[dict-item]


@pytest.mark.parametrize("text", ["", "x" * (MESSAGE_ID_BYTES_MAX + 1), "ü" * MESSAGE_ID_BYTES_MAX])
def test_an_id_has_a_length(text: str) -> None:
    with pytest.raises(ValueError, match=f"1 to {MESSAGE_ID_BYTES_MAX} are allowed"):
        pack_id(text)
    assert pack_id("ü" * (MESSAGE_ID_BYTES_MAX // 2)).decode() == "ü" * (MESSAGE_ID_BYTES_MAX // 2)
