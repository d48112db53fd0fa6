"""The times until which messages wait, in milliseconds of the wall clock."""

from __future__ import annotations

from typing import Final

from .sweep import wall_ms

DUE_MAX_MS: Final = (1 << 63) - 1


def delay_ms(seconds: float, what: str = "delay") -> int:
    """Return seconds as milliseconds, rounded up. Raises TypeError, and ValueError for what is no time to wait."""
    if not isinstance(seconds, int | float) or isinstance(seconds, bool):
        raise TypeError(f"{what} is a number of seconds, not {type(seconds).__name__}: {seconds!r}")
    if not 0 <= seconds <= (DUE_MAX_MS - wall_ms()) / 1000 - 1:  # not so of nan either
        raise ValueError(f"{what} is a number of seconds from 0 to 2**63 ms from now, not {seconds!r}")
    return -int(-seconds * 1000 // 1)
