"""Text for people: sizes, counts and ages, paragraphs and tables."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence


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


def listed(names: Sequence[str], most: int) -> str:
    """Join names by commas, at most so many."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def human_age(seconds: float) -> str:
    """Return an age as `40 s`, `12 min`, `5 h`, `31 d`. Its unit is the largest of which there are two, or seconds."""
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{int(seconds // size):,} {unit}"
    return f"{int(max(seconds, 0))} s"


def printable(text: str) -> str:
    """Return a text with characters escaped that a terminal would take for a command."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def wrapped(text: str, width: int) -> list[str]:
    """Return the lines of a paragraph, of 40 columns at least; no word is broken."""
    lines = textwrap.wrap(text, max(40, width), break_long_words=False, break_on_hyphens=False)
    return list(map(printable, lines))


def table(rows: Sequence[Sequence[str]], right: Sequence[int] = (), ruled: bool = True) -> list[str]:
    """Return the lines of a table whose first row is its head, with a rule under it if it is `ruled`. `right` has the
    columns that are aligned to the right."""
    rows = [list(map(printable, row)) for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    if ruled:
        lines.insert(1, "  ".join("-" * width for width in widths))
    return lines


def free_name(name: str, taken: set[str]) -> str:
    """Return the name, with a number behind it where it is taken. `taken` has small letters, and has the name then."""
    free, number = name, 2
    while free.lower() in taken:
        free, number = f"{name}-{number}", number + 1
    taken.add(free.lower())
    return free
