"""The wall clock, as it is kept: in milliseconds since 1970. A message that has a time is refused while the clock
stands before that."""

from __future__ import annotations

import time

from ...policies.errors import ClockError


def now_ms() -> int:
    """Return the time now, in milliseconds since the epoch. Raises ClockError if that is negative."""
    now = time.time_ns() // 1_000_000
    if now < 0:
        raise before_1970(now)
    return now


def now_us() -> int:
    """Return the time now in microseconds since the epoch: numbers that must not come again begin from it. Raises
    ClockError."""
    now = time.time_ns() // 1_000
    if now < 0:
        raise before_1970(now // 1_000)
    return now


def before_1970(now: int) -> ClockError:
    """Return the error for a time (ms) before 1970. For the send that asks the clock itself, since a call would
    cost."""
    return ClockError(
        f"this machine's clock stands {-now / 1000:.3f} s before 1970, and times are kept in milliseconds since then; "
        "set the clock, and try again. Nothing was done"
    )
