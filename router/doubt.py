"""What is in doubt, and the outcomes that somebody gives by hand."""

from __future__ import annotations

import logging
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass

from ..adapters.base import Prepared, Store
from ..policies.errors import AnabranchError, TransactionError
from .decision_log import Decision, DecisionLog, word
from .external import Externals
from .forgetting import Forgetting
from .settling import Settling
from .store_registry import StoreRegistry
from .xid import Xid

log = logging.getLogger(__name__)


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
    sends: int
    """How many it holds where it is prepared, in the stores that can be opened."""
    acks: int
    """Likewise."""


@dataclass(frozen=True, slots=True)
class Heuristic:
    """An outcome that somebody gave by hand."""

    transaction: str
    xid: Xid | None
    outcome: str


class Doubt:
    """Threads: all. Keeps nothing itself."""

    def __init__(
        self,
        the_log: DecisionLog,
        places: StoreRegistry,
        active: Container[bytes],
        settling: Settling,
        forgetting: Forgetting,
        externals: Externals,
    ) -> None:
        self._log, self._places, self._active = the_log, places, active
        self._settling, self._forgetting, self._externals = settling, forgetting, externals

    def in_doubt(self, stores: Iterable[Store]) -> list[InDoubt]:
        """What waits in these stores, and what is decided and not carried out everywhere."""
        where: dict[bytes, list[str]] = {}
        reasons: dict[bytes, str] = {}
        holds: dict[bytes, tuple[int, int]] = {}
        for store, prepared in prepared_in(stores):
            if prepared.transaction not in self._active:
                said = self._settling.verdict(prepared)
                where.setdefault(prepared.transaction, []).append(store.name)
                sends, acks = holds.get(prepared.transaction, (0, 0))
                holds[prepared.transaction] = (sends + prepared.sends, acks + prepared.acks)
                reasons[prepared.transaction] = said if isinstance(said, str) else "its store carries it out soon"
        for transaction, store_ids in self._settling.unfinished().items():
            names = {self._places.name_of(store_id) for store_id in store_ids}
            where[transaction] = sorted(names | set(where.get(transaction, [])))
            reasons[transaction] = "decided; these stores cannot carry it out now, and are told again until they can"
        return [
            self._described(transaction, where[transaction], reasons[transaction], *holds.get(transaction, (0, 0)))
            for transaction in sorted(where)
        ]

    def _described(self, transaction: bytes, stores: Sequence[str], reason: str, sends: int, acks: int) -> InDoubt:
        said = self._log.decisions.get(transaction)
        known = said or self._log.externals.get(transaction)
        outcome = word(said) if said is not None else None
        xid = known.xid if known is not None else None
        return InDoubt(transaction.hex(), xid, outcome, tuple(stores), reason, sends, acks)

    def resolve(self, transaction: bytes, commit: bool, stores: Iterable[Store]) -> None:
        """The outcome by hand, recorded. Raises TransactionError for a transaction that does not wait for one."""
        self._log.require_usable()
        said = self._log.decisions.get(transaction)
        if said is not None:
            raise TransactionError(
                f"transaction {transaction.hex()} is decided already: {word(said)}; its stores carry it out as soon "
                "as they can"
            )
        external = self._log.externals.get(transaction)
        if external is not None:
            self._externals.say(Decision(transaction, commit, external.participants, external.xid, by_hand=True))
            return
        for store, prepared in prepared_in(stores):
            if prepared.transaction == transaction and transaction not in self._active:
                if commit and not isinstance(self._settling.verdict(prepared), str):
                    raise TransactionError(
                        f"transaction {transaction.hex()} cannot be committed: it was never decided, and its stores "
                        "roll it back as soon as they can; some may have done so"
                    )
                other = None if commit else self._settling.committed_elsewhere(prepared, store)
                if other is not None:
                    raise TransactionError(
                        f"transaction {transaction.hex()} cannot be rolled back: store {other!r} has committed it, and "
                        "the others follow by themselves"
                    )
                self._log.new_transaction()  # there may be no log yet, or none that was used
                self._externals.say(Decision(transaction, commit, list(prepared.participants), by_hand=True))
                return
        raise TransactionError(f"no transaction {transaction.hex()} is in doubt; in_doubt() lists those that are")

    def heuristics(self) -> list[Heuristic]:
        """The outcomes given by hand that nobody has forgotten yet."""
        return [Heuristic(d.transaction.hex(), d.xid, word(d)) for d in self._by_hand()]

    def _by_hand(self) -> list[Decision]:
        return [decision for _, decision in sorted(self._log.decisions.items()) if decision.by_hand]

    def forget(self, transaction: bytes) -> None:
        """Raises TransactionError unless its outcome was given by hand and is carried out."""
        self._log.require_usable()
        if transaction not in {decision.transaction for decision in self._by_hand()}:
            raise TransactionError(f"no outcome of transaction {transaction.hex()} was given by hand")
        if transaction in self._settling.unfinished():
            raise TransactionError(
                f"transaction {transaction.hex()} cannot be forgotten yet: a store has yet to carry it out"
            )
        if not self._forgetting.made_durable([self._log.decisions[transaction]]):
            raise TransactionError(
                f"transaction {transaction.hex()} cannot be forgotten yet: a store of it has failed; reopen that first"
            )
        self._log.forget([transaction])


def prepared_in(stores: Iterable[Store]) -> Iterator[tuple[Store, Prepared]]:
    """What is prepared in those that can say it."""
    for store in stores:
        try:
            found = store.recover_prepared()
        except AnabranchError as error:
            log.debug("store %s cannot say what is prepared in it: %s", store.name, error)
            continue
        for prepared in found:
            yield store, prepared
