"""A data manager for the `transaction` package (zope): one commit for Anabranch, databases and whatever else joins.

    with transaction.manager:
        messages = router.join()                  # part of the current transaction from now on
        messages.send("queue://orders", b"...")
        session.add(Order(...))                   # of SQLAlchemy with zope.sqlalchemy, say

In the vote the stores are prepared, power-failure durable; after it nothing but a broken disk fails the commit. If the
process ends between vote and finish, the transaction is rolled back, unless it was joined with an `xid`. Then it is
held, over restarts too, and `Router.recover()` lists it. Somebody who can see what became of the other resources says
the outcome.

Needs the extra `transaction`; the rest of Anabranch does not.
"""

from __future__ import annotations

import logging
from typing import Any

from transaction import manager as of_this_thread
from transaction.interfaces import IDataManagerSavepoint, ISavepointDataManager
from zope.interface import classImplements, implementer

from ...policies.errors import TransactionError
from ..api.transaction import Savepoint, Transaction
from ..transactions.xid import Xid, as_xid
from .transactions import TransactionOperations, Transactions

log: logging.Logger = logging.getLogger(__name__)

classImplements(Savepoint, IDataManagerSavepoint)


def join(router: Transactions, manager: Any = None, xid: Xid | None = None) -> DataManager:
    """Join the current transaction of a manager; see Router.join."""
    manager = of_this_thread if manager is None else manager
    if isinstance(manager, (tuple, str)):  # an Xid, most likely
        raise TypeError(f"join() takes a transaction manager, not {manager!r}; an xid is given by name: join(xid=...)")
    joined = manager.get()
    try:
        known: DataManager = joined.data(router)
    except KeyError:
        pass
    else:
        if known.active:
            if xid is not None and as_xid(xid) != known.xid:
                raise TransactionError(f"the current transaction is joined already, with xid {known.xid}, not {xid}")
            return known
    ours = DataManager(router, manager, joined, xid)
    try:
        joined.join(ours)
    except BaseException:
        ours.abort(joined)
        raise
    joined.set_data(router, ours)
    return ours


@implementer(ISavepointDataManager)
class DataManager(TransactionOperations):
    """A router's part in one transaction of a transaction manager. Made by `Router.join`; gone with the transaction.

    Threads: one at a time, as the transaction itself.
    """

    def __init__(self, router: Transactions, manager: Any, joined: Any, xid: Xid | None) -> None:
        self.transaction_manager = manager
        self._router = router
        self._joined = joined
        self._transaction = router.transaction(xid)
        self._finishing = self._finished = False

    @property
    def xid(self) -> Xid | None:
        """The name under which the transaction is found if this process ends between vote and finish."""
        return self._transaction.xid

    @property
    def active(self) -> bool:
        """True if sends and acks can still be added."""
        return self._transaction.state == "open"

    @property
    def state(self) -> str:
        """The state of the transaction: as Transaction.state."""
        return "committed" if self._finished else self._transaction.state

    def _current(self) -> Transaction:
        return self._transaction

    # IDataManager

    def sortKey(self) -> str:  # noqa: N802
        """Return a key that sorts before managers that vote to commit last, as zope.sqlalchemy does ("~"): we have
        voted by then."""
        return f"anabranch:{self._router.config.directory}"

    def tpc_begin(self, transaction: Any) -> None:
        """Do nothing: the vote writes all that is written."""
        self._require_own(transaction)

    def commit(self, transaction: Any) -> None:
        """Do nothing yet."""
        self._require_own(transaction)

    def tpc_vote(self, transaction: Any) -> None:
        """Prepare all stores. Raises what Transaction.commit raises; it is rolled back then. A transaction that has
        done nothing waits for no outcome, whatever becomes of the process, and writes nothing."""
        self._require_own(transaction)
        if self.xid is not None and not self._transaction.is_empty:
            self._transaction.prepare()
        else:
            self._transaction.vote()

    def tpc_finish(self, transaction: Any) -> None:
        """Decide, carry out. Raises TransactionInDoubt or StoreFailedError if the decision log's disk broke since the
        vote, and ClosedError if the router was closed; a store that cannot carry it out now does so later."""
        self._require_own(transaction)
        self._finishing = True
        if self.state == "voted":
            self._transaction.commit()
        elif self.state == "prepared":
            assert self.xid is not None
            self._router.commit(self.xid)
        self._finished = True

    def tpc_abort(self, transaction: Any) -> None:
        """Roll back, however far it came, but for what was finished. One with an xid whose finish has failed is held:
        other resources may have committed before."""
        self._require_own(transaction)
        if self._finished:
            log.warning("a transaction was aborted after it had been committed here; its messages stay as they are")
        elif self.state in ("open", "voted"):
            self._transaction.rollback()
        elif self.state == "prepared":
            assert self.xid is not None
            if self._finishing:
                log.error("transaction %s could not be finished and is held: recover() lists it", self.xid)
            else:
                self._router.rollback(self.xid)

    def abort(self, transaction: Any) -> None:
        """Forget all. Also called after the end, by a manager that cleans up."""
        self._require_own(transaction)
        if self.active:
            self._transaction.rollback()

    def _require_own(self, transaction: Any) -> None:
        if transaction is not self._joined:
            raise TransactionError("this data manager takes part in another transaction; join() this one")

    # ISavepointDataManager

    def savepoint(self) -> Savepoint:
        """Return a savepoint at this point of the transaction."""
        return self._transaction.savepoint()
