"""The waits of messages in memory, in the order of their times."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator

from .message_chunks import Chunk


class Dues:
    """The waits of one store; under its lock. A wait that a chunk does not say any more (`Chunk.waits`) is skipped. An
    interruption leaves one too many, which is skipped, or seen twice, which does no harm."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Chunk, int, int]] = []
        """Until when, a number, chunk, index, subscription."""
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, due: int, chunk: Chunk, index: int, number: int) -> None:
        """Add a message that waits until then (ms)."""
        heapq.heappush(self._heap, (due, next(self._numbers), chunk, index, number))

    def first(self) -> int:
        """Return the least time; 0: nothing waits."""
        heap = self._heap
        while heap and not _waits(heap[0]):
            heapq.heappop(heap)
        return heap[0][0] if heap else 0

    def until(self, now: int, limit: int) -> Iterator[tuple[Chunk, int, int]]:
        """Yield chunk, index and subscription of the first ones that are due by then, in order; they stay. So many are
        looked at in the heap and no more: who has them due one after the other takes some time for each, not for all
        that wait."""
        self.first()
        heap = self._heap
        ahead = [(heap[0], 0)] if heap else []
        count = 0
        while ahead and count < limit and ahead[0][0][0] <= now:
            one, at = heapq.heappop(ahead)
            for below in (2 * at + 1, 2 * at + 2):
                if below < len(heap):
                    heapq.heappush(ahead, (heap[below], below))
            if _waits(one):
                count += 1
                yield one[2:]


def _waits(one: tuple[int, int, Chunk, int, int]) -> bool:
    due, _, chunk, index, number = one
    return chunk.waits.get((number, index)) == due
