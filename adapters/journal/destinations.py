"""What a store knows of one destination: its id and counts, and what has been fetched for delivery."""

from __future__ import annotations

from collections import deque
from typing import Any

from ...policies.destination import Destination
from . import format as f

Place = tuple[int, int, int, int]
"""Where a message is: seq, LSN, offset in the segment, length of its record."""


class DestinationState:
    """All fields belong to the store's index lock, but `declared`, which is the leader's."""

    __slots__ = (
        "bytes", "changed", "count", "cursor", "declared", "destination", "id", "named", "purging", "ready", "returned",
        "waiters",
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
        self.cursor = 0
        """All up to this seq has been fetched for delivery."""
        self.ready: deque[Place] = deque()
        self.returned: list[Place] = []
        """A heap of what was released."""
        self.purging = 0
        """Purges under way: nothing is delivered meanwhile."""
        self.waiters: list[Any] = []
        """Locks that a new message releases."""

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
        while self.waiters:
            try:
                self.waiters.pop().release()
            except (IndexError, RuntimeError):
                pass  # another thread woke it
