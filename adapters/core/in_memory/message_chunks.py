"""The chunks in which messages lie: some hundred that follow each other in one destination (and, with priorities, of
one priority). A chunk is the unit of swapping.

K1  A chunk's messages are in the order of their seqs, and the chunks of a level too.
K2  The last chunk of a level may be open: messages are added, also behind some that are swapped already. Any other is
    sealed.
K3  The first `written` records are in the swap, at `addresses`, in order; the first `out` are not in memory. None is
    in neither: out <= written. A chunk that is loaded again keeps its addresses, since a message never changes.
K4  A dead message's record is dropped from memory at once; from the swap with the last one of its chunk.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Final

from ..state.leases import DestinationState
from .packed_numbers import Packed, bytes_of, packed_ascending
from .swap_files import Address

MESSAGES_MAX: Final = 1024
"""Messages of one chunk."""
MASKS: Final = tuple((1 << n) - 1 for n in range(MESSAGES_MAX + 1))
BITS: Final = tuple(1 << n for n in range(MESSAGES_MAX))
CHUNK_COST: Final = 1000
"""Bytes of memory that a chunk takes beside its records, with the most compact of its arrays."""
ADDRESS_COST: Final = 250
"""Bytes of memory that each of a chunk's entries in the swap takes."""
COUNT_COST: Final = 128
"""Bytes of memory for how often one message has been given back."""
WAIT_COST: Final = 320
"""Bytes of memory for until when one message waits."""
NUMBERS_COST: Final = 12
"""Bytes that an open chunk keeps of each message: offset and size."""

_first = attrgetter("first")


def memory_of(size: int) -> int:
    """Return how many bytes a record of this size takes in memory. Its place in the list of its chunk, which grows
    ahead, is included."""
    # 33: what a bytes object takes beside. CPython gives out multiples of 16 bytes up to 512; beyond it malloc keeps
    # 8 to 16 for itself.
    return 9 + ((size + 48) & ~15 if size <= 479 else (size + 64) & ~15)


class Level:
    """The messages of one destination and order."""

    __slots__ = ("chunks", "order", "state")

    def __init__(self, state: DestinationState, order: int) -> None:
        self.state: DestinationState = state
        self.order: int = order
        self.chunks: list[Chunk] = []

    @property
    def last(self) -> int:
        """Return the seq of the level's last message, dead or not; 0 if there is none."""
        return self.chunks[-1].last if self.chunks else 0

    def find(self, seq: int) -> tuple[Chunk, int] | None:
        """Return chunk and index of a message, dead or not."""
        at = bisect_right(self.chunks, seq, key=_first) - 1
        if at < 0:
            return None
        chunk = self.chunks[at]
        index = bisect_left(chunk.offsets, seq - chunk.first)
        return (chunk, index) if index < len(chunk.offsets) and chunk.seq(index) == seq else None

    def after(self, seq: int) -> Iterator[tuple[Chunk, int]]:
        """Yield each chunk that has messages behind `seq`, with the index of the first of them."""
        chunks = self.chunks
        at = max(0, bisect_right(chunks, seq, key=_first) - 1) if seq else 0
        while at < len(chunks):
            chunk = chunks[at]
            index = bisect_right(chunk.offsets, seq - chunk.first) if seq >= chunk.first else 0
            if index < len(chunk.offsets):
                yield chunk, index
            at += 1

    def between(self, first: int, last: int) -> list[Chunk]:
        """Return the chunks that may have messages between two seqs, both included."""
        start = max(0, bisect_right(self.chunks, first, key=_first) - 1)
        return self.chunks[start : bisect_right(self.chunks, last, key=_first)]

    def drop(self, chunk: Chunk) -> None:
        """Drop a chunk. Idempotent."""
        at = bisect_left(self.chunks, chunk.first, key=_first)
        if at < len(self.chunks) and self.chunks[at] is chunk:
            del self.chunks[at]


class Chunk:
    """Messages of a level that follow each other. Under the store's lock."""

    __slots__ = (
        "_array_bytes", "acked", "addresses", "charge", "counts", "dead", "expiries", "first", "level", "offsets",
        "out", "records", "resident", "sealed", "sizes", "soonest", "total_bytes", "waiting", "waits", "written",
    )  # fmt: skip

    def __init__(self, level: Level, first: int) -> None:
        self.level: Final = level
        self.first: int = first
        """The seq of its first message."""
        self.offsets: Sequence[int] = array("Q")
        """The seq of each message, less `first`. A message is there once it is in here: all else comes before."""
        self.sizes: array[int] | Packed = array("I")
        """Bytes of each message's record."""
        self.records: list[bytes | None] = []
        """Records in memory: of the message at `out`, and so on. None for a dead one."""
        self.out: int = 0
        self.written: int = 0
        self.addresses: tuple[Address, ...] = ()
        self.dead: int = 0
        """A bit for each message that is dead."""
        self.acked: dict[int, int] = {}
        """Subscription's number -> a bit for each message that it has acked."""
        self.counts: dict[tuple[int, int], int] = {}
        """Number of the channel's, index -> how often the message has come back."""
        self.waits: dict[tuple[int, int], int] = {}
        """Subscription's number (0: for all), index -> until when the message waits (ms)."""
        self.waiting: dict[int, int] = {}
        """Subscription's number (0: for all) -> a bit for each message that waits. Follows from `waits`."""
        self.expiries: array[int] | Packed | None = None
        """When each message expires; None if none does."""
        self.soonest: int = 0
        """No live message that was not given to who asked for expired ones expires before; 0: none does."""
        self.total_bytes: int = 0
        """Bytes of all messages ever in the chunk."""
        self.resident: int = 0
        """Bytes of memory that its records take now."""
        self.charge: int = 0
        """The cost, as `cost` said when it was last counted."""
        self.sealed: bool = False
        self._array_bytes = 0

    def __len__(self) -> int:
        return len(self.offsets)

    def seq(self, index: int) -> int:
        return self.first + self.offsets[index]

    @property
    def last(self) -> int:
        return self.first + self.offsets[-1]

    def expires_at(self, index: int) -> int:
        return self.expiries[index] if self.expiries is not None else 0

    @property
    def live(self) -> int:
        """Return a bit for each message that lives."""
        return MASKS[len(self.offsets)] & ~self.dead

    @property
    def is_dead(self) -> bool:
        """Return whether nothing of the chunk lives."""
        return self.dead == MASKS[len(self.offsets)]

    @property
    def is_out(self) -> bool:
        """Return whether nothing of the chunk is in memory."""
        return self.out == len(self.offsets)

    @property
    def is_written(self) -> bool:
        """Return whether all of the chunk is in the swap."""
        return self.written == len(self.offsets)

    @property
    def cost(self) -> int:
        """Return how many bytes of memory the chunk takes."""
        return (
            CHUNK_COST + self.resident + self._array_bytes + ADDRESS_COST * len(self.addresses) + 64 * len(self.acked)
            + COUNT_COST * len(self.counts) + WAIT_COST * len(self.waits)
        )  # fmt: skip

    def bytes_of(self, mask: int) -> int:
        """Return how many bytes the records of some messages have."""
        if mask == MASKS[len(self.offsets)]:
            return self.total_bytes
        return sum(self.sizes[index] for index in indexes(mask))

    def between(self, first: int, last: int) -> int:
        """Return a bit for each message between two seqs, both included."""
        start = bisect_left(self.offsets, first - self.first) if first > self.first else 0
        return MASKS[bisect_right(self.offsets, last - self.first)] >> start << start

    def extend(self, first: int, offsets: Sequence[int], records: Sequence[bytes], expiries: Sequence[int]) -> None:
        """Add messages at index `first`, the end. `expiries` is empty if none of them expires. May be done again
        after `mend`."""
        sizes = [len(record) for record in records]
        assert isinstance(self.sizes, array)
        self.sizes.extend(sizes)
        self.records += records
        more = NUMBERS_COST
        if expiries or self.expiries is not None:
            self.expiries = longer(self.expiries, first, expiries or [0] * len(offsets))
            more += 8
        self._array_bytes = (first + len(offsets)) * more
        self.total_bytes += sum(sizes)
        self.resident += sum([memory_of(size) for size in sizes])
        self.offsets.extend(offsets)  # type: ignore[attr-defined]

    def append(self, seq: int, record: bytes) -> int:
        """Add a message that never expires, where none does; return how many bytes of memory it takes."""
        size = len(record)
        more = memory_of(size)
        self.sizes.append(size)  # type: ignore[union-attr]
        self.records.append(record)
        self._array_bytes += NUMBERS_COST
        self.total_bytes += size
        self.resident += more
        self.offsets.append(seq - self.first)  # type: ignore[attr-defined]
        return more + NUMBERS_COST

    def mend(self) -> None:
        """Make what `extend`, or the death of a message, has left half done whole again. Idempotent."""
        length = len(self.offsets)
        if not self.sealed:
            for numbers in (self.sizes, self.expiries):
                if isinstance(numbers, array):
                    del numbers[length:]
        self.total_bytes = sum(self.sizes[index] for index in range(length))
        del self.records[length - self.out :]
        for index in indexes(self.dead >> self.out):
            if index < len(self.records):
                self.records[index] = None
        self.resident = sum(memory_of(len(record)) for record in self.records if record is not None)
        for number, index in list(self.counts):
            if self.dead >> index & 1:
                self.counts.pop((number, index), None)
        for number, index in list(self.waits):
            if self.dead >> index & 1:
                self.waits.pop((number, index), None)
        self.count_waiting()
        self._count_arrays()

    def count_waiting(self) -> None:
        """Set `waiting` to what `waits` says."""
        waiting: dict[int, int] = {}
        for number, index in self.waits:
            waiting[number] = waiting.get(number, 0) | BITS[index]
        self.waiting = waiting

    def waits_for(self, number: int) -> int:
        """Return a bit for each message that waits, for all or for this subscription."""
        if not number:
            return self.waiting.get(0, 0)
        return self.waiting.get(0, 0) | self.waiting.get(number, 0)

    def seal(self) -> None:
        """Seal the chunk: no more messages are added. Idempotent."""
        self.offsets = packed_ascending(self.offsets)
        if isinstance(self.sizes, array):
            self.sizes = Packed(self.sizes)
        if isinstance(self.expiries, array):
            self.expiries = Packed(self.expiries)
        self.sealed = True
        self._count_arrays()

    def _count_arrays(self) -> None:
        arrays = (self.offsets, self.sizes, self.expiries)
        self._array_bytes = sum(map(bytes_of, arrays))


def longer(numbers: array[int] | Packed | None, length: int, more: Sequence[int]) -> array[int]:
    """Return the numbers with more of them behind the first `length`; 0 for those that had none."""
    if numbers is None:
        numbers = array("Q", bytes(8 * length))
    assert isinstance(numbers, array)
    numbers[length:] = array("Q", more)
    return numbers


def indexes(mask: int) -> Iterator[int]:
    """Yield which bits are set, from the lowest."""
    bits = f"{mask:b}"[::-1]
    at = bits.find("1")
    while at >= 0:
        yield at
        at = bits.find("1", at + 1)
