"""The configuration in force with a recommendation in it.

    text = revised_yaml(current, plans, weights)         # the same file with the recommended stores in it

All that the current file says stays: every option of every store, and where destinations go that the trace did not
show. A store that is recommended takes the place of the current one with which it shares most bytes; the others are
new, with the options of the store that their destinations come from. Destinations whose stores' options differ, but for
tuning, never come together. New patterns are the recommended filters where these, beside the patterns that are there,
route every destination as recommended; else the names of what moves.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from ...config import loads
from ...config.adapters import DEFAULT_KIND
from ...config.durability import Sync
from ...config.options import JournalOptions, SqlOptions
from ...config.writing import document
from ...errors import ConfigError
from ...names.destination import Destination
from ...names.pattern import escape
from ...text import free_name, human_bytes, listed
from ...units import format_size
from ..search.current import CurrentConfig
from .recommendation import StorePlan
from .sharing import SHARED_STORE, URL_VARIABLE

_NEW_SHARED = f"new, and one for all nodes: {URL_VARIABLE} is the URL of its database"
_PLACES = ("directory", "index_directory")
"""Options that no two stores can share."""


@dataclass(slots=True)
class _Store:
    """A store of the file to be."""

    data: dict[str, Any]
    options: BaseModel
    """As they are now, of it or of the store that it takes them from."""
    notes: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return str(self.data["name"])


def revised_yaml(
    current: CurrentConfig,
    plans: Sequence[StorePlan],
    weights: Mapping[str, int],
    segment_bytes: int | None = None,
    crossed: frozenset[str] = frozenset(),
) -> str:
    """Write the current file with the recommended stores in it, and comments that say what changed. The plans are named
    as `names_beside` says.

    `weights`: bytes by destination. `segment_bytes`: for all journals; None leaves each as it is. `crossed`: the
    destinations that need a store which several nodes share.
    """
    for exact in (False, True):
        stores = _stores(current, plans, weights, segment_bytes, crossed, exact)
        text = _text(current, stores)
        if exact or _routes_as_planned(text, current, plans):
            return text
    raise AssertionError


def _stores(
    current: CurrentConfig,
    plans: Sequence[StorePlan],
    weights: Mapping[str, int],
    segment_bytes: int | None,
    crossed: frozenset[str],
    exact: bool,
) -> list[_Store]:
    options = {store.name: store.options for store in current.config.stores}
    stores = {str(d["name"]): _Store(copy.deepcopy(d), options[d["name"]]) for d in current.data["stores"]}
    groups = [plan.destinations for plan in plans]
    syncs = [Sync(plan.sync) if crossed.isdisjoint(plan.destinations) else None for plan in plans]
    for plan, sync, base in zip(plans, syncs, _bases(current, groups, syncs, weights), strict=True):
        moved = [name for name in plan.destinations if base is None or current.store_of(name).name != base]
        source = _most(current, plan.destinations, weights)
        if base is None and sync is None:
            made = {"name": plan.name, "match": [], **SHARED_STORE}
            stores[plan.name] = _Store(made, SqlOptions(), [_NEW_SHARED])
        elif base is None:
            made = {
                k: v for k, v in copy.deepcopy(stores[source].data).items() if k not in (*_PLACES, "per_destination")
            }
            stores[plan.name] = _Store({**made, "name": plan.name, "match": []}, options[source])
            stores[plan.name].notes.append(f"new, with the options of {source}")
        store = stores[base or plan.name]
        _take(stores, store, plan, moved, exact)
        if moved:
            store.notes.append(f"takes {listed([f'{n} from {current.store_of(n).name}' for n in moved], 8)}")
        if plan.saves_mean_bytes is not None and moved:
            copied = f", {_change(plan.saves_copied_bytes)} to be copied" if plan.saves_copied_bytes else ""
            store.notes.append(
                f"this change alone: {_change(plan.saves_mean_bytes)} disk on average, "
                f"{_change(plan.saves_peak_bytes or 0)} at the peak{copied}"
            )
        _set(store, "sync", Sync(plan.sync), plan.sync)
    for store in stores.values():
        if segment_bytes is not None:
            _set(store, "segment_size", segment_bytes, format_size(segment_bytes))
    return list(stores.values())


def _bases(
    current: CurrentConfig, groups: Sequence[Sequence[str]], syncs: Sequence[Sync | None], weights: Mapping[str, int]
) -> list[str | None]:
    """Find the current store whose place each group of destinations takes, by bytes in common; None for a new one. One
    that syncs otherwise does not do: what the trace did not show may be in it, too. Nor does one that nodes do not
    share, where they have to: there a group has no sync."""
    shared: list[tuple[int, int, str]] = []
    bases: list[str | None] = [None] * len(groups)
    for number, group in enumerate(groups):
        common: Counter[str] = Counter()
        for name in group:
            store = current.store_of(name)
            fits = current.is_shared(name) if syncs[number] is None else current.sync_of(name) in (None, syncs[number])
            if not fits:
                continue
            if not store.per_destination:
                common[store.name] += weights[name]
            elif len(group) == 1:
                bases[number] = store.name  # it has a store of its own already
        shared += [(size, number, name) for name, size in common.items()]
    used: set[str] = set()
    for _, number, name in sorted(shared, key=lambda one: (-one[0], one[1], one[2])):
        if bases[number] is None and name not in used:
            bases[number] = name
            used.add(name)
    return bases


def names_beside(
    current: CurrentConfig,
    groups: Sequence[Sequence[str]],
    syncs: Sequence[Sync | None],
    names: Sequence[str],
    weights: Mapping[str, int],
) -> list[str]:
    """Name the stores of these groups, which sync like that. A store is named as the current one whose place it takes,
    or anew, as in `names`."""
    taken = {store.name.lower() for store in current.config.stores}
    found = []
    for group, base, name in zip(groups, _bases(current, groups, syncs, weights), names, strict=True):
        found.append(free_name(name, taken) if base is None else current.name_of(group[0], base))
    return found


def _most(current: CurrentConfig, names: Sequence[str], weights: Mapping[str, int]) -> str:
    """Find the current store that holds most of these."""
    common: Counter[str] = Counter()
    for name in names:
        common[current.store_of(name).name] += weights[name] + 1
    return min(common, key=lambda name: (-common[name], name))


def _take(stores: Mapping[str, _Store], store: _Store, plan: StorePlan, moved: Sequence[str], exact: bool) -> None:
    """Give the store the patterns that bring it what moves, and take these from others."""
    if not moved:
        return
    wanted = [f"{d.kind.scheme}{escape(d.name)}" for d in map(Destination.parse, moved)] if exact else plan.filters
    # Dictionaries: there may be thousands of patterns.
    there = dict.fromkeys(store.data["match"])
    new = {pattern: None for pattern in wanted if pattern not in there}
    for other in stores.values():
        if other is not store:
            other.data["match"] = [pattern for pattern in other.data["match"] if pattern not in new]
    store.data["match"] = [*there, *new]


def _set(store: _Store, option: str, value: Sync | int, text: str) -> None:
    """Set an option of a journal, where it is another."""
    now = getattr(store.options, option, None)
    if isinstance(store.options, JournalOptions) and now != value:
        store.notes.append(f"{option} was {now.value if isinstance(now, Sync) else format_size(now or 0)}")
        store.data[DEFAULT_KIND] = {**(store.data.get(DEFAULT_KIND) or {}), option: text}


def _text(current: CurrentConfig, stores: Sequence[_Store]) -> str:
    gone = [store.name for store in stores if not store.data["match"]]
    head = [
        "Recommended by `anabranch recommend`, from the configuration in force, whose options are all kept. What the",
        "trace did not show goes where it went, unless a new pattern takes it.",
        *(f"Store {name} is gone: what it matched is in the others now." for name in gone),
    ]
    rest = {key: value for key, value in current.data.items() if key != "stores"}
    return document(rest, [(store.data, store.notes) for store in stores if store.name not in gone], head)


def _routes_as_planned(text: str, current: CurrentConfig, plans: Sequence[StorePlan]) -> bool:
    """Tell whether each plan's destinations, and nobody else's, come together."""
    try:
        made = CurrentConfig(loads(text, current.config.directory, names_suffice=True), {})
        made.require_all([name for plan in plans for name in plan.destinations])
        places = [{made.place_of(name) for name in plan.destinations} for plan in plans]
    except ConfigError:  # two stores with one pattern
        return False
    return all(len(place) == 1 for place in places) and len(set().union(*places)) == len(plans)


def _change(saved: float) -> str:
    return f"{human_bytes(abs(saved))} {'less' if saved >= 0 else 'more'}"
