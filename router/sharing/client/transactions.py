"""Transactions of a client: all of one goes to the owner at once, which decides."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec

from ....adapters.core.messages import Message, Outgoing
from ....adapters.core.state.leases import ROLLED_BACK
from ....adapters.core.store_types import Change
from ....policies.errors import AnabranchError, OutcomeUnknownError, StoreFailedError, TransactionError
from ....policies.names.destination import Destination
from ...transactions.coordinator import Coordinator
from ...transactions.global_transaction import GlobalTransaction
from ...transactions.outcomes import Heuristic, InDoubt, Outcomes
from ...transactions.states import DONE, IN_DOUBT, PREPARED, PREPARING, Outcome
from ...transactions.table import TransactionTable
from ...transactions.xid import Xid
from .leases import RemoteLease
from .store import RemoteStore

if TYPE_CHECKING:
    from ....policies.config import Config, TransactionOptions


class _NoDecisions:
    """Decisions are the owner's."""

    externals: Final[Mapping[bytes, Any]] = {}


class _TransactionTable(TransactionTable):
    """The transactions of a client. The xids of those that are prepared are the owner's to know."""

    def __init__(self, options: TransactionOptions, store: RemoteStore) -> None:
        super().__init__(options, _NoDecisions())  # type: ignore[arg-type]
        self._store = store

    def _require_free(self, xid: Xid) -> None:
        super()._require_free(xid)
        if list(xid) in self._store.call("recover"):
            raise TransactionError(
                f"xid {xid} is in use: commit or roll back that transaction first; each transaction "
                "needs one of its own"
            )

    def _schedule(self, seconds: float) -> None:
        self._store.connection.schedule(seconds, self.expire)


class RemoteCoordinator(Coordinator):
    """Transactions of a client: all of it goes to the owner at once, as to a single store that decides alone."""

    def __init__(self, config: Config, store: RemoteStore, registry: Any) -> None:
        self._store, self._registry = store, registry
        self.table: TransactionTable = _TransactionTable(config.transactions, store)
        self.table.closed = False
        self._votes: dict[GlobalTransaction, int] = {}
        self._prepared: dict[Xid, list[RemoteLease]] = {}
        """What transactions of this client have acked that wait for their manager."""

    def prepare(self, transaction: GlobalTransaction) -> None:
        """Let the owner prepare it, and wait for the outcome."""
        if not transaction.participants:
            super().prepare(transaction)
            return
        transaction.move(PREPARING)
        self._sent(transaction, "vote", on_answer=partial(self._voted, transaction))
        transaction.move(PREPARED)

    def _voted(self, transaction: GlobalTransaction, answer: list[int]) -> None:
        """Note the number of a vote. By the thread that reads: its caller may be interrupted from then on."""
        (self._votes[transaction],) = answer

    def hold(self, transaction: GlobalTransaction, xid: Xid) -> None:
        """Let the owner prepare it under its xid, and hold it."""
        transaction.move(PREPARING)
        self._sent(transaction, "prepare", xid)
        acks = [message for one in transaction.participants.values() for message in one.acks]
        self._prepared[xid] = self._store.prepared(acks)
        transaction.external = True
        transaction.move(PREPARED)
        transaction.running = False

    def _sent(
        self, transaction: GlobalTransaction, mode: str, xid: Xid | None = None,
        on_answer: Callable[[Any], None] | None = None,
    ) -> None:  # fmt: skip
        try:
            self._store.commit_as(mode, *_parts(transaction), xid, on_answer)
        except Exception:
            self.roll_back(transaction)
            raise

    def _commit_prepared(self, transaction: GlobalTransaction) -> None:
        self._end_vote(transaction, commit=True)

    def roll_back(self, transaction: GlobalTransaction) -> None:
        """Roll back. Never raises but for a signal."""
        if transaction in self._votes:
            self._end_vote(transaction, commit=False)
            return
        if transaction.state is DONE:
            return
        transaction.decide(False)
        for participant in transaction.participants.values():
            participant.unclaim()
            participant.carried_out = True
        transaction.move(DONE)

    def _end_vote(self, transaction: GlobalTransaction, commit: bool) -> None:
        number = self._votes[transaction]
        sends, acks, changes = _parts(transaction)
        if commit:
            transaction.alone = next(iter(transaction.participants.values()), None)
            transaction.move(IN_DOUBT)
        try:
            receipts = self._store.end_vote(number, commit, sends, acks, changes)
        except AnabranchError as error:
            del self._votes[transaction]
            if type(error) is StoreFailedError:  # the owner may have heard nothing of it
                self._store.roll_back_later(number, acks)
            if not isinstance(error, OutcomeUnknownError):
                transaction.decide(False)
            if commit:
                raise
            receipts = []
        else:
            del self._votes[transaction]  # not before: who was interrupted until then has yet to say the outcome
            transaction.decide(commit)
        for one in transaction.participants.values():
            one.receipts, receipts = receipts[: len(one.sends)], receipts[len(one.sends) :]
            one.carried_out = True
        transaction.move(DONE)

    def take_over(self, transaction: GlobalTransaction) -> None:
        """Bring a transaction to its end, as Coordinator.take_over. One that has voted is rolled back, unless the owner
        has begun to commit it."""
        number = self._votes.pop(transaction, None)
        if number is not None:
            self._store.roll_back_later(number, _parts(transaction)[1])
            if transaction.state is not IN_DOUBT:
                transaction.decide(False)
        elif not transaction.external:  # the owner holds what it has prepared under its xid
            super().take_over(transaction)
        transaction.running = False

    def has_prepared(self, xid: Xid) -> bool:
        """Return whether a transaction of this client waits for its manager."""
        return xid in self._prepared

    def note_end(self, xid: Xid, commit: bool) -> None:
        """Note that a transaction was ended which had waited for its manager."""
        for lease in self._prepared.pop(xid, ()):
            lease.end = "" if commit else ROLLED_BACK

    def reopen(self) -> None:
        """Let the owner read its decisions again."""
        self._store.call("reopen_decisions")


def _parts(
    transaction: GlobalTransaction,
) -> tuple[list[tuple[Destination, Outgoing]], list[Message[Any]], list[Change]]:
    """Return all that a transaction sends, acks and changes."""
    sends, acks, changes = [], [], []
    for one in transaction.participants.values():
        sends += one.sends
        acks += one.acks
        changes += one.changes
    return sends, acks, changes


class RemoteOutcomes(Outcomes):
    def __init__(self, coordinator: RemoteCoordinator, store: RemoteStore) -> None:
        self._remote, self._table = coordinator, coordinator.table
        self._ask = store.call

    def end(self, xid: Xid, commit: bool) -> None:
        is_own = self._remote.has_prepared(xid)
        self._ask("commit_xid" if commit else "rollback_xid", xid, is_own, False)
        self._remote.note_end(xid, commit)

    def held(self) -> list[Xid]:
        return [Xid(*one) for one in self._ask("recover")]

    def in_doubt(self) -> list[InDoubt]:
        return msgspec.convert(self._ask("in_doubt"), list[InDoubt])

    def resolve(self, transaction: str, outcome: Outcome) -> None:
        self._ask("resolve", transaction, outcome)

    def heuristics(self) -> list[Heuristic]:
        return msgspec.convert(self._ask("heuristics"), list[Heuristic])

    def forget(self, transaction: str) -> None:
        self._ask("forget", transaction)
