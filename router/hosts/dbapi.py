"""Transactions under the names of Python's DB-API (PEP 249), its two-phase extension among them.

    connection = router.connection()
    connection.tpc_begin(connection.xid(1, "order-17", "messages"))
    connection.send("queue://orders", b"...")
    connection.tpc_prepare()              # durable, unseen, over restarts
    connection.tpc_commit()               # or after a restart: tpc_commit(xid) of one that tpc_recover() lists

A transaction manager that drives databases can drive this as it drives those. The rules on when which may be called are
PEP 249's: where they are broken, ProgrammingError says so and nothing has happened.
"""

from __future__ import annotations

from types import TracebackType

from ...adapters.core.messages import Receipt
from ...policies.errors import AnabranchError, StoreFailedError, TransactionError, TransactionInDoubt
from ..api.transaction import Transaction
from ..transactions.xid import Xid, as_xid, checked_xid
from .transactions import TransactionOperations, Transactions


class ProgrammingError(TransactionError):
    """A call that PEP 249 does not allow at this point, or with this xid. Nothing has happened."""


class Connection(TransactionOperations):
    """A connection runs one transaction after the other. A transaction begins with the first send or ack, or with
    `tpc_begin`.

    Threads: one at a time (PEP 249's threadsafety 1: threads share the router, not its connections).
    """

    Error = AnabranchError
    ProgrammingError = ProgrammingError
    OperationalError = StoreFailedError

    def __init__(self, router: Transactions) -> None:
        self._router = router
        self._transaction: Transaction | None = None
        """The current one; with an xid if tpc_begin has begun it."""
        self._closed = False

    def __enter__(self) -> Connection:
        self._require_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Roll back what is neither committed nor prepared. Idempotent."""
        self._closed = True
        transaction, self._transaction = self._transaction, None
        if transaction is not None and transaction.state == "open":
            transaction.rollback()

    def _current(self) -> Transaction:
        self._require_open()
        if self._transaction is None:
            self._transaction = self._router.transaction()
        elif self._transaction.state == "prepared":
            raise ProgrammingError("the transaction is prepared; call tpc_commit() or tpc_rollback() first")
        return self._transaction

    # One phase

    def commit(self) -> list[Receipt]:
        """Commit what was sent and acked since the last commit, if anything was. As Transaction.commit; whatever it
        raises, the next call begins another transaction."""
        self._require_one_phase("commit", "tpc_commit")
        transaction, self._transaction = self._transaction, None
        return transaction.commit() if transaction is not None else []

    def rollback(self) -> None:
        """Forget what was sent and acked since the last commit, if anything was."""
        self._require_one_phase("rollback", "tpc_rollback")
        transaction, self._transaction = self._transaction, None
        if transaction is not None and transaction.state == "open":
            transaction.rollback()

    def _require_one_phase(self, called: str, instead: str) -> None:
        self._require_open()
        if self._transaction is not None and self._transaction.xid is not None:
            raise ProgrammingError(f"{called}() is for transactions without an xid; this one ends with {instead}()")

    # Two phases

    def xid(self, format_id: int, global_transaction_id: str, branch_qualifier: str = "") -> Xid:
        """Return a name for a transaction: a number from 0 to 2^31 - 1 and two texts of at most 64 bytes. Raises
        TypeError, and TransactionError for what is too long or out of range."""
        return checked_xid(format_id, global_transaction_id, branch_qualifier)

    def tpc_begin(self, xid: Xid) -> None:
        """Begin a transaction of that name. Raises ProgrammingError inside another, or if the name is in use."""
        self._require_outside("tpc_begin")
        try:
            self._transaction = self._router.transaction(as_xid(xid))
        except TransactionError as error:
            raise ProgrammingError(str(error)) from error

    def tpc_prepare(self) -> None:
        """Prepare the transaction, the first phase. Afterwards only tpc_commit and tpc_rollback may be called. After
        any error it is rolled back, and tpc_rollback() ends it. Raises ProgrammingError unless in a transaction that
        tpc_begin has begun; else as Transaction.prepare."""
        transaction, _ = self._require_two_phase("tpc_prepare")
        if transaction.state == "prepared":
            raise ProgrammingError("the transaction is prepared already; call tpc_commit() or tpc_rollback()")
        transaction.prepare()

    def tpc_commit(self, xid: Xid | None = None) -> None:
        """Commit, without an xid, the transaction of this connection, in one phase if it is not prepared. With an xid,
        outside of any transaction, commit that prepared one, of whichever connection. Raises ProgrammingError where
        that is not allowed, or if no such transaction is prepared; else as Router.commit."""
        if xid is not None:
            self._require_outside("tpc_commit(xid)")
            self._say(xid, commit=True)
            return
        transaction, known = self._require_two_phase("tpc_commit")
        if transaction.state == "prepared":
            self._say(known, commit=True)  # where that fails it is prepared still, and can be tried again
            self._end()
        else:
            self._end()
            transaction.commit()

    def tpc_rollback(self, xid: Xid | None = None) -> None:
        """Roll back, without an xid, the transaction of this connection, prepared or not. With one: as tpc_commit."""
        if xid is not None:
            self._require_outside("tpc_rollback(xid)")
            self._say(xid, commit=False)
            return
        transaction, known = self._require_two_phase("tpc_rollback")
        if transaction.state == "open":
            transaction.rollback()
        elif transaction.state == "prepared" or known in self._router.recover():  # or its prepare was interrupted
            self._say(known, commit=False)
        self._end()

    def tpc_recover(self) -> list[Xid]:
        """Return the transactions that are prepared and wait, oldest first: for tpc_commit(xid) and tpc_rollback(xid).
        Raises StoreFailedError if the decision log cannot be read."""
        self._require_open()
        return self._router.recover()

    def _say(self, xid: Xid, commit: bool) -> None:
        try:
            (self._router.commit if commit else self._router.rollback)(as_xid(xid))
        except TransactionInDoubt:
            self._end()
            raise
        except TransactionError as error:
            raise ProgrammingError(str(error)) from error

    def _end(self) -> None:
        self._transaction = None

    def _require_outside(self, called: str) -> None:
        self._require_open()
        if self._transaction is not None:
            raise ProgrammingError(f"{called} inside a transaction; end that first")

    def _require_two_phase(self, called: str) -> tuple[Transaction, Xid]:
        self._require_open()
        transaction = self._transaction
        if transaction is None or transaction.xid is None:
            raise ProgrammingError(f"{called}() is for a transaction that was begun with tpc_begin(xid)")
        return transaction, transaction.xid

    def _require_open(self) -> None:
        if self._closed:
            raise ProgrammingError("this connection is closed; router.connection() gives another")
