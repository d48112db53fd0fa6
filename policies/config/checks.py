"""What must hold between stores: no name, pattern or directory twice, no directory inside another's; what is
dead-lettered is taken.

Checked on outlines, so that a store in which something else is wrong takes part too: errors come all at once.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import DestinationError
from ..names.destination import Destination, wildcard_in
from ..names.pattern import Pattern
from .limits import contradictions
from .options import dead_letter_name
from .problems import Located
from .yaml_lines import Path as Place

RESERVED = ("bindings.id", "decisions", "in-force.yaml", "placement.records", "router.lock", "usage")
"""What the data directory itself holds, beside `stores`."""


@dataclass(frozen=True, slots=True)
class Outline:
    """As much of a store as could be read. `place` is its position in the list of stores."""

    place: int
    name: str | None
    match: Sequence[object]
    directory: Path | None
    index_directory: Path | None
    kind: str = ""
    dead_letter: object = None
    options: Mapping[str, object] = field(default_factory=dict)


def disagreements(
    root: Path | None, stores: Sequence[Outline], where: Callable[[Place], str] = lambda _place: ""
) -> Iterator[Located]:
    """Each pair of stores that cannot both be. `where` gives the words for a place: ` (line 7)`."""
    yield from _names(stores, where)
    yield from _patterns(stores, where)
    yield from _directories(root, stores, where)
    yield from _dead_letters(stores)
    for store in stores:
        yield from contradictions(("stores", store.place, store.kind), store.kind, store.match, store.options)


def doubts(stores: Sequence[Outline]) -> Iterator[Located]:
    """What may stand in a file, and is probably not what was meant."""
    for store in stores:
        for index, text in enumerate(store.match):
            if isinstance(text, str) and "#" in text.rpartition("://")[2].split("."):
                yield Located(
                    ("stores", store.place, "match", index),
                    f"pattern {text!r}: # is no wildcard here, it matches a segment of that name. A last segment > "
                    "matches all the rest, as in 'orders.>', and * one segment; write [#] if # is meant",
                )
        if isinstance(store.dead_letter, str) and wildcard_in(store.dead_letter) is not None:
            yield Located(
                ("stores", store.place, store.kind, "dead_letter"),
                f"{store.dead_letter!r} is the name of a queue, in which {wildcard_in(store.dead_letter)} is no "
                "wildcard; {name} stands for the destination that a message comes from",
            )
        elif isinstance(store.dead_letter, str) and set("{}") & set(store.dead_letter.replace("{name}", "")):
            yield Located(
                ("stores", store.place, store.kind, "dead_letter"),
                f"{store.dead_letter!r} is the name of a queue with braces in it; only {{name}} stands for the "
                "destination that a message comes from",
            )
        elif isinstance(store.dead_letter, str) and store.dead_letter.rpartition("://")[2] == "{name}":
            yield Located(
                ("stores", store.place, store.kind, "dead_letter"),
                f"{store.dead_letter!r} is the queue itself that a message comes from: there it stays, and is "
                "delivered again and again; give another name, such as `dlq.{name}`",
            )


def _dead_letters(stores: Sequence[Outline]) -> Iterator[Located]:
    """Dead-letter queues that no store takes: what is dead-lettered would have nowhere to go."""
    patterns = [pattern for store in stores for pattern in map(_pattern, store.match) if pattern is not None]
    for store in stores:
        if not isinstance(store.dead_letter, str):
            continue
        try:
            queue = Destination.parse(dead_letter_name(store.dead_letter, "a.b"))
        except DestinationError:
            continue  # said where the option is read
        if not any(pattern.matches(queue) for pattern in patterns):
            yield Located(
                ("stores", store.place, store.kind, "dead_letter"),
                f"no store takes {store.dead_letter!r}: {queue} matches no pattern; add one that it matches",
            )


def _pattern(text: object) -> Pattern | None:
    """None for what is none, which is said where it is read."""
    try:
        return Pattern.parse(text) if isinstance(text, str) else None
    except DestinationError:
        return None


def _names(stores: Sequence[Outline], where: Callable[[Place], str]) -> Iterator[Located]:
    seen: dict[str, Outline] = {}
    for store in stores:
        if store.name is None:
            continue
        first = seen.setdefault(store.name.casefold(), store)
        if first is store:
            continue
        what = "this name too" if first.name == store.name else f"the name {first.name!r}: on some disks they are one"
        at = where(("stores", first.place, "name"))
        yield Located(("stores", store.place, "name"), f"store number {first.place + 1}{at} has {what}; rename one")


def _patterns(stores: Sequence[Outline], where: Callable[[Place], str]) -> Iterator[Located]:
    seen: dict[Pattern, tuple[Outline, Place]] = {}
    for store in stores:
        for index, text in enumerate(store.match):
            place: Place = ("stores", store.place, "match", index)
            pattern = _pattern(text)
            if pattern is None:
                continue
            if pattern not in seen:
                seen[pattern] = (store, place)
                continue
            first, at = seen[pattern]
            owner = "this store" if first is store else f"store {first.name!r}"
            yield Located(place, f"pattern {text!r} stands in {owner} already{where(at)}; keep one of the two")


def _directories(root: Path | None, stores: Sequence[Outline], where: Callable[[Place], str]) -> Iterator[Located]:
    taken: list[tuple[Outline, Place, str]] = []
    for store in stores:
        place: Place = ("stores", store.place)
        if store.directory is None and root is not None and store.name is not None:
            taken.append((store, place, os.path.normpath(root / "stores" / store.name)))
        for key in ("directory", "index_directory"):
            path: Path | None = getattr(store, key)
            if path is None:
                continue
            reason = _against_root(os.path.normpath(path), os.path.normpath(root)) if root is not None else ""
            if reason:
                yield Located((*place, key), reason)
            else:
                taken.append((store, (*place, key), os.path.normpath(path)))
    for (one, at, first), (other, place, second) in itertools.combinations(taken, 2):
        if one is other or (len(at) == 2 and len(place) == 2):
            continue  # a store may nest its own; two defaults meet only where the names do
        relation = _relation(second, first)
        if relation:
            owner = f"store {one.name!r}{where(at)}"
            yield Located(place, f"{second} {relation} {owner}'s {first}; give each store a directory of its own")


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
