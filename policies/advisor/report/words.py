"""Figures of the advisor as people read them: disk held over time, and how two costs compare."""

from __future__ import annotations

from ...units import GIB, KIB


def byte_hours(gib_hours: float) -> str:
    """Write disk times time: `9.8 KiB-hours`, `1.2 GiB-hours`, in the unit that leaves few digits."""
    count = gib_hours * GIB
    for unit in ("byte-hours", "KiB-hours", "MiB-hours", "GiB-hours"):
        if abs(count) < KIB:
            return f"{count:.3g} {unit}" if abs(count) < 999.5 else f"{count:,.0f} {unit}"
        count /= KIB
    return f"{count:,.4g} TiB-hours"


def ratio(share: float) -> str:
    """Say how a cost compares with another: `the same`, `95 %`, `2.4 times`, `3,600 times`, `one 3,600th`."""
    if abs(share - 1) < 5e-4:
        return "the same"
    if share >= 2:
        return f"{_round(share)} times"
    if share * 20 < 1:
        return f"one {_round(1 / share)}{_ordinal(_round(1 / share))}" if share > 0 else "nothing"
    return f"{share:.0%}".replace("%", " %") if abs(share - 1) >= 0.01 else f"{share:.1%}".replace("%", " %")


def change(share: float) -> str:
    """Say what a cost grows by: `no change`, `12 % more`, `3 % less`, `3,600 times as much`."""
    if abs(share) < 5e-4:
        return "no change"
    if share >= 1:
        return f"{_round(share + 1)} times as much"
    digits = 0 if abs(share) >= 0.01 else 1
    return f"{abs(share) * 100:.{digits}f} % {'more' if share > 0 else 'less'}"


def _round(number: float) -> str:
    """Round to two digits: no more are meant."""
    if number < 10:
        return f"{number:.1f}".removesuffix(".0")
    magnitude = 10 ** (len(str(int(number))) - 2)
    return f"{round(number / magnitude) * magnitude:,}"


def _ordinal(number: str) -> str:
    """Return what a number's text ends in as a part of something: a 21st, a 32nd, a 3,600th."""
    if number[-2:] in ("11", "12", "13"):
        return "th"
    return {"1": "st", "2": "nd", "3": "rd"}.get(number[-1], "th")
