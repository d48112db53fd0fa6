"""Joining a manager of the `transaction` package needs that package, an extra, which may not be installed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...policies.errors import MissingExtraError
from ..transactions.xid import Xid
from .transactions import Transactions

if TYPE_CHECKING:
    from .data_manager import DataManager


def join(router: Transactions, manager: Any, xid: Xid | None) -> DataManager:
    """Join the current transaction of a manager; see Router.join. Raises MissingExtraError without the package."""
    try:
        from . import data_manager
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in {"transaction", "zope"}:
            raise
        raise MissingExtraError(
            "the transaction package is not installed; install it with: pip install 'anabranch[transaction]'"
        ) from error
    return data_manager.join(router, manager, xid)
