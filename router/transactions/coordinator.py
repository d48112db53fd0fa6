"""Transactions over several stores: two phases, one decision (invariant 4, rules T1 to T5).

    reserve     room in all stores, in the order of their names
    prepare     in all of them at once; each waits for its disk
    decide      one synced record in the decision log: the commit point
    carry out   in each store, written and not synced; visible; the caller returns
    forget      the decision, once it is durable in all of them

Before the decision is handed to its log everything can be undone, afterwards nothing. A store that cannot carry it out
stays in doubt and is told again, in the background and when it is opened. Without a decision a prepared transaction is
rolled back, if this log would know of one. For one store alone its own commit is the decision. So it is for one that
another process may take over, the primary, beside others that are prepared (primary.py).
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import filterfalse
from operator import attrgetter, methodcaller
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ...adapters.core import Store
from ...adapters.core.messages import Receipt
from ...adapters.core.store_types import TRANSACTION_BYTES, Pending
from ...adapters.system.files import FILE_MODE, disk_errors
from ...policies.config.durability import Sync
from ...policies.errors import (
    AnabranchError,
    ClosedError,
    CorruptionError,
    OutcomeUnknownError,
    PlacementError,
    StoreFailedError,
    TransactionError,
    TransactionInDoubt,
    router_closed,
)
from ..placement.registry import StoreRegistry
from .decision_cleanup import DecisionCleanup
from .decision_log import READ_AGAIN, Decision, DecisionLog, External
from .global_transaction import GlobalTransaction
from .participant import Participant, is_limited, reserve_all
from .primary import packed
from .resolver import Resolver
from .states import DONE, IN_DOUBT, PREPARED, PREPARING
from .table import TransactionTable
from .xid import Xid

if TYPE_CHECKING:
    from ...policies.config import TransactionOptions

log: logging.Logger = logging.getLogger(__name__)

_by_store_name = attrgetter("store.name")
_id_of = attrgetter("store_id")
_is_volatile = attrgetter("volatile")
_is_shared = attrgetter("store.shared")


class Coordinator:
    """Commits transactions, prepares them and rolls them back. Threads: all, once open."""

    def __init__(
        self, directory: Path, options: TransactionOptions, registry: StoreRegistry, file_mode: int = FILE_MODE
    ) -> None:
        self._sync = options.sync is Sync.ALWAYS
        self._registry = registry
        self.log: Final = DecisionLog(directory, options.sync, file_mode)
        self.table: TransactionTable = TransactionTable(options, self.log)
        self.cleanup: Final = DecisionCleanup(self.log, registry, self.table)
        registry.removal.forget_decisions = self.cleanup.forget_of
        registry.removal.may_remove = self.cleanup.has_forgotten
        self.resolver: Final = Resolver(self.log, registry, self.table, self.cleanup)

    # Opening and closing

    def open(self) -> None:
        """Read the decisions. A log that is damaged stops transactions over several stores, nothing else."""
        self.table.clear()
        self.resolver.clear()
        self.cleanup.clear()
        try:
            self.log.open()
        except (CorruptionError, PlacementError) as error:
            log.error(
                "the decision log is damaged: %s; transactions over several stores are refused, and in_doubt() names "
                "those that are prepared, with their stores", error,
            )  # fmt: skip
        self.table.load()
        self.table.closed = False

    def require_participants(self, store_ids: Iterable[bytes]) -> None:
        """Raise PlacementError if a store that a transaction names is not recorded (rule T3)."""
        recorded = set(store_ids)
        for transaction in self.table.all():
            missing = [store_id for store_id in transaction.participants if store_id not in recorded]
            if missing and not transaction.by_hand:
                raise PlacementError(
                    f"transaction {transaction.id.hex()} waits for store {missing[0].hex()}, which is not there; "
                    "mount its disk or restore it from a backup: without it the transaction cannot be finished"
                )

    def change_participants(self, transaction_id: bytes, more: set[bytes], fewer: set[bytes]) -> None:
        """Note that a transaction which waits for its manager is prepared in other stores than it was, by their ids.
        Durable on return. Changes nothing if it is so already, or the transaction does not wait."""
        external, transaction = self.log.externals.get(transaction_id), self.table.by_id.get(transaction_id)
        if external is None or transaction is None:
            return
        store_ids = sorted({*external.participants, *more} - fewer)
        if store_ids != sorted(external.participants):
            self.log.hold(External(transaction_id, store_ids, external.xid), sync=True)
            with self.table.lock:
                transaction.remembering = store_ids
                before = transaction.participants
                transaction.participants = {one: before.get(one) or Participant(one) for one in store_ids}

    def close(self) -> None:
        """Forget what can be forgotten. Idempotent."""
        if not self.table.closed:
            try:
                self.cleanup.run()
            except AnabranchError as error:
                log.debug("decisions are kept for the next open: %s", error)
            self.table.closed = True

    def reopen(self) -> None:
        """Read the decision log again, after it failed or was moved away. Raises CorruptionError, PlacementError, and
        StoreFailedError if the disk does not let it be read."""
        with self.cleanup.busy:
            try:
                self.log.close()
            except (AnabranchError, OSError) as error:
                log.warning("closing the decision log after a failure: %s", error)
            with disk_errors("the decision log cannot be read"):
                self.log.open()
            self.table.load()
        self.resolver.resolve_all()  # the log says what is decided, and it may be another one now
        self.resolver.recover_open()

    # A commit

    def commit(self, transaction: GlobalTransaction) -> None:
        """Commit in all its stores or in none. The participants then have the receipts, none where a store carries it
        out later.

        Raises TransactionInDoubt if the decision may or may not have reached the disk; after any other error the
        transaction is rolled back. One store that remembers decides alone, also beside volatile ones (rule T7): the
        error is then that store's OutcomeUnknownError.
        """
        participants = transaction.participants.values()
        if not participants:
            transaction.decide(True)
            transaction.move(DONE)
        elif transaction.state is PREPARED:
            self._commit_prepared(transaction)
        elif len(participants) == 1:
            (transaction.alone,) = participants
            self._commit_alone(transaction, transaction.alone)
            transaction.move(DONE)
        elif sum(map(_is_volatile, participants)) < len(participants) - 1:
            self._prepare_all(transaction)
            self._decide(transaction)
        else:
            self._commit_beside(transaction)

    def _commit_alone(self, transaction: GlobalTransaction, alone: Participant) -> None:
        """Commit by the own commit of its one store."""
        transaction.move(IN_DOUBT)
        try:
            marked = () if transaction.mark is None else (transaction.mark,)
            commit = methodcaller("commit", alone.sends, alone.acks, None, alone.changes, *marked)  # a call less so
            alone.receipts = alone.call(self._registry, commit)
        except OutcomeUnknownError:
            raise
        except Exception:
            alone.unclaim()
            alone.carried_out = True
            transaction.decide(False)
            raise
        alone.carried_out = True
        transaction.decide(True)

    def _commit_beside(self, transaction: GlobalTransaction) -> None:
        """Prepare in the volatile stores, which then cannot refuse. The other store's own commit is the decision."""
        participants = transaction.participants.values()
        alone = transaction.alone = next(filterfalse(_is_volatile, participants), None)
        self._prepare(transaction, list(filter(_is_volatile, participants)), _random_id)
        try:
            if alone is None:
                transaction.decide(True)
            else:
                self._commit_alone(transaction, alone)
        except OutcomeUnknownError:  # what is acked is delivered once more, rather than never
            self._undo_beside(transaction)
            raise
        except Exception:
            self.resolver.resolve(transaction)
            raise
        self.resolver.resolve(transaction)

    def _undo_beside(self, transaction: GlobalTransaction) -> None:
        """Roll back in the volatile stores what their durable one may or may not have committed."""
        undone = GlobalTransaction.recovered(transaction.id, (), PREPARED)
        undone.participants = {p.store_id: p for p in transaction.participants.values() if p.volatile}
        undone.decide(False)
        self.table.add(undone)
        self.resolver.resolve(undone)
        transaction.running = False

    # Two steps, for callers that ask other resources between them: prepare, then commit or roll back.

    def prepare(self, transaction: GlobalTransaction) -> None:
        """Prepare everywhere, and decide nowhere: a crash now rolls the transaction back, and so does closing the
        router. After an error it is rolled back. Raises StoreFailedError if the decision log has failed."""
        if transaction.participants:
            self._prepare_all(transaction)
        else:
            transaction.move(PREPARING)
            transaction.move(PREPARED)

    def _prepare_all(self, transaction: GlobalTransaction, xid: Xid | None = None) -> None:
        """Prepare in all its stores, of which there may be none. Given the xid, the primary keeps that."""
        participants = sorted(transaction.participants.values(), key=_by_store_name)
        durable = list(filterfalse(_is_volatile, participants))
        shared = list(map(_id_of, filter(_is_shared, durable)))
        transaction.primary = shared[0] if shared else b""
        transaction.remembering = [store_id for store_id in map(_id_of, durable) if store_id != transaction.primary]
        self._prepare(transaction, participants, self._new_id, packed(xid, transaction.primary))

    def _prepare(
        self,
        transaction: GlobalTransaction,
        participants: Sequence[Participant],
        new_id: Callable[[GlobalTransaction], bytes],
        note: bytes = b"",
    ) -> None:
        """Prepare in these stores, which keep the note, under a new id. If that fails anywhere all is rolled back. A
        write of unknown outcome, in one store or in the decision log, is a StoreFailedError then: the transaction's
        outcome is known."""
        registry, steps = self._registry, list[Pending[None]]()
        transaction.move(PREPARING)
        try:
            transaction.id = name = new_id(transaction)
            self.table.by_id[name] = transaction
            if any(map(is_limited, participants)):
                reserve_all(participants, registry)
            remembering, sync, mark = transaction.remembering, self._sync, transaction.mark
            for participant in participants:
                store_ids = [participant.store_id] if participant.store_id == transaction.primary else remembering
                steps.append(participant.call(registry, participant.prepare, name, store_ids, sync, mark, note))
            for step in steps[:-1]:  # not before all are there: other threads would take turns with this one
                step.proceed()
            for step in reversed(steps):  # the last is led by this thread, the others by others meanwhile
                step.wait()
        except OutcomeUnknownError as error:
            self.roll_back(transaction)
            raise StoreFailedError(f"the transaction was rolled back: {error.__cause__ or error}") from error
        except Exception:
            self.roll_back(transaction)
            raise
        transaction.move(PREPARED)

    def hold(self, transaction: GlobalTransaction, xid: Xid) -> None:
        """Prepare an external transaction, the first phase, until its outcome is said. One that has done nothing is
        held too: its manager, which knows nothing of that, says its outcome. Errors as those of `commit`."""
        durable = list(filterfalse(_is_volatile, transaction.participants.values()))
        if any(map(_is_shared, durable)):
            self._hold_in_primary(transaction, durable, xid)
            return
        self._prepare_all(transaction)
        transaction.external = True
        self._hand_over(transaction, External(transaction.id, transaction.remembering, xid))
        transaction.move(PREPARED)
        transaction.running = False

    def _hold_in_primary(self, transaction: GlobalTransaction, durable: Sequence[Participant], xid: Xid) -> None:
        """Prepare in one store that other processes may take over, beside volatile ones. It keeps the xid, by which its
        next owner tells the manager of it."""
        try:
            if len(durable) > 1:
                raise _shared(transaction, "cannot be prepared under an xid, and wait for its manager")
            self.table.require_unused(xid)  # it may have come with the store, which was not open when this one began
        except TransactionError:
            self.roll_back(transaction)
            raise
        self._prepare_all(transaction, xid)
        if not self.table.has(transaction):  # the router was closed and opened since, and knows nothing of it
            self.roll_back(transaction)
            raise StoreFailedError(READ_AGAIN)
        transaction.external = True
        transaction.running = False

    def roll_back(self, transaction: GlobalTransaction) -> None:
        """Roll back. Nothing is decided, so nothing needs to be written to undo it: a store that fails here rolls back
        when it is opened again. Never raises but for a signal."""
        if transaction.state is DONE:
            return
        transaction.decide(False)
        if transaction.id:
            for participant in transaction.participants.values():
                participant.let_go_of_room()
            self.resolver.resolve(transaction)
        else:  # nothing is prepared
            for participant in transaction.participants.values():
                participant.unclaim()
                participant.carried_out = True
            transaction.move(DONE)

    def _require_open(self) -> None:
        if self.table.closed:
            raise router_closed()
        self._registry.require_open()

    def _new_id(self, transaction: GlobalTransaction) -> bytes:
        """Return an id for a transaction that all its stores can prepare."""
        self._require_open()
        durable = filterfalse(_is_volatile, transaction.participants.values())
        if sum(map(_is_shared, durable)) > 1:
            raise _shared(transaction, "cannot be made atomic: each could be another process's while it commits")
        if transaction.primary and not transaction.remembering:
            return transaction.primary + time.time_ns().to_bytes(8, "big") + os.urandom(8)
        try:
            return self.log.new_transaction()
        except OutcomeUnknownError:
            raise
        except StoreFailedError:
            self.log.require_usable()  # which says what to do
            raise

    def _commit_prepared(self, transaction: GlobalTransaction) -> None:
        """Commit a transaction that has voted, the second phase. If the router was closed since, or the decision log
        had failed before, it is rolled back."""
        try:
            self._require_open()
            self.log.require_usable()
            if not self.table.has(transaction):
                raise TransactionError("this transaction was rolled back when the router was closed; begin another")
        except Exception:
            self.roll_back(transaction)
            raise
        self._decide(transaction)

    def _decide(self, transaction: GlobalTransaction) -> None:
        if transaction.primary:
            self._decide_in_primary(transaction)
        else:
            self._hand_over(transaction, Decision(transaction.id, True, transaction.remembering))
        self.resolver.resolve(transaction)

    def _decide_in_primary(self, transaction: GlobalTransaction) -> None:
        """Commit in the primary, which is the decision; the log has it afterwards, so that the others need not ask.
        Raises what has kept the primary from it, once all is rolled back, and TransactionInDoubt if nobody can tell."""
        primary = transaction.participants[transaction.primary]
        store = primary.store
        assert store is not None
        transaction.move(IN_DOUBT)
        try:
            if not self.table.has(transaction):  # the others may have been rolled back
                raise StoreFailedError(READ_AGAIN)
            commit = partial(_commit_in, transaction=transaction.id)
            try:
                primary.receipts = commit(store)
            except ClosedError:  # it was opened again since
                primary.receipts = self._registry.with_id(transaction.primary, commit)
        except (AnabranchError, RuntimeError) as error:
            self.resolver.retry_later()  # first: Ctrl-C may strike while it is asked
            transaction.running = False  # so that it may be asked
            why = self.resolver.outcome_of(transaction)
            if why:
                raise TransactionInDoubt(
                    f"transaction {transaction.id.hex()} over {', '.join(map(repr, transaction.stores))} is in doubt: "
                    f"{error}. The others keep it prepared until store {store.name!r} can be asked",
                    transaction.id.hex(),
                    transaction.stores,
                ) from error
            if not transaction.commit:
                self.resolver.resolve(transaction)
                if isinstance(error, OutcomeUnknownError):
                    raise StoreFailedError(f"the transaction was rolled back: {error.__cause__ or error}") from error
                raise
        primary.carried_out = True
        transaction.decide(True)
        try:
            if transaction.remembering:
                self._write(transaction, Decision(transaction.id, True, transaction.remembering))
            else:  # nobody will ask
                self.cleanup.forget_in(transaction.primary, [transaction.id])
        except (AnabranchError, RuntimeError) as error:
            log.debug("transaction %s: its primary alone knows the outcome: %s", transaction.id.hex(), error)

    def _write(self, transaction: GlobalTransaction, record: Decision | External) -> None:
        """Write to the decision log, unless the router was closed since. A decision then stands."""
        current = self.log.current()  # first: looked up in the table of that opening, or of a later one
        if self.table.by_id.get(transaction.id) is not transaction:
            raise StoreFailedError(READ_AGAIN)
        if isinstance(record, External):
            self.log.hold(record, current)
        else:
            self.log.decide(record, current)
            transaction.recorded = True
            transaction.decide(True)

    def _hand_over(self, transaction: GlobalTransaction, record: Decision | External) -> None:
        """Write to the decision log. From here on nobody may roll back, but where the log says that it wrote nothing
        (rule T2)."""
        transaction.move(IN_DOUBT)
        try:
            self._write(transaction, record)
        except OutcomeUnknownError as error:
            transaction.running = False
            self.resolver.retry_later()  # whoever has read the log again meanwhile took it for one under way
            names = transaction.stores
            raise TransactionInDoubt(
                f"transaction {transaction.id.hex()} over {', '.join(map(repr, names))} is in doubt: the decision log "
                f"failed while it wrote the decision: {error}. Its stores keep it prepared; see to the disk and call "
                "reopen_decisions(), which finds out",
                transaction.id.hex(),
                names,
            ) from error
        except (AnabranchError, RuntimeError):  # the latter in a signal handler that interrupted the log's own write
            self.roll_back(transaction)
            raise

    # After Ctrl-C

    def take_over(self, transaction: GlobalTransaction) -> None:
        """Bring a transaction to the end that it could still reach, after its thread was interrupted: perhaps before it
        began, perhaps after it was done. For a background thread, which no signal strikes."""
        if self.table.closed or not transaction.running:
            return
        try:
            if transaction.external and transaction.state in (PREPARED, IN_DOUBT):
                self.log.flush()  # first: what is not in the log by then is rolled back, by whoever looks
                transaction.running = False  # not held once more: its manager may have said the outcome since
                self.resolver.resolve(transaction)
            elif transaction.state is IN_DOUBT and transaction.primary:
                transaction.running = False
                if self.resolver.resolve(transaction):
                    self.resolver.retry_later()
            elif transaction.state is IN_DOUBT:
                self._take_over_in_doubt(transaction)
            elif transaction.commit is None or not transaction.commit:
                self.roll_back(transaction)
            elif transaction.id:
                self.resolver.resolve(transaction)
        except AnabranchError as error:
            log.warning("transaction %s, which was interrupted, is in doubt: %s", transaction.id.hex(), error)
            self.resolver.retry_later()  # what could not be decided for want of room, say, is rolled back
        transaction.running = False

    def _take_over_in_doubt(self, transaction: GlobalTransaction) -> None:
        if transaction.alone is not None:  # its commit may be in its store's queue
            if transaction.id:
                self._undo_beside(transaction)
            self._free(transaction.alone)
        else:  # the decision may be in the log's queue, or on disk; once more changes nothing
            self._write(transaction, Decision(transaction.id, True, transaction.remembering))
            self.resolver.resolve(transaction)

    def _free(self, participant: Participant) -> None:
        """Free the messages that a participant has acked, unless its commit, which may be in the store's queue, takes
        them away."""
        try:
            assert participant.store is not None
            participant.store.rollback_prepared(bytes(TRANSACTION_BYTES)).wait()  # of none: all before it is written
        except AnabranchError as error:
            log.debug("store %s cannot say what became of a commit: %s", participant.store_id.hex(), error)
        participant.unclaim()


def _commit_in(store: Store, transaction: bytes) -> Sequence[Receipt]:
    """Commit what is prepared in a primary, durably. Raises what the store raises, and StoreFailedError if it is there
    no more."""
    receipts: Sequence[Receipt] = store.commit_prepared(transaction).wait()
    store.sync()
    if not store.has_committed(transaction):
        raise StoreFailedError(f"store {store.name!r}: what was prepared there is there no more")
    return receipts


def _random_id(_: GlobalTransaction) -> bytes:
    """Return an id for a transaction that no decision names."""
    return os.urandom(TRANSACTION_BYTES)


def _shared(transaction: GlobalTransaction, why: str) -> TransactionError:
    """Return the error for stores that other processes may take over, which could not ask this one's decision log (rule
    T6)."""
    names = ", ".join(map(repr, transaction.stores))
    shared = ", ".join(
        repr(p.store.name) for p in transaction.participants.values() if p.store is not None and p.store.shared
    )
    return TransactionError(
        f"a transaction over {names}, of which {shared} may be taken over by other processes, {why}; keep these "
        "destinations in one store, or give them no lease"
    )
