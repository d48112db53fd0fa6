"""Checks between stores: no name, pattern or directory stands twice, and dead letters have a store.

The checks read what was given, not what a model made of it. So a store takes part although something else in it is
wrong, and errors come all at once.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import DestinationError
from ..names.destination import Destination, dead_letter_name
from ..names.pattern import Pattern
from ..paths import from_home
from .adapters import kind_in
from .fields import Base, given, items, parsed
from .limits import contradictions
from .problems import Located
from .yaml_lines import Path as Place

Given = Mapping[str, Any]
"""A store's keys and values, in the shape of a file."""

RESERVED = ("bindings.id", "decisions", "in-force.yaml", "placement.records", "router.lock", "usage")
"""Names in the data directory that the router takes itself, beside `stores`."""


def disagreements(directory: object, stores: Sequence[Given], base: Base) -> Iterator[Located]:
    """Yield the problems between stores, and those within one that are no single option's. `directory` is the data
    directory."""
    root = _path(directory, base)
    yield from _names(stores, base)
    yield from _patterns(stores, base)
    yield from _directories(root, stores, base)
    yield from _dead_letters(stores)
    for place, store in enumerate(stores):
        kind, options = _options(store)
        yield from contradictions(("stores", place, kind), kind, items(store.get("match")), options)


def _dead_letters(stores: Sequence[Given]) -> Iterator[Located]:
    """Yield dead-letter queues that no store takes: dead letters would have nowhere to go."""
    given_ones = (store.get("match") for store in stores)
    texts = itertools.chain.from_iterable([one] if isinstance(one, str) else items(one) for one in given_ones)
    patterns = [pattern for pattern in map(parsed, texts) if pattern is not None]
    for place, store in enumerate(stores):
        kind, options = _options(store)
        name = options.get("dead_letter")
        if not isinstance(name, str):
            continue
        try:
            queue = Destination.parse(dead_letter_name(name, "a.b"))
        except DestinationError:
            continue  # said where the option is read
        if not any(pattern.matches(queue) for pattern in patterns):
            yield Located(
                ("stores", place, kind, "dead_letter"),
                f"no store takes {name!r}: {queue} matches no pattern; add one that it matches",
            )


def _names(stores: Sequence[Given], base: Base) -> Iterator[Located]:
    seen: dict[str, tuple[int, str]] = {}
    for place, store in enumerate(stores):
        name = _name(store)
        if name is None:
            continue
        first, other = seen.setdefault(name.casefold(), (place, name))
        if first == place:
            continue
        what = "this name too" if other == name else f"the name {other!r}: on some disks they are one"
        at = base.where(("stores", first, "name"))
        yield Located(("stores", place, "name"), f"store number {first + 1}{at} has {what}; rename one")


def _patterns(stores: Sequence[Given], base: Base) -> Iterator[Located]:
    seen: dict[Pattern, tuple[int, Place]] = {}
    for number, store in enumerate(stores):
        for index, text in enumerate(items(store.get("match"))):
            place: Place = ("stores", number, "match", index)
            pattern = parsed(text)
            if pattern is None:
                continue
            first, at = seen.setdefault(pattern, (number, place))
            if at is not place:
                owner = "this store" if first == number else f"store {_name(stores[first])!r}"
                yield Located(place, f"pattern {text!r} stands in {owner} already{base.where(at)}; keep one of the two")


def _directories(root: Path | None, stores: Sequence[Given], base: Base) -> Iterator[Located]:
    taken: list[tuple[int, Place, str]] = []
    for number, store in enumerate(stores):
        place: Place = ("stores", number)
        name = _name(store)
        if _path(store.get("directory"), base) is None and root is not None and name is not None:
            taken.append((number, place, os.path.normpath(root / "stores" / name)))
        for key in ("directory", "index_directory"):
            path = _path(store.get(key), base)
            if path is None:
                continue
            reason = _against_root(os.path.normpath(path), os.path.normpath(root)) if root is not None else ""
            if reason:
                yield Located((*place, key), reason)
            else:
                taken.append((number, (*place, key), os.path.normpath(path)))
    for (one, at, first), (other, place, second) in itertools.combinations(taken, 2):
        if one == other or (len(at) == 2 and len(place) == 2):
            continue  # a store may nest its own; two defaults meet only where the names do
        relation = _relation(second, first)
        if relation:
            owner = f"store {_name(stores[one])!r}{base.where(at)}"
            yield Located(place, f"{second} {relation} {owner}'s {first}; give each store a directory of its own")


def _options(store: Given) -> tuple[str, Given]:
    """Return the kind of a store and what was given of its options."""
    kind = kind_in(store)
    return kind, given(store.get(kind))


def _name(store: Given) -> str | None:
    name = store.get("name")
    return name if isinstance(name, str) else None


def _path(value: object, base: Base) -> Path | None:
    return base.directory / from_home(value) if isinstance(value, str | Path) and value else None


def _against_root(path: str, root: str) -> str:
    for taken in (root, os.path.join(root, "stores")):  # noqa: PTH118
        if path == taken:
            return f"{path} is where the stores without a directory of their own are; choose another"
        if _inside(taken, path):
            return f"{path} holds {taken}, where the stores without a directory of their own are; choose another"
    for name in RESERVED:
        taken = os.path.join(root, name)  # noqa: PTH118
        if path == taken or _inside(path, taken):
            return f"{path} is kept for the router's own {name}; choose another"
    return ""


def _relation(path: str, other: str) -> str:
    if path == other:
        return "is also"
    if _inside(path, other):
        return "is inside"
    return "holds" if _inside(other, path) else ""


def _inside(path: str, outer: str) -> bool:
    return path.startswith(outer.rstrip(os.sep) + os.sep)
