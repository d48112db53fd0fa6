"""Transactions over several stores: two phases, one decision (invariant 4, rules T1 to T5).

    reserve     room in all stores, in the order of their names
    prepare     in all of them at once; each waits for its disk
    decide      one synced record in the decision log: the commit point
    carry out   in each store, written and not synced; visible; the caller returns
    forget      the decision, once it is durable in all of them

Before the decision is handed to its log everything can be undone, afterwards nothing: a store that cannot carry it out
stays in doubt and is told again, in the background and when it is opened. Without a decision a prepared transaction is
rolled back, if this log would know of one.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..adapters.background import shared
from ..adapters.base import TRANSACTION_BYTES, Pending, Receipt, Store
from ..adapters.files import FILE_MODE, disk_errors
from ..policies.config import TransactionOptions
from ..policies.durability import Sync
from ..policies.errors import (
    AnabranchError,
    ClosedError,
    CorruptionError,
    OutcomeUnknownError,
    PlacementError,
    StoreFailedError,
    TransactionError,
    TransactionInDoubt,
)
from .decision_log import Decision, DecisionLog, External, word
from .doubt import Doubt
from .external import Externals
from .forgetting import Forgetting, tell
from .parts import Part, Work
from .settling import Settling
from .store_registry import StoreRegistry
from .xid import Xid

log = logging.getLogger(__name__)


class Coordinator:
    """Threads: all, once open. What is decided, the decision log says; the fields here are memory alone."""

    def __init__(
        self, directory: Path, options: TransactionOptions, places: StoreRegistry, file_mode: int = FILE_MODE
    ) -> None:
        self._options = options
        self._places = places
        self._closed = True
        self._active: dict[bytes, Work] = {}
        """From before the first prepare until the outcome is carried out or left to be."""
        self.log = DecisionLog(directory, options.sync, file_mode)
        self.forgetting = Forgetting(self.log, places)
        self.settling = Settling(self.log, places, self._active, self.forgetting)
        self.externals = Externals(self.log, places, self.settling)
        self.doubt = Doubt(self.log, places, self._active, self.settling, self.forgetting, self.externals)

    # Opening and closing

    def open(self) -> None:
        """Read the decisions. A log that is damaged stops transactions over several stores, nothing else."""
        self._active.clear()
        self.settling.clear()
        self.forgetting.clear()
        try:
            self.log.open()
        except (CorruptionError, PlacementError) as error:
            log.error(
                "the decision log is damaged: %s; transactions over several stores are refused, and in_doubt() names "
                "those that are prepared, with their stores", error,
            )  # fmt: skip
        self._closed = self.settling.closed = self.forgetting.closed = False

    def require_participants(self, known: Iterable[bytes]) -> None:
        """Raise PlacementError if a store that a transaction names is not recorded (rule T3)."""
        recorded = set(known)
        waiting: list[Decision | External] = [*self.log.decisions.values(), *self.log.externals.values()]
        for said in waiting:
            missing = [store_id for store_id in said.participants if store_id not in recorded]
            if missing and not (isinstance(said, Decision) and said.by_hand):
                raise PlacementError(
                    f"transaction {said.transaction.hex()} waits for store {missing[0].hex()}, which is not there; "
                    "mount its disk or restore it from a backup: without it the transaction cannot be finished"
                )

    def close(self) -> None:
        """Forget what can be forgotten. Idempotent."""
        if not self._closed:
            try:
                self.forgetting.run()
            except AnabranchError as error:
                log.debug("decisions are kept for the next open: %s", error)
            self._closed = self.settling.closed = self.forgetting.closed = True

    def reopen(self) -> None:
        """Read the decision log again, after it failed or was put aside. Raises CorruptionError, PlacementError, and
        StoreFailedError if the disk does not let it be read."""
        with self.forgetting.busy:
            try:
                self.log.close()
            except (AnabranchError, OSError) as error:
                log.warning("closing the decision log after a failure: %s", error)
            with disk_errors("the decision log cannot be read"):
                self.log.open()
            self.forgetting.drop_all()
        self.settling.recover()  # the log says what is decided, and it may be another one now
        self.settling.settle_open()

    # A commit

    def commit(self, parts: Sequence[Part]) -> dict[int, list[Receipt]]:
        """All parts or none. Returns the receipts by `id(part)`; none for a part that is left in doubt.

        Raises TransactionInDoubt if the decision may or may not have reached the disk; after any other error the
        transaction is rolled back. Beside volatile stores one that remembers decides alone (rule T7): then
        OutcomeUnknownError as from that one.
        """
        remembering = [part for part in parts if not part.store.volatile]
        if len(remembering) > 1:
            return self._decide(self.vote(parts))
        return self._commit_beside(remembering[0] if remembering else None, [p for p in parts if p not in remembering])

    def _commit_beside(self, alone: Part | None, volatile: Sequence[Part]) -> dict[int, list[Receipt]]:
        """Prepared in the volatile stores, which then cannot refuse; the other store's own commit is the decision."""
        work = Work(os.urandom(TRANSACTION_BYTES), volatile, None, alone)
        if alone is not None:
            alone.work = work
        for part in volatile:
            part.work = work
        self._active[work.id] = work
        try:
            self._prepare(work)
        except Exception:
            if alone is not None:
                alone.unclaim()
            raise
        receipts: dict[int, list[Receipt]] = {}
        if alone is not None:
            work.phase = "committing"
            try:
                receipts[id(alone)] = alone.commit(self._places)
            except Exception:  # of unknown outcome too: what is acked is delivered once more, rather than never
                self._roll_back(work)
                raise
        work.phase = "decided"
        receipts |= self._carry_out(Decision(work.id, True, work.participants), volatile)
        self._end(work)
        return receipts

    # The same in two steps, for who has other resources to ask between them: vote, then finish or abandon.

    def vote(self, parts: Sequence[Part], xid: Xid | None = None) -> Work:
        """Prepared everywhere, and decided nowhere: a crash now rolls it back, and so does closing the router. After an
        error it is rolled back. Raises StoreFailedError if the decision log has failed."""
        work = self._begin(parts, xid)
        self._prepare(work)
        return work

    def finish(self, work: Work) -> dict[int, list[Receipt]]:
        """Decide it and carry it out. Receipts and TransactionInDoubt as those of `commit`. After StoreFailedError
        because the decision log had failed before it is prepared still, and can only be abandoned."""
        self._require_usable()
        if not self._is_active(work):
            raise TransactionError("this transaction was rolled back when the router was closed; begin another")
        return self._decide(work)

    def abandon(self, work: Work) -> None:
        """Roll it back, unless that is done. Never raises but for a signal."""
        if self._is_active(work):
            self._roll_back(work)

    def hold(self, parts: Sequence[Part], xid: Xid) -> None:
        """The first phase of an external transaction: prepared until its outcome is said. Errors as those of
        `commit`."""
        work = self.vote(parts, xid)
        work.phase = "deciding"
        held = External(work.id, work.participants, xid)
        self._hand_over(work, lambda: self.log.hold(held, lambda: self._is_active(work)))
        self._end(work)

    def _begin(self, parts: Sequence[Part], xid: Xid | None) -> Work:
        """Nothing is prepared yet."""
        try:
            self._require_usable()
            _require_unshared(parts)
            work = Work(self.log.new_transaction(), sorted(parts, key=lambda part: part.store.name), xid)
        except Exception as error:
            for part in parts:
                part.unclaim()
            _raise_known(error)
            raise
        for part in parts:
            part.work = work
        self._active[work.id] = work
        return work

    def _is_active(self, work: Work) -> bool:
        return self._active.get(work.id) is work

    def _end(self, work: Work) -> None:
        work.phase = "ended"
        self._active.pop(work.id, None)

    def _require_usable(self) -> None:
        if self._closed:
            raise ClosedError("the router is closed; open it with anabranch.open(...)")
        self._places.require_open()
        self.log.require_usable()

    def _prepare(self, work: Work) -> None:
        """The first phase. If it fails anywhere all is rolled back."""
        try:
            for part in work.parts:
                self._reserve(part)
            participants = work.participants
            steps: list[Pending[None]] = []
            for part in work.parts:
                if steps:
                    steps[-1].proceed()
                steps.append(self._prepare_part(work, participants, part))
            for step in reversed(steps):  # the last is led by this thread, the others by others meanwhile
                step.wait()
        except Exception as error:
            self._roll_back(work)
            _raise_known(error)
            raise

    def _prepare_part(self, work: Work, participants: list[bytes], part: Part) -> Pending[None]:
        sync = self._options.sync is Sync.ALWAYS
        step = self._places.with_store(
            part,
            lambda store: store.prepare(work.id, participants, part.sends, part.acks, sync, part.room, part.changes),
        )
        part.room = None
        return step

    def _reserve(self, part: Part) -> None:
        part.room = self._places.with_store(part, lambda store: store.reserve(part.sends))

    def _decide(self, work: Work) -> dict[int, list[Receipt]]:
        decision = Decision(work.id, True, work.participants)
        work.phase = "deciding"
        self._hand_over(work, lambda: self.log.decide(decision, lambda: self._is_active(work)))
        work.phase = "decided"
        receipts = self._carry_out(decision, work.parts)
        self._end(work)
        return receipts

    def _hand_over(self, work: Work, write: Callable[[], object]) -> None:
        """From here on nobody may roll back, but where the log says that it wrote nothing (rule T2)."""
        try:
            write()
        except OutcomeUnknownError as error:
            self._end(work)
            self.settling.retry_later()  # whoever has read the log again meanwhile took it for one under way
            raise TransactionInDoubt(
                f"transaction {work.id.hex()} over {', '.join(map(repr, work.stores))} is in doubt: the decision log "
                f"failed while it wrote the decision: {error}. Its stores keep it prepared; see to the disk and call "
                "reopen_decisions(), which finds out",
                work.id.hex(),
                work.stores,
            ) from error
        except (AnabranchError, RuntimeError):  # the latter in a signal handler that interrupted the log's own write
            self._roll_back(work)
            raise

    def _carry_out(self, decision: Decision, parts: Sequence[Part]) -> dict[int, list[Receipt]]:
        """The second phase; never raises, since it undoes nothing: a store that fails stays in doubt (rule T2)."""
        steps = []
        left = []
        for part in parts:
            try:
                steps.append((part, self._outcome(part.store, decision)))
            except AnabranchError as error:
                left.append((part.store, error))
        receipts: dict[int, list[Receipt]] = {}
        for part, step in steps:
            try:
                receipts[id(part)] = step.wait() or []
                if part.store.volatile:  # no decision names it: nobody will ever ask it what became of that
                    part.store.forget([decision.transaction])
            except AnabranchError as error:
                left.append((part.store, error))
        if left:  # not before all have been told: once these have done it, the decision may be forgotten
            self._leave(decision, left)
        self.settling.done_with(decision)
        return receipts

    def _outcome(self, store: Store, decision: Decision) -> Pending[Any]:
        try:
            return tell(store, decision)
        except ClosedError:  # for being idle: what is prepared alone holds no store open that was about to close
            return self._places.with_id(store.store_id, lambda store: tell(store, decision))

    def _leave(self, decision: Decision, left: Sequence[tuple[Store, AnabranchError]]) -> None:
        for store, error in left:
            log.warning(
                "transaction %s: %s is decided; store %r has yet to carry it out: %s", decision.transaction.hex(),
                word(decision), store.name, error,
            )  # fmt: skip
        self.settling.expect(decision, [store.store_id for store, _ in left])
        self.settling.retry_later()

    def _roll_back(self, work: Work) -> None:
        """Nothing is decided, so nothing needs to be written to undo it: a store that fails here rolls back when it is
        opened again. Never raises."""
        work.phase = "rolling back"
        failed = refused = False
        steps = []
        decision = Decision(work.id, False, work.participants)
        for part in work.parts:
            part.room = None
            try:
                steps.append((part, self._outcome(part.store, decision)))
            except AnabranchError:
                failed = True
            except RuntimeError:
                refused = True
        for part, step in steps:
            try:
                if not step.wait():  # not prepared there, or an interrupted rollback had come so far
                    part.unclaim()
            except AnabranchError:
                failed = True
            except RuntimeError:
                refused = True
        if refused:  # in a signal handler that interrupted this very store (rule G3): done once that goes on
            shared().schedule(0, partial(self.take_over, work.parts))
            return
        self._end(work)
        if failed:
            self.settling.retry_later()

    def take_over(self, parts: Sequence[Part]) -> None:
        """From a thread that was interrupted with these, perhaps before it began, perhaps after it was done: to the end
        that it could still reach. For a background thread, which no signal strikes."""
        if self._closed or not parts:
            return
        work = parts[0].work
        if work is None:
            for part in parts:
                self._free(part)
        elif work.phase in ("preparing", "rolling back", "committing"):
            self._roll_back(work)
            if work.alone is not None:  # its commit may be in its store's queue
                self._free(work.alone)
        elif work.phase != "ended" and self._is_active(work):
            try:
                self._take_over_decided(work)
            except AnabranchError as error:
                log.warning("transaction %s, which was interrupted, is in doubt: %s", work.id.hex(), error)
                self.settling.retry_later()  # what could not be decided for want of room, say, is rolled back
            self._end(work)
        else:
            self._end(work)  # it may have been interrupted in there

    def _free(self, part: Part) -> None:
        """Of a transaction that was never begun here; of one store alone, its commit may be in the store's queue."""
        try:
            part.store.rollback_prepared(bytes(TRANSACTION_BYTES)).wait()  # of none: all before it is written then
        except AnabranchError as error:
            log.debug("store %s: %s", part.store.name, error)
        part.unclaim()

    def _take_over_decided(self, work: Work) -> None:
        if not work.participants:  # volatile stores only, as their one other participant has decided
            self._carry_out(Decision(work.id, True, []), work.parts)
            return
        if work.xid is None:  # the decision may be in the log's queue, or on disk; once more changes nothing
            decision = Decision(work.id, True, work.participants)
            self.log.decide(decision, lambda: self._is_active(work))
            self._carry_out(decision, work.parts)
            return
        self.log.flush()
        # Not held once more: its manager may have said the outcome since.
        if work.id not in self.log.externals and work.id not in self.log.decisions:
            self._roll_back(work)


def _require_unshared(parts: Sequence[Part]) -> None:
    """Rule T6: who takes a shared store over could not ask this process's decision log."""
    for part in parts:
        if part.store.shared:
            others = ", ".join(repr(other.store.name) for other in parts if other is not part) or "a later decision"
            raise TransactionError(
                f"store {part.store.name!r} is shared with other processes by a lease, so a transaction over it and "
                f"{others} cannot be made atomic; keep these destinations in one store, or give it no lease"
            )


def _raise_known(error: Exception) -> None:
    """Of a write that failed in one store, or in the decision log, before anything was decided the outcome is not
    known; that of the transaction is."""
    if isinstance(error, OutcomeUnknownError):
        raise StoreFailedError(f"the transaction was rolled back: {error.__cause__ or error}") from error
