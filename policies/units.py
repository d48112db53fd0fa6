"""Sizes and durations as people write them: `32MiB`, `10 MB`, `500ms`, `2m`; and back.

A size is a whole number of bytes, a duration a number of seconds. A bare number is taken as exactly that. Units are
read without regard to case; `MiB` is 1024 * 1024, `MB` is 1000 * 1000, and a bare `M` is refused: it may be either.
"""

from __future__ import annotations

import math
import re
from decimal import Decimal

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

_SIZES = {
    "B": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": 1024 * GIB,
    "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
}  # fmt: skip
_DURATIONS = {
    unit: Decimal(seconds)
    for unit, seconds in {
        "us": "1e-6",
        "ms": "1e-3",
        "s": "1",
        "m": "60",
        "min": "60",
        "h": "3600",
        "d": "86400",
    }.items()
}

_SIZE_BY_FOLDED = {unit.lower(): factor for unit, factor in _SIZES.items()}
_QUANTITY = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", re.ASCII)

SIZE_BYTES_MAX = 2**63 - 1
SIZE_PATTERN = r"^\s*[0-9]+(\.[0-9]+)?\s*([Bb]|[KkMmGgTt][Ii]?[Bb])?\s*$"
"""The texts that `parse_size` takes, as a regular expression for JSON Schema."""
DURATION_PATTERN = r"^\s*[0-9]+(\.[0-9]+)?\s*([Uu][Ss]|[Mm][Ss]|[Ss]|[Mm]|[Mm][Ii][Nn]|[Hh]|[Dd])?\s*$"
"""The texts that `parse_duration` takes, as a regular expression for JSON Schema."""


def parse_size(value: object) -> int:
    """Return a size in bytes from `32MiB`, `10 MB`, `512` or 512. Raises ValueError, which says what is allowed."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= SIZE_BYTES_MAX:
        return value
    match = _QUANTITY.fullmatch(value) if isinstance(value, str) else None
    factor = _SIZE_BY_FOLDED.get(match[2].lower() or "b") if match else None
    if match and factor is not None:
        size = Decimal(match[1]) * factor
        if size == size.to_integral_value() and size <= SIZE_BYTES_MAX:
            return int(size)
    raise ValueError("expected a size: a whole number of bytes or a number with a unit, such as 65536, 32MiB or 10 MB")


def parse_duration(value: object) -> float:
    """Return a duration in seconds from `500ms`, `1s`, `1.5 h` or a number. Raises ValueError, which says what is
    allowed."""
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0:
        return float(value)
    match = _QUANTITY.fullmatch(value) if isinstance(value, str) else None
    factor = _DURATIONS.get(match[2].lower() or "s") if match else None
    if match and factor is not None:
        return float(Decimal(match[1]) * factor)
    raise ValueError("expected a duration: seconds or a number with a unit (us ms s m h d), such as 0.5, 500ms or 2m")


def format_size(size: int) -> str:
    """Return the shortest text that `parse_size` reads back as exactly `size`: 33554432 is `32MiB`, 1000 is `1kB`.
    Configured sizes are written so, and measured ones by text.human_bytes."""
    for unit, factor in sorted(_SIZES.items(), key=lambda item: -item[1]):
        if size and factor > 1 and size % factor == 0:
            return f"{size // factor}{unit}"
    return f"{size}B"


def format_duration(seconds: float) -> str:
    """Return a text that `parse_duration` reads back as exactly `seconds`: 0.5 is `500ms`, 120.0 is `2m`."""
    for unit in ("d", "h", "m", "s", "ms", "us"):
        count = Decimal(repr(seconds)) / _DURATIONS[unit]
        if count >= 1 and count == count.to_integral_value():
            return f"{int(count)}{unit}"
    return f"{Decimal(repr(seconds)):f}s" if seconds else "0s"
