"""External transactions: prepared here, decided by a transaction manager elsewhere (rule T4)."""

from __future__ import annotations

import logging
from functools import partial

from ..adapters.background import shared
from ..policies.errors import AnabranchError, OutcomeUnknownError, TransactionError, TransactionInDoubt
from .decision_log import Decision, DecisionLog, External, word
from .settling import Settling
from .store_registry import StoreRegistry
from .xid import Xid

log = logging.getLogger(__name__)


class Externals:
    """Those that are prepared, by the names that their managers gave them. Threads: all. Keeps nothing itself."""

    def __init__(self, the_log: DecisionLog, places: StoreRegistry, settling: Settling) -> None:
        self._log, self._places, self._settling = the_log, places, settling

    def __len__(self) -> int:
        return len(self._log.externals)

    def get(self, xid: Xid) -> External | None:
        """A prepared one by its manager's name."""
        return next((known for known in list(self._log.externals.values()) if known.xid == xid), None)

    def waiting(self) -> list[Xid]:
        """The prepared ones that wait for their outcome, oldest first. Raises StoreFailedError where the log cannot
        tell: a manager takes what is not listed for ended."""
        self._log.require_usable()
        return [known.xid for _, known in sorted(self._log.externals.items())]

    def decided(self, xid: Xid) -> Decision | None:
        """The outcome of an external transaction that is not forgotten yet."""
        return next((known for known in list(self._log.decisions.values()) if known.xid == xid), None)

    def require_free(self, xid: Xid) -> None:
        """Raise TransactionError if a transaction of that name is prepared or decided."""
        external, decision = self.get(xid), self.decided(xid)  # in the order of its life: it is in one of them
        if decision is not None and decision.by_hand:
            raise TransactionError(f"xid {xid} had its outcome by hand, {word(decision)}; forget it first")
        if decision is not None or external is not None:
            step = "commit or roll back that transaction first" if decision is None else "it ended a moment ago"
            raise TransactionError(f"xid {xid} is in use: {step}; each transaction needs one of its own")

    def end(self, xid: Xid, commit: bool) -> None:
        """What its manager says of a prepared transaction: durable on return, and carried out wherever a store can.
        Said again it changes nothing. Raises TransactionError for one that is not prepared here or had the other
        outcome, by hand say, and TransactionInDoubt as `commit` does."""
        external, decision = self.get(xid), self.decided(xid)
        if external is not None:
            self.say(Decision(external.transaction, commit, external.participants, xid))
        elif decision is None:
            known = self.waiting()
            raise TransactionError(
                f"no transaction {xid} is prepared here; recover() lists those that are: "
                f"{', '.join(map(str, known[:10])) or 'none'}"
            )
        elif decision.commit != commit:
            raise _said_before(decision)

    def say(self, decision: Decision) -> None:
        """The outcome of a prepared transaction, by its manager or by hand. A rollback is recorded as a commit is:
        carried out in one store, it must not become a commit in another."""
        self._log.require_usable()
        try:
            self._say_and_tell(decision)
        except KeyboardInterrupt:
            shared().schedule(0, partial(self._tell_if_said, decision))
            raise

    def _tell_if_said(self, decision: Decision) -> None:
        """From a thread that was interrupted. If it had not come to say it, that waits to be said again."""
        try:
            self._log.flush()
            if not self._settling.closed and decision.transaction in self._log.decisions:
                self._tell(decision)
        except AnabranchError as error:
            log.warning("transaction %s waits: %s", decision.transaction.hex(), error)

    def _say_and_tell(self, decision: Decision) -> None:
        try:
            stands = self._log.decide(decision)
        except OutcomeUnknownError as error:
            names = [self._places.name_of(store_id) for store_id in decision.participants]
            raise TransactionInDoubt(
                f"transaction {decision.transaction.hex()}: the decision log failed while it wrote the outcome: "
                f"{error}; see to the disk, call reopen_decisions() and look at recover()",
                decision.transaction.hex(),
                names,
            ) from error
        if stands.commit != decision.commit:  # by another thread, just now; that tells the stores
            raise _said_before(stands)
        self._tell(decision)

    def _tell(self, decision: Decision) -> None:
        """No others than its stores: one of another's decisions may take long to open (invariant 7)."""
        self._settling.expect(decision, decision.participants)
        self._settling.tell_all(decision.participants)
        self._settling.settle_volatile()


def _said_before(decision: Decision) -> TransactionError:
    what = f"transaction {decision.xid if decision.xid is not None else decision.transaction.hex()}"
    how = "by hand; forget it once you have put that right" if decision.by_hand else "before"
    return TransactionError(f"the outcome of {what} is {word(decision)}: that was said {how}")
