"""The primary of a transaction: a store that another process may take over, so that no decision log of ours may decide
for it (rule T6). Its own commit is the decision, and the notes that stores keep with their branches say so.

    prepared under an xid, in that store alone    it waits there for its manager, whoever owns the store by then
    beside other stores, or after a vote          they are prepared first; then it commits; then they do

Whoever owns the primary next rolls back what it finds prepared there without an xid: who could have committed it has
gone, or cannot write there any more. So a store that waits for the outcome has only to ask whether the primary has
committed, once nothing is prepared there any more.
"""

from __future__ import annotations

from contextlib import suppress

import msgspec

from ...adapters.core import Store
from ...policies.errors import AnabranchError, StoreFailedError
from ..placement.registry import StoreRegistry
from .xid import Xid


class Note(msgspec.Struct, frozen=True, array_like=True):
    """The note that a store keeps with its branch, in msgpack."""

    xid: Xid | None = None
    """What its manager calls the transaction."""
    primary: bytes = b""
    """The id of the store whose commit is the decision."""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Note).decode


def packed(xid: Xid | None, primary: bytes) -> bytes:
    """Return a note; nothing where it would say nothing."""
    return _encode(Note(xid, primary)) if xid is not None or primary else b""


def unpacked(note: bytes) -> Note:
    """Return the note that a store has kept."""
    return _decode(note) if note else Note()


def settled_in(store: Store, transaction: bytes) -> bool:
    """Return whether an open primary has committed a transaction; one that is prepared there still is rolled back. For
    who knows that nobody is committing it. Raises what the store raises."""
    if not store.has_committed(transaction):
        store.rollback_prepared(transaction).wait()  # all that is queued is written before
        store.sync()
    return store.has_committed(transaction)


def outcome_in(registry: StoreRegistry, primary: bytes, transaction: bytes, may_open: bool) -> bool:
    """Return whether a primary has committed a transaction that nobody is committing any more. Unless `may_open` only
    what an open one has in memory is asked. Raises AnabranchError, OSError where that cannot be told now."""
    store = registry.open_store(primary)
    if not may_open:  # nothing is waited for
        if store is not None and store.failed is None and store.has_committed(transaction):
            return True
        raise StoreFailedError("it is asked soon")
    if store is not None and store.failed is None:
        with suppress(AnabranchError):  # its database may answer all the same
            if settled_in(store, transaction):
                return True
    committed = registry.peek(primary, transaction)  # also where it is open: it has in memory the latest alone
    if committed is not None:
        return committed
    return registry.with_id(primary, lambda opened: settled_in(opened, transaction))
