"""Removal takes destinations away, and the stores that were theirs alone."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol, TypeVar

from ...adapters.core import Store
from ...adapters.system.files import remove_directory
from ...policies.errors import AnabranchError
from ...policies.names.destination import Destination
from .gates import Gates
from .on_disk.directories import StoreDirectories
from .open_stores import OpenStores
from .record import DestinationsTable, StoreRow

log: logging.Logger = logging.getLogger(__name__)

T = TypeVar("T")


class CallRow(Protocol):
    """Calls with the store of a row."""

    def __call__(self, row: StoreRow, call: Callable[[Store], T], /) -> T:
        """Call with the store of a row, opened if it is not open."""


class Removal:
    """Removes from one router. Threads: all."""

    def __init__(
        self,
        table: DestinationsTable,
        stores: OpenStores,
        directories: StoreDirectories,
        gates: Gates,
        store_of: Callable[[Destination], Store | None],
        with_row: CallRow,
    ) -> None:
        """Make a remover. `store_of` finds the store that has a destination; the functions are the registry's."""
        self._table, self._stores, self._directories, self._gates = table, stores, directories, gates
        self._store_of, self._with_row = store_of, with_row
        self.forget_decisions: Callable[[bytes], None] = lambda store_id: None
        """Called with the id of a store that may be about to be removed, with nothing held."""
        self.may_remove: Callable[[bytes], bool] = lambda store_id: True
        """Returns whether no decision names it, nor will one after a crash. Both are set by the coordinator."""

    def delete(self, destination: Destination) -> int:
        """Remove a destination with all that it has; returns how many messages there were. Its row goes once the
        removal is durable, and its store, if that was its own."""
        while (store := self._store_of(destination)) is not None:
            row = self._table.stores.get(store.store_id)
            if row is not None:
                self._prepare_removal(row, destination)
                with self._stores.removing(row.path):
                    known = self._table.destinations.get(destination)
                    if known is not None and known.store_id == row.store_id:
                        return self._delete(destination, row)
                    self._stores.forget(destination, row)
        return 0

    def _delete(self, destination: Destination, row: StoreRow) -> int:
        """Remove a destination, with `removing` held: nobody finds the store by this destination until its row is gone.
        A caller that has found the store before sees that `removals` has risen, and records it again."""
        self._stores.forget(destination, row)
        self._gates.removals += 1
        prepared = self._with_row(row, lambda store: store.recover_prepared())
        count = self._with_row(row, lambda store: store.delete(destination))
        if prepared or self._with_row(row, lambda store: store.recover_prepared()):
            return count  # these may send there: only what has a row is never lost sight of
        self._table.let_go(destination)
        if _is_own(row, destination):
            self._remove_store(row, destination)
        return count

    def delete_if_idle(self, destination: Destination, may_be: Callable[[], bool]) -> bool:
        """Remove a queue in which there is nothing and that nobody uses; returns whether it is gone. `may_be` is asked
        once nobody finds its store any more. A caller that comes meanwhile waits, and finds it made anew. For
        background threads alone, which Ctrl-C does not strike."""
        known = self._table.destinations.get(destination)
        row = self._table.stores.get(known.store_id) if known is not None else None
        if row is None:
            return known is None
        self._prepare_removal(row, destination)
        with self._stores.removing(row.path):
            if self._table.destinations.get(destination) is not known or destination in self._gates:
                return False
            gate = self._gates.close(destination, row)
            try:
                if not may_be() or not self._with_row(row, lambda store: store.delete_if_idle(destination, gate)):
                    return False
                self._table.let_go(destination)
                if _is_own(row, destination):
                    self._remove_store(row, destination)
                return True
            finally:
                self._gates.open(gate)

    def _prepare_removal(self, row: StoreRow, destination: Destination) -> None:
        if _is_own(row, destination):
            self.forget_decisions(row.store_id)

    def _remove_store(self, row: StoreRow, destination: Destination) -> None:
        """Remove the store of one destination, which is deleted (rule D2). The store stays while somebody waits for
        messages in it, while a decision names it, and where its directory is not all that it has."""

        def remove() -> None:
            if destination not in self._table.destinations:  # else somebody has sent there meanwhile
                self._table.flush()  # first: a store that has a destination and no directory is refused at open
                remove_directory(self._directories.path(row), row.store_id)
                self._table.let_go(row.store_id)

        config = self._directories.options_of(row)
        contained = getattr(self._stores.adapter(row.kind), "is_contained", None)
        if contained is None or config.index_directory is not None or not contained(config.options):
            return
        try:
            if self.may_remove(row.store_id):
                self._stores.discard(row, remove)
        except (AnabranchError, OSError) as error:
            log.warning("store %s, whose one destination is deleted, stays: %s", row.name, error)


def _is_own(row: StoreRow, destination: Destination) -> bool:
    """Return whether a store is that of this one destination."""
    return row.name.partition(":")[2] == str(destination)
