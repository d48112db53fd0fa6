"""The open transactions of a router: how many there may be, what they are called, and when their time is over."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable

from ..adapters.background import shared
from ..policies.config import TransactionOptions
from ..policies.errors import TransactionError
from .transaction import UNKNOWN, Transaction
from .xid import Xid

log = logging.getLogger(__name__)


class OpenTransactions:
    """Of one router: how many there are, and which have been open for too long."""

    def __init__(self, options: TransactionOptions, prepared: Callable[[], int]) -> None:
        """`prepared` tells how many external ones wait for their outcome."""
        self.options = options
        self._prepared = prepared
        self._lock = threading.RLock()  # guards the fields; a signal handler may come back to it in the same thread
        self._since: dict[Transaction, float] = {}
        """Oldest first."""
        self._kept: set[Transaction] = set()
        """Those that voted: open still, but nothing times them out."""
        self._timer = False

    def add(self, transaction: Transaction) -> None:
        """Raises TransactionError at the limit, and for the xid of another."""
        with self._lock:
            known = len(self._since) + len(self._kept)
            prepared = self._prepared()
            if known + prepared >= self.options.max_open:
                raise TransactionError(
                    f"{known} transactions are open and {prepared} prepared; transactions.max_open is "
                    f"{self.options.max_open}: commit or roll back some (recover() lists the prepared ones), or raise "
                    "the limit"
                )
            if transaction.xid is not None and self._by_xid(transaction.xid) is not None:
                raise TransactionError(f"xid {transaction.xid} is in use; commit or roll back that transaction first")
            self._since[transaction] = time.monotonic()
            start, self._timer = not self._timer, True
        if start:
            self._schedule(self.options.timeout)

    def remove(self, transaction: Transaction) -> None:
        """It has ended."""
        with self._lock:
            self._since.pop(transaction, None)
            self._kept.discard(transaction)

    def keep(self, transaction: Transaction) -> None:
        """It has voted: its time is not over before it ends."""
        with self._lock:
            self._kept.add(transaction)
            self._since.pop(transaction, None)

    def by_xid(self, xid: Xid) -> Transaction | None:
        """The open external transaction of that name."""
        with self._lock:
            known = self._by_xid(xid)
        return known if known is not None and known.state != UNKNOWN else None  # what becomes of that, the log says

    def _by_xid(self, xid: Xid) -> Transaction | None:
        return next((known for known in (*self._since, *self._kept) if known.xid == xid), None)

    def expire(self) -> None:
        """Roll back those whose time is over; come again for the next."""
        with self._lock:
            known = list(self._since.items())
        now = time.monotonic()
        due = [transaction for transaction, since in known if now - since >= self.options.timeout]
        for transaction in due:
            try:
                transaction.expire()
            except Exception:  # its store's trouble: the next ones' time is over all the same
                log.exception("a transaction that timed out could not be rolled back")
        with self._lock:
            oldest = next(iter(self._since.values()), None)
            self._timer = oldest is not None
        if oldest is not None:
            self._schedule(max(oldest + self.options.timeout - time.monotonic(), 0.05))

    def _schedule(self, seconds: float) -> None:
        alive = weakref.ref(self)  # a timer must not keep a closed router alive

        def run() -> None:
            transactions = alive()
            if transactions is not None:
                transactions.expire()

        shared().schedule(seconds, run)
