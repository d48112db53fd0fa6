"""A data directory that nobody has open, as who only reads it finds its way: the stores in it, and their options."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...adapters.system.directory import StoreDirectory
from ...policies.config import Config, StoreConfig
from ...policies.errors import CorruptionError, PlacementError
from ..placement import bindings
from ..placement.on_disk.directories import children
from ..placement.record import RECORD, DestinationsTable, StoreRow

LOCK = "router.lock"


@contextmanager
def recorded(directory: Path, scratch: Path, notes: list[str]) -> Iterator[DestinationsTable | None]:
    """Give the placement record, from a copy in `scratch`; None, with a note, where there is none that can be used."""
    record, copy = bindings.place_of(directory) / RECORD, scratch / RECORD
    if not record.exists():
        notes.append(f"{record} is missing: the stores that lie here are shown")
        yield None
        return
    shutil.copyfile(record, copy)
    table = DestinationsTable(copy)
    try:
        table.open()
    except (CorruptionError, PlacementError) as error:
        notes.append(str(error).replace(str(copy), str(record)))
        yield None
        return
    try:
        yield table
    finally:
        table.close()


def lying_in(directory: Path) -> Iterator[StoreRow]:
    """Yield the stores that lie in a data directory whose record cannot be used."""
    stores = children(directory / "stores")
    for path in [*stores, *(child for store in stores for child in children(store))]:
        store_id = StoreDirectory("", path).identify()
        if store_id is not None:
            kind = "journal" if (path / "journal").is_dir() else "other"
            relative = path.relative_to(directory)
            yield StoreRow(store_id, str(relative), kind, ":".join(relative.parts[1:]))


def config_at(config: Config, path: Path) -> StoreConfig | None:
    """Return the configured store that has this directory, or whose stores of one destination each have it among
    theirs."""
    place = path.resolve()
    for store in config.stores:
        if config.directory_of(store).resolve() == (place.parent if store.per_destination else place):
            return store
    return None


def config_of(config: Config | None, name: str, path: Path) -> StoreConfig | None:
    """Return the configuration of a recorded store; None where there is none."""
    if config is None:
        return None
    named = (store for store in config.stores if store.name == name.partition(":")[0])
    return config_at(config, path) or next(named, None)
