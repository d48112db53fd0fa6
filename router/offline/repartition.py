"""Offline repartition moves destinations to where a new configuration routes them, while nobody uses the data
directory."""

from __future__ import annotations

from ...adapters.system.files import disk_errors
from ...policies.config import Config
from ..migration.plan import require_directory
from ..migration.repartition import Repartitioned, Repartitioning, Told
from ..placement.on_disk.in_force import write_in_force
from ..router import Router


def repartition(
    config: Config, before: Config | None = None, restart: bool = False, path: str = "", progress: Told | None = None
) -> Repartitioned:
    """Move all destinations of a data directory to where `config` routes them. No router may have it open.

    `before`: the configuration that the directory was used with until now, which says how to open stores that `config`
    does not have and that cannot be opened with defaults. `path` is the configuration's, for messages. `restart`: an
    interrupted repartition to another configuration is not gone on with; destinations that it had moved stay there
    unless `config` routes them elsewhere too.

    Raises PlacementError before anything is changed: for destinations that are routed nowhere or to a memory store, or
    that a prepared transaction would change, and for an interrupted repartition to another configuration.
    StoreLockedError, StoreFullError, MessageTooLargeError, CorruptionError, StoreFailedError: all that has not moved is
    where it was; call it again.
    """
    require_directory(config, before)
    router = Router(config)
    router._registry.move(before)
    router.open()
    try:
        with disk_errors(f"{config.directory} cannot be repartitioned"):
            told = progress or (lambda done, total: None)
            run = Repartitioning(router._registry, router._coordinator, config, restart, path, told)
            done = run.run()
        write_in_force(config)
        return done
    finally:
        router.close()
