"""Gates of destinations on their way to another store: callers are sent away, to look for the destination again.

    engine.gates[destination] = gate        # from the next plan on nothing is sent there; then the last of it is copied
    gate.open()                             # who waits looks the store up again

K11  From when a gate is there no plan has anything for its destination but acks, counts of deliveries, and what the
     move itself writes. A ticket that has more is refused whole, with MovedError, and has done nothing.
K12  A gate stays, open, in the store that the destination has left, as long as that is open, or until the destination
     is there anew: who had found the store before is sent on too.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import Any, Final

from ....policies.errors import AnabranchError, ClosedError
from ....policies.names.destination import Destination
from ...system import locking
from ...system.conditions import Event

LOOK_SECONDS: Final = 1.0
"""Seconds after which who waits looks again whether it is in a forked child."""


class Gate:
    """The gate of one move of one destination. Threads: all. A gate is opened once."""

    def __init__(self, destination: Destination) -> None:
        self.destination = destination
        self.error: AnabranchError | None = None
        """Set before it opens, where nobody can tell in which of two stores the destination is: who waits raises it."""
        self.reserves = False
        """True for the gate of a store to which a copy is made, until that is done or given up."""
        self._opened = Event()
        self._holder = threading.get_ident()
        self._generation = locking.generation

    @classmethod
    def passed(cls, destination: Destination) -> Gate:
        """Return a gate that is open: who comes there looks again at once."""
        gate = cls(destination)
        gate.reserves = True
        gate.open()
        return gate

    def open(self) -> None:
        """Open the gate: the destination is where the placement record says. Idempotent."""
        self._opened.set()

    def wait(self) -> None:
        """Wait until the gate is open. Raises ClosedError in a forked child, RuntimeError in the thread that is to open
        it, the error that it was opened with."""
        while not self._opened.is_set():
            if self._holder == threading.get_ident():
                raise RuntimeError(f"{self.destination} is being moved by this thread; use it after that")
            if locking.generation != self._generation:
                raise ClosedError(f"{self.destination} was being moved by the parent process when this one was forked")
            self._opened.wait(LOOK_SECONDS)
        if self.error is not None:
            raise self.error


class MovedError(ClosedError):
    """A destination is moving, or has moved, to another store; nothing was done. Once its gate is open the router says
    where it is."""

    def __init__(self, gate: Gate) -> None:
        super().__init__(gate)  # as it is copied
        self.gate = gate

    def __str__(self) -> str:
        return f"{self.gate.destination} moves to another store; ask the router for it again"


class LeaseMovedError(MovedError):
    """The destination of a message in hand is moving, or has moved (forwarding.py)."""


def require_passage(gates: Mapping[Destination, Gate], changes: Iterable[Any], ours: bool = False) -> None:
    """Raise MovedError if a ticket, by its changes, has something for a destination behind a gate (rule K11). `ours`:
    the move's."""
    if ours:
        return
    for change in changes:
        inner = getattr(change, "change", change)
        state = getattr(inner, "state", None)
        if state is None or inner.settles or (state.removed and not inner.brings):  # what it has left behind goes
            continue
        gate = gates.get(state.destination)
        if gate is not None:
            raise MovedError(gate)
