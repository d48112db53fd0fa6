"""A transaction over any stores: who takes part, and how far it has come."""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from typing import Any, Final

from ...adapters.core import Store
from ...adapters.core.store_types import Pending
from ...policies.names.destination import Destination
from .participant import Participant
from .states import ACTIVE, COMMIT, DECIDED, DONE, IN_DOUBT, PREPARED, ROLLBACK, Outcome, State, TransactionState
from .xid import Xid

_is_carried_out = attrgetter("carried_out")

_NOTHING: Final[list[Any]] = []
"""Shared by all that are done, which nobody adds to: the garbage collector has so many lists less to look at."""


class GlobalTransaction:
    """One transaction, from its begin, or from when it was found after a restart, until its decision is forgotten.

    While it is `running` it belongs to the thread that commits, prepares or rolls it back, or to the one that finishes
    what Ctrl-C has cut off. Afterwards it belongs to the table, under whose lock it moves on. Each move is one
    assignment, so that another thread can take over from one that was interrupted anywhere.
    """

    # Fields that most transactions leave as they are have their values here, not in each.
    id = b""
    """32 bytes, from the decision log or at random; empty before its first phase."""
    mark: str | None = None
    """The name under which its stores remember that it was committed (Store.commit), if it has one."""
    commit: bool | None = None
    """The outcome, once it is decided."""
    remembering: list[bytes] = _NOTHING
    """The ids of the stores that have to remember, which a decision names (rule T7), from its first phase."""
    alone: Participant | None = None
    """The one store that remembers: its own commit is the decision, also for volatile ones (rule T7)."""
    running = True
    """True while a thread has it in hand, which tells the stores and gets the receipts: nobody else may."""
    external = False
    """True if it is prepared under its xid, or about to be: a transaction manager decides it (rule T4)."""
    primary = b""
    """The id of the store whose own commit is the decision (primary.py); empty: the decision log decides."""
    recorded = False
    """True if its outcome is in the decision log, to be forgotten there."""
    by_hand = False
    """True if its outcome was given by hand: kept until somebody forgets it."""
    durable_in: frozenset[bytes] = frozenset()
    """The ids of the stores in which its outcome, carried out, is known to be on disk."""
    passing = False
    """True if it is on its way into its stores, or was interrupted there: a destination that it changes waits with
    moving."""
    begun: float = 0.0
    """Its begin, by the monotonic clock."""
    told: TransactionState | None = None
    """The state that its user is told, where `state` alone does not say it."""

    def __init__(self, xid: Xid | None = None) -> None:
        self.xid = xid
        self.state: State = ACTIVE
        self.participants: dict[bytes, Participant] = {}
        """By store id, since a store that was closed for being idle comes back as another object."""

    @classmethod
    def recovered(cls, transaction: bytes, store_ids: Iterable[bytes], state: State) -> GlobalTransaction:
        """Return a transaction that was found in the decision log or in a store."""
        recovered = cls()
        recovered.id, recovered.state, recovered.running = transaction, state, False
        recovered.remembering = list(store_ids)
        recovered.participants = {store_id: Participant(store_id) for store_id in recovered.remembering}
        return recovered

    def __repr__(self) -> str:
        return f"<GlobalTransaction {self.id.hex()}, {self.state.label}>"

    def move(self, state: State) -> None:
        """Go on to a state that may come next."""
        assert state in self.state.successors, f"{self!r} cannot become {state.label}"
        self.state = state

    def decide(self, commit: bool) -> None:
        """Let the outcome stand. Said again it changes nothing."""
        if self.state is not DECIDED and self.state is not DONE:
            assert DECIDED in self.state.successors
            self.commit = commit
            self.state = DECIDED

    def finish(self) -> bool:
        """Return whether it is done just now: decided, and no store has yet to carry it out. Under the table's lock."""
        if self.state is DECIDED and all(map(_is_carried_out, self.participants.values())):
            self.state = DONE
            return True
        return False

    def let_go(self) -> None:
        """Drop all that it did, once it is done and its receipts are given: it stays until its decision is
        forgotten."""
        for participant in self.participants.values():
            participant.sends = participant.acks = participant.changes = _NOTHING
            participant.receipts = ()

    def begin_in(self, store: Store) -> Pending[Any]:
        """Begin to carry its outcome out in a store, where it is prepared."""
        return store.commit_prepared(self.id) if self.commit else store.rollback_prepared(self.id)

    @property
    def outcome(self) -> Outcome | None:
        """`commit` or `rollback` once it is decided."""
        if self.commit is None:
            return None
        return COMMIT if self.commit else ROLLBACK

    @property
    def stores(self) -> list[str]:
        """The names of its stores; the ids of those that it has not come to since a restart."""
        return [p.store_id.hex() if p.store is None else p.store.name for p in self.participants.values()]

    def concerns(self, destination: Destination) -> bool:
        """Return whether the transaction does anything to a destination. May be asked by other threads."""
        return any(participant.concerns(destination) for participant in list(self.participants.values()))

    @property
    def held_by_primary(self) -> bool:
        """True if it is prepared under its xid in its primary alone, or about to be: no decision log knows of it."""
        return self.external and bool(self.primary)

    @property
    def held(self) -> bool:
        """True if it waits for its transaction manager."""
        return self.external and self.state is PREPARED and not self.running

    @property
    def waiting(self) -> list[bytes]:
        """The ids of the stores that have yet to carry out the outcome."""
        if self.state is not DECIDED:
            return []
        return [participant.store_id for participant in self.participants.values() if not participant.carried_out]

    @property
    def shown(self) -> TransactionState:
        """The state that its user is told: `Transaction.state`."""
        if self.told is not None:
            return self.told
        if self.state is ACTIVE:
            return "open"
        if self.state is DECIDED or self.state is DONE:
            return "committed" if self.commit else "rolled back"
        if self.state is PREPARED:
            return "voted" if self.running else "prepared"
        if self.state is IN_DOUBT:
            return "in doubt" if self.alone is None else "of unknown outcome"
        return "preparing"
