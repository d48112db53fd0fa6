"""The door: how users open a router, and how other processes come in."""

from __future__ import annotations

from os import PathLike
from typing import TYPE_CHECKING

from ..adapters.core.store_types import Progress
from .placement.on_disk.in_force import configuration_of
from .placement.registry import StoreRegistry
from .router import Others, Router

if TYPE_CHECKING:
    from ..policies.config import Config


def _way_in(router: Router, registry: StoreRegistry) -> Others:
    from .sharing.owner.control import ControlSocket  # once a router is opened: an import need not take longer

    return ControlSocket(router, registry)


Router._let_in = staticmethod(_way_in)  # type: ignore[method-assign]


def open(
    source: str | PathLike[str] | Config | None = None, progress: Progress | None = None, *, shared: bool | None = None
) -> Router:
    """Open a router from a directory, a YAML file or a Config. Use it with `with`, or close it.

    A directory, new or not, is opened with the `stores.yaml` in it, else as it was opened last. A directory that nobody
    has used yet has one journal store for everything (`sync: always`). A path where nothing is is a directory, unless
    its name ends in .yaml or .yml. A name that ends nearly so, or as other configurations do, is refused.

    With `shared`, here or in the configuration, any number of processes of one user have the directory open at once:
    each is a client of the process that owns it, which the first one starts (docs/processes.md).
    None: as the configuration says.

    Raises ConfigError with all that is wrong in the file or with the directory, StoreLockedError, PlacementError,
    CorruptionError, and TypeError for what is none of the three.
    """
    config = configuration_of(source)
    if config.shared if shared is None else shared:
        from .sharing.client.router import SharedRouter  # for who shares a directory alone: it takes a while

        return SharedRouter(config).open(progress)
    return Router(config).open(progress)
