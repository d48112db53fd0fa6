"""Transactions over several stores: what is prepared here and waits for its outcome (rule T7: visibility only)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from ..base import Change, Prepared
from .records import Encoded, StoredMessage

COMMITTED_MAX: Final = 100_000
"""So many ids of committed transactions are remembered until they are forgotten (invariant 10)."""


class Branch(NamedTuple):
    """A part of a transaction."""

    transaction: bytes
    participants: tuple[bytes, ...]
    sends: Sequence[Encoded]
    acks: Sequence[StoredMessage]
    changes: Sequence[Change]
    room: object
    """The reservation of its sends, held as long as the branch is."""

    @property
    def cost(self) -> int:
        """Bytes of memory that its messages take."""
        return sum(message.cost for message in self.sends)

    @property
    def summary(self) -> Prepared:
        return Prepared(self.transaction, self.participants, len(self.sends), len(self.acks))


class Branches:
    """Under the store's lock."""

    def __init__(self) -> None:
        self.prepared: dict[bytes, Branch] = {}
        self._committed: dict[bytes, None] = {}

    @property
    def cost(self) -> int:
        """Bytes of memory that all of them take."""
        return sum(branch.cost for branch in self.prepared.values())

    def summaries(self) -> list[Prepared]:
        return sorted((branch.summary for branch in self.prepared.values()), key=lambda one: one.transaction)

    def committed(self) -> list[bytes]:
        return sorted(self._committed)

    def ended(self, branch: Branch, committed: bool) -> None:
        """It has its outcome. Idempotent."""
        if committed:
            self._committed[branch.transaction] = None
            while len(self._committed) > COMMITTED_MAX:
                self._committed.pop(next(iter(self._committed)), None)
        self.prepared.pop(branch.transaction, None)

    def forget(self, transactions: Sequence[bytes]) -> None:
        for transaction in transactions:
            self._committed.pop(transaction, None)
