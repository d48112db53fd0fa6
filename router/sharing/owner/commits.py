"""Whole transactions of clients, which the owner carries out at once."""

from __future__ import annotations

from operator import methodcaller
from typing import Any

from ....adapters.core import Store
from ....adapters.core.messages import MadeId
from ....policies.errors import OutcomeUnknownError, TransactionError, UnknownMessageError
from ....policies.names.destination import Destination, Kind
from ...placement.registry import StoreRegistry
from ...transactions.xid import as_xid
from ..protocol import Commit, destination_of
from .session import Session


def commit(session: Session, number: int, request: Commit) -> list[Any]:
    """Commit a whole transaction, or prepare it (`prepare`, `vote`); returns the receipts' seqs, and whether each is a
    duplicate. One that may have been committed before is told by its sends and its acks, for they took effect together
    or not at all."""
    router, xid = session.router, None if request.xid is None else as_xid(request.xid)
    tokens = [session.now(token) for token in request.acks]
    sends = [
        (destination_of(text), session.outgoing_of(fields, number, at))
        for at, (text, fields) in enumerate(request.sends)
    ]
    if request.again and request.mode == "prepare":
        if xid is not None and xid in router.recover():
            session.let_go(request.acks)
            return []
    elif request.again:
        before = _committed_before(session, sends, tokens)
        if before is not None:
            return before
    transaction = router.transaction(xid)
    try:
        for destination, message in sends:
            transaction._carry(destination, message)
        for token in tokens:
            if token is None:
                raise UnknownMessageError("a message that this transaction acks is not leased any more")
            transaction.ack(store_of_lease(session.registry, token).leased(token))
        for change in request.changes:
            transaction._change(change)
        if request.mode == "vote":
            transaction.vote()
            vote = next(session.numbers)
            session.voted[vote] = transaction
            return [vote]
        if request.mode == "prepare":
            transaction.prepare()
        receipts = transaction.commit() if request.mode == "commit" else []
    except BaseException:
        if transaction.state == "open":
            transaction.rollback()
        raise
    session.let_go(request.acks)
    return [one[1:] for one in receipts]


def end_vote(session: Session, number: int, commit: bool, acks: list[str]) -> list[Any]:
    """Carry out the outcome of a transaction that has voted."""
    transaction = session.voted.pop(number, None)
    if transaction is None:
        raise TransactionError(
            "this transaction was rolled back with the process that owned the directory before; begin another"
        )
    session.let_go(acks)
    if not commit:
        transaction.rollback()
        return []
    return [one[1:] for one in transaction.commit()]


def store_of_lease(registry: StoreRegistry, token: str) -> Store:
    """Return the store that leased a message, whose UUID a token begins with. Raises UnknownMessageError."""
    try:
        store = registry.open_store(bytes.fromhex(token[:32]))
    except ValueError:
        store = None
    if store is None:
        raise UnknownMessageError(f"the message of token {token!r} is not leased here any more")
    return store


def _committed_before(
    session: Session, sends: list[tuple[Destination, Any]], tokens: list[str | None]
) -> list[Any] | None:
    """Return the receipts of a transaction that was committed before; None if it was not. A message tells that
    came without an id: other ids may be known from elsewhere. Raises OutcomeUnknownError where there is none, and an
    acked message is gone, which this transaction may have acked, or somebody else."""
    receipts = []
    is_known = tells = False
    for destination, message in sends:
        seq = None
        if destination.kind is not Kind.MAP:
            seq = session.registry.for_held(destination, methodcaller("seq_of", destination, message.message_id), None)
            if type(message.message_id) is MadeId:
                is_known |= seq is not None
                tells = True
        receipts.append((seq or 0, False))
    if is_known or (tokens and not sends and None in tokens):
        return receipts
    if None in tokens and not tells:
        raise OutcomeUnknownError(
            "the process that owned the directory was lost before it had answered to a commit, and a message that this "
            "transaction acks is gone; look whether the others were sent"
        )
    return None
