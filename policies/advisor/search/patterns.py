"""The fewest filters that route each destination of a set to its store.

Filters should also catch the likely next destination: with telemetry.press and telemetry.paint in one store,
`telemetry.>` takes telemetry.weld along. First, on the trie of name segments, dynamic programming finds the fewest of
`name` and `prefix.>` such that the deepest filter on each destination's path leads to its store (the problem, and the
method, of optimal routing tables: Draves et al., ORTC, 1999). On equal count the names win over `prefix.>`: what was
not seen is not guessed. Then filters of one store that differ in one segment are merged into one with `*` there, where
no destination changes its route. At last every destination is routed through the very table that the router will use.

Queues and topics are separate name spaces; each filter says which it is for. `>` alone is the catch-all's: a store of
its own, or one of these, which then has no other filter. ActiveMQ knows no other beside it, so where this store's
destinations are, no other store's filter may be.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from ...names.destination import Destination, Kind
from ...names.pattern import Pattern, escape
from ...names.routes import RouteTable
from ...names.trie import PatternTrie
from .catch_all import CATCH_ALL

_NONE = -1
"""The catch-all takes these: no store of the recommendation."""

_Filter = tuple[str, int]
"""A pattern, and the number of the store that it leads to."""


@dataclass(slots=True)
class _Node:
    """A prefix of names. `store` is the one of the destination that is named exactly so."""

    segments: tuple[str, ...]
    store: int | None = None
    children: dict[str, _Node] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Plan:
    """The fewest filters below a node, by the store inherited from above: how many, and which `>` to put here."""

    count: dict[int, int]
    here: dict[int, int | None]


def filters(stores: Sequence[Sequence[str]], catch_all: int | None = None) -> list[list[str]]:
    """Find filters for each store, in the order of the stores. They route every destination to its own store.

    Destinations are given as text (`queue://a.b`), each in one store. `catch_all`: the number of the store that takes
    all that no other does, by `>` alone; None where none of them does.
    """
    rest = (CATCH_ALL, _NONE if catch_all is None else catch_all)
    store_of = {Destination.parse(name): number for number, names in enumerate(stores) for name in names}
    found: list[_Filter] = []
    for kind in Kind:
        mine = {d: number for d, number in store_of.items() if d.kind is kind}
        if mine:
            found += _of_kind(kind, mine, rest[1])
    found = _merge_stars(found, store_of, rest)
    _verify([*found, rest], store_of)
    result: list[list[str]] = [[] for _ in stores]
    for text, number in sorted(found):
        result[number].append(text)
    if catch_all is not None:
        result[catch_all].append(CATCH_ALL)
    return result


def _of_kind(kind: Kind, store_of: Mapping[Destination, int], catch_all: int) -> list[_Filter]:
    root = _Node(())
    for destination, number in store_of.items():
        node = root
        for segment in destination.name.split("."):
            node = node.children.setdefault(segment, _Node((*node.segments, segment)))
        node.store = number
    plans: dict[tuple[str, ...], _Plan] = {}
    nodes = _below(root)
    for node in reversed(nodes):
        # Dearer than all filters together: no name of the catch-all's store needs one of its own.
        plans[node.segments] = _plan(node, plans, catch_all, 2 * len(store_of) if node.store == catch_all else 1)
    found: list[_Filter] = []
    pending = [(child, catch_all) for child in root.children.values()]
    while pending:
        node, inherited = pending.pop()
        chosen = plans[node.segments].here.get(inherited, plans[node.segments].here[_NONE])
        name = kind.scheme + escape(".".join(node.segments))
        if chosen is not None:
            found.append((name + ".>", chosen))
            inherited = chosen
        if node.store is not None and node.store != inherited:
            found.append((name, node.store))
        pending += [(child, inherited) for child in node.children.values()]
    return found


def _below(root: _Node) -> list[_Node]:
    """Yield all nodes but the root, parents before children. Not recursive: names may have a thousand segments."""
    nodes = list(root.children.values())
    for node in nodes:
        nodes.extend(node.children.values())
    return nodes


def _plan(node: _Node, plans: Mapping[tuple[str, ...], _Plan], catch_all: int, price: int) -> _Plan:
    """Plan the filters below a node. `a.>` matches a itself, so the node's own name inherits what it leads to. `price`:
    what a filter for that name alone counts.

    Only stores that occur below matter. Any other one inherited counts like no store at all, `_NONE`.
    """
    # What the children take where nothing that concerns them is inherited; and by how much it is less where it does.
    without = sum(plans[child.segments].count[_NONE] for child in node.children.values())
    less: dict[int, int] = defaultdict(int)
    for child in node.children.values():
        below = plans[child.segments].count
        for store, value in below.items():
            less[store] += below[_NONE] - value
    if node.store is not None:
        without += price
        less[node.store] += price
    less[_NONE] = 0
    plain = {store: without - less[store] for store in sorted(less)}
    # Where the whole path so far leads nowhere else, a `>` may stand here: it costs one and changes what is inherited.
    # What the catch-all takes is inherited from the root alone.
    never = (without + 1, _NONE)
    best = min(((plain[store] + 1, store) for store in plain if store not in (_NONE, catch_all)), default=never)
    count: dict[int, int] = {}
    here: dict[int, int | None] = {}
    for store, value in plain.items():
        takes = bool(node.children) and best[0] < value and best[1] != store
        count[store], here[store] = (best[0], best[1]) if takes else (value, None)
    return _Plan(count, here)


def _merge_stars(found: list[_Filter], store_of: Mapping[Destination, int], rest: _Filter) -> list[_Filter]:
    """Merge filters of one store that differ in one segment, largest group first, until none can be."""
    groups = _Groups(found)
    named = _Named(store_of)
    table: PatternTrie[int] = PatternTrie()
    _exchange(table, [], [*found, rest])
    astray: dict[str, tuple[Destination]] = {}
    while (merged := groups.largest()) is not None:
        star, group = merged
        pattern = Pattern.parse(star[0])
        _exchange(table, group, [star])
        # Only what the new filter matches can change its route: it matches all that the group did. Whom the same text
        # led astray for another store is asked first: there may be as many stores as names to ask.
        asked = chain(astray.get(star[0], ()), named.by(pattern))
        lost = next((d for d in asked if next(table.matching(d))[1] != store_of[d]), None)
        if lost is None:
            groups.replace(group, star)
        else:
            astray[star[0]] = (lost,)
            _exchange(table, [star], group)
    return groups.filters()


def _exchange(table: PatternTrie[int], gone: Iterable[_Filter], come: Iterable[_Filter]) -> None:
    for text, _ in gone:
        table.remove(Pattern.parse(text))
    for text, number in come:
        table.add(Pattern.parse(text), number)


class _Groups:
    """Filters, and which of them would become the same one with `*` in place of one segment."""

    def __init__(self, found: Iterable[_Filter]) -> None:
        self._filters: dict[str, int] = {}
        self._groups: dict[_Filter, dict[_Filter, None]] = defaultdict(dict)
        self._heap: list[tuple[int, _Filter]] = []
        """The size of each group, negative, and its star; out of date where the group has another size now."""
        self._tried: set[_Filter] = set()
        for filter_ in found:
            self._add(filter_)

    def filters(self) -> list[_Filter]:
        return list(self._filters.items())

    def largest(self) -> tuple[_Filter, list[_Filter]] | None:
        """Give the filter that takes the place of most others, and these; each is given once."""
        while self._heap:
            size, star = heapq.heappop(self._heap)
            group = self._groups[star]
            if len(group) == -size > 1 and star not in self._tried and star[0] not in self._filters:
                self._tried.add(star)
                return star, list(group)
        return None

    def replace(self, group: Iterable[_Filter], star: _Filter) -> None:
        for filter_ in group:
            del self._filters[filter_[0]]
            for other in _stars(filter_):
                del self._groups[other][filter_]
                self._note(other)
        self._add(star)

    def _add(self, filter_: _Filter) -> None:
        self._filters[filter_[0]] = filter_[1]
        for star in _stars(filter_):
            self._groups[star][filter_] = None
            self._note(star)

    def _note(self, star: _Filter) -> None:
        if len(self._groups[star]) > 1:
            heapq.heappush(self._heap, (-len(self._groups[star]), star))


def _stars(filter_: _Filter) -> Iterator[_Filter]:
    """Yield the filter with `*` in place of one segment, for each that this can be said of."""
    scheme, _, name = filter_[0].partition("://")
    segments = name.split(".")
    literal = [place for place, segment in enumerate(segments) if segment not in ("*", ">")]
    if len(literal) < 2:
        return  # A pattern of nothing but wildcards is the catch-all's business.
    for place in literal:
        yield f"{scheme}://{'.'.join([*segments[:place], '*', *segments[place + 1 :]])}", filter_[1]


class _Named:
    """Destinations by each segment of their names, to find those that a pattern matches without trying all."""

    def __init__(self, destinations: Iterable[Destination]) -> None:
        self._by_segment: dict[tuple[int, str], list[Destination]] = defaultdict(list)
        for destination in destinations:
            for place, segment in enumerate(destination.name.split(".")):
                self._by_segment[place, segment].append(destination)

    def by(self, pattern: Pattern) -> Iterator[Destination]:
        """Find the destinations that a pattern with a literal segment matches."""
        few = min((self._by_segment[literal] for literal in pattern._literals()), key=len)
        return (destination for destination in few if pattern.matches(destination))


def _verify(found: Sequence[_Filter], store_of: Mapping[Destination, int]) -> None:
    table = RouteTable(found)
    for destination, number in store_of.items():
        match = table.route(destination)
        assert match is not None and match.target == number, f"{destination} is routed to another store than its own"
