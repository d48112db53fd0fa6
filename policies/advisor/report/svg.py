"""Shapes for the report's charts: the `d` of SVG paths in a box of WIDTH by HEIGHT, and axes' marks.

The box is stretched to the room that there is (`preserveAspectRatio="none"`), so there is no text in it: labels are
HTML beside it, which stays readable on a narrow screen. Shapes of one colour are one path, to keep the file small.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import floor, log10

import numpy as np

from ..trace.arrays import Floats, Ints

WIDTH = 1000
HEIGHT = 300
_DURATIONS = (
    1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 432000, 864000,
    2592000, 5184000, 12960000, 31536000,
)  # fmt: skip


def steps(low: Sequence[int], high: Sequence[int], top: float) -> str:
    """Draw the area between two staircases of as many columns; empty where it has no height. `top`: the value at the
    top."""
    if all(a == b for a, b in zip(low, high, strict=True)):
        return ""
    width = WIDTH / len(high)
    there = _staircase(high, top, width)
    back = _staircase(low[::-1], top, -width)
    return f"M0 {_y(high[0], top)}{there}V{_y(low[-1], top)}{back}Z"


def _staircase(values: Sequence[int], top: float, width: float) -> str:
    """Go from the first value's height on, by columns to the right or (a negative width) to the left."""
    at = 0.0 if width > 0 else float(WIDTH)
    parts = []
    for value, following in pairwise([*values, None]):
        at += width
        if following is None:
            parts.append(f"H{_short(at)}")
        elif following != value:
            parts.append(f"H{_short(at)}V{_y(following, top)}")
    return "".join(parts)


def boxes(rows: Sequence[int], count: int, begin: Floats, end: Floats) -> str:
    """Draw bars in these rows of `count`, from begin to end, given as shares of the width."""
    height = HEIGHT / max(count, 1)
    thick = height * 0.85 if height > 2 else height
    parts = []
    for row, a, b in zip(rows, begin, end, strict=True):
        left, width = a * WIDTH, max((b - a) * WIDTH, 0.8)
        parts.append(f"M{_short(left)} {_short(row * height)}h{_short(width)}v{_short(thick)}h{_short(-width)}z")
    return "".join(parts)


def line(xs: Sequence[float], ys: Sequence[float]) -> str:
    """Draw a line through points given as shares of width and height."""
    return "M" + "L".join(f"{_short(x * WIDTH)} {_short(HEIGHT - y * HEIGHT)}" for x, y in zip(xs, ys, strict=True))


def dots(xs: Sequence[float], ys: Sequence[float]) -> str:
    """Draw points, each as a line of no length. Round ends make dots of them, whatever the box is stretched to."""
    points = zip(xs, ys, strict=True)
    return "".join(f"M{_short(x * WIDTH)} {_short(HEIGHT - y * HEIGHT)}h0" for x, y in points)


def grid(shares: Sequence[float]) -> str:
    """Draw horizontal lines at these shares of the height."""
    return "".join(f"M0 {_short(HEIGHT - share * HEIGHT)}H{WIDTH}" for share in shares)


def _y(value: int, top: float) -> str:
    return _short(HEIGHT - HEIGHT * value / top)


def _short(number: float) -> str:
    """Write a number with one decimal at most, and no more zeros than needed."""
    return f"{number:.1f}".removesuffix(".0").replace("-0.0", "0")


def stacked(held: Ints) -> tuple[Ints, Ints]:
    """Return the lower and upper edges of rows stacked on one another, the first at the bottom."""
    upper: Ints = np.cumsum(held, axis=0)
    return upper - held, upper


def round_marks(top: float, most: int = 5) -> list[float]:
    """Return 0 and round numbers up to at least `top`, `most` or fewer. They are 1, 2 or 5 times a power of ten
    apart."""
    if top <= 0:
        return [0.0, 1.0]
    power = 10.0 ** floor(log10(top / most))
    step = next(power * factor for factor in (1, 2, 5, 10, 20, 50) if top / (power * factor) <= most - 1)
    count = -int(-top // step)
    return [step * i for i in range(count + 1)]


def time_marks(seconds: float, most: int = 6) -> list[float]:
    """Return 0 and round durations up to at most this one."""
    step = next((s for s in _DURATIONS if seconds / s <= most), None)
    if seconds < most or step is None:
        return [mark for mark in round_marks(seconds, most) if mark <= seconds]
    return [float(step * i) for i in range(int(seconds / step) + 1)]
