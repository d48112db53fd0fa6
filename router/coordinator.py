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
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

from ..adapters.base import TRANSACTION_BYTES, Message, Outgoing, Pending, Prepared, Receipt, Store
from ..adapters.files import disk_errors
from ..adapters.journal.background import shared
from ..policies.config import TransactionOptions
from ..policies.destination import Destination
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
    UnknownMessageError,
)
from .decision_log import Decision, DecisionLog, External
from .xid import Xid

log = logging.getLogger(__name__)

FORGET_SECONDS: Final = 1.0
"""After so long decisions that were carried out are made durable in their stores and forgotten."""
FORGET_MAX: Final = 1000
"""So many are forgotten at once, without waiting."""
RETRY_SECONDS: Final = 1.0
RETRY_SECONDS_MAX: Final = 30.0

COMMIT: Final = "commit"
ROLLBACK: Final = "rollback"


@dataclass(frozen=True, slots=True)
class InDoubt:
    """A transaction that is prepared somewhere and waits: for a word, or for a store."""

    transaction: str
    """Its id, 64 hexadecimal digits."""
    xid: Xid | None
    """What its manager calls it, if it is external."""
    outcome: str | None
    """`commit` or `rollback` if that is decided and a store has yet to carry it out."""
    stores: tuple[str, ...]
    """Where it waits."""
    reason: str
    """Why, and what to do."""


@dataclass(frozen=True, slots=True)
class Heuristic:
    """An outcome that somebody gave by hand."""

    transaction: str
    xid: Xid | None
    outcome: str


class Part:
    """What a transaction does in one store."""

    __slots__ = ("acks", "first", "room", "sends", "store", "work")

    def __init__(self, store: Store, first: Destination) -> None:
        self.store = store
        self.first = first
        """A destination in it: one that was closed for being idle is opened again by it."""
        self.sends: list[tuple[Destination, Outgoing]] = []
        self.acks: list[Message] = []
        self.room: object = None
        self.work: Work | None = None
        """The transaction that it has become part of."""

    def unclaim(self) -> None:
        """Nothing was prepared, or it failed: the messages are free again."""
        if self.acks:
            try:
                self.store.unclaim(self.acks)
            except UnknownMessageError:  # some were freed before, by a failed commit or a rollback to a savepoint
                self._unclaim_each()
            except (StoreFailedError, ClosedError):
                pass  # the store's leases and claims are gone with it

    def _unclaim_each(self) -> None:
        for message in self.acks:
            try:
                self.store.unclaim([message])
            except (StoreFailedError, ClosedError, UnknownMessageError):
                pass


class Work:
    """A transaction on its way through the two phases. `phase` moves by single assignments, so that another thread can
    take over from one that was interrupted."""

    __slots__ = ("id", "parts", "phase", "xid")

    def __init__(self, transaction: bytes, parts: Sequence[Part], xid: Xid | None) -> None:
        self.id = transaction
        self.parts = parts
        self.xid = xid
        self.phase = "preparing"

    @property
    def participants(self) -> list[bytes]:
        return [part.store.store_id for part in self.parts]

    @property
    def stores(self) -> list[str]:
        return [part.store.name for part in self.parts]


class Stores(Protocol):
    """What the coordinator asks of the router."""

    def store_by_id(self, store_id: bytes) -> Store:
        """The open store of that id, opened if need be. Raises PlacementError for one that is not recorded."""

    def require_open(self) -> None:
        """Raise ClosedError if the router is closed, or in a forked child."""

    def name_of(self, store_id: bytes) -> str:
        """Its name, or its id where it has none."""

    def open_stores(self) -> list[Store]:
        """Those that are open."""

    def reopened(self, part: Part) -> Store:
        """After a ClosedError: the part's store, opened again if it was closed for being idle."""


class Coordinator:
    """Threads: all, once open. What is decided, the decision log says; the fields here are memory alone."""

    def __init__(self, directory: Path, options: TransactionOptions, stores: Stores) -> None:
        self._path = directory
        self._options = options
        self._stores = stores
        self._log = DecisionLog(directory, options.sync)
        self._clear()

    def _clear(self) -> None:
        self._closed = True
        self._damage: AnabranchError | None = None
        self._active: dict[bytes, Work] = {}
        """From before the first prepare until the outcome is carried out or left to be."""
        self._unfinished: dict[bytes, set[bytes]] = {}
        """Decided, and the stores that have yet to carry it out. Guarded by `_lock`."""
        self._finished: dict[bytes, Decision] = {}
        """Carried out everywhere, to be forgotten. Guarded by `_lock`."""
        self._lock = threading.Lock()
        self._forgetting = threading.Lock()
        self._forget_due = self._retry_due = False
        self._retry_seconds = RETRY_SECONDS

    # Opening and closing

    def open(self) -> None:
        """Read the decisions. A log that is damaged stops transactions over several stores, nothing else."""
        self._clear()
        try:
            self._log.open()
        except (CorruptionError, PlacementError) as error:
            self._damage = error
            log.error("the decision log is damaged: %s; transactions over several stores are refused", error)
        self._closed = False

    def require_participants(self, known: Iterable[bytes]) -> None:
        """Raise PlacementError if a store that a transaction names is not recorded (rule T3)."""
        recorded = set(known)
        waiting: list[Decision | External] = [*self._log.decisions.values(), *self._log.externals.values()]
        for said in waiting:
            missing = [store_id for store_id in said.participants if store_id not in recorded]
            if missing and not (isinstance(said, Decision) and said.by_hand):
                raise PlacementError(
                    f"transaction {said.transaction.hex()} waits for store {missing[0].hex()}, which is not there; "
                    "mount its disk or restore it from a backup: without it the transaction cannot be finished"
                )

    def recover(self) -> None:
        """Carry out the decisions that were not forgotten. A store that cannot is told again later."""
        for decision in list(self._log.decisions.values()):
            with self._lock:
                self._unfinished[decision.transaction] = set(decision.participants)
        self._retry_unfinished()

    def close(self) -> None:
        """Forget what can be forgotten. Idempotent."""
        if not self._closed:
            try:
                self.forget_finished()
            except AnabranchError as error:
                log.debug("decisions are kept for the next open: %s", error)
            self._closed = True

    def close_log(self) -> None:
        """After the stores are closed. Idempotent."""
        self._log.close()

    def reopen(self) -> None:
        """Read the decision log again, after it failed or was put aside. Raises CorruptionError, PlacementError, and
        StoreFailedError if the disk does not let it be read."""
        with self._forgetting:
            self._damage = StoreFailedError("it is being read again")  # half read it would deny what it has decided
            try:
                self._log.close()
            except (AnabranchError, OSError) as error:
                log.warning("closing the decision log after a failure: %s", error)
            try:
                with disk_errors("the decision log cannot be read"):
                    self._log.open()
            except AnabranchError as error:
                self._damage = error
                raise
            with self._lock:  # the log says what is decided, and it may be another one now
                self._unfinished.clear()
                self._finished.clear()
            self._damage = None
        self.recover()
        self._settle_open()

    @property
    def damage(self) -> BaseException | None:
        """Why the decision log cannot be used; None if it can."""
        return self._damage or self._log.failed

    @property
    def syncs(self) -> int:
        """How often the decision log waited for the disk."""
        return self._log.syncs

    # A commit

    def commit(self, parts: Sequence[Part]) -> dict[int, list[Receipt]]:
        """All parts or none. Returns the receipts by `id(part)`; none for a part that is left in doubt.

        Raises TransactionInDoubt if the decision may or may not have reached the disk; after any other error the
        transaction is rolled back.
        """
        work = self.begin(parts)
        self._prepare(work)
        return self._decide(work, Decision(work.id, True, work.participants))

    # The same in two steps, for who has other resources to ask between them: begin and vote, then finish or abandon.

    def vote(self, work: Work) -> None:
        """Prepared everywhere, and decided nowhere: a crash now rolls it back, and so does closing the router. After an
        error it is rolled back."""
        self._prepare(work)

    def finish(self, work: Work) -> dict[int, list[Receipt]]:
        """Decide it and carry it out. Receipts and TransactionInDoubt as those of `commit`. After StoreFailedError
        because the decision log had failed before it is prepared still, and can only be abandoned."""
        self._require_log()
        if self._active.get(work.id) is not work:
            raise TransactionError("this transaction was rolled back when the router was closed; begin another")
        return self._decide(work, Decision(work.id, True, work.participants))

    def abandon(self, work: Work) -> None:
        """Roll it back, unless that is done. Never raises but for a signal."""
        if self._active.get(work.id) is work:
            self._roll_back(work)

    def hold(self, parts: Sequence[Part], xid: Xid) -> bytes:
        """The first phase of an external transaction: prepared until its outcome is said. Returns its id. Errors as
        those of `commit`."""
        work = self.begin(parts, xid)
        self._prepare(work)
        work.phase = "deciding"
        self._hand_over(work, lambda: self._log.hold(External(work.id, work.participants, xid)))
        self._end(work)
        return work.id

    def begin(self, parts: Sequence[Part], xid: Xid | None = None) -> Work:
        """Nothing is prepared yet. Raises StoreFailedError if the decision log has failed; all is rolled back then."""
        try:
            self._require_log()
            work = Work(self._log.new_transaction(), sorted(parts, key=lambda part: part.store.name), xid)
        except Exception as error:
            for part in parts:
                part.unclaim()
            if isinstance(error, OutcomeUnknownError):  # of the epoch's record; that of the transaction is known
                raise StoreFailedError(f"the transaction was rolled back: {error.__cause__ or error}") from error
            raise
        for part in parts:
            part.work = work
        self._active[work.id] = work
        return work

    def _end(self, work: Work) -> None:
        work.phase = "ended"
        self._active.pop(work.id, None)

    def _require_log(self) -> None:
        if self._closed:
            raise ClosedError("the router is closed; open it with anabranch.open(...)")
        self._stores.require_open()
        if self._log.failed is not None:
            raise StoreFailedError(
                f"transactions over several stores are stopped: the decision log has failed: {self._log.failed}; "
                "see to the disk and call reopen_decisions()"
            ) from self._log.failed
        if self._damage is not None:
            raise StoreFailedError(
                f"transactions over several stores are stopped: the decision log is damaged: {self._damage}. Restore "
                f"{self._path} from a backup, or move it aside and call reopen_decisions(): what is prepared then "
                "waits for your word (in_doubt, resolve)"
            ) from self._damage

    def _prepare(self, work: Work) -> None:
        """The first phase. If it fails anywhere all is rolled back."""
        try:
            for part in work.parts:
                part.room = self._with_store(part, lambda store, part: store.reserve(part.sends))
            participants, sync = work.participants, self._options.sync is Sync.ALWAYS
            steps: list[Pending[None]] = []
            for part in work.parts:
                if steps:
                    steps[-1].proceed()
                steps.append(
                    self._with_store(
                        part,
                        lambda store, part: store.prepare(
                            work.id, participants, part.sends, part.acks, sync, part.room
                        ),
                    )
                )
                part.room = None
            for step in reversed(steps):  # the last is led by this thread, the others by others meanwhile
                step.wait()
        except Exception as error:
            self._roll_back(work)
            if isinstance(error, OutcomeUnknownError):  # of one store; that of the transaction is known
                raise StoreFailedError(f"the transaction was rolled back: {error.__cause__ or error}") from error
            raise

    def _with_store(self, part: Part, call: Callable[[Store, Part], Any]) -> Any:
        """A store that is held by sends alone may have been closed for being idle; it is opened again."""
        while True:
            try:
                return call(part.store, part)
            except ClosedError:
                if part.acks:
                    raise
                part.store = self._stores.reopened(part)

    def _decide(self, work: Work, decision: Decision) -> dict[int, list[Receipt]]:
        work.phase = "deciding"
        self._hand_over(work, lambda: self._log.decide(decision))
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
            raise TransactionInDoubt(
                f"transaction {work.id.hex()} over {', '.join(map(repr, work.stores))} is in doubt: the decision log "
                f"failed while it wrote the decision: {error}. Its stores keep it prepared; see to the disk and call "
                "reopen_decisions(), which finds out",
                work.id.hex(),
                work.stores,
            ) from error
        except AnabranchError:
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
            except AnabranchError as error:
                left.append((part.store, error))
        if left:  # not before all have been told: once these have done it, the decision may be forgotten
            self._leave(decision, left)
        self._done_with(decision)
        return receipts

    def _outcome(self, store: Store, decision: Decision) -> Pending[Any]:
        try:
            return _tell(store, decision)
        except ClosedError:  # for being idle: what is prepared alone holds no store open that was about to close
            return _tell(self._stores.store_by_id(store.store_id), decision)

    def _leave(self, decision: Decision, left: Sequence[tuple[Store, AnabranchError]]) -> None:
        for store, error in left:
            log.warning(
                "transaction %s: %s is decided; store %r has yet to carry it out: %s", decision.transaction.hex(),
                _word(decision), store.name, error,
            )  # fmt: skip
        with self._lock:
            self._unfinished[decision.transaction] = {store.store_id for store, _ in left}
        self._retry_later()

    def _done_with(self, decision: Decision) -> None:
        """Forgotten soon, unless a store has yet to carry it out or it was given by hand."""
        with self._lock:
            if decision.transaction in self._unfinished or decision.by_hand:
                return
            self._finished[decision.transaction] = decision
            now = len(self._finished) == FORGET_MAX
            if now or not self._forget_due:
                shared().schedule(0 if now else FORGET_SECONDS, self._forget_in_background)
                self._forget_due = True  # not before: Ctrl-C between the two would leave it due for ever

    def _roll_back(self, work: Work) -> None:
        """Nothing is decided, so nothing needs to be written to undo it: a store that fails here rolls back when it is
        opened again. Never raises."""
        work.phase = "rolling back"
        failed = False
        steps = []
        decision = Decision(work.id, False, work.participants)
        for part in work.parts:
            part.room = None
            try:
                steps.append((part, self._outcome(part.store, decision)))
            except AnabranchError:
                failed = True
        for part, step in steps:
            try:
                if not step.wait():  # not prepared there, or an interrupted rollback had come so far
                    part.unclaim()
            except AnabranchError:
                failed = True
        self._end(work)
        if failed:
            self._retry_later()

    def take_over(self, parts: Sequence[Part]) -> None:
        """From a thread that was interrupted with these, perhaps before it began, perhaps after it was done: to the end
        that it could still reach. For a background thread, which no signal strikes."""
        if self._closed or not parts:
            return
        work = parts[0].work
        if work is None:
            for part in parts:
                self._free(part)
        elif work.phase in ("preparing", "rolling back"):
            self._roll_back(work)
        elif work.phase != "ended" and self._active.get(work.id) is work:
            try:
                self._take_over_decided(work)
            except AnabranchError as error:
                log.warning("transaction %s, which was interrupted, is in doubt: %s", work.id.hex(), error)
            self._end(work)

    def _free(self, part: Part) -> None:
        """Of a transaction that was never begun here; of one store alone, its commit may be in the store's queue."""
        try:
            part.store.rollback_prepared(bytes(TRANSACTION_BYTES)).wait()  # of none: all before it is written then
        except AnabranchError as error:
            log.debug("store %s: %s", part.store.name, error)
        part.unclaim()

    def _take_over_decided(self, work: Work) -> None:
        if work.xid is None:  # the decision may be in the log's queue, or on disk; once more changes nothing
            decision = Decision(work.id, True, work.participants)
            self._log.decide(decision)
            self._carry_out(decision, work.parts)
            return
        self._log.flush()
        # Not held once more: its manager may have said the outcome since.
        if work.id not in self._log.externals and work.id not in self._log.decisions:
            self._roll_back(work)

    # External transactions

    def external(self, xid: Xid) -> External | None:
        """A prepared one by its manager's name."""
        return next((known for known in list(self._log.externals.values()) if known.xid == xid), None)

    def externals(self) -> list[Xid]:
        """The prepared ones that wait for their outcome, oldest first. Raises StoreFailedError where the log cannot
        tell: a manager takes what is not listed for ended."""
        self._require_log()
        return [known.xid for _, known in sorted(self._log.externals.items())]

    def decided(self, xid: Xid) -> Decision | None:
        """The outcome of an external transaction that is not forgotten yet."""
        return next((known for known in list(self._log.decisions.values()) if known.xid == xid), None)

    def require_free(self, xid: Xid) -> None:
        """Raise TransactionError if a transaction of that name is prepared or decided."""
        external, decision = self.external(xid), self.decided(xid)  # in the order of its life: it is in one of them
        if decision is not None and decision.by_hand:
            raise TransactionError(f"xid {xid} had its outcome by hand, {_word(decision)}; forget it first")
        if decision is not None or external is not None:
            raise TransactionError(f"xid {xid} is in use; commit or roll back that transaction first")

    def end(self, xid: Xid, commit: bool) -> None:
        """What its manager says of a prepared transaction: durable on return, and carried out wherever a store can.
        Said again it changes nothing. Raises TransactionError for one that is not prepared here or had the other
        outcome, by hand say, and TransactionInDoubt as `commit` does."""
        external, decision = self.external(xid), self.decided(xid)
        if external is not None:
            self._finish(external, commit, by_hand=False)
        elif decision is None:
            known = self.externals()
            raise TransactionError(
                f"no transaction {xid} is prepared here; recover() lists those that are: "
                f"{', '.join(map(str, known[:10])) or 'none'}"
            )
        elif decision.commit != commit:
            raise _said_before(decision)

    def _finish(self, external: External, commit: bool, by_hand: bool) -> None:
        """A rollback is recorded as a commit is: carried out in one store, it must not become a commit in another."""
        self._say(Decision(external.transaction, commit, external.participants, external.xid, by_hand))

    def _say(self, decision: Decision) -> None:
        self._require_log()
        try:
            self._say_and_tell(decision)
        except KeyboardInterrupt:
            shared().schedule(0, partial(self._tell_if_said, decision))
            raise

    def _tell_if_said(self, decision: Decision) -> None:
        """From a thread that was interrupted. If it had not come to say it, that waits to be said again."""
        try:
            self._log.flush()
            if not self._closed and decision.transaction in self._log.decisions:
                with self._lock:
                    self._unfinished[decision.transaction] = set(decision.participants)
                self._retry_unfinished()
        except AnabranchError as error:
            log.warning("transaction %s waits: %s", decision.transaction.hex(), error)

    def _say_and_tell(self, decision: Decision) -> None:
        try:
            stands = self._log.decide(decision)
        except OutcomeUnknownError as error:
            names = [self._stores.name_of(store_id) for store_id in decision.participants]
            raise TransactionInDoubt(
                f"transaction {decision.transaction.hex()}: the decision log failed while it wrote the outcome: "
                f"{error}; see to the disk, call reopen_decisions() and look at recover()",
                decision.transaction.hex(),
                names,
            ) from error
        if stands.commit != decision.commit:  # by another thread, just now; that tells the stores
            raise _said_before(stands)
        with self._lock:
            self._unfinished[decision.transaction] = set(decision.participants)
        self._retry_unfinished()

    # What is in doubt

    def verdict(self, prepared: Prepared) -> Decision | str:
        """The decision about a transaction that is prepared in a store, or why there is none to be had (rule T3)."""
        transaction = prepared.transaction
        if transaction in self._active:  # before its decision: who commits it tells the stores, and gets the receipts
            return "it is being committed"
        decision = self._log.decisions.get(transaction)
        if decision is not None:
            return decision
        coordinator, epoch = transaction[:16], int.from_bytes(transaction[16:24], "big")
        if transaction in self._log.externals:
            return "its transaction manager has not said the outcome: commit(xid) or rollback(xid)"
        if self._damage is not None or self._log.failed is not None:
            return "the decision log cannot be read; see to it and call reopen_decisions()"
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
            expected = {t for t, left in self._unfinished.items() if store.store_id in left}
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
                _tell(store, said).wait()
                log.info("store %s: transaction %s: %s", store.name, transaction.hex(), _word(said))
            except AnabranchError as error:
                log.warning("store %s: transaction %s waits: %s", store.name, transaction.hex(), error)
                waiting.add(transaction)
        self._carried_out(store.store_id, expected - waiting)
        if waiting:
            self._retry_later()

    def _carried_out(self, store_id: bytes, transactions: Iterable[bytes]) -> None:
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
                self._done_with(decision)

    def _retry_later(self) -> None:
        with self._lock:
            if self._retry_due or self._closed:
                return
            seconds = self._retry_seconds
            shared().schedule(seconds, self._retry)
            self._retry_due = True  # not before, as in _done_with
            self._retry_seconds = min(2 * seconds, RETRY_SECONDS_MAX)

    def _retry(self) -> None:
        """In the background: everything that waits is tried again."""
        with self._lock:
            self._retry_due = False
        if self._closed:
            return
        self._retry_unfinished()
        self._settle_open()
        if not self._retry_due:
            self._retry_seconds = RETRY_SECONDS

    def _settle_open(self) -> None:
        """A store that fails holds up no other (invariant 7)."""
        for store in self._stores.open_stores():
            try:
                self._find_commits(store)
                self.settle(store)
            except AnabranchError as error:
                log.debug("store %s: what is prepared in it waits: %s", store.name, error)
                self._retry_later()

    def _retry_unfinished(self) -> None:
        """Tell the stores that have yet to carry out a decision."""
        with self._lock:
            store_ids = set().union(*self._unfinished.values())
        for store_id in sorted(store_ids):
            try:
                self.settle(self._stores.store_by_id(store_id))
            except PlacementError:  # only by hand can a transaction be decided that names a store not recorded here
                self._carried_out(store_id, list(self._unfinished))
            except (AnabranchError, OSError) as error:
                log.debug("store %s cannot carry out what is decided: %s", self._stores.name_of(store_id), error)
                self._retry_later()

    def _find_commits(self, store: Store) -> None:
        """Any participant's commit record wins, where the decision log cannot say (rule T3)."""
        for prepared in store.recover_prepared():
            ours = prepared.transaction in self._active or prepared.transaction in self._log.externals
            if not ours and isinstance(self.verdict(prepared), str):
                other = self._committed_elsewhere(prepared, store)
                if other is not None:
                    log.warning(
                        "transaction %s: store %r has committed it, so store %r does", prepared.transaction.hex(),
                        other, store.name,
                    )  # fmt: skip
                    store.commit_prepared(prepared.transaction).wait()

    def _committed_elsewhere(self, prepared: Prepared, store: Store) -> str | None:
        """The name of another participant that has committed it, among those that can be asked."""
        for store_id in prepared.participants:
            if store_id != store.store_id:
                try:
                    if prepared.transaction in self._stores.store_by_id(store_id).committed():
                        return self._stores.name_of(store_id)
                except (AnabranchError, OSError) as error:
                    log.debug("store %s cannot be asked: %s", self._stores.name_of(store_id), error)
        return None

    def in_doubt(self, stores: Iterable[Store]) -> list[InDoubt]:
        """What waits in these stores, and what is decided and not carried out everywhere."""
        where: dict[bytes, list[str]] = {}
        reasons: dict[bytes, str] = {}
        for store, prepared in _prepared_in(stores):
            if prepared.transaction not in self._active:
                said = self.verdict(prepared)
                where.setdefault(prepared.transaction, []).append(store.name)
                reasons[prepared.transaction] = said if isinstance(said, str) else "its store carries it out soon"
        with self._lock:
            unfinished = {transaction: set(ids) for transaction, ids in self._unfinished.items()}
        for transaction, store_ids in unfinished.items():
            names = {self._stores.name_of(store_id) for store_id in store_ids}
            where[transaction] = sorted(names | set(where.get(transaction, [])))
            reasons[transaction] = "decided; these stores cannot carry it out now, and are told again until they can"
        return [self._described(transaction, where[transaction], reasons[transaction]) for transaction in sorted(where)]

    def _described(self, transaction: bytes, stores: Sequence[str], reason: str) -> InDoubt:
        said = self._log.decisions.get(transaction)
        known = said or self._log.externals.get(transaction)
        outcome = _word(said) if said is not None else None
        return InDoubt(transaction.hex(), known.xid if known is not None else None, outcome, tuple(stores), reason)

    def resolve(self, transaction: bytes, commit: bool, stores: Iterable[Store]) -> None:
        """The outcome by hand, recorded. Raises TransactionError for a transaction that does not wait for one."""
        self._require_log()
        said = self._log.decisions.get(transaction)
        if said is not None:
            raise TransactionError(
                f"transaction {transaction.hex()} is decided already: {_word(said)}; its stores carry it out as soon "
                "as they can"
            )
        external = self._log.externals.get(transaction)
        if external is not None:
            self._finish(external, commit, by_hand=True)
            return
        for store, prepared in _prepared_in(stores):
            if prepared.transaction == transaction and transaction not in self._active:
                other = None if commit else self._committed_elsewhere(prepared, store)
                if other is not None:
                    raise TransactionError(
                        f"transaction {transaction.hex()} cannot be rolled back: store {other!r} has committed it, and "
                        "the others follow by themselves"
                    )
                self._log.new_transaction()  # there may be no log yet, or none that was used
                self._say(Decision(transaction, commit, list(prepared.participants), None, True))
                return
        raise TransactionError(f"no transaction {transaction.hex()} is in doubt; in_doubt() lists those that are")

    def heuristics(self) -> list[Heuristic]:
        """The outcomes given by hand that nobody has forgotten yet."""
        return [Heuristic(d.transaction.hex(), d.xid, _word(d)) for d in self._by_hand()]

    def _by_hand(self) -> list[Decision]:
        return [decision for _, decision in sorted(self._log.decisions.items()) if decision.by_hand]

    def forget_by_hand(self, transaction: bytes) -> None:
        """Raises TransactionError unless its outcome was given by hand and is carried out."""
        self._require_log()
        if transaction not in {decision.transaction for decision in self._by_hand()}:
            raise TransactionError(f"no outcome of transaction {transaction.hex()} was given by hand")
        with self._lock:
            if transaction in self._unfinished:
                raise TransactionError(
                    f"transaction {transaction.hex()} cannot be forgotten yet: a store has yet to carry it out"
                )
        if not self._made_durable([self._log.decisions[transaction]]):
            raise TransactionError(
                f"transaction {transaction.hex()} cannot be forgotten yet: a store of it has failed; reopen that first"
            )
        self._log.forget([transaction])

    @property
    def prepared(self) -> int:
        """External transactions that wait for their outcome."""
        return len(self._log.externals)

    # Forgetting

    def _forget_in_background(self) -> None:
        with self._lock:
            self._forget_due = False
        if self._closed:
            return
        try:
            self.forget_finished()
        except AnabranchError as error:
            log.debug("decisions are kept: %s", error)
        with self._lock:
            if self._finished and not self._forget_due:
                shared().schedule(FORGET_SECONDS, self._forget_in_background)
                self._forget_due = True

    def forget_finished(self) -> None:
        """What is carried out everywhere is made durable there, then forgotten (rule T5). Where a store cannot, its
        decisions stay, and those of the others go."""
        with self._forgetting:
            with self._lock:
                decisions = list(self._finished.values())
            durable = self._made_durable(decisions)
            if durable:
                self._log.forget([decision.transaction for decision in durable])
            with self._lock:
                for decision in durable:
                    self._finished.pop(decision.transaction, None)

    def _made_durable(self, decisions: Sequence[Decision]) -> list[Decision]:
        """Those that are durable in all their stores now. One given by hand may name a store that is gone for good."""
        by_store: dict[bytes, list[Decision]] = {}
        for decision in decisions:
            for store_id in decision.participants:
                by_store.setdefault(store_id, []).append(decision)
        stores: dict[bytes, Store] = {}
        missing: set[bytes] = set()
        for store_id, told in by_store.items():
            try:
                store = self._stores.store_by_id(store_id)
                _sync_outcomes(store, told)
                stores[store_id] = store
            except PlacementError:
                missing.add(store_id)
            except (AnabranchError, OSError) as error:
                log.debug("decisions of store %s are kept: %s", self._stores.name_of(store_id), error)
        durable = [
            decision
            for decision in decisions
            if all(id_ in stores or (decision.by_hand and id_ in missing) for id_ in decision.participants)
        ]
        forgotten = {decision.transaction for decision in durable}
        for store_id, store in stores.items():
            try:
                store.forget([told.transaction for told in by_store[store_id] if told.transaction in forgotten])
            except AnabranchError as error:  # it only remembers more than it needs to
                log.debug("store %s: %s", store.name, error)
        return durable


def _sync_outcomes(store: Store, decisions: Sequence[Decision]) -> None:
    """Make them durable in a store that has carried them out."""
    store.sync()
    prepared = {prepared.transaction for prepared in store.recover_prepared()}
    again = [decision for decision in decisions if decision.transaction in prepared]
    for decision in again:  # a store that failed since has it prepared again; without its decision it rolls back
        _tell(store, decision).wait()
    if again:
        store.sync()


def _prepared_in(stores: Iterable[Store]) -> Iterator[tuple[Store, Prepared]]:
    """What is prepared in those that can say it."""
    for store in stores:
        try:
            found = store.recover_prepared()
        except AnabranchError as error:
            log.debug("store %s cannot say what is prepared in it: %s", store.name, error)
            continue
        for prepared in found:
            yield store, prepared


def _tell(store: Store, decision: Decision) -> Pending[Any]:
    step = store.commit_prepared if decision.commit else store.rollback_prepared
    return step(decision.transaction)


def _said_before(decision: Decision) -> TransactionError:
    what = f"transaction {decision.xid if decision.xid is not None else decision.transaction.hex()}"
    how = "by hand; forget it once you have put that right" if decision.by_hand else "before"
    return TransactionError(f"the outcome of {what} is {_word(decision)}: that was said {how}")


def _word(decision: Decision) -> str:
    return COMMIT if decision.commit else ROLLBACK
