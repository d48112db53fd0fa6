"""Branches of prepared transactions go with a destination to its new store (repartition.py, rule J11).

Only branches move that wait for their transaction manager: all others are resolved when the router is opened, or nobody
can say what becomes of them. For each of them, before the new copy counts:

1. the decision log says that the new store takes part: the outcome will be told there
2. the progress says what is to be prepared in the new store, which then is

and, once it counts, the same for what is left of it in the old store. A run that was cut off puts what the progress
says, and goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Final

from ...adapters.core import Store
from ...adapters.core.migration import moved_branches
from ...adapters.core.operations.branches import Branch, destinations_of
from ...policies.names.destination import Destination
from ..placement.on_disk.repartition_progress import Wanted
from ..placement.record import DestinationRow, StoreRow
from ..placement.registry import StoreRegistry
from ..transactions.coordinator import Coordinator
from ..transactions.global_transaction import GlobalTransaction

OUTCOME_FIRST: Final = (
    "give its outcome first, with `anabranch transactions` and the configuration that was used until now"
)


class MovedBranches:
    """The branches that one run moves. One thread does that."""

    def __init__(
        self, registry: StoreRegistry, coordinator: Coordinator, note: Callable[[tuple[Wanted, ...]], None]
    ) -> None:
        """Make a mover of branches. `note` makes the progress say what is to be prepared."""
        self._registry, self._coordinator, self._note = registry, coordinator, note

    def problems(self, row: StoreRow, destination: Destination, branches: Iterable[Branch], routed: bool) -> list[str]:
        """Return why these branches, which are prepared in a store, cannot go along. `routed`: to a store that keeps
        what it has."""
        wrong = []
        for branch in branches:
            transaction = self._coordinator.table.by_id.get(branch.transaction)
            what = f"{destination}: transaction {branch.transaction.hex()} is prepared in store {row.name!r}"
            if transaction is None or not transaction.held:
                wrong.append(f"{what} and would change it, and waits for no transaction manager; {OUTCOME_FIRST}")
            elif transaction.held_by_primary:
                wrong.append(f"{what}, which alone knows of it, since other processes share it; {OUTCOME_FIRST}")
            elif not routed:
                wrong.append(f"{what}, and no store that keeps messages is to have it; {OUTCOME_FIRST}")
            elif self._sends_large(transaction):
                wrong.append(f"{what} and sends a large message, which keeps it where it is; {OUTCOME_FIRST}")
        return wrong

    def _sends_large(self, transaction: GlobalTransaction) -> bool:
        """Return whether a transaction sends a large message in any store: also the branch in the store that a part of
        another comes to is written anew."""
        sends_large = partial(moved_branches.sends_large, transaction=transaction.id)
        return any(self._registry.with_id(store_id, sends_large) for store_id in transaction.participants)

    def bring(self, source: Store, target: Store, destination: Destination) -> None:
        """Prepare in the target what the branches do to a destination: the target holds all messages of it by now."""
        wanted = []
        for branch in moved_branches.concerning(source, destination):
            self._coordinator.change_participants(branch.transaction, {target.store_id}, set())
            payload = moved_branches.with_part(source, target, branch, destination)
            wanted.append(Wanted(target.store_id, branch.transaction, payload))
        self.put(wanted)

    def drop(self, row: StoreRow, destination: Destination) -> None:
        """Drop what the branches do to a destination in a store: its copy there does not count any more, or never
        did."""

        def rest(store: Store) -> list[Wanted]:
            return [
                Wanted(row.store_id, one.transaction, moved_branches.without(store, one.transaction, destination))
                for one in moved_branches.concerning(store, destination)
            ]

        self.put(self._registry.with_row(row, rest))

    def put(self, wanted: Iterable[Wanted]) -> None:
        """Have each store prepare its payload, and nothing else; the progress says so before. Idempotent."""
        wanted = tuple(wanted)
        if not wanted:
            return
        self._note(wanted)
        for one in wanted:
            call = partial(moved_branches.put, transaction=one.transaction, payload=one.payload)
            self._registry.with_id(one.store_id, call)
            if one.payload:
                self._record_again(one)
            else:
                self._coordinator.change_participants(one.transaction, set(), {one.store_id})

    def _record_again(self, one: Wanted) -> None:
        """Record the destinations of a branch that have no row. After a crash between the two steps of `put` a store
        that was opened knew nothing of a destination that its branch alone concerns, and the placement record has
        forgotten it."""
        table = self._registry.table
        rows = [
            DestinationRow(destination.kind.value, destination.name, one.store_id, destination.name)
            for destination in destinations_of(one.payload)
            if destination not in table.destinations
        ]
        if rows:
            table.record_destinations(rows)
