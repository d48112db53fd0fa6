"""Settling what is prepared: what is decided is carried out, what is not is rolled back, and what nobody knows waits
(rules T2, T3).

At open, when a store is opened, and in the background for as long as a store could not do what it was told.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Container, Iterable
from typing import Final

from ..adapters.background import shared
from ..adapters.base import Prepared, Store
from ..policies.errors import AnabranchError, PlacementError
from .decision_log import Decision, DecisionLog, word
from .forgetting import Forgetting, tell
from .store_registry import StoreRegistry

log = logging.getLogger(__name__)

RETRY_SECONDS: Final = 1.0
RETRY_SECONDS_MAX: Final = 30.0
_UNREADABLE: Final = "the decision log cannot be read; see to it and call reopen_decisions()"


class Settling:
    """Threads: all. `_lock` guards `_unfinished` and the retry's two fields; a signal handler may come back to it in
    the same thread."""

    def __init__(
        self, the_log: DecisionLog, places: StoreRegistry, active: Container[bytes], forgetting: Forgetting
    ) -> None:
        """`active`: the transactions that a thread is committing or preparing, which are not ours to settle."""
        self._log, self._places, self._active, self._forgetting = the_log, places, active, forgetting
        self._lock = threading.RLock()
        self.clear()

    def clear(self) -> None:
        """Nothing is known to wait; nothing happens in the background until `closed` is unset."""
        self.closed = True
        self._unfinished: dict[bytes, set[bytes]] = {}
        """Decided, and the stores that have yet to carry it out."""
        self._retry_due = False
        self._retry_seconds = RETRY_SECONDS

    def recover(self) -> None:
        """Carry out all decisions that were not forgotten, as the log says now. A store that cannot is told again
        later."""
        with self._lock:
            self._unfinished.clear()
            decisions = list(self._log.decisions.values())
            for decision in decisions:
                if decision.participants:
                    self._unfinished[decision.transaction] = set(decision.participants)
        for decision in decisions:
            if not decision.participants:  # of volatile stores only
                self.done_with(decision)
        self.retry_unfinished()

    def expect(self, decision: Decision, store_ids: Collection[bytes]) -> None:
        """These stores have yet to carry out a decision."""
        if not store_ids:
            self.done_with(decision)
            return
        with self._lock:
            self._unfinished[decision.transaction] = set(store_ids)

    def unfinished(self) -> dict[bytes, set[bytes]]:
        """Decided, and the ids of the stores that have yet to carry it out."""
        with self._lock:
            return {transaction: set(ids) for transaction, ids in list(self._unfinished.items())}

    def verdict(self, prepared: Prepared) -> Decision | str:
        """The decision about a transaction that is prepared in a store, or why there is none to be had (rule T3)."""
        opening, unusable = self._log.openings, self._log.unusable  # before: of what is half read nothing is known
        said = self._said(prepared, unusable)
        if opening != self._log.openings:  # nor of what was looked up partly before it was read again
            return _UNREADABLE
        return said

    def _said(self, prepared: Prepared, unusable: BaseException | None) -> Decision | str:
        transaction = prepared.transaction
        if transaction in self._active:  # before its decision: who commits it tells the stores, and gets the receipts
            return "it is being committed"
        decision = self._log.decisions.get(transaction)
        if decision is not None:
            return decision
        coordinator, epoch = transaction[:16], int.from_bytes(transaction[16:24], "big")
        if transaction in self._log.externals:
            return "its transaction manager has not said the outcome: commit(xid) or rollback(xid)"
        if unusable is not None:
            return _UNREADABLE
        if coordinator != self._log.id:
            return (
                f"it was prepared under another decision log ({coordinator.hex()}); put that back, or say the outcome "
                "with resolve()"
            )
        if epoch not in self._log.epochs:
            return (
                "the decision log does not know of its time (restored from a backup?); put the right one back, or say "
                "the outcome with resolve()"
            )
        decision = self._log.decisions.get(transaction)  # it may have been decided while we looked
        return decision or Decision(transaction, False, list(prepared.participants))

    def settle(self, store: Store) -> None:
        """A store was opened: carry out in it what is decided, roll back what is not."""
        with self._lock:  # before we ask: what is decided from now on is somebody else's to tell this store
            expected = {t for t, left in list(self._unfinished.items()) if store.store_id in left}
        waiting: set[bytes] = set()
        # In the order of their decisions, as they were seen before: an external one is older than its decision.
        place = {transaction: number for number, transaction in enumerate(list(self._log.decisions))}
        for prepared in sorted(store.recover_prepared(), key=lambda p: place.get(p.transaction, len(place))):
            transaction = prepared.transaction
            said = self.verdict(prepared)
            if isinstance(said, str):
                if transaction in expected or not (transaction in self._log.externals or transaction in self._active):
                    waiting.add(transaction)
                continue
            try:
                tell(store, said).wait()
                self._carried_out_in(store, transaction)
                log.info("store %s: transaction %s: %s", store.name, transaction.hex(), word(said))
            except AnabranchError as error:
                log.warning("store %s: transaction %s waits: %s", store.name, transaction.hex(), error)
                waiting.add(transaction)
        self.carried_out(store.store_id, expected - waiting)
        if waiting:
            self.retry_later()

    def _carried_out_in(self, store: Store, transaction: bytes) -> None:
        if store.volatile:  # nobody will ever ask it what became of that: no decision names it
            store.forget([transaction])
        else:
            self._places.align_companion(store)

    def carried_out(self, store_id: bytes, transactions: Iterable[bytes]) -> None:
        """A store has carried out these decisions."""
        done = []
        with self._lock:
            for transaction in transactions:
                left = self._unfinished.get(transaction)
                if left is not None:
                    left.discard(store_id)
                    if not left:
                        del self._unfinished[transaction]
                        done.append(transaction)
        for transaction in done:
            decision = self._log.decisions.get(transaction)
            if decision is not None:
                self.done_with(decision)

    def retry_later(self) -> None:
        with self._lock:
            if self._retry_due or self.closed:
                return
            seconds = self._retry_seconds
            shared().schedule_while_alive(seconds, self._retry)
            self._retry_due = True  # not before, as in done_with
            self._retry_seconds = min(2 * seconds, RETRY_SECONDS_MAX)

    def _retry(self) -> None:
        """In the background: everything that waits is tried again."""
        with self._lock:
            self._retry_due = False
        if self.closed:
            return
        self.retry_unfinished()
        self.settle_open()
        if not self._retry_due:
            self._retry_seconds = RETRY_SECONDS

    def settle_open(self) -> None:
        """A store that fails holds up no other (invariant 7)."""
        for store in self._places.open_stores():
            try:
                self._find_commits(store)
                self.settle(store)
            except AnabranchError as error:
                log.debug("store %s: what is prepared in it waits: %s", store.name, error)
                self.retry_later()

    def settle_volatile(self) -> None:
        """Volatile stores, which no decision names (rule T7)."""
        for store in self._places.open_stores():
            if store.volatile:
                try:
                    self.settle(store)
                except AnabranchError as error:
                    log.debug("store %s: what is prepared in it waits: %s", store.name, error)

    def retry_unfinished(self) -> None:
        """Tell all stores that have yet to carry out a decision."""
        with self._lock:
            store_ids = set().union(*self._unfinished.values())
        self.tell_all(store_ids)

    def tell_all(self, store_ids: Iterable[bytes]) -> None:
        """Settle these stores."""
        for store_id in sorted(store_ids):
            try:
                self.settle(self._places.store_by_id(store_id))
            except PlacementError:  # only by hand can a transaction be decided that names a store not recorded here
                self.carried_out(store_id, list(self._unfinished))
            except (AnabranchError, OSError) as error:
                log.debug("store %s cannot carry out what is decided: %s", self._places.name_of(store_id), error)
                self.retry_later()

    def _find_commits(self, store: Store) -> None:
        """Any participant's commit record wins, where the decision log cannot say (rule T3)."""
        for prepared in store.recover_prepared():
            ours = prepared.transaction in self._active or prepared.transaction in self._log.externals
            if not ours and isinstance(self.verdict(prepared), str):
                other = self.committed_elsewhere(prepared, store)
                if other is not None:
                    log.warning(
                        "transaction %s: store %r has committed it, so store %r does", prepared.transaction.hex(),
                        other, store.name,
                    )  # fmt: skip
                    store.commit_prepared(prepared.transaction).wait()

    def committed_elsewhere(self, prepared: Prepared, store: Store) -> str | None:
        """The name of another participant that has committed it, among those that can be asked."""
        for store_id in prepared.participants:
            if store_id != store.store_id:
                try:
                    if prepared.transaction in self._places.with_id(store_id, lambda other: other.committed()):
                        return self._places.name_of(store_id)
                except (AnabranchError, OSError) as error:
                    log.debug("store %s cannot be asked: %s", self._places.name_of(store_id), error)
        return None

    def done_with(self, decision: Decision) -> None:
        """Forgotten soon, unless a store has yet to carry it out or it was given by hand."""
        with self._lock:
            if decision.transaction not in self._unfinished and not decision.by_hand:
                self._forgetting.add(decision)
