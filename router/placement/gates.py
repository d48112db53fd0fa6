"""Gates stand before destinations that are about to change their store, and say where their leases have gone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from ...adapters.core import Store
from ...adapters.core.state.gates import Gate
from ...adapters.core.state.leases import Lease
from ...policies.names.destination import Destination
from .open_stores import OpenStores
from .record import StoreRow


class Gates:
    """The gates of one router. Threads: all; each step is a single one."""

    def __init__(self, stores: OpenStores, lock: threading.RLock, require_open: Callable[[], None]) -> None:
        """Begin without gates. Under the lock a store begins or ceases to be found by its destination. `require_open`
        raises ClosedError if the router is closed."""
        self._stores, self._lock, self._require_open = stores, lock, require_open
        self._gates: dict[Destination, Gate] = {}
        """The gates of destinations that are about to move: nobody finds their store."""
        self.moves: int = 0
        """Counts when a destination is about to change its store, and when that is over."""
        self.removals: int = 0
        """The number of destinations that were removed since this was made, or began to move to another store. A caller
        that had found a store before looks again after its call."""
        self._moved: dict[int, tuple[Store, Lease]] = {}
        """Each lease whose message has moved, by its number, which stays, and where it is now; some may have ended."""

    def wait(self, destination: Destination) -> None:
        """Wait until a destination is not about to change its store. Raises what Gate.wait raises."""
        gate = self._gates.get(destination)
        if gate is not None:
            gate.wait()
            self._require_open()

    def __contains__(self, destination: Destination) -> bool:
        """Return whether a destination is about to change its store: a caller that asks for that store would wait."""
        return bool(self._gates) and destination in self._gates

    def close(self, destination: Destination, row: StoreRow) -> Gate:
        """Close the gate of a destination that is in the store of a row, and return the gate. Nobody finds that store
        until `open` was called with the gate."""
        gate = Gate(destination)
        with self._stores.removing(row.path), self._lock:
            self._gates[destination] = gate
            self._stores.forget(destination, row)
        self.removals += 1
        self.moves += 1
        return gate

    def open(self, gate: Gate) -> None:
        """Open a gate: its destination is where the record says. Idempotent."""
        if gate.error is None:
            self._gates.pop(gate.destination, None)
        self.moves += 1
        gate.open()

    def is_stuck(self, destination: Destination) -> bool:
        """Return whether a destination's gate was opened with an error, which every caller there gets."""
        gate = self._gates.get(destination)
        return gate is not None and gate.error is not None

    def drop(self, destination: Destination) -> None:
        """Drop the gate of a destination, which is where the record says."""
        self._gates.pop(destination, None)

    def note_moved(self, store: Store, leases: Mapping[Lease, Lease]) -> None:
        """Note that these leases have successors in this store."""
        kept = {number: one for number, one in self._moved.items() if one[1].is_held}
        self._moved = kept | {old.number: (store, new) for old, new in leases.items()}

    def moved_token(self, token: str) -> str | None:
        """Return the token of the same lease where its message is now; None if it has not moved."""
        try:
            moved = self._moved.get(int(token.rpartition(".")[2], 16))
        except ValueError:
            return None
        return moved[0].token_of(moved[1]) if moved is not None else None
