"""The table that routes destinations to what their patterns lead to, and says why.

    >>> routes = RouteTable([("queue://orders.*", "all"), ("queue://orders.eu-*", "europe")])
    >>> routes.route(Destination.parse("orders.eu-1")).target
    'europe'

A RouteTable never changes: any thread may use it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Generic, TypeVar

from ..errors import ConfigError
from .destination import Destination, Kind
from .pattern import KIND_SETS, Pattern, may_overlap
from .trie import PatternTrie

T = TypeVar("T")

ROUTES_CACHED_MAX = 16384
"""The most destinations whose route a RouteTable remembers."""

_RANK_NAMES = ("the literal", "the glob", "the wildcard", "the wildcard")
_KIND_NAMES = ("queues alone", "topics alone", "maps alone", "all kinds")


@dataclass(frozen=True, slots=True)
class Match(Generic[T]):
    """A pattern that matches a destination, what it leads to, and why it won or lost."""

    pattern: Pattern
    target: T
    reason: str


class RouteTable(Generic[T]):
    """Patterns and what they lead to. Their order does not decide which of them wins. Finding it costs by the name's
    segments, not by the number of patterns."""

    def __init__(self, pairs: Iterable[tuple[str, T]]) -> None:
        """Raise DestinationError for what is no pattern, and ConfigError for two that are the same."""
        parsed = [(Pattern.parse(text), target) for text, target in pairs]
        seen: dict[Pattern, str] = {}
        problems = []
        for pattern, _ in parsed:
            if pattern in seen:
                problems.append(f"pattern {pattern.text!r} is the same as {seen[pattern]!r}; keep one of them")
            seen.setdefault(pattern, pattern.text)
        if problems:
            raise ConfigError(problems)
        self._patterns = [pattern for pattern, _ in parsed]
        self._trie: PatternTrie[T] = PatternTrie()
        for pattern, target in parsed:
            self._trie.add(pattern, target)
        self._route = lru_cache(maxsize=ROUTES_CACHED_MAX)(self._find)

    def route(self, destination: Destination) -> Match[T] | None:
        """Return the winner, or None where no pattern matches. A known destination costs a look into a bounded
        cache."""
        return self._route(destination)

    def matches(self, destination: Destination) -> list[Match[T]]:
        """Return every pattern that matches, the winner first. Each has a sentence on why it stands where it stands."""
        return _explained(list(self._trie.matching(destination)))

    def _may_take(self, pattern: Pattern, kind: Kind) -> bool:
        """Tell whether some destination of this kind may match one of these patterns and that one, too."""
        return any(kind in one.kinds and may_overlap(one, pattern) for one in self._patterns)

    def nearest(self, wanted: Destination | Pattern, n: int = 3) -> list[str]:
        """Return the n patterns most like a destination, or a pattern, for the error that none matches."""
        scheme, separator, name = str(wanted).rpartition("://")

        def likeness(text: str) -> float:
            like = f"{scheme}{separator}{name}" if "://" in text else name
            return difflib.SequenceMatcher(None, text, like, autojunk=False).ratio()

        ranked = sorted((-likeness(one.text), one.text) for one in self._patterns)
        return [text for _, text in ranked[:n]]

    def _find(self, destination: Destination) -> Match[T] | None:
        # Two: the winner's reason is what it wins over.
        return next(iter(_explained(list(islice(self._trie.matching(destination), 2)))), None)


def _explained(found: Sequence[tuple[Pattern, T]]) -> list[Match[T]]:
    """Return the patterns that match a destination, the winner first, with reasons."""
    result = []
    for place, (pattern, target) in enumerate(found):
        if place:
            above = found[place - 1][0]
            reason = f"loses to {above.text!r}: {_why(above, pattern)}"
        elif len(found) > 1:
            below = found[1][0]
            reason = f"wins over {below.text!r}: {_why(pattern, below)}"
        else:
            reason = "the only pattern that matches"
        result.append(Match(pattern, target, reason))
    return result


def _why(above: Pattern, below: Pattern) -> str:
    """Say why `above` comes before `below`, two different patterns that match one destination."""
    if above.exact and not below.exact:
        return "an exact name beats every wildcard"
    for place, (a, b) in enumerate(zip(above._segments, below._segments, strict=False), start=1):
        if a == b:
            continue
        if a.rank != b.rank:
            return f"in segment {place}, {_RANK_NAMES[a.rank]} {a.source!r} beats {_RANK_NAMES[b.rank]} {b.source!r}"
        if a.literals != b.literals:
            counts = f"({a.literals} to {b.literals})"
            return f"in segment {place}, {a.source!r} has more literal characters than {b.source!r} {counts}"
        return f"in segment {place}, {a.source!r} comes before {b.source!r} in text order"
    if len(above._segments) != len(below._segments):
        return f"it ends where the other goes on with {below._segments[len(above._segments)].source!r}"
    one, other = (_KIND_NAMES[KIND_SETS.index(pattern.kinds)] for pattern in (above, below))
    return f"it is for {one}, the other for {other}"
