"""Space is given back by stores: what is free at once, and what has to be copied together for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ...adapters.core import Store
from ...adapters.system.background import shared
from ...policies.errors import ClosedError, ConfigError

if TYPE_CHECKING:
    from ..placement.registry import StoreRegistry


def reclaim(registry: StoreRegistry) -> int:
    """Free what can be freed now in all open stores; returns bytes. Raises the first error after trying all."""
    return _freed(registry, registry.open_stores(), lambda store: store.reclaim())


def compact(registry: StoreRegistry, name: str | None) -> int:
    """Compact all open stores, or those of one name; returns bytes. Raises the first error after trying all, and
    ConfigError if no open store has this name."""
    there = registry.open_stores()
    stores = [one for one in there if name is None or one.name == name]
    if name is not None and not stores:
        names = ", ".join(sorted({one.name for one in there})) or "none"
        raise ConfigError([f"no store {name!r} is open, to be compacted; open are: {names}"])
    return _freed(registry, stores, lambda store: store.compact())


def compact_recorded(
    registry: StoreRegistry, names: Sequence[str], progress: Callable[[int, int], object]
) -> dict[str, int]:
    """Compact all recorded stores, or those of these names, opened for it; returns the bytes freed by name. `progress`
    is called with how many are done, and how many there are. Raises ConfigError for a name that none has."""
    rows = list(registry.table.stores.values())
    there = [row for row in rows if not names or row.name in names]
    if missing := [name for name in names if all(row.name != name for row in there)]:
        known = ", ".join(sorted(row.name for row in rows)) or "none yet"
        raise ConfigError([f"there is no store {missing[0]!r} to compact; there are: {known}"])
    freed: dict[str, int] = {}
    for number, row in enumerate(there):
        progress(number, len(there))
        freed[row.name] = freed.get(row.name, 0) + registry.with_row(row, lambda store: store.compact())
    return freed


def _freed(registry: StoreRegistry, stores: Sequence[Store], free: Callable[[Store], int]) -> int:
    freed = shared().for_each(stores, free)
    registry.require_open()
    for _, _, error in freed:
        if error is not None and not isinstance(error, ClosedError):  # that was closed for being idle
            raise error
    return sum(freed or 0 for _, freed, _ in freed)
