"""Whole transactions of clients, which the owner carries out at once.

Each is remembered by the name of its request: if that comes again, to this owner or to the next, what it asks for is
carried out, or answered as it was before.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from ....adapters.core import Store
from ....adapters.core.messages import Outgoing
from ....adapters.core.state.leases import UNKNOWN, unknown_lease
from ....adapters.core.store_types import Settlement
from ....policies.errors import (
    AnabranchError,
    ClosedError,
    OutcomeUnknownError,
    TransactionError,
    UnknownMessageError,
)
from ....policies.names.destination import Destination
from ...placement.registry import StoreRegistry
from ...transactions.xid import Xid, as_xid
from ..protocol import Commit, OutgoingFields, destination_of
from .session import Session

Sends = Sequence[tuple[str, OutgoingFields]]


class _Names:
    """The names of transactions that are being carried out. Threads: all."""

    def __init__(self) -> None:
        self._taken: set[str] = set()
        self._given_back = threading.Condition()

    @contextmanager
    def taken(self, session: Session, number: int) -> Iterator[str]:
        """Take the name that a client's transaction has by the number of its request, once nobody has it: what came
        over a connection that was lost may be under way. Raises ClosedError where this one was: it comes again, over
        another, or nobody waits for it."""
        name = f"{session.client}.{number:x}"
        with self._given_back:
            self._given_back.wait_for(lambda: name not in self._taken)
            self._taken.add(name)
        try:
            if session.is_closed:
                raise ClosedError("the connection of this client was lost")
            yield name
        finally:
            with self._given_back:
                self._taken.discard(name)
                self._given_back.notify_all()


_names: Final = _Names()


def commit(session: Session, number: int, request: Commit) -> list[Any]:
    """Commit a whole transaction, or prepare it (`prepare`, `vote`); returns the receipts' seqs, and whether each is a
    duplicate; of a vote the number of its request."""
    router, xid = session.router, None if request.xid is None else as_xid(request.xid)
    with _names.taken(session, number) as name:
        before: list[Any] | None = None
        if request.again and request.mode == "commit":
            others = (*map(destination_of, request.acked), *(change.subscription.topic for change in request.changes))
            before = _before(session.registry, name, request.sends, others, bool(request.rejected))
        elif request.again and request.mode == "prepare" and xid is not None and router._outcomes.holds(xid):
            before = []
        if before is not None:
            session.let_go(request.acks)
            return before
        transaction = router._unlimited(xid)  # the client has counted, and each rejection as one
        if request.mode != "prepare":  # which its xid names
            transaction._global.mark = name
        try:
            for text, fields in request.sends:
                transaction._carry(destination_of(text), session.outgoing_of(fields))
            for token in request.acks:
                message = _store_of(session, token, request.again).leased(session.now(token) or "")
                if token in request.rejected:
                    transaction.reject(message, reason_of(*request.rejected[token]))
                else:
                    transaction.ack(message)
            for change in request.changes:
                transaction._change(change)
            if request.mode == "vote":
                transaction.vote()
                session.keep_vote(number, transaction)
                return [number]
            if request.mode == "prepare":
                transaction.prepare()
            receipts = transaction.commit() if request.mode == "commit" else []
        except BaseException:
            if transaction.state in ("open", "voted"):
                transaction.rollback()
            raise
        session.let_go(request.acks)
        return [one[1:] for one in receipts]


def end_vote(
    session: Session, number: int, commit: bool, acks: list[str], others: list[str], sends: Sends, rejects: bool
) -> list[Any]:
    """Carry out the outcome of a transaction that has voted, by the number of that request. `sends` are without their
    bodies, `others` the other destinations that it changes. `rejects`: some of its acks are rejections."""
    with _names.taken(session, number) as name:
        transaction = session.voted.pop(number, None)
        if transaction is None:
            before = _before(session.registry, name, sends, map(destination_of, others), rejects)
            if before is None:  # the client holds them again, since it told the next owner so
                left = [token for token in map(session.now, acks) if token is not None]
                session.router.settle(left, Settlement.RELEASE)
            session.let_go(acks)
            if commit and before is None:
                raise TransactionError(
                    "this transaction was rolled back with the connection that it had voted over, or with the process "
                    "that owned the directory; begin another"
                )
            return before or []
        session.let_go(acks)
        if not commit:
            transaction.rollback()
            return []
        return [one[1:] for one in transaction.commit()]


def end_xid(session: Session, commit: bool, xid: Xid, is_own: bool, again: bool) -> None:
    """End a transaction that is prepared under its xid, as its manager says. `is_own`: the client that asks has
    prepared it. `again`: it has asked before, and nothing may be left of it; that is a success, but not of a commit
    where it is not its own: another may have rolled that back, which nobody does to what a living client has prepared.
    Raises as Router.commit, and OutcomeUnknownError."""
    router = session.router
    if not again or router._outcomes.knows(xid):
        (router.commit if commit else router.rollback)(xid)
    elif commit and not is_own:
        raise OutcomeUnknownError(
            f"the connection to the owner of {session.registry.config.directory} was lost before it had answered to "
            f"the commit of transaction {xid}, which is prepared no more: it is committed, unless another process has "
            "rolled it back; look whether it took effect"
        )


def store_of_lease(registry: StoreRegistry, token: str) -> Store:
    """Return the store that leased a message, whose UUID a token begins with. Raises UnknownMessageError."""
    try:
        store = registry.open_store(bytes.fromhex(token[:32]))
    except ValueError:
        store = None
    if store is None:
        raise unknown_lease(token)
    return store


def reason_of(kind: str | None, text: str) -> str | BaseException:
    """Return the reason of a release or a rejection as the owner's router takes it: text, or an exception of that
    type's name."""
    if kind is None:
        return text
    module, _, name = kind.rpartition(".")
    kept: type[Exception] = type(name, (Exception,), {"__module__": module or "builtins", "__qualname__": name})
    return kept(text)


def _store_of(session: Session, token: str, again: bool) -> Store:
    """Return the store of a message that a transaction acks. Raises UnknownMessageError if it is not leased any more,
    OutcomeUnknownError where it may have been acked by this transaction before, which the store does not remember."""
    if session.now(token) is None:
        if again and not store_of_lease(session.registry, token).settings.duplicate_window:
            raise OutcomeUnknownError(
                "the process that owned the directory was lost before it had answered to a commit, and a message that "
                "it acks is gone; it may have taken effect: its store remembers none, having no duplicate_window"
            )
        raise UnknownMessageError(f"a message that this transaction acks is not leased any more: {UNKNOWN}")
    return store_of_lease(session.registry, session.now(token) or "")


def _before(
    registry: StoreRegistry, name: str, given: Sends, others: Iterable[Destination], rejects: bool
) -> list[Any] | None:
    """Return the receipts of a transaction that was committed before; None if it was not. Their seqs are 0 where one of
    them cannot be told: so it is if it `rejects` messages, for its dead letters may be among its sends."""
    sends = [(destination_of(text), Outgoing(b"", None, *fields[2:])) for text, fields in given]
    sent = dict.fromkeys(destination for destination, _ in sends)
    if not any(_is_marked(registry, name, destination) for destination in (*sent, *others)):
        return None
    stores = {destination: registry.for_held(destination, lambda store: store, None) for destination in sent}
    receipts: dict[Destination, list[Any]] = {}
    try:
        for store in dict.fromkeys(stores.values()):
            its = [one for one in sends if stores[one[0]] is store]
            for receipt in (None if store is None else store.marked(name, its)) or ():
                receipts.setdefault(receipt.destination, []).append(receipt[1:])
        found = [receipts[destination].pop(0) for destination, _ in sends]
    except (AnabranchError, KeyError):
        found = []
    return found if found and not rejects and all(seq for seq, _ in found) else [(0, False)] * len(sends)


def _is_marked(registry: StoreRegistry, name: str, destination: Destination) -> bool:
    """Return whether a destination knows a transaction by its name."""
    return registry.for_held(destination, lambda store: store.marked(name, [], [destination]) is not None, False)
