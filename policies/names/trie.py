"""Patterns found by the segments of a name: what that takes does not grow with the patterns that do not match.

    trie = PatternTrie[str]()
    trie.add(Pattern.parse("orders.*"), "orders")
    [target for _, target in trie.matching(Destination.parse("orders.eu"))]

A node stands for the segments that patterns begin with. A name is followed down from the root, at each node along the
literal that is its next segment, then the globs that match it, then `*`, then `>`: depth first, that is the order of
precedence (invariant 5), since at the first segment in which two patterns differ the stronger one wins. Globs are kept
by the literal characters that they begin with, so that of thousands only those are asked whose beginning is there.

Not for several threads while it is changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from .destination import Destination
from .pattern import Pattern, Segment

T = TypeVar("T")

_STAR, _REST = "*.", ">."
"""Keys of children that no segment has, which holds no dot."""


@dataclass(slots=True)
class _Node(Generic[T]):
    """The place of patterns that begin alike. `entries` are those that end here, at most one for each set of kinds."""

    entries: list[tuple[Pattern, T]] = field(default_factory=list)
    children: dict[str, _Node[T]] = field(default_factory=dict)
    """All but globs: a literal by its text, `*` and `>` by what is no segment."""
    globs: dict[str, dict[Segment, _Node[T]]] = field(default_factory=dict)
    """By the literal text that each begins with."""

    @property
    def empty(self) -> bool:
        return not (self.entries or self.children or self.globs)

    def child(self, segment: Segment) -> _Node[T] | None:
        if segment.is_glob:
            return self.globs.get(segment.lead, {}).get(segment)
        return self.children.get(_key(segment))

    def grow(self, segment: Segment) -> _Node[T]:
        """Make a new child."""
        child: _Node[T] = _Node()
        if segment.is_glob:
            self.globs.setdefault(segment.lead, {})[segment] = child
        else:
            self.children[_key(segment)] = child
        return child

    def cut(self, segment: Segment) -> None:
        """Remove a child that is there."""
        if not segment.is_glob:
            del self.children[_key(segment)]
        elif len(self.globs[segment.lead]) > 1:
            del self.globs[segment.lead][segment]
        else:
            del self.globs[segment.lead]

    def matching_globs(self, text: str) -> list[_Node[T]]:
        """Return the children whose glob matches a name's segment, the strongest first."""
        found = [
            (glob.key, child)
            for end in range(len(text) + 1)
            for glob, child in self.globs.get(text[:end], {}).items()
            if glob.matches(text)
        ]
        return [child for _, child in sorted(found, key=lambda one: one[0])]


def _key(segment: Segment) -> str:
    return segment.lead if segment.is_literal else f"{segment.source}."


class PatternTrie(Generic[T]):
    """Patterns, each leading to a target."""

    def __init__(self) -> None:
        self._root: _Node[T] = _Node()

    @property
    def empty(self) -> bool:
        """Return whether no pattern is there."""
        return self._root.empty

    def add(self, pattern: Pattern, target: T) -> None:
        """Add a pattern. Raises ValueError where it, however written, is there already."""
        node = self._root
        for segment in pattern._segments:
            node = node.child(segment) or node.grow(segment)
        if any(pattern == other for other, _ in node.entries):
            raise ValueError(f"{pattern.text!r} is there already")
        node.entries = sorted([*node.entries, (pattern, target)], key=lambda entry: entry[0]._key)

    def remove(self, pattern: Pattern) -> None:
        """Remove a pattern. Raises KeyError where it is not there."""
        path = [self._root]
        for segment in pattern._segments:
            child = path[-1].child(segment)
            if child is None:
                raise KeyError(pattern.text)
            path.append(child)
        left = [entry for entry in path[-1].entries if entry[0] != pattern]
        if len(left) == len(path[-1].entries):
            raise KeyError(pattern.text)
        path[-1].entries = left
        for parent, segment, child in zip(path[-2::-1], pattern._segments[::-1], path[:0:-1], strict=True):
            if not child.empty:
                break
            parent.cut(segment)

    def matching(self, destination: Destination) -> Iterator[tuple[Pattern, T]]:
        """Yield the patterns that match, the winner first. Take only as many as are wanted: the search stops there."""
        texts = destination.name.split(".")
        end = len(texts)
        # Not recursive: names may have a thousand segments.
        pending: list[tuple[_Node[T], int]] = [(self._root, 0)]
        while pending:
            node, depth = pending.pop()
            # Last in, first out: the weakest is put there first.
            if (rest := node.children.get(_REST)) is not None:
                pending.append((rest, end))
            if depth == end:
                yield from (entry for entry in node.entries if destination.kind in entry[0].kinds)
                continue
            text = texts[depth]
            if (star := node.children.get(_STAR)) is not None:
                pending.append((star, depth + 1))
            if node.globs:
                pending += [(child, depth + 1) for child in reversed(node.matching_globs(text))]
            if (literal := node.children.get(text)) is not None:
                pending.append((literal, depth + 1))
