"""The table of a router's transactions: every one that is known, from its begin until its decision is forgotten."""

from __future__ import annotations

import logging
import threading
from time import monotonic
from typing import TYPE_CHECKING, Final, Protocol

from ...adapters.core.store_types import Prepared
from ...adapters.system.background import shared
from ...policies.errors import TransactionError
from .decision_log import Decision, DecisionLog, External
from .global_transaction import GlobalTransaction
from .primary import unpacked
from .states import ACTIVE, IN_DOUBT, PREPARED
from .xid import Xid

if TYPE_CHECKING:
    from ...policies.config import TransactionOptions

log: logging.Logger = logging.getLogger(__name__)


class Begun(Protocol):
    """A transaction that is not over, as its user holds it."""

    @property
    def state(self) -> str:
        """The state; see Transaction.state."""

    @property
    def xid(self) -> Xid | None:
        """The xid; see Transaction.xid."""

    def commit(self) -> object:
        """Commit; see Transaction.commit."""

    def rollback(self) -> None:
        """Roll back; see Transaction.rollback."""

    def _expire(self) -> None:
        """Roll back, since its time is over."""


class TransactionTable:
    """All transactions that are known. Threads: all; to look something up takes no lock. A crash loses nothing of the
    table: decisions are in the decision log, and prepared branches in the stores."""

    def __init__(self, options: TransactionOptions, decisions: DecisionLog) -> None:
        self.options = options
        self._log = decisions
        # Guards adding, and the moves of those that no thread has in hand. A signal handler may come back to it.
        self.lock: Final = threading.RLock()
        self.begun: dict[GlobalTransaction, Begun] = {}
        """The transactions that their users have not ended yet, oldest first. Open transactions are limited in number
        and in time."""
        self.by_id: dict[bytes, GlobalTransaction] = {}
        """All transactions that have come to their first phase."""
        self._timer = False
        self.closed = True
        """True if nothing is to happen in the background."""

    def clear(self) -> None:
        """Forget all transactions, for a router that is opened: its threads had these in hand before."""
        self.by_id.clear()

    def load(self) -> None:
        """Take over what the log says, now that it was read, in the order of its decisions. A transaction that a thread
        has in hand stays: the thread hears from the log itself."""
        with self.lock:
            before = dict(self.by_id)
            for transaction in before.values():
                if not transaction.running:
                    del self.by_id[transaction.id]
            for external in list(self._log.externals.values()):
                if external.transaction not in self.by_id:
                    self.note_held(self._loaded(external, before.get(external.transaction)), external)
            for decision in list(self._log.decisions.values()):
                if decision.transaction not in self.by_id:
                    self.note_decision(self._loaded(decision, before.get(decision.transaction)), decision)

    def _loaded(self, record: Decision | External, before: GlobalTransaction | None) -> GlobalTransaction:
        loaded = GlobalTransaction.recovered(record.transaction, record.participants, IN_DOUBT)
        if before is not None:  # volatile participants too, which the log does not name
            loaded.participants.update(before.participants)
            for participant in loaded.participants.values():
                participant.carried_out = False
        self.by_id[record.transaction] = loaded
        return loaded

    # Transactions that their users have open

    def begin(self, transaction: GlobalTransaction, user: Begun) -> None:
        """Add a transaction that begins. Raises TransactionError at the limit, and for the xid of another."""
        with self.lock:
            opened, prepared = len(self.begun), len(self._log.externals)
            if opened + prepared >= self.options.max_open:
                raise TransactionError(
                    f"{opened} transactions are open and {prepared} prepared; transactions.max_open is "
                    f"{self.options.max_open}: commit or roll back some (recover() lists the prepared ones), or raise "
                    "the limit"
                )
            if transaction.xid is not None:
                self._require_free(transaction.xid)
            transaction.begun = monotonic()
            self.begun[transaction] = user
            if not self._timer:
                self._schedule(self.options.timeout)
                self._timer = True  # not before: Ctrl-C between the two would leave them without a time limit

    def _require_free(self, xid: Xid) -> None:
        if any(other.xid == xid for other in list(self.begun)):
            raise TransactionError(f"xid {xid} is in use; commit or roll back that transaction first")
        self.require_unused(xid)

    def require_unused(self, xid: Xid) -> None:
        """Raise TransactionError for the xid of a transaction that is prepared, or has just ended."""
        other = self.by_xid(xid)
        if other is None:
            return
        if other.by_hand:
            raise TransactionError(f"xid {xid} had its outcome by hand, {other.outcome}; forget it first")
        step = "commit or roll back that transaction first" if other.commit is None else "it ended a moment ago"
        raise TransactionError(f"xid {xid} is in use: {step}; each transaction needs one of its own")

    def user_of(self, xid: Xid) -> Begun | None:
        """Return the user's object of an external transaction of that name, while it is open or has voted."""
        for other, user in list(self.begun.items()):
            if other.xid == xid and user.state in ("open", "voted"):
                return user
        return None

    def expire(self) -> None:
        """Roll back the transactions whose time is over; come again for the next."""
        now = monotonic()
        for other, user in list(self.begun.items()):
            if other.state is ACTIVE and now - other.begun >= self.options.timeout:
                try:
                    user._expire()
                except Exception:  # its store's trouble: the next ones' time is over all the same
                    log.exception("a transaction that timed out could not be rolled back")
        with self.lock:
            oldest = next((other.begun for other in list(self.begun) if other.state is ACTIVE), None)
            self._timer = oldest is not None
        if oldest is not None:
            self._schedule(max(oldest + self.options.timeout - monotonic(), 0.05))

    def _schedule(self, seconds: float) -> None:
        shared().schedule_while_alive(seconds, self.expire)  # a timer must not keep a closed router alive

    # Transactions that have come to their first phase

    def add(self, transaction: GlobalTransaction) -> None:
        """Add a transaction that has an id now."""
        self.by_id[transaction.id] = transaction

    def remove(self, transaction: GlobalTransaction) -> None:
        """Remove a transaction about which nothing is left to be done."""
        if self.has(transaction):
            del self.by_id[transaction.id]

    def has(self, transaction: GlobalTransaction) -> bool:
        """Return whether a transaction is in here. One from before the router was closed and opened again is not."""
        return self.by_id.get(transaction.id) is transaction

    def all(self) -> list[GlobalTransaction]:
        """Return all that have come to their first phase, oldest first."""
        return list(self.by_id.values())

    def of(self, prepared: Prepared) -> GlobalTransaction:
        """Return the transaction of a branch that was found in a store; one that is not known is in doubt."""
        other = self.by_id.get(prepared.transaction)
        if other is not None:
            return other
        found = GlobalTransaction.recovered(prepared.transaction, prepared.participants, IN_DOUBT)
        note = unpacked(prepared.note)
        found.primary = note.primary
        if note.xid is not None:
            found.xid, found.external = note.xid, True
            found.move(PREPARED)
        return found

    def by_xid(self, xid: Xid) -> GlobalTransaction | None:
        """Return the external transaction of that name that is prepared or decided."""
        return next((other for other in self.all() if other.external and other.xid == xid), None)

    def running(self) -> list[GlobalTransaction]:
        """Return the transactions that a thread has in hand."""
        return [other for other in self.all() if other.running]

    # A transaction that no thread has in hand goes on under the lock

    def decide(self, transaction: GlobalTransaction, commit: bool) -> None:
        """Let the outcome of a transaction stand. Said again, or otherwise, it changes nothing."""
        with self.lock:
            transaction.decide(commit)

    def note_held(self, transaction: GlobalTransaction, external: External) -> None:
        """Note that the log has a transaction as prepared: it waits for its manager."""
        with self.lock:
            transaction.xid, transaction.external = external.xid, True
            if transaction.state is IN_DOUBT:
                transaction.move(PREPARED)

    def note_decision(self, transaction: GlobalTransaction, decision: Decision) -> None:
        """Note a decision of the log as the outcome of a transaction."""
        with self.lock:
            transaction.recorded, transaction.by_hand = True, decision.by_hand
            transaction.external = transaction.external or decision.xid is not None
            transaction.xid = decision.xid or transaction.xid
            transaction.decide(decision.commit)
