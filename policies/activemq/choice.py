"""The choice of ActiveMQ among the filters that match a destination, where that is sure.

An mKahaDB orders the filters that match by ActiveMQDestination.compare and takes the first: of two patterns the one
that the other matches, taken for a name. Where each matches the other (`a.*` and `a.>`), or neither does, or where a
filter lists several patterns, the choice hangs on the order in which they are met, or on the alphabet. So it was read
in, and tried with, ActiveMQ 5.17.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..names.destination import Kind
from ..names.pattern import Pattern, escape, may_overlap

Filter = tuple[Kind, str]
"""A kind, and a name in which whole segments may be `*`, or `>`."""


def ours(filter_: Filter) -> str:
    """Return the pattern of ours that matches the same."""
    kind, name = filter_
    segments = name.split(".")
    # Escaped one by one: what is a wildcard as a whole segment stays one.
    escaped = [segment if segment in ("*", ">") else escape(segment) for segment in segments]
    return kind.scheme + ".".join(escaped)


def unsure(stores: Sequence[Sequence[Filter]]) -> Iterator[tuple[int, Filter, int, Filter]]:
    """Yield each pair of filters in two stores that may match one destination, where ActiveMQ may not choose like us.
    The filters are given by their stores' places: first the winner's store and filter by our order."""
    every = [(place, one, Pattern.parse(ours(one))) for place, filters in enumerate(stores) for one in filters]
    for other, theirs, loser in [entry for entry in every if is_pattern(entry[1][1])]:  # a name loses to none
        for place, mine, winner in every:
            if place == other or not may_overlap(winner, loser) or not winner._key < loser._key:
                continue
            if not _is_sure(stores[place], mine, stores[other]):
                yield place, mine, other, theirs


def is_compacted(filter_: Filter) -> bool:
    """Return whether ActiveMQ takes a filter for another one: `a.*.>` for `a.>`."""
    return filter_[1].split(".")[-2:] == ["*", ">"]


def _is_sure(winners: Sequence[Filter], winner: Filter, losers: Sequence[Filter]) -> bool:
    if len(winners) == 1 and not is_pattern(winner[1]):
        return True  # who is called so comes first
    if len(losers) > 1 or any(map(is_compacted, (*winners, *losers))):
        return False  # tried: of these ActiveMQ took now one, now the other
    return _compare(winners, losers) < 0 < _compare(losers, winners)


def _compare(first: Sequence[Filter], second: Sequence[Filter]) -> int:
    """Compare as ActiveMQDestination.compare does: return a negative number where `first` comes before."""
    left, right = _text(first), _text(second)
    if first[0][0] is not second[0][0]:
        return -1 if first[0][0] is Kind.QUEUE else 1
    if is_pattern(left) and is_pattern(right) and left == right:
        return 0
    if is_pattern(left) and _matches(first, second):
        return 1
    if is_pattern(right) and _matches(second, first):
        return -1
    return (left > right) - (left < right)


def _text(filters: Sequence[Filter]) -> str:
    """Return the physical name of filters."""
    if len(filters) == 1:
        return filters[0][1]
    own = filters[0][0]
    return ",".join(name if kind is own else kind.scheme + name for kind, name in filters)


def is_pattern(name: str) -> bool:
    """Return whether ActiveMQ takes a name for a pattern."""
    return "*" in name or ">" in name


def _matches(filters: Sequence[Filter], names: Sequence[Filter]) -> bool:
    """Match as DestinationFilter.matches does, where what is matched may be patterns itself."""
    if len(names) > 1:
        return False  # a composite's name is no other's
    ((kind, name),) = names
    return any(own is kind and _one_matches(pattern.split("."), name.split(".")) for own, pattern in filters)


def _one_matches(pattern: list[str], path: list[str]) -> bool:
    if pattern[-1] == ">":
        return len(path) >= len(pattern) - 1 and all(map(_like, pattern[:-1], path))
    if "*" in pattern:
        return len(path) == len(pattern) and all(one in ("*", other) for one, other in zip(pattern, path, strict=True))
    return pattern == path


def _like(one: str, other: str) -> bool:
    return "*" in (one, other) or one == other
