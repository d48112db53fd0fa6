"""The change by which what was copied counts: from then on these messages are in that file (rule J8)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

from ..core.operations.changes import Change
from ..core.operations.table import Table
from ..wal.segment import Segment

if TYPE_CHECKING:
    from .index import Index


class Copied(NamedTuple):
    """A message in a file of copies."""

    number: int
    """Its destination's."""
    seq: int
    own: tuple[int, int, int]
    """The place of the copy (encoding.Own)."""


class Compacted(Change):
    """The change by which a file of copies, whole and on disk, counts. Of its messages those count that live at this
    place in the order: no ack can fall between the question and the answer, since both are given by the order of the
    journal alone."""

    __slots__ = ("copies", "messages")

    def __init__(self, copies: Segment, messages: Sequence[Copied]) -> None:
        self.copies, self.messages = copies, messages

    def apply(self, table: Table) -> None:
        cast("Index", table).take_copies(self.copies, self.messages)
