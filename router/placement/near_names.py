"""Near names: those that somebody may have meant who names a queue that is not there."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from itertools import islice
from typing import Final

from ...policies.names.destination import Destination, Kind
from ...policies.names.pattern import Pattern

LOOKED_AT: Final = 200
"""If more destinations are known a single name is not looked for: that would take longer than it helps."""
PATTERN_LOOKED_AT: Final = 2000
"""The number of destinations that a pattern is compared with, once."""
SHORTEST: Final = 4
"""The letters of a segment in which a slip is seen."""


def near_pattern(pattern: Pattern, known: Iterable[Destination]) -> str | None:
    """Return the pattern with the words of a known queue's name in place of its own: the one most like it."""
    scheme, separator, name = pattern.text.rpartition("://")
    parts = name.split(".")
    made: dict[str, None] = {}
    for destination in islice(known, PATTERN_LOOKED_AT):
        words = destination.name.split(".")
        if destination.kind is Kind.QUEUE and len(words) >= sum(part != ">" for part in parts):
            text = ".".join(part if _is_wild(part) else words[place] for place, part in enumerate(parts))
            made[text] = None
    found = difflib.get_close_matches(name, made, n=1, cutoff=0.6)
    return f"{scheme}{separator}{found[0]}" if found else None


def _is_wild(part: str) -> bool:
    return any(sign in part for sign in "*?[>")


def near_name(named: Destination, known: Iterable[Destination]) -> Destination | None:
    """Return a known one of the same kind whose name differs by one slip: a letter too few or too many, or two swapped.
    Numbers are no slips, nor is another letter: those are names of their own."""
    for other in known:
        if other.kind is named.kind:
            differ = [pair for pair in _pairs(named.name, other.name) if pair[0] != pair[1]]
            if len(differ) == 1 and _is_slip(*differ[0]):
                return other
    return None


def alike_name(named: Destination, known: Iterable[Destination]) -> Destination | None:
    """Return the known one of the same kind whose name is most like this one's, for who only looks at it."""
    names = {other.name: other for other in known if other.kind is named.kind}
    found = difflib.get_close_matches(named.name, names, n=1, cutoff=0.6)
    return names[found[0]] if found else None


def _pairs(one: str, other: str) -> list[tuple[str, str]]:
    words, others = one.split("."), other.split(".")
    return list(zip(words, others, strict=True)) if len(words) == len(others) else []


def _is_slip(one: str, other: str) -> bool:
    if max(len(one), len(other)) < SHORTEST:
        return False
    if len(one) == len(other):
        at = next(place for place, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)
        return one[at : at + 2] == other[at : at + 2][::-1] and one[at + 2 :] == other[at + 2 :]
    short, long = sorted((one, other), key=len)
    return any(long[at].isalpha() and long[:at] + long[at + 1 :] == short for at in range(len(long)))
