"""Forgetting decisions: once they are durable in all their stores (rule T5)."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from ..adapters.background import shared
from ..adapters.base import Pending, Store
from ..policies.errors import AnabranchError, PlacementError
from .decision_log import Decision, DecisionLog
from .store_registry import StoreRegistry

log = logging.getLogger(__name__)

FORGET_SECONDS: Final = 1.0
"""After so long decisions that were carried out are made durable in their stores and forgotten."""
FORGET_MAX: Final = 1000
"""So many are forgotten at once, without waiting."""


class Forgetting:
    """Threads: all. `_lock` guards `_finished` and `_due`; `busy` is held while decisions are being forgotten."""

    def __init__(self, the_log: DecisionLog, places: StoreRegistry) -> None:
        self._log, self._places = the_log, places
        self._lock = threading.RLock()  # a signal handler may come back to it in the same thread
        self.busy = threading.Lock()
        self.clear()

    def clear(self) -> None:
        """Nothing is to be forgotten; nothing happens in the background until `closed` is unset."""
        self.closed = True
        self._due = False
        self._finished: dict[bytes, Decision] = {}
        """Carried out everywhere."""

    def add(self, decision: Decision) -> None:
        """It is carried out everywhere: forgotten soon."""
        with self._lock:
            self._finished[decision.transaction] = decision
            now = len(self._finished) == FORGET_MAX
            if now or not self._due:
                shared().schedule_while_alive(0 if now else FORGET_SECONDS, self._run_in_background)
                self._due = True  # not before: Ctrl-C between the two would leave it due for ever

    def drop_all(self) -> None:
        """The log is read again: what is decided and what is not is to be found out anew."""
        with self._lock:
            self._finished.clear()

    def _run_in_background(self) -> None:
        with self._lock:
            self._due = False
        if self.closed:
            return
        try:
            self.run()
        except AnabranchError as error:
            log.debug("decisions are kept: %s", error)
        with self._lock:
            if self._finished and not self._due:
                shared().schedule_while_alive(FORGET_SECONDS, self._run_in_background)
                self._due = True

    def run(self) -> None:
        """What is carried out everywhere is made durable there, then forgotten (rule T5). Where a store cannot, its
        decisions stay, and those of the others go."""
        with self.busy:
            with self._lock:
                decisions = list(self._finished.values())
            durable = self.made_durable(decisions)
            if durable:
                self._log.forget([decision.transaction for decision in durable])
            with self._lock:
                for decision in durable:
                    self._finished.pop(decision.transaction, None)

    def made_durable(self, decisions: Sequence[Decision]) -> list[Decision]:
        """Those that are durable in all their stores now. One given by hand may name a store that is gone for good."""
        by_store: dict[bytes, list[Decision]] = {}
        for decision in decisions:
            for store_id in decision.participants:
                by_store.setdefault(store_id, []).append(decision)
        stores: set[bytes] = set()
        missing: set[bytes] = set()
        for store_id, told in by_store.items():
            try:
                self._places.with_id(store_id, partial(_sync_outcomes, decisions=told))
                stores.add(store_id)
            except PlacementError:
                missing.add(store_id)
            except (AnabranchError, OSError) as error:
                log.debug("decisions of store %s are kept: %s", self._places.name_of(store_id), error)
        durable = [
            decision
            for decision in decisions
            if all(id_ in stores or (decision.by_hand and id_ in missing) for id_ in decision.participants)
        ]
        forgotten = {decision.transaction for decision in durable}
        for store_id, told in by_store.items():
            if store_id not in stores:
                continue
            known = [decision.transaction for decision in told if decision.transaction in forgotten]
            try:
                self._places.with_id(store_id, partial(_forget, transactions=known))
            except (AnabranchError, OSError) as error:  # it only remembers more than it needs to
                log.debug("store %s: %s", self._places.name_of(store_id), error)
        return durable


def _forget(store: Store, transactions: Sequence[bytes]) -> None:
    store.forget(transactions)


def _sync_outcomes(store: Store, decisions: Sequence[Decision]) -> None:
    """Make them durable in a store that has carried them out."""
    prepared = {prepared.transaction for prepared in store.recover_prepared()}
    for decision in decisions:
        if decision.transaction in prepared:  # it failed since, and without its decision would roll back
            tell(store, decision).wait()
    store.sync()  # last: another thread may be telling it just now


def tell(store: Store, decision: Decision) -> Pending[Any]:
    """The step that carries a decision out in a store."""
    step = store.commit_prepared if decision.commit else store.rollback_prepared
    return step(decision.transaction)
