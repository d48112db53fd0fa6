"""Decisions are forgotten in time: once they are durable in all their stores (rule T5)."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final, TypeVar

from ...adapters.core import Store
from ...adapters.system.background import CoalescedJob, shared
from ...adapters.system.conditions import unless_busy
from ...policies.errors import AnabranchError, PlacementError
from ..placement.registry import StoreRegistry
from .decision_log import DecisionLog
from .global_transaction import GlobalTransaction
from .states import DONE
from .table import TransactionTable

log: logging.Logger = logging.getLogger(__name__)

T = TypeVar("T")

FORGET_SECONDS: Final = 1.0
"""Seconds after which decisions that were carried out are made durable in their stores and forgotten."""
FORGET_MAX: Final = 1000
"""The number of decisions that are forgotten at once, without waiting."""
SYNC_SECONDS: Final = 1.0
"""A store that takes longer to make outcomes durable, since its disk hangs, say, holds up no other store's decisions,
and no close: its own are forgotten later."""


class DecisionCleanup:
    """Forgets decisions. Threads: all. `_lock` guards `_count` and what is durable; `busy` is held while decisions are
    being forgotten."""

    def __init__(self, decisions: DecisionLog, registry: StoreRegistry, table: TransactionTable) -> None:
        self._log, self._registry, self._table = decisions, registry, table
        self._lock = threading.RLock()  # a signal handler may come back to it in the same thread
        self.busy: Final = threading.Lock()
        self._syncing: set[bytes] = set()
        """The ids of the stores that background threads wait for."""
        self.clear()

    def clear(self) -> None:
        """Begin anew: the router is opened."""
        self._job = CoalescedJob(self._run_in_background)
        self._count = 0
        """The number of transactions that are done since the last round."""

    def add(self) -> None:
        """Note one more transaction that is done: its decision is forgotten soon."""
        with self._lock:
            self._count += 1
            if self._count == FORGET_MAX:
                shared().schedule_while_alive(0, self._run_in_background)
        self._job.schedule(FORGET_SECONDS)

    def _run_in_background(self) -> None:
        if self._table.closed:
            return
        try:
            self.run()
        except AnabranchError as error:
            log.debug("decisions are kept: %s", error)
        if self._job.last.begun and self._done():
            self._job.schedule(FORGET_SECONDS)

    def _done(self) -> list[GlobalTransaction]:
        return [done for done in self._table.all() if done.state is DONE and not done.by_hand]

    def run(self) -> None:
        """Make durable what is carried out everywhere, then forget it (rule T5). Where a store cannot, its decisions
        stay, and those of the others go."""
        with self.busy:
            with self._lock:
                self._count = 0
            self.forget(self.made_durable(self._done(), SYNC_SECONDS))

    def forget_of(self, store_id: bytes) -> None:
        """Forget decisions that name a store which is about to be removed. Waits for no disk for long, and not for ever
        for another thread that is forgetting."""
        if self._names(store_id):
            unless_busy(self.busy, lambda: self.forget(self.made_durable(self._done(), SYNC_SECONDS)), SYNC_SECONDS)

    def has_forgotten(self, store_id: bytes) -> bool:
        """Return whether no decision names a store, nor will one after a crash. No router would open that misses such a
        store (rule T3). Raises StoreFailedError."""
        if self._names(store_id):
            return False
        self._log.sync()
        return True

    def _names(self, store_id: bytes) -> bool:
        return any(store_id in transaction.participants for transaction in self._table.all())

    def forget(self, transactions: Sequence[GlobalTransaction]) -> None:
        """Drop the decisions of these transactions."""
        if transactions:
            self._log.forget([transaction.id for transaction in transactions])
        kept: dict[bytes, list[bytes]] = {}
        for transaction in transactions:
            self._table.remove(transaction)
            if self._registry.open_store(transaction.primary) is not None:  # else it remembers one more
                kept.setdefault(transaction.primary, []).append(transaction.id)
        _for_each(kept, self.forget_in, SYNC_SECONDS)

    def made_durable(
        self, transactions: Sequence[GlobalTransaction], timeout: float | None = None
    ) -> list[GlobalTransaction]:
        """Return the transactions that are durable in all their stores now. A store that takes longer than the
        `timeout`, in seconds, counts the next time. None waits for all, in this thread."""
        by_store: dict[bytes, list[GlobalTransaction]] = {}
        for transaction in transactions:
            for store_id in transaction.remembering:
                if store_id not in transaction.durable_in:
                    by_store.setdefault(store_id, []).append(transaction)
        sync = self._make_durable if timeout is None else self._sync_unless_busy
        _for_each(by_store, sync, timeout)
        durable = [t for t in transactions if t.durable_in.issuperset(t.remembering)]
        ids_in: dict[bytes, list[bytes]] = {}
        for transaction in durable:
            for store_id in transaction.remembering:
                ids_in.setdefault(store_id, []).append(transaction.id)
        _for_each(ids_in, self.forget_in, timeout)
        return durable

    def _sync_unless_busy(self, store_id: bytes, transactions: Sequence[GlobalTransaction]) -> None:
        """Make outcomes durable in a store, on a background thread. Does nothing if another thread waits for that store
        already."""
        with self._lock:
            if store_id in self._syncing:
                return
            self._syncing.add(store_id)
        try:
            self._make_durable(store_id, transactions)
        finally:
            self._syncing.discard(store_id)

    def _make_durable(self, store_id: bytes, transactions: Sequence[GlobalTransaction]) -> None:
        """Make outcomes durable in a store. A decision by hand may name a store that is gone for good: it is as durable
        there as can be."""
        error = self._ask(store_id, partial(_sync_outcomes, transactions=transactions))
        if error is not None:
            transactions = [t for t in transactions if t.by_hand and isinstance(error, PlacementError)]
        with self._lock:
            for transaction in transactions:
                transaction.durable_in |= {store_id}

    def forget_in(self, store_id: bytes, ids: list[bytes]) -> None:
        """Let a store forget that it has committed these."""
        self._ask(store_id, lambda store: store.forget(ids))  # one that fails only remembers more than it needs to

    def _ask(self, store_id: bytes, call: Callable[[Store], None]) -> Exception | None:
        """Call with a store; returns the error of one that cannot do it, whose decisions are kept."""
        try:
            self._registry.with_id(store_id, call)
        except (AnabranchError, OSError) as error:
            log.debug("decisions of store %s are kept: %s", self._registry.name_of(store_id), error)
            return error
        return None


def _for_each(by_store: Mapping[bytes, T], call: Callable[[bytes, T], None], timeout: float | None) -> None:
    """Call for each store. Raises what a call has raised within the `timeout`."""
    for _, _, error in shared().for_each(by_store, lambda store_id: call(store_id, by_store[store_id]), timeout):
        if error is not None:
            raise error


def _sync_outcomes(store: Store, transactions: Sequence[GlobalTransaction]) -> None:
    """Make outcomes durable in a store that has carried them out."""
    prepared = {branch.transaction for branch in store.recover_prepared()}
    for transaction in transactions:
        if transaction.id in prepared:  # it failed since, and without its decision would roll back
            transaction.begin_in(store).wait()
    store.sync()  # last: another thread may be telling it just now
