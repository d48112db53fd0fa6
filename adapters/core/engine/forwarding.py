"""Messages in hand whose destination has moved to another store: who holds them settles them there.

A lease that is MOVING or MOVED says so to whoever comes with it, after the fact: nobody else pays for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from ....policies.errors import AnabranchError, ClosedError
from ..messages import Message
from ..state.gates import LeaseMovedError
from ..state.leases import MOVED, MOVING, Lease

if TYPE_CHECKING:
    from ..messages import MessageStore


def follow(message: Message) -> bool:
    """Wait while a message's destination is moving, or has moved, and let the message know its store. Returns whether
    that was so. Raises what Gate.wait raises."""
    lease, moved = message._note, False
    while type(lease) is Lease and lease.hold >= MOVING:
        moved = True
        lease.gate.wait()
        if lease.hold != MOVED:
            return True  # it stays where it was
        # The store first: with its new lease and the old store it would be settled in the wrong one.
        message._store = lease.successor[0]
        message._note = lease = lease.successor[1]
        message.seq = lease.seq
    return moved


def is_moving(messages: Sequence[Message]) -> bool:
    """Return whether the destination of one of the messages is moving, or has moved."""
    return any(type(message._note) is Lease and message._note.hold >= MOVING for message in messages)


def after_move(
    error: ClosedError, messages: Sequence[Message], call: Callable[[MessageStore, list[Message]], object]
) -> None:
    """Repeat a call with messages in hand that has raised this, and done nothing: call again, with those of each store,
    if one of them has moved, or was about to (by now that may be given up). Raises the error otherwise."""
    moved = isinstance(error, LeaseMovedError)
    for message in messages:
        moved |= follow(message)
    if not moved:
        raise error
    stores: dict[int, tuple[MessageStore, list[Message]]] = {}
    for message in messages:
        stores.setdefault(id(message._store), (message._store, []))[1].append(message)
    for store, some in stores.values():
        call(store, some)


def give_back(lease: Lease) -> bool:
    """Free the message of a lease where it is then, if it is moving or has moved. The lease's holder has never seen it.
    Returns False if it is where it was."""
    if lease.hold < MOVING:
        return False
    lease.gate.wait()
    if lease.hold != MOVED:
        return False
    store, successor = lease.successor
    if not give_back(successor):
        with suppress(AnabranchError, RuntimeError):  # in a store that has stopped nobody holds anything
            store.give_back(successor)
    return True
