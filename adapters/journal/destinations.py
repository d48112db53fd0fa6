"""What a store knows of one destination: its id and counts, and what has been fetched for delivery."""

from __future__ import annotations

from typing import Final

from ...policies.destination import Destination
from ..delivery import Feed
from . import format as f

Place = tuple[int, int, int, int, int, int]
"""Where a message is: order, seq, when it expires (ms, 0: never); LSN, offset in the segment, length of its record."""
SEQ: Final = 1
LSN: Final = 3
OFFSET: Final = 4
LENGTH: Final = 5


class DestinationState:
    """All fields belong to the store's index lock, but `declared`, which is the leader's."""

    __slots__ = (
        "bytes", "changed", "count", "declared", "destination", "feed", "id", "named",
    )  # fmt: skip

    def __init__(self, number: int, destination: Destination, declared: bool) -> None:
        self.id = number
        self.destination = destination
        self.declared = declared
        """The journal holds the record that gives the id its name."""
        self.named = declared
        """The index has applied that record: what `declared` says, as of what the index reflects."""
        self.count = 0
        self.bytes = 0
        self.changed = True
        self.feed = Feed(self)

    @property
    def send_overhead(self) -> int:
        """At most so many bytes a send takes in the journal beside what its sender encoded."""
        return f.SEND_START.size + f.CRC.size + (0 if self.declared else f.DECLARATION_BYTES_MAX)

    def declaration(self) -> bytes:
        """The payload of its DESTINATION record."""
        destination = self.destination
        return f.DESTINATION_PAYLOAD.pack(self.id, destination.kind.value) + destination.name.encode()

    def wake(self) -> None:
        """Tell all that wait for a message here."""
        self.feed.wake()
