"""The rows of an outbox: what a backend that shares its database with callers brings for their own transactions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from ..operations.table import Table


class Entry(NamedTuple):
    """One send or ack that a caller's transaction asks for."""

    number: int
    """Their order. No other entry has it."""
    destination: str
    """The destination, as text."""
    seq: int
    """The seq of the message that is acked; 0: one is sent."""
    subscription: int
    """The subscription whose ack it is; 0: for all. For a send: until when the message waits (ms); 0: it does not."""
    record: bytes
    """The record of a message that is sent."""
    rows: int = 1
    """In how many rows it is written down, where it was read."""


class Written(NamedTuple):
    """The part of a committed entry that is known without reading it."""

    number: int
    caller: str
    """The transaction that the entry belongs to."""
    size: int
    """Bytes of its record."""


class Caller(Protocol):
    """One transaction of a caller's. Compares by identity."""

    key: str
    """No other transaction has it."""

    @property
    def is_open(self) -> Callable[[], bool]:
        """Return a function that tells whether its connection is still in it, as far as is known without asking the
        database."""


class OutboxRows(Protocol):
    """The rows of a backend that shares its database with callers. Connections that callers hand in are theirs: errors
    of their driver pass through where a connection is used."""

    def enlist(self, connection: Any, listener: EndListener) -> Caller:
        """Return the transaction that is open on a connection, begun if need be; the same object each time. `told`
        hears of its end, weakly. Raises TypeError for what is no connection, TransactionError for one to another
        database and one without transactions."""

    def put(self, connection: Any, caller: Caller, entries: Sequence[Entry]) -> None:
        """Write them down, in that transaction."""

    def written(self, after: int, most: int, caller: str | None = None) -> Sequence[Written]:
        """Return the first so many committed entries behind this number, in order; of one transaction, if that is
        given. Raises StoreFailedError."""

    def entries(self, caller: str, first: int, last: int) -> Sequence[Entry]:
        """Return the entries of one transaction between two numbers, in order. Raises StoreFailedError."""

    def is_over(self, caller: Caller) -> bool:
        """Return whether a transaction has ended for certain: what `written` does not show from now on is not there.
        Raises StoreFailedError."""


class EndListener(Protocol):
    """A listener for the end of transactions."""

    def ending(self, caller: Caller) -> None:
        """Note that a transaction is about to end, one way or the other, by this thread. Raises nothing."""


class OutboxTable(Table, Protocol):
    """A Table of a backend that has OutboxRows."""

    def entries_done(self, numbers: Sequence[int], rows: int) -> None:
        """Remove these entries, which have so many rows. Raises NotTakenError if some are gone already."""


@runtime_checkable
class SharesDatabase(Protocol):
    """A backend that callers may be able to write to in database transactions of their own."""

    outbox: OutboxRows | None
    """Set by `open`; None: not in a database of this kind."""
