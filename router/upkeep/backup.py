"""A backup is a copy of a data directory while it is used, as all of it was at one moment.

    found = backup(registry, decisions, Path("/backup/data"))      # opened like any other directory

For that moment, some milliseconds, every store and the decision log are held still at once. So of a transaction over
several stores the copy has what a crash at that moment would have left, and a message that goes from one store to
another is in the one or the other. Then all go on, and are copied as they were: what was queued by then is written
first, and nothing that the copy needs is released meanwhile.

The copy appears whole, under its own name, or not at all. Indexes are left out, which are made anew from the journals;
so are the usage log, and what is not persistent.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Final

from ...adapters.core.migration.backup import StoreCopier
from ...adapters.core.migration.copying import is_shared
from ...adapters.system.directory import is_empty
from ...adapters.system.files import made_whole, make_directory, new_directory, sync_directory, sync_file
from ...adapters.wal import LogCopier
from ...policies.errors import AnabranchError, ClosedError, PlacementError, StoreFailedError
from ...policies.paths import from_home
from ..placement import bindings
from ..placement.on_disk.in_force import FILE, NAME
from ..placement.on_disk.repartition_progress import NAME as PROGRESS
from ..placement.record import RECORD, StoreRow
from ..transactions.decision_log import DecisionLog

if TYPE_CHECKING:
    from ..placement.registry import StoreRegistry

TRIES: Final = 50
"""How often a moment is looked for in which no store comes or goes."""


@dataclass(frozen=True, slots=True)
class BackedUp:
    """The content of a backup."""

    directory: str
    stores: tuple[str, ...]
    bytes: int
    still_seconds: float
    """How long everybody who writes waited."""


def backup(registry: StoreRegistry, decisions: DecisionLog, target: Path | str) -> BackedUp:
    """Copy the data directory of a router to `target`, which must not exist.

    Raises PlacementError where something is at `target`, and for a directory that cannot be copied: some of it lies
    elsewhere, or it is being repartitioned; StoreFailedError, StoreFullError and OSError. Then nothing is at `target`.
    """
    target = from_home(target).absolute()
    _require_copyable(registry, target)
    with made_whole(target, "backup") as making:
        new_directory(making, registry.config.file_mode)
        return _Backup(registry, decisions, making).run(target)


def _require_copyable(registry: StoreRegistry, target: Path) -> None:
    config = registry.config
    if target.exists() and not is_empty(target):
        raise PlacementError(f"{target} is there already; name a new directory for the backup")
    if config.directory.resolve() in [target.resolve(), *target.resolve().parents]:
        raise PlacementError(f"{target} lies in {config.directory}, which is copied; name a directory elsewhere")
    if config.bindings_directory is not None:
        raise PlacementError(
            f"{RECORD} and {bindings.DECISIONS}/ lie in {config.bindings_directory}, and a backup is of one directory; "
            "close the router, and copy both"
        )


def _require_inside(registry: StoreRegistry, row: StoreRow) -> None:
    if Path(row.path).is_absolute():
        raise PlacementError(
            f"store {row.name!r} lies in {row.path}, and a backup is of one directory: the copy would use that store "
            "where it is; close the router, and copy both"
        )


class _Backup:
    def __init__(self, registry: StoreRegistry, decisions: DecisionLog, making: Path) -> None:
        self._registry, self._decisions, self._making = registry, decisions, making
        self._mode = registry.config.file_mode
        self._rows: Mapping[bytes, StoreRow] = {}
        """The stores of this try."""

    def run(self, target: Path) -> BackedUp:
        failed = ""
        for _ in range(TRIES):
            self._rows = dict(self._registry.table.stores)
            try:
                found, failed = self._tried(target), ""
            except (AnabranchError, OSError) as error:
                self._registry.require_open()
                is_same = self._registry.table.stores == self._rows or str(error) == failed
                if is_same and not isinstance(error, ClosedError):
                    raise
                found, failed = None, str(error)  # one of them was just removed, or is about to be
            if found is not None:
                return found
            shutil.rmtree(self._making)
            new_directory(self._making, self._mode)
        raise StoreFailedError("stores come and go all the time, and no moment was found to copy them at; try again")

    def _tried(self, target: Path) -> BackedUp | None:
        """Copy all stores. None: others are there by now. Raises also where one of them is just removed."""
        with ExitStack() as kept:
            stores = self._copiers(kept)
            decisions = self._decisions.copier()
            if decisions is not None:
                kept.enter_context(decisions.kept())
            self._registry.table.flush()  # else the file names stores that are gone
            began = monotonic()
            if not self._at_one_moment(stores, decisions):
                return None
            seconds = monotonic() - began
            size = self._copy(stores, decisions)
            return BackedUp(str(target), tuple(sorted(row.name for row in stores)), size, seconds)

    def _copiers(self, kept: ExitStack) -> dict[StoreRow, StoreCopier | None]:
        """Return what copies each store, also those that come meanwhile: then few come before the moment."""
        found: dict[StoreRow, StoreCopier | None] = {}
        while new := set(self._rows.values()) - found.keys():
            for row in new:
                try:
                    found[row] = self._copier(row, kept)
                except (AnabranchError, OSError):
                    if row.store_id in self._registry.table.stores:
                        raise
                    found[row] = None  # it was just removed
            self._rows = dict(self._registry.table.stores)
        return {row: found[row] for row in sorted(self._rows.values(), key=lambda row: row.path)}

    def _copier(self, row: StoreRow, kept: ExitStack) -> StoreCopier | None:
        """Return what copies a store, which is kept as it is from now on; None for one that keeps nothing."""
        store = self._registry.with_row(row, lambda store: store)
        if store.volatile:
            return None
        _require_inside(self._registry, row)
        if is_shared(store):
            raise PlacementError(f"store {row.name!r} is used by other routers too: back up its database itself")
        copier = StoreCopier(store)
        kept.enter_context(copier.kept())
        return copier

    def _at_one_moment(
        self,
        stores: Mapping[StoreRow, StoreCopier | None],
        decisions: LogCopier | None,
    ) -> bool:
        """Hold all still, note where each ends, and copy the placement record. False: other stores are there now."""
        table = self._registry.table
        with ExitStack() as still:
            for copier in stores.values():
                if copier is not None:
                    still.enter_context(copier.still())
            if decisions is not None:
                still.enter_context(decisions.still())
            with table.unchanged():
                directory = self._registry.config.directory
                if (directory / PROGRESS).exists():
                    raise PlacementError(f"{directory} is being repartitioned; back it up once that is done")
                if (
                    table.stores != self._rows
                    or table.has_leaving
                    or (decisions is None and self._decisions.copier() is not None)
                ):
                    return False
                shutil.copyfile(directory / RECORD, self._making / RECORD)
        return True

    def _copy(self, stores: Mapping[StoreRow, StoreCopier | None], decisions: LogCopier | None) -> int:
        size, directory = 0, self._registry.config.directory
        for row, copier in stores.items():
            path = self._making / row.path
            make_directory(path.parent, self._mode)
            if copier is not None:
                size += copier.copy(path, self._mode)
            elif (directory / row.path / "store.id").exists():  # whoever opens the copy looks for it
                new_directory(path, self._mode)
                shutil.copy2(directory / row.path / "store.id", path / "store.id")
        if decisions is not None:
            path = self._making / bindings.DECISIONS
            new_directory(path, self._mode)
            size += decisions.copy(path)
            shutil.copy2(directory / bindings.DECISIONS / "store.id", path / "store.id")
            sync_directory(path)
        for name in (NAME, FILE):
            if (directory / name).exists():
                shutil.copy2(directory / name, self._making / name)
        for path in self._making.rglob("*"):
            if path.is_dir():
                sync_directory(path)
            elif path.parent == self._making or path.name == "store.id":
                with path.open("rb") as file:
                    sync_file(file.fileno())
        sync_directory(self._making)
        return size + (self._making / RECORD).stat().st_size
