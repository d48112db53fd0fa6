"""The part of a prepared transaction for one destination, moved from its branch in one store to that in another. The
messages lie in the other store from now on (copying.py).

    for branch in concerning(source, destination):
        put(target, branch.transaction, with_part(source, target, branch, destination))
        put(source, branch.transaction, without(source, branch.transaction, destination))

A branch is written in bytes, as branches.py makes them; no bytes are no branch. `put` takes two steps where there is
one already, and between them there is none: whoever calls it keeps the bytes until it has returned, and puts them
again after a crash. Nobody else uses either store meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final

from ....policies.errors import AnabranchError
from ....policies.names.destination import Destination
from ..operations.branches import Branch, payload_of, send_of
from ..operations.changes import Ack, Change, Mark, Send, vague_mark
from ..operations.destination_changes import Subscribe, Unsubscribe
from ..state.leases import DestinationState
from . import copying

if TYPE_CHECKING:
    from ..store import Store

NOTHING: Final = b""


def concerning(store: Store, destination: Destination) -> list[Branch]:
    """Return the branches of transactions that are prepared in a store and would change this destination; none of a
    shared one, which ends its own."""
    if copying.is_shared(store):
        return []
    engine = store._engine

    def prepared() -> list[Branch]:
        branches = list(engine.sequencer.prepared.values())
        if engine.transient is not None:
            branches += engine.transient.prepared.values()
        return branches

    return [branch for branch in engine.asked(prepared) if any(_is_of(destination, one) for one in branch.changes)]


def sends_large(store: Store, transaction: bytes) -> bool:
    """Return whether a transaction sends a body here that is kept apart, beside the bytes that are moved. `put` cannot
    have such a branch: after a crash between its steps nothing names the body, and the store removes it."""
    branch = store._engine.sequencer.prepared.get(transaction)
    return branch is not None and any(send.large is not None for send in branch.sends)


def without(store: Store, transaction: bytes, destination: Destination) -> bytes:
    """Return a store's branch but for what it does to this destination."""
    branch = store._engine.sequencer.prepared.get(transaction)
    rest = [] if branch is None else [one for one in branch.changes if not _is_of(destination, one)]
    return payload_of(branch.participants, rest, branch.note) if branch is not None and rest else NOTHING


def with_part(source: Store, target: Store, branch: Branch, destination: Destination) -> bytes:
    """Return the target's branch of the same transaction, with what the source's does to this destination. The target
    holds all messages and subscriptions of the destination by now."""
    other = target._engine.sequencer.prepared.get(branch.transaction)
    part = list(_translated(source, target, branch, destination))
    there = [] if other is None else list(other.changes)
    # As a branch has them: marks, changes of subscriptions, sends, then acks.
    order = {Mark: 0, Subscribe: 1, Unsubscribe: 1, Send: 2, Ack: 3}
    changes = sorted([*there, *part], key=lambda change: order[type(change)])
    return payload_of(sorted({*branch.participants, source.store_id, target.store_id}), changes)


def put(store: Store, transaction: bytes, payload: bytes) -> None:
    """Replace what a store has prepared under a transaction, durably. Idempotent."""
    store._transactions.put(transaction, payload)


def _is_of(destination: Destination, change: Change) -> bool:
    inner = change.inner
    state = getattr(inner, "state", None)
    return isinstance(state, DestinationState) and state.destination == destination


def _translated(source: Store, target: Store, branch: Branch, destination: Destination) -> Iterator[Change]:
    """Yield changes in the target's terms. Messages and subscriptions have other numbers there."""
    catalog = target._engine.catalog
    state = catalog.state(destination)
    acked = {change.seq for change in branch.acks if _is_of(destination, change)}
    seqs = _seqs(source, target, destination) if acked else {}
    for change in branch.changes:
        if not _is_of(destination, change):
            continue
        if isinstance(change, Send):
            send = send_of(state, change.record, target.backend.settings.priorities)
            send.wait_until(change.deliver_at_ms)
            yield send
        elif isinstance(change, Mark):
            yield Mark(state, vague_mark(change.name), change.declares)
        elif isinstance(change, Subscribe):
            yield Subscribe(state, catalog.next_number(), change.subscription, change.retroactive)
        elif isinstance(change, Unsubscribe):
            yield Unsubscribe(state, change.key)
        elif isinstance(change, Ack):
            number = _number(source, target, destination, change.number)
            if change.seq in seqs and number is not None:  # else what it acks was removed in spite of it
                yield Ack(state, seqs[change.seq], number, drops=change.drops)
        else:
            raise AssertionError(f"a branch cannot do {change}")


def _number(source: Store, target: Store, destination: Destination, number: int) -> int | None:
    """Return a subscription's number in the target; None if it has ended. 0, a queue or all subscriptions, is 0."""
    if not number:
        return 0
    keys = {one.number: key for key, one in _state(source, destination).subscriptions.items()}
    there = _state(target, destination).subscriptions.get(keys[number]) if number in keys else None
    return None if there is None else there.number


def _state(store: Store, destination: Destination) -> DestinationState:
    return store._engine.asked(lambda: store._engine.catalog.state(destination))


def _seqs(source: Store, target: Store, destination: Destination) -> Mapping[int, int]:
    """Return the target's seq of each message, by the source's: both hold the same ones, in the same order."""
    try:
        return dict(zip(copying.seqs(source, destination), copying.seqs(target, destination), strict=True))
    except ValueError:
        raise AnabranchError(f"{destination}: the copies in {source.name!r} and {target.name!r} differ") from None
