"""The resolver brings a transaction to the end that it can reach now, wherever it was left (rules T2, T3).

`resolve` is idempotent, and everything that ends a transaction over several stores calls it. Callers are a commit once
it has decided, a rollback, a store that is opened, and the router when it has read its decision log. So are the retry
in the background, and a transaction manager or an operator who says the outcome.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from itertools import filterfalse
from operator import attrgetter
from time import monotonic
from typing import Any, Final

from ...adapters.core import Store
from ...adapters.core.store_types import Pending, Prepared
from ...adapters.system.background import shared
from ...policies.errors import AnabranchError, ClosedError, PlacementError
from ..placement.registry import StoreRegistry
from .decision_cleanup import DecisionCleanup
from .decision_log import Decision, DecisionLog
from .global_transaction import GlobalTransaction
from .participant import Participant
from .primary import outcome_in, settled_in
from .states import DECIDED, DONE
from .table import TransactionTable

log: logging.Logger = logging.getLogger(__name__)

_is_volatile = attrgetter("volatile")

RETRY_SECONDS: Final = 1.0
RETRY_SECONDS_MAX: Final = 30.0
ASK_SECONDS: Final = 0.5
"""A store that could not be asked is not asked again so soon: each time may last for as long as a connection does."""
_RUNNING: Final = "it is being committed"
_HELD: Final = "its transaction manager has not said the outcome: commit(xid) or rollback(xid)"
_UNREADABLE: Final = "the decision log cannot be read; see to it and call reopen_decisions()"
_TROUBLE: Final = (AnabranchError, OSError, RuntimeError)
"""Errors that keep a store from being told. RuntimeError: a signal handler has interrupted that very store (rule
G3)."""


class Resolver:
    """Resolves transactions. Threads: all. `_lock` guards the retry's two fields; a signal handler may come back to it
    in the same thread."""

    def __init__(
        self, decisions: DecisionLog, registry: StoreRegistry, table: TransactionTable, cleanup: DecisionCleanup
    ) -> None:
        self._log, self._registry, self._table, self._cleanup = decisions, registry, table, cleanup
        self._lock = threading.RLock()
        self.clear()

    def clear(self) -> None:
        """Begin anew: the router is opened."""
        self._retry_due = False
        self._retry_seconds = RETRY_SECONDS
        self._silent: dict[bytes, tuple[float, str]] = {}
        """Primaries that could not be asked: when that was (monotonic), and why."""

    # One transaction

    def resolve(self, transaction: GlobalTransaction, store: Store | None = None) -> str:
        """Find out the outcome of a transaction, and tell the stores that have yet to carry it out, or `store` alone,
        which is being opened. Returns why there is no outcome yet, else an empty text. A store that cannot carry it out
        undoes nothing: it is told again later. For a transaction in the hand of the calling thread, which lets go of it
        by that, or of none. Never raises but for a signal."""
        if transaction.state is not DECIDED and (why := self.outcome_of(transaction, may_open=store is None)):
            return why
        failed: list[tuple[Participant, Exception]] = []
        participants = list(transaction.participants.values())  # a store that is opened may find that it is one
        # Volatile ones come last, behind what a durable store has committed.
        for some in (list(filterfalse(_is_volatile, participants)), list(filter(_is_volatile, participants))):
            steps: list[tuple[Participant, Store, Pending[Any]]] = []
            for participant in some:
                if not participant.carried_out and (store is None or store.store_id == participant.store_id):
                    try:
                        steps.append(self._begin(participant, transaction, store))
                    except _TROUBLE as error:
                        failed.append((participant, error))
            for participant, told, step in steps:
                try:
                    result = step.wait()
                    if transaction.commit:
                        participant.receipts = result or ()
                    elif result:
                        participant.rolled_back = True
                    else:  # not prepared there, or an interrupted rollback had come so far
                        participant.unclaim()
                    if told.volatile:  # no decision names it: nobody will ever ask it what became of that
                        told.forget([transaction.id])
                    participant.carried_out = True
                except _TROUBLE as error:
                    failed.append((participant, error))
        if failed:
            self._tell_later(transaction, failed)
        self._end(transaction)
        transaction.running = False  # not before all have been told: then others may
        return ""

    def _end(self, transaction: GlobalTransaction) -> None:
        """End a transaction that is decided, and carried out everywhere: only its decision is left to be forgotten."""
        with self._table.lock:
            is_done = transaction.finish()
        if is_done:
            if not transaction.recorded:
                self._table.remove(transaction)
            elif not transaction.by_hand:
                self._cleanup.add()

    def outcome_of(self, transaction: GlobalTransaction, may_open: bool = True) -> str:
        """Find out the outcome (rule T3). Returns why there is none yet, else an empty text. Unless `may_open` no other
        store is opened for it."""
        if transaction.state is DECIDED or transaction.state is DONE:
            return ""
        if transaction.running:  # who commits it tells the stores, and gets the receipts
            return _RUNNING
        if transaction.held_by_primary:
            return _HELD
        opening, unusable = self._log.openings, self._log.unusable  # before: of what is half read nothing is known
        decision, held = self._log.decisions.get(transaction.id), self._log.externals.get(transaction.id)
        why = "" if decision is not None else self._why_unknown(transaction.id, held is not None, unusable)
        if not why and decision is None:
            decision = self._log.decisions.get(transaction.id)  # it may have been decided while we looked
        if opening != self._log.openings:  # nor of what was looked up partly before it was read again
            return _UNREADABLE
        if decision is not None:
            self._table.note_decision(transaction, decision)
        elif held is not None:
            self._table.note_held(transaction, held)
        elif transaction.primary:
            return self._ask_primary(transaction, may_open, why)
        elif not why:
            self._table.decide(transaction, False)
        return why

    def _ask_primary(self, transaction: GlobalTransaction, may_open: bool, unknown: str) -> str:
        """Find out the outcome from the store whose commit is the decision, as `outcome_of`. Where the log is `unknown`
        that knew it perhaps, the primary may have forgotten by then that it has committed."""
        asked, why = self._silent.get(transaction.primary, (0.0, ""))
        if monotonic() < asked + ASK_SECONDS:
            return why
        try:
            committed = outcome_in(self._registry, transaction.primary, transaction.id, may_open)
        except _TROUBLE as error:
            name = self._registry.name_of(transaction.primary)
            why = f"store {name!r}, whose own commit decides, cannot be asked now: {error}"
            if may_open:
                self._silent[transaction.primary] = monotonic(), why
            return why
        if unknown and not committed and transaction.remembering:
            return unknown
        asked_one = transaction.participants.get(transaction.primary)
        if asked_one is not None:
            if not committed:
                asked_one.unclaim()
            asked_one.carried_out = True
        try:
            if committed:  # it need not be asked again, and may forget
                decision = Decision(transaction.id, True, list(transaction.remembering))
                self._table.note_decision(transaction, self._log.decide(decision))
        except AnabranchError as error:
            log.debug("transaction %s: its primary alone knows the outcome: %s", transaction.id.hex(), error)
        self._table.decide(transaction, committed)
        return ""

    def _why_unknown(self, transaction: bytes, held: bool, unusable: BaseException | None) -> str:
        """Return why nobody can say the outcome of a transaction without a decision; empty if it is rolled back."""
        coordinator, epoch = transaction[:16], int.from_bytes(transaction[16:24], "big")
        if held:
            return _HELD
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
        return ""

    def _begin(
        self, participant: Participant, transaction: GlobalTransaction, only: Store | None
    ) -> tuple[Participant, Store, Pending[Any]]:
        store = only or participant.store
        if store is not None and (only or transaction.running or participant.volatile):  # else another may be open now
            try:
                return participant, store, transaction.begin_in(store)
            except ClosedError:  # for being idle: what is prepared alone holds no store open that was about to close
                if only is not None:
                    raise
        return self._registry.with_id(participant.store_id, lambda one: (participant, one, transaction.begin_in(one)))

    def _tell_later(self, transaction: GlobalTransaction, failed: list[tuple[Participant, Exception]]) -> None:
        again = False
        for participant, error in failed:
            if self._is_gone(participant.store_id, error):
                participant.carried_out = True
                continue
            log.warning(
                "transaction %s: %s is decided; store %r has yet to carry it out: %s", transaction.id.hex(),
                transaction.outcome, self._registry.name_of(participant.store_id), error,
            )  # fmt: skip
            again = again or isinstance(error, RuntimeError)
        if again:
            shared().schedule(0, partial(self.resolve_later, transaction))
        self.retry_later()

    def resolve_later(self, transaction: GlobalTransaction) -> None:
        """Resolve, on a background thread, a transaction that its own thread could not, once all that was handed to the
        log is there, or not. Raises what the log raises."""
        if not self._table.closed:
            if transaction.state is not DECIDED:
                self._log.flush()
            self.resolve(transaction)

    # A store, all stores

    def recover(self, store: Store, ask_others: bool = False) -> None:
        """Carry out what is decided in a store that was opened, and roll back what is not. `ask_others`, which opens
        the other participants: where the decision log cannot say the outcome, any participant's commit record does
        (rule T3). Raises what the store raises."""
        expected = [t for t in self._table.all() if store.store_id in t.waiting]
        # In the order of their decisions, as they were seen before: an external one is older than its decision.
        place = {transaction: number for number, transaction in enumerate(list(self._log.decisions))}
        branches = [self._table.of(prepared) for prepared in self.look_into(store)]
        branches.sort(key=lambda transaction: place.get(transaction.id, len(place)))
        for transaction in branches:
            if not transaction.running:
                self._recover_branch(transaction, store, ask_others)
        if store.shared and (decided := [one for one in store.committed() if one in self._log.decisions]):
            with suppress(AnabranchError):  # it need not be asked for these; else it remembers some more
                store.forget(decided)
        for transaction in expected:  # those that are not prepared here have been carried out
            if not transaction.running:
                self.resolve(transaction, store)

    def look_into(self, store: Store) -> Sequence[Prepared]:
        """Return what is prepared in a store. Forgets what another process that has the store, or had it, has ended.
        Raises what the store raises."""
        held = [t for t in self._table.all() if t.held_by_primary and t.held and t.primary == store.store_id]
        branches = store.recover_prepared()
        prepared = {branch.transaction for branch in branches}
        for other in held:
            if other.id not in prepared:
                other.participants[store.store_id].carried_out = True
                self._table.decide(other, store.has_committed(other.id))  # for volatile ones: that is forgotten soon
                self.resolve(other)
        return branches

    def _recover_branch(self, transaction: GlobalTransaction, store: Store, ask_others: bool) -> None:
        """Resolve a transaction that is prepared in this store, whatever was known of that."""
        with self._table.lock:
            participant = transaction.participants.setdefault(store.store_id, Participant(store.store_id, store))
            participant.carried_out = False
            if transaction.state is DONE:
                transaction.move(DECIDED)
        why = self._settle_in_primary(transaction, store) or self.resolve(transaction, store)
        if why and ask_others and not transaction.held:
            other = self.committed_elsewhere(transaction, store)
            if other is not None:
                log.warning(
                    "transaction %s: store %r has committed it, so store %r does", transaction.id.hex(), other,
                    store.name,
                )  # fmt: skip
                self._table.decide(transaction, True)
                why = self.resolve(transaction)
        if why and (transaction.held_by_primary or not transaction.held):
            self._table.by_id.setdefault(transaction.id, transaction)
        if why and not transaction.held:
            self.retry_later()
        elif not why and participant.carried_out:
            log.info("store %s: transaction %s: %s", store.name, transaction.id.hex(), transaction.outcome)
        if transaction.waiting and self._table.has(transaction):
            self.retry_later()

    def _settle_in_primary(self, transaction: GlobalTransaction, store: Store) -> str:
        """Settle a transaction that is prepared in its primary, and that nobody commits any more: it is rolled back,
        unless its commit was on its way. Returns why that cannot be done now, else an empty text."""
        if transaction.primary != store.store_id or transaction.external or transaction.state is DECIDED:
            return ""
        try:
            committed = settled_in(store, transaction.id)
        except _TROUBLE as error:
            return f"store {store.name!r}, whose own commit decides, cannot say what became of it: {error}"
        self._table.decide(transaction, committed)
        return ""

    def committed_elsewhere(self, transaction: GlobalTransaction, store: Store) -> str | None:
        """Return the name of another participant that has committed the transaction, among those that can be asked."""
        for store_id in transaction.participants:
            if store_id != store.store_id:
                try:
                    if transaction.id in self._registry.with_id(store_id, lambda other: other.committed()):
                        return self._registry.name_of(store_id)
                except (AnabranchError, OSError) as error:
                    log.debug("store %s cannot be asked: %s", self._registry.name_of(store_id), error)
        return None

    def recover_open(self, stores: Iterable[Store] | None = None) -> None:
        """Recover in all open stores, or in these. One that fails holds up no other (invariant 7)."""
        for store in self._registry.open_stores() if stores is None else stores:
            try:
                self.recover(store, ask_others=True)
            except AnabranchError as error:
                log.debug("store %s: what is prepared in it waits: %s", store.name, error)
                self.retry_later()

    def resolve_all(self) -> None:
        """Resolve everything that waits, store by store, so that a store which cannot be opened is tried once."""
        store_ids: set[bytes] = set()
        for transaction in self._table.all():
            if not transaction.running:
                self.outcome_of(transaction)
                store_ids.update(transaction.waiting)
                self._end(transaction)  # of volatile stores alone, perhaps, which are gone
        for store_id in sorted(store_ids):
            try:
                self._registry.with_id(store_id, self.recover)
            except (AnabranchError, OSError) as error:
                log.debug("store %s cannot be told: %s", self._registry.name_of(store_id), error)
                if self._is_gone(store_id, error):
                    self._pass_over(store_id)
                else:
                    self.retry_later()

    def _is_gone(self, store_id: bytes, error: Exception) -> bool:
        """Return whether a store is no more. Only a transaction decided by hand, or a volatile store, can have it yet
        to tell."""
        return isinstance(error, PlacementError) and store_id not in self._registry.table.stores

    def _pass_over(self, store_id: bytes) -> None:
        for transaction in self._table.all():
            if store_id in transaction.waiting:
                transaction.participants[store_id].carried_out = True
                self._end(transaction)

    def retry_later(self) -> None:
        """Try everything that waits again soon."""
        with self._lock:
            if self._retry_due or self._table.closed:
                return
            seconds = self._retry_seconds
            shared().schedule_while_alive(seconds, self._retry)
            self._retry_due = True  # not before: Ctrl-C between the two would leave it due for ever
            self._retry_seconds = min(2 * seconds, RETRY_SECONDS_MAX)

    def _retry(self) -> None:
        with self._lock:
            self._retry_due = False
        if self._table.closed:
            return
        self.resolve_all()
        self.recover_open()
        if not self._retry_due:
            self._retry_seconds = RETRY_SECONDS
