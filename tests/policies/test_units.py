"""Sizes and durations."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.policies.units import (
    DURATION_PATTERN,
    SIZE_BYTES_MAX,
    SIZE_PATTERN,
    format_duration,
    format_size,
    parse_duration,
    parse_size,
)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("32MiB", 2**25),
        ("10 MB", 10**7),
        (" 512 ", 512),
        (512, 512),
        ("1.5GiB", 3 * 2**29),
        ("64kib", 65536),
        ("1kB", 1000),
        ("0", 0),
        ("7B", 7),
    ],
)
def test_sizes(text: object, size: int) -> None:
    assert parse_size(text) == size
    if isinstance(text, str):
        assert re.search(SIZE_PATTERN, text)


@pytest.mark.parametrize(
    "text", ["", "MiB", "32M", "1.5", "0.3kB1", "-1", -1, 1.5, True, None, "1e3", "٣MiB", "9000000TiB", 2**63, [1]]
)
def test_what_is_no_size(text: object) -> None:
    with pytest.raises(ValueError, match="such as 65536, 32MiB or 10 MB"):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("500ms", 0.5),
        ("1s", 1.0),
        ("2m", 120.0),
        ("2 min", 120.0),
        ("1.5 h", 5400.0),
        ("0.1", 0.1),
        (3, 3.0),
        (0.25, 0.25),
        ("10us", 1e-5),
        ("1d", 86400.0),
    ],
)
def test_durations(text: object, seconds: float) -> None:
    assert parse_duration(text) == seconds
    if isinstance(text, str):
        assert re.search(DURATION_PATTERN, text)


@pytest.mark.parametrize(
    "text", ["", "s", "1m30s", "-1s", -0.5, float("nan"), float("inf"), False, None, "1 year", "1e3"]
)
def test_what_is_no_duration(text: object) -> None:
    with pytest.raises(ValueError, match="such as"):
        parse_duration(text)


@given(st.integers(0, SIZE_BYTES_MAX))
def test_a_size_reads_back(size: int) -> None:
    assert parse_size(format_size(size)) == size


@given(st.floats(0, 1e9))
def test_a_duration_reads_back(seconds: float) -> None:
    assert parse_duration(format_duration(seconds)) == seconds


def test_formats() -> None:
    assert [format_size(n) for n in (2**25, 1000, 1023, 0, 1536)] == ["32MiB", "1kB", "1023B", "0B", "1536B"]
    assert [format_duration(s) for s in (0.5, 120.0, 1.0, 0.0, 1e-5)] == ["500ms", "2m", "1s", "0s", "10us"]
