"""Transactions: sends and acks that take effect together or not at all.

    with router.transaction() as tx:
        tx.send("queue://audit", b"...")
        tx.ack(message)

What the transaction does stays in memory until commit, so others see nothing of it before (rule X6: an acked message
is CLAIMED). All that it touches must live in one store; its commit is then one batch of that store's journal, which a
crash leaves there whole or not at all.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from ..adapters.base import Headers, Message, Outgoing, Receipt, Store, checked
from ..policies.destination import Destination
from ..policies.errors import ClosedError, OutcomeUnknownError, StoreFailedError, TransactionError
from .addresses import Address, resolve_all

if TYPE_CHECKING:
    from .router import Router


class Transaction:
    """One transaction, used by one thread at a time; ends with commit, rollback or its `with` block."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._lock = threading.Lock()  # guards all below
        self._store: Store | None = None
        self._first: Destination | None = None
        self._sends: list[tuple[Destination, Outgoing]] = []
        self._acks: list[Message] = []
        self._state = "open"

    def __enter__(self) -> Transaction:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._state != "open":
            return
        if kind is None:
            self.commit()
        else:
            self.rollback()

    def send(
        self,
        destination: Address,
        body: bytes,
        headers: Headers | None = None,
        message_id: str | None = None,
    ) -> None:
        """Send at commit. A composite (`queue://a,queue://b`) is a send to each of its parts.

        Raises what routing raises, TypeError and ValueError for what is no message, and TransactionError if it would
        touch a second store; the transaction goes on without it either way.
        """
        parts, message = resolve_all(destination), checked(body, headers, message_id)
        with self._lock:
            self._require_open()
            stores = [(part, self._router.store_for(part)) for part in parts]
            self._first, self._store = self._joined(stores)
            self._sends += [(part, message) for part in parts]

    def ack(self, message: Message) -> None:
        """Ack a leased message at commit; on rollback it is free again, at its old place.

        Raises UnknownMessageError, and TransactionError if it lives in a second store.
        """
        with self._lock:
            self._require_open()
            joined = self._joined([(message.destination, message.store)])
            message.store.claim(message)
            self._first, self._store = joined
            self._acks.append(message)

    def _joined(self, steps: Sequence[tuple[Destination, Store]]) -> tuple[Destination | None, Store | None]:
        """The first destination and the store once these steps are part of it. By the store's id, since one that was
        closed for being idle comes back as another object."""
        first, joined = self._first, self._store
        for destination, store in steps:
            if joined is not None and joined.store_id != store.store_id:
                raise TransactionError(
                    f"a transaction touches one store: {first} lives in {joined.name!r} and {destination} in "
                    f"{store.name!r}; give both the same store in the configuration, or use a transaction for each"
                )
            first, joined = first or destination, store
        return first, joined

    def _require_open(self) -> None:
        if self._state != "open":
            raise TransactionError(f"this transaction is {self._state}; begin another")

    def commit(self) -> list[Receipt]:
        """Make it durable as the store's policy says, then visible. Returns a receipt for each send, in order.

        Raises OutcomeUnknownError if the store failed while it wrote: whether it took effect shows when the store is
        opened again. Any other error: it was rolled back.
        """
        with self._lock:
            self._require_open()
            self._state = "committing"
            if self._store is None:
                self._state = "committed"
                return []
            try:
                receipts = self._commit_in(self._store)
            except OutcomeUnknownError:
                self._state = "of unknown outcome"
                raise
            except Exception:
                self._roll_back()
                raise
            except BaseException:  # of a signal handler: it may have struck anywhere
                self._state = "of unknown outcome"
                raise
            self._state = "committed"
            return receipts

    def _commit_in(self, store: Store) -> list[Receipt]:
        """A store that is held by sends alone may have been closed for being idle; it is opened again."""
        while True:
            try:
                return store.commit(self._sends, self._acks)
            except ClosedError:
                if self._first is None or self._acks:
                    raise
                self._router.forget_closed(self._first, store)
                store = self._store = self._router.store_for(self._first)

    def rollback(self) -> None:
        """Forget the sends, free the acked messages. Nothing was written."""
        with self._lock:
            self._require_open()
            self._roll_back()

    def _roll_back(self) -> None:
        self._state = "rolled back"
        if self._store is not None and self._acks:
            try:
                self._store.unclaim(self._acks)
            except (StoreFailedError, ClosedError):
                pass  # the store's leases and claims are gone with it
