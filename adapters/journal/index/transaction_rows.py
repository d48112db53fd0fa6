"""The index's rows of transactions: where the record of each that is prepared is, and which are committed and not yet
forgotten.

    transactions   id                           ->  LSN, offset, length of its PREPARE; empty: committed
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ...core.engine.engine import COMMITTED_MAX
from ...core.operations.branches import Branch
from ...wal.segment import SegmentTable
from ..encoding import Own
from .row_format import WHERE


class TransactionRows:
    """The rows of one index's transactions; the index lends its transaction. Every method is called under the store's
    lock."""

    def __init__(self, remove_live: Callable[[int, int, object], None]) -> None:
        """`remove_live` as of MessageRows."""
        self._remove_live = remove_live
        self._txn: Any = None
        self.count: int = 0
        """Prepared, or committed and not forgotten."""
        self._committed = 0

    def open(self, env: Any) -> None:
        self.db: Any = env.open_db(b"transactions")

    def lend(self, txn: Any) -> None:
        """Use this transaction from now on."""
        self._txn = txn

    def load(self) -> None:
        """Set the counts to what the table says."""
        self.count = self._txn.stat(self.db)["entries"]
        self._committed = self.count - len(self.prepared())

    def prepare(self, branch: Branch, table: SegmentTable) -> None:
        """Keep a prepared branch: its record retains its segment as a live message does."""
        lsn, _, length = branch.own
        segment = table.find(lsn)
        if segment is None:
            raise AssertionError(f"index: the prepared transaction {branch.transaction.hex()} lies in no segment")
        # A rebuild may know from the snapshot that it is committed before it comes to the PREPARE.
        replaced = self._txn.replace(branch.transaction, WHERE.pack(*branch.own), db=self.db)
        self.count += replaced is None
        self._committed -= replaced == b""
        segment.add_live(length)

    def settle(self, transaction: bytes, committed: bool) -> None:
        """Record the outcome of a transaction."""
        if committed:
            place = self.remember_committed(transaction)
        else:
            place = self._txn.pop(transaction, db=self.db)
            self.count -= place is not None
        if place:
            lsn, _, length = WHERE.unpack(place)
            self._remove_live(lsn, length, f"transaction {transaction.hex()}")

    def remember_committed(self, transaction: bytes) -> bytes | None:
        """Remember a committed transaction until it is forgotten, or the oldest of too many. Returns its row before:
        the place of its PREPARE, empty if it was committed, None without one."""
        replaced: bytes | None = self._txn.replace(transaction, b"", db=self.db)
        self.count += replaced is None
        self._committed += replaced != b""
        if self._committed > COMMITTED_MAX:
            with self._txn.cursor(db=self.db) as cursor:
                oldest = next((key for key, place in cursor if not place), None)
            if oldest is not None:
                self.forget([oldest])
        return replaced

    def forget(self, transactions: Iterable[bytes]) -> None:
        """Forget committed transactions; others stay."""
        for transaction in transactions:
            if self._txn.get(transaction, db=self.db) == b"":
                self._txn.delete(transaction, db=self.db)
                self.count -= 1
                self._committed -= 1

    def prepared(self) -> list[tuple[bytes, Own]]:
        """Return each branch that waits for its outcome, and where its record is; oldest first."""
        with self._txn.cursor(db=self.db) as cursor:
            return [(bytes(key), WHERE.unpack(place)) for key, place in cursor if place]
