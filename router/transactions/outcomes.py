"""Outcomes that are decided elsewhere: by a transaction manager (XA, rule T4), by an operator who sees what waits."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from operator import attrgetter, methodcaller

from ...adapters.core import Store
from ...adapters.core.store_types import TRANSACTION_BYTES, Prepared
from ...adapters.system.background import shared
from ...policies.errors import (
    AnabranchError,
    OutcomeUnknownError,
    StoreFailedError,
    TransactionError,
    TransactionInDoubt,
)
from ..placement.registry import StoreRegistry
from .coordinator import Coordinator
from .decision_log import Decision
from .global_transaction import GlobalTransaction
from .states import COMMIT, ROLLBACK, Outcome
from .xid import Xid

log: logging.Logger = logging.getLogger(__name__)

_by_id = attrgetter("id")


@dataclass(frozen=True, slots=True)
class InDoubt:
    """A transaction that is prepared somewhere and waits: for an outcome, or for a store."""

    transaction: str
    """Its id, 64 hexadecimal digits."""
    xid: Xid | None
    """The name that its manager gives it, if it is external."""
    outcome: Outcome | None
    """`commit` or `rollback` if that is decided and a store has yet to carry it out."""
    stores: tuple[str, ...]
    """The stores in which it waits, and the one whose own commit decides, if that cannot be asked."""
    reason: str
    """The reason why it waits, and what to do."""
    sends: int
    """How many sends it holds where it is prepared, in the stores that can be opened."""
    acks: int
    """How many acks it holds there."""


@dataclass(frozen=True, slots=True)
class Heuristic:
    """An outcome that somebody gave by hand."""

    transaction: str
    xid: Xid | None
    outcome: Outcome


class Outcomes:
    """Gives outcomes to transactions that wait. Threads: all. Keeps nothing itself."""

    def __init__(self, coordinator: Coordinator, registry: StoreRegistry) -> None:
        self._coordinator, self._registry = coordinator, registry
        self._log, self._table, self._resolver = coordinator.log, coordinator.table, coordinator.resolver

    # By a transaction manager

    def held(self) -> list[Xid]:
        """Return the external transactions that wait for their outcome, oldest first. Raises StoreFailedError where the
        log, or a store that other processes may take over, cannot tell, and StoreLockedError where one has done so: a
        manager takes what is not listed for ended."""
        self._log.require_usable()
        self._look_into_shared()
        held = sorted((transaction for transaction in self._table.all() if transaction.held), key=_by_age)
        return [transaction.xid for transaction in held if transaction.xid is not None]

    def _look_into_shared(self) -> None:
        """Learn what is prepared in stores that other processes may have had since: to open them is enough."""
        for row in self._registry.shared_rows():
            for branch in self._registry.with_row(row, self._resolver.look_into):
                transaction = self._table.of(branch)
                if transaction.held_by_primary:
                    self._table.by_id.setdefault(transaction.id, transaction)

    def holds(self, xid: Xid) -> bool:
        """Return whether an external transaction waits for its outcome. Raises as `held` if that cannot be told."""
        transaction = self._table.by_xid(xid)
        return (transaction is not None and transaction.held) or xid in self.held()

    def knows(self, xid: Xid) -> bool:
        """Return whether an external transaction is open, waits for its outcome, or has ended a moment ago. Raises as
        `held` if that cannot be told."""
        return self._table.user_of(xid) is not None or self._table.by_xid(xid) is not None or xid in self.held()

    def commit(self, xid: Xid, one_phase: bool) -> None:
        """Commit a prepared transaction; with `one_phase` one that is open and not prepared. Raises as `end`."""
        opened = self._table.user_of(xid)
        if opened is None:
            self.end(xid, commit=True)
        elif one_phase:
            opened.commit()
        else:
            raise TransactionError(f"transaction {opened.xid} is not prepared; prepare() it or commit it in one phase")

    def rollback(self, xid: Xid) -> None:
        """Roll back a transaction, prepared or open. Raises as `end`."""
        opened = self._table.user_of(xid)
        if opened is None:
            self.end(xid, commit=False)
        else:
            opened.rollback()

    def end(self, xid: Xid, commit: bool) -> None:
        """End a prepared transaction as its manager says: durable on return, and carried out wherever a store can. Said
        again it changes nothing. Raises TransactionError for a transaction that is not prepared here or had the other
        outcome, by hand say, and TransactionInDoubt as a commit does."""
        transaction = self._table.by_xid(xid)
        if transaction is not None and transaction.held and transaction.held_by_primary:
            with suppress(AnabranchError, OSError):  # a store that cannot be asked cannot be told either
                self._registry.with_id(transaction.primary, self._resolver.look_into)
            transaction = self._table.by_xid(xid)
        if transaction is None:
            self._look_into_shared()
            transaction = self._table.by_xid(xid)
        if transaction is not None and transaction.outcome is not None and not transaction.held_by_primary:
            _require_same(transaction, commit)
        elif transaction is not None and (transaction.held_by_primary or transaction.id in self._log.externals):
            self._record(transaction, commit, by_hand=False)
        else:
            prepared = ", ".join(map(str, self.held()[:10])) or "none"
            raise TransactionError(f"no transaction {xid} is prepared here; recover() lists those that are: {prepared}")

    def _record(self, transaction: GlobalTransaction, commit: bool, by_hand: bool) -> None:
        """Make the outcome durable, and carry it out. A rollback is recorded as a commit is: a rollback carried out in
        one store must not become a commit in another."""
        xid = transaction.xid if transaction.external else None
        try:
            if transaction.held_by_primary:
                self._end_in_primary(transaction, commit)
                return
            self._log.require_usable()
            decision = self._log.decide(Decision(transaction.id, commit, list(transaction.remembering), xid, by_hand))
            transaction = self._table.by_id.setdefault(transaction.id, transaction)  # the log may have been read again
            self._table.note_decision(transaction, decision)
            self._resolver.resolve(transaction)
            # No others than its stores, since one of another's decisions may take long to open (invariant 7), and the
            # volatile ones, which nothing names.
            self._resolver.recover_open([store for store in self._registry.open_stores() if store.volatile])
        except OutcomeUnknownError as error:
            raise TransactionInDoubt(
                f"transaction {transaction.id.hex()}: the decision log failed while it wrote the outcome: {error}; see "
                "to the disk, call reopen_decisions() and look at recover()",
                transaction.id.hex(),
                [self._registry.name_of(store_id) for store_id in transaction.participants],
            ) from error
        except KeyboardInterrupt:  # if it had not come to say the outcome, that waits to be said again
            shared().schedule(0, partial(self._resolver.resolve_later, transaction))
            raise
        _require_same(transaction, commit)  # not another's, said just now

    def _end_in_primary(self, transaction: GlobalTransaction, commit: bool) -> None:
        """Let the one store that keeps a transaction carry the outcome out, which is then recorded there. Where it
        cannot it does so later, or its next owner, who is asked again by the manager: it has no answer yet."""
        self._table.decide(transaction, commit)
        _require_same(transaction, commit)
        self._resolver.resolve(transaction)
        if transaction.waiting:
            (name, *_) = map(self._registry.name_of, transaction.waiting)
            raise StoreFailedError(
                f"transaction {transaction.xid}: store {name!r} cannot carry out the {transaction.outcome} now; say it "
                "again once the store can be reached, there or at its next owner"
            )
        self._registry.with_id(transaction.primary, methodcaller("sync"))
        done = transaction.participants[transaction.primary].rolled_back
        if commit:
            done = self._registry.with_id(transaction.primary, methodcaller("has_committed", transaction.id))
        if not done:
            raise TransactionError(
                f"transaction {transaction.xid} is prepared no more in store "
                f"{self._registry.name_of(transaction.primary)!r}: another process has said its outcome, or an earlier "
                f"{transaction.outcome} took effect whose answer was lost"
            )
        self._coordinator.cleanup.forget_in(transaction.primary, [transaction.id])

    # By an operator

    def in_doubt(self) -> list[InDoubt]:
        """Return the transactions that are prepared in any store that can be opened, wait for their manager, or are
        decided and not carried out everywhere."""
        waiting: dict[bytes, tuple[GlobalTransaction, set[str], list[Prepared]]] = {}
        for store, branch in self._all_prepared():
            transaction = self._table.of(branch)
            if not transaction.running:
                _, stores, branches = waiting.setdefault(branch.transaction, (transaction, set(), []))
                stores.add(store.name)
                branches.append(branch)
        for transaction in self._table.all():
            if (transaction.waiting or transaction.held) and not transaction.running:
                _, stores, _ = waiting.setdefault(transaction.id, (transaction, set(), []))
                stores.update(map(self._registry.name_of, transaction.waiting))
        return [self._described(*waiting[transaction]) for transaction in sorted(waiting)]

    def _all_prepared(self) -> Iterator[tuple[Store, Prepared]]:
        """Yield what is prepared in those stores that can say it."""
        for store in self._registry.all_stores():
            try:
                branches = self._resolver.look_into(store)
            except AnabranchError as error:
                log.debug("store %s cannot say what is prepared in it: %s", store.name, error)
                continue
            for branch in branches:
                yield store, branch

    def _described(self, transaction: GlobalTransaction, stores: set[str], branches: list[Prepared]) -> InDoubt:
        why = self._resolver.outcome_of(transaction)
        if why and transaction.primary:
            stores.add(self._registry.name_of(transaction.primary))
        if not why and transaction.recorded:
            why = "decided; these stores cannot carry it out now, and try again until they can"
        why = why or "it was never decided; its stores roll it back soon"
        sends, acks = sum(branch.sends for branch in branches), sum(branch.acks for branch in branches)
        return InDoubt(
            transaction.id.hex(), transaction.xid, transaction.outcome, tuple(sorted(stores)), why, sends, acks
        )

    def resolve(self, text: str, outcome: Outcome) -> None:
        """Record an outcome by hand, of the transaction whose id `in_doubt` shows so. Raises TransactionError for one
        that does not wait for an outcome, ValueError for what is none."""
        if outcome not in (COMMIT, ROLLBACK):
            raise ValueError(f"an outcome is {COMMIT!r} or {ROLLBACK!r}, not {outcome!r}")
        transaction_id, commit = _transaction_id(text), outcome == COMMIT
        self._log.require_usable()
        transaction = self._table.by_id.get(transaction_id)
        if transaction is not None and transaction.recorded:
            raise TransactionError(
                f"transaction {transaction_id.hex()} is decided already: {transaction.outcome}; its stores carry it "
                "out as soon as they can"
            )
        if transaction is None or not transaction.held:
            transaction = self._prepared(transaction_id, commit)
            self._log.new_transaction()  # there may be no log yet, or none that was used
        self._record(transaction, commit, by_hand=True)

    def _prepared(self, transaction_id: bytes, commit: bool) -> GlobalTransaction:
        """Return a transaction that is prepared in a store and may have that outcome. Raises TransactionError."""
        for store, branch in self._all_prepared():
            transaction = self._table.of(branch)
            if branch.transaction == transaction_id and not transaction.running:
                why = self._resolver.outcome_of(transaction) if commit or transaction.primary else ""
                if not commit and transaction.commit:
                    raise TransactionError(
                        f"transaction {transaction_id.hex()} cannot be rolled back: it is committed, and its stores "
                        "follow by themselves"
                    )
                if commit and not why and not transaction.commit:
                    raise TransactionError(
                        f"transaction {transaction_id.hex()} cannot be committed: it was never decided, and its stores "
                        "roll it back as soon as they can; some may have done so"
                    )
                other = None if commit else self._resolver.committed_elsewhere(transaction, store)
                if other is not None:
                    raise TransactionError(
                        f"transaction {transaction_id.hex()} cannot be rolled back: store {other!r} has committed it, "
                        "and the others follow by themselves"
                    )
                return transaction
        raise TransactionError(f"no transaction {transaction_id.hex()} is in doubt; in_doubt() lists those that are")

    def heuristics(self) -> list[Heuristic]:
        """Return the outcomes given by hand that nobody has forgotten yet."""
        given = sorted((transaction for transaction in self._table.all() if transaction.by_hand), key=_by_id)
        return [Heuristic(g.id.hex(), g.xid, g.outcome) for g in given if g.outcome is not None]

    def forget(self, text: str) -> None:
        """Forget an outcome given by hand. Raises TransactionError unless it was given by hand and is carried out."""
        transaction_id = _transaction_id(text)
        self._log.require_usable()
        transaction = self._table.by_id.get(transaction_id)
        if transaction is None or not transaction.by_hand:
            raise TransactionError(f"no outcome of transaction {transaction_id.hex()} was given by hand")
        cleanup, cannot = self._coordinator.cleanup, f"transaction {transaction_id.hex()} cannot be forgotten yet"
        if transaction.waiting:
            raise TransactionError(f"{cannot}: a store has yet to carry it out")
        if not cleanup.made_durable([transaction]):
            raise TransactionError(f"{cannot}: a store of it has failed; reopen that first")
        cleanup.forget([transaction])


def _by_age(transaction: GlobalTransaction) -> bytes:
    """Return what is behind the id of the log, or of the store, in a transaction's id: its age there."""
    return transaction.id[16:]


def _transaction_id(text: str) -> bytes:
    """Return a transaction's id from the text that in_doubt() shows. Raises TransactionError."""
    try:
        transaction = bytes.fromhex(text)
    except (TypeError, ValueError):
        transaction = b""
    if len(transaction) != TRANSACTION_BYTES:
        raise TransactionError(
            f"{text!r} is no transaction's id: that is {2 * TRANSACTION_BYTES} hexadecimal digits, as in_doubt() shows"
        )
    return transaction


def _require_same(transaction: GlobalTransaction, commit: bool) -> None:
    """Raise TransactionError if the outcome that stands is the other one."""
    if transaction.commit != commit:
        what = f"transaction {transaction.xid if transaction.xid is not None else transaction.id.hex()}"
        how = "by hand; forget it once you have put that right" if transaction.by_hand else "before"
        raise TransactionError(f"the outcome of {what} is {transaction.outcome}: that was said {how}")
