"""What a store knows of one destination: its id and counts, who holds which message, and where delivery stands.

A message is READY, LEASED by a receiver, CLAIMED by a transaction, or LEAVING when its ack is on the way to the disk
(rule X6). READY is the absence of an entry in `held`.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from ...policies.destination import Destination
from . import format as f

LEASED: Final = 1
CLAIMED: Final = 2
LEAVING: Final = 3

FETCH: Final = 64
"""How many messages a receive looks up ahead."""

Place = tuple[int, int, int, int]
"""Where a message is: seq, LSN, offset in the segment, length of its record."""


class DestinationState:
    """All fields belong to the store's index lock, but `declared`, which is the leader's, and `held`."""

    __slots__ = (
        "bytes", "changed", "count", "cursor", "declared", "destination", "held", "id", "named", "ready", "returned",
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
        self.held: dict[int, int] = {}
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

    def next_ready(self, fetch: Callable[[DestinationState, int, int], list[Place]]) -> Place | None:
        """Take the first message that nobody holds. `fetch(state, after seq, count)` reads the index."""
        if not self.ready:
            self.ready.extend(fetch(self, self.cursor, FETCH))
            if self.ready:
                self.cursor = self.ready[-1][0]
        if self.returned and (not self.ready or self.returned[0] < self.ready[0]):
            return heapq.heappop(self.returned)
        return self.ready.popleft() if self.ready else None

    def skip_to(self, cursor: int) -> None:
        """Go on delivering from the message after seq `cursor`; what is held is skipped there."""
        self.cursor = cursor
        self.ready.clear()
        self.returned.clear()

    def wake(self) -> None:
        """Tell all that wait for a message here."""
        while self.waiters:
            try:
                self.waiters.pop().release()
            except (IndexError, RuntimeError):
                pass  # another thread woke it
