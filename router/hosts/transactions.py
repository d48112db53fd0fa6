"""What another interface needs of the router to run transactions under its own names."""

from __future__ import annotations

from typing import Protocol

from ...policies.config import Config
from ..api.transaction import Transaction
from ..transactions.xid import Xid


class Transactions(Protocol):
    """Begins transactions, and ends those that are prepared."""

    @property
    def config(self) -> Config:
        """As Router.config."""

    def transaction(self, xid: Xid | None = None) -> Transaction:
        """As Router.transaction."""

    def commit(self, xid: Xid) -> None:
        """As Router.commit."""

    def rollback(self, xid: Xid) -> None:
        """As Router.rollback."""

    def recover(self) -> list[Xid]:
        """As Router.recover."""
