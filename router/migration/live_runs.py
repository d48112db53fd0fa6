"""LiveRuns has the one repartition of an open router that may be under way."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ...policies import config as configs
from ...policies.errors import TransactionError
from ..placement.registry import StoreRegistry
from ..transactions.coordinator import Coordinator
from .live import LiveRepartition
from .plan import require_directory
from .repartition import Repartitioned

if TYPE_CHECKING:
    from ...policies.config import Config


class LiveRuns:
    """Runs repartitions, one at a time. Threads: all. `_lock` guards the run."""

    def __init__(self, registry: StoreRegistry, coordinator: Coordinator) -> None:
        self._registry, self._coordinator = registry, coordinator
        self._lock = threading.RLock()
        self._run: LiveRepartition | None = None

    def run(
        self,
        config: str | Path | Config,
        progress: Callable[[int, int], None] | None,
        restart: bool,
        prepared_seconds: float,
    ) -> Repartitioned:
        """Move all destinations to where a configuration routes them. Raises as Router.repartition."""
        if not isinstance(prepared_seconds, int | float) or isinstance(prepared_seconds, bool):
            kind = type(prepared_seconds).__name__
            raise TypeError(f"prepared_seconds is a number of seconds, not {kind}: {prepared_seconds!r}")
        if not prepared_seconds >= 0:  # not so of nan either
            raise ValueError(f"prepared_seconds is a number of seconds, 0 or more, not {prepared_seconds!r}")
        new, path = (config, "") if isinstance(config, configs.Config) else (configs.load(config), str(config))
        require_directory(new, self._registry.config)
        told = progress or (lambda done, total: None)
        live = LiveRepartition(self._registry, self._coordinator, new, restart, path, prepared_seconds, told)
        with self._lock:
            self._registry.require_open()
            if self._run is not None and not self._run.ended:
                raise TransactionError("this router is being repartitioned already; wait until that is done")
            self._run = live
        return live.run()

    def stop(self) -> None:
        """Stop what runs, which leaves the destination that is on its way where it was. Waits for the end."""
        run = self._run
        if run is not None:
            run.stop()
