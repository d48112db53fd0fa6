"""From sets of destinations to the fewest filters that route each of them to its store.

Filters should also catch the likely next destination: with telemetry.press and telemetry.paint in one store,
`telemetry.>` takes telemetry.weld along. First, on the trie of name segments, dynamic programming finds the fewest of
`name` and `prefix.>` such that the deepest filter on each destination's path leads to its store (the problem, and the
method, of optimal routing tables: Draves et al., ORTC, 1999). On equal count the names win over `prefix.>`: what was
not seen is not guessed. Then filters of one store that differ in one segment are merged into one with `*` there, where
no destination changes its route. At last every destination is routed through the very table that the router will use.

Queues and topics are separate name spaces; each filter says which it is for. Nothing is put at a root: `>` is the
catch-all store's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ..destination import Destination, Kind
from ..wildcard import Pattern, RouteTable, escape

CATCH_ALL = ">"
_NONE = -1
"""What the catch-all takes: no store of the recommendation."""


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


def filters(stores: Sequence[Sequence[str]]) -> list[list[str]]:
    """Filters for each store, in the order of the stores. Every destination is routed to its own store by them.

    Destinations are given as text (`queue://a.b`), each in one store.
    """
    store_of = {Destination.parse(name): number for number, names in enumerate(stores) for name in names}
    found: list[tuple[str, int]] = []
    for kind in Kind:
        mine = {d: number for d, number in store_of.items() if d.kind is kind}
        if mine:
            found += _of_kind(kind, mine)
    found = _merge_stars(found, store_of)
    _verify(found, store_of)
    result: list[list[str]] = [[] for _ in stores]
    for text, number in sorted(found):
        result[number].append(text)
    return result


def _of_kind(kind: Kind, store_of: Mapping[Destination, int]) -> list[tuple[str, int]]:
    root = _Node(())
    for destination, number in store_of.items():
        node = root
        for segment in destination.name.split("."):
            node = node.children.setdefault(segment, _Node((*node.segments, segment)))
        node.store = number
    plans: dict[tuple[str, ...], _Plan] = {}
    nodes = _below(root)
    for node in reversed(nodes):
        plans[node.segments] = _plan(node, plans)
    found: list[tuple[str, int]] = []
    pending = [(child, _NONE) for child in root.children.values()]
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
    """All nodes but the root, parents before children. Not recursive: names may have a thousand segments."""
    nodes = list(root.children.values())
    for node in nodes:
        nodes.extend(node.children.values())
    return nodes


def _plan(node: _Node, plans: Mapping[tuple[str, ...], _Plan]) -> _Plan:
    """`a.>` matches a itself, so what it leads to is inherited by the node's own name too.

    Only stores that occur below matter. Any other one inherited counts like no store at all, `_NONE`.
    """
    children = [plans[child.segments] for child in node.children.values()]
    stores = {store for child in children for store in child.count} | {_NONE}
    if node.store is not None:
        stores.add(node.store)

    def cost(inherited: int) -> int:
        own = int(node.store is not None and node.store != inherited)
        return own + sum(child.count.get(inherited, child.count[_NONE]) for child in children)

    plain = {store: cost(store) for store in sorted(stores)}
    # Where the whole path so far leads nowhere else, a `>` may stand here: it costs one and changes what is inherited.
    best = min((plain[store] + 1, store) for store in plain if store != _NONE)
    count: dict[int, int] = {}
    here: dict[int, int | None] = {}
    for store, value in plain.items():
        takes = bool(node.children) and best[0] < value and best[1] != store
        count[store], here[store] = (best[0], best[1]) if takes else (value, None)
    return _Plan(count, here)


def _merge_stars(found: list[tuple[str, int]], store_of: Mapping[Destination, int]) -> list[tuple[str, int]]:
    """Merge filters of one store that differ in one segment, largest group first, until none can be."""
    rejected: set[tuple[str, int]] = set()
    while True:
        merged = _largest_merge(found, rejected)
        if merged is None:
            return found
        star, group = merged
        candidate = [pair for pair in found if pair not in group] + [star]
        # Only what the new filter matches can change its route: it matches all that the group did.
        pattern = Pattern.parse(star[0])
        if _routes(candidate, store_of, filter(pattern.matches, store_of)):
            found = candidate
        else:
            rejected.add(star)


def _largest_merge(
    found: Sequence[tuple[str, int]], rejected: set[tuple[str, int]]
) -> tuple[tuple[str, int], set[tuple[str, int]]] | None:
    groups: dict[tuple[str, int], set[tuple[str, int]]] = defaultdict(set)
    for text, number in found:
        scheme, _, name = text.partition("://")
        segments = name.split(".")
        for place, segment in enumerate(segments):
            # A pattern of nothing but wildcards is the catch-all's business.
            rest = segments[:place] + segments[place + 1 :]
            if segment in ("*", ">") or all(other in ("*", ">") for other in rest):
                continue
            star = f"{scheme}://{'.'.join([*segments[:place], '*', *segments[place + 1 :]])}"
            groups[star, number].add((text, number))
    taken = {text for text, _ in found}
    usable = [
        (-len(group), star)
        for star, group in groups.items()
        if len(group) > 1 and star not in rejected and star[0] not in taken
    ]
    if not usable:
        return None
    _, best = min(usable)
    return best, groups[best]


def _routes(
    found: Sequence[tuple[str, int]], store_of: Mapping[Destination, int], asked: Iterable[Destination]
) -> bool:
    """Whether every one of these goes where it should."""
    table = RouteTable([*found, (CATCH_ALL, _NONE)])
    for destination in asked:
        match = table.route(destination)
        if match is None or match.target != store_of[destination]:
            return False
    return True


def _verify(found: Sequence[tuple[str, int]], store_of: Mapping[Destination, int]) -> None:
    routed = _routes(found, store_of, store_of)
    assert routed, "a filter routes a destination to another store than the one it was made for"
