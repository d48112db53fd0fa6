"""The part of the router that another interface needs to run transactions under its own names."""

from __future__ import annotations

from typing import Protocol

from ...policies.config import Config
from ..api.transaction import Transaction
from ..transactions.xid import Xid


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
