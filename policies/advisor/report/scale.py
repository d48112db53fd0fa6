"""Times and costs as the trace's clock has them: by order alone there are no hours, so costs are ratios."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ...text import count_of
from . import svg
from .words import byte_hours, change, ratio

_MARKS = 5
_MARKED = 0.92


class Scale:
    """The scale of one recommendation, by its parameters and its cost."""

    def __init__(self, parameters: Mapping[str, Any], cost: float) -> None:
        """Take the scale from parameters. `cost`: the recommended partitioning's, in GiB-hours."""
        self.timeless: Final = parameters["clock"] == "seq"
        self.duration: Final = float(parameters["duration_seconds"])
        self.best_cost = cost
        self._rate = float(parameters["operations_per_second"])

    def time(self, seconds: float) -> str:
        return count_of(round(seconds * self._rate), "operation") if self.timeless else human_duration(seconds)

    def marks(self, seconds: float) -> list[tuple[float, str]]:
        """Choose where on an axis of this length something is written, as a share of it, and what. Nothing stands near
        its end, where it would not fit."""
        length = seconds * self._rate if self.timeless else seconds
        marks = svg.round_marks(length, _MARKS) if self.timeless else svg.time_marks(length, _MARKS)
        text = _count_mark if self.timeless else _duration_mark
        return [(mark / length, text(mark, marks[1])) for mark in marks if mark <= _MARKED * length]

    @property
    def axis(self) -> str:
        return "operations since the trace began" if self.timeless else "time since the trace began"

    def cost(self, cost: float) -> str:
        """Write J, and how it compares with the recommended one's."""
        share = ratio(cost / self.best_cost if self.best_cost else 1.0)
        if share == "the same":
            return "as the recommended" if self.timeless else f"{byte_hours(cost)}, as the recommended"
        compared = f"{share} {'' if share.endswith('times') else 'of '}the recommended"
        return compared if self.timeless else f"{byte_hours(cost)}, {compared}"

    def change(self, added: float) -> str:
        """Say what the recommended cost grows by."""
        return change(added / self.best_cost if self.best_cost else 0.0)

    def hours(self, added: float) -> str:
        """Write an added cost as disk over time, with a comma after it; nothing where there are no hours."""
        return "" if self.timeless else f"{'+' if added >= 0 else ''}{byte_hours(added)}, "


def human_duration(seconds: float) -> str:
    """Write a duration: `12 ms`, `4.5 s`, `2 h 10 min`, `3 d 4 h`."""
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms" if seconds else "0 s"
    if seconds < 60:
        return f"{seconds:.3g} s"
    for size, name, smaller, small in ((60, "min", 1, "s"), (3600, "h", 60, "min"), (86400, "d", 3600, "h")):
        whole, rest = divmod(round(seconds / smaller), size // smaller)
        if name == "d" or whole < (60 if name == "min" else 48):
            return f"{whole:,} {name}" + (f" {rest} {small}" if rest and whole < 100 else "")
    raise AssertionError("days have no end")


def _count_mark(count: float, step: float) -> str:
    """Write a number as short as an axis needs it: `0`, `20`, `20k`, `20M`."""
    if not count:
        return "0"
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if step >= size:
            return f"{count / size:g}{letter}"
    return f"{count:g}"


def _duration_mark(seconds: float, step: float) -> str:
    """Write a duration in one unit, that of the step."""
    if not seconds:
        return "0"
    for size, name in ((86400, "d"), (3600, "h"), (60, "min"), (1, "s")):
        if step >= size and step % size == 0:
            return f"{seconds / size:g} {name}"
    return human_duration(seconds)
