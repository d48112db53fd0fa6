"""The bytes that one operation puts into a journal, under each of the two models.

`kahadb`: what the trace says, since it was read from such a journal. `anabranch`: the body and what our own journal
adds to it. Its constants are used row by row here and as an SQL expression by the Spark pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from ..trace.events import ACK_BYTES_DEFAULT, SEND_HEADER_BYTES_DEFAULT

Model = Literal["anabranch", "kahadb"]
MODELS: tuple[Model, ...] = ("anabranch", "kahadb")


@dataclass(frozen=True, slots=True)
class JournalSizes:
    """The bytes that our own journal adds to a message's body. A test holds the defaults to the journal's format."""

    send_overhead: int = 58
    """A send record beside its body, without message id and headers, of which a trace knows nothing."""
    ack_overhead: int = 36
    """A whole ack record."""
    batch_overhead: int = 32
    """The header of a batch. A trace does not say what shared a group commit: one operation, one batch."""
    transaction_overhead: int = 0
    """The bytes that a transaction adds to its batch: none in one store, since a batch is there whole or not at all."""
    segment_header: int = 4096
    """The part of each segment that holds no records."""
    snapshot_overhead: int = 0
    """Snapshots' bytes in an average segment."""
    segments_ahead: int = 0
    """Segments of each store that are on disk without being needed: preallocated or pooled."""

    def capacity(self, segment_bytes: int) -> int:
        """Return the bytes of a segment that operations can fill."""
        return max(segment_bytes - self.segment_header - self.snapshot_overhead, 1)


KAHADB_SIZES = JournalSizes(0, 0, 0, 0, 0, 0, 0)
"""KahaDB: the trace's own sizes, nothing added, whole files, none ahead (measured: 44 files predicted, 44 found)."""


@dataclass(frozen=True, slots=True)
class OperationSizes:
    """The size rule of one run: the model, its constants, and what an operation inside a transaction adds on average.

    A transaction is one batch that ends in one outcome record. Its operations share that equally over the whole trace,
    which keeps an operation's size independent of the partitioning: exact for a transaction in one store, a few dozen
    bytes low for one that spans several.
    """

    model: Model
    sizes: JournalSizes
    transaction_share: float = 0.0

    @classmethod
    def of(
        cls, model: Model, sizes: JournalSizes | None, transactions: int, operations_in_transactions: int
    ) -> OperationSizes:
        """Return the rule of one run. `sizes` None: the model's defaults."""
        if model == "kahadb":
            return cls(model, KAHADB_SIZES)
        sizes = sizes or JournalSizes()
        both = sizes.batch_overhead + sizes.transaction_overhead
        share = both * transactions / operations_in_transactions if operations_in_transactions else 0.0
        return cls(model, sizes, share)

    def overhead(self, is_send: bool, in_transaction: bool) -> int:
        """Return the bytes that an operation takes beside its body, in our own journal."""
        record = self.sizes.send_overhead if is_send else self.sizes.ack_overhead
        return record + (round(self.transaction_share) if in_transaction else self.sizes.batch_overhead)

    def capacity(self, segment_bytes: int) -> int:
        return self.sizes.capacity(segment_bytes)

    def rows(
        self,
        is_send: npt.NDArray[np.bool_],
        in_transaction: npt.NDArray[np.bool_],
        size: npt.NDArray[np.int64],
        body: npt.NDArray[np.int64],
    ) -> npt.NDArray[np.int64]:
        """Return the bytes of each operation. `size` and `body` are -1 where the trace does not say."""
        if self.model == "kahadb":
            unknown = np.where(is_send, np.maximum(body, 0) + SEND_HEADER_BYTES_DEFAULT, ACK_BYTES_DEFAULT)
            return np.where(size > 0, size, unknown)
        known_body = np.where(body >= 0, body, np.maximum(size, 0))
        sends = known_body + np.where(in_transaction, self.overhead(True, True), self.overhead(True, False))
        acks = np.where(in_transaction, self.overhead(False, True), self.overhead(False, False))
        return np.where(is_send, sends, acks).astype(np.int64)

    def sql(self) -> str:
        """Return the bytes of an operation as SQL over the columns op, tx, size and body_size."""
        if self.model == "kahadb":
            return (
                f"CASE WHEN size > 0 THEN size WHEN op = 'send' THEN coalesce(body_size, 0) + "
                f"{SEND_HEADER_BYTES_DEFAULT} ELSE {ACK_BYTES_DEFAULT} END"
            )
        return (
            f"CASE WHEN op = 'send' THEN coalesce(body_size, greatest(size, 0), 0) + "
            f"if(tx IS NULL, {self.overhead(True, False)}, {self.overhead(True, True)}) "
            f"ELSE if(tx IS NULL, {self.overhead(False, False)}, {self.overhead(False, True)}) END"
        )
