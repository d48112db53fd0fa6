"""Changes that may happen to a journal alone: what was copied counts (rule J8), a snapshot is written (rule J6)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol, cast

from ..core.operations.changes import Change
from ..core.operations.plan import Plan
from ..core.operations.table import Table
from ..wal.segment import Segment
from ..wal.ticket import OWED


class TakesCopies(Protocol):
    """The index, which knows where each message is."""

    def take_copies(self, copies: Segment, messages: Sequence[Copied]) -> None:
        """Let the messages in a file of copies that live be there, and nowhere else."""


class Copied(NamedTuple):
    """A message in a file of copies."""

    number: int
    """Its destination's."""
    seq: int
    own: tuple[int, int, int]
    """The place of the copy (encoding.Own)."""


class Compacted(Change):
    """The change by which a file of copies, whole and on disk, counts. Those of its messages count that live at this
    place in the order: no ack can fall between the question and the answer, since both are given by the order of the
    journal alone."""

    __slots__ = ("copies", "messages")

    def __init__(self, copies: Segment, messages: Sequence[Copied]) -> None:
        self.copies: Final = copies
        self.messages: Sequence[Copied] = messages

    def apply(self, table: Table) -> None:
        cast(TakesCopies, table).take_copies(self.copies, self.messages)


class WriteSnapshot(Change):
    """The change that puts a snapshot into the journal: nothing else comes of it."""

    __slots__ = ("payload", "size")

    leaves = OWED

    def __init__(self, payload: bytes) -> None:
        self.payload: bytes = payload
        self.size: int = len(payload)

    def plan(self, plan: Plan) -> None:
        plan.changes.append(self)
        plan.own, plan.is_more = self, True

    def apply(self, table: Table) -> None:
        """Do nothing: a snapshot says what is in the index already."""
