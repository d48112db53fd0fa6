"""Headers and ids as bytes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.adapters.core.record.headers import MESSAGE_ID_BYTES_MAX, pack_headers, pack_id, unpack_headers

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
