"""Destination patterns: which names they match, which one wins, and why.

A pattern is `queue://`, `topic://` or `map://` (none: all kinds) and a dotted name in which

    *       as a whole segment is any one segment, also an empty one
    >       as the last segment is any number of segments, also none: `a.>` matches `a`, `a.b`, `a.b.c`; `>` everything
    * ?     inside a segment are any characters (also none) and any one character: `orders.eu-*`
    [ab]    is one of these characters; ranges `[a-z]`, all others `[!ab]`, and `]` in first place is itself
    [*]     and likewise `[?]`, `[[]`, `[>]` are the characters themselves; `escape` writes them

All else is literal, case-sensitive; `.` always separates. No wildcard but `>` reaches over a `.`.

Which pattern wins depends on the patterns alone (invariant 5). An exact name beats all; then, at the first segment in
which two patterns differ, literal beats in-segment glob (the one with more literal characters first, then text order)
beats `*` beats `>`, and a pattern that ends there beats one that goes on; then one kind beats all.

Patterns are immutable: any thread may use them. Names are matched by fnmatch2; what that takes is said at `_matches`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from fnmatch2 import fnmatchcase2

from ..errors import DestinationError
from .destination import Destination, Kind, mistyped_scheme

_LITERAL, _GLOB, _STAR, _REST = range(4)
KIND_SETS = (frozenset({Kind.QUEUE}), frozenset({Kind.TOPIC}), frozenset({Kind.MAP}), frozenset(Kind))

# Characters that fnmatch or fnmatch2 gives a meaning to, each as a lone surrogate. No valid name holds a surrogate, so
# the encoding is one to one, and one character stays one character, as `?` and `[...]` need.
_TRAPS = {char: chr(0xDC00 + ord(char)) for char in "/\\[]*?!^-&|~"}
_ENCODE = str.maketrans({**_TRAPS, ".": "/"})
_DECODE = str.maketrans({code: char for char, code in _TRAPS.items()})
_END = "/\0"


def _matches(encoded_name: str, encoded_pattern: str, *, prefix: bool) -> bool:
    """Ask fnmatch2, which matches paths, and matches them by prefix; nothing else does.

    Both sides come encoded (`_ENCODE`): segments end in `/`, and characters that would mean something are others. So
    no backslash becomes a slash, and no literal a wildcard. `**`, which fnmatch2 does not backtrack on, never gets
    here. A pattern that does not end in `>` gets a last segment that no name can hold. Thus the prefix is a whole one.
    """
    if prefix:
        return bool(fnmatchcase2(encoded_name, encoded_pattern))
    return bool(fnmatchcase2(encoded_name + _END, encoded_pattern + _END))


@dataclass(frozen=True, slots=True)
class Segment:
    """One segment. Equal segments match the same names; the source text does not count (`[ab]` is `[ba]`)."""

    rank: int
    encoded: str
    literals: int
    lead: str
    """The text that every match begins with; all of a literal."""
    source: str = field(compare=False)

    @property
    def is_literal(self) -> bool:
        return self.rank == _LITERAL

    @property
    def is_glob(self) -> bool:
        return self.rank == _GLOB

    @property
    def is_rest(self) -> bool:
        return self.rank == _REST

    def matches(self, text: str) -> bool:
        """Tell whether it matches this one segment of a name; not for `>`, which matches several."""
        return _matches(text.translate(_ENCODE), self.encoded, prefix=False)

    @property
    def key(self) -> tuple[int, int, str, str]:
        """The order of segments in the same place of two patterns: the first is the stronger."""
        return (self.rank, -self.literals if self.rank == _GLOB else 0, self.encoded.translate(_DECODE), self.encoded)


@dataclass(frozen=True)
class Pattern:
    """A parsed pattern. Two are equal when they are one pattern, however written: `[ab]` and `[ba]`, `a` and `[a]`."""

    text: str = field(compare=False)
    kinds: frozenset[Kind]
    _segments: tuple[Segment, ...] = field(repr=False)
    """The parts between dots. The trie of patterns reads them too."""

    @classmethod
    def parse(cls, text: str) -> Pattern:
        """Parse a pattern. Raises DestinationError, which says what is wrong and what to write instead."""
        return _parse(text)

    def __str__(self) -> str:
        return self.text

    def __hash__(self) -> int:
        # Each receive by a pattern looks it up; a dataclass would hash its segments anew.
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.kinds, self._segments))

    @cached_property
    def exact(self) -> bool:
        """Return whether the pattern is a name: without any wildcard."""
        return all(segment.rank == _LITERAL for segment in self._segments)

    @cached_property
    def _key(self) -> tuple[object, ...]:
        """The order of patterns: of those that match a destination, the first is its route (invariant 5)."""
        return (not self.exact, tuple(s.key for s in self._segments), KIND_SETS.index(self.kinds))

    def matches(self, destination: Destination) -> bool:
        """Tell whether this destination is one of those that the pattern names."""
        name = destination.name
        if destination.kind not in self.kinds or not name.startswith(self._lead):
            return False
        return _matches(name.translate(_ENCODE), self._encoded, prefix=self._open_ended)

    def _literals(self) -> Iterator[tuple[int, str]]:
        """Return the segments of a name that must be certain texts: places from 0, and texts."""
        return ((place, segment.lead) for place, segment in enumerate(self._segments) if segment.is_literal)

    @cached_property
    def _open_ended(self) -> bool:
        return self._segments[-1].rank == _REST

    @cached_property
    def _encoded(self) -> str:
        if len(self._segments) == 1 and self._open_ended:
            return "*"
        closed = self._segments[:-1] if self._open_ended else self._segments
        return "/".join(s.encoded for s in closed)

    @cached_property
    def _lead(self) -> str:
        """The text that every name that matches begins with. It spares most patterns the question to fnmatch2."""
        parts = []
        for segment in self._segments:
            if segment.rank == _REST:
                break
            parts.append(segment.lead)
            if segment.rank != _LITERAL:
                break
        return ".".join(parts)


def may_overlap(one: Pattern, other: Pattern) -> bool:
    """Return False only if no destination can match both. Two globs are taken to overlap."""
    return bool(one.kinds & other.kinds) and _overlap(one._segments, other._segments)


def _overlap(one: Sequence[Segment], other: Sequence[Segment]) -> bool:
    if (one and one[0].is_rest) or (other and other[0].is_rest):
        return True  # what comes before has matched, and the rest may be anything: `>` also matches nothing
    if not one or not other:
        return not one and not other
    first, second = one[0], other[0]
    if first.is_literal and second.is_literal:
        same = first.lead == second.lead
    elif first.is_literal or second.is_literal:
        literal, glob = (first, second) if first.is_literal else (second, first)
        same = glob.matches(literal.lead)
    else:
        same = True
    return same and _overlap(one[1:], other[1:])


def escape(name: str) -> str:
    """Return the pattern that matches exactly this name, of any kind. With `queue://` or `topic://` before it, it is of
    one."""
    segments = []
    for segment in name.split("."):
        if segment == ">":
            segments.append("[>]")
        else:
            segments.append("".join(f"[{char}]" if char in "*?[," else char for char in segment))
    text = ".".join(segments).replace("://", "[:]//")
    if mistyped_scheme(text):
        text = f"[{text[0]}]{text[1:]}"
    for blank in {text[:1], text[-1:]}:
        if blank.isspace():
            text = re.sub(rf"^{blank}|{blank}$", f"[{blank}]", text)
    return text


# Parsing -------------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def _parse(text: str) -> Pattern:
    scheme, separator, name = text.partition("://")
    kinds = {kind.scheme: frozenset({kind}) for kind in Kind}.get(scheme + separator)
    if not separator:
        kinds, name = frozenset(Kind), text
    if kinds is None:
        raise DestinationError(
            f"unknown scheme {scheme!r} in pattern {text!r}; use queue://, topic://, map:// or none for all"
        )
    if not name:
        raise DestinationError(f"pattern {text!r} is empty; to match everything write >")
    if name[0].isspace() or name[-1].isspace() or text[0].isspace():
        raise DestinationError(f"pattern {text!r} begins or ends with a blank; leave it out, or write it as [ ]")
    if not separator and mistyped_scheme(text):
        raise DestinationError(
            f"pattern {text!r} looks mistyped; two slashes after a colon: queue://, topic:// or map://"
        )
    if "\0" in name:
        raise DestinationError(f"pattern {text!r} holds NUL, as no name does")
    if "," in name.replace("[,]", ""):
        raise DestinationError(f"pattern {text!r} holds a comma; list patterns one by one, or write a comma as [,]")
    if any("\ud800" <= char <= "\udfff" for char in name):
        raise DestinationError(f"pattern {text!r} is not valid unicode")
    sources = name.split(".")
    if ">" in sources[:-1]:
        raise DestinationError(
            f"pattern {text!r}: > is the rest of a name, so only its last segment; a literal one is [>]"
        )
    segments = [_parse_segment(source, text) for source in sources]
    if sources[-1] == ">":
        segments[-1] = Segment(_REST, "", 0, "", ">")
    return Pattern(text, kinds, tuple(segments))


def _parse_segment(source: str, pattern: str) -> Segment:
    if source == "*":
        return Segment(_STAR, "*", 0, "", source)
    encoded: list[str] = []
    literals: list[str] = []
    lead: str | None = None
    at = 0
    while at < len(source):
        char, at = source[at], at + 1
        literal = None
        if char == "*" and encoded and encoded[-1] == "*":
            raise DestinationError(
                f"pattern {pattern!r}: ** is no wildcard; * is one segment, a last segment > is all the rest"
            )
        if char == "[":
            token, literal, at = _bracket(source, at, pattern)
        elif char in "*?":
            token = char
        else:
            token, literal = char.translate(_ENCODE), char
        encoded.append(token)
        if literal is not None:
            literals.append(literal)
        elif lead is None:
            lead = "".join(literals)
    whole = "".join(literals)
    rank = _LITERAL if lead is None else _GLOB
    return Segment(rank, "".join(encoded), len(literals), whole if lead is None else lead, source)


def _bracket(source: str, at: int, pattern: str) -> tuple[str, str | None, int]:
    """Parse the brackets that open just before `at`. Return them encoded, the character if they name just one, and
    their end."""
    negated = source.startswith("!", at)
    start = at + negated
    end = source.find("]", start + 1)
    if end < 0:
        raise DestinationError(
            f"pattern {pattern!r}: no ] closes the [ in segment {source!r} (a . always separates segments); "
            "a literal [ is written [[]"
        )
    ranges = _ranges(source[start:end], pattern)
    if not negated and len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        char = chr(ranges[0][0])
        return char.translate(_ENCODE), char, end + 1
    return f"[{'!' if negated else ''}{_encoded_class(ranges)}]", None, end + 1


def _ranges(members: str, pattern: str) -> list[tuple[int, int]]:
    """Return the code points that `a-z_` names, as sorted ranges that do not touch."""
    found = []
    at = 0
    while at < len(members):
        low = high = members[at]
        at += 1
        if members.startswith("-", at) and at + 1 < len(members):
            high = members[at + 1]
            at += 2
        if low > high:
            raise DestinationError(f"pattern {pattern!r}: the range {low}-{high} is empty; write {high}-{low}")
        found.append((ord(low), ord(high)))
    merged: list[tuple[int, int]] = []
    for low_code, high_code in sorted(found):
        if merged and low_code <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], high_code))
        else:
            merged.append((low_code, high_code))
    return merged


def _encoded_class(ranges: list[tuple[int, int]]) -> str:
    """Return the inside of fnmatch brackets that match, among encoded characters, what the ranges hold among plain
    ones."""
    cuts = sorted({ord(char) for char in _TRAPS})
    traps = [_TRAPS[chr(cut)] for cut in cuts if any(low <= cut <= high for low, high in ranges)]
    plain = []
    for low, high in ranges:
        # The surrogates stand for other characters, so a range may not run over them.
        for first, last in ((low, min(high, 0xD7FF)), (max(low, 0xE000), high)):
            for cut in cuts:
                if first <= cut <= last:
                    plain.append((first, cut - 1))
                    first = cut + 1
            plain.append((first, last))
    return "".join(_span(first, last) for first, last in plain if first <= last) + "".join(traps)


def _span(first: int, last: int) -> str:
    return chr(first) if first == last else f"{chr(first)}-{chr(last)}"
