"""The plan of a repartition: what it would move, and what keeps that from moving (repartition.py)."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ...adapters.core import Store
from ...adapters.core.migration import copying, moved_branches
from ...adapters.core.migration.copying import Amount
from ...adapters.system.directory import is_empty
from ...adapters.system.files import disk_errors
from ...adapters.system.locking import DirectoryLock
from ...policies.config.adapters import load_adapter
from ...policies.errors import AnabranchError, ConfigError, PlacementError, StoreFullError
from ...policies.names.destination import Destination
from ...policies.names.routes import Match
from ...policies.text import count_of, human_bytes
from ..placement import bindings
from ..placement.changed_kinds import command, displaced, held_by, refusal
from ..placement.on_disk.directories import StoreDirectories
from ..placement.on_disk.in_force import known_configuration
from ..placement.on_disk.repartition_progress import NAME, Progress, ProgressFile
from ..placement.open_stores import OpenStores
from ..placement.reconcile import Misplaced, Reconciler, hiding, misplaced_in
from ..placement.record import RECORD, DestinationsTable, StoreRow

if TYPE_CHECKING:
    from ...policies.config import Config, StoreConfig

log: logging.Logger = logging.getLogger(__name__)

SHOWN_MAX: Final = 20


@dataclass(frozen=True, slots=True)
class Move:
    """A destination that is in another store than the configuration routes it to."""

    destination: Destination
    source: str
    """The store's name."""
    target: str
    messages: int
    bytes: int
    """The size of the messages, as they are stored."""
    subscriptions: int


# A dry run -----------------------------------------------------------------------------------------------------------


def plan_of(config: Config, before: Config | None = None, restart: bool = False) -> tuple[Move, ...]:
    """Return what `repartition` would move. The data directory stays as it is, to the byte. Each store that messages
    would leave is copied to the system's directory for temporary files, and looked at there, one after the other.

    Raises as `repartition`, and StoreFullError where there is no room for a copy.
    """
    require_directory(config, before)
    with _looking_at(config) as scratch:
        return tuple(_plan(config, before, scratch, restart))


def refused_open(config: Config) -> PlacementError | None:
    """Return the error of an open that would change the kind of stores, or hide messages; None for nothing, also for a
    directory that is not there. If the configuration in force has the same stores, none is read. Otherwise those that
    it is about are copied, as by `plan_of`, and StoreLockedError is raised where the directory is in use."""
    if not (config.bindings / RECORD).is_file():
        return None
    former = known_configuration(config.directory)
    if former is not None and _places_in(config) == _places_in(former):
        return None
    with _looking_at(config) as scratch, _rows(config, None, scratch) as (directories, table, stores):
        rows = [row for row in table.stores.values() if not _keeps_nothing(row.kind)]
        found = displaced(directories, rows)

        def held(row: StoreRow) -> str:
            try:
                with _copied(directories, row, scratch / "store", stores) as store:
                    return held_by(store)
            except (AnabranchError, OSError) as error:
                return f"what cannot be told ({error})"

        if found:
            return refusal(directories, found, held)
        misplaced: list[Misplaced] = []
        elsewhere = Reconciler(directories, config.routes(), table, stores).routed_elsewhere()
        for row in rows:
            here = [(destination, match) for there, destination, match in elsewhere if there is row]
            # A store that has been moved by hand is told of, or found, by the open.
            if here and stores.adapter(row.kind).identify(directories.path(row)) == row.store_id:
                with _copied(directories, row, scratch / "store", stores) as store:
                    misplaced += filter(None, (misplaced_in(store, row, *one) for one in here))
        return hiding(misplaced, directories) if misplaced else None


@contextmanager
def _looking_at(config: Config) -> Iterator[Path]:
    """Give a directory for copies, while nobody else has the data directory open."""
    lock_path = config.directory / "router.lock"
    owner = lock_path.read_bytes() if lock_path.exists() else None
    lock = DirectoryLock(lock_path, "the router", config.file_mode)
    try:
        lock.acquire()
        what = f"what is in {config.directory} cannot be copied to be looked at"
        with disk_errors(what), tempfile.TemporaryDirectory(prefix="anabranch-") as scratch:
            yield Path(scratch)
    finally:
        if owner is not None and lock.held:
            lock_path.write_bytes(owner)
        lock.release(remove=owner is None)


@contextmanager
def _rows(
    config: Config, before: Config | None, scratch: Path
) -> Iterator[tuple[StoreDirectories, DestinationsTable, OpenStores]]:
    """Give the rows of the placement record, from a copy."""
    shutil.copy2(config.bindings / RECORD, scratch / RECORD)
    directories = StoreDirectories(config)
    directories.before = before
    directories.remember_in_force()
    table = DestinationsTable(scratch / RECORD)
    table.open()
    try:
        yield directories, table, OpenStores(directories, table, None, lambda: None)
    finally:
        table.close()


def _plan(config: Config, before: Config | None, scratch: Path, restart: bool) -> Iterator[Move]:
    if (config.directory / NAME).exists():
        shutil.copy2(config.directory / NAME, scratch / NAME)
    file = ProgressFile(scratch)
    try:
        found = file.open()
    finally:
        file.close()
    if found is not None and found.configuration != digest_of(config) and not restart:  # as a run does
        raise interrupted(config, found)
    with _rows(config, before, scratch) as (directories, table, stores):
        misplaced = Reconciler(directories, config.routes(), table, stores).routed_elsewhere()
        wrong: list[str] = []
        moves: list[Move] = []
        for row in dict.fromkeys(row for row, _, _ in misplaced):
            with _copied(directories, row, scratch / "store", stores) as store:
                for _, destination, match in (one for one in misplaced if one[0] is row):
                    amount = copying.amount(store, destination)
                    wrong += problems_of(directories, table, row, destination, match, amount)
                    if prepared := moved_branches.concerning(store, destination):
                        log.warning(
                            "%s: %s prepared in store %s would change it; those that wait for a transaction "
                            "manager move along, unless they send large messages. A run resolves those that are "
                            "decided, and refuses while others are left (`anabranch transactions`)",
                            destination, count_of(len(prepared), "transaction"), row.name,
                        )  # fmt: skip
                    if (amount.known or prepared) and match is not None:
                        target = directories.name(match.target, destination)
                        moves.append(move_of(destination, row, target, match.target.kind, amount))
    refuse(wrong)
    yield from moves


@contextmanager
def _copied(directories: StoreDirectories, row: StoreRow, copy: Path, stores: OpenStores) -> Iterator[Store]:
    """Give a store's copy, open."""
    path, options = directories.path(row), directories.options_of(row)
    needed = sum(file.stat().st_blocks * 512 for file in path.rglob("*") if file.is_file())
    free = shutil.disk_usage(copy.parent).free
    if needed > free:
        raise StoreFullError(
            f"a copy of store {row.name!r}, {human_bytes(needed)}, has no room in {copy.parent}, where "
            f"{human_bytes(free)} are free; set TMPDIR to a directory on a larger disk and try again"
        )
    try:
        shutil.copytree(path, copy, ignore=shutil.ignore_patterns("*.lock"))
        store = stores.adapter(row.kind)(row.name, copy, directories.options(options))
        store.open()
        try:
            yield store
        finally:
            store.close()
    finally:
        shutil.rmtree(copy, ignore_errors=True)


# Refusals of both ----------------------------------------------------------------------------------------------------


def require_directory(config: Config, before: Config | None) -> None:
    """Raise for a directory that is no data directory, or is another's."""
    bindings.require(config)
    if not (config.bindings / RECORD).is_file():
        raise PlacementError(
            f"{config.directory} is no data directory: {config.bindings} has no {RECORD}. Give the directory that "
            "the stores were used in until now"
        )
    if before is not None and (before.directory, before.bindings) != (config.directory, config.bindings):
        raise ConfigError(
            [
                f"the configuration that was used until now has the data directory {before.directory}, and the new one "
                f"{config.directory}; they must be the same"
            ]
        )


def interrupted(config: Config, found: Progress) -> PlacementError:
    former = f" ({found.path})" if found.path else ""
    return PlacementError(
        f"{config.directory} is being repartitioned to another configuration{former}, and that was interrupted; "
        "nothing was changed. Run it again with that one: it goes on where it was. Or run it with --restart: "
        "what has moved then moves from there, if it has to"
    )


def problems_of(
    directories: StoreDirectories,
    table: DestinationsTable,
    row: StoreRow,
    destination: Destination,
    match: Match[StoreConfig] | None,
    amount: Amount,
) -> list[str]:
    """Return what keeps a destination from being moved."""
    held = f"{destination}: {held_of(amount)}"
    if not amount.messages and not amount.subscriptions:
        return []
    if match is None:
        return [f"{held} in store {row.name!r}, routed to no store; add a pattern for it"]
    name = directories.name(match.target, destination)
    if is_volatile(match):
        return [
            f"{held} would go from store {row.name!r} to {name!r}, a {match.target.kind} store, which keeps nothing "
            "when it is closed; route it to a store that does, or empty it first"
        ]
    path = directories.expected(match.target, destination)
    is_new = table.store_at(directories.recorded(path)) is None and path.exists() and not is_empty(path)
    if is_new and path.is_dir():
        asides = {directories.path(item.row) for item in displaced(directories, table.stores.values())}
        is_new = not asides.issuperset(path.iterdir())  # else it is empty once they are put aside
    if is_new and load_adapter(match.target.kind).identify(path) is None:
        return [f"{held} would go to store {name!r}, and {path} exists and is no store; give it another directory"]
    return []


def held_of(amount: Amount) -> str:
    """Return in words what a store holds of a destination."""
    messages, subscriptions = count_of(amount.messages, "message"), len(amount.subscriptions)
    return f"{messages}, {count_of(subscriptions, 'durable subscription')}" if subscriptions else messages


def is_volatile(match: Match[StoreConfig]) -> bool:
    """Return whether the store of a match keeps nothing when it is closed."""
    return _keeps_nothing(match.target.kind)


def _places_in(config: Config) -> dict[Path, tuple[str, bool, frozenset[str]]]:
    """Return the kind of each store, whether it is one for each destination, and what it takes, by directory."""
    stores = config.stores
    return {config.directory_of(one): (one.kind, one.per_destination, frozenset(one.match)) for one in stores}


def _keeps_nothing(kind: str) -> bool:
    return bool(load_adapter(kind).backend_type.volatile)


def kinds_changed(directories: StoreDirectories, rows: list[StoreRow]) -> list[str]:
    """Return a text for each store whose directory the configuration gives to a store of another kind."""
    wrong = []
    for row in rows:
        config = directories.config_at(directories.path(row))
        if config is not None and config.kind != row.kind:
            wrong.append(
                f"store {config.name!r} is a {row.kind} store in {directories.path(row)}, and the configuration says "
                f"{config.kind}; give the new one another name or `directory`. Or close the router, and run "
                f"`{command(directories.config)}`, which gives it that kind"
            )
    return wrong


def refuse(wrong: list[str]) -> None:
    """Raise PlacementError if anything is wrong."""
    if len(wrong) > SHOWN_MAX:
        wrong = [*wrong[:SHOWN_MAX], f"and {len(wrong) - SHOWN_MAX} more"]
    if wrong:
        raise PlacementError("\n".join(["nothing was changed. These cannot be moved:", *(f"  {one}" for one in wrong)]))


def move_of(destination: Destination, row: StoreRow, target: str, kind: str, amount: Amount) -> Move:
    """Return the move of a destination. `target` and `kind` are the new store's. If its name stays, its kind tells it
    from the old one."""
    source = row.name
    if source == target:
        source, target = f"{source} ({row.kind})", f"{target} ({kind})"
    return Move(destination, source, target, amount.messages, amount.bytes, len(amount.subscriptions))


def digest_of(config: Config) -> bytes:
    """Return the digest of where a configuration routes what; it stays the same if the data directory is moved."""
    recorded = StoreDirectories(config).recorded
    stores = sorted(
        [store.name, store.kind, recorded(config.directory_of(store)), sorted(store.match), store.per_destination]
        for store in config.stores
    )
    return hashlib.sha256(json.dumps(stores).encode()).digest()
