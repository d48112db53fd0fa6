"""What a chunk and a destination will be once a change (changes.py) is carried out; that may be done again."""

from __future__ import annotations

from array import array

from .chunks import MASKS, MESSAGES_MAX, Chunk, Numbers
from .contents import DestinationState, SubscriptionState
from .records import Encoded, Record
from .swap import Address


class ChunkDraft:
    """What a chunk will be: messages are added, others die or are acked."""

    __slots__ = ("acked", "address", "chunk", "dead", "expiries", "length", "live_bytes", "offsets", "records",
                 "resident", "total_bytes")  # fmt: skip

    def __init__(self, chunk: Chunk) -> None:
        self.chunk = chunk
        self.length = len(chunk.offsets)
        """Of the messages that it has already."""
        self.offsets: list[int] = []
        self.records: list[Record] = []
        self.expiries: list[int] = []
        """Of those that are added."""
        self.dead = chunk.dead
        self.acked: dict[int, int] = {}
        """By subscription's number, where it changes."""
        self.total_bytes = chunk.total_bytes
        self.live_bytes = chunk.live_bytes
        self.resident = chunk.resident
        self.address: Address | None = None
        """Where it was written to, if it does not stay in memory."""

    def takes(self, size: int, chunk_bytes: int) -> bool:
        """Whether one more message may be added."""
        count = self.length + len(self.offsets)
        return count == 0 or (count < MESSAGES_MAX and self.total_bytes + size <= chunk_bytes)

    def add(self, seq: int, message: Encoded) -> None:
        self.offsets.append(seq - self.chunk.first)
        self.records.append(message.record)
        self.expiries.append(message.expires_at_ms)
        self.total_bytes += message.size
        self.live_bytes += message.size
        self.resident += message.cost

    @property
    def is_dead(self) -> bool:
        return self.dead == MASKS[self.length + len(self.offsets)]

    def apply(self, position: int | None) -> None:
        chunk, start = self.chunk, self.length
        if self.offsets and not chunk.sealed:  # once it is, all this is done
            assert isinstance(chunk.offsets, array)
            chunk.offsets[start:] = array("Q", self.offsets)
            if self.address is None:
                chunk.records[start - chunk.out :] = self.records
            if chunk.expiries is not None or any(self.expiries):
                chunk.expiries = _longer(chunk.expiries, start, self.expiries)
                times = [at for at in (chunk.soonest, *self.expiries) if at]
                chunk.soonest = min(times, default=0)
            if position is not None:
                chunk.positions = _longer(chunk.positions, start, [position] * len(self.offsets))
        chunk.dead = self.dead
        chunk.acked.update(self.acked)
        chunk.total_bytes, chunk.live_bytes, chunk.resident = self.total_bytes, self.live_bytes, self.resident
        if self.address is not None:
            chunk.addresses, chunk.resident = (self.address,), 0
            chunk.written = chunk.out = len(chunk.offsets)


def _longer(numbers: Numbers | None, length: int, more: list[int]) -> array[int]:
    """With more of them behind the first `length`; 0 for those that had none. Idempotent."""
    if numbers is None:
        numbers = array("Q", bytes(8 * length))
    assert isinstance(numbers, array)
    numbers[length:] = array("Q", more)
    return numbers


class DestinationDraft:
    """What a destination will be."""

    __slots__ = ("count", "done", "live_bytes", "state", "subscriptions", "tails", "total")

    def __init__(self, state: DestinationState) -> None:
        self.state = state
        self.count, self.live_bytes, self.total = state.count, state.live_bytes, state.total
        self.subscriptions = state.subscriptions
        """Replaced, never changed."""
        self.done: dict[SubscriptionState, int] = {}
        self.tails: dict[int, ChunkDraft | None] = {}
        """By order, the chunks that messages are added to."""

    def apply(self) -> None:
        state = self.state
        state.count, state.live_bytes, state.total = self.count, self.live_bytes, self.total
        state.subscriptions = self.subscriptions
        for subscription, done in self.done.items():
            subscription.done = done
        state.declared = True
