"""Inspection is what the commands ask of a router beyond what its users do.

    with anabranch.open("data") as router:
        inspection_of(router).bytes_of(destination)         # router.inspection_of

The commands use this and the public methods, nothing else of a router.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..adapters.core.migration.copying import amount
from ..policies.config.adapters import load_adapter
from ..policies.names.destination import Destination
from .api.transaction import Transaction
from .placement.registry import StoreRegistry
from .transactions.decision_log import DecisionLog
from .upkeep import space


class Inspection:
    """Answers the commands' questions. Threads: all."""

    def __init__(self, registry: StoreRegistry, decisions: DecisionLog, begin: Callable[[], Transaction]) -> None:
        self._registry, self._decisions = registry, decisions
        self.begin_unlimited = begin
        """Begins a transaction that holds what it must, whatever the limits of transactions."""

    def option(self, destination: Destination, name: str) -> Any:
        """Return an option of the store that a destination is in, or would be; None if its kind has none of that
        name."""
        return self._registry.option_for(destination, name)

    def is_volatile(self, destination: Destination) -> bool:
        """Return whether a destination is, or would be, in memory alone, so that it goes when the router closes."""
        volatile = self._registry.for_held(destination, lambda store: store.volatile, None)
        if volatile is None:
            volatile = load_adapter(self._registry.route(destination).target.kind).backend_type.volatile
        return volatile

    def bytes_of(self, destination: Destination) -> int:
        """Return how many bytes the messages of a destination have."""
        return self._registry.for_held(destination, lambda store: amount(store, destination).bytes, 0)

    def depth(self, destination: Destination) -> int:
        """Return how many messages or values a destination has, of whatever kind it is."""
        return self._registry.for_held(destination, lambda store: store.depth(destination), 0)

    def compact(self, names: Sequence[str], progress: Callable[[int, int], object]) -> dict[str, int]:
        """Compact all recorded stores, or those of these names; see space.compact_recorded."""
        return space.compact_recorded(self._registry, names, progress)

    @property
    def decisions_damage(self) -> BaseException | None:
        """The reason why the decision log cannot be used; None if it can."""
        return self._decisions.unusable
