"""Sizes and counts as people read them."""

from __future__ import annotations


def human_bytes(count: float) -> str:
    """Return bytes as `9.2 KB`, `23.1 MB`: by powers of a thousand, as disks are sold. Use it for all that was measured
    or counted. A configured size is shown as it may be written in a file, by units.format_size."""
    for unit in ("bytes", "KB", "MB", "GB"):
        if abs(count) < 1000:
            return count_of(round(count), "byte") if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:,.1f} TB"


def count_of(number: int, what: str) -> str:
    """Return a count with its noun: `1 row`, `2,000 rows`."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"
