"""Reconciling compares the configuration, the placement record and the disk, so that no message is lost sight of
(invariant 6).

At each open, in this order:

1. Every recorded store must be where it was, or in a directory that the configuration names now (rules D1, D2).
2. A store that is not recorded, since the record was lost or restored from an old backup, is recorded anew if the
   configuration routes all that it holds to where it lies; else the open is refused.
3. A destination with messages must be routed to where they are; else the open is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from ...adapters.core import Store
from ...adapters.system.directory import is_empty
from ...adapters.system.files import remove_directory, sync_directory
from ...policies.config.adapters import DEFAULT_KIND
from ...policies.errors import AnabranchError, PlacementError, StoreLockedError, shown_held
from ...policies.names.destination import Destination
from ...policies.names.pattern import escape
from ...policies.names.routes import Match, RouteTable
from ...policies.text import count_of
from .changed_kinds import Displaced, command, displaced, held_by, in_words, refusal
from .on_disk.directories import Place, StoreDirectories
from .on_disk.in_force import NAME as IN_FORCE
from .open_stores import OpenStores
from .record import DestinationRow, DestinationsTable, StoreRow

if TYPE_CHECKING:
    from ...policies.config import StoreConfig

log: logging.Logger = logging.getLogger(__name__)

SHOWN_MAX: Final = 20


class Misplaced(NamedTuple):
    """A destination whose messages lie in another store than the configuration routes it to."""

    destination: Destination
    messages: int
    row: StoreRow
    match: Match[StoreConfig] | None
    other: StoreRow | None = None
    """The store that the record has the destination in, where that is not the one that holds these messages."""
    prepared: int = 0
    """The number of transactions that are prepared in the store and may send there once they are committed."""
    subscriptions: int = 0
    """The number of durable subscriptions, with messages or without."""


class Reconciler:
    """Compares and records. Used by the router, at open and when it meets a directory that it did not make."""

    def __init__(
        self,
        directories: StoreDirectories,
        routes: RouteTable[StoreConfig],
        table: DestinationsTable,
        stores: OpenStores,
        may_remove: Callable[[bytes], bool] = lambda store_id: True,
    ) -> None:
        """Make a reconciler. `may_remove` returns whether no decision names a store."""
        self._directories, self._may_remove = directories, may_remove
        self._routes = routes
        self._table = table
        self._stores = stores

    def run(self) -> None:
        """Do all three steps. Raises PlacementError, which lists everything that would be hidden."""
        self.find_stores()
        if changed := self.clear_volatile():
            raise refusal(self._directories, changed, self._held)
        misplaced = self._misplaced()
        if misplaced:
            raise hiding(misplaced, self._directories)

    def find_stores(self) -> None:
        """Do the first two steps alone. Raises PlacementError."""
        self._locate()
        unknown = self._record_unknown()
        if unknown:
            raise _refusal(_UNKNOWN, unknown, self._directories)

    def routed_elsewhere(self) -> list[tuple[StoreRow, Destination, Match[StoreConfig] | None]]:
        """Return recorded destinations that the configuration routes to another store than theirs, or to none, by the
        store they are in."""
        found = []
        for known in list(self._table.destinations.values()):
            row, match = self._table.stores[known.store_id], self._routes.route(known.destination)
            if match is None or not self.lies_at(row, match, known.destination):
                found.append((row, known.destination, match))
        return sorted(found, key=lambda one: (one[0].path, one[1].kind.value, one[1].name))

    def reroute(self, routes: RouteTable[StoreConfig]) -> None:
        """Route by a new configuration, which the directories know already. Its names of the stores are recorded."""
        self._routes = routes
        self._locate()

    # 1. Recorded stores

    def _locate(self) -> None:
        by_id: dict[bytes, Path] | None = None
        for row in list(self._table.stores.values()):
            path = self._directories.path(row)
            found = self._stores.adapter(row.kind).identify(path)
            if found != row.store_id:
                if by_id is None:
                    by_id = self._by_id()
                if row.store_id in by_id:
                    path = by_id[row.store_id]
                    log.info("store %s has moved to %s", row.name, path)
                elif found is None and getattr(self._stores.adapter(row.kind), "volatile", False):
                    self._forget_volatile(row, path)
                    continue
                elif not self._table.destinations_in(row.store_id):
                    self._table.forget_store(row.store_id)  # nothing was ever in it, or all has moved out (D1)
                    continue
                else:
                    held = dict.fromkeys(map(str, self._table.destinations_in(row.store_id)))
                    raise PlacementError(f"{_missing(row, path, found)}; {shown_held(held, 'it')}")
            now = StoreRow(row.store_id, self._directories.recorded(path), row.kind, self._name_now(row, path))
            if now != row:
                self._table.record_store(now)

    def _by_id(self) -> dict[bytes, Path]:
        """Return where stores lie, also those that a repartition was about to put aside."""
        kinds = {row.kind for row in list(self._table.stores.values())}  # a live move may add one
        places = [*self._directories.places(), *self._directories.former_places()]
        return {known[1]: place.path for place in places if (known := self._identify(place, kinds))}

    def clear_volatile(self) -> list[Displaced]:
        """Remove the stores that keep nothing and in whose place the configuration has something else; returns the
        others in whose place it has something else."""
        left = []
        for item in displaced(self._directories, self._table.stores.values()):
            row, path = item.row, self._directories.path(item.row)
            if not getattr(self._stores.adapter(row.kind), "volatile", False) or not self._may_remove(row.store_id):
                left.append(item)
                continue
            self._stores.load(row)  # whoever has it open has it locked
            self._stores.unload(row.path)
            remove_directory(path, row.store_id)
            self._forget_volatile(row, path)
            if ":" in row.name and is_empty(path.parent):
                path.parent.rmdir()  # a store for all of them may be made there
        return left

    def _held(self, row: StoreRow) -> str:
        """Return what a store holds, in words; empty for nothing."""
        try:
            return held_by(self._stores.load(row))
        except (AnabranchError, OSError) as error:
            return f"what cannot be told ({error})"
        finally:
            self._stores.unload(row.path)

    def _forget_volatile(self, row: StoreRow, path: Path) -> None:
        """Forget a store that keeps nothing and whose directory is gone, or is empty. Nothing is lost with it, so it is
        made anew when it is needed."""
        for destination in self._table.destinations_in(row.store_id):
            self._table.forget_destination(destination)
        self._table.forget_store(row.store_id)
        with suppress(OSError):
            path.rmdir()  # an empty one, which would be in the way
        log.info("store %s, which keeps nothing, is not in %s any more and is made anew", row.name, path)

    def _name_now(self, row: StoreRow, path: Path) -> str:
        """Return the configuration's name of the store in this directory; it may have been renamed there."""
        config = self._directories.config_at(path)
        if config is None:
            return row.name
        of = row.name.partition(":")[2]
        return f"{config.name}:{of}" if config.per_destination and of else config.name

    def _identify(self, place: Place, more: Collection[str] = ()) -> tuple[str, bytes] | None:
        """Return the kind and the id of the store in a directory. `more`: kinds that it may be of beside those of the
        configuration."""
        if place.config is not None:
            kinds = {place.config.kind, *more}
        else:
            kinds = {DEFAULT_KIND, *more, *(store.kind for store in self._directories.config.stores)}
        for kind in sorted(kinds):
            store_id = self._stores.adapter(kind).identify(place.path)
            if store_id is not None:
                return kind, store_id
        return None

    # 2. Stores that are not recorded

    def _record_unknown(self) -> list[Misplaced]:
        recorded = {self._directories.path(row) for row in self._table.stores.values()}
        strays: list[Misplaced] = []
        for place in self._directories.places():
            found = self._identify(place) if place.path not in recorded else None
            if found is None or found[1] in self._table.stores:
                continue
            name = place.config.name if place.config is not None else place.path.name
            kind = self._directories.kind_at(place.path, found[0])
            row = StoreRow(found[1], self._directories.recorded(place.path), kind, name)
            try:
                strays += self._record_if_all_belong(row)
            except StoreLockedError as error:
                log.warning("%s is not recorded here, and is left alone: %s", place.path, error)
        return strays

    def _record_if_all_belong(self, row: StoreRow) -> list[Misplaced]:
        """Record a store and the destinations in it, or return those with messages that do not belong there. A store
        without any is left as it is: a crash came after it was made, and the first send records it.

        Its maker may have been killed before its name was on disk, so the directory is synced first (rule D2).
        """
        sync_directory(self._directories.path(row).parent)
        store = self._stores.load(row)
        try:
            held = {destination: store.depth(destination) for destination in store.destinations()}
            prepared = store.recover_prepared()
        finally:
            self._stores.unload(row.path)
        strays, rows, name = [], [], row.name
        for destination, count in held.items():
            match = self._routes.route(destination)
            known = self._table.destinations.get(destination)
            other = self._table.stores[known.store_id] if known is not None else None
            if match is None or not self.lies_at(row, match, destination) or other is not None:
                strays += [Misplaced(destination, count, row, match, other)] if count else []
                continue
            name = self._directories.name(match.target, destination)
            rows.append(DestinationRow(destination.kind.value, destination.name, row.store_id, match.pattern.text))
        if (rows or prepared) and not strays:
            self._table.record_store(StoreRow(row.store_id, row.path, row.kind, name), rows)
            log.warning(
                "store %s in %s was not in the placement record; it is recorded again, with %s",
                name, self._directories.path(row), count_of(len(rows), "destination"),
            )  # fmt: skip
        return strays

    def adopt(self, config: StoreConfig, name: str, path: Path) -> StoreRow | None:
        """Return the row of a store that lies where one is about to be made: made, but a crash came before it was
        recorded. Returns None where there was a store of another kind that keeps nothing, which is gone now. Raises
        PlacementError if it is anything else."""
        store_id = self._stores.adapter(config.kind).identify(path)
        if store_id is None:
            raise PlacementError(
                f"{path} exists and is no store (its store.id is missing or damaged); nothing was changed. If it held "
                f"one, restore it from a backup; else empty the place, or give store {name!r} another directory"
            )
        copied = self._table.stores.get(store_id)
        if copied is not None:
            raise PlacementError(
                f"{path} is a copy of store {copied.name!r} in {self._directories.path(copied)}; nothing was changed. "
                "Give "
                f"store {name!r} another directory, or put the copy elsewhere"
            )
        kind = self._directories.kind_at(path, config.kind)
        if kind != config.kind and getattr(self._stores.adapter(kind), "volatile", False):
            remove_directory(path, store_id)
            return None
        row = StoreRow(store_id, self._directories.recorded(path), kind, name)
        if kind != config.kind:
            raise refusal(self._directories, [Displaced(row, config)], self._held)
        strays = self._record_if_all_belong(row)
        if strays:
            raise _refusal(_UNKNOWN, strays, self._directories)
        if store_id not in self._table.stores:
            self._table.record_store(row)
        return self._table.stores[store_id]

    # 3. Destinations

    def _misplaced(self) -> list[Misplaced]:
        misplaced: list[Misplaced] = []
        empty: list[Destination] = []
        for row, destination, match in self.routed_elsewhere():
            item = misplaced_in(self._stores.open(row), row, destination, match)
            if item is not None:
                misplaced.append(item)
            else:
                empty.append(destination)
        if empty and not misplaced:  # a refusal changes nothing
            names, rest = ", ".join(map(str, empty[:SHOWN_MAX])), " and others" if len(empty) > SHOWN_MAX else ""
            what = count_of(len(empty), "destination")
            log.info("%s without messages, routed to other stores now, not known any more: %s%s", what, names, rest)
            for destination in empty:
                self._table.forget_destination(destination)
        return misplaced

    def lies_at(self, row: StoreRow, match: Match[StoreConfig], destination: Destination) -> bool:
        """Return whether a destination that is routed so belongs into this store."""
        is_there = self._directories.expected(match.target, destination) == self._directories.path(row)
        return is_there and match.target.kind == row.kind


def misplaced_in(
    store: Store, row: StoreRow, destination: Destination, match: Match[StoreConfig] | None
) -> Misplaced | None:
    """Return what of a destination is in a store that it is not routed to; None for nothing."""
    count, prepared = store.depth(destination), len(store.recover_prepared())
    subscribed = sum(subscription.topic == destination for subscription in store.subscriptions())
    if not count and not prepared and not subscribed:
        return None
    return Misplaced(destination, count, row, match, None, prepared, subscribed)


# The text of refusals ------------------------------------------------------------------------------------------------

_MISPLACED: Final = (
    "the configuration would hide messages of {destinations}; nothing was changed. The one in force, under which they "
    "were stored, is {in_force}: open with that if this one is out of date. To move them to where this one routes "
    "them, run `{command}` (--dry-run shows what would move). Or do as "
    "the lines below say, or empty these destinations under the one in force first:"
)
_UNKNOWN: Final = (
    "placement.records does not know some of the stores, and the configuration would hide messages of "
    "{destinations} in them; nothing was changed. Restore placement.records from a backup. If there is none, open once "
    "with a configuration that routes each destination to where it lies: stores are then recorded again by themselves. "
    "What does not fit:"
)


def hiding(found: Sequence[Misplaced], directories: StoreDirectories) -> PlacementError:
    """Return the error of an open under a configuration that hides what these destinations hold."""
    return _refusal(_MISPLACED, found, directories)


def _refusal(text: str, found: Sequence[Misplaced], directories: StoreDirectories) -> PlacementError:
    destinations = count_of(len(found), "destination")
    in_force = directories.config.directory / IN_FORCE
    first = text.format(destinations=destinations, command=command(directories.config), in_force=in_force)
    return PlacementError("\n".join([first, *_lines(found, directories)]))


def _target(item: Misplaced, directories: StoreDirectories) -> str:
    """Return where a destination is routed; for a store of the same name also what tells it from the other."""
    if item.match is None:
        return "no store"
    config = item.match.target
    if config.name != item.row.name.partition(":")[0]:
        return f"store {config.name!r}"
    name = directories.name(config, item.destination)
    where = f" in {directories.expected(config, item.destination)}" if name == item.row.name else ""
    return f"store {name!r}{where}"


def _missing(row: StoreRow, path: Path, found: bytes | None) -> str:
    if found is None and path.is_dir():
        return (
            f"{path}, the directory of store {row.name!r}, has no readable store.id. If its disk is not mounted, mount "
            f"it; if the store is all there, write {row.store_id.hex()} into {path / 'store.id'}; else restore it from "
            "a backup"
        )
    what = f"holds another store, {found.hex()}" if found is not None else "is not there"
    return (
        f"store {row.name!r} is missing: {path} {what}. Mount its disk, or restore it from a backup; it is never "
        "created anew, since it held messages"
    )


def _lines(found: Sequence[Misplaced], directories: StoreDirectories) -> list[str]:
    """Return a line for every destination: how many messages, from where, to where, and the way out. A line follows for
    each store that has left the configuration."""
    lines = []
    for item in found[:SHOWN_MAX]:
        config = directories.config_at(directories.path(item.row))
        target = _target(item, directories)
        held = in_words(item.messages, item.subscriptions, item.prepared)
        source = f"store {item.row.name!r}"
        if item.match is not None and item.match.target.kind != item.row.kind:
            source, target = f"{source} (`{item.row.kind}:`)", f"{target} (`{item.match.target.kind}:`)"
        line = f"  {item.destination}: {held} in {source}, routed to {target}"
        if item.other is not None:
            line += f", and recorded in store {item.other.name!r}, {directories.path(item.other)}"
        elif config is not None:
            pattern = f"{item.destination.kind.scheme}{escape(item.destination.name)}"
            line += f'; to leave it there add "{pattern}" to the match of store {config.name!r}'
        lines.append(line)
    if len(found) > SHOWN_MAX:
        lines.append(f"  and {len(found) - SHOWN_MAX} more")
    gone = {
        _left(item.row, directories): None
        for item in found
        if directories.config_at(directories.path(item.row)) is None
    }
    named = {store.name: directories.config.directory_of(store) for store in directories.config.stores}
    for name, directory in gone:
        if name in named:
            if named[name] != directory:
                lines.append(
                    f"  store {name!r} lies in {directory}, and the configuration has it in {named[name]}: give it "
                    f"`directory: {directory}`, or move that directory there"
                )
            continue
        lines.append(
            f"  store {name!r} is not in the configuration. If it was renamed, name it {name!r} again, or keep the new "
            f"name and give it `directory: {directory}`; if it was removed, put it back until its queues are empty"
        )
    return lines


def _left(row: StoreRow, directories: StoreDirectories) -> tuple[str, Path]:
    """Return name and directory, as the configuration had them, of a store that it has no more."""
    name, separator, _ = row.name.partition(":")
    path = directories.path(row)
    return name, path.parent if separator else path
