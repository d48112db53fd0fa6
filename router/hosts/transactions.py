"""The base of interfaces that run transactions under their own names: the part of the router that they need, and the
operations of a transaction."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Protocol, Unpack, cast

from ...adapters.core.messages import Headers, LargeBody, Message, Readable, T
from ...policies.names.destination import Destination
from ..api.addresses import Address
from ..api.endpoint import SendOptions
from ..api.map import Map, V
from ..api.queue import Queue
from ..api.topic import Topic
from ..api.transaction import Transaction
from ..transactions.xid import Xid

if TYPE_CHECKING:
    from ...policies.config import Config


class Transactions(Protocol):
    """Begins transactions, and ends those that are prepared."""

    @property
    def config(self) -> Config:
        """The configuration; see Router.config."""

    def transaction(self, xid: Xid | None = None) -> Transaction:
        """Begin a transaction; see Router.transaction."""

    def commit(self, xid: Xid) -> None:
        """Commit a prepared transaction; see Router.commit."""

    def rollback(self, xid: Xid) -> None:
        """Roll back a prepared transaction; see Router.rollback."""

    def recover(self) -> list[Xid]:
        """Return the names of prepared transactions; see Router.recover."""


class TransactionOperations(ABC):
    """The operations of a transaction, which somebody else ends."""

    @abstractmethod
    def _current(self) -> Transaction:
        """Return the transaction that they are done in."""

    def send(
        self,
        destination: Queue[T] | Topic[T] | str | Destination,
        body: T | Readable | LargeBody,
        headers: Headers | None = None,
        message_id: str | None = None,
        **options: Unpack[SendOptions],
    ) -> None:
        """Send when the transaction is committed. As Transaction.send."""
        self._current().send(cast("Queue[T]", destination), body, headers, message_id, **options)

    def put(self, map: Map[V] | Address, key: str, value: V, *, ttl: float | None = None) -> None:
        """Put a value into a map when the transaction is committed. As Transaction.put."""
        self._current().put(map, key, value, ttl=ttl)

    def remove(self, map: Map[Any] | Address, key: str) -> None:
        """Remove a key of a map when the transaction is committed. As Transaction.remove."""
        self._current().remove(map, key)

    def ack(self, message: Message[Any]) -> None:
        """Ack when the transaction is committed; if it is rolled back the message is free again. As Transaction.ack."""
        self._current().ack(message)
