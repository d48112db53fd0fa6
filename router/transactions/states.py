"""The states of a transaction over any stores, and the moves between them: the whole of the state machine.

    active ---> preparing ---> prepared ---> in doubt ---> decided ---> done

`in doubt` is narrow by right: it begins when the decision is handed to its log and ends when the log has said whether
it is there. Before it a rollback needs nothing written, behind it nothing is undone, and in it nobody may do either
(rule T2). docs/transactions.md shows the same as a table; a test compares the two.
"""

from __future__ import annotations

from enum import Enum
from typing import Final, Literal

Outcome = Literal["commit", "rollback"]
TransactionState = Literal[
    "open", "preparing", "voted", "prepared", "committed", "rolled back", "timed out", "in doubt", "of unknown outcome"
]  # fmt: skip
"""The state of a transaction that users are told: `Transaction.state`."""

COMMIT: Final = "commit"
ROLLBACK: Final = "rollback"


class State(Enum):
    """How far a transaction has come. Each state says when a transaction is in it, and what a process finds that opens
    the stores after a crash."""

    ACTIVE = "active", "it gathers sends and acks, in memory", "nothing: rolled back"
    PREPARING = "preparing", "its stores are preparing it", "rolled back"
    PREPARED = (
        "prepared",
        "all its stores have it on disk, nothing is decided",
        "held until its manager says the outcome, if `prepare()` has returned; else rolled back",
    )
    IN_DOUBT = (
        "in doubt",
        "the decision is handed to its log, or its primary, and not known to be there",
        "committed if the decision reached it, else as it was before",
    )
    DECIDED = "decided", "its outcome stands; a store has yet to carry it out", "carried out, as decided"
    DONE = "done", "every store has carried it out", "as it is; its decision is forgotten once that is on disk"

    successors: tuple[State, ...]
    """The states that may come next."""

    def __init__(self, label: str, meaning: str, survives: str) -> None:
        self.label = label
        self.meaning = meaning
        self.survives = survives


ACTIVE: Final = State.ACTIVE
PREPARING: Final = State.PREPARING
PREPARED: Final = State.PREPARED
IN_DOUBT: Final = State.IN_DOUBT
DECIDED: Final = State.DECIDED
DONE: Final = State.DONE

for _state, _successors in {
    # One store alone prepares nothing: its own commit is the decision. Rolled back, nothing is prepared either.
    ACTIVE: (PREPARING, IN_DOUBT, DECIDED),
    PREPARING: (PREPARED, DECIDED),
    PREPARED: (IN_DOUBT, DECIDED),
    # Back: an external one is held once the log has its record.
    IN_DOUBT: (PREPARED, DECIDED),
    DECIDED: (DONE,),
    # Back: a store that failed before its outcome was on disk has it prepared again when it is reopened.
    DONE: (DECIDED,),
}.items():
    _state.successors = _successors
