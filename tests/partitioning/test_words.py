"""Figures as people read them."""

from __future__ import annotations

import pytest

from anabranch.policies.advisor.report.words import byte_hours, change, ratio

KIB_HOUR = 1 / (1 << 20)
"""In GiB-hours."""


@pytest.mark.parametrize(
    ("gib_hours", "text"),
    [
        (9.4e-06, "9.86 KiB-hours"), (0.0, "0 byte-hours"), (KIB_HOUR / 2048, "0.5 byte-hours"),
        (0.25, "256 MiB-hours"), (12.5, "12.5 GiB-hours"), (1500.0, "1.465 TiB-hours"), (3e6, "2,930 TiB-hours"),
        (-KIB_HOUR, "-1 KiB-hours"), (1010 * KIB_HOUR, "1,010 KiB-hours"),
    ],
)  # fmt: skip
def test_disk_over_time_has_the_unit_that_leaves_few_digits(gib_hours: float, text: str) -> None:
    assert byte_hours(gib_hours) == text


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (1.0, "the same"), (1.0001, "the same"), (1.002, "100.2 %"), (1.49, "149 %"), (0.95, "95 %"), (2.0, "2 times"),
        (2.44, "2.4 times"), (27.3, "27 times"), (3635.0, "3,600 times"), (1 / 3635, "one 3,600th"),
        (1 / 21, "one 21st"), (1 / 32, "one 32nd"), (1 / 112.0, "one 110th"), (0.0, "nothing"), (0.05, "5 %"),
    ],
)  # fmt: skip
def test_two_costs_are_compared_in_words(share: float, text: str) -> None:
    assert ratio(share) == text


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (0.0, "no change"), (1e-4, "no change"), (0.002, "0.2 % more"), (0.17, "17 % more"), (-0.03, "3 % less"),
        (3634.0, "3,600 times as much"), (1.0, "2 times as much"), (-0.9997, "100 % less"),
    ],
)  # fmt: skip
def test_what_a_cost_grows_by_is_told_in_words(share: float, text: str) -> None:
    assert change(share) == text
