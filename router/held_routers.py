"""Routers that several parts of one process hold together: `shared` counts them, and the last close closes.

    router = anabranch.shared("data")        # in a web page, a task, a library: the same router each time
    router.close()                           # once for each call

A fork leaves a child what its parent's router leaves it: a client goes on, with as many holders; any other router is
the parent's, and the child's next call opens anew. The lock of a place is held while the router of that directory is
opened, or closed.
"""

from __future__ import annotations

import os
import threading
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from ..adapters.core.store_types import Progress
from ..policies import config as configs
from ..policies.errors import ConfigError
from ..policies.paths import from_home
from .opening import open as open_router
from .placement.on_disk.in_force import FILE, configuration_of
from .router import Router

if TYPE_CHECKING:
    from ..policies.config import Config


class _Place:
    """A data directory, and the router that this process has it open with."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lock = threading.RLock()
        self.router: Router | None = None
        self.holders = 0

    def close(self, router: Router) -> None:
        """Let one holder go, and close the router after the last one."""
        with self.lock:
            if self.router is router and self.holders > 1:
                self.holders -= 1
                return
            router._close()
            if self.router is router:
                self.router = None
                _places.pop(self.path, None)


_places: dict[Path, _Place] = {}
"""Those with a router, and those at which one is just opened."""


def _begin_in_child() -> None:
    for place in _places.values():
        place.lock = threading.RLock()  # whoever held it is not in this process


os.register_at_fork(after_in_child=_begin_in_child)


def shared(
    source: str | PathLike[str] | Config, progress: Progress | None = None, *, shared: bool | None = None
) -> Router:
    """Return the router of a directory that this process has open by an earlier call, or open it as `anabranch.open`.

    All calls get the same router. It counts them, and closes with the last of as many calls of `close`; a `with` block
    is one. So each part of a program, a library too, may take and close it without knowing of the others. How it was
    opened first (`shared`) holds for all. A router that is closed, or that a fork has left to the parent, is no
    longer found here: the next call opens anew.

    Raises ConfigError if the directory is open so under another configuration than `source` gives; the directory alone
    gives none, unless a `stores.yaml` is in it. Otherwise as `anabranch.open`, also where the directory is open by
    that.
    """
    config = None if _is_open_as_it_is(source) else configuration_of(source)
    directory = from_home(source) if config is None else config.directory  # type: ignore[arg-type]
    path = directory.resolve()
    while True:
        place = _places.setdefault(path, _Place(path))
        with place.lock:
            if _places.get(path) is not place:
                continue  # its router was closed since
            router = place.router
            if router is not None and router._registry.opened and not router._registry.forked:
                if config is not None:
                    _require_same(config, router.config)
                place.holders += 1
                return router
            try:
                opened = open_router(source if config is None else config, progress, shared=shared)
            except BaseException:
                if place.router is router:  # else a signal handler's call has opened it meanwhile
                    _places.pop(path, None)
                raise
            opened._held, place.router, place.holders = partial(place.close, opened), opened, 1
            _places[path] = place  # a signal handler's call may have failed meanwhile
            return opened


def _is_open_as_it_is(source: object) -> bool:
    """Return whether a source is a directory that says nothing of how it is to be configured."""
    text = os.fspath(source) if isinstance(source, str | PathLike) else None
    if not isinstance(text, str) or not text:
        return False
    path = from_home(text)
    return path.is_dir() and not (path / FILE).is_file()


def _require_same(given: Config, held: Config) -> None:
    """Raise ConfigError if a configuration differs from the one that a router has."""
    names = [name for name in configs.Config.model_fields if name != "directory"]
    others = [name for name in names if getattr(given, name) != getattr(held, name)]
    if others:
        raise ConfigError(
            [
                f"{held.directory} is open in this process under another configuration: {', '.join(others)} "
                f"{'differs' if len(others) == 1 else 'differ'}. Give the same one, or the directory alone "
                f"({str(held.directory)!r}), which takes it as it is"
            ]
        )
