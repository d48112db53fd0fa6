"""The configuration in force: what a recommendation is compared with, and what it has to keep to.

    current = CurrentConfig.load("stores.yaml")
    options = RecommendOptions(current=current)          # compared with, and what its stores sync by

`revision` says what of it changes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from ...config import Config, as_plain_data, load
from ...config.durability import Sync
from ...config.models import StoreConfig
from ...config.options import JournalOptions, SqlOptions
from ...config.writing import plain_data
from ...errors import ConfigError
from ...names.destination import Destination

_TUNING = frozenset(
    {"sync", "segment_size", "checkpoint_interval", "checkpoint_operations", "batch_bytes_max", "pool_files"}
)
"""Options in which journals may differ whose destinations are put together. The search knows of `sync`."""


class CurrentConfig:
    """A configuration as models, and as the plain data of its file."""

    def __init__(
        self, config: Config, data: Mapping[str, Any] | None = None, name: str = "the current configuration"
    ) -> None:
        self.config = config
        self.name = name
        self.data: Final = plain_data(config) if data is None else data
        """As `as_plain_data` gives it."""
        self._routes = config.routes()

    @classmethod
    def load(cls, path: str | Path) -> CurrentConfig:
        """Read a configuration. Variables of the environment need not be set: no store is opened. Raises
        ConfigError."""
        return cls(load(path, names_suffice=True), as_plain_data(path))

    def store_of(self, name: str) -> StoreConfig:
        """Return the store of a destination that `require_all` has let pass."""
        match = self._routes.route(Destination.parse(name))
        assert match is not None, name
        return match.target

    def place_of(self, name: str) -> tuple[str, str]:
        """Return what is equal for destinations in one store. It is the store's name, and the destination's where each
        has a store of its own."""
        store = self.store_of(name)
        return store.name, name if store.per_destination else ""

    def name_of(self, destination: str, store: str | None = None) -> str:
        """Name the store of a destination, one of its own with its name behind; or a store of that name."""
        name, alone = self.place_of(destination)
        return f"{name}:{alone}" if alone and store in (None, name) else store or name

    def require_all(self, names: Sequence[str]) -> None:
        """Raise ConfigError that lists all that is routed nowhere."""
        nowhere = [name for name in names if self._routes.route(Destination.parse(name)) is None]
        if nowhere:
            raise ConfigError(
                [f"{self.name} routes {n} nowhere; add a pattern for it, in a --current" for n in nowhere]
            )

    def is_shared(self, name: str) -> bool:
        """Return whether several nodes may have a destination's store."""
        options = self.store_of(name).options
        return isinstance(options, SqlOptions) and (options.shared or options.lease_expiration is not None)

    def sync_of(self, name: str) -> Sync | None:
        """Return how a destination's journal syncs; None where it is in no journal."""
        options = self.store_of(name).options
        return options.sync if isinstance(options, JournalOptions) else None

    def rules_of(self, name: str) -> object:
        """Return what is equal for destinations that may share a store. Others would lose what an option gives them.
        Destinations outside of journals stay where they are, since their files are not those that are predicted."""
        options = self.store_of(name).options
        if not isinstance(options, JournalOptions):
            return self.place_of(name)
        return options.model_dump_json(exclude=set(_TUNING))

    @property
    def _journals(self) -> list[JournalOptions]:
        return [store.options for store in self.config.stores if isinstance(store.options, JournalOptions)]

    def segment_sizes(self, weights: Mapping[str, int]) -> tuple[int, ...]:
        """Return the sizes of segments of the journals that hold these destinations, those first that hold most.
        `weights`: bytes by destination, all of which `require_all` has let pass."""
        held: Counter[int] = Counter()
        for name, weight in weights.items():
            options = self.store_of(name).options
            if isinstance(options, JournalOptions):
                held[options.segment_size] += weight
        return tuple(size for size, _ in held.most_common()) or (self.segment_bytes,)

    @property
    def segment_bytes(self) -> int:
        """Return the largest of the journals' segments; the default where there is no journal."""
        return max((one.segment_size for one in self._journals), default=JournalOptions().segment_size)

    @property
    def compaction(self) -> JournalOptions:
        """Return the journal whose compaction is taken for all: that of most stores, or the default where there is
        none."""
        journals = self._journals
        kinds = [(one.compact_live_percent, one.compact_min_segments) for one in journals]
        return journals[kinds.index(max(kinds, key=kinds.count))] if journals else JournalOptions()

    def to_json(self) -> dict[str, list[str]]:
        """Return the stores and their patterns."""
        return {store.name: list(store.match) for store in self.config.stores}
