"""Repartition moves destinations to where a new configuration routes them, while nobody uses the data directory (rule
J11).

    done = repartition(config, before=old)        # again after a crash, or an error: it goes on where it was
    planned = plan_of(config, before=old)           # what that would move; changes nothing: plan.py

For each destination, one after the other:

1. the progress says that it is on its way                      progress.py
2. all of it is copied into its new store, in pages, and synced  adapters/core/migration/copying.py
3. both copies are read and compared, by count and digest
4. its row in the placement record says the new store: from here on that copy counts
5. it is deleted in the old store, and that is synced

Branches of prepared transactions go along: into the new store before 4, and out of the old one before 5, as branches.py
says.

Where one of both stores is shared with other routers, draining.py moves the messages instead of 2 and 3.

A store that holds nothing any more and has left the configuration is removed then, with its directory. Before all that,
a store whose place another one is to take is put aside, as changed_kinds.py says.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from ...adapters.core import Store
from ...adapters.core.migration import copying, moved_branches
from ...adapters.core.migration.copying import Amount
from ...adapters.core.operations.branches import Branch
from ...adapters.system.directory import is_empty
from ...adapters.system.files import FULL, make_directory, remove_directory, sweep_unfinished, sync_directory
from ...policies.config.adapters import load_adapter
from ...policies.errors import CorruptionError, PlacementError, StoreFullError
from ...policies.names.destination import Destination, Kind
from ...policies.names.routes import Match
from ...policies.text import count_of
from ..placement.changed_kinds import Displaced, aside, displaced
from ..placement.on_disk.directories import children
from ..placement.on_disk.repartition_progress import Moving, Progress, ProgressFile, Wanted
from ..placement.record import DestinationRow, StoreRow
from ..placement.registry import StoreRegistry
from ..transactions.coordinator import Coordinator
from .branches import OUTCOME_FIRST, MovedBranches
from .draining import drain
from .plan import Move, digest_of, held_of, interrupted, is_volatile, kinds_changed, move_of, problems_of, refuse

if TYPE_CHECKING:
    from ...policies.config import Config, StoreConfig

log: logging.Logger = logging.getLogger(__name__)

_DAMAGED: Final = (
    "until the repartition is done no router opens the directory. `anabranch salvage` keeps what can be read of it, "
    "and the repartition goes on there; or restore the file from a backup and run it again. Where a large body is "
    "damaged its message stays in either: go back with --restart and the configuration until now, receive and ack it, "
    "and begin again"
)
_SHARED: Final = (
    "a router that is in use moves nothing into a store that other routers share, nor out of it; close it, and run "
    "`anabranch repartition`: the others may go on"
)
RECLAIM_BYTES: Final = 8 << 20
"""Bytes deleted in a store after which it gives back the space at once: the next move may need it."""
Planned = tuple[StoreRow, Destination, Match["StoreConfig"], Amount]
"""A destination to move, and the store that it is in."""
Told = Callable[[int, int], None]
"""Called with how many messages have moved, and how many there are to move."""


@dataclass(frozen=True, slots=True)
class Repartitioned:
    """The result of a repartition."""

    moves: tuple[Move, ...]
    removed: tuple[str, ...]
    """Names of the stores that were removed with their directories."""


class Repartitioning:
    """One run, over a router that is open for it alone; live.py says what differs in a router that is in use."""

    _live = False
    """True for a router that is in use: stores of another kind are refused, and not put aside."""

    def __init__(
        self, registry: StoreRegistry, coordinator: Coordinator, config: Config, restart: bool, path: str, told: Told
    ) -> None:
        self._registry, self._coordinator = registry, coordinator
        self._directories, self._table = self._registry.directories, self._registry.table
        self._config = config
        self._restart, self._path, self._told = restart, path, told
        self._file = ProgressFile(self._config.directory, self._config.file_mode)
        self._progress = Progress(digest_of(self._config), path)
        self._branches = MovedBranches(self._registry, coordinator, self._write_wanted)
        self._done = self._total = 0
        self.moves: list[Move] = []
        """The destinations that have moved."""

    def run(self) -> Repartitioned:
        """Do all of it."""
        try:
            self._resume(self._file.open())
            planned = self._planned()
            obstacles = [] if self._live else displaced(self._directories, self._table.stores.values())
            if (planned or obstacles) and self._progress.moving is None:
                self._write(None)
            self._total = sum(amount.messages for _, _, _, amount in planned)
            self._coordinator.cleanup.run()  # decisions name stores
            removed = self._put_all_aside(obstacles)
            removed += self._move_all([self._as_it_is_now(one) for one in planned])
            if not self._live:
                self._sweep_aside()
            self._file.remove()
            return Repartitioned(tuple(self.moves), tuple(removed))
        except StoreFullError as error:
            if self._progress.moving is None:
                raise
            raise type(error)(
                f"{error}. All that has moved stays moved. Run the same again: it goes on from there. Or undo it "
                f"with {'restart=True' if self._live else '--restart'} and the configuration that was used until now"
            ) from error
        finally:
            self._file.close()

    # Stores whose place another one takes

    def _put_all_aside(self, obstacles: Sequence[Displaced]) -> list[str]:
        """Put the obstacles aside; returns the names of those that hold nothing, which are gone."""
        removed: list[str] = []
        for item in obstacles:
            self._put_aside(item)
            if not self._table.destinations_in(item.row.store_id):
                removed += self._left(self._table.stores[item.row.store_id])
        for store in self._config.stores:  # of what was a store for each destination, now or in an earlier run
            directory = self._config.directory_of(store)
            if not store.per_destination and is_empty(directory) and any(_put_aside(directory)):
                directory.rmdir()
        return removed

    def _as_it_is_now(self, planned: Planned) -> Planned:
        row, destination, match, amount = planned
        return self._table.stores.get(row.store_id, row), destination, match, amount

    def _put_aside(self, item: Displaced) -> None:
        """Rename the directory of a store, which stays the same store. Its row says first where it will be: a crash
        then finds it where the configuration has its successor."""
        row = item.row
        path, put = self._directories.path(row), aside(self._directories, item)

        def rename() -> None:
            make_directory(put.parent, self._config.file_mode)
            self._table.record_store(StoreRow(row.store_id, self._directories.recorded(put), row.kind, row.name))
            path.rename(put)
            sync_directory(path.parent)
            sync_directory(put.parent)

        try:
            self._registry.discard(row, rename)
        except OSError as error:
            if error.errno in FULL:
                raise
            raise PlacementError(
                f"{path}, the directory of the {row.kind} store {row.name!r}, cannot be renamed: {error.strerror}; "
                f"give the {item.config.kind} store another name or `directory`, and run it again with --restart"
            ) from error

    def _sweep_aside(self) -> None:
        """Remove the directories that stores of single destinations were put aside in."""
        for store in self._config.stores:
            for path in _put_aside(self._config.directory_of(store)):
                sweep_unfinished(path)  # of which a disk's error may have left something
                if is_empty(path):
                    path.rmdir()

    # All that is planned

    def _move_all(self, planned: Sequence[Planned]) -> list[str]:
        """Move all planned destinations; returns the names of the stores that are gone."""
        removed: list[str] = []
        for number, (row, destination, match, amount) in enumerate(planned):
            self._told(self._done, self._total)
            target = self._registry.target(destination, match)
            self._move(row, target, destination, match, amount)
            self.moves.append(move_of(destination, row, target.name, target.kind, amount))
            if number + 1 == len(planned) or planned[number + 1][0].store_id != row.store_id:
                removed += self._left(row)
        return removed

    def _write(self, moving: Moving | None, removing: tuple[str, bytes] | None = None) -> None:
        self._progress = Progress(self._progress.configuration, self._path, moving, removing)
        self._file.write(self._progress)

    def _write_wanted(self, wanted: tuple[Wanted, ...]) -> None:
        self._progress = msgspec.structs.replace(self._progress, wanted=wanted)
        self._file.write(self._progress)

    # The remains of an interrupted run

    def _resume(self, found: Progress | None) -> None:
        if not self._live:  # else others may be making stores now, and the open has removed what a crash had left
            sweep_unfinished(self._config.directory / "stores")
        if found is None:
            return
        if found.configuration != self._progress.configuration and not self._restart:
            raise interrupted(self._config, found)
        if found.removing is not None:
            self._sweep_removed(*found.removing)
        moving = found.moving
        if moving is None or self._is_shared(self._table.stores.get(moving.target)):
            return  # what has moved into a shared store is where others have it, and stays
        if self._is_shared(self._table.stores.get(moving.source)):
            if found.configuration != self._progress.configuration:
                raise PlacementError(
                    f"{moving.destination} is half way out of a store that other routers use, and cannot go back: run "
                    "it again with the same configuration first"
                )
            self._progress = found
            return
        mine, self._progress = self._progress, found  # it stays in force until what it says is done, or undone
        self._branches.put(found.wanted)
        destination, row = moving.destination, self._table.destinations.get(moving.destination)
        moved = row is not None and row.store_id == moving.target
        void = moving.source if moved else moving.target
        if void in self._table.stores:
            self._branches.drop(self._table.stores[void], destination)
        if moved or found.configuration != mine.configuration:
            self._progress = mine
            self._undo(void, destination)  # else its copy is gone on with

    def _undo(self, store_id: bytes, destination: Destination) -> None:
        """Undo a copy in this store, which does not count; its branches are gone."""
        row = self._table.stores.get(store_id)
        if row is not None:
            self._delete(row, destination)
            self._left(row)

    def _sweep_removed(self, path: str, store_id: bytes) -> None:
        """Finish the removal of a store."""
        place = self._config.directory / path
        sweep_unfinished(place.parent, place.name)
        if store_id in self._table.stores:
            self._left(self._table.stores[store_id])

    # The destinations to move

    def _planned(self) -> list[Planned]:
        """Return the destinations to move, by the store they are in. Raises PlacementError for all that cannot be
        moved, before anything is changed."""
        nothing: list[Destination] = []
        """The destinations that hold nothing, and whose new store would keep nothing of it."""
        planned, wrong = [], kinds_changed(self._directories, list(self._table.stores.values())) if self._live else []
        for row, destination, match in self._elsewhere():
            amount, prepared = self._registry.with_row(row, partial(looked_at, destination=destination))
            if destination not in self._table.destinations:
                continue  # its store was opened for the first time, and knew nothing of it
            routed = match is not None and not is_volatile(match)
            if match is not None and routed and (self._is_shared(row) or copying.shares(match.target.options)):
                found = self._undrained(row, destination, match, prepared)
                wrong += found
                planned += [] if found else [(row, destination, match, amount)]
                continue
            problems = [] if self._live else self._branches.problems(row, destination, prepared, routed)
            problems += problems_of(self._directories, self._table, row, destination, match, amount)
            wrong += problems
            if match is None or not routed:
                nothing.append(destination)
            elif not problems:
                wrong += self._in_the_way(destination, match)
                planned.append((row, destination, match, amount))
        refuse(wrong)
        for destination in nothing if not self._live else ():  # which may be sent to at any moment
            self._table.forget_destination(destination)
        moving = self._progress.moving
        # A destination that was on its way comes first: the progress knows of one alone.
        return sorted(planned, key=lambda one: moving is None or one[1] != moving.destination)

    def _elsewhere(self) -> list[tuple[StoreRow, Destination, Match[StoreConfig] | None]]:
        return self._registry.routed_elsewhere()

    def _undrained(
        self, row: StoreRow, destination: Destination, match: Match[StoreConfig], prepared: Sequence[Branch]
    ) -> list[str]:
        """Return what keeps a queue from being moved into a shared store, or out of it."""
        if self._live:
            return [f"{destination}: {_SHARED}"]
        if destination.kind is not Kind.QUEUE:
            return [
                f"{destination}: topics move neither into a store that other routers share, nor out of it; receive "
                "what its subscriptions have yet to ack, end them, and delete it first"
            ]
        if prepared:
            return [f"{in_the_way(destination, row, prepared)}; {OUTCOME_FIRST}"]
        if self._is_shared(row):
            return self._in_the_way(destination, match)
        waiting = self._registry.with_row(row, lambda store: store.counts(destination)).delayed
        if not waiting:
            return []
        return [
            f"{destination}: {count_of(waiting, 'message')} in store {row.name!r} waits for its time, and only what "
            "can be received moves into a shared store; receive it first, or purge the queue"
        ]

    def _is_shared(self, row: StoreRow | None) -> bool:
        """Return whether other routers use a store at the same time."""
        return row is not None and copying.shares(self._directories.options_of(row).options)

    def _in_the_way(self, destination: Destination, match: Match[StoreConfig]) -> list[str]:
        """Return what is wrong if the new store holds something by that name which no earlier run has brought there."""
        path = self._directories.expected(match.target, destination)
        row = self._table.store_at(self._directories.recorded(path))
        moving = self._progress.moving
        if row is not None and row.kind != match.target.kind:
            return []  # it is put aside
        if row is None or (moving is not None and (moving.destination, moving.target) == (destination, row.store_id)):
            return []
        found = self._registry.with_row(row, partial(copying.amount, destination=destination))
        if not found.messages and not found.subscriptions:
            return []
        return [
            f"{destination}: store {row.name!r} holds {held_of(found)} of it too, of which the placement "
            "record knows nothing; was that restored from a backup? Restore the right one, or have the configuration "
            "route it to a store of another name"
        ]

    # One destination

    def _move(
        self, source: StoreRow, target: StoreRow, destination: Destination, match: Match[StoreConfig], amount: Amount
    ) -> None:
        moving = Moving(destination.kind.value, destination.name, source.store_id, target.store_id)
        if self._progress.moving != moving:
            if not self._is_shared(source):
                self._delete(target, destination)  # only its name can be there, and ids
            self._write(moving)
        stores = self._both(source, target)
        if any(map(copying.is_shared, stores)):
            done = self._done
            self._done += drain(
                self._coordinator, *stores, destination, lambda count: self._told(done + count, self._total)
            )
            self._moved_to(source, target, destination, match)
            self._coordinator.cleanup.run()  # these decisions name stores
            return
        try:
            self._copy(*stores, destination, amount)
        except CorruptionError as error:
            if error.path != str(stores[1].directory):  # it cannot be read where it is
                error._say(f"{destination} cannot be moved, and is where it was: {error.reason}", _DAMAGED)
            raise
        self._branches.bring(*stores, destination)
        self._moved_to(source, target, destination, match)
        log.info("%s: %d messages moved from store %s to %s", destination, amount.messages, source.name, target.name)

    def _moved_to(
        self, source: StoreRow, target: StoreRow, destination: Destination, match: Match[StoreConfig]
    ) -> None:
        """Record that a destination has moved, and remove it where it was."""
        row = DestinationRow(destination.kind.value, destination.name, target.store_id, match.pattern.text)
        self._table.record_destinations([row])
        self._branches.drop(source, destination)
        self._delete(source, destination)

    def _both(self, source: StoreRow, target: StoreRow) -> tuple[Store, Store]:
        """Return both stores, open. While no third one is opened they stay so."""
        while True:
            from_store, to_store = (self._registry.with_row(row, lambda store: store) for row in (source, target))
            if self._registry.open_store(source.store_id) is from_store:  # not closed to make way for the other
                return from_store, to_store

    def _copy(self, source: Store, target: Store, destination: Destination, amount: Amount) -> None:
        """Copy and compare (steps 2 and 3), on from what is there of an earlier run. Raises CorruptionError if the
        copies differ."""
        there = copying.common(source, target, destination)
        if there is None:
            target.delete(destination)
            there = 0
        expected, bringing = copying.Digest(), copying.Bringing(target, destination, amount.subscriptions)
        for page in copying.pages(copying.read(source, destination)):
            new = []
            for item in page:
                if isinstance(item, copying.Stored):
                    expected.add(item)
                    if expected.count <= there:
                        continue
                new.append(item)
            bringing.page(new)
            self._told(self._done + expected.count, self._total)
        bringing.end()
        found = copying.digest(copying.messages(copying.read(target, destination)))
        subscribed = copying.amount(target, destination).subscriptions
        if (found.count, found.hex(), set(subscribed)) != (expected.count, expected.hex(), set(amount.subscriptions)):
            raise CorruptionError(
                str(target.directory), 0,
                f"the copy of {destination} in store {target.name!r}, {count_of(found.count, 'message')}, is not what "
                f"store {source.name!r} holds, {expected.count}",
                "the source is untouched; see to the disk, and run it again: the copy begins anew",
            )  # fmt: skip
        self._done += expected.count

    def _delete(self, row: StoreRow, destination: Destination) -> None:
        """Delete a destination in a store. Durable on return. Idempotent."""

        def deleted(store: Store) -> None:
            if copying.is_shared(store):
                return  # others use it
            size = copying.amount(store, destination).bytes
            copying.remove(store, destination)
            if size >= RECLAIM_BYTES:
                store.reclaim()

        self._registry.with_row(row, deleted)

    # A store that is empty now

    def _left(self, row: StoreRow) -> list[str]:
        """Remove a store that is empty and has left the configuration, or was one destination's own. Any other gives
        back what space it can. Returns its name if it is gone."""
        used = bool(self._table.destinations_in(row.store_id))
        needed = self._directories.config_at(self._directories.path(row)) is not None and ":" not in row.name
        holds = used or needed or (not self._is_shared(row) and self._registry.with_row(row, _holds_anything))
        if holds or not self._coordinator.cleanup.has_forgotten(row.store_id):
            self._registry.with_row(row, lambda store: store.reclaim())
            return []
        self._write(None, (row.path, row.store_id))
        if not self._discard(row):
            return []
        options = self._directories.options_of(row)
        if options.index_directory is not None or not load_adapter(row.kind).is_contained(options.options):
            log.warning(
                "store %s is removed; its data outside of its directory, an empty database or an index, stays",
                row.name,
            )
        is_named = any(store.name == row.name.partition(":")[0] for store in self._config.stores)
        return [f"{row.name} ({row.kind})" if is_named else row.name]

    def _discard(self, row: StoreRow) -> bool:
        """Remove a store; returns whether it is gone."""
        self._registry.discard(row, partial(self._remove, row))
        return True

    def _remove(self, row: StoreRow) -> None:
        path = self._directories.path(row)
        below = [other for other in self._table.stores.values() if path in self._directories.path(other).parents]
        self._table.flush()
        if not below:
            remove_directory(path, row.store_id)
            self._table.forget_store(row.store_id)
            return
        self._table.forget_store(row.store_id)  # first: what has no id any more would be missed
        kept = [self._directories.path(other) for other in below]
        (path / "store.id").unlink(missing_ok=True)
        for child in list(path.iterdir()):
            if not child.is_dir():
                child.unlink()
            elif not any(child == one or child in one.parents for one in kept):
                shutil.rmtree(child)
        sync_directory(path)


def _put_aside(directory: Path) -> Iterator[Path]:
    """Return the directories that stores of this one were put aside in."""
    return (path for path in children(directory.parent) if path.name.startswith(f"{directory.name}~"))


def looked_at(store: Store, destination: Destination) -> tuple[Amount, list[Branch]]:
    """Return what a store holds of a destination, and the branches there that would change it."""
    return copying.amount(store, destination), moved_branches.concerning(store, destination)


def in_the_way(destination: Destination, row: StoreRow, prepared: Sequence[Branch]) -> str:
    """Return a text that names the prepared transactions which keep a destination in a store."""
    ids = ", ".join(branch.transaction.hex() for branch in prepared)
    return f"{destination}: transaction {ids} is prepared in store {row.name!r} and would change it"


def _holds_anything(store: Store) -> bool:
    stats = store.stats()
    return bool(stats.messages or stats.subscriptions or store.recover_prepared())
